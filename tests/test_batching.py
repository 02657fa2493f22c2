"""Every pair once an epoch, in few shapes known beforehand; step n alone decides batch n."""

import dataclasses
import itertools
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from flaxformer_min.config import DataConfig
from flaxformer_min.data.batching import (
    EVALUATION_BUCKETS,
    BatchPlan,
    assemble,
    batch_iterator,
    bucket_edges,
    evaluation_batches,
)
from flaxformer_min.data.corpus import EncodedCorpus
from flaxformer_min.errors import UserError

PAD = 7  # no other id of the corpora here
CONFIG = DataConfig(
    train=(),
    validation=(),
    source_language="en",
    target_language="de",
    vocab_size=300,
    tokens_per_batch=331,
    num_buckets=5,
    row_multiple=4,
    seed=3,
)


def random_lengths(pairs: int, longest: int = 29) -> np.ndarray:
    random = np.random.default_rng(pairs)
    return random.integers(1, longest + 1, (pairs, 2), dtype=np.int32)


def corpus_of(folder: Path, lengths: np.ndarray) -> EncodedCorpus:
    """Pair n has the ids 100 + n: on the source side as they are, on the target side negated."""
    sign = np.array([1, -1])
    ids = (100 + np.arange(len(lengths)))[:, None] * sign
    (folder / "lengths").write_bytes(lengths.astype(np.int32).tobytes())
    (folder / "ids").write_bytes(np.repeat(ids.ravel(), lengths.ravel()).astype(np.int32).tobytes())
    return EncodedCorpus(folder, "int32")


def epoch(plan: BatchPlan, number: int = 0) -> list[tuple[int, list[int]]]:
    first = number * plan.batches_per_epoch
    batches = (plan.batch_ids(step) for step in range(first, first + plan.batches_per_epoch))
    return [(bucket, ids.tolist()) for bucket, ids in batches]


def fill(plan: BatchPlan, lengths: np.ndarray) -> float:
    """The share of real tokens among an epoch's padded positions, filler rows included."""
    shapes = [plan.buckets[bucket] for bucket, _ in epoch(plan)]
    return lengths.sum() / sum(rows * (source + target) for rows, source, target in shapes)


@pytest.mark.parametrize("pairs", [1, 2, 7, 97, 541, 1009])
def test_every_pair_comes_exactly_once_in_every_epoch(pairs):
    plan = BatchPlan(random_lengths(pairs), CONFIG)
    for number in (0, 1, 5):
        ids = [i for _, batch in epoch(plan, number) for i in batch]
        assert sorted(ids) == list(range(pairs))


@pytest.mark.parametrize("pairs", [1, 2, 7, 97, 541, 1009])
def test_shapes_are_few_within_the_budget_and_all_in_use(pairs):
    plan = BatchPlan(random_lengths(pairs), CONFIG)
    assert len(plan.buckets) <= CONFIG.num_buckets
    for rows, source_length, target_length in plan.buckets:
        assert rows > 0 and rows % CONFIG.row_multiple == 0
        assert rows * max(source_length, target_length) <= CONFIG.tokens_per_batch
    assert {bucket for bucket, _ in epoch(plan)} == set(range(len(plan.buckets)))


@pytest.mark.parametrize("pairs", [1, 7, 97, 1009])
def test_every_batch_fits_the_shape_of_its_bucket(pairs):
    lengths = random_lengths(pairs)
    plan = BatchPlan(lengths, CONFIG)
    for bucket, ids in epoch(plan, 2):
        rows, *shape = plan.buckets[bucket]
        assert 0 < len(ids) <= rows
        assert (lengths[ids] <= shape).all()


@pytest.mark.parametrize("pairs", [97, 541, 1009])
def test_all_batches_but_one_are_full(pairs):
    plan = BatchPlan(random_lengths(pairs), CONFIG)
    missing = [plan.buckets[bucket].rows - len(ids) for bucket, ids in epoch(plan, 1)]
    assert sum(count > 0 for count in missing) <= 1
    last = [bucket for bucket, ids in epoch(plan, 1) if len(ids) < plan.buckets[bucket].rows]
    assert last in ([], [len(plan.buckets) - 1])


def test_a_batch_depends_on_its_step_alone():
    lengths = random_lengths(541)
    plan = BatchPlan(lengths, CONFIG)
    steps = np.random.default_rng(0).permutation(3 * plan.batches_per_epoch).tolist()
    for step in steps[:60]:
        bucket, ids = plan.batch_ids(step)
        same_bucket, same_ids = BatchPlan(lengths, CONFIG).batch_ids(step)
        assert bucket == same_bucket and ids.tolist() == same_ids.tolist()


def test_epochs_differ_in_the_order_and_in_the_members_of_batches():
    plan = BatchPlan(random_lengths(1009), CONFIG)
    first, second = epoch(plan, 0), epoch(plan, 1)
    assert [bucket for bucket, _ in first] != [bucket for bucket, _ in second]
    members = [{frozenset(ids) for _, ids in batches} for batches in (first, second)]
    assert not members[0] & members[1]


def test_another_seed_gives_another_plan_and_no_shuffling_the_same_every_epoch():
    lengths = random_lengths(541)
    other = dataclasses.replace(CONFIG, seed=4)
    assert epoch(BatchPlan(lengths, CONFIG)) != epoch(BatchPlan(lengths, other))
    plan, same = (BatchPlan(lengths, config, shuffle=False) for config in (CONFIG, other))
    assert epoch(plan, 0) == epoch(plan, 1) == epoch(same, 0)


def test_pairs_left_over_join_the_next_longer_bucket():
    lengths = np.array([[3, 2]] * 7 + [[5, 10]] * 6, np.int32)
    config = dataclasses.replace(CONFIG, tokens_per_batch=40, num_buckets=2, row_multiple=2)
    plan = BatchPlan(lengths, config, shuffle=False)
    # 7 short pairs are too few for a batch of 12; with the long ones they make 4 of at most 4 rows.
    assert plan.buckets == [(4, 5, 10)]
    assert epoch(plan) == [(0, [0, 1, 2, 3]), (0, [4, 5, 6, 7]), (0, [8, 9, 10, 11]), (0, [12])]
    config = dataclasses.replace(config, tokens_per_batch=20)
    plan = BatchPlan(lengths, config, shuffle=False)
    assert plan.buckets == [(6, 3, 2), (2, 5, 10)]
    assert epoch(plan) == [
        (0, [0, 1, 2, 3, 4, 5]),
        (1, [6, 7]),
        (1, [8, 9]),
        (1, [10, 11]),
        (1, [12]),
    ]


def test_a_small_corpus_is_not_drowned_in_filler_rows():
    config = dataclasses.replace(CONFIG, tokens_per_batch=25_000, row_multiple=8)
    plan = BatchPlan(random_lengths(13), config)
    assert [bucket.rows for bucket in plan.buckets] == [16]


def test_filler_rows_are_spread_so_that_the_last_bucket_has_few():
    lengths = np.full((21, 2), 10, np.int32)
    config = dataclasses.replace(CONFIG, tokens_per_batch=200, row_multiple=2)
    plan = BatchPlan(lengths, config)
    assert plan.buckets == [(12, 10, 10)] and plan.batches_per_epoch == 2


def cost(edges: tuple[int, ...], lengths: np.ndarray) -> int:
    return sum(min(edge for edge in edges if edge >= length) for length in lengths)


@pytest.mark.parametrize("seed", range(12))
def test_edges_cost_no_more_than_any_other_edges(seed):
    random = np.random.default_rng(seed)
    lengths = 2 + random.geometric(0.3, size=30)
    most = 1 + seed % 5
    edges = bucket_edges(np.bincount(lengths), most)
    distinct = sorted(set(lengths.tolist()))
    choices = itertools.combinations(distinct[:-1], min(most, len(distinct)) - 1)
    least = min(cost((*choice, distinct[-1]), lengths) for choice in choices)
    assert cost(tuple(edges.tolist()), lengths) == least
    assert edges.tolist() == sorted(set(edges.tolist())) and edges[-1] == distinct[-1]


def test_edges_of_a_histogram_worked_out_by_hand():
    counts = np.zeros(13, int)
    counts[[2, 3, 9, 12]] = [1, 10, 4, 5]
    assert bucket_edges(counts, 1).tolist() == [12]
    assert bucket_edges(counts, 2).tolist() == [3, 12]  # wastes 1 + 4 x 3
    assert bucket_edges(counts, 3).tolist() == [3, 9, 12]  # wastes 1
    assert bucket_edges(counts, 7).tolist() == [2, 3, 9, 12]


def caption_lengths() -> np.ndarray:
    """29,000 pairs much like Multi30k's: mean 15 on both sides, within a few of each other."""
    random = np.random.default_rng(1)
    source = 5 + random.gamma(5.0, 2.0, 29_000)
    target = source + random.normal(0, 1.8, 29_000)
    return np.clip(np.stack([source, target], axis=1).round(), 3, 50).astype(np.int32)


def test_at_least_88_percent_of_the_positions_are_real_tokens():
    lengths = caption_lengths()
    config = dataclasses.replace(CONFIG, tokens_per_batch=4096, num_buckets=12, row_multiple=8)
    assert fill(BatchPlan(lengths, config), lengths) >= 0.88


def test_too_small_a_budget_is_refused_with_the_least_that_works():
    lengths = random_lengths(97, longest=83)
    with pytest.raises(UserError, match=r"data\.tokens_per_batch: 331 .* at least 332$"):
        BatchPlan(lengths, CONFIG)
    BatchPlan(lengths, dataclasses.replace(CONFIG, tokens_per_batch=332))


def test_a_batch_holds_its_pairs_padded_and_filler_rows_are_all_pad(tmp_path):
    lengths = random_lengths(97)
    corpus = corpus_of(tmp_path, lengths)
    plan = BatchPlan(corpus.lengths, CONFIG)
    for step in range(plan.batches_per_epoch):
        bucket, ids = plan.batch_ids(step)
        rows, *widths = plan.buckets[bucket]
        batch = assemble(plan, corpus, PAD, step)
        for array, width, sign, side in zip(batch, widths, (1, -1), (0, 1), strict=True):
            expected = np.full((rows, width), PAD)
            for row, i in enumerate(ids):
                expected[row, : lengths[i, side]] = sign * (100 + i)
            np.testing.assert_array_equal(array, expected)
            assert array.dtype == np.int32


@pytest.mark.parametrize("start", [0, 1, 23, 1_000_003])
def test_the_iterator_gives_the_plan_from_any_start(tmp_path, start):
    corpus = corpus_of(tmp_path, random_lengths(97))
    batches = batch_iterator(BatchPlan(corpus.lengths, CONFIG), corpus, PAD, start)
    plan = BatchPlan(corpus.lengths, CONFIG)
    for step in range(start, start + 2 * plan.batches_per_epoch + 1):
        for array, expected in zip(next(batches), assemble(plan, corpus, PAD, step), strict=True):
            np.testing.assert_array_equal(array, expected)
    batches.close()


def test_closing_the_iterator_ends_its_thread(tmp_path):
    corpus = corpus_of(tmp_path, random_lengths(97))
    before = set(threading.enumerate())
    batches = batch_iterator(BatchPlan(corpus.lengths, CONFIG), corpus, PAD, 0)
    next(batches)
    assert set(threading.enumerate()) - before
    batches.close()
    assert not set(threading.enumerate()) - before
    with pytest.raises(StopIteration):
        next(batches)
    batch_iterator(BatchPlan(corpus.lengths, CONFIG), corpus, PAD, 0).close()  # before its start


def test_an_error_while_a_batch_is_made_reaches_the_loop(tmp_path):
    lengths = random_lengths(97)
    corpus = corpus_of(tmp_path, lengths)
    batches = batch_iterator(BatchPlan(np.tile(lengths, (2, 1)), CONFIG), corpus, PAD, 0)
    with pytest.raises(IndexError):
        for _ in range(40):
            next(batches)
    batches.close()


def test_a_closed_iterator_leaves_no_word_at_exit(tmp_path):
    corpus_of(tmp_path, random_lengths(7))
    program = f"""
from pathlib import Path
from flaxformer_min.data.batching import BatchPlan, batch_iterator
from flaxformer_min.config import DataConfig
from flaxformer_min.data.corpus import EncodedCorpus
corpus = EncodedCorpus(Path({str(tmp_path)!r}), "int32")
config = DataConfig(train=(), validation=(), source_language="", target_language="", vocab_size=1)
batches = batch_iterator(BatchPlan(corpus.lengths, config), corpus, 7, 0)
print(next(batches).source.shape)
batches.close()
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("(8, ") and done.stderr == ""


def test_validation_batches_hold_every_pair_once_in_few_shapes(tmp_path):
    lengths = random_lengths(541)
    corpus = corpus_of(tmp_path, lengths)
    batches, again = (list(evaluation_batches(corpus, CONFIG, PAD)) for _ in range(2))
    first_tokens = np.concatenate([batch.source[:, 0] for batch in batches])
    pairs = first_tokens[first_tokens != PAD] - 100
    assert sorted(pairs.tolist()) == list(range(541))
    assert len({(b.source.shape, b.target.shape) for b in batches}) <= EVALUATION_BUCKETS
    assert sum((batch.target != PAD).sum() for batch in batches) == lengths[:, 1].sum()
    for batch, same in zip(batches, again, strict=True):
        np.testing.assert_array_equal(batch.source, same.source)


def test_validation_takes_pairs_that_training_has_no_tokens_for(tmp_path):
    lengths = random_lengths(23)
    few = dataclasses.replace(CONFIG, tokens_per_batch=30)
    batches = list(evaluation_batches(corpus_of(tmp_path, lengths), few, PAD, 8))
    assert sum((batch.target != PAD).sum() for batch in batches) == lengths[:, 1].sum()
    assert all(len(batch.source) % 8 == 0 for batch in batches)
