"""train.py that sends itself SIGTERM within the first evaluation, in its loss or its decoding."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flaxformer_min.cli import main
from flaxformer_min.training.validation import Validation

inside: list[str] = []


def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method; the signal comes a little after it is entered, once."""

    def call(*args: Any, **kwargs: Any) -> Any:
        inside.append(name)
        if name == os.environ["STOP_IN"] and not Path(os.environ["MARKS"]).exists():
            threading.Timer(float(os.environ["STOP_AFTER"]), stop).start()
        try:
            return method(*args, **kwargs)
        finally:
            inside.remove(name)

    return call


def stop() -> None:
    """Notes where we are, and sends the signal."""
    Path(os.environ["MARKS"]).write_text(f"{time.time()} {' '.join(inside)}")
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    Validation.loss = watched("loss", Validation.loss)
    Validation.translations = watched("decoding", Validation.translations)
    sys.exit(main(["train", *sys.argv[1:]]))
