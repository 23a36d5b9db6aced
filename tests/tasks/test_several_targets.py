"""Tasks of several targets per row, by numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjaxsim as fjs
from fedjaxsim.cli import main
from fedjaxsim.models import linear
from fedjaxsim.tasks import multilabel, squared_targets

PARAMS = {"kernel": jnp.array([[1.0, -2.0], [0.5, 1.0], [0.0, 3.0]]), "bias": jnp.zeros(3)}
X = np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]], np.float32)
OUTPUTS = X @ np.asarray(PARAMS["kernel"]).T


def batch(y):
    return fjs.Batch({"x": jnp.asarray(X), "y": jnp.asarray(y)}, jnp.ones(3))


def test_labels_of_which_any_may_hold():
    y = np.array([[1, 0, 1], [0, 1, 1], [1, 1, 0]])
    task = multilabel(linear((2,), 3), 3)
    p = 1 / (1 + np.exp(-OUTPUTS))
    by_hand = -np.sum(y * np.log(p) + (1 - y) * np.log(1 - p), axis=1)
    assert jax.jit(task.loss)(PARAMS, batch(y)) == pytest.approx(by_hand.mean(), rel=1e-6)
    values = jax.jit(task.metrics)(PARAMS, batch(y))
    right = (OUTPUTS > 0) == (y > 0)
    np.testing.assert_allclose(values["accuracy"], right.mean(axis=1))
    for label in range(3):
        np.testing.assert_allclose(values[f"accuracy_{label}"], right[:, label])
    assert task.predict is not None
    said = jax.jit(task.predict)(PARAMS, {"x": jnp.asarray(X)})
    np.testing.assert_array_equal(said["prediction"], OUTPUTS > 0)
    np.testing.assert_allclose(said["probability"], p, rtol=1e-6)
    assert task.metric_records([*values])["accuracy_1"].title == "accuracy of y1"
    with pytest.raises(ValueError, match="3 targets per row"):
        task.check({"x": jax.ShapeDtypeStruct((3, 2), float), "y": jax.ShapeDtypeStruct((3,), int)})


def test_several_numbers_and_their_errors():
    y = np.array([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0], [4.0, 1.0, 0.0]], np.float32)
    y *= [1, 10, 0.001]
    task = squared_targets(linear((2,), 3), 3)
    errors = (OUTPUTS - y) ** 2
    loss = jax.jit(task.loss)(PARAMS, batch(y))
    assert loss == pytest.approx(errors.sum(axis=1).mean() / 2, rel=1e-6)
    population = fjs.Population.from_clients([{"x": X[:1], "y": y[:1]}, {"x": X[1:], "y": y[1:]}])
    sim = fjs.Simulation(
        fjs.local(task), population, fjs.full_participation(), mechanism=fjs.no_release()
    )
    hparams = sim.hyperparameters()
    summary = sim.evaluate(sim.init(0, hparams), hparams, "train").summary()
    # Models start at zero, so errors are the squared targets.
    per_client = [np.mean(y[:1] ** 2), np.mean(y[1:] ** 2)]
    assert summary["train_squared_error"] == pytest.approx(np.mean(per_client))
    assert summary["train_squared_error_2_weighted"] == pytest.approx(np.mean(y[:, 2] ** 2))
    # A target in thousandths would count a millionth if errors were added up first.
    assert summary["train_nmse"] == pytest.approx(
        np.mean(np.mean(y**2, axis=0) / np.var(y, axis=0))
    )


@pytest.mark.thorough
def test_the_command_line_makes_an_output_for_each_target(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2)).astype(np.float32)
    y = (x @ rng.normal(size=(2, 3)) > 0).astype(int)
    np.savez("many.npz", x=x, y=y, client=np.arange(60) // 20)
    command = "run --data npz:many.npz --loss multilabel --algorithm local --rounds 30 --quiet"
    assert main([*command.split(), "--out", "run"]) == 0
    run = fjs.load_run("run")
    assert run.models()["kernel"].shape == (3, 3, 2)
    assert run.summary["test_accuracy_2"] > 0.7
    assert {"prediction_y0", "prediction_y1", "prediction_y2"} <= {*run.predict()}
    np.savez("one.npz", x=x, y=y[:, 0], client=np.arange(60) // 20)
    assert (
        main(["run", "--data", "npz:one.npz", "--loss", "multilabel", "--rounds", "3", "--quiet"])
        == 2
    )
    assert "several targets per row" in capsys.readouterr().err
