"""A mechanism of one's own, from public names: Laplace noise on sums bounded in the L1 norm."""

import dataclasses

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from support.problems import classification

import fedjaxsim as fjs
from fedjaxsim.privacy.entries import ADJACENCIES, Entry
from fedjaxsim.privacy.events import event_from

Z, ROUNDS, DELTA = 4.0, 3, 1e-2


@dataclasses.dataclass(frozen=True)
class Laplace(fjs.privacy.PrivacyEvent):
    """Laplace noise of scale zC on each number."""

    def losses(self, entry, adjacency, interval):
        return privacy_loss_distribution.from_laplace_mechanism(
            entry.noise_multiplier / self.sensitivity(adjacency),
            value_discretization_interval=interval,
        )

    def rdp(self, entry, adjacency, orders, xp):
        # Mironov 2017, Table II.
        a = xp.asarray(orders, float)
        scale = entry.noise_multiplier / self.sensitivity(adjacency)
        up = xp.log(a / (2 * a - 1)) + (a - 1) / scale
        down = xp.log((a - 1) / (2 * a - 1)) - a / scale
        return xp.logaddexp(up, down) / (a - 1)


def laplace():
    def add(accumulator, messages, mask, ids, state, hparams):
        del ids, state
        bounded = messages.bound(hparams.clip, mask, ord=1)
        return fjs.privacy.accumulate(accumulator, bounded, bounded.messages.total())

    def release(accumulator, denominator, key, state, hparams, round_):
        del round_
        leaves, structure = jax.tree.flatten(accumulator.total)
        scale = hparams.noise_multiplier * hparams.clip
        noise = jax.tree.unflatten(
            structure,
            [
                scale * jax.random.laplace(jax.random.fold_in(key, number), leaf.shape)
                for number, leaf in enumerate(leaves)
            ],
        )
        value = fjs.privacy.noised_mean(accumulator.total, noise, denominator)
        return fjs.privacy.Release(value, state, hparams.noise_multiplier)

    return fjs.gaussian()._replace(event=Laplace(), add=add, release=release)


@pytest.mark.thorough
def test_its_own_cost_is_reported_and_shown_on_the_way():
    population, task = classification([3, 4, 5])
    sim = fjs.Simulation(
        fjs.fedavg(task), population, fjs.full_participation(), mechanism=laplace()
    )
    hparams = sim.hyperparameters(learning_rate=0.1, clip=1.0, noise_multiplier=Z)
    state, _ = sim.run(sim.init(0, hparams), hparams, ROUNDS)
    for adjacency, distance in zip(ADJACENCIES, (1, 2), strict=True):
        exact = privacy_loss_distribution.from_laplace_mechanism(Z / distance)
        exact = exact.self_compose(ROUNDS).get_epsilon_for_delta(DELTA)
        found = sim.guarantee(state, DELTA).find(adjacency)
        assert found.epsilon == pytest.approx(exact, rel=1e-6)
        assert (found.accountant, found.status) == ("pld", "upper_bound")
    exact = sim.guarantee(state, DELTA).find("zero_out").epsilon
    assert exact is not None
    assert exact <= float(sim.epsilon(state, DELTA)) < 2.5 * exact
    # As a release of which nothing is known but its ε it would cost more.
    spend = sim.planned(hparams)._replace(event=fjs.privacy.Pure())
    spend = spend._replace(entries=(Entry(Z, 1.0, ROUNDS),))
    pure = fjs.privacy.report([spend], DELTA).find("zero_out").epsilon
    assert pure is not None
    assert exact < pure
    assert event_from(Laplace().to_dict()) == Laplace()


def test_its_renyi_divergence_is_that_of_dp_accounting():
    orders = (1.5, 2.0, 30.0)
    accountant = dp_accounting.rdp.RdpAccountant(orders)
    accountant.compose(dp_accounting.LaplaceDpEvent(Z))
    found = Laplace().rdp(Entry(Z, 1.0, 1), "zero_out", orders, np)
    np.testing.assert_allclose(found, accountant.rdp, rtol=1e-9)


def test_messages_are_bounded_in_the_sum_of_sizes():
    messages = fjs.privacy.Messages({
        "w": np.array([[3.0, -1.0], [0.5, 0.0]], np.float32), "b": np.zeros(2, np.float32)
    })  # fmt: skip

    @jax.jit
    def bounded():
        found = messages.bound(jnp.float32(2.0), jnp.ones(2, bool), ord=1)
        return found.messages.dense()["w"], found.clipped

    rows, clipped = bounded()
    np.testing.assert_allclose(rows, [[1.5, -0.5], [0.5, 0]], rtol=1e-4)
    np.testing.assert_array_equal(clipped, [True, False])
    assert np.sum(np.abs(rows[0])) <= 2
    with pytest.raises(ValueError, match="ord"):
        messages.bound(jnp.float32(2.0), jnp.ones(2, bool), ord=3)
