"""The command line: train, plan, translate, score, evaluate, average.

Exit status: 0 done; 2 the user's mistake; 1 what went wrong otherwise; 143 and 130 after SIGTERM
and SIGINT. Whatever can be foreseen is told in one line; a traceback is a bug of this program.
Each verb imports what it needs when it runs, so that --help answers at once.
"""

import argparse
import contextlib
import dataclasses
import gc
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, cast, get_args

from flaxformer_min.decoding.options import IN_CONFIG, Options
from flaxformer_min.errors import UserError
from flaxformer_min.system.sealed import CheckpointError


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit status."""
    # Importing and tracing make millions of objects and hardly any garbage; looking for it after
    # every 700, as Python does, takes a tenth of a start.
    gc.set_threshold(20_000)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = unraisable
    try:
        parser = _make_parser()
        options, rest = parser.parse_known_args(arguments)
        if rest and options.verb not in (train, plan):  # whose other flags override the config
            raise UserError(f"unrecognized: {' '.join(rest)} (see {parser.prog} --help)")
        return options.verb(options, rest) or 0
    except BrokenPipeError:  # whoever read our output has seen enough; say nothing at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, KeyboardInterrupt) as error:
        text, status = told(error)
        if text is not None:
            print(f"error: {text}", file=sys.stderr)
        return status


def unraisable(event: Any) -> None:
    """Python's own hook, but silent about threads that come back to an event loop that is over.

    After a failed save or restore tensorstore's do, dozens of times; the failure is told by itself.
    """
    if str(event.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(event)


def told(error: BaseException) -> tuple[str | None, int]:
    """The line for an error that can be foreseen, and the exit status; raises any other again."""
    if isinstance(error, UserError):
        return str(error), 2
    if isinstance(error, CheckpointError | FloatingPointError | OSError):
        return str(error), 1
    if isinstance(error, KeyboardInterrupt):
        return None, 130
    raise error


def train(options: argparse.Namespace, overrides: list[str]) -> int:
    """Trains, or resumes if DIR holds checkpoints."""
    from flaxformer_min.config_file import load_config

    config = load_config(options.config, overrides)
    from flaxformer_min.system import failures as ending
    from flaxformer_min.system import malloc as heap
    from flaxformer_min.system import processes as distributed
    from flaxformer_min.training import loop as training

    heap.keep_work_space()
    distributed.initialize(options.coordinator, options.processes, options.process)
    workdir = Path(options.workdir)
    return ending.together(
        lambda: training.run(config, workdir, profile_steps=options.profile), told
    )


def plan(options: argparse.Namespace, overrides: list[str]) -> None:
    """Compiles CONFIG's train step for devices that need not be here: memory, time, collectives."""
    from flaxformer_min.config_file import load_config

    config = load_config(options.config, overrides)
    from flaxformer_min.planning.plan import make_plan
    from flaxformer_min.planning.report import to_json, to_text

    found = make_plan(config, options.topology, options.lengths)
    print(to_json(found) if options.json else to_text(found))


def translate(options: argparse.Namespace, _: list[str]) -> None:
    """Reads standard input, writes one line for each of its lines, in order."""
    from flaxformer_min.decoding.attention_file import attention_file
    from flaxformer_min.decoding.streams import translate_stream
    from flaxformer_min.decoding.translator import Translator

    if options.average_heads and options.attention is None:
        raise UserError("--average-heads belongs to --attention FILE: give both or neither")
    file = contextlib.nullcontext()
    if options.attention is not None:
        file = attention_file(options.attention, average_heads=options.average_heads)
    with file as write:
        groups = translate_stream(
            Translator.load(*options.dir, step=options.step),
            cast(io.BufferedIOBase, sys.stdin.buffer),
            dataclasses.replace(_search_options(options), attention=write is not None),
            errors=options.errors,
            one_by_one=options.interactive,
            prefix=options.prefix,
            as_json="n_best" in options,
            write_attention=write,
        )
        for lines in groups:
            sys.stdout.buffer.write("".join(line + "\n" for line in lines).encode())
            sys.stdout.buffer.flush()


def score(options: argparse.Namespace, _: list[str]) -> None:
    """Writes the log-probability of each target given its source, one a line, EOS included."""
    from flaxformer_min.decoding.translator import Translator

    pairs = list(_pairs(options.source, options.target))
    translator = Translator.load(*options.dir, step=options.step)
    if not options.per_token:
        for log_probability in translator.score(pairs):
            print(log_probability)
        return
    for scored in translator.score_tokens(pairs):
        pieces = translator.tokenizer.pieces(scored.tokens)
        row = {"tokens": pieces, "log_probs": scored.log_probs}
        print(json.dumps({"score": math.fsum(scored.log_probs), **row}))


def evaluate(options: argparse.Namespace, _: list[str]) -> None:
    """Translates SOURCE, or the config's test split, and writes its BLEU record as JSON."""
    from flaxformer_min.data.sources import read_pairs
    from flaxformer_min.decoding.evaluate import evaluate as evaluate_pairs
    from flaxformer_min.decoding.translator import Translator

    if (options.source is None) != (options.reference is None):
        raise UserError("--source and --reference belong together: give both or neither")
    pairs = list(_pairs(options.source, options.reference)) if options.source else None
    translator = Translator.load(*options.dir, step=options.step)
    if pairs is None:
        data = translator.config.data
        pairs = list(read_pairs(data, data.test))
    print(json.dumps(evaluate_pairs(translator, pairs, _search_options(options)), indent=2))


def average(options: argparse.Namespace, _: list[str]) -> None:
    """Averages the parameters of the last checkpoints, by step number, in float32."""
    from flaxformer_min.checkpoints.average import average as average_checkpoints

    steps = average_checkpoints(options.dir, options.output, last=options.last)
    print(f"{options.output}: the average of steps {', '.join(map(str, steps))}", file=sys.stderr)


def _pairs(source: str, target: str) -> Iterator[tuple[str, str]]:
    """The pairs of two files; raises UserError naming both if their line counts differ."""
    from flaxformer_min.data.lines import read_lines

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
        several = "a workdir, or one checkpoint; several are an ensemble"
        sub.add_argument("dir", nargs="+", metavar="DIR", help=several)
        sub.add_argument("--step", type=_step, help="N, or 'best'; the newest by default")
        return sub

    sub = verb(train, add_help=False)
    sub.epilog = "Every field of the config is a flag too: --model.dropout 0.2"
    sub.add_argument("-h", "--help", action=_TrainHelp, nargs=0, help="after --config: every field")
    sub.add_argument("--config", required=True, help="a Python file, or FILE:VARIANT")
    sub.add_argument("--workdir", required=True, help="where everything of the run is kept")
    sub.add_argument("--profile", type=_count, default=0, metavar="STEPS", help="trace STEPS steps")
    _add_distributed_flags(sub)
    sub = verb(plan)
    sub.epilog = "Every field of the config is a flag too: --model.remat True"
    sub.add_argument("--config", required=True, help="a Python file, or FILE:VARIANT")
    sub.add_argument("--topology", required=True, help="such as v5e:16x16, v5p:4x4x4 or cpu:8")
    sub.add_argument("--lengths", metavar="FILE", help="source and target tokens of a pair a line")
    sub.add_argument("--json", action="store_true", help="write JSON, not a table")
    sub = model_verb(translate)
    _add_search_flags(sub, [field.name for field in dataclasses.fields(Options)])
    _add_translate_flags(sub)
    sub = model_verb(score)
    sub.add_argument("--source", required=True)
    sub.add_argument("--target", required=True)
    sub.add_argument("--per-token", action="store_true", help="JSON, with every token's")
    sub = model_verb(evaluate)
    _add_search_flags(sub, IN_CONFIG)
    sub.add_argument("--source", help="lines to translate; the config's test split by default")
    sub.add_argument("--reference", help="their translations")
    sub = verb(average)
    sub.add_argument("dir", metavar="DIR", help="a workdir")
    sub.add_argument("--last", type=_count, default=5, help="how many checkpoints")
    sub.add_argument("--output", required=True, help="the folder to write")
    return parser


def _add_distributed_flags(parser: _Parser) -> None:
    parser.add_argument(
        "--distributed.coordinator",
        dest="coordinator",
        metavar="HOST:PORT",
        help="where process 0 of several listens; SLURM and TPU pods need none of these",
    )
    parser.add_argument(
        "--distributed.processes",
        dest="processes",
        type=_count,
        metavar="N",
        help="how many there are",
    )
    parser.add_argument(
        "--distributed.process",
        dest="process",
        type=_whole,
        metavar="I",
        help="which of them this is, from 0",
    )


def _add_search_flags(parser: _Parser, names: Sequence[str]) -> None:
    """The flags of these fields of Options; one that is not given leaves no trace."""
    for field in dataclasses.fields(Options):
        about = field.metadata
        if field.name not in names or about["help"] is None:
            continue
        how: dict[str, Any] = {"type": _count, "metavar": about["metavar"]}
        if field.type is bool:
            how = {"action": argparse.BooleanOptionalAction if field.default else "store_true"}
        elif float in (field.type, *get_args(field.type)):
            how["type"] = _number
        elif "from zero" in about:
            how["type"] = int
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, default=argparse.SUPPRESS, help=about["help"], **how)


def _add_translate_flags(parser: _Parser) -> None:
    flag = parser.add_argument
    flag("--prefix", metavar="FILE", help="how each translation begins, a line for each line")
    flag("--attention", metavar="FILE", help="attention weights of every line: .npz or .jsonl")
    flag("--average-heads", action="store_true", help="of --attention: the mean, labelled so")
    flag("--errors", choices=("strict", "replace"), default="strict", help="of invalid UTF-8")
    flag("--interactive", action="store_true", help="answer line by line")


def _search_options(options: argparse.Namespace) -> Options:
    """The options whose flags were given; the defaults hold for all others."""
    names = {field.name for field in dataclasses.fields(Options) if field.metadata["help"]}
    return Options(**{name: value for name, value in vars(options).items() if name in names})


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


def _whole(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number")


def _count(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
