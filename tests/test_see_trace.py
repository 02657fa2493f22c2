"""A trace holds the numbers of the model's own forward pass, and fits into a terminal."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import numpy_transformer as reference
import pytest
import tiny_checkpoints
from jax.interpreters import partial_eval
from jaxprs import equations
from tiny_model import CONFIG, SOURCE, TARGET_IN, build, random_params, reference_weights

from flaxformer_min import cli
from flaxformer_min.config import ModelConfig
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.errors import UserError
from flaxformer_min.model.build import initializer
from flaxformer_min.model.teacher_forcing import forced_states
from flaxformer_min.see.record import Trace, axes, to_json, write_npz
from flaxformer_min.see.trace import trace_sentence
from flaxformer_min.see.trace_text import fit, flow, printable, to_text, width

TOKENIZER = tiny_checkpoints.TOKENIZER
# Sizes are distinct: L 2, H 3, K 5, U 4, D 14, F 11, V 20, and in PAIR S 9 and T 7.
MODEL = ModelConfig(num_layers=2, d_model=14, d_ff=11, num_heads=3, d_k=5, d_v=4, max_length=23)
CASES = {
    "paper": MODEL,
    "nothing shared": dataclasses.replace(MODEL, share_embeddings="none", positions="learned"),
}
PAIR = "a b ab g a b ab g", "ef ga ba"


def translator_of(model: ModelConfig) -> Translator:
    """Random weights, biases and norms."""
    _, params = initializer(model, TOKENIZER.vocab_size)(jax.random.key(5))
    params = jax.tree.map(
        lambda leaf: leaf + 0.01 * jnp.cos(jnp.arange(leaf.size).reshape(leaf.shape)), params
    )
    config = dataclasses.replace(tiny_checkpoints.CONFIG, model=model)
    return Translator(config, TOKENIZER, params, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def translator() -> Translator:
    return translator_of(MODEL)


@pytest.fixture(scope="module")
def trace(translator) -> Trace:
    return trace_sentence(translator, *PAIR)


# Taps


def test_without_taps_nothing_is_computed_that_only_taps_would_read():
    params = random_params()

    def states(params, taps=None):
        model = build(CONFIG, params)
        return forced_states(model, SOURCE, TARGET_IN, pad_id=0, bos_id=2, taps=taps)

    without = jax.make_jaxpr(states)(params).jaxpr
    needed, _ = partial_eval.dce_jaxpr(without, [True])
    with_taps, _ = partial_eval.dce_jaxpr(
        jax.make_jaxpr(lambda params: states(params, {}))(params).jaxpr, [True]
    )
    counts = [len(list(equations(jaxpr))) for jaxpr in (without, needed, with_taps)]
    assert counts[0] > 300
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.run
@pytest.mark.parametrize("change", [{}, {"scan_layers": True}, {"remat": True}], ids=str)
def test_every_tap_is_there_however_the_layers_are_run(change, trace):
    again = trace_sentence(translator_of(dataclasses.replace(MODEL, **change)), *PAIR)
    assert again.arrays.keys() == trace.arrays.keys()
    for path, array in trace.arrays.items():
        np.testing.assert_allclose(again.arrays[path], array, atol=1e-5, err_msg=path)


# The numbers


def test_axes_name_the_shape_of_every_array(trace):
    assert len(trace.arrays) == 47
    sizes = trace.sizes
    assert len(set(sizes.values())) == len(sizes) == 9
    for path, array in trace.arrays.items():
        assert array.shape == tuple(sizes[letter] for letter in axes(path)), path
        assert array.dtype == np.float32


def test_log_probabilities_are_those_that_the_translator_gives(translator, trace):
    (scored,) = translator.score_tokens([PAIR])
    assert trace.target.ids == list(scored.tokens)
    np.testing.assert_allclose(trace.log_probs, scored.log_probs, atol=1e-6)


@pytest.mark.run
def test_without_a_target_the_trace_is_of_what_the_model_writes_greedily(translator):
    (found,) = translator.translate(PAIR[:1], Options(beam_size=1))
    trace = trace_sentence(translator, PAIR[0])
    assert (trace.translation, trace.target.ids) == (found.text, list(found.tokens))
    assert sum(trace.log_probs) == pytest.approx(found.log_prob, rel=1e-6)


@pytest.mark.run
@pytest.mark.parametrize("model", CASES.values(), ids=CASES)
def test_the_arrays_are_those_of_the_numpy_reference(model):
    translator = translator_of(model)
    trace = trace_sentence(translator, *PAIR)
    weights = reference_weights(jax.device_get(translator.params), model)
    source, target = np.array(trace.source.ids), np.array(trace.target.ids)
    target_in = np.array([TOKENIZER.bos_id, *target[:-1]])
    found = trace.arrays

    def equal(path, wanted, layer=...):
        np.testing.assert_allclose(found[path][layer], wanted, atol=2e-5, err_msg=path)

    positions = weights.source_positions
    x = reference.embed(weights.source_table, positions, source)
    equal("encoder/input", x)
    equal("encoder/embedding", model.d_model**0.5 * weights.source_table[source])
    everything = np.ones((len(source), len(source)), bool)
    for n, layer in enumerate(weights.encoder):
        x = check_attention(equal, "encoder/self_attention", n, layer, x, x, everything)
        x = check_feed_forward(equal, "encoder/feed_forward", n, layer, x)
    memory = reference.encode(weights, source)
    equal("encoder/states", memory)
    past = np.tri(len(target), dtype=bool)
    y = reference.embed(weights.target_table, weights.target_positions, target_in)
    equal("decoder/input", y)
    for n, layer in enumerate(weights.decoder):
        y = check_attention(equal, "decoder/self_attention", n, layer, y, y, past)
        seen = np.ones((len(target), len(source)), bool)
        y = check_attention(equal, "decoder/cross_attention", n, layer, y, memory, seen)
        y = check_feed_forward(equal, "decoder/feed_forward", n, layer, y)
    equal("decoder/states", y)
    logits = reference.decode(weights, target_in, memory, source)
    equal("logits", logits)
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for row, best in zip(chances, trace.likeliest, strict=True):
        assert [each.id for each in best] == np.argsort(-row)[:5].tolist()
        np.testing.assert_allclose([e.probability for e in best], np.sort(row)[:-6:-1], atol=1e-5)
        assert [each.piece for each in best] == TOKENIZER.pieces([each.id for each in best])


def check_attention(equal, site, n, layer, x, memory, allowed):
    part, norm = (getattr(layer, site.split("/")[1] + end) for end in ("", "_norm"))
    for head, (query, key, value) in enumerate(zip(part.query, part.key, part.value, strict=True)):
        scores = (x @ query) @ (memory @ key).T
        weights = reference.attention_weights(x @ query, memory @ key, allowed)
        equal(f"{site}/query", x @ query, (n, head))
        equal(f"{site}/keys", memory @ key, (n, head))
        equal(f"{site}/values", memory @ value, (n, head))
        equal(f"{site}/scores", scores, (n, head))
        equal(f"{site}/scaled_scores", scores / query.shape[1] ** 0.5, (n, head))
        equal(f"{site}/weights", weights, (n, head))
        equal(f"{site}/context", weights @ (memory @ value), (n, head))
    output = reference.multi_head(part, x, memory, allowed)
    return check_residual(equal, site, n, norm, x, output)


def check_feed_forward(equal, site, n, layer, x):
    ffn = layer.feed_forward
    equal(f"{site}/hidden", np.maximum(0, x @ ffn.w1 + ffn.b1), n)
    return check_residual(
        equal, site, n, layer.feed_forward_norm, x, reference.feed_forward(ffn, x)
    )


def check_residual(equal, site, n, norm, x, output):
    equal(f"{site}/output", output, n)
    equal(f"{site}/sum", x + output, n)
    normed = reference.layer_norm(norm, x + output)
    equal(f"{site}/norm", normed, n)
    return normed


# What is written


def test_json_has_the_record_and_a_digest_of_each_array(trace):
    tree = json.loads(to_json(trace))
    assert tree["source"]["pieces"] == trace.source.pieces
    assert (tree["text"], tree["sizes"]["V"], len(tree["likeliest"])) == (PAIR[0], 20, 7)
    assert tree["likeliest"][0][0].keys() == {"piece", "id", "probability"}
    weights = trace.arrays["decoder/cross_attention/weights"]
    about = tree["arrays"]["decoder/cross_attention/weights"]
    assert (about["axes"], about["shape"]) == ("LHTS", [2, 3, 7, 9])
    assert about["first"] == pytest.approx(weights[0, 0, 0, :3].tolist())
    assert (about["mean"], about["std"]) == pytest.approx((weights.mean(), weights.std()))


def test_npz_has_every_array_by_its_path(trace, tmp_path):
    write_npz(str(tmp_path / "a.npz"), trace.arrays | trace.pieces)
    with np.load(tmp_path / "a.npz") as file:
        assert set(file) == {*trace.arrays, "source/pieces", "target/pieces", "decoder/pieces"}
        assert file["decoder/pieces"].tolist() == ["<s>", *trace.target.pieces[:-1]]
        np.testing.assert_array_equal(file["logits"], trace.arrays["logits"])
    for name, message in (("a.txt", "ends in .npz"), ("no/a.npz", "No such file")):
        with pytest.raises(UserError, match=message):
            write_npz(str(tmp_path / name), {})


def test_the_text_never_is_wider_than_80_columns_and_shows_the_steps_in_order(trace):
    wide = ["素晴らしい世界へようこそ" * 9, "e\u0301" * 90, "\x1b[2J\u200b", "a" * 200]
    hostile = dataclasses.replace(
        trace,
        text=" ".join(wide),
        source=dataclasses.replace(trace.source, pieces=[*wide, *trace.source.pieces[4:]]),
        target_in=[*wide, *trace.target_in[4:]],
    )
    for each in (trace, hostile):
        lines = to_text(each).split("\n")
        assert max(map(width, lines)) <= 80
        assert all(line.isprintable() for line in lines)
    order = ["E[ids] sqrt(D)", "Encoder layer 1, self", "Encoder layer 2, feed", "C, the memory"]
    order += ["Decoder layer 2, cross", "D, the states", "logits = D E^T", "Next token", "log p("]
    places = [to_text(trace).index(words) for words in order]
    assert places == sorted(places)


def test_a_picture_shades_what_is_attended_to_and_dots_what_is_masked(trace):
    site = "decoder/self_attention/weights"
    weights = np.zeros_like(trace.arrays[site])
    weights[:, :, np.arange(7), [0, 0, 2, 1, 4, 0, 6]] = 1
    drawn = to_text(dataclasses.replace(trace, arrays=trace.arrays | {site: weights})).split("\n")
    pictures = [line for line in drawn if "|" in line and "·" in line][:6]
    assert [line.split("|")[1] for line in pictures] == [
        "█······", "█······", "··█····", "·█·····", "····█··", "█······",
    ]  # fmt: skip
    assert pictures[2].split("|")[2].strip() == f"{trace.target_in[2]} 100%"


def test_widths_count_wide_characters_twice_and_accents_not_at_all():
    assert [width(text) for text in ("abc", "世界", "e\u0301", "▁a")] == [3, 4, 1, 2]
    assert fit("世界", 3) == "世…" and fit("世界", 5) == "世界 " and fit("a\tb", 3) == "a b"
    assert list(flow(["x" * 40, "y" * 36, "z"])) == ["  " + "x" * 40 + "  " + "y" * 36, "  z"]


def test_another_encoding_gets_other_signs():
    assert printable("▁ü |█▒·|…", "ascii") == "_? |#+.|."
    assert printable("▁ü |█▒·|…", "utf-8") == "▁ü |█▒·|…"


# Mistakes


@pytest.mark.parametrize(
    ("text", "message"), [(" \t", "blank sentence"), ("a " * 23, "the model takes 23, shorten")]
)
def test_a_sentence_that_cannot_be_traced_is_an_error_of_the_user(translator, text, message):
    for pair in ((text, "a"), ("a", text)):
        with pytest.raises(UserError, match=message):
            trace_sentence(translator, *pair)


def test_the_verb_writes_text_json_and_arrays(finished, tmp_path, capsys):
    command = ["trace", str(finished), "a cat", "--target", "eine Katze", "--step", "100"]
    assert cli.main(command) == 0
    assert "Next token" in capsys.readouterr().out
    assert cli.main([*command, "--json", "--npz", str(tmp_path / "a.npz")]) == 0
    tree = json.loads(capsys.readouterr().out)
    (scored,) = Translator.load(finished, step=100).score_tokens([("a cat", "eine Katze")])
    np.testing.assert_allclose(tree["log_probs"], scored.log_probs, atol=1e-6)
    with np.load(tmp_path / "a.npz") as file:
        assert file["logits"].shape == (len(scored.tokens), 290)


def test_mistakes_of_the_verb_are_one_line_and_status_2(finished, tmp_path, capsys):
    for command, message in (
        (["trace", tmp_path, "a"], "no finished checkpoint in it"),
        (["trace", finished, " "], "blank sentence"),
        (["trace", finished, "\udcff"], "not UTF-8"),
        (["trace", finished, "a", "--npz", "x"], "ends in .npz"),
    ):
        assert cli.main(list(map(str, command))) == 2
        errors = capsys.readouterr().err
        assert message in errors and errors.count("\n") == 1
