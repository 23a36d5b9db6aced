"""Print the tests that a change since the last commit touches, for `make quick`.

A file of tests is touched if it has changed, if it imports a changed module itself, or if it has
that module's name. A module that no file of tests knows touches those of its folder.
"""

import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_ALL = ("tests/conftest.py", "tests/support/session.py", "pyproject.toml", "Makefile")
"""Files that touch all tests."""


def changed() -> list[Path]:
    """Return the files that differ from the last commit, new ones too."""
    command = ["git", "status", "--porcelain", "--no-renames", "--untracked-files=all"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(line[3:].strip('"')) for line in lines.splitlines()]


_IMPORT = re.compile(r"^[ \t]*(?:from (\S+) )?import (\([^)]*\)|[^\n#]*)", re.MULTILINE)
"""An import: of what module, if it says so, and its names. To parse all tests takes a second."""


@cache
def imports() -> dict[Path, set[str]]:
    """Return the names that each file of tests imports, of modules and in them."""
    return {path.relative_to(ROOT): _imports(path) for path in (ROOT / "tests").rglob("test_*.py")}


def _imports(path: Path) -> set[str]:
    names = set()
    for module, listed in _IMPORT.findall(path.read_text()):
        parts = re.sub(r"#[^\n]*", "", listed).strip("()").split(",")
        imported = {part.split()[0] for part in parts if part.strip()}
        names |= {module, *(f"{module}.{name}" for name in imported)} if module else imported
    return names


def touched(changes: Iterable[Path]) -> set[Path]:
    """Return the files and folders of tests that changed files touch, relative to the root."""
    found = set()
    for path in changes:
        inside = path.is_relative_to("tests")
        if str(path) in OF_ALL:
            return {Path("tests")}
        if inside and path.name.startswith("test_"):
            found.add(path)
        elif inside and path.name == "conftest.py":
            found.add(path.parent)
        elif path.suffix == ".py" and path.parts[0] in ("fedjaxsim", "tests"):
            found |= _of_module(path)
        elif path.suffix == ".md":
            found.add(Path("tests/test_docs.py"))
    return {path for path in found if (ROOT / path).exists()}


def _of_module(path: Path) -> set[Path]:
    parts = path.with_suffix("").parts
    module = ".".join(parts if parts[0] == "fedjaxsim" else parts[1:]).removesuffix(".__init__")
    folder = Path("tests", *parts[1:-1])
    known = {test for test, names in imports().items() if module in names}
    known |= {test for test in imports() if test.parent == folder and _named(test, parts[-1])}
    return known or {folder if (ROOT / folder).is_dir() else Path("tests")}


def _named(test: Path, module: str) -> bool:
    return test.stem == f"test_{module}" or test.stem.startswith(f"test_{module}_")


if __name__ == "__main__":
    print(*sorted(map(str, touched(changed()))))
