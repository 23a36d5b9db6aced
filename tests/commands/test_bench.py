"""`fedjaxsim bench`, from its flags to its numbers."""

import os

import pytest
from support.refusals import check_refusals, parsed

from fedjaxsim.bench import measure as command
from fedjaxsim.cli import main
from fedjaxsim.cli.program import parse

TINY = [
    *("--data", "random", "--clients", "4", "--shape", "3", "--labels", "2"),
    *("--rounds", "4", "--eval-every", "2", "--noise-multiplier", "1"),
]


def test_flags_win_over_the_file_and_a_run_has_a_line(tmp_path, monkeypatch, capsys):
    file = tmp_path / "one.toml"
    file.write_text('data = "random"\nclients = 4\nlam = 0.5\n')
    config = parse(["bench", str(file), "--rounds", "5", "--clip", "2"]).settings
    assert (config.rounds, config.lam, config.clip) == (5, 0.5, 2)
    numbers = {"compile_seconds": 1.0, "evaluation_seconds": 2.0, "rounds_mb": 3.0}
    speed = {"rounds_per_second": 4.5, "rounds_per_second_range": [4.0, 7.0]}
    monkeypatch.setattr(command, "measure", lambda experiment, repeats: speed | numbers)
    assert main(["bench", str(file), "--repeats", "2"]) == 0
    line = capsys.readouterr().out.splitlines()[-1].split()
    assert line == ["pmtl", "linear", "on", "random", "4.5", "(4–7)", "1", "2", "3"]


def test_words_of_no_measurement_are_refused():
    check_refusals(
        lambda words: parsed(f"bench {words}"),
        {
            "--repeats 0": "repeats must be at least 1",
            "nowhere": "no configuration file nowhere",
            "--out .": "out has no effect on bench",
        },
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("one.toml there/one.toml", "there/one.toml"),
        ("--data leaf:absent", "absent"),
        ("--devices 1000000", "devices"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, words, refused, tmp_path):
    (tmp_path / "there").mkdir()
    for name in ("one.toml", "there/one.toml"):
        (tmp_path / name).touch()
    assert words in refused(f"bench {arguments}")


@pytest.mark.thorough
def test_a_tiny_run_is_measured(ask_json, capsys):
    found = ask_json(f"bench {' '.join(TINY)} --repeats 2")
    assert found["machine"]["cores"] == os.cpu_count()
    assert found["machine"]["versions"].keys() >= {"python", "jax", "fedjaxsim"}
    low, high = found["rounds_per_second_range"]
    assert 0 < low <= found["rounds_per_second"] <= high
    for positive in ("evaluation_seconds", "clients_per_round", "chunk_size", "devices"):
        assert found[positive] > 0
    assert "fedjaxsim" not in capsys.readouterr().err
