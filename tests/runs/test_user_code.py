"""A user's algorithms and models, named on the command line, in files and in sweeps."""

import dataclasses
import json
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import PoissonRegressor

from fedjaxsim.cli import main
from fedjaxsim.cli.flags import Command
from fedjaxsim.cli.program import COMMANDS
from fedjaxsim.factories import Options, settings_of
from fedjaxsim.runs import build, sweeping
from fedjaxsim.runs.build import check_user_code, prepare
from fedjaxsim.runs.parts import Part, check_takes
from fedjaxsim.runs.settings import COMMAND_FLAGS, readers, run_config, static_keys
from fedjaxsim.runs.settings_files import read_toml
from fedjaxsim.runs.sweep_files import SweepOptions
from fedjaxsim.runs.sweep_runs import column_of, expand_sweep, read_sweep

CODE = """
import fedjaxsim as fjs; import jax; from fedjaxsim.hyperparameters import declared_by
@fjs.reads(*declared_by(fjs.fedprox))
def algorithm(task):
    return fjs.fedprox(task)

def model(shape, outputs):
    return fjs.models.mlp(shape, outputs, (3,))

def two(task, other):
    return fjs.fedprox(task)

def seven(task):
    return 7

def of_client(task, *, client: str = "a"):
    return fjs.fedprox(task)

def broken(task):
    return {}["key"]

number = 3

def typo(task):
    def client(w, v, data, hparams, context):
        def step(w, batch):
            return jax.grad(tsk.loss)(w, batch)
        return v, data.fold(step, w), {}
    return fjs.fedprox(task)._replace(client=client)

def misused(task):
    def predict(w, v, hparams, client_id):
        return jax.grad(task.loss)(w, 3)
    return fjs.fedprox(task)._replace(predict=predict)

def asserts(task):
    def init(key, hparams):
        assert task is None
    return fjs.fedprox(task)._replace(init=init)

def serves(task):
    def server(w, release, hparams, round_):
        return release.x
    return fjs.fedprox(task)._replace(server=server)

def factory_of_ours(task):
    return fjs.pmtl(task, message="other")

@fjs.reads(*declared_by(fjs.fedprox), fjs.Hyperparameter("nu", 0.5, scale="log"))
def mine(task, *, kind: "Literal['one', 'two']" = "one", deep: bool = False, other: "Type" = None):
    assert (kind, deep, other) == ("two", True, None)
    return fjs.fedprox(task)

from fedjaxsim.privacy.mechanisms import CLIP_NORM, NOISE_MULTIPLIER
class Noise(fjs.privacy.Gaussian):
    "An event of my own, which costs what Gaussian noise does."

@fjs.reads(CLIP_NORM, NOISE_MULTIPLIER)
def noise():
    return fjs.gaussian()._replace(event=Noise())

def undeclared():
    return fjs.gaussian()._replace(event=Noise())

from typing import TYPE_CHECKING, Literal
if TYPE_CHECKING:
    from absent import Type

@fjs.reads(*declared_by(fjs.fedprox))
def nothing(task):
    fjs.fedprox(task)

def module(shape, outputs):
    from flax import linen
    return linen.Dense(outputs)

def seeded(shape, outputs, *, seeds: int = 3):
    return fjs.models.mlp(shape, outputs, (seeds,))

def narrow(shape, outputs, *, hidden: int = 3):
    return fjs.models.mlp(shape, outputs, (hidden,))

def poisson(model, outputs: int, *, offset: float = 0.0):
    def losses(params, batch):
        log_rate = model.apply(params, batch.fields["x"])[:, 0] + offset
        return jax.numpy.exp(log_rate) - batch.fields["y"] * log_rate
    return fjs.tasks.Task(
        model.init,
        lambda params, batch: batch.mean(losses(params, batch)),
        lambda params, batch: {"likelihood": losses(params, batch)},
    )
"""
OWN: Any = {"algorithm": "mycode:algorithm", "model": "mycode:model"}


NAMES = "mycode", "mine"
"""Modules of the tests."""


@pytest.fixture(autouse=True)
def mycode(tmp_path, monkeypatch):
    for name in NAMES:
        sys.modules.pop(name, None)  # another test's
    (tmp_path / "mycode.py").write_text(CODE)
    (tmp_path / "halfway.py").write_text("import absent_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


def test_a_run_takes_an_algorithm_and_a_model_of_ones_own():
    experiment = prepare(run_config(clients=6, rounds=1, mu=0.3, **OWN))
    simulation = experiment.simulation
    assert experiment.hparams.mu == 0.3
    with pytest.raises(ValueError, match="hidden"):
        run_config(hidden=(5,), **OWN)
    assert run_config(model="mycode:narrow", hidden=5).get("hidden") == 5  # a setting of its own
    loss = run_config(loss="mycode:poisson", offset=0.5)  # whose annotated outputs are given
    assert (loss.offset, loss.outputs) == (0.5, None)
    params = jax.eval_shape(simulation.task.init, jax.random.key(0))
    shapes = {name: leaf["kernel"].shape for name, leaf in params.items()}
    assert shapes == {"Dense_0": (64, 3), "Dense_1": (3, 10)}
    assert "fedprox" in repr(simulation.algorithm.client)


def test_a_hyperparameter_named_as_a_column_of_results_has_its_own_column():
    assert column_of("round") == "setting_round"
    assert column_of("test_loss") == "setting_test_loss"
    assert [column_of(name) for name in ("test_fraction", "lam")] == ["test_fraction", "lam"]
    ours = {*readers(), *static_keys()}
    assert all(column_of(name) in (name, f"target_{name}") for name in ours)


def test_a_setting_named_as_a_flag_of_commands_is_refused():
    with pytest.raises(ValueError, match="'seeds' is a flag of commands"):
        run_config(model="mycode:seeded", seeds=3)
    flags = {*settings_of(SweepOptions)}
    for command in (Command.find(name, path) for name, path in COMMANDS.items()):
        if command.takes:
            flags |= command.flags.keys()
    assert flags <= COMMAND_FLAGS | static_keys().keys()


def test_a_setting_of_two_parts_is_refused_and_names_both():
    both = "algorithm mycode:of_client and data csv have settings of one name, 'client'"
    with pytest.raises(ValueError, match=f"{both}: rename yours"):
        run_config(algorithm="mycode:of_client", data="csv:rows.csv", client="who")


def test_a_file_named_as_another_module_is_refused():
    Path("statistics.py").write_text("def mean(shape, outputs): pass\n")  # Python has one, too
    with pytest.raises(ValueError, match=r"another module 'statistics': rename statistics\.py"):
        run_config(model="statistics.py:mean")


def test_a_mechanism_of_ones_own_has_a_target_epsilon_as_ours():
    assert run_config(mechanism="mycode:noise", epsilon=2.0).epsilon == 2.0
    with pytest.raises(ValueError, match="declare it by @fjs"):
        run_config(mechanism="mycode:undeclared", epsilon=2.0)


@pytest.mark.thorough
def test_its_noise_is_calibrated_by_its_own_event():
    settings = {"clients": 6, "rounds": 3, "algorithm": "fedavg", "epsilon": 2.0}
    noises = [
        prepare(run_config(mechanism=name, **settings)).noise_multiplier
        for name in ("gaussian", "mycode:noise")
    ]
    assert noises[0] == pytest.approx(noises[1], rel=1e-6)


@pytest.mark.thorough
def test_a_loss_of_ones_own_is_fitted_as_scikit_learn_fits_it():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (80, 2))
    visits = rng.poisson(np.exp(0.5 + x @ [1.0, -0.5]))  # integers, which are no classes here
    frame = pd.DataFrame({"who": np.arange(80) % 2, "a": x[:, 0], "b": x[:, 1], "visits": visits})
    frame = frame.assign(split=np.where(np.arange(80) < 60, "train", "test"))
    frame.to_csv("visits.csv", index=False)
    table = {"data": "csv:visits.csv", "client": "who", "target": "visits", "split": "split"}
    table |= {"loss": "mycode:poisson", "offset": 0.25, "algorithm": "fedavg"}
    descent = {"sampling": "full", "batch_size": 30, "learning_rate": 0.3, "rounds": 300}
    experiment = prepare(run_config(**table, **descent))
    check_user_code(experiment)
    simulation, hparams = experiment.simulation, experiment.hparams
    state, _ = simulation.run(simulation.init(0, hparams), hparams, 300)
    fitted = PoissonRegressor(alpha=0, tol=1e-8).fit(x[:60], visits[:60])
    np.testing.assert_allclose(state.shared.params["kernel"][0], fitted.coef_, atol=1e-3)
    assert state.shared.params["bias"][0] + 0.25 == pytest.approx(fitted.intercept_, abs=1e-3)
    assert set(simulation.evaluate(state, hparams).values) >= {"likelihood"}
    with pytest.raises(ValueError, match=r"loss mycode:seven must take \(model, outputs\)"):
        prepare(
            run_config(
                **{n: v for n, v in table.items() if n != "offset"} | {"loss": "mycode:seven"}
            )
        )
    with pytest.raises(ValueError, match="loss must be softmax, "):
        run_config(loss="poison")


def test_files_and_sweeps_name_them_too(tmp_path):
    (tmp_path / "run.toml").write_text("algorithm = 'mycode:algorithm'\nmodel = 'mycode:model'\n")
    assert read_toml(tmp_path / "run.toml").given() == OWN
    (tmp_path / "sweep.toml").write_text(
        "[sweep]\nalgorithm = ['fedavg', 'mycode:algorithm']\nmu = [1, 2]\n"
    )
    runs = read_sweep(tmp_path / "sweep.toml").runs
    assert [(run.algorithm, run.get("mu")) for run in runs] == [
        ("fedavg", None), ("mycode:algorithm", 1.0), ("mycode:algorithm", 2.0),
    ]  # fmt: skip


def test_what_ones_own_code_takes_is_set_swept_and_checked(tmp_path):
    settings = {"algorithm": "mycode:mine", "kind": "two", "deep": True, "clients": 6}
    experiment = prepare(run_config(**settings, nu=2.0))
    assert (experiment.hparams.nu, experiment.hparams.mu) == (2.0, 0.1)
    (tmp_path / "sweep.toml").write_text(
        "[sweep]\nalgorithm = ['mycode:mine', 'pmtl']\nkind = ['one', 'two']\nnu = [1, 3]\n"
    )
    plan = read_sweep(tmp_path / "sweep.toml")
    assert [(plan.swept[run]["kind"], plan.swept[run]["nu"]) for run in range(5)] == [
        ("one", 1.0), ("one", 3.0), ("two", 1.0), ("two", 3.0), (None, None),
    ]  # fmt: skip
    assert plan.families() == [[(0, 1)], [(2, 3)], [(4,)]]
    (tmp_path / "run.toml").write_text("algorithm = 'mycode:mine'\nkind = 'three'\n")
    with pytest.raises(ValueError, match="kind"):
        read_toml(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--algorithm fedsgd", "algorithm .*MODULE:FACTORY.*'fedsgd'"),
        (
            "--model mycode:",
            "model .*MODULE:FACTORY",
        ),
        ("--algorithm absent_module:x", "absent_module:x: .*'absent_module'"),
        ("--algorithm halfway:x", "halfway.py:1: ModuleNotFoundError"),
        ("--algorithm mycode:algoritm", "mycode .*'algoritm'.*'algorithm'"),
        ("--algorithm mycode:number", "mycode:number .*int"),
        ("--algorithm mycode:two", r"\(task\).*\(task, other\)"),
        ("--algorithm mycode.py:two", r"\(task\).*\(task, other\)"),
        ("--algorithm ../mycode.py:two", "the file must be in or below"),
        ("--algorithm mycode:nothing", r"nothing returns None: does it lack a `return`\?"),
        (
            "--model mycode:module",
            "must return a Model.*got a Dense.*from_flax",
        ),
        ("--algorithm mycode:seven", "mycode:seven .*Algorithm.*int"),
        ("--algorithm mycode:broken", "mycode.py:20: KeyError: 'key'"),
        (
            "--algorithm mycode:factory_of_ours",
            "mycode:factory_of_ours .*mycode.py:47: SettingError",
        ),
        (
            "--algorithm mycode:typo",
            r"error: your code fails at /.*/mycode.py:27: NameError: name 'tsk' is not defined; "
            "JAX_TRACEBACK_FILTERING=off shows the whole traceback$",
        ),
        ("--algorithm mycode:misused", "your code fails at .*/mycode.py:33: AttributeError: 'int'"),
        ("--algorithm mycode:asserts", "your code fails at .*/mycode.py:38: AssertionError; JAX"),
        ("--algorithm mycode:serves", "mycode.py:43: AttributeError: 'dict' object .*; JAX_TRACE"),
        ("--model mycode:algorithm", r"\(shape, outputs\).*\(task\)"),
        (
            "--algorithm mycode:algorithm --averaged",
            "averaged .*mycode:algorithm.*ppsgd",
        ),
    ],
)
def test_what_is_wrong_with_them_is_one_line(flags, message, tmp_path, capsys):
    assert main(["run", "--clients", "6", *flags.split(), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists()


def test_a_reader_of_ones_own_may_take_a_record_of_settings():
    @dataclasses.dataclass(frozen=True)
    class Sensor(Options):
        hertz: float = 1.0
        unit: str = "V"

    def read(sensor: Sensor) -> Sensor:
        return sensor

    part = Part("data", "own:read", read)
    assert {"hertz", "unit", "target"} <= part.settings.keys()
    settings = {"hertz": 50.0, "target": "y"}
    assert part.rows(settings, seed=0) == (Sensor(hertz=50.0), {"target": "y"})


def test_settings_of_ones_own_may_be_called_as_arguments_of_ours():
    def loss(model, *, name, role="", factory=0):
        return model

    names = {"name": "hits", "role": "a", "factory": 1}
    check_takes("loss", "own:loss", loss, None, **names)
    with pytest.raises(ValueError, match="loss own:loss must take"):
        check_takes("loss", "own:loss", loss, None)


def test_all_of_the_traceback_is_shown_on_demand(monkeypatch, capsys):
    monkeypatch.setenv("JAX_TRACEBACK_FILTERING", "off")
    assert main(["run", "--clients", "6", "--algorithm", "mycode:typo"]) == 2
    first, second, *others = capsys.readouterr().err.splitlines()
    assert first.endswith("mycode.py:27: NameError: name 'tsk' is not defined")
    assert second == "Traceback (most recent call last):"
    assert sum("simulation.py" in line for line in others) > 0


def test_our_own_errors_are_no_errors_of_the_user(monkeypatch):
    def broken(*_):
        raise KeyError("ours")

    monkeypatch.setattr("fedjaxsim.runs.build._check_memory", broken)
    with pytest.raises(KeyError, match="ours"):
        main(["run", "--clients", "6", "--algorithm", "mycode:algorithm"])


@pytest.mark.thorough
def test_the_algorithm_of_the_readme_runs_and_resumes(tmp_path):
    text = Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")
    code = text.partition("## Write your own")[2].split("```")[1].removeprefix("python\n")
    (tmp_path / "mine.py").write_text(code)
    run = "run --algorithm mine:ditto --clients 6 --rounds 1 --local-steps 1 --quiet --out a"
    assert main(run.split()) == 0
    assert main(["resume", "a", "--rounds", "2", "--quiet"]) == 0
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["round"] for record in records] == [0, 1, 2]
    assert "train_loss" not in records[0]
    assert np.isfinite(
        [record["train_loss"] for record in records[1:]]
    ).all()  # of the gradients that it took


def test_the_check_tells_which_program_it_is_at_and_shows_none_of_its_warnings(monkeypatch):
    of_package, swept = {"algorithm": ("ditto",)}, ("fedavg", "scaffold")
    plan = expand_sweep({}, [of_package, {"algorithm": swept, "model": ("mycode:model",)}])
    simulation = SimpleNamespace(population=None)
    monkeypatch.setattr(
        sweeping,
        "prepare",
        lambda config, *_: SimpleNamespace(config=config, simulation=simulation),
    )
    monkeypatch.setattr(build, "_few", lambda population: population)
    monkeypatch.setattr(build, "everyone_of", lambda *_: (None, None))
    monkeypatch.setattr(build, "check_billboard", lambda *_, **__: warnings.warn("", stacklevel=1))
    said = []
    with warnings.catch_warnings(action="error"):
        sweeping.families_of(plan, said.append)
    ending = "of 2 programs (--trust-own-code leaves this out)"
    assert said[2:] == [
        f"checking your code with fedavg, 1 {ending}",
        f"checking your code with scaffold, 2 {ending}",
    ]
