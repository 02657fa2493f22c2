"""Parallel text: lines of files, and pairs of lines from every kind of source.

A split is a list of sources, each a pair of files, a slice of the built-in phrases or a split of a
TFDS dataset. All kinds meet in `PairSource`; nobody below `open_sources` knows which kind it reads.
"""

import hashlib
import importlib.metadata
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from flaxformer_min.config import DataConfig
from flaxformer_min.data.lines import opened, read_lines
from flaxformer_min.errors import UserError

HASHED_PHRASES = 256  # of a slice, evenly spread


class PairSource(NamedTuple):
    """Pairs of lines, with a name for messages and a hash of all they say."""

    name: str
    digest: str
    size: int  # pairs
    pairs: Callable[[], Iterator[tuple[str, str]]]


def read_pairs(config: DataConfig, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """All pairs of a split as written, in order; `names` is `config.train` or another split's."""
    sources = open_sources(config, names)
    return itertools.chain.from_iterable(source.pairs() for source in sources)


def open_sources(config: DataConfig, names: Sequence[str]) -> list[PairSource]:
    """The sources of a split, checked: files are read wholly, counted and hashed.

    A TFDS dataset is prepared where it is not. Raises UserError where a file is missing, two files
    of a pair differ in their number of lines, or a name is not understood.
    """
    if config.source == "phrases":
        return [_phrases(config, name) for name in names]
    if config.source.startswith("tfds:"):
        return _tfds(config, names)
    if config.source != "files":
        raise UserError(
            f"data.source: {config.source!r} is unknown; use 'files', 'phrases' or 'tfds:NAME'"
        )
    if len(names) % 2:
        raise UserError(f"data: source and target files must alternate, got {', '.join(names)}")
    paths = [Path(config.dir) / name for name in names]
    return [_files(*pair) for pair in zip(paths[::2], paths[1::2], strict=True)]


def _files(source: Path, target: Path) -> PairSource:
    (source_size, source_digest), (target_size, target_digest) = _scan(source), _scan(target)
    if source_size != target_size:
        raise UserError(
            f"{source} has {source_size} lines but {target} has {target_size}; "
            "each line needs its translation in the same line of the other file"
        )

    def pairs() -> Iterator[tuple[str, str]]:
        return zip(read_lines(source), read_lines(target), strict=True)

    return PairSource(f"{source} {target}", source_digest + target_digest, source_size, pairs)


def _phrases(config: DataConfig, name: str) -> PairSource:
    from flaxformer_min.data.phrases import phrase

    found = re.fullmatch(r"(train|validation|test)\[(\d*):(\d+)\]", name)
    if not found:
        raise UserError(f'data: {name!r} is no slice of the phrases; write "train[:60000]"')
    split, indices = found[1], range(int(found[2] or 0), int(found[3]))
    languages = config.source_language, config.target_language

    def render(indices: range) -> Iterator[tuple[str, str]]:
        for index in indices:
            drawn = phrase(split, index, *languages)
            yield drawn.source, drawn.target

    # Rendering every phrase only to hash it is slow; some of them notice changed code or data.
    some = list(render(indices[:: max(1, len(indices) // HASHED_PHRASES)]))
    says = [name, languages, importlib.metadata.version("babel"), some]
    digest = hashlib.sha256(json.dumps(says).encode()).hexdigest()
    return PairSource(f"phrases {name}", digest, len(indices), lambda: render(indices))


def _tfds(config: DataConfig, names: Sequence[str]) -> list[PairSource]:
    from flaxformer_min.data import tfds as tfds_source  # TFDS takes a second to import

    dataset = tfds_source.open_dataset(config)
    return [
        PairSource(f"{config.source} {name}", *tfds_source.open_split(dataset, config, name))
        for name in names
    ]


def _scan(path: Path) -> tuple[int, str]:
    """The number of lines of a file, and the SHA-256 of its (unpacked) bytes."""
    digest, newlines, last = hashlib.sha256(), 0, b"\n"
    with opened(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            newlines += chunk.count(b"\n")
            last = chunk[-1:]
    return newlines + (last != b"\n"), digest.hexdigest()
