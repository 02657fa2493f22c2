"""What a command does before it uses JAX: devices are there, compiled programs are kept."""

import contextlib
import os
import warnings
from pathlib import Path

import jax
from jax._src import hardware_utils

from flaxformer_min.errors import UserError, first_line
from flaxformer_min.system.own_folder import own_folder

CACHE_SIZE = 2_000_000_000  # bytes of compiled programs that are kept, the newest ones

_started_in: int | None = None  # the process that called `start`


def start() -> None:
    """Makes JAX keep compiled programs, and looks for its devices.

    Raises UserError, naming JAX_PLATFORMS if it is set, if JAX finds no device, and RuntimeError
    for the reason of `refuse_forked`.
    """
    global _started_in
    refuse_forked()
    _started_in = os.getpid()
    keep_programs()
    quiet_libtpu()
    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # the latter where a plug-in finds nothing
        reason = f": {first_line(error)}" if str(error) else ""
        if wanted := jax.config.values["jax_platforms"]:
            raise UserError(
                f"JAX_PLATFORMS is {wanted}, but JAX finds no such device here{reason}; "
                "unset it, or set it to cpu"
            ) from error
        raise UserError(f"JAX finds no device here{reason}") from error


def refuse_forked() -> None:
    """Raises RuntimeError in a fork of a process that called `start`: JAX would hang there."""
    if _started_in not in (None, os.getpid()):
        raise RuntimeError(
            "this process was forked after its parent began to use JAX, which does not work after "
            "os.fork(): load the Translator in each worker, or start workers by spawn"
        )


def quiet_libtpu() -> None:
    """Keeps libtpu from complaining, on a machine without TPUs, that it does not know which it has.

    The values are those of one chip; without chips nothing depends on them.
    """
    if hardware_utils.num_available_tpu_chips_and_device_id()[0] == 0:
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")


def keep_programs() -> None:
    """Makes JAX keep compiled programs on disk, in a folder of this user alone.

    What is read back there is run as code, so it must never lie in a workdir, which is passed on.
    A folder that JAX_COMPILATION_CACHE_DIR names, or this process has given JAX already, is left as
    it is. Where nothing can be written, programs are compiled at every start.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    if folder := own_folder("compiled", "compiled programs"):
        with contextlib.suppress(OSError):
            _delete_oldest(folder)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # A program that another process is writing is compiled here too; nothing is amiss.
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")


def _delete_oldest(folder: Path) -> None:
    """Deletes the programs that are older than the newest CACHE_SIZE bytes of them."""
    written = {path: path.stat() for path in folder.glob("*-cache")}
    size = 0
    for path in sorted(written, key=lambda path: written[path].st_mtime, reverse=True):
        size += written[path].st_size
        if size > CACHE_SIZE:
            path.unlink(missing_ok=True)
