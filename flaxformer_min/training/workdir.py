"""A run's workdir: which run it belongs to, and which process may work in it now.

config.json      the run's config; it may be replaced as long as there is no checkpoint
lock             held by the process that works in the workdir
tokenizer.model  the run's tokenizer           \\ training/prepared_data.py
corpus.json      pairs read, kept, dropped     /
corpus/          token ids, only of a run of several processes, or if data.cache says so
checkpoints/     checkpoints/store.py
metrics.jsonl    training/log.py
"""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

from flaxformer_min.checkpoints.retention import FOLDER, find_checkpoints
from flaxformer_min.config import Config
from flaxformer_min.config_rules import check_resume, config_from_json, config_to_json
from flaxformer_min.errors import UserError
from flaxformer_min.system.files import locked, replace_file
from flaxformer_min.system.processes import is_first
from flaxformer_min.system.sealed import refuse_name, remove

CONFIG, TOKENIZER, CORPUS, CACHE = "config.json", "tokenizer.model", "corpus.json", "corpus"
LOCK, METRICS, TENSORBOARD = "lock", "metrics.jsonl", "tensorboard"
# What a start makes before its first step.
MADE = (FOLDER, CONFIG, TOKENIZER, CORPUS, CACHE, LOCK, METRICS, TENSORBOARD)


@contextlib.contextmanager
def hold(workdir: Path, config: Config) -> Generator[None, None, None]:
    """A context in which no other run can work in the workdir, which is made if it is missing.

    In a run of several processes, process 0 holds it for all. Raises UserError if another process
    holds it, if its path cannot hold a checkpoint, and for the reasons of `claim`.
    """
    if not is_first():
        yield
        return
    refuse_name(workdir)
    for path in (workdir, workdir / FOLDER, workdir / CACHE):
        if path.is_symlink() and not path.exists():
            target = path.readlink()
            raise UserError(f"{path}: is a link to {target}, which is not there; mend or remove it")
    _read_config(workdir)  # refuses a directory of another program before changing it
    made = [workdir / name for name in MADE] + [workdir, *workdir.parents]
    new = [path for path in made if not os.path.lexists(path)]
    with contextlib.ExitStack() as stack:
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(workdir / LOCK, wait=False))
            stack.enter_context(_without(new, workdir))
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"--workdir {workdir}: is a file; give a directory") from None
        except BlockingIOError:
            raise UserError(
                f"--workdir {workdir}: another run is at work in it; wait for it or use another"
            ) from None
        claim(workdir, config)
        yield


@contextlib.contextmanager
def _without(new: list[Path], workdir: Path) -> Generator[None, None, None]:
    """A context that holds the lock; if the run cannot begin, the `new` files and folders go.

    After a mistake of the user, or an error of a disk, the next start then finds what this one
    found. A run that has logged a step, and one that was stopped, leave what they have.
    """
    try:
        yield
    except (UserError, OSError):
        log = workdir / METRICS
        if not resumes(workdir) and not (log.is_file() and log.stat().st_size):
            with contextlib.suppress(OSError):  # a folder into which somebody put a file stays
                for path in new:
                    if path in (workdir, *workdir.parents):
                        path.rmdir()
                    else:
                        remove(path)
        raise


def claim(workdir: Path, config: Config) -> None:
    """Makes a workdir belong to the run of this config.

    If it has checkpoints, they must be of a run that this config may resume. If it has none, the
    tokenizer, corpus report and config that an earlier start left are deleted or replaced.

    Raises UserError naming the field that differs, or the file that shows that it is no run's
    workdir.
    """
    before = _read_config(workdir)
    if before is not None and resumes(workdir):
        check_resume(before, config)
    else:
        for name in (TOKENIZER, CORPUS):
            (workdir / name).unlink(missing_ok=True)
        write_config(workdir, config)  # the first file, because it marks the workdir as a run's


def resumes(workdir: Path) -> bool:
    """Whether a run in this workdir resumes from a checkpoint."""
    return bool(find_checkpoints(workdir / FOLDER))


def write_config(workdir: Path, config: Config) -> None:
    """Writes config.json; a run that resumes calls this when nothing can be refused any more."""
    replace_file(workdir / CONFIG, config_to_json(config).encode())


def _read_config(workdir: Path) -> Config | None:
    """Returns the config of the workdir's run, or None if it has none yet.

    Raises UserError for a directory that is no workdir.
    """
    path = workdir / CONFIG
    if not path.exists():
        for name in (FOLDER, TOKENIZER):
            if (workdir / name).exists():
                raise UserError(f"{workdir}: has {name} but no {CONFIG}; use another --workdir")
        return None
    try:
        return config_from_json(path.read_text(encoding="utf-8"))
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}; use another --workdir") from None
