"""The notebooks run from start to end, and show what they say they show."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from support.problems import COMPILED_FOR_TESTS, HANGS

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
COMPILED_AS_FOR_USERS = "first_steps", "hypergradients"
"""The others are compiled as all tests, in less than half of the time. In the thousands of runs of
`hypergradients` optimized programs take less time than they cost."""
COLLECT_SELDOM = "import gc\n\ngc.set_threshold(200_000, 20, 50)"
"""As in all tests: Python's collector takes an eighth of a notebook's time."""


@pytest.mark.thorough
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws_its_pictures(path, monkeypatch):
    if path.stem in COMPILED_AS_FOR_USERS:
        for name in COMPILED_FOR_TESTS:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("MPLBACKEND", raising=False)  # drawn in the notebook, as for users
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(COLLECT_SELDOM))
    resources = {"metadata": {"path": path.parent}}
    NotebookClient(notebook, timeout=HANGS, startup_timeout=HANGS, resources=resources).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code" and "plt.subplots" in cell.source:
            kinds = [kind for output in cell.outputs for kind in output.get("data", {})]
            assert "image/png" in kinds


def test_tutorials_have_a_number_say_what_one_learns_and_end_with_an_exercise():
    numbers = set()
    for path in NOTEBOOKS.glob("*.ipynb"):
        first, *_, last = nbformat.read(path, as_version=4).cells
        numbers |= set(re.findall(r"\A# Tutorial (\d+): ", first.source))
        assert "You learn\n\n* " in first.source
        assert "pip install" in first.source
        assert last.source.startswith("## Exercise\n")
        assert "<summary>Answer</summary>" in last.source
    assert numbers == {str(number) for number in range(1, 12)}


def test_there_are_notebooks():
    names = {
        "first_steps",
        "from_other_libraries",
        "from_pytorch",
        "hypergradients",
        "lora",
        "own_algorithm",
        "privacy",
        "private_examples",
        "text_gru",
        "thousand_runs",
        "tracking",
    }
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == names
