"""Outside of the package: the examples learn, and what README shows is there and runs."""

import contextlib
import dataclasses
import importlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import numpy_transformer as reference
import pytest
import tiny_model
from flax import nnx
from tiny_checkpoints import CONFIG, TOKENIZER

from flaxformer_min.checkpoints.format import Loaded
from flaxformer_min.config import ModelConfig
from flaxformer_min.data.tokenizer import BOS_ID, PAD_ID
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.interop.stablehlo import export_stablehlo
from flaxformer_min.model.build import initializer
from flaxformer_min.model.masks import causal_mask, padding_mask

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURE = (ROOT / "docs" / "figure1.svg").read_text(encoding="utf-8")


# A script finds the scripts beside it.
sys.path.append(str(ROOT / "examples"))
SMALL = ModelConfig(num_layers=2, d_model=26, d_ff=21, num_heads=2, d_k=6, d_v=17, dropout=0.0)


@pytest.fixture
def small(monkeypatch) -> ModuleType:
    """decoder_only, whose model and data the other descendants share, with little of both."""
    module = importlib.import_module("decoder_only")
    monkeypatch.setattr(module, "MODEL", SMALL)
    monkeypatch.setattr(module, "PAIRS", 700)
    return module


def printed(capsys, name: str, **sizes: int) -> list[str]:
    """The lines that an example prints in a short form."""
    importlib.import_module(name).main(**sizes)
    return capsys.readouterr().out.splitlines()


def numbers(line: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", line)]


@pytest.mark.run
def test_the_thirty_lines_of_the_readme_run_and_print_what_they_say():
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line]) <= 32
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "README.md", "exec"), {})
    attention, learned = printed.getvalue().splitlines()
    assert attention == "[[[[0.5 0.5 0. ]]]]"
    assert int(learned.split("%")[0]) >= 95


def test_every_file_that_figure_1_names_is_there():
    named = re.findall(r"\b([a-z]+/[a-z_0-9]+\.py)", FIGURE)
    assert len(set(named)) >= 10
    assert [name for name in named if not (ROOT / "flaxformer_min" / name).is_file()] == []


DOCUMENTS = ["README.md", "CONTRIBUTING.md", "docs/promises.md", "docs/where_to_see_it.md"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_a_document_names_is_there(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:python )?([a-z_]+/[a-z_0-9/]+\.py)", text))
    homes = [ROOT, ROOT / "flaxformer_min"]
    assert [name for name in named if not any((home / name).is_file() for home in homes)] == []
    linked = [name for name in re.findall(r"\]\(([^)#:]+)\)", text) if name != "LICENSE"]
    folder = (ROOT / document).parent
    assert len(named) + len(linked) and [n for n in linked if not (folder / n).exists()] == []


def test_every_verb_and_example_has_its_place_where_a_reader_looks_for_it():
    text = (ROOT / "docs" / "where_to_see_it.md").read_text(encoding="utf-8")
    for verb in ("trace", "summary", "neighbours", "encode", "plot", "page"):
        assert f"{verb} DIR" in text or f"`{verb} " in text, verb
    examples = {path.name for path in (ROOT / "examples").glob("*.py")} - {
        "run_stablehlo.py",
        "service.py",
    }
    assert [name for name in examples if f"python examples/{name}" not in text] == []


def test_the_readme_is_read_in_one_sitting():
    assert len(README.splitlines()) <= 220


@pytest.mark.run
def test_an_exported_program_translates_without_the_package_as_the_translator_does(tmp_path):
    model = dataclasses.replace(CONFIG.model, max_length=32)
    config = dataclasses.replace(CONFIG, model=model)
    _, params = initializer(model, TOKENIZER.vocab_size)(jax.random.key(3))
    loaded = Loaded(config, TOKENIZER, params, step=0)
    export_stablehlo(loaded, tmp_path / "exported", rows=3, length=13)
    translator = Translator(config, TOKENIZER, params)
    for line in ("a b c", "ga", "d e f g a b c d"):
        wanted = translator.translate([line], Options(beam_size=1))[0]
        found = importlib.import_module("run_stablehlo").main(tmp_path / "exported", line)
        assert found == wanted.text


def test_attention_in_numpy_prints_the_row_worked_out_by_hand_and_agrees_with_the_package(capsys):
    numpy_attention = importlib.import_module("attention_in_numpy")
    steps = numpy_attention.worked_row()
    np.testing.assert_allclose(steps.weights, [[0.4, 0.1, 0.5]])
    np.testing.assert_allclose(steps.output, [[0.4, 0.1, 21.0]])
    draw = np.random.default_rng(7)
    query, key, value = (draw.standard_normal(shape) for shape in ((2, 11), (3, 11), (3, 5)))
    found = numpy_attention.attention(query, key, value)
    wanted = numpy_attention.of_the_package(query, key, value)
    np.testing.assert_allclose(found.output, wanted, atol=1e-6)
    numpy_attention.main()
    said = capsys.readouterr().out
    assert "i asks j as j asks i, True; apart: False" in said
    assert "permuted outputs: True" in said


@pytest.mark.run
def test_a_decoder_only_model_learns_from_one_stream_and_says_what_it_reached(small, capsys):
    loss, exact, *samples = printed(capsys, "decoder_only", steps=40, tested=5)
    first, _, last, _, held_out, _ = numbers(loss)
    assert 0.9 * np.log(1000) < first < 1.5 * np.log(1000)
    assert max(last, held_out) < 0.85 * first
    assert re.match(r"\d+\.0% of the held-out phrases are translated exactly", exact)
    assert len(samples) == 3


@pytest.mark.run
def test_an_encoder_only_model_learns_to_restore_hidden_tokens(small, capsys):
    loss, restored = printed(capsys, "encoder_only", steps=40, tested=50)
    first, _, last, _ = numbers(loss)
    assert 0.9 * np.log(1000) < first < 1.5 * np.log(1000)
    assert last < 0.9 * first
    _, beside, alone = numbers(restored)
    assert 0 < beside <= 100 and 0 < alone <= 100


@pytest.mark.run
def test_every_part_of_a_modern_block_is_trained_alone_and_all_together(small, capsys, monkeypatch):
    monkeypatch.setattr(small, "MODEL", dataclasses.replace(SMALL, num_layers=1))
    _, *rows = printed(capsys, "modern_block", steps=60, tested=20)
    names = ["none: the paper's", "rms_norm", "rotary", "swiglu", "grouped", "all of them"]
    assert [row[:24].strip() for row in rows] == names
    table = dict(zip(names, (numbers(row[24:]) for row in rows), strict=True))
    assert all(loss < 0.95 * np.log(1000) for _, loss in table.values()), rows
    paper = table["none: the paper's"][0]
    assert paper - table["rms_norm"][0] == 2 * 26  # the biases of two norms
    assert table["rotary"][0] == paper
    assert paper - table["swiglu"][0] == 26 + 21  # the biases; 3 x 14 = 2 x 21
    assert paper - table["grouped"][0] == 26 * (6 + 17)  # of keys and values one head


@pytest.mark.run
def test_pre_norm_learns_with_a_rate_at_which_post_norm_does_not_begin(small, capsys, monkeypatch):
    model = dataclasses.replace(SMALL, d_v=6, num_layers=1)
    monkeypatch.setattr(importlib.import_module("pre_norm"), "MODEL", model)
    _, post, pre = printed(capsys, "pre_norm", steps=40, tested=20)
    assert "post-norm" in post and "pre-norm" in pre
    for line in (post, pre):
        first, _, last, _, held_out, _ = numbers(line)
        assert max(last, held_out) < 0.85 * first


@pytest.mark.run
def test_a_pre_norm_sublayer_reads_its_normed_input_and_adds_to_what_was_not_normed():
    pre_norm, draw = importlib.import_module("pre_norm"), np.random.default_rng(7)
    x = draw.standard_normal((1, 5, 26)) * 3 + 1
    unit = reference.Norm(np.ones(26), np.zeros(26))
    found = pre_norm.PreNorm(SMALL)(jnp.asarray(x, jnp.float32), lambda y: 2 * y, None)
    np.testing.assert_allclose(found[0], x[0] + 2 * reference.layer_norm(unit, x[0]), atol=1e-5)
    model = pre_norm.PreNormTransformer(SMALL, 31, rngs=nnx.Rngs(1))
    ids = jnp.array([[5, 7, 30, 3]])
    memory = model.encode(ids, padding_mask(ids))
    states = model.decode_states(ids, memory, causal_mask(4), padding_mask(ids))
    for normed in (memory, states):  # behind each stack stands one more norm
        np.testing.assert_allclose(normed.mean(-1), 0, atol=1e-5)
        np.testing.assert_allclose(normed.var(-1), 1, atol=1e-3)


def reference_of(model, config: ModelConfig) -> reference.Weights:
    """A single stack's weights under the reference's names."""
    params = nnx.to_pure_dict(nnx.state(model))
    whole = {"embedding": params["embedding"], "encoder": params["layers"], "decoder": {}}
    return tiny_model.reference_weights(whole, config)


@pytest.mark.run
@pytest.mark.parametrize("kind", ["GPT", "BERT"])
def test_a_single_stack_computes_what_numpy_computes_under_either_mask(small, kind):
    model = small.Stack(SMALL, 31, rngs=nnx.Rngs(3))
    weights = reference_of(model, SMALL)
    ids = jnp.array([[5, 7, 30, 1, 4, 4, 11], [9, 2, 3, 8, 0, 0, 0]])
    mask = causal_mask(7) if kind == "GPT" else padding_mask(ids)
    found = model(ids, mask)
    grids = np.broadcast_to(mask, (2, 1, 7, 7))
    for row, allowed, logits in zip(np.asarray(ids), grids, found, strict=True):
        states = reference.run_encoder(weights, row, allowed[0])
        np.testing.assert_allclose(logits, states @ weights.output_table.T, atol=1e-5)


def turned(x: np.ndarray) -> np.ndarray:
    """Rotary positions in complex numbers, x [T, K]: row t, pair i times e^(i t 10000^(-2i/K))."""
    pairs = x[:, ::2] + 1j * x[:, 1::2]
    angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(0, x.shape[1], 2) / x.shape[1])
    pairs = pairs * np.exp(1j * angles)
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)


def modern_logits(params, ids: np.ndarray) -> np.ndarray:
    """The modern stack on one row of ids in NumPy: every part replaced, all heads of one group."""
    x = params["embedding"][ids] * np.sqrt(26)
    earlier = np.tril(np.ones((len(ids), len(ids)), bool))
    for _, layer in sorted(params["layers"].items()):
        attention, ffn = layer["self_attention"], layer["feed_forward"]
        key, value = turned(x @ attention["key"]), x @ attention["value"]
        heads = [turned(x @ kernel) for kernel in np.split(attention["query"], 2, axis=1)]
        read = [reference.attention_weights(head, key, earlier) @ value for head in heads]
        x = x + np.hstack(read) @ attention["output"]
        x = x / np.sqrt((x**2).mean(1, keepdims=True)) * layer["self_attention_residual"]["scale"]
        gate = x @ ffn["gate"]
        x = x + gate / (1 + np.exp(-gate)) * (x @ ffn["up"]) @ ffn["down"]
        x = x / np.sqrt((x**2).mean(1, keepdims=True)) * layer["feed_forward_residual"]["scale"]
    return x @ params["embedding"].T


@pytest.mark.run
def test_a_modern_stack_computes_what_numpy_computes(small):
    modern_block = importlib.import_module("modern_block")
    model = modern_block.ModernStack(31, modern_block.PARTS)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(model)))
    ids = jnp.array([[5, 7, 30, 1, 4, 4, 11]])
    np.testing.assert_allclose(
        model(ids, causal_mask(7))[0], modern_logits(params, ids[0]), atol=1e-5
    )


@pytest.mark.run
def test_pairs_are_packed_whole_and_continued_token_by_token(small, monkeypatch):
    pairs = small.corpus("train", 300)
    tokenizer = small.tokenizer_of(pairs)
    rows = small.packed(tokenizer, pairs)
    assert rows.shape[1] == small.LENGTH and np.all(rows[:, 0] == BOS_ID)
    stream = [i for row in rows for i in row.tolist() if i != PAD_ID]
    whole = [i for s, t in pairs for i in (BOS_ID, *tokenizer.encode(s), *tokenizer.encode(t))]
    assert stream == whole
    model, source = small.Stack(SMALL, tokenizer.vocab_size, rngs=nnx.Rngs(1)), pairs[1][0]
    ids = [BOS_ID, *tokenizer.encode(source)]
    prompt = len(ids)
    monkeypatch.setattr(small, "LENGTH", prompt + 3)
    (found,) = small.translate(model, tokenizer, [source])
    while len(ids) < prompt + 3:
        ids.append(int(model(np.array([ids]), causal_mask(len(ids)))[0, -1].argmax()))
    assert found == tokenizer.decode(ids[prompt:])


@pytest.mark.run
def test_neither_marks_nor_padding_are_hidden_and_the_loss_counts_what_is(small):
    encoder_only = importlib.import_module("encoder_only")
    rows = np.tile(np.array([[2, 4, 5, 6, 3, 7, 8, 3, 0, 0]]), (200, 1))
    mask = np.asarray(encoder_only.hidden(rows, jax.random.key(1)))
    assert 0.25 < mask[:, [1, 2, 3, 5, 6]].mean() < 0.35
    assert not mask[:, [0, 4, 7, 8, 9]].any()
    model = small.Stack(SMALL, 31, rngs=nnx.Rngs(3))
    _, tokens = encoder_only.masked_loss(model, rows, jax.random.key(1))
    assert tokens == mask.sum()


@pytest.mark.run
def test_complexity_counts_the_steps_of_a_program_and_the_layers_of_a_path(capsys):
    _, *rows = printed(capsys, "complexity", repeats=1, shrink=16)
    found = {row.split()[0]: [int(cell) for cell in row.split()[-2:]] for row in rows}
    assert found == {"self_attention": [1, 1], "recurrent": [33, 1], "convolution": [1, 16]}
    sizes = [3, 6, 12]
    complexity = importlib.import_module("complexity")
    assert complexity.exponent(sizes, [7 * size**2 for size in sizes]) == pytest.approx(2)


def test_each_way_of_mixing_computes_its_formula():
    complexity = importlib.import_module("complexity")
    x, weights = (np.asarray(array) for array in complexity.inputs(5, 3))
    state, states = np.zeros(3), []
    for row in x:
        state = np.tanh(state @ weights[0] + row)
        states.append(state)
    np.testing.assert_allclose(complexity.recurrent(x, weights), states, atol=1e-5)
    before = np.vstack([np.zeros((2, 3)), x])
    mixed = [sum(before[t + i] @ weights[i] for i in range(3)) for t in range(5)]
    np.testing.assert_allclose(complexity.convolution(x, weights), mixed, atol=1e-5)


@pytest.mark.run
def test_one_sentence_by_pure_functions_has_the_log_probability_of_the_translator(finished, capsys):
    importlib.import_module("one_sentence").main(str(finished), "a cat")
    *_, last = capsys.readouterr().out.splitlines()
    assert float(re.search(r"differs by (\S+)", last)[1]) < 1e-5


@pytest.mark.run
def test_the_small_experiments_find_what_the_paper_says(capsys):
    said = "\n".join(printed(capsys, "why"))
    assert "a look-up: True" in said
    assert "no position: other words' order gives the same vectors in that order: True" in said
    assert "mask: other words' order gives the same vectors in that order: False" in said
    assert "attention moves words 1 2 3 4 5 6" in said and "the FFN moves words 3\n" in said
    narrow, wide = (float(share) for share in re.findall(r"loses ([\d.]+)%", said))
    assert wide < narrow / 3
    kept, lost = (float(share) for share in re.findall(r"([\d.]+) of the gradient", said))
    assert lost < kept / 2


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_an_example_is_short_and_says_how_to_run_it(path):
    code = path.read_text(encoding="utf-8")
    assert len(code.splitlines()) < 150
    assert f"python examples/{path.name}" in code
