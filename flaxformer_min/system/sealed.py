"""Directories that count only when they are whole, and whose every byte can be verified.

    NAME           whole; a file in it that is missing or changed is damage
    NAME.partial   being written; whole as well once it has a manifest, which is written last
    NAME.deleted   being removed, whatever is still in it

Renaming a directory is atomic, so that a kill at any moment leaves one of these three.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flaxformer_min.errors import UserError, first_line
from flaxformer_min.system.files import flush, naming, replace_file

FORMAT = 2  # of a checkpoint directory; checkpoints/format.py describes it
MANIFEST, PARTIAL, DELETED = "manifest.json", ".partial", ".deleted"
LONGEST = 3_900  # bytes of a directory's path; the paths of files within it are up to 4,096 long
# What the system says of a file that is damaged. Anything else is no damage of the file: this user
# may not read it, or this process has opened too many.
DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.ENXIO}


class CheckpointError(Exception):
    """A checkpoint is damaged or could not be written; the text is one line naming the file."""


class DeletedError(UserError):
    """A directory that was being read has been deleted or replaced by another process."""


@contextlib.contextmanager
def checkpoint_errors(path: Path, problem: str) -> Generator[None, None, None]:
    """A context whose errors become a CheckpointError naming the path, the problem and its cause.

    The cause is the first error in the chain of causes. Its class is named too, unless it is a
    UserError, whose text is for the user already.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        kind = "" if isinstance(cause, UserError) else f"{type(cause).__name__}: "
        raise CheckpointError(f"{path}: {problem}: {kind}{first_line(cause)}") from error


@contextlib.contextmanager
def unless_deleted(folder: Path) -> Generator[None, None, None]:
    """A context that reads a directory which another process may delete or replace meanwhile.

    If that happens, an error within the context is no sign of damage and becomes a DeletedError.
    """
    before = _identity(folder)
    try:
        if before is None:
            raise FileNotFoundError(folder)
        yield
    except Exception as error:
        if before is not None and _identity(folder) == before:
            raise
        raise DeletedError(
            f"{folder}: was deleted while it was being read; a run that is at work keeps more of "
            "its checkpoints with a larger train.keep_last"
        ) from error


def refuse_name(folder: Path) -> None:
    """Raises UserError if no directory of this program can be kept under this path."""
    path = os.fsencode(folder.absolute())
    if len(path) > LONGEST:
        raise UserError(f"{folder}: the whole path has {len(path)} bytes, at most {LONGEST}")
    try:
        path.decode()
    except UnicodeDecodeError:
        raise UserError(f"{folder}: the path is not UTF-8; use another name") from None


@contextlib.contextmanager
def publish(folder: Path) -> Generator[Path, None, None]:
    """A context with an empty directory to fill, which becomes `folder` when the context ends.

    The directory is then sealed and replaces an older one of that name. If the context raises, it
    is deleted.
    """
    new = begin(folder)
    try:
        yield new
        seal(new)
        put_in_place(folder)
    except BaseException:
        discard(folder)
        raise


def unfinished(folder: Path) -> Path:
    """Returns NAME.partial, the name under which a directory is written."""
    return folder.with_name(folder.name + PARTIAL)


def begin(folder: Path) -> Path:
    """Makes the empty directory NAME.partial and returns its path; an older one is deleted."""
    new = unfinished(folder)
    delete(new)
    new.mkdir(parents=True)
    return new


def seal(folder: Path) -> None:
    """Writes the manifest: size and SHA-256 of every file. From then on the directory counts.

    All files are on the disk before the manifest is, and the manifest before this returns.
    """
    paths = sorted(folder.rglob("*"))
    _flush(*paths, folder, folder.parent)
    files = {
        path.relative_to(folder).as_posix(): _fingerprint(path) for path in paths if path.is_file()
    }
    manifest: dict[str, Any] = {"format": FORMAT, "files": files}
    manifest["sha256"] = _digest(manifest)
    replace_file(folder / MANIFEST, json.dumps(manifest, indent=2).encode())


def is_sealed(folder: Path) -> bool:
    """Whether the directory has a manifest; `verify` says whether its files agree with it."""
    return (folder / MANIFEST).is_file()


def put_in_place(folder: Path) -> None:
    """Renames a sealed NAME.partial to NAME; an older directory of that name is deleted."""
    delete(folder)
    unfinished(folder).rename(folder)
    _flush(folder.parent)


def discard(folder: Path) -> None:
    """Deletes NAME.partial as far as the disk lets it, without an error of its own.

    Its caller is handling an error that matters more.
    """
    with contextlib.suppress(OSError):
        delete(unfinished(folder))


def delete(folder: Path) -> None:
    """Deletes a directory, if there is one. It stops counting at once, by being renamed first.

    Of a link to a directory the link is deleted, and not what it points to.
    """
    if os.path.lexists(folder):
        doomed = folder.with_name(folder.name + DELETED)
        remove(doomed)
        folder.rename(doomed)
        _flush(folder.parent)
        remove(doomed)


def remove(path: Path) -> None:
    """Removes a directory or a file, if there is one; of a link, the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def verify(folder: Path, names: Iterable[str] | None = None) -> None:
    """Compares size and SHA-256 of every file, or of the named ones, with the manifest.

    Raises CheckpointError naming the first damaged file, UserError for another format version, and
    OSError naming a file that cannot be read for a reason that lies outside of it.
    """
    path = folder / MANIFEST
    if folder.is_symlink() and not folder.exists():
        raise CheckpointError(f"{folder}: is a link to {folder.readlink()}, which is not there")
    with _damage(path):
        content = path.read_bytes()
    try:
        manifest = json.loads(content)
        if manifest.pop("sha256") != _digest(manifest):
            raise ValueError("it is not what was written")
        if (version := manifest["format"]) != FORMAT:
            raise UserError(f"{folder}: checkpoint format {version!r}; this program reads {FORMAT}")
        files = manifest["files"]
        wanted = {name: dict(files[name]) for name in (files if names is None else names)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: no manifest of format {FORMAT}") from error
    for name, written in wanted.items():
        _verify_file(folder / name, written)


def _verify_file(path: Path, written: dict[str, Any]) -> None:
    """Compares one file with its entry in the manifest; raises CheckpointError if they differ."""
    with _damage(path):
        found = _fingerprint(path)
    if found["size"] != written.get("size"):
        raise CheckpointError(f"{path}: damaged: {found['size']} bytes, was {written.get('size')}")
    if found != written:
        raise CheckpointError(f"{path}: damaged: its content is not what was saved")


@contextlib.contextmanager
def _damage(path: Path) -> Generator[None, None, None]:
    """A context that reads a file; an OSError that means damage becomes a CheckpointError."""
    try:
        with naming(path):
            yield
    except OSError as error:
        if error.errno not in DAMAGE:
            raise
        raise CheckpointError(f"{path}: damaged: {error.strerror}") from error


def _identity(path: Path) -> tuple[int, int] | None:
    """Returns what tells a directory from another one of the same name; None if there is none."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        return status.st_dev, status.st_ino
    return None


def _fingerprint(path: Path) -> dict[str, Any]:
    """Returns a file's entry in the manifest."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def _digest(manifest: dict[str, Any]) -> str:
    """Returns the manifest's own checksum, which tells a damaged manifest from damaged files."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _flush(*paths: Path) -> None:
    """Waits until files, and the lists of names in directories, are on the disk."""
    with ThreadPoolExecutor(16) as pool:  # many requests take a disk little longer than one
        list(pool.map(flush, paths))
