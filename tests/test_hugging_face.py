"""Datasets of Hugging Face as a source, with a stand-in for their library."""

import dataclasses
import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from flaxformer_min.config import DataConfig
from flaxformer_min.data import hugging_face
from flaxformer_min.data.corpus import prepare_split
from flaxformer_min.data.phrases import pair
from flaxformer_min.data.sources import open_sources
from flaxformer_min.data.tokenizer import open_tokenizer
from flaxformer_min.data.tokenizer_training import train_tokenizer
from flaxformer_min.errors import UserError

PAIRS = [(f"line {n}\n", f"Zeile\r\n{n}") for n in range(11)]
WANTED = [(f"line {n}", f"Zeile {n}") for n in range(11)]
CONFIG = DataConfig(
    source="hf:some/name:de-en",
    train=("train[:11]",),
    validation=("validation",),
    source_language="en",
    target_language="de",
    vocab_size=300,
)


class Rows:
    """What `datasets` gives: rows whose slices are columns."""

    def __init__(self, columns: dict[str, list], features: dict[str, object]) -> None:
        self.columns, self.features = columns, features

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, rows: slice) -> dict[str, list]:
        return {name: column[rows] for name, column in self.columns.items()}

    def select(self, rows: range) -> "Rows":
        chosen = {name: [col[i] for i in rows] for name, col in self.columns.items()}
        return Rows(chosen, self.features)


def flat(pairs) -> Rows:
    sides = [list(side) for side in zip(*pairs, strict=True)] or [[], []]
    return Rows(dict(zip(("en", "de"), sides, strict=True)), {"en": "text", "de": "text"})


def nested(pairs) -> Rows:
    records = [{"en": source, "de": target} for source, target in pairs]
    languages = SimpleNamespace(languages=("de", "en"))
    return Rows({"translation": records}, {"translation": languages})


@pytest.fixture
def library(monkeypatch) -> SimpleNamespace:
    """The stand-in; `asked` are the arguments that it got, `rows` what it answers."""
    library = SimpleNamespace(asked=[], rows=flat(PAIRS), disable_progress_bars=lambda: None)

    def load_dataset(*arguments, **options):
        library.asked.append((*arguments, options))
        if isinstance(library.rows, Exception):
            raise library.rows
        return library.rows

    library.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.setattr(hugging_face, "AT_ONCE", 3)
    return library


@pytest.mark.parametrize("form", [flat, nested])
def test_pairs_come_in_order_each_as_one_line_whatever_the_columns(library, form):
    library.rows = form(PAIRS)
    (source,) = open_sources(CONFIG, CONFIG.train)
    assert list(source.pairs()) == list(source.pairs()) == WANTED
    assert (source.size, source.name) == (11, "hf:some/name:de-en train[:11]")
    assert library.asked == [("some/name", "de-en", {"split": "train[:11]", "cache_dir": None})]


def test_a_folder_is_given_whole_and_dir_is_the_cache(library, tmp_path):
    open_sources(dataclasses.replace(CONFIG, source=f"hf:{tmp_path}", dir="cache"), ("train",))
    assert library.asked == [(str(tmp_path), None, {"split": "train", "cache_dir": "cache"})]


def test_another_text_or_another_number_of_pairs_has_another_digest(library):
    digests = set()
    for pairs in (PAIRS, PAIRS[:-1], [*PAIRS[:-1], ("other", "andere")]):
        library.rows = flat(pairs)
        digests.add(open_sources(CONFIG, CONFIG.train)[0].digest)
    assert len(digests) == 3


def message(config: DataConfig = CONFIG) -> str:
    with pytest.raises(UserError) as refused:
        for source in open_sources(config, ("train",)):
            list(source.pairs())
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_cannot_be_read_is_one_line_that_says_what_to_give(library):
    library.rows = ConnectionError("no\nnetwork")
    assert "cannot be read (ConnectionError: no network)" in message()
    library.rows = flat([])
    assert "'train' names no example" in message()
    library.rows = flat(PAIRS)
    text = message(dataclasses.replace(CONFIG, target_language="fr"))
    assert "data.target_language is 'fr'" in text and "en, de" in text


def test_an_example_without_text_is_named_by_its_number(library):
    hashed = flat([*PAIRS, ("no text", None)])
    library.rows = hashed
    assert "train, example 12: has no text" in message()


def test_without_the_library_the_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'flaxformer_min[hf]'" in message()


def test_the_real_library_gives_the_ids_that_files_give(tmp_path):
    datasets = pytest.importorskip("datasets")
    pairs = [pair("train", n, "en", "de") for n in range(5003)]
    columns = dict(zip(("en", "de"), map(list, zip(*pairs, strict=True)), strict=True))
    (tmp_path / "parquet").mkdir()
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "parquet" / "train.parquet")
    for language, texts in columns.items():
        (tmp_path / language).write_text("".join(f"{text}\n" for text in texts))
    from_hub = dataclasses.replace(
        CONFIG, source=f"hf:{tmp_path / 'parquet'}", train=("train",), dir=str(tmp_path / "cache")
    )
    from_files = dataclasses.replace(CONFIG, source="files", train=("en", "de"), dir=str(tmp_path))
    lines = itertools.chain(*pairs)
    wide = dataclasses.replace(from_files, vocab_size=503)
    tokenizer = open_tokenizer(train_tokenizer(lines, wide))
    found, wanted = (
        prepare_split(config, config.train, tokenizer, tmp_path / f"corpus{n}")[0]
        for n, config in enumerate((from_hub, from_files))
    )
    assert len(found) == len(wanted) == 5003
    for side in (0, 1):
        width = wanted.lengths[:, side].max()
        ids = [np.zeros((5003, width), np.int32) for _ in range(2)]
        for corpus, rows in zip((found, wanted), ids, strict=True):
            corpus.copy_rows(np.arange(5003), side, rows)
        np.testing.assert_array_equal(*ids)
