"""A step works in the memory that the step before it worked in."""

import subprocess
import sys

import pytest

# The page faults of a program that needs 64 MiB to work in: the fewest of its fourth to ninth call,
# because what else goes on in the process may add some to one of them.
COUNT_FAULTS = """
import resource
from flaxformer_min.system.malloc import keep_work_space
keep_work_space()
import jax, jax.numpy as jnp
step = jax.jit(lambda x: jnp.sort(jnp.outer(x, x), axis=1).sum(axis=0) / x.size)
x = jnp.ones(4096)
faults = []
for _ in range(9):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    x = jax.block_until_ready(step(x))
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults[3:]))
"""
PAGES = 64 * 2**20 // 4096


@pytest.mark.run
@pytest.mark.skipif(sys.platform != "linux", reason="a matter of glibc")
def test_the_work_space_of_a_step_serves_the_next_one():
    faults = int(subprocess.check_output([sys.executable, "-c", COUNT_FAULTS]))
    assert faults < PAGES / 10
