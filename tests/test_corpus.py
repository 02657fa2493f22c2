"""Pairs on disk are the pairs read, whole and aligned; what is missing is counted."""

import dataclasses
import errno
import functools
import gc
import itertools
import json
import re
import resource
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from flaxformer_min.config import DataConfig
from flaxformer_min.data import corpus as corpus_room
from flaxformer_min.data.batching import BatchPlan
from flaxformer_min.data.corpus import EncodedCorpus, prepare_split
from flaxformer_min.data.lines import is_blank
from flaxformer_min.data.sources import read_pairs
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.data.tokenizer_training import train_tokenizer
from flaxformer_min.errors import UserError

NAMES = ("train.en", "train.de")
ENGLISH = ["the", "small", "dog", "eats", "a", "red", "apple"]
GERMAN = ["der", "kleine", "Hund", "frisst", "einen", "roten", "Apfel"]
CONFIG = DataConfig(
    train=NAMES,
    validation=NAMES,
    source_language="en",
    target_language="de",
    vocab_size=387,  # the largest these words give: each is one piece
    max_length=13,
)
PAIRS = [(" ".join(ENGLISH[: 1 + n % 5]), " ".join(GERMAN[: 1 + n % 7])) for n in range(17)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer((ENGLISH + GERMAN) * 3, CONFIG))


def write(folder: Path, pairs: list[tuple[str, str]], names: tuple[str, str] = NAMES) -> DataConfig:
    """Writes a pair of files; returns the config of their folder."""
    for name, lines in zip(names, zip(*pairs, strict=True), strict=True):
        (folder / name).write_bytes("".join(line + "\n" for line in lines).encode())
    return dataclasses.replace(CONFIG, dir=str(folder))


def prepare(
    config: DataConfig, tokenizer: Tokenizer, names: tuple[str, ...] = NAMES, keep_all: bool = False
) -> tuple[EncodedCorpus, dict]:
    return prepare_split(config, names, tokenizer, Path(config.dir) / "cache", keep_all=keep_all)


def pair_of(corpus: EncodedCorpus, index: int) -> list[list[int]]:
    """The ids of one pair, source and target."""
    rows = [np.zeros((1, length), np.int32) for length in corpus.lengths[index]]
    for side, row in enumerate(rows):
        corpus.copy_rows(np.array([index]), side, to=row)
    return [row[0].tolist() for row in rows]


def texts(corpus: EncodedCorpus, tokenizer: Tokenizer) -> list[tuple[str, ...]]:
    decode = functools.cache(tokenizer.decode)
    pairs = [map(tuple, pair_of(corpus, index)) for index in range(len(corpus))]
    return [tuple(map(decode, pair)) for pair in pairs]


def test_pairs_are_the_tokens_of_their_lines_in_order(tokenizer, tmp_path):
    corpus, _ = prepare(write(tmp_path, PAIRS), tokenizer)
    assert len(corpus) == len(PAIRS)
    for index, pair in enumerate(PAIRS):
        encoded = pair_of(corpus, index)
        assert encoded == [tokenizer.encode(line) for line in pair]
        assert corpus.lengths[index].tolist() == [len(ids) for ids in encoded]


def test_rows_of_many_pairs_are_copied_and_what_lies_around_them_stays(tokenizer, tmp_path):
    corpus, _ = prepare(write(tmp_path, PAIRS), tokenizer)
    pairs = np.array([16, 2, 5])
    for side in (0, 1):
        rows = np.full((5, 11), -1)
        corpus.copy_rows(pairs, side, to=rows)
        for row, pair in zip(rows, pairs.tolist(), strict=False):
            ids = pair_of(corpus, pair)[side]
            assert row.tolist() == ids + [-1] * (11 - len(ids))
        assert (rows[3:] == -1).all()


def test_blocks_and_files_are_joined_without_seam(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_room, "PAIRS_AT_ONCE", 5)
    write(tmp_path, PAIRS)
    config = write(tmp_path, PAIRS[:3], names=("more.en", "more.de"))
    corpus, report = prepare(config, tokenizer, (*NAMES, "more.en", "more.de"))
    assert texts(corpus, tokenizer) == PAIRS + PAIRS[:3]
    assert [source["kept"] for source in report["sources"]] == [17, 3]
    assert report["kept"] == 20


@pytest.mark.parametrize(
    "blank",
    [
        "",
        " ",
        "\t",
        "\u00a0",
        "\u3000 ",
        "\x0b\x0c\u2028",
        "\u200b",
        " \ufeff\u2060",
        "\u00ad\u200f",
    ],
)
@pytest.mark.parametrize("side", [0, 1])
def test_a_pair_with_a_blank_side_is_dropped_whole(tokenizer, tmp_path, blank, side):
    assert is_blank(blank)
    pairs = list(PAIRS)
    pairs[4] = (blank, "Apfel") if side == 0 else ("apple", blank)
    corpus, report = prepare(write(tmp_path, pairs), tokenizer)
    assert texts(corpus, tokenizer) == PAIRS[:4] + PAIRS[5:]
    assert report["sources"][0]["dropped"] == {"blank": 1, "too_long": 0}


def long_pairs(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """One pair at the limit of 13 tokens, then two that are one token over it on one side."""
    at_limit, over = " ".join(["dog"] * 12), " ".join(["dog"] * 13)
    assert [len(tokenizer.encode(line)) for line in (at_limit, over)] == [13, 14]
    return [(at_limit, at_limit), ("dog", over), (over, "dog"), ("apple", "Apfel")]


def test_a_training_pair_over_the_limit_is_dropped_whole(tokenizer, tmp_path):
    pairs = long_pairs(tokenizer)
    corpus, report = prepare(write(tmp_path, pairs), tokenizer)
    assert texts(corpus, tokenizer) == [pairs[0], pairs[3]]
    assert report["sources"][0]["dropped"] == {"blank": 0, "too_long": 2}
    assert report["sources"][0]["cut"] == 0


def test_no_validation_pair_is_dropped_and_a_cut_side_still_ends_in_eos(tokenizer, tmp_path):
    pairs = [*long_pairs(tokenizer), ("", "Hund"), (" ", "\t")]
    corpus, report = prepare(write(tmp_path, pairs), tokenizer, keep_all=True)
    at_limit = pairs[0][0]
    cut = [pairs[0], ("dog", at_limit), (at_limit, "dog"), *pairs[3:]]
    assert texts(corpus, tokenizer) == cut
    assert corpus.lengths.max() == CONFIG.max_length
    assert all(side[-1] == tokenizer.eos_id for i in range(6) for side in pair_of(corpus, i))
    counts = report["sources"][0]
    assert (counts["read"], counts["kept"], counts["cut"]) == (6, 6, 2)
    assert counts["dropped"] == {"blank": 0, "too_long": 0}


def test_the_report_adds_up_and_is_plain_json(tokenizer, tmp_path):
    pairs = [*PAIRS, ("", "Hund"), ("dog", " ".join(["Hund"] * 30)), ("dog", "Hund")]
    config = write(tmp_path, pairs)
    corpus, report = prepare(config, tokenizer)
    assert json.loads(json.dumps(report)) == report
    assert len(report["digest"]) == 64
    (counts,) = report["sources"]
    assert "train.en" in counts["name"] and "train.de" in counts["name"]
    assert counts["read"] == len(pairs)
    assert counts["kept"] == report["kept"] == len(corpus) == len(pairs) - 2
    assert sum(counts["dropped"].values()) == 2
    assert counts["longest"] == [6, 31]
    assert counts["pieces"] == corpus.lengths.sum(axis=0).tolist()
    assert counts["unknown_piece_rate"] == [0, 0]


def test_unknown_pieces_are_counted_by_side_and_kept(tmp_path):
    config = dataclasses.replace(CONFIG, byte_fallback=False, vocab_size=131)
    tokenizer = Tokenizer(train_tokenizer((ENGLISH + GERMAN) * 3, config))
    corpus, report = prepare(write(tmp_path, [("dog", "Ω dog Ω"), ("Ω", "dog")]), tokenizer)
    assert report["sources"][0]["unknown_piece_rate"] == [1 / 5, 2 / 8]
    assert tokenizer.unk_id in pair_of(corpus, 1)[0]


def test_an_empty_split_is_refused_and_says_what_became_of_its_pairs(tokenizer, tmp_path):
    config = write(tmp_path, [("", "Hund"), ("dog", " ".join(["Hund"] * 30)), ("dog ", " ")])
    with pytest.raises(UserError, match=r"train\.en, train\.de: 3 read, 2 .*blank.*, 1 over"):
        prepare(config, tokenizer)
    for name in NAMES:
        (tmp_path / name).write_bytes(b"")
    for names in (NAMES, ()):
        with pytest.raises(UserError, match=r"no pair to use .* 0 read"):
            prepare(config, tokenizer, names, keep_all=True)


@pytest.mark.parametrize("keep_all", [False, True])
def test_what_became_of_the_pairs_is_told_and_much_that_is_lost_with_a_warning(
    tokenizer, tmp_path, capsys, caplog, keep_all
):
    """Of 20 pairs one has a blank side, and one, two or three are too long."""
    over = ("dog", " ".join(["Hund"] * 30))
    warnings = 0
    for too_long in (1, 2, 3):
        pairs = [*PAIRS, *PAIRS][: 19 - too_long] + [over] * too_long + [("", "Hund")]
        prepare(write(tmp_path, pairs), tokenizer, keep_all=keep_all)
        told = capsys.readouterr().err.splitlines()[-1]
        kept, dropped, cut = (20, 0, too_long) if keep_all else (19 - too_long, too_long, 0)
        assert f"train.de: {kept} of 20 pairs kept" in told
        assert f"{1 - keep_all} dropped for a blank side and {dropped} over data.max_length" in told
        assert f"(13), {cut} cut to it" in told and "0.00% and 0.00% unknown" in told
        lost = too_long if keep_all else too_long + 1
        warnings += lost > 2  # of 20 are more than 10 %
        assert len(caplog.messages) == warnings
    assert "15% of the pairs" in caplog.text and "have 6 and 31 tokens" in caplog.text


def test_more_than_a_hundredth_of_unknown_pieces_gets_a_warning(tmp_path, caplog, capsys):
    """1 of 3 + 12 target pieces is unknown, 1 of 3 + 2 x 49 is not too many."""
    config = dataclasses.replace(CONFIG, byte_fallback=False, vocab_size=131, max_length=99)
    tokenizer = Tokenizer(train_tokenizer((ENGLISH + GERMAN) * 3, config))
    for others, warnings in ((1, 1), (49, 1)):
        pairs = [("dog", "Ω"), *[("dog", "Hund")] * others]
        folder = tmp_path / str(others)
        folder.mkdir()
        (folder / "train.en").write_text("dog\n" * len(pairs))
        (folder / "train.de").write_text("".join(f"{target}\n" for _, target in pairs))
        prepare(dataclasses.replace(config, dir=str(folder)), tokenizer)
        share = 1 / (3 + 2 * others)
        assert f"0.00% and {share:.2%} unknown" in capsys.readouterr().err
        assert len([m for m in caplog.messages if "unknown to the tokenizer" in m]) == warnings


class Encodings:
    """Counts how often lines are encoded."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch) -> None:
        self.count, self.encode_batch = 0, tokenizer.encode_batch
        monkeypatch.setattr(tokenizer, "encode_batch", self)

    def __call__(self, lines: list[str], side: str) -> list[list[int]]:
        self.count += side == "source"
        return self.encode_batch(lines, side)


def test_a_split_is_encoded_once(tokenizer, tmp_path, monkeypatch):
    config, encodings = write(tmp_path, PAIRS), Encodings(tokenizer, monkeypatch)
    first, report = prepare(config, tokenizer)
    second, same_report = prepare(config, tokenizer)
    assert encodings.count == 1
    assert texts(second, tokenizer) == texts(first, tokenizer)
    assert same_report == report
    _, other_report = prepare(dataclasses.replace(config, max_length=99), tokenizer)
    assert other_report["digest"] != report["digest"]


def test_the_same_text_under_another_name_is_not_encoded_again(tokenizer, tmp_path, monkeypatch):
    config, encodings = write(tmp_path, PAIRS), Encodings(tokenizer, monkeypatch)
    write(tmp_path, PAIRS, names=("other.en", "other.de"))
    prepare(config, tokenizer)
    _, report = prepare(config, tokenizer, ("other.en", "other.de"))
    assert encodings.count == 1
    assert "other.en" in report["sources"][0]["name"]


@pytest.mark.parametrize("changed", ["text", "tokenizer", "limit", "keep_all"])
def test_whatever_decides_the_ids_is_noticed(tokenizer, tmp_path, changed):
    config, keep_all = write(tmp_path, PAIRS), False
    prepare(config, tokenizer)
    if changed == "text":
        write(tmp_path, [*PAIRS[:-1], ("the apple", "Apfel")])
    elif changed == "tokenizer":
        tokenizer = Tokenizer(
            train_tokenizer(ENGLISH + GERMAN, dataclasses.replace(CONFIG, vocab_size=331))
        )
    elif changed == "limit":
        config = dataclasses.replace(config, max_length=4)
    else:
        keep_all = True
    prepare(config, tokenizer, keep_all=keep_all)
    folders = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(folders) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_encoding_that_was_interrupted_leaves_nothing(tokenizer, tmp_path, monkeypatch, error):
    config, encode = write(tmp_path, PAIRS), corpus_room._Writer._encode
    monkeypatch.setattr(corpus_room, "PAIRS_AT_ONCE", 5)

    def interrupted(writer, pairs, report):
        if PAIRS[-1] in pairs:
            raise error
        return encode(writer, pairs, report)

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(corpus_room._Writer, "_encode", interrupted)
        prepare(config, tokenizer)
    (lock,) = left_in(tmp_path / "cache")
    assert lock.endswith(".lock")


@pytest.mark.parametrize("block", [0, 2])
def test_an_encoding_that_was_killed_is_done_again(tokenizer, tmp_path, monkeypatch, block):
    config = write(tmp_path, PAIRS)
    killed = f"""
import os, signal
from pathlib import Path
from flaxformer_min.data import corpus
from flaxformer_min.config import DataConfig
from flaxformer_min.data.tokenizer import Tokenizer
corpus.PAIRS_AT_ONCE = 5
encode, blocks = corpus._Writer._encode, []
def _encode(*arguments):
    blocks.append(arguments)
    if len(blocks) > {block}:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(*arguments)
corpus._Writer._encode = _encode
folder = Path({str(tmp_path)!r})
tokenizer = Tokenizer((folder / "model").read_bytes())
corpus.prepare_split({config!r}, {NAMES!r}, tokenizer, folder / "cache")
"""
    (tmp_path / "model").write_bytes(tokenizer.model_bytes)
    done = subprocess.run([sys.executable, "-c", killed], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert any(name.endswith(".partial") for name in left_in(tmp_path / "cache"))
    config = write(tmp_path, PAIRS[:-1])  # what was killed goes, even if nobody needs it now
    corpus, report = prepare(config, tokenizer)
    assert texts(corpus, tokenizer) == PAIRS[:-1]
    left = [name for name in left_in(tmp_path / "cache") if not name.endswith(".lock")]
    assert left == [report["digest"]]


def test_invalid_utf8_stops_the_encoding_with_file_and_line(tokenizer, tmp_path):
    config = write(tmp_path, PAIRS)
    (tmp_path / "train.de").write_bytes(b"gut\n" * 16 + b"\xc3(\n")
    with pytest.raises(UserError, match=r"train\.de, line 17: not UTF-8"):
        prepare(config, tokenizer)


def lines_as(ends: str, lines: list[str]) -> bytes:
    return "".join(line + ends for line in lines).encode()


ODD = "NUL \x00 </s>\u2028<pad>\x85 \x0b\x0c 😀\u00a0."  # each an ordinary character
SIDES = [list(side) for side in zip(*PAIRS, strict=True)]
LONG = "dog " * 20_000
HOSTILE = {  # bytes of both files, and the pairs they are
    "a pair of 20,000 words": (
        lines_as("\n", [*SIDES[0], LONG]),
        lines_as("\n", [*SIDES[1], LONG]),
        [*PAIRS, (LONG, LONG)],
    ),
    "10,000 identical lines": (
        lines_as("\n", [PAIRS[6][0]] * 10_000),
        lines_as("\n", [PAIRS[6][1]] * 10_000),
        [PAIRS[6]] * 10_000,
    ),
    "no final newline": (lines_as("\n", SIDES[0])[:-1], lines_as("\n", SIDES[1])[:-1], PAIRS),
    "no final newline on one side": (
        lines_as("\n", SIDES[0]),
        lines_as("\n", SIDES[1])[:-1],
        PAIRS,
    ),
    "CRLF on one side": (lines_as("\n", SIDES[0]), lines_as("\r\n", SIDES[1]), PAIRS),
    "a BOM": (b"\xef\xbb\xbf" + lines_as("\n", SIDES[0]), lines_as("\n", SIDES[1]), PAIRS),
    "odd characters": (
        lines_as("\n", [*SIDES[0], ODD]),
        lines_as("\n", [ODD[::-1], *SIDES[1]]),
        list(zip([*SIDES[0], ODD], [ODD[::-1], *SIDES[1]], strict=True)),
    ),
    "blank sides": (
        lines_as("\n", ["", *SIDES[0], "dog", " \u3000"]),
        lines_as("\n", ["Hund", *SIDES[1], "\t\x85", ""]),
        PAIRS,
    ),
}


@pytest.mark.run
@pytest.mark.parametrize("shape", HOSTILE)
def test_hostile_files_become_a_tokenizer_and_the_pairs_they_hold(tmp_path, shape):
    *contents, pairs = HOSTILE[shape]
    for name, content in zip(NAMES, contents, strict=True):
        (tmp_path / name).write_bytes(content)
    config = dataclasses.replace(CONFIG, dir=str(tmp_path), max_length=99_999, vocab_size=300)
    lines = itertools.chain.from_iterable(read_pairs(config, NAMES))
    tokenizer = Tokenizer(train_tokenizer(lines, config))
    corpus, report = prepare(config, tokenizer)
    assert texts(corpus, tokenizer) == pairs
    counts = report["sources"][0]
    assert counts["read"] == contents[1].count(b"\n") + (contents[1][-1:] != b"\n")
    assert counts["kept"] == counts["read"] - counts["dropped"]["blank"] == len(pairs)


def test_files_of_different_length_stop_before_anything_is_written(tokenizer, tmp_path):
    config = write(tmp_path, PAIRS)
    (tmp_path / "train.de").write_bytes(lines_as("\n", SIDES[1][:-1]))
    with pytest.raises(UserError, match=r"train\.en has 17 lines but .*train\.de has 16"):
        prepare(config, tokenizer)
    assert not (tmp_path / "cache").exists()


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    {
        "a changed bit": lambda: path.write_bytes(content),
        "cut short": lambda: path.write_bytes(content[:-1]),
        "empty": lambda: path.write_bytes(b""),
        "missing": path.unlink,
    }[how]()


@pytest.mark.parametrize("how", ["a changed bit", "cut short", "empty", "missing"])
@pytest.mark.parametrize("name", ["ids", "lengths", "report.json", "manifest.json"])
def test_a_damaged_cache_is_noticed_and_written_again(tokenizer, tmp_path, caplog, name, how):
    config = write(tmp_path, PAIRS)
    _, report = prepare(config, tokenizer)
    damage(tmp_path / "cache" / report["digest"] / name, how)
    corpus, again = prepare(config, tokenizer)
    assert texts(corpus, tokenizer) == PAIRS and again == report
    (warning,) = caplog.messages
    assert f"{name}: damaged" in warning and "encoded again" in warning
    prepare(config, tokenizer)
    assert len(caplog.messages) == 1


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_a_half_written_tokenizer_in_the_cache_does_not_stop_an_encoding(tokenizer, tmp_path):
    config, cache = write(tmp_path, PAIRS), tmp_path / "cache"
    cache.mkdir()
    (cache / "x.tokenizer.partial").write_bytes(b"half")  # a kill left it
    (cache / "x.partial").mkdir()
    _, report = prepare(config, tokenizer)
    kept = [report["digest"], f"{report['digest']}.lock", "x.lock", "x.tokenizer.partial"]
    assert left_in(cache) == sorted(kept)


def test_a_full_disk_is_one_line_and_leaves_nothing(tokenizer, tmp_path, monkeypatch):
    config, cache = write(tmp_path, PAIRS * 99), tmp_path / "cache"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (0, 99, 10_000):  # bytes of a file; the last is enough for all but the ids
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            with pytest.raises(UserError) as caught:
                prepare(config, tokenizer)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert re.fullmatch(rf"{cache}: cannot keep the token ids here: .*", str(caught.value))
        assert [name[64:] for name in left_in(cache)] == [".lock"]

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(UserError, match="No space left"):
        patch.setattr("flaxformer_min.system.sealed.seal", full)
        prepare(config, tokenizer)
    assert [name[64:] for name in left_in(cache)] == [".lock"]
    assert len(prepare(config, tokenizer)[0]) == len(PAIRS) * 99


def test_a_cache_that_cannot_be_made_is_one_line(tokenizer, tmp_path):
    config = write(tmp_path, PAIRS)
    (tmp_path / "cache").write_bytes(b"a file")
    with pytest.raises(UserError, match=r"cache: cannot keep the token ids here: File exists"):
        prepare(config, tokenizer)


@pytest.mark.parametrize(("vocab_size", "largest"), [(1 << 16, 65_535), (65_537, 65_536)])
def test_the_largest_id_survives(tmp_path, tokenizer, monkeypatch, vocab_size, largest):
    monkeypatch.setattr(tokenizer, "vocab_size", vocab_size)
    monkeypatch.setattr(
        tokenizer, "encode_batch", lambda lines, side: [[largest, 3] for _ in lines]
    )
    corpus, _ = prepare(write(tmp_path, PAIRS), tokenizer)
    assert pair_of(corpus, 16)[1] == [largest, 3]
    assert corpus._ids.itemsize == (2 if largest < 1 << 16 else 4)


def test_progress_is_one_plain_line_where_there_is_no_terminal(tokenizer, tmp_path, capsys):
    config = write(tmp_path, PAIRS)
    prepare(config, tokenizer)
    captured = capsys.readouterr()
    assert captured.out == ""
    before, after = captured.err.splitlines()
    assert "17 pairs" in before and "17 of 17 pairs kept" in after


def test_an_opened_corpus_and_its_plan_hold_at_most_32_bytes_a_pair(tmp_path):
    pairs = 50_021
    lengths = np.random.default_rng(1).integers(1, 13, (pairs, 2), np.int32)
    (tmp_path / "lengths").write_bytes(lengths.tobytes())
    (tmp_path / "ids").write_bytes(np.zeros(lengths.sum(), np.uint16).tobytes())
    tracemalloc.start()
    corpus = EncodedCorpus(tmp_path, "uint16")
    plan = BatchPlan(corpus.lengths, CONFIG)
    plan.batch_ids(plan.batches_per_epoch)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 8 * pairs < held < 32 * pairs


def test_encoding_a_larger_corpus_takes_no_more_memory(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_room, "PAIRS_AT_ONCE", 20)
    peaks = []
    for copies in (1, 5, 30):  # the first only warms up
        config = write(tmp_path, PAIRS * copies)
        tracemalloc.start()
        prepare(config, tokenizer)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] - peaks[1] < 32 * len(PAIRS) * 25


def test_ids_cannot_be_overwritten(tokenizer, tmp_path):
    corpus, _ = prepare(write(tmp_path, PAIRS), tokenizer)
    with pytest.raises(ValueError, match="read-only"):
        corpus._ids[0] = 5
    assert isinstance(corpus.lengths, np.ndarray)
