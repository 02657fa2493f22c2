"""Trains the SentencePiece BPE model of a run on its corpus (paper, section 5.1)."""

import io
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from flaxformer_min.config import DataConfig
from flaxformer_min.data.tokenizer import BOS_ID, EOS_ID, NFC, PAD_ID, UNK_ID, Tokenizer, nfc
from flaxformer_min.errors import UserError

VERSION = 1  # of the tokenizers made here: another one may be made of the same text otherwise
TRAINING_LINES = 2_000_000  # at most, drawn from all: SentencePiece holds them in memory
LONGEST_TRAINING_LINE = 4192  # bytes; longer lines teach the tokenizer nothing new


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
