"""How the tests of experiments import their scripts."""

import importlib

import pytest


@pytest.fixture(scope="module")
def script(request):
    """Import a file beside the test as the scripts there do, which are no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(request.module.SCRIPTS)
        yield importlib.import_module
