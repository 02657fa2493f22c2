"""A layer alone: a norm follows every one of its sublayers (section 5.4), and none comes first."""

import jax
import numpy as np
import pytest
from flax import nnx
from tiny_model import CONFIG, SOURCE, TARGET_IN

from flaxformer_min.model.layers import (
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    MultiHeadAttention,
)
from flaxformer_min.model.masks import causal_mask, padding_mask


@pytest.fixture
def inputs(monkeypatch):
    """What the sublayers are given from now on, in the order of their calls."""
    given = []
    for kind in (MultiHeadAttention, FeedForward):

        def recording(self, x, *rest, sublayer=kind.__call__):
            given.append(x)
            return sublayer(self, x, *rest)

        monkeypatch.setattr(kind, "__call__", recording)
    return given


def states(ids, seed):
    """States [B, L, D] whose mean is 1 and whose variance is 9."""
    return 1 + 3 * jax.random.normal(jax.random.key(seed), (*ids.shape, CONFIG.d_model))


def assert_normed_after_each_sublayer(x, inputs, output):
    np.testing.assert_array_equal(inputs[0], x)
    for number, normed in enumerate([*inputs[1:], output], start=1):
        message = f"after sublayer {number}"
        np.testing.assert_allclose(normed.mean(-1), 0, atol=1e-5, err_msg=message)
        np.testing.assert_allclose(normed.var(-1), 1, atol=1e-3, err_msg=message)


@pytest.mark.run
def test_an_encoder_layer_norms_after_each_of_its_two_sublayers(inputs):
    x = states(SOURCE, 1)
    output = EncoderLayer(CONFIG, rngs=nnx.Rngs(0))(x, padding_mask(SOURCE))
    assert len(inputs) == 2
    assert_normed_after_each_sublayer(x, inputs, output)


@pytest.mark.run
def test_a_decoder_layer_norms_after_each_of_its_three_sublayers(inputs):
    x, memory = states(TARGET_IN, 2), states(SOURCE, 3)
    target_mask = padding_mask(TARGET_IN) & causal_mask(TARGET_IN.shape[1])
    layer = DecoderLayer(CONFIG, rngs=nnx.Rngs(0))
    output = layer(x, memory, target_mask, padding_mask(SOURCE))
    assert len(inputs) == 3
    assert_normed_after_each_sublayer(x, inputs, output)
