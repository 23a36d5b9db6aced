"""Files for the services of a repository follow their schemas; one file has the version."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.touched import touched

import fedjaxsim as fjs

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("dependabot", ".github/dependabot.yml"),
        ("readthedocs", ".readthedocs.yaml"),
        ("citation-file-format", "CITATION.cff"),
    ],
)
def test_a_file_follows_the_schema_of_its_service(schema, files):
    found = [str(path) for path in ROOT.glob(files)]
    assert found
    options = ["--builtin-schema", f"vendor.{schema}"]
    command = [sys.executable, "-m", "check_jsonschema", *options, *found]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_the_version_is_one():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {fjs.__version__}\n" in citation
    assert PROJECT["dynamic"] == ["version"]


def test_the_extras_are_those_of_the_page():
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    table = page.partition("| extra | use |")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines() for name in re.findall(r"`([\w-]+)`", row[:20])]
    assert sorted(listed) == sorted(PROJECT["optional-dependencies"])


def test_the_oldest_versions_are_those_that_are_declared():
    constraints = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8").splitlines()
    oldest = dict(re.findall(r"^([\w-]+)==([\d.]+)$", "\n".join(constraints), re.M))
    extras = PROJECT["optional-dependencies"]
    parts = [PROJECT["dependencies"], *(extras[name] for name in ("plots", "tables", "images"))]
    declared = re.findall(
        r"^([\w-]+)>=([\d.]+)", "\n".join(name for part in parts for name in part), re.M
    )
    assert declared
    for name, least in declared:
        assert f"{oldest[name]}.".startswith(f"{least}."), name


def test_tests_of_a_group_run_in_one_process(request):
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("tests are in one process, or not in groups")
    assert request.node.nodeid.endswith("@tests/test_project_files.py")


def test_a_quick_call_runs_the_tests_that_a_change_touches():
    def of(*names):
        return {str(path) for path in touched(map(Path, names))}

    assert of() == of("docs/conf.py") == set()
    ditto = of("fedjaxsim/algorithms/ditto.py")
    assert "tests/algorithms/test_ditto.py" in ditto  # by its name and by its imports
    assert "tests/data/test_table.py" not in ditto
    assert of("tests/data/test_table.py") == {"tests/data/test_table.py"}
    assert "tests/engine/test_streams.py" in of("tests/support/traced_keys.py")
    assert "tests/models/test_modules.py" in of("fedjaxsim/models/modules.py")
    assert of("fedjaxsim/models/no_such_module.py") == {"tests/models"}
    assert of("fedjaxsim/cli/run.py", "tests/conftest.py") == {"tests"}
    assert of("tests/commands/conftest.py", "docs/reference/faq.md") == {
        "tests/commands", "tests/test_docs.py"
    }  # fmt: skip
