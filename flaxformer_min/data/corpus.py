"""A split encoded once: pairs of lines become token ids on disk, filtered, counted, memory-mapped.

CACHE/DIGEST/    DIGEST is of text, tokenizer and limits; a directory has this name once complete
  ids            uint16 or int32: source of pair 0, target of pair 0, source of pair 1 ...
  lengths        int32 [N, 2]: source and target of each pair, EOS counted
  report.json    how many pairs were read, kept, dropped and cut
  manifest.json  size and SHA-256 of the three files; if a file differs, all are written again
"""

import contextlib
import hashlib
import itertools
import json
import logging
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from flaxformer_min.config import DataConfig
from flaxformer_min.data.lines import is_blank
from flaxformer_min.data.pairs import PairSource
from flaxformer_min.data.sources import open_sources
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.errors import UserError
from flaxformer_min.system.files import locked
from flaxformer_min.system.meter import Meter, say
from flaxformer_min.system.sealed import CheckpointError, publish, remove, verify

PAIRS_AT_ONCE = 4096  # a list bounds the memory; SentencePiece is fastest on many lines
LAYOUT = 2  # version of these files; it is part of DIGEST
# Shares above which a warning says so.
MUCH_LOST = 0.1  # of the pairs: dropped, or cut
MUCH_UNKNOWN = 0.01  # of the pieces of a side

_log = logging.getLogger(__name__)


class EncodedCorpus:
    """Token ids of pairs 0 to N-1, memory-mapped; both sides end in EOS.

    `lengths` is int32 [N, 2]: source and target, EOS counted. Only 8 bytes a pair are in memory.
    """

    def __init__(self, folder: Path, dtype: str) -> None:
        """Opens a directory that `prepare_split` wrote, with ids stored as `dtype`."""
        self.lengths = lengths_in(folder)
        self._ids = _mapped(folder / "ids", dtype)
        self._starts = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths.sum(axis=1), out=self._starts[1:])

    def __len__(self) -> int:
        return len(self.lengths)

    def copy_rows(self, pairs: np.ndarray, side: int, to: np.ndarray) -> None:
        """Writes the ids of many pairs to the first rows of `to` [B, width], a row for each pair.

        `side` is 0 for the source, 1 for the target. The rest of a row after its ids, and the rows
        after the pairs, stay as they are.
        """
        starts = self._starts[pairs] + side * self.lengths[pairs, 0]
        columns = np.arange(to.shape[1])
        is_id = columns < self.lengths[pairs, side][:, None]  # [pairs, width]
        to[: len(pairs)][is_id] = self._ids[(starts[:, None] + columns)[is_id]]


def prepare_split(
    config: DataConfig,
    names: Sequence[str],
    tokenizer: Tokenizer,
    cache_dir: str | Path,
    *,
    keep_all: bool = False,
) -> tuple[EncodedCorpus, dict[str, Any]]:
    """Encodes a split, or opens it if `cache_dir` has it, undamaged, from an earlier run.

    Training pairs with a blank side, or with one longer than `config.max_length`, are dropped. With
    `keep_all` (validation, test) no pair is dropped: a side too long is cut and still ends in EOS.

    Returns the corpus and a report made of plain JSON: the DIGEST, the number of pairs kept, and
    the counts of `_new_report` for each source, which are told on the terminal too.
    Raises UserError if no pair is left, or the cache cannot be written.
    """
    sources = open_sources(config, names)
    limit = config.max_length
    key = json.dumps([LAYOUT, [s.digest for s in sources], tokenizer.sha256, limit, keep_all])
    folder = Path(cache_dir) / hashlib.sha256(key.encode()).hexdigest()
    with own_entry(folder):
        if not _is_whole(folder):
            _write(folder, sources, tokenizer, limit, keep_all)
        report = json.loads((folder / "report.json").read_bytes())
    for source, counts in zip(sources, report["sources"], strict=True):
        counts["name"] = source.name  # the same text may have been read under another name
        counts["digest"] = source.digest
    if not report["kept"]:
        raise UserError(_nothing_left(names, report["sources"]))
    for counts in report["sources"]:
        _tell(counts, limit)
    corpus = open_split(cache_dir, folder.name, tokenizer)
    return corpus, {"digest": folder.name, **report}


@contextlib.contextmanager
def own_entry(path: Path) -> Generator[None, None, None]:
    """A context in which only this process uses an entry of a cache, which is made if missing.

    Several runs may share the cache: those that need the same entry wait for one another. Raises
    UserError if the cache, or a file within it, cannot be written.
    """
    cache = path.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(_lock_of(path), wait=True):
            yield
    except OSError as error:
        raise UserError(f"{cache}: cannot keep the token ids here: {error.strerror}") from error


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def open_split(cache_dir: str | Path, digest: str, tokenizer: Tokenizer) -> EncodedCorpus:
    """Opens a split that `prepare_split` encoded, by the digest in its report.

    Raises OSError if its files cannot be opened.
    """
    return EncodedCorpus(Path(cache_dir) / digest, _dtype(tokenizer))


def lengths_in(folder: Path) -> np.ndarray:
    """Returns the lengths [N, 2] of the pairs of a split that `prepare_split` encoded there.

    Raises OSError or ValueError if there is none.
    """
    return _mapped(folder / "lengths", "int32").reshape(-1, 2)


def _is_whole(folder: Path) -> bool:
    """Whether a split is there and undamaged; a damaged one is deleted, with a warning."""
    if not folder.exists():
        return False
    try:
        verify(folder)
        return True
    except (CheckpointError, UserError) as error:
        _log.warning("%s; the corpus is encoded again", error)
        remove(folder)
        return False


def _write(
    folder: Path, sources: list[PairSource], tokenizer: Tokenizer, limit: int, keep_all: bool
) -> None:
    """Writes a split; a kill or an error leaves nothing under its name."""
    for killed in folder.parent.glob("*.partial"):
        _remove_unless_at_work(killed)
    with publish(folder) as new:
        with open(new / "ids", "wb") as ids, open(new / "lengths", "wb") as lengths:
            writer = _Writer(ids, lengths, tokenizer, limit, keep_all)
            reports = [writer.write(source) for source in sources]
        kept = sum(report["kept"] for report in reports)
        (new / "report.json").write_text(json.dumps({"kept": kept, "sources": reports}))


def _remove_unless_at_work(partial: Path) -> None:
    """Removes a split that a kill left half written; one that is being written has its lock."""
    if partial.is_dir():  # a tokenizer of the same cache is a file
        with (
            contextlib.suppress(BlockingIOError),
            locked(_lock_of(partial.with_suffix("")), wait=False),
        ):
            remove(partial)


class _Writer(NamedTuple):
    """The open files of a split, and the settings by which its pairs are encoded."""

    ids: BinaryIO
    lengths: BinaryIO
    tokenizer: Tokenizer
    limit: int  # tokens of a side, EOS counted
    keep_all: bool

    def write(self, source: PairSource) -> dict[str, Any]:
        """Appends the pairs of one source to both files; returns the report about them."""
        report, pieces, unknown = _new_report(), np.zeros(2, int), np.zeros(2, int)
        for pairs in _batches(source):
            sides = self._encode(pairs, report)
            lengths = np.fromiter(map(len, sides), np.int32, len(sides))
            flat = itertools.chain.from_iterable(sides)
            ids = np.fromiter(flat, _dtype(self.tokenizer), lengths.sum())
            pieces += lengths.reshape(-1, 2).sum(axis=0)
            side_of_id = np.repeat(np.arange(len(sides)) % 2, lengths)
            unknown += np.bincount(side_of_id[ids == self.tokenizer.unk_id], minlength=2)
            self.ids.write(ids.tobytes())
            self.lengths.write(lengths.tobytes())
        report["pieces"] = pieces.tolist()
        report["unknown_piece_rate"] = (unknown / np.maximum(pieces, 1)).tolist()
        return report

    def _encode(self, pairs: list[tuple[str, str]], report: dict[str, Any]) -> list[list[int]]:
        """Returns the ids of the pairs that are kept, source and target alternately.

        It counts the pairs in `report`.
        """
        usable = [pair for pair in pairs if self.keep_all or not any(map(is_blank, pair))]
        report["read"] += len(pairs)
        report["dropped"]["blank"] += len(pairs) - len(usable)
        sources = self.tokenizer.encode_batch([source for source, _ in usable], "source")
        targets = self.tokenizer.encode_batch([target for _, target in usable], "target")
        kept = []
        for pair in zip(sources, targets, strict=True):
            report["longest"] = list(map(max, report["longest"], map(len, pair)))
            if max(map(len, pair)) <= self.limit:
                kept += pair
            elif self.keep_all:
                kept += map(self._cut, pair)
                report["cut"] += 1
            else:
                report["dropped"]["too_long"] += 1
        report["kept"] += len(kept) // 2
        return kept

    def _cut(self, ids: list[int]) -> list[int]:
        """Returns the first ids of a side, up to the limit; the last one is EOS."""
        return ids if len(ids) <= self.limit else [*ids[: self.limit - 1], self.tokenizer.eos_id]


def _new_report() -> dict[str, Any]:
    return {
        "read": 0,  # pairs
        "kept": 0,
        "dropped": {"blank": 0, "too_long": 0},
        "cut": 0,  # pairs that were kept, but not whole
        "longest": [0, 0],  # source and target as read, in tokens with EOS
        "pieces": [0, 0],  # source and target of the kept pairs, EOS counted
        "unknown_piece_rate": [0.0, 0.0],  # share of these pieces that are unk
    }


def _batches(source: PairSource) -> Iterator[list[tuple[str, str]]]:
    """Yields the pairs in lists and shows how far it is."""
    pairs = source.pairs()
    with Meter(f"encoding {source.name}", source.size, "pairs") as meter:
        while batch := list(itertools.islice(pairs, PAIRS_AT_ONCE)):
            yield batch
            meter.update(len(batch))


def _tell(counts: dict[str, Any], limit: int) -> None:
    """Prints what became of the pairs of a source, and warns where much is lost or unknown."""
    name, read, cut = counts["name"], max(counts["read"], 1), counts["cut"]
    blank, too_long = counts["dropped"]["blank"], counts["dropped"]["too_long"]
    rates = " and ".join(f"{rate:.2%}" for rate in counts["unknown_piece_rate"])
    say(
        f"{name}: {counts['kept']} of {counts['read']} pairs kept, {blank} dropped for a blank "
        f"side and {too_long} over data.max_length ({limit}), {cut} cut to it; "
        f"of source and target pieces {rates} unknown"
    )
    if (lost := (blank + too_long + cut) / read) > MUCH_LOST:
        longest = " and ".join(map(str, counts["longest"]))
        _log.warning(
            "%s: %.0f%% of the pairs were dropped or cut; the longest sides have %s tokens, and "
            "data.max_length is %d",
            *(name, 100 * lost, longest, limit),
        )
    if max(counts["unknown_piece_rate"]) > MUCH_UNKNOWN:
        _log.warning(
            "%s: %s of the pieces are unknown to the tokenizer; data.byte_fallback or a tokenizer "
            "of this text would keep them",
            *(name, rates),
        )


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
