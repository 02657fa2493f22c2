"""The devices of a plan: what TPU slices are called and what their chips can do."""

import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from flaxformer_min.errors import UserError, first_line


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of chip as its vendor describes it; None where nothing is published.

    The clock is not published: it is peak_flops divided by the multiplications and additions that
    all matrix units of a chip do in one cycle.
    """

    memory: float | None = None  # bytes that a program may use
    peak_flops: float | None = None  # FLOPs a second in bfloat16
    clock: float | None = None  # cycles a second
    interconnect: float | None = None  # bytes a second to other chips over all links together
    bandwidth: float | None = None  # bytes a second from and to its memory


GIB = 2**30
CHIPS = {
    "v5e": Chip(15.75 * GIB, 197e12, 197e12 / (4 * 128**2 * 2), 1600e9 / 8, 819e9),
    "v5p": Chip(95.74 * GIB, 459e12, 459e12 / (8 * 128**2 * 2), 4800e9 / 8, 2765e9),
    "v6e": Chip(31.25 * GIB, 918e12, 918e12 / (4 * 256**2 * 2), 3584e9 / 8, 1638e9),
    "cpu": Chip(),
}


def topology_devices(topology: str) -> tuple[Chip, Sequence[Any]]:
    """Returns the kind of chip and the devices of a topology such as `v5e:16x16` or `cpu:8`.

    The devices are there to compile for; only those of a CPU can also run a program. JAX must not
    have looked for devices before this call.

    Raises UserError if no topology has this name or the compiler for TPUs is not installed.
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
    count = int(size) if size.isdecimal() and len(size) < 6 else 0
    if not count:
        raise UserError(
            f"--topology {topology:.80}: after cpu comes a number of devices of at most 5 digits, "
            "as in cpu:8"
        )
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has looked for devices already
        assert jax.device_count() >= count, "topology_devices was called too late"
    return jax.devices()[:count]


def _tpus(topology: str) -> Sequence[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"--topology {topology}: libtpu, which compiles for TPUs, is not installed; "
            "pip install -e '.[tpu]' -c constraints.txt"
        )
    # libtpu would ask the cloud's metadata server for the type of this machine: it is told one
    # instead (any type that it knows will do, because the topology decides). It would also refuse
    # to be loaded while another process on this machine uses it.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
    try:
        # A single chip is a part of a host, which has to be said.
        one = {"chips_per_host_bounds": (1, 1, 1)} if topology.endswith(":1x1") else {}
        return topologies.get_topology_desc(topology, "tpu", **one).devices
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise UserError(f"--topology {topology}: {first_line(error)}") from error
