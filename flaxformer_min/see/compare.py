"""What differs between runs: their configs, their text, their results."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from flaxformer_min.config import flat
from flaxformer_min.errors import UserError
from flaxformer_min.see.runs import Run, series

WIDTH, LABEL, COLUMN = 80, 29, 17  # characters of a line, of its label, of the cell of a run
Row = tuple[str, list[str]]  # a label, and a cell for each run


def compare(runs: Sequence[Run]) -> list[str]:
    """Returns a table of lines of at most WIDTH characters, as many runs beside each other as fit.

    It has the fields of the config that differ, the first digits of the hashes of tokenizer and
    text if they differ (losses do not compare then), and the results. Raises UserError for less
    than two runs.
    """
    if len(runs) < 2:
        raise UserError("compare needs two workdirs or more")
    names: Row = ("", [f"[{n}] {run.name}" for n, run in enumerate(runs, 1)])
    rows = [names, *_differences(runs), ("", [""] * len(runs)), *_results(runs)]
    fit = (WIDTH - LABEL) // COLUMN
    lines: list[str] = []
    for first in range(0, len(runs), fit):
        lines += ["", *(_line(label, cells[first : first + fit]) for label, cells in rows)]
    return lines[1:]


def _differences(runs: Sequence[Run]) -> Iterator[Row]:
    """Yields what differs of config, tokenizer and text."""
    values = [flat(run.config) | {k: v[:8] for k, v in run.text.items()} for run in runs]
    rows = [(key, [_shown(value[key]) for value in values]) for key in values[0]]
    different = [(key, cells) for key, cells in rows if len(set(cells)) > 1]
    yield from different or [("configs and text are the same", [""] * len(runs))]


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _results(runs: Sequence[Run]) -> Iterator[Row]:
    """Yields the best and the last of each measure, with its step; time is that of all steps."""
    steps = [series(run.rows, "train", "loss")[0][-1:] for run in runs]
    yield "steps", [f"{step[0]:,}" if step else "-" for step in steps]
    yield "time of the steps", [tqdm.format_interval(_seconds(run)) for run in runs]
    for title, name, best in (("validation loss", "validation_loss", min), ("BLEU", "bleu", max)):
        measured = [_finite(*series(run.rows, "validation", name)) for run in runs]
        digits = 4 if best is min else 2
        yield f"{title}, best", [_at(points, best, digits) for points in measured]
        yield f"{title}, last", [_at(points[-1:], best, digits) for points in measured]


def _seconds(run: Run) -> float:
    """Returns the time of all training steps, without evaluations and saving."""
    _, tokens = series(run.rows, "train", "tokens")
    _, rates = series(run.rows, "train", "tokens_per_second")
    return math.fsum(count / rate for count, rate in zip(tokens, rates, strict=True))


def _finite(steps: Iterable[int], values: Iterable[float]) -> list[tuple[float, int]]:
    points = zip(values, steps, strict=True)
    return [(value, step) for value, step in points if math.isfinite(value)]


def _at(points: list[tuple[float, int]], best: Callable[..., Any], digits: int) -> str:
    if not points:
        return "-"
    value, step = best(points, key=lambda point: point[0])
    return f"{value:.{digits}f} at {step:,}"


def _line(label: str, cells: Sequence[str]) -> str:
    """Returns a line; of a cell that is too long the end is shown, where paths differ."""
    shown = (cell if len(cell) < COLUMN else f"..{cell[3 - COLUMN :]}" for cell in cells)
    return (f"{label:<{LABEL}}" + "".join(f"{cell:<{COLUMN}}" for cell in shown)).rstrip()
