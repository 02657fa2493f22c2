"""Checks what callers hand to the model; a compiled function is checked only while it is traced."""

from typing import Any

import jax.numpy as jnp

FLOATS, IDS, BOOLEANS = jnp.floating, jnp.integer, jnp.bool_
_MEANT = {FLOATS: "floating", IDS: "integer token ids", BOOLEANS: "boolean, True = may attend"}


def check(**arrays: tuple[Any, type, str]) -> None:
    """Refuses arrays of another dtype or shape than is meant.

    An argument is the name of an array; its value is the array, its kind and its axes in the
    paper's letters. A letter has the same size wherever it stands; with "#" an axis of 1 will do:

        check(query=(query, FLOATS, "B H T K"), mask=(mask, BOOLEANS, "#B #H #T S"))

    Raises TypeError for the dtype and ValueError for the shape; both name the array.
    """
    sizes = {"1": 1}
    for name, (array, kind, letters) in arrays.items():
        dtype = getattr(array, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, kind):
            raise TypeError(f"{name} is {dtype or type(array).__name__}: it must be {_MEANT[kind]}")
        known, axes = dict(sizes), letters.split()
        fits = array.ndim == len(axes)
        for axis, size in zip(axes, array.shape, strict=False):
            if axis[0] != "#" or size != 1:
                fits &= sizes.setdefault(axis.strip("#"), size) == size
        if not fits:
            given = "".join(f", {axis} = {known[axis]}" for axis in known if axis.isalpha())
            wanted = f"[{', '.join(axes)}]{given}" + ' ("#": or 1)' * ("#" in letters)
            raise ValueError(f"{name} has shape {list(array.shape)}: it must be {wanted}")


def check_length(length: int) -> None:
    """Refuses a sequence of no positions with a ValueError."""
    if length < 1:
        raise ValueError(f"length is {length}: it must be at least 1")
