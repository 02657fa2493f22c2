"""Devices that need not be here: what a TPU slice is called, what its chips can do."""

import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from flaxformer_min.errors import UserError


@dataclasses.dataclass(frozen=True)
class Chip:
    """What the vendor says of a chip; None where nobody does.

    The clock is peak_flops over the products and sums of all matrix units in a cycle.
    """

    memory: float | None = None  # bytes that a program may use
    peak_flops: float | None = None  # a second, bfloat16
    clock: float | None = None  # cycles a second
    interconnect: float | None = None  # bytes a second to other chips, all links together


GIB = 2**30
CHIPS = {
    "v5e": Chip(15.75 * GIB, 197e12, 197e12 / (4 * 128**2 * 2), 1600e9 / 8),
    "v5p": Chip(95.74 * GIB, 459e12, 459e12 / (8 * 128**2 * 2), 4800e9 / 8),
    "v6e": Chip(31.25 * GIB, 918e12, 918e12 / (4 * 256**2 * 2), 3584e9 / 8),
    "cpu": Chip(),
}


def find(topology: str) -> tuple[Chip, Sequence[Any]]:
    """The kind of chip and the devices of `v5e:16x16` or `cpu:8`, to compile for.

    Must come before anything else has made JAX look for devices.

    Raises UserError: the name is none, or what compiles for TPUs is not installed.
    """
    kind, _, size = topology.partition(":")
    if kind not in CHIPS or not size:
        raise UserError(
            f"--topology {topology}: write KIND:SIZE, such as v5e:16x16 or cpu:8, with one of "
            f"{', '.join(CHIPS)}"
        )
    jax.config.update("jax_platforms", "cpu")
    return CHIPS[kind], _cpus(topology, size) if kind == "cpu" else _tpus(topology)


def _cpus(topology: str, size: str) -> Sequence[Any]:
    count = int(size) if size.isdecimal() else 0
    if not count:
        raise UserError(f"--topology {topology}: after cpu comes a number of devices, as in cpu:8")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has looked already
        assert jax.device_count() >= count, "find() came too late"
    return jax.devices()[:count]


def _tpus(topology: str) -> Sequence[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"--topology {topology}: libtpu, which compiles for TPUs, is not installed; "
            "pip install -e '.[tpu]' -c constraints.txt"
        )
    # libtpu shall not ask a cloud what this machine is (any type it knows will do, the topology
    # counts), and others here may be compiling as well.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
    try:
        return topologies.get_topology_desc(topology, "tpu").devices
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--topology {topology}: {reason}") from error
