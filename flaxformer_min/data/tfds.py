"""Prepares translation datasets of TensorFlow Datasets (TFDS) if need be, and reads them.

TensorFlow is not needed. Datasets are prepared as array_record, which TFDS reads by itself.
Datasets that somebody else prepared as tfrecord, the default of TFDS, are read by `read_tfrecord`.
"""

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import logging
import os
import struct
import sys
import textwrap
import types
from collections.abc import Generator, Iterator
from pathlib import Path
from unittest import mock

import tensorflow_datasets as tfds
import tensorflow_datasets.translate as translation  # this registers the datasets by name
from google.protobuf.message import DecodeError
from tensorflow_datasets.core.download import downloader, extractor

from flaxformer_min.config import DataConfig
from flaxformer_min.data.pairs import PairSource, one_line
from flaxformer_min.errors import UserError, nearest
from flaxformer_min.system.files import locked

AT_ONCE = 1024  # examples; one by one, array_record is many times slower
HASHED_EXAMPLES = 16  # the first examples of each file
RETRIES = 2  # of a download that fails
TIMEOUTS = 4, 60  # seconds until a host has answered, and between two parts of an answer


def open_dataset(config: DataConfig) -> tfds.core.DatasetBuilder:
    """Opens the dataset that `data.source` names; prepares it first if it is not prepared yet.

    The dataset lies in `data.dir`; the default, ".", means TFDS_DATA_DIR or else TFDS's own folder.
    Preparing uses the archives in `downloads/manual` of that folder and downloads all others.
    Raises UserError if there is no such dataset or config, if it has no text in one of the
    languages, or if it cannot be prepared.
    """
    name = config.source.removeprefix("tfds:")
    folder = os.environ.get("TFDS_DATA_DIR") or None if config.dir == "." else config.dir
    with contextlib.redirect_stdout(sys.stderr):  # TFDS prints
        builder = _builder(name, folder)
        _check_languages(builder, config)
        if not builder.is_prepared():
            _prepare(builder, config.source)
            builder = _builder(name, folder)
    return builder


def open_texts(builder: tfds.core.DatasetBuilder, config: DataConfig, name: str) -> PairSource:
    """Opens a split or slice, named in TFDS's notation; its pairs come in the stored order.

    The digest is the same however and wherever the dataset was prepared. It covers the dataset's
    version, the number of examples in each file, the bytes of all examples together and the first
    few texts of each file. TFDS has shuffled the examples, so a change of the text goes unnoticed
    only if it leaves all these as they were.
    Raises UserError if the dataset has no such split or it is empty; reading raises UserError if
    text is not UTF-8 or a file is damaged.
    """
    splits = builder.info.splits
    try:
        size, parts = splits[name].num_examples, splits[name].file_instructions
    except (ValueError, NotImplementedError):
        size, parts = 0, []
    if size < 1:
        there = ", ".join(f"{key} ({split.num_examples} examples)" for key, split in splits.items())
        raise UserError(
            f"{config.source}: {name!r} names no example of its splits, which are {there}; "
            "write 'train' or a slice such as 'train[:7]' or 'train[:1%]'"
        )
    languages = config.source_language, config.target_language

    def pairs(most: int = sys.maxsize) -> Iterator[tuple[str, str]]:
        texts = _texts(builder, name, languages, most)
        for number, (source, target) in enumerate(texts, start=1):
            place = f"{config.source} {name}, example {number}"
            yield _line(source, place, config.errors), _line(target, place, config.errors)

    files = {part.filename for part in parts}
    stored = [
        [split.num_bytes, split.shard_lengths]
        for split in splits.values()
        if files & set(map(str, split.filepaths))
    ]
    slices = [[part.skip, part.take] for part in parts]
    first = list(pairs(HASHED_EXAMPLES))
    text = json.dumps([builder.info.full_name, languages, stored, slices, first])
    digest = hashlib.sha256(text.encode()).hexdigest()
    return PairSource(f"{config.source} {name}", digest, size, pairs)


def read_tfrecord(path: str | Path) -> Iterator[bytes]:
    """Yields the records of a tfrecord file; their checksums are not compared.

    A record is its length (8 bytes, little-endian), 4 bytes of checksum, its content and 4 more
    bytes of checksum. Raises EOFError where the file ends within a record.
    """
    with open(path, "rb") as file:
        end = os.fstat(file.fileno()).st_size
        while header := file.read(12):
            length = struct.unpack("<Q", header[:8])[0] if len(header) == 12 else end
            if length + 4 > end - file.tell():
                raise EOFError(f"{path} ends within a record")
            yield file.read(length)
            file.seek(4, os.SEEK_CUR)


def _texts(
    builder: tfds.core.DatasetBuilder, name: str, languages: tuple[str, str], most: int
) -> Iterator[tuple[bytes, bytes]]:
    """Yields source and target of a split's examples in order, at most `most` from each file."""
    read = _tfrecord if builder.info.file_format == tfds.core.FileFormat.TFRECORD else _array_record
    try:
        for record in read(builder, name, most):
            example = builder.info.features.deserialize_example_np(record)
            source, target = (example[key] for key in languages)
            if source is None or target is None:  # array_record reads a file cut short like this
                raise EOFError("an example without text")
            yield source, target
    except (OSError, EOFError, RuntimeError, DecodeError) as error:
        raise UserError(
            f"{builder.info.full_name}: {_one_line(error)}; delete {builder.data_dir} and repeat "
            "the command to prepare it anew"
        ) from error


def _array_record(builder: tfds.core.DatasetBuilder, name: str, most: int) -> Iterator[bytes]:
    """Yields the serialised examples of a split, at most `most` from each file."""
    raw = tfds.decode.DeserializeMethod.RAW_BYTES
    source, start = builder.as_data_source(name, deserialize_method=raw), 0
    for part in builder.info.splits[name].file_instructions:
        end = start + min(part.take, most)
        for first in range(start, end, AT_ONCE):
            yield from source.__getitems__(range(first, min(first + AT_ONCE, end)))
        start += part.take


def _tfrecord(builder: tfds.core.DatasetBuilder, name: str, most: int) -> Iterator[bytes]:
    """Yields the serialised examples of a split, at most `most` from each file."""
    for part in builder.info.splits[name].file_instructions:
        records, count = read_tfrecord(part.filename), min(part.take, most)
        for record in itertools.islice(records, part.skip, part.skip + count):
            count -= 1
            yield record
        if count:
            raise EOFError(f"{part.filename} lacks {count} examples")


def _line(text: bytes, place: str, errors: str) -> str:
    try:
        return one_line(text.decode(errors=errors))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place}: not UTF-8 ({error.reason}); data.errors 'replace' reads it"
        ) from None


def _builder(name: str, folder: str | None) -> tfds.core.DatasetBuilder:
    try:
        return tfds.builder(name, data_dir=folder)
    except tfds.core.DatasetNotFoundError:
        raise UserError(_unknown_dataset(name, folder)) from None
    except Exception as error:  # TFDS raises what it likes
        raise UserError(_unknown_config(name, error)) from error


def _check_languages(builder: tfds.core.DatasetBuilder, config: DataConfig) -> None:
    """Raises UserError if the dataset has no text in one of the two languages."""
    kind, texts = builder.info.features, []
    if isinstance(kind, tfds.features.FeaturesDict):
        texts = [key for key, value in kind.items() if isinstance(value, tfds.features.Text)]
    for side in ("source_language", "target_language"):
        if getattr(config, side) not in texts:
            configs = textwrap.shorten(", ".join(builder.builder_configs), 200)
            raise UserError(
                f"data.{side} is {getattr(config, side)!r}, but the texts of "
                f"{builder.info.full_name} are {', '.join(texts) or 'none'} "
                f"({builder.name} has the configs {configs or 'of that folder'})"
            )


def _prepare(builder: tfds.core.DatasetBuilder, source: str) -> None:
    """Downloads and prepares a dataset, in one process at a time."""
    folder = Path(builder.data_dir_root)
    print(f"preparing {source} in {folder}", file=sys.stderr)
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = locked(folder / "lock", wait=True)
        with lock, _unpacking_without_tensorflow(), _giving_up_soon():
            if not builder.is_prepared():  # by another process in the meantime
                builder.download_and_prepare(file_format="array_record")
    except ImportError as error:
        package = f"`pip install {error.name}`" if error.name else "install it"
        raise UserError(
            f"{source}: preparing needs a package ({_one_line(error)}); {package}, here or where "
            "you prepare it: reading does not need it"
        ) from error
    except Exception as error:  # the network, the disk, the archives, the code of a dataset
        raise UserError(
            f"{source}: cannot be prepared in {folder} ({_one_line(error)}); archives that it "
            f"cannot download you can put into {folder / 'downloads' / 'manual'}"
        ) from error


@contextlib.contextmanager
def _giving_up_soon() -> Generator[None]:
    """A context in which TFDS gives up a host that does not answer after seconds, and silently.

    By itself it waits without end and tries ten times again, with a warning each.
    """
    session = downloader.requests.Session
    get = functools.partialmethod(session.get, timeout=TIMEOUTS)
    warnings = logging.getLogger("urllib3.connectionpool")
    with (
        mock.patch.object(downloader, "MAX_RETRIES", RETRIES),
        mock.patch.object(session, "get", get),
        mock.patch.object(warnings, "disabled", True),
    ):
        yield


def _unpacking_without_tensorflow() -> contextlib.AbstractContextManager:
    """A context in which TFDS unpacks archives without TensorFlow, if that is not installed.

    TFDS calls two functions of TensorFlow for it, which are replaced by Python's own.
    """
    if importlib.util.find_spec("tensorflow"):
        return contextlib.nullcontext()
    here = types.SimpleNamespace
    stand_in = here(io=here(gfile=here(GFile=open)), compat=here(as_text=str))
    return mock.patch.object(extractor, "tf", stand_in)


def _unknown_dataset(name: str, folder: str | None) -> str:
    classes = [key for key in dir(translation) if key[0].isupper() and not key.endswith("Config")]
    known = [tfds.core.naming.camelcase_to_snakecase(key) for key in classes]
    return (
        f"tfds:{name}: no such dataset in TFDS, and none prepared in "
        f"{folder or tfds.core.constants.DATA_DIR}; "
        f"did you mean {nearest(name.partition('/')[0], known)}?"
    )


def _unknown_config(name: str, error: Exception) -> str:
    dataset, _, config = name.partition("/")
    try:
        known = list(tfds.builder_cls(dataset).builder_configs)
    except (ValueError, ImportError):  # not even a name, or one of a community that needs more
        known = []
    if not known or config.partition(":")[0] in known:
        return f"tfds:{name}: {_one_line(error)}"
    meant = nearest(config, known)
    return f"tfds:{name}: {dataset} has no config {config!r}; did you mean {meant}?"


def _one_line(error: Exception) -> str:
    """Returns an error's text, which TFDS spreads over many lines, in one of 300 characters."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300)
