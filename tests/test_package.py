"""What is built of the project: files, and a wheel that works where the repository is not."""

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
from problems import HANGS

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
        "tests/problems.py",
    } <= names
    assert not [name for name in names if name.startswith((".venv", "runs"))]


@pytest.mark.thorough
def test_the_wheel_runs_the_demo_outside_the_repository(built, tmp_path):
    """Its dependencies are those of this environment, which has the repository itself no more."""
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=False)
    scripts = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}

    def call(*command):
        return subprocess.run(
            list(map(str, command)),
            cwd=tmp_path,
            env=variables,
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
    assert Path(found.strip()).is_relative_to(tmp_path)
    call(scripts / "fedjaxsim", "demo", "--out", "demo", "--quiet")
    assert (tmp_path / "demo" / "curves.png").exists()
    assert len(json.loads((tmp_path / "demo" / "table.json").read_text())) == 7
