"""Where a run stands between two steps, what is due at that point, and whether the run is over."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from flaxformer_min.checkpoints.progress import Progress, score
from flaxformer_min.config import TrainConfig


class Cursor(NamedTuple):
    """Where a run stands; with the training state it decides all that the run does next."""

    step: int = 0  # steps taken so far
    progress: Progress = Progress()  # the best of all evaluations so far
    evaluation: Mapping[str, Any] | None = None  # the record of this step's evaluation, if made
    saved: bool = True  # False after a step or an evaluation that no checkpoint holds

    def evaluation_due(self, train: TrainConfig) -> bool:
        """Whether this step has to be evaluated and has not been; the last step always has to."""
        scheduled = self.step % train.evaluate_every == 0 or self.step >= train.steps
        return self.step > 0 and scheduled and self.evaluation is None

    def checkpoint_due(self, train: TrainConfig) -> bool:
        """Whether the config asks for a checkpoint at this step, and no evaluation is due first."""
        scheduled = self.step % train.checkpoint_every == 0 or self.step >= train.steps
        return scheduled and not self.evaluation_due(train)

    def over(self, train: TrainConfig) -> bool:
        """Whether the run is over: the last step is evaluated, or the patience is exhausted."""
        done = self.step >= train.steps and not self.evaluation_due(train)
        return done or self.progress.exhausted(train.patience)

    def after_evaluation(self, record: Mapping[str, Any], train: TrainConfig) -> "Cursor":
        """Returns the cursor after the evaluation of this step, whose record is given."""
        progress = self.progress.after(score(record, train.best_metric), self.step)
        return self._replace(progress=progress, evaluation=record, saved=False)

    def after_step(self) -> "Cursor":
        """Returns the cursor after one more step."""
        return Cursor(self.step + 1, self.progress, saved=False)
