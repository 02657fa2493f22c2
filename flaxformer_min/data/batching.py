"""Plans which pairs form the batch of step n, so that batches have few static shapes.

The plan of an epoch is a pure function of (lengths, config, seed, epoch). So the step number alone
says where a run is in the data, and a checkpoint saves nothing else about it.
"""

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

import numpy as np

from flaxformer_min.config import DataConfig
from flaxformer_min.data.batch import Batch, Bucket
from flaxformer_min.data.corpus import EncodedCorpus
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.errors import UserError
from flaxformer_min.system.threads import map_ahead

EVALUATION_BUCKETS = 4  # a small split does not repay more compilations
PREFETCHED = 4  # batches made ahead of the training step


class BatchPlan:
    """The batches of every epoch: each pair once, in at most `config.num_buckets` shapes.

    A bucket holds the pairs whose longer side lies between two edges, and gives its batches their
    shape. The pair ids of an epoch stand bucket after bucket in one array, and batches are cut from
    its left end. Here three buckets have batches of 3, 2 and 1 rows:

        pair id               7 2 9 4 0 8 3 5 1 6 . . . . . .
        bucket of the pair    0 0 0 0 0 0 0 1 1 1 1 1 1 2 2 2
        batch of the pair     A A A B B B C C D D E E F G H I
        bucket of the batch   0     0     1   1   1   2 2 2 2

    Pair 3 is left over in bucket 0: it is too few for one more batch there, and opens the first
    batch of the next longer bucket. Shuffling within the buckets leaves other pairs over in each
    epoch. All batches are full but perhaps the last one, so every epoch has the same number of
    batches of the same shapes. They are trained on in an order that is drawn for each epoch.
    """

    def __init__(self, lengths: np.ndarray, config: DataConfig, *, shuffle: bool = True) -> None:
        """Plans pairs of `lengths` [N, 2], EOS counted, shuffled with `config.seed` or not at all.

        Raises UserError if `config.row_multiple` rows of the longest pair are more tokens than
        `config.tokens_per_batch`.
        """
        longer = lengths.max(axis=1)
        edges = bucket_edges(np.bincount(longer), config.num_buckets)
        bucket_of_pair = np.searchsorted(edges, longer)
        longest = np.array([lengths[bucket_of_pair == b].max(axis=0) for b in range(len(edges))])
        longest = np.maximum.accumulate(longest)  # pairs that a bucket leaves over must fit too
        pairs = np.bincount(bucket_of_pair)
        rows, batches = _rows_and_batches(pairs, longest.max(axis=1), config)
        used = batches > 0  # a bucket with too few pairs for a batch leaves them to the next
        bucket_of_pair = np.searchsorted(edges[used], longer)
        shapes = np.column_stack([rows, longest])[used]

        self._seed = config.seed if shuffle else None
        self.buckets = [Bucket(*shape) for shape in shapes.tolist()]  # by length
        self.batches_per_epoch = int(batches.sum())
        # In the picture above: the line of pair ids, unshuffled, and the places in it at which
        # buckets and batches end. Only the last batch may end after the last id.
        self._ids = np.argsort(bucket_of_pair, kind="stable").astype(np.int32)
        self._bucket_ends = np.cumsum(np.bincount(bucket_of_pair))
        self._batch_buckets = np.repeat(np.arange(len(self.buckets)), batches[used])
        self._batch_ends = np.cumsum(shapes[self._batch_buckets, 0])
        self._planned = -1, self._ids, self._ids  # an epoch (-1: none yet) and its _plan

    def batch_ids(self, step: int) -> tuple[int, np.ndarray]:
        """Returns the bucket of a step, an index into `buckets`, and its pair ids.

        The first step is 0. There are as many ids as the bucket has rows, or fewer in one batch of
        an epoch. Any step can be asked for at any time; within one epoch the answer is quick.
        """
        epoch, place = divmod(step, self.batches_per_epoch)
        planned = self._planned  # another thread may be in another epoch
        if planned[0] != epoch:
            planned = self._planned = (epoch, *self._plan(epoch))
        _, ids, order = planned
        batch = order[place]
        bucket, end = int(self._batch_buckets[batch]), self._batch_ends[batch]
        return bucket, ids[end - self.buckets[bucket].rows : end]

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the pair ids of an epoch, and the order in which its batches are trained on."""
        if self._seed is None:
            return self._ids, np.arange(self.batches_per_epoch)
        random = np.random.default_rng((self._seed, epoch))
        ids = self._ids.copy()
        for bucket in np.split(ids, self._bucket_ends[:-1]):  # views
            random.shuffle(bucket)
        return ids, random.permutation(self.batches_per_epoch)


def bucket_edges(counts: np.ndarray, most: int) -> np.ndarray:
    """Returns the lengths at which buckets end, at most `most`, so that there is least padding.

    `counts[n]` is the number of pairs of length n. The answer is exact, by dynamic programming: the
    best k buckets for the shortest lengths are the best k - 1 for fewer of them, and one more.
    """
    lengths = np.flatnonzero(counts)
    pairs = np.cumsum(counts[lengths])
    before = np.concatenate([[0], pairs[:-1]])
    # cost[i, j]: tokens, padding counted, of one bucket from the i-th to the j-th length
    cost = np.where(np.tri(len(lengths)).T, (pairs - before[:, None]) * lengths, np.inf)
    best, firsts = cost[0], []
    for _ in range(min(most, len(lengths)) - 1):
        total = best[:-1, None] + cost[1:]  # [i - 1, j]: the last bucket begins at i
        firsts.append(1 + total.argmin(axis=0))
        best = total.min(axis=0)
    last = len(lengths) - 1
    edges = [lengths[last]]
    for first in reversed(firsts):
        last = first[last] - 1
        edges.append(lengths[last])
    return np.array(edges[::-1])


def _rows_and_batches(
    pairs: np.ndarray, length: np.ndarray, config: DataConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of a batch and the batches of an epoch, for each bucket.

    `pairs` is the number of pairs in each bucket, and `length` the width of its longer side. Raises
    UserError if the token budget is too small for `config.row_multiple` rows.
    """
    multiple = config.row_multiple
    rows = config.tokens_per_batch // length // multiple * multiple
    if rows[-1] == 0:
        raise UserError(
            f"data.tokens_per_batch: {config.tokens_per_batch} is too few for {multiple} rows "
            f"(data.row_multiple) of {length[-1]} tokens; at least {multiple * length[-1]}"
        )
    batches, left = np.zeros_like(rows), 0
    for b in range(len(rows)):
        batches[b], left = divmod(pairs[b] + left, rows[b])
    if left:  # one more batch; all batches of the last bucket shrink, so that few rows have no pair
        remaining = batches[-1] * rows[-1] + left
        batches[-1] += 1
        rows[-1] = -(-remaining // (batches[-1] * multiple)) * multiple
    return rows, batches


# From the number of a batch's rows to the indices, ascending, of the rows that this process holds.
OwnRows = Callable[[int], np.ndarray]


def assemble(
    plan: BatchPlan, corpus: EncodedCorpus, pad_id: int, step: int, own_rows: OwnRows = np.arange
) -> Batch:
    """Returns the batch of a step, or the rows of it that this process holds.

    `plan` is that of the whole batch in every process. `own_rows` gives the rows of this process.
    """
    bucket, ids = plan.batch_ids(step)
    rows, *widths = plan.buckets[bucket]
    own = own_rows(rows)
    ids = ids[own[own < len(ids)]]  # rows without a pair are the last ones
    batch = Batch(*(np.full((len(own), width), pad_id, np.int32) for width in widths))
    for side, array in enumerate(batch):
        corpus.copy_rows(ids, side, to=array)
    return batch


class Data(NamedTuple):
    """The tokenizer and corpora of a run, and the plan of its training batches."""

    tokenizer: Tokenizer
    train: EncodedCorpus
    validation: EncodedCorpus
    plan: BatchPlan


def batch_iterator(
    plan: BatchPlan,
    corpus: EncodedCorpus,
    pad_id: int,
    start_step: int,
    own_rows: OwnRows = np.arange,
) -> Generator[Batch, None, None]:
    """Yields batches from `start_step` on without end; close() ends the thread that makes them."""
    return map_ahead(
        lambda step: assemble(plan, corpus, pad_id, step, own_rows),
        itertools.count(start_step),
        threads=1,  # more only take turns
        ahead=PREFETCHED,
    )


def evaluation_batches(
    corpus: EncodedCorpus,
    config: DataConfig,
    pad_id: int,
    row_multiple: int = 1,
    own_rows: OwnRows = np.arange,
) -> Iterator[Batch]:
    """Yields every pair exactly once, by length and without shuffling, in few shapes.

    Rows are a multiple of `row_multiple`. No split is refused: if the token budget is too small for
    `row_multiple` rows of the longest pair, batches have more tokens than the budget.
    """
    plan = evaluation_plan(corpus.lengths, config, row_multiple)
    for step in range(plan.batches_per_epoch):
        yield assemble(plan, corpus, pad_id, step, own_rows)


def evaluation_plan(lengths: np.ndarray, config: DataConfig, row_multiple: int) -> BatchPlan:
    """Returns the plan of the batches of `evaluation_batches` for pairs of `lengths` [N, 2]."""
    few = dataclasses.replace(
        config,
        num_buckets=min(config.num_buckets, EVALUATION_BUCKETS),
        row_multiple=row_multiple,
        tokens_per_batch=max(config.tokens_per_batch, row_multiple * int(lengths.max())),
    )
    return BatchPlan(lengths, few, shuffle=False)
