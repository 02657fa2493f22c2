"""Where a run stands: which evaluation is the best so far, what is due, and when it is over."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from flaxformer_min.checkpoints.progress import Progress, score
from flaxformer_min.config import TrainConfig


class Cursor(NamedTuple):
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

    def evaluated(self, record: Mapping[str, Any], train: TrainConfig) -> "Cursor":
        """The position once this step's evaluation is made."""
        progress = self.progress.after(score(record, train.best_metric), self.step)
        return self._replace(progress=progress, evaluation=record, saved=False)

    def next(self) -> "Cursor":
        """The position one step later."""
        return Cursor(self.step + 1, self.progress, saved=False)
