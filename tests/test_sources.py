"""Lines end at LF alone, pairs stay aligned, and every kind of source yields the same thing."""

import bz2
import dataclasses
import gzip
import io
import lzma
import os
import socket
from pathlib import Path

import pytest

from flaxformer_min.config import DataConfig
from flaxformer_min.data import sources
from flaxformer_min.data.lines import decode_lines, read_lines
from flaxformer_min.data.phrases import pair
from flaxformer_min.data.sources import open_sources, read_pairs
from flaxformer_min.errors import UserError


def files_config(folder: Path, **files: bytes) -> DataConfig:
    """A config of `folder`, after writing files; their names have `_` for `.`."""
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return DataConfig(
        dir=str(folder),
        train=(),
        validation=(),
        source_language="en",
        target_language="de",
        vocab_size=300,
    )


def lines_of(content: bytes) -> list[str]:
    return list(decode_lines(io.BytesIO(content), "standard input"))


def test_a_line_ends_at_lf_alone():
    text = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\rh\x00\nsecond\n"
    assert lines_of(text.encode()) == text.split("\n")[:2]


# The first bytes count, not the name.
PACKED = {
    "plain": bytes,
    "plain.gz": bytes,
    "packed.gz": gzip.compress,
    "PACKED.GZ": gzip.compress,
    "packed.txt": gzip.compress,
    "packed.xz": lzma.compress,
    "packed.bz2": bz2.compress,
}


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a\n\nb\n", ["a", "", "b"]),
        (b"a\nno newline", ["a", "no newline"]),
        (b"a\r\nb\r\r\nc\r", ["a", "b\r", "c"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        (b"  a \n", ["  a "]),
    ],
)
def test_lines_are_what_lies_between_line_ends(tmp_path, content, lines):
    assert lines_of(content) == lines
    for name, pack in PACKED.items():
        (tmp_path / name).write_bytes(pack(content))
        assert list(read_lines(tmp_path / name)) == lines
        assert list(read_lines(str(tmp_path / name))) == lines


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"\x28\xb5\x2f\xfd\x04\x00", "packed by Zstandard: unpack it by `zstd -d`"),
        (b"\x04\x22\x4d\x18d@", "packed by LZ4"),
        (b"7z\xbc\xaf\x27\x1c\0\4", "a 7z archive"),
        (b"PK\x03\x04\x14\0", "a zip archive"),
        ("\ufeffa\n".encode("utf-16-le"), "UTF-16 text: convert it by `iconv"),
        ("\ufeffa\n".encode("utf-16-be"), "UTF-16 text"),
        ("ab\n".encode("utf-16-le"), "UTF-16 text"),
        ("ab\n".encode("utf-16-be"), "UTF-16 text"),
        ("a\n".encode("utf-32"), "UTF-32 text"),
        (b"a b\rc d\r", "text whose lines end in CR: convert it by `tr"),
    ],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_what_is_not_read_is_called_by_its_name(tmp_path, content, what, pack):
    (tmp_path / "train.en").write_bytes(pack(content))
    with pytest.raises(UserError, match=r"train\.en: " + what) as caught:
        list(read_lines(tmp_path / "train.en"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"BZh9 is text\n", b"a\0\n", b"7z\n", b"PK\n", b"\r\n", b"a\r"]
)
def test_text_is_not_taken_for_something_else(tmp_path, content):
    (tmp_path / "train.en").write_bytes(content)
    assert list(read_lines(tmp_path / "train.en")) == lines_of(content)


@pytest.mark.parametrize("wrong", [b"\xff", b"\xe2\x82", b"\xed\xa0\x80"])
def test_invalid_utf8_is_named_by_file_and_line(tmp_path, wrong):
    (tmp_path / "bad.en").write_bytes(b"fine\nfine too\n" + wrong + b"\nfine\n")
    lines = read_lines(tmp_path / "bad.en")
    assert [next(lines), next(lines)] == ["fine", "fine too"]
    with pytest.raises(UserError, match=r"bad\.en, line 3: not UTF-8"):
        next(lines)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ([3], r"line 3: not UTF-8"),
        ([2, 5], r"lines 2, 5: not UTF-8"),
        ([1, 2, 4], r"lines 1, 2, 4: not UTF-8"),
        ([2, 3, 4, 7, 8], r"lines 2, 3, 4 and 2 more: not UTF-8"),
    ],
)
def test_all_lines_that_are_not_utf8_are_counted_and_the_first_named(tmp_path, bad, named):
    lines = [b"gr\xfc\xdfe\n" if number in bad else "grüße\n".encode() for number in range(1, 10)]
    (tmp_path / "bad.de").write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=rf"bad\.de, {named}.*--data\.errors replace") as caught:
        list(read_lines(tmp_path / "bad.de"))
    assert "\n" not in str(caught.value)
    found = list(read_lines(tmp_path / "bad.de", errors="replace"))
    assert [number for number, line in enumerate(found, 1) if line == "gr\ufffd\ufffde"] == bad
    assert found.count("grüße") == 9 - len(bad)


def test_training_text_that_is_not_utf8_is_read_if_the_config_says_so(tmp_path):
    config = files_config(tmp_path, a_en=b"one\n", a_de=b"\xff\n")
    with pytest.raises(UserError, match=r"a\.de, line 1: not UTF-8"):
        list(read_pairs(config, ("a.en", "a.de")))
    replacing = dataclasses.replace(config, errors="replace")
    assert list(read_pairs(replacing, ("a.en", "a.de"))) == [("one", "\ufffd")]


@pytest.mark.parametrize("kind", ["FIFO", "folder", "socket", "device", "substitution"])
@pytest.mark.parametrize("side", [0, 1])
def test_a_training_file_that_can_be_read_once_only_is_refused_before_it_is_opened(
    tmp_path, monkeypatch, kind, side
):
    """Nobody writes to the FIFO: whoever opened it would wait for ever."""
    monkeypatch.setattr(sources, "_scan", lambda path: pytest.fail(f"{path} was opened"))
    config, wrong = files_config(tmp_path, a_en=b"1\n"), tmp_path / "wrong"
    reader, writer = os.pipe()
    with socket.socket(socket.AF_UNIX) as server:
        if kind == "FIFO":
            os.mkfifo(wrong)
        elif kind == "folder":
            wrong.mkdir()
        elif kind == "socket":
            server.bind(os.path.relpath(wrong))  # an absolute path may be too long for a socket
        names = [
            "a.en",
            {"device": "/dev/null", "substitution": f"/dev/fd/{reader}"}.get(kind, "wrong"),
        ]
        try:
            with pytest.raises(UserError, match=r": no regular file") as caught:
                open_sources(config, names[:: 1 - 2 * side])
        finally:
            os.close(reader)
            os.close(writer)
    assert names[1] in str(caught.value)


def test_a_link_to_a_training_file_is_as_good_as_the_file(tmp_path):
    config = files_config(tmp_path, a_en=b"1\n", a_de=b"eins\n")
    (tmp_path / "link").symlink_to("a.de")
    assert list(read_pairs(config, ("a.en", "link"))) == [("1", "eins")]


@pytest.mark.parametrize(
    ("names", "swapped"),
    [
        (("train.de", "train.en"), True),
        (("news.en-de.de.gz", "news.en-de.en.gz"), True),
        (("train.en", "train.de"), False),
        (("de.train", "en.train"), False),
        (("train.de", "train.fr"), False),
        (("train.en-de.de", "other"), False),
    ],
)
def test_files_whose_endings_are_the_languages_swapped_get_a_warning(
    tmp_path, caplog, names, swapped
):
    config = files_config(tmp_path)
    for name in names:
        (tmp_path / name).write_text(f"{name}\n")
    assert len(open_sources(config, names)) == 1
    found = [message for message in caplog.messages if "are they swapped" in message]
    assert len(found) == swapped == len(caplog.messages)
    if swapped:
        assert names[0] in found[0] and names[1] in found[0]


def test_one_text_as_both_sides_gets_a_warning(tmp_path, caplog):
    config = files_config(tmp_path, a_en=b"1\n", copy_gz=gzip.compress(b"1\n"))
    open_sources(config, ("a.en", "copy.gz"))
    (message,) = caplog.messages
    assert "a.en" in message and "copy.gz" in message and "the same text" in message


@pytest.mark.parametrize(
    "name",
    [
        "missing.en",
        "folder.en",
        "short.gz",
        "short.xz",
        "short.bz2",
        "wrong.gz",
        "wrong.xz",
        "wrong.bz2",
    ],
)
def test_a_file_that_cannot_be_read_is_named_in_one_line(tmp_path, name):
    (tmp_path / "folder.en").mkdir()
    for kind, pack in (("gz", gzip.compress), ("xz", lzma.compress), ("bz2", bz2.compress)):
        packed = pack(b"line\n" * 1000)
        (tmp_path / f"short.{kind}").write_bytes(packed[:-9])
        (tmp_path / f"wrong.{kind}").write_bytes(packed[:15] + b"\xff" * 9 + packed[24:])
    with pytest.raises(UserError) as caught:
        list(read_lines(tmp_path / name))
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_pairs_of_several_files_come_in_order(tmp_path):
    config = files_config(
        tmp_path, a_en=b"1\n2\n", a_de=b"eins\nzwei", b_de_gz=gzip.compress(b"drei\r\n"), b_en=b"3"
    )
    pairs = read_pairs(config, ("a.en", "a.de", "b.en", "b.de.gz"))
    assert list(pairs) == [("1", "eins"), ("2", "zwei"), ("3", "drei")]
    assert list(read_pairs(config, ())) == []


@pytest.mark.parametrize(
    ("source", "target", "counts"),
    [(b"1\n2\n3\n", b"1\n2\n", "32"), (b"1\n2", b"1\n2\n\n", "23"), (b"", b"\n", "01")],
)
def test_unequal_line_counts_name_both_files_and_counts(tmp_path, source, target, counts):
    config = files_config(tmp_path, train_en=source, train_de=target)
    with pytest.raises(UserError) as caught:
        open_sources(config, ("train.en", "train.de"))
    message = str(caught.value)
    assert f"train.en has {counts[0]} lines" in message
    assert f"train.de has {counts[1]}" in message


def test_a_single_name_is_refused(tmp_path):
    config = files_config(tmp_path, train_en=b"1\n")
    with pytest.raises(UserError, match=r"alternate, got train\.en"):
        open_sources(config, ("train.en",))


def test_a_missing_file_is_found_before_any_line_is_read(tmp_path):
    config = files_config(tmp_path, train_en=b"\xff\n")
    with pytest.raises(UserError, match=r"train\.de: No such file"):
        open_sources(config, ("train.en", "train.de"))


def test_a_source_knows_its_size_and_can_be_read_again(tmp_path):
    config = files_config(tmp_path, a_en=b"1\n2\n3", a_de=b"1\r\n\n3\n")
    (source,) = open_sources(config, ("a.en", "a.de"))
    assert source.size == 3 and "a.en" in source.name and "a.de" in source.name
    assert list(source.pairs()) == list(source.pairs()) == [("1", "1"), ("2", ""), ("3", "3")]


def test_the_digest_is_that_of_the_text_whatever_its_name(tmp_path):
    packed = gzip.compress(b"1\n")
    config = files_config(tmp_path, a_en=b"1\n", b_gz=packed, a_de=b"eins\n", c_de=b"Eins\n")
    names = [("a.en", "a.de"), ("b.gz", "a.de"), ("a.de", "a.en"), ("a.en", "c.de")]
    digests = [open_sources(config, pair)[0].digest for pair in names]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_slices_of_the_phrases_yield_those_phrases(tmp_path):
    config = dataclasses.replace(files_config(tmp_path), source="phrases")
    first, second = open_sources(config, ("train[:7]", "test[3:5]"))
    assert (first.size, second.size) == (7, 2)
    assert len(list(first.pairs())) == 7
    assert list(second.pairs()) == [pair("test", index, "en", "de") for index in (3, 4)]


def test_the_digest_of_phrases_depends_on_slice_and_languages(tmp_path):
    config = dataclasses.replace(files_config(tmp_path), source="phrases")
    french = dataclasses.replace(config, target_language="fr")
    names = ("train[:7]", "train[:8]", "train[1:8]", "test[:7]")
    digests = {s.digest for c in (config, french) for s in open_sources(c, names)}
    assert len(digests) == 8
    again = {s.digest for s in open_sources(config, names)}
    assert again < digests


@pytest.mark.parametrize("name", ["train", "train[5]", "train[:]", "train[:1%]", "dev[:5]", ""])
def test_another_syntax_of_a_slice_is_refused(tmp_path, name):
    config = dataclasses.replace(files_config(tmp_path), source="phrases")
    with pytest.raises(UserError, match=r'write "train\[:60000\]"'):
        open_sources(config, (name,))


def test_an_unknown_kind_of_source_is_refused(tmp_path):
    config = dataclasses.replace(files_config(tmp_path), source="phrase")
    with pytest.raises(UserError, match=r"data\.source: 'phrase'"):
        open_sources(config, ())
