import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def real_file() -> Callable[[str], Path]:
    """Find a file of the real data sets, or skip the test."""

    def find(name: str) -> Path:
        folder = os.environ.get("FEDJAXSIM_DATA")
        if not folder:
            pytest.skip("FEDJAXSIM_DATA does not name a folder with the real data sets")
        path = Path(folder) / name
        if not path.exists():
            pytest.skip(f"{path} is absent")
        return path

    return find
