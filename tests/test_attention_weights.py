"""Attention weights are those of the forward pass: rows sum to 1, what is masked is exactly 0."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flaxformer_min.config import ModelConfig
from flaxformer_min.decoding.attention_file import attention_file
from flaxformer_min.errors import UserError
from flaxformer_min.model import layers
from flaxformer_min.model.attention_weights import AttentionWeights, attention_weights
from flaxformer_min.model.teacher_forcing import forced_states
from flaxformer_min.model.transformer import Transformer

LAYERS, HEADS = 2, 3
CONFIG = ModelConfig(
    num_layers=LAYERS, d_model=10, d_ff=7, num_heads=HEADS, d_k=5, d_v=2, max_length=11,
    share_embeddings="none", positions="learned",
)  # fmt: skip
SOURCE = jnp.array([[5, 6, 7, 8, 3], [9, 3, 0, 0, 0]])
TARGET = jnp.array([[4, 5, 6, 7, 8, 9, 3], [6, 3, 0, 0, 0, 0, 0]])
IDS = {"pad_id": 0, "bos_id": 2}


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(CONFIG, 13, rngs=nnx.Rngs(1))


@pytest.fixture(scope="module")
def weights(model) -> AttentionWeights:
    return jax.device_get(attention_weights(model, SOURCE, TARGET, **IDS))


@pytest.mark.run
def test_the_weights_are_those_that_the_forward_pass_uses(model, weights, monkeypatch):
    used = []

    def attend(*arguments, **options):
        attended = original(*arguments, **options)
        used.append(np.asarray(attended.weights))
        return attended

    original = layers.attend
    monkeypatch.setattr(layers, "attend", attend)
    forced_states(model, SOURCE, TARGET, **IDS)
    assert len(used) == 3 * LAYERS
    for layer in range(LAYERS):
        own, cross = used[LAYERS + 2 * layer :][:2]
        np.testing.assert_array_equal(weights.encoder[:, layer], used[layer])
        np.testing.assert_array_equal(weights.decoder[:, layer], own)
        np.testing.assert_array_equal(weights.cross[:, layer], cross)
    assert len({site[0, 0, 0, 1, 0] for site in weights}) == 3


def test_rows_sum_to_one_and_masked_entries_are_exactly_zero(weights):
    assert weights.encoder.shape == (2, LAYERS, HEADS, 5, 5)
    assert weights.decoder.shape == (2, LAYERS, HEADS, 7, 7)
    assert weights.cross.shape == (2, LAYERS, HEADS, 7, 5)
    for site in weights:
        np.testing.assert_allclose(site.sum(axis=-1), 1, atol=1e-6)
    future = np.triu_indices(7, 1)
    assert (weights.decoder[..., future[0], future[1]] == 0).all()
    for site in (weights.encoder, weights.cross):
        assert (site[1, ..., 2:] == 0).all()
        assert (site[1, ..., :2] > 0).all() and (site[0] > 0).all()


def written(path, weights, *, average_heads) -> None:
    with attention_file(path, average_heads=average_heads) as write:
        for line in (4, 6):
            one = AttentionWeights(*(site[line // 5] for site in weights))
            write(line, ["▁a", "</s>"], ["▁b", "</s>"], one)


def test_an_npz_holds_every_line_site_layer_and_head(weights, tmp_path):
    written(tmp_path / "a.npz", weights, average_heads=False)
    with np.load(tmp_path / "a.npz") as file:
        names = ("source", "target", "encoder", "decoder", "cross")
        assert set(file) == {f"{line}/{name}" for line in (4, 6) for name in names}
        assert file["6/source"].tolist() == ["▁a", "</s>"]
        np.testing.assert_array_equal(file["6/decoder"], weights.decoder[1])
        np.testing.assert_array_equal(file["4/cross"], weights.cross[0])


def test_json_lines_hold_the_average_over_heads_if_asked_and_say_so(weights, tmp_path):
    written(tmp_path / "a.jsonl", weights, average_heads=True)
    four, six = map(json.loads, (tmp_path / "a.jsonl").read_text("utf-8").splitlines())
    sites = {f"{site}_mean_over_heads" for site in ("encoder", "decoder", "cross")}
    assert set(four) == {"line", "source", "target", *sites}
    assert (four["line"], six["line"], six["target"]) == (4, 6, ["▁b", "</s>"])
    mean = np.array(six["cross_mean_over_heads"])
    np.testing.assert_allclose(mean, weights.cross[1].mean(axis=1), rtol=1e-6)


def test_a_file_that_cannot_be_is_an_error_of_the_user(tmp_path):
    for path, message in (
        (tmp_path / "a.txt", "a.txt: attention goes to a file that ends in"),
        (tmp_path / "no" / "a.npz", "a.npz: No such file or directory"),
    ):
        with pytest.raises(UserError, match=message), attention_file(path, average_heads=False):
            pass
