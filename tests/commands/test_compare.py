"""`fedjaxsim compare` of what is no run; `test_run.py` compares runs."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "directory"),
        ("absent", "absent"),
        (".", "config.toml"),
        (". .", "config.toml"),
        (". --out curves.gif", "curves.gif"),
        ("--out c.png", "directory"),
    ],
)
def test_what_is_no_run_is_refused(refused, arguments, words):
    assert words in refused(f"compare {arguments}")


def test_the_folder_of_runs_is_no_run(refused, tmp_path):
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "config.toml").touch()
    assert "is no run, but holds some, such as runs/one" in refused("compare runs")
