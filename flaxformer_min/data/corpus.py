"""Pairs of lines to token ids on disk: filtered, counted, memory-mapped, written once.

CACHE/DIGEST/    of text, tokenizer and limits; it has its name once it is complete
  ids            uint16 or int32: source, target, source, target ...
  lengths        int32 [N, 2], of each side with its EOS
  report.json    what was read, kept, dropped and cut
  manifest.json  size and SHA-256 of the three: where they differ, all is written again
"""

import contextlib
import hashlib
import itertools
import json
import logging
import shutil
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from flaxformer_min.config import DataConfig
from flaxformer_min.data.lines import is_blank
from flaxformer_min.data.sources import PairSource, open_sources
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.errors import UserError
from flaxformer_min.system.files import locked
from flaxformer_min.system.sealed import CheckpointError, publish, verify

PAIRS_AT_ONCE = 4096  # bounds memory; SentencePiece is fastest on many lines
LAYOUT = 2  # of the cached files; it is part of their key

_log = logging.getLogger(__name__)


class EncodedCorpus:
    """Token ids of pairs 0 to N-1, memory-mapped; both sides end in EOS.

    `lengths` is int32 [N, 2]: source and target, EOS counted. Resident are 8 bytes a pair.
    """

    def __init__(self, folder: Path, dtype: str) -> None:
        """`folder` as `prepare_split` left it, ids stored as `dtype`."""
        self.lengths = _mapped(folder / "lengths", "int32").reshape(-1, 2)
        self._ids = _mapped(folder / "ids", dtype)
        self._starts = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths.sum(axis=1), out=self._starts[1:])

    def __len__(self) -> int:
        return len(self.lengths)

    def pair(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of one pair, source and target: views of the mapped file."""
        start, end = self._starts[index], self._starts[index + 1]
        middle = start + self.lengths[index, 0]
        return self._ids[start:middle], self._ids[middle:end]

    def copy_rows(self, pairs: np.ndarray, side: int, to: np.ndarray) -> None:
        """Writes one side (0 source, 1 target) of many pairs to the first rows of `to` [B, width].

        What lies behind a row's ids stays as it is.
        """
        starts = self._starts[pairs] + side * self.lengths[pairs, 0]
        columns = np.arange(to.shape[1])
        real = columns < self.lengths[pairs, side][:, None]
        to[: len(pairs)][real] = self._ids[(starts[:, None] + columns)[real]]


def prepare_split(
    config: DataConfig,
    names: Sequence[str],
    tokenizer: Tokenizer,
    cache_dir: str | Path,
    *,
    keep_all: bool = False,
) -> tuple[EncodedCorpus, dict[str, Any]]:
    """Encodes a split, or opens it where `cache_dir` has it from an earlier run, unchanged.

    Training pairs with a blank side, or one longer than `config.max_length`, are dropped. With
    `keep_all` (validation, test) no pair is: a side too long is cut and still ends in EOS.
    The report is plain JSON: a digest of text, tokenizer and limits, the pairs kept, and per source
    what was read, kept, dropped and cut; of each side the longest, the pieces and the share of them
    that is unknown.
    Raises UserError where no pair is left, or the cache cannot be written.
    """
    sources = open_sources(config, names)
    limit = config.max_length
    decides = [LAYOUT, [s.digest for s in sources], tokenizer.sha256, limit, keep_all]
    folder = Path(cache_dir) / hashlib.sha256(json.dumps(decides).encode()).hexdigest()
    with own_cache(folder.parent):
        if not _is_whole(folder):
            _write(folder, sources, tokenizer, limit, keep_all)
        report = json.loads((folder / "report.json").read_bytes())
    for source, counts in zip(sources, report["sources"], strict=True):
        counts["name"] = source.name  # the same text may have been read under another name
    if not report["kept"]:
        raise UserError(_nothing_left(names, report["sources"]))
    corpus = open_split(cache_dir, folder.name, tokenizer)
    return corpus, {"digest": folder.name, **report}


@contextlib.contextmanager
def own_cache(folder: Path) -> Generator[None, None, None]:
    """A context in which a cache is this process's alone; makes it where there is none.

    Raises UserError where it, or what is put there, cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock", wait=True):
            yield
    except OSError as error:
        raise UserError(f"{folder}: cannot keep the token ids here: {error.strerror}") from error


def open_split(cache_dir: str | Path, digest: str, tokenizer: Tokenizer) -> EncodedCorpus:
    """A split that `prepare_split` encoded, by the digest in its report; raises OSError."""
    return EncodedCorpus(Path(cache_dir) / digest, _dtype(tokenizer))


def _is_whole(folder: Path) -> bool:
    """Whether a split is there as it was written; a damaged one is deleted, with a warning."""
    if not folder.exists():
        return False
    try:
        verify(folder)
        return True
    except (CheckpointError, UserError) as error:
        _log.warning("%s; the corpus is encoded again", error)
        shutil.rmtree(folder)
        return False


def _write(
    folder: Path, sources: list[PairSource], tokenizer: Tokenizer, limit: int, keep_all: bool
) -> None:
    """Writes a split; a kill or an error leaves nothing under its name."""
    for killed in folder.parent.glob("*.partial"):  # nobody else writes: this process has the lock
        if killed.is_dir():  # a tokenizer of the same cache is a file
            shutil.rmtree(killed)
    with publish(folder) as new:
        with open(new / "ids", "wb") as ids, open(new / "lengths", "wb") as lengths:
            reports = [
                _write_source(source, ids, lengths, tokenizer, limit, keep_all)
                for source in sources
            ]
        kept = sum(report["kept"] for report in reports)
        (new / "report.json").write_text(json.dumps({"kept": kept, "sources": reports}))


def _write_source(
    source: PairSource,
    ids_file: BinaryIO,
    lengths_file: BinaryIO,
    tokenizer: Tokenizer,
    limit: int,
    keep_all: bool,
) -> dict[str, Any]:
    """Appends one source to both files; returns what became of it."""
    report, pieces, unknown = _new_report(), np.zeros(2, int), np.zeros(2, int)
    for block in _blocks(source):
        sides = _encode(block, tokenizer, limit, keep_all, report)
        lengths = np.fromiter(map(len, sides), np.int32, len(sides))
        flat = itertools.chain.from_iterable(sides)
        ids = np.fromiter(flat, _dtype(tokenizer), lengths.sum())
        pieces += lengths.reshape(-1, 2).sum(axis=0)
        side = np.repeat(np.arange(len(sides)) % 2, lengths)
        unknown += np.bincount(side[ids == tokenizer.unk_id], minlength=2)
        ids_file.write(ids.tobytes())
        lengths_file.write(lengths.tobytes())
    report["pieces"] = pieces.tolist()
    report["unknown_piece_rate"] = (unknown / np.maximum(pieces, 1)).tolist()
    return report


def _new_report() -> dict[str, Any]:
    return {
        "read": 0,  # pairs
        "kept": 0,
        "dropped": {"blank": 0, "too_long": 0},
        "cut": 0,  # kept, but not whole
        "longest": [0, 0],  # source and target as read, in tokens with EOS
        "pieces": [0, 0],  # of the kept pairs, EOS counted
        "unknown_piece_rate": [0.0, 0.0],
    }


def _blocks(source: PairSource) -> Iterator[list[tuple[str, str]]]:
    """The pairs in lists, with a progress bar on a terminal and one line elsewhere."""
    terminal = sys.stderr.isatty()
    if not terminal:
        print(f"encoding {source.name}: {source.size} pairs", file=sys.stderr)
    pairs = source.pairs()
    with tqdm(total=source.size, desc=source.name, unit=" pairs", disable=not terminal) as bar:
        while block := list(itertools.islice(pairs, PAIRS_AT_ONCE)):
            yield block
            bar.update(len(block))


def _encode(
    block: list[tuple[str, str]],
    tokenizer: Tokenizer,
    limit: int,
    keep_all: bool,
    report: dict[str, Any],
) -> list[list[int]]:
    """The ids of the pairs that stay, source and target alternately; adds to the report."""
    usable = [pair for pair in block if keep_all or not any(map(is_blank, pair))]
    report["read"] += len(block)
    report["dropped"]["blank"] += len(block) - len(usable)
    sides = tokenizer.encode_batch([line for pair in usable for line in pair])
    kept = []
    for pair in zip(sides[::2], sides[1::2], strict=True):
        report["longest"] = [
            max(old, len(s)) for old, s in zip(report["longest"], pair, strict=True)
        ]
        if max(map(len, pair)) <= limit:
            kept += pair
        elif keep_all:
            kept += [s if len(s) <= limit else [*s[: limit - 1], tokenizer.eos_id] for s in pair]
            report["cut"] += 1
        else:
            report["dropped"]["too_long"] += 1
    report["kept"] += len(kept) // 2
    return kept


def _nothing_left(names: Sequence[str], reports: list[dict[str, Any]]) -> str:
    read = sum(report["read"] for report in reports)
    blank = sum(report["dropped"]["blank"] for report in reports)
    too_long = sum(report["dropped"]["too_long"] for report in reports)
    return (
        f"no pair to use in {', '.join(names) or 'an empty list of files'}: {read} read, "
        f"{blank} with a blank side, {too_long} over data.max_length"
    )


def _dtype(tokenizer: Tokenizer) -> str:
    return "uint16" if tokenizer.vocab_size <= 1 << 16 else "int32"


def _mapped(path: Path, dtype: str) -> np.ndarray:
    return np.memmap(path, dtype, mode="r").view(np.ndarray)
