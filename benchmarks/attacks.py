"""Odd inputs for the command line: each has to end with an allowed status, and errors in one line.

    python -m benchmarks.attacks

It trains a tiny model first, then runs a command for each input (four minutes on two cores) and
prints a line for each; the exit status is 1 if one of them went wrong.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools import tiny_config

ROOT = Path(__file__).parents[1]
USERS, FINE = (2,), (0,)  # allowed statuses: a mistake of the user; all is done
VALUES = {
    "model.d_model": ["nan", "1e3", "0x10", "-2", "", "1000000000000"],
    "model.dropout": ["nan", "1.0", "-0.0001"],
    "model.positions": ["Sinusoidal"],
    "model.share_embeddings": ["true"],
    "model.layer_norm_epsilon": ["0"],
    "model.num_decoder_layers": ["0"],
    "optimizer.peak_learning_rate": ["inf", "1e400"],
    "optimizer.epsilon": ["0"],
    "optimizer.clip_norm": ["nan"],
    "train.steps": ["0", "99999999999999999999"],
    "train.patience": ["0"],
    "train.seed": ["True"],
    "data.train": ["[]"],
    "data.seed": ["4294967296"],
    "data.vocab_size": ["None", "2000000000"],
    "data.num_buckets": ["0"],
    "data.character_coverage": ["0"],
    "decode.length_penalty_alpha": ["nan"],
    "mesh.data": ["3", "0"],
}
CONFIGS = {
    "raises": "1 / 0",
    "exits": "import sys; sys.exit(3)",
    "returns nothing": "def get_config(): return None",
    "is no Python": "def",
    "has no function": "print('x')",
    "calls itself": "def get_config(): return get_config()",
    "holds a NUL": "a = '\0'",
}
LINES = {
    "nothing": b"",
    "NUL, VT, U+2028, an empty line": b"a\0b\n\n\x0b\n\xe2\x80\xa8\n",
    "bidi, joined emoji": "\u202eabc\n👩\u200d👧\n".encode(),
    "jamo, zero width": "\u1112\u1161\u11ab\n\u200b\n".encode(),
    "a word of 1 MB": b"x" * 1_000_000 + b"\n",
    "10,000 blank lines": b"\n" * 10_000,
}
# Flags of translate, and the statuses that are right.
FLAGS = {
    **dict.fromkeys(
        (
            *("--beam-size 0", "--n-best 9", "--temperature 0", "--sample --top-k 0"),
            *("--sample --top-p 1.5", "--no-repeat-ngram-size -1", "--seed -1", "--top-k 5"),
            *("--max-length-offset -1", "--step 007", "--step -1", "--sample --beam-size 3"),
            *("--attention x.txt", "--attention /nonexistent/x.npz", "--prefix /dev/null"),
            *(
                "--min-length 900",
                "--errors maybe",
                "--beam-size 2 --beam-size 3",
                "--interactive=yes",
                "--beam",
            ),
        ),
        USERS,
    ),
    **dict.fromkeys(
        (
            *("--sample --temperature 1e-9", "--sample --temperature 1e9"),
            *("--length-penalty-alpha -5", "--max-length-offset 100000", "--sample --top-k 99999"),
            *("--step best", "--beam-size 100", "--no-repeat-ngram-size 1"),
        ),
        FINE,
    ),
    "--beam-size 100000": (1,),
}
ENVIRONMENTS = {
    **{"LANG": "C", "LC_ALL": "tr_TR.UTF-8", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
    **{"HOME": "/nonexistent", "TMPDIR": "/nonexistent", "TZ": "Mars/Olympus", "COLUMNS": "3"},
    **{"PYTHONWARNINGS": "error", "PYTHONOPTIMIZE": "2", "JAX_DEBUG_NANS": "1"},
    **{"JAX_DEFAULT_MATMUL_PRECISION": "bfloat16", "JAX_DEFAULT_PRNG_IMPL": "rbg"},
    **{"JAX_NUMPY_RANK_PROMOTION": "raise", "JAX_NUM_CPU_DEVICES": "2", "JAX_ENABLE_X64": "1"},
}


@dataclasses.dataclass(frozen=True)
class Attack:
    """A command with its standard input and environment, and the statuses that are right."""

    name: str
    arguments: list[str]
    allowed: tuple[int, ...] = USERS
    stdin: bytes = b""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    lines: int | None = None  # of standard output


def attacks(folder: Path, spec: str, run: str) -> Iterator[Attack]:
    """Yields all attacks. `run` is a trained workdir, in which nothing may be changed."""
    train = ["train", "--config", spec, "--workdir", str(folder / "never")]
    for field, values in VALUES.items():
        for value in values:
            yield Attack(f"--{field} {value}", [*train, f"--{field}", value])
    for name, text in CONFIGS.items():
        path = folder / f"{name.replace(' ', '_')}.py"
        path.write_text(text)
        yield Attack(f"a config that {name}", ["train", "--config", str(path), *train[3:]])
    yield Attack("a folder as config", ["train", "--config", str(folder), *train[3:]])
    for name, stdin in LINES.items():
        yield Attack(name, ["translate", run], FINE, stdin, lines=stdin.count(b"\n"))
    yield Attack("bytes that are not UTF-8", ["translate", run], stdin=b"a cat\n\xff\xfe\n")
    replaced = ["translate", run, "--errors", "replace"]
    yield Attack("bytes to be replaced", replaced, FINE, b"a cat\n\xff\xfe\n", lines=2)
    for flags, allowed in FLAGS.items():
        lines = 1 if allowed == FINE else None
        yield Attack(flags, ["translate", run, *flags.split()], allowed, b"a cat\n", lines=lines)
    for name, value in ENVIRONMENTS.items():
        yield Attack(
            f"{name}={value}", ["translate", run], FINE, b"a cat\ndogs\n", {name: value}, lines=2
        )
    text, output = str(folder / "train.en"), ["--output", str(folder / "out")]
    yield Attack("score of no file", ["score", run, "--source", "/no", "--target", "/no"])
    yield Attack("evaluate without reference", ["evaluate", run, "--source", text])
    yield Attack("average of 0", ["average", run, "--last", "0", *output])
    yield Attack("average of 99", ["average", run, "--last", "99", *output])
    yield Attack("average into the run", ["average", run, "--output", f"{run}/checkpoints/7"])
    yield Attack("export over a folder", ["export", "safetensors", run, "--output", str(folder)])
    yield Attack("export too long", ["export", "stablehlo", run, "--length", "9999", *output])
    yield Attack("export of nothing", ["export", "marian", str(folder), *output])
    yield Attack("import of nothing", ["import", "marian", str(folder), *output])
    yield Attack("an unknown slice", ["plan", "--config", spec, "--topology", "v99:2x2"])
    yield Attack("no devices", ["plan", "--config", spec, "--topology", "cpu:0"])


def problems(attack: Attack, folder: Path) -> list[str]:
    """Runs the command; returns what is wrong."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    done = subprocess.run(
        [sys.executable, "-m", "flaxformer_min", *attack.arguments],
        input=attack.stdin, capture_output=True, env=environment | attack.environment,
        cwd=folder, timeout=600, check=False,
    )  # fmt: skip
    errors = done.stderr.decode(errors="replace").strip().splitlines() or [""]
    found = []
    if done.returncode not in attack.allowed:
        found.append(f"status {done.returncode}, and not {attack.allowed}: {errors[-1]}")
    if any("Traceback" in line for line in errors):
        found.append(f"a traceback: {errors[-1]}")
    if done.returncode and not errors[-1].startswith("error: "):
        found.append(f"no error at the end: {errors[-1]}")
    if attack.lines not in (None, done.stdout.count(b"\n")):
        found.append(f"{len(done.stdout.splitlines())} lines, and not {attack.lines}")
    if (folder / "never").exists() or (folder / "out").exists():
        found.append("something was left behind")
    return found


def main() -> int:
    failed = count = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tiny_config.write_corpus(folder)
        spec, run = f"{tiny_config.__file__}:{folder}", str(folder / "run")
        trained = Attack("train", ["train", "--config", spec, "--workdir", run], FINE)
        assert not problems(trained, folder)
        for attack in attacks(folder, spec, run):
            found = problems(attack, folder)
            count, failed = count + 1, failed + bool(found)
            print("WRONG" if found else "right", attack.name, "; ".join(found), flush=True)
    print(f"{count - failed} of {count} right")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
