"""Turns text into token ids and back, by one SentencePiece BPE model for both languages.

The paper's tokens are described in section 5.1.
"""

import hashlib
import io
import itertools
import random
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import SupportsIndex

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from flaxformer_min.config import DataConfig
from flaxformer_min.errors import UserError

TRAINING_LINES = 2_000_000  # at most, drawn from all: SentencePiece holds them in memory
PAD_ID, UNK_ID, BOS_ID, EOS_ID = 0, 1, 2, 3  # in every model that this program trains
LONGEST_TRAINING_LINE = 4192  # bytes; longer lines teach the tokenizer nothing new
# The name of the normalisation in a model that this program trains: text is brought to Unicode's
# form NFC here, before SentencePiece sees it. A model under any other name gets text as it is.
NFC = "nfc"

# SentencePiece is C++: a malformed model may crash the interpreter, so another one tries it first.
_TRIAL = """
import sys, sentencepiece
model = sentencepiece.SentencePieceProcessor(model_proto=sys.stdin.buffer.read())
ids = list(range(model.get_piece_size()))
model.encode([model.id_to_piece(i) for i in ids])
model.decode(ids)
"""


class Tokenizer:
    """A SentencePiece model and the ids of pad, unk, bos and eos, which are all different.

    A model that lacks pad, bos or eos gets ids for them above its last piece. Decoding the ids of a
    line gives the line back, up to the changes of the model's own normalisation. A model that this
    program trained with byte fallback gives the line back in NFC, which looks the same, and changes
    one character more: U+2581, SentencePiece's mark for a space, comes back as a space.
    """

    def __init__(self, model_bytes: bytes) -> None:
        """Parses a model that this program wrote; any other model has to go through `load`.

        Raises UserError if the bytes are no SentencePiece model.
        """
        self.model_bytes = model_bytes
        self.sha256 = hashlib.sha256(model_bytes).hexdigest()
        self._processor = _processor(model_bytes)
        self.vocab_size: int = self._processor.get_piece_size()
        self.unk_id: int = self._processor.unk_id()
        self._added: dict[int, str] = {}
        self.pad_id = self._own_or_added(self._processor.pad_id(), "<pad>")
        self.bos_id = self._own_or_added(self._processor.bos_id(), "<s>")
        self.eos_id = self._own_or_added(self._processor.eos_id(), "</s>")
        try:
            self._form = _name_of_normalisation(model_bytes)
            self.never_generated = self._never_generated()  # ids, ascending
        except (DecodeError, UnicodeDecodeError):
            raise UserError("damaged: a piece of the model is not UTF-8") from None

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads a model file of any origin; another process tries the model first.

        Raises UserError naming the file if it is missing or malformed.
        """
        try:
            model_bytes = Path(path).read_bytes()
            _try_elsewhere(model_bytes)
            return cls(model_bytes)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; give a SentencePiece model file") from None
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    def encode(self, line: str) -> list[int]:
        """Returns the ids of one line, EOS last.

        The names of control symbols in the text are ordinary text.
        """
        return self.encode_batch([line])[0]

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each line, EOS last; faster than `encode` for many lines."""
        texts = list(map(nfc, lines)) if self._form == NFC else list(lines)
        return [[*ids, self.eos_id] for ids in self._processor.encode(texts)]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Returns the text of the ids before the first EOS, without pad and bos.

        Bytes that are no UTF-8 become U+FFFD; a line break becomes a space, so that the text stays
        one line.
        """
        before_eos = itertools.takewhile(lambda i: i != self.eos_id, map(int, ids))
        content = [i for i in before_eos if i not in (self.pad_id, self.bos_id)]
        text = self._processor.decode(content)
        return text.replace("\n", " ").replace("\r", " ")

    def pieces(self, ids: Iterable[SupportsIndex]) -> list[str]:
        """Returns the name of each id, special ids included."""
        return [self._added.get(i) or self._processor.id_to_piece(i) for i in map(int, ids)]

    def _own_or_added(self, own_id: int, name: str) -> int:
        """Returns the model's id of a special piece, or a new id if the model has none (-1)."""
        if own_id >= 0:
            return own_id
        self._added[self.vocab_size] = name
        self.vocab_size += 1
        return self.vocab_size - 1

    def _never_generated(self) -> tuple[int, ...]:
        """Returns special ids but EOS, and pieces that contain a line break or are its byte."""
        model = self._processor
        never = {self.pad_id, self.unk_id, self.bos_id}
        for i in range(model.get_piece_size()):
            piece = model.id_to_piece(i)
            breaks_line = "\n" in piece or "\r" in piece
            breaks_line |= model.is_byte(i) and piece in ("<0x0A>", "<0x0D>")
            if breaks_line or (model.is_control(i) and i != self.eos_id):
                never.add(i)
        return tuple(sorted(never))


def prepare_tokenizer(config: DataConfig, lines: Iterable[str]) -> Tokenizer:
    """Returns the tokenizer that `config.tokenizer` names, or one trained on `lines`.

    The lines are read only if there is one to train. Raises UserError if an existing model has
    another size than `config.vocab_size`.
    """
    if config.tokenizer is None:
        return Tokenizer(train_tokenizer(lines, config))
    path = Path(config.dir) / config.tokenizer
    tokenizer = Tokenizer.load(path)
    if tokenizer.vocab_size != config.vocab_size:
        raise UserError(
            f"data.vocab_size is {config.vocab_size}, but {path} has {tokenizer.vocab_size} ids; "
            f"set data.vocab_size to {tokenizer.vocab_size}"
        )
    return tokenizer


def train_tokenizer(lines: Iterable[str], config: DataConfig) -> bytes:
    """Trains a BPE model on lines of both languages; returns the bytes of its model file.

    The text is brought to NFC and is otherwise used as it is, white space included (SentencePiece's
    defaults would destroy U+2028, U+202F and U+00A0). At most TRAINING_LINES lines are used,
    drawn with `config.seed`. The same lines and config give the same bytes.
    Raises UserError if the corpus is too small for the vocabulary, or has too many characters.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=map(nfc, _emptied(_sample(lines, TRAINING_LINES, config.seed))),
            model_writer=model,
            model_type="bpe",
            vocab_size=config.vocab_size,
            character_coverage=config.character_coverage,
            byte_fallback=config.byte_fallback,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            pad_id=PAD_ID,
            unk_id=UNK_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            max_sentence_length=LONGEST_TRAINING_LINE,
            num_threads=1,  # the order of work decides ties
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _training_error(str(error), config.vocab_size) from error
    named = ModelProto.FromString(model.getvalue())
    named.normalizer_spec.name = NFC  # SentencePiece itself looks at the rules alone: it has none
    return named.SerializeToString(deterministic=True)


def nfc(text: str) -> str:
    """Returns a text in Unicode's form NFC, which looks the same; most text is in it already."""
    return unicodedata.normalize("NFC", text)


def _name_of_normalisation(model_bytes: bytes) -> str:
    return ModelProto.FromString(model_bytes).normalizer_spec.name


def _sample(lines: Iterable[str], size: int, seed: int) -> list[str]:
    """Returns at most `size` of the lines, each equally likely to be chosen (reservoir sampling).

    SentencePiece can sample too, but always with the same seed.
    """
    draw = random.Random(seed)
    kept: list[str] = []
    for number, line in enumerate(lines):
        if number < size:
            kept.append(line)
        elif (place := draw.randrange(number + 1)) < size:
            kept[place] = line
    return kept


def _emptied(lines: list[str]) -> Iterator[str]:
    """Yields the lines in order and removes each from the list: SentencePiece keeps a copy."""
    lines.reverse()
    while lines:
        yield lines.pop()


def _training_error(message: str, asked: int) -> UserError | RuntimeError:
    """Returns a UserError for a message of SentencePiece that is the user's mistake.

    For any other message it returns a RuntimeError.
    """
    if found := re.search(r"Vocabulary size too high .* <= (\d+)", message):
        return UserError(
            f"data.vocab_size: {asked} is more than this corpus gives; at most {found[1]}"
        )
    if found := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return UserError(
            f"data.vocab_size: {asked} does not hold this corpus's characters; "
            f"at least {found[1]}, or lower data.character_coverage"
        )
    if "sentences_.empty()" in message:
        return UserError(
            "data.train: no line to train a tokenizer on; "
            f"one is needed of 1 to {LONGEST_TRAINING_LINE} bytes"
        )
    return RuntimeError(message)


def _try_elsewhere(model_bytes: bytes) -> None:
    """Raises UserError if another interpreter fails to load and use the model, or crashes."""
    child = [sys.executable, "-P", "-c", _TRIAL]
    if subprocess.run(child, input=model_bytes, capture_output=True).returncode:
        raise UserError("not a SentencePiece model, or damaged")


def _processor(model_bytes: bytes) -> sentencepiece.SentencePieceProcessor:
    if not model_bytes:  # SentencePiece would take it for a model still to be loaded
        raise UserError("empty; give a SentencePiece model file")
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    except RuntimeError:
        raise UserError("not a SentencePiece model, or damaged") from None
