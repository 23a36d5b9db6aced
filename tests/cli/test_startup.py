"""Imports of a new process before it answers: checked by modules, never by seconds."""

import json
import subprocess
import sys

import pytest
from support.problems import HANGS

import fedjaxsim

_HEAVY = {
    "jax",
    "flax",
    "optax",
    "matplotlib",
    "sklearn",
    "scipy",
    "numpy",
    "dp_accounting",
    "pandas",
    "pyarrow",
    "PIL",
}
_OF_PARTS = {"jax", "flax", "optax", "numpy", "scipy"}
_COMMANDS = (
    "run",
    "resume",
    "sweep",
    "tune",
    "compare",
    "predict",
    "evaluate",
    "coefficients",
    "data",
    "demo",
    "privacy",
    "audit",
    "bench",
)
_SCRIPT = """
import contextlib, json, os, sys
from fedjaxsim.cli import main

codes = []
with open(os.devnull, "w") as nowhere:
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        for arguments in json.loads(sys.argv[1]):
            codes.append(main(arguments))
print(json.dumps([codes, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def run(*commands: str) -> tuple[list[int], set[str]]:
    """Return the exit codes of commands in one new process, and the modules it imports."""
    arguments = json.dumps([command.split() for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=HANGS,
    )
    codes, modules = json.loads(done.stdout)
    return codes, set(modules)


def test_the_package_help_and_the_version_import_nothing_heavy():
    asked = ["--help", "--version", *(f"{c} --help" for c in _COMMANDS)]
    codes, modules = run(*asked)
    assert codes == [0] * len(asked)
    assert "fedjaxsim" in modules
    assert not modules & _HEAVY


@pytest.mark.thorough
def test_refusing_a_flag_or_a_command_imports_nothing_heavy(tmp_path):
    (tmp_path / "run.toml").write_text("learning_rat = 1\n")
    refused = ["rnu", "--hlep", "run absent.toml", "privacy --rounds 3"]
    codes, modules = run(*refused)
    assert codes == [2] * len(refused)
    assert not modules & _HEAVY
    # The flags of a run are those that its parts declare, whose code must be there.
    refused = ["run --round 3", "run --rounds three", "run --rounds 0", f"run {tmp_path}/run.toml"]
    refused += ["bench --repeats many"]
    codes, modules = run(*refused)
    assert codes == [2] * len(refused)
    assert not modules & (_HEAVY - _OF_PARTS)


@pytest.mark.thorough
def test_the_privacy_of_a_plan_imports_no_models_and_no_figures():
    plan = "--sampling-rate 0.5 --noise-multiplier 4 --rounds 2 --delta 1e-3"
    codes, modules = run(f"privacy {plan}")
    assert codes == [0]
    assert not modules & {"flax", "optax", "matplotlib", "sklearn"}


def test_comparing_runs_computes_nothing_and_draws_only_if_asked_to(tmp_path):
    spent = {"epsilon": None, "epsilon_replace": None, "delta": 0.1, "rounds_per_second": 1.0}
    summary = {"rounds": 1, "rounds_planned": 1, "interrupted": False, **spent}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n')
    (tmp_path / "guarantee.json").write_text('{"assumed": []}')
    (tmp_path / "config.toml").write_text("rounds = 1\n")
    codes, modules = run(f"compare {tmp_path} --json")
    assert codes == [0]
    assert not modules & {"jax", "flax", "matplotlib", "sklearn", "scipy"}


def modules_of(script: str) -> set[str]:
    """Return the names of modules that a script prints."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=HANGS)
    return set(done.stdout.split())


@pytest.mark.thorough
def test_the_public_names_and_runs_import_little_more_than_jax():
    modules = modules_of("""
import sys
import jax, flax, optax
before = set(sys.modules)
import fedjaxsim
for name in fedjaxsim.__all__:
    getattr(fedjaxsim, name)
import fedjaxsim.cli.running  # as `fedjaxsim run` does
from fedjaxsim.runs import settings
settings.readers()  # of all parts, by which flags are read
jax.config.update("jax_num_cpu_devices", 3)  # raises once a device is in use
assert jax.device_count("cpu") == 3
print(*set(sys.modules) - before)
""")
    assert "fedjaxsim.simulation" in modules
    assert not modules & {"matplotlib", "sklearn", "rich", "tyro", "dp_accounting", "pyarrow"}
    assert not modules & {"PIL", "datasets"}
    assert not modules & {"scipy.stats", "scipy.optimize", "scipy.signal", "scipy.io", "tree"}


def test_every_public_name_is_found_and_listed():
    for name in fedjaxsim.__all__:
        assert getattr(fedjaxsim, name) is getattr(fedjaxsim, name)
    assert set(fedjaxsim.__all__) <= set(dir(fedjaxsim))
    assert fedjaxsim.Simulation.__module__ == "fedjaxsim.simulation"
    assert fedjaxsim.models.__name__ == "fedjaxsim.models"
    with pytest.raises(AttributeError, match="Simulatio"):
        getattr(fedjaxsim, "Simulatio")  # noqa: B009
