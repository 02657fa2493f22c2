"""The manifest that makes a directory count: size and SHA-256 of every file, written last."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flaxformer_min.errors import UserError

FORMAT = 1  # of a checkpoint directory; described in checkpoint.py
MANIFEST = "manifest.json"


class CheckpointError(Exception):
    """A checkpoint is damaged or could not be written; the text is one line naming the file."""


def seal(folder: Path) -> None:
    """Writes the manifest of what the directory holds; the directory counts when this returns.

    Everything is flushed to the disk before the manifest is, and the manifest before returning.
    """
    paths = sorted(folder.rglob("*"))
    _flush(*paths, folder, folder.parent)
    files = {
        path.relative_to(folder).as_posix(): _fingerprint(path) for path in paths if path.is_file()
    }
    partial = folder / f"{MANIFEST}.partial"
    manifest = {"format": FORMAT, "files": files, "sha256": _digest(files)}
    partial.write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    _flush(partial)
    partial.replace(folder / MANIFEST)
    _flush(folder)


def is_sealed(folder: Path) -> bool:
    """Whether the directory has a manifest; what the manifest says is for `verify`."""
    return (folder / MANIFEST).is_file()


def delete(folder: Path) -> None:
    """Removes a directory, its manifest first: wherever this is interrupted, no half counts."""
    if folder.exists():
        (folder / MANIFEST).unlink(missing_ok=True)
        _flush(folder)
        shutil.rmtree(folder)


def verify(folder: Path, names: Iterable[str] | None = None) -> None:
    """Compares size and SHA-256 of every file, or of those named, with the manifest.

    Raises CheckpointError naming the first damaged file, UserError for another format version.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        if (version := manifest["format"]) != FORMAT:
            raise UserError(f"{folder}: checkpoint format {version!r}; this program reads {FORMAT}")
        files = manifest["files"]
        if manifest["sha256"] != _digest(files):
            raise ValueError("its list of files is not what was written")
        wanted = {name: files[name] for name in (files if names is None else names)}
    except OSError as error:
        raise CheckpointError(f"{path}: damaged: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: not a manifest") from error
    for name, written in wanted.items():
        _verify_file(folder / name, written)


def _verify_file(path: Path, written: Any) -> None:
    try:
        found = _fingerprint(path)
    except OSError as error:
        raise CheckpointError(f"{path}: damaged: {error.strerror}") from error
    if found["size"] != written["size"]:
        raise CheckpointError(f"{path}: damaged: {found['size']} bytes, was {written['size']}")
    if found != written:
        raise CheckpointError(f"{path}: damaged: its content is not what was saved")


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def _digest(files: dict[str, Any]) -> str:
    """Of the manifest's own list, so that damage to it is not laid to the files it names."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


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
