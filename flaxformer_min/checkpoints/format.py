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

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import json
import logging
import os
import re
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore as ts
from orbax.checkpoint import v1 as ocp

from flaxformer_min.checkpoints.leaves import nested
from flaxformer_min.checkpoints.progress import Progress
from flaxformer_min.config import Config
from flaxformer_min.config_rules import config_from_json, typed
from flaxformer_min.data.tokenizer import Tokenizer, open_tokenizer
from flaxformer_min.errors import UserError
from flaxformer_min.system.processes import exchange
from flaxformer_min.system.sealed import checkpoint_errors, verify

LEAF = b"/zarr.json"  # after the name of a leaf, where tensorstore keeps its shape
ARRAYS, CONFIG, TOKENIZER, META = "arrays", "config.json", "tokenizer.model", "meta.json"
# A path without a sign or a first folder that Orbax, etils or tensorstore give a meaning to.
PLAIN = re.compile(r"(?!/(gs|s3|az|hf)/)[\w/ .,+=@~-]*")
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


def read_meta(folder: Path) -> Meta:
    """Verifies meta.json, and no other file, and reads it.

    Raises CheckpointError if it is damaged, and UserError for another format version.
    """
    verify(folder, [META])
    return parse_meta(folder)


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
    config, meta = read_config(folder), parse_meta(folder)
    try:
        tokenizer = open_tokenizer((folder / TOKENIZER).read_bytes())
    except UserError as error:
        raise UserError(f"{folder / TOKENIZER}: {error}") from error
    stored = stored_shapes(folder).get("params", {})
    like = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in stored.items()}
    params = read_arrays(folder, {"params": like})["params"]
    tree = nested({name: np.asarray(leaf, np.float32) for name, leaf in params.items()})
    return Loaded(config, tokenizer, tree["params"], meta.step)


def parse_meta(folder: Path) -> Meta:
    """Reads meta.json, which has been verified. Raises CheckpointError if it makes no sense."""
    content = (folder / META).read_bytes()
    with checkpoint_errors(folder / META, "damaged"):
        return typed(Meta, json.loads(content), whole=META)


def stored_shapes(folder: Path) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """Returns the shapes and dtypes of the stored leaves, by part and name.

    They are read as they lie on the disk, a file zarr.json for each leaf. Orbax could be asked, but
    every answer loses a megabyte of memory (`Spec.to_json` of tensorstore 0.1.86).
    """
    with checkpoint_errors(folder / ARRAYS, "cannot be read"), plain_path(folder) as path:
        parts = [entry.name for entry in os.scandir(f"{path}/{ARRAYS}") if entry.is_dir()]
        return {part: _stored_part(f"{path}/{ARRAYS}/{part}/") for part in parts}


def _stored_part(path: str) -> dict[str, jax.ShapeDtypeStruct]:
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}"}).result()
    names = [key.decode()[: -len(LEAF)] for key in store.list().result() if key.endswith(LEAF)]
    found = {name: json.loads(store.read(name.encode() + LEAF).result().value) for name in names}
    return {
        name: jax.ShapeDtypeStruct(leaf["shape"], jax.numpy.dtype(leaf["data_type"]))
        for name, leaf in found.items()
    }


def read_arrays(folder: Path, like: Any) -> Any:
    """Reads the stored leaves, by part and name, with the shapes and shardings of `like`."""
    with checkpoint_errors(folder / ARRAYS, "cannot be read"), plain_path(folder) as path:
        return ocp.load_checkpointables(f"{path}/{ARRAYS}", like)


@contextlib.contextmanager
def plain_path(folder: Path, *, everywhere: bool = False) -> Generator[str, None, None]:
    """A context with a path to a directory in which no sign has a meaning for Orbax.

    Orbax and what it is built on look for names that match a path with `[`, take `\\` for `/`, and
    `gs:` for the beginning of a URL. A directory with such a path is opened here, and Linux gives
    each directory that a process has open a path of digits. `everywhere` makes it the same path in
    all processes of the run, which all have to call this then.
    """
    if PLAIN.fullmatch(str(folder)):
        yield str(folder)
        return
    number = os.open(folder, os.O_RDONLY)
    while everywhere and len(numbers := set(exchange(str(number)).values())) > 1:
        if number < (highest := max(map(int, numbers))):
            lower, number = number, fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, highest)
            os.close(lower)
    try:
        yield f"/proc/self/fd/{number}"
    finally:
        os.close(number)
