"""Memory and compilations over a long stream: python -m benchmarks.stream DIR --source FILE.

Passes the lines of a file through `translate` again and again, as `translate DIR < FILE` does, and
prints after every block what is resident and how many programs XLA has compiled.
"""

import argparse
import io
import itertools
import os
import time
from pathlib import Path

import jax

from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.streams import line_groups, translate_stream
from flaxformer_min.decoding.translator import Translator

COMPILED = "/jax/core/compile/backend_compile_duration"


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", help="a workdir, or one checkpoint")
    parser.add_argument("--source", required=True, help="a file of lines")
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--beam-size", type=int, default=1)
    options = parser.parse_args()
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name)
    )
    translator = Translator.load(options.directory)
    lines = Path(options.source).read_bytes().splitlines(keepends=True)
    stream = b"".join(itertools.islice(itertools.cycle(lines), options.lines))
    began, done = time.perf_counter(), 0
    how = Options(beam_size=options.beam_size)
    groups = line_groups(io.BytesIO(stream), options.source)
    for block in translate_stream(translator, groups, how):
        done += len(block)
        seconds, programs = time.perf_counter() - began, compiled.count(COMPILED)
        text = f"{done:>7,} lines: {resident_mib():,.0f} MiB, {programs} compilations"
        print(f"{text}, {seconds:.0f} s", flush=True)
    assert done == options.lines, done


if __name__ == "__main__":
    main()
