"""What is chosen for speed: sizes of chunks, and that no copy of all states is made."""

import functools
import re

import jax
import pytest
from problems import classification, simulation_of

from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.engine.layout import Layout
from fedjaxsim.privacy.samplers import full_participation


def test_places_stay_empty_rather_than_batches_small():
    batch, one_by_one = Layout(64, "vmap"), Layout(16, "scan")
    sizes = {5: 5, 15: 15, 100: 50, 640: 64}
    assert {places: batch.even_size(places) for places in sizes} == sizes
    few = 31_623  # 3 · 83 · 127
    assert (batch.even_size(few), one_by_one.even_size(few)) == (64, 3)


@pytest.mark.thorough
@pytest.mark.usefixtures("fully_optimized")
def test_rounds_of_everyone_copy_no_states():
    # A piece that several uses read, one of which writes it back, would take two copies of all.
    population, task = classification([4 + k % 5 for k in range(150)], 400)
    sim = simulation_of("pmtl", task, population, full_participation(), Minibatches(3, steps=2))
    assert sim.setup.layout.scans
    hparams = sim.setup.check(sim.hyperparameters(learning_rate=0.01, clip_norm=0.2))
    state = jax.eval_shape(sim.program.init, jax.random.key(0), hparams)
    several = functools.partial(sim.program.rounds, rounds=2)
    compiled = jax.jit(several, donate_argnums=0).lower(state, hparams, sim.setup.rows["train"])
    text = compiled.compile().as_text()
    assert text
    states = r"f32\[150,3,400\]"
    assert re.search(states + r"\S* dynamic-update-slice\(", text)
    assert not re.search(states + r"\S* (copy|transpose)\(", text)
