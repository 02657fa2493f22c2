"""Counts what a model is made of and what it costs: parameters, FLOPs and bytes.

Nothing is compiled, and no array is allocated: everything follows from shapes.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from flaxformer_min.checkpoints.load import load_for_inference
from flaxformer_min.config import Config
from flaxformer_min.config_file import load_config
from flaxformer_min.data.batch import Batch, Bucket
from flaxformer_min.errors import UserError
from flaxformer_min.model.build import Params, split_model
from flaxformer_min.planning.flops import step_flops
from flaxformer_min.training.loss import make_loss
from flaxformer_min.training.optimizer import make_optimizer

EXAMPLE = 32  # tokens of each side of the sentence pair whose costs are given
PARTS = {"attention": "_attention'", "feed-forward": "feed_forward'", "norms": "_residual'"}
# What the paper prints for its two models, in millions, by N, D, F, H, K and U (Table 3).
PRINTED = {(6, 512, 2048, 8, 64, 64): 65, (6, 1024, 4096, 16, 64, 64): 213}


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a model costs. FLOPs are those of matrix products in a pair of EXAMPLE tokens a side."""

    config: Config
    vocab_size: int
    parameters: dict[str, Counter[str]]  # by part: of an encoder layer, a decoder layer, the model
    flops: dict[str, float]  # of one target token
    bytes: dict[str, int]


def load_summary(spec: str, overrides: list[str]) -> Summary:
    """Returns the summary of a config FILE or FILE:VARIANT, or of a workdir or checkpoint.

    Raises UserError for flags beside a directory, and for the reasons of `load_config` and
    `load_for_inference`.
    """
    if not Path(spec).is_dir():
        config = load_config(spec, overrides)
        vocab_size = config.data.vocab_size
        return summarize(config, vocab_size, split_model(config.model, vocab_size)[1])
    if overrides:
        raise UserError(f"{spec} has a config already: leave out {' '.join(overrides)}")
    loaded = load_for_inference(spec)
    return summarize(loaded.config, loaded.tokenizer.vocab_size, loaded.params)


def summarize(config: Config, vocab_size: int, params: Params) -> Summary:
    """Returns the summary of a config and of its parameters, which are arrays or shapes."""
    model, beam = config.model, config.decode.beam_size
    flops = step_flops(model, vocab_size, Bucket(1, EXAMPLE, EXAMPLE)) / EXAMPLE
    width = 2 if model.compute_dtype == "bfloat16" else 4
    cache = model.num_layers * model.num_heads * (model.d_k + model.d_v) * width
    optimizer = make_optimizer(config.optimizer, model.d_model)
    batch = _largest_batch(config)
    columns = {"encoder layer": params["encoder"][0], "decoder layer": params["decoder"][0]}
    return Summary(
        config,
        vocab_size,
        {name: count_parts(tree) for name, tree in (columns | {"model": params}).items()},
        {"training: forward and backward": flops, "translating: each product once": flops / 3},
        {
            "parameters, float32": _bytes(params),
            "gradients": _bytes(params),
            "optimizer state": _bytes(jax.eval_shape(optimizer.init, params)),
            f"activations of {' x '.join(map(str, batch))} tokens": _activations(config, batch),
            "decoding cache, a token": cache,
            # The source's keys and values are held once, the target's for each hypothesis.
            f"decoding cache, a sentence, beam {beam}": cache * EXAMPLE * (1 + beam),
        },
    )


def count_parts(params: Params) -> Counter[str]:
    """Returns how many numbers a tree of parameters has in the embedding and in each of PARTS."""
    counts: Counter[str] = Counter()
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        part = next((part for part, sign in PARTS.items() if sign in name), "embedding")
        counts[part] += math.prod(leaf.shape)
    return counts


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _largest_batch(config: Config) -> Bucket:
    """Returns the shape of a micro-batch of the longest sentences."""
    data, longest = config.data, config.data.max_length
    groups = max(data.tokens_per_batch // longest // data.row_multiple, 1)
    return Bucket(groups * data.row_multiple // config.optimizer.accumulation, longest, longest)


def _activations(config: Config, batch: Bucket) -> int:
    """Returns the bytes that the forward pass keeps for the backward pass, as JAX traces them.

    They are the residuals of `jax.vjp`, which hold every array that the gradient reads.
    """
    graphdef, params = split_model(config.model, config.data.vocab_size)
    loss = make_loss(graphdef, pad_id=0, bos_id=2, smoothing=config.train.label_smoothing)

    def residuals(params: Params) -> list[Any]:
        sides = (jnp.zeros((batch.rows, length), jnp.int32) for length in batch[1:])
        pairs: Any = Batch(*sides)  # pyrefly: ignore[bad-argument-type]
        key = jax.random.key(0)
        kept = jax.vjp(lambda params: loss(params, pairs, key), params, has_aux=True)[1]
        return [
            x for x in jax.tree.leaves(kept) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        ]

    return _bytes(jax.eval_shape(residuals, params))


def to_text(summary: Summary) -> Iterator[str]:
    """Yields the summary as lines of at most 80 columns."""
    columns = summary.parameters
    total = columns["model"].total()
    yield f"{'parameters':<13}" + "".join(f"{name:>16}" for name in columns) + f"{'share':>10}"
    for part in ("embedding", *PARTS):
        cells = "".join(f"{column[part]:>16,}" for column in columns.values())
        yield f"{part:<13}{cells}{columns['model'][part] / total:>10.1%}"
    yield f"{'all':<13}" + "".join(f"{column.total():>16,}" for column in columns.values())
    yield from _printed(summary, total)
    yield f"\n{f'FLOPs a target token, {EXAMPLE} + {EXAMPLE} tokens a pair':<45}{'MFLOP':>26}"
    for name, flops in summary.flops.items():
        yield f"{name:<45}{flops / 1e6:>26,.2f}"
    yield f"\n{f'memory, {EXAMPLE} + {EXAMPLE} tokens a sentence':<45}{'bytes':>16}{'MiB':>10}"
    for name, size in summary.bytes.items():
        yield f"{name:<45}{size:>16,}{size / 2**20:>10,.2f}"
    yield "Activations (rows x S x T): what JAX keeps for the backward pass, by formula;"
    yield "the compiled step may keep less."


def _printed(summary: Summary, total: int) -> Iterator[str]:
    """Says why the count is not the paper's, if the model is one of the paper's."""
    c = summary.config.model
    millions = PRINTED.get((c.num_layers, c.d_model, c.d_ff, c.num_heads, c.d_k, c.d_v))
    if millions is not None:
        pieces = summary.vocab_size + (millions * 1e6 - total) / c.d_model
        gives = f"V = {pieces:,.0f} gives that, here V = {summary.vocab_size:,}."
        yield f"The paper prints {millions} M and no exact V: {gives}"
