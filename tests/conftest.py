"""Strict settings for every test: shapes checked, eight CPU devices, no silent rank promotion."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

from jaxtyping import install_import_hook

install_import_hook("flaxformer_min", "beartype.beartype")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
