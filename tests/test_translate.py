"""N lines in, N lines out, whatever the lines and their neighbours; and scores that are true."""

import copy
import dataclasses
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flaxformer_min.checkpoint import Checkpoints
from flaxformer_min.config import Config, DataConfig, DecodeConfig, ModelConfig
from flaxformer_min.masks import causal_mask, padding_mask
from flaxformer_min.model import Transformer
from flaxformer_min.state import split_model
from flaxformer_min.tokenizer import Tokenizer, train_tokenizer
from flaxformer_min.translate import Translation, Translator, plan_batches, shape_ladder

MAX_LENGTH = 23  # two shapes, 16 and 23
DATA = DataConfig(
    train=("train.en", "train.de"),
    validation=("val.en", "val.de"),
    source_language="en",
    target_language="de",
    vocab_size=300,
    max_length=MAX_LENGTH,
)
CONFIG = Config(
    model=ModelConfig(
        num_layers=1, d_model=10, d_ff=7, num_heads=3, d_k=5, d_v=2, max_length=MAX_LENGTH,
        share_embeddings="none",
    ),
    data=DATA,
    decode=DecodeConfig(beam_size=3, length_penalty_alpha=0.6, max_length_offset=5),
)  # fmt: skip
WORDS = ("one", "two", "three", "grey", "dogs", "see", "a", "cat")
BLANK = ["", " ", "\t", "\u00a0", "\u3000 ", "\u2028", "\u0085", "\x0b\x0c"]
HOSTILE = [
    "one two",
    *BLANK[:5],
    "a\u2028b",
    *BLANK[5:],
    "a\u0085b",
    "\u00a0a\u00a0",
    "NUL \x00 inside",
    "\x00",
    "CR \r inside",
    "\U0001f642 \U0001f469\u200d\U0001f52c",
    "</s>",
    "<pad> <s> <unk>",
    "\u2581",
    "'" * 300,
    " ".join(WORDS[n % 8] for n in range(3000)),
    "see a cat",
    "see a grey cat",
]


def random_params(seed: int, tokenizer: Tokenizer) -> dict:
    """Weights so large that lines differ. With seed 3 many translations end, with seed 0 none."""
    _, shapes = split_model(CONFIG.model, tokenizer.vocab_size)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: (0.7 * rng.normal(size=leaf.shape)).astype("f4"), shapes)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    lines = [f"{a} {b} {c}" for a in WORDS for b in WORDS for c in WORDS]
    return Tokenizer(train_tokenizer(lines, DATA))


@pytest.fixture(scope="module")
def translator(tokenizer: Tokenizer) -> Translator:
    return Translator(CONFIG, tokenizer, random_params(3, tokenizer))


@pytest.fixture(scope="module")
def endless(translator: Translator) -> Translator:
    """The same compiled functions with weights under which nothing ends."""
    other = copy.copy(translator)
    other.params = jax.device_put(random_params(0, translator.tokenizer))
    return other


def sentences(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=rng.integers(1, 9))) for _ in range(count)]


@pytest.fixture(scope="module")
def forced(translator: Translator) -> Callable[[list[int], list[int]], np.ndarray]:
    """(source, target) -> log-probabilities [T, V] at each target position, by a full forward."""
    graphdef, _ = split_model(CONFIG.model, translator.tokenizer.vocab_size)

    @jax.jit
    def log_probs(source: jax.Array, target_in: jax.Array) -> jax.Array:
        model: Transformer = nnx.merge(graphdef, translator.params)
        mask = padding_mask(source)
        memory = model.encode(source, mask)
        return jax.nn.log_softmax(model.decode(target_in, memory, causal_mask(MAX_LENGTH), mask))

    def padded(ids: list[int]) -> np.ndarray:
        return np.array([ids + [0] * (MAX_LENGTH - len(ids))])

    def forced(source: list[int], target: list[int]) -> np.ndarray:
        target_in = [translator.tokenizer.bos_id, *target[:-1]]
        return np.asarray(log_probs(padded(source), padded(target_in)))[0, : len(target)]

    return forced


def log_probability(forced: Callable, source: list[int], target: list[int]) -> float:
    return forced(source, target)[np.arange(len(target)), target].sum()


def test_every_line_has_its_translation_and_blank_ones_an_empty_one(translator):
    found = translator.translate(HOSTILE)
    assert len(found) == len(HOSTILE)
    for line, translation in zip(HOSTILE, found, strict=True):
        blank = line == "" or line.isspace()
        assert (translation == Translation("", 0.0, (), True)) == blank
        assert "\n" not in translation.text and "\r" not in translation.text
        assert not set(translation.tokens) & set(translator.tokenizer.never_generated)
        assert blank == (not translation.tokens)
    assert {line for line in HOSTILE if line == "" or line.isspace()} == set(BLANK)
    assert len({translation.text for translation in found}) > 6
    assert {translation.finished for translation in found if translation.tokens} == {True, False}


def test_blank_lines_do_not_reach_the_model(translator, monkeypatch):
    monkeypatch.setattr(translator, "_search", None)
    assert [translation.text for translation in translator.translate(BLANK)] == [""] * len(BLANK)
    assert translator.translate([]) == []


@pytest.mark.parametrize("beam_size", [1, 3])
def test_neighbours_change_no_bit_of_a_translation(translator, endless, beam_size):
    lines = HOSTILE + sentences(70, seed=1)
    for model in (translator, endless):
        found = model.translate(lines, beam_size=beam_size)
        backwards = model.translate(lines[::-1], beam_size=beam_size)
        assert backwards[::-1] == found
        for n in (0, *range(8, 34)):
            assert model.translate([lines[n]], beam_size=beam_size) == [found[n]]
    assert len({translation.tokens for translation in found}) > 50


def test_scores_are_forced_decoding_over_the_length_penalty(translator, forced):
    lines = sentences(12, seed=2)
    for alpha in (0.0, 1.3):
        translations = translator.translate(lines, length_penalty_alpha=alpha)
        for line, found in zip(lines, translations, strict=True):
            target = list(found.tokens)
            total = log_probability(forced, translator.tokenizer.encode(line), target)
            expected = total / ((5 + len(target)) / 6) ** alpha
            np.testing.assert_allclose(found.score, expected, atol=1e-4)


def test_a_greedy_token_is_the_likeliest_that_may_be_generated(translator, forced):
    tokenizer = translator.tokenizer
    for line in sentences(5, seed=11):
        (found,) = translator.translate([line], beam_size=1)
        steps = forced(tokenizer.encode(line), list(found.tokens)).copy()
        steps[:, list(tokenizer.never_generated)] = -np.inf
        assert steps.argmax(axis=1).tolist() == list(found.tokens)


def test_ids_never_generated_do_not_come_even_where_they_are_likeliest(endless):
    forbidden = list(endless.tokenizer.never_generated)
    (before,) = endless.translate(["one grey cat"], beam_size=1)
    output = np.array(endless.params["output_embedding"])
    output[forbidden] = 1.5 * output[before.tokens[0]]  # likelier than the first token
    other = copy.copy(endless)
    other.params = {**endless.params, "output_embedding": jnp.array(output)}
    (after,) = other.translate(["one grey cat"], beam_size=1)
    assert after.tokens == before.tokens
    assert after.score < before.score  # the forbidden ids keep their share of the probability
    for translation in other.translate(sentences(5, seed=12)):
        assert not set(translation.tokens) & set(forbidden)


def test_score_is_the_log_probability_of_the_pair_in_order(translator, forced):
    pairs = list(zip(sentences(9, seed=3), sentences(9, seed=4), strict=True))
    pairs += [("", "a cat"), ("see", ""), ("\u2028", "</s>")]
    found = translator.score(pairs)
    encode = translator.tokenizer.encode
    for (source, target), score in zip(pairs, found, strict=True):
        expected = log_probability(forced, encode(source), encode(target))
        np.testing.assert_allclose(score, expected, atol=1e-4)
    assert translator.score(pairs[::-1]) == found[::-1]


def test_lengths_are_bounded_by_the_source_length_and_the_model(translator, endless):
    tokenizer = translator.tokenizer
    lines = sentences(20, seed=5) + HOSTILE[-4:-2]
    bounds = [min(len(tokenizer.encode(line)) + 5, MAX_LENGTH) for line in lines]
    assert len(set(bounds)) > 5
    for bound, ended, unfinished in zip(
        bounds, translator.translate(lines), endless.translate(lines), strict=True
    ):
        assert len(ended.tokens) <= bound
        assert ended.finished == (ended.tokens[-1] == tokenizer.eos_id)
        assert len(unfinished.tokens) == bound
        assert not unfinished.finished


def test_a_line_too_long_is_translated_from_its_first_tokens_with_one_warning(translator, caplog):
    tokenizer = translator.tokenizer
    long = "see a cat " * 40
    first = tokenizer.decode(tokenizer.encode(long)[: MAX_LENGTH - 1])
    assert tokenizer.encode(first) == [*tokenizer.encode(long)[: MAX_LENGTH - 1], tokenizer.eos_id]
    with caplog.at_level(logging.WARNING):
        cut, whole, _ = translator.translate([long, first, "one"], first_line=101)
    assert cut == whole
    assert [record.getMessage()[:9] for record in caplog.records] == ["line 101:"]
    caplog.clear()
    one, other = translator.score([("see", long), ("see", first)])
    assert one == other
    assert [record.getMessage()[:7] for record in caplog.records] == ["line 1:"]


def test_new_weights_and_more_lines_compile_nothing_new(tokenizer):
    translator = Translator(CONFIG, tokenizer, random_params(3, tokenizer))
    few, many = sentences(3, seed=6), sentences(140, seed=7)
    before = translator.translate(few)
    widths = {
        width for _, width, _ in plan_batches([len(tokenizer.encode(s)) for s in few], MAX_LENGTH)
    }
    assert translator._search._cache_size() == len(widths) == 1
    translator.params = jax.tree.map(jnp.array, random_params(4, tokenizer))
    after = translator.translate(few)
    translator.translate(few, length_penalty_alpha=0.1)
    translator.translate([line for line in many if len(tokenizer.encode(line)) <= 16])
    assert translator._search._cache_size() == 1
    assert after != before
    translator.params = jax.tree.map(jnp.array, random_params(3, tokenizer))
    assert translator.translate(few) == before


def test_a_saved_checkpoint_translates_as_the_live_weights(translator, tmp_path):
    tokenizer = translator.tokenizer
    with Checkpoints(tmp_path, CONFIG, tokenizer) as checkpoints:
        checkpoints.save({"params": translator.params}, 7)
    loaded = Translator.load(tmp_path)
    lines = sentences(5, seed=8)
    assert loaded.step == 7
    assert loaded.translate(lines) == translator.translate(lines)


def test_bfloat16_scores_stay_near_those_of_float32(translator):
    model = dataclasses.replace(CONFIG.model, compute_dtype="bfloat16")
    config = dataclasses.replace(CONFIG, model=model)
    rough = Translator(config, translator.tokenizer, translator.params)
    pairs = list(zip(sentences(5, seed=9), sentences(5, seed=10), strict=True))
    exact = translator.score(pairs)
    np.testing.assert_allclose(rough.score(pairs), exact, rtol=0.05)
    assert rough.score(pairs) != exact


def test_a_batch_holds_lines_of_one_shape_and_every_line_is_in_one():
    lengths = [1, 16, 17, 40, 41, 2, 24, 25, 41, 33, *[5] * 130]
    batches = list(plan_batches(lengths, 41))
    assert shape_ladder(41) == [16, 24, 32, 41]
    assert sorted(place for *_, places in batches for place in places) == list(range(len(lengths)))
    shapes = {}
    for rows, width, places in batches:
        assert 0 < len(places) <= rows
        assert shapes.setdefault(width, rows) == rows
        for place in places:
            assert width == min(shape for shape in (16, 24, 32, 41) if shape >= lengths[place])


@pytest.mark.parametrize(
    ("longest", "ladder"),
    [(7, [7]), (16, [16]), (17, [16, 17]), (100, [16, 24, 32, 48, 64, 96, 100])],
)
def test_shapes_grow_by_half_or_a_third_up_to_the_longest(longest, ladder):
    assert shape_ladder(longest) == ladder
