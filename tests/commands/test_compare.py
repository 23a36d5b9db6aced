"""`fedjaxsim compare` of what is no run."""

import re

import pytest

from fedjaxsim.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "at least one run directory"),
        (["absent"], "no directory absent"),
        (["."], r"\. holds no summary\.json"),
        ([".", "--out", "curves.pdf"], r"must be written to a \.png file, got curves\.pdf"),
    ],
)
def test_compare_refuses_what_is_no_run(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *arguments]) == 2
    assert re.search(f"fedjaxsim: error: .*{message}", capsys.readouterr().err)
