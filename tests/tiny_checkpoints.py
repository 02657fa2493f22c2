"""States, a config and tokenizers small enough to be saved often; for the tests of checkpoints."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxformer_min.checkpoints.store import Checkpoints
from flaxformer_min.config import Config, DataConfig, ModelConfig, TrainConfig
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.data.tokenizer_training import train_tokenizer

CONFIG = Config(
    model=ModelConfig(num_layers=1, d_model=10, d_ff=3, num_heads=2, d_k=5, d_v=7),
    data=DataConfig(
        train=("a", "b"),
        validation=("c", "d"),
        source_language="en",
        target_language="de",
        vocab_size=20,
        byte_fallback=False,
    ),
    train=TrainConfig(keep_last=9),
)
TOKENIZER, OTHER_TOKENIZER = (
    Tokenizer(train_tokenizer(lines, CONFIG.data))
    for lines in (["a b c d e f g", "ab cd ef ga ba"] * 3, ["h i j k l m n", "hi jk lm nh ih"] * 3)
)
OPTIMIZER = optax.adam(1e-3)


class State(NamedTuple):
    step: jax.Array
    params: dict[str, Any]
    opt_state: Any
    skipped: jax.Array


def make_state(seed: int) -> State:
    """Odd shapes, numbered layers beyond nine, and floats that only exact copying preserves."""
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "embedding": jax.random.normal(keys[0], (16, 5)),
        "encoder": {
            2: {"query": jax.random.normal(keys[1], (8, 2, 3))},
            10: {"query": jax.random.normal(keys[2], (8, 2, 3))},
        },
        "bias": jnp.array([-0.0, 1e-40, 1e38]),
    }
    moments = OPTIMIZER.update(jax.tree.map(jnp.sin, params), OPTIMIZER.init(params))[1]
    return State(jnp.int32(seed), params, moments, jnp.int32(7))


def abstract(state: State, devices: int) -> State:
    """The state's shapes, every first axis of 8 and 16 split over so many devices."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))

    def leaf(array: jax.Array) -> jax.ShapeDtypeStruct:
        spec = P("fsdp") if array.shape[:1] in ((8,), (16,)) else P()
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(leaf, state)


def opened(workdir: Path, *, tokenizer: Tokenizer = TOKENIZER, **train: Any) -> Checkpoints:
    """A run's checkpoints, with other values in the section `train` of the config."""
    config = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, **train))
    return Checkpoints(workdir, config, tokenizer)


def saved(workdir: Path, *steps: int, tokenizer: Tokenizer = TOKENIZER) -> Path:
    """Saves `make_state(step)` at each step; returns the folder of the checkpoints."""
    with opened(workdir, tokenizer=tokenizer) as checkpoints:
        for step in steps:
            checkpoints.save(make_state(step), step)
    return workdir / "checkpoints"


def names(workdir: Path) -> list[str]:
    """Everything in the folder of the checkpoints."""
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))
