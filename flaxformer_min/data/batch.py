"""A batch of token ids, and the static shape that it has."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """Token ids, padded with pad; rows beyond the pairs are all pad."""

    source: np.ndarray  # int32 [B, S]
    target: np.ndarray  # int32 [B, T]


class Bucket(NamedTuple):
    """One static shape of a batch."""

    rows: int
    source_length: int
    target_length: int


def padded(batch: Sequence[Sequence[int]], width: int, pad_id: int) -> np.ndarray:
    """Token ids [len(batch), width], padded."""
    array = np.full((len(batch), width), pad_id, np.int32)
    for row, ids in enumerate(batch):
        array[row, : len(ids)] = ids
    return array
