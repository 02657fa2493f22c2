"""Pairs of lines: the one form in which every kind of parallel text is read."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple


class PairSource(NamedTuple):
    """Parallel text that can be read any number of times, always the same pairs in the same order.

    `name` stands in messages. `digest` is a hash of the text: another digest means other pairs.
    """

    name: str
    digest: str
    size: int  # pairs
    pairs: Callable[[], Iterator[tuple[str, str]]]  # source and target line of each pair


def one_line(text: str) -> str:
    """Returns a text as one line: a line break at its end is dropped, any other becomes a space."""
    return re.sub("\r?\n", " ", text.removesuffix("\n").removesuffix("\r"))
