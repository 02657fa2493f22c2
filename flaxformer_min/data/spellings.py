"""The ways to write a text of the built-in corpus: as CLDR has it, and as a keyboard does."""

import unicodedata

_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")
_DASHES = dict.fromkeys([*range(0x2010, 0x2016), 0x2212], "-")  # hyphens, dashes and the minus
_JOINERS = "\u200c\u200d"  # they cannot be seen, but change how Persian or Hindi letters look


def spellings(text: str) -> tuple[str, ...]:
    """Returns the different ways to write a text, one to three; the first is the text itself.

    The others are as it is typed, with its own dashes and with hyphens for them: every space is
    the space bar's, quotes are straight, and marks of direction, which nobody sees, are left out.
    """
    typed = "".join(map(_typed, text)).translate(_QUOTES)
    return tuple(dict.fromkeys((text, typed, typed.translate(_DASHES))))


def plainest(text: str) -> str:
    """Returns the spelling that all spellings of a text have in common, with hyphens for dashes."""
    return text if text.isascii() else spellings(text)[-1]


def _typed(character: str) -> str:
    """Returns what a keyboard has for a character; it may be nothing."""
    kind = unicodedata.category(character)
    if kind == "Zs":
        return " "
    return "" if kind == "Cf" and character not in _JOINERS else character
