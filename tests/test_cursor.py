"""Where a run stands: the best evaluation, patience, what is due and when it is over."""

import dataclasses
import math

import pytest

from flaxformer_min.checkpoints.progress import Progress, score
from flaxformer_min.config import TrainConfig
from flaxformer_min.training.cursor import Cursor


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


def test_a_bleu_that_prints_as_zero_does_not_rank_and_the_loss_does():
    """As that of Chinese under 13a: the loss falls from 5 to 2, rises to 4; then BLEU moves."""
    records = [(5.0, 0.0), (3.0, 0.004), (2.0, 0.0), (4.0, 0.003), (9.0, 0.005), (1.0, 0.0)]
    progress, course = Progress(), []
    for step, (loss, bleu) in enumerate(records, start=1):
        record = {"bleu": {"score": bleu}, "validation_loss": loss}
        progress = progress.after(score(record, "bleu"), step)
        course.append((progress.best_step, progress.evaluations_since))
    assert course == [(1, 0), (2, 0), (3, 0), (3, 1), (5, 0), (5, 1)]


TRAIN = TrainConfig(steps=70, evaluate_every=30, checkpoint_every=10, patience=2)
RECORD = {"bleu": {"score": 3.0}, "validation_loss": 1.0}


@pytest.mark.parametrize(
    ("step", "evaluation", "due", "checkpoint_due", "over"),
    [
        (0, None, False, True, False),
        (7, None, False, False, False),
        (10, None, False, True, False),
        (30, None, True, False, False),  # saved now, the checkpoint would lack its evaluation
        (30, RECORD, False, True, False),
        (70, None, True, False, False),  # the last step is always evaluated
        (70, RECORD, False, True, True),
        (80, None, True, False, False),  # of a run that had more steps
        (80, RECORD, False, True, True),
    ],
)
def test_what_is_due_at_a_step(step, evaluation, due, checkpoint_due, over):
    cursor = Cursor(step, evaluation=evaluation)
    assert cursor.evaluation_due(TRAIN) == due
    assert cursor.checkpoint_due(TRAIN) == checkpoint_due
    assert cursor.over(TRAIN) == over


def test_a_cursor_counts_its_evaluations_and_steps():
    cursor = Cursor().after_step()
    assert cursor == Cursor(1, Progress(), None, saved=False)
    cursor = Cursor(30).after_evaluation(RECORD, TRAIN)
    assert cursor == Cursor(30, Progress(3.0, 30, 0), RECORD, saved=False)
    assert cursor.after_step() == Cursor(31, Progress(3.0, 30, 0), None, saved=False)
    for step in (60, 61):
        assert not cursor.over(TRAIN)
        cursor = Cursor(step, cursor.progress).after_evaluation(RECORD, TRAIN)
    assert cursor.over(TRAIN)
    assert not cursor.over(dataclasses.replace(TRAIN, patience=None))


def test_a_cursor_ranks_by_the_metric_of_the_config():
    by_loss = dataclasses.replace(TRAIN, best_metric="loss")
    assert Cursor(30).after_evaluation(RECORD, by_loss).progress == Progress(-1.0, 30, 0)
