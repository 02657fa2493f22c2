"""Strict settings for every test: shapes checked, eight CPU devices, no silent rank promotion."""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
# What one test compiles, the next and the processes it starts read back.
_compiled = tempfile.TemporaryDirectory(prefix="compiled-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

from jaxtyping import install_import_hook

install_import_hook("flaxformer_min", "beartype.beartype")

from pathlib import Path

import jax
import pytest

from flaxformer_min.config import Config
from flaxformer_min.training import loop as training
from tools import tiny_config

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """The folder of the tiny corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    tiny_config.write_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(corpus) -> Config:
    """The config of a run that takes seconds."""
    return tiny_config.get_config(str(corpus))


@pytest.fixture(scope="session")
def finished(tiny, tmp_path_factory) -> Path:
    """The workdir of that run, trained to its end without a stop; tests must leave it as it is."""
    workdir = tmp_path_factory.mktemp("finished")
    assert training.run(tiny, workdir) == 0
    return workdir
