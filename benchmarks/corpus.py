"""What a corpus of millions of pairs costs: python -m benchmarks.corpus --pairs 5000000 --dir DIR.

Makes up a corpus, the same for the same number of pairs. Trains a tokenizer on it, encodes it,
opens it again as a resumed run does, and makes batches beside train steps of the model of
configs/multi30k_en_de.py:cpu. Each stage has a process of its own and so a peak memory of its own.
Everything stays in DIR: about 450 bytes a pair.
"""

import argparse
import collections
import dataclasses
import itertools
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jax
import numpy as np

from flaxformer_min.config import Config
from flaxformer_min.config_file import load_config
from flaxformer_min.data.batch import Batch
from flaxformer_min.data.batching import BatchPlan, assemble, batch_iterator
from flaxformer_min.data.corpus import EncodedCorpus, prepare_split
from flaxformer_min.data.sources import read_pairs
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.data.tokenizer_training import train_tokenizer
from flaxformer_min.model.build import split_model
from flaxformer_min.training.loss import make_loss
from flaxformer_min.training.optimizer import make_optimizer
from flaxformer_min.training.state import init_state
from flaxformer_min.training.step import make_train_step

RECIPE = Path(__file__).parent.parent / "configs" / "multi30k_en_de.py"
NAMES = ("train.en", "train.de")
WORDS = 300_000  # of each language; Zipf's law says how often each occurs
PAIRS_AT_ONCE = 20_000
TOKENS_PER_BATCH = 4_096
BATCHES, STEPS = 500, 9  # how many are timed at once, and how many times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=500_000)
    parser.add_argument("--dir", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    print(f"{arguments.pairs:,} pairs, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'':<32}{'seconds':>10}{'CPU s':>10}{'peak GB':>10}")
    for stage in (make, train, encode, open_again, make_batches, take_steps):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            done = process.submit(measured, stage, arguments.dir, arguments.pairs).result()
        *figures, says = done
        columns = "".join(f"{figure:>10.2f}" for figure in figures)
        print(f"{stage.__doc__:<32}{columns}  {says}", flush=True)


def measured(
    stage: Callable[[Path, int], str], folder: Path, pairs: int
) -> tuple[float, float, float, str]:
    """Seconds, those of all cores, most gigabytes resident (mapped files too); what it says."""
    start, cpu = time.perf_counter(), time.process_time()
    says = stage(folder, pairs)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return seconds, cpu, peak, says


def make(folder: Path, pairs: int) -> str:
    """make the text"""
    random = np.random.default_rng(1)
    frequency = np.cumsum(1 / np.arange(1, WORDS + 1))
    languages = [np.array(words(initials), object) for initials in ("bdfgklmn", "prstvwzh")]
    with open(folder / NAMES[0], "w") as source, open(folder / NAMES[1], "w") as target:
        for start in range(0, pairs, PAIRS_AT_ONCE):
            size = min(PAIRS_AT_ONCE, pairs - start)
            lengths = 1 + random.gamma(2.5, 10, size).astype(int)  # 25 words in the mean
            drawn = np.searchsorted(frequency, random.random(lengths.sum()) * frequency[-1])
            for language, file in zip(languages, (source, target), strict=True):
                sentence = iter(language[drawn].tolist())
                file.writelines(
                    " ".join(itertools.islice(sentence, n)) + "\n" for n in lengths.tolist()
                )
    size = sum((folder / name).stat().st_size for name in NAMES)
    return f"{size / 1e9:.2f} GB"


def words(initials: str) -> list[str]:
    """Words of one syllable, then of two and so on, all different."""
    syllables = [initial + vowel for initial in initials for vowel in ("a", "e", "i", "o", "u")]
    longer = (itertools.product(syllables, repeat=length) for length in itertools.count(1))
    return ["".join(w) for w in itertools.islice(itertools.chain.from_iterable(longer), WORDS)]


def config_of(folder: Path) -> Config:
    """The recipe, on this corpus."""
    config = load_config(f"{RECIPE}:cpu", [])
    data = dataclasses.replace(
        config.data, dir=str(folder), train=NAMES, tokens_per_batch=TOKENS_PER_BATCH
    )
    return dataclasses.replace(config, data=data)


def train(folder: Path, pairs: int) -> str:
    """train the tokenizer"""
    data = config_of(folder).data
    lines = itertools.chain.from_iterable(read_pairs(data, data.train))
    (folder / "tokenizer.model").write_bytes(train_tokenizer(lines, data))
    return f"{data.vocab_size:,} ids"


def opened(folder: Path) -> tuple[EncodedCorpus, int]:
    """The encoded corpus, and pad's id."""
    data, tokenizer = config_of(folder).data, Tokenizer.load(folder / "tokenizer.model")
    return prepare_split(data, data.train, tokenizer, folder / "corpus")[0], tokenizer.pad_id


def encode(folder: Path, pairs: int) -> str:
    """encode"""
    start, cpu = time.perf_counter(), time.process_time()
    corpus, _ = opened(folder)
    speed, by_cpu = pairs / (time.perf_counter() - start), pairs / (time.process_time() - cpu)
    tokens = corpus.lengths.mean()
    return f"{speed:,.0f} pairs/s, {by_cpu:,.0f} a CPU second; {tokens:.1f} tokens a side"


def open_again(folder: Path, pairs: int) -> str:
    """open again, to the first batch"""
    corpus, pad_id = opened(folder)
    batches = batch_iterator(BatchPlan(corpus.lengths, config_of(folder).data), corpus, pad_id, 0)
    next(batches)
    batches.close()
    return ""


def make_batches(folder: Path, pairs: int) -> str:
    """make batches"""
    corpus, pad_id = opened(folder)
    plan = BatchPlan(corpus.lengths, config_of(folder).data)
    batches = batch_iterator(plan, corpus, pad_id, start_step=0)
    milliseconds = 1e3 * per_batch(batches)
    batches.close()
    start = time.perf_counter()
    plan.batch_ids(plan.batches_per_epoch)
    planning = time.perf_counter() - start
    return (
        f"{milliseconds:.2f} ms each, {plan.batches_per_epoch:,} an epoch; "
        f"{planning:.1f} s to plan an epoch"
    )


def take_steps(folder: Path, pairs: int) -> str:
    """take training steps on them"""
    config, (corpus, pad_id) = config_of(folder), opened(folder)
    plan = BatchPlan(corpus.lengths, config.data)
    bucket = plan.batch_ids(0)[0]
    batch = assemble(plan, corpus, pad_id, step=0)
    optimizer = make_optimizer(config.optimizer, config.model.d_model)
    graphdef, _ = split_model(config.model, config.data.vocab_size)
    loss = make_loss(graphdef, pad_id=pad_id, bos_id=2, smoothing=0.1)
    train_step = jax.jit(make_train_step(loss, optimizer))
    state, key = init_state(config.model, config.data.vocab_size, optimizer, 1), jax.random.key(1)
    state, _ = jax.block_until_ready(train_step(state, batch, key))  # compiles
    batches = batch_iterator(plan, corpus, pad_id, start_step=0)
    steps, ratios = [], []
    for _ in range(STEPS):  # turn about, because the machine may have other work
        start = time.perf_counter()
        state, _ = jax.block_until_ready(train_step(state, batch, key))
        steps.append(time.perf_counter() - start)
        ratios.append(steps[-1] / per_batch(batches))
    batches.close()
    milliseconds, ratio = 1e3 * statistics.median(steps), statistics.median(ratios)
    rows, *lengths = plan.buckets[bucket]
    return f"{milliseconds:.0f} ms each ({rows} x {max(lengths)}): {ratio:,.0f} times a batch"


def per_batch(batches: Iterator[Batch]) -> float:
    """Seconds, in the mean of `BATCHES`."""
    start = time.perf_counter()
    collections.deque(itertools.islice(batches, BATCHES), maxlen=0)
    return (time.perf_counter() - start) / BATCHES


if __name__ == "__main__":
    main()
