"""A second run of the same shapes compiles nothing, in processes that start anew."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from problems import HANGS

from fedjaxsim.cli import compiled
from fedjaxsim.rundir import RunDirectory

RUN = """run --quiet --data synthetic --loss squared --clients 6 --rounds 4 --eval-every 2
--local-steps 1 --noise-multiplier 1 --sampling-rate 0.5"""
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


def run(cache: Path, out: Path) -> Finished:
    """One run in a new process, with what JAX reports about its cache of compiled programs."""
    unset = {name: text for name, text in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *RUN.split(), "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=unset | {"JAX_PLATFORMS": "cpu", compiled.VARIABLE: str(cache)},
        timeout=HANGS,
    )
    *errors, events = done.stderr.splitlines()
    names = Counter(event.rpartition("/")[2] for event in json.loads(events) if "cache" in event)
    return Finished(done.returncode, names, errors, RunDirectory(out))


def programs(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Finished, Finished]:
    folder = tmp_path_factory.mktemp("compiled")
    cache = folder / "cache"
    return cache, run(cache, folder / "first"), run(cache, folder / "second")


def assert_same_results(one: Finished, other: Finished) -> None:
    assert one.directory.metrics() == other.directory.metrics()
    states = [np.load(each.directory.path / "state.npz") for each in (one, other)]
    assert states[0].files == states[1].files
    for name in states[0].files:
        np.testing.assert_array_equal(states[0][name], states[1][name], strict=True)


def test_a_second_run_compiles_nothing(runs):
    _, first, second = runs
    assert (first.code, first.errors) == (second.code, second.errors) == (0, [])
    assert first.events["cache_misses"] > 0
    assert second.events["cache_misses"] == 0
    assert second.events["cache_hits"] == second.events["compile_requests_use_cache"] > 0


def test_compiled_programs_that_were_kept_compute_the_same(runs):
    assert_same_results(*runs[1:])


def test_broken_files_are_named_replaced_and_harmless(runs, tmp_path):
    cache, first, _ = runs
    before = {path.name for path in programs(cache)}
    for path in programs(cache):
        path.write_bytes(path.read_bytes()[:100])
    repaired = run(cache, tmp_path / "run")
    assert repaired.code == 0
    assert_same_results(first, repaired)
    assert repaired.events["cache_misses"] == first.events["cache_misses"]
    assert repaired.errors
    for line in repaired.errors:
        assert line.startswith("fedjaxsim: warning: the compiled jit_")
    assert {path.name for path in programs(cache)} == before
    assert all(path.stat().st_size > 100 for path in programs(cache))


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv(compiled.VARIABLE, str(tmp_path / "file" / "cache"))
    compiled.keep_compiled_programs()
    error = capsys.readouterr().err
    assert error.startswith("fedjaxsim: warning: compiled programs are not kept: ")
    assert error.count("\n") == 1


def test_where_compiled_programs_are_kept(tmp_path, monkeypatch):
    def folder(chosen: str | None, cache: str | None) -> Path | None:
        for name, value in ((compiled.VARIABLE, chosen), ("XDG_CACHE_HOME", cache)):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        found = compiled.cache_folder()
        return None if found is None else found.parent

    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder(None, None) == tmp_path / ".cache" / "fedjaxsim" / "compiled"
    assert folder(None, "relative") == tmp_path / ".cache" / "fedjaxsim" / "compiled"
    assert folder(None, "/var/cache/me") == Path("/var/cache/me/fedjaxsim/compiled")
    assert folder("/elsewhere", "/var/cache/me") == Path("/elsewhere")
    assert folder("~/own", None) == tmp_path / "own"
    assert folder("off", "/var/cache/me") is None


def test_what_was_not_used_for_longest_is_removed_first(tmp_path):
    for age, name in enumerate(("newest", "middle", "oldest")):
        path = tmp_path / "kind" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(10))
        os.utime(path, (10_000 - age, 10_000 - age))
    compiled.prune(tmp_path, 30)
    assert len(programs(tmp_path)) == 3
    compiled.prune(tmp_path, 29)
    assert {path.name for path in programs(tmp_path)} == {"newest", "middle"}
    compiled.prune(tmp_path, 9)
    assert programs(tmp_path) == []
