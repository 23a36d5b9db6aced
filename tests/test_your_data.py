"""What docs/data.md says works, on small files of the names that it uses."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from support.problems import speakers

from fedjaxsim.cli import main

DOCUMENT = (Path(__file__).parents[1] / "docs" / "data.md").read_text()


def grades(rng):
    """A CSV of three schools with 40, 80 and 120 pupils, which grade unlike one another."""
    rows = ["school,hours,absences,grade"]
    for school, pupils, leniency in (("north", 40, -4), ("south", 80, 8), ("west", 120, 20)):
        for _ in range(pupils):
            hours, absences = rng.integers(1, 20), rng.integers(0, 10)
            grade = "DCBA"[int(np.clip((hours - absences + leniency) // 8, 0, 3))]
            rows.append(f"{school},{hours},{absences},{grade}")
    return "\n".join(rows)


def cells(*matrices):
    array = np.empty((1, len(matrices)), object)
    array[0] = list(matrices)
    return array


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("yours")
    rng = np.random.default_rng(0)
    (folder / "grades.csv").write_text(grades(rng))
    for name in ("ann/cat", "ann/dog", "bob/cat", "bob/dog"):
        (folder / "photos" / name).mkdir(parents=True)
        for k in range(3):
            pixels = rng.integers(0, 255, (4, 4, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{k}.png")
    (folder / "shakespeare.json").write_text(json.dumps(speakers(30)))
    features, scores = (cells(*(rng.normal(size=(8, d)) for _ in range(3))) for d in (5, 1))
    savemat(folder / "school.mat", {"feature": features, "score": scores})
    return folder


def blocks():
    """The Python of the document, block by block."""
    return re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


def commands():
    text = DOCUMENT.replace("\\\n", " ")
    return re.findall(r"^ {4}fedjaxsim (.*)$", text, re.MULTILINE)


@pytest.fixture(scope="module")
def names(folder):
    """What the Python of the document leaves, after all of it has run."""
    names = {}
    absent = importlib.util.find_spec("datasets") is None  # an extra
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in blocks():
            if not (absent and "import datasets" in block):
                exec(block, names)
    return names


def test_the_python_runs(names, folder):
    assert names["shakespeare"].num_clients == 2
    assert names["school"].fields["x"].shape == (24, 5)
    assert names["population"].num_clients == 50
    assert (folder / "mine.npz").exists()


def test_the_commands_run_and_print_what_they_say(names, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    shown = [shlex.split(command) for command in commands() if command.startswith("data")]
    assert len(shown) == 8
    for k, command in enumerate(shown):
        assert main(command) == 0
        printed = capsys.readouterr().out
        if k == 0:
            assert "".join(f"    {line}\n" for line in printed.splitlines()) in DOCUMENT


@pytest.mark.thorough
def test_a_table_runs_as_the_document_says(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (command,) = (command for command in commands() if command.startswith("run --data csv"))
    assert main([*shlex.split(command), "--quiet"]) == 0
    assert "accuracy" in capsys.readouterr().out
