"""How arrays are split over devices: one table maps names of parameters to axes of the mesh."""

import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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
    (r"attention/output$", P(("tensor", "fsdp"))),
    (r"feed_forward/up$", P("fsdp", "tensor")),
    (r"feed_forward/up_bias$", P("tensor")),
    (r"feed_forward/down$", P(("tensor", "fsdp"))),
    (r"", P()),
)
EMBEDDING, KERNEL = r"embedding$", r"(attention|feed_forward)/(query|key|value|output|up|down)$"


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
    return 1 if mesh is None else _devices(mesh, ROW_AXES)


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


def shardings(mesh: Mesh, tree: Any, *, gathered: bool = False) -> Any:
    """Returns a NamedSharding by RULES for every leaf of a tree of arrays or shapes.

    What RULES split along fsdp is split along data and fsdp together, where both divide its size,
    so that between steps no device holds weights or optimizer state of others (ZeRO, Rajbhandari et
    al. 2020). With `gathered` no leaf is split along either.
    """

    def sharding(name: str, leaf: Any) -> NamedSharding:
        rule = next(spec for rule, spec in RULES if re.search(rule, name))
        axes = (_axes(mesh, *each, gathered) for each in zip(rule, leaf.shape, strict=False))
        return NamedSharding(mesh, P(*axes))

    leaves = itertools.starmap(sharding, named_leaves(tree).items())
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _axes(mesh: Mesh, rule: Any, size: int, gathered: bool) -> Any:
    """Returns the axes of the mesh that split a dimension of this size, by its entry in RULES."""
    axes = (rule,) if isinstance(rule, str) else rule or ()
    others = tuple(axis for axis in axes if axis != "fsdp")
    if gathered or "fsdp" not in axes:
        return others or None
    choices = ((*others, *ROW_AXES), axes, others)
    fit = (each for each in choices if size % _devices(mesh, each) == 0)
    return next(fit, others) or None


def _devices(mesh: Mesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def gather(mesh: Mesh, params: Any, dtype: jnp.dtype) -> Any:
    """Gathers the parameters over data and fsdp: a step computes with them whole.

    This is done explicitly, because XLA would otherwise all-gather activations. Kernels, which are
    multiplied in `dtype` in any case, are gathered in it, and their gradients are summed in it.
    Gradients come back split as the parameters are, so that each device updates only its share.
    Embeddings stay split, for `split_lookup`.
    """

    def place(name: str, leaf: Any, split: NamedSharding, whole: NamedSharding) -> Any:
        if re.search(EMBEDDING, name) and _divides(mesh, leaf):
            return leaf
        kernel = re.search(KERNEL, name)
        return _gather_leaf(split, whole, leaf.astype(dtype) if kernel else leaf)

    trees = params, shardings(mesh, params), shardings(mesh, params, gathered=True)
    leaves = map(place, named_leaves(params), *map(jax.tree.leaves, trees))
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def gather_table(mesh: Mesh, table: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Gathers the table [V, D] of the logits, and sums its gradient, in `dtype`, as a kernel."""
    named = {"embedding": table}
    split, whole = (shardings(mesh, named, gathered=gathered) for gathered in (False, True))
    return _gather_leaf(split["embedding"], whole["embedding"], table.astype(dtype))


def split_lookup(mesh: Mesh, table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns `table[ids]` for ids [B, T] split by rows and a table [V, D] that `gather` has left.

    Each device looks up all ids in its own columns of the table, and then columns are exchanged for
    rows. The rows of a batch are far less than a table and its gradient.
    """
    if not _divides(mesh, table):
        return table[ids]

    def own(columns, ids):
        all_ids = jax.lax.all_gather(ids, ROW_AXES, tiled=True)
        return jax.lax.all_to_all(columns[all_ids], ROW_AXES, 0, 2, tiled=True)

    return jax.shard_map(
        own,
        mesh=mesh,
        axis_names=set(ROW_AXES),
        in_specs=(P(None, ROW_AXES), ROWS),
        out_specs=ROWS,
        check_vma=False,
    )(table, ids)


def _divides(mesh: Mesh, table: Any) -> bool:
    return table.shape[1] % row_shares(mesh) == 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_leaf(split: NamedSharding, whole: NamedSharding, leaf: jax.Array) -> jax.Array:
    # Without the first constraint XLA would gather first and then convert.
    leaf = jax.lax.with_sharding_constraint(leaf, split)
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
