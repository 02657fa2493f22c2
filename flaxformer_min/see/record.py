"""What is known of one sentence's way through a model: the record that is printed and drawn.

Letters: L layers, S source length, T target length, D d_model, H heads, K d_k, U d_v, F d_ff,
V vocabulary.
"""

import contextlib
import dataclasses
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_min.config import ModelConfig
from flaxformer_min.errors import UserError

# The axes of each array, and what it is in the paper's terms, in the order of computation. In the
# axes, q and k are the lengths of queries and keys. In the terms, {x} is the input of the part that
# the array belongs to, {c} what its keys and values are made of, and {h} the name of its result.
ARRAYS = {
    "embedding": ("qD", "E[ids] sqrt(D)"),
    "positions": ("qD", "position"),
    "input": ("qD", "{x} = their sum"),
    "query": ("HqK", "Q = {x} W_Q"),
    "keys": ("HkK", "K = {c} W_K"),
    "values": ("HkU", "V = {c} W_V"),
    "scores": ("Hqk", "Q K^T"),
    "scaled_scores": ("Hqk", "Q K^T / sqrt(d_k)"),
    "weights": ("Hqk", "A = softmax(.. + M)"),
    "context": ("HqU", "A V"),
    "hidden": ("qF", "max(0, {x} W_1 + b_1)"),
    "output": ("qD", "Sublayer({x})"),
    "sum": ("qD", "{x} + Sublayer({x})"),
    "norm": ("qD", "{h} = LayerNorm(sum)"),
    "states": ("qD", "{h}"),
    "logits": ("qV", "logits = {x} E^T"),
}


@dataclasses.dataclass(frozen=True)
class Side:
    """A sentence in pieces and in token ids, EOS last."""

    pieces: list[str]
    ids: list[int]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A token that may come next; its probability is the model's, before any constraint."""

    piece: str
    id: int
    probability: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """One sentence pair and every array of the forward pass on it, without padding.

    The names of the arrays are paths such as `encoder/self_attention/weights`. An array of a layer
    has the layer as its first axis. The decoder reads BOS and then the target without its EOS.
    """

    text: str
    translation: str
    config: ModelConfig
    source: Side
    target: Side
    target_in: list[str]  # the pieces that the decoder reads
    log_probs: list[float]  # of each target token, in nats
    likeliest: list[list[Candidate]]  # for each target token the likeliest ones, best first
    arrays: dict[str, np.ndarray]

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every dimension by its letter."""
        c, (length, vocab_size) = self.config, self.arrays["logits"].shape
        sizes = {"L": c.num_layers, "S": len(self.source.ids), "T": length, "D": c.d_model}
        return sizes | {"H": c.num_heads, "K": c.d_k, "U": c.d_v, "F": c.d_ff, "V": vocab_size}

    @property
    def pieces(self) -> dict[str, list[str]]:
        """The pieces of both sides, and of what the decoder reads, as an .npz names them."""
        sides = {"source/pieces": self.source.pieces, "target/pieces": self.target.pieces}
        return sides | {"decoder/pieces": self.target_in}

    def sides(self, site: str) -> tuple[list[str], list[str]]:
        """Returns the pieces of the queries and of the keys of a site of attention."""
        queries = self.source.pieces if site.startswith("encoder") else self.target_in
        return queries, self.target_in if site == "decoder/self_attention" else self.source.pieces


def axes(path: str) -> str:
    """Returns the letters of an array's dimensions: "LHTS" for the weights of cross-attention."""
    *above, name = path.split("/")
    query = "S" if path.startswith("encoder") else "T"
    key = "T" if path.startswith("decoder/self_attention") else "S"
    letters = ARRAYS[name][0].replace("q", query).replace("k", key)
    return "L" + letters if len(above) == 2 else letters


def digest(array: np.ndarray) -> dict[str, Any]:
    """Returns the first three values of an array, its mean and its standard deviation."""
    first = array.ravel()[:3].tolist()
    return {"first": first, "mean": float(array.mean()), "std": float(array.std())}


def to_json(trace: Trace) -> str:
    """Returns a JSON object: all but the arrays, and for each array its shape and `digest`."""
    arrays = {
        path: {"axes": axes(path), "shape": array.shape, **digest(array)}
        for path, array in trace.arrays.items()
    }
    rest = dataclasses.asdict(dataclasses.replace(trace, arrays={}))
    return json.dumps(rest | {"sizes": trace.sizes, "arrays": arrays})


def write_npz(path: str, arrays: dict[str, Any]) -> None:
    """Writes arrays by name. Raises UserError for another ending than .npz or a file that fails."""
    if not path.endswith(".npz"):
        raise UserError(f"{path}: arrays go to a file that ends in .npz")
    with writing(path), open(path, "wb") as file:
        np.savez_compressed(file, **arrays)


@contextlib.contextmanager
def writing(path: str) -> Generator[None]:
    """Raises UserError naming the file if what is done inside cannot write it."""
    try:
        yield
    except OSError as error:
        folder = "" if Path(path).parent.is_dir() else "; make that folder first"
        raise UserError(f"{path}: {error.strerror}{folder}") from None
