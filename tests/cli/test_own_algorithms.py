"""Algorithms of a user from the command line: runs, sweeps, tunings and derivatives."""

import json

import jax
import numpy as np
import pytest

from fedjaxsim.cli import main
from fedjaxsim.cli.program import parse
from fedjaxsim.gradients import hypergradient, mean_metric
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.settings import RunConfig, run_config
from fedjaxsim.runs.settings_files import read_toml
from fedjaxsim.runs.sweep_runs import read_sweep

SMALL = {"clients": 8, "rounds": 4, "eval_every": 2, "local_steps": 2, "sampling_rate": 1.0}
PFEDME = {"algorithm": "mine:pfedme", "inner_steps": 2, "inner_learning_rate": 0.2, "lam": 3.0}
APFL = {"algorithm": "mine:apfl", "initial_mixing": 0.25, "mixing_learning_rate": 0.5}
pytestmark = pytest.mark.usefixtures("mine")


def flags(*tables) -> list[str]:
    """Settings as flags."""
    return [
        word
        for table in tables
        for name, value in table.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def toml(*tables) -> str:
    """Settings as the lines of a file."""
    return "".join(f"{name} = {json.dumps(value)}\n" for t in tables for name, value in t.items())


def settings_of(*arguments: str) -> RunConfig:
    command = parse(["run", *arguments])
    return command.settings


@pytest.mark.parametrize("own", [PFEDME, APFL], ids=["pfedme", "apfl"])
def test_flags_a_file_and_python_are_one_run(own, mine):
    (mine / "run.toml").write_text(toml(SMALL, own))
    expected = run_config(**SMALL, **own)
    assert settings_of(*flags(SMALL, own)) == settings_of("run.toml") == expected
    experiment = prepare(expected)
    hparams, written = experiment.hparams, experiment.resolved()
    assert {name: hparams.get(name, value) for name, value in own.items()} == own
    assert {name: written[name] for name in own} == own  # in config.toml of the run
    changed = {name: 2 * value for name, value in own.items() if name != "algorithm"}
    assert settings_of("run.toml", *flags(changed)) == expected.replace(**changed)


@pytest.mark.thorough
def test_a_sweep_takes_settings_and_hyperparameters_of_ones_own(mine):
    own = {"algorithm": "mine:pfedme", "lam": 3.0}
    swept = "inner-steps = [1, 2]\ninner-learning-rate = [0.05, 0.2]\n"
    (mine / "sweep.toml").write_text(f"{toml(SMALL, own)}trust-own-code = true\n[sweep]\n{swept}")
    plan = read_sweep(mine / "sweep.toml")
    # A setting is another program, a hyperparameter is not.
    assert plan.families() == [[(0, 1)], [(2, 3)]]
    assert main(["sweep", "sweep.toml", "--quiet", "--out", "swept"]) == 0
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(mine / "swept" / "results.parquet").to_pylist()
    last = [row for row in rows if row["round"] == 4]
    found = [(row["inner_steps"], row["inner_learning_rate"]) for row in last]
    assert found == [(each, rate) for each in (1, 2) for rate in (0.05, 0.2)]
    assert len({row["test_loss"] for row in last}) == len(last)


@pytest.mark.thorough
def test_tune_takes_a_hyperparameter_of_ones_own(mine):
    small = ["--seeds", "2", "--steps", "3", "--quiet", "--out", "tuned"]
    start = PFEDME | {"inner_learning_rate": 0.02}
    command = ["tune", *flags(SMALL, start), "--wrt", "inner-learning-rate", *small]
    assert main(command) == 0
    path = json.loads((mine / "tuned" / "path.json").read_text())
    assert path["steps"][0]["point"] == {"inner_learning_rate": 0.02}
    best = path["steps"][path["best"]]
    assert best["value"] < path["steps"][0]["value"]
    tuned = read_toml(mine / "tuned" / "tuned.toml")
    assert tuned.get("inner_learning_rate") == best["point"]["inner_learning_rate"]
    assert (tuned.algorithm, tuned.get("inner_steps")) == ("mine:pfedme", 2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("own", "wrt"),
    [
        (PFEDME, ("inner_learning_rate", "learning_rate", "lam")),
        (APFL, ("initial_mixing", "mixing_learning_rate", "learning_rate")),
    ],
    ids=["pfedme", "apfl"],
)
def test_a_run_is_differentiated_in_hyperparameters_of_ones_own(own, wrt):
    with jax.enable_x64():
        experiment = prepare(run_config(**SMALL, **own))
        simulation, hparams = experiment.simulation, experiment.hparams
        objective = mean_metric(simulation, "loss", "test")
        measure = hypergradient(simulation, objective, 3, wrt)
        key = jax.random.key(3)
        _, gradient = measure(key, hparams)
        for name in wrt:
            value = float(np.asarray(hparams.get(name)))
            ends = [
                measure(key, hparams.replace(**{name: value + step}))[0] for step in (1e-4, -1e-4)
            ]
            slope = float(ends[0] - ends[1]) / 2e-4
            assert abs(slope) > 1e-6
            np.testing.assert_allclose(gradient[name], slope, rtol=1e-4)


@pytest.mark.thorough
def test_every_client_learns_a_mixing_weight_of_its_own():
    experiment = prepare(run_config(**SMALL, **APFL))
    simulation, hparams = experiment.simulation, experiment.hparams
    state = simulation.init(0, hparams)
    np.testing.assert_array_equal(state.personal["alpha"], np.full(8, 0.25, np.float32))
    state, _ = simulation.run(state, hparams, 4)
    alphas = np.asarray(state.personal["alpha"])
    assert len({*alphas.tolist()}) == 8
    assert ((alphas > 0) & (alphas < 1) & (alphas != 0.25)).all()


@pytest.mark.thorough
@pytest.mark.parametrize(("mixing", "other"), [(0.0, "fedavg"), (1.0, "local")])
def test_a_fixed_mixing_weight_of_zero_is_fedavg_and_of_one_local(mixing, other):
    fixed = {"algorithm": "mine:apfl", "initial_mixing": mixing, "mixing_learning_rate": 0.0}
    sampled = {k: v for k, v in SMALL.items() if k != "sampling_rate"}
    everyone = sampled | {"sampling": "full"}
    losses = []
    for settings in (fixed, {"algorithm": other}):
        experiment = prepare(run_config(**everyone, **settings))
        simulation, hparams = experiment.simulation, experiment.hparams
        state, _ = simulation.run(simulation.init(0, hparams), hparams, 3)
        losses.append(simulation.evaluate(state, hparams).values["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
