"""A folder with algorithms of a user."""

import sys
from pathlib import Path

import pytest
from support import own_algorithms


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The current folder, whose `mine.py` has algorithms that the package does not have."""
    (tmp_path / "mine.py").write_text(Path(own_algorithms.__file__).read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("mine", None)
