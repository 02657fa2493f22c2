"""Folders in which programs keep, for one user, what they can make again."""

import logging
import os
from pathlib import Path

_log = logging.getLogger(__name__)


def own_folder(name: str, content: str) -> Path | None:
    """Makes and returns ~/.cache/flaxformer_min/NAME, or that below XDG_CACHE_HOME.

    Returns None where nothing can be written, and where anybody else can write; a warning then says
    that `content`, such as "compiled programs", is not kept there.
    """
    try:
        folder = _made(name)
    except (OSError, RuntimeError):  # read-only, full, or a user without a home
        return None
    private = all([_is_private(path, content) for path in (folder.parent, folder)])
    return folder if private and os.access(folder, os.W_OK) else None


def _made(name: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = base if base.is_absolute() else Path.home() / ".cache"
    folder = base / "flaxformer_min" / name
    base.mkdir(parents=True, exist_ok=True)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
    return folder


def _is_private(folder: Path, content: str) -> bool:
    """Whether nobody else can write to a folder; warns if somebody can."""
    status = folder.stat()
    private = status.st_uid == os.getuid() and not status.st_mode & 0o022
    if not private:
        _log.warning("%s: others can write to it, so %s are not kept there", folder, content)
    return private
