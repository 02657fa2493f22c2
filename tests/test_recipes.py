"""Policies of the whole project: recipes, parameter counts, fields, pins."""

import ast
import dataclasses
import functools
import importlib.metadata
import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flaxformer_min import cli
from flaxformer_min.config import FIELD_TYPES, ModelConfig, flat
from flaxformer_min.config_file import load_config
from flaxformer_min.config_rules import config_from_json, config_to_json
from flaxformer_min.decoding.options import IN_CONFIG
from flaxformer_min.model.build import count_parameters, split_model

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "flaxformer_min").rglob("*.py"))
RECIPES = sorted((ROOT / "configs").glob("*.py"))


def variants(path: Path) -> list[str]:
    """The keys of a config file's VARIANTS, none if it has no such dict."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VARIANTS":
            return [ast.literal_eval(key) for key in node.value.keys]
    return []


def specs(path: Path) -> list[str]:
    """Every FILE or FILE:ARG that can be made from a config file."""
    return [f"{path}:{name}" for name in variants(path)] or [str(path)]


SPECS = {spec.split("configs/")[-1]: spec for path in RECIPES for spec in specs(path)}


# Recipes


@pytest.mark.parametrize("name", SPECS)
def test_every_recipe_loads_and_survives_json(name: str) -> None:
    config = load_config(SPECS[name], [])
    assert config_from_json(config_to_json(config)) == config


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_says_what_to_expect_and_how_to_run_it(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text()))
    for word in ("Data", "Expected", "Hardware", "Time", "Command"):
        assert re.search(rf"\b{word}\b", text), word
    for name in variants(path):
        assert re.search(rf"^{re.escape(name)}\b", text, re.MULTILINE), name
    for name in re.findall(r"--config configs/(\S+)", text):
        assert name in SPECS


@pytest.mark.parametrize("variant", ["cpu", "published", "regularised"])
def test_the_recipe_of_the_published_figures_is_as_it_was_run(variant: str) -> None:
    """Who changes it on purpose runs it again, and writes RESULTS.md and the golden file anew."""
    golden = json.loads((ROOT / "tests" / "golden" / "multi30k.json").read_text())
    wanted = golden["cpu"] | golden[variant]  # the others are given by what differs
    found = json.loads(json.dumps(flat(load_config(SPECS[f"multi30k_en_de.py:{variant}"], []))))
    assert {field: found[field] for field in wanted} == wanted


def test_the_rows_of_table_3_are_all_there() -> None:
    rows = variants(ROOT / "configs" / "table3.py")
    assert len(rows) == len(set(rows)) == 20
    assert len({load_config(SPECS[f"table3.py:{row}"], []) for row in rows}) == 20


# Parameters


def formula(model: ModelConfig, vocab_size: int) -> int:
    """The number of parameters of the paper's model, section by section."""
    d, heads = model.d_model, model.num_heads
    attention = d * heads * (model.d_k + model.d_k + model.d_v) + heads * model.d_v * d  # 3.2.2
    if model.biases:  # Marian's; the paper has none
        attention += heads * (model.d_k + model.d_k + model.d_v) + d
    feed_forward = d * model.d_ff + model.d_ff + model.d_ff * d + d  # 3.3, with biases
    norm = 2 * d  # scale and bias
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = 2 * attention + feed_forward + 3 * norm
    tables = {"all": 1, "target": 2, "none": 3}[model.share_embeddings]  # 3.4
    learned = 2 * model.max_length * d if model.positions == "learned" else 0
    decoder_layers = model.num_decoder_layers or model.num_layers
    layers = model.num_layers * encoder_layer + decoder_layers * decoder_layer
    return layers + (tables * d + model.biases) * vocab_size + learned


def parameters(model: ModelConfig, vocab_size: int) -> int:
    """The number of parameters that the real model would have, without allocating them."""
    return _parameters(dataclasses.replace(model, dropout=0.0), vocab_size)


@functools.cache  # many recipes differ in other things than the shape of the model
def _parameters(model: ModelConfig, vocab_size: int) -> int:
    return count_parameters(split_model(model, vocab_size)[1])


@pytest.mark.run
@pytest.mark.parametrize("name", SPECS)
def test_every_recipe_has_the_parameters_of_the_formula(name: str) -> None:
    model = load_config(SPECS[name], []).model
    assert parameters(model, 37_000) == formula(model, 37_000)


@pytest.mark.parametrize("share", ["all", "target", "none"])
def test_odd_sizes_have_the_parameters_of_the_formula(share: str) -> None:
    model = ModelConfig(
        num_layers=2, d_model=14, d_ff=31, num_heads=3, d_k=5, d_v=7, share_embeddings=share
    )
    assert parameters(model, 37) == formula(model, 37)


@pytest.mark.parametrize(
    ("row", "at_37_000", "at_41_500"),
    [
        ("base", 63.0, 65.3),
        ("B-dk16", 56.0, 58.3),
        ("B-dk32", 58.3, 60.6),
        ("C-N2", 33.6, 35.9),
        ("C-N4", 48.3, 50.6),
        ("C-N8", 77.7, 80.1),
        ("C-d256", 26.8, 28.0),
        ("C-d1024", 163.8, 168.4),
        ("C-ff1024", 50.5, 52.8),
        ("C-ff4096", 88.2, 90.5),
        ("big", 214.2, 218.8),
    ],
)
def test_the_formula_gives_the_millions_worked_out_from_the_paper(
    row: str, at_37_000: float, at_41_500: float
) -> None:
    model = load_config(SPECS[f"table3.py:{row}"], []).model
    assert round(formula(model, 37_000) / 1e6, 1) == at_37_000
    assert round(formula(model, 41_500) / 1e6, 1) == at_41_500


# Fields


def fields_read(path: Path) -> set[str]:
    """Section and name of each config field that a file reads as an attribute.

    Read is `SECTION.field` with any prefix (`config.model.d_ff`, `model.d_ff`), and
    `config.field` in a file that names the class of the section (`config: ModelConfig`).
    """
    text, found = path.read_text(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = ast.unparse(node.value).split(".")[-1]
            for key in FIELD_TYPES:
                section, field = key.split(".")
                through_class = owner == "config" and f"{section.capitalize()}Config" in text
                if node.attr == field and (owner == section or through_class):
                    found.add(key)
    return found


def test_every_field_of_the_config_is_read_somewhere() -> None:
    readers = [path for path in PACKAGE if not path.stem.startswith("config")]
    assert len(readers) > 60
    # decoding/options.py reads these by name, with getattr, because they are options as well.
    by_name = {f"decode.{name}" for name in IN_CONFIG}
    assert len(by_name) == 3
    assert set(FIELD_TYPES) - by_name - set().union(*map(fields_read, readers)) == set()


# Pins


def brought(requirement: Requirement) -> set[str]:
    """The packages that a package needs here, with the extras that are asked of it."""
    needs = importlib.metadata.requires(requirement.name) or []
    return {
        need
        for need in needs
        for extra in requirement.extras | {""}
        if (marker := Requirement(need).marker) is None or marker.evaluate({"extra": extra})
    }


def test_every_package_that_an_install_brings_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {canonicalize_name(p.name): p for p in pins if not p.marker or p.marker.evaluate()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    waiting = {*project["dependencies"], *extras["train"], *extras["dev"]}
    seen: set[str] = set()
    while waiting - seen:
        seen.add(text := (waiting - seen).pop())
        requirement = Requirement(text)
        pin = pinned[canonicalize_name(requirement.name)]
        assert importlib.metadata.version(requirement.name) in pin.specifier
        waiting |= brought(requirement)
    assert len(seen) > 60


def test_the_packages_of_the_extra_for_training_are_those_whose_absence_is_told() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [Requirement(text).name for text in project["optional-dependencies"]["train"]]
    assert sorted(name.replace("-", "_") for name in names) == sorted(cli.TRAINING)


def test_a_lower_bound_is_a_version_that_these_tests_run_with() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *extras["train"], *extras["plot"], *extras["interop"]):
        requirement = Requirement(text)
        (bound,) = requirement.specifier
        assert bound.operator == ">="
        assert importlib.metadata.version(requirement.name) in requirement.specifier
