"""Docstrings and pages are plain: a verb or a noun first, and no word that stood for grammar."""

import re

import pytest
from support.sources import PACKAGE, source_of

pytestmark = pytest.mark.usefixtures("sources")
OPENINGS = {"What", "Whether", "How", "Where", "Whose", "Which", "Who", "Of", "As", "That", "Those"}
PLAIN = re.compile(
    r"\b(of (which|whom)|(that|those) of|of (one's|its|your|their) own|of oneself|as of"
    r"|for which there|(is|are|as) of (a|any|the|one|all)|by name)\b",
    re.IGNORECASE,
)
"""Turns of phrase that a reader reads twice, where a noun or a second sentence says it once."""
PLAIN_ON_PAGES = re.compile(
    PLAIN.pattern + r"|\b((is|are|has|have) no \w+ (that|which)"
    r"|as (it|they) (is|are|has|have))\b|(^|[.;:] )Where (a|an|the|no|nothing|there)\b",
    re.IGNORECASE,
)
"""And what is exact in a docstring (values as they are), but not in a sentence."""
ALLOWED = re.compile(r"\b(sorted|found|data|Find a part) by name\b")
WORDS = re.compile(r"\b(so many|likewise|told|doors?|as of `)", re.IGNORECASE)


def docstrings():
    """Return places and texts of the docstrings of the package."""
    return [
        (f"{path.relative_to(PACKAGE)}: {name}", text)
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, text in source_of(path).docstrings
    ]


def sentences():
    """Return places and texts of all strings with a space."""
    return [
        (f"{path.relative_to(PACKAGE)}:{line}", text)
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in source_of(path).strings
        if " " in text
    ]


def test_docstrings_begin_with_a_verb_or_a_noun():
    wrong = [place for place, text in docstrings() if text.split()[0].strip("`,.") in OPENINGS]
    assert wrong == []


def test_docstrings_use_the_names_of_things():
    found = [(place, WORDS.findall(text)) for place, text in docstrings() if WORDS.search(text)]
    assert found == []


def test_docstrings_and_messages_have_a_noun_where_grammar_would_stand_for_it():
    found = [
        f"{place}: {phrase[0]}"
        for place, text in sentences()
        for phrase in PLAIN.finditer(ALLOWED.sub("", " ".join(text.split())))
    ]
    assert found == []


def test_pages_have_a_noun_where_grammar_would_stand_for_it():
    root = PACKAGE.parent
    pages = [root / name for name in ("README.md", "index.md", "CONTRIBUTING.md", "SECURITY.md")]
    for folder in ("docs", "experiments", "benchmarks"):
        pages += sorted((root / folder).rglob("*.md"))
    found = [
        f"{page.relative_to(root)}:{number}: {phrase[0]}"
        for page in pages
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        for phrase in PLAIN_ON_PAGES.finditer(ALLOWED.sub("", line))
    ]
    assert found == []


def test_private_functions_list_no_errors():
    private = [(place, text) for place, text in docstrings() if place.split(": ")[1][0] == "_"]
    assert [place for place, text in private if "Raises:" in text and "__" not in place] == []
