"""What the documents point to exists (links, headings, files, names), and what they show runs."""

import dataclasses
import functools
import glob
import importlib.util
import inspect
import json
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.problems import environment_of_users
from support.sources import source_of

import fedjaxsim as fjs
from fedjaxsim.cli import main
from fedjaxsim.cli.program import parse

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "index.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *ROOT.glob("benchmarks/**/*.md"),
    *ROOT.glob("experiments/**/*.md"),
]
FOLDERS = ["fedjaxsim", "tests", "benchmarks", "experiments", "notebooks", "docs"]
_SCRIPTS = {
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if "site-packages" not in path.parts
}
_TEST_NAMES = {
    name
    for path in _SCRIPTS
    if path.name.startswith("test_")
    for name in re.findall(r"def (test_\w+)", path.read_text())
}

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RAW = PROJECT["urls"]["Repository"].replace("github.com", "raw.githubusercontent.com") + "/main"
"""Where pictures of the README are found by a package index."""

START = ROOT / "docs/start.md"
BUILD_ON_THE_README = {
    ROOT / f"docs/{name}.md"
    for name in ("reference/algorithms", "audit", "privacy", "sweeps", "your-algorithm")
}
"""Pages whose Python continues that of the README."""
OF_FILES = {ROOT / "docs/data.md", START}
"""Pages whose Python reads files; see test_your_data.py, and below."""
WITH_PYTHON = [
    document
    for document in DOCUMENTS[1:]
    if "```python" in document.read_text() and document not in OF_FILES
]


def anchors(document: Path) -> set[str]:
    """The headings, as GitHub makes anchors of them."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def prose(document: Path) -> str:
    """The text of a page, or of the cells of a notebook that are no code."""
    text = document.read_text()
    if document.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def commands(document: Path) -> list[str]:
    """What a reader may type: the indented lines that start a program, continued ones joined."""
    text = prose(document).replace("\\\n", " ")
    return re.findall(r"^ {4}(?:\w+=\w+ )?((?:fedjaxsim|python) [^…\n]*)$", text, re.MULTILINE)


def of_each_document(check):
    """Make one test of a check of a document; a failure names all that fail."""

    @functools.wraps(check)
    def test(**fixtures):
        failures = []
        for document in DOCUMENTS:
            try:
                check(document, **fixtures)
            except Exception as error:
                failures.append(f"{document.relative_to(ROOT)}: {type(error).__name__} {error}")
        assert not failures, "\n".join(failures)

    signature = inspect.signature(check)
    fixtures = [*signature.parameters.values()][1:]
    test.__dict__["__signature__"] = signature.replace(parameters=fixtures)
    return test


@of_each_document
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if link.startswith(f"{RAW}/"):
            assert (ROOT / link.removeprefix(f"{RAW}/")).exists(), link
        elif "://" not in link:
            name, _, anchor = link.partition("#")
            target = document.parent / name if name else document
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@of_each_document
def test_files_and_tests_that_are_named_exist(document):
    text = re.sub(r"https?://\S+", "", document.read_text())  # files of others
    for name in re.findall(r"[\w./-]+\.py\b", text):
        readers = name == "mycode.py" or "NAME" in name
        assert readers or any(path.match(name) for path in _SCRIPTS), name
    for name in re.findall(r"`([\w./-]+)`", text):
        if name.split("/")[0] in FOLDERS:
            assert (ROOT / name).exists(), name
        elif re.fullmatch(r"test_\w+", name):
            assert name in _TEST_NAMES, name


def test_files_in_the_picture_of_a_message_exist():
    text = (ROOT / "docs/figures/message.svg").read_text(encoding="utf-8")
    names = re.findall(r"\w+(?:/\w+)*(?:/|\.py)(?= |<)", text.replace("NAME.py", ""))
    assert len(names) > 10
    for name in names:
        assert (ROOT / "fedjaxsim" / name).exists(), name


def test_pages_that_code_and_notebooks_name_exist():
    for path in {*_SCRIPTS, *ROOT.glob("notebooks/*.ipynb")}:
        for name in re.findall(r"docs/[\w/-]+\.md", path.read_text()):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"


@of_each_document
def test_python_names_exist(document):
    text = document.read_text()
    for module, names in re.findall(r"from (fedjaxsim[\w.]*) import ([\w, ]+)", text):
        for name in names.split(", "):
            pkgutil.resolve_name(f"{module}:{name}")
    for name in re.findall(r"`(fedjaxsim(?:\.\w+)+)", text):
        pkgutil.resolve_name(name)


def test_members_of_the_api_page_exist():
    page = (ROOT / "docs/reference/api.md").read_text()
    sections = re.findall(r"auto(?:module|class):: (fedjaxsim[\w.]*)\n((?:   :.*\n)*)", page)
    assert sections
    for name, options in sections:
        module, _, last = name.rpartition(".")
        where = pkgutil.resolve_name(f"{module}:{last}" if last[:1].isupper() else name)
        listed = re.findall(r":(?:exclude-)?members: (.+)", options)
        for member in (text.strip() for line in listed for text in line.split(",")):
            assert hasattr(where, member), f"{name}.{member}"


def test_a_package_index_shows_the_pictures_of_the_readme():
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", DOCUMENTS[0].read_text())
    assert pictures
    assert all(link.startswith(f"{RAW}/") for link in pictures)


def test_every_page_is_on_the_site():
    trees = re.findall(r"```\{toctree\}\n(.*?)```", (ROOT / "index.md").read_text(), re.S)
    listed = {line for tree in trees for line in tree.split() if line[0] != ":"}
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/*.ipynb")]
    assert {str(path.relative_to(ROOT).with_suffix("")) for path in pages} <= listed


def write_own_code(folder: Path, monkeypatch) -> None:
    """Write code of pages to the module `mycode`, which commands name: an algorithm, a reader."""
    readme, data = (ROOT / page for page in ("README.md", "docs/data.md"))
    (own,) = re.findall(r"```python\n(.*?def ditto.*?)```", readme.read_text(), re.S)
    (reader,) = re.findall(r"```python\n(def grades.*?)```", data.read_text(), re.S)
    code = "import jax\n" + own.rpartition("import jax\n")[2]
    (folder / "mycode.py").write_text(f"{code}\nimport pandas as pd\n\n{reader}")
    monkeypatch.syspath_prepend(folder)


@of_each_document
def test_commands_are_understood(document, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    write_own_code(tmp_path, monkeypatch)
    for command in commands(document):
        program, *arguments = shlex.split(command, comments=True)
        if program == "python":
            assert Path(arguments[0]).exists(), command
            continue
        # As a shell expands patterns of files.
        arguments = [word for each in arguments for word in sorted(glob.glob(each)) or [each]]
        try:
            parse(arguments)
        except FileNotFoundError:  # What only a run before this one writes.
            assert "runs/" in command


def test_commands_of_tutorials_are_understood():
    for tutorial in sorted(ROOT.glob("notebooks/*.ipynb")):
        shown = [command for command in commands(tutorial) if command.startswith("fedjaxsim")]
        assert shown, tutorial.name
        for command in shown:
            # A module of the reader's, and a run that only the command before it makes.
            if not re.search(r"\b(mine|mycode):| --from ", command):
                parse(shlex.split(command)[1:])


@of_each_document
def test_commands_inside_sentences_are_understood(document):
    """Parse those in running text, which may leave out values, or name the reader's own files."""
    for command in re.findall(r"`(fedjaxsim [a-z][^`…]*)`", document.read_text()):
        words = shlex.split(command)[1:]
        if "--help" in words or any(re.search(r"\bmycode\b|^[A-Z]+$", word) for word in words):
            continue
        try:
            parse(words)
        except FileNotFoundError:
            continue
        except ValueError as error:
            if " needs " not in str(error):
                raise


@pytest.mark.usefixtures("sources")
def test_messages_among_the_questions_are_those_of_the_package():
    files = (ROOT / "fedjaxsim").rglob("*.py")
    pieces = {text for path in files for _, text in source_of(path).strings}
    page = (ROOT / "docs/reference/faq.md").read_text(encoding="utf-8").split("| message |")[1]
    messages = re.findall(r"^\| (`{1,2})(.+?)\1 \|", page, re.MULTILINE)
    assert len(messages) > 4
    for _, message in messages:
        longest = max(message.split("…"), key=len).strip()
        said = any(len(piece) > 11 and (piece in longest or longest in piece) for piece in pieces)
        assert said, message


@pytest.fixture(scope="module")
def page_numbers():
    """The script that makes numbers of pages again."""
    file = ROOT / "docs/page_numbers.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_numbers_that_can_be_made_again_stand_once_on_their_page(page_numbers):
    for row in page_numbers.ROWS:
        text = (ROOT / row.page).read_text(encoding="utf-8")
        assert len(page_numbers.pattern(row.text).findall(text)) == 1, row.text


def test_a_number_differs_by_more_than_half_of_its_last_digit(page_numbers):
    page = "of 1,406 clients\n  0.75   is enough"

    def different(made, within=0.0):
        row = page_numbers.Row("", "of {} clients {} is", lambda: made, within)
        return [(each.written, each.today) for each in page_numbers.differences(row, page)]

    assert different((1406.4, 0.7549)) == []
    assert different((1407.0, 0.756)) == [("1,406", "1,407"), ("0.75", "0.76")]
    assert different((1406.0, 0.756), within=0.002) == []
    assert different("of 1406 clients 0.7 is") == [("0.75", "0.70")]
    assert different((1406.0, float("nan"))) == [("0.75", "nan")]
    with pytest.raises(ValueError, match="has 0 times"):
        page_numbers.differences(page_numbers.Row("", "{} rounds", lambda: (1.0,)), page)


@pytest.mark.thorough
def test_the_short_numbers_of_pages_are_those_of_today():
    # Compiled as tests are, whose sums round as on another processor, which the script allows for.
    script = [sys.executable, ROOT / "docs/page_numbers.py"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def python(document: Path) -> str:
    """All Python of a document, on the lines where it stands."""
    lines, inside = [], False
    for line in document.read_text().splitlines():
        lines.append(line if inside and line != "```" else "")
        if line.startswith("```"):
            inside = line == "```python"
    return "\n".join(lines)


def run_python(document: Path, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(python(document), document, "exec"), names)
    return names


@pytest.fixture(scope="module")
def readme():
    """What the Python of the README leaves."""
    return run_python(DOCUMENTS[0], {})


@pytest.mark.thorough
def test_the_python_of_the_readme_spends_its_epsilon_and_its_ditto_is_ditto(readme):
    sim, ours = readme["sim"], []
    assert 1.59 < sim.guarantee(readme["state"], delta=1e-3).find("zero_out").epsilon <= 1.6
    given = {name: readme["hparams"].get(name) for name in readme["hparams"]}
    for make in (readme["ditto"], fjs.ditto):
        other = dataclasses.replace(sim, algorithm=make(sim.task))
        hparams = other.hyperparameters(**{n: v for n, v in given.items() if n in other.records})
        ours.append(other.run(other.init(0, hparams), hparams, rounds=3)[0].personal)
    for mine, theirs in zip(*map(jax.tree.leaves, ours), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def run_commands(document: Path) -> list[list[str]]:
    """The arguments of commands that run: not those on data of others, or of minutes."""
    found = []
    for program, *arguments in (shlex.split(each, comments=True) for each in commands(document)):
        kind = arguments[0]
        if program == "python" or kind in ("sweep", "tune") or "PATH" in " ".join(arguments):
            continue
        if kind == "run" and "--rounds" in arguments:
            arguments[arguments.index("--rounds") + 1] = "2"
        found.append(arguments)
    return found


@pytest.mark.thorough
def test_the_ditto_of_the_readme_is_a_flag_where_programs_are_optimized(tmp_path, monkeypatch):
    # Other tests leave optimizations out, which round a release in the checks before the run.
    write_own_code(tmp_path, monkeypatch)
    (command,) = (words for words in run_commands(DOCUMENTS[0]) if "mycode:ditto" in words)
    subprocess.run(
        [sys.executable, "-m", "fedjaxsim", *command, "--quiet"],
        cwd=tmp_path, env=environment_of_users() | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}, check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page, readme, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "import optuna" in page.read_text():
        pytest.importorskip("optuna")
    run_python(page, dict(readme) if page in BUILD_ON_THE_README else {})


@pytest.mark.thorough
def test_the_python_of_start_repeats_its_first_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (first,) = (each for each in commands(START) if re.match("fedjaxsim run .*runs/first", each))
    assert main([*shlex.split(first)[1:], "--quiet"]) == 0
    history = run_python(START, {})["history"]
    recorded = json.loads((tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()[-1])
    found = history[-1].evaluation.summary()
    assert {name: recorded[name] for name in found} == found


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["README.md", "docs/start.md", "docs/command-line.md"])
def test_the_commands_run(name, tmp_path, monkeypatch):
    """With few rounds."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    people = []
    for k in range(240):
        age, school = rng.uniform(18, 65), rng.integers(8, 16)
        people.append(f"p{k % 12},{age},{school},{20 + k % 12 + 0.3 * age + rng.normal()}")
    (tmp_path / "pay.csv").write_text("\n".join(["who,age,school,pay", *people]))
    for arguments in run_commands(ROOT / name):
        if "mycode:ditto" not in arguments:  # which runs above
            assert main(arguments) == 0, arguments
