"""10: workdirs with odd names, and parts of a workdir that are links to elsewhere."""

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.reliability.runs import ROOT, Run, Size, environment, programs, reference, same_end
from benchmarks.reliability.tally import Tally

SIZE = Size(30, 15, 5, buckets=1, devices=1)
NAMES = [
    "x[1]",
    "a*b?",
    "back\\slash",
    "two words",
    "Пушкин 日本",
    'it\'s "q"',
    "~",
    "50%#:=",
    "-v",
]
LINKED = ["checkpoints/5", "checkpoints", "."]


def places(folder: Path, short: bool, seed: int) -> Tally:
    """Each run is stopped after a checkpoint, goes on, and is averaged and translated with."""
    tally = Tally("places")
    never_stopped = reference(folder, SIZE)
    for number, name in enumerate(NAMES[:1] if short else NAMES):
        run = Run(folder / f"place-{number}" / name / "run", folder, SIZE)
        problems = [*_through(run, never_stopped), *_used(run, name)]
        tally.trial(repr(name), problems, seen="names")
    for number, part in enumerate([] if short else LINKED):
        run = Run(folder / f"linked-{number}" / "run", folder, SIZE)
        tally.trial(f"link {part}", _through(run, never_stopped, linked=part), seen="links")
    return tally


def _through(run: Run, never_stopped: Run, linked: str | None = None) -> list[str]:
    """Kills a run after two checkpoints, puts a link in the place of a part, lets it go on."""
    run.workdir.parent.mkdir(parents=True)
    cache = {"JAX_COMPILATION_CACHE_DIR": str(programs(run.folder))}
    start = run.start(**cache)
    start.wait_until(lambda: len(run.counted()) >= 2)
    start.kill()
    elsewhere = run.workdir.parent / "elsewhere"
    if linked is not None:
        part = (run.workdir / linked).absolute()
        shutil.move(part, elsewhere)
        part.symlink_to(elsewhere)
        before = _names(elsewhere)
    start = run.finish(**cache)
    problems = [] if start.process.returncode == 0 else [start.output()]
    problems += [*same_end(run, never_stopped), *run.damaged()]
    if linked == "checkpoints/5" and _names(elsewhere) != before:
        problems.append("what the link pointed to is not as it was")
    return problems


def _used(run: Run, name: str) -> list[str]:
    """Averages and translates; the average has an odd name too."""
    averaged = run.workdir.with_name(f"averaged {name}")
    average = _command("average", str(run.workdir), "--last", "2", "--output", str(averaged))
    translate = _command("translate", str(averaged), lines="a cat\ndogs\n")
    problems = [done.stderr for done in (average, translate) if done.returncode]
    if translate.stdout.count("\n") != 2:
        problems.append(f"two lines became {translate.stdout!r}")
    return problems


def _command(*arguments: str, lines: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flaxformer_min", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment(1), input=lines, capture_output=True, text=True
    )


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))
