"""train.py on a small corpus, in processes of its own, and what is to be seen of it from outside.

Everything that could make two runs differ is on: dropout, shuffling over several epochs,
accumulation, and in long runs two shapes of batches and two devices.
"""

import dataclasses
import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp

from flaxformer_min.checkpoints.leaves import named_leaves
from flaxformer_min.checkpoints.retention import find_checkpoints
from flaxformer_min.config import Config
from flaxformer_min.config_file import load_config
from flaxformer_min.system.sealed import CheckpointError, verify
from tools import tiny_config

ROOT = Path(__file__).parents[2]
PAIRS, VALIDATION_PAIRS = 1900, 40
LONGEST_START = 1800  # seconds until a run that shows no progress is given up


@dataclasses.dataclass(frozen=True)
class Size:
    """How long a run is."""

    steps: int
    evaluate_every: int
    checkpoint_every: int
    accumulation: int = 2
    buckets: int = 2  # shapes of batches
    devices: int = 2

    @property
    def flags(self) -> list[str]:
        train = {
            "steps": self.steps,
            "evaluate_every": self.evaluate_every,
            "checkpoint_every": self.checkpoint_every,
        }
        flags = [f"--train.{name}={value}" for name, value in train.items()]
        return [
            *flags,
            "--data.tokens_per_batch=1024",
            f"--data.num_buckets={self.buckets}",
            f"--optimizer.accumulation={self.accumulation}",
        ]


LONG, SHORT = Size(240, 40, 10), Size(30, 15, 5, buckets=1, devices=1)


def size(short: bool) -> Size:
    return SHORT if short else LONG


def config_spec(folder: Path) -> str:
    """FILE:ARG of the config whose corpus is in the folder; writes it if it is not there."""
    corpus = folder / "corpus"
    if not corpus.exists():
        corpus.mkdir()
        tiny_config.write_corpus(corpus, PAIRS, VALIDATION_PAIRS)
    return f"{tiny_config.__file__}:{corpus}"


def config_of(folder: Path, size: Size, *flags: str) -> Config:
    return load_config(config_spec(folder), [*size.flags, *flags])


def environment(devices: int, **more: str) -> dict[str, str]:
    """Of a process: CPUs, and nothing that is set for this one about JAX."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    return own | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # small programs too
        "PYTHONPATH": str(ROOT),
        **more,
    }


class Run:
    """One workdir and the command that trains in it, to be given again and again."""

    def __init__(self, workdir: Path, folder: Path, size: Size) -> None:
        self.workdir, self.folder, self.size, self.starts = workdir, folder, size, 0
        spec = config_spec(folder)
        self._arguments = ["--config", spec, "--workdir", str(workdir), *size.flags]

    def start(
        self,
        program: Sequence[str] = (str(ROOT / "train.py"),),
        *,
        cold: bool = False,
        **variables: str,
    ) -> "Start":
        """Gives the command; `cold` makes it compile everything anew."""
        self.starts += 1
        for folder in [self.marks, self.compiled] if cold else [self.marks]:
            shutil.rmtree(folder, ignore_errors=True)
        self.marks.mkdir()
        own = {"JAX_COMPILATION_CACHE_DIR": str(self.compiled), "MARKS": str(self.marks)}
        environ = environment(self.size.devices, **own | variables)
        return Start(self, [sys.executable, *program, *self._arguments], environ)

    def finish(self, **options: Any) -> "Start":
        start = self.start(**options)
        start.wait()
        return start

    @property
    def marks(self) -> Path:
        """Where marked.py says in which phase it is."""
        return self.folder / f"{self.workdir.name}.marks"

    @property
    def compiled(self) -> Path:
        """Where this run's programs are kept; the disk of the workdir may be full."""
        return self.folder / f"{self.workdir.name}.compiled"

    @property
    def checkpoints(self) -> Path:
        return self.workdir / "checkpoints"

    def counted(self) -> dict[int, Path]:
        """The checkpoints that count, by step, ascending."""
        return find_checkpoints(self.checkpoints)

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint, 0 if there is none."""
        return max(self.counted(), default=0)

    @property
    def newest_folder(self) -> Path:
        return self.counted()[self.newest]

    def unfinished(self) -> list[str]:
        """What is among the checkpoints and is none."""
        entries = self.checkpoints.iterdir() if self.checkpoints.exists() else ()
        return sorted(path.name for path in {*entries} - {*self.counted().values()})

    def log(self, last: int | None = None) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl, or of its last bytes."""
        path = self.workdir / "metrics.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            cut = last is not None and file.seek(0, os.SEEK_END) > last
            file.seek(-last if cut else 0, os.SEEK_END if cut else os.SEEK_SET)
            lines = file.read().split(b"\n")
        return [json.loads(line) for line in lines[cut:-1]]

    def last_step(self) -> int:
        """The last training step in the log."""
        return max((line["step"] for line in self.log(4096) if "loss" in line), default=0)

    def damaged(self) -> list[str]:
        """The problems of the checkpoints that count."""
        problems = []
        for folder in self.counted().values():
            try:
                verify(folder)
            except CheckpointError as error:
                problems.append(f"unreadable: {error}")
        return problems

    def leaves_hash(self) -> str:
        """Of the newest checkpoint."""
        return leaves_hash(self.newest_folder)


class Start:
    """One process of a run."""

    def __init__(self, run: Run, command: list[str], env: dict[str, str]) -> None:
        self.run, self.begun, self._log = run, run.newest, _log_of(run)
        # Not beside the workdir, which may be on a disk that is full.
        self._output = run.folder / f"{run.workdir.name}.{run.starts}.txt"
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait(self) -> float:
        """Waits for the end; returns its time."""
        self.process.wait(timeout=LONGEST_START)
        return time.time()

    def kill(self) -> None:
        """SIGKILL to the process and to whatever it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def phases(self) -> set[str]:
        """The phases that marked.py is in, or was in when it was killed."""
        return {path.stem for path in self.run.marks.iterdir()}

    def logs(self) -> bool:
        """Whether it has taken over the log: what an earlier process wrote too much is gone."""
        return _log_of(self.run) != self._log

    def wait_for_step(self, step: int) -> bool:
        """Whether the step was taken or loaded; False if the process ended first."""
        return self.wait_until(lambda: self.logs() and self.run.last_step() >= step)

    def wait_for(self, phase: str) -> bool:
        """Whether the phase was reached; False if the process ended first."""
        return self.wait_until(lambda: phase in self.phases())

    def wait_until(self, holds: Callable[[], bool]) -> bool:
        end = time.monotonic() + LONGEST_START
        while self.process.poll() is None:
            if holds():
                return True
            assert time.monotonic() < end, self.output()
            time.sleep(0.003)
        return False

    def children_left(self) -> list[str]:
        """Processes of the session that outlive it."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:  # it ended
                continue
            if int(fields[3]) == self.process.pid and fields[0] != "Z":
                found.append(path.parent.name)
        return found


def _log_of(run: Run) -> int | None:
    """A number that changes when a start takes over the log, which makes a new file of it."""
    path = run.workdir / "metrics.jsonl"
    return path.stat().st_ino if path.exists() else None


def programs(folder: Path) -> Path:
    """Where JAX keeps what the runs that are not to be disturbed have compiled."""
    return folder / "compiled"


@functools.cache
def reference(folder: Path, size: Size) -> Run:
    """The run that was never stopped."""
    run = Run(folder / f"reference-{size.steps}", folder, size)
    start = run.finish(JAX_COMPILATION_CACHE_DIR=str(programs(folder)))
    assert start.process.returncode == 0, start.output()
    return run


def warm(run: Run, folder: Path) -> Run:
    """The run, with the compiled programs of the reference where it looks for its own."""
    shutil.copytree(programs(folder), run.compiled)
    return run


def same_end(run: Run, other: Run) -> list[str]:
    """What is not as in the run never stopped: the state's bits, and every loss in the log."""
    problems = []
    if run.newest != other.newest:
        problems.append(f"ended at step {run.newest}, not {other.newest}")
    elif run.leaves_hash() != other.leaves_hash():
        problems.append("the final state is another")
    if losses(run) != losses(other):
        problems.append("the log has other steps or losses")
    return problems


def losses(run: Run) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["tokens"]) for line in run.log() if "loss" in line]


def tree_hash(tree: Any) -> str:
    """SHA-256 over name, dtype, shape and bytes of every leaf."""
    digest = hashlib.sha256()
    leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}
    for name, leaf in sorted(leaves.items()):
        digest.update(f"{name} {leaf.dtype} {leaf.shape}\n".encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def leaves_hash(checkpoint: Path) -> str:
    """`tree_hash` of a checkpoint, by Orbax alone, which cannot read paths with odd names."""
    with tempfile.TemporaryDirectory(prefix="hashed-") as place:
        arrays = shutil.copytree(checkpoint / "arrays", f"{place}/arrays")
        stored = ocp.checkpointables_metadata(arrays).metadata
        like = {
            part: {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
            for part, leaves in stored.items()
        }
        parts = ocp.load_checkpointables(arrays, like)
    return tree_hash({name: leaf for part in parts.values() for name, leaf in part.items()})


def one_line(output: str) -> list[str]:
    """Problems of an error that should be one line, the last, without a traceback."""
    if "Traceback" in output:
        return ["a traceback: " + output.strip().splitlines()[-1]]
    last = output.strip().splitlines()[-1:]
    return [] if last and last[0].startswith("error: ") else [f"no error line, but {last}"]
