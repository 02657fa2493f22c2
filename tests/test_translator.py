"""N lines in, N lines out, whatever the lines and their neighbours; and scores that are true."""

import copy
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flaxformer_min.checkpoints.format import Loaded
from flaxformer_min.checkpoints.store import Checkpoints
from flaxformer_min.config import Config, DataConfig, DecodeConfig, ModelConfig
from flaxformer_min.data.batch import Batch, padded
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.data.tokenizer_training import train_tokenizer
from flaxformer_min.decoding import translator as translate
from flaxformer_min.decoding.batches import plan_batches
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import EMPTY, Translator
from flaxformer_min.errors import UserError
from flaxformer_min.model.build import split_model
from flaxformer_min.model.masks import causal_mask, padding_mask
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.training.loss import make_loss

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


@pytest.mark.run
def test_every_line_has_its_translation_and_blank_ones_an_empty_one(translator):

    def read_ids(line: str) -> list[int]:
        ids = translator.tokenizer.encode(line)
        return ids if len(ids) <= MAX_LENGTH else [*ids[: MAX_LENGTH - 1], ids[-1]]

    found = translator.translate(HOSTILE)
    assert len(found) == len(HOSTILE)
    for line, translation in zip(HOSTILE, found, strict=True):
        blank = line == "" or line.isspace()
        assert (translation == EMPTY) == blank
        assert "\n" not in translation.text and "\r" not in translation.text
        assert not set(translation.tokens) & set(translator.tokenizer.never_generated)
        assert blank == (not translation.tokens)
        assert list(translation.source) == ([] if blank else read_ids(line))
    assert {line for line in HOSTILE if line == "" or line.isspace()} == set(BLANK)
    assert len({translation.text for translation in found}) > 6
    assert {translation.finished for translation in found if translation.tokens} == {True, False}


def test_blank_lines_do_not_reach_the_model(translator, monkeypatch):
    monkeypatch.setattr(translator, "_search", None)
    assert [translation.text for translation in translator.translate(BLANK)] == [""] * len(BLANK)
    assert translator.translate([]) == []


@pytest.mark.run
@pytest.mark.parametrize(
    "options",
    [Options(beam_size=1), Options(beam_size=3), Options(sample=True, n_best=2, seed=5, top_p=0.9)],
    ids=["greedy", "beam", "sample"],
)
def test_neighbours_change_no_bit_of_a_translation(translator, endless, options):
    lines = HOSTILE + sentences(70, seed=1)
    for model in (translator, endless):
        found = model.translate(lines, options)
        backwards = model.translate(lines[::-1], options)
        assert backwards[::-1] == found
        for n in (0, *range(8, 34)):
            assert model.translate([lines[n]], options) == [found[n]]
    assert len({translation.tokens for translation in found}) > 50


def test_scores_are_forced_decoding_over_the_length_penalty(translator, forced):
    lines = sentences(12, seed=2)
    for alpha in (0.0, 1.3):
        translations = translator.translate(lines, Options(length_penalty_alpha=alpha))
        for line, found in zip(lines, translations, strict=True):
            target = list(found.tokens)
            total = log_probability(forced, translator.tokenizer.encode(line), target)
            expected = total / ((5 + len(target)) / 6) ** alpha
            np.testing.assert_allclose(found.score, expected, atol=1e-4)


def test_a_greedy_token_is_the_likeliest_that_may_be_generated(translator, forced):
    tokenizer = translator.tokenizer
    for line in sentences(5, seed=11):
        (found,) = translator.translate([line], Options(beam_size=1))
        steps = forced(tokenizer.encode(line), list(found.tokens)).copy()
        steps[:, list(tokenizer.never_generated)] = -np.inf
        assert steps.argmax(axis=1).tolist() == list(found.tokens)


def test_ids_never_generated_do_not_come_even_where_they_are_likeliest(endless):
    forbidden = list(endless.tokenizer.never_generated)
    (before,) = endless.translate(["one grey cat"], Options(beam_size=1))
    output = np.array(endless.params["output_embedding"])
    output[forbidden] = 1.5 * output[before.tokens[0]]  # likelier than the first token
    other = copy.copy(endless)
    other.params = {**endless.params, "output_embedding": jnp.array(output)}
    (after,) = other.translate(["one grey cat"], Options(beam_size=1))
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
    assert list(cut.source) == tokenizer.encode(first)
    assert [record.getMessage()[:17] for record in caplog.records] == ["source, line 101:"]
    caplog.clear()
    one, other = translator.score([("see", long), ("see", first)])
    assert one == other
    assert [record.getMessage()[:15] for record in caplog.records] == ["target, line 1:"]


def test_of_many_lines_too_long_the_first_are_named_and_all_are_counted(translator, caplog):
    long = "see a cat " * 40
    translator.translate([long, "one", *[long] * 98], prefixes=["one", long, *["one"] * 98])
    messages = caplog.messages
    assert [text.split(":")[0] for text in messages[:3]] == [
        f"source, line {number}" for number in (1, 3, 4)
    ]
    assert messages[3:] == ["lines of more tokens than the model takes: 100"]
    caplog.clear()
    translator.translate(["one"], prefixes=[long])
    assert [text.split(":")[0] for text in caplog.messages] == ["prefix, line 1"]


def test_lines_longer_than_what_the_model_was_trained_on_are_counted(translator, caplog):
    """The model takes 23 tokens and, here, was trained on at most 11."""
    data = dataclasses.replace(DATA, max_length=11)
    short = Translator(dataclasses.replace(CONFIG, data=data), translator.tokenizer, params={})
    short.params = translator.params
    lines = ["one " * words for words in range(1, 30)]
    tokens = [len(translator.tokenizer.encode(line)) for line in lines]
    over = [count for count in tokens if 11 < count <= 23]
    assert len(over) > 1 and max(tokens) > 23
    for found in (lambda: short.translate(lines), lambda: short.score([("one", x) for x in lines])):
        caplog.clear()
        found()
        (message,) = [text for text in caplog.messages if "trained on none" in text]
        assert f"more than 11 tokens: {len(over)}, the longest of {max(over)};" in message
    caplog.clear()
    short.translate(["one"])
    assert caplog.messages == []


@pytest.mark.run
def test_new_weights_and_more_lines_compile_nothing_new(tokenizer):
    translator = Translator(CONFIG, tokenizer, random_params(3, tokenizer))
    few, many = sentences(3, seed=6), sentences(140, seed=7)
    before = translator.translate(few)
    widths = {
        width for width, _ in plan_batches([len(tokenizer.encode(s)) for s in few], MAX_LENGTH)
    }
    assert translator._search._cache_size() == len(widths) == 1
    translator.params = jax.tree.map(jnp.array, random_params(4, tokenizer))
    after = translator.translate(few)
    translator.translate(few, Options(length_penalty_alpha=0.1))
    translator.translate([line for line in many if len(tokenizer.encode(line)) <= 16])
    assert translator._search._cache_size() == 1
    assert after != before
    translator.params = jax.tree.map(jnp.array, random_params(3, tokenizer))
    assert translator.translate(few) == before


@pytest.mark.run
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


@pytest.mark.run
def test_one_device_gives_the_bits_of_eight(translator):
    lines = HOSTILE + sentences(70, seed=1)
    pairs = list(zip(sentences(9, seed=3), sentences(9, seed=4), strict=True))
    expected, scores = translator.translate(lines), translator.score(pairs)
    assert jax.device_count() == 8
    alone = Translator(CONFIG, translator.tokenizer, translator.params, devices=jax.devices()[:1])
    assert alone.translate(lines) == expected
    assert alone.score(pairs) == scores


@pytest.mark.run
@pytest.mark.parametrize(
    "options",
    [
        Options(beam_size=1, min_length=5),
        Options(n_best=2, no_repeat_ngram_size=2),
        Options(sample=True, n_best=3, top_p=0.9),
    ],
    ids=["greedy", "beam", "sample"],
)
def test_lines_that_follow_others_in_their_rows_are_translated_as_those_that_do_not(
    translator, options
):
    """On one device 30 lines share 16 rows; on eight each has a row. An ensemble, with prefixes."""
    tokenizer, count = translator.tokenizer, 60
    short = [line for line in sentences(400, seed=30) if len(tokenizer.encode(line)) <= 16]
    lines, prefixes = short[:count], [*sentences(count - 20, seed=31), *[""] * 20]
    prefixes = [prefix[: len(line)] for prefix, line in zip(prefixes, lines, strict=True)]
    alone, eight = (
        Translator(
            CONFIG,
            tokenizer,
            translator.params,
            others=[(CONFIG.model, random_params(5, tokenizer))],
            devices=devices,
        )
        for devices in (jax.devices()[:1], jax.devices())
    )
    found = eight.translate(lines, options, prefixes=prefixes)
    assert alone.translate(lines, options, prefixes=prefixes) == found
    assert len({len(each.tokens) for each in found}) > 5
    assert len({each.text for each in found}) > 40


def test_two_threads_give_what_one_gives(translator):
    lines = [sentences(40, seed=seed) for seed in (21, 22)]
    expected = [translator.translate(each) for each in lines]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            assert list(pool.map(translator.translate, lines)) == expected


def test_the_n_best_are_different_and_sorted_and_the_best_is_that_of_the_search(translator, forced):
    lines = sentences(9, seed=13)
    found = translator.translate(lines, Options(n_best=3))
    assert [dataclasses.replace(each, others=()) for each in found] == translator.translate(lines)
    for line, best in zip(lines, found, strict=True):
        ranked = [best, *best.others]
        assert len({each.tokens for each in ranked}) == 3
        assert ranked == sorted(ranked, key=lambda each: (not each.finished, -each.score))
        for each in ranked:
            expected = log_probability(forced, translator.tokenizer.encode(line), [*each.tokens])
            np.testing.assert_allclose(each.log_prob, expected, atol=1e-4)
            penalty = ((5 + len(each.tokens)) / 6) ** 0.6
            np.testing.assert_allclose(each.score, each.log_prob / penalty, rtol=1e-5)


@pytest.mark.run
def test_draws_follow_from_seed_and_line_and_have_true_scores(translator, forced):
    lines = sentences(7, seed=14)
    options = Options(sample=True, n_best=3, seed=1, temperature=0.8, top_k=50)
    found = translator.translate(lines, options)
    assert translator.translate(lines, options) == found
    assert translator.translate(lines, dataclasses.replace(options, seed=2)) != found
    texts = set()
    for line, best in zip(lines, found, strict=True):
        for each in (best, *best.others):
            texts.add((line, each.tokens))
            expected = log_probability(forced, translator.tokenizer.encode(line), [*each.tokens])
            np.testing.assert_allclose(each.log_prob, expected, atol=1e-4)
    assert len(texts) > 2 * len(lines)


def test_lengths_have_the_limits_asked_for(translator, endless):
    eos = translator.tokenizer.eos_id
    lines = sentences(12, seed=15)
    before = translator.translate(lines)
    assert min(len(each.tokens) for each in before) < 7
    for each in translator.translate(lines, Options(min_length=7)):
        assert len(each.tokens) >= 7 and eos not in each.tokens[:6]
    for line, each in zip(
        lines, endless.translate(lines, Options(max_length_offset=1)), strict=True
    ):
        assert len(each.tokens) == min(len(translator.tokenizer.encode(line)) + 1, MAX_LENGTH)


@pytest.mark.run
def test_no_ngram_is_repeated_if_so_asked(endless):
    lines = sentences(12, seed=16)

    def most(options: Options) -> int:
        """How often a pair of tokens comes in one translation, at most."""
        pairs = [
            zip(t.tokens, t.tokens[1:], strict=False) for t in endless.translate(lines, options)
        ]
        return max(max(Counter(each).values()) for each in pairs)

    assert most(Options()) > 1
    assert most(Options(no_repeat_ngram_size=2)) == 1
    assert most(Options(sample=True, no_repeat_ngram_size=2)) == 1


@pytest.mark.run
@pytest.mark.parametrize("options", [Options(), Options(sample=True)], ids=["beam", "sample"])
def test_a_translation_begins_with_its_prefix_and_its_score_counts_it(translator, forced, options):
    tokenizer = translator.tokenizer
    lines = [*sentences(5, seed=17), "", "see"]
    prefixes = ["a cat", "", " \t", "</s>", "grey dogs", "x", "one two three " * 4]
    found = translator.translate(lines, options, prefixes=prefixes)
    free = translator.translate(lines, options)
    for line, prefix, each, other in zip(lines, prefixes, found, free, strict=True):
        if not prefix.strip() or not line:
            assert each == other
            continue
        start = tokenizer.encode(prefix)[:-1][: MAX_LENGTH - 1]
        assert list(each.tokens[: len(start)]) == start != list(other.tokens[: len(start)])
        expected = log_probability(forced, tokenizer.encode(line), [*each.tokens])
        np.testing.assert_allclose(each.log_prob, expected, atol=1e-4)
    for line, prefix, each in zip(lines, prefixes, found, strict=True):
        assert translator.translate([line], options, prefixes=[prefix]) == [each]


def test_the_unknown_piece_comes_only_if_allowed(endless):
    unk = endless.tokenizer.unk_id
    (before,) = endless.translate(["one grey cat"], Options(beam_size=1))
    output = np.array(endless.params["output_embedding"])
    output[unk] = 1.5 * output[before.tokens[0]]
    other = copy.copy(endless)
    other.params = {**endless.params, "output_embedding": jnp.array(output)}
    for options, comes in ((Options(beam_size=1), False), (Options(forbid_unknown=False), True)):
        (after,) = other.translate(["one grey cat"], options)
        assert (unk in after.tokens) == comes


@pytest.mark.run
def test_an_ensemble_takes_the_mean_of_probabilities(translator, endless, forced):
    tokenizer = translator.tokenizer
    smaller = dataclasses.replace(CONFIG.model, d_ff=5, max_length=19)
    _, shapes = split_model(smaller, tokenizer.vocab_size)
    rng = np.random.default_rng(8)
    params = jax.tree.map(lambda leaf: (0.5 * rng.normal(size=leaf.shape)).astype("f4"), shapes)
    config = dataclasses.replace(CONFIG, model=smaller)
    other = Translator(config, tokenizer, params)
    both = Translator(CONFIG, tokenizer, translator.params, others=[(smaller, params)])
    pairs = [(a, b) for a, b in zip(sentences(7, seed=18), sentences(7, seed=19), strict=True)]
    single = [model.score_tokens(pairs) for model in (translator, other)]
    for first, second, mean in zip(*single, both.score_tokens(pairs), strict=True):
        expected = np.log((np.exp(first.log_probs) + np.exp(second.log_probs)) / 2)
        np.testing.assert_allclose(mean.log_probs, expected, atol=1e-5)
    for line, found in zip(
        sentences(5, seed=20), both.translate(sentences(5, seed=20)), strict=True
    ):
        text = tokenizer.decode(found.tokens)
        if found.finished and tokenizer.encode(text) == list(found.tokens):
            np.testing.assert_allclose(both.score([(line, text)])[0], found.log_prob, atol=1e-4)
    assert both.translate(["see"])[0].tokens != translator.translate(["see"])[0].tokens
    twice = Translator(
        CONFIG, tokenizer, translator.params, others=[(CONFIG.model, translator.params)]
    )
    for one, two in zip(translator.score(pairs), twice.score(pairs), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-5)
    with pytest.raises(UserError, match="attention is that of one model"):
        both.translate(["see"], Options(attention=True))


def test_models_of_different_tokenizers_make_no_ensemble(tokenizer, translator, monkeypatch):
    other = Tokenizer(train_tokenizer(["one two three"] * 9 + list(WORDS), DATA))
    assert other.vocab_size == tokenizer.vocab_size
    found = {
        "a": Loaded(CONFIG, tokenizer, translator.params, 5),
        "b": Loaded(CONFIG, other, translator.params, 7),
    }
    monkeypatch.setattr(translate, "load_for_inference", lambda path, step: found[path])
    with pytest.raises(UserError, match="b: its tokenizer is not that of a"):
        Translator.load("a", "b")
    assert Translator.load("a", "a").step == [5, 5]
    assert Translator.load("b").step == 7


@pytest.mark.run
def test_scores_are_the_training_loss_without_smoothing(translator):
    tokenizer = translator.tokenizer
    pairs = list(zip(sentences(9, seed=3), sentences(9, seed=4), strict=True))
    sides = [[tokenizer.encode(pair[side]) for pair in pairs] for side in (0, 1)]
    batch = Batch(*(padded(side, MAX_LENGTH, tokenizer.pad_id) for side in sides))
    graphdef, _ = split_model(CONFIG.model, tokenizer.vocab_size)
    ids = {"pad_id": tokenizer.pad_id, "bos_id": tokenizer.bos_id}
    loss, tokens = make_loss(graphdef, **ids, smoothing=0.0)(translator.params, batch, None)
    scored = translator.score_tokens(pairs)
    assert tokens == sum(len(each.tokens) for each in scored)
    assert [list(each.tokens) for each in scored] == sides[1]
    np.testing.assert_allclose(-sum(translator.score(pairs)), loss, rtol=1e-5)
    np.testing.assert_allclose(-sum(sum(each.log_probs) for each in scored), loss, rtol=1e-5)


@pytest.mark.run
def test_attention_comes_with_each_hypothesis_if_asked_for(translator):
    lines = ["see a cat", "", "one two three grey dogs see a cat"]
    options = Options(n_best=2, attention=True)
    found = translator.translate(lines, options)
    assert found == translator.translate(lines, Options(n_best=2))
    assert found[1].attention is None
    for line in (0, 2):
        s = len(translator.tokenizer.encode(lines[line]))
        for each in (found[line], *found[line].others):
            t = len(each.tokens)
            shapes = [site.shape for site in each.attention]
            assert shapes == [(1, 3, s, s), (1, 3, t, t), (1, 3, t, s)]
            for site in each.attention:
                np.testing.assert_allclose(site.sum(axis=-1), 1, atol=1e-6)
            assert (each.attention.decoder[:, :, *np.triu_indices(t, 1)] == 0).all()


# What is no list of lines


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"Oct 7", r"lines is one bytes: write \[text\] for a single text"),
        (["see", None], r"lines\[1\] is None \(NoneType\): it must be a string"),
        ([b"see"], r"lines\[0\] is b'see' \(bytes\): it must be a string"),
        (["", 7], r"lines\[1\] is 7 \(int\): it must be a string"),
        (None, r"lines is None \(NoneType\): it must be a list of strings"),
        ({"see"}, r"lines is {'see'} \(set\): it must be a list of strings; write list\(...\)"),
        (iter(["see"]), r"it must be a list of strings; write list\(...\)"),
        ({"see": "now"}, r"\(dict\): it must be a list of strings; write list\(...\)"),
    ],
)
def test_lines_that_are_no_strings_are_a_type_error_at_once(translator, lines, message):
    with pytest.raises(TypeError, match=message):
        translator.decode(lines)  # before the first batch is asked for
    with pytest.raises(TypeError, match=message):
        translator.translate(lines)


def test_a_string_is_one_line_and_gives_one_translation(translator):
    assert translator.translate("a cat") == translator.translate(["a cat"])[0]
    assert translator.translate("") == EMPTY
    with pytest.raises(TypeError, match=r"lines is one str: write \[text\]"):
        translator.decode("a cat")


def test_after_a_warm_up_nothing_is_compiled_for_lines_up_to_its_length(translator, caplog):
    options = Options(beam_size=2, length_penalty_alpha=0.3)
    widths = translator.warm_up(options, longest=9)
    assert widths == sorted(widths) and widths[-1] >= 9
    lines = ["a", "a cat", "dogs and cats", ""] * 3
    with jax.log_compiles(), caplog.at_level("WARNING"):
        translator.translate(lines, dataclasses.replace(options, length_penalty_alpha=0.7))
    assert not [r for r in caplog.records if "search" in r.getMessage()]
    with pytest.raises(ValueError, match="longest is 0"):
        translator.warm_up(options, longest=0)


def test_no_batch_begins_once_it_should_stop(translator):
    begun = []

    def should_stop():
        begun.append(1)
        return len(begun) > 1

    lines = [" ".join(["a"] * n) for n in (1, 12)] * 200
    with pytest.raises(CancelledError, match="before every line was done"):
        translator.translate(lines, Options(beam_size=1), should_stop=should_stop)
    assert len(translator.translate(lines[:3], should_stop=lambda: False)) == 3


@pytest.mark.usefixtures("as_users_have_it")
def test_the_model_of_a_translator_has_its_weights(translator):
    model = translator.model
    tokens = np.array([translator.tokenizer.encode("a cat")])
    np.testing.assert_array_equal(model.embedding[...], translator.params["embedding"])
    assert model.encode(tokens, padding_mask(tokens)).shape[1] == tokens.shape[1]


@pytest.mark.usefixtures("as_users_have_it")
def test_prefixes_are_strings_and_as_many_as_the_lines(translator):
    lines = ["see", "a cat", ""]
    for prefixes in (["a"], ["a"] * 4):
        with pytest.raises(ValueError, match=f"{len(prefixes)} prefixes for 3 lines"):
            translator.decode(lines, prefixes=prefixes)
    with pytest.raises(TypeError, match=r"prefixes\[2\] is None"):
        translator.decode(lines, prefixes=["a", "", None])
    with pytest.raises(TypeError, match=r"prefixes is one str: write prefixes=\[prefix\]"):
        translator.decode(lines, prefixes="abc")


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["Oct 7", "7. Okt."], r"pairs\[0\] is 'Oct 7' \(str\): it must be \(source, target\)"),
        (("ab", "cd"), r"pairs\[0\] is 'ab' \(str\)"),
        ("ab", "pairs is one string"),
        (None, r"pairs is None \(NoneType\): it must be a list of pairs of strings"),
        (zip(["a"], ["b"], strict=True), r"it must be a list of pairs .*; write list\(...\)"),
        ([("a", "b"), ("a", "b", "c")], r"pairs\[1\] is \('a', 'b', 'c'\) \(tuple\)"),
        ([("a", "b"), ("a", None)], r"pairs\[1\] is \('a', None\) \(tuple\)"),
        ([("a", "b"), None], r"pairs\[1\] is None \(NoneType\)"),
    ],
)
def test_what_is_no_pair_of_strings_is_a_type_error(translator, pairs, message):
    for function in (translator.score, translator.score_tokens):
        with pytest.raises(TypeError, match=message):
            function(pairs)


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize("options", [None, {"beam_size": 4}])
def test_what_is_no_options_is_a_type_error(translator, options):
    with pytest.raises(TypeError, match=r"^options is .*: it must be Options\(beam_size=4\), say"):
        translator.translate(["see"], options)


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize(
    ("arguments", "step", "message"),
    [
        ([None], None, r"directory is None \(NoneType\): it must be a path, a string or a Path"),
        ([["a"]], None, r"directory is \['a'\] \(list\): it must be a path"),
        (["a"], "100", r"step is '100' \(str\): it must be a whole number, 'best' or None"),
        (["a"], 1.0, "step is 1.0"),
        (["a"], True, "step is True"),
    ],
)
def test_what_is_no_path_or_no_step_is_a_type_error_that_names_the_argument(
    arguments, step, message
):
    with pytest.raises(TypeError, match=f"^{message}"):
        Translator.load(*arguments, step=step)


@pytest.mark.parametrize("path", ["", "gs://bucket/run"])
def test_a_path_that_cannot_be_one_is_named(path):
    with pytest.raises(ValueError, match=r"^directory: "):
        Translator.load(path)


def test_half_a_character_is_read_as_the_replacement_character(translator):
    halves, whole = ["see \ud83d a cat", "\udfff"], ["see \ufffd a cat", "\ufffd"]
    found = translator.translate(halves, prefixes=[halves[1], ""])
    assert found == translator.translate(whole, prefixes=[whole[1], ""])
    pairs, expected = ([tuple(lines), tuple(lines[::-1])] for lines in (halves, whole))
    assert translator.score(pairs) == translator.score(expected)


def test_options_that_are_wrong_are_refused_before_a_batch_is_asked_for(translator):
    with pytest.raises(UserError, match="n_best is 5"):
        translator.decode(["see"], Options(n_best=5))


def test_weights_of_another_vocabulary_are_refused_by_name(translator):
    tokenizer, params = translator.tokenizer, translator.params
    size, width = params["output_embedding"].shape
    small = {**params, "output_embedding": params["output_embedding"][:-1]}
    message = (
        rf"output_embedding is float32\[{size - 1}, {width}\] there and float32\[{size}, {width}\]"
    )
    with pytest.raises(ValueError, match=message):
        Translator(CONFIG, tokenizer, small)
    with pytest.raises(ValueError, match=message):
        Translator(CONFIG, tokenizer, params, others=[(CONFIG.model, small)])
    with pytest.raises(ValueError, match=message):
        copy.copy(translator).params = small


def test_an_ensemble_takes_no_line_longer_than_its_smallest_model_does(translator, caplog):
    smaller = dataclasses.replace(CONFIG.model, max_length=19)
    weights, others = translator.params, [(smaller, translator.params)]
    both = Translator(CONFIG, translator.tokenizer, weights, others=others)
    with caplog.at_level(logging.WARNING):
        both.decode(["one two three " * 9])
    assert "its first 19 are used" in caplog.text
