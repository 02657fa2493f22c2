"""How arrays are split over devices: one table maps names of parameters to axes of the mesh."""

import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxformer_min.checkpoints.leaves import named_leaves
from flaxformer_min.config import Config, MeshConfig, ModelConfig
from flaxformer_min.errors import UserError

AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")
ROWS = P(ROW_AXES)  # the split of an array [B, ...]: its rows, over data and fsdp together

# The first pattern found in the name of a leaf decides how it is split. The names of optimizer
# moments end in those of their parameters, so that they are split alike.
RULES = (
    (r"embedding$", P("tensor", "fsdp")),
    (r"logits_bias$", P("tensor")),
    (r"attention/(query|key|value)$", P("fsdp", "tensor")),
    (r"attention/(query|key|value)_bias$", P("tensor")),
    (r"attention/output$", P("tensor", "fsdp")),
    (r"feed_forward/up$", P("fsdp", "tensor")),
    (r"feed_forward/up_bias$", P("tensor")),
    (r"feed_forward/down$", P("tensor", "fsdp")),
    (r"", P()),
)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Makes the mesh with the axes AXES over the given devices, by default all devices of the run.

    An axis of size -1 gets the devices that the other axes leave. Raises UserError if the sizes do
    not multiply to the number of devices.
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
    """Raises UserError if an axis of the mesh does not divide a size, and names what would fit.

    It also raises UserError if the config asks for an attention that these devices do not have.
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
    """Raises UserError unless cuDNN has attention for such a model on this platform."""
    wide = model.d_k == model.d_v <= 128 and model.d_k % 8 == 0
    plain = model.compute_dtype == "bfloat16" and model.attention_dropout == 0
    if platform != "gpu" or not wide or not plain:
        raise UserError(
            f"model.attention is 'cudnn': that needs NVIDIA GPUs (here is {platform}), "
            "compute_dtype bfloat16, attention_dropout 0, and d_k = d_v, a multiple of 8 up to "
            "128; set it to 'exact'"
        )


def _split_sizes(config: Config) -> Iterator[tuple[str, str, int]]:
    """Yields axis, field and size of every dimension that RULES split.

    d_k and d_v are not among them, because they are split by whole heads.
    """
    model = config.model
    yield "fsdp", "model.d_model", model.d_model
    yield "tensor", "model.num_heads", model.num_heads
    yield "tensor", "model.d_ff", model.d_ff
    yield "tensor", "data.vocab_size", config.data.vocab_size


def row_shares(mesh: Mesh | None) -> int:
    """Returns the number of shares into which the rows of a batch are divided: data x fsdp."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in ROW_AXES)


def rows_here(mesh: Mesh, rows: int) -> np.ndarray:
    """Returns the indices, ascending, of the rows that the devices of this process hold."""
    places = NamedSharding(mesh, ROWS).addressable_devices_indices_map((rows,))
    return np.unique([np.arange(rows)[place] for place in places.values()])


def place_rows(mesh: Mesh, batch: Any) -> Any:
    """Splits a tree of arrays [B, ...] by rows over all devices of the run.

    Each process gives only its own rows, those of `rows_here`.
    """
    return jax.make_array_from_process_local_data(NamedSharding(mesh, ROWS), batch)


def abstract_rows(mesh: Mesh, rows: int, *lengths: int) -> list[jax.ShapeDtypeStruct]:
    """Returns shapes of token ids [rows, length], one for each length, split like real batches."""
    sharding = NamedSharding(mesh, ROWS)
    return [jax.ShapeDtypeStruct((rows, n), np.int32, sharding=sharding) for n in lengths]


def place_whole(mesh: Mesh, tree: Any) -> Any:
    """Splits a tree of arrays by RULES; every process has the whole tree and places its share."""

    def place(leaf: Any, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(place, tree, shardings(mesh, tree))


def fetch_whole(mesh: Mesh, tree: Any) -> Any:
    """Gathers the leaves of a split tree, each of them whole on one device of this process."""
    whole = jax.jit(_identity, out_shardings=NamedSharding(mesh, P()))(tree)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), whole)


def _identity(tree: Any) -> Any:  # not a lambda: jax.jit would compile each new one again
    return tree


def shardings(mesh: Mesh, tree: Any, *, without: str | None = None) -> Any:
    """Returns a NamedSharding by RULES for every leaf of a tree of arrays or shapes.

    No leaf is split along the axis `without`.
    """

    def sharding(name: str) -> NamedSharding:
        axes = next(spec for rule, spec in RULES if re.search(rule, name))
        return NamedSharding(mesh, P(*(None if axis == without else axis for axis in axes)))

    return jax.tree.unflatten(jax.tree.structure(tree), map(sharding, named_leaves(tree)))


def gather_fsdp(mesh: Mesh | None, params: Any) -> Any:
    """Gathers the parameters along the axis fsdp, so that a step computes with them whole.

    This is done explicitly, because XLA would otherwise all-gather activations. Between steps
    parameters are split along fsdp, and their gradients come back split in the same way.
    """
    if mesh is None or mesh.size == 1:
        return params
    whole = shardings(mesh, params, without="fsdp")
    return jax.tree.map(_gather_leaf, shardings(mesh, params), whole, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_leaf(split: NamedSharding, whole: NamedSharding, leaf: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(leaf, whole)


def _gather_leaf_forward(split, whole, leaf):
    return _gather_leaf(split, whole, leaf), None


def _gather_leaf_backward(split, whole, _, gradient):
    # The gradient's sum over devices is asked of XLA whole, and then it is split. If the split sum
    # were asked for directly, XLA would split the arrays from which the gradient is computed.
    gradient = jax.lax.with_sharding_constraint(gradient, whole)
    return (jax.lax.with_sharding_constraint(gradient, split),)


_gather_leaf.defvjp(_gather_leaf_forward, _gather_leaf_backward)


def abstract(mesh: Mesh, tree: Any) -> Any:
    """Returns the tree with a jax.ShapeDtypeStruct, with its sharding by RULES, for every leaf."""

    def shape(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(shape, tree, shardings(mesh, tree))
