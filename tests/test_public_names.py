"""What the package offers at its top level: names that are loaded when they are first used."""

import doctest
import importlib
import inspect
import runpy
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import optax
import pytest
from tiny_checkpoints import CONFIG, TOKENIZER

import flaxformer_min
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.errors import UserError
from flaxformer_min.training.state import init_state

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def names():
    return {name: getattr(flaxformer_min, name) for name in flaxformer_min.__all__}


def test_importing_the_package_loads_nothing_and_a_name_loads_its_file():
    program = (
        "import sys, flaxformer_min as f; before = set(sys.modules) & {'jax', 'numpy', 'flax'}; "
        "f.ModelConfig; print(before, 'jax' in sys.modules, f.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == f"set() False {flaxformer_min.__version__}\n", done.stderr


def test_every_name_is_there_is_documented_and_is_told_to_readers_of_the_code(names):
    shown = inspect.getsource(flaxformer_min)
    for name, value in names.items():
        assert inspect.getdoc(value), name
        assert f" {name} as {name}" in shown.replace("(\n        ", " "), name
    assert set(names) <= set(dir(flaxformer_min))
    with pytest.raises(AttributeError, match="has no attribute 'Transformers'"):
        _ = flaxformer_min.Transformers


@pytest.mark.run
@pytest.mark.usefixtures("as_users_have_it")
def test_the_examples_in_the_docstrings_are_true(names, monkeypatch):
    state = init_state(CONFIG.model, TOKENIZER.vocab_size, optax.identity(), seed=1)
    tiny = Translator(CONFIG, TOKENIZER, state.params)
    monkeypatch.setattr(Translator, "load", lambda _: tiny)
    globs = {**names, "np": np, "jnp": importlib.import_module("jax.numpy")}
    finder, examples = doctest.DocTestFinder(exclude_empty=True), 0
    for name, value in names.items():
        for test in finder.find(value, name, globs=globs):
            result = doctest.DocTestRunner(verbose=False).run(test)
            examples += result.attempted
            assert result.failed == 0, test.name
    assert examples >= 20


def test_a_recipe_of_the_package_goes_by_its_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = flaxformer_min.load_config("wmt14_en_de:base", ["--model.num_layers", "2"])
    assert (base.model.num_layers, base.model.d_model) == (2, 512)
    with pytest.raises(
        UserError, match="wmt14: there is no such config file; the recipes are demo"
    ):
        flaxformer_min.load_config("wmt14")


@pytest.mark.run
def test_the_service_answers_line_by_line_and_says_what_it_refuses(monkeypatch):
    service = runpy.run_path(str(ROOT / "examples" / "service.py"), run_name="service")
    state = init_state(CONFIG.model, TOKENIZER.vocab_size, optax.identity(), seed=1)
    tiny = Translator(CONFIG, TOKENIZER, state.params)
    with service["serve"](tiny, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://localhost:{server.server_port}"
        lines = ["a cat", "", "dogs"]
        with urllib.request.urlopen(url, "\n".join(lines).encode()) as answer:
            found = answer.read().decode()
        with urllib.request.urlopen(f"{url}/health") as health:
            assert health.read() == b"ok"
        statuses = []
        for path, body in (("/nothing", None), ("/", b"x" * 1_000_001)):
            with pytest.raises(urllib.error.URLError) as refused:
                urllib.request.urlopen(url + path, body)
            statuses.append(getattr(refused.value, "code", None))
            getattr(refused.value, "close", lambda: None)()
        server.shutdown()
        thread.join()
    wanted = [each.text for each in tiny.translate(lines, service["OPTIONS"])]
    assert found == "".join(f"{text}\n" for text in wanted)
    assert statuses[0] == 404 and statuses[1] in (413, None)  # None: it closed while we sent
