"""Which pairs form the batch of step n, in which of few static shapes.

The plan of an epoch is a pure function of (lengths, config, seed, epoch), so the position in the
data is the step number and nothing about it needs saving.
"""

import dataclasses
from collections.abc import Callable, Generator, Iterator

import grain
import numpy as np

from flaxformer_min.config import DataConfig
from flaxformer_min.data.batch import Batch, Bucket
from flaxformer_min.data.corpus import EncodedCorpus
from flaxformer_min.errors import UserError

EVALUATION_BUCKETS = 4  # a small split does not repay more compilations
PREFETCHED = 4  # batches made ahead of the training step


class BatchPlan:
    """Every pair exactly once an epoch, in batches of at most `config.num_buckets` shapes.

    A bucket holds the pairs whose longer side lies between two edges. Its batches are full: the
    pairs left over, other ones each epoch, join the next longer bucket. Only the last batch of the
    longest bucket may have fewer pairs than rows. So all epochs have the same number of batches.
    """

    def __init__(self, lengths: np.ndarray, config: DataConfig, *, shuffle: bool = True) -> None:
        """Plans pairs of `lengths` [N, 2], EOS counted, shuffled with `config.seed` or not at all.

        Raises UserError where `config.row_multiple` rows of the longest pair are more than
        `config.tokens_per_batch`.
        """
        longer = lengths.max(axis=1)
        edges = bucket_edges(np.bincount(longer), config.num_buckets)
        bucket = np.searchsorted(edges, longer)
        longest = np.array([lengths[bucket == b].max(axis=0) for b in range(len(edges))])
        longest = np.maximum.accumulate(longest)  # what a bucket leaves over must fit the next
        rows, batches = _rows_and_batches(np.bincount(bucket), longest.max(axis=1), config)
        used = batches > 0  # a bucket short of one batch leaves all its pairs to the next
        bucket = np.searchsorted(edges[used], longer)

        self._seed = config.seed if shuffle else None
        self.buckets = [Bucket(*row) for row in np.column_stack([rows, longest])[used].tolist()]
        self.batches_per_epoch = int(batches.sum())
        self._ids = np.argsort(bucket, kind="stable").astype(np.int32)
        self._bucket_ends = np.cumsum(np.bincount(bucket))
        self._bucket_of_batch = np.repeat(np.arange(len(self.buckets)), batches[used])
        self._batch_ends = np.cumsum(rows[used][self._bucket_of_batch])
        self._planned = (-1, self._ids, self._bucket_of_batch)

    def batch_ids(self, step: int) -> tuple[int, np.ndarray]:
        """The bucket (an index into `buckets`) and the pair ids of a step; the first step is 0.

        There are as many ids as the bucket has rows, or fewer. Any step can be asked for at any
        time; it is quick within one epoch.
        """
        epoch, place = divmod(step, self.batches_per_epoch)
        planned = self._planned  # another thread may be in another epoch
        if planned[0] != epoch:
            planned = self._planned = (epoch, *self._plan(epoch))
        _, ids, order = planned
        bucket, end = int(self._bucket_of_batch[order[place]]), self._batch_ends[order[place]]
        return bucket, ids[end - self.buckets[bucket].rows : end]

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of an epoch, which are cut into batches from the left, and the batches' order.

        Ids come bucket after bucket: where a bucket's last batch would end in the next bucket, its
        pairs fall into the next bucket's first batch.
        """
        if self._seed is None:
            return self._ids, np.arange(self.batches_per_epoch)
        random = np.random.default_rng((self._seed, epoch))
        ids = self._ids.copy()
        for members in np.split(ids, self._bucket_ends[:-1]):  # views
            random.shuffle(members)
        return ids, random.permutation(self.batches_per_epoch)


def bucket_edges(counts: np.ndarray, most: int) -> np.ndarray:
    """The lengths at which at most `most` buckets end, so that padding is least.

    `counts[n]` is the number of pairs of length n. Exact, by dynamic programming: the best k
    buckets for the shortest lengths are the best k - 1 for fewer of them, and one more.
    """
    lengths = np.flatnonzero(counts)
    pairs = np.cumsum(counts[lengths])
    before = np.concatenate([[0], pairs[:-1]])
    # cost[i, j]: positions in one bucket of the i-th to the j-th length
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
    """Rows of a batch and batches of an epoch, for buckets of `pairs` pairs and width `length`."""
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
    if left:  # one more batch, and the filler rows it would need spread over all of the last bucket
        remaining = batches[-1] * rows[-1] + left
        batches[-1] += 1
        rows[-1] = -(-remaining // (batches[-1] * multiple)) * multiple
    return rows, batches


RowsOf = Callable[[int], np.ndarray]  # of so many rows the numbers of those wanted, ascending


def assemble(
    plan: BatchPlan, corpus: EncodedCorpus, pad_id: int, step: int, rows_of: RowsOf = np.arange
) -> Batch:
    """The batch of a step, or the rows of it that this process wants; the plan is that of all."""
    bucket, ids = plan.batch_ids(step)
    rows, *widths = plan.buckets[bucket]
    wanted = rows_of(rows)
    ids = ids[wanted[wanted < len(ids)]]  # the rows beyond the pairs are the last ones
    batch = Batch(*(np.full((len(wanted), width), pad_id, np.int32) for width in widths))
    for side, array in enumerate(batch):
        corpus.copy_rows(ids, side, to=array)
    return batch


def batch_iterator(
    plan: BatchPlan,
    corpus: EncodedCorpus,
    pad_id: int,
    start_step: int,
    rows_of: RowsOf = np.arange,
) -> Generator[Batch, None, None]:
    """Endless batches from `start_step` on, made ahead in one thread; close() ends the thread."""
    steps = grain.MapDataset.range(start_step, np.iinfo(np.int64).max)
    batches = steps.map(lambda step: assemble(plan, corpus, pad_id, step, rows_of))
    one_thread = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # more only slow Python
    iterator = iter(
        grain.experimental.ThreadPrefetchIterDataset(
            batches.to_iter_dataset(one_thread), prefetch_buffer_size=PREFETCHED
        )
    )
    try:
        yield from iterator
    finally:
        iterator.close()


def evaluation_batches(
    corpus: EncodedCorpus,
    config: DataConfig,
    pad_id: int,
    row_multiple: int = 1,
    rows_of: RowsOf = np.arange,
) -> Iterator[Batch]:
    """Every pair exactly once, by length and without shuffling, in few shapes.

    Rows are a multiple of `row_multiple`. No split is refused: where the token budget is too small
    for so many rows, a batch has just as many.
    """
    few = dataclasses.replace(
        config,
        num_buckets=min(config.num_buckets, EVALUATION_BUCKETS),
        row_multiple=row_multiple,
        tokens_per_batch=max(config.tokens_per_batch, row_multiple * int(corpus.lengths.max())),
    )
    plan = BatchPlan(corpus.lengths, few, shuffle=False)
    for step in range(plan.batches_per_epoch):
        yield assemble(plan, corpus, pad_id, step, rows_of)
