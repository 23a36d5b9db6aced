"""What the files of the package say, parsed once for all tests that read them."""

import ast
import functools
from pathlib import Path
from typing import NamedTuple

import fedjaxsim

PACKAGE = Path(fedjaxsim.__file__).parent


class Source(NamedTuple):
    """A file's imports and assertions, strings by line, docstrings by name, and attributes."""

    statements: list[ast.Import | ast.ImportFrom | ast.Assert]
    strings: list[tuple[int, str]]
    docstrings: list[tuple[str, str]]
    attributes: set[str]


@functools.cache
def source_of(path: Path) -> Source:
    """Return what a file says; a test that asks uses the fixture `sources`, for one process."""
    source = Source([], [], [], set())
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert):
            source.statements.append(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            source.strings.append((node.lineno, node.value))
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            if text := ast.get_docstring(node):
                source.docstrings.append((getattr(node, "name", "module"), text))
        elif isinstance(node, ast.Attribute):
            source.attributes.add(node.attr)
    return source
