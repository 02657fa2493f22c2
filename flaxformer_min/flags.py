"""The flags of every verb, and the types of what follows them.

A mistake in them is one line that names the flag, like every mistake of the user.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NoReturn, get_args

from flaxformer_min import __version__
from flaxformer_min.decoding.options import IN_CONFIG, Options
from flaxformer_min.errors import UserError, local_path

RECIPE = "a recipe such as demo or wmt14_en_de:base, or FILE.py, or FILE.py:VARIANT"
TRANSLATIONS = "a file of translations, one for each line of SOURCE"
DIGITS = 19  # a number of so many digits is a mistake


class _Once(argparse.Action):
    """Stores the value of a flag, which must not be given twice."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: Any
    ) -> None:
        given = vars(namespace).setdefault("given", set())
        if flag and flag in given:
            parser.error(f"{flag} is given twice; leave one out")
        given.add(flag)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.register("action", None, _Once)
        # Until Python 3.14 argparse takes -5e-1 for a flag.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def make_parser(verbs: Iterable[Callable[..., int | None]]) -> Parser:
    """Returns the parser of the command line: each verb is named and described as its function.

    What it parses has the function as `verb`, and the flags that this takes as `flags`.
    """
    parser = Parser(prog="flaxformer-min", description="The 2017 Transformer.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    added = parser.add_subparsers(required=True, metavar="VERB")
    for verb in verbs:
        name, text = verb.__name__.rstrip("_"), verb.__doc__
        how = {"help": text, "description": text, "add_help": name != "train"}
        sub = added.add_parser(name, allow_abbrev=False, **how)
        sub.set_defaults(verb=verb, flags=sub._option_string_actions.keys())
        FLAGS_OF[name](sub)
    return parser


def search_options(options: argparse.Namespace) -> Options:
    """Returns the options whose flags were given, with defaults for all others."""
    names = {field.name for field in dataclasses.fields(Options) if field.metadata["help"]}
    return Options(**{name: value for name, value in vars(options).items() if name in names})


def _add_train_flags(sub: Parser) -> None:
    sub.epilog = "Every field of the config is a flag too: --model.dropout 0.2"
    flag = sub.add_argument
    flag("-h", "--help", action=_TrainHelp, nargs=0, help="after --config: every field too")
    flag("--config", type=_path, help=RECIPE)
    flag("--workdir", required=True, type=_path, help="where everything of the run is kept")
    flag("--profile", type=_count, default=0, metavar="STEPS", help="trace STEPS steps")
    group = "several processes; SLURM and TPU pods need none of these"
    flag = sub.add_argument_group(group).add_argument
    flag("--distributed.coordinator", metavar="HOST:PORT", dest="coordinator", help="of process 0")
    flag("--distributed.processes", metavar="N", dest="processes", type=_count, help="how many")
    flag("--distributed.process", metavar="I", dest="process", type=_whole, help="this one, from 0")


def _add_plan_flags(sub: Parser) -> None:
    sub.epilog = "Every field of the config is a flag too: --model.remat True"
    flag = sub.add_argument
    flag("--config", type=_path, help=f"{RECIPE}; or that of the run in WORKDIR")
    flag("--topology", required=True, help="such as v5e:16x16, v5p:4x4x4 or cpu:8")
    flag(
        "--lengths",
        type=_path,
        metavar="FILE|WORKDIR",
        help="of each pair a line: its source and target tokens; or a run's pairs",
    )
    kinds = ("train", "validation", "search", "scoring", "init", "restore")
    flag("--only", nargs="+", choices=kinds, default=kinds, metavar="KIND", help=", ".join(kinds))
    flag("--json", action="store_true", help="write JSON, not a table")


def _add_model(sub: Parser, nargs: str | None = None) -> Callable[..., Any]:
    """Adds the flags that choose one model, or several; returns what adds further flags."""
    about = "a workdir, or one checkpoint" + ("; several are an ensemble" if nargs else "")
    sub.add_argument("dir", nargs=nargs, type=_path, metavar="DIR", help=about)
    sub.add_argument("--step", type=_step, help="N, or 'best'; the newest by default")
    return sub.add_argument


def add_search_flags(sub: Parser, names: Sequence[str]) -> None:
    """Adds the flags of these fields of Options; a flag that is not given sets no attribute."""
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
        sub.add_argument(flag, default=argparse.SUPPRESS, help=about["help"], **how)


def _add_translate_flags(sub: Parser) -> None:
    flag = _add_model(sub, "+")
    add_search_flags(sub, [field.name for field in dataclasses.fields(Options)])
    file = functools.partial(flag, type=_path, metavar="FILE")
    file("--prefix", help="how each translation begins, a line for each line")
    file("--input", help="lines to translate, in place of standard input")
    file("--output", help="what to write, in place of standard output")
    together = "words of every line and of its translation that belong together: 0-0 1-2 ..."
    file("--alignment", help=together)
    file("--attention", help="attention weights of every line: .npz or .jsonl")
    flag("--average-heads", action="store_true", help="of --attention: the mean, labelled so")
    flag("--errors", choices=("strict", "replace"), default="strict", help="of invalid UTF-8")
    flag("--interactive", action="store_true", help="answer line by line")


def _add_score_flags(sub: Parser) -> None:
    flag = _add_model(sub, "+")
    flag("--source", required=True, type=_path, help="a file of lines")
    flag("--target", required=True, type=_path, help=TRANSLATIONS)
    flag("--per-token", action="store_true", help="write JSON with each token's log-probability")


def _add_evaluate_flags(sub: Parser) -> None:
    flag = _add_model(sub, "+")
    add_search_flags(sub, IN_CONFIG)
    flag("--source", type=_path, help="lines to translate; the config's test split by default")
    flag("--reference", type=_path, help=TRANSLATIONS)
    baseline = "a baseline: another model, or a file of translations; by paired bootstrap"
    flag("--against", type=_path, metavar="DIR|FILE", help=baseline)


def _add_average_flags(sub: Parser) -> None:
    flag = sub.add_argument
    flag("dir", type=_path, metavar="DIR", help="a workdir")
    flag("--last", type=_count, default=5, help="how many checkpoints to average")
    flag("--output", required=True, type=_path, help="the folder to write")


def _add_page_flags(sub: Parser) -> None:
    flag = _add_model(sub)
    flag("--source", type=_path, metavar="FILE", help="lines to begin with; or the test split")
    flag("--output", required=True, type=_path, metavar="FILE", help="the HTML file to write")


def _add_import_flags(sub: Parser) -> None:
    flag = sub.add_argument
    flag("format", choices=("marian", "safetensors"), metavar="FORMAT", help="%(choices)s")
    flag("dir", type=_path, metavar="DIR", help="the directory of the model")
    flag("--output", required=True, type=_path, help="the checkpoint directory to write")
    flag("--source-language", help="such as en; by default what the directory says")
    flag("--target-language", help="such as de; by default what the directory says")


def _add_export_flags(sub: Parser) -> None:
    formats = ("marian", "ctranslate2", "safetensors", "stablehlo")
    sub.add_argument("format", choices=formats, metavar="FORMAT", help="%(choices)s")
    flag = _add_model(sub)
    flag("--output", required=True, type=_path, help="the folder to write")
    flag("--rows", type=_count, default=8, help="of stablehlo: sentences of a call")
    flag("--length", type=_count, default=64, help="of stablehlo: tokens of a source, with EOS")


def _add_trace_flags(sub: Parser) -> None:
    flag = _add_model(sub)
    flag("sentence", type=_text, help="a sentence of the source language")
    flag("--target", type=_text, help="its translation; the model's own, greedy, by default")
    flag("--json", action="store_true", help="write JSON, not text")
    flag("--npz", type=_path, metavar="FILE", help="write every array, by its path")


def _add_summary_flags(sub: Parser) -> None:
    sub.epilog = "With FILE, every field of the config is a flag too: --model.d_ff 4096"
    about = f"{RECIPE}, or a trained model"
    sub.add_argument("model", type=_path, metavar="CONFIG|DIR", help=about)


def _add_neighbours_flags(sub: Parser) -> None:
    flag = _add_model(sub)
    flag("words", nargs="+", type=_text, metavar="WORD", help="or words joined by + and -")


def _add_encode_flags(sub: Parser) -> None:
    flag = _add_model(sub)
    kept = ".npz: pieces, embedding and states of each line"
    flag("--output", type=_path, metavar="FILE", help=kept)
    flag("--pooled", action="store_true", help="of --output: the mean of each line's states")
    flag("--word", type=_text, help="print cosines of its vectors: alone, and in each line")


def _add_plot_flags(sub: Parser) -> None:
    figures = sub.add_subparsers(required=True, metavar="FIGURE", dest="figure")

    def figure(name: str, text: str) -> Parser:
        parser = figures.add_parser(name, help=text, description=text, allow_abbrev=False)
        parser.add_argument("--output", required=True, type=_image, help="FILE.png or FILE.svg")
        return parser

    figure("positions", "the first 64 dimensions of 50 sinusoidal positions")
    figure("masks", "which keys a query may attend to: padding, causal, both")
    flag = figure("schedule", "the paper's learning rate over steps").add_argument
    flag("--warmups", type=_count, nargs="+", default=[4000], metavar="STEPS")
    flag("--steps", type=_count, default=100_000)
    flag("--d-model", type=_count, default=512, metavar="D")
    flag = figure("curves", "loss and BLEU over the steps of runs").add_argument
    flag("workdirs", type=_path, nargs="+", metavar="WORKDIR")
    weights = figure("attention", "the weights of one site by layer and head")
    for parser in (weights, figure("alignment", "a sentence's pieces beside their translation's")):
        flag = _add_model(parser)
        flag("sentence", type=_text, help="a sentence of the source language")
        flag("--target", type=_text, help="its translation; the model's own by default")
    flag = weights.add_argument
    flag("--site", choices=("encoder", "decoder", "cross"), default="cross")
    flag("--layer", type=_count, help="one of them, from 1; all by default")
    flag("--head", type=_count, help="one of them, from 1; all by default")


def _add_compare_flags(sub: Parser) -> None:
    flag = sub.add_argument
    flag("workdirs", type=_path, nargs="+", metavar="WORKDIR", help="of two runs or more")
    flag("--output", type=_image, metavar="FILE", help="draw their curves as .png or .svg")


FLAGS_OF = {
    "train": _add_train_flags,
    "plan": _add_plan_flags,
    "translate": _add_translate_flags,
    "score": _add_score_flags,
    "evaluate": _add_evaluate_flags,
    "average": _add_average_flags,
    "page": _add_page_flags,
    "import": _add_import_flags,
    "export": _add_export_flags,
    "trace": _add_trace_flags,
    "summary": _add_summary_flags,
    "neighbours": _add_neighbours_flags,
    "encode": _add_encode_flags,
    "plot": _add_plot_flags,
    "compare": _add_compare_flags,
}


class _TrainHelp(argparse.Action):
    """Prints the flags of train and, if --config came before, every field of that config."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any
    ) -> None:
        parser.print_help()
        if namespace.config is not None:
            from flaxformer_min.config_file import print_help

            print_help(namespace.config)
        parser.exit()


def _step(text: str) -> int | Literal["best"]:
    if text == "best":
        return "best"
    if text.isdecimal() and len(text) < DIGITS:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r:.80} is neither a step number nor 'best'")


def _path(text: str) -> str:
    try:
        return local_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _text(text: str) -> str:
    if text.encode(errors="replace").decode() == text:
        return text
    raise argparse.ArgumentTypeError("the text is not UTF-8")


def _image(text: str) -> str:
    if text.endswith((".png", ".svg")):
        return _path(text)
    raise argparse.ArgumentTypeError(f"{text} ends in neither .png nor .svg")


def _number(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    raise argparse.ArgumentTypeError(f"{text!r:.80} is no finite number")


def _whole(text: str) -> int:
    if text.isdecimal() and len(text) < DIGITS:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r:.80} is no whole number")


def _count(text: str) -> int:
    if text.isdecimal() and len(text) < DIGITS and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r:.80} is no whole number above 0")
