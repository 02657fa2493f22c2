"""The tokenizer and the encoded corpora of a run, made before step 1 and opened by every process.

A run that resumes must find the tokenizer and the corpora that it was trained with, whose digests
are in corpus.json.
"""

import hashlib
import itertools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import sentencepiece

from flaxformer_min.checkpoints.load import load_for_inference
from flaxformer_min.config import Config, DataConfig
from flaxformer_min.data.batching import BatchPlan, Data
from flaxformer_min.data.corpus import open_split, own_entry, prepare_split
from flaxformer_min.data.sources import open_sources
from flaxformer_min.data.tokenizer import Tokenizer, open_tokenizer
from flaxformer_min.data.tokenizer_training import VERSION, prepare_tokenizer
from flaxformer_min.errors import UserError
from flaxformer_min.system.files import replace_file
from flaxformer_min.system.meter import say
from flaxformer_min.system.own_folder import own_folder
from flaxformer_min.system.processes import broadcast, is_first
from flaxformer_min.training.workdir import CACHE, CORPUS, TOKENIZER, resumes

_log = logging.getLogger(__name__)

DIGEST_SIZE = hashlib.sha256().digest_size


def prepare_data(config: Config, workdir: Path) -> Data:
    """Prepares the data of a run in process 0, in a workdir that it holds; every process opens it.

    Raises UserError if a run that resumes would train on another corpus or tokenizer than before,
    or if this process does not see the files of process 0.
    """
    digests = broadcast(lambda: _prepare(config, workdir))
    try:
        tokenizer = _open_tokenizer(workdir, digests["tokenizer"])
        train, validation = (
            open_split(digests["cache"], digests[split], tokenizer)
            for split in ("train", "validation")
        )
    except (OSError, UserError) as error:
        if is_first():
            raise
        raise UserError(
            f"--workdir {workdir}: must be on a disk that all processes share, and data.cache too: "
            f"{error}"
        ) from error
    return Data(tokenizer, train, validation, BatchPlan(train.lengths, config.data))


def _prepare(config: Config, workdir: Path) -> dict[str, str]:
    """Writes tokenizer.model, the cache and corpus.json.

    Returns the digests in corpus.json, and as "cache" the folder of the cache.
    """
    data, cache = config.data, cache_of(config, workdir)
    before = read_digests(workdir) if resumes(workdir) else {}
    tokenizer = _prepare_tokenizer(config, workdir, cache, before)
    _, train = prepare_split(data, data.train, tokenizer, cache)
    if before and before["train"] != train["digest"]:
        raise UserError(f"data.train: {workdir} was trained on other text; use a new --workdir")
    _, validation = prepare_split(data, data.validation, tokenizer, cache, keep_all=True)
    _warn_of_overlap(train["sources"], validation["sources"])
    shared = "of this run" if cache.parent == workdir else "shared by all runs"
    say(f"{cache}: encoded text, {shared} (data.cache)")
    report = {"tokenizer": tokenizer.sha256, "train": train, "validation": validation}
    replace_file(workdir / CORPUS, (json.dumps(report, indent=2) + "\n").encode())
    return {"cache": str(cache), **read_digests(workdir)}


def cache_of(config: Config, workdir: Path) -> Path:
    """Returns the folder of encoded corpora and trained tokenizers, as the comment on `data.cache`.

    A workdir that has them keeps them: it is that of an older version, or of several processes.
    """
    if config.data.cache is not None:
        return Path(config.data.cache)
    in_workdir = workdir / CACHE
    if jax.process_count() > 1 or in_workdir.is_dir():
        return in_workdir
    return own_folder("corpora", "encoded corpora") or in_workdir


def _warn_of_overlap(train: list[dict[str, Any]], validation: list[dict[str, Any]]) -> None:
    """Warns if a source of validation pairs has the same text as one of the training pairs."""
    trained_on = {counts["digest"] for counts in train}
    for counts in validation:
        if counts["digest"] in trained_on:
            _log.warning(
                "data.validation: %s is in data.train too, so loss and BLEU there say nothing "
                "about other text",
                counts["name"],
            )


def read_digests(workdir: Path) -> dict[str, str]:
    """Returns the digests of "tokenizer", "train" and "validation" from corpus.json.

    Raises UserError if the file is missing or cannot be understood.
    """
    path = workdir / CORPUS
    try:
        report = json.loads(path.read_bytes())
        splits = {split: report[split]["digest"] for split in ("train", "validation")}
        return {"tokenizer": report["tokenizer"], **splits}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: cannot be read ({error!r:.80}), so nothing says what the run was trained on; "
            "put it back or use a new --workdir"
        ) from None


def _prepare_tokenizer(
    config: Config, workdir: Path, cache: Path, before: Mapping[str, str]
) -> Tokenizer:
    """Returns the workdir's tokenizer: a resumed run checks it, a new run chooses and writes it.

    `before` holds the digests that the run was trained with; it is empty for a new run.
    """
    start_from = config.train.initialize_from
    if before:
        tokenizer = _open_tokenizer(workdir, before["tokenizer"])
        _refuse_other_than(tokenizer, config.data, str(workdir))
        return tokenizer
    if start_from is None:
        tokenizer = _configured_tokenizer(config.data, cache)
    else:  # the weights were trained with the ids of that run's tokenizer
        tokenizer = load_for_inference(start_from).tokenizer
        _refuse_other_than(tokenizer, config.data, f"{start_from} (train.initialize_from)")
    replace_file(workdir / TOKENIZER, tokenizer.model_bytes)
    return tokenizer


def _open_tokenizer(workdir: Path, sha256: str) -> Tokenizer:
    """Opens the workdir's tokenizer; raises UserError if its SHA-256 is another one."""
    path = workdir / TOKENIZER
    found = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(found).hexdigest() != sha256:  # compared before any parser sees the file
        raise UserError(f"{path}: not this run's any more; every checkpoint has a copy of it")
    return open_tokenizer(found)


def _refuse_other_than(tokenizer: Tokenizer, data: DataConfig, owner: str) -> None:
    """Raises UserError if the config asks for another tokenizer than this one of `owner`."""
    if data.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"data.vocab_size is {data.vocab_size}, but the tokenizer of {owner} has "
            f"{tokenizer.vocab_size} ids"
        )
    if data.tokenizer and prepare_tokenizer(data, ()).sha256 != tokenizer.sha256:
        raise UserError(f"data.tokenizer is another than that of {owner}; leave it out")


def _configured_tokenizer(data: DataConfig, cache: Path) -> Tokenizer:
    """Returns the tokenizer in the file `data.tokenizer`, or else one trained on the text.

    A trained tokenizer is kept in the cache, as the model followed by its SHA-256, for all runs on
    the same text that ask for the same tokenizer.
    """
    if data.tokenizer:
        return prepare_tokenizer(data, ())
    sources = open_sources(data, data.train)
    digests = [source.digest for source in sources]
    asked = (data.vocab_size, data.character_coverage, data.byte_fallback, data.seed, data.errors)
    key = json.dumps([VERSION, sentencepiece.__version__, digests, asked])
    path = cache / f"{hashlib.sha256(key.encode()).hexdigest()}.tokenizer"
    with own_entry(path):
        kept = path.read_bytes() if path.is_file() else b""
        model, digest = kept[:-DIGEST_SIZE], kept[-DIGEST_SIZE:]
        if hashlib.sha256(model).digest() == digest:
            return Tokenizer(model)
        say("training the tokenizer ...")
        pairs = itertools.chain.from_iterable(source.pairs() for source in sources)
        tokenizer = prepare_tokenizer(data, itertools.chain.from_iterable(pairs))
        model = tokenizer.model_bytes
        replace_file(path, model + hashlib.sha256(model).digest())
        return tokenizer
