"""What a run finds in its workdir or puts there before step 1: config, tokenizer, corpora."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from flaxformer_min.batching import BatchPlan
from flaxformer_min.checkpoint import FOLDER, counted_steps, load_for_inference
from flaxformer_min.config import Config, check_resume, config_from_json, config_to_json
from flaxformer_min.corpus import EncodedCorpus, prepare_split
from flaxformer_min.errors import UserError
from flaxformer_min.parallel import read_pairs
from flaxformer_min.tokenizer import Tokenizer, prepare_tokenizer

CONFIG, TOKENIZER, CORPUS = "config.json", "tokenizer.model", "corpus.json"


class Data(NamedTuple):
    """What the files of a run became."""

    tokenizer: Tokenizer
    train: EncodedCorpus
    validation: EncodedCorpus
    plan: BatchPlan


def claim(workdir: Path, config: Config) -> None:
    """Makes the workdir this run's and writes config.json.

    With checkpoints in it, it must be a run of the same config. Without, every start is a fresh
    one: it forgets what a start that came to nothing left. Compiled programs are cached in the
    workdir too, unless JAX was told another place.

    Raises UserError naming what differs, or what in the workdir is not a run's.
    """
    path = workdir / CONFIG
    if path.exists():
        _take_over(path, config)
    elif found := [name for name in (FOLDER, TOKENIZER) if (workdir / name).exists()]:
        raise UserError(f"{workdir}: has {found[0]} but no {CONFIG}; use another --workdir")
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"--workdir {workdir}: is a file; give a directory") from None
    _replace(path, config_to_json(config).encode())
    if not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(workdir.absolute() / "compiled"))


def prepare_data(config: Config, workdir: Path) -> Data:
    """Tokenizer, encoded corpora and the plan of batches; writes corpus.json, the corpus report.

    Raises UserError if a resumed run would train on another corpus than before.
    """
    tokenizer = _tokenizer(config, workdir)
    cache, path = workdir / "corpus", workdir / CORPUS
    train, train_report = prepare_split(config.data, config.data.train, tokenizer, cache)
    validation, validation_report = prepare_split(
        config.data, config.data.validation, tokenizer, cache, keep_all=True
    )
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))["train"]["digest"]
        if before != train_report["digest"]:
            raise UserError(f"data.train: {workdir} was trained on other text; use a new --workdir")
    report = {"train": train_report, "validation": validation_report}
    _replace(path, (json.dumps(report, indent=2) + "\n").encode())
    return Data(tokenizer, train, validation, BatchPlan(train.lengths, config.data))


def _take_over(path: Path, config: Config) -> None:
    """Refuses another run's workdir, or clears one without checkpoints."""
    try:
        before = config_from_json(path.read_text(encoding="utf-8"))
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}; use another --workdir") from None
    if counted_steps(path.parent / FOLDER):
        check_resume(before, config)
    else:
        for name in (TOKENIZER, CORPUS):
            (path.parent / name).unlink(missing_ok=True)


def _tokenizer(config: Config, workdir: Path) -> Tokenizer:
    """The workdir's tokenizer; put there when the run starts."""
    path = workdir / TOKENIZER
    if path.exists():
        tokenizer = Tokenizer.load(path)
        if config.data.tokenizer and not config.train.initialize_from:
            _refuse_another(tokenizer, config, workdir)
        return tokenizer
    if config.train.initialize_from is not None:
        tokenizer = _tokenizer_of(config.train.initialize_from, config)
    else:
        tokenizer = prepare_tokenizer(config.data, _lines(config))
    _replace(path, tokenizer.model_bytes)
    return tokenizer


def _tokenizer_of(folder: str, config: Config) -> Tokenizer:
    """That of another run, whose weights know no other; the config must not ask for another."""
    tokenizer, data = load_for_inference(folder).tokenizer, config.data
    if data.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"data.vocab_size is {data.vocab_size}, but the tokenizer of {folder} "
            f"(train.initialize_from) has {tokenizer.vocab_size} ids"
        )
    if data.tokenizer and prepare_tokenizer(data, ()).sha256 != tokenizer.sha256:
        raise UserError(
            f"data.tokenizer is another than that of {folder} (train.initialize_from); leave it out"
        )
    return tokenizer


def _refuse_another(tokenizer: Tokenizer, config: Config, workdir: Path) -> None:
    if prepare_tokenizer(config.data, ()).sha256 != tokenizer.sha256:
        raise UserError(
            f"data.tokenizer: {config.data.tokenizer} is another than that of {workdir}; "
            "set it back or use a new workdir"
        )


def _lines(config: Config) -> Iterator[str]:
    """Every training line of both languages."""
    if sys.stderr.isatty():
        print("training the tokenizer ...", file=sys.stderr)
    for pair in read_pairs(config.data, config.data.train):
        yield from pair


def _replace(path: Path, content: bytes) -> None:
    """Writes a file that is whole or not there."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)
