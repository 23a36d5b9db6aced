"""How the tests of experiments import their scripts."""

import importlib

import pytest


@pytest.fixture(scope="module")
def script(request):
    """Imports a file of the test's `SCRIPTS` as the scripts there do, which are no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(request.module.SCRIPTS)
        yield importlib.import_module
