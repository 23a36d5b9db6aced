"""A second run of the same shapes compiles nothing, in processes that start anew."""

import json
import os
import subprocess
import sys
import types
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from support.problems import HANGS

import fedjaxsim as fjs
from fedjaxsim.cli.devices import LocalDevices
from fedjaxsim.cli.program import _as_found
from fedjaxsim.engine import compilation_cache
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.settings_files import read_toml

RUN = """run --quiet --data synthetic --loss squared --clients 6 --rounds 4 --eval-every 2
--local-steps 1 --noise-multiplier 1 --sampling-rate 1"""
# Two devices, whatever the machine has: the clients are divided over them.
SCRIPT = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
assert jax.device_count() == 2
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
from fedjaxsim.cli import main
code = main(sys.argv[1:])
print(json.dumps(events), file=sys.stderr)
sys.exit(code)
"""


class Finished(NamedTuple):
    code: int
    events: Counter[str]
    errors: list[str]
    directory: RunDirectory


def environment(cache: Path) -> dict[str, str]:
    """Return the environment of a process with a folder for programs that compile quickly."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("JAX_")}
    quick = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return kept | quick | {"XDG_CACHE_HOME": str(cache)}


def run(cache: Path, out: Path) -> Finished:
    """One run in a new process, with what JAX reports about its cache of compiled programs."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *RUN.split(), "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(cache),
        timeout=HANGS,
    )
    *errors, events = done.stderr.splitlines()
    names = Counter(event.rpartition("/")[2] for event in json.loads(events) if "cache" in event)
    return Finished(done.returncode, names, errors, RunDirectory(out))


def jax_without_cache(changed: dict[str, str] | None = None) -> types.SimpleNamespace:
    """Return what stands for JAX before its cache is on, with what is changed of its settings."""
    update = ({} if changed is None else changed).__setitem__
    config = types.SimpleNamespace(
        jax_compilation_cache_dir=None, jax_enable_compilation_cache=True, update=update
    )
    return types.SimpleNamespace(config=config)


def programs(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Finished, Finished]:
    folder = tmp_path_factory.mktemp("compiled")
    cache = folder / "cache"
    return cache, run(cache, folder / "first"), run(cache, folder / "second")


@pytest.mark.thorough
def test_compiled_programs_that_were_kept_compute_the_same(runs):
    one, other = runs[1:]
    assert one.directory.metrics() == other.directory.metrics()
    experiment = prepare(read_toml(one.directory.path / "config.toml"))
    like = experiment.simulation.init(1, experiment.hparams)
    states = [
        jax.tree.leaves(each.directory.checkpoints().last().state(like)) for each in (one, other)
    ]
    for leaf, same in zip(*states, strict=True):
        assert bool((leaf == same).all())


@pytest.mark.thorough
def test_a_second_run_compiles_nothing(runs):
    _, first, second = runs
    assert (first.code, first.errors) == (second.code, second.errors)
    [line] = first.errors  # four rounds are too few: of no file
    assert (first.code, "of no use yet" in line) == (0, True)
    assert first.events["cache_misses"] > 0
    assert second.events["cache_misses"] == 0
    assert second.events["cache_hits"] == second.events["compile_requests_use_cache"] > 0


@pytest.mark.thorough
def test_a_broken_file_is_named_and_written_anew(tmp_path):
    small = """
import jax
from fedjaxsim.cli.devices import LocalDevices
from fedjaxsim.cli.program import _as_found
with _as_found():
    LocalDevices().start(quiet=True)
    print(jax.jit(lambda x: x * 2)(21))
"""

    def compute() -> str:
        command = [sys.executable, "-c", small]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env=environment(tmp_path),
            timeout=HANGS,
        )
        assert done.stdout == "42\n"
        return done.stderr

    assert compute() == ""
    written = set(programs(tmp_path))
    assert written
    for path in written:
        path.write_bytes(path.read_bytes()[:100])
    lines = compute().splitlines()
    assert len(lines) == len(written)
    for line in lines:
        assert line.startswith("fedjaxsim: warning: Error reading persistent compilation cache")
    assert set(programs(tmp_path)) == written
    assert all(path.stat().st_size > 100 for path in written)


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(compilation_cache, "jax", jax_without_cache())
    with warnings.catch_warnings(action="default"), _as_found():
        LocalDevices().start(quiet=True)
    error = capsys.readouterr().err
    assert error.startswith("fedjaxsim: warning: compiled programs are not kept: ")
    assert error.count("\n") == 1
    with pytest.warns(UserWarning, match="compiled programs are not kept"):
        assert fjs.keep_compiled_programs() is None


def test_a_full_folder_begins_anew(tmp_path, monkeypatch):
    changed: dict[str, str] = {}
    monkeypatch.setattr(compilation_cache, "jax", jax_without_cache(changed))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fjs.keep_compiled_programs()
    folder = Path(changed["jax_compilation_cache_dir"])
    assert folder.is_relative_to(tmp_path / "fedjaxsim" / "compiled")
    for most, left in ((20, 2), (19, 0)):
        for name in "ab":
            (folder / name).write_bytes(bytes(10))
        monkeypatch.setattr(compilation_cache, "_MOST_BYTES", most)
        fjs.keep_compiled_programs()
        assert len(programs(tmp_path)) == left
    assert fjs.keep_compiled_programs() == folder
