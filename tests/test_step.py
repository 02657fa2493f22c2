"""One training step: what it averages, what it leaves alone, on one device and on many."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_min.batching import Batch
from flaxformer_min.config import MeshConfig, ModelConfig, OptimizerConfig
from flaxformer_min.errors import UserError
from flaxformer_min.schedule import make_optimizer
from flaxformer_min.sharding import ROWS, make_mesh, shardings
from flaxformer_min.state import count_parameters, init_state, split_model
from flaxformer_min.step import loss_sums, make_train_step, shift_right

PAD, BOS, EOS, VOCAB = 0, 2, 3, 48
MODEL = ModelConfig(num_layers=1, d_model=16, d_ff=32, num_heads=2, d_k=8, d_v=8, dropout=0.0)
OPTIMIZER = make_optimizer(OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=3), MODEL.d_model)
GRAPHDEF, _ = split_model(MODEL, VOCAB)
KEY = jax.random.key(5)
KEYWORDS = {"pad_id": PAD, "bos_id": BOS}


@functools.cache
def fresh_state():
    return jax.jit(lambda: init_state(MODEL, VOCAB, OPTIMIZER, 7))()


def ragged_batch(target_lengths=(1, 3, 11, 2, 0, 0, 5, 7), source_length=7, target_length=11):
    """Rows whose targets have the given numbers of tokens, EOS included; 0 is a filler row."""
    random = np.random.default_rng(1)
    batch = Batch(
        np.zeros((len(target_lengths), source_length), np.int32),
        np.zeros((len(target_lengths), target_length), np.int32),
    )
    for row, length in enumerate(target_lengths):
        for side, n in zip(batch, (min(length, source_length), length), strict=True):
            side[row, :n] = random.integers(4, VOCAB, n)
            side[row, max(n - 1, 0) : n] = EOS
    return batch


@functools.cache
def make_step(accumulation=1, smoothing=0.1, graphdef=GRAPHDEF):
    return jax.jit(
        make_train_step(
            graphdef, OPTIMIZER, **KEYWORDS, smoothing=smoothing, accumulation=accumulation
        )
    )


@jax.jit
def mean_loss_and_tokens(params, batch):
    loss, tokens = loss_sums(GRAPHDEF, params, batch, **KEYWORDS, smoothing=0.0)
    return loss / tokens, tokens


def assert_close(left, right, tolerance):
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * (1e-3 + np.abs(one).max()))


def test_the_decoder_reads_bos_and_then_every_token_but_the_last():
    target = jnp.array([[5, 7, EOS], [11, EOS, PAD]])
    assert shift_right(target, BOS).tolist() == [[BOS, 5, 7], [BOS, 11, EOS]]


def test_the_loss_counts_target_tokens_with_eos_and_no_padding():
    params = fresh_state().params
    loss, tokens = mean_loss_and_tokens(params, ragged_batch())
    assert tokens == 1 + 3 + 11 + 2 + 5 + 7
    # Before training the guess is nearly uniform.
    assert abs(float(loss) - np.log(VOCAB)) < 1


def test_filler_rows_and_more_padding_do_not_change_loss_or_gradient():
    params, short = fresh_state().params, ragged_batch((3, 5))
    longer = Batch(*(np.pad(side, ((0, 5), (0, 2))) for side in short))
    gradient = jax.jit(jax.value_and_grad(mean_loss_and_tokens, has_aux=True))
    assert_close(gradient(params, short), gradient(params, longer), 1e-5)


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_over_ragged_micro_batches_is_the_gradient_of_one_big_batch(accumulation):
    batch = ragged_batch()
    whole, _ = make_step()(fresh_state(), batch, KEY)
    parts, metrics = make_step(accumulation)(fresh_state(), batch, KEY)
    assert metrics.tokens == 29
    # Adam's first moment after one step is (1 - beta1) times the gradient.
    assert_close(whole.opt_state[0].mu, parts.opt_state[0].mu, 1e-5)


def test_a_batch_of_filler_rows_alone_gives_finite_numbers():
    state, metrics = make_step()(fresh_state(), ragged_batch((0,) * 8), KEY)
    assert metrics.tokens == 0 and metrics.loss == 0
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def test_a_step_that_is_not_finite_changes_neither_parameters_nor_moments_nor_the_rate():
    step, batch = make_step(), ragged_batch()
    state, _ = step(fresh_state(), batch, KEY)
    broken = state.params | {"embedding": state.params["embedding"].at[5, 3].set(jnp.nan)}
    broken_state = state._replace(params=broken)
    after, metrics = step(broken_state, batch, KEY)
    assert (int(after.step), int(after.skipped), int(metrics.skipped_in_a_row)) == (2, 1, 1)
    jax.tree.map(
        np.testing.assert_array_equal,
        (after.params, after.opt_state),
        (broken, state.opt_state),
    )
    healed, metrics = step(after._replace(params=state.params), batch, KEY)
    assert (int(healed.skipped), int(metrics.skipped_in_a_row)) == (1, 0)
    assert int(healed.opt_state[0].count) == 2


def test_dropout_depends_on_step_and_key_and_on_nothing_else():
    model = ModelConfig(num_layers=1, d_model=16, d_ff=32, num_heads=2, d_k=8, d_v=8, dropout=0.3)
    step, batch = make_step(graphdef=split_model(model, VOCAB)[0]), ragged_batch()
    state = fresh_state()

    def loss(state, key):
        return float(step(state, batch, key)[1].loss)

    assert loss(state, KEY) == loss(state, KEY)
    assert loss(state, KEY) != loss(state, jax.random.key(6))
    assert loss(state, KEY) != loss(state._replace(step=state.step + 1), KEY)


def test_training_on_one_batch_learns_it_by_heart():
    step, batch, state = make_step(smoothing=0.0), ragged_batch(), fresh_state()
    for _ in range(150):
        state, metrics = step(state, batch, KEY)
    assert metrics.loss < 0.1


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 4, 2)])
def test_a_mesh_of_devices_takes_the_same_step_as_one_device(sizes):
    config = MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2])
    mesh, state, batch = make_mesh(config), fresh_state(), ragged_batch()
    expected, expected_metrics = make_step()(state, batch, KEY)
    spread = jax.device_put(state, shardings(mesh, state))
    rows = jax.device_put(batch, jax.sharding.NamedSharding(mesh, ROWS))
    got, metrics = make_step()(spread, rows, KEY)
    assert_close(metrics.loss, expected_metrics.loss, 1e-6)
    assert_close(got.opt_state[0].mu, expected.opt_state[0].mu, 1e-5)
    up = got.params["encoder"][0]["feed_forward"]["up"]
    assert up.addressable_shards[0].data.size == up.size // (sizes[1] * sizes[2])


def test_a_mesh_that_does_not_make_the_devices_is_refused():
    with pytest.raises(UserError, match="3 x 1 x 1 does not make the 8 devices"):
        make_mesh(MeshConfig(data=3))


def test_one_axis_of_a_mesh_may_take_the_rest():
    assert dict(make_mesh(MeshConfig(tensor=2)).shape) == {"data": 4, "fsdp": 1, "tensor": 2}


def test_parameters_are_counted_by_the_paper_s_formula():
    layers = 2 * 4 * 16 * 16 + 4 * 16 * 16  # three attentions of four square kernels
    feed_forward = 2 * (2 * 16 * 32 + 32 + 16)
    norms = 5 * 2 * 16
    assert count_parameters(fresh_state().params) == (
        layers + feed_forward + norms + VOCAB * MODEL.d_model
    )
