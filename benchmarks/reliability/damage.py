"""3: flipped bits, and files cut, emptied and deleted: never used, always named."""

import logging
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.reliability.runs import Run, config_of, reference, size
from benchmarks.reliability.tally import Tally
from flaxformer_min.checkpoints.load import load_for_inference
from flaxformer_min.checkpoints.store import Checkpoints
from flaxformer_min.errors import UserError
from flaxformer_min.system.sealed import MANIFEST, CheckpointError
from flaxformer_min.training.prepared_data import prepare_data

Damage = Callable[[Path], object]


class _Warnings(logging.Handler):
    """What the program warned of, as one text."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def damage(folder: Path, short: bool, seed: int) -> Tally:
    """Damages the newest of two checkpoints and asks for it, and for the newest good one."""
    tally, draw = Tally("damage"), random.Random(seed)
    whole = reference(folder, size(short))
    run = Run(folder / "damaged", folder, whole.size)
    shutil.copytree(whole.workdir, run.workdir)
    newest = run.newest_folder
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    full = [path for path in files if path.stat().st_size > 0]
    reader = _Reader(folder, run)
    for number in range(40 if short else 1000):
        path = full[number % len(full)]
        place, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
        name = f"{path.relative_to(newest)}, byte {place}, bit {bit}"
        tally.trial(name, reader.problems(path, partial(_flip, place=place, bit=bit)), seen="bits")
    for path in files:
        for damage in [_halve, _empty] * (path in full) + [Path.unlink]:
            name = f"{path.relative_to(newest)} {damage.__name__}"
            seen = f"files {damage.__name__.strip('_')}"
            tally.trial(name, reader.problems(path, damage), seen=seen)
    tally.trial("restored", [] if reader.good() else ["the whole checkpoint is not read"])
    return tally


class _Reader:
    """Reads a damaged checkpoint as inference and as a resumed run would."""

    def __init__(self, folder: Path, run: Run) -> None:
        config = config_of(folder, run.size)
        tokenizer = prepare_data(config, run.workdir).tokenizer
        self._run, self._newest = run, run.newest
        self._checkpoints = Checkpoints(run.workdir, config, tokenizer)
        self._warnings, log = _Warnings(), logging.getLogger("flaxformer_min")
        log.addHandler(self._warnings)
        log.propagate = False

    def good(self) -> bool:
        """Whether both read the newest checkpoint."""
        loaded = load_for_inference(self._run.workdir)
        return self._checkpoints.latest_good() == loaded.step == self._newest

    def problems(self, path: Path, damage: Damage) -> list[str]:
        """What is wrong with the answers while the file is damaged."""
        content = path.read_bytes()
        damage(path)
        try:
            return [*self._asked_for(path), *self._passed_by(path)]
        finally:
            path.write_bytes(content)

    def _asked_for(self, path: Path) -> list[str]:
        folder = self._run.newest_folder
        try:
            load_for_inference(folder)
        except CheckpointError as error:
            return [] if str(path) in str(error) else [f"not named: {error}"]
        except UserError as error:  # without a manifest it is no checkpoint at all
            return [] if path.name == MANIFEST and not path.exists() else [f"user error: {error}"]
        return ["read without a word"]

    def _passed_by(self, path: Path) -> list[str]:
        self._warnings.text = ""
        try:
            step = self._checkpoints.latest_good()
        except (CheckpointError, UserError) as error:
            return [f"the newest good one was not found: {error}"]
        problems = [] if step is not None and step < self._newest else [f"step {step} was taken"]
        return (
            problems
            if str(path) in self._warnings.text
            else [*problems, "no warning names the file"]
        )


def _flip(path: Path, place: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def _halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")
