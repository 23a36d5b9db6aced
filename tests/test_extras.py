"""What works without optional libraries, and the one line that names the extra where one is needed.

A library is absent here where `sys.modules` holds None for it, as Python itself has it.
"""

import importlib.machinery
import json
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
from support.problems import HANGS

import fedjaxsim as fjs
from fedjaxsim.cli import main, running
from fedjaxsim.cli.program import parse
from fedjaxsim.data import from_dataframe, load
from fedjaxsim.extras import EXTRAS, MissingExtraError, importing, missing, require
from fedjaxsim.models import from_equinox

ROOT = Path(__file__).parents[1]
TABLE = "k,x,y\n0,1,0\n0,2,1\n1,3,0\n1,4,1\n"
SWEEP = "rounds = 1\nclients = 6\nepsilon = inf\n[sweep]\nlam = [0.1, 1.0]\n"


_COMMANDS = """
import contextlib, io, json, sys

for library in json.loads(sys.argv[1]):
    sys.modules[library] = None

import fedjaxsim
from fedjaxsim.cli import main

for name in fedjaxsim.__all__:
    getattr(fedjaxsim, name)
answers = []
for arguments in json.loads(sys.argv[2]):
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = main(arguments.split())
    answers.append([code, out.getvalue(), error.getvalue()])
print(json.dumps(answers))
"""


def without(libraries, commands, folder):
    """The exit code, output and errors of commands in one new process without some libraries."""
    arguments = [json.dumps(libraries), json.dumps(commands)]
    done = subprocess.run(
        [sys.executable, "-c", _COMMANDS, *arguments],
        cwd=folder, stdout=subprocess.PIPE, text=True, check=True, timeout=HANGS,
    )  # fmt: skip
    return dict(zip(commands, json.loads(done.stdout.splitlines()[-1]), strict=True))


DISTRIBUTIONS = {
    "PIL": "pillow", "jax_cuda12_plugin": "jax[cuda12]",
    "libtpu": "jax[tpu]", "dp_accounting": "dp-accounting",
}  # fmt: skip


def test_the_extras_are_those_of_the_project():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, libraries in EXTRAS.items():
        listed = " ".join(declared["optional-dependencies"][name])
        for library in libraries:
            distribution = DISTRIBUTIONS.get(library, library)
            assert f"{distribution}>=" in listed
            assert not any(each.startswith(distribution) for each in declared["dependencies"])


@pytest.mark.parametrize("name", EXTRAS)
def test_an_absent_library_is_one_line_with_its_extra(name, monkeypatch):
    library = EXTRAS[name][0]
    monkeypatch.setitem(sys.modules, library, None)
    message = rf"^{library} is not installed: pip install 'fedjaxsim\[{name}\]'$"
    with pytest.raises(MissingExtraError, match=message):
        require(name)
    with pytest.raises(MissingExtraError, match=message), importing(name):
        __import__(library)
    assert missing(name) is not None


def test_another_missing_module_is_not_taken_for_that_of_an_extra():
    with pytest.raises(ModuleNotFoundError, match="no_such") as caught, importing("plots"):
        import no_such_module  # type: ignore  # noqa: F401
    assert not isinstance(caught.value, MissingExtraError)


def frame():
    import pyarrow

    return pyarrow.table({"k": [0, 1], "x": [0.0, 1.0], "y": [0, 1]})


@pytest.mark.parametrize(
    ("library", "extra", "use"),
    [
        ("pyarrow", "tables", lambda path: load(f"csv:{path}/t.csv", client="k", target="y")),
        ("equinox", "equinox", lambda path: from_equinox(lambda key: None)),  # type: ignore
        ("pandas", "tables", lambda path: fjs.History().to_pandas()),
    ],
)
def test_a_function_that_needs_a_library_names_its_extra(
    library, extra, use, tmp_path, monkeypatch
):
    (tmp_path / "t.csv").write_text(TABLE)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=rf"'fedjaxsim\[{extra}\]'"):
        use(tmp_path)


def test_a_data_frame_names_the_extra(monkeypatch):
    table = frame()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"'fedjaxsim\[tables\]'"):
        from_dataframe(table, client="k", target="y")


REFUSED = {
    "compare done --out both.png": "plots",
    "sweep sweep.toml --out swept": "tables",
    "run --data csv:t.csv --client k --target y --rounds 2 --out table": "tables",
    "run --data hf:ylecun/mnist --target label --partition iid --rounds 2": "hf",
    "privacy --noise-multiplier 4 --rounds 9 --sampling-rate 1 --delta 1e-3 --verify": "verify",
}
"""Commands that need a library, and its extra."""
QUIET = " --clients 6 --rounds 2 --sampling-rate 1 --epsilon inf --quiet"
RUN = f"run{QUIET} --out run"
IN_WORDS = "data show --clients 6"
NO_PICTURES = (
    "fedjaxsim: warning: no pictures will be drawn: matplotlib is not installed: pip install "
    "'fedjaxsim[plots]'"
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A folder, and what commands answered in it without any library of an extra."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sweep.toml").write_text(SWEEP)
    (folder / "t.csv").write_text(TABLE)
    libraries = [library for extra in EXTRAS.values() for library in extra]
    return folder, without([*libraries, "chex"], [*REFUSED, RUN, IN_WORDS], folder)


@pytest.mark.thorough
@pytest.mark.parametrize("command", REFUSED)
def test_a_command_that_needs_a_library_is_refused_before_it_computes(command, bare):
    folder, answers = bare
    code, out, error = answers[command]
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert f"not installed: pip install 'fedjaxsim[{REFUSED[command]}]'" in error
    assert {path.name for path in folder.iterdir()} == {"sweep.toml", "t.csv", "run"}


@pytest.mark.thorough
def test_a_run_needs_no_extra_and_says_first_that_it_draws_no_pictures(bare):
    folder, answers = bare
    code, _, error = answers[RUN]
    assert (code, error.splitlines()[0]) == (0, NO_PICTURES)
    files = {path.name for path in (folder / "run").iterdir()}
    assert "curves.png" not in files
    assert {"summary.json", "guarantee.json", "metrics.jsonl", "clients.csv"} <= files
    assert json.loads((folder / "run" / "summary.json").read_text())["rounds"] == 2


@pytest.mark.thorough
def test_what_draws_nothing_does_not_miss_pictures(bare, monkeypatch, capsys):
    def stopped(*arguments, **options):
        raise KeyboardInterrupt

    code, _, error = bare[1][IN_WORDS]
    assert (code, error) == (0, "")
    monkeypatch.setattr(running, "execute", stopped)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(KeyboardInterrupt):
        parse(f"run{QUIET}".split()).prepare()()
    assert capsys.readouterr().err == ""


@pytest.mark.thorough
def test_a_sweep_goes_on_without_pictures_and_says_so_first(tmp_path, monkeypatch, capsys):
    (tmp_path / "sweep.toml").write_text(SWEEP)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["sweep", f"{tmp_path}/sweep.toml", "--out", f"{tmp_path}/swept", "--quiet"]) == 0
    assert capsys.readouterr().err.splitlines()[0] == NO_PICTURES
    assert (tmp_path / "swept" / "results.parquet").exists()
    assert list((tmp_path / "swept").glob("*.png")) == []


def test_the_compiler_of_cuda_13_serves_as_well(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_cuda12_plugin", None)
    plugin = types.ModuleType("jax_cuda13_plugin")
    plugin.__spec__ = importlib.machinery.ModuleSpec(plugin.__name__, None)
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    require("cuda")
    monkeypatch.setitem(sys.modules, plugin.__name__, None)
    with pytest.raises(MissingExtraError, match="jax_cuda12_plugin"):
        require("cuda")
