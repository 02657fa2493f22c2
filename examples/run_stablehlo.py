"""Translates a line with what `export stablehlo` wrote: JAX alone, nothing of this package.

    python examples/run_stablehlo.py EXPORTED "a line of the source language"

SentencePiece makes ids of text; a program in any language can do that.
"""

import sys
from pathlib import Path

import jax
import numpy as np
import sentencepiece


def main(folder: Path, line: str) -> str:
    program = jax.export.deserialize(bytearray((folder / "greedy.stablehlo").read_bytes()))
    weights = list(np.load(folder / "weights.npz").values())
    tokenizer = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    rows, length = program.in_avals[-1].shape
    source = np.full((rows, length), tokenizer.pad_id(), np.int32)
    ids = [*tokenizer.encode(line)[: length - 1], tokenizer.eos_id()]
    source[0, : len(ids)] = ids
    target = np.asarray(program.call(weights, source))[0].tolist()
    ended = tokenizer.eos_id() in target
    return tokenizer.decode(target[: target.index(tokenizer.eos_id())] if ended else target)


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), sys.argv[2]))
