"""A user's reader of data, `--data MODULE:FACTORY`: as good as ours, whatever it returns."""

import sys

import numpy as np
import pandas as pd
import pytest

from fedjaxsim.cli import main
from fedjaxsim.cli.program import parse
from fedjaxsim.runs.assemble import population_of
from fedjaxsim.runs.finished import load_run

CODE = """
import pandas as pd
from fedjaxsim.data import Columns, Population, from_dataframe

def frame(*, skip: int = 0):
    return pd.read_csv("rows.csv")[skip:]

def population():
    rows = pd.read_csv("rows.csv").drop(columns="id")
    return from_dataframe(rows, client="ward", target="pay", one_hot=["kind"])

def arrays():
    rows = pd.read_csv("rows.csv")
    return {"x": rows[["age"]].to_numpy(), "y": rows["pay"].to_numpy()}

def texts():
    rows = pd.read_csv("rows.csv")
    return {"x": rows[["age"]].values.tolist(), "y": rows["kind"], "client": rows["ward"]}

def two_targets():
    rows = pd.read_csv("rows.csv")
    fields = {"x": rows[["age"]].to_numpy(), "y": rows[["pay", "id"]].to_numpy()}
    columns = {"x": Columns(("age",)), "y": Columns(("pay", "id"))}
    return Population.from_rows(fields, rows["id"] % 2, ["a", "b"], columns=columns)

def nothing():
    return None
"""
ROLES = "--client ward --target pay --one-hot kind --drop id"
SCALED = "--loss squared --range age=20:50 --range pay=0:2000"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a table and a module, `ownreader`, that reads it."""
    path, rng = tmp_path_factory.mktemp("own"), np.random.default_rng(0)
    rows = {"ward": np.resize(["b", "a"], 24), "id": np.arange(24), "age": rng.integers(20, 50, 24)}
    rows |= {"kind": np.resize(["u", "v", "w"], 24), "pay": rng.integers(100, 1900, 24) + 0.5}
    pd.DataFrame(rows).to_csv(path / "rows.csv", index=False)
    (path / "ownreader.py").write_text(CODE)
    return path


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])


def read(flags):
    return population_of(parse(["run", "--data", *flags.split()]).settings)


@pytest.mark.parametrize("flags", [f"frame {ROLES}", "population"])
def test_rows_scales_names_and_order_are_those_of_the_file(flags):
    ours, own = read(f"csv:rows.csv {ROLES} {SCALED}"), read(f"ownreader:{flags} {SCALED}")
    for name, values in ours.fields.items():
        np.testing.assert_array_equal(own.fields[name], values)
    np.testing.assert_array_equal(own.source_row, ours.source_row)
    assert own.columns == ours.columns
    assert own.names.tolist() == ours.names.tolist() == ["a", "b"]
    assert {*own.public} > {*ours.public}  # what the reader computed from all rows is public


def test_settings_of_the_reader_are_flags_and_rows_without_clients_are_divided():
    assert read(f"ownreader:frame --skip 4 {ROLES} {SCALED}").num_rows == 20
    divided = read(f"ownreader:arrays --partition iid --clients 3 {SCALED.split(' --range')[0]}")
    assert divided.counts.sum(axis=1).tolist() == [8, 8, 8]


def test_lists_and_text_of_a_frame_are_arrays():
    population = read("ownreader:texts")
    assert population.names.tolist() == ["a", "b"]
    assert population.categories["y"] == ("u", "v", "w")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("nothing", "data ownreader:nothing must return a data frame, a Population, or a dict of"),
        ("frame", "returns a data frame, which needs --target"),
        ("population --client ward", "client names a column of a data frame, but data ownreader:"),
        ("arrays", "holds no client of its rows: name a data frame's column"),
        (
            "frame --client ward --target pay --drop id",
            "^ownreader:frame: column 'kind' holds text",
        ),
        ("farme", r"ownreader has no 'farme' \(did you mean 'frame'\?\)"),
    ],
)
def test_what_a_reader_cannot_mean_is_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        read(f"ownreader:{flags}")


def test_columns_of_its_frame_are_shown(capsys):
    words = "data show --data ownreader:frame --client ward --target pay"
    assert main(words.split()) == 0
    assert "flags: --one-hot kind" in capsys.readouterr().out


@pytest.mark.thorough
def test_new_rows_are_predicted_by_the_columns_that_it_named(folder, recwarn):
    """In the frame's order, in its units, without the columns that the reader left out."""
    how = "--algorithm fedavg --rounds 2 --sampling-rate 1 --epsilon inf --quiet --out run"
    assert main(["run", "--data", "ownreader:population", *f"{SCALED} {how}".split()]) == 0
    run, rows = load_run(folder / "run"), pd.read_csv("rows.csv").iloc[::-1]
    table = run.coefficients().set_index("client")
    assert [*table] == ["intercept", "age", "kind=u", "kind=v", "kind=w"]
    with pytest.raises(ValueError, match="client names a column of a table, which ownreader:arr"):
        run.predict("ownreader:arrays", client="ward")
    said = run.predict(rows.drop(columns="pay"), client="ward")
    assert any("'id': left out" in str(warning.message) for warning in recwarn)
    encoded = pd.get_dummies(rows[["age", "kind"]], prefix_sep="=")[[*table][1:]]
    of_client = table.loc[rows["ward"]]
    wanted = (encoded.to_numpy(float) * of_client.iloc[:, 1:].to_numpy()).sum(axis=1)
    np.testing.assert_allclose(said["prediction"], wanted + of_client["intercept"], rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "source", ["ownreader:two_targets", "csv:rows.csv --client ward --target pay,id --drop kind"]
)
def test_several_targets_have_the_names_of_their_columns(folder, source):
    """And each its own unit, in predictions and coefficients."""
    how = "--algorithm fedavg --rounds 2 --sampling-rate 1 --epsilon inf --quiet --out two"
    scaled = "--loss squared-targets --range age=20:50 --range pay=0:2000 --range id=0:23"
    command = f"run --data {source} {scaled} {how} --overwrite"
    assert main(command.split()) == 0
    run, rows = load_run(folder / "two"), pd.read_csv("rows.csv")
    said = run.predict()
    columns = "client row split prediction_pay prediction_id target_pay target_id"
    assert [*said] == columns.split()
    if source.startswith("csv"):
        new = run.predict("csv:rows.csv")
        same = [name for name in said if name != "split"]
        alike = (table.filter(same) for table in (new, said))
        pd.testing.assert_frame_equal(*alike, check_dtype=False)
        assert "target_pay" not in run.predict(rows.drop(columns=["pay", "id"]))
    table = run.coefficients().set_index(["client", "target"])
    for target in ("pay", "id"):
        of_client = table.loc[[(client, target) for client in said.client]]
        wanted = of_client["intercept"] + rows["age"].to_numpy() * of_client["age"]
        np.testing.assert_allclose(said[f"prediction_{target}"], wanted, rtol=1e-4)
    titles = {
        record.title
        for record in run.sim.reported.metric_records(
            ["loss", "squared_error", "squared_error_0", "squared_error_1"]
        ).values()
    }
    assert {"squared error of pay", "squared error of id"} <= titles
