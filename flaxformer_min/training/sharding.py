"""Which device holds what: one table from parameter names to axes of the mesh."""

import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxformer_min.config import Config, MeshConfig, ModelConfig
from flaxformer_min.errors import UserError

AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")
ROWS = P(ROW_AXES)  # of a batch

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


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh (data, fsdp, tensor) over all devices; an axis of -1 takes what the others leave.

    Raises UserError if the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [config.data, config.fsdp, config.tensor]
    known = math.prod(size for size in sizes if size != -1)
    sizes = [len(devices) // known if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh: data x fsdp x tensor = {' x '.join(map(str, sizes))} does not make the "
            f"{len(devices)} devices here; set one axis to -1"
        )
    return jax.make_mesh(
        tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )


def check_mesh(config: Config, mesh: Mesh) -> None:
    """Refuses what the devices cannot share evenly, before anything is compiled.

    Raises:
        UserError: names the size, the axis that does not divide it, and what would fit.
    """
    if config.model.attention == "cudnn":
        _check_cudnn(config.model, mesh.devices.flat[0].platform)
    for axis, field, size in _split_sizes(config):
        if size % mesh.shape[axis]:
            fit = [n for n in range(1, mesh.size + 1) if size % n == 0 and mesh.size % n == 0]
            raise UserError(
                f"mesh.{axis} is {mesh.shape[axis]}, which does not divide {field} ({size}); "
                f"of {mesh.size} devices {', '.join(map(str, fit))} would"
            )
    shares = row_shares(mesh) * config.optimizer.accumulation
    multiple = config.data.row_multiple
    if multiple % shares:
        raise UserError(
            f"data.row_multiple is {multiple}: it must be a multiple of mesh data x fsdp x "
            f"optimizer.accumulation = {shares}; {math.lcm(multiple, shares)} would fit"
        )


def _check_cudnn(model: ModelConfig, platform: str) -> None:
    wide = model.d_k == model.d_v <= 128 and model.d_k % 8 == 0
    plain = model.compute_dtype == "bfloat16" and model.attention_dropout == 0
    if platform != "gpu" or not wide or not plain:
        raise UserError(
            f"model.attention is 'cudnn': that needs NVIDIA GPUs (here is {platform}), "
            "compute_dtype bfloat16, attention_dropout 0, and d_k = d_v, a multiple of 8 up to "
            "128; set it to 'exact'"
        )


def _split_sizes(config: Config) -> Iterator[tuple[str, str, int]]:
    """Axis, field and size of everything that RULES split, and of the heads."""
    model = config.model
    yield "fsdp", "model.d_model", model.d_model
    yield "tensor", "model.num_heads", model.num_heads
    yield "tensor", "model.d_ff", model.d_ff
    yield "tensor", "data.vocab_size", config.data.vocab_size


def row_shares(mesh: Mesh | None) -> int:
    """Among how many shares the rows of a batch are divided."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in ROW_AXES)


def rows_here(mesh: Mesh, rows: int) -> np.ndarray:
    """Of so many rows the numbers of those that devices of this process hold, ascending."""
    places = NamedSharding(mesh, ROWS).addressable_devices_indices_map((rows,))
    return np.unique([np.arange(rows)[place] for place in places.values()])


def place_rows(mesh: Mesh, batch: Any) -> Any:
    """Arrays [B, ...] over all devices, of which each process gives its `rows_here`."""
    return jax.make_array_from_process_local_data(NamedSharding(mesh, ROWS), batch)


def abstract_rows(mesh: Mesh, rows: int, *lengths: int) -> list[jax.ShapeDtypeStruct]:
    """Shapes of token ids [rows, length] for each length, as `place_rows` will place them."""
    sharding = NamedSharding(mesh, ROWS)
    return [jax.ShapeDtypeStruct((rows, n), np.int32, sharding=sharding) for n in lengths]


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


def shardings(mesh: Mesh, tree: Any, *, without: str | None = None) -> Any:
    """A NamedSharding for every leaf of a tree of arrays or shapes, by RULES.

    Along the axis `without` nothing is split.
    """

    def sharding(path: tuple[Any, ...], _: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axes = next(spec for rule, spec in RULES if re.search(rule, name))
        return NamedSharding(mesh, P(*(None if axis == without else axis for axis in axes)))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def gather_fsdp(mesh: Mesh | None, params: Any) -> Any:
    """The parameters as a step computes with them: whole along fsdp, where they are kept split.

    Said outright, because XLA alone would rather move the activations of the whole batch.
    Gradients come back split as the parameters are.
    """
    if mesh is None or mesh.size == 1:
        return params
    whole = shardings(mesh, params, without="fsdp")
    return jax.tree.map(_gathered, shardings(mesh, params), whole, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(split: NamedSharding, whole: NamedSharding, leaf: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(leaf, whole)


def _gather(split, whole, leaf):
    return _gathered(split, whole, leaf), None


def _scatter(split, whole, _, gradient):
    # Summed whole and then split; asked for the split sum, XLA would split what is summed.
    gradient = jax.lax.with_sharding_constraint(gradient, whole)
    return (jax.lax.with_sharding_constraint(gradient, split),)


_gathered.defvjp(_gather, _scatter)


def abstract(mesh: Mesh, tree: Any) -> Any:
    """The tree as jax.ShapeDtypeStruct leaves that carry their shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings(mesh, tree),
    )
