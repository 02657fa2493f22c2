"""The command line: train, plan, translate, score, evaluate, average.

Exit status: 0 done; 2 the user's mistake; 1 what went wrong otherwise; 143 and 130 after SIGTERM
and SIGINT. Whatever can be foreseen is told in one line; a traceback is a bug of this program.
Each verb imports what it needs when it runs, so that --help answers at once.
"""

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from flaxformer_min.errors import UserError
from flaxformer_min.manifest import CheckpointError

LINES_AT_ONCE = 4096  # that translate reads before it writes


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit status."""
    try:
        parser = _make_parser()
        options, rest = parser.parse_known_args(arguments)
        if rest and options.verb not in (train, plan):  # whose other flags override the config
            raise UserError(f"unrecognized: {' '.join(rest)} (see {parser.prog} --help)")
        return options.verb(options, rest) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read our output has seen enough; say nothing at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CheckpointError, FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def train(options: argparse.Namespace, overrides: list[str]) -> int:
    """Trains, or resumes if DIR holds checkpoints."""
    from flaxformer_min.config_file import load_config

    config = load_config(options.config, overrides)
    from flaxformer_min import training

    return training.run(config, Path(options.workdir), profile_steps=options.profile)


def plan(options: argparse.Namespace, overrides: list[str]) -> None:
    """Compiles CONFIG's train step for devices that need not be here: memory, time, collectives."""
    from flaxformer_min.config_file import load_config

    config = load_config(options.config, overrides)
    from flaxformer_min.plan import make_plan
    from flaxformer_min.plan_report import to_json, to_text

    found = make_plan(config, options.topology, options.lengths)
    print(to_json(found) if options.json else to_text(found))


def translate(options: argparse.Namespace, _: list[str]) -> None:
    """Reads standard input, writes one line for each of its lines, in order."""
    from flaxformer_min.parallel import decode_lines
    from flaxformer_min.translate import Translator

    translator = Translator.load(options.dir, options.step)
    lines = decode_lines(sys.stdin.buffer, "standard input")
    first = 1
    while block := list(itertools.islice(lines, LINES_AT_ONCE)):
        translations = translator.translate(
            block,
            beam_size=options.beam_size,
            length_penalty_alpha=options.length_penalty_alpha,
            first_line=first,
        )
        for translation in translations:
            sys.stdout.buffer.write(translation.text.encode() + b"\n")
        sys.stdout.buffer.flush()
        first += len(block)


def score(options: argparse.Namespace, _: list[str]) -> None:
    """Writes the log-probability of each target given its source, one a line, EOS included."""
    from flaxformer_min.translate import Translator

    pairs = list(_pairs(options.source, options.target))
    for log_probability in Translator.load(options.dir, options.step).score(pairs):
        print(log_probability)


def evaluate(options: argparse.Namespace, _: list[str]) -> None:
    """Translates SOURCE, or the config's test split, and writes its BLEU record as JSON."""
    from flaxformer_min.evaluate import evaluate_files

    if (options.source is None) != (options.reference is None):
        raise UserError("--source and --reference belong together: give both or neither")
    pairs = list(_pairs(options.source, options.reference)) if options.source else None
    record = evaluate_files(options.dir, options.step, pairs)
    print(json.dumps(record, indent=2))


def average(options: argparse.Namespace, _: list[str]) -> None:
    """Averages the parameters of the last checkpoints, by step number, in float32."""
    from flaxformer_min.average import average as average_checkpoints

    steps = average_checkpoints(options.dir, options.output, last=options.last)
    print(f"{options.output}: the average of steps {', '.join(map(str, steps))}", file=sys.stderr)


def _pairs(source: str, target: str) -> Iterator[tuple[str, str]]:
    """The pairs of two files; raises UserError naming both if their line counts differ."""
    from flaxformer_min.parallel import read_lines

    sources, targets = list(read_lines(source)), list(read_lines(target))
    if len(sources) != len(targets):
        raise UserError(f"{source} has {len(sources)} lines but {target} has {len(targets)}")
    return zip(sources, targets, strict=True)


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="flaxformer-min", description="The 2017 Transformer.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(function: Callable[..., int | None], *, add_help: bool = True) -> _Parser:
        name, text = function.__name__, function.__doc__
        sub = verbs.add_parser(
            name, help=text, description=text, add_help=add_help, allow_abbrev=False
        )
        sub.set_defaults(verb=function)
        return sub

    def model_verb(function: Callable[..., int | None]) -> _Parser:
        sub = verb(function)
        sub.add_argument("dir", metavar="DIR", help="a workdir, or one checkpoint")
        sub.add_argument("--step", type=_step, help="N, or 'best'; the newest by default")
        return sub

    sub = verb(train, add_help=False)
    sub.epilog = "Every field of the config is a flag too: --model.dropout 0.2"
    sub.add_argument("-h", "--help", action=_TrainHelp, nargs=0, help="after --config: every field")
    sub.add_argument("--config", required=True, help="a Python file, or FILE:VARIANT")
    sub.add_argument("--workdir", required=True, help="where everything of the run is kept")
    sub.add_argument("--profile", type=_count, default=0, metavar="STEPS", help="trace STEPS steps")
    sub = verb(plan)
    sub.epilog = "Every field of the config is a flag too: --model.remat True"
    sub.add_argument("--config", required=True, help="a Python file, or FILE:VARIANT")
    sub.add_argument("--topology", required=True, help="such as v5e:16x16, v5p:4x4x4 or cpu:8")
    sub.add_argument("--lengths", metavar="FILE", help="source and target tokens of a pair a line")
    sub.add_argument("--json", action="store_true", help="write JSON, not a table")
    sub = model_verb(translate)
    sub.add_argument("--beam-size", type=_count, help="1 is greedy; the config's by default")
    sub.add_argument("--length-penalty-alpha", type=_number, help="the config's by default")
    sub = model_verb(score)
    sub.add_argument("--source", required=True)
    sub.add_argument("--target", required=True)
    sub = model_verb(evaluate)
    sub.add_argument("--source", help="lines to translate; the config's test split by default")
    sub.add_argument("--reference", help="their translations")
    sub = verb(average)
    sub.add_argument("dir", metavar="DIR", help="a workdir")
    sub.add_argument("--last", type=_count, default=5, help="how many checkpoints")
    sub.add_argument("--output", required=True, help="the folder to write")
    return parser


class _TrainHelp(argparse.Action):
    """The flags of train and, if --config came before, every field that may follow them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        parser.print_help()
        if namespace.config is not None:
            from flaxformer_min.config_file import load_config

            load_config(namespace.config, ["--help"])
        parser.exit()


def _step(text: str) -> int | Literal["best"]:
    if text == "best":
        return "best"
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a step number nor 'best'")


def _number(text: str) -> float:
    if math.isfinite(number := float(text)):
        return number
    raise argparse.ArgumentTypeError(f"{text} is not finite")


def _count(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
