"""The notebooks run from start to end, and show what they say they show."""

import ast
import re
import sys
from pathlib import Path
from types import ModuleType

import jax
import matplotlib as mpl
import nbformat
import pytest
from matplotlib import pyplot as plt
from nbclient import NotebookClient
from support.problems import COMPILED_FOR_TESTS, HANGS

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
IN_A_KERNEL = NOTEBOOKS / "first_steps.ipynb"
"""The notebook that runs as for users; a kernel for each would import and compile all anew."""
OPTIMIZED = NOTEBOOKS / "hypergradients.ipynb"
"""In its thousands of runs optimized programs take less time than they cost."""
pytestmark = [pytest.mark.exact_keys, pytest.mark.usefixtures("exact_noise")]


def code_of(path):
    cells = nbformat.read(path, as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == "code"]


@pytest.mark.thorough
def test_a_notebook_runs_in_a_kernel_and_draws_its_pictures(monkeypatch):
    for name in (*COMPILED_FOR_TESTS, "MPLBACKEND"):
        monkeypatch.delenv(name, raising=False)
    notebook = nbformat.read(IN_A_KERNEL, as_version=4)
    resources = {"metadata": {"path": NOTEBOOKS}}
    NotebookClient(notebook, timeout=HANGS, startup_timeout=HANGS, resources=resources).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code" and "plt.subplots" in cell.source:
            kinds = [kind for output in cell.outputs for kind in output.get("data", {})]
            assert "image/png" in kinds


def run_cell(source, module):
    """Run a cell as a kernel does: show the value it ends with, and draw its open figures."""
    lines = [line for line in source.splitlines() if not line.startswith("%matplotlib")]
    tree, last = ast.parse("\n".join(lines)), ast.Constant(None)
    if isinstance(end := tree.body[-1], ast.Expr):
        del tree.body[-1]
        last = end.value
    exec(compile(tree, module.__name__, "exec"), vars(module))
    shown = ast.fix_missing_locations(ast.Expression(last))
    value = eval(compile(shown, module.__name__, "eval"), vars(module))
    getattr(value, "_repr_html_", value.__repr__)()
    for number in plt.get_fignums():
        plt.figure(number).canvas.draw()


@pytest.fixture
def compiled_as_suits(path):
    jax.config.update("jax_disable_most_optimizations", path != OPTIMIZED)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.thorough
@pytest.mark.usefixtures("compiled_as_suits")
@pytest.mark.parametrize(
    "path",
    [path for path in sorted(NOTEBOOKS.glob("*.ipynb")) if path != IN_A_KERNEL],
    ids=lambda path: path.stem,
)
def test_the_cells_of_a_notebook_run_and_draw_their_pictures(path, monkeypatch):
    module = ModuleType(path.stem)
    monkeypatch.setitem(sys.modules, path.stem, module)
    monkeypatch.setattr(plt, "show", lambda: None)
    monkeypatch.chdir(NOTEBOOKS)
    with mpl.rc_context():
        for source in code_of(path):
            run_cell(source, module)
            assert bool(plt.get_fignums()) == ("plt.subplots" in source)
            plt.close("all")


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
