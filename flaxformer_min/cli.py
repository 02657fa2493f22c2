"""The command line: train, plan, translate, score, evaluate, average, and verbs that show.

The exit status is 0 if all is done, 2 after a mistake of the user, 1 after any other error, and 143
or 130 after SIGTERM or SIGINT. An error that can be foreseen is printed in one line; a traceback
means a bug of this program. Each verb imports what it needs when it runs, so that --help answers
at once.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """Runs one verb; returns the exit status.

    A start of the program has these effects on the whole process, and no others:

    - Here, the garbage collector is told to look for garbage less often: importing and tracing make
      millions of objects and hardly any garbage, and looking for it after every 700, as Python
      does, takes a tenth of a start.
    - Here, `unraisable` replaces Python's hook for errors that no code can catch.
    - `checkpoints.format` filters the logger of absl when it is imported.
    - `system.malloc.keep_work_space`, which `train` calls, turns off JAX's asynchronous dispatch on
      CPUs and sets two parameters of glibc's malloc.
    """
    gc.set_threshold(20_000)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = unraisable
    try:
        parser = _make_parser()
        options, rest = parser.parse_known_args(arguments)
        if rest and options.verb not in (train, plan, summary):  # config fields as flags
            raise UserError(f"unrecognized: {' '.join(rest)} (see {parser.prog} --help)")
        return options.verb(options, rest) or 0
    except BrokenPipeError:  # the reader of the output has gone; say nothing at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, KeyboardInterrupt) as error:
        message, status = message_and_status(error)
        if message is not None:
            print(f"error: {message}", file=sys.stderr)
        return status


def unraisable(event: Any) -> None:
    """Calls Python's own hook, except for threads that come back to a closed event loop.

    After a failed save or restore, threads of tensorstore do that dozens of times; the failure
    itself is reported where it happens.
    """
    if str(event.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(event)


def message_and_status(error: BaseException) -> tuple[str | None, int]:
    """Returns the line to print about an error that can be foreseen, and the exit status.

    The line is None if nothing is to be printed. Any other error is a bug and is raised again, so
    that its traceback is seen.
    """
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
    from flaxformer_min.system import failures, malloc, processes
    from flaxformer_min.training import loop

    malloc.keep_work_space()
    processes.initialize(options.coordinator, options.processes, options.process)
    workdir = Path(options.workdir)
    return failures.together(
        lambda: loop.run(config, workdir, profile_steps=options.profile), message_and_status
    )


def plan(options: argparse.Namespace, overrides: list[str]) -> None:
    """Compiles CONFIG's train step for devices that need not be here: memory, time, collectives."""
    from flaxformer_min.config_file import load_config

    config = load_config(options.config, overrides)
    from flaxformer_min.planning.plan import make_plan
    from flaxformer_min.planning.report import to_json, to_text

    made = make_plan(config, options.topology, options.lengths)
    print(to_json(made) if options.json else to_text(made))


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


def trace(options: argparse.Namespace, _: list[str]) -> None:
    """Follows one sentence through the model, from text to the likeliest next tokens."""
    from flaxformer_min.decoding.translator import Translator
    from flaxformer_min.see.record import to_json, write_npz
    from flaxformer_min.see.trace import trace_sentence
    from flaxformer_min.see.trace_text import to_text

    translator = Translator.load(options.dir, step=options.step)
    traced = trace_sentence(translator, options.sentence, options.target)
    if options.npz is not None:
        write_npz(options.npz, traced.arrays | traced.pieces)
    _show([to_json(traced) if options.json else to_text(traced)])


def summary(options: argparse.Namespace, overrides: list[str]) -> None:
    """Counts parameters, FLOPs and bytes of a config's model, or of a trained one."""
    from flaxformer_min.see.summary import load_summary, to_text

    _show(to_text(load_summary(options.model, overrides)))


def neighbours(options: argparse.Namespace, _: list[str]) -> None:
    """Prints the pieces nearest to each WORD in the embedding, by cosine, or to A - B + C."""
    from flaxformer_min.checkpoints.load import load_for_inference
    from flaxformer_min.see.embedding import neighbours as nearest

    for found in nearest(load_for_inference(options.dir, options.step), options.words):
        _show([found.title, *(f"{cosine:8.3f}  {piece}" for piece, cosine in found.nearest)])


def encode(options: argparse.Namespace, _: list[str]) -> None:
    """Writes the encoder's states of each line of standard input, or compares a word's vectors."""
    from flaxformer_min.checkpoints.load import load_for_inference
    from flaxformer_min.data.lines import decode_lines
    from flaxformer_min.see import embedding
    from flaxformer_min.see.record import write_npz

    if options.output is None and options.word is None:
        raise UserError("encode needs --output FILE.npz or --word WORD, or both")
    loaded = load_for_inference(options.dir, options.step)
    lines = list(decode_lines(sys.stdin.buffer, "standard input"))
    if options.word is not None:
        _show(embedding.compare(loaded, options.word, lines))
    if options.output is not None:
        encoded = embedding.encode(loaded, lines)
        write_npz(options.output, embedding.arrays(encoded, pooled=options.pooled))


def plot(options: argparse.Namespace, _: list[str]) -> None:
    """Draws a figure: positions, masks, learning rates, curves of runs, or attention."""
    from flaxformer_min.decoding.translator import Translator
    from flaxformer_min.see import plot as figures
    from flaxformer_min.see.trace import trace_sentence

    given = dict(vars(options))
    draw, path = getattr(figures, given.pop("figure")), given.pop("output")
    del given["verb"]
    if "sentence" in given:
        translator = Translator.load(given.pop("dir"), step=given.pop("step"))
        given["trace"] = trace_sentence(translator, given.pop("sentence"), given.pop("target"))
    figures.save(draw(**given), path)


def _show(lines: Iterable[str]) -> None:
    """Prints lines as this terminal can show them."""
    from flaxformer_min.see.trace_text import printable

    for line in lines:
        print(printable(line, sys.stdout.encoding))


def _pairs(source: str, target: str) -> Iterator[tuple[str, str]]:
    """Reads the pairs of two files; raises UserError naming both if their line counts differ."""
    from flaxformer_min.data.lines import read_lines

    sources, targets = list(read_lines(source)), list(read_lines(target))
    if len(sources) != len(targets):
        raise UserError(f"{source} has {len(sources)} lines but {target} has {len(targets)}")
    return zip(sources, targets, strict=True)


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="flaxformer-min", description="The 2017 Transformer.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(function: Callable[..., int | None], *, add_help: bool = True) -> _Parser:
        """Adds a verb, named and described as its function."""
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
    flag = sub.add_argument
    flag("-h", "--help", action=_TrainHelp, nargs=0, help="after --config: every field too")
    flag("--config", required=True, help="a Python file, or FILE:VARIANT")
    flag("--workdir", required=True, help="where everything of the run is kept")
    flag("--profile", type=_count, default=0, metavar="STEPS", help="trace STEPS steps")
    _add_distributed_flags(sub)
    sub = verb(plan)
    sub.epilog = "Every field of the config is a flag too: --model.remat True"
    flag = sub.add_argument
    flag("--config", required=True, help="a Python file, or FILE:VARIANT")
    flag("--topology", required=True, help="such as v5e:16x16, v5p:4x4x4 or cpu:8")
    flag("--lengths", metavar="FILE", help="of each pair a line: its source and target tokens")
    flag("--json", action="store_true", help="write JSON, not a table")
    sub = model_verb(translate)
    _add_search_flags(sub, [field.name for field in dataclasses.fields(Options)])
    _add_translate_flags(sub)
    flag = model_verb(score).add_argument
    flag("--source", required=True, help="a file of lines")
    flag("--target", required=True, help="a file of translations, one for each line of SOURCE")
    flag("--per-token", action="store_true", help="write JSON with each token's log-probability")
    sub = model_verb(evaluate)
    _add_search_flags(sub, IN_CONFIG)
    flag = sub.add_argument
    flag("--source", help="lines to translate; the config's test split by default")
    flag("--reference", help="a file of translations, one for each line of SOURCE")
    flag = verb(average).add_argument
    flag("dir", metavar="DIR", help="a workdir")
    flag("--last", type=_count, default=5, help="how many checkpoints to average")
    flag("--output", required=True, help="the folder to write")
    _add_verbs_that_show(verb)
    return parser


def _add_verbs_that_show(verb: Callable[..., _Parser]) -> None:
    flag = _add_one_model(verb(trace))
    flag("sentence", type=_text, help="a sentence of the source language")
    flag("--target", type=_text, help="its translation; the model's own, greedy, by default")
    flag("--json", action="store_true", help="write JSON, not text")
    flag("--npz", metavar="FILE", help="write every array, by its path")
    sub = verb(summary)
    sub.epilog = "With FILE, every field of the config is a flag too: --model.d_ff 4096"
    sub.add_argument("model", metavar="CONFIG|DIR", help="FILE, FILE:VARIANT, or a trained model")
    flag = _add_one_model(verb(neighbours))
    flag("words", nargs="+", type=_text, metavar="WORD", help="or words joined by + and -")
    flag = _add_one_model(verb(encode))
    flag("--output", metavar="FILE", help=".npz: pieces, embedding and states of each line")
    flag("--pooled", action="store_true", help="of --output: the mean of each line's states")
    flag("--word", type=_text, help="print cosines of its vectors: alone, and in each line")
    _add_figures(verb(plot))


def _add_one_model(parser: _Parser) -> Callable[..., Any]:
    """Adds the flags that choose one model; returns the function that adds further ones."""
    parser.add_argument("dir", metavar="DIR", help="a workdir, or one checkpoint")
    parser.add_argument("--step", type=_step, help="N, or 'best'; the newest by default")
    return parser.add_argument


def _add_figures(parser: _Parser) -> None:
    figures = parser.add_subparsers(required=True, metavar="FIGURE", dest="figure")

    def figure(name: str, text: str) -> _Parser:
        sub = figures.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("--output", required=True, type=_image, help="FILE.png or FILE.svg")
        return sub

    figure("positions", "the first 64 dimensions of 50 sinusoidal positions")
    figure("masks", "which keys a query may attend to: padding, causal, both")
    flag = figure("schedule", "the paper's learning rate over steps").add_argument
    flag("--warmups", type=_count, nargs="+", default=[4000], metavar="STEPS")
    flag("--steps", type=_count, default=100_000)
    flag("--d-model", type=_count, default=512, metavar="D")
    sub = figure("curves", "loss and BLEU over the steps of runs")
    sub.add_argument("workdirs", nargs="+", metavar="WORKDIR")
    weights = figure("attention", "the weights of one site by layer and head")
    for sub in (weights, figure("alignment", "a sentence's pieces beside their translation's")):
        flag = _add_one_model(sub)
        flag("sentence", type=_text, help="a sentence of the source language")
        flag("--target", type=_text, help="its translation; the model's own by default")
    flag = weights.add_argument
    flag("--site", choices=("encoder", "decoder", "cross"), default="cross")
    flag("--layer", type=_count, help="one of them, from 1; all by default")
    flag("--head", type=_count, help="one of them, from 1; all by default")


def _add_distributed_flags(parser: _Parser) -> None:
    group = "several processes; SLURM and TPU pods need none of these"
    flag = parser.add_argument_group(group).add_argument
    flag("--distributed.coordinator", metavar="HOST:PORT", dest="coordinator", help="of process 0")
    flag("--distributed.processes", metavar="N", dest="processes", type=_count, help="how many")
    flag("--distributed.process", metavar="I", dest="process", type=_whole, help="this one, from 0")


def _add_search_flags(parser: _Parser, names: Sequence[str]) -> None:
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
        parser.add_argument(flag, default=argparse.SUPPRESS, help=about["help"], **how)


def _add_translate_flags(parser: _Parser) -> None:
    flag = parser.add_argument
    flag("--prefix", metavar="FILE", help="how each translation begins, a line for each line")
    flag("--attention", metavar="FILE", help="attention weights of every line: .npz or .jsonl")
    flag("--average-heads", action="store_true", help="of --attention: the mean, labelled so")
    flag("--errors", choices=("strict", "replace"), default="strict", help="of invalid UTF-8")
    flag("--interactive", action="store_true", help="answer line by line")


def _search_options(options: argparse.Namespace) -> Options:
    """Returns the options whose flags were given, with defaults for all others."""
    names = {field.name for field in dataclasses.fields(Options) if field.metadata["help"]}
    return Options(**{name: value for name, value in vars(options).items() if name in names})


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
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a step number nor 'best'")


def _text(text: str) -> str:
    if text.encode(errors="replace").decode() == text:
        return text
    raise argparse.ArgumentTypeError("the text is not UTF-8")


def _image(text: str) -> str:
    if text.endswith((".png", ".svg")):
        return text
    raise argparse.ArgumentTypeError(f"{text} ends in neither .png nor .svg")


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
