"""The best evaluation of a run so far; it decides what is kept and when a run ends."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple


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
