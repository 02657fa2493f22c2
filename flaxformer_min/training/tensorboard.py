"""A run's numbers, settings and sample translations as TensorBoard events."""

import html
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from flaxformer_min.system.files import naming


class Events:
    """A TensorBoard event file; every method raises OSError naming the folder if it cannot write.

    tensorboardX's own SummaryWriter writes from a thread. On a full disk that thread dies silently,
    and the writer blocks for ever once its queue of ten numbers is full.
    """

    def __init__(self, folder: Path, step: int, hparams: Mapping[str, Any]):
        """Opens a new file; TensorBoard ignores events after `step` in earlier files.

        `hparams` are the settings that TensorBoard lists beside the results of each run.
        """
        self._folder = folder
        with naming(folder):
            folder.mkdir(exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"), f".{step}")
        start = SessionLog(status=SessionLog.START)
        self._write(Event(step=step + 1, session_log=start))
        shown = {name: "None" if value is None else value for name, value in hparams.items()}
        # Without the first part, which describes all runs, TensorBoard itself sees what differs
        # between them and shows that first. The last part says that the run has ended.
        _, settings, _ = summary.hparams(shown, {})
        self._write(Event(summary=settings))

    def add(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Writes the numbers of a step as KIND/NAME, and its "samples" as a table.

        Of a BLEU record the score is written, and from a name the kind is left out.
        """
        numbers = {name: value for name, value in values.items() if name != "samples"}
        scalars = [
            Summary.Value(
                tag=f"{kind}/{name.removeprefix(f'{kind}_')}",
                simple_value=value["score"] if isinstance(value, dict) else value,
            )
            for name, value in numbers.items()
        ]
        self._write(Event(step=step, summary=Summary(value=scalars)))
        if samples := values.get("samples"):
            self._write(Event(step=step, summary=summary.text(f"{kind}/samples", _table(samples))))

    def flush(self) -> None:
        """Puts everything on disk."""
        with naming(self._folder):
            self._writer.flush()

    def close(self) -> None:
        """Puts everything on disk and closes the file."""
        with naming(self._folder):
            self._writer.close()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        with naming(self._folder):
            self._writer.write_event(event)


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns a table in Markdown, in which no text can be taken for Markdown or HTML."""
    head = list(rows[0])
    cells = [[f"<code>{html.escape(row[name])}</code>" for name in head] for row in rows]
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "&#124;") for cell in line) + " |" for line in lines
    )
