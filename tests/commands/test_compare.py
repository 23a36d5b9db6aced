"""`fedjaxsim compare` of what is no run; `test_run.py` compares runs."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "directory"),
        ("absent", "absent"),
        (".", "summary.json"),
        (". .", "summary.json"),
        (". --out curves.gif", "curves.gif"),
        ("--out c.png", "directory"),
    ],
)
def test_what_is_no_run_is_refused(refused, arguments, words):
    assert words in refused(f"compare {arguments}")
