"""The whole model against the NumPy reference, and what it promises about batches and precision.

The sizes are those of tiny_model.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_transformer as reference
import optax
import pytest
from flax import nnx
from jaxprs import equations
from tiny_model import (
    CONFIG,
    HYPOTHESES,
    SOURCE,
    SOURCE_LENGTH,
    TARGET_IN,
    TARGET_LENGTH,
    VARIANTS,
    VOCAB_SIZE,
    build,
    compiled_forward,
    forward,
    padded_ids,
    random_params,
    reference_weights,
    silenced,
)

from flaxformer_min.config import ModelConfig
from flaxformer_min.model import build as build_room
from flaxformer_min.model import cached
from flaxformer_min.model.build import count_parameters, split_model
from flaxformer_min.model.cached import (
    block_sizes,
    decode_step,
    init_cache,
    memory_keys_values,
    step_weights,
)
from flaxformer_min.model.dropout import dropout
from flaxformer_min.model.layers import EncoderLayer
from flaxformer_min.model.linear import project
from flaxformer_min.model.masks import causal_mask, padding_mask
from flaxformer_min.model.positions import sinusoidal_positions
from flaxformer_min.model.teacher_forcing import forced_states
from flaxformer_min.model.transformer import Transformer, run_layers
from flaxformer_min.training.state import init_state


@pytest.fixture(scope="module")
def params():
    return random_params()


@pytest.fixture(scope="module")
def outputs(params):
    return compiled_forward(CONFIG, params, SOURCE, TARGET_IN)


# Parity with the reference


def reference_forward(weights, source, target_in):
    """Memory [B, S, D] and logits [B, T, V] of the reference, sentence by sentence."""
    source, target_in = np.asarray(source), np.asarray(target_in)
    memory = [reference.encode(weights, ids) for ids in source]
    rows = zip(target_in, memory, source, strict=True)
    return np.stack(memory), np.stack([reference.decode(weights, *row) for row in rows])


@pytest.mark.run
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_memory_and_logits_equal_the_numpy_reference(config):
    params = random_params(config)
    memory, logits = compiled_forward(config, params, SOURCE, TARGET_IN)
    wanted = reference_forward(reference_weights(params, config), SOURCE, TARGET_IN)
    assert memory.dtype == logits.dtype == jnp.float32
    np.testing.assert_allclose(memory, wanted[0], atol=1e-5)
    np.testing.assert_allclose(logits, wanted[1], atol=1e-5)


def test_float64_weights_give_the_reference_to_the_last_digits():
    # Learned positions, because the sinusoidal table itself is float32.
    config = VARIANTS["learned positions"]
    with jax.enable_x64(True):
        params = random_params(config, np.float64)
        memory, logits = compiled_forward(config, params, SOURCE, TARGET_IN)
    wanted = reference_forward(reference_weights(params, config), SOURCE, TARGET_IN)
    assert memory.dtype == logits.dtype == jnp.float64
    np.testing.assert_allclose(memory, wanted[0], atol=1e-12)
    np.testing.assert_allclose(logits, wanted[1], atol=1e-12)


@pytest.mark.run
def test_a_padded_sentence_equals_the_reference_on_the_sentence_alone(params, outputs):
    weights = reference_weights(params, CONFIG)
    for row in range(len(SOURCE)):
        ids, target = (np.asarray(x)[row][np.asarray(x)[row] > 0] for x in (SOURCE, TARGET_IN))
        memory = reference.encode(weights, ids)
        logits = reference.decode(weights, target, memory, ids)
        np.testing.assert_allclose(outputs[0][row, : len(ids)], memory, atol=1e-5)
        np.testing.assert_allclose(outputs[1][row, : len(target)], logits, atol=1e-5)


def test_logits_are_the_states_times_the_output_table(params, outputs):
    model, target_mask = build(CONFIG, params), padding_mask(TARGET_IN) & causal_mask(13)
    states = model.decode_states(TARGET_IN, outputs[0], target_mask, padding_mask(SOURCE))
    assert states.shape == (5, TARGET_LENGTH, CONFIG.d_model)
    np.testing.assert_array_equal(model.output_table, params["embedding"])
    np.testing.assert_allclose(model.project(states), outputs[1], atol=1e-5)
    np.testing.assert_allclose(states @ params["embedding"].T, outputs[1], atol=1e-5)


# Cached decoding


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """The positions of these tests in several blocks: 5 + 5 + 3 of them."""
    monkeypatch.setattr(cached, "FIRST_BLOCK", 5)


@functools.partial(jax.jit, static_argnums=0)
def cached_logits(config, params, prefixes, memory, source, order):
    """Logits [B, M, T, V] of prefixes [B, M, T], one token at a time.

    Half-way the cache's hypotheses are put in `order`, a permutation of M. The sentences begin one
    step after the other; before it each row has read the end of its prefix, of which nothing may
    be left.
    """
    model, length = build(config, params), prefixes.shape[2]
    weights = step_weights(model)
    memories, source_mask = memory_keys_values(model, memory), padding_mask(source)

    batch, late = len(prefixes), jnp.arange(len(prefixes))

    def step(cache, clock):
        index = (clock - late) % length
        moved = cache.moved(jnp.broadcast_to(order, prefixes.shape[:2]))
        half = index == length // 2
        ancestors = jnp.where(half[:, None, None, None], moved.ancestors, cache.ancestors)
        tokens = jnp.take_along_axis(prefixes, index[:, None, None], axis=2)[:, :, 0]
        cache = cache._replace(ancestors=ancestors)
        return decode_step(model, weights, tokens, index, cache, memories, source_mask)[::-1]

    cache = init_cache(model, *prefixes.shape)
    _, logits = jax.lax.scan(step, cache, jnp.arange(length + batch))
    by_row = [logits[row : row + length, row] for row in range(batch)]
    return jnp.moveaxis(jnp.stack(by_row), 1, 2)


@functools.partial(jax.jit, static_argnums=0)
def full_logits(config, params, prefixes, memory, source):
    """Logits [B, M, T, V] of prefixes [B, M, T] by the forward pass, each prefix a batch row."""
    memory, source = (jnp.repeat(x, prefixes.shape[1], axis=0) for x in (memory, source))
    target_in = prefixes.reshape(-1, prefixes.shape[2])
    masks = causal_mask(target_in.shape[1]), padding_mask(source)
    return build(config, params).decode(target_in, memory, *masks).reshape(*prefixes.shape, -1)


AS_THEY_ARE = jnp.arange(HYPOTHESES)
PREFIXES = padded_ids(3, [TARGET_LENGTH] * 5 * HYPOTHESES, TARGET_LENGTH)
PREFIXES = PREFIXES.reshape(5, HYPOTHESES, TARGET_LENGTH)


@pytest.mark.run
@pytest.mark.parametrize("name", ["paper", "learned positions", "Marian's"])
def test_cached_decoding_equals_the_full_forward_at_every_position(name):
    config, params = VARIANTS[name], random_params(VARIANTS[name])
    memory = compiled_forward(config, params, SOURCE, TARGET_IN)[0]
    cached = cached_logits(config, params, PREFIXES, memory, SOURCE, AS_THEY_ARE)
    full = full_logits(config, params, PREFIXES, memory, SOURCE)
    assert cached.shape == (5, HYPOTHESES, TARGET_LENGTH, VOCAB_SIZE)
    np.testing.assert_allclose(cached, full, atol=1e-5)


def test_a_reordered_cache_continues_the_reordered_prefixes(params, outputs):
    order, half = jnp.array([2, 0, 1]), TARGET_LENGTH // 2
    cached = cached_logits(CONFIG, params, PREFIXES, outputs[0], SOURCE, order)
    joined = jnp.concatenate([PREFIXES[:, order, :half], PREFIXES[:, :, half:]], axis=2)
    full = full_logits(CONFIG, params, joined, outputs[0], SOURCE)
    np.testing.assert_allclose(cached[:, :, half:], full[:, :, half:], atol=1e-5)


def test_keys_and_values_are_held_once_for_each_token_and_those_of_the_memory_per_sentence(
    params, outputs
):
    model = build(CONFIG, params)
    ancestors, layers = init_cache(model, 5, HYPOTHESES, 23)
    assert ancestors.shape == (5, HYPOTHESES, 23, HYPOTHESES)
    assert len(layers) == CONFIG.num_layers
    for layer in layers:
        for block, positions in zip(layer, (5, 5, 5, 5, 3), strict=True):
            assert block.keys.shape == (5, 2, 7, positions * HYPOTHESES)
            assert block.values.shape == (5, 2, positions * HYPOTHESES, 17)
    memories = [leaf.shape for leaf in jax.tree.leaves(memory_keys_values(model, outputs[0]))]
    assert memories == [(5, 2, SOURCE_LENGTH, 7), (5, 2, SOURCE_LENGTH, 17)] * CONFIG.num_layers


def test_blocks_of_a_cache_are_small_at_first_and_have_room_for_all():
    assert block_sizes(13) == [5, 5, 3]
    assert block_sizes(53) == [5, 5, 5, 5, 5, 6, 7, 9, 6]
    assert all(sum(block_sizes(length)) == length for length in range(1, 307))


def test_what_the_cache_holds_beyond_the_index_is_not_read(params, outputs):
    model, source_mask = build(CONFIG, params), padding_mask(SOURCE)
    memories, step = (
        memory_keys_values(model, outputs[0]),
        jax.jit(functools.partial(decode_step, model, step_weights(model))),
    )
    clean = init_cache(model, 5, HYPOTHESES, 4)
    dirty = clean._replace(layers=jax.tree.map(lambda leaf: leaf + 1e30, clean.layers))
    for index in range(2):
        tokens = PREFIXES[:, :, index], jnp.full(5, index)
        wanted, clean = step(*tokens, clean, memories, source_mask)
        logits, dirty = step(*tokens, dirty, memories, source_mask)
        np.testing.assert_array_equal(logits, wanted)


# Batches and shapes


def test_jit_changes_nothing(params, outputs):
    plain = forward(CONFIG, params, SOURCE, TARGET_IN)
    for with_jit, without in zip(outputs, plain, strict=True):
        np.testing.assert_allclose(with_jit, without, atol=5e-6)


def test_permuting_the_batch_permutes_the_outputs(params, outputs):
    order = jnp.array([3, 0, 4, 1, 2])
    permuted = compiled_forward(CONFIG, params, SOURCE[order], TARGET_IN[order])
    for new, old in zip(permuted, outputs, strict=True):
        np.testing.assert_array_equal(new, old[order])


def test_neighbours_in_the_batch_do_not_change_a_bit_of_a_sentence(params, outputs):
    others = padded_ids(4, [2, 11, 11, 11, 0], SOURCE_LENGTH).at[2].set(SOURCE[2])
    others_in = padded_ids(5, [13, 13, 2, 2, 0], TARGET_LENGTH).at[2].set(TARGET_IN[2])
    changed = compiled_forward(CONFIG, params, others, others_in)
    for new, old in zip(changed, outputs, strict=True):
        np.testing.assert_array_equal(new[2], old[2])


def test_more_padding_columns_change_nothing(params, outputs):
    source, target_in = (jnp.pad(x, ((0, 0), (0, 6))) for x in (SOURCE, TARGET_IN))
    memory, logits = compiled_forward(CONFIG, params, source, target_in)
    np.testing.assert_allclose(memory[:, :SOURCE_LENGTH], outputs[0], rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(logits[:, :TARGET_LENGTH], outputs[1], rtol=1e-6, atol=5e-6)


# Embeddings and sublayers

NO_LAYERS = dataclasses.replace(CONFIG, num_layers=0)  # memory is what enters the first layer


def test_embedding_is_one_hot_times_matrix_times_sqrt_d_plus_position(params):
    memory, _ = forward(NO_LAYERS, random_params(NO_LAYERS), SOURCE, TARGET_IN)
    table = np.asarray(random_params(NO_LAYERS)["embedding"], np.float64)
    one_hot = np.eye(VOCAB_SIZE)[np.asarray(SOURCE)]
    wanted = 26**0.5 * (one_hot @ table) + reference.sinusoids(SOURCE_LENGTH, 26)
    np.testing.assert_allclose(memory, wanted, atol=1e-6)


def test_only_tokens_that_occur_move_their_embedding():
    config = dataclasses.replace(NO_LAYERS, share_embeddings="none")

    def total(params):
        memory, logits = forward(config, params, SOURCE, TARGET_IN)
        return (memory**3).sum() + (logits**3).sum()

    grads = jax.jit(jax.grad(total))(random_params(config))
    for table, ids in (("source_embedding", SOURCE), ("embedding", TARGET_IN)):
        moved = np.flatnonzero(np.abs(grads[table]).sum(axis=1))
        assert set(moved) == set(np.unique(ids))


@pytest.mark.run
def test_embeddings_start_with_the_variance_of_a_unit_normal():
    # sqrt(D) brings them up to the positions' size, which lies in [-1, 1].
    config = dataclasses.replace(NO_LAYERS, d_model=512)
    model = Transformer(config, 307, rngs=nnx.Rngs(0))
    ids = jnp.arange(307)[None]
    words = model.encode(ids, padding_mask(ids)) - sinusoidal_positions(307, 512)[None]
    np.testing.assert_allclose(words.std(), 1.0, rtol=0.02)


def test_every_sublayer_returns_d_and_every_norm_mean_0_and_variance_1(params):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, SOURCE_LENGTH, 26)), jnp.float32)
    layer, mask = build(CONFIG, params).decoder[0], padding_mask(SOURCE)
    for site in (layer.self_attention, layer.cross_attention):
        assert site(x, site.keys_values(x), mask).shape == x.shape
    assert layer.feed_forward(x).shape == x.shape
    fresh = Transformer(CONFIG, VOCAB_SIZE, rngs=nnx.Rngs(0))
    memory = fresh.encode(SOURCE, mask)
    np.testing.assert_allclose(memory.mean(-1), 0.0, atol=1e-5)
    np.testing.assert_allclose(memory.var(-1), 1.0, atol=1e-4)


def test_the_feed_forward_network_treats_every_position_alike(params):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, SOURCE_LENGTH, 26)), jnp.float32)
    network = build(CONFIG, params).encoder[1].feed_forward
    alone = jnp.stack([network(x[:, i : i + 1])[:, 0] for i in range(SOURCE_LENGTH)], axis=1)
    np.testing.assert_allclose(network(x), alone, atol=2e-6)


# Dropout


def test_dropout_keeps_the_promised_share_and_the_mean():
    x = jnp.full((97, 89, 3), 2.0)
    dropped = np.asarray(dropout(x, 0.3, jax.random.key(0)))
    np.testing.assert_allclose((dropped != 0).mean(), 0.7, atol=0.01)
    np.testing.assert_allclose(dropped[dropped != 0], 2 / 0.7, rtol=1e-6)
    np.testing.assert_allclose(dropped.mean(), 2.0, rtol=0.015)
    # Every entry decides for itself: no row, column or feature shares its fate.
    kept = dropped != 0
    for axes in ((0,), (1,), (2,), (0, 1)):
        assert not (kept.all(axes) | ~kept.any(axes)).mean() > 0.5


@pytest.mark.run
def test_the_key_decides_dropout_and_no_key_means_none(params, outputs):
    keys = [jax.random.key(seed) for seed in (0, 0, 1)]
    first, again, other = (forward(CONFIG, params, SOURCE, TARGET_IN, key)[1] for key in keys)
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1
    assert np.abs(first - outputs[1]).max() > 0.1
    still = dataclasses.replace(CONFIG, dropout=0.0)
    evaluated = forward(still, params, SOURCE, TARGET_IN, keys[0])[1]
    np.testing.assert_allclose(evaluated, outputs[1], atol=5e-6)


ALMOST_ALL = 1 - 1e-9  # a rate at which nothing survives


def test_dropout_is_on_embeddings_and_sublayers_but_not_on_the_residual(params):
    config = dataclasses.replace(CONFIG, dropout=ALMOST_ALL)
    memory, _ = forward(config, params, SOURCE, TARGET_IN, jax.random.key(0))
    states = np.zeros((1, CONFIG.d_model))  # what is left is LayerNorm(x + 0), time and again
    for layer in reference_weights(params, CONFIG).encoder:
        states = reference.layer_norm(layer.self_attention_norm, states)
        states = reference.layer_norm(layer.feed_forward_norm, states)
    np.testing.assert_allclose(memory, np.broadcast_to(states, memory.shape), atol=1e-5)


@pytest.mark.run
@pytest.mark.parametrize(
    ("option", "kernel"), [("attention_dropout", "value"), ("ffn_dropout", "down")]
)
def test_the_optional_dropouts_act_on_weights_and_on_activations(params, option, kernel):
    config = dataclasses.replace(CONFIG, dropout=0.0, **{option: ALMOST_ALL})
    dropped = forward(config, params, SOURCE, TARGET_IN, jax.random.key(0))
    wanted = forward(CONFIG, silenced(params, kernel), SOURCE, TARGET_IN)
    for got, want in zip(dropped, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.run
@pytest.mark.parametrize(("rate", "sites"), [(0.0, 1 + 2 * 2 + 1 + 2 * 3), (0.2, 22)])
def test_every_dropout_draws_from_a_key_of_its_own(params, monkeypatch, rate, sites):
    # Embeddings and sublayers; with the options also 3 attentions and 2 networks a layer.
    drawn, bernoulli = [], jax.random.bernoulli

    def recording(key, *args):
        drawn.append(jax.random.key_data(key).tobytes())
        return bernoulli(key, *args)

    monkeypatch.setattr(jax.random, "bernoulli", recording)
    config = dataclasses.replace(CONFIG, attention_dropout=rate, ffn_dropout=rate)
    ids = {"pad_id": 0, "bos_id": 2}
    forced_states(build(config, params), SOURCE, TARGET_IN, **ids, key=jax.random.key(0))
    assert len(drawn) == len(set(drawn)) == sites


# Precision


@pytest.mark.run
def test_bfloat16_compute_stays_close_and_keeps_float32_weights(params, outputs):
    config = dataclasses.replace(CONFIG, compute_dtype="bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(split_model(config, 31)[1])} == {"float32"}
    low = compiled_forward(config, params, SOURCE, TARGET_IN)
    assert low[0].dtype == jnp.bfloat16
    for got, want in zip(low, outputs, strict=True):
        off = np.asarray(got, np.float32) - want
        assert np.sqrt((off**2).mean() / (want**2).mean()) < 2e-2
    grad = jax.grad(lambda p: forward(config, p, SOURCE, TARGET_IN)[0].sum())
    grads = jax.eval_shape(grad, params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}


def test_softmax_and_norms_are_float32_under_bfloat16_compute(params):
    config = dataclasses.replace(CONFIG, compute_dtype="bfloat16")
    jaxpr = jax.make_jaxpr(lambda p: forward(config, p, SOURCE, TARGET_IN))(params)
    dtypes = {"exp": [], "rsqrt": [], "dot_general": []}
    for equation in equations(jaxpr):
        if equation.primitive.name in dtypes:
            dtypes[equation.primitive.name].append(equation.invars[0].aval.dtype.name)
    assert dtypes["exp"] == ["float32"] * 3 * CONFIG.num_layers  # one softmax per attention
    assert dtypes["rsqrt"] == ["float32"] * 5 * CONFIG.num_layers  # one norm per sublayer
    assert "bfloat16" in dtypes["dot_general"]


# Parameters


@pytest.mark.run
def test_initialisation_is_xavier_with_fans_d_and_h_times_k():
    config = ModelConfig(num_layers=1, d_model=128, d_ff=307, num_heads=6, d_k=31, d_v=53)
    params = nnx.to_pure_dict(nnx.state(Transformer(config, 1009, rngs=nnx.Rngs(3))))
    fans = {"query": (128, 6 * 31), "key": (128, 6 * 31), "value": (128, 6 * 53)}
    fans |= {"output": (6 * 53, 128), "up": (128, 307), "down": (307, 128)}
    seen = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name, leaf = path[-1].key, np.asarray(leaf)
        seen.add(name)
        if name in fans:
            variance = 2 / sum(fans[name])
            np.testing.assert_allclose(leaf.std(), variance**0.5, rtol=0.02)
            np.testing.assert_allclose(np.abs(leaf).max(), (3 * variance) ** 0.5, rtol=0.01)
        elif name == "embedding":
            np.testing.assert_allclose(leaf.std(), 128**-0.5, rtol=0.02)
            assert abs(leaf.mean()) < 1e-3
        else:
            np.testing.assert_array_equal(leaf, 1.0 if name == "scale" else 0.0)
    assert seen == {*fans, "embedding", "scale", "bias", "up_bias", "down_bias"}


@pytest.mark.run
def test_every_matrix_starts_from_numbers_of_its_own():
    model = Transformer(VARIANTS["nothing shared"], VOCAB_SIZE, rngs=nnx.Rngs(0))
    first = [float(leaf[0, 0]) for leaf in jax.tree.leaves(nnx.state(model)) if leaf.ndim == 2]
    assert len(first) == len(set(first)) == 3 + (4 + 2) + (8 + 2)


@pytest.mark.parametrize(("share", "tables"), [("all", 1), ("target", 2), ("none", 3)])
def test_a_sharing_rule_owns_its_number_of_tables(share, tables):
    _, params = split_model(dataclasses.replace(CONFIG, share_embeddings=share), VOCAB_SIZE)
    shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
    assert shapes.count((VOCAB_SIZE, CONFIG.d_model)) == tables


def test_a_base_layer_has_twice_as_many_weights_in_the_network_as_in_attention():
    _, params = split_model(ModelConfig(num_layers=1), 37_000)
    layer = params["encoder"][0]
    assert count_parameters(layer["self_attention"]) == 4 * 512 * 512  # 1.05 M, no biases
    assert count_parameters(layer["feed_forward"]) == 2 * 512 * 2048 + 2048 + 512  # 2.1 M


@pytest.mark.parametrize("knobs", [{}, {"remat": True}, {"scan_layers": True}])
def test_layers_that_are_alike_are_traced_once(knobs):
    config = dataclasses.replace(CONFIG, num_layers=3, **knobs)
    seen = []

    class Seen(EncoderLayer):
        def __call__(self, *arguments):
            seen.append(self)
            return super().__call__(*arguments)

    layers = [Seen(config, rngs=nnx.Rngs(n)) for n in range(3)]
    x, mask = jnp.ones((2, SOURCE_LENGTH, config.d_model)), jnp.ones((1, 1, 1, SOURCE_LENGTH), bool)
    jax.jit(lambda x: run_layers(layers, x, (mask,), config))(x)
    assert len(seen) == 1


@pytest.mark.run
def test_shapes_and_weights_come_from_modules_that_were_built_once(monkeypatch):
    built = []

    def counted(*arguments, **names):
        built.append(arguments)
        return Transformer(*arguments, **names)

    monkeypatch.setattr(build_room, "Transformer", counted)
    config = dataclasses.replace(CONFIG, d_ff=29)  # which no other test has
    _, shapes = split_model(config, VOCAB_SIZE)
    for seed in (5, 7):
        params = jax.jit(lambda s=seed: init_state(config, VOCAB_SIZE, optax.sgd(1.0), s))().params
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    assert len(built) == 1


@pytest.mark.parametrize(
    ("knobs", "loops", "recomputed"),
    [({}, 0, 0), ({"remat": True}, 0, 3), ({"scan_layers": True}, 1, 0)],
)
def test_the_traced_program_loops_over_layers_or_marks_them_as_asked(knobs, loops, recomputed):
    config = dataclasses.replace(CONFIG, num_layers=3, num_decoder_layers=None, **knobs)
    params, mask = random_params(config), padding_mask(SOURCE)
    program = jax.make_jaxpr(lambda params: build(config, params).encode(SOURCE, mask))(params)
    names = [each.primitive.name for each in equations(program.jaxpr)]
    assert names.count("scan") == loops
    assert sum(name in ("checkpoint", "remat", "remat2") for name in names) == recomputed


def test_logits_of_bfloat16_states_are_not_rounded_to_bfloat16():
    rng = np.random.default_rng(5)
    states = jnp.asarray(rng.standard_normal((2, 3, 26)), jnp.bfloat16)
    table = jnp.asarray(rng.standard_normal((31, 26)), jnp.float32)
    found = project(states, table)
    narrow = np.asarray(table.astype(jnp.bfloat16), np.float64)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.asarray(states, np.float64) @ narrow.T, atol=1e-5)
