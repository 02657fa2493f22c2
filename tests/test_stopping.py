"""Patience: which evaluation is the best, and how many in a row were no better."""

import math

import pytest

from flaxformer_min.stopping import Progress, score


def progress_after(scores: list[float]) -> Progress:
    progress = Progress()
    for step, value in enumerate(scores, start=1):
        progress = progress.after(value, step)
    return progress


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([], Progress(None, None, 0)),
        ([3.0], Progress(3.0, 1, 0)),
        ([3.0, 5.0], Progress(5.0, 2, 0)),
        ([3.0, 5.0, 5.0], Progress(5.0, 2, 1)),  # an equal score is no better
        ([3.0, 2.0, 1.0], Progress(3.0, 1, 2)),
        ([3.0, 2.0, 4.0, 1.0], Progress(4.0, 3, 1)),
        ([-math.inf, -math.inf, -2.0], Progress(-2.0, 3, 0)),
    ],
)
def test_the_best_evaluation_is_the_first_of_the_highest_score(scores, expected):
    assert progress_after(scores) == expected


@pytest.mark.parametrize(
    ("worse", "patience", "ends"),
    [(0, 1, False), (1, 1, True), (2, 3, False), (3, 3, True), (99, None, False)],
)
def test_patience_ends_a_run_after_so_many_evaluations_that_were_no_better(worse, patience, ends):
    assert Progress(1.0, 1, worse).exhausted(patience) == ends


def test_higher_bleu_and_lower_loss_score_higher():
    better = {"bleu": {"score": 31.0}, "validation_loss": 1.7}
    worse = {"bleu": {"score": 29.0}, "validation_loss": 2.3}
    for metric in ("bleu", "loss"):
        assert score(better, metric) > score(worse, metric)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ranks_below_every_other(loss):
    assert score({"validation_loss": loss}, "loss") < score({"validation_loss": 1e30}, "loss")
