"""The leaves of a tree by name: what is named can be built again, and two sides compared."""

import jax
import jax.numpy as jnp
import pytest

from flaxformer_min.checkpoints.leaves import difference, named_leaves, nested

TREE = {"encoder": {2: {"query": jnp.ones((5, 3))}, 10: {"query": jnp.zeros(7)}}, "v2": jnp.ones(2)}


def test_names_are_paths_in_the_order_of_the_leaves():
    assert list(named_leaves(TREE)) == ["encoder/2/query", "encoder/10/query", "v2"]
    assert list(named_leaves({"mu": (jnp.ones(1), [jnp.ones(2)])})) == ["mu/0", "mu/1/0"]


def test_leaves_that_are_named_already_keep_their_names():
    named = named_leaves(TREE)
    assert named_leaves(named).keys() == named.keys()


def test_named_leaves_of_nested_dicts_are_nested_again():
    again = nested(named_leaves(TREE))
    assert jax.tree.structure(again) == jax.tree.structure(TREE)
    assert all(map(jnp.array_equal, jax.tree.leaves(again), jax.tree.leaves(TREE)))


@pytest.mark.parametrize("name", ["2", -1])
def test_a_path_that_could_not_be_read_back_is_an_error_of_ours(name):
    with pytest.raises(AssertionError, match="ambiguous"):
        named_leaves({"encoder": {name: jnp.ones(3)}})


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ({"a": jnp.ones((2, 3))}, None),
        ({"a": jnp.ones((3, 2))}, r"a is float32[3, 2] there and float32[2, 3] here"),
        ({"a": jnp.ones((2, 3), jnp.int32)}, "a is int32[2, 3] there and float32[2, 3] here"),
        ({}, "a is missing there and float32[2, 3] here"),
        ({"a": jnp.ones((2, 3)), "b": jnp.ones(1)}, "b is float32[1] there and missing here"),
    ],
)
def test_the_first_difference_is_named_with_both_sides(there, expected):
    assert difference(there, {"a": jnp.ones((2, 3))}) == expected
