"""The models of the training benchmark."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

# Token ids [B, S] and [B, T], int32, padded with 0 -> a number, usually the loss.
Step = Callable[[np.ndarray, np.ndarray], float]


class Size(NamedTuple):
    """A model; d_k = d_v = d_model / num_heads."""

    num_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    vocab_size: int
    dropout: float = 0.1


SMALL = Size(num_layers=4, d_model=128, d_ff=512, num_heads=4, vocab_size=10_000)
LARGE = Size(num_layers=6, d_model=512, d_ff=2_048, num_heads=8, vocab_size=16_000)
