"""What the documents point to exists: links, headings, files, names and commands."""

import pkgutil
import re
import shlex
from pathlib import Path

import pytest

from fedjaxsim.cli.program import parse

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *ROOT.glob("benchmarks/*/*.md")]
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


def anchors(document: Path) -> set[str]:
    """The headings, as GitHub makes anchors of them."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(document: Path) -> list[str]:
    """What a reader may type: the indented lines that start a program, continued ones joined."""
    text = document.read_text().replace("\\\n", " ")
    return re.findall(r"^ {4}(?:\w+=\w+ )?((?:fedjaxsim|python) [^…\n]*)$", text, re.MULTILINE)


@pytest.fixture(params=DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def document(request):
    return request.param


def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            target = document.parent / name if name else document
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_files_and_tests_that_are_named_exist(document):
    text = document.read_text()
    for name in re.findall(r"[\w./-]+\.py\b", text):
        assert "NAME" in name or any(path.match(name) for path in _SCRIPTS), name
    for name in re.findall(r"`([\w./-]+)`", text):
        if name.split("/")[0] in FOLDERS:
            assert (ROOT / name).exists(), name
        elif re.fullmatch(r"test_\w+", name):
            assert name in _TEST_NAMES, name


def test_python_names_exist(document):
    text = document.read_text()
    for module, names in re.findall(r"from (fedjaxsim[\w.]*) import ([\w, ]+)", text):
        for name in names.split(", "):
            pkgutil.resolve_name(f"{module}:{name}")
    for name in re.findall(r"`(fedjaxsim(?:\.\w+)+)", text):
        pkgutil.resolve_name(name)


def test_commands_are_understood(document, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in commands(document):
        program, *arguments = shlex.split(command, comments=True)
        if program == "python":
            assert Path(arguments[0]).exists(), command
            continue
        try:
            parse(arguments)
        except FileNotFoundError:  # What only a run before this one writes.
            assert "runs/" in command
