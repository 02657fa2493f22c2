"""How the evaluations of a run compare: the score of each and the best one so far."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple


class Progress(NamedTuple):
    """The best evaluation of a run so far.

    With `train.patience` it decides when the run ends, so every checkpoint holds it.
    """

    best_score: float | None = None  # a result of `score`; None before the first evaluation
    best_step: int | None = None
    evaluations_since: int = 0  # how many evaluations after the best one were no better
    measure: str | None = None  # of what and how it was measured: only equal ones compare

    def after(self, score: float, step: int) -> "Progress":
        """Returns the progress after the evaluation at `step`; an equal score is no better."""
        if self.best_score is None or score > self.best_score:
            return Progress(score, step, 0, self.measure)
        return self._replace(evaluations_since=self.evaluations_since + 1)

    def exhausted(self, patience: int | None) -> bool:
        """Whether `patience` evaluations in a row were no better; False if `patience` is None."""
        return patience is not None and self.evaluations_since >= patience


def score(record: Mapping[str, Any], metric: Literal["bleu", "loss"]) -> float:
    """Returns the score of an evaluation's record, higher being better.

    It is the BLEU score, or the negated validation loss; a loss that is not finite ranks last. A
    BLEU that prints as 0.00 says nothing yet, so that the loss ranks there too, below every BLEU.
    """
    if metric == "bleu" and says_something(record["bleu"]):
        return record["bleu"]["score"]
    loss = record["validation_loss"]
    return -loss if math.isfinite(loss) else -math.inf


def says_something(bleu: Mapping[str, Any]) -> bool:
    """Whether a BLEU record has a score that does not print as 0.00."""
    return bleu["score"] >= 0.005
