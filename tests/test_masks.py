"""Masks by truth table (1 = may attend, rows are queries, columns keys) and what the model makes
of them: which position's input moves which position's output, by gradient and by value.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import CONFIG, SOURCE, TARGET_IN, build, compiled_forward, random_params

from flaxformer_min.model.masks import causal_mask, padding_mask
from flaxformer_min.model.teacher_forcing import forced_states


def as_table(mask):
    assert mask.dtype == jnp.bool_
    return np.asarray(mask).astype(int).tolist()


def test_padding_mask_hides_only_the_pad_symbol():
    ids = jnp.array([[7, 2, 3, 0, 0], [1, 5, 1, 2, 3], [0, 4, 0, 9, 0]])  # 1 is unk: not padding
    assert as_table(padding_mask(ids)) == [
        [[[1, 1, 1, 0, 0]]],
        [[[1, 1, 1, 1, 1]]],
        [[[0, 1, 0, 1, 0]]],
    ]


def test_padding_mask_follows_the_given_pad_symbol():
    ids = jnp.array([[0, 4, 31, 31]])
    assert as_table(padding_mask(ids, pad_id=31)) == [[[[1, 1, 0, 0]]]]


def test_causal_mask_hides_the_future_and_shows_the_diagonal():
    assert as_table(causal_mask(5)) == [
        [
            [
                [1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [1, 1, 1, 0, 0],
                [1, 1, 1, 1, 0],
                [1, 1, 1, 1, 1],
            ]
        ]
    ]


def test_causal_mask_of_one_position_sees_itself():
    assert as_table(causal_mask(1)) == [[[[1]]]]


def test_the_decoders_mask_is_both_the_padding_and_the_causal_one():
    ids = jnp.array([[2, 8, 5, 0], [2, 0, 6, 3], [0, 0, 0, 0]])
    assert as_table(padding_mask(ids) & causal_mask(4)) == [
        [
            [
                [1, 0, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 0],
                [1, 1, 1, 0],
            ]
        ],
        [
            [
                [1, 0, 0, 0],
                [1, 0, 0, 0],
                [1, 0, 1, 0],
                [1, 0, 1, 1],
            ]
        ],
        [
            [
                [0, 0, 0, 0],
                [0, 0, 0, 0],
                [0, 0, 0, 0],
                [0, 0, 0, 0],
            ]
        ],
    ]


# Influence: rows are outputs, columns inputs. A learned position's row is added to the input at
# that position, so its gradient is the input's. A position always moves itself (the residual).

LEARNED = dataclasses.replace(CONFIG, positions="learned", num_layers=1)
SHORT_SOURCE = jnp.array([[5, 9, 0, 1, 0]])  # padding in the middle too
SHORT_TARGET = jnp.array([[2, 7, 0, 4, 8, 0]])
READABLE = [1, 1, 0, 1, 0]
SEEN = np.array(
    [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [1, 1, 0, 1, 1, 1],
    ]
)


def encode_alone(params):
    return build(LEARNED, params).encode(SHORT_SOURCE, padding_mask(SHORT_SOURCE))


def decode_alone(params, memory):
    masks = padding_mask(SHORT_TARGET) & causal_mask(6), padding_mask(SHORT_SOURCE)
    return build(LEARNED, params).decode_states(SHORT_TARGET, memory, *masks)


def influence(outputs, inputs):
    """0/1 table [outputs, inputs] of exact zeros in the Jacobian of states [1, T, D] by [S, D]."""
    direction = jnp.asarray(np.random.default_rng(0).standard_normal(CONFIG.d_model), jnp.float32)
    jacobian = jax.jit(jax.jacrev(lambda x: outputs(x)[0] @ direction))(inputs)
    return (np.abs(jacobian).sum(-1) > 0).astype(int)


@pytest.fixture(scope="module")
def learned():
    return random_params(LEARNED)


def test_encoder_positions_read_every_real_token_and_no_padding_in_one_layer(learned):
    table = influence(
        lambda rows: encode_alone(learned | {"source_positions": rows}), learned["source_positions"]
    )
    np.testing.assert_array_equal(table[:, :5], np.maximum(READABLE, np.eye(5, dtype=int)))


@pytest.mark.run
def test_future_target_tokens_and_padding_do_not_move_earlier_states(learned):
    memory = encode_alone(learned)
    table = influence(
        lambda rows: decode_alone(learned | {"target_positions": rows}, memory),
        learned["target_positions"],
    )
    np.testing.assert_array_equal(table[:, :6], SEEN)


def test_every_target_position_reads_the_whole_source_and_not_its_padding(learned):
    table = influence(lambda memory: decode_alone(learned, memory[None]), encode_alone(learned)[0])
    np.testing.assert_array_equal(table, np.tile(READABLE, (6, 1)))


@pytest.mark.run
def test_changing_future_tokens_changes_no_bit_of_earlier_logits():
    params = random_params()
    logits = compiled_forward(CONFIG, params, SOURCE, TARGET_IN)[1]
    for t in (1, 6, 12):
        changed = TARGET_IN.at[:, t:].set((TARGET_IN[:, t:] + 5) % 31)
        other = compiled_forward(CONFIG, params, SOURCE, changed)[1]
        np.testing.assert_array_equal(other[:, :t], logits[:, :t])
        assert (np.abs(other[:, t:] - logits[:, t:]).max(-1) > 0).all()


@pytest.mark.run
def test_what_padding_is_embedded_as_does_not_matter():
    params = random_params(LEARNED)
    changed = params | {"embedding": params["embedding"].at[0].set(1e3)}
    for real, new, old in zip(
        (SOURCE > 0, TARGET_IN > 0),
        compiled_forward(LEARNED, changed, SOURCE, TARGET_IN),
        compiled_forward(LEARNED, params, SOURCE, TARGET_IN),
        strict=True,
    ):
        real, rest = np.asarray(real), slice(1, None)  # entry 0 of the logits is pad's own
        np.testing.assert_array_equal(new[real][:, rest], old[real][:, rest])


def test_a_row_of_padding_is_finite_and_changes_no_other_row():
    params, others = random_params(), np.array([0, 1, 3, 4])
    source, target_in = SOURCE.at[2].set(0), TARGET_IN.at[2].set(0)
    before = compiled_forward(CONFIG, params, SOURCE, TARGET_IN)
    after = compiled_forward(CONFIG, params, source, target_in)
    for new, old in zip(after, before, strict=True):
        assert np.isfinite(new).all()
        np.testing.assert_array_equal(new[others], old[others])


def test_a_row_of_padding_has_finite_gradients_and_adds_nothing_to_the_others():
    config = dataclasses.replace(CONFIG, num_layers=1)
    params = random_params(config)

    @jax.jit
    @jax.grad
    def gradient(params, source, target_in, counts):
        memory, logits = compiled_forward(config, params, source, target_in)
        return jnp.sum((logits**2).sum((1, 2)) * counts) + jnp.sum((memory**3).sum((1, 2)) * counts)

    source, target_in = SOURCE.at[2].set(0), TARGET_IN.at[2].set(0)
    with_it = gradient(params, source, target_in, jnp.ones(5))
    without = gradient(params, source, target_in, jnp.ones(5).at[2].set(0))
    never = gradient(params, SOURCE, TARGET_IN, jnp.ones(5).at[2].set(0))
    for counted, ignored, other in zip(
        *map(jax.tree.leaves, (with_it, without, never)), strict=True
    ):
        assert np.isfinite(counted).all()
        np.testing.assert_allclose(ignored, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


@pytest.mark.run
def test_bos_may_be_attended_to_even_where_it_has_pads_id():
    params = random_params()
    target = jnp.array([[5, 3, 7], [11, 7, 7]])
    states = [
        forced_states(build(CONFIG, changed), target, target, pad_id=7, bos_id=bos)
        for bos, changed in (
            (7, params),
            (9, {**params, "embedding": params["embedding"].at[9].set(params["embedding"][7])}),
        )
    ]
    np.testing.assert_array_equal(*states)
