"""6: a loss, a gradient or activations that are not finite change nothing but the counts."""

import random
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.reliability.inside import batch_of, one_step, prepared
from benchmarks.reliability.runs import Size, tree_hash
from benchmarks.reliability.tally import Tally
from flaxformer_min import step as step_module
from flaxformer_min.state import TrainState
from flaxformer_min.training import Trainer

LOSS_SUMS = step_module.loss_sums
PLACES, VALUES = ("loss", "gradient", "activations"), (np.nan, np.inf, -np.inf)


def nonfinite(folder: Path, short: bool, seed: int) -> Tally:
    """Poisons one row of one batch, at random steps, and compares the state before and after."""
    tally, draw = Tally("nonfinite"), random.Random(seed)
    for accumulation in (2,) if short else (1, 4):
        with mock.patch.object(step_module, "loss_sums", _poisoned):
            size = Size(1000, 1000, 1000, accumulation, 1 if short else 2)
            trainer = prepared(folder / f"poisoned-{accumulation}", folder, size)
            state, step = trainer.fresh_state(), 0
            for point in range(2 if short else 10):
                for _ in range(draw.randint(1, 6)):
                    state, step = one_step(trainer, state, step), step + 1
                place, value = draw.choice(PLACES), draw.choice(VALUES)
                problems, state = _poison(trainer, state, step, place, value, draw)
                step += 1
                tally.trial(f"accumulation {accumulation}, point {point}", problems, seen=place)
    return tally


def _mark(place: str, value: float) -> int:
    """A source id that this corpus never has, one of the byte pieces: the poison and its place."""
    return 250 + 3 * PLACES.index(place) + VALUES.index(value)


def _poisoned(graphdef: Any, params: Any, batch: Any, **options: Any) -> Any:
    """As `loss_sums`, but a batch with a mark in it makes that place not finite."""

    def poison(place: str) -> jax.Array:
        """The value if the mark is there, else 0."""
        found = [(batch.source == _mark(place, value)).any() for value in VALUES]
        return sum(jnp.where(mark, value, 0.0) for mark, value in zip(found, VALUES, strict=True))

    bad = {place: poison(place) for place in PLACES}
    params = jax.tree.map(lambda leaf: _with_gradient(leaf, bad["gradient"]), params)
    params["embedding"] = params["embedding"] + bad["activations"]
    loss, tokens = LOSS_SUMS(graphdef, params, batch, **options)
    return loss + bad["loss"], tokens


@jax.custom_vjp
def _with_gradient(leaf: jax.Array, added: jax.Array) -> jax.Array:
    """The leaf; its gradient gets `added`."""
    return leaf


_with_gradient.defvjp(
    lambda leaf, added: (leaf, added), lambda added, gradient: (gradient + added, None)
)


def _poison(
    trainer: Trainer, state: TrainState, step: int, place: str, value: float, draw: random.Random
) -> tuple[list[str], TrainState]:
    """Takes a poisoned step, then compares; returns the problems and the state."""
    batch = batch_of(trainer, step)
    rows = np.flatnonzero(np.asarray(batch.source)[:, 0])  # those that hold a pair
    source = batch.source.at[draw.choice(rows.tolist()), 0].set(_mark(place, value))
    before, counts = _kept(state), (int(state.step), int(state.skipped))
    key = jax.random.key(trainer.config.train.seed)
    state, metrics = trainer.train_step(state, batch._replace(source=source), key)
    problems = []
    if _kept(state) != before:
        problems.append(f"{place} {value}: parameters or optimizer have changed")
    if (int(state.step), int(state.skipped)) != (counts[0] + 1, counts[1] + 1):
        problems.append(f"{place} {value}: counted {counts} -> {state.step}, {state.skipped}")
    if int(metrics.skipped_in_a_row) != 1:
        problems.append(f"{place} {value}: {metrics.skipped_in_a_row} in a row")
    finite = bool(jnp.isfinite(metrics.loss)), bool(jnp.isfinite(metrics.gradient_norm))
    if finite[0] != (place == "gradient") or (place != "loss" and finite[1]):
        problems.append(f"{place} {value}: not where it was meant, {metrics}")
    return problems, state


def _kept(state: TrainState) -> str:
    return tree_hash({"params": state.params, "opt_state": state.opt_state})
