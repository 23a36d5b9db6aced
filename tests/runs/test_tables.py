"""Runs on tables: their flags, and what is known of their labels."""

import pytest

from fedjaxsim.cli import main
from fedjaxsim.cli.program import parse
from fedjaxsim.runs.build import simulation_of, whole_population_of
from fedjaxsim.runs.settings import RunConfig

COLUMNS = {"client": "who", "target": "likes", "drop": ("age",)}


@pytest.fixture
def table(tmp_path):
    rows = "".join(
        f"{'ab'[k % 2]},{k},{k / 2},{('no', 'yes', 'perhaps')[k % 3]}\n" for k in range(8)
    )
    (tmp_path / "a.csv").write_text("who,age,height,likes\n" + rows)
    return f"csv:{tmp_path}/a.csv"


def test_the_names_of_classes_say_how_many_there_are(table):
    config = RunConfig(data=table, **COLUMNS)
    population = whole_population_of(config)
    known = simulation_of(config, population).public
    assert not any("number of classes" in sentence for sentence in known)
    assert any("names of the classes" in sentence for sentence in known)


def test_flags_name_columns(table):
    flags = f"--data {table} --client who --target likes --drop age,height --one-hot a --split b"
    config = parse(["run", *flags.split()]).settings  # pyright: ignore[reportAttributeAccessIssue]
    assert (config.client, config.target, config.split) == ("who", "likes", "b")
    assert (config.drop, config.one_hot) == (("age", "height"), ("a",))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--client who", "csv needs the column that is to be predicted (target)"),
        ("--target likes", "csv needs the column that says whose a row is (client)"),
        ("--client who --target likes --partition iid", "partition has no effect with data table"),
        ("--target likes --partition iid --split b", "split has no effect with data table without"),
        ("--client who --target likes --loss squared", "which loss squared would take for numbers"),
    ],
)
def test_flags_that_do_not_suit_a_table_are_refused(table, flags, message, capsys):
    assert main(["run", "--data", table, *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_the_columns_of_other_data_have_no_effect(capsys):
    assert main(["run", "--target", "y"]) == 2
    assert "target has no effect with data digits, only with table" in capsys.readouterr().err
