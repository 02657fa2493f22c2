"""The command line: train, plan, translate, score, evaluate, average, import, export and showing.

The exit status is 0 if all is done, 2 after a mistake of the user, 1 after any other error, and
128 + N after a signal N, such as 143 after SIGTERM. An error that can be foreseen is printed in one
line; a traceback means a bug of this program. Each verb imports what it needs when it runs, so that
--help answers at once.
"""

import argparse
import atexit
import contextlib
import dataclasses
import gc
import importlib.util
import inspect
import json
import math
import os
import sys
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from pathlib import Path

from flaxformer_min.errors import UserError, first_line, is_out_of_memory, nearest
from flaxformer_min.flags import Parser, make_parser, search_options
from flaxformer_min.system import console
from flaxformer_min.system.sealed import CheckpointError

LESS_SEARCH = "lower --beam-size or --max-length-offset, or split longer lines"
# Packages of the extra `train`.
TRAINING = "babel", "importlib_resources", "sacrebleu", "tensorboardX", "tensorflow_datasets"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit status.

    A start of the program has these effects on the whole process, and no others:

    - Here, the garbage collector is told to look for garbage less often: importing and tracing make
      millions of objects and hardly any garbage, and looking for it after every 700, as Python
      does, takes a tenth of a start.
    - Here, the null device takes the place of a standard stream that is closed.
    - Here, JAX_ENABLE_X64 is set to 0, because every number of this program is in float32.
    - Here, `system.console.unraisable` replaces Python's hook for errors that no code can catch.
    - `checkpoints.format` filters the logger of absl when it is imported.
    - `system.devices.keep_programs` gives JAX a folder for compiled programs.
    - `system.malloc.keep_work_space`, which `train` calls, turns off JAX's asynchronous dispatch on
      CPUs and sets two parameters of glibc's malloc.
    """
    gc.set_threshold(20_000)
    console.open_closed_streams()
    os.environ["JAX_ENABLE_X64"] = "0"
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = console.unraisable
    try:
        status = _run_verb(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of the output has gone
        return 1
    except (Exception, KeyboardInterrupt) as error:
        message, status = message_and_status(error)
        if message is not None:
            with contextlib.suppress(OSError):  # the reader of standard error has gone
                print(f"error: {message}", file=sys.stderr)
            atexit.register(console.say_no_more)
        return status
    finally:
        console.drop_what_cannot_be_written()


def _run_verb(arguments: Sequence[str] | None) -> int:
    if importlib.util.find_spec("fcntl") is None:
        raise UserError("this system has no fcntl: run on Linux or macOS; on Windows within WSL")
    parser = _make_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.verb not in (train, plan, summary):  # these take config fields as flags
        meant = _meant(rest[0], options.flags) if rest[0].startswith("--") else ""
        raise UserError(f"unrecognized: {' '.join(rest)}{meant} (see {parser.prog} --help)")
    return options.verb(options, rest) or 0


def _make_parser() -> Parser:
    to_use = train, plan, translate, score, evaluate, average, page, import_, export
    to_look_at = trace, summary, neighbours, encode, plot, compare
    return make_parser((*to_use, *to_look_at))


def _meant(word: str, flags: Collection[str]) -> str:
    """Returns the question which of the flags was meant by one that is none, as far as is known."""
    from flaxformer_min.config_file import SYNONYMS

    name = word.removeprefix("--").partition("=")[0].replace("-", "_")
    field = SYNONYMS.get(name)
    meant = "--" + field.rpartition(".")[2].replace("_", "-") if field else nearest(word, flags)
    return f"; did you mean {meant}?" if meant in flags else ""


def message_and_status(error: BaseException) -> tuple[str | None, int]:
    """Returns the line to print about an error that can be foreseen, and the exit status.

    The line is None if nothing is to be printed. Any other error is a bug and is raised again, so
    that its traceback is seen.
    """
    if isinstance(error, UserError):
        return str(error), 2
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in TRAINING:
        return f"{error.name} is not installed: pip install 'flaxformer_min[train]'", 2
    if isinstance(error, CheckpointError | FloatingPointError | MemoryError | OSError):
        return str(error), 1
    if isinstance(error, KeyboardInterrupt):
        return None, 130
    raise error


@contextlib.contextmanager
def _memory(mend: str) -> Generator[None]:
    """A context in which an error for lack of memory becomes a MemoryError that names the mend."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(f"out of memory ({first_line(error)}): {mend}") from error


def train(options: argparse.Namespace, overrides: list[str]) -> int:
    """Trains, or resumes if DIR holds checkpoints; without --config, by the config of DIR's run."""
    from flaxformer_min.config_file import load_config, load_workdir_config

    if options.config is None:
        config = load_workdir_config(options.workdir, overrides)
    else:
        config = load_config(options.config, overrides)
    from flaxformer_min.system import devices, failures, malloc, processes
    from flaxformer_min.training import loop

    malloc.keep_work_space()
    processes.initialize(options.coordinator, options.processes, options.process)
    devices.start()

    def run() -> int:
        with _memory(
            "lower data.tokens_per_batch, or raise optimizer.accumulation (micro-batches), or set "
            "model.remat True; if it was in an evaluation, lower decode.beam_size"
        ):
            return loop.run(config, Path(options.workdir), profile_steps=options.profile)

    return failures.together(run, message_and_status)


def plan(options: argparse.Namespace, overrides: list[str]) -> None:
    """Compiles CONFIG's programs for devices that need not be here: memory, time, collectives."""
    from flaxformer_min.config_file import load_config, load_workdir_config

    if options.config is not None:
        config = load_config(options.config, overrides)
    elif options.lengths is not None and Path(options.lengths, "config.json").is_file():
        config = load_workdir_config(options.lengths, overrides)
    else:
        raise UserError("give --config, or --lengths WORKDIR for the config of its run")
    from flaxformer_min.planning.chips import topology_devices
    from flaxformer_min.planning.lengths import find_lengths
    from flaxformer_min.planning.plan import make_plan
    from flaxformer_min.planning.report import to_json, to_text
    from flaxformer_min.system.devices import quiet_libtpu

    quiet_libtpu()
    topology_devices(options.topology)  # before JAX looks for devices
    lengths = find_lengths(options.lengths, config.data)
    made = make_plan(config, options.topology, lengths, options.only)
    print(to_json(made) if options.json else to_text(made))


def translate(options: argparse.Namespace, _: list[str]) -> None:
    """Reads standard input, or a file, and writes one line for each of its lines, in order."""
    from flaxformer_min.decoding.files import Paths, open_files
    from flaxformer_min.decoding.streams import line_groups, translate_stream
    from flaxformer_min.decoding.translator import Translator

    if options.average_heads and options.attention is None:
        raise UserError("--average-heads belongs to --attention FILE: give both or neither")
    if options.interactive and options.input is not None:
        raise UserError("--interactive answers what is typed, --input reads a file: give one")
    typed = options.interactive and sys.stdin.isatty()
    if typed:
        print(f"loading {' and '.join(options.dir)} ...", file=sys.stderr, flush=True)
    paths = Paths(*(getattr(options, name) for name in Paths._fields))
    weights = paths.attention is not None or paths.alignment is not None
    search = dataclasses.replace(search_options(options), attention=weights)
    how = {"errors": options.errors, "one_by_one": options.interactive}
    with open_files(paths, average_heads=options.average_heads) as (source, outputs):
        translator = Translator.load(*options.dir, step=options.step)
        groups = line_groups(source.file, source.name, **how)
        groups = _prompted(groups) if typed else groups
        with _memory(LESS_SEARCH):
            for found in translate_stream(
                translator, groups, search, prefix=paths.prefix, tell=source.tell
            ):
                outputs.write(translator.tokenizer, found, as_json="n_best" in options)


def _prompted(groups: Iterator[list[str]]) -> Iterator[list[str]]:
    """Yields the groups and asks for each, on standard error, before it is read."""
    print("type a line to translate; Ctrl-D ends", file=sys.stderr)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        if (group := next(groups, None)) is None:
            print(file=sys.stderr)
            return
        yield group


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
    """Translates SOURCE, or the config's test split; writes BLEU, chrF and TER as JSON."""
    from flaxformer_min.data.lines import read_lines
    from flaxformer_min.data.sources import read_pairs
    from flaxformer_min.decoding.evaluate import evaluate as evaluate_pairs
    from flaxformer_min.decoding.evaluate import rounded
    from flaxformer_min.decoding.translator import Translator

    if (options.source is None) != (options.reference is None):
        raise UserError("--source and --reference belong together: give both or neither")
    pairs = list(_pairs(options.source, options.reference)) if options.source else None
    against = options.against
    if against is not None and not Path(against).is_dir():
        against = list(read_lines(against))
    translator = Translator.load(*options.dir, step=options.step)
    if pairs is None:
        data = translator.config.data
        pairs = list(read_pairs(data, data.test))
    if isinstance(against, list) and len(against) != len(pairs):
        text = f"{options.against} has {len(against)} lines but {len(pairs)} are translated"
        raise UserError(text)
    baseline = Translator.load(against) if isinstance(against, str) else against
    with _memory(LESS_SEARCH):
        record = evaluate_pairs(translator, pairs, search_options(options), against=baseline)
    if against is not None:
        record["against"] = {"system": options.against, **record["against"]}
    print(json.dumps(rounded(record), indent=2))


def average(options: argparse.Namespace, _: list[str]) -> None:
    """Averages the parameters of the last checkpoints, by step number, in float32."""
    from flaxformer_min.checkpoints.average import average as average_checkpoints
    from flaxformer_min.system.devices import start as start_devices

    start_devices()
    steps = average_checkpoints(options.dir, options.output, last=options.last)
    print(f"{options.output}: the average of steps {', '.join(map(str, steps))}", file=sys.stderr)


def page(options: argparse.Namespace, _: list[str]) -> None:
    """Writes one HTML file that runs a checkpoint in a browser, without network or server."""
    from flaxformer_min.decoding.translator import Translator
    from flaxformer_min.see.page import write_page

    translator = Translator.load(options.dir, step=options.step)
    size = write_page(translator, options.output, options.source)
    print(f"{options.output}: {size / 1e6:.1f} MB; open it in a browser", file=sys.stderr)


def import_(options: argparse.Namespace, _: list[str]) -> None:
    """Makes a checkpoint of a Marian model (OPUS-MT) or of exported safetensors."""
    from flaxformer_min.interop.marian import import_marian, import_safetensors

    folder, output = Path(options.dir), Path(options.output)
    if options.format == "safetensors":
        config = import_safetensors(folder, output)
    else:
        languages = options.source_language, options.target_language
        config = import_marian(folder, output, *languages)
    data = config.data
    print(
        f"{output}: {data.source_language} to {data.target_language}, data.vocab_size "
        f"{data.vocab_size}, beam {config.decode.beam_size}",
        file=sys.stderr,
    )


def export(options: argparse.Namespace, _: list[str]) -> None:
    """Writes a checkpoint in the format of another program."""
    from flaxformer_min.checkpoints.load import load_for_inference
    from flaxformer_min.interop.export import export_ctranslate2, export_marian, export_safetensors
    from flaxformer_min.interop.stablehlo import export_stablehlo

    loaded, output = load_for_inference(options.dir, options.step), Path(options.output)
    if options.format == "stablehlo":
        export_stablehlo(loaded, output, options.rows, options.length)
        return
    exports = {"marian": export_marian, "ctranslate2": export_ctranslate2}
    for line in exports.get(options.format, export_safetensors)(loaded, output):
        print(f"note: {line}", file=sys.stderr)


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

    draw, given = getattr(figures, options.figure), dict(vars(options))
    if "sentence" in given:
        translator = Translator.load(options.dir, step=options.step)
        given["trace"] = trace_sentence(translator, options.sentence, options.target)
    names = inspect.signature(draw).parameters
    chosen = {name: value for name, value in given.items() if name in names}
    figures.save(draw(**chosen), options.output)


def compare(options: argparse.Namespace, _: list[str]) -> None:
    """Prints what differs between runs, in config and result; draws their curves."""
    from flaxformer_min.see.compare import compare as compared
    from flaxformer_min.see.runs import read_run

    _show(compared([read_run(workdir) for workdir in options.workdirs]))
    if options.output is not None:
        from flaxformer_min.see import plot as figures

        figures.save(figures.curves(options.workdirs), options.output)


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
