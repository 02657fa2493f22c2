"""Describes a tokenizer for see/page/pieces.js, which does what SentencePiece does for it."""

from typing import Any

from sentencepiece.sentencepiece_model_pb2 import ModelProto

from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.errors import UserError

CONTROL, USER_DEFINED, UNUSED, BPE = 3, 4, 5, 2  # numbers in the format of SentencePiece's models


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns what see/page/pieces.js needs. Raises UserError for a model that it does not know."""
    if type(tokenizer) is not Tokenizer:
        raise UserError("its tokenizer is Marian's; the page knows one SentencePiece model alone")
    proto = ModelProto.FromString(tokenizer.model_bytes)
    rules, trained = proto.normalizer_spec, proto.trainer_spec
    types = [piece.type for piece in proto.pieces]
    reasons = {
        "is no BPE model": trained.model_type != BPE,
        "changes text by rules": rules.precompiled_charsmap or rules.remove_extra_whitespaces,
        "marks words by what follows": trained.treat_whitespace_as_suffix,
        "leaves spaces as they are": not rules.escape_whitespaces,
        "has pieces of a user": USER_DEFINED in types or UNUSED in types,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError(f"its tokenizer {reason}, which the page cannot do")
    added = tokenizer.vocab_size - len(types)
    return {
        "pieces": tokenizer.pieces(range(tokenizer.vocab_size)),
        "scores": [piece.score for piece in proto.pieces] + [0] * added,
        "types": types + [CONTROL] * added,
        "dummyPrefix": rules.add_dummy_prefix,
        "byteFallback": trained.byte_fallback,
        "nfc": rules.name == "nfc",
        **{name: getattr(tokenizer, f"{name}_id") for name in ("pad", "unk", "bos", "eos")},
    }
