"""Clients held out of a run."""

import dataclasses

import numpy as np
import pytest
from support.problems import least_squares

from fedjaxsim.data.splitting import hold_out, split


def test_clients_are_held_out_whole_and_whatever_their_data_are():
    population = split(least_squares([5, 9, 6, 8, 7, 10])[0], validation=0.2, test=0.2)
    left, held = hold_out(population, 1 / 3, seed=4)
    assert sorted([*left.names, *held.names]) == sorted(population.names)
    assert held.num_clients == 2
    for part in (left, held):
        for index, name in enumerate(part.names):
            for which in ("train", "validation", "test"):
                own = population.rows(list(population.names).index(name), which)
                for field, values in part.rows(index, which).items():
                    np.testing.assert_array_equal(values, own[field])
    other = {name: -values for name, values in population.fields.items()}
    changed = dataclasses.replace(population, fields=other)
    assert hold_out(changed, 1 / 3, seed=4)[1].names.tolist() == held.names.tolist()
    chosen = {tuple(hold_out(population, 1 / 3, seed=seed)[1].names) for seed in range(20)}
    assert len(chosen) > 5


@pytest.mark.parametrize(
    ("fraction", "message"),
    [(1.0, "got 1"), (0.2, "are 1"), (0.9, "are 5")],
)
def test_too_few_clients_on_either_side_are_refused(fraction, message):
    population, _ = least_squares([5, 9, 6, 8, 7, 10])
    with pytest.raises(ValueError, match=message):
        hold_out(population, fraction, seed=0)
