"""What a run finds in its workdir or puts there before step 1: config, tokenizer, corpora."""

import contextlib
import dataclasses
import hashlib
import json
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import sentencepiece

from flaxformer_min.checkpoints.load import FOLDER, load_for_inference
from flaxformer_min.checkpoints.retention import find_checkpoints
from flaxformer_min.config import Config
from flaxformer_min.config_rules import check_resume, config_from_json, config_to_json
from flaxformer_min.data.batching import BatchPlan
from flaxformer_min.data.corpus import EncodedCorpus, open_split, own_cache, prepare_split
from flaxformer_min.data.sources import PairSource, open_sources
from flaxformer_min.data.tokenizer import Tokenizer, prepare_tokenizer
from flaxformer_min.errors import UserError
from flaxformer_min.system.files import locked, replace_file
from flaxformer_min.system.processes import broadcast, is_first, on_first

CONFIG, TOKENIZER, CORPUS, CACHE = "config.json", "tokenizer.model", "corpus.json", "corpus"
DIGEST_SIZE = hashlib.sha256().digest_size


class Data(NamedTuple):
    """What the files of a run became."""

    tokenizer: Tokenizer
    train: EncodedCorpus
    validation: EncodedCorpus
    plan: BatchPlan


@contextlib.contextmanager
def hold(workdir: Path) -> Generator[None, None, None]:
    """A context in which the workdir is this run's alone; makes it where there is none.

    Of several processes the first holds it for all.

    Raises UserError where another process holds it, or where it is no workdir of a run.
    """
    if not is_first():
        yield
        return
    _config_there(workdir)  # before anything is put into a directory of something else
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"--workdir {workdir}: is a file; give a directory") from None
    with contextlib.ExitStack() as lock:
        try:
            lock.enter_context(locked(workdir / "lock", wait=False))
        except BlockingIOError:
            raise UserError(
                f"--workdir {workdir}: another run is at work in it; wait for it or use another"
            ) from None
        yield


def claim(workdir: Path, config: Config) -> None:
    """Makes a workdir that is held the one of this run.

    With checkpoints in it, it must be a run of the same config. Without, every start is a fresh
    one: it forgets what a start that came to nothing left.

    Raises UserError naming what differs.
    """
    before = _config_there(workdir)
    if before is not None and _resumes(workdir):
        check_resume(before, config)
    else:
        for name in (TOKENIZER, CORPUS):
            (workdir / name).unlink(missing_ok=True)
        write_config(workdir, config)  # first of all: it marks what follows as a run's


def cache_programs(workdir: Path) -> None:
    """Compiled programs are kept in the workdir, unless JAX was told another place."""
    if not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(workdir.absolute() / "compiled"))


def write_config(workdir: Path, config: Config) -> None:
    """Writes config.json: on a resume when nothing can be refused any more."""
    replace_file(workdir / CONFIG, config_to_json(config).encode())


def prepare_data(config: Config, workdir: Path) -> Data:
    """Tokenizer, encoded corpora and the plan of batches; writes corpus.json, the corpus report.

    Raises UserError if a resumed run would train on another corpus or tokenizer than before.
    """
    before = _digests(workdir) if _resumes(workdir) else {}
    tokenizer = _tokenizer(config, workdir, before.get("tokenizer"))
    cache = workdir / CACHE
    train, train_report = prepare_split(config.data, config.data.train, tokenizer, cache)
    if before and before["train"] != train_report["digest"]:
        raise UserError(f"data.train: {workdir} was trained on other text; use a new --workdir")
    validation, validation_report = prepare_split(
        config.data, config.data.validation, tokenizer, cache, keep_all=True
    )
    plan = BatchPlan(train.lengths, config.data)
    report = {
        "tokenizer": tokenizer.sha256,
        "train": train_report,
        "validation": validation_report,
    }
    replace_file(workdir / CORPUS, (json.dumps(report, indent=2) + "\n").encode())
    return Data(tokenizer, train, validation, plan)


def shared_data(config: Config, workdir: Path) -> Data:
    """`claim` and `prepare_data`, done by process 0; the others wait and open what it made."""

    def prepare() -> Data:
        claim(workdir, config)
        return prepare_data(config, workdir)

    data = on_first(prepare)
    digests = broadcast(lambda: _digests(workdir))
    return open_data(config, workdir, digests) if data is None else data


def open_data(config: Config, workdir: Path, digests: Mapping[str, str]) -> Data:
    """What process 0 prepared; raises UserError where this process does not see it."""
    try:
        tokenizer = Tokenizer.load(workdir / TOKENIZER)
        train, validation = (
            open_split(workdir / CACHE, digests[split], tokenizer)
            for split in ("train", "validation")
        )
    except (OSError, UserError) as error:
        raise UserError(
            f"--workdir {workdir}: must be on a disk that all processes share: {error}"
        ) from error
    assert tokenizer.sha256 == digests["tokenizer"]
    return Data(tokenizer, train, validation, BatchPlan(train.lengths, config.data))


def _config_there(workdir: Path) -> Config | None:
    """The config of the run that has this workdir, if one has; refuses what is not a run's."""
    path = workdir / CONFIG
    if not path.exists():
        for name in (FOLDER, TOKENIZER):
            if (workdir / name).exists():
                raise UserError(f"{workdir}: has {name} but no {CONFIG}; use another --workdir")
        return None
    try:
        return config_from_json(path.read_text(encoding="utf-8"))
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}; use another --workdir") from None


def _resumes(workdir: Path) -> bool:
    return bool(find_checkpoints(workdir / FOLDER))


def _digests(workdir: Path) -> dict[str, str]:
    """What corpus.json says of the run: digests of its "tokenizer", "train" and "validation"."""
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


def _tokenizer(config: Config, workdir: Path, sha256: str | None) -> Tokenizer:
    """The workdir's tokenizer, which on a resume has this digest; put there when the run starts."""
    path, start_from = workdir / TOKENIZER, config.train.initialize_from
    if sha256 is not None:
        found = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(found).hexdigest() != sha256:  # checked before any parser sees it
            raise UserError(f"{path}: not this run's any more; every checkpoint has a copy of it")
        tokenizer = Tokenizer(found)
        _refuse_another(tokenizer, config, str(workdir))
        return tokenizer
    if start_from is None:
        tokenizer = _from_text(config, workdir / CACHE)
    else:  # the weights know no other
        tokenizer = load_for_inference(start_from).tokenizer
        _refuse_another(tokenizer, config, f"{start_from} (train.initialize_from)")
    replace_file(path, tokenizer.model_bytes)
    return tokenizer


def _refuse_another(tokenizer: Tokenizer, config: Config, owner: str) -> None:
    """Raises UserError where the config asks for another tokenizer than the `owner`'s."""
    data = config.data
    if data.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"data.vocab_size is {data.vocab_size}, but the tokenizer of {owner} has "
            f"{tokenizer.vocab_size} ids"
        )
    if data.tokenizer and prepare_tokenizer(data, ()).sha256 != tokenizer.sha256:
        raise UserError(f"data.tokenizer is another than that of {owner}; leave it out")


def _from_text(config: Config, cache: Path) -> Tokenizer:
    """The config's tokenizer: its file's, or one trained on its text, where no earlier start did.

    What is kept of an earlier start is the model and its digest.
    """
    if config.data.tokenizer:
        return prepare_tokenizer(config.data, ())
    sources = open_sources(config.data, config.data.train)
    texts, asked = [source.digest for source in sources], dataclasses.asdict(config.data)
    decides = json.dumps([sentencepiece.__version__, texts, asked])
    path = cache / f"{hashlib.sha256(decides.encode()).hexdigest()}.tokenizer"
    with own_cache(cache):
        kept = path.read_bytes() if path.is_file() else b""
        model, digest = kept[:-DIGEST_SIZE], kept[-DIGEST_SIZE:]
        if hashlib.sha256(model).digest() == digest:
            return Tokenizer(model)
        tokenizer = prepare_tokenizer(config.data, _lines(sources))
        model = tokenizer.model_bytes
        replace_file(path, model + hashlib.sha256(model).digest())
        return tokenizer


def _lines(sources: Sequence[PairSource]) -> Iterator[str]:
    """Every line of both languages."""
    if sys.stderr.isatty():
        print("training the tokenizer ...", file=sys.stderr)
    for source in sources:
        for pair in source.pairs():
            yield from pair
