"""How the tests compile: for two devices, also on a machine with a CPU only, and quickly.

Compiled programs are kept in `.pytest_cache/xla`, for other workers, for processes that tests
start, and for the next call.
"""

import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjaxsim.cli import main
from fedjaxsim.kernels import threefry
from fedjaxsim.privacy import noise
from fedjaxsim.report import plots, progress
from support import assembled, compiling, simulations

_TESTS = Path(__file__).parents[1]
for _name, _value in {
    "jax_compilation_cache_dir": str(_TESTS.parent / ".pytest_cache" / "xla"),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}.items():
    # Child processes read the environment.
    jax.config.update(_name, type(_value)(os.environ.setdefault(_name.upper(), str(_value))))
_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
"""XLA's newer generator of code for fused operations takes longer than all the rest of a test, and
parts to compile in parallel more than the whole. Only JAX 0.10 has the older one."""
_UNROLLED = threefry.words
_FACTORS = tuple(np.uint32(factor) for factor in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F))
"""Odd numbers whose bits look random, of xxHash."""
_EXACT = noise._draw
_TRACED_WITH = jax.make_user_context(default_value=_EXACT.__name__)
_OF_COSTS = {
    "test_accounting_composition", "test_accounting_gaussian", "test_accounting_in_loop",
    "test_accounting_losses", "test_accounting_pure", "test_accounting_rdp", "test_assumptions",
    "test_banded", "test_calibration", "test_correlated", "test_entries", "test_filter",
    "test_guarantee", "test_ledger", "test_ledger_draws", "test_messages", "test_planned_noise",
    "test_privacy_levels", "test_private_examples", "test_private_ranges", "test_published",
    "test_random_allocation", "test_schedule", "test_second_opinion", "test_selection",
    "test_trade_off", "test_unknown_costs",
}  # fmt: skip
"""Files of `tests/privacy` that ask what noise costs, or who is protected by it."""
_DRAWN = plots.content
_GROWTH = 700_000_000
"""Bytes by which a process grows before it lets go of its programs."""
_BLANK = plots.content(plots.picture("", 0.1, 0.1))


def _compile_quickly() -> None:
    """Compiling takes most of the time of a test, and how it is done does not change numbers."""
    jax.config.update("jax_num_cpu_devices", 2)
    # Where the source of each operation stands goes into no program: a seventh of a test's time.
    jax.config.update("jax_include_full_tracebacks_in_locations", False)
    for name, value in {
        "jax_traceback_in_locations_limit": 0,
        "jax_disable_most_optimizations": True,
    }.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(int(value))  # for processes that tests start
    if jax.__version_info__ < (0, 11):  # XLA ends the process at a flag that it does not know.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"


@jax.jit
def _hash_short(key, x, y):
    """Two words of key and counters in two dozen operations, where the hash is not the question.

    Four steps of a Feistel network: other counters have other words.
    """
    x, y = x + key[0], y + key[1]
    for step, factor in enumerate(_FACTORS):
        x, y = y, x + (y ^ (y >> 16)) * factor
        if step == 1:
            x, y = x ^ key[1], y ^ key[0]
    x = x ^ (y >> 15)
    return x, y ^ (x >> 13)


def _draw_short(words, size, dtype):
    """`noise._draw` in a dozen operations instead of 150: four uniform numbers, mean 0, variance 1.

    They end at √12, so whatever asks how noise is distributed needs the package's.
    """
    index = jax.lax.iota(jnp.uint32, size)
    high, low = threefry.words(words, jnp.zeros_like(index), index)
    total = (high >> 16) + (high & 0xFFFF) + (low >> 16) + (low & 0xFFFF)
    return (total.astype(dtype) - 2 * 0xFFFF) * (3**0.5 / 2**16)


def _draw_of(path):
    """What draws noise for the tests of a file."""
    exact = path.parent.name in ("audit", "kernels", "privacy") and path.stem not in _OF_COSTS
    return _EXACT if exact else _draw_short


@contextlib.contextmanager
def _drawn_by(draw, exact_keys=True):
    """No program that was traced with other noise, or keys, is used again."""
    traced_with = f"{draw.__name__}, {exact_keys}"
    with _TRACED_WITH(traced_with), pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "_draw", draw)
        patch.setattr(threefry, "words", compiling.hash_in_a_loop if exact_keys else _hash_short)
        yield


_compile_quickly()
compiling.quicken()
# Of the time of a command, a tenth draws its pictures; of a sweep, most.
plots.content = lambda figure, kind="png": _BLANK
# No power fails here, and to wait for the disk takes 5 to 10 ms for each file of a run.
os.fsync = lambda descriptor: None
# Under load everything is slow, and commands are read line by line.
progress.SLOW = 600.0
# What a shell has started in the background ignores Ctrl-C, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples at each call, none fails for the time that it takes, and none is kept.
hypothesis.settings.register_profile(
    "tests",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What a shared simulation has compiled serves all its tests, whatever their files."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(simulations.group_of(item)))


def pytest_collection_finish():
    """Modules and tests live as long as the process: Python's collector need not look at them."""
    gc.freeze()
    _MEMORY.after_release = _resident()


def _resident() -> int:
    """Return the bytes of this process in memory; 0 if that is unknown."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class _Memory:
    """What a process has in memory: workers grew to gigabytes of programs.

    To let go of them takes half a second, and the next tests compile again.
    """

    after_release = 0

    def bound(self):
        if _resident() > self.after_release + _GROWTH:
            jax.clear_caches()
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            self.after_release = _resident()


_MEMORY = _Memory()


def pytest_runtest_teardown(item, nextitem):
    """Between groups, as a group shares what it has compiled."""
    if nextitem is None or simulations.group_of(item) == simulations.group_of(nextitem):
        return
    _MEMORY.bound()


def _fixture_of(name, kind):
    return pytest.fixture(lambda: simulations.shared(name, kind))


for _name, _parts in simulations.NAMED.items():
    globals()[f"shared_{_name}"] = _fixture_of(*_parts)


@pytest.fixture
def sources():
    """For tests that read the files of the package by `support.sources`, in one process."""


@pytest.fixture
def shared_system(request):
    """The system that `parametrize(…, indirect=True)` names, in float64, as the test itself is."""
    with jax.enable_x64(True):
        yield simulations.shared(request.param)


@pytest.fixture(scope="module", autouse=True)
def _noise_of_folder(request):
    if _TESTS not in request.path.parents:  # a benchmark or an experiment
        yield
        return
    draw = _draw_of(request.path)
    exact_keys = draw is _EXACT or request.node.get_closest_marker("exact_keys") is not None
    with _drawn_by(draw, exact_keys), assembled.shared(assembled.of_module(request.node)):
        yield


@pytest.fixture(scope="module")
def exact_noise():
    """For tests in other folders that ask how noise is distributed."""
    with _drawn_by(_EXACT):
        yield


@pytest.fixture
def draw_of():
    """For the test that says where noise is the package's."""
    return _draw_of


@pytest.fixture(scope="module")
def unrolled(exact_noise):
    """For tests that are about Threefry or count operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threefry, "words", _UNROLLED)
        yield


@pytest.fixture
def every_program(monkeypatch):
    """For tests that count programs: those that move numbers outside `jax.jit`, too."""
    monkeypatch.setattr(compiling, "moves_by_numpy", False)


@pytest.fixture(scope="module")
def drawn():
    """For tests that are about pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "content", _DRAWN)
        yield


@pytest.fixture(scope="module")
def optimized():
    """For tests that ask what memory compiled programs plan."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def fully_optimized(unrolled, optimized):
    """For tests that read compiled programs."""


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
