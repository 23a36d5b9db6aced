"""Mechanism and sampling of a run: the effect, cost and errors of each flag."""

import functools
import math

import numpy as np
import pytest
from scipy.stats import norm
from support.refusals import check_refusals

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.cli import main
from fedjaxsim.cli.program import parse
from fedjaxsim.data.npz import save_npz
from fedjaxsim.data.population import Population
from fedjaxsim.data.tables.load import load
from fedjaxsim.privacy.choices import MECHANISMS, SAMPLERS
from fedjaxsim.privacy.entries import ADJACENCIES
from fedjaxsim.privacy.guarantee import report
from fedjaxsim.runs.assemble import population_of, simulation_of
from fedjaxsim.runs.build import hparams_of, prepare
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.parts import part_of
from fedjaxsim.runs.sweep_runs import read_sweep
from fedjaxsim.runs.sweeping import families_of

CLIENTS = 20
SMALL = ["--clients", str(CLIENTS), "--rounds", "2", "--local-steps", "1"]
NEEDS = {
    "fixed": ["--cohort", "5"],
    "groups": ["--groups", "4"],
    "allocation": ["--every", "4"],
    "cyclic": ["--groups", "4", "--sampling-rate", "0.125"],
}


def experiment(*flags):
    command = parse(["run", *flags])
    return prepare(command.settings)


@functools.cache
def digits() -> Population:
    """The data of small runs."""
    return population_of(parse(["run", *SMALL]).settings)


def untraced(*flags):
    """A run on digits, checked but for its functions, which tests of samplers trace."""
    config = parse(["run", *flags]).settings
    return prepare(config, simulation_of(config, digits()))


def epsilons(*flags, small=SMALL) -> list[float]:
    """ε of a whole plan at δ = 10⁻³, for zero-out and for replacement, as its run would have it."""
    found = untraced(*small, "--delta", "1e-3", *flags)
    both = [report([found.planned()], found.delta).find(each).epsilon for each in ADJACENCIES]
    return [epsilon for epsilon in both if epsilon is not None]


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_has_a_flag(name):
    parts = {"per-part": ["--parts", "kernel,bias", "--clip-kernel", "1", "--clip-bias", "0.5"]}
    read = {record.name for record in part_of("mechanism", name).records({})}
    noise = ["--noise-multiplier", "0.1"] if "noise_multiplier" in read else []
    systems = dict.fromkeys(("gaussian-gram", "pure-gram", "wishart"), "mpmtl")
    systems |= {"no-release": "local", "every-row": "naive-dp"}
    system = systems.get(name, "pmtl")
    small = SMALL[:-2] if SYSTEMS[system].whole_pass else SMALL
    turns = {"correlated": ["full"], "banded": ["groups", "--groups", "8"]}
    sampling = ["--sampling", *turns[name]] if name in turns else []
    flags = ["--mechanism", name, *noise, "--algorithm", system, *sampling, *parts.get(name, [])]
    config = parse(["run", *small, *flags]).settings
    # Its functions are traced by the tests of each mechanism.
    simulation = simulation_of(config, digits())
    hparams = hparams_of(config, simulation)
    gaussian = "gaussian", "adaptive", "every-row", "gaussian-gram", "per-layer", "per-part"
    kinds = dict.fromkeys(gaussian, "gaussian")
    kinds |= {"pure": "pure", "pure-gram": "pure", "no-release": "no_release"}
    kinds |= {"correlated": "correlated", "banded": "banded"}
    assert simulation.mechanism.event.kind == kinds.get(name, "no_known_cost")
    assert hparams.get("noise_multiplier", 0.0) == (0.1 if noise else 0.0)
    clip = "clip_bias" if name == "per-part" else "clip"
    assert np.all(np.isfinite(hparams.get(clip, math.inf))) == bool(noise)
    # A twentieth of the cohort of 10 that is expected.
    count_noise = pytest.approx(0.5) if name == "adaptive" else None
    assert hparams.get("count_noise") == count_noise


RATES = zip(SAMPLERS, (0.3, 1.0, 0.25, 0.25, 0.125, 0.25), strict=True)


@pytest.mark.parametrize(("name", "rate"), list(RATES))
def test_every_sampler_has_a_flag(name, rate):
    given = ["--sampling-rate", "0.3"] if name == "poisson" else NEEDS.get(name, [])
    found = untraced(*SMALL, "--sampling", name, *given, "--epsilon", "2")
    assert found.simulation.sampler.rate(found.hparams) == rate
    scheme = found.simulation.sampler.scheme
    assert scheme.kind == name
    assert found.noise_multiplier > 0


def test_a_pure_release_costs_one_over_z():
    # One round with full participation: ε = 1/z, and 2/z for replacement; δ takes its part of the
    # probability (1 + e^−ε)^−1 of the high loss.
    once = ["--clients", str(CLIENTS), "--rounds", "1", "--local-steps", "1"]
    plan = "--mechanism pure --noise-multiplier 4 --sampling full"
    expected = [cost + math.log1p(-1e-3 * (1 + math.exp(-cost))) for cost in (1 / 4, 2 / 4)]
    assert epsilons(*plan.split(), small=once) == pytest.approx(expected, rel=1e-6)


def test_in_two_groups_every_client_is_in_one_of_two_releases():
    # The Gaussian mechanism of sensitivity 1 at z.
    plan = "--sampling groups --groups 2 --noise-multiplier 2"
    epsilon, z = epsilons(*plan.split())[0], 2.0
    spent = norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * norm.cdf(-0.5 / z - epsilon * z)
    assert spent == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.thorough
def test_a_mechanism_without_a_guarantee_has_no_epsilon(tmp_path, capsys):
    flags = ["--mechanism", "client-noise", "--noise-multiplier", "1", "--out", str(tmp_path / "r")]
    assert main(["run", *SMALL, *flags, "--quiet"]) == 0
    assert RunDirectory(tmp_path / "r").summary()["epsilon"] is None
    assert "no guarantee is known for this mechanism" in capsys.readouterr().out


def test_what_is_aimed_at_is_what_the_accountant_reports():
    zero_out, replace = epsilons("--epsilon", "2")
    assert 1.99 < zero_out <= 2 < replace


@pytest.mark.thorough
def test_clients_weigh_by_their_rows():
    """One full round without noise: w is the mean of the clients' models, by numbers of rows."""
    found = experiment(*SMALL, "--algorithm", "fedavg", "--sampling", "full", "--weights", "rows")
    sim, hparams, rows = found.simulation, found.hparams, found.simulation.population.counts[:, 0]
    alone = experiment(*SMALL, "--algorithm", "local", "--sampling", "full")
    state, _ = sim.round(found.init(), hparams)
    models, _ = alone.simulation.round(alone.init(), alone.hparams)
    assert len({*rows.tolist()}) > 3
    np.testing.assert_allclose(
        state.shared.params["kernel"],
        np.average(models.personal["kernel"], axis=0, weights=rows),
        rtol=1e-4,
        atol=1e-6,
    )


def test_seeds_may_share_their_data_and_weights_by_rows_follow_the_data(tmp_path):
    def rows(*flags):
        return population_of(parse(["run", *SMALL, *flags]).settings).fields["x"]

    first = rows("--seed", "1", "--partition-seed", "7")
    np.testing.assert_array_equal(first, rows("--seed", "2", "--partition-seed", "7"))
    np.testing.assert_array_equal(first, rows("--seed", "7"))
    assert not np.array_equal(first, rows("--seed", "1"))
    sweep = "clients = 20\nrounds = 2\nweights = 'rows'\n{}[[sweep]]\nseed = [0, 1]\n"
    for extra, count in (("", 2), ("partition-seed = 0\n", 1)):
        (tmp_path / "a.toml").write_text(sweep.format(extra))
        assert len(families_of(read_sweep(tmp_path / "a.toml"))) == count


def test_a_bound_on_rows_is_declared_in_the_shell_and_named_and_holds_for_each_client():
    def population(*flags):
        # A fifth of a client's rows is for testing: its training rows are the most.
        return population_of(parse(["run", *SMALL, *flags]).settings)

    most = int(population().counts.max())
    declared = population("--max-rows", str(most))
    assert [declared.bound(name) for name in ("train", "test")] == [most] * 2
    kept = population("--max-rows", str(most), "--held-out-clients", "0.5")
    assert kept.max_rows == most
    with pytest.raises(ValueError, match=f"has {most} rows in a split, more than max_rows = "):
        population("--max-rows", str(most - 1))


def test_a_bound_on_rows_of_data_with_one_holds_for_the_splits_of_the_run(tmp_path):
    fields = {"x": np.arange(30.0)[:, None], "y": np.arange(30) % 2}
    save_npz(tmp_path / "a.npz", Population.from_flat(fields, [[5, 5, 5]] * 2, max_rows=9))
    assert load(f"npz:{tmp_path / 'a.npz'}").max_rows == 9
    assert load(f"npz:{tmp_path / 'a.npz'}", test=0.4).counts.max() == 9
    with pytest.raises(ValueError, match="has 12 rows in a split, more than max_rows = 9"):
        load(f"npz:{tmp_path / 'a.npz'}", test=0.2)
    assert load(f"npz:{tmp_path / 'a.npz'}", test=0.2, max_rows=12).max_rows == 12


def test_they_may_be_swept(tmp_path):
    (tmp_path / "a.toml").write_text(
        "noise-multiplier = 1\ncohort = 5\n[[sweep]]\nmechanism = ['gaussian', 'pure']\n"
        "[[sweep]]\nmechanism = 'adaptive'\ntarget-quantile = [0.3, 0.5]\nsampling = 'fixed'\n"
    )
    plan = read_sweep(tmp_path / "a.toml")
    assert [run.mechanism for run in plan.runs] == ["gaussian", "pure", "adaptive", "adaptive"]
    assert plan.families() == [[(0,)], [(1,)], [(2, 3)]]


def test_what_is_unsound_is_refused():
    check_refusals(
        lambda flags: experiment(*SMALL, *flags.split()),
        {
            "--mechanism no-release": "no-release would lose: use gaussian$",
            "--algorithm local --mechanism gaussian": "so it takes no-release",
            "--mechanism adaptive --noise-multiplier 1 --count-noise 0.4": "count-noise",
            "--target-quantile 1 --mechanism adaptive": "target-quantile",
            "--sampling fixed --cohort 21": "cohort",
        },
    )
