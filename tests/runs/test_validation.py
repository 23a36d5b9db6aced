"""Data and settings that do not suit each other, and the columns and labels of tables."""

import json
import sys

import numpy as np
import pytest

from fedjaxsim.cli import main
from fedjaxsim.cli.program import parse
from fedjaxsim.runs.assemble import simulation_of, whole_population_of
from fedjaxsim.runs.settings import run_config

COLUMNS = {"client": "who", "target": "likes", "drop": ("age",)}


@pytest.fixture
def table(tmp_path):
    rows = "".join(
        f"{'ab'[k % 2]},{k},{k / 2},{('no', 'yes', 'perhaps')[k % 3]}\n" for k in range(8)
    )
    (tmp_path / "a.csv").write_text("who,age,height,likes\n" + rows)
    return f"csv:{tmp_path}/a.csv"


def test_the_names_of_classes_say_how_many_there_are(table):
    config = run_config(data=table, **COLUMNS)
    population = whole_population_of(config)
    known = simulation_of(config, population).public
    assert not any("number of classes" in sentence for sentence in known)
    assert any("names of the classes" in sentence for sentence in known)


def test_flags_name_columns(table):
    flags = f"--data {table} --client who --target likes --drop age,height --one-hot a --split b"
    config = parse(["run", *flags.split()]).settings  # pyright: ignore[reportAttributeAccessIssue]
    assert (config.client, config.target, config.split) == ("who", ("likes",), "b")
    assert (config.drop, config.one_hot) == (("age", "height"), ("a",))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--client who", "data csv need --target"),
        ("--target likes", "--client"),
        (
            "--client who --target likes --partition iid",
            "partition",
        ),
        ("--target likes --partition iid --split b", "no column 'b'"),
        ("--client who --target likes --loss squared", "squared"),
    ],
)
def test_flags_that_do_not_suit_a_table_are_refused(table, flags, message, capsys):
    assert main(["run", "--data", table, *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_text_is_no_number_to_a_model(tmp_path, capsys):
    users = {"users": ["a", "b"], "num_samples": [2, 2]}
    data = {user: {"x": ["ab", "bc"], "y": ["c", "d"]} for user in "ab"}
    (tmp_path / "a.json").write_text(json.dumps({**users, "user_data": data}))
    assert main(["run", "--data", f"leaf:{tmp_path}/a.json", "--test-fraction", "0.5"]) == 2
    assert "whose characters model linear would take for numbers" in capsys.readouterr().err


@pytest.mark.parametrize(("labels", "per_token"), [(["bb", "ca"], True), (["b", "c"], False)])
def test_labels_per_token_have_a_loss_per_token(tmp_path, monkeypatch, labels, per_token):
    data = {user: {"x": ["ab", "bc"], "y": labels} for user in "ab"}
    leaf = {"users": ["a", "b"], "num_samples": [2, 2], "user_data": data}
    (tmp_path / "a.json").write_text(json.dumps(leaf))
    (tmp_path / "mychars.py").write_text(
        "import jax.numpy as jnp, fedjaxsim as fjs\n"
        "def table(shape, outputs):\n"
        "    assert (shape, outputs) == ((2,), 80)\n"
        "    return fjs.Model(lambda key: jnp.zeros((outputs, outputs)), lambda w, x: w[x])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mychars", raising=False)
    config = run_config(data="leaf:a.json", model="mychars:table", test_fraction=0.5)
    population = whole_population_of(config)
    assert (simulation_of(config, population).task.targets is not None) == per_token


def test_labels_that_are_all_the_same_are_refused(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", x=np.ones((8, 2)), y=np.full(8, 3), client=np.arange(8) // 4)
    assert main(["run", "--data", f"npz:{tmp_path}/a.npz"]) == 2
    assert "y is 3 in all rows: there is nothing to predict" in capsys.readouterr().err


def test_cells_have_two_names():
    refused = run_config(data="mat:a.mat", fields=("x",))
    with pytest.raises(ValueError, match="fields must be two names, got x"):
        whole_population_of(refused)
