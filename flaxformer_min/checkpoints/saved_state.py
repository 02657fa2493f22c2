"""The whole state of a run in a checkpoint: how it is written, and read back as it was."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from flaxformer_min.checkpoints.format import (
    ARRAYS,
    CONFIG,
    META,
    TOKENIZER,
    Meta,
    plain_path,
    read_arrays,
    stored_shapes,
)
from flaxformer_min.checkpoints.leaves import difference, named_leaves
from flaxformer_min.config import Config
from flaxformer_min.config_rules import config_to_json
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.errors import UserError
from flaxformer_min.system.processes import is_first


def start_writing(folder: Path, tree: Any) -> Callable[[], None]:
    """Copies the arrays to the host and lets Orbax write them to `folder` in the background.

    Every process of a run has to call this. `tree` is a state, or {"params": params}; its buffers
    may be donated as soon as this returns. The function that is returned waits until the arrays are
    written and raises the error if they could not be; process 0 then looks whether every one of
    them is there, with its shape and dtype.
    """
    parts = _parts(tree)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), parts)
    path = contextlib.ExitStack()
    context = ocp.Context()
    # Orbax would wait up to 20 minutes for a directory that it cannot make in the background.
    context.asynchronous.create_directories_asynchronously = False
    # This program says how to shard whenever it reads, so it needs no file of Orbax about that. On
    # a full disk such a file is still being written when the error is raised, so that it would
    # outlive the removal of the directory.
    context.array.saving.enable_write_sharding_file = False
    with context:
        to = path.enter_context(plain_path(folder, everywhere=True))
        written = ocp.save_checkpointables_async(f"{to}/{ARRAYS}", parts)

    def finish() -> None:
        with path:
            written.result()
        if is_first():
            _refuse_difference(stored_shapes(folder), shapes, f"{folder}: was not written whole")

    return finish


def write_description(folder: Path, config: Config, tokenizer: Tokenizer, meta: Meta) -> None:
    """Writes config, tokenizer and meta.json to `folder`, which the caller seals after that."""
    (folder / CONFIG).write_text(config_to_json(config), encoding="utf-8")
    (folder / TOKENIZER).write_bytes(tokenizer.model_bytes)
    content = dataclasses.asdict(meta) | {"progress": meta.progress._asdict()}
    (folder / META).write_text(json.dumps(content, indent=2), encoding="utf-8")


def read_state(folder: Path, like: Any) -> Any:
    """Reads the whole state, with the structure, dtypes and shardings of `like`.

    Raises UserError if leaves differ in name, shape or dtype, and CheckpointError for arrays that
    cannot be read.
    """
    wanted = _parts(like)
    _refuse_difference(
        stored_shapes(folder), wanted, f"{folder}: holds another state than this run's"
    )
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), wanted
    )
    parts = read_arrays(folder, abstract)
    leaves = {name: leaf for part in parts.values() for name, leaf in part.items()}
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[n] for n in named_leaves(like)])


def _refuse_difference(stored: dict[str, Any], wanted: dict[str, Any], problem: str) -> None:
    """Raises UserError with the problem and the first leaf that differs in shape or dtype."""
    for part, leaves in wanted.items():
        if (found := difference(stored.get(part, {}), leaves)) is not None:
            cause = "; it was trained with JAX_ENABLE_X64" if "float64" in found else ""
            raise UserError(f"{problem}: {found}{cause}")


def _parts(tree: Any) -> dict[str, dict[str, Any]]:
    """Returns the parts that Orbax can read separately: "params", and "rest" if there is more."""
    parts: dict[str, dict[str, Any]] = {}
    for name, leaf in named_leaves(tree).items():
        part = "params" if name.startswith("params/") else "rest"
        parts.setdefault(part, {})[name] = leaf
    return parts
