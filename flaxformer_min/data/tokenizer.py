"""Turns text into token ids and back.

A run of this program has one SentencePiece BPE model for both languages (paper, section 5.1). A
model that comes from Marian has one for each language and a table of ids. Its model file is a zip
archive of the three files that a Marian directory has for that:

    source.spm    cuts a source line into pieces
    target.spm    cuts a target line into pieces, and joins them again
    vocab.json    {piece: id} for the pieces of both; the ids are 0 to V - 1
"""

import hashlib
import io
import itertools
import json
import re
import subprocess
import sys
import unicodedata
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from flaxformer_min.errors import UserError

PAD_ID, UNK_ID, BOS_ID, EOS_ID = 0, 1, 2, 3  # in every model that this program trains
Side = Literal["source", "target"]
# The name of the normalisation in a model that this program trains: text is brought to Unicode's
# form NFC here, before SentencePiece sees it. A model under any other name gets text as it is.
NFC = "nfc"

SOURCE, TARGET, VOCABULARY = "source.spm", "target.spm", "vocab.json"  # of Marian
PAD, UNK, EOS = "<pad>", "<unk>", "</s>"
_ZIP = b"PK\x03\x04"  # how a zip archive begins; no SentencePiece model does
_UNREADABLE = (zipfile.BadZipFile, zlib.error, KeyError, ValueError, RuntimeError, OSError)
_LANGUAGE = re.compile(r">>[^<>]+<<")

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

    def encode(self, line: str, side: Side = "source") -> list[int]:
        """Returns the ids of one line, EOS last; both sides are encoded alike.

        The names of control symbols in the text are ordinary text.
        """
        return self.encode_batch([line], side)[0]

    def encode_batch(self, lines: Sequence[str], side: Side = "source") -> list[list[int]]:
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


class MarianTokenizer(Tokenizer):
    """The tokenizer of a Marian model, with a SentencePiece model for either side.

    A line may begin with the name of the target language, such as ">>deu<<", if that is in the
    table of ids. Marian has no BOS: `bos_id` is `pad_id`, with which its decoder begins.
    """

    def __init__(self, model_bytes: bytes) -> None:
        """Parses what `pack` made. Raises UserError naming the part that is malformed."""
        self.model_bytes = model_bytes
        self.sha256 = hashlib.sha256(model_bytes).hexdigest()
        parts = unpack(model_bytes)
        self._models = {side: _processor(parts[side]) for side in (SOURCE, TARGET)}
        self._ids = _vocabulary(parts[VOCABULARY])
        self._pieces = sorted(self._ids, key=self._ids.__getitem__)
        self.vocab_size = len(self._pieces)
        self.pad_id, self.unk_id, self.eos_id = (self._ids[name] for name in (PAD, UNK, EOS))
        self.bos_id = self.pad_id
        names = {PAD, UNK}
        broken = {piece for piece in self._pieces if "\n" in piece or "\r" in piece}
        never = names | broken | {"<0x0A>", "<0x0D>"} & self._ids.keys()
        self.never_generated = tuple(sorted(self._ids[piece] for piece in never))

    def encode_batch(self, lines: Sequence[str], side: Side = "source") -> list[list[int]]:
        """Returns the ids of each line of this side, EOS last."""
        languages = map(_LANGUAGE.match, lines)
        ends = [0 if found is None else found.end() for found in languages]
        rest = [line[end:] for line, end in zip(lines, ends, strict=True)]
        model = self._models[SOURCE if side == "source" else TARGET]
        return [
            [*self._numbers([line[:end]] if end else []), *self._numbers(pieces), self.eos_id]
            for line, end, pieces in zip(lines, ends, model.encode(rest, out_type=str), strict=True)
        ]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Returns the target text of the ids before the first EOS, without pad and languages."""
        before_eos = itertools.takewhile(lambda i: i != self.eos_id, map(int, ids))
        pieces = [self._pieces[i] for i in before_eos if i != self.pad_id]
        text = self._models[TARGET].decode([p for p in pieces if not _LANGUAGE.fullmatch(p)])
        return text.replace("\u2581", " ").strip().replace("\n", " ").replace("\r", " ")

    def pieces(self, ids: Iterable[SupportsIndex]) -> list[str]:
        """Returns the name of each id, special ids included."""
        return [self._pieces[int(i)] for i in ids]

    def _numbers(self, pieces: Iterable[str]) -> list[int]:
        return [self._ids.get(piece, self.unk_id) for piece in pieces]


def open_tokenizer(model_bytes: bytes) -> Tokenizer:
    """Parses the model file of a checkpoint, which this program wrote, whatever kind it is."""
    return (MarianTokenizer if model_bytes.startswith(_ZIP) else Tokenizer)(model_bytes)


def pack(parts: Mapping[str, bytes]) -> bytes:
    """Makes one model file of source.spm, target.spm and vocab.json; equal parts, equal bytes.

    Raises UserError naming the part that is malformed.
    """
    for side in (SOURCE, TARGET):
        try:
            _try_elsewhere(parts[side])
        except UserError as error:
            raise UserError(f"{side}: {error}") from None
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name in (SOURCE, TARGET, VOCABULARY):  # an entry made so has no time of its own
            file.writestr(zipfile.ZipInfo(name), parts[name], zipfile.ZIP_DEFLATED)
    MarianTokenizer(archive.getvalue())
    return archive.getvalue()


def unpack(model_bytes: bytes) -> dict[str, bytes]:
    """Returns the three parts of a model file. Raises UserError if they are not there."""
    try:
        with zipfile.ZipFile(io.BytesIO(model_bytes)) as file:
            return {name: file.read(name) for name in (SOURCE, TARGET, VOCABULARY)}
    except _UNREADABLE as error:
        raise UserError(f"not the archive of a Marian tokenizer, or damaged: {error}") from None


def _vocabulary(text: bytes) -> dict[str, int]:
    """Reads {piece: id}. Raises UserError unless the ids are 0 to V - 1 and the names are there."""
    try:
        ids: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{VOCABULARY}: not JSON: {error!s:.80}") from None
    if not isinstance(ids, dict) or not all(type(i) is int for i in ids.values()):
        raise UserError(f"{VOCABULARY}: must be an object of pieces and whole numbers")
    if sorted(ids.values()) != list(range(len(ids))):
        raise UserError(f"{VOCABULARY}: its ids must be 0 to {len(ids) - 1}, each of them once")
    for name in (PAD, UNK, EOS):
        if name not in ids:
            raise UserError(f"{VOCABULARY}: {name} is missing")
    return ids


def nfc(text: str) -> str:
    """Returns a text in Unicode's form NFC, which looks the same; most text is in it already."""
    return unicodedata.normalize("NFC", text)


def _name_of_normalisation(model_bytes: bytes) -> str:
    return ModelProto.FromString(model_bytes).normalizer_spec.name


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
