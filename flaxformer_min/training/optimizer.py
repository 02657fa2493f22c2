"""The learning rate and Adam (paper, section 5.3), in optax."""

import jax.numpy as jnp
import optax

from flaxformer_min.config import OptimizerConfig

BETA1 = 0.9  # Adam's beta_1, the paper's value (section 5.3)


def warmup_inverse_sqrt(
    d_model: int, warmup_steps: int, peak: float | None = None
) -> optax.Schedule:
    """Returns the paper's rate D^-0.5 min(step^-0.5, step warmup^-1.5) as a function of a count.

    The rate rises linearly up to step `warmup_steps` and then falls with the inverse square root of
    the step. The paper counts steps from 1 and optax from 0, so that optax's count 0 is step 1.
    `peak` is the rate at step `warmup_steps`; without one it is the paper's, (D x warmup)^-0.5.

    >>> rate = warmup_inverse_sqrt(d_model=512, warmup_steps=4000)
    >>> print(f"{rate(0):.3g} {rate(3999):.3g} {rate(15999):.3g}")
    1.75e-07 0.000699 0.000349
    """
    peak = (d_model * warmup_steps) ** -0.5 if peak is None else peak

    def rate(count):
        step = count + 1
        return peak * jnp.minimum(step / warmup_steps, (warmup_steps / step) ** 0.5)

    return rate


def make_schedule(config: OptimizerConfig, d_model: int) -> optax.Schedule:
    """Returns the learning rate that the config asks for, as a function of optax's count."""
    return warmup_inverse_sqrt(d_model, config.warmup_steps, config.peak_learning_rate)


def make_optimizer(config: OptimizerConfig, d_model: int) -> optax.GradientTransformation:
    """Returns Adam with the config's schedule; `clip_norm` first clips the gradients to that norm.

    The norm is that of all gradients together.
    """
    schedule = make_schedule(config, d_model)
    adam = optax.adam(schedule, b1=BETA1, b2=config.beta2, eps=config.epsilon)
    if config.clip_norm is None:
        return adam
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adam)
