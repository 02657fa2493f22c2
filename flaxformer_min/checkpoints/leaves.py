"""Names for the leaves of a tree of arrays, in checkpoints and in the table of shardings."""

from typing import Any

import jax


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves in the order of jax.tree by their paths: params/encoder/0/..., opt_state/0/mu/...

    The names do not depend on the classes that hold the leaves. A number in the path of a parameter
    is a place in a list.
    """
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}
