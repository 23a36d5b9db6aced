import jax
import pytest


@pytest.fixture(scope="module")
def quickly_compiled():
    """For tests of numbers: compiling takes nearly all of their time, and does not change them."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
