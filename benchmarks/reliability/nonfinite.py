"""6: a loss, a gradient or activations that are not finite change nothing but the counts."""

import random
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.reliability.inside import one_step, prepared
from benchmarks.reliability.runs import Size, tree_hash
from benchmarks.reliability.tally import Tally
from flaxformer_min.training import step
from flaxformer_min.training.loop import Trainer
from flaxformer_min.training.loss import Loss, make_loss
from flaxformer_min.training.state import TrainState

PLACES, VALUES = ("loss", "gradient", "activations"), (np.nan, np.inf, -np.inf)


def nonfinite(folder: Path, short: bool, seed: int) -> Tally:
    """Poisons one row of one batch, at random steps, and compares the state before and after."""
    tally, draw = Tally("nonfinite"), random.Random(seed)
    for accumulation in (2,) if short else (1, 4):
        with mock.patch.object(step, "make_loss", _make_poisoned_loss):
            size = Size(1000, 1000, 1000, accumulation, 1 if short else 2)
            trainer = prepared(folder / f"poisoned-{accumulation}", folder, size)
            state = trainer.fresh_state()
            with closing(trainer.batches(0)) as batches:
                for point in range(3 if short else 10):
                    for batch in islice(batches, draw.randint(1, 6)):
                        state, _ = one_step(trainer, state, batch)
                    place, value = PLACES[point % len(PLACES)], draw.choice(VALUES)
                    batch = _marked(next(batches), place, value, draw)
                    problems, state = _compared(trainer, state, batch, place)
                    name = f"accumulation {accumulation}, point {point}, {value} in {place}"
                    tally.trial(name, problems, seen=place)
    return tally


def _mark(place: str, value: float) -> int:
    """A source id that this corpus never has, one of the byte pieces: the poison and its place."""
    return 250 + 3 * PLACES.index(place) + VALUES.index(value)


def _make_poisoned_loss(graphdef: Any, **options: Any) -> Loss:
    """As `make_loss`, but a batch with a mark in it makes that place not finite."""
    loss = make_loss(graphdef, **options)
    return lambda params, batch, key: _poisoned(loss, params, batch, key)


def _poisoned(loss_of: Loss, params: Any, batch: Any, key: Any) -> Any:
    """The loss of a batch, with what its mark asks for."""

    def poison(place: str) -> jax.Array:
        """The value if the mark is there, else 0."""
        found = [(batch.source == _mark(place, value)).any() for value in VALUES]
        return jnp.where(jnp.array(found), jnp.array(VALUES), 0).sum()

    bad = {place: poison(place) for place in PLACES}
    params = jax.tree.map(lambda leaf: _with_gradient(leaf, bad["gradient"]), params)
    params["embedding"] = params["embedding"] + bad["activations"]
    loss, tokens = loss_of(params, batch, key)
    return loss + bad["loss"], tokens


@jax.custom_vjp
def _with_gradient(leaf: jax.Array, added: jax.Array) -> jax.Array:
    """The leaf; its gradient gets `added`."""
    return leaf


_with_gradient.defvjp(
    lambda leaf, added: (leaf, added), lambda added, gradient: (gradient + added, None)
)


def _marked(batch: Any, place: str, value: float, draw: random.Random) -> Any:
    """The batch with the poison in one of its pairs."""
    pairs = np.flatnonzero(np.asarray(batch.source)[:, 0])  # the other rows are padding
    source = np.array(batch.source)
    source[draw.choice(pairs.tolist()), 0] = _mark(place, value)
    return batch._replace(source=jax.device_put(source, batch.source.sharding))


def _compared(
    trainer: Trainer, state: TrainState, batch: Any, place: str
) -> tuple[list[str], TrainState]:
    """Takes the poisoned step; returns what is wrong after it, and the state."""
    before, step, skipped = _kept(state), int(state.step), int(state.skipped)
    state, metrics = one_step(trainer, state, batch)
    problems = []
    if _kept(state) != before:
        problems.append("parameters or optimizer have changed")
    if (int(state.step), int(state.skipped)) != (step + 1, skipped + 1):
        problems.append(f"was at {step, skipped}, counts {state.step}, {state.skipped}")
    if int(metrics.skipped_in_a_row) != 1:
        problems.append(f"{metrics.skipped_in_a_row} in a row")
    finite = bool(jnp.isfinite(metrics.loss)), bool(jnp.isfinite(metrics.gradient_norm))
    meant = {"loss": (False, True), "gradient": (True, False), "activations": (False, False)}
    if finite != meant[place]:
        problems.append(f"not where it was meant: {metrics}")
    return problems, state


def _kept(state: TrainState) -> str:
    return tree_hash({"params": state.params, "opt_state": state.opt_state})
