"""A batch of token ids, and the static shape that it has."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """Token ids of B pairs, padded with pad_id; rows beyond the last pair are all padding."""

    source: np.ndarray  # int32 [B, S]
    target: np.ndarray  # int32 [B, T]


class Bucket(NamedTuple):
    """One static shape of a batch: B, S and T."""

    rows: int
    source_length: int
    target_length: int


def padded(batch: Sequence[Sequence[int]], width: int, pad_id: int) -> np.ndarray:
    """Returns token ids as int32 [len(batch), width], each row padded at its end."""
    array = np.full((len(batch), width), pad_id, np.int32)
    for row, ids in enumerate(batch):
        array[row, : len(ids)] = ids
    return array
