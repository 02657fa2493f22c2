"""Several processes on this machine beside one: the same numbers, and how they end together.

    python -m benchmarks.distributed [--processes 2 4] [--workdir DIR]

Trains the tiny model on 13 pairs, with 5 lines to evaluate, and prints a line for each case
as it is done. Silence is the program's own (60 seconds), so all of it takes minutes.
"""

import argparse
import itertools
import signal
import tempfile
from pathlib import Path

from tools import tiny_config
from tools.processes import Accident, Ended, launch, metrics, worst_difference

FLAGS = "--data.vocab_size 285 --train.evaluate_every 20 --train.checkpoint_every 20"
FLAGS = [*FLAGS.split(), "--decode.bleu_tokenize", "char", "--train.steps"]
STEPS = "40"


def told(ended: list[Ended]) -> str:
    """Status and seconds of each process, and what the first that survived said in the end."""
    each = ", ".join(f"{e.status} after {e.seconds:.0f} s" for e in ended)
    said = [e.errors for e in ended if e.status not in (None, -signal.SIGKILL)]
    lines = [line for line in "".join(said).splitlines() if line.startswith(("error:", "F"))]
    return f"status {each}: {lines[0] if lines else 'no error'}"


def compared(one: Path, other: Path, steps: int) -> str:
    """The losses of two runs side by side, their BLEU records being the same."""
    bleu = [line["bleu"]["score"] for line in metrics(other) if "bleu" in line]
    worst = worst_difference(one, other)
    return f"{steps} steps: losses within {worst:.1e} of one process's; BLEU the same: {bleu}"


def same_numbers(corpus: Path, root: Path, counts: list[int]) -> None:
    """Whole runs, and runs that are stopped and go on with another number of processes."""
    for count in counts:
        ended = launch(corpus, root / str(count), count, *FLAGS, STEPS)
        print(f"{count} processes:", [e.status for e in ended], flush=True)
        print(f"  {compared(root / '1', root / str(count), int(STEPS))}", flush=True)
    for first, then in itertools.permutations([1, *counts], 2):
        workdir = root / f"{first} then {then}"
        launch(corpus, workdir, first, *FLAGS, "20")
        ended = launch(corpus, workdir, then, *FLAGS, STEPS)
        print(f"{first} processes, then {then}:", [e.status for e in ended], flush=True)
        print(f"  {compared(root / '1', workdir, int(STEPS))}", flush=True)


def endings(corpus: Path, root: Path, counts: list[int]) -> None:
    """A process is killed or stopped; one or all are asked to stop."""
    for count in counts:
        for number, hit in itertools.product((signal.SIGKILL, signal.SIGSTOP), (count - 1, 0)):
            workdir = root / f"{number.name} {hit} of {count}"
            accident = Accident(hit, 10, number)
            ended = launch(corpus, workdir, count, *FLAGS, STEPS, accidents=[accident])
            print(f"{number.name} to {hit} of {count} processes: {told(ended)}", flush=True)
        for hit in ([0], [count - 1], range(count)):
            workdir = root / f"SIGTERM {list(hit)} of {count}"
            accidents = [Accident(process, 10 + process, signal.SIGTERM) for process in hit]
            ended = launch(corpus, workdir, count, *FLAGS, STEPS, accidents=accidents)
            steps = sorted(path.name for path in (workdir / "checkpoints").iterdir())
            print(f"SIGTERM to {list(hit)} of {count} processes: {told(ended)}", flush=True)
            print(f"  last step {metrics(workdir)[-1]['step']}, checkpoints {steps}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--workdir", type=Path, help="a new folder; a temporary one by default")
    parser.add_argument("--only", choices=["numbers", "endings"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = (options.workdir or Path(temporary)).absolute()
        corpus = root / "corpus"
        corpus.mkdir(parents=True)
        tiny_config.write_corpus(corpus, train=13, validation=5)
        if options.only != "endings":
            launch(corpus, root / "1", 1, *FLAGS, STEPS)
            same_numbers(corpus, root, options.processes)
        if options.only != "numbers":
            endings(corpus, root, options.processes)


if __name__ == "__main__":
    main()
