"""Simulated seconds: the law by hand, the work of a client, and that both are public."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

import fedjaxsim as fjs
from fedjaxsim.clock import Clock, RoundWork
from fedjaxsim.models import linear
from fedjaxsim.tasks import squared


def work(**values):
    return RoundWork(
        **{"operations": 2e9, "message_bytes": 0.0, "draws": 1, "answers": 1.0} | values
    )


@pytest.mark.parametrize("spread", [0.05, 0.7, 3.0])
def test_the_slowest_client_of_a_cohort_by_its_known_means(spread):
    clock, mean = Clock(spread=spread), math.exp(spread**2 / 2)
    assert clock.seconds(work()) == pytest.approx(2 * mean)
    # E max of two log-normal times is 2 e^(s²/2) Φ(s/√2).
    of_two = 2 * mean * norm.cdf(spread / math.sqrt(2))
    assert clock.seconds(work(draws=2)) == pytest.approx(2 * of_two)
    # Of two coins: both with 1/4, one with 1/2.
    assert clock.seconds(work(draws=2, answers=0.5)) == pytest.approx(of_two / 2 + mean)
    # FedBuff's server steps four times while a client works, and waits for nobody.
    assert clock.seconds(work(draws=9, at_work=4.0)) == pytest.approx(mean / 2)


def test_alike_clients_compute_and_send_one_after_the_other():
    clock = Clock(speed=1e6, bandwidth=1e3, spread=0.0)
    sent = work(operations=3e6, message_bytes=500.0, draws=10)
    assert clock.seconds(sent) == pytest.approx(3.5)
    assert clock.seconds(sent._replace(answers=0.1)) == pytest.approx(3.5 * (1 - 0.9**10))
    for wrong in ({"speed": 0.0}, {"bandwidth": -1.0}, {"spread": math.nan}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Clock(**wrong)


def simulation(counts, sampling):
    """Return a simulation whose client multiplies in a fold, a pass, a condition and 5 times."""
    rng, task = np.random.default_rng(0), squared(linear((3,), 1))
    clients = [{"x": rng.normal(size=(n, 3)), "y": rng.normal(size=n)} for n in counts]
    population = dataclasses.replace(fjs.Population.from_clients(clients), max_rows=9)

    def client(shared, personal, data, hparams, context):
        def product(total, batch):
            return total + jnp.sum(batch.fields["x"] @ jnp.ones((3, 2)))

        total = data.full_pass(product, data.fold(product, 0.0))
        total = jax.lax.cond(total > 0, lambda t: t * t * t, lambda t: -t, total)
        return personal, jax.lax.fori_loop(0, 5, lambda _, t: t * shared, total), {}

    algorithm = fjs.Algorithm(
        lambda key, hparams: (jnp.zeros(()), ()),
        client,
        lambda shared, release, hparams, round_: release,
        lambda shared, personal, hparams, client_id: task.init(jax.random.key(0)),
        task,
    )
    return fjs.Simulation(algorithm, population, sampling, fjs.Minibatches(4, epochs=2))


SAMPLINGS = [
    (fjs.poisson(0.5), 4, 0.5),
    (fjs.fixed_size(cohort=2), 2, 1.0),
    (fjs.full_participation(), 4, 1.0),
    (fjs.privacy.fixed_groups(groups=2), 2, 1.0),
]


@pytest.mark.parametrize(("sampling", "draws", "answers"), SAMPLINGS)
def test_the_work_is_that_of_a_client_with_the_declared_number_of_rows(sampling, draws, answers):
    """Attack: rows that clients have, and who takes part, must not show in the clock."""
    # Two epochs of ⌈9/4⌉ batches of 4 × 3 × 2, a pass of one batch of 16, the larger branch, 5.
    expected = 2 * 3 * 24 + 96 + 2 + 5
    # Samplings differ in who is drawn, so other rows are tried with one of them.
    others = [[1, 1, 1, 1]] if sampling is SAMPLINGS[0][0] else []
    for counts in ([9, 4, 1, 8], *others):
        sim = simulation(counts, sampling)
        work = sim.round_work(sim.hyperparameters())
        assert work == RoundWork(expected, 4.0, draws, answers)
