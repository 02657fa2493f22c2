"""The learning rate of section 5.3, against published numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flaxformer_min.training.optimizer import warmup_inverse_sqrt

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
