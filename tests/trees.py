"""Comparisons of trees of arrays; one that fails names the first leaf that differs, and how."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np


def assert_same_bits(left: Any, right: Any) -> None:
    """Both trees have the same leaves, with the same dtypes, shapes and bytes."""
    for name, one, other in _pairs(left, right):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), f"leaf {name}"
        if one.tobytes() != other.tobytes():
            np.testing.assert_array_equal(one, other, err_msg=f"leaf {name}")
            raise AssertionError(f"leaf {name}: equal numbers of other bits, such as 0 and -0")


def assert_close(left: Any, right: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Both trees have the same leaves, and |left - right| <= atol + rtol * |right| everywhere."""
    for name, one, other in _pairs(left, right):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=f"leaf {name}")


def assert_close_for_its_size(left: Any, right: Any, tolerance: float) -> None:
    """Differences of a leaf are at most `tolerance` times (0.001 + its largest magnitude)."""
    for name, one, other in _pairs(left, right):
        atol = tolerance * (1e-3 + np.abs(one).max())
        np.testing.assert_allclose(one, other, rtol=0, atol=atol, err_msg=f"leaf {name}")


def _pairs(left: Any, right: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Name and both arrays of each leaf."""
    ours, theirs = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (left, right))
    alone = [jax.tree_util.keystr(path) for path in ours.keys() ^ theirs.keys()]
    assert not alone, f"leaves of one tree only: {sorted(alone)}"
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for path, leaf in ours.items():
        yield jax.tree_util.keystr(path) or "(the only one)", *map(np.asarray, (leaf, theirs[path]))
