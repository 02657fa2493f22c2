"""From the command to the first step, cold and warm: python -m benchmarks.startup [--data-dir DIR].

Starts `train.py` with the recipe configs/multi30k_en_de.py:cpu (the demo without --data-dir), waits
until metrics.jsonl has its first step, and kills it. Cold is an empty workdir and empty caches of
text and programs: tokenizer, corpus and programs are made. Warm is the same again, with all of
these there. The yardstick is an interpreter that imports jax, flax and orbax and ends; starts and
imports take turns.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMPORTS = "import flax.nnx, jax, orbax.checkpoint"


def first_step(config: str, workdir: Path, *flags: str) -> float:
    """Seconds until the first step is in the log."""
    log = workdir / "metrics.jsonl"
    log.unlink(missing_ok=True)
    command = [sys.executable, "train.py", "--config", config, "--workdir", str(workdir), *flags]
    # With one step in all its numbers are written down at once, not after the next is on its way.
    command += ["--train.steps", "1"]
    began = time.perf_counter()
    caches = {"JAX_COMPILATION_CACHE_DIR": "compiled", "XDG_CACHE_HOME": "cache"}
    environ = os.environ | {name: str(workdir.parent / to) for name, to in caches.items()}
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)
    while not (log.exists() and '"loss"' in log.read_text()):
        if process.poll() is not None:
            assert process.stderr is not None
            sys.exit(process.stderr.read())
        time.sleep(0.005)
    seconds = time.perf_counter() - began
    process.kill()
    process.communicate()
    return seconds


def imports() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", help="where Multi30k is; the built-in corpus by default")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    config, flags = "configs/demo.py", []
    if options.data_dir:
        config, flags = "configs/multi30k_en_de.py:cpu", ["--data.dir", options.data_dir]
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder) / "run"
        print(f"cold: {first_step(config, workdir, *flags):.1f} s")
        turns = [(imports(), first_step(config, workdir, *flags)) for _ in range(options.rounds)]
    bare, warm = (statistics.median(column) for column in zip(*turns, strict=True))
    ratios = sorted(start / bare for bare, start in turns)
    print(f"warm: {warm:.1f} s; bare imports: {bare:.1f} s")
    print(f"ratio: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
