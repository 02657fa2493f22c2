"""What a comparison of trees says when it fails."""

import jax.numpy as jnp
import numpy as np
import pytest
from trees import assert_close, assert_close_for_its_size, assert_same_bits

TREE = {"a": [jnp.zeros(3), jnp.arange(5)], "b": {"c": jnp.float32(2)}}


def other(**leaves):
    return TREE | leaves


def test_equal_trees_are_equal():
    assert_same_bits(TREE, other(b={"c": np.float32(2)}))
    assert_close(TREE, TREE)
    assert_close_for_its_size(TREE, TREE, 1e-6)


@pytest.mark.parametrize(
    ("right", "message"),
    [
        (other(b={"c": jnp.float32(3)}), r"leaf \['b'\]\['c'\]"),
        (other(a=[jnp.zeros(3), jnp.arange(5).at[2].set(7)]), r"leaf \['a'\]\[1\]"),
        (other(a=[jnp.zeros(2), jnp.arange(5)]), r"leaf \['a'\]\[0\]"),
        (other(a=[-jnp.zeros(3), jnp.arange(5)]), r"leaf \['a'\]\[0\]: .* other bits"),
        (other(b={"c": jnp.int32(2)}), r"leaf \['b'\]\['c'\]"),
        (other(d=jnp.zeros(1)), r"leaves of one tree only: \[\"\['d'\]\"\]"),
    ],
)
def test_other_bits_are_refused_by_the_name_of_their_leaf(right, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_bits(TREE, right)


def test_numbers_further_apart_than_the_tolerance_are_refused_by_the_name_of_their_leaf():
    right = other(b={"c": jnp.float32(2.1)})
    assert_close(TREE, right, rtol=0.06)
    assert_close(TREE, right, atol=0.11)
    assert_close_for_its_size(TREE, right, 0.06)
    for refused in (
        lambda: assert_close(TREE, right, rtol=0.04),
        lambda: assert_close(TREE, right, atol=0.09),
        lambda: assert_close_for_its_size(TREE, right, 0.04),
    ):
        with pytest.raises(AssertionError, match=r"leaf \['b'\]\['c'\]"):
            refused()
