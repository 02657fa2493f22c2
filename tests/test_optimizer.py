"""The learning rate of section 5.3, against published numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flaxformer_min.config import OptimizerConfig
from flaxformer_min.training.optimizer import make_optimizer, warmup_inverse_sqrt

PAPER = {
    1: 1.746928e-7,
    2: 3.493856e-7,
    100: 1.746928e-5,
    3999: 6.985966e-4,
    4000: 6.987712e-4,
    4001: 6.986839e-4,
    100_000: 1.397542e-4,
}


@pytest.mark.parametrize(("step", "rate"), PAPER.items())
def test_the_papers_base_model_gets_the_published_rates(step, rate):
    schedule = warmup_inverse_sqrt(512, 4000)
    np.testing.assert_allclose(schedule(step - 1), rate, rtol=1e-6)


def test_the_first_update_has_a_rate_above_zero():
    np.testing.assert_allclose(warmup_inverse_sqrt(128, 10)(0), 128**-0.5 * 10**-1.5, rtol=1e-6)


def test_the_rate_is_the_same_for_traced_counts():
    schedule = warmup_inverse_sqrt(512, 4000)
    steps = np.array(list(PAPER))
    rates = jax.jit(jax.vmap(schedule))(jnp.asarray(steps - 1, jnp.int32))
    np.testing.assert_allclose(rates, list(PAPER.values()), rtol=1e-6)


def test_the_peak_is_at_the_end_of_the_warm_up_and_nowhere_else():
    rates = jax.vmap(warmup_inverse_sqrt(38, 17))(jnp.arange(101))
    assert int(jnp.argmax(rates)) == 16
    np.testing.assert_allclose(rates[16], (38 * 17) ** -0.5, rtol=1e-6)
    assert (np.diff(rates[:17]) > 0).all()
    assert (np.diff(rates[16:]) < 0).all()


def test_a_given_peak_scales_the_whole_curve():
    paper = jax.vmap(warmup_inverse_sqrt(38, 17))(jnp.arange(101))
    given = jax.vmap(warmup_inverse_sqrt(38, 17, 1.5e-3))(jnp.arange(101))
    np.testing.assert_allclose(given[16], 1.5e-3, rtol=1e-6)
    np.testing.assert_allclose(given[0], 1.5e-3 / 17, rtol=1e-6)
    np.testing.assert_allclose(given[4 * 17 - 1], 1.5e-3 / 2, rtol=1e-6)
    np.testing.assert_allclose(given / given[16], paper / paper[16], rtol=1e-5)


def test_a_given_peak_makes_the_width_irrelevant():
    narrow, wide = (warmup_inverse_sqrt(d_model, 17, 1e-3) for d_model in (38, 512))
    assert narrow(5) == wide(5)


def test_optax_applies_the_rate_of_step_one_to_the_first_update():
    schedule = warmup_inverse_sqrt(38, 17)
    optimizer = optax.sgd(schedule)
    update, _ = optimizer.update(jnp.ones(()), optimizer.init(jnp.ones(())))
    np.testing.assert_allclose(-update, schedule(0), rtol=1e-6)


# Adam and clipping


def updates_of(config, gradients):
    """The updates that the config's optimizer makes of gradients [N, 3], and its last state."""
    optimizer = make_optimizer(config, 38)
    state, updates = optimizer.init(jnp.zeros(3)), []
    for gradient in gradients:
        update, state = optimizer.update(jnp.asarray(gradient, jnp.float32), state)
        updates.append(np.asarray(update))
    return updates, jax.tree.leaves(state)


GRADIENTS = np.array([[3.0, -0.05, 0.2], [-1.0, 0.02, 0.1], [0.5, -0.04, 0.0]])


def test_adam_is_the_published_one_with_the_configs_constants():
    config = OptimizerConfig(peak_learning_rate=0.5, warmup_steps=2, beta2=0.7, epsilon=1e-2)
    first = second = np.zeros(3)
    updates, _ = updates_of(config, GRADIENTS)
    for step, (update, gradient) in enumerate(zip(updates, GRADIENTS, strict=True), start=1):
        first, second = 0.9 * first + 0.1 * gradient, 0.7 * second + 0.3 * gradient**2
        mean, root = first / (1 - 0.9**step), np.sqrt(second / (1 - 0.7**step))
        rate = {1: 0.25, 2: 0.5, 3: 0.5 * (2 / 3) ** 0.5}[step]
        np.testing.assert_allclose(update, -rate * mean / (root + 1e-2), rtol=1e-5)


def test_a_gradient_above_clip_norm_counts_as_one_of_that_norm_and_others_as_they_are():
    gradients = [np.array([6.0, 0.0, 8.0]), np.array([0.3, -0.4, 0.0])]  # norms 10 and 0.5
    plain = OptimizerConfig(peak_learning_rate=0.5, warmup_steps=2, epsilon=1e-2)
    clipped = updates_of(dataclasses.replace(plain, clip_norm=2.0), gradients)
    expected = updates_of(plain, [gradients[0] / 5, gradients[1]])
    for one, other in zip(jax.tree.leaves(clipped), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
