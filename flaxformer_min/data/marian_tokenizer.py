"""The tokenizer of a Marian model: one SentencePiece model for each language, and a table of ids.

Its model file is a zip archive of the three files that a Marian directory has for it:

    source.spm    cuts a source line into pieces
    target.spm    cuts a target line into pieces, and joins them again
    vocab.json    {piece: id} for the pieces of both; the ids are 0 to V - 1

A line may begin with the name of the target language, such as ">>deu<<", if that is in the
table. Marian has no BOS: the decoder begins with pad.
"""

import hashlib
import io
import itertools
import json
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

from flaxformer_min.data.tokenizer import Side, Tokenizer, processor, try_elsewhere
from flaxformer_min.errors import UserError

SOURCE, TARGET, VOCABULARY = "source.spm", "target.spm", "vocab.json"
PAD, UNK, EOS = "<pad>", "<unk>", "</s>"
ZIP = b"PK\x03\x04"  # how a zip archive begins; no SentencePiece model does
_UNREADABLE = (zipfile.BadZipFile, zlib.error, KeyError, ValueError, RuntimeError, OSError)
_LANGUAGE = re.compile(r">>[^<>]+<<")


class MarianTokenizer(Tokenizer):
    """Does what its base class does, with a model of its own for either side.

    `bos_id` is `pad_id`, since that is what Marian's decoder begins with.
    """

    def __init__(self, model_bytes: bytes) -> None:
        """Parses what `pack` made. Raises UserError naming the part that is malformed."""
        self.model_bytes = model_bytes
        self.sha256 = hashlib.sha256(model_bytes).hexdigest()
        parts = unpack(model_bytes)
        self._models = {side: processor(parts[side]) for side in (SOURCE, TARGET)}
        self._ids = _vocabulary(parts[VOCABULARY])
        self._pieces = sorted(self._ids, key=self._ids.__getitem__)
        self.vocab_size = len(self._pieces)
        self.pad_id, self.unk_id, self.eos_id = (self._ids[name] for name in (PAD, UNK, EOS))
        self.bos_id = self.pad_id
        names = {PAD, UNK}
        broken = {piece for piece in self._pieces if "\n" in piece or "\r" in piece}
        never = names | broken | {"<0x0A>", "<0x0D>"} & self._ids.keys()
        self.never_generated = tuple(sorted(self._ids[piece] for piece in never))

    def encode(self, line: str, side: Side = "source") -> list[int]:
        """Returns the ids of one line of this side, EOS last."""
        return self.encode_batch([line], side)[0]

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
    return (MarianTokenizer if model_bytes.startswith(ZIP) else Tokenizer)(model_bytes)


def pack(parts: Mapping[str, bytes]) -> bytes:
    """Makes one model file of source.spm, target.spm and vocab.json; equal parts, equal bytes.

    Raises UserError naming the part that is malformed.
    """
    for side in (SOURCE, TARGET):
        try:
            try_elsewhere(parts[side])
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
