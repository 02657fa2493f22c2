"""The built-in corpus: phrases of Unicode CLDR, rendered by Babel in two languages.

Phrase `index` of a split is drawn from a hash of (split, index): a value (a date, an amount, a
list of countries) is rendered in one of its category's styles in the source language, and again
in the target language. The corpus needs no file, no network and no clock, and it has no end.

*The target is a function of the source.* Two values never give the same source text unless they
differ only in what neither text shows: values are drawn at the resolution at which they are
shown, and names which the source language does not tell apart are left out. A text that several
styles share ("May 3, 2026" is both the long and the medium date) is translated in the first.

*A source is written in every way.* CLDR writes spaces and marks that no keyboard has, as U+2009
around a dash and U+202F before AM. `spellings` has the source as CLDR writes it and as it is typed;
each pair of the corpus has one of them, drawn. The target is always as CLDR writes it.

*No held-out source occurs in training.* The source text alone, however it is spelt, decides which
split it belongs to (`split_of`); candidates are drawn until one belongs to the split asked for.
"""

import functools
import hashlib
from typing import Any, NamedTuple

from babel import Locale, UnknownLocaleError, localedata

from flaxformer_min.data.cldr import CATEGORIES, Category, Dice, plainest, spellings
from flaxformer_min.errors import UserError, nearest

SPLITS = ("train", "validation", "test")
_HELD_OUT_SHARE = 64  # one source text in 64 is a test source, another one a validation source


class Phrase(NamedTuple):
    """One pair of the corpus, and the name of its category (a key of CATEGORIES)."""

    source: str
    target: str
    category: str


def split_of(source: str) -> str:
    """Returns the split that a source text belongs to, in every language and spelling."""
    digest = hashlib.blake2b(plainest(source).encode(), digest_size=8).digest()
    held_out = {0: "validation", 1: "test"}
    return held_out.get(int.from_bytes(digest, "big") % _HELD_OUT_SHARE, "train")


def phrase(split: str, index: int, source_language: str, target_language: str) -> Phrase:
    """Returns phrase `index` (from 0, without end) of a split, in any two locales that Babel has.

    Categories take turns, so that any run of indices has equally many of each. The source does not
    depend on the target language. Raises UserError if the split or a locale is not known.
    """
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r}: the built-in corpus has {', '.join(SPLITS)}")
    source_locale, target_locale = _locale(source_language), _locale(target_language)
    name = tuple(CATEGORIES)[index % len(CATEGORIES)]
    category = CATEGORIES[name]
    drawn, value, source = _draw(category, split, index, source_locale)
    style = next(
        style
        for style in category.styles
        if style == drawn
        or plainest(category.render(value, style, source_locale)) == plainest(source)
    )
    return Phrase(source, category.render(value, style, target_locale), name)


def pair(split: str, index: int, source_language: str, target_language: str) -> tuple[str, str]:
    """Returns source and target of a phrase, as the corpus has them: in one of its spellings."""
    source, target, _ = phrase(split, index, source_language, target_language)
    return Dice(f"{split} {index} spelling").choice(spellings(source)), target


def _draw(category: Category, split: str, index: int, source: Locale) -> tuple[str, Any, str]:
    """Draws until a text belongs to the split; returns its style, value and source text."""
    attempt = 0
    while True:
        dice = Dice(f"{split} {index} {attempt}")
        style = dice.choice(category.styles)
        value = category.draw(dice, style, source)
        text = category.render(value, style, source)
        if split_of(text) == split:
            return style, value, text
        attempt += 1


@functools.cache
def _locale(name: str) -> Locale:
    """Returns Babel's locale of a name such as "de", "pt_BR" or "zh-Hant".

    Raises UserError if there is none.
    """
    try:
        return Locale.parse(name.replace("-", "_"))
    except (UnknownLocaleError, ValueError):
        locale = nearest(name, localedata.locale_identifiers())
        raise UserError(f"unknown locale {name!r}: did you mean {locale!r}?") from None
