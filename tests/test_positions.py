"""The sinusoidal table: its layout, what it promises, and what the model is without it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_transformer as reference
import pytest
from tiny_model import CONFIG, build, random_params

from flaxformer_min.model.masks import causal_mask, padding_mask
from flaxformer_min.model.positions import sinusoidal_positions

LENGTH, D_MODEL = 97, 34


@pytest.fixture(scope="module")
def table():
    return np.asarray(sinusoidal_positions(LENGTH, D_MODEL))


def test_two_dimensions_give_the_published_values():
    # fairseq's tests/test_positional_encoding.py, positions 1 to 3.
    wanted = [[0.8415, 0.5403], [0.9093, -0.4161], [0.1411, -0.9900]]
    np.testing.assert_allclose(sinusoidal_positions(4, 2)[1:], wanted, atol=5e-5)


def test_eight_dimensions_are_interleaved_on_the_papers_timescales():
    wanted = [
        *(0.14112001, -0.98999250, 0.29552021, 0.95533649),
        *(0.02999550, 0.99955003, 0.00299999, 0.99999550),
    ]
    np.testing.assert_allclose(sinusoidal_positions(4, 8)[3], wanted, atol=1e-7)


def test_table_is_float32_of_length_times_width(table):
    assert table.shape == (LENGTH, D_MODEL)
    assert table.dtype == np.float32


def test_positions_count_from_zero(table):
    np.testing.assert_array_equal(table[0], np.tile([0.0, 1.0], D_MODEL // 2))


@pytest.mark.parametrize(("length", "d_model"), [(LENGTH, D_MODEL), (4099, 6), (1024, 512)])
def test_table_equals_the_formula_also_far_out(length, d_model):
    # An angle computed in float32 would be wrong by 1e-4 at position 4,000.
    table = sinusoidal_positions(length, d_model)
    step = max(1, length // 41)
    wanted = reference.sinusoids(length, d_model)
    np.testing.assert_allclose(table[::step], wanted[::step], atol=1e-6)


def test_a_longer_table_begins_with_the_shorter_one(table):
    np.testing.assert_array_equal(table[:13], sinusoidal_positions(13, D_MODEL))


def test_every_position_has_a_row_of_its_own():
    table = np.asarray(sinusoidal_positions(1031, 14))
    distances = np.linalg.norm(table[:, None] - table[None, :], axis=-1)
    np.fill_diagonal(distances, np.inf)
    assert distances.min() > 1e-2


def test_moving_on_is_one_rotation_wherever_it_starts(table):
    # Row k holds (sin, cos) of the angles of k steps, so it says by what to rotate.
    for k in (1, 2, 7, 31):
        sine, cosine = table[k, 0::2], table[k, 1::2]
        rotation = np.zeros((D_MODEL, D_MODEL))
        for i in range(D_MODEL // 2):
            block = [[cosine[i], sine[i]], [-sine[i], cosine[i]]]
            rotation[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = block
        np.testing.assert_allclose(rotation @ rotation.T, np.eye(D_MODEL), atol=1e-6)
        np.testing.assert_allclose(table[:-k] @ rotation.T, table[k:], atol=2e-6)


def test_the_likeness_of_two_positions_depends_on_their_distance_alone(table):
    likeness = table @ table.T
    for k in (0, 1, 5, 23):
        diagonal = np.diagonal(likeness, k)
        np.testing.assert_allclose(diagonal, np.full(len(diagonal), diagonal[0]), atol=1e-4)
    np.testing.assert_allclose(np.diagonal(likeness), D_MODEL / 2, atol=1e-4)


def test_waves_run_from_fast_to_slow_across_the_dimensions(table):
    first_step = np.hypot(*(table[1] - table[0]).reshape(-1, 2).T)
    assert (np.diff(first_step) < 0).all()
    assert first_step[0] > 0.9  # 2 sin(1/2): a radian a position
    assert first_step[-1] < 2e-4


def test_table_is_the_same_under_jit(table):
    jitted = jax.jit(lambda x: x + sinusoidal_positions(LENGTH, D_MODEL))
    np.testing.assert_array_equal(jitted(jnp.zeros((LENGTH, D_MODEL))), table)


# Word order

WORDS = jnp.array([[7, 3, 9, 4, 5], [8, 6, 6, 2, 3]])
ORDER = jnp.array([3, 4, 2, 0, 1])  # "Tom bit a dog" to "a dog bit Tom"
LEARNED = dataclasses.replace(CONFIG, positions="learned")


@pytest.fixture(scope="module")
def without_positions():
    """The parameters of a model whose learned position tables are all 0."""
    params = random_params(LEARNED)
    tables = ("source_positions", "target_positions")
    return params | {name: 0 * params[name] for name in tables}


@functools.partial(jax.jit, static_argnums=0)
def encode(config, params, ids):
    return build(config, params).encode(ids, padding_mask(ids))


@jax.jit
def decode(params, target_in, memory):
    """Decoder states [B, T, D] of a model with learned positions; no padding."""
    masks = causal_mask(target_in.shape[1]), jnp.ones((1, 1, 1, memory.shape[1]), bool)
    return build(LEARNED, params).decode_states(target_in, memory, *masks)


def test_without_positions_the_encoder_is_permutation_equivariant(without_positions):
    memory = encode(LEARNED, without_positions, WORDS)
    permuted = encode(LEARNED, without_positions, WORDS[:, ORDER])
    np.testing.assert_allclose(permuted, memory[:, ORDER], atol=5e-6)


@pytest.mark.parametrize("config", [CONFIG, LEARNED], ids=["sinusoidal", "learned"])
def test_with_positions_the_encoder_tells_orders_apart(config):
    params = random_params(config)
    memory, permuted = encode(config, params, WORDS), encode(config, params, WORDS[:, ORDER])
    assert (np.abs(permuted - memory[:, ORDER]).max(axis=-1) > 1e-2).all()


def test_without_positions_the_causal_decoder_is_not_permutation_equivariant(without_positions):
    memory = encode(LEARNED, without_positions, WORDS)
    states = decode(without_positions, WORDS, memory)
    permuted = decode(without_positions, WORDS[:, ORDER], memory)
    assert np.abs(permuted - states[:, ORDER]).max() > 1e-2
    # Nor is the last position a function of the set before it: that was computed from prefixes.
    swapped = decode(without_positions, WORDS[:, jnp.array([3, 2, 1, 0, 4])], memory)
    assert np.abs(swapped[:, -1] - states[:, -1]).max() > 1e-3


def test_the_decoder_takes_the_memory_as_a_set(without_positions):
    # The order of the source reaches the decoder only through what the encoder made of it.
    memory = encode(LEARNED, without_positions, WORDS)
    straight = decode(without_positions, WORDS, memory)
    shuffled = decode(without_positions, WORDS, memory[:, ORDER])
    np.testing.assert_allclose(shuffled, straight, atol=5e-6)
