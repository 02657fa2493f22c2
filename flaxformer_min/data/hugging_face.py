"""Reads translation datasets of Hugging Face, from the hub's cache or from a folder of Parquet.

`data.source` is hf:NAME, hf:NAME:CONFIG or hf:FOLDER, and a split is written as the library
`datasets` writes it, such as "train" or "train[:1%]". The texts are in a column `translation` that
holds a record with the two languages, or in two columns named like the languages.
"""

import contextlib
import hashlib
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flaxformer_min.config import DataConfig
from flaxformer_min.data.pairs import PairSource, one_line
from flaxformer_min.errors import UserError

AT_ONCE = 1024  # examples
HASHED_EXAMPLES = 4096  # about so many are hashed, evenly spread


def open_splits(config: DataConfig, names: Sequence[str]) -> list[PairSource]:
    """Opens splits or slices of the dataset that `data.source` names.

    The library `datasets` looks for it in a folder, in its cache and, unless HF_HUB_OFFLINE is 1,
    on the hub; `data.dir` is the cache, and the default "." the library's own.

    Raises:
        UserError: `datasets` is not installed, there is no such dataset, config or split, or it has
            no text in one of the languages.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"data.source is {config.source!r}: that needs pip install 'flaxformer_min[hf]'"
        ) from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return [_open(datasets, config, name) for name in names]


def _open(datasets: Any, config: DataConfig, name: str) -> PairSource:
    path, _, subset = config.source.removeprefix("hf:").partition(":")
    cache = None if config.dir == "." else config.dir
    path = str(Path(path).resolve()) if Path(path).is_dir() else path
    try:
        with contextlib.redirect_stdout(sys.stderr):
            rows = datasets.load_dataset(path, subset or None, split=name, cache_dir=cache)
    except Exception as error:  # the network, the disk, the hub, the files of a dataset
        text = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        raise UserError(
            f"{config.source}, split {name!r}: cannot be read ({text}); give a dataset of the hub, "
            "one in the cache, or a folder of Parquet files, and a split such as 'train[:1%]'"
        ) from error
    if not len(rows):
        raise UserError(f"{config.source}: {name!r} names no example")
    columns = _columns(rows, config)

    def pairs(rows: Any = rows) -> Iterator[tuple[str, str]]:
        for first in range(0, len(rows), AT_ONCE):
            examples = rows[first : first + AT_ONCE]
            for number, pair in enumerate(_texts(examples, columns), start=first + 1):
                if not all(isinstance(text, str) for text in pair):
                    raise UserError(f"{config.source} {name}, example {number}: has no text")
                yield one_line(pair[0]), one_line(pair[1])

    some = list(pairs(rows.select(range(0, len(rows), max(1, len(rows) // HASHED_EXAMPLES)))))
    text = json.dumps([columns, len(rows), some])
    return PairSource(
        f"{config.source} {name}", hashlib.sha256(text.encode()).hexdigest(), len(rows), pairs
    )


def _columns(rows: Any, config: DataConfig) -> tuple[str | None, str, str]:
    """Returns the column of records, or None, and the names of source and target in it.

    Raises UserError naming what is there instead.
    """
    languages = config.source_language, config.target_language
    nested = rows.features.get("translation")
    there = getattr(nested, "languages", None) or (nested if isinstance(nested, dict) else None)
    outer = None if there is None else "translation"
    there = list(rows.features if there is None else there)
    for side, language in zip(("source", "target"), languages, strict=True):
        if language not in there:
            raise UserError(
                f"data.{side}_language is {language!r}, but {config.source} has "
                f"{', '.join(map(str, there))}: set it to one of these"
            )
    return outer, *languages


def _texts(examples: dict[str, list], columns: tuple[str | None, str, str]) -> Iterator[tuple]:
    """Yields source and target of examples, which are given column by column."""
    outer, source, target = columns
    if outer is None:
        return zip(examples[source], examples[target], strict=True)
    return ((row[source], row[target]) for row in examples[outer])
