"""What is built of the project: files, and a wheel that works where the repository is not."""

import functools
import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest
from support.problems import HANGS, environment_of_users, speakers

import fedjaxsim

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "hatchling", "build", "-d", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=HANGS)
    return folder


def test_the_citation_names_this_version():
    version = f"version: {fedjaxsim.__version__}\n"
    assert version in (ROOT / "CITATION.cff").read_text()
    assert f"## {fedjaxsim.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert importlib.metadata.version("fedjaxsim") == fedjaxsim.__version__


@pytest.mark.thorough
def test_the_source_distribution_has_what_reproduces_the_results(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "README.md",
        "CITATION.cff",
        "Makefile",
        "benchmarks/peers/compare.py",
        "docs/figures/peers.png",
        "experiments/ppsgd/figure-1a.toml",
        "notebooks/hypergradients.ipynb",
        "tests/support/problems.py",
    } <= names
    assert not [name for name in names if name.startswith((".venv", "runs"))]


@pytest.fixture(scope="module")
def program(built, tmp_path_factory):
    """Calls the program of an environment in which the wheel is installed, in a folder of its own.

    Its dependencies are those of this environment, which has the repository itself no more.
    """
    folder = tmp_path_factory.mktemp("outside")
    (wheel,) = built.glob("*.whl")
    venv.create(folder / "env", with_pip=False)
    scripts = folder / "env" / ("Scripts" if os.name == "nt" else "bin")

    def call(*command, environment=os.environ):
        return subprocess.run(
            list(map(str, command)),
            cwd=folder,
            env={name: value for name, value in environment.items() if name != "PYTHONPATH"},
            check=True,
            capture_output=True,
            text=True,
            timeout=HANGS,
        ).stdout

    pip = (sys.executable, "-m", "pip", "--python", scripts / "python")
    call(*pip, "install", "--no-deps", "--no-index", wheel)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(call(scripts / "python", "-c", where).strip())
    # Files with paths are not followed a second time, so the editable install is not seen.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    found = call(scripts / "python", "-c", "import fedjaxsim; print(fedjaxsim.__file__)")
    assert Path(found.strip()).is_relative_to(folder)
    return folder, functools.partial(call, scripts / "fedjaxsim")


@pytest.mark.thorough
def test_the_wheel_runs_the_demo_outside_the_repository(program):
    folder, fedjaxsim_ = program
    fedjaxsim_("demo", "--out", "demo", "--seeds", "1", "--quiet")
    assert (folder / "demo" / "envelopes.png").exists()
    assert json.loads((folder / "demo" / "report.json").read_text())["summary"]["finished"] == 7


@pytest.mark.thorough
def test_the_wheel_runs_a_table_and_shakespeare_by_speaker_with_a_command_each(program):
    folder, fedjaxsim_ = program
    rows = [f"{'abc'[k % 3]},{k % 7},{k % 5},{'AB'[k % 2]}" for k in range(60)]
    (folder / "grades.csv").write_text("\n".join(["school,hours,sleep,grade", *rows]) + "\n")
    (folder / "shakespeare.json").write_text(json.dumps(speakers(30)))
    plan = ["--rounds", "2", "--sampling-rate", "1", "--epsilon", "4", "--quiet"]
    table = ["--data", "csv:grades.csv", "--client", "school", "--target", "grade"]
    text = ["--data", "leaf:shakespeare.json", "--model", "gru", "--hidden", "8"]
    runs = ("table", 3, table, environment_of_users()), ("text", 2, text, os.environ)
    for name, clients, data, environment in runs:
        fedjaxsim_("run", *data, *plan, "--out", name, environment=environment)
        summary = json.loads((folder / name / "summary.json").read_text())
        assert summary["clients"] == clients
        assert 3.9 < summary["epsilon"] <= 4
