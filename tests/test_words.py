"""Docstrings are plain: a verb or a noun first, and none of the words that stood for grammar."""

import ast
import re
from pathlib import Path

import fedjaxsim

PACKAGE = Path(fedjaxsim.__file__).parent
OPENINGS = {"What", "Whether", "How", "Where", "Whose", "Which", "Who", "Of", "As", "That", "Those"}
WORDS = re.compile(r"\b(so many|likewise|told|doors?|as of `)", re.IGNORECASE)


def docstrings():
    """Yield the place and the text of every docstring of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text:
                    name = getattr(node, "name", "module")
                    yield f"{path.relative_to(PACKAGE)}: {name}", text


def test_docstrings_begin_with_a_verb_or_a_noun():
    wrong = [place for place, text in docstrings() if text.split()[0].strip("`,.") in OPENINGS]
    assert wrong == []


def test_docstrings_use_the_names_of_things():
    found = [(place, WORDS.findall(text)) for place, text in docstrings() if WORDS.search(text)]
    assert found == []


def test_private_functions_list_no_errors():
    private = [(place, text) for place, text in docstrings() if place.split(": ")[1][0] == "_"]
    assert [place for place, text in private if "Raises:" in text and "__" not in place] == []
