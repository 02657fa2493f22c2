"""The weights of this program under the names and in the layouts of Hugging Face's Marian.

Two things differ besides names. Marian's matrices are [out, in] and this program's [in, out]. And
Marian's table of positions is [sines | cosines], while the paper's alternates them, so that the D
columns of everything that is added to positions stand in another order:

    the paper's column     0   1   2   3   4   5
    Marian's column        0   3   1   4   2   5        for D = 6

An entry of the table is the name here, the name there, whether the matrix is transposed, and the
axis, as it is here, that has these D columns, or None.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from flaxformer_min.config import ModelConfig
from flaxformer_min.errors import UserError

SHARED = "model.shared.weight"
LOGITS_BIAS = "final_logits_bias"


class Weight(NamedTuple):
    """One array of a model, here and in Marian's files."""

    here: str  # as checkpoints.leaves.named_leaves gives it, without params/
    there: str
    transposed: bool
    axis: int | None  # of the array as it is here

    def imported(self, array: np.ndarray) -> np.ndarray:
        """Returns Marian's array as it is here."""
        array = array.T if self.transposed else array
        array = array[0] if self.there == LOGITS_BIAS else array
        return (
            array if self.axis is None else array.take(marian_columns(array, self.axis), self.axis)
        )

    def exported(self, array: np.ndarray) -> np.ndarray:
        """Returns an array from here as Marian has it; `imported` is its inverse."""
        if self.axis is not None:
            array = array.take(np.argsort(marian_columns(array, self.axis)), self.axis)
        array = array[None] if self.there == LOGITS_BIAS else array
        return np.ascontiguousarray(array.T if self.transposed else array)


def marian_columns(array: np.ndarray, axis: int) -> np.ndarray:
    """Returns Marian's column for each of the paper's columns along an axis of size D."""
    return np.arange(array.shape[axis]).reshape(2, -1).T.ravel()


def weights_of(model: ModelConfig) -> Iterator[Weight]:
    """Yields every array of such a model; those of biases are among them."""
    if model.share_embeddings == "all":
        yield Weight("embedding", SHARED, False, 1)
    else:
        yield Weight("source_embedding", "model.encoder.embed_tokens.weight", False, 1)
        yield Weight("embedding", "model.decoder.embed_tokens.weight", False, 1)
    yield Weight("logits_bias", LOGITS_BIAS, False, None)
    sizes = {"encoder": model.num_layers, "decoder": model.num_decoder_layers or model.num_layers}
    for side, layers in sizes.items():
        sites = {"self_attention": "self_attn", "cross_attention": "encoder_attn"}
        if side == "encoder":
            del sites["cross_attention"]
        for layer in range(layers):
            here, there = f"{side}/{layer}", f"model.{side}.layers.{layer}"
            for site, its_name in sites.items():
                yield from _attention(f"{here}/{site}", f"{there}.{its_name}")
                yield from _norm(f"{here}/{site}_residual", f"{there}.{its_name}_layer_norm")
            yield from _feed_forward(f"{here}/feed_forward", there)
            yield from _norm(f"{here}/feed_forward_residual", f"{there}.final_layer_norm")


def _attention(here: str, there: str) -> Iterator[Weight]:
    for name, its_name in {"query": "q", "key": "k", "value": "v"}.items():
        yield Weight(f"{here}/{name}", f"{there}.{its_name}_proj.weight", True, 0)
        yield Weight(f"{here}/{name}_bias", f"{there}.{its_name}_proj.bias", False, None)
    yield Weight(f"{here}/output", f"{there}.out_proj.weight", True, 1)
    yield Weight(f"{here}/output_bias", f"{there}.out_proj.bias", False, 0)


def _feed_forward(here: str, there: str) -> Iterator[Weight]:
    yield Weight(f"{here}/up", f"{there}.fc1.weight", True, 0)
    yield Weight(f"{here}/up_bias", f"{there}.fc1.bias", False, None)
    yield Weight(f"{here}/down", f"{there}.fc2.weight", True, 1)
    yield Weight(f"{here}/down_bias", f"{there}.fc2.bias", False, 0)


def _norm(here: str, there: str) -> Iterator[Weight]:
    yield Weight(f"{here}/scale", f"{there}.weight", False, 0)
    yield Weight(f"{here}/bias", f"{there}.bias", False, 0)


def imported_leaves(
    model: ModelConfig, shapes: Mapping[str, Any], found: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns the arrays of Marian's files under this program's names, in float32.

    `shapes` are those of the model's leaves here.

    Raises:
        UserError: an array is missing, has another shape or is not finite, or one is left over.
    """
    left, leaves = dict(found), {}
    for weight in weights_of(model):
        array = left.pop(weight.there, None)
        if array is None:
            raise UserError(f"{weight.there}: missing; not all weights of the model are there")
        wanted = weight.exported(np.empty(shapes[weight.here].shape, np.uint8)).shape
        if array.shape != wanted:
            raise UserError(f"{weight.there}: is {list(array.shape)}, but must be {list(wanted)}")
        leaves[weight.here] = weight.imported(np.asarray(array, np.float32))
        if not np.isfinite(leaves[weight.here]).all():
            raise UserError(f"{weight.there}: has numbers that are not finite")
    _refuse_what_is_left(model, left, found)
    return leaves


def _refuse_what_is_left(
    model: ModelConfig, left: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]
) -> None:
    """Raises UserError unless the arrays that are left over repeat what is known already."""
    shared = model.share_embeddings == "all"
    target = SHARED if shared else "model.decoder.embed_tokens.weight"
    same = {"lm_head.weight": target}
    if shared:
        same |= {f"model.{side}.embed_tokens.weight": SHARED for side in ("encoder", "decoder")}
    for name, array in left.items():
        if name.endswith(".embed_positions.weight"):
            known = sinusoids(*array.shape) if array.ndim == 2 else None
            alike = known is not None and np.allclose(array, known, atol=1e-4)
        else:
            alike = name in same and np.array_equal(array, found[same[name]])
        if not alike:
            raise UserError(f"{name}: a post-norm Marian model has no such array, or another one")


def sinusoids(length: int, d_model: int) -> np.ndarray:
    """Returns Marian's table of positions, [length, D]: sines first, then cosines."""
    half = np.arange(d_model // 2)
    angles = np.arange(length)[:, None] / 10000 ** (2 * half / d_model)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
