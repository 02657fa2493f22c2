"""9: mutated files: refused in one line, no crash of the interpreter, no code of theirs run."""

import json
import pickle
import random
import select
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.reliability.runs import ROOT, Run, config_spec, environment, reference, size
from benchmarks.reliability.tally import Tally
from flaxformer_min.system.sealed import MANIFEST, seal

LONG = {"checkpoint": 800, "sealed checkpoint": 300, "workdir": 300, "tokenizer": 600}
SHORT = {"checkpoint": 12, "sealed checkpoint": 6, "workdir": 6, "tokenizer": 12}
PATIENCE = 120  # seconds for one file
# The files to mutate, where not all are.
OURS = {"workdir": ("config.json", "corpus.json", "tokenizer.model")}


def hostile(folder: Path, short: bool, seed: int) -> Tally:
    """Mutates one file at a time and opens what it belongs to in a process that may die."""
    tally, draw = Tally("hostile"), random.Random(seed)
    whole = reference(folder, size(short))
    canary = folder / "canary"
    payloads = _payloads(canary)
    with _Opener(folder, whole) as opener:
        for how, count in (SHORT if short else LONG).items():
            for number in range(count):
                path, name = _mutated(how, whole, folder / "hostile", payloads, draw)
                outcome, message = opener.ask(how, path)
                problems = _judged(outcome, message, canary)
                tally.trial(f"{how} {number}: {name}", problems, seen=f"{how} {outcome}")
        tally.notes.append(f"{opener.deaths} deaths of the opening process")
    return tally


def _judged(outcome: str, message: str, canary: Path) -> list[str]:
    problems = [] if outcome in ("read", "refused") else [f"{outcome}: {message}"]
    if outcome == "refused" and (not message or "\n" in message):
        problems.append(f"not one line: {message!r}")
    if canary.exists():
        problems.append("its code was run")
        canary.unlink()
    return problems


def _mutated(
    how: str, whole: Run, to: Path, payloads: list[bytes], draw: random.Random
) -> tuple[Path, str]:
    """A copy with one file changed, and what was done to it."""
    shutil.rmtree(to, ignore_errors=True)
    if how == "tokenizer":
        to.mkdir()
        shutil.copy(whole.workdir / "tokenizer.model", to)
    elif how == "workdir":
        shutil.copytree(whole.workdir, to, ignore=shutil.ignore_patterns("tensorboard"))
    else:
        shutil.copytree(whole.newest_folder, to)
    files = [to / name for name in OURS[how]] if how in OURS else sorted(to.rglob("*"))
    file = draw.choice([path for path in files if path.is_file() and path.stat().st_size])
    before, mutation = file.read_bytes(), draw.choice(MUTATIONS)
    while (after := mutation(before, payloads, draw)) == before:
        pass
    file.write_bytes(after)
    if how == "sealed checkpoint":
        (to / MANIFEST).unlink()
        seal(to)
    name = f"{mutation.__name__.strip('_')} of {file.relative_to(to)}"
    return file if how == "tokenizer" else to, name


# Each takes (content, payloads, draw) and returns another content.


def _bit(content: bytes, _: list[bytes], draw: random.Random) -> bytes:
    changed = bytearray(content)
    changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _noise(content: bytes, _: list[bytes], draw: random.Random) -> bytes:
    changed = bytearray(content)
    for place in draw.choices(range(len(content)), k=draw.randint(2, 20)):
        changed[place] = draw.randrange(256)
    return bytes(changed)


def _cut(content: bytes, _: list[bytes], draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def _hole(content: bytes, _: list[bytes], draw: random.Random) -> bytes:
    begin, end = sorted(draw.choices(range(len(content) + 1), k=2))
    return content[:begin] + content[end:]


def _twice(content: bytes, _: list[bytes], draw: random.Random) -> bytes:
    begin, end = sorted(draw.choices(range(len(content) + 1), k=2))
    return content[:end] + content[begin:]


def _length(content: bytes, _: list[bytes], draw: random.Random) -> bytes:
    """A number where one was, or none: as protobuf, as JSON, as eight bytes."""
    absurd = [b"\xff\xff\xff\xff\xff\xff\xff\x7f", b"\xff" * 9 + b"\x01", b"9" * 400, b"1e999"]
    place = draw.randrange(len(content))
    digits = [i for i, byte in enumerate(content) if byte in b"0123456789"]
    if digits and draw.random() < 0.5:
        place = draw.choice(digits)
    return content[:place] + draw.choice(absurd) + content[place + draw.randint(0, 8) :]


def _nested(content: bytes, _: list[bytes], draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + draw.choice([b"[", b'{"a":', b"\x0a"]) * 100_000 + content[place:]


def _payload(content: bytes, payloads: list[bytes], draw: random.Random) -> bytes:
    """Code that would leave a canary, in place of the file, or of a string in it."""
    payload = draw.choice(payloads)
    strings = [i for i, byte in enumerate(content) if byte == ord('"')][:-1]
    if not strings or draw.random() < 0.3:
        return payload
    place = draw.choice(strings) + 1
    text = json.dumps(payload.decode("latin-1"))[1:-1].encode()
    return content[:place] + text + content[content.index(b'"', place) :]


MUTATIONS: tuple[Callable[[bytes, list[bytes], random.Random], bytes], ...] = (
    _bit,
    _noise,
    _cut,
    _hole,
    _twice,
    _length,
    _nested,
    _payload,
)


def _payloads(canary: Path) -> list[bytes]:
    """Ways to say: make the canary."""
    command = f"touch {canary}"

    class Touch:
        def __reduce__(self) -> tuple[Callable, tuple[str]]:
            import os

            return os.system, (command,)

    python = f"__import__('os').system({command!r})"
    texts = [
        python,
        f"${{{python}}}",
        f"!!python/object/apply:os.system [{command!r}]",
        json.dumps({"py/reduce": [{"py/function": "os.system"}, [command]]}),
        f"$({command})",
    ]
    return [pickle.dumps(Touch(), 0), pickle.dumps(Touch()), *(text.encode() for text in texts)]


class _Opener:
    """A process that opens files; another takes its place when it dies or does not answer."""

    def __init__(self, folder: Path, whole: Run) -> None:
        self.deaths = 0
        self._arguments = [config_spec(folder), *whole.size.flags]
        self._output = (folder / "opener.txt").open("w")

    def __enter__(self) -> "_Opener":
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._output.close()

    def ask(self, how: str, path: Path) -> tuple[str, str]:
        """What the process says of it, or how it ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps([how, str(path)]) + "\n")
        stdin.flush()
        ready, _, _ = select.select([stdout], [], [], PATIENCE)
        if line := stdout.readline() if ready else "":
            outcome, message = json.loads(line)
            return outcome, message
        self._process.kill() if not ready else None
        status = self._process.wait()
        self.deaths += 1
        self._begin()
        return ("died", f"with status {status}") if ready else ("hung", f"for {PATIENCE} s")

    def _begin(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.reliability.opener", *self._arguments],
            cwd=ROOT,
            env=environment(1),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
        )
