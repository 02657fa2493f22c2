"""The content of the built-in corpus: categories of values, and Babel's rendering of each.

Every category draws a value for a style, at the resolution at which that style shows it, and
renders any of its values in any of its styles and languages. Counts are kept so that no small
group of texts is drawn often: each held-out text is then a small part of what is held out.
"""

import datetime
import functools
import hashlib
import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar

from babel import Locale, dates, lists, numbers, units

T = TypeVar("T")


class Dice:
    """Draws whole numbers from a hash of `seed`, the same on every machine and Python version."""

    def __init__(self, seed: str) -> None:
        self._bits = int.from_bytes(hashlib.blake2b(seed.encode()).digest(), "big")

    def between(self, first: int, last: int) -> int:
        """Returns a number from first to last, both included.

        A phrase uses up some 60 of the 512 bits.
        """
        self._bits, number = divmod(self._bits, last - first + 1)
        return first + number

    def choice(self, options: Sequence[T]) -> T:
        """Returns one of the options."""
        self._bits, index = divmod(self._bits, len(options))
        return options[index]

    def sample(self, options: Sequence[T], count: int) -> tuple[T, ...]:
        """Returns `count` different options."""
        rest, chosen = list(options), []
        for _ in range(count):
            self._bits, index = divmod(self._bits, len(rest))
            chosen.append(rest.pop(index))
        return tuple(chosen)


class Category(NamedTuple):
    """A kind of phrase: its styles, and the functions that draw a value for a style and render it.

    `draw` gets the source's locale, to leave out names which that language does not tell apart.
    """

    styles: tuple[str, ...]
    draw: Callable[[Dice, str, Locale], Any]
    render: Callable[[Any, str, Locale], str]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Dates and times. A style is one of CLDR's lengths (full, long, medium, short) or skeletons.

_LENGTHS = ("full", "long", "medium", "short")
_Instant = datetime.datetime
_Span = tuple[datetime.datetime, datetime.datetime]


def _day(dice: Dice, later: int = 0) -> _Instant:
    """Draws a day of 2000 to 2099, so that two digits name its year.

    At least `later` more days of these years come after it.
    """
    return _Instant(2000, 1, 1) + datetime.timedelta(days=dice.between(0, 36_524 - later))


def _draw_date(dice: Dice, style: str, source: Locale) -> _Instant:
    if style in _LENGTHS or "d" in style:
        return _day(dice)
    months = range(1, 13, 3) if "Q" in style else range(1, 13)
    return _Instant(dice.between(2000, 2099), dice.choice(months), 1)


def _render_date(day: _Instant, style: str, locale: Locale) -> str:
    if style in _LENGTHS:
        return dates.format_date(day, style, locale)
    return dates.format_skeleton(style, day, locale=locale)


def _draw_time(dice: Dice, style: str, source: Locale) -> _Instant:
    seconds = dice.between(0, 59) if style == "medium" else 0
    return _day(dice) + datetime.timedelta(minutes=dice.between(0, 1439), seconds=seconds)


def _render_time(time: _Instant, style: str, locale: Locale) -> str:
    if style in _LENGTHS:
        return dates.format_time(time, style, locale=locale)
    skeleton = style.replace("H", _hour(locale))
    try:
        return dates.format_skeleton(skeleton, time, locale=locale)
    except ValueError:  # no names for the parts of the day (B), as in Babel 2.19's Sicilian
        return dates.format_skeleton(skeleton.replace("B", ""), time, locale=locale)


def _render_date_time(time: _Instant, style: str, locale: Locale) -> str:
    pattern = str(dates.get_datetime_format(style, locale=locale)).replace("'", "")
    clock = dates.format_time(time, "short", locale=locale)
    return pattern.replace("{0}", clock).replace("{1}", dates.format_date(time, style, locale))


def _draw_interval(dice: Dice, style: str, source: Locale) -> _Span:
    if style == "Hm":
        minute = dice.between(0, 1438)
        start = _Instant(2000, 1, 1) + datetime.timedelta(minutes=minute)
        return start, start + datetime.timedelta(minutes=dice.between(1, 1439 - minute))
    if "d" in style:
        days = dice.between(1, 60)
        start = _day(dice, later=days)
        return start, start + datetime.timedelta(days=days)
    start = _Instant(dice.between(2000, 2098), dice.between(1, 12), 1)
    months = start.month - 1 + dice.between(1, 11)
    return start, _Instant(start.year + months // 12, 1 + months % 12, 1)


def _render_interval(span: _Span, style: str, locale: Locale) -> str:
    try:
        return dates.format_interval(*span, style.replace("H", _hour(locale)), locale=locale)
    except NotImplementedError:  # Babel 2.19 cannot compare parts of the day, as in zh_Hant_HK
        return dates.format_interval(*span, style, locale=locale)


def _hour(locale: Locale) -> str:
    """Returns the letter of the hour in skeletons: h where the locale has AM or PM, else H."""
    return "h" if "a" in locale.time_formats["short"].pattern else "H"


# Amounts. `_SPANS` holds for each span of time its largest count and its seconds in Babel.

_SPANS = {
    "year": (99, 365 * 86_400),
    "month": (11, 30 * 86_400),
    "week": (51, 7 * 86_400),
    "day": (30, 86_400),
    "hour": (23, 3_600),
    "minute": (59, 60),
    "second": (59, 1),
}
_UNITS = _words(
    "length-kilometer length-meter length-centimeter length-millimeter length-mile length-yard "
    "length-foot length-inch length-light-year mass-kilogram mass-gram mass-milligram mass-pound "
    "mass-ounce volume-liter volume-milliliter volume-cubic-meter volume-gallon area-square-meter "
    "area-square-kilometer area-hectare area-acre temperature-celsius temperature-fahrenheit "
    "speed-kilometer-per-hour speed-mile-per-hour speed-meter-per-second power-watt "
    "power-kilowatt energy-joule energy-kilowatt-hour electric-volt digital-megabyte"
)
_PARTS = _words("mass-gram mass-kilogram volume-liter volume-milliliter energy-joule")
_WHOLES = _words("duration-second duration-minute duration-hour duration-day")
_CURRENCIES = _words("USD EUR GBP JPY CNY INR CHF SEK NOK PLN CZK BRL MXN CAD AUD KRW")

_Duration = tuple[tuple[int, str], ...]
_Measure = tuple[Decimal, str, str | None]  # number, unit, and the unit it is counted per
_Money = tuple[Decimal, str]


def _draw_duration(dice: Dice, style: str, source: Locale) -> _Duration:
    chosen = dice.sample(_spans(source), dice.between(2, 3))
    return tuple((dice.between(1, _SPANS[s][0]), s) for s in _SPANS if s in chosen)


def _render_duration(duration: _Duration, style: str, locale: Locale) -> str:
    parts = [units.format_unit(n, f"duration-{s}", style, locale=locale) for n, s in duration]
    return lists.format_list(parts, "standard", locale)


def _draw_relative(dice: Dice, style: str, source: Locale) -> tuple[int, str]:
    direction, span = dice.choice(_directed_spans(source))
    return direction * dice.between(1, 300), span


def _render_relative(value: tuple[int, str], style: str, locale: Locale) -> str:
    count, span = value
    return dates.format_timedelta(
        count * _SPANS[span][1],
        granularity=span,
        threshold=math.inf,  # Babel must not turn it into a larger span
        add_direction=True,
        format=style,
        locale=locale,
    )


def _draw_measure(dice: Dice, style: str, source: Locale) -> _Measure:
    number = Decimal(dice.between(10, 999)) / dice.choice((1, 10))
    return number, *dice.choice(_measures(source))


def _render_measure(measure: _Measure, style: str, locale: Locale) -> str:
    number, unit, per = measure
    if per is None:
        return units.format_unit(number, unit, style, locale=locale)
    text = units.format_compound_unit(
        number, unit, denominator_unit=per, length=style, locale=locale
    )
    assert text is not None
    return text


def _draw_currency(dice: Dice, style: str, source: Locale) -> _Money:
    code = dice.choice(_currencies(source))
    amount = Decimal(dice.between(1, 10 ** dice.between(3, 6) - 1))
    sign = dice.choice((1, 1, 1, -1))
    return sign * amount / 10 ** numbers.get_currency_precision(code), code


def _render_currency(money: _Money, style: str, locale: Locale) -> str:
    return numbers.format_currency(*money, locale=locale, format_type=style)


def _draw_number(dice: Dice, style: str, source: Locale) -> Decimal:
    sign = dice.choice((1, 1, 1, -1))
    if style == "percent":
        return sign * Decimal(dice.between(1, 9_999)) / 10 ** dice.between(2, 4)
    if style == "decimal":
        digits = Decimal(dice.between(1, 10 ** dice.between(3, 6) - 1))
        return sign * digits / 10 ** dice.between(0, 3)
    return sign * Decimal(dice.between(10, 9_999)) * 10 ** dice.choice((2, 5, 8))


def _render_number(number: Decimal, style: str, locale: Locale) -> str:
    if style == "decimal":
        return numbers.format_decimal(number, locale=locale)
    if style == "percent":
        return numbers.format_percent(number, locale=locale, decimal_quantization=False)
    # Four decimals are enough for four digits, whatever powers of ten the locale has names for.
    return numbers.format_compact_decimal(
        number, format_type=style, locale=locale, fraction_digits=4
    )


# Lists of names.

_NAMES = {
    "weekday": tuple(range(7)),
    "month": tuple(range(1, 13)),
    "language": _words("ar cs da de el en es fi fr he hi hu it ja ko nl pl pt ru sv tr uk"),
    "territory": _words(
        "AR AT AU BE BR CA CH CL CN DE DK EG ES FI FR GR HU IE IN IT JP KE MX NL NO PE PL PT SE TR "
        "UA VN"
    ),
}
_List = tuple[tuple[str, Any], ...]


def _draw_list(dice: Dice, style: str, source: Locale) -> _List:
    kind = dice.choice(tuple(_NAMES))
    return dice.sample(_names(source)[kind], dice.between(2, 4))


def _name(item: tuple[str, Any], locale: Locale) -> str:
    kind, key = item
    if kind == "weekday":
        return dates.get_day_names("wide", "stand-alone", locale)[key]
    if kind == "month":
        return dates.get_month_names("wide", "stand-alone", locale)[key]
    return (locale.languages if kind == "language" else locale.territories).get(key, key)


def _render_list(items: _List, style: str, locale: Locale) -> str:
    return lists.format_list([_name(item, locale) for item in items], style, locale)


# The ways to write a text: as CLDR has it, and as a keyboard does.

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


# Names and units that a language tells apart.


def _distinct(options: Iterable[T], texts: Callable[[T], set[str]]) -> tuple[T, ...]:
    """Returns the options in order, without those that share a text with an option before them.

    Texts are the same if they are spelt the same in one way.
    """
    seen: set[str] = set()
    kept = []
    for option in options:
        plain = set(map(plainest, texts(option)))
        if seen.isdisjoint(plain):
            kept.append(option)
        seen |= plain
    return tuple(kept)


_COUNTS = (1, 2, 3, 5, 11, 100)  # together they have every plural form of whole numbers
_WIDTHS = ("long", "short")


def _told_apart(
    category: str, options: Iterable[T], value: Callable[[int, T], Any], locale: Locale
) -> tuple[T, ...]:
    """Returns the options, without those that share a text with an option before them.

    The texts of an option are those of value(count, option), for a few counts, in every style.
    """
    styles, _, render = CATEGORIES[category]
    return _distinct(
        options,
        lambda o: {render(value(n, o), style, locale) for n in _COUNTS for style in styles},
    )


@functools.cache
def _spans(locale: Locale) -> tuple[str, ...]:
    return _told_apart("duration", _SPANS, lambda n, span: ((n, span),), locale)


@functools.cache
def _directed_spans(locale: Locale) -> tuple[tuple[int, str], ...]:
    options = [(direction, span) for span in _SPANS for direction in (1, -1)]
    return _told_apart("relative time", options, lambda n, o: (o[0] * n, o[1]), locale)


@functools.cache
def _measures(locale: Locale) -> tuple[tuple[str, str | None], ...]:
    options: list[tuple[str, str | None]] = [(unit, None) for unit in _UNITS]
    options += [(part, whole) for part in _PARTS for whole in _WHOLES]
    return _told_apart("measure", options, lambda n, option: (Decimal(n), *option), locale)


@functools.cache
def _currencies(locale: Locale) -> tuple[str, ...]:
    return _told_apart("currency", _CURRENCIES, lambda n, code: (Decimal(n), code), locale)


@functools.cache
def _names(locale: Locale) -> dict[str, _List]:
    items = _distinct(
        [(kind, key) for kind, keys in _NAMES.items() for key in keys],
        lambda item: {_name(item, locale)},
    )
    return {kind: tuple(item for item in items if item[0] == kind) for kind in _NAMES}


CATEGORIES = {
    "date": Category(
        (*_LENGTHS, "yMMMEd", "MMMMEd", "MMMEd", "MMMMd", "MMMd", "yMMMM", "yMMM", "yQQQQ", "yQQQ"),
        _draw_date,
        _render_date,
    ),
    "time": Category(("medium", "short", "EHm", "EBhm", "Bhm"), _draw_time, _render_time),
    "date and time": Category(_LENGTHS, _draw_time, _render_date_time),
    "interval": Category(
        ("yMMMd", "MMMd", "yMMMM", "yMMM", "Hm"),
        _draw_interval,
        _render_interval,
    ),
    "duration": Category(_WIDTHS, _draw_duration, _render_duration),
    "relative time": Category(_WIDTHS, _draw_relative, _render_relative),
    "measure": Category(_WIDTHS, _draw_measure, _render_measure),
    "currency": Category(("standard", "accounting", "name"), _draw_currency, _render_currency),
    "number": Category(("decimal", "percent", *_WIDTHS), _draw_number, _render_number),
    "list": Category(("standard", "or"), _draw_list, _render_list),
}
