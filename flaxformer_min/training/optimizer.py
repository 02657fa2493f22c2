"""The learning rate (paper, section 5.3) as an optax schedule."""

import jax.numpy as jnp
import optax

from flaxformer_min.config import OptimizerConfig

BETA1 = 0.9  # of Adam, as the paper's (section 5.3)


def warmup_inverse_sqrt(
    d_model: int, warmup_steps: int, peak: float | None = None
) -> optax.Schedule:
    """lr(step) = D^-0.5 min(step^-0.5, step warmup^-1.5): linear warm-up, then inverse square root.

    Steps are counted from 1: optax's count 0 is the paper's step 1. `peak` is the rate at step
    `warmup_steps`; None is the paper's (D x warmup)^-0.5.
    """
    peak = (d_model * warmup_steps) ** -0.5 if peak is None else peak

    def rate(count):
        step = count + 1
        return peak * jnp.minimum(step / warmup_steps, (warmup_steps / step) ** 0.5)

    return rate


def make_schedule(config: OptimizerConfig, d_model: int) -> optax.Schedule:
    """The schedule that a config asks for."""
    return warmup_inverse_sqrt(d_model, config.warmup_steps, config.peak_learning_rate)


def make_optimizer(config: OptimizerConfig, d_model: int) -> optax.GradientTransformation:
    """Adam with the paper's betas and schedule; the gradient's global norm clipped if asked."""
    schedule = make_schedule(config, d_model)
    adam = optax.adam(schedule, b1=BETA1, b2=config.beta2, eps=config.epsilon)
    if config.clip_norm is None:
        return adam
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adam)
