"""`fedjaxsim predict` and `fedjaxsim models`: what a run leaves is used."""

import csv

import numpy as np
import pandas as pd
import pytest

FLAGS = "--client who --target pay --loss squared --preprocess unit-rows --rounds 3 --quiet"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(60, 2)), columns=["age", "size"])
    frame = frame.assign(who=np.array(["ann", "bob", "eve"])[np.arange(60) % 3], pay=frame.age)
    frame.to_csv(folder / "all.csv", index=False)
    frame.assign(who="new").head(4).to_csv(folder / "new.csv", index=False)
    return folder


def test_a_run_leaves_models_and_predictions(table, ask, refused):
    run = f"run --data csv:{table}/all.csv {FLAGS} --algorithm pmtl --out {table}/run"
    assert "learning rate 0.4762: 1/L" in ask(run)  # 1/(1 + 1 + 0.1)
    said = ask(f"models {table}/run --out {table}/models.csv")
    assert "A client's model is its own" in said
    models = pd.read_csv(table / "models.csv").pivot(
        index="client", columns="feature", values="coefficient"
    )
    assert models.index.tolist() == ["ann", "bob", "eve"]
    ask(f"predict {table}/run --out {table}/said.parquet")
    found, frame = pd.read_parquet(table / "said.parquet"), pd.read_csv(table / "all.csv")
    assert found.columns.tolist() == ["client", "split", "row", "target", "prediction"]
    assert found.groupby(["client", "split"]).size().unique().tolist() == [4, 16]
    assert sorted(found[found.client == "ann"].row) == list(range(20))
    ask(f"predict {table}/run --data csv:{table}/all.csv --out {table}/said.csv")
    found, frame = pd.read_csv(table / "said.csv"), pd.read_csv(table / "all.csv")
    assert found.prediction.astype(str).str.len().max() < 14  # no digits beyond float32's
    ann = frame[frame.who == "ann"]
    sizes = np.asarray(ann[["age", "size"]])
    unit = sizes / np.linalg.norm(sizes, axis=1)[:, None]
    own = models.loc["ann"]
    wanted = own["(intercept)"] + unit @ own[["age / ‖x‖", "size / ‖x‖"]].to_numpy()
    of_ann = found[found.client == "ann"]
    np.testing.assert_allclose(of_ann.target, ann.pay, rtol=1e-6)
    np.testing.assert_allclose(of_ann.prediction, wanted, rtol=1e-4, atol=1e-6)
    new = f"predict {table}/run --data csv:{table}/new.csv --out {table}/new-said.csv"
    assert "1 of them took no part in the run: the published model" in ask(new)
    with open(table / "new-said.csv", newline="") as file:
        assert [row["client"] for row in csv.DictReader(file)] == ["new"] * 4
    assert ".parquet or .csv" in refused(f"models {table}/run --out {table}/models.txt")
