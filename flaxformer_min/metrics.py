"""What a run writes down as it goes: metrics.jsonl, TensorBoard events and the progress bar."""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import optax
from tensorboardX import SummaryWriter
from tqdm import tqdm

from flaxformer_min.step import Metrics

LINES_EVERY = 50  # steps between plain progress lines where there is no terminal
SKIPS_IN_A_ROW = 10  # non-finite steps after which a run gives up


class MetricsLog:
    """One JSON object a line in WORKDIR/metrics.jsonl, the same numbers as TensorBoard events.

    A number that is not finite is null there: JSON has no other word for it. Lines past `step` are
    dropped when the log is opened: a run resumed from there writes them again. The metrics of a
    step are read only when the next one has been dispatched (`push`), so that the device never
    waits for the host.
    """

    def __init__(self, workdir: Path, step: int, steps: int, schedule: optax.Schedule):
        path = workdir / "metrics.jsonl"
        _drop_later_lines(path, step)
        self._file = path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(workdir / "tensorboard"), purge_step=step + 1)
        self._terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=steps, initial=step, unit=" steps", disable=not self._terminal, smoothing=0.05
        )
        self._schedule = schedule
        self._waiting: tuple[int, Metrics] | None = None
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves the time since the last step (evaluation, saving) out of the next rate."""
        self._clock = time.perf_counter()

    def push(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of the step just dispatched and records those of the one before."""
        self.flush()
        self._waiting = step, metrics

    def flush(self) -> None:
        """Waits for the step last pushed and records it.

        Raises FloatingPointError after SKIPS_IN_A_ROW non-finite steps in a row.
        """
        if self._waiting is None:
            return
        (step, metrics), self._waiting = self._waiting, None
        values = {name: float(value) for name, value in metrics._asdict().items()}
        seconds = time.perf_counter() - self._clock
        self.restart_clock()
        skipped, in_a_row = int(values.pop("skipped")), int(values.pop("skipped_in_a_row"))
        before = step - 1 - skipped + bool(in_a_row)  # updates before this step
        values["learning_rate"] = np.asarray(self._schedule(before)).item()
        values["tokens_per_second"] = values["tokens"] / seconds
        self._train(step, values)
        if in_a_row:
            self.say(f"step {step}: loss or gradient not finite; parameters left as they were")
        if in_a_row >= SKIPS_IN_A_ROW:
            raise FloatingPointError(
                f"steps {step - in_a_row + 1} to {step} were not finite; try a lower "
                "optimizer.peak_learning_rate or set optimizer.clip_norm"
            )

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
        self._events.close()
        self._file.close()

    def _train(self, step: int, values: dict[str, float]) -> None:
        self._record(step, values)
        text = f"loss {values['loss']:.3f}, {values['tokens_per_second']:,.0f} tokens/s"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        if not self._terminal and step % LINES_EVERY == 0:
            self.say(f"step {step}/{self._bar.total}: {text}")

    def _record(self, step: int, values: dict[str, Any]) -> None:
        line = {name: value if _writable(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **line}, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, dict):  # a BLEU record: TensorBoard gets its score
                value = value["score"]
            self._events.add_scalar(name, value, step)


def _writable(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _drop_later_lines(path: Path, step: int) -> None:
    """Keeps the whole lines of steps up to `step`; a kill may have left half a line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            continue
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.replace(path)
