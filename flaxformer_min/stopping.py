"""Where a run stands: which evaluation is the best so far, what is due, and when it is over."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from flaxformer_min.config import TrainConfig


class Progress(NamedTuple):
    """The best evaluation so far; saved in every checkpoint, since it decides when a run ends."""

    best_score: float | None = None  # as `score` gives it; None before the first evaluation
    best_step: int | None = None
    evaluations_since: int = 0  # evaluations that were no better

    def after(self, score: float, step: int) -> "Progress":
        """The progress once the evaluation at `step` is counted; an equal score is no better."""
        if self.best_score is None or score > self.best_score:
            return Progress(score, step, 0)
        return self._replace(evaluations_since=self.evaluations_since + 1)

    def exhausted(self, patience: int | None) -> bool:
        """Whether `patience` evaluations in a row were no better; never for None."""
        return patience is not None and self.evaluations_since >= patience


def score(record: Mapping[str, Any], metric: Literal["bleu", "loss"]) -> float:
    """The number by which an evaluation's record is ranked, higher being better.

    A loss that is not finite ranks last.
    """
    if metric == "bleu":
        return record["bleu"]["score"]
    loss = record["validation_loss"]
    return -loss if math.isfinite(loss) else -math.inf


class Position(NamedTuple):
    """Where a run stands between two steps; beside the state, this decides what comes next."""

    step: int = 0
    progress: Progress = Progress()
    evaluation: Mapping[str, Any] | None = None  # of this step, once it is made
    saved: bool = True  # nothing has been trained or evaluated since the last checkpoint

    def evaluation_due(self, train: TrainConfig) -> bool:
        """Whether this step is to be evaluated and is not yet; the last one always is."""
        scheduled = self.step % train.evaluate_every == 0 or self.step >= train.steps
        return self.step > 0 and scheduled and self.evaluation is None

    def regular(self, train: TrainConfig) -> bool:
        """Whether the plan has a checkpoint here, and what it is to hold is complete."""
        scheduled = self.step % train.checkpoint_every == 0 or self.step >= train.steps
        return scheduled and not self.evaluation_due(train)

    def over(self, train: TrainConfig) -> bool:
        """Whether the run is complete: its last step is evaluated, or its patience exhausted."""
        done = self.step >= train.steps and not self.evaluation_due(train)
        return done or self.progress.exhausted(train.patience)

    def evaluated(self, record: Mapping[str, Any], train: TrainConfig) -> "Position":
        """The position once this step's evaluation is made."""
        progress = self.progress.after(score(record, train.best_metric), self.step)
        return self._replace(progress=progress, evaluation=record, saved=False)

    def next(self) -> "Position":
        """The position one step later."""
        return Position(self.step + 1, self.progress, saved=False)
