"""Imports run downhill: every folder knows those below it and none above."""

import ast
import re
from pathlib import Path

import pytest
from support.sources import PACKAGE, source_of

pytestmark = pytest.mark.usefixtures("sources")
LAYERS = (
    ("__init__", "__main__"),
    ("cli",),
    ("commands",),
    ("tuning", "bench"),
    ("runs",),
    ("callbacks",),
    ("report",),
    ("testing", "audit", "gradients", "simulation_batch"),
    ("simulation",),
    ("engine",),
    ("algorithms",),
    ("privacy",),
    ("algorithm",),
    ("tasks",),
    ("models",),
    ("data",),
    ("hyperparameters", "metrics", "keys"),
    ("kernels", "factories", "extras", "signals", "store", "divergence", "clock"),
    ("checks", "own_code"),
)
"""From the top down. Modules of one layer do not import each other."""


def nodes_of(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports in a file."""
    return [node for node in source_of(path).statements if not isinstance(node, ast.Assert)]


def imports_of(path: Path) -> set[str]:
    """Return the folders, or top modules, that a file imports, late and type-only ones too."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedjaxsim":
            assert node.module is not None
            parts = node.module.split(".")
            names = {alias.name for alias in node.names} - {"__version__"}
            found |= {parts[1]} if len(parts) > 1 else names
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {name[1] for name in names if name[0] == "fedjaxsim" and len(name) > 1}
    return found


def test_imports_run_downhill():
    level = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}
    files = sorted(PACKAGE.rglob("*.py"))
    homes = {path: path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in files}
    assert set(homes.values()) == set(level)
    uphill = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in files
        for name in sorted(imports_of(path) - {homes[path]})
        if level[name] <= level[homes[path]]
    ]
    assert uphill == []


def test_only_runs_and_commands_read_tables():
    """No round, and nothing that a round reads, imports a reader of files."""
    tables = "fedjaxsim.data.tables."
    readers = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        for alias in node.names
        if PACKAGE / "data" / "tables" not in path.parents
        if f"{getattr(node, 'module', None) or ''}.{alias.name}.".lstrip(".").startswith(tables)
    }
    assert readers == {"runs", "cli"}


def test_the_engine_reads_no_columns():
    """Units and names of a table are the task's (`tasks/in_source.py`); rounds read numbers."""
    reading = {
        f"{path.relative_to(PACKAGE)} reads {name}"
        for path in [PACKAGE / "simulation.py", *(PACKAGE / "engine").glob("*.py")]
        for name in source_of(path).attributes & {"columns", "categories"}
    }
    assert reading == set()


def test_no_files_import_each_other():
    """Late imports count, and those for type checkers."""
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules[".".join(part for part in parts if part != "__init__")] = path

    def needs(path: Path) -> set[str]:
        found = set()
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {name if name in modules else node.module for name in names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        return found & modules.keys()

    graph = {name: needs(path) for name, path in modules.items()}

    def reached(name: str) -> set[str]:
        found, left = set(), [name]
        while left:
            new = graph[left.pop()] - found
            found |= new
            left += new
        return found

    after = {name: reached(name) for name in modules}
    circles = {
        frozenset(other.removeprefix("fedjaxsim.") for other in others if name in after[other])
        for name, others in after.items()
        if name in others
    }
    assert circles == set()


def test_no_check_goes_with_python_o():
    """`python -O` removes assertions: ours tell checkers of types what is so by construction."""
    checks = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in source_of(path).statements
        if isinstance(node, ast.Assert)
        and not re.fullmatch(r"[\w.]+ is not None|isinstance\(.*\)", ast.unparse(node.test))
    ]
    assert not checks
