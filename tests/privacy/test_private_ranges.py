"""Private ranges: what one client can move, what the release costs, and how good it is."""

import dataclasses
import functools
import json
import math
import re

import jax
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from support.problems import after, untrained

import fedjaxsim as fjs
from fedjaxsim import data
from fedjaxsim.cli import main
from fedjaxsim.data.aligned import with_test_rows
from fedjaxsim.privacy import private_ranges, scale_privately
from fedjaxsim.privacy.private_ranges import answers

M = 200
"""Enough clients for three columns at z = 2."""
WRONG = [np.nan, np.inf, -np.inf, 1e38, -1e308, 0.0]


def clients(m=M, seed=0):
    """Clients with a narrow column far from 0, a skewed one, and a target."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(m):
        n, level = int(rng.integers(1, 12)), rng.normal()
        year, skewed = rng.integers(1960, 1990, n), np.exp(10 + level + rng.normal(size=n))
        y = 0.01 * (year - 1975) + level + 0.1 * rng.normal(size=n)
        rows.append({"x": np.stack([year, skewed], axis=1), "y": y})
    return rows


@functools.cache
def scaled():
    return scale_privately(data.Population.from_clients(clients()), 2.0, target=True, seed=3)


@functools.cache
def simulation():
    task = fjs.tasks.squared(fjs.models.linear((2,), 1))
    minibatches = fjs.Minibatches(10, epochs=1)
    return fjs.Simulation(untrained(task), scaled(), fjs.full_participation(), minibatches)


@pytest.mark.parametrize("extreme", WRONG)
def test_a_client_of_extreme_columns_moves_a_sum_by_its_sensitivity_at_most(extreme):
    rng, d = np.random.default_rng(0), 5
    first, values = np.array([0, 2, 3, 7]), rng.normal(size=(9, d))
    medians, changed = rng.normal(size=(4, d)), values.copy()
    changed[3:7] = extreme
    other = np.where(np.arange(4)[:, None] == 2, extreme, medians)
    for centre in (None, np.zeros(d)):
        for threshold in (np.full(d, 1e-3), np.full(d, 1e12), rng.normal(size=d)):
            before = answers(medians, values, first, threshold, centre)
            after = answers(other, changed, first, threshold, centre)
            np.testing.assert_array_equal(np.delete(before, 2, 0), np.delete(after, 2, 0))
            # Without the client √d/2, with other rows √d at most, in each of the questions.
            assert np.linalg.norm(after[2]) == pytest.approx(math.sqrt(d) / 2, abs=1e-12)
            assert np.linalg.norm(after.sum(0) - before.sum(0)) <= math.sqrt(d)


def test_the_noise_of_all_questions_costs_what_the_ledger_is_charged(monkeypatch):
    errors: list[np.ndarray] = []
    d, z, m = 400, 0.5, 2_000
    asker = private_ranges._asker

    def noting(values, counts, *others):
        ask, first = asker(values, counts, *others), np.cumsum(counts) - counts

        def noted(threshold, centre):
            share = ask(threshold, centre)
            exact = answers(values, values, first, threshold, centre).mean(axis=0)
            # Of a sum, in units of the norm of a client's answer.
            errors.append((share - 0.5 - exact) * m / (math.sqrt(d) / 2))
            return share

        return noted

    monkeypatch.setattr(private_ranges, "_asker", noting)
    one_row = {"x": np.zeros((m, d))}
    population = scale_privately(data.Population.from_flat(one_row, np.ones(m, int)), z)
    assert population.preparations[0][1:] == (m, z)
    deviations = np.array([np.sqrt(np.mean(error**2)) for error in errors])
    assert len(deviations) == 25
    # Gaussian releases compose by the sum of 1/z²; each deviation is known to 1/√(2 d).
    assert np.sum(deviations**-2.0) == pytest.approx(z**-2.0, rel=0.05)
    noise = np.stack(errors) / np.reshape(deviations, (-1, 1))
    assert abs(np.mean(noise)) < 4 / math.sqrt(noise.size)
    assert np.abs(np.asarray(np.corrcoef(noise))[np.triu_indices(25, 1)]).max() < 5 / math.sqrt(d)


def test_other_rows_numbers_of_rows_questions_and_seeds_have_other_noise():
    values, counts = np.zeros((3, 2)), np.array([1, 2])
    first = 0, values, counts, "asked"
    others = [
        (1, values, counts, "asked"),
        (0, values + 1, counts, "asked"),
        (0, values, np.array([2, 1]), "asked"),
        (0, values, counts, "asked otherwise"),
    ]

    def words(request):
        return tuple(jax.random.key_data(private_ranges._key(*request)).tolist())

    assert len({words(request) for request in (first, *others)}) == 5
    assert words(first) == words((0, values.copy(), counts.copy(), "asked"))


def test_ranges_are_a_function_of_what_was_released(monkeypatch):
    asker, released = private_ranges._asker, []

    def recording(*given):
        ask = asker(*given)
        return lambda *question: released.append(ask(*question)) or released[-1]

    def replaying(*_):
        shares = iter(released)
        return lambda *_: next(shares)

    monkeypatch.setattr(private_ranges, "_asker", recording)
    again = scale_privately(data.Population.from_clients(clients()), 2.0, target=True, seed=3)
    assert again.columns == scaled().columns
    assert again.preparations == scaled().preparations
    monkeypatch.setattr(private_ranges, "_asker", replaying)
    others = [{"x": -1e6 * each["x"], "y": 1e3 * each["y"]} for each in clients(seed=1)]
    replayed = scale_privately(data.Population.from_clients(others), 2.0, target=True, seed=4)
    for field in ("x", "y"):
        assert replayed.columns[field].centre == scaled().columns[field].centre
        assert replayed.columns[field].half_range == scaled().columns[field].half_range
        assert np.abs(replayed.fields[field]).max() <= 1
    assert replayed.preparations != scaled().preparations


def test_ranges_cover_nearly_all_rows_and_a_narrow_column_gets_a_narrow_range():
    for field in ("x", "y"):
        assert np.mean(np.abs(scaled().fields[field]) < 1) > 0.95
    (year, _), (spread, _) = (getattr(scaled().columns["x"], n) for n in ("centre", "half_range"))
    assert 1965 < year < 1985
    assert spread <= 64
    # A share errs by 4 √((19/9 + 6)·3)/(2 m), at most 0.03: 19 questions have 3 times the noise.
    with pytest.raises(ValueError, match="need 329 clients, got 200"):
        scale_privately(data.Population.from_clients(clients()), 4.0, target=True)


def test_every_epsilon_of_a_run_has_the_ranges_in_it(tmp_path):
    sim, z, rounds = simulation(), 5.0, 4
    hparams = sim.hyperparameters(clip=1.0, noise_multiplier=z)
    state = after(sim, hparams, rounds)
    report = sim.guarantee(state)
    # Gaussian releases with 1/z² in all, by dp_accounting.
    of_all = (rounds / z**2 + 1 / 2.0**2) ** -0.5
    gaussian = privacy_loss_distribution.from_gaussian_mechanism(of_all)
    wanted = gaussian.get_epsilon_for_delta(1 / (10 * M))
    assert report.find("zero_out").epsilon == pytest.approx(wanted, rel=1e-3)
    assert any("released with noise before round 1" in s for s in report.guarantees[0].assumptions)
    calibrated = sim.calibrate(hparams, epsilon=wanted, rounds=rounds)
    assert float(calibrated.noise_multiplier) == pytest.approx(z, rel=2e-3)
    with pytest.raises(ValueError, match=r"before round 1 spend ε 1\.\d+ of epsilon 1"):
        sim.calibrate(hparams, epsilon=1.0, rounds=rounds)
    budget = sim.budget(hparams, epsilon=wanted * 1.001)
    limited = sim.with_budget(sim.init(1, hparams), budget)
    for _ in range(rounds + 1):
        limited, _ = sim.round(limited, hparams)
    assert int(limited.round) == rounds
    # Stages are charged for a release once, other data for theirs, and files keep it.
    begun = sim.start_from(state, hparams)
    step, rows = sim.program.step, sim.rows["train"]
    again, _ = jax.eval_shape(step, begun, hparams.as_arrays(), rows)
    kinds = [charges.event.kind for charges in again.privacy.charges]
    assert kinds.count("prepared") == 1
    data.save_npz(tmp_path / "scaled.npz", scaled())
    assert data.load_npz(tmp_path / "scaled.npz").preparations == scaled().preparations
    assert with_test_rows(scaled(), scaled()).preparations == scaled().preparations
    # Nobody takes the charge off by hand: the columns have it.
    bare = dataclasses.replace(scaled(), preparations=())
    assert sim.with_population(bare).prepared == sim.prepared != ()
    data.save_npz(tmp_path / "bare.npz", bare)
    assert data.load_npz(tmp_path / "bare.npz").preparations == scaled().preparations
    raw = sim.with_population(data.scale(data.Population.from_clients(clients()), {"x0": (0, 1e4)}))
    assert raw.prepared == ()
    lost = raw.guarantee(raw.init(0, hparams)).find("zero_out").epsilon
    assert lost == 0


@pytest.mark.thorough
def test_a_target_epsilon_holds_on_the_command_line(tmp_path, capsys):
    lines = ["who,year,pay,y"]
    for k, each in enumerate(clients(300)):
        rows = zip(each["x"].tolist(), each["y"].tolist(), strict=True)
        lines += [f"{k},{year},{pay},{y}" for (year, pay), y in rows]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    flags = ["--data", f"csv:{tmp_path}/a.csv", "--client", "who", "--target", "y"]
    flags += ["--loss", "squared", "--sampling", "full", "--rounds", "5", "--epsilon", "4"]
    flags += ["--algorithm", "fedavg", "--out", str(tmp_path / "run")]
    assert main(["run", *flags, "--scale", "private", "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"private ranges cost ε 0\.\d+: year \d+ to \d+, pay ", printed)
    report = json.loads((tmp_path / "run" / "guarantee.json").read_text())
    [zero_out] = report["zero_out"]["joint_dp"].values()
    assert 3.99 < zero_out["epsilon"] <= 4
    assert main(["run", *flags[:-1], str(tmp_path / "b"), "--scale-noise", "1"]) == 2
    assert "scale-noise has no effect without scale private" in capsys.readouterr().err
