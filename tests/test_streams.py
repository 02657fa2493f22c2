"""Streams: as many lines out as in, in order, each group as soon as it is done."""

import io
import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from flaxformer_min.data.lines import decode_lines
from flaxformer_min.decoding.files import to_json
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.streams import line_groups, ready_lines, translate_stream
from flaxformer_min.decoding.translator import EMPTY, Translator
from flaxformer_min.errors import UserError


class Arriving(io.BytesIO):
    """A stream whose bytes come in the given pieces."""

    def __init__(self, *pieces: bytes) -> None:
        super().__init__()
        self.pieces = list(pieces)

    def read1(self, size: int | None = -1, /) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""


@pytest.fixture(scope="module")
def translator(finished) -> Translator:
    return Translator.load(finished)


def arriving(*pieces: bytes, **how) -> Iterator[list[str]]:
    return line_groups(Arriving(*pieces), "standard input", **how)


def stream(translator, *pieces: bytes, errors="strict", **options) -> list[str]:
    groups = translate_stream(translator, arriving(*pieces, errors=errors), **options)
    return [each.text for group in groups for each in group]


@pytest.mark.parametrize(
    ("pieces", "groups"),
    [
        ([], []),
        ([b"a"], [[b"a"]]),
        ([b"a\n"], [[b"a"]]),
        ([b"a\nb\nc"], [[b"a", b"b"], [b"c"]]),
        ([b"a\nb", b"c", b"d\n\n", b"e\n"], [[b"a"], [b"bcd", b""], [b"e"]]),
        ([b"\n\n"], [[b"", b""]]),
        (["a\u2028b\r\n".encode()], [["a\u2028b\r".encode()]]),
    ],
)
def test_lines_are_taken_as_they_come(pieces, groups):
    assert list(ready_lines(Arriving(*pieces))) == groups
    one_by_one = [[line] for group in groups for line in group]
    assert list(ready_lines(Arriving(*pieces), one_by_one=True)) == one_by_one


def test_what_is_done_is_there_before_more_is_read(translator):
    source = Arriving(b"now\n\n", b"dogs\nse", b"e\n")
    groups = translate_stream(translator, line_groups(source, "it"))
    assert [(len(group), len(source.pieces)) for group in groups] == [(2, 2), (1, 1), (1, 0)]


@pytest.mark.parametrize("count", [0, 1, 2, 17])
@pytest.mark.parametrize("end", ["", "\n"])
def test_as_many_lines_come_out_as_went_in(translator, count, end):
    lines = ["dogs", "", "see", "\u3000", "now now"][: max(1, count)] * 4
    text = "\n".join([*lines[: max(0, count - 1)], "trees"][:count]) + (end if count else "")
    assert len(stream(translator, text.encode())) == count


def test_hostile_lines_leave_their_neighbours_alone(translator):
    hostile = [
        b"", b"   ", b"\t", "\u00a0".encode(), "\u3000".encode(), b"dogs\r", "a\u2028b".encode(),
        b"a\x00b", b"</s>", b"<pad>", "\U0001f600".encode(), b"'" * 300, b"see " * 3000,
    ]  # fmt: skip
    good = b"seven dogs"
    text = b"".join(good + b"\n" + line + b"\n" for line in hostile) + good
    found = stream(translator, text)
    assert len(found) == 2 * len(hostile) + 1
    assert set(found[::2]) == set(stream(translator, good))
    assert found[1:10:2] == [""] * 5
    assert found[11] == stream(translator, b"dogs")[0] != ""
    for line in found:
        assert not set("\r\0") & set(line) and "</s>" not in line and "<pad>" not in line


def test_invalid_utf8_is_named_or_replaced(translator):
    pieces = (b"now\n", b"dogs\n\xff\nsee\n")
    groups = translate_stream(translator, arriving(*pieces))
    assert len(next(groups)) == 1
    with pytest.raises(UserError, match="standard input, line 3: not UTF-8"):
        next(groups)
    found = stream(translator, *pieces, errors="replace")
    assert found == stream(translator, "now\ndogs\n\ufffd\nsee\n".encode())


def test_lines_too_long_are_counted_over_all_groups_of_a_stream(translator, caplog, tmp_path):
    """The tiny model takes 16 tokens."""
    (tmp_path / "prefix").write_text("see\n" * 7 + "see " * 99 + "\n")
    pieces = [b"see " * 99 + b"\n"] * 7 + [b"see\n"]
    stream(translator, *pieces, prefix=str(tmp_path / "prefix"))
    assert [message.split(":")[0] for message in caplog.messages] == [
        *(f"source, line {number}" for number in (1, 2, 3)),
        "lines of more tokens than the model takes",
    ]
    assert caplog.messages[-1].endswith(": 8")


def test_prefixes_go_with_their_lines_over_blocks(translator, tmp_path):
    path = tmp_path / "prefix"
    path.write_text("Hunde\n\njetzt\n")
    found = stream(translator, b"see\nnow\n", b"dogs\n", prefix=str(path))
    assert found[0].startswith("Hunde") and found[2].startswith("jetzt")
    assert found[1:2] == stream(translator, b"now")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"see\n", "prefix has more lines than the text, which has 1"),
        (b"a\nb\nc\nd", "prefix has 3 lines but the text has more"),
        (b"", "prefix has more lines than the text, which has 0"),
    ],
)
def test_another_number_of_prefixes_is_an_error_of_the_user(translator, tmp_path, text, message):
    path = tmp_path / "prefix"
    path.write_text("Hunde\n\njetzt\n")
    with pytest.raises(UserError, match=message):
        stream(translator, text, prefix=str(path))
    with pytest.raises(UserError, match="no: No such file"):
        stream(translator, b"", prefix=str(tmp_path / "no"))


def test_json_has_an_array_of_hypotheses_for_each_line(translator):
    expected = translator.translate(["a cat", "", "now"], Options(n_best=2))
    for translation in expected:
        text = json.loads(to_json(translation))
        assert len(text) == 1 + len(translation.others) == (2 if translation.tokens else 1)
        for row, each in zip(text, (translation, *translation.others), strict=True):
            assert row == {
                "text": each.text,
                "score": each.score,
                "log_prob": each.log_prob,
                "token_count": len(each.tokens),
                "finished": each.finished,
            }


def test_options_that_make_no_sense_are_told_before_a_line_comes(translator):
    with pytest.raises(UserError, match="n_best is 3"):
        stream(translator, options=Options(n_best=3))


@pytest.mark.usefixtures("as_users_have_it")
def test_lines_are_numbered_on_from_group_to_group():
    seen = []

    def translate(lines, options, *, first_line, **_):
        seen.append((first_line, lines))
        return [EMPTY] * len(lines)

    long_lines = SimpleNamespace(end=lambda: seen.append("end"))
    fake = SimpleNamespace(
        settings=lambda options: options,
        translate=translate,
        long_lines=lambda: long_lines,
    )
    assert stream(fake, b"a\nb\nc\n", b"d\ne\n", b"f") == [""] * 6
    assert seen == [(1, ["a", "b", "c"]), (4, ["d", "e"]), (6, ["f"]), "end"]


def test_only_the_very_start_of_a_text_loses_its_byte_order_mark():
    lines = ["\ufeffa".encode(), "\ufeffb".encode()]
    assert list(decode_lines(lines, "text")) == ["a", "\ufeffb"]
    assert list(decode_lines(lines, "text", first_line=7)) == ["\ufeffa", "\ufeffb"]
