"""Marian models of Hugging Face (OPUS-MT among them) to checkpoints of this program, and back.

A Marian directory holds config.json, generation_config.json, model.safetensors or
pytorch_model.bin, source.spm, target.spm, vocab.json and tokenizer_config.json.
"""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_min.checkpoints.format import Meta, read_config
from flaxformer_min.checkpoints.leaves import difference, named_leaves, nested
from flaxformer_min.checkpoints.saved_state import start_writing, write_description
from flaxformer_min.config import Config, DataConfig, DecodeConfig, ModelConfig
from flaxformer_min.config_rules import validate
from flaxformer_min.data.tokenizer import (
    SOURCE,
    TARGET,
    VOCABULARY,
    MarianTokenizer,
    Tokenizer,
    open_tokenizer,
    pack,
)
from flaxformer_min.errors import UserError, first_line
from flaxformer_min.interop.names import imported_leaves
from flaxformer_min.model.build import split_model
from flaxformer_min.system.sealed import checkpoint_errors, publish

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
MODEL = "tokenizer.model"  # of this program: a SentencePiece model, or Marian's archive
EPSILON = 1e-5  # of Marian's layer norms; no file says it

# What a config.json may say of a post-norm Marian model. A field that is not there has the value
# that MarianConfig gives it, which stands last where it is not the only one.
_REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("marian",),
    "activation_function": ("relu", "swish", "silu", "gelu"),
    "scale_embedding": (True, False),
    "tie_word_embeddings": (True,),
    "is_encoder_decoder": (True,),
    "normalize_before": (False,),
    "normalize_embedding": (False,),
    "add_final_layer_norm": (False,),
    "static_position_embeddings": (True,),
    "add_bias_logits": (False,),
}
_REFUSED = {"activation_function": "gelu", "scale_embedding": False}


def import_marian(
    folder: Path, output: Path, source_language: str | None, target_language: str | None
) -> Config:
    """Writes a checkpoint directory with the model of a Marian directory; returns its config.

    The languages are those of tokenizer_config.json unless they are given.

    Raises:
        UserError: names the file and what is wrong with it, or what of the model this program
            cannot say; nothing is written then.
        CheckpointError: `output` could not be written.
    """
    if output.exists():
        raise UserError(f"{output}: is there already; give a new directory")
    fields = _read_json(folder / CONFIG)
    model = model_config(fields, str(folder / CONFIG))
    tokenizer = _read_tokenizer(folder)
    _compare_ids(fields, tokenizer, folder)
    named = _read_json(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else {}
    config = Config(
        model=model,
        data=DataConfig(
            train=("train.source", "train.target"),
            validation=("validation.source", "validation.target"),
            source_language=_language(source_language or named.get("source_lang"), "source"),
            target_language=_language(target_language or named.get("target_lang"), "target"),
            vocab_size=tokenizer.vocab_size,
            byte_fallback=False,
            max_length=min(256, model.max_length),
        ),
        decode=_decode_config(folder),
    )
    validate(config)
    _write_checkpoint(output, config, tokenizer, _read_params(folder, model, tokenizer.vocab_size))
    return config


def import_safetensors(folder: Path, output: Path) -> Config:
    """Writes a checkpoint directory with what `export.export_safetensors` wrote.

    Raises what `import_marian` raises.
    """
    if output.exists():
        raise UserError(f"{output}: is there already; give a new directory")
    config, path = read_config(folder), folder / MODEL
    try:
        tokenizer = open_tokenizer(path.read_bytes())
    except (OSError, UserError) as error:
        raise UserError(f"{path}: {first_line(error)}") from None
    leaves = _read_safetensors(folder / SAFETENSORS)
    shapes = named_leaves(split_model(config.model, tokenizer.vocab_size)[1])
    if found := difference(leaves, shapes):
        raise UserError(f"{folder / SAFETENSORS}: holds another model than config.json: {found}")
    _write_checkpoint(output, config, tokenizer, nested(leaves))
    return config


def _write_checkpoint(
    output: Path, config: Config, tokenizer: Tokenizer, params: dict[str, Any]
) -> None:
    meta = Meta(step=0, tokenizer_sha256=tokenizer.sha256)
    with checkpoint_errors(output, "not saved"), publish(output) as new:
        start_writing(new, {"params": params})()
        write_description(new, config, tokenizer, meta)


def model_config(fields: Mapping[str, Any], where: str) -> ModelConfig:
    """Returns the model that a Marian config.json describes.

    Raises UserError naming the field if it is not a post-norm Marian model.
    """
    for name, allowed in _REQUIRED.items():
        value = fields.get(name, allowed[-1])
        if value not in allowed or value == _REFUSED.get(name):
            good = " or ".join(json.dumps(v) for v in allowed if v != _REFUSED.get(name))
            raise UserError(f"{where}: {name} is {json.dumps(value)}: only {good} can be imported")
    numbers = {name: _number(fields, name, default, where) for name, default in _SIZES.items()}
    for name in ("ffn_dim", "attention_heads"):
        pair = numbers[f"encoder_{name}"], numbers[f"decoder_{name}"]
        if pair[0] != pair[1]:
            raise UserError(
                f"{where}: encoder_{name} {pair[0]} and decoder_{name} {pair[1]} differ"
            )
    d_model, heads = numbers["d_model"], numbers["encoder_attention_heads"]
    if d_model % heads or d_model % 2:
        raise UserError(f"{where}: d_model {d_model} must be even and divisible by {heads} heads")
    if fields.get("decoder_vocab_size", fields.get("vocab_size")) != fields.get("vocab_size"):
        raise UserError(f"{where}: vocab_size and decoder_vocab_size differ; they must be one")
    shared = fields.get("share_encoder_decoder_embeddings", True)
    layers = numbers["encoder_layers"], numbers["decoder_layers"]
    return ModelConfig(
        num_layers=layers[0],
        num_decoder_layers=None if layers[0] == layers[1] else layers[1],
        d_model=d_model,
        d_ff=numbers["encoder_ffn_dim"],
        num_heads=heads,
        d_k=d_model // heads,
        d_v=d_model // heads,
        share_embeddings="all" if shared else "target",
        activation="relu" if fields.get("activation_function") == "relu" else "swish",
        biases=True,
        layer_norm_epsilon=EPSILON,
        max_length=numbers["max_position_embeddings"],
    )


_SIZES = {
    "d_model": 1024,
    "max_position_embeddings": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
}


def _number(fields: Mapping[str, Any], name: str, default: int, where: str) -> int:
    value = fields.get(name, default)
    if type(value) is not int or not 1 <= value <= 1_000_000:
        raise UserError(f"{where}: {name} is {value!r:.40}: it must be a whole number above 0")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises UserError naming the file."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a Marian directory") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {first_line(error):.80}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: must be a JSON object")
    return found


def _read_tokenizer(folder: Path) -> MarianTokenizer:
    try:
        parts = {name: (folder / name).read_bytes() for name in (SOURCE, TARGET, VOCABULARY)}
        return MarianTokenizer(pack(parts))
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; give a Marian directory") from None
    except UserError as error:
        raise UserError(f"{folder}/{error}") from None


def _compare_ids(fields: Mapping[str, Any], tokenizer: MarianTokenizer, folder: Path) -> None:
    """Raises UserError if config.json and vocab.json disagree about a number."""
    wanted = {
        "vocab_size": tokenizer.vocab_size,
        "pad_token_id": tokenizer.pad_id,
        "eos_token_id": tokenizer.eos_id,
        "decoder_start_token_id": tokenizer.bos_id,
    }
    for name, value in wanted.items():
        if (found := fields.get(name)) != value:
            raise UserError(
                f"{folder / CONFIG}: {name} is {found!r:.40}, but {VOCABULARY} says {value}"
            )


def _language(name: Any, side: str) -> str:
    if not isinstance(name, str) or not name:
        raise UserError(f"{TOKENIZER} has no {side}_lang: give --{side}-language")
    return name


def _decode_config(folder: Path) -> DecodeConfig:
    """Returns the beam size of generation_config.json.

    Its length penalty divides by n^p, which this program does not have; alpha 1 comes near p = 1.
    """
    fields = _read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    beams, penalty = fields.get("num_beams", 4), fields.get("length_penalty", 1.0)
    if type(beams) is not int or not 1 <= beams <= 100 or type(penalty) not in (int, float):
        raise UserError(f"{folder / GENERATION}: num_beams or length_penalty is no such number")
    return DecodeConfig(beam_size=beams, length_penalty_alpha=float(penalty))


def _read_params(folder: Path, model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    shapes = named_leaves(split_model(model, vocab_size)[1])
    path = folder / SAFETENSORS
    path = path if path.exists() else folder / PICKLED
    arrays = _read_safetensors(path) if path.name == SAFETENSORS else _read_pickled(path)
    try:
        return nested(imported_leaves(model, shapes, arrays))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file
    except ImportError:
        raise UserError("safetensors is needed: pip install 'flaxformer_min[interop]'") from None
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged: {first_line(error):.120}") from None


def _read_pickled(path: Path) -> dict[str, np.ndarray]:
    """Reads arrays that torch saved; code in the file is refused and never run."""
    if not path.exists():
        raise UserError(f"{path.parent}: has neither {SAFETENSORS} nor {PICKLED}")
    try:
        import torch
    except ImportError:
        raise UserError(
            f"{path}: pip install torch reads it, or convert it to safetensors"
        ) from None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        return {name: array.float().numpy() for name, array in found.items()}
    except (
        pickle.UnpicklingError,
        RuntimeError,
        OSError,
        ValueError,
        AttributeError,
        EOFError,
        KeyError,
        TypeError,
    ) as error:
        raise UserError(
            f"{path}: damaged, or holds more than arrays: {first_line(error):.80}"
        ) from None
