"""TFDS without TensorFlow: the real WMT14 builder over tiny archives, and a small one of ours."""

import dataclasses
import fcntl
import io
import itertools
import json
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import tensorflow_datasets as tfds
from tensorboardX.record_writer import RecordWriter
from tensorflow_datasets.core.download import downloader
from tensorflow_datasets.core.download.download_manager import DownloadManager
from tensorflow_datasets.core.utils.lazy_imports_utils import tensorflow as lazy_tensorflow

from flaxformer_min.cli import main
from flaxformer_min.config import DataConfig
from flaxformer_min.data.pairs import PairSource
from flaxformer_min.data.sources import open_sources, read_pairs
from flaxformer_min.data.tfds import read_tfrecord
from flaxformer_min.errors import UserError
from tools import tiny_config

WMT14 = "tfds:wmt14_translate/de-en"
TRAIN, TEST = 200, 7  # pairs, those of the tiny corpus
ROOT = Path(__file__).parent.parent


def archive(path: Path, files: dict[str, list[str]]) -> None:
    """A .tgz of text files."""
    with tarfile.open(path, "w:gz") as tar:
        for name, lines in files.items():
            info, content = tarfile.TarInfo(name), "\n".join(lines).encode()
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def segments(lines: list[str]) -> list[str]:
    return [f'<seg id="{i}">{line}</seg>' for i, line in enumerate(lines, 1)]


def write_archives(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """The archives that the builder asks for; returns the pairs of each split, English first."""
    folder.mkdir(parents=True)
    tiny_config.write_corpus(folder, TRAIN, TEST)
    text = {path.name: path.read_text().splitlines() for path in folder.iterdir()}
    names = "training/europarl-v7", "commoncrawl", "training/news-commentary-v9"
    archives = "europarl-v7", "commoncrawl", "nc-v9"
    for part, (name, packed) in enumerate(zip(names, archives, strict=True)):
        files = {f"{name}.de-en.{side}": text[f"train.{side}"][part::3] for side in ("de", "en")}
        archive(folder / f"training-parallel-{packed}.tgz", files)
    source, target = (segments(text[f"validation.{side}"]) for side in ("de", "en"))
    archive(
        folder / "dev.tgz",
        {
            "dev/newstest2013.de": text["validation.de"],
            "dev/newstest2013.en": text["validation.en"],
            "dev/newstest2014-deen-src.de.sgm": source,
            "dev/newstest2014-deen-ref.en.sgm": target,
        },
    )
    train, short = (
        list(zip(text[f"{name}.en"], text[f"{name}.de"], strict=True))
        for name in ("train", "validation")
    )
    return {"train": train, "validation": short, "test": short}


@pytest.fixture(scope="module")
def wmt14(tmp_path_factory) -> tuple[Path, dict[str, list[tuple[str, str]]]]:
    """A folder in which the real builder has prepared WMT14 from tiny archives, and their pairs."""
    folder = tmp_path_factory.mktemp("tfds")
    pairs = write_archives(folder / "downloads" / "manual")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DownloadManager, "_register_or_validate_checksums", lambda *_, **__: None)
        open_sources(config_of(folder, source=WMT14), ("train",))
    return folder, pairs


def config_of(folder: Path | str, **values) -> DataConfig:
    known = {
        "source": "tfds:tiny_pairs",
        "dir": str(folder),
        "train": ("train",),
        "validation": ("test",),
        "source_language": "en",
        "target_language": "de",
        "vocab_size": 300,
    }
    return DataConfig(**(known | values))


# The real builder


@pytest.mark.run
def test_wmt14_trains_evaluates_and_is_scored_without_tensorflow(wmt14, tmp_path, capsys):
    folder, _ = wmt14
    flags = f"--data.source {WMT14} --data.dir {folder} --data.train train --data.validation"
    flags += " validation --data.test test --train.steps 20 --train.evaluate_every 20"
    flags += " --train.checkpoint_every 10"
    recipe = f"{tiny_config.__file__}:{tmp_path}"
    workdir = tmp_path / "run"
    command = ["train", "--config", recipe, "--workdir", str(workdir), *flags.split()]
    assert main(command) == 0
    records = list(map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines()))
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 21))
    (scored,) = [r["bleu"] for r in records if "bleu" in r]
    assert scored["lines"] == TEST and scored["step"] == 20 and scored["signature"]
    report = json.loads((workdir / "corpus.json").read_text())
    assert report["train"]["sources"][0]["name"] == f"{WMT14} train"
    assert report["train"]["sources"][0]["read"] == TRAIN
    capsys.readouterr()
    assert main(["evaluate", str(workdir)]) == 0
    assert json.loads(capsys.readouterr().out)["lines"] == TEST
    assert "tensorflow" not in sys.modules


def test_every_pair_of_the_archives_comes_once_in_the_direction_asked_for(wmt14):
    folder, pairs = wmt14
    for split, expected in pairs.items():
        there = config_of(folder, source=WMT14)
        back = dataclasses.replace(there, source_language="de", target_language="en")
        assert sorted(read_pairs(there, (split,))) == sorted(expected)
        turned = [(source, target) for target, source in read_pairs(back, (split,))]
        assert turned == list(read_pairs(there, (split,)))


def test_what_tfds_prints_while_it_prepares_does_not_go_to_standard_output(tmp_path, capsys):
    open_sources(config_of(tmp_path), ("train",))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"preparing tfds:tiny_pairs in {tmp_path}\n" in captured.err


# A builder of our own: several files a split, awkward text, other formats


class TinyPairs(tfds.core.GeneratorBasedBuilder):
    """53 training and 7 test pairs; the training texts hold what texts may hold."""

    VERSION = tfds.core.Version("1.2.3")
    awkward: ClassVar = {
        5: ("ends in a line break\n", "und so\r\n"),
        6: ("two\nlines\r\nor three", "\n"),
        7: (" kept: \u2028 \x85 \x0c \r ", "\n\n"),
    }

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.Translation(("en", "de"))
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self.examples("train", 53), "test": self.examples("test", 7)}

    def examples(self, split: str, size: int) -> Iterator[tuple[str, dict[str, str]]]:
        for index in range(size):
            pair = f"{split} {index}", f"{split} Nr. {index}"
            if split == "train":
                pair = self.awkward.get(index, pair)
            yield f"{index}", dict(zip(("en", "de"), pair, strict=True))

    def _generate_examples(self, *arguments):
        raise AssertionError("the generators are above")


class NeedsTensorFlow(TinyPairs):
    """A builder that asks for TensorFlow, as many of TFDS's do."""

    def _split_generators(self, dl_manager):
        return lazy_tensorflow.io.gfile.listdir(".")


class OneText(TinyPairs):
    """No translation: a text and a number."""

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"en": tfds.features.Text(), "de": np.int64})
        return tfds.core.DatasetInfo(builder=self, features=features)


def prepared(folder: Path, shards: int = 3, file_format: str = "array_record") -> Path:
    """The version's folder of `TinyPairs`, prepared below `folder` in so many files a split."""
    builder = TinyPairs(data_dir=str(folder))
    download = tfds.download.DownloadConfig(num_shards=shards)
    builder.download_and_prepare(download_config=download, file_format="array_record")
    if file_format == "tfrecord":
        to_tfrecord(builder)
    return Path(builder.data_dir)


def to_tfrecord(builder: tfds.core.DatasetBuilder) -> None:
    """Turns a prepared dataset into what TFDS prepares by default where there is TensorFlow."""
    folder = Path(builder.data_dir)
    for split, info in builder.info.splits.items():
        raw = iter(
            builder.as_data_source(
                split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES
            )
        )
        for path, length in zip(info.filepaths, info.shard_lengths, strict=True):
            name = path.name.replace("array_record", "tfrecord")
            write_tfrecord(folder / name, itertools.islice(raw, length))
            (folder / path.name).unlink()
    change_info(folder, '"array_record"', '"tfrecord"')


def write_tfrecord(path: Path, records: Iterable[bytes]) -> None:
    """A file by another program: TensorBoard's events are tfrecords too."""
    writer = RecordWriter(str(path))
    for record in records:
        writer.write(record)
    writer.close()


def change_info(folder: Path, before: str, after: str) -> None:
    path = folder / "dataset_info.json"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def only(sources: list[PairSource]) -> PairSource:
    (source,) = sources
    return source


@pytest.fixture(scope="module", params=["array_record", "tfrecord"])
def tiny_pairs(request, tmp_path_factory) -> Path:
    """A folder with `TinyPairs` in three files a split."""
    folder = tmp_path_factory.mktemp(request.param)
    assert list(prepared(folder, 3, request.param).glob(f"*train.{request.param}-0000?-of-00003"))
    return folder


def test_a_slice_is_that_slice_of_the_split_across_its_files(tiny_pairs):
    config = config_of(tiny_pairs)
    pairs = list(read_pairs(config, ("train",)))
    test = list(read_pairs(config, ("test",)))
    assert len(set(pairs)) == 53 and len(set(test)) == 7
    for name, expected in {
        "train[:7]": pairs[:7],
        "train[16:20]": pairs[16:20],  # 18 examples are in the first file
        "train[-3:]": pairs[-3:],
        "train[:10%]": pairs[:5],
        "train[50%:]": pairs[26:],
        "train[11:23]+test": pairs[11:23] + test,
    }.items():
        source = only(open_sources(config, (name,)))
        assert (list(source.pairs()), source.size) == (expected, len(expected)), name
        assert list(source.pairs()) == expected  # and once more
    names = ("test", "train[52:]", "test[:1]")
    assert [source.size for source in open_sources(config, names)] == [7, 1, 1]
    assert list(read_pairs(config, names)) == [*test, pairs[52], test[0]]


def test_every_text_is_one_line(tiny_pairs):
    pairs = set(read_pairs(config_of(tiny_pairs), ("train",)))
    assert pairs >= {
        ("ends in a line break", "und so"),
        ("two lines or three", ""),
        (" kept: \u2028 \x85 \x0c \r ", " "),
    }


def test_the_digest_is_that_of_the_text_however_it_was_prepared(tiny_pairs, tmp_path):
    names = ("train", "train[:16]", "train[:17]", "train[17:]", "test")  # 16 are hashed of a file
    here = [source.digest for source in open_sources(config_of(tiny_pairs), names)]
    prepared(tmp_path)
    there = [source.digest for source in open_sources(config_of(tmp_path), names)]
    assert here == there and len(set(there)) == 5
    back = config_of(tmp_path, source_language="de", target_language="en")
    assert only(open_sources(back, ("train",))).digest not in there


@pytest.mark.parametrize("change", ["a letter", "a text", "the version"])
def test_the_digest_notices_changed_data(change, tmp_path, monkeypatch):
    prepared(tmp_path / "before")
    before = open_sources(config_of(tmp_path / "before"), ("train", "test"))
    changed = {"a letter": {3: ("train 3", "train Nr. 8")}, "a text": {52: ("train 52", "52")}}
    monkeypatch.setattr(TinyPairs, "awkward", TinyPairs.awkward | changed.get(change, {}))
    if change == "the version":
        monkeypatch.setattr(TinyPairs, "VERSION", tfds.core.Version("1.3.0"))
    prepared(tmp_path / "after")
    after = open_sources(config_of(tmp_path / "after"), ("train", "test"))
    assert before[0].digest != after[0].digest
    assert (before[1].digest != after[1].digest) == (change == "the version")


def test_a_dataset_without_its_code_is_read_from_its_folder(tmp_path):
    folder = prepared(tmp_path)
    for path in folder.iterdir():
        path.rename(path.with_name(path.name.replace("tiny_pairs", "someones_pairs")))
    change_info(folder, "tiny_pairs", "someones_pairs")
    folder.parent.rename(tmp_path / "someones_pairs")
    config = config_of(tmp_path, source="tfds:someones_pairs")
    assert len(set(read_pairs(config, ("train",)))) == 53


# Where


def test_the_folder_is_data_dir_or_tfds_data_dir(tiny_pairs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tiny_pairs))
    assert len(list(read_pairs(config_of("."), ("test",)))) == 7
    assert not (tmp_path / "tiny_pairs").exists()
    assert len(list(read_pairs(config_of(tmp_path), ("test",)))) == 7
    assert (tmp_path / "tiny_pairs").exists()


def test_without_either_it_is_where_tfds_looks(tiny_pairs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    tfds.core.add_data_dir(str(tiny_pairs))
    try:
        assert len(list(read_pairs(config_of("."), ("test",)))) == 7
    finally:
        tfds.core.utils.file_utils.clear_registered_data_dirs()
    assert list(tmp_path.iterdir()) == []


def test_a_process_waits_for_another_that_prepares_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(NeedsTensorFlow, "name", "tiny_pairs")  # this process could not do it
    monkeypatch.setattr(TinyPairs, "_split_generators", NeedsTensorFlow._split_generators)
    sizes = []

    def wait() -> None:
        sizes.append(only(open_sources(config_of(tmp_path), ("train",))).size)

    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)
        monkeypatch.undo()
        prepared(tmp_path)
        assert sizes == []
    thread.join()
    assert sizes == [53]


def test_tfds_is_imported_only_where_it_is_used():
    check = (
        "import sys, flaxformer_min.data.sources; "
        "sys.exit(any(name in sys.modules for name in ('tensorflow_datasets', 'tensorflow')))"
    )
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT).returncode == 0


# Mistakes


def message_of(config: DataConfig, name: str = "train") -> str:
    with pytest.raises(UserError) as caught:
        list(only(open_sources(config, (name,))).pairs())
    message = str(caught.value)
    assert "\n" not in message and len(message) < 800
    return message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("tfds:wmt14_translat/de-en", ("no such dataset", "mean wmt14_translate?")),
        ("tfds:wmt14", ("no such dataset", "mean wmt14_translate?")),
        ("tfds:wmt14_translate/en-de", ("no config 'en-de'", "mean de-en?")),
        ("tfds:wmt14_translate/de-en:0.9.0", ("0.9.0", "only: 1.0.0")),
        ("tfds:wmt14_translate", ("data.target_language is 'de'", "are cs, en", "de-en")),
        ("tfds:one_text", ("data.target_language is 'de'", "are en ")),
        ("tfds:mnist", ("data.source_language is 'en'", "are none")),
        ("tfds:/", ("tfds:/: ValueError",)),
    ],
)
def test_a_wrong_dataset_config_or_language_is_named_with_the_right_ones(tmp_path, source, words):
    message = message_of(config_of(tmp_path, source=source))
    assert all(word in message for word in words), message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["dev", "train[:54]", "train[x]", "all[:5]", "train[:0]", "train[5:2]", "", "train+dev"]
)
def test_a_split_that_is_not_there_is_named_with_those_that_are(tiny_pairs, name):
    message = message_of(config_of(tiny_pairs), name)
    assert repr(name) in message and "train (53 examples), test (7 examples)" in message


def test_without_a_network_the_error_says_where_archives_can_lie(tmp_path, monkeypatch, caplog):
    for key in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(key, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    asked, send = [], downloader.requests.Session.request
    monkeypatch.setattr(
        downloader.requests.Session,
        "request",
        lambda *arguments, **options: asked.append(options) or send(*arguments, **options),
    )
    message = message_of(config_of(tmp_path, source=WMT14))
    assert "europarl-v7.tgz" in message and "\n" not in message
    # Each try waits for seconds at most; nobody hears of those that are followed by another one.
    assert {sum(options["timeout"][:1]) for options in asked} == {4}
    assert downloader.MAX_RETRIES == 10  # and other users of TFDS in this process are as before
    assert [record for record in caplog.records if record.name.startswith("urllib3")] == []
    assert f"you can put into {tmp_path}/downloads/manual" in message


def test_an_archive_with_another_checksum_is_refused(tmp_path):
    write_archives(tmp_path / "downloads" / "manual")
    message = message_of(config_of(tmp_path, source=WMT14))
    assert "NonMatchingChecksumError" in message and "europarl-v7.tgz" in message
    assert not list(tmp_path.glob("wmt14_translate/de-en/*"))


def test_a_builder_that_needs_tensorflow_says_what_to_install(tmp_path):
    message = message_of(config_of(tmp_path, source="tfds:needs_tensor_flow"))
    assert "pip install tensorflow" in message


def test_text_that_is_not_utf8_is_named_by_its_place(tmp_path):
    folder = prepared(tmp_path, 1, "tfrecord")
    (path,) = folder.glob("*train.tfrecord*")
    path.write_bytes(path.read_bytes().replace(b"train 11", b"train \xff1"))
    config = config_of(tmp_path)
    message = message_of(config)
    place = int(message.partition("example ")[2].partition(":")[0])
    assert message.startswith("tfds:tiny_pairs train") and "not UTF-8" in message
    if place > 1:
        list(read_pairs(config, (f"train[:{place - 1}]",)))
    assert "example 1:" in message_of(config, f"train[{place - 1}:]")
    replacing = config_of(tmp_path, errors="replace")
    lines = {line for pair in read_pairs(replacing, ("train",)) for line in pair}
    assert len([line for line in lines if "\ufffd" in line]) > 0


DAMAGES = ("cut", "missing", "fewer", "overwritten")


@pytest.mark.parametrize(
    ("file_format", "damage"),
    [*itertools.product(("array_record", "tfrecord"), DAMAGES), ("tfrecord", "scrambled")],
)
def test_a_damaged_file_is_named_with_the_mend(tmp_path, file_format, damage):
    folder = prepared(tmp_path, 1, file_format)
    (path,) = folder.glob(f"*train.{file_format}*")
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "missing":
        path.unlink()
    elif damage == "overwritten":
        path.write_bytes(b"\xff" * len(content))
    elif damage == "scrambled":  # within the first record
        path.write_bytes(content[:12] + b"\xff" * 20 + content[32:])
    else:
        change_info(folder, '"53"', '"54"')
    assert f"delete {folder}" in message_of(config_of(tmp_path))


def test_a_cut_tfrecord_ends_within_a_record_or_between_two(tmp_path):
    records = [b"first", b"", b"third" * 7]
    path = tmp_path / "cut"
    write_tfrecord(path, records)
    content, ends = path.read_bytes(), (5 + 16, 5 + 16 + 16, 5 + 16 + 16 + 35 + 16)
    assert len(content) == ends[-1]
    for end in range(len(content) + 1):
        path.write_bytes(content[:end])
        whole = [record for record, stop in zip(records, ends, strict=True) if stop <= end]
        reader = read_tfrecord(path)
        assert list(itertools.islice(reader, len(whole))) == whole
        if end in (0, *ends):
            assert list(reader) == []
        else:
            with pytest.raises(EOFError, match="cut ends within a record"):
                next(reader)
