"""When a directory counts, and whether its bytes are what was written.

    NAME           whole; a file of it that is missing or changed is damage
    NAME.partial   being written; with a manifest in it, which is written last, it is whole as well
    NAME.deleted   on its way out, whatever is in it

A name changes in one step of the file system, so a kill at any moment leaves one of these.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flaxformer_min.errors import UserError

FORMAT = 2  # of a checkpoint directory; described in checkpoint_directory.py
MANIFEST, PARTIAL, DELETED = "manifest.json", ".partial", ".deleted"


class CheckpointError(Exception):
    """A checkpoint is damaged or could not be written; the text is one line naming the file."""


@contextlib.contextmanager
def reported(path: Path, what: str) -> Generator[None, None, None]:
    """Any error within becomes a CheckpointError that names the path and the first cause."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = f"{type(cause).__name__}: {cause}".splitlines()[0]
        raise CheckpointError(f"{path}: {what}: {reason}") from error


def partial(folder: Path) -> Path:
    """The name under which a directory is written."""
    return folder.with_name(folder.name + PARTIAL)


def seal(folder: Path) -> None:
    """Writes the manifest: size and SHA-256 of every file; the directory counts from then on.

    Everything is flushed to the disk before the manifest is, and the manifest before returning.
    """
    paths = sorted(folder.rglob("*"))
    _flush(*paths, folder, folder.parent)
    files = {
        path.relative_to(folder).as_posix(): _fingerprint(path) for path in paths if path.is_file()
    }
    manifest: dict[str, Any] = {"format": FORMAT, "files": files}
    manifest["sha256"] = _digest(manifest)
    unfinished = folder / (MANIFEST + PARTIAL)
    unfinished.write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    _flush(unfinished)
    unfinished.replace(folder / MANIFEST)
    _flush(folder)


def is_sealed(folder: Path) -> bool:
    """Whether the directory has a manifest; what the manifest says is for `verify`."""
    return (folder / MANIFEST).is_file()


def put_in_place(folder: Path) -> None:
    """Gives a sealed partial directory its name; the one that had the name is deleted."""
    delete(folder)
    partial(folder).rename(folder)
    _flush(folder.parent)


def delete(folder: Path) -> None:
    """Removes a directory, if it is there; the first step makes it count for nothing."""
    if folder.exists():
        doomed = folder.with_name(folder.name + DELETED)
        if doomed.exists():
            shutil.rmtree(doomed)
        folder.rename(doomed)
        _flush(folder.parent)
        shutil.rmtree(doomed)


def verify(folder: Path, names: Iterable[str] | None = None) -> None:
    """Compares size and SHA-256 of every file, or of those named, with the manifest.

    Raises CheckpointError naming the first damaged file, UserError for another format version.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        if manifest.pop("sha256") != _digest(manifest):
            raise ValueError("it is not what was written")
        if (version := manifest["format"]) != FORMAT:
            raise UserError(f"{folder}: checkpoint format {version!r}; this program reads {FORMAT}")
        files = manifest["files"]
        wanted = {name: dict(files[name]) for name in (files if names is None else names)}
    except OSError as error:
        raise CheckpointError(f"{path}: damaged: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: no manifest of format {FORMAT}") from error
    for name, written in wanted.items():
        _verify_file(folder / name, written)


def _verify_file(path: Path, written: dict[str, Any]) -> None:
    try:
        found = _fingerprint(path)
    except OSError as error:
        raise CheckpointError(f"{path}: damaged: {error.strerror}") from error
    if found["size"] != written.get("size"):
        raise CheckpointError(f"{path}: damaged: {found['size']} bytes, was {written.get('size')}")
    if found != written:
        raise CheckpointError(f"{path}: damaged: its content is not what was saved")


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def _digest(manifest: dict[str, Any]) -> str:
    """Of all else in a manifest, whatever its format: damage to it is not laid to other files."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _flush(*paths: Path) -> None:
    """Waits until files, and the entries of directories, are on the disk."""
    with ThreadPoolExecutor(16) as pool:  # a disk answers many requests in little more than one
        list(pool.map(_flush_one, paths))


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
