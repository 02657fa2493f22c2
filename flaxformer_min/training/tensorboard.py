"""A run's numbers as TensorBoard events."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from flaxformer_min.system.files import naming


class Events:
    """A TensorBoard event file; every method raises OSError naming the folder if it cannot write.

    tensorboardX's own SummaryWriter writes from a thread. On a full disk that thread dies silently,
    and the writer blocks for ever once its queue of ten numbers is full.
    """

    def __init__(self, folder: Path, step: int):
        """Opens a new file; TensorBoard ignores events after `step` in earlier files."""
        self._folder = folder
        with naming(folder):
            folder.mkdir(exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"), f".{step}")
        start = SessionLog(status=SessionLog.START)
        self._write(Event(step=step + 1, session_log=start))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the numbers of a step under their names."""
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Event(step=step, summary=Summary(value=scalars)))

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
