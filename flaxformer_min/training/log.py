"""The log of a run: metrics.jsonl, TensorBoard events and the progress bar."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from flaxformer_min.checkpoints.progress import says_something
from flaxformer_min.system.files import naming, replace_file
from flaxformer_min.system.meter import Bar, Pace, say
from flaxformer_min.training.cursor import Cursor
from flaxformer_min.training.state import Metrics

SKIPS_IN_A_ROW = 10  # non-finite steps after which a run gives up


class Dispatched(NamedTuple):
    """A step that was given to the devices and whose metrics have not been fetched."""

    step: int
    metrics: Metrics
    end: float | None  # the time at which it was over, in seconds; None if it was still running


class QuietLog:
    """The log of every process but process 0: it writes nothing, but it can end the run.

    It ends a run in which too many steps in a row are not finite. Whoever fetches the metrics of a
    step waits for the step. So they are fetched one step late, when the next step has been
    dispatched and the devices have work:

        push(1)         step 1 is dispatched
        push(2)         step 2 is dispatched; step 1 is waited for and logged
        flush()         step 2 is waited for and logged
    """

    def __init__(self, pair_ids: Callable[[int], Iterable[int]]):
        """`pair_ids(step)` gives the ids of the pairs in a step's batch, for an error message."""
        self._pair_ids = pair_ids
        self._dispatched: Dispatched | None = None

    def push(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of the step just dispatched, and logs the step before it.

        Raises FloatingPointError after SKIPS_IN_A_ROW non-finite steps in a row.
        """
        self._log_dispatched()
        # On a CPU a step is over when its dispatch returns. Elsewhere it still runs, and it ends at
        # the time at which its metrics arrive.
        is_over = metrics.loss.is_ready()  # pyrefly: ignore[missing-attribute]
        self._dispatched = Dispatched(step, metrics, time.perf_counter() if is_over else None)

    def flush(self) -> None:
        """Waits for the step last pushed and logs it. Raises FloatingPointError like `push`."""
        self._log_dispatched()

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        """Takes the record of an evaluation, which only process 0 writes."""

    def restart_clock(self) -> None:
        """Leaves the time since the last step (evaluation, saving) out of the next step's rate."""

    def close(self) -> None:
        """Ends the log."""

    def _log_dispatched(self) -> None:
        if self._dispatched is None:
            return
        (step, metrics, end), self._dispatched = self._dispatched, None
        values = {name: float(value) for name, value in metrics._asdict().items()}  # waits
        self._log_step(step, values, time.perf_counter() if end is None else end)
        if (in_a_row := int(values["skipped_in_a_row"])) >= SKIPS_IN_A_ROW:
            raise FloatingPointError(
                f"steps {step - in_a_row + 1} to {step} were not finite; lower "
                "optimizer.peak_learning_rate or set optimizer.clip_norm; pairs of the last batch: "
                + ", ".join(map(str, sorted(self._pair_ids(step))))
            )

    def _log_step(self, step: int, values: dict[str, float], end: float) -> None:
        """Logs the metrics of a step that was over at the time `end`."""


class MetricsLog(QuietLog):
    """The log of process 0, as lines of WORKDIR/metrics.jsonl and as TensorBoard events.

    Each line is one JSON object, whose "kind" is "train" or "validation". A number that is not
    finite is written as null, since JSON has no other word for it. Lines after the cursor at which
    the log is opened are dropped, because a run that resumes from that cursor writes them again.
    Every method raises OSError naming the file that it cannot write.
    """

    def __init__(
        self,
        workdir: Path,
        cursor: Cursor,
        steps: int,
        schedule: optax.Schedule,
        pair_ids: Callable[[int], Iterable[int]],
        hparams: Mapping[str, Any],
    ):
        """`steps` is where the progress bar ends; `schedule` gives the learning rate to log.

        `hparams` are what TensorBoard compares runs by.
        """
        # Imported here, while a thread compiles: where PyTorch is installed, this takes a second.
        from flaxformer_min.training.tensorboard import Events

        super().__init__(pair_ids)
        self._path = workdir / "metrics.jsonl"
        _drop_later_lines(self._path, cursor)
        self._file = self._path.open("a", encoding="utf-8")
        self._events = Events(workdir / "tensorboard", cursor.step, hparams)
        self._bar = Bar(  # disable=None shows it on a terminal only
            total=steps, initial=cursor.step, unit=" steps", disable=None, smoothing=0.05
        )
        self._pace, self._steps = Pace(), steps
        self._first: int | None = None  # the first step of this process that was logged
        self._schedule = jax.jit(schedule)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves the time since the last step (evaluation, saving) out of the next step's rate."""
        self._start = time.perf_counter()  # the start of the next step to be logged

    def flush(self) -> None:
        """Waits for the step last pushed, logs it, and puts everything on disk."""
        super().flush()
        with naming(self._path):
            os.fsync(self._file.fileno())
        self._events.flush()

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        """Logs the record of an evaluation and prints its main numbers."""
        self._record(step, "validation", values)
        bleu = values["bleu"]
        say(
            f"step {step}: validation loss {values['validation_loss']:.4f}, "
            f"perplexity {values['validation_perplexity']:.3f}, BLEU {bleu['score']:.2f} "
            f"({bleu['signature']})"
        )
        if not says_something(bleu):
            say(
                f"step {step}: this BLEU ranks nothing, so the loss does; if it stays, see whether "
                "decode.bleu_tokenize suits the language"
            )

    def close(self) -> None:
        """Puts everything on disk and closes the files; a step not yet logged is left out."""
        self._bar.close()
        with naming(self._path):
            self._file.close()
        self._events.close()

    def _log_step(self, step: int, values: dict[str, float], end: float) -> None:
        seconds, self._start = end - self._start, end
        skipped, in_a_row = int(values["skipped"]), int(values["skipped_in_a_row"])
        updates = step - 1 - skipped + bool(in_a_row)  # the updates made before this step
        line = {name: values[name] for name in ("loss", "tokens", "gradient_norm")}
        line["learning_rate"] = np.asarray(self._schedule(updates)).item()
        line["tokens_per_second"] = values["tokens"] / seconds
        self._record(step, "train", line)
        self._show_progress(step, line)
        if in_a_row:
            say(f"step {step}: loss or gradient not finite; parameters left as they were")

    def _show_progress(self, step: int, line: Mapping[str, float]) -> None:
        text = f"loss {line['loss']:.3f}, {line['tokens_per_second']:,.0f} tokens/s"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        if self._bar.disable:
            self._say_progress(step, text)

    def _say_progress(self, step: int, text: str) -> None:
        """Prints a line at the first step, for which XLA compiles, and whenever one is due."""
        first, steps = self._first, self._steps
        if first is None:
            self._first, self._pace = step, Pace()
            say(f"step {step}/{steps}: {text}")
        elif self._pace.due():
            say(f"step {step}/{steps}: {text}, {self._pace.left(step - first, steps - first)}")

    def _record(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Writes one line and its events."""
        line = {name: value if _has_json(value) else None for name, value in values.items()}
        with naming(self._path):
            row = {"step": step, "kind": kind, **line}
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        self._events.add(step, kind, values)


def _has_json(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _drop_later_lines(path: Path, cursor: Cursor) -> None:
    """Keeps the whole lines up to a cursor; a kill may have left half a line at the end.

    The line of an evaluation comes after that of its step. It is dropped if the cursor is at that
    step and has no evaluation, because the evaluation will then be made again.
    """
    if not path.exists():
        return
    kept, last = [], (cursor.step, cursor.evaluation is not None)
    for line in path.read_bytes().split(b"\n"):
        try:
            values = json.loads(line.decode())
            early = (values["step"], "validation_loss" in values) <= last
        except (ValueError, TypeError, LookupError, RecursionError):  # not written by a run, or cut
            continue
        if early:
            kept.append(line + b"\n")
    replace_file(path, b"".join(kept))
