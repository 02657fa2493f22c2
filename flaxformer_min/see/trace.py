"""Follows one sentence through a trained model, in the paper's order.

Letters: T target length, V vocabulary.
"""

import functools
from typing import Any

import jax
import numpy as np
from flax import nnx

from flaxformer_min.data.lines import is_blank
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.errors import UserError
from flaxformer_min.model.build import Params, split_model
from flaxformer_min.model.teacher_forcing import forced_states
from flaxformer_min.model.transformer import Source, Target
from flaxformer_min.see.record import Candidate, Side, Trace

CANDIDATES = 5  # next tokens that are named at each step


def trace_sentence(translator: Translator, text: str, target: str | None = None) -> Trace:
    """Returns the `Trace` of a sentence and its translation.

    Without `target` the model first decodes greedily; the trace is the teacher-forced pass over
    what it wrote. Raises UserError for a side that is blank or longer than the model takes.
    """
    tokenizer, config = translator.tokenizer, translator.config.model
    source = _ids(tokenizer, text, config.max_length)
    if target is None:
        (found,) = translator.translate([text], Options(beam_size=1))
        target, written = found.text, list(found.tokens)
    else:
        written = _ids(tokenizer, target, config.max_length)
    graphdef, _ = split_model(config, tokenizer.vocab_size)
    forward = jax.jit(functools.partial(_forward, graphdef, tokenizer))
    pair = np.array([source], np.int32), np.array([written], np.int32)
    taps, log_probs = jax.device_get(forward(translator.params, *pair))
    return Trace(
        text,
        target,
        config,
        Side(tokenizer.pieces(source), source),
        Side(tokenizer.pieces(written), written),
        tokenizer.pieces([tokenizer.bos_id, *written[:-1]]),
        log_probs[range(len(written)), written].tolist(),
        [_likeliest(tokenizer, row) for row in log_probs],
        dict(_array(*each) for each in jax.tree.leaves_with_path(taps)),
    )


def _ids(tokenizer: Tokenizer, text: str, most: int) -> list[int]:
    if is_blank(text):
        raise UserError("a blank sentence cannot be traced: give at least one word")
    if len(ids := tokenizer.encode(text)) > most:
        raise UserError(f"{text[:20]}... has {len(ids)} tokens: the model takes {most}, shorten it")
    return ids


def _forward(
    graphdef: nnx.GraphDef, tokenizer: Tokenizer, params: Params, source: Source, target: Target
) -> tuple[dict[str, Any], jax.Array]:
    """Returns the taps of a teacher-forced pass on one pair, and log-probabilities [T, V]."""
    model, taps = nnx.merge(graphdef, params), {}
    ids = {"pad_id": tokenizer.pad_id, "bos_id": tokenizer.bos_id}
    taps["logits"] = model.project(forced_states(model, source, target, **ids, taps=taps))
    return taps, jax.nn.log_softmax(taps["logits"][0])


def _likeliest(tokenizer: Tokenizer, log_probs: np.ndarray) -> list[Candidate]:
    best = np.argsort(-log_probs, kind="stable")[:CANDIDATES].tolist()
    chances = np.exp(log_probs[best]).tolist()
    return list(map(Candidate, tokenizer.pieces(best), best, chances))


def _array(keys: Any, value: np.ndarray) -> tuple[str, np.ndarray]:
    """Returns the path of a tap, and its array as float32 without the axis of the batch.

    That axis is the first one, but the second one of arrays that are stacked by layer.
    """
    batch = 1 if len(keys) == 3 else 0
    path = jax.tree_util.keystr(keys, simple=True, separator="/")
    return path, value.take(0, axis=batch).astype(np.float32)
