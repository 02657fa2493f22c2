"""Small files that are whole or as they were, whatever happens while they are written."""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Gives a file this content; after a kill or a power cut it has the old or the new one.

    It is on the disk when this returns. Raises OSError naming the file, which then is as it was.
    """
    partial = path.with_name(f"{path.name}.partial")
    with naming(path):
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def naming(path: Path) -> Generator[None, None, None]:
    """Within it, an OSError that names no file (a write's does not) is raised naming this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
