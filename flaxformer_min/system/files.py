"""Small files that a crash leaves whole, and the lock that keeps other processes out."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Generator
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Writes a small file, so that a kill or a power cut leaves either the old or the new content.

    The new content is on the disk when this returns. Raises OSError naming the file; the file then
    still has its old content.
    """
    unfinished = path.with_name(f"{path.name}.partial")
    with naming(path):
        try:
            with unfinished.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        flush(path.parent)


def flush(path: Path) -> None:
    """Waits until a file's content, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, *, wait: bool) -> Generator[None, None, None]:
    """A context in which this process alone holds the lock of a file, which is made if missing.

    The operating system releases the lock when the process ends, even if it is killed.

    Raises BlockingIOError if another process holds the lock and `wait` is False, or has removed the
    file while this one waited, and OSError if the file cannot be opened.
    """
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if not _is_file_of(path, file.fileno()):
            raise BlockingIOError(errno.EAGAIN, "is being removed by its holder", str(path))
        yield


def _is_file_of(path: Path, descriptor: int) -> bool:
    """Whether an open file still has this name; whoever held its lock may have removed it."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


@contextlib.contextmanager
def naming(path: Path) -> Generator[None, None, None]:
    """A context that adds this file's name to an OSError without one, such as a failed write's."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
