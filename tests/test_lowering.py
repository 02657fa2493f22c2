"""Every program that a run needs lowers for TPUs and GPUs, on a machine that has neither."""

import functools

import jax
import jax.numpy as jnp
import pytest
from tiny_checkpoints import CONFIG, TOKENIZER

from flaxformer_min.data.batch import Batch, Bucket
from flaxformer_min.decoding.batches import rows_at_once
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.programs import score_batch, search_batch
from flaxformer_min.decoding.sentences import PaddedSentences
from flaxformer_min.model.build import split_model
from flaxformer_min.training.loss import make_loss
from flaxformer_min.training.sharding import abstract_rows, make_mesh
from flaxformer_min.training.step import StepProgram
from tools import tiny_config

WIDTH = 11
ROWS = rows_at_once(WIDTH)
IDS = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.int32)
DRAWS = jax.ShapeDtypeStruct((ROWS, 2), jnp.uint32)
GRAPHDEF, PARAMS = split_model(CONFIG.model, TOKENIZER.vocab_size)


def lowered(function, *arguments, platforms=("tpu", "cuda")):
    """The program of a jitted function as text; raises an error if it does not lower."""
    return function.trace(*arguments).lower(lowering_platforms=platforms).as_text()


def train_step(**changes):
    """A jitted train step, accumulating, and the shapes of its arguments."""
    config = tiny_config.changed(CONFIG, "model", **changes)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    program = StepProgram(config, mesh, pad_id=TOKENIZER.pad_id, bos_id=TOKENIZER.bos_id)
    sides = abstract_rows(mesh, *Bucket(2 * ROWS, 7, WIDTH))
    return program.jitted, program.shapes, Batch(*sides), jax.eval_shape(jax.random.key, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_train_step_lowers_for_tpu_and_cuda(dtype):
    text = lowered(*train_step(compute_dtype=dtype))
    assert ("bf16" in text) == (dtype == "bfloat16")


def test_the_train_step_with_the_fused_kernel_of_cudnn_lowers_for_cuda(monkeypatch):
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000
    )
    heads = {"num_heads": 2, "d_k": 32, "d_v": 32, "d_model": 64}
    program = train_step(compute_dtype="bfloat16", attention="cudnn", **heads)
    text = lowered(*program, platforms=("cuda",))
    assert "cudnn" in text


def test_the_validation_loss_lowers_for_tpu_and_cuda():
    ids = {"pad_id": TOKENIZER.pad_id, "bos_id": TOKENIZER.bos_id}
    loss = make_loss(GRAPHDEF, **ids, smoothing=0.0)
    assert lowered(
        jax.jit(lambda params, batch: loss(params, batch, None)), PARAMS, Batch(IDS, IDS)
    )


@pytest.mark.parametrize(
    "options",
    [
        Options(beam_size=1),
        Options(beam_size=3, n_best=2, no_repeat_ngram_size=3, min_length=2),
        Options(sample=True, n_best=2, top_k=5, top_p=0.9),
    ],
    ids=["greedy", "beam", "sampling"],
)
@pytest.mark.parametrize("prefixes", [None, IDS], ids=["free", "prefix"])
def test_every_search_lowers_for_tpu_and_cuda(options, prefixes):
    complete = options.with_defaults(CONFIG.decode)
    longest = CONFIG.model.max_length
    search = functools.partial(search_batch, (GRAPHDEF,), TOKENIZER, longest)
    sentences = PaddedSentences(IDS, prefixes, DRAWS)
    assert lowered(jax.jit(lambda *given: search(*given, complete)), (PARAMS,), sentences)


def test_scoring_lowers_for_tpu_and_cuda():
    score = functools.partial(score_batch, (GRAPHDEF,), TOKENIZER)
    assert lowered(jax.jit(score), (PARAMS,), (IDS, IDS))
