"""Checks the texts that callers hand to a Translator."""

import re
from collections.abc import Iterable

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which UTF-8 cannot hold


def checked_texts(texts: Iterable[str], name: str) -> list[str]:
    """Returns the texts, with U+FFFD in place of lone surrogates.

    Raises TypeError for a bare string, which would be taken letter by letter, and for a text that
    is no string. `name` is what messages call the texts.
    """
    if isinstance(texts, str | bytes):
        raise TypeError(f"{name} is one {type(texts).__name__}: write [text] for a single text")
    if not isinstance(texts, Iterable):
        raise TypeError(f"{name} is {_shown(texts)}: it must be strings, such as a list of them")
    texts = list(texts)
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{name}[{place}] is {_shown(text)}: it must be a string")
    return [_LONE_SURROGATE.sub("\ufffd", text) for text in texts]


def checked_prefixes(prefixes: Iterable[str] | None, lines: int) -> list[str] | None:
    """Returns the prefixes as `checked_texts` does; ValueError unless each line has one."""
    if prefixes is None:
        return None
    if len(prefixes := checked_texts(prefixes, "prefixes")) != lines:
        raise ValueError(f"{len(prefixes)} prefixes for {lines} lines: each line needs one, or ''")
    return prefixes


def checked_pairs(pairs: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Returns sources and targets as `checked_texts` does; TypeError for what is no pair."""
    if isinstance(pairs, str | bytes):
        raise TypeError("pairs is one string: write [(source, target)] for a single pair")
    pairs = list(pairs)
    for place, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or [isinstance(x, str) for x in pair] != [True] * 2:
            wrong = f"pairs[{place}] is {_shown(pair)}"
            raise TypeError(f"{wrong}: it must be (source, target), two strings")
    sides = ("sources", 0), ("targets", 1)
    sources, targets = (checked_texts([p[n] for p in pairs], name) for name, n in sides)
    return sources, targets


def _shown(value: object) -> str:
    return f"{value!r:.60} ({type(value).__name__})"
