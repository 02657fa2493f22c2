"""The whole greedy search as StableHLO, for programs that have JAX and not this package.

    greedy.stablehlo   jax.export's file: (weights, source ids [B, S]) -> target ids [B, T]
    weights.npz        the weights, in the order in which the program takes them
    pieces.json        the names of all ids, and the ids of pad and EOS
    tokenizer.model    the SentencePiece model, or Marian's archive

examples/run_stablehlo.py runs them.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from flaxformer_min.checkpoints.format import Loaded
from flaxformer_min.checkpoints.leaves import named_leaves, nested
from flaxformer_min.decoding.batches import rows_at_once
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.programs import search_batch
from flaxformer_min.decoding.sentences import PaddedSentences
from flaxformer_min.errors import UserError
from flaxformer_min.interop.export import new_directory
from flaxformer_min.interop.marian import MODEL
from flaxformer_min.model.build import split_model

PLATFORMS = "cpu", "cuda", "tpu"
PROGRAM, WEIGHTS, PIECES = "greedy.stablehlo", "weights.npz", "pieces.json"


def export_stablehlo(loaded: Loaded, output: Path, rows: int, length: int) -> list[str]:
    """Writes greedy search for B = `rows` sentences of at most S = `length` ids, padded.

    A translation ends in EOS and is then padded; it has at most S + decode.max_length_offset ids.
    """
    model, tokenizer = loaded.config.model, loaded.tokenizer
    if length > model.max_length:
        raise UserError(f"--length {length}: the model takes at most {model.max_length} ids")
    longest, graphdefs = model.max_length, (split_model(model, tokenizer.vocab_size)[0],)
    leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(loaded.params).items()}
    options = Options(beam_size=1).with_defaults(loaded.config.decode)

    def greedy(weights: list[Array], source: Int[Array, "B S"]) -> Int[Array, "B T"]:
        params = nested(dict(zip(leaves, weights, strict=True)))
        missing = -rows % rows_at_once(length)  # a search takes whole groups of rows
        source = jnp.pad(source, ((0, missing), (0, 0)), constant_values=tokenizer.pad_id)
        draws = jnp.zeros((len(source), 2), jnp.uint32)  # of sampling, which is not done here
        sentences = PaddedSentences(source, None, draws)
        found = search_batch(graphdefs, tokenizer, longest, (params,), sentences, options)
        return found.tokens[:rows, 0]

    weights = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves.values()]
    source = jax.ShapeDtypeStruct((rows, length), np.int32)
    program = jax.export.export(jax.jit(greedy), platforms=PLATFORMS)(weights, source)
    names = tokenizer.pieces(range(tokenizer.vocab_size))
    ids = {"pieces": names, "pad_id": tokenizer.pad_id, "eos_id": tokenizer.eos_id}
    with new_directory(output) as folder:
        (folder / PROGRAM).write_bytes(program.serialize())
        arrays: dict[str, Any] = {name.replace("/", "."): leaf for name, leaf in leaves.items()}
        np.savez(folder / WEIGHTS, **arrays)
        (folder / PIECES).write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
        (folder / MODEL).write_bytes(tokenizer.model_bytes)
    return []
