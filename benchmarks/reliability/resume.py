"""2: going on from every step of three epochs, through a real save and restore."""

import random
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

from benchmarks.reliability.inside import one_step, prepared
from benchmarks.reliability.runs import Size, tree_hash
from benchmarks.reliability.tally import Tally
from flaxformer_min.checkpoints.store import Checkpoints
from flaxformer_min.training.loop import Trainer
from flaxformer_min.training.state import TrainState

EPOCHS, POINTS = 3, 60
BEYOND = 3  # steps past the last epoch, so that every resumed run takes some


def resume(folder: Path, short: bool, seed: int) -> Tally:
    """Saves at many steps of one run, and trains from each checkpoint to the same end."""
    tally, draw = Tally("resume"), random.Random(seed)
    for accumulation in (2,) if short else (1, 4):
        workdir = folder / f"resumed-{accumulation}"
        size = Size(1000, 1000, 1000, accumulation, 1 if short else 2)
        trainer = prepared(workdir, folder, size, f"--train.keep_last={POINTS}")
        epoch = trainer.data.plan.batches_per_epoch
        last = EPOCHS * epoch
        steps = sorted(draw.sample(range(1, last + 1), min(last, 3 if short else POINTS)))
        config, tokenizer = trainer.config, trainer.data.tokenizer
        with Checkpoints(workdir, config, tokenizer) as checkpoints:
            ended = _ended(trainer, trainer.fresh_state(), 0, last + BEYOND, steps, checkpoints)
            for step in steps:
                state = trainer.saved_state(checkpoints, step)
                same = _ended(trainer, state, step, last + BEYOND) == ended
                problems = [] if same else ["ended with another state"]
                tally.trial(f"accumulation {accumulation}, step {step}", problems)
        tally.notes.append(f"accumulation {accumulation}: {epoch} steps an epoch")
    return tally


def _ended(
    trainer: Trainer,
    state: TrainState,
    begin: int,
    end: int,
    saved: Collection[int] = (),
    checkpoints: Checkpoints | None = None,
) -> str:
    """The hash after step `end`, from the state after step `begin`; saves on the way."""
    with closing(trainer.batches(begin)) as batches:
        for step, batch in zip(range(begin + 1, end + 1), batches, strict=False):
            state, _ = one_step(trainer, state, batch)
            if checkpoints is not None and step in saved:
                checkpoints.save(state, step)
    return tree_hash(state)
