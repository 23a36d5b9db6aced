"""kNN-Per: its predictions against scikit-learn's neighbours, and FedAvg's training."""

from typing import Any, cast

import jax
import numpy as np
import pytest
from scipy.special import softmax as softmax_of
from sklearn.neighbors import KNeighborsClassifier
from support.problems import after, classification, least_squares, read_by

from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.knnper import knnper
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.models.model import linear
from fedjaxsim.models.network import mlp
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.simulation import Simulation
from fedjaxsim.simulation_batch import SimulationBatch
from fedjaxsim.tasks.task import softmax
from fedjaxsim.testing import check_billboard

K, SCALE = 3, 2.0


def kernel(distances):
    return np.exp(-distances / SCALE)


@pytest.mark.thorough
def test_predictions_are_mixed_with_those_of_neighbours_on_ones_own_rows():
    population, _ = classification([8, 40, 11])
    task, steps = softmax(mlp((4,), 3, hidden=(5,)), 3), Minibatches(4, steps=2)
    sims = [
        Simulation(algorithm, population, full_participation(), steps)
        for algorithm in (knnper(task, neighbours=K, datastore=32), fedavg(task))
    ]
    both = [read_by(sim, learning_rate=0.3, neighbour_scale=SCALE) for sim in sims]
    state, plain = (after(sim, hparams, 2) for sim, hparams in zip(sims, both, strict=True))
    w, same = (jax.tree.map(np.asarray, each.shared.params) for each in (state, plain))
    jax.tree.map(np.testing.assert_array_equal, w, same)

    def hidden(x):
        return np.maximum(x @ w["Dense_0"]["kernel"] + w["Dense_0"]["bias"], 0)

    for weight in (0.0, 0.4, 1.0):
        hparams = both[0].replace(neighbour_weight=weight)
        found = sims[0].evaluate(state, hparams).values["loss"]
        for client, loss in enumerate(found):
            train, test = (population.rows(client, split) for split in ("train", "test"))
            train = {name: values[:32] for name, values in train.items()}
            nearest = KNeighborsClassifier(K, weights=cast(Any, kernel))
            nearest.fit(hidden(train["x"]), train["y"])
            probabilities = np.zeros((len(test["y"]), 3))
            probabilities[:, nearest.classes_] = nearest.predict_proba(hidden(test["x"]))
            logits = hidden(test["x"]) @ w["Dense_1"]["kernel"] + w["Dense_1"]["bias"]
            of_model = softmax_of(logits, axis=1)
            mixed = weight * probabilities + (1 - weight) * of_model
            expected = -np.log(np.maximum(mixed[np.arange(len(test["y"])), test["y"]], 1e-30))
            np.testing.assert_allclose(loss, np.mean(expected), rtol=1e-4)


@pytest.mark.thorough
def test_settings_of_a_sweep_are_evaluated_as_alone():
    population, task = classification([8, 40, 11])
    sim = Simulation(knnper(task), population, full_participation(), Minibatches(4, steps=2))
    settings = [read_by(sim, learning_rate=0.3, neighbour_weight=weight) for weight in (0.4, 1.0)]
    many = SimulationBatch(sim, settings)
    of_all = many.evaluate(many.init(0)).values["loss"]
    for index, hparams in enumerate(settings):
        found = sim.evaluate(sim.init(0, hparams), hparams).values["loss"]
        np.testing.assert_allclose(of_all[:, index], found, rtol=1e-5)


@pytest.mark.thorough
def test_only_releases_reach_other_clients():
    population, task = classification([8, 9, 11])
    sim = Simulation(knnper(task), population, full_participation(), Minibatches(4, steps=1))
    check_billboard(sim, read_by(sim, clip=0.5, noise_multiplier=0.7))


def test_it_needs_a_softmax_classification_and_as_many_rows_as_neighbours():
    with pytest.raises(ValueError, match="softmax"):
        knnper(least_squares([3])[1])
    with pytest.raises(ValueError, match="neighbours"):
        knnper(softmax(linear((4,), 3), 3), neighbours=5, datastore=4)
