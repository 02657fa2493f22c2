"""7: every token weighs alike, however a batch is cut over micro-batches and devices."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding

from benchmarks.reliability.tally import Tally
from flaxformer_min.config import ModelConfig
from flaxformer_min.data.batch import Batch
from flaxformer_min.model.build import split_model
from flaxformer_min.model.masks import causal_mask, padding_mask
from flaxformer_min.model.teacher_forcing import shift_right
from flaxformer_min.training.loss import make_loss, smoothed_cross_entropy
from flaxformer_min.training.sharding import AXES, ROWS, shardings
from flaxformer_min.training.state import TrainState, init_state
from flaxformer_min.training.step import make_train_step

MODEL = ModelConfig(
    num_layers=1, d_model=12, d_ff=20, num_heads=3, d_k=5, d_v=7, dropout=0.0, max_length=32
)
VOCAB_SIZE, PAD_ID, BOS_ID, SMOOTHING = 31, 0, 2, 0.1
TOKENS = (1, 3, 30, 2)  # of the targets
ROWS_IN_ALL = 16  # the others are all padding
# Takes no step; the gradient it was given last is in its state.
KEEPS = optax.chain(optax.trace(decay=0.0), optax.scale(0.0))
TOLERANCE = {jnp.float32: 1e-6, jnp.float64: 1e-12}


def gradients(folder: Path, short: bool, seed: int) -> Tally:
    """The step's gradient of one batch, cut in every way, against the batch as a whole.

    In float64 the whole is compared too, with the model's logits and the loss as it is written.
    """
    tally, draw = Tally("gradients"), random.Random(seed)
    cuts = [(1, 4)] if short else [(d, a) for d in (1, 2, 4) for a in (1, 2, 4)]
    batches = _batches(draw)
    for dtype, tolerance in list(TOLERANCE.items())[-1 if short else 0 :]:
        worst = 0.0
        with jax.enable_x64(dtype == jnp.float64):
            state = _fresh(dtype, seed)
            whole = list(map(_found(state, 1, 1), batches.values()))
            trials = [(f"{d} devices, accumulation {a}", _found(state, d, a)) for d, a in cuts]
            if dtype == jnp.float64:
                trials.append(("as written", partial(jax.jit(jax.grad(_written)), state.params)))
            for name, found in trials:
                for (places, batch), expected in zip(batches.items(), whole, strict=True):
                    off = _furthest(found(batch), expected)
                    worst = max(worst, off)
                    problems = [f"off by {off:.1e}"] if off > tolerance else []
                    tally.trial(f"{dtype.__name__}, {name}, {places}", problems)
        tally.notes.append(f"{dtype.__name__}: off by {worst:.1e} at most")
    return tally


def _batches(draw: random.Random) -> dict[str, Batch]:
    """The pairs in rows that leave micro-batches all padding, and in rows drawn."""
    drawn = draw.sample(range(ROWS_IN_ALL), len(TOKENS))
    places = {"every fourth row": (0, 4, 8, 12), "first rows": (0, 1, 2, 3), "rows drawn": drawn}
    batches = {}
    for name, rows in places.items():
        batch = Batch(*(np.zeros((ROWS_IN_ALL, width), np.int32) for width in (9, max(TOKENS))))
        for row, tokens in zip(rows, TOKENS, strict=True):
            for side, length in zip(batch, (draw.randint(1, 9), tokens), strict=True):
                side[row, :length] = [draw.randrange(4, VOCAB_SIZE) for _ in range(length)]
        batches[name] = batch
    return batches


def _fresh(dtype: Any, seed: int) -> TrainState:
    """A state whose weights are of that dtype; its optimizer only keeps what it is given."""
    state = jax.jit(partial(init_state, MODEL, VOCAB_SIZE, KEEPS, seed))()
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), state.params)
    return state._replace(params=params, opt_state=KEEPS.init(params))


def _found(state: TrainState, devices: int, accumulation: int) -> Callable[[Batch], Any]:
    """From a batch to the gradient that the training step hands to its optimizer."""
    axes = (AxisType.Auto,) * len(AXES)
    mesh = jax.make_mesh((devices, 1, 1), AXES, axes, devices=jax.devices()[:devices])
    graphdef, _ = split_model(MODEL, VOCAB_SIZE)
    loss = make_loss(graphdef, pad_id=PAD_ID, bos_id=BOS_ID, smoothing=SMOOTHING, mesh=mesh)
    step = make_train_step(loss, KEEPS, accumulation)
    placed, compiled = jax.device_put(state, shardings(mesh, state)), jax.jit(step)

    def gradient(batch: Batch) -> Any:
        batch = jax.device_put(batch, NamedSharding(mesh, ROWS))
        after, metrics = compiled(placed, batch, jax.random.key(1))
        assert int(metrics.tokens) == sum(TOKENS)
        return after.opt_state[0].trace

    return gradient


def _written(params: Any, batch: Batch) -> jax.Array:
    """The mean loss of the tokens, without the training step."""
    model = nnx.merge(split_model(MODEL, VOCAB_SIZE)[0], params)
    source, target = map(jnp.asarray, batch)
    target_in, source_mask = shift_right(target, BOS_ID), padding_mask(source, PAD_ID)
    target_mask = padding_mask(target_in, PAD_ID) & causal_mask(target_in.shape[1])
    memory = model.encode(source, source_mask)
    logits = model.decode(target_in, memory, target_mask, source_mask)
    weights = (target != PAD_ID).astype(logits.dtype)
    total, tokens = smoothed_cross_entropy(logits, target, weights, SMOOTHING)
    return total / tokens


def _furthest(found: Any, expected: Any) -> float:
    """The largest distance of a leaf from the expected one, relative to the latter's norm."""

    def distance(a: jax.Array, b: jax.Array) -> float:
        return float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(b))

    return max(jax.tree.leaves(jax.tree.map(distance, found, expected)))
