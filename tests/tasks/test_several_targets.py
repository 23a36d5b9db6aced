"""Several targets per row: labels and outputs of a regression, by scikit-learn's definitions."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from sklearn import metrics as by_sklearn

import fedjaxsim as fjs
from fedjaxsim.cli import main
from fedjaxsim.data.minibatches import Batch
from fedjaxsim.models.model import Model, linear
from fedjaxsim.tasks import multilabel, squared

OWN = Model(lambda key: jnp.zeros(()), lambda params, x: params + x)
ZERO = jnp.zeros(())


def table():
    """Four clients whose two targets follow from three features."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(80, 3))
    y = x @ draw.normal(size=(3, 2)) + 0.1 * draw.normal(size=(80, 2)) + [0.5, 3]
    frame = pd.DataFrame(x, columns=["u", "v", "w"]).assign(site=np.arange(80) % 4)
    frame = frame.assign(split=np.where(np.arange(80) < 48, "train", "test"))
    return frame, y


def test_labels_are_judged_as_scikit_learn_judges_them():
    draw = np.random.default_rng(1)
    logits, y = draw.normal(size=(21, 3)).astype(np.float32), draw.integers(0, 2, (21, 3))
    task, p = multilabel(OWN, 3), 1 / (1 + np.exp(-logits))
    halves = [slice(0, 10), slice(10, 21)]
    # The last row of each batch is padding.
    batches = [
        Batch(
            {"x": jnp.asarray(np.vstack([logits[s], np.full((1, 3), 9.0)])),
             "y": jnp.asarray(np.vstack([y[s], np.zeros((1, 3), int)]))},
            jnp.asarray(np.r_[np.ones(s.stop - s.start), 0]),
        )
        for s in halves
    ]  # fmt: skip
    values = [task.metrics(ZERO, batch) for batch in batches]
    found = {name: np.concatenate([v[name][:-1] for v in values]).mean() for name in values[0]}
    expected = {
        "loss": np.mean([by_sklearn.log_loss(y[:, k], p[:, k]) for k in range(3)]),
        "subset_accuracy": by_sklearn.accuracy_score(y, logits > 0),
        "hamming_loss": by_sklearn.hamming_loss(y, logits > 0),
    }
    assert found == pytest.approx(expected, rel=1e-5)
    f1, rows = task.streaming_metrics["f1"], f1_of(task, batches)
    np.testing.assert_allclose(rows, by_sklearn.f1_score(y, logits > 0, average="micro"), rtol=1e-6)
    assert np.isnan(f1_of(task, batches, jnp.array(jnp.nan)))
    assert f1.value(f1.start(3)) == 0
    assert np.isnan(task.metrics(jnp.nan, batches[0])["hamming_loss"]).all()


def f1_of(task, batches, params=ZERO):
    metric = task.streaming_metrics["f1"]
    carry = metric.start(30)
    for batch in batches:
        carry = metric.add(carry, params, batch)
    return metric.value(carry)


def test_a_regression_has_several_outputs():
    frame, y = table()
    population = fjs.data.from_dataframe(
        frame.assign(a=y[:, 0], b=y[:, 1]), client="site", target=["a", "b"], split="split"
    )
    task = squared(linear((3,), 2), num_targets=2)
    batches = fjs.Minibatches(6, epochs=2)
    sim = fjs.Simulation(fjs.fedavg(task), population, fjs.full_participation(), batches)
    hparams = sim.hyperparameters(learning_rate=0.1)
    state, history = sim.run(sim.init(0, hparams), hparams, 8, eval_every=8)
    rows = population.splits["test"].all_rows()
    x, wanted = population.fields["x"][rows], population.fields["y"][rows]
    w = state.shared.params
    said = x @ np.asarray(w["kernel"]).T + np.asarray(w["bias"])
    summary = list(history)[-1].evaluation.summary()
    r2 = by_sklearn.r2_score(wanted, said, multioutput="variance_weighted")
    assert r2 > 0.5
    assert summary["test_nmse"] == pytest.approx(1 - r2, rel=1e-4)
    assert summary["test_squared_error"] == pytest.approx(
        by_sklearn.mean_squared_error(wanted, said), rel=1e-4
    )
    for target in range(2):
        assert summary[f"test_squared_error_{target}_weighted"] == pytest.approx(
            by_sklearn.mean_squared_error(wanted[:, target], said[:, target]), rel=1e-4
        )
    # The same models on scaled targets have the same errors in the units of the table.
    scaled = sim.with_population(fjs.data.scale(population, {"a": (-9, 11), "b": (-50, 70)}))
    half, centre = np.array([10, 60]), np.array([1, 10])
    moved = {"kernel": w["kernel"] / half[:, None], "bias": (w["bias"] - centre) / half}
    there = dataclasses.replace(
        scaled.init(0, hparams),
        shared=state.shared._replace(params=jax.tree.map(jnp.asarray, moved)),
    )
    again = scaled.evaluate(there, hparams, "test").summary()
    for name, value in summary.items():
        if "error" in name or "nmse" in name:
            assert again[name] == pytest.approx(value, rel=1e-3), name
    loss, gradient = jax.value_and_grad(task.loss)(
        w, Batch({"x": jnp.asarray(x), "y": jnp.asarray(wanted)}, jnp.ones(len(x)))
    )
    assert loss == pytest.approx(by_sklearn.mean_squared_error(wanted, said) / 2, rel=1e-4)
    assert gradient["kernel"].shape == (2, 3)


@pytest.mark.thorough
def test_labels_of_several_columns_by_flags(tmp_path, capsys):
    frame, y = table()
    frame.assign(a=(y[:, 0] > 0.5) * 1, b=(y[:, 1] > 3) * 1).to_csv(tmp_path / "t.csv", index=False)
    flags = ["run", "--data", f"csv:{tmp_path / 't.csv'}", "--client", "site", "--target", "a,b"]
    flags += ["--split", "split", "--algorithm", "fedavg", "--rounds", "20", "--eval-every", "20"]
    flags += ["--learning-rate", "1", "--quiet", "--out", str(tmp_path / "out")]
    assert main([*flags, "--loss", "multilabel"]) == 0
    last = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["test_f1"] > 0.9
    assert last["test_hamming_loss"] < 0.1
    assert main([*flags, "--overwrite"]) == 2
    assert "several targets need loss multilabel or squared" in capsys.readouterr().err
