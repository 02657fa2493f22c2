"""Strict settings for every test: shapes checked, eight CPU devices, no silent rank promotion."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
# What one test compiles, the others read back: in this process, in the other workers, which inherit
# the variable, and in the processes that tests start.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import jaxtyping

jaxtyping.install_import_hook("flaxformer_min", "beartype.beartype")

from pathlib import Path

import jax
import pytest

from flaxformer_min.config import Config
from flaxformer_min.training import loop
from tools import tiny_config

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What reads the finished run belongs to the tests that train one; a browser takes seconds."""
    for item in items:
        if {"finished", "browser"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("run")


@pytest.fixture
def as_users_have_it() -> Iterator[None]:
    """Without the checks of annotations, which only tests have."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory) -> Callable[[str, Callable[[Path], None]], Path]:
    """`made_once(name, make)`: a folder that `make` fills for this worker and all others."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def folder_of(name: str, make: Callable[[Path], None]) -> Path:
        folder, complete = shared / name, shared / f"{name}.complete"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.exists():
                shutil.rmtree(folder, ignore_errors=True)  # another worker began it and failed
                folder.mkdir()
                make(folder)
                complete.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def corpus(made_once) -> Path:
    """The folder of the tiny corpus."""
    return made_once("corpus", tiny_config.write_corpus)


@pytest.fixture(scope="session")
def tiny(corpus) -> Config:
    """The config of a run that takes seconds."""
    return tiny_config.get_config(str(corpus))


@pytest.fixture(scope="session")
def finished(tiny, made_once) -> Path:
    """The workdir of that run, trained to its end without a stop.

    Other workers read it at the same time: a test that trains, or takes its lock, takes a copy.
    """

    def train(workdir: Path) -> None:
        assert loop.run(tiny, workdir) == 0

    return made_once("finished", train)
