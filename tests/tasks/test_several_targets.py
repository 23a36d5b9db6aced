"""Several targets per row, by scikit-learn's definitions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from sklearn import metrics as by_sklearn

import fedjaxsim as fjs
from fedjaxsim.data.minibatches import Batch
from fedjaxsim.models.model import linear
from fedjaxsim.tasks import squared


def table():
    """Four clients whose two targets follow from three features."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(80, 3))
    y = x @ draw.normal(size=(3, 2)) + 0.1 * draw.normal(size=(80, 2)) + [0.5, 3]
    frame = pd.DataFrame(x, columns=["u", "v", "w"]).assign(site=np.arange(80) % 4)
    frame = frame.assign(split=np.where(np.arange(80) < 48, "train", "test"))
    return frame, y


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
