"""What a run finds in its workdir or puts there before step 1: config, tokenizer, corpora."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from flaxformer_min.batching import BatchPlan
from flaxformer_min.checkpoint import load_for_inference
from flaxformer_min.config import Config, check_resume, config_from_json, config_to_json
from flaxformer_min.corpus import EncodedCorpus, prepare_split, read_pairs
from flaxformer_min.errors import UserError
from flaxformer_min.tokenizer import Tokenizer, prepare_tokenizer


class Data(NamedTuple):
    """What the files of a run became."""

    tokenizer: Tokenizer
    train: EncodedCorpus
    validation: EncodedCorpus
    plan: BatchPlan


def claim(workdir: Path, config: Config) -> None:
    """Writes config.json; raises UserError if the workdir belongs to another run.

    Compiled programs are cached in the workdir too, unless JAX was told another place.
    """
    path = workdir / "config.json"
    if path.exists():
        check_resume(config_from_json(path.read_text(encoding="utf-8")), config)
    elif (workdir / "checkpoints").exists():
        raise UserError(f"{workdir}: has checkpoints but no config.json; use another --workdir")
    workdir.mkdir(parents=True, exist_ok=True)
    _replace(path, config_to_json(config).encode())
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(workdir.absolute() / "compiled"))


def prepare_data(config: Config, workdir: Path) -> Data:
    """Tokenizer, encoded corpora and the plan of batches; writes corpus.json, the corpus report.

    Raises UserError if a resumed run would train on another corpus than before.
    """
    tokenizer, cache, path = (
        _tokenizer(config, workdir),
        workdir / "corpus",
        workdir / "corpus.json",
    )
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


def _tokenizer(config: Config, workdir: Path) -> Tokenizer:
    """The workdir's tokenizer; put there when the run starts.

    A run that starts from another run's weights takes its tokenizer with them.
    """
    path = workdir / "tokenizer.model"
    if path.exists():
        return Tokenizer.load(path)
    if config.train.initialize_from is None:
        tokenizer = prepare_tokenizer(config.data, _lines(config))
    else:
        tokenizer = load_for_inference(config.train.initialize_from).tokenizer
    _replace(path, tokenizer.model_bytes)
    return tokenizer


def _lines(config: Config) -> Iterator[str]:
    """Every training line of both languages."""
    print("training the tokenizer", file=sys.stderr)
    for pair in read_pairs(config.data, config.data.train):
        yield from pair


def _replace(path: Path, content: bytes) -> None:
    """Writes a file that is whole or not there."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)
