"""What memory alone can do: the yardstick beside a model's exact match on held-out phrases."""

import collections
from collections.abc import Sequence

import numpy as np


def nearest_neighbours(train_sources: Sequence[str], queries: Sequence[str]) -> list[int]:
    """For each query the index of the training source most like it.

    Likeness is Dice's coefficient of the sets of character trigrams, 2 |a and b| / (|a| + |b|),
    with two spaces before a text and one behind it, so that its ends count too. The first of
    several equally near sources is taken. `train_sources` must not be empty.
    """
    postings: dict[str, list[int]] = collections.defaultdict(list)
    for index, source in enumerate(train_sources):
        for trigram in _trigrams(source):
            postings[trigram].append(index)
    arrays = {trigram: np.array(indices) for trigram, indices in postings.items()}
    sizes = np.array([len(_trigrams(source)) for source in train_sources])
    return [_nearest(_trigrams(query), arrays, sizes) for query in queries]


def _trigrams(text: str) -> set[str]:
    padded = f"  {text} "
    return {padded[i : i + 3] for i in range(len(padded) - 2)}


def _nearest(trigrams: set[str], postings: dict[str, np.ndarray], sizes: np.ndarray) -> int:
    found = [postings[trigram] for trigram in trigrams if trigram in postings]
    if not found:
        return 0
    shared = np.bincount(np.concatenate(found), minlength=len(sizes))
    return int(np.argmax(2 * shared / (sizes + len(trigrams))))
