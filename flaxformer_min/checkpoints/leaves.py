"""Names for the leaves of a tree of arrays, for checkpoints and for the table of shardings."""

from collections.abc import Mapping
from typing import Any

import jax


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves in jax.tree order by their paths: params/encoder/0/..., opt_state/0/mu/...

    The names do not depend on the classes that hold the leaves. A component of digits is always a
    number, such as the index of a layer in a list, and never a name, so that `nested` can tell them
    apart. If `tree` is a dict of leaves that have such names already, they keep them.
    """
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(map(_component, path)): leaf for path, leaf in paths}


def nested(leaves: Mapping[str, Any]) -> dict[Any, Any]:
    """Makes nested dicts of leaves from the paths that `named_leaves` gives them."""
    tree: dict[Any, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = [int(key) if _is_number(key) else key for key in name.split("/")]
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Describes the first leaf, by name, that differs in shape, dtype or existence, if any does."""

    def described(leaves: Mapping[str, Any], name: str) -> str:
        return f"{leaves[name].dtype}{list(leaves[name].shape)}" if name in leaves else "missing"

    for name in sorted(there.keys() | here.keys()):
        if (one := described(there, name)) != (other := described(here, name)):
            return f"{name} is {one} there and {other} here"
    return None


def fitting(params: Any, shapes: Any) -> Any:
    """Returns the parameters, or raises ValueError for those of another model or vocabulary.

    An empty tree stands for parameters that come later.
    """

    def described(tree: Any) -> dict[str, jax.ShapeDtypeStruct]:
        leaves = named_leaves(tree).items()
        return {name: jax.ShapeDtypeStruct(leaf.shape, "float32") for name, leaf in leaves}

    if params and (wrong := difference(described(params), described(shapes))):
        raise ValueError(f"params (there) do not fit config and tokenizer (here): {wrong}")
    return params


def _component(key: Any) -> str:
    """Returns one component of a leaf's path."""
    text = jax.tree_util.keystr((key,), simple=True)
    value = getattr(key, "key", getattr(key, "idx", text))
    assert _is_number(text) == isinstance(value, int), f"ambiguous: {key!r}"
    return text


def _is_number(component: str) -> bool:
    return component.isascii() and component.isdecimal()
