"""Two devices, also on a machine with a CPU only, for what is divided over devices.

Programs that tests compile are not kept: neither here nor in the processes that they start.
"""

import os

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 2)
os.environ["FEDJAXSIM_COMPILATION_CACHE"] = "off"


@pytest.fixture(scope="module")
def quickly_compiled():
    """For tests of numbers: compiling takes nearly all of their time, and does not change them."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
