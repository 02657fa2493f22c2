"""One checkpoint: a directory that is whole by itself, so that it can be copied and used elsewhere.

    arrays/          written by Orbax: "params" and, unless it is an average, "rest" of the state
    config.json      the whole config of the run
    tokenizer.model  its SentencePiece model
    meta.json        step, evaluation, progress, the tokenizer's SHA-256, versions of packages
    manifest.json    format version, then size and SHA-256 of every file above

system/sealed.py describes the manifest. No file of a checkpoint can run code, and hashes are
compared before any parser sees a file: a function in this file either says that it verifies, or its
caller must have done so.
"""

import dataclasses
import importlib.metadata
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from flaxformer_min.checkpoints.leaves import difference, named_leaves, nested
from flaxformer_min.checkpoints.progress import Progress
from flaxformer_min.config import Config
from flaxformer_min.config_rules import config_from_json, config_to_json, typed
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.errors import UserError
from flaxformer_min.system.sealed import checkpoint_errors, verify

ARRAYS, CONFIG, TOKENIZER, META = "arrays", "config.json", "tokenizer.model", "meta.json"
PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "numpy", "sentencepiece")

# If a save fails, its result() raises the error, and a thread of Orbax also logs a traceback, which
# this filter drops. It is set for the whole process, because Orbax logs to absl's root logger.
logging.getLogger("absl").addFilter(lambda record: "_SignalingThread" not in record.getMessage())


def _package_versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meta:
    """The content of meta.json: all that is to be known about a checkpoint besides its arrays."""

    step: int
    tokenizer_sha256: str
    evaluation: Mapping[str, Any] | None = None  # the record of the evaluation at this step
    # The best of the evaluations up to this step.
    progress: Progress = dataclasses.field(default_factory=Progress)
    interim: bool = False  # saved between the regular steps, because the run was stopped
    averaged_steps: list[int] | None = None  # only of an average
    packages: Mapping[str, str] = dataclasses.field(default_factory=_package_versions)


class Loaded(NamedTuple):
    """A checkpoint as it is needed for translating: without the optimizer's state."""

    config: Config
    tokenizer: Tokenizer
    params: dict[str, Any]  # nested by module names; leaves are NumPy float32
    step: int


def start_writing(folder: Path, tree: Any) -> Callable[[], None]:
    """Copies the arrays to the host and lets Orbax write them to `folder` in the background.

    Every process of a run has to call this. `tree` is a state, or {"params": params}; its buffers
    may be donated as soon as this returns. The function that is returned waits until the arrays are
    written and raises the error if they could not be.
    """
    context = ocp.Context()
    # Orbax would wait up to 20 minutes for a directory that it cannot make in the background.
    context.asynchronous.create_directories_asynchronously = False
    # This program says how to shard whenever it reads, so it needs no file of Orbax about that. On
    # a full disk such a file is still being written when the error is raised, so that it would
    # outlive the removal of the directory.
    context.array.saving.enable_write_sharding_file = False
    with context:
        return ocp.save_checkpointables_async(str(folder / ARRAYS), _parts(tree)).result


def write_description(folder: Path, config: Config, tokenizer: Tokenizer, meta: Meta) -> None:
    """Writes config, tokenizer and meta.json to `folder`, which the caller seals after that."""
    (folder / CONFIG).write_text(config_to_json(config), encoding="utf-8")
    (folder / TOKENIZER).write_bytes(tokenizer.model_bytes)
    content = dataclasses.asdict(meta) | {"progress": meta.progress._asdict()}
    (folder / META).write_text(json.dumps(content, indent=2), encoding="utf-8")


def read_meta(folder: Path) -> Meta:
    """Verifies meta.json, and no other file, and reads it.

    Raises CheckpointError if it is damaged, and UserError for another format version.
    """
    verify(folder, [META])
    return _parse_meta(folder)


def read_config(folder: Path) -> Config:
    """Reads config.json. Raises UserError if this version of the program does not know it."""
    try:
        return config_from_json((folder / CONFIG).read_text(encoding="utf-8"))
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error


def read_checkpoint(folder: Path) -> Loaded:
    """Reads one checkpoint without its optimizer state.

    Raises UserError for a config or tokenizer that this version of the program does not know, and
    CheckpointError for arrays that cannot be read.
    """
    config, meta = read_config(folder), _parse_meta(folder)
    try:
        tokenizer = Tokenizer((folder / TOKENIZER).read_bytes())
    except UserError as error:
        raise UserError(f"{folder / TOKENIZER}: {error}") from error
    stored = _stored_shapes(folder).get("params", {})
    like = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in stored.items()}
    params = _read_arrays(folder, {"params": like})["params"]
    tree = nested({name: np.asarray(leaf, np.float32) for name, leaf in params.items()})
    return Loaded(config, tokenizer, tree["params"], meta.step)


def read_state(folder: Path, like: Any) -> Any:
    """Reads the whole state, with the structure, dtypes and shardings of `like`.

    Raises UserError if leaves differ in name, shape or dtype, and CheckpointError for arrays that
    cannot be read.
    """
    stored, wanted = _stored_shapes(folder), _parts(like)
    for part, leaves in wanted.items():
        if (found := difference(stored.get(part, {}), leaves)) is not None:
            raise UserError(f"{folder}: holds another state than this run's: {found}")
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), wanted
    )
    parts = _read_arrays(folder, abstract)
    leaves = {name: leaf for part in parts.values() for name, leaf in part.items()}
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[n] for n in named_leaves(like)])


def _parts(tree: Any) -> dict[str, dict[str, Any]]:
    """Returns the parts that Orbax can read separately: "params", and "rest" if there is more."""
    parts: dict[str, dict[str, Any]] = {}
    for name, leaf in named_leaves(tree).items():
        part = "params" if name.startswith("params/") else "rest"
        parts.setdefault(part, {})[name] = leaf
    return parts


def _parse_meta(folder: Path) -> Meta:
    with checkpoint_errors(folder / META, "damaged"):
        return typed(Meta, json.loads((folder / META).read_bytes()), whole=META)


def _stored_shapes(folder: Path) -> dict[str, Any]:
    """Returns the shapes and dtypes of the stored leaves, by part and name."""
    with checkpoint_errors(folder / ARRAYS, "cannot be read"):
        parts = ocp.checkpointables_metadata(str(folder / ARRAYS)).metadata
        if None in parts.values():  # Orbax logs the reason
            raise ValueError("another version's, or damaged before the manifest was written")
        return parts


def _read_arrays(folder: Path, like: Any) -> Any:
    """Reads the stored leaves, by part and name, with the shapes and shardings of `like`."""
    with checkpoint_errors(folder / ARRAYS, "cannot be read"):
        return ocp.load_checkpointables(str(folder / ARRAYS), like)
