"""Reads the pairs of a split, from whatever kind of source `data.source` names.

A split is a list of sources: pairs of files, slices of the built-in phrases, or splits of a TFDS
dataset. Each of them becomes a `PairSource`; no caller of `open_sources` need know its kind.
"""

import hashlib
import importlib.metadata
import itertools
import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from flaxformer_min.config import DataConfig
from flaxformer_min.data.lines import Errors, opened, read_lines, require_regular
from flaxformer_min.data.pairs import PairSource
from flaxformer_min.errors import UserError

_log = logging.getLogger(__name__)

HASHED_PHRASES = 256  # about so many phrases of a slice are hashed, evenly spread


def read_pairs(config: DataConfig, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Returns all pairs of a split as written, in order.

    `names` is `config.train` or that of another split. Raises UserError as `open_sources` does.
    """
    sources = open_sources(config, names)
    return itertools.chain.from_iterable(source.pairs() for source in sources)


def open_sources(config: DataConfig, names: Sequence[str]) -> list[PairSource]:
    """Opens and checks the sources of a split: files are read to their ends, counted and hashed.

    A TFDS dataset that is not prepared yet is prepared now. Raises UserError if a file is missing,
    two files of a pair differ in their number of lines, or a name is not understood.
    """
    kinds = {"files": _open_files, "phrases": _open_phrases, "tfds": _open_tfds, "hf": _open_hf}
    if config.source_kind not in kinds:  # a config made in Python need not have been validated
        known = "files, phrases, tfds:NAME/CONFIG or hf:NAME:CONFIG"
        raise UserError(f"data.source: {config.source!r} is unknown; use {known}")
    return kinds[config.source_kind](config, names)


def _open_files(config: DataConfig, names: Sequence[str]) -> list[PairSource]:
    if len(names) % 2:
        raise UserError(f"data: source and target files must alternate, got {', '.join(names)}")
    paths = [Path(config.dir) / name for name in names]
    pairs = list(zip(paths[::2], paths[1::2], strict=True))
    for path in paths:
        require_regular(path)
    for pair in pairs:
        _warn_if_swapped(config, *pair)
    return [_open_pair(*pair, config.errors) for pair in pairs]


def _warn_if_swapped(config: DataConfig, source: Path, target: Path) -> None:
    """Warns if the endings of two files are the two languages, the other way round."""
    first, second = config.source_language, config.target_language
    endings = [set(path.name.split(".")[1:]) & {first, second} for path in (source, target)]
    if first != second and endings == [{second}, {first}]:
        _log.warning(
            "%s is given as source and %s as target, but data.source_language is %s and "
            "data.target_language %s: are they swapped?",
            *(source, target, first, second),
        )


def _open_pair(source: Path, target: Path, errors: Errors) -> PairSource:
    (source_size, source_digest), (target_size, target_digest) = _scan(source), _scan(target)
    if source_size != target_size:
        raise UserError(
            f"{source} has {source_size} lines but {target} has {target_size}; "
            "each line needs its translation in the same line of the other file"
        )
    if source_digest == target_digest and source_size:
        _log.warning("%s and %s have the same text: is one a translation?", source, target)

    def pairs() -> Iterator[tuple[str, str]]:
        return zip(read_lines(source, errors), read_lines(target, errors), strict=True)

    return PairSource(f"{source} {target}", source_digest + target_digest, source_size, pairs)


def _scan(path: Path) -> tuple[int, str]:
    """Returns the number of lines of a file, and the SHA-256 of its (unpacked) bytes."""
    digest, newlines, last = hashlib.sha256(), 0, b"\n"
    with opened(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            newlines += chunk.count(b"\n")
            last = chunk[-1:]
    return newlines + (last != b"\n"), digest.hexdigest()


def _open_phrases(config: DataConfig, names: Sequence[str]) -> list[PairSource]:
    return [_open_slice(name, config.source_language, config.target_language) for name in names]


def _open_slice(name: str, *languages: str) -> PairSource:
    from flaxformer_min.data.phrases import pair

    found = re.fullmatch(r"(train|validation|test)\[(\d*):(\d+)\]", name)
    if not found:
        raise UserError(f'data: {name!r} is no slice of the phrases; write "train[:60000]"')
    split, indices = found[1], range(int(found[2] or 0), int(found[3]))

    def render(indices: range) -> Iterator[tuple[str, str]]:
        return (pair(split, index, *languages) for index in indices)

    # Rendering every phrase only to hash it is slow. A sample of the phrases shows whether Babel or
    # the code of the corpus has changed.
    some = list(render(indices[:: max(1, len(indices) // HASHED_PHRASES)]))
    text = json.dumps([name, languages, importlib.metadata.version("babel"), some])
    digest = hashlib.sha256(text.encode()).hexdigest()
    return PairSource(f"phrases {name}", digest, len(indices), lambda: render(indices))


def _open_hf(config: DataConfig, names: Sequence[str]) -> list[PairSource]:
    from flaxformer_min.data.hugging_face import open_splits

    return open_splits(config, names)


def _open_tfds(config: DataConfig, names: Sequence[str]) -> list[PairSource]:
    from flaxformer_min.data.tfds import open_dataset, open_texts  # TFDS takes a second to import

    dataset = open_dataset(config)
    return [open_texts(dataset, config, name) for name in names]
