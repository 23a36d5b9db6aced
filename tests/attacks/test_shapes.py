"""Attacks by hyperparameters with a value for each client or coordinate: one of them is charged."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import classification, untrained

import fedjaxsim as fjs
from fedjaxsim.engine.batch import batch, varying
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
    sim = fjs.Simulation(untrained(TASK), POPULATION, fjs.poisson(0.5), mechanism=mechanism)
    given = {"clip": 1.0, "noise_multiplier": 1.0}
    if name == "count_noise":
        given["count_noise"] = 10.0
    with pytest.raises(ValueError, match=name):
        sim.hyperparameters(**(given | {name: value}))
    smuggled = sim.hyperparameters(**given).replace(**{name: value})
    with pytest.raises(ValueError, match=name):
        sim.init(0, smuggled)


@pytest.fixture(scope="module")
def sim():
    return fjs.Simulation(
        untrained(TASK), POPULATION, fjs.poisson(0.5), fjs.Minibatches(2, steps=1),
        adaptive_clipping(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def given(sim):
    return sim.hyperparameters(clip=1.0, noise_multiplier=1.0, count_noise=10.0).as_arrays()


@pytest.fixture(scope="module")
def key():
    return jax.random.key(5, impl="threefry2x32")


@pytest.mark.parametrize("name", ["sampling_rate", "clip", "count_noise", "target_quantile"])
def test_the_pure_program_refuses_them_too(sim, given, key, name):
    program, several = sim.program, given.replace(**{name: jnp.ones(M)})
    with pytest.raises(ValueError, match=name):
        jax.eval_shape(program.init, key, several)
    state = jax.eval_shape(program.init, key, given)
    with pytest.raises(ValueError, match=name):
        jax.eval_shape(program.step, state, several, sim.rows["train"])
    # A batch has one axis of runs, and no second one.
    runs = batch(program, varying([given, given.replace(**{name: 0.25})]), 2)
    state = jax.eval_shape(runs.init, key, given.replace(**{name: jnp.ones(2)}))
    wide = given.replace(**{name: jnp.ones((2, M))})
    with pytest.raises(ValueError, match=name):
        jax.eval_shape(runs.step, state, wide, sim.rows["train"])


def test_a_traced_value_out_of_its_range_has_no_guarantee(sim, given, key):
    # The square of 1e-30 is 0 in float32, so nothing is clipped; negative noise on a count is none.
    out_of_range = [
        {"clip": 1e-30}, {"count_noise": -1e-4}, {"sampling_rate": 1.5}, {"clip": jnp.nan},
        {"target_quantile": -1.0}, {"noise_multiplier": 1e-8},
    ]  # fmt: skip
    several = [given, *(given.replace(**values) for values in out_of_range)]
    program, rows = sim.program, sim.rows["train"]
    state = jax.jit(program.init)(key, given)

    @jax.jit
    @jax.vmap
    def after(hparams):
        return program.step(state, hparams, rows)[0].privacy

    found = jax.device_get(after(jax.tree.map(lambda *leaves: np.stack(leaves), *several)))
    z = found.charges[0].noise_multiplier[:, 0]
    np.testing.assert_array_equal(z, [1.0] + [np.nan] * len(out_of_range))
    for run in range(len(several)):
        privacy = jax.tree.map(lambda leaf, run=run: leaf[run], found)
        report = sim.guarantee(dataclasses.replace(state, privacy=privacy), 1e-3)
        assert (report.find("zero_out").status == "none") == (run > 0)
