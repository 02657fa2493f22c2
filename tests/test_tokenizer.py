"""Text survives the way to ids and back; special ids never meet text; mistakes get one line."""

import dataclasses
import io
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from flaxformer_min.config import DataConfig
from flaxformer_min.data import tokenizer as tokenizer_room
from flaxformer_min.data import tokenizer_training
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.data.tokenizer_training import (
    _emptied,
    _sample,
    prepare_tokenizer,
    train_tokenizer,
)
from flaxformer_min.errors import UserError

LINES = [
    f"{adjective} {animal} eats {number} of the {fruit} near </s> and <pad>"
    for number, adjective in enumerate(("small", "grey", "naïve", "übergroßer", "don't", "10000"))
    for animal in ("dog", "cat", "horse", "Hund", "katze", "лошадь")
    for fruit in ("apples", "pears", "Birnen", "plums")
]
CONFIG = DataConfig(
    train=(), validation=(), source_language="en", target_language="de", vocab_size=347
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer(LINES, CONFIG))


def byte(tokenizer: Tokenizer, value: int) -> int:
    names = tokenizer.pieces(range(tokenizer.vocab_size))
    return names.index(f"<0x{value:02X}>")


def foreign(**options) -> Tokenizer:
    """A model as somebody else would train it: SentencePiece's own defaults and `options`."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, vocab_size=53, minloglevel=2, **options
    )
    return Tokenizer(model.getvalue())


def test_trained_ids_are_pad_0_unk_1_bos_2_eos_3(tokenizer):
    ids = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id)
    assert ids == (0, 1, 2, 3)
    assert tokenizer.pieces(ids) == ["<pad>", "<unk>", "<s>", "</s>"]
    assert tokenizer.vocab_size == CONFIG.vocab_size


@pytest.mark.parametrize(
    "text",
    [
        "a small dog",
        "",
        " ",
        "  leading, double  and trailing  ",
        "</s>",
        "<pad> <unk> <s> </s> <0x0A>",
        "line\u2028separator \u202f narrow \u00a0 wide \u3000",
        "NUL \x00 VT \x0b FF \x0c NEL \x85 TAB\t",
        "emoji 😀 👩\u200d🚀, 漢字, é, \u200b, \ufeff, \uffff",
        "300 " + "'" * 300,
        "\u2585\u2047",
    ],
)
def test_text_comes_back_as_it_was(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert set(ids[:-1]).isdisjoint((0, 1, 2, 3)) and ids[-1] == tokenizer.eos_id


@pytest.mark.parametrize(
    ("apart", "together"),
    [
        ("e\u0301", "\u00e9"),
        ("o\u0302\u0323", "\u1ed9"),  # marks in the other order
        ("\u1112\u1161\u11ab", "\ud55c"),  # Hangul, whose syllables are in no table
        ("\u2126", "\u03a9"),  # Ohm is Omega
        ("q\u0323\u0307", "q\u0323\u0307"),  # there is no such letter
    ],
)
def test_letters_that_look_the_same_have_the_same_ids(tokenizer, apart, together):
    assert apart.isascii() is False and tokenizer.encode(apart) == tokenizer.encode(together)
    assert tokenizer.encode_batch(["a", apart])[1] == tokenizer.encode(together)
    assert tokenizer.decode(tokenizer.encode(apart)) == together


def test_decomposed_lines_train_the_same_tokenizer(tokenizer):
    apart = [unicodedata.normalize("NFD", line) for line in LINES]
    assert apart != LINES and train_tokenizer(apart, CONFIG) == tokenizer.model_bytes


def test_a_model_that_says_nothing_of_nfc_gets_the_text_as_it_is(tokenizer):
    """So were all models that this program trained before, and those that come from elsewhere."""
    earlier = ModelProto.FromString(tokenizer.model_bytes)
    assert earlier.normalizer_spec.name == "nfc"
    earlier.normalizer_spec.name = "identity"
    unmarked = Tokenizer(earlier.SerializeToString())
    assert unmarked.decode(unmarked.encode("e\u0301")) == "e\u0301"
    assert [unmarked.encode(line) for line in LINES] == tokenizer.encode_batch(LINES)


def test_the_space_mark_of_sentencepiece_comes_back_as_a_space(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\u2581b")) == "a b"


def test_many_lines_at_once_are_encoded_as_one_by_one(tokenizer):
    lines = ["", " ", *LINES[:11], "😀"]
    assert tokenizer.encode_batch(lines) == [tokenizer.encode(line) for line in lines]
    assert tokenizer.encode_batch([]) == []


def test_decoding_stops_at_eos_and_skips_pad_and_bos(tokenizer):
    grey, dog = tokenizer.encode("grey dog"), tokenizer.encode("dog")
    assert tokenizer.decode([2, 0, *grey[:-1], 0, 3, *dog]) == "grey dog"
    assert tokenizer.decode([]) == ""


def test_decoded_text_has_no_line_break(tokenizer):
    breaks = [byte(tokenizer, 0x0A), byte(tokenizer, 0x0D)]
    text = tokenizer.decode([*tokenizer.encode("dog")[:-1], *breaks, byte(tokenizer, ord("x"))])
    assert text == "dog  x"


def test_bytes_that_are_no_utf8_become_replacement_characters(tokenizer):
    euro = [byte(tokenizer, value) for value in "€".encode()]
    assert tokenizer.decode(euro) == "€"
    assert set(tokenizer.decode(euro[:2])) == {"\ufffd"}
    assert tokenizer.decode([byte(tokenizer, 0xFF), byte(tokenizer, ord("A"))]) == "\ufffdA"


def test_never_generated_are_pad_unk_bos_and_the_line_breaks(tokenizer):
    breaks = {byte(tokenizer, 0x0A), byte(tokenizer, 0x0D)}
    assert set(tokenizer.never_generated) == {0, 1, 2} | breaks


def test_without_byte_fallback_an_unknown_character_is_unk_and_not_pad():
    config = dataclasses.replace(CONFIG, byte_fallback=False, vocab_size=97)
    tokenizer = Tokenizer(train_tokenizer(LINES, config))
    assert tokenizer.unk_id in tokenizer.encode("dog 😀")
    assert tokenizer.pad_id not in tokenizer.encode("dog 😀")
    assert set(tokenizer.never_generated) == {0, 1, 2}


def test_no_piece_joins_two_digits(tokenizer):
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    assert all(sum(c.isdigit() for c in piece) < 2 for piece in pieces if piece[:1] != "<")


def test_the_same_lines_and_config_give_the_same_bytes(tokenizer):
    assert train_tokenizer(iter(LINES), CONFIG) == tokenizer.model_bytes
    assert Tokenizer(tokenizer.model_bytes).sha256 == tokenizer.sha256


def test_the_seed_decides_which_lines_are_used_where_there_are_too_many(monkeypatch):
    monkeypatch.setattr(tokenizer_training, "TRAINING_LINES", 59)
    few = dataclasses.replace(CONFIG, vocab_size=310)
    models = {train_tokenizer(LINES, dataclasses.replace(few, seed=seed)) for seed in (1, 1, 5)}
    assert len(models) == 2


def test_a_sample_takes_every_line_equally_often():
    counts = Counter(line for seed in range(2000) for line in _sample("abcdefg", 3, seed))
    assert sum(counts.values()) == 6000
    assert all(abs(counts[line] / 2000 - 3 / 7) < 0.05 for line in "abcdefg")
    assert _sample("abc", 3, seed=1) == ["a", "b", "c"]


def test_too_large_a_vocabulary_is_refused_with_the_largest_that_works():
    with pytest.raises(UserError, match=r"vocab_size: 9999 .* at most (\d+)") as caught:
        train_tokenizer(LINES, dataclasses.replace(CONFIG, vocab_size=9999))
    largest = int(str(caught.value).split()[-1])
    train_tokenizer(LINES, dataclasses.replace(CONFIG, vocab_size=largest))
    with pytest.raises(UserError):
        train_tokenizer(LINES, dataclasses.replace(CONFIG, vocab_size=largest + 1))


def test_too_small_a_vocabulary_is_refused_with_the_least_that_works():
    with pytest.raises(UserError, match=r"vocab_size: 7 .* at least (\d+),") as caught:
        train_tokenizer(LINES, dataclasses.replace(CONFIG, vocab_size=7))
    least = int(str(caught.value).split("at least ")[1].split(",")[0])
    train_tokenizer(LINES, dataclasses.replace(CONFIG, vocab_size=least))
    with pytest.raises(UserError):
        train_tokenizer(LINES, dataclasses.replace(CONFIG, vocab_size=least - 1))


@pytest.mark.parametrize("lines", [[], [""], ["", ""], ["dog " * 20_000, "😀" * 1049]])
def test_a_corpus_without_a_line_to_learn_from_is_refused(lines):
    with pytest.raises(UserError, match=r"no line .* 1 to 4192 bytes"):
        train_tokenizer(lines, CONFIG)


def test_lines_too_long_to_learn_from_change_nothing(tokenizer):
    assert (
        train_tokenizer([LINES[0] * 99, *LINES, "dog " * 20_000], CONFIG) == tokenizer.model_bytes
    )


@pytest.mark.parametrize("lines", [["the same line"] * 10_000, [" ", "\x00", "\x85\u2028"] * 7])
def test_the_largest_vocabulary_of_poor_text_is_named_and_works(lines):
    with pytest.raises(UserError, match=r"vocab_size: 347 .* at most (\d+)") as caught:
        train_tokenizer(lines, CONFIG)
    largest = int(str(caught.value).split()[-1])
    model = train_tokenizer(lines, dataclasses.replace(CONFIG, vocab_size=largest))
    assert Tokenizer(model).vocab_size == largest


def test_lines_are_let_go_of_as_they_are_handed_over():
    lines = ["a", "b", "c"]
    handed_over = _emptied(lines)
    assert next(handed_over) == "a" and len(lines) == 2
    assert list(handed_over) == ["b", "c"] and lines == []


def test_an_error_while_lines_are_read_reaches_the_caller_unchanged():
    def lines():
        yield LINES[0]
        raise UserError("train.en, line 2: not UTF-8")

    with pytest.raises(UserError, match=r"^train\.en, line 2: not UTF-8$"):
        train_tokenizer(lines(), CONFIG)


def test_a_foreign_model_without_pad_and_bos_gets_ids_above_its_last():
    tokenizer = foreign(bos_id=-1, pad_id=-1, unk_id=0, eos_id=1)
    assert (tokenizer.pad_id, tokenizer.bos_id) == (53, 54)
    assert (tokenizer.unk_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 55)
    assert tokenizer.never_generated == (0, 53, 54)
    ids = [54, 53, *tokenizer.encode("small dog"), 53]
    assert tokenizer.decode(ids) == "small dog"
    assert tokenizer.pieces([53, 54, 1]) == ["<pad>", "<s>", "</s>"]


def test_a_foreign_model_without_eos_gets_one_too():
    tokenizer = foreign(bos_id=0, unk_id=1, eos_id=-1)
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (53, 0, 54)
    assert tokenizer.decode([*tokenizer.encode("dog"), 5, 6]) == "dog"


def test_control_pieces_and_line_breaks_of_a_foreign_model_are_never_generated():
    tokenizer = foreign(control_symbols=["<mask>"], user_defined_symbols=["\n", "keep"])
    names = tokenizer.pieces(tokenizer.never_generated)
    assert sorted(names) == ["\n", "<mask>", "<pad>", "<s>", "<unk>"]


@pytest.mark.parametrize("damage", ["missing", "folder", "empty", "garbage", "truncated"])
def test_a_file_that_is_no_model_is_named_in_one_line(tokenizer, tmp_path, damage):
    path = tmp_path / "some.model"
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        half = tokenizer.model_bytes[: len(tokenizer.model_bytes) // 2]
        path.write_bytes({"empty": b"", "garbage": b"no model\n", "truncated": half}[damage])
    with pytest.raises(UserError) as caught:
        Tokenizer.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_piece_that_is_no_utf8_is_damage(tokenizer, tmp_path):
    model = tokenizer.model_bytes.replace("ш".encode(), b"\xd1\xff")
    assert model != tokenizer.model_bytes
    with pytest.raises(UserError, match="not UTF-8"):
        Tokenizer(model)


@pytest.mark.parametrize(
    "trial", ["import os; os.kill(os.getpid(), 11)", "raise MemoryError", "import sys; sys.exit(3)"]
)
def test_a_foreign_model_that_kills_the_interpreter_kills_another_one(
    tokenizer, tmp_path, monkeypatch, trial
):
    path = tmp_path / "some.model"
    path.write_bytes(tokenizer.model_bytes)
    assert Tokenizer.load(path).sha256 == tokenizer.sha256
    monkeypatch.setattr(tokenizer_room, "_TRIAL", trial)
    monkeypatch.setattr(tokenizer_room, "_processor", lambda _: pytest.fail("parsed here"))
    with pytest.raises(UserError, match=r"some\.model: not a SentencePiece model, or damaged$"):
        Tokenizer.load(path)


def stored(tokenizer: Tokenizer, folder: Path, vocab_size: int) -> DataConfig:
    (folder / "given.model").write_bytes(tokenizer.model_bytes)
    return dataclasses.replace(
        CONFIG, dir=str(folder), tokenizer="given.model", vocab_size=vocab_size
    )


def test_an_existing_model_is_used_and_no_line_is_read(tokenizer, tmp_path):
    def lines():
        raise AssertionError("read")
        yield

    prepared = prepare_tokenizer(stored(tokenizer, tmp_path, 347), lines())
    assert prepared.sha256 == tokenizer.sha256


def test_an_existing_model_of_another_size_is_refused_with_both_sizes(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"given\.model") as caught:
        prepare_tokenizer(stored(tokenizer, tmp_path, 350), [])
    assert "350" in str(caught.value) and "347" in str(caught.value)


def test_without_a_model_one_is_trained_on_the_lines(tokenizer):
    assert prepare_tokenizer(CONFIG, iter(LINES)).sha256 == tokenizer.sha256
