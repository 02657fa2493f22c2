"""What a run writes down as it goes: metrics.jsonl, TensorBoard events and the progress bar."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from tqdm import tqdm

from flaxformer_min.system.files import naming, replace_file
from flaxformer_min.training.cursor import Cursor
from flaxformer_min.training.state import Metrics

LINES_EVERY = 50  # steps between plain progress lines where there is no terminal
SKIPS_IN_A_ROW = 10  # non-finite steps after which a run gives up


class QuietLog:
    """What every process does with the metrics of a step; process 0 also writes them down.

    They are read only when the next step has been dispatched (`push`), so that the device never
    waits for the host.
    """

    def __init__(self, pair_ids: Callable[[int], Iterable[int]]):
        """`pair_ids` gives the ids of the pairs in a step's batch, for the message about it."""
        self._pair_ids = pair_ids
        self._waiting: tuple[int, Metrics] | None = None

    def push(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of the step just dispatched and settles those of the one before.

        Raises FloatingPointError after SKIPS_IN_A_ROW non-finite steps in a row.
        """
        self._settle()
        self._waiting = step, metrics

    def flush(self) -> None:
        """As `push`, without a step: waits for the one last pushed."""
        self._settle()

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        """Takes the record of an evaluation."""

    def restart_clock(self) -> None:
        """Leaves the time since the last step (evaluation, saving) out of the next rate."""

    def close(self) -> None:
        """To be called at the end."""

    def _settle(self) -> None:
        if self._waiting is None:
            return
        (step, metrics), self._waiting = self._waiting, None
        values = {name: float(value) for name, value in metrics._asdict().items()}
        self._train(step, values)
        if (in_a_row := int(values["skipped_in_a_row"])) >= SKIPS_IN_A_ROW:
            raise FloatingPointError(
                f"steps {step - in_a_row + 1} to {step} were not finite; lower "
                "optimizer.peak_learning_rate or set optimizer.clip_norm; pairs of the last batch: "
                + ", ".join(map(str, sorted(self._pair_ids(step))))
            )

    def _train(self, step: int, values: dict[str, float]) -> None:
        """Takes the metrics of a step that is over, as numbers."""


class MetricsLog(QuietLog):
    """One JSON object a line in WORKDIR/metrics.jsonl, the same numbers as TensorBoard events.

    A number that is not finite is null there: JSON has no other word for it. Lines past the
    position at which the log is opened are dropped: a run resumed there writes them again. What
    cannot be written raises OSError naming the file.
    """

    def __init__(
        self,
        workdir: Path,
        at: Cursor,
        steps: int,
        schedule: optax.Schedule,
        pair_ids: Callable[[int], Iterable[int]],
    ):
        # Here, while a thread compiles: where PyTorch is installed, this import takes a second.
        from flaxformer_min.training.tensorboard import Events

        super().__init__(pair_ids)
        self._path = workdir / "metrics.jsonl"
        _drop_later_lines(self._path, at)
        self._file = self._path.open("a", encoding="utf-8")
        self._events = Events(workdir / "tensorboard", at.step)
        self._terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=steps, initial=at.step, unit=" steps", disable=not self._terminal, smoothing=0.05
        )
        self._schedule = jax.jit(schedule)
        self._over: float | None = None  # when the waiting step was, if that is known already
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves the time since the last step (evaluation, saving) out of the next rate."""
        self._clock = time.perf_counter()

    def push(self, step: int, metrics: Metrics) -> None:
        super().push(step, metrics)
        # A CPU takes the step before the call returns, other devices while the next one is due.
        is_over = metrics.loss.is_ready()  # pyrefly: ignore[missing-attribute]
        self._over = time.perf_counter() if is_over else None

    def flush(self) -> None:
        """As `push`, without a step: waits for the one last pushed. Then everything is on disk."""
        self._settle()
        with naming(self._path):
            os.fsync(self._file.fileno())
        self._events.flush()

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        """Records an evaluation and says its main numbers."""
        self._record(step, values)
        bleu = values["bleu"]
        self.say(
            f"step {step}: validation loss {values['validation_loss']:.4f}, "
            f"perplexity {values['validation_perplexity']:.3f}, BLEU {bleu['score']:.2f} "
            f"({bleu['signature']})"
        )

    def say(self, text: str) -> None:
        """A line for the reader, above the progress bar."""
        tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        """Puts everything on disk."""
        self._bar.close()
        with naming(self._path):
            self._file.close()
        self._events.close()

    def _train(self, step: int, values: dict[str, float]) -> None:
        over = time.perf_counter() if self._over is None else self._over
        seconds, self._clock = over - self._clock, over
        skipped, in_a_row = int(values["skipped"]), int(values["skipped_in_a_row"])
        before = step - 1 - skipped + bool(in_a_row)  # updates before this step
        line = {name: values[name] for name in ("loss", "tokens", "gradient_norm")}
        line["learning_rate"] = np.asarray(self._schedule(before)).item()
        line["tokens_per_second"] = values["tokens"] / seconds
        self._record(step, line)
        self._tell(step, line)
        if in_a_row:
            self.say(f"step {step}: loss or gradient not finite; parameters left as they were")

    def _tell(self, step: int, values: Mapping[str, float]) -> None:
        text = f"loss {values['loss']:.3f}, {values['tokens_per_second']:,.0f} tokens/s"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        if not self._terminal and step % LINES_EVERY == 0:
            self.say(f"step {step}/{self._bar.total}: {text}")

    def _record(self, step: int, values: Mapping[str, Any]) -> None:
        line = {name: value if _writable(value) else None for name, value in values.items()}
        with naming(self._path):
            self._file.write(json.dumps({"step": step, **line}, allow_nan=False) + "\n")
            self._file.flush()
        # of a BLEU record TensorBoard gets the score
        self._events.add(
            step, {n: v["score"] if isinstance(v, dict) else v for n, v in values.items()}
        )


def _writable(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _drop_later_lines(path: Path, at: Cursor) -> None:
    """Keeps the whole lines up to a position; a kill may have left half a line.

    An evaluation comes after its step: if the position does not have it, it will be made again.
    """
    if not path.exists():
        return
    kept, place = [], (at.step, at.evaluation is not None)
    for line in path.read_bytes().split(b"\n"):
        try:
            values = json.loads(line.decode())
            early = (values["step"], "validation_loss" in values) <= place
        except (ValueError, TypeError, LookupError, RecursionError):  # no line of ours, or half one
            continue
        if early:
            kept.append(line + b"\n")
    replace_file(path, b"".join(kept))
