"""What the model's functions refuse, as users have them: without the checks of the other tests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import CONFIG, SOURCE, TARGET_IN, VOCAB_SIZE, build, random_params

from flaxformer_min.model.attention import (
    attend,
    cudnn_attention,
    masked_softmax,
    scaled_dot_product_attention,
)
from flaxformer_min.model.attention_weights import attention_weights
from flaxformer_min.model.build import split_model
from flaxformer_min.model.masks import causal_mask, padding_mask
from flaxformer_min.model.positions import sinusoidal_positions
from flaxformer_min.model.teacher_forcing import forced_states, shift_right

pytestmark = pytest.mark.usefixtures("as_users_have_it")


def inputs(**changed):
    """Query [5, 2, 13, 7], key [5, 2, 11, 7], value [5, 2, 11, 17] and a mask of True."""
    shapes = {"query": (5, 2, 13, 7), "key": (5, 2, 11, 7), "value": (5, 2, 11, 17)}
    good = {name: jnp.ones(shape) for name, shape in shapes.items()}
    return good | {"mask": jnp.ones((5, 1, 1, 11), bool)} | changed


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("attention", [scaled_dot_product_attention, attend, cudnn_attention])
def test_a_mask_that_is_not_boolean_is_a_type_error_that_says_what_true_means(attention, dtype):
    minus_infinity = jnp.full((1, 1, 13, 11), -1e9).astype(dtype)  # as most texts write a mask
    message = f"mask is {dtype}: it must be boolean, True = may attend"
    with pytest.raises(TypeError, match=message):
        attention(**inputs(mask=minus_infinity))
    with pytest.raises(TypeError, match=message):
        jax.jit(attention)(**inputs(mask=minus_infinity))
    with pytest.raises(TypeError, match=message):
        masked_softmax(jnp.ones((5, 2, 13, 11)), minus_infinity)


@pytest.mark.parametrize(
    ("name", "wrong", "error", "message"),
    [
        ("query", np.ones((5, 2, 13, 7), int), TypeError, "is int64: it must be floating"),
        ("key", [[1.0]], TypeError, "is list: it must be floating"),
        ("key", jnp.ones((5, 2, 11, 5)), ValueError, r"11, 5\]: .*\[B, H, S, K\], .*K = 7"),
        ("value", jnp.ones((5, 11, 17)), ValueError, r"\[5, 11, 17\]: .*\[B, H, S, U\].* S = 11$"),
        ("value", jnp.ones((5, 2, 3, 17)), ValueError, r"3, 17\]: .* S = 11"),
        ("mask", jnp.ones((5, 11), bool), ValueError, r"\[5, 11\]: .*\[#B, #H, #T, S\], B = 5"),
        ("mask", jnp.ones((5, 1, 1, 1), bool), ValueError, r"\[5, 1, 1, 1\]: .* S = 11"),
        ("mask", jnp.ones((13, 1, 1, 11), bool), ValueError, r"\[13, 1, 1, 11\]: .*B = 5"),
    ],
)
def test_inputs_of_attention_that_do_not_fit_are_named_in_the_papers_letters(
    name, wrong, error, message
):
    for attention in (attend, cudnn_attention):
        with pytest.raises(error, match=f"{name} .*{message}"):
            attention(**inputs(**{name: wrong}))
    assert scaled_dot_product_attention(**inputs()).shape == (5, 2, 13, 17)


FLOATS = SOURCE.astype(float)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: padding_mask(FLOATS),
        lambda model: shift_right(FLOATS, 2),
        lambda model: model.encode(FLOATS, padding_mask(SOURCE)),
        lambda model: forced_states(model, SOURCE, FLOATS, pad_id=0, bos_id=2),
        lambda model: attention_weights(model, FLOATS, SOURCE, pad_id=0, bos_id=2),
    ],
)
def test_ids_that_are_no_integers_are_a_type_error(call):
    with pytest.raises(TypeError, match="is float32: it must be integer token ids"):
        call(build(CONFIG, random_params()))


def test_ids_and_masks_of_another_rank_or_length_are_value_errors():
    model, params = build(CONFIG, random_params()), padding_mask(SOURCE)
    memory, target_mask = jnp.ones((5, 11, 26)), causal_mask(13)
    with pytest.raises(ValueError, match=r"ids has shape \[11\]: it must be \[B, S\]"):
        padding_mask(SOURCE[0])
    with pytest.raises(ValueError, match=r"source_mask has shape \[5, 11\].* \[#B, 1, 1, S\], B"):
        model.encode(SOURCE, SOURCE != 0)
    with pytest.raises(ValueError, match=r"target_mask has .*\[5, 1, 1, 13\].*\[#B, 1, T, T\]"):
        model.decode_states(TARGET_IN, memory, padding_mask(TARGET_IN), params)
    with pytest.raises(ValueError, match=r"memory has shape \[3, 11, 26\].*B = 5, T = 13"):
        model.decode(TARGET_IN, memory[:3], target_mask, params)
    with pytest.raises(ValueError, match=r"source_mask has shape .*10\].* S = 11"):
        model.decode(TARGET_IN, memory, target_mask, params[..., 1:])


def test_ids_on_the_host_that_have_no_row_in_the_table_are_a_value_error():
    model = build(CONFIG, random_params())
    for wrong in (VOCAB_SIZE, -1):
        source = np.asarray(SOURCE).copy()
        source[3, 0] = wrong
        with pytest.raises(ValueError, match=f"ids are from .*{wrong}.*: they must be .* 0 to 30"):
            model.encode(source, padding_mask(source))
    for known in (0, VOCAB_SIZE - 1):
        source[3, 0] = known
        model.encode(source, padding_mask(source))


@pytest.mark.parametrize("length", [0, -3])
def test_a_sequence_has_at_least_one_position(length):
    for function in (causal_mask, lambda length: sinusoidal_positions(length, 6)):
        with pytest.raises(ValueError, match=f"length is {length}: it must be at least 1"):
            function(length)


@pytest.mark.parametrize("d_model", [7, 0, -2])
def test_a_sinusoidal_table_has_an_even_width(d_model):
    with pytest.raises(ValueError, match=f"d_model is {d_model}: it must be even"):
        sinusoidal_positions(5, d_model)


@pytest.mark.parametrize(
    ("changed", "vocab_size", "message"),
    [
        ({"d_model": 7}, 31, "d_model is 7: it must be even"),
        ({}, 0, "vocab_size is 0: it must be at least 1"),
    ],
)
def test_a_network_that_cannot_be_built_is_a_value_error(changed, vocab_size, message):
    config = dataclasses.replace(CONFIG, **changed)
    with pytest.raises(ValueError, match=message):
        split_model(config, vocab_size)
    split_model(dataclasses.replace(CONFIG, d_model=7, positions="learned"), 31)
