"""The parts of a training step that a plan tells apart, and to which one an instruction belongs."""

from collections.abc import Collection

# Each part with what makes it smaller. An instruction belongs to the first part that fits it; a
# fusion with a product is a product, whatever else is fused with it.
PARTS = {
    "products": "more rows a chip; d_model, d_ff, d_k and d_v that fill the chip's matrix units",
    "random bits": "dropout at rate 0, which alone draws none",
    "copies": "d_k and d_v that fill the 128 lanes of a register",
    "loss": "a smaller vocabulary: these are passes over the logits",
    "optimizer": "more devices in mesh.data or mesh.fsdp, which share state and update out",
    "rest": "fewer or narrower layers: norms, softmax, activations, dropout, sums, conversions",
}
EXCHANGE = "more tokens a step, or fewer devices"

_PRODUCTS = {"dot", "convolution"}
_RANDOM = "threefry", "_bernoulli", "_uniform", "random_bits"
_MOVES = {"copy", "copy-done", "transpose", "slice", "dynamic-slice", "concatenate"}
_MOVES |= {"dynamic-update-slice", "reverse", "slice-done"}
_FREE = {"parameter", "constant", "bitcast", "reshape", "tuple", "get-tuple-element", "fusion"}


def part_of(opcodes: Collection[str], source: str) -> str:
    """Returns the part, one of PARTS, of an instruction of the train step.

    `opcodes` are its own and those of all that it calls. `source` is the operation that it comes
    from, as JAX names it: a path such as jit(train_step)/jvp(jit(one))/dot_general. Only the
    gradient has jvp in its path, only the loss shares out its work by shard_map.
    """
    kinds = set(opcodes)
    if kinds & _PRODUCTS:
        return "products"
    if "rng-bit-generator" in kinds or any(word in source for word in _RANDOM):
        return "random bits"
    if kinds & _MOVES and kinds <= _MOVES | _FREE:
        return "copies"
    if "shard_map" in source:
        return "loss"
    return "optimizer" if "/" in source and "jvp" not in source else "rest"
