"""The leaves of a state and their names, which are its paths."""

from collections.abc import Mapping
from typing import Any

import jax


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves in jax.tree order by their paths: params/encoder/0/..., opt_state/0/mu/...

    The names do not depend on the classes that hold the leaves. A component of digits is always a
    number, such as the place of a layer in a list, and never a name, so that the path can be read
    back.
    """
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(map(_component, path)): leaf for path, leaf in paths}


def nested(leaves: Mapping[str, Any]) -> dict[Any, Any]:
    """Nested dicts from leaves by the paths that `named_leaves` gives them."""
    tree: dict[Any, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = [int(key) if _is_number(key) else key for key in name.split("/")]
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def _component(key: Any) -> str:
    """One component of a leaf's path."""
    text = jax.tree_util.keystr((key,), simple=True)
    value = getattr(key, "key", getattr(key, "idx", text))
    assert _is_number(text) == isinstance(value, int) and "/" not in text, f"ambiguous: {key!r}"
    return text


def _is_number(component: str) -> bool:
    return component.isascii() and component.isdecimal()
