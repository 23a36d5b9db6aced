"""How the tests compile: for two devices, also on a machine with a CPU only, and quickly.

Programs that tests compile are not kept: neither here nor in the processes that they start.
"""

import gc
import os
import signal

import hypothesis
import jax
import pytest

from fedjaxsim.cli import main

os.environ["FEDJAXSIM_COMPILATION_CACHE"] = "off"
_FUSIONS = "xla_cpu_use_fusion_emitters"
"""XLA's newer generator of code for fused operations takes longer than all the rest of a test. Only
JAX 0.10 has the older one."""


def _compile_quickly() -> None:
    """Compiling takes most of the time of a test, and how it is done does not change numbers."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_disable_most_optimizations", True)
    # Where the source of each operation stands goes into no program: a seventh of a test's time.
    jax.config.update("jax_include_full_tracebacks_in_locations", False)
    jax.config.update("jax_traceback_in_locations_limit", 0)
    if jax.__version_info__ < (0, 11):  # XLA ends the process at a flag that it does not know.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{_FUSIONS}=false"


_compile_quickly()
# Tracing makes many small objects that live: Python's collector would go through them again and
# again, for a sixth of a test's time.
gc.set_threshold(200_000, 20, 50)
# What a shell has started in the background ignores Ctrl-C, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# No example fails for the time that it takes, and none is kept.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")


@pytest.fixture(scope="module")
def fully_optimized():
    """For tests that read compiled programs, or what memory they plan."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Run a command that must be refused, in one line and leaving no file; return the line."""
    monkeypatch.chdir(tmp_path)

    def files():
        return [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts]

    def refuse(command: str) -> str:
        before = files()
        capsys.readouterr()
        assert main(command.split()) == 2
        error = capsys.readouterr().err
        assert error.startswith("fedjaxsim: error: ")
        assert error.endswith("\n")
        assert error.count("\n") == 1
        assert files() == before
        return error

    return refuse
