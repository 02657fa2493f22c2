"""Three ways to mix n positions of width d, measured: python examples/complexity.py (Table 1).

                    operations    sequential steps    longest path between two positions
    self-attention  n^2 d         1                   1
    recurrent       n d^2         n                   n
    convolution     k n d^2       1                   n / (k - 1) layers

Time is fitted to n^a d^b, with n or d doubled while the other stays. The sequential steps are
counted in the compiled program, and the path by asking how many layers it takes until the last
output depends on the first input. Self-attention stands here without its projections, as in the
table: they would add 4 n d^2. Printed on two cores that did other work as well, so that a and b are
rough; the scores of long sequences also leave the cache:

    self_attention  a = 2.30, b = 0.97    1       1
    recurrent       a = 1.37, b = 2.36    33      1
    convolution     a = 0.92, b = 1.85    1       16
"""

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_min.model.attention import scaled_dot_product_attention

Mixer = Callable[[jax.Array, jax.Array], jax.Array]  # x [n, d] and weights [K, d, d] -> [n, d]
KERNEL = 3  # k
# For each mixer: sizes (n, d) with n doubled, and then sizes with d doubled.
SIZES = {
    "self_attention": [[(n, 64) for n in (512, 1024, 2048)], [(512, d) for d in (512, 1024, 2048)]],
    "recurrent": [[(n, 256) for n in (512, 1024, 2048)], [(256, d) for d in (256, 512, 1024)]],
    "convolution": [[(n, 256) for n in (512, 1024, 2048)], [(512, d) for d in (256, 512, 1024)]],
}


def self_attention(x: jax.Array, _: jax.Array) -> jax.Array:
    """Every position reads every other one at once."""
    mask = jnp.ones((1, 1, 1, len(x)), bool)
    return scaled_dot_product_attention(*[x[None, None]] * 3, mask)[0, 0]


def recurrent(x: jax.Array, weights: jax.Array) -> jax.Array:
    """h_t = tanh(h_(t-1) W + x_t): each position waits for the one before it."""

    def step(state, row):
        state = jnp.tanh(state @ weights[0] + row)
        return state, state

    return jax.lax.scan(step, jnp.zeros(x.shape[1], x.dtype), x)[1]


def convolution(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Every position reads itself and the k - 1 positions before it."""
    before = jnp.pad(x, ((KERNEL - 1, 0), (0, 0)))
    return sum(before[i : i + len(x)] @ weights[i] for i in range(KERNEL))


def inputs(n: int, d: int) -> tuple[jax.Array, jax.Array]:
    draw = np.random.default_rng(1)
    weights = draw.standard_normal((KERNEL, d, d)) / d**0.5
    return jnp.float32(draw.standard_normal((n, d))), jnp.float32(weights)


def seconds(mixer: Mixer, sizes: Sequence[tuple[int, int]], repeats: int) -> list[float]:
    """The shortest of several runs at each size (n, d), which take turns; without compilation."""
    run, given, times = jax.jit(mixer), [inputs(*size) for size in sizes], [[] for _ in sizes]
    for _ in range(repeats + 1):
        for each, those in zip(given, times, strict=True):
            start = time.perf_counter()
            run(*each).block_until_ready()
            those.append(time.perf_counter() - start)
    return [min(those[1:]) for those in times]  # the first run compiles


def exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """The b of time = a size^b, by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])


def sequential_steps(mixer: Mixer, n: int) -> int:
    """The turns of the loop in the traced program, or 1 if it has none."""
    equations = jax.make_jaxpr(mixer)(*inputs(n, 4)).eqns
    return max([eqn.params["length"] for eqn in equations if eqn.primitive.name == "scan"] or [1])


def layers_until_connected(mixer: Mixer, n: int) -> int:
    """How many layers it takes until the last output depends on the first input."""
    x, weights = inputs(n, 2)

    def last(x, depth):
        for _ in range(depth):
            x = mixer(x, weights)
        return x[-1].sum()

    return next(depth for depth in range(1, n) if jnp.any(jax.grad(last)(x, depth)[0] != 0))


def main(repeats: int = 20, shrink: int = 1, length: int = 33) -> None:
    """Prints the table; `shrink` divides every n and d, for a quick look."""
    print(
        f"{'':<16}time ~ n^a d^b        steps   layers to connect {length} positions, k = {KERNEL}"
    )
    for mixer in (self_attention, recurrent, convolution):
        fitted = []
        for axis, sizes in enumerate(SIZES[mixer.__name__]):
            small = [(n // shrink, d // shrink) for n, d in sizes]
            fitted.append(exponent([size[axis] for size in small], seconds(mixer, small, repeats)))
        steps, depth = sequential_steps(mixer, length), layers_until_connected(mixer, length)
        about = f"a = {fitted[0]:.2f}, b = {fitted[1]:.2f}"
        print(f"{mixer.__name__:<16}{about:<22}{steps:<8}{depth}")


if __name__ == "__main__":
    main()
