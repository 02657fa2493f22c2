"""The summary counts what is really there, and its counts of base and big are the formulas'."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_checkpoints

from flaxformer_min import cli
from flaxformer_min.config import Config, ModelConfig
from flaxformer_min.config_file import load_config
from flaxformer_min.data.batch import Bucket
from flaxformer_min.model.build import initializer, split_model
from flaxformer_min.model.cached import init_cache, memory_keys_values
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.planning.flops import step_flops
from flaxformer_min.see.summary import EXAMPLE, load_summary, summarize, to_text
from flaxformer_min.see.trace_text import width
from flaxformer_min.training.optimizer import make_optimizer

WMT = "configs/wmt14_en_de.py"


def tiny(**model) -> Config:
    config = ModelConfig(num_layers=3, d_model=14, d_ff=11, num_heads=2, d_k=5, d_v=7)
    changed = dataclasses.replace(config, **model)
    data = dataclasses.replace(tiny_checkpoints.CONFIG.data, max_length=17, tokens_per_batch=400)
    return dataclasses.replace(tiny_checkpoints.CONFIG, model=changed, data=data)


def summary_of(config: Config, vocab_size: int = 19):
    return summarize(config, vocab_size, split_model(config.model, vocab_size)[1])


@pytest.mark.parametrize(("variant", "count"), [("base", 63_045_632), ("big", 214_171_648)])
def test_base_and_big_have_the_parameters_of_the_papers_formulas(variant, count):
    summary = load_summary(f"{WMT}:{variant}", [])
    m = load_config(f"{WMT}:{variant}", []).model
    attention = m.d_model * m.num_heads * (2 * m.d_k + 2 * m.d_v)
    ffn = 2 * m.d_model * m.d_ff + m.d_ff + m.d_model
    model = summary.parameters["model"]
    assert model["embedding"] == 37_000 * m.d_model
    assert model["attention"] == 3 * m.num_layers * attention
    assert model["feed-forward"] == 2 * m.num_layers * ffn
    assert model["norms"] == 5 * m.num_layers * 2 * m.d_model
    assert model.total() == count
    layer = summary.parameters["encoder layer"]
    assert (layer["attention"], layer["feed-forward"]) == (attention, ffn)
    if variant == "base":  # the explainers' 1.05 M and 2.1 M
        assert (attention, ffn) == (1_048_576, 2_099_712)
    assert summary.parameters["decoder layer"]["attention"] == 2 * attention


@pytest.mark.parametrize("share", ["all", "target", "none"])
def test_counts_and_bytes_are_those_of_the_real_arrays(share):
    config = tiny(share_embeddings=share, positions="learned", max_length=17)
    _, params = initializer(config.model, 19)(jax.random.key(0))
    summary = summarize(config, 19, params)
    leaves = jax.tree.leaves(params)
    assert summary.parameters["model"].total() == sum(leaf.size for leaf in leaves)
    tables = {"all": 1, "target": 2, "none": 3}[share]
    assert summary.parameters["model"]["embedding"] == (tables * 19 + 2 * 17) * 14
    assert summary.bytes["parameters, float32"] == sum(leaf.nbytes for leaf in leaves)
    moments = make_optimizer(config.optimizer, 14).init(params)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(moments))
    assert summary.bytes["optimizer state"] == held
    assert summary.bytes == summary_of(config).bytes  # shapes are enough


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_the_cache_are_those_of_the_real_cache(dtype):
    config = tiny(compute_dtype=dtype)
    beam = config.decode.beam_size

    def caches(key):
        model = Transformer(config.model, 19, rngs=jax_rngs(key))
        memory = jax.numpy.zeros((1, EXAMPLE, 14), model.dtype)
        return init_cache(model, 1, beam, EXAMPLE).layers, memory_keys_values(model, memory)

    def jax_rngs(key):
        from flax import nnx

        return nnx.Rngs(key)

    shapes = jax.eval_shape(caches, jax.random.key(0))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    found = summary_of(config).bytes
    assert found[f"decoding cache, a sentence, beam {beam}"] == held
    assert found["decoding cache, a token"] == 3 * 2 * (5 + 7) * (4 if dtype == "float32" else 2)


def test_flops_are_a_third_for_the_forward_pass():
    flops = list(summary_of(tiny()).flops.values())
    assert flops[0] == step_flops(tiny().model, 19, Bucket(1, EXAMPLE, EXAMPLE)) / EXAMPLE
    assert flops[0] == 3 * flops[1]


@pytest.mark.run
def test_activations_are_of_the_size_that_xla_needs_and_fewer_with_remat():
    from flaxformer_min.data.batch import Batch
    from flaxformer_min.training.loss import make_loss

    def activations(config):
        (size,) = (v for k, v in summary_of(config, 20).bytes.items() if "activations" in k)
        return size

    config = tiny(d_model=38, d_ff=150)
    graphdef, params = split_model(config.model, 20)
    loss = make_loss(graphdef, pad_id=0, bos_id=2, smoothing=0.1)
    ids = jax.ShapeDtypeStruct((16, 17), np.int32)  # 400 tokens a batch, 8 rows at a time
    key = jax.eval_shape(jax.random.key, 0)
    step = jax.jit(jax.grad(loss, has_aux=True)).lower(params, Batch(ids, ids), key)
    needed = step.compile().memory_analysis().temp_size_in_bytes
    assert needed / 2 < activations(config) < needed * 2
    assert activations(tiny(d_model=38, d_ff=150, remat=True)) < activations(config) / 3


def test_the_text_has_80_columns_and_names_the_papers_counts():
    for variant, words in (("base", "65 M and no exact V: V = 40,817"), ("big", "V = 35,856")):
        lines = [
            x for line in to_text(load_summary(f"{WMT}:{variant}", [])) for x in line.split("\n")
        ]
        assert max(map(width, lines)) <= 80
        assert words in "\n".join(lines)
    assert "The paper prints" not in "\n".join(to_text(summary_of(tiny())))


def test_the_verb_takes_configs_with_flags_and_trained_models(finished, capsys):
    assert cli.main(["summary", f"{WMT}:base", "--model.d_ff", "1024"]) == 0
    assert "1,050,112" in capsys.readouterr().out  # 2 D F + F + D
    assert cli.main(["summary", str(finished)]) == 0
    assert "10,016" in capsys.readouterr().out
    for command, message in (
        ([str(finished), "--model.d_ff", "3"], "has a config already"),
        (["no.py"], "no.py: there is no such config file"),
    ):
        assert cli.main(["summary", *command]) == 2
        assert message in capsys.readouterr().err
