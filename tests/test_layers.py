"""Imports run downhill: every folder knows those below it and none above."""

import ast
from pathlib import Path

import fedjaxsim

PACKAGE = Path(fedjaxsim.__file__).parent
LAYERS = (
    ("__init__",),
    ("cli",),
    ("commands",),
    ("tune", "bench"),
    ("runs",),
    ("callbacks",),
    ("report",),
    ("testing", "audit", "gradients", "sweep"),
    ("simulation",),
    ("engine",),
    ("algorithms",),
    ("privacy",),
    ("algorithm",),
    ("tasks",),
    ("models",),
    ("data",),
    ("hyperparameters", "metrics"),
    ("kernels", "factories", "extras", "notebook"),
)
"""From the top down. What shares a layer does not import each other."""


def imports_of(path: Path) -> set[str]:
    """The folders, or modules of the top, that a file imports; for type checkers, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedjaxsim":
            assert node.module is not None
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
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


def test_no_two_files_import_each_other():
    modules = {
        ".".join(("fedjaxsim", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in PACKAGE.rglob("*.py")
    }

    def needs(path):
        """The modules of the package that must be there before this one's own lines run."""
        found = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                found |= {name for name in names if name in modules}
        return found

    graph = {name: needs(path) for name, path in modules.items()}
    done: set[str] = set()
    while ready := {name for name, before in graph.items() if name not in done and before <= done}:
        done |= ready
    assert set(graph) - done == set()
