"""Checks the texts that callers hand to a Translator."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from flaxformer_min.errors import local_path

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which UTF-8 cannot hold


def checked_texts(texts: Sequence[str], name: str, one: str) -> list[str]:
    """Returns the texts, with U+FFFD in place of lone surrogates.

    Raises TypeError for a bare string, which would be taken letter by letter, for what is no list,
    and for a text that is no string. `name` is what messages call the texts, and `one` is what to
    write for one text.
    """
    if isinstance(texts, str | bytes):
        raise TypeError(f"{name} is one {type(texts).__name__}: write {one} for a single text")
    _refuse_what_is_no_list(texts, name, "strings")
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{name}[{place}] is {shown(text)}: it must be a string")
    return [_LONE_SURROGATE.sub("\ufffd", text) for text in texts]


def checked_prefixes(prefixes: Sequence[str] | None, lines: int) -> list[str] | None:
    """Returns the prefixes as `checked_texts` does; ValueError unless each line has one."""
    if prefixes is None:
        return None
    if len(prefixes := checked_texts(prefixes, "prefixes", "prefixes=[prefix]")) != lines:
        raise ValueError(f"{len(prefixes)} prefixes for {lines} lines: each line needs one, or ''")
    return prefixes


def checked_pairs(pairs: Sequence[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Returns sources and targets as `checked_texts` does; TypeError for what is no pair."""
    if isinstance(pairs, str | bytes):
        raise TypeError("pairs is one string: write [(source, target)] for a single pair")
    _refuse_what_is_no_list(pairs, "pairs", "pairs of strings")
    for place, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or [isinstance(x, str) for x in pair] != [True] * 2:
            wrong = f"pairs[{place}] is {shown(pair)}"
            raise TypeError(f"{wrong}: it must be (source, target), two strings")
    sides = ("sources", 0), ("targets", 1)
    sources, targets = (checked_texts([p[n] for p in pairs], name, "") for name, n in sides)
    return sources, targets


def checked_path(path: str | Path, name: str) -> str:
    """Returns a path as `local_path` does; TypeError for what is none, ValueError naming it."""
    if not isinstance(path, str | Path):
        raise TypeError(f"{name} is {shown(path)}: it must be a path, a string or a Path")
    try:
        return local_path(str(path))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _refuse_what_is_no_list(values: object, name: str, content: str) -> None:
    """Raises TypeError for what has no order or no length: a set, a generator, a dict, a number."""
    if isinstance(values, Mapping) or not hasattr(values, "__getitem__"):
        mend = "; write list(...)" if isinstance(values, Iterable) else ""
        raise TypeError(f"{name} is {shown(values)}: it must be a list of {content}{mend}")


def shown(value: object) -> str:
    """Returns a value and its type, for messages."""
    return f"{value!r:.60} ({type(value).__name__})"
