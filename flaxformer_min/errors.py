"""The user's mistakes: the exception for them, and helpers for its text."""

import difflib
import os
import re
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in a file, a flag or a config.

    Its text is one line that names the place and says how to mend it. The command line prints it
    without a traceback and exits with status 2.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known name that a misspelt `name` most likely stands for.

    Names are compared whole, by what follows their last dot (so that "dropout" finds
    "model.dropout") and by their letters in alphabetical order (so that "en-de" finds "de-en").
    `known` must not be empty.
    """

    def likeness(other: str) -> float:
        whole = _ratio(name, other)
        last_part = _ratio(name.split(".")[-1], other.split(".")[-1])
        return whole + last_part + _ratio(sorted(name), sorted(other))

    return max(known, key=likeness)


def local_path(text: str) -> str:
    """Returns a path that the user gave, with the home folder in place of `~`.

    Raises ValueError if it is empty, a URL, longer than the system's names can be, or begins with
    `~` and the name of nobody.
    """
    if not text:
        raise ValueError("it is empty; give a path")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise ValueError(
            f"{text} is a URL; give a path on this machine: mount the place or copy it"
        )
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ValueError(f"{text}: there is no such user; a file of that name is ./{text}")
    if "\0" in path or max(map(len, os.fsencode(path).split(b"/"))) > 255 or len(path) > 4000:
        raise ValueError(f"{path!r:.80} cannot be the name of a file; give a shorter path")
    return path


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or a device had too little memory; for JAX this is known by the text."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def _ratio(one: str | list[str], other: str | list[str]) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or the name of its class if it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0]
