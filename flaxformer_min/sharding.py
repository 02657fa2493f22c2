"""Which device holds what: one table from parameter names to axes of the mesh."""

import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxformer_min.config import Config, MeshConfig
from flaxformer_min.errors import UserError

AXES = ("data", "fsdp", "tensor")
ROWS = P(("data", "fsdp"))  # of a batch

# The first pattern found in a leaf's path decides; optimizer moments end in the same names.
RULES = (
    (r"embedding$", P("tensor", "fsdp")),
    (r"attention/(query|key|value)$", P("fsdp", "tensor")),
    (r"attention/output$", P("tensor", "fsdp")),
    (r"feed_forward/up$", P("fsdp", "tensor")),
    (r"feed_forward/up_bias$", P("tensor")),
    (r"feed_forward/down$", P("tensor", "fsdp")),
    (r"", P()),
)


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh (data, fsdp, tensor) over all devices; an axis of -1 takes what the others leave.

    Raises UserError if the sizes do not multiply to the number of devices.
    """
    sizes = [config.data, config.fsdp, config.tensor]
    devices = jax.device_count()
    known = 1
    for size in sizes:
        known *= size if size != -1 else 1
    sizes = [devices // known if size == -1 else size for size in sizes]
    if sizes[0] * sizes[1] * sizes[2] != devices:
        raise UserError(
            f"mesh: data x fsdp x tensor = {' x '.join(map(str, sizes))} does not make the "
            f"{devices} devices here; set one axis to -1"
        )
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_rows(config: Config, mesh: Mesh) -> None:
    """Raises UserError unless devices and micro-batches share the rows of every batch evenly."""
    shares = row_shards(mesh) * config.optimizer.accumulation
    if config.data.row_multiple % shares:
        raise UserError(
            f"data.row_multiple is {config.data.row_multiple}: it must be a multiple of mesh "
            f"data x fsdp x optimizer.accumulation = {shares}"
        )


def row_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a batch are split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def rows_here(mesh: Mesh, rows: int) -> np.ndarray:
    """Of so many rows the numbers of those that devices of this process hold, ascending."""
    places = NamedSharding(mesh, ROWS).addressable_devices_indices_map((rows,))
    return np.unique([np.arange(rows)[place] for place in places.values()])


def place_rows(mesh: Mesh, batch: Any) -> Any:
    """Arrays [B, ...] over all devices, of which each process gives its `rows_here`."""
    return jax.make_array_from_process_local_data(NamedSharding(mesh, ROWS), batch)


def place_whole(mesh: Mesh, tree: Any) -> Any:
    """A tree of arrays that every process holds whole, sharded by RULES."""

    def place(leaf: Any, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(place, tree, shardings(mesh, tree))


def fetch_whole(mesh: Mesh, tree: Any) -> Any:
    """The inverse: every leaf whole on a device of this process."""
    whole = jax.jit(_as_it_is, out_shardings=NamedSharding(mesh, P()))(tree)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), whole)


def _as_it_is(tree: Any) -> Any:  # one function, so that it is compiled once
    return tree


def shardings(mesh: Mesh, tree: Any) -> Any:
    """A NamedSharding for every leaf of a tree of arrays or shapes, by RULES."""

    def sharding(path: tuple[Any, ...], _: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, next(spec for rule, spec in RULES if re.search(rule, name)))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def abstract(mesh: Mesh, tree: Any) -> Any:
    """The tree as jax.ShapeDtypeStruct leaves that carry their shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings(mesh, tree),
    )
