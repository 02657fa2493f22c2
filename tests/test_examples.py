"""Outside of the package: the examples learn, and what README shows is there and runs."""

import contextlib
import dataclasses
import importlib.util
import io
import re
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest
from tiny_checkpoints import CONFIG, TOKENIZER

from flaxformer_min.checkpoints.format import Loaded
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.interop.stablehlo import export_stablehlo
from flaxformer_min.model.build import initializer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURE = (ROOT / "docs" / "figure1.svg").read_text(encoding="utf-8")


def example(name: str) -> ModuleType:
    """A program in examples/ as a module; it is a script and lies in no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.run
@pytest.mark.parametrize(
    ("name", "start"), [("pre_norm", np.log(20)), ("decoder_only", np.log(256))]
)
def test_an_example_begins_at_the_loss_of_a_guess_and_learns(name, start):
    losses = example(name).train(60)
    assert 0.9 * start < losses[0] < 1.5 * start
    assert losses[-1] < 0.85 * start


@pytest.mark.run
def test_the_thirty_lines_of_the_readme_run_and_print_what_they_say():
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line]) <= 32
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "README.md", "exec"), {})
    attention, learned = printed.getvalue().splitlines()
    assert attention == "[[[[0.5 0.5 0. ]]]]"
    assert int(learned.split("%")[0]) >= 95


def test_every_file_that_figure_1_names_is_there():
    named = re.findall(r"\b([a-z]+/[a-z_0-9]+\.py)", FIGURE)
    assert len(set(named)) >= 10
    assert [name for name in named if not (ROOT / "flaxformer_min" / name).is_file()] == []


def test_every_file_that_the_readme_names_is_there():
    named = set(re.findall(r"`([a-z_]+/[a-z_0-9/]+\.py)", README))
    assert len(named) >= 10
    homes = [ROOT, ROOT / "flaxformer_min"]
    assert [name for name in named if not any((home / name).is_file() for home in homes)] == []


def test_the_readme_is_read_in_one_sitting():
    assert len(README.splitlines()) <= 220


@pytest.mark.run
def test_an_exported_program_translates_without_the_package_as_the_translator_does(tmp_path):
    model = dataclasses.replace(CONFIG.model, max_length=32)
    config = dataclasses.replace(CONFIG, model=model)
    _, params = initializer(model, TOKENIZER.vocab_size)(jax.random.key(3))
    loaded = Loaded(config, TOKENIZER, params, step=0)
    export_stablehlo(loaded, tmp_path / "exported", rows=3, length=13)
    translator = Translator(config, TOKENIZER, params)
    for line in ("a b c", "ga", "d e f g a b c d"):
        wanted = translator.translate([line], Options(beam_size=1))[0]
        found = example("run_stablehlo").main(tmp_path / "exported", line)
        assert found == wanted.text


def test_attention_in_numpy_prints_the_row_worked_out_by_hand_and_agrees_with_the_package(capsys):
    numpy_attention = example("attention_in_numpy")
    steps = numpy_attention.worked_row()
    np.testing.assert_allclose(steps.weights, [[0.4, 0.1, 0.5]])
    np.testing.assert_allclose(steps.output, [[0.4, 0.1, 21.0]])
    draw = np.random.default_rng(7)
    query, key, value = (draw.standard_normal(shape) for shape in ((2, 11), (3, 11), (3, 5)))
    found = numpy_attention.attention(query, key, value)
    wanted = numpy_attention.of_the_package(query, key, value)
    np.testing.assert_allclose(found.output, wanted, atol=1e-6)
    numpy_attention.main()
    said = capsys.readouterr().out
    assert "i asks j as j asks i, True; apart: False" in said
    assert "permuted outputs: True" in said
