"""Small files that a crash leaves whole, and the lock that keeps other processes out."""

import contextlib
import errno
import io
import os
import socket
import sys
import time
from collections.abc import Generator
from pathlib import Path

# What an operation says that a file system does not have.
UNSUPPORTED = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


def replace_file(path: Path, content: bytes) -> None:
    """Writes a small file as `written_aside` does."""
    with written_aside(path) as file:
        file.write(content)


@contextlib.contextmanager
def written_aside(path: Path) -> Generator[io.BufferedWriter, None, None]:
    """A context with a file to write, NAME.partial, which takes the place of NAME at its end.

    So a kill or a power cut leaves either the old or the new content. The new content is on the
    disk when the context ends. If it raises, NAME still has its old content. An OSError names it.
    """
    unfinished = path.with_name(f"{path.name}.partial")
    with naming(path):
        try:
            with unfinished.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        flush(path.parent)


def flush(path: Path) -> None:
    """Waits until a file's content, or a directory's list of names, is on the disk.

    Some file systems of networks cannot be asked about a directory; there nothing is waited for.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, *, wait: bool) -> Generator[None, None, None]:
    """A context in which this process alone holds the lock of a file, which is made if missing.

    The operating system releases the lock when the process ends, even if it is killed. Where the
    file system has no locks, `_owned` takes their place. Whoever waits says so on standard error.

    Raises BlockingIOError if another process holds the lock and `wait` is False, or has removed the
    file while this one waited, and OSError if the file cannot be opened.
    """
    import fcntl  # not there on Windows, where the command line says so (cli.py)

    with open(path, "a") as file, contextlib.ExitStack() as stack:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            print(f"waiting for another process, which holds {path}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            stack.enter_context(_owned(path.with_name(f"{path.name}.owner"), wait=wait))
        if not _is_file_of(path, file.fileno()):
            raise BlockingIOError(errno.EAGAIN, "is being removed by its holder", str(path))
        yield


def _is_file_of(path: Path, descriptor: int) -> bool:
    """Whether an open file still has this name; whoever held its lock may have removed it."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


@contextlib.contextmanager
def _owned(path: Path, *, wait: bool) -> Generator[None, None, None]:
    """A context in which this process owns a file that nobody else could make; it then goes.

    The file names host and process. A process that is killed leaves it, and nobody can tell from
    another machine whether that process lives; so it is never taken for granted that it does not.
    Raises OSError naming the owner unless `wait` is True and it may be at work.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            break
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # it has gone meanwhile
                _refuse_owned(path, path.read_text(), wait=wait)
            time.sleep(1)
    try:
        os.write(descriptor, f"{socket.gethostname()} {os.getpid()}".encode())
        os.close(descriptor)
        yield
    finally:
        path.unlink(missing_ok=True)


def _refuse_owned(path: Path, owner: str, *, wait: bool) -> None:
    """Raises OSError if the owner of a lock has ended, or is not to be waited for."""
    host, _, process = owner.partition(" ")
    ended = host == socket.gethostname() and not _lives(process)
    if ended or not wait:
        what = "left this file; delete it" if ended else "is at work; if not, delete this file"
        text = f"no locks on this file system: process {process} of {host} {what}"
        raise OSError(errno.ENOLCK, text, str(path))


def _lives(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (ValueError, PermissionError):  # not written yet; another user's
        pass
    return True


@contextlib.contextmanager
def naming(path: Path) -> Generator[None, None, None]:
    """A context that adds this file's name to an OSError without one, such as a failed write's."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
