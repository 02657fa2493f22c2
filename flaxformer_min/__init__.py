"""The 2017 Transformer, whole and exact, on today's JAX.

What a user of the library wants is offered here: `from flaxformer_min import Translator`. A name is
loaded when it is first used, so that importing the package loads nothing, JAX included.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The files of the package, and the names in them that are offered here.
_OFFERED = {
    "checkpoints.load": "load_for_inference",
    "config": "Config DataConfig DecodeConfig MeshConfig ModelConfig OptimizerConfig TrainConfig",
    "config_file": "load_config",
    "data.batch": "Batch",
    "data.tokenizer": "Tokenizer",
    "decoding.options": "Options",
    "decoding.search": "Search beam_search",
    "decoding.translator": "Translation Translator",
    "errors": "UserError",
    "model.attention": "attend scaled_dot_product_attention",
    "model.attention_weights": "attention_weights",
    "model.build": "split_model",
    "model.masks": "causal_mask padding_mask",
    "model.positions": "sinusoidal_positions",
    "model.teacher_forcing": "forced_states shift_right",
    "model.transformer": "Transformer",
    "training.loss": "make_loss smoothed_cross_entropy",
    "training.optimizer": "make_optimizer warmup_inverse_sqrt",
    "training.state": "init_state",
    "training.step": "make_train_step",
}
_HOMES = {name: home for home, names in _OFFERED.items() for name in names.split()}
__all__ = list(_HOMES)  # pyrefly: ignore

if TYPE_CHECKING:  # the same names, for what reads the code without running it
    from flaxformer_min.checkpoints.load import load_for_inference as load_for_inference
    from flaxformer_min.config import Config as Config
    from flaxformer_min.config import DataConfig as DataConfig
    from flaxformer_min.config import DecodeConfig as DecodeConfig
    from flaxformer_min.config import MeshConfig as MeshConfig
    from flaxformer_min.config import ModelConfig as ModelConfig
    from flaxformer_min.config import OptimizerConfig as OptimizerConfig
    from flaxformer_min.config import TrainConfig as TrainConfig
    from flaxformer_min.config_file import load_config as load_config
    from flaxformer_min.data.batch import Batch as Batch
    from flaxformer_min.data.tokenizer import Tokenizer as Tokenizer
    from flaxformer_min.decoding.options import Options as Options
    from flaxformer_min.decoding.search import Search as Search
    from flaxformer_min.decoding.search import beam_search as beam_search
    from flaxformer_min.decoding.translator import Translation as Translation
    from flaxformer_min.decoding.translator import Translator as Translator
    from flaxformer_min.errors import UserError as UserError
    from flaxformer_min.model.attention import attend as attend
    from flaxformer_min.model.attention import (
        scaled_dot_product_attention as scaled_dot_product_attention,
    )
    from flaxformer_min.model.attention_weights import attention_weights as attention_weights
    from flaxformer_min.model.build import split_model as split_model
    from flaxformer_min.model.masks import causal_mask as causal_mask
    from flaxformer_min.model.masks import padding_mask as padding_mask
    from flaxformer_min.model.positions import sinusoidal_positions as sinusoidal_positions
    from flaxformer_min.model.teacher_forcing import forced_states as forced_states
    from flaxformer_min.model.teacher_forcing import shift_right as shift_right
    from flaxformer_min.model.transformer import Transformer as Transformer
    from flaxformer_min.training.loss import make_loss as make_loss
    from flaxformer_min.training.loss import smoothed_cross_entropy as smoothed_cross_entropy
    from flaxformer_min.training.optimizer import make_optimizer as make_optimizer
    from flaxformer_min.training.optimizer import warmup_inverse_sqrt as warmup_inverse_sqrt
    from flaxformer_min.training.state import init_state as init_state
    from flaxformer_min.training.step import make_train_step as make_train_step


def __getattr__(name: str) -> Any:
    """Loads one of the names that are offered here (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
