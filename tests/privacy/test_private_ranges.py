"""Private ranges: what one client can move, what the release costs, and how good it is."""

import dataclasses

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

import fedjaxsim as fjs
from fedjaxsim import data
from fedjaxsim.privacy import private_ranges
from fedjaxsim.privacy.private_ranges import votes

M = 200
"""Enough clients for three columns with z = 2."""
WRONG = [np.nan, np.inf, -np.inf, 1e38, -1e308, 0.0]


def clients(m=M, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(m):
        n, own = int(rng.integers(1, 12)), rng.normal()
        year = rng.integers(1960, 1990, n)
        skewed = np.exp(10 + own + rng.normal(size=n))
        y = 0.01 * (year - 1975) + own + 0.1 * rng.normal(size=n)
        found.append({"x": np.stack([year, skewed], axis=1), "y": y})
    return found


@pytest.fixture(scope="module")
def population():
    return data.Population.from_clients(clients())


@pytest.fixture(scope="module")
def scaled(population):
    return fjs.scale_privately(population, 2.0, target=True, seed=3)


def simulation(population):
    task = fjs.tasks.squared(fjs.models.linear((2,), 1))
    return fjs.Simulation(
        fjs.fedavg(task), population, fjs.full_participation(), fjs.Minibatches(10, epochs=1)
    )


@pytest.mark.parametrize("extreme", WRONG)
def test_a_client_of_extreme_columns_moves_a_release_by_its_sensitivity_at_most(extreme):
    rng, d = np.random.default_rng(0), 5
    first, values = np.array([0, 2, 3, 7]), rng.normal(size=(9, d))
    medians, changed = rng.normal(size=(4, d)), values.copy()
    changed[3:7] = extreme
    other = np.where(np.arange(4)[:, None] == 2, extreme, medians)
    for centre in (None, np.zeros(d)):
        for threshold in (np.full(d, 1e-3), np.full(d, 1e12), rng.normal(size=d)):
            before = votes(medians, values, first)(threshold, centre)
            after = votes(other, changed, first)(threshold, centre)
            assert set(np.unique([before, after])) <= {-1, 1}
            # In units of half a vote: without the client √d, with other rows 2 √d at most.
            np.testing.assert_array_equal(np.delete(before, 2, 0), np.delete(after, 2, 0))
            assert np.linalg.norm(after[2]) == np.sqrt(d)
            assert np.linalg.norm(after.sum(0) - before.sum(0)) <= 2 * np.sqrt(d)


def test_the_noise_of_all_questions_costs_what_the_ledger_is_charged(monkeypatch):
    asked, d, z = [], 400, 0.5
    asker = private_ranges._asker

    def noting(values, counts, noise, key):
        first = np.cumsum(counts) - counts
        answers = votes(np.zeros((len(counts), d)), values, first)
        ask = asker(values, counts, noise, key)

        def noted(threshold, centre):
            released = ask(threshold, centre)
            exact = 0.5 + answers(threshold, centre).sum(axis=0) / (2 * len(counts))
            asked.append((released - exact) * 2 * len(counts) / np.sqrt(d))
            return released

        return noted

    monkeypatch.setattr(private_ranges, "_asker", noting)
    one_row = {"x": np.zeros((2_000, d))}  # all clients know the exact answers
    population = data.Population.from_flat(one_row, np.ones(2_000, int))
    found = fjs.scale_privately(population, z).preparations[0]
    assert (found.clients, found.noise_multiplier) == (2_000, z)
    deviations = np.array([np.sqrt(np.mean(each**2)) for each in asked])
    assert len(deviations) == 25
    # Gaussian releases compose by the sum of 1/z²; each deviation is known to 1/√(2 d).
    assert np.sum(deviations**-2.0) == pytest.approx(z**-2.0, rel=0.05)
    noise = np.concatenate(asked) / np.repeat(deviations, d)
    assert abs(np.mean(noise)) < 4 / np.sqrt(noise.size)
    assert np.abs(np.corrcoef(np.array(asked))[np.triu_indices(25, 1)]).max() < 5 / np.sqrt(d)


def test_ranges_are_a_function_of_what_was_released(population, scaled, monkeypatch):
    asker, released = private_ranges._asker, []

    def recording(*given):
        ask = asker(*given)
        return lambda *question: released.append(ask(*question)) or released[-1]

    def replaying(*_):
        answers = iter(released)
        return lambda *_: next(answers)

    monkeypatch.setattr(private_ranges, "_asker", recording)
    again = fjs.scale_privately(population, 2.0, target=True, seed=3)
    assert again.columns == scaled.columns
    assert again.preparations == scaled.preparations
    monkeypatch.setattr(private_ranges, "_asker", replaying)
    others = data.Population.from_clients(
        [{"x": -1e6 * each["x"], "y": 1e3 * each["y"]} for each in clients(seed=1)]
    )
    found = fjs.scale_privately(others, 2.0, target=True, seed=4)
    for field in ("x", "y"):
        assert found.columns[field].centre == scaled.columns[field].centre
        assert found.columns[field].half_range == scaled.columns[field].half_range
        assert np.abs(found.fields[field]).max() <= 1


def test_a_release_is_known_by_seed_rows_and_settings(population, scaled):
    def digest(of=population, z=2.0, **more):
        (made,) = fjs.scale_privately(of, z, **{"target": True, "seed": 3} | more).preparations
        return made.digest

    other_rows = clients()
    other_rows[7]["y"] = other_rows[7]["y"] + 1e-3
    different = [
        digest(seed=4),
        digest(z=1.5),
        digest(target=False),
        digest(data.Population.from_clients(other_rows)),
    ]
    assert digest() == scaled.preparations[0].digest
    assert len({digest(), *different}) == 5


def exact_epsilon(delta, *noise):
    z = np.sum(np.power(noise, -2.0)) ** -0.5  # Gaussian releases compose to one
    return pld.from_gaussian_mechanism(z).get_epsilon_for_delta(delta)


def epsilon(sim, state, adjacency="zero_out"):
    found = sim.guarantee(state, 1 / (10 * M)).guarantees
    (one,) = [each for each in found if (each.adjacency, each.view) == (adjacency, "joint_dp")]
    assert "adapted to what all 200 clients released with noise" in str(one.assumptions)
    return one.epsilon


def test_guarantees_compose_the_release_with_the_rounds(population, scaled):
    sim, delta = simulation(scaled), 1 / (10 * M)
    hparams = sim.hyperparameters(learning_rate=0.1, clip=1.0, noise_multiplier=5.0)
    start = sim.init(0, hparams)
    assert epsilon(sim, start) == pytest.approx(exact_epsilon(delta, 2.0), rel=1e-3)
    state, _ = sim.run(start, hparams, 3)
    noise = [2.0, 5.0, 5.0, 5.0]
    zero_out, replace = exact_epsilon(delta, *noise), exact_epsilon(delta, *np.divide(noise, 2))
    assert epsilon(sim, state) == pytest.approx(zero_out, rel=1e-3)
    assert epsilon(sim, state, "replace") == pytest.approx(replace, rel=1e-3)

    z = float(sim.calibrate(hparams, epsilon=4.0, rounds=10).noise_multiplier)
    assert exact_epsilon(delta, 2.0, *[z] * 10) == pytest.approx(4, rel=1e-2)
    planned = sim.budget(hparams, epsilon=3.0).planned[1:]
    rounds = sum(entry.rounds for each in planned for entry in each.entries)
    assert exact_epsilon(delta, 2.0, *[5.0] * rounds) <= 3 * (1 + 1e-6)
    assert exact_epsilon(delta, 2.0, *[5.0] * (rounds + 1)) > 3 * (1 - 1e-3)

    # A later stage on the same release does not pay again; on another one it does.
    other = sim.with_population(fjs.scale_privately(population, 2.0, target=True, seed=4))
    twice = exact_epsilon(delta, *noise, 2.0)
    assert epsilon(sim, sim.start_from(state, hparams)) == pytest.approx(zero_out, rel=1e-3)
    assert epsilon(other, other.start_from(state, hparams)) == pytest.approx(twice, rel=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_ranges_cover_nearly_all_values_and_are_not_far_too_wide(seed):
    rng, m = np.random.default_rng(seed), 300
    counts = rng.integers(1, 20, m)
    own, rest = rng.normal(size=(2, m, 6)), rng.normal(size=(counts.sum(), 6))
    x = np.repeat(own[0], counts, axis=0) * rng.uniform(0, 1, 6) + rest
    x[:, 0] = 1975 + np.round(5 * x[:, 0])  # years
    x[:, 1] = np.exp(10 + x[:, 1])
    x[:, 2] = x[:, 2] > 1.5  # mostly 0
    x[:, 3] = 1e-4 * x[:, 3]
    x[:, 4] = 7
    x[:, 5] = -1e7 - 1e5 * np.abs(x[:, 5])
    population = data.Population.from_flat({"x": x}, counts)
    scaled = fjs.scale_privately(population, seed=seed)
    columns = scaled.columns["x"]
    away = np.abs(x - np.array(columns.centre))
    assert np.all(np.mean(away <= np.array(columns.half_range), axis=0) > 0.95)
    spread = np.quantile(away, 0.99, axis=0)
    assert np.all(np.array(columns.half_range)[[0, 1, 3, 5]] <= 8 * spread[[0, 1, 3, 5]])


def test_too_few_clients_and_known_columns(population):
    known = data.scale(population, {"x0": (1960, 1990), "y": (-5, 5)})
    with pytest.raises(ValueError, match=r"1 columns with noise 9 need \d+ clients, got 200: give"):
        fjs.scale_privately(known, 9.0)
    assert fjs.scale_privately(known, 4.0).columns["x"].bound == (1, 1)  # three columns need 216
    with pytest.raises(ValueError, match="3 columns with noise 4 need"):
        fjs.scale_privately(population, 4.0, target=True)
    both = data.scale(known, {"x1": (0, 1e6)})
    assert fjs.scale_privately(both, 50.0) is both
    assert 4 < fjs.scale_privately(known).preparations[0].noise_multiplier < 9
    with pytest.raises(ValueError, match="noise_multiplier must lie in"):
        fjs.scale_privately(population, 0.0)
    held = dataclasses.replace(population, held_out=population.of_clients([0, 1]))
    scaled = fjs.scale_privately(held, 2.0, seed=3)
    assert scaled.held_out is not None
    assert scaled.held_out.columns["x"] == scaled.columns["x"]
