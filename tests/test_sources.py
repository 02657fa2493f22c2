"""Lines end at LF alone, pairs stay aligned, and every kind of source yields the same thing."""

import dataclasses
import gzip
import io
from pathlib import Path

import pytest

from flaxformer_min.config import DataConfig
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
    (tmp_path / "plain").write_bytes(content)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(content))
    assert lines_of(content) == lines
    assert list(read_lines(tmp_path / "plain")) == lines
    assert list(read_lines(str(tmp_path / "packed.gz"))) == lines


@pytest.mark.parametrize("wrong", [b"\xff", b"\xe2\x82", b"\xed\xa0\x80"])
def test_invalid_utf8_is_named_by_file_and_line(tmp_path, wrong):
    (tmp_path / "bad.en").write_bytes(b"fine\nfine too\n" + wrong + b"\nfine\n")
    lines = read_lines(tmp_path / "bad.en")
    assert [next(lines), next(lines)] == ["fine", "fine too"]
    with pytest.raises(UserError, match=r"bad\.en, line 3: not UTF-8"):
        next(lines)


@pytest.mark.parametrize("name", ["missing.en", "folder.en", "short.gz", "plain.gz", "wrong.gz"])
def test_a_file_that_cannot_be_read_is_named_in_one_line(tmp_path, name):
    packed = gzip.compress(b"line\n" * 1000)
    (tmp_path / "folder.en").mkdir()
    (tmp_path / "short.gz").write_bytes(packed[:-9])
    (tmp_path / "plain.gz").write_bytes(b"not packed\n")
    (tmp_path / "wrong.gz").write_bytes(packed[:15] + b"\xff" * 9 + packed[24:])
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
