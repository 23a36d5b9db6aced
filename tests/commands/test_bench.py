"""`fedjaxsim bench`, from its flags to its numbers."""

import json
import os

import pytest

from fedjaxsim.bench import measure as command
from fedjaxsim.cli import main
from fedjaxsim.cli.program import parse

TINY = [
    *("--data", "random", "--clients", "4", "--shape", "3", "--labels", "2"),
    *("--rounds", "4", "--eval-every", "2", "--noise-multiplier", "1"),
]


@pytest.fixture
def files(tmp_path):
    """Two files of settings, with other parts."""
    (tmp_path / "one.toml").write_text('data = "random"\nclients = 4\nlam = 0.5\n')
    (tmp_path / "two.toml").write_text('algorithm = "fedavg"\nclients = 4\nrounds = 7\n')
    return [str(tmp_path / name) for name in ("one.toml", "two.toml")]


def test_flags_win_over_every_file(files):
    runs = parse(["bench", *files, "--rounds", "5", "--clip", "2"]).settings
    assert [config.algorithm for config in runs] == ["pmtl", "fedavg"]
    assert [config.rounds for config in runs] == [5, 5]
    assert [config.get("lam") for config in runs] == [0.5, None]
    assert [config.get("clip") for config in runs] == [2, 2]


def test_each_file_has_a_line_of_its_name(files, monkeypatch, capsys):
    seen = []

    def measured(experiment, repeats):
        seen.append((experiment.config.algorithm, repeats))
        numbers = {"compile_seconds": 1.0, "evaluation_seconds": 2.0, "rounds_mb": 3.0}
        speed = 4.5 if len(seen) == 1 else 7.0
        return {"rounds_per_second": speed, "rounds_per_second_range": [4.0, speed], **numbers}

    monkeypatch.setattr(command, "measure", measured)
    assert main(["bench", *files, "--repeats", "2"]) == 0
    assert seen == [("pmtl", 2), ("fedavg", 2)]
    one, two = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    assert one == ["one", "4.5", "(4–4.5)", "1", "2", "3"]
    assert two == ["two", "7", "(4–7)", "1", "2", "3"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--repeats 0", "repeats"),
        ("--devices none", "devices"),
        ("nowhere", "nowhere"),
        ("nowhere.toml", "nowhere.toml"),
        ("one.toml there/one.toml", "one"),
        ("--rounds 0", "rounds"),
        ("--algorithm fedavg --lam 1", "lam"),
        ("--roundz 3", "roundz"),
        ("--out .", "out"),
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
def test_a_tiny_run_is_measured(capsys):
    assert main(["bench", *TINY, "--repeats", "2", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["machine"]["cores"] == os.cpu_count()
    assert found["machine"]["versions"].keys() >= {"python", "jax", "fedjaxsim"}
    [(name, numbers)] = found["runs"].items()
    assert name == "pmtl-linear-random"
    low, high = numbers["rounds_per_second_range"]
    assert 0 < low <= numbers["rounds_per_second"] <= high
    for positive in ("evaluation_seconds", "clients_per_round", "chunk_size", "devices"):
        assert numbers[positive] > 0
    assert "fedjaxsim" not in printed.err
