"""One checkpoint: a directory whole by itself, so that it can be copied elsewhere and used.

    arrays/          the state, written by Orbax: "params" and, in a run's own, "rest"
    config.json      the whole config of the run
    tokenizer.model  its SentencePiece model
    meta.json        step, evaluation, progress, the tokenizer's SHA-256, versions of packages
    manifest.json    format version, then size and SHA-256 of every file above

Who reads one calls `manifest.verify` first: hashes are checked before any parser sees a file, and
no file can run code. It is written under the name NAME.partial (manifest.py).
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import types
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from flaxformer_min.checkpoints.leaves import named_leaves
from flaxformer_min.checkpoints.progress import Progress
from flaxformer_min.config import Config, config_from_json, config_to_json
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.errors import UserError
from flaxformer_min.system.sealed import CheckpointError, delete, partial, reported, seal, verify

ARRAYS, CONFIG, TOKENIZER, META = "arrays", "config.json", "tokenizer.model", "meta.json"
PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "numpy", "sentencepiece")

# Orbax's threads log one traceback each for an error that its result() raises anyway.
logging.getLogger("absl").addFilter(lambda record: "_SignalingThread" not in record.getMessage())


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meta:
    """meta.json: what is to be known of a checkpoint without reading its arrays."""

    step: int
    tokenizer_sha256: str
    evaluation: Mapping[str, Any] | None = None  # its record, if there was one at this step
    # Of the evaluations up to this step.
    progress: Progress = dataclasses.field(default_factory=Progress)
    interim: bool = False  # saved between the regular steps, because a run was stopped
    averaged_steps: list[int] | None = None  # of an average
    packages: Mapping[str, str] = dataclasses.field(default_factory=_versions)


META_TYPES: dict[str, type | types.UnionType] = {
    "step": int,
    "tokenizer_sha256": str,
    "evaluation": dict | None,
    "progress": dict,
    "best_score": int | float | None,
    "best_step": int | None,
    "evaluations_since": int,
    "interim": bool,
    "averaged_steps": list | None,
    "packages": dict,
}


class Loaded(NamedTuple):
    """What translating needs."""

    config: Config
    tokenizer: Tokenizer
    params: dict[str, Any]  # nested by module names; leaves are NumPy float32
    step: int


def start_writing(folder: Path, tree: Any) -> Callable[[], None]:
    """Copies the arrays to the host and lets Orbax write `partial(folder)` in the background.

    `tree` is a state, or {"params": params}. Its buffers may be donated when this returns. The
    result waits until all is written, and raises what went wrong. Called by every process.
    """
    unfinished = partial(folder)
    if jax.process_index() == 0:
        delete(unfinished)
        unfinished.mkdir(parents=True)
    context = ocp.Context()
    # What Orbax cannot make in the background it waits for until a timeout of 20 minutes.
    context.asynchronous.create_directories_asynchronously = False
    # Readers here always say how to shard. On a full disk this file is still being written when the
    # error is raised, so that it would outlive the cleaning up.
    context.array.saving.enable_write_sharding_file = False
    with context:
        return ocp.save_checkpointables_async(str(unfinished / ARRAYS), _parts(tree)).result


def complete(folder: Path, config: Config, tokenizer: Tokenizer, meta: Meta) -> None:
    """Adds all but the arrays; the checkpoint counts when this returns."""
    unfinished = partial(folder)
    (unfinished / CONFIG).write_text(config_to_json(config), encoding="utf-8")
    (unfinished / TOKENIZER).write_bytes(tokenizer.model_bytes)
    content = dataclasses.asdict(meta) | {"progress": meta.progress._asdict()}
    (unfinished / META).write_text(json.dumps(content, indent=2), encoding="utf-8")
    seal(unfinished)


@contextlib.contextmanager
def whole_or_nothing(folder: Path) -> Generator[None, None, None]:
    """Leaves no partial directory if writing fails; raises CheckpointError with the cause."""
    try:
        with reported(folder, "not saved"):
            yield
    except CheckpointError:
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                delete(partial(folder))
        raise


def read_meta(folder: Path) -> Meta:
    """Reads meta.json, verifying no other file. Raises what `verify` raises."""
    verify(folder, [META])
    return _parse_meta(folder / META)


def read_config(folder: Path) -> Config:
    """Reads config.json, unverified. Raises UserError if this program does not know such a one."""
    try:
        return config_from_json((folder / CONFIG).read_text(encoding="utf-8"))
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error


def read_checkpoint(folder: Path) -> Loaded:
    """Reads one checkpoint, unverified, without its optimizer state.

    Raises UserError for a config that this version of the program does not know.
    """
    config, meta = read_config(folder), _parse_meta(folder / META)
    try:
        tokenizer = Tokenizer((folder / TOKENIZER).read_bytes())
    except UserError as error:
        raise UserError(f"{folder / TOKENIZER}: {error}") from error
    stored = _stored(folder).get("params", {})
    like = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in stored.items()}
    params = _load(folder, {"params": like})["params"]
    tree = _nested({name: np.asarray(leaf, np.float32) for name, leaf in params.items()})
    return Loaded(config, tokenizer, tree["params"], meta.step)


def read_state(folder: Path, like: Any) -> Any:
    """Reads the whole state, unverified, with the structure, dtypes and shardings of `like`.

    Raises UserError if leaves differ in name, shape or dtype.
    """
    stored, wanted = _stored(folder), _parts(like)
    for part, leaves in wanted.items():
        if (found := difference(stored.get(part, {}), leaves)) is not None:
            raise UserError(f"{folder}: holds another state than this run's: {found}")
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), wanted
    )
    parts = _load(folder, abstract)
    leaves = {name: leaf for part in parts.values() for name, leaf in part.items()}
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[n] for n in named_leaves(like)])


def difference(left: Mapping[str, Any], right: Mapping[str, Any]) -> str | None:
    """The first leaf, by name, that one side lacks or that has another shape or dtype there."""

    def kind(leaves: Mapping[str, Any], name: str) -> str:
        return f"{leaves[name].dtype}{list(leaves[name].shape)}" if name in leaves else "missing"

    for name in sorted(left.keys() | right.keys()):
        if (one := kind(left, name)) != (other := kind(right, name)):
            return f"{name} is {one} there and {other} here"
    return None


def _nested(leaves: Mapping[str, Any]) -> dict[Any, Any]:
    """The inverse of `named_leaves` for nested dicts."""
    tree: dict[Any, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = [int(key) if key.isdecimal() else key for key in name.split("/")]
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def _parts(tree: Any) -> dict[str, dict[str, Any]]:
    """Orbax's separately readable pieces: "params", and "rest" if there is more."""
    parts: dict[str, dict[str, Any]] = {}
    for name, leaf in named_leaves(tree).items():
        part = "params" if name.startswith("params/") else "rest"
        parts.setdefault(part, {})[name] = leaf
    return parts


def _stored(folder: Path) -> dict[str, Any]:
    """By part and name, leaves with shape and dtype."""
    with reported(folder / ARRAYS, "cannot be read"):
        parts = ocp.checkpointables_metadata(str(folder / ARRAYS)).metadata
        if None in parts.values():  # Orbax logs the reason
            raise ValueError("another version's, or damaged before the manifest was written")
        return parts


def _load(folder: Path, like: Any) -> Any:
    with reported(folder / ARRAYS, "cannot be read"):
        return ocp.load_checkpointables(str(folder / ARRAYS), like)


def _parse_meta(path: Path) -> Meta:
    with reported(path, "damaged"):
        content = json.loads(path.read_bytes())
        for name, value in {**content, **content["progress"]}.items():
            if not isinstance(value, META_TYPES[name]):
                raise TypeError(f"{name} is {value!r:.80}")
        return Meta(**content | {"progress": Progress(**content["progress"])})
