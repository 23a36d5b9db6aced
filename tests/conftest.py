"""What runs tests is set up by `support.session`; what hands them to workers needs none of it."""

import importlib

import pytest

pytest.register_assert_rewrite("support.session")


def pytest_configure(config):
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.register(importlib.import_module("support.session"))
