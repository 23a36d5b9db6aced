"""What runs tests is set up by `support.session`; what hands them to workers needs none of it."""

import importlib
import os
import sys

import pytest

# Of 3 s that a process needs to import the package, 2 s read its text where bytecode is not kept,
# and 1 s that of Hypothesis, whose assertions pytest rewrites.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
pytest.register_assert_rewrite("support.session")


def pytest_configure(config):
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.register(importlib.import_module("support.session"))
