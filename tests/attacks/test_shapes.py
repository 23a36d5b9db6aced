"""Attacks by hyperparameters with a value for each client or coordinate: one of them is charged."""

import numpy as np
import pytest
from problems import classification

import fedjaxsim as fjs
from fedjaxsim.privacy.mechanisms.gram import gaussian_gram
from fedjaxsim.privacy.mechanisms.sums import adaptive_clipping

M = 4
POPULATION, TASK = classification([5] * M)


@pytest.mark.parametrize(
    ("name", "value", "mechanism"),
    [
        ("sampling_rate", np.array([1e-6, 1, 1, 1]), fjs.gaussian()),
        ("clip", np.arange(1.0, 4.0), gaussian_gram()),
        ("count_noise", np.linspace(100.0, 200.0, M), adaptive_clipping()),
        ("noise_multiplier", np.ones((2, M)), fjs.gaussian()),
    ],
)
def test_a_value_for_each_client_or_coordinate_is_refused(name, value, mechanism):
    sim = fjs.Simulation(fjs.fedavg(TASK), POPULATION, fjs.poisson(0.5), mechanism=mechanism)
    given = {"clip": 1.0, "noise_multiplier": 1.0}
    if name == "count_noise":
        given["count_noise"] = 10.0
    with pytest.raises(ValueError, match=name):
        sim.hyperparameters(**(given | {name: value}))
    smuggled = sim.hyperparameters(**given).replace(**{name: value})
    with pytest.raises(ValueError, match=name):
        sim.init(0, smuggled)
