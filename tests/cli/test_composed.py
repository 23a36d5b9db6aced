"""Flags are composed of the parts that a command names, those of a user's own code, too."""

import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from problems import HANGS

from fedjaxsim.cli import main
from fedjaxsim.gradients import hypergradient, mean_metric
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.settings import run_config
from fedjaxsim.runs.settings_files import read_toml
from fedjaxsim.runs.sweep_runs import read_sweep

MINE = '''
"""Two algorithms that the package does not have."""

import jax
import jax.numpy as jnp
import fedjaxsim as fjs


@fjs.reads(
    fjs.Hyperparameter("inner_learning_rate", 0.05, "step of θ", scale="log"),
    fjs.Hyperparameter("learning_rate", 0.1, "η, the step of w", scale="log"),
    fjs.Hyperparameter("lam", 1.0, "λ, the weight of the proximal term", scale="log"),
)
def pfedme(task: fjs.Task, *, inner_steps: int = 3) -> fjs.Algorithm:
    """pFedMe (Dinh, Tran, Nguyen; NeurIPS 2020): θ is the proximal point of a client's loss at w.

    Args:
      task: model and loss.
      inner_steps: steps towards θ on every minibatch.
    """

    def client(shared, personal, data, hparams, context):
        def step(carry, batch):
            w, theta = carry
            for _ in range(inner_steps):
                gradient = jax.grad(task.loss)(theta, batch)
                theta = jax.tree.map(
                    lambda t, g, a: t - hparams.inner_learning_rate * (g + hparams.lam * (t - a)),
                    theta, gradient, w,
                )
            pull = hparams.learning_rate * hparams.lam
            return jax.tree.map(lambda a, t: a - pull * (a - t), w, theta), theta

        w, theta = data.fold(step, (shared, personal))
        return theta, jax.tree.map(jnp.subtract, w, shared), {}

    def init(key, hparams):
        w = task.init(key)
        return w, w

    return fjs.Algorithm(
        init,
        client,
        lambda shared, release, hparams, round_: jax.tree.map(jnp.add, shared, release),
        lambda shared, personal, hparams, client_id: personal,
        task,
    )


def mixed(alpha, v, w):
    return jax.tree.map(lambda a, b: alpha * a + (1 - alpha) * b, v, w)


@fjs.reads(
    fjs.Hyperparameter("learning_rate", 0.1, scale="log"),
    fjs.Hyperparameter(
        "initial_mixing", 0.5, "α of every client at first", (0.0, 1.0), allowed="lie in [0, 1]"
    ),
    fjs.Hyperparameter("mixing_learning_rate", 0.1, "step of α", scale="log"),
)
def apfl(task: fjs.Task) -> fjs.Algorithm:
    """APFL (Deng, Kamani, Mahdavi; 2020): clients learn how much of w their model has."""

    def client(shared, personal, data, hparams, context):
        def step(carry, batch):
            w, v, alpha = carry
            slope, direction = jax.grad(
                lambda alpha, v: task.loss(mixed(alpha, v, w), batch), argnums=(0, 1)
            )(alpha, v)
            alpha = jnp.clip(alpha - hparams.mixing_learning_rate * slope, 0.0, 1.0)
            along = lambda a, g: a - hparams.learning_rate * g
            gradient = jax.grad(task.loss)(w, batch)
            return jax.tree.map(along, w, gradient), jax.tree.map(along, v, direction), alpha

        w, v, alpha = data.fold(step, (shared, personal["v"], personal["alpha"]))
        return {"v": v, "alpha": alpha}, jax.tree.map(jnp.subtract, w, shared), {}

    def init(key, hparams):
        w = task.init(key)
        return w, {"v": w, "alpha": hparams.initial_mixing}

    return fjs.Algorithm(
        init,
        client,
        lambda shared, release, hparams, round_: jax.tree.map(jnp.add, shared, release),
        lambda shared, own, hparams, client_id: mixed(own["alpha"], own["v"], shared),
        task,
    )


@fjs.reads(fjs.Hyperparameter("mu", 0.1))
def forgets(task):
    """FedAvg, which reads more than is declared here."""
    return fjs.fedavg(task)


@fjs.reads(fjs.Hyperparameter("rounds", 0.1))
def clashes(task):
    return fjs.fedavg(task)
'''
SMALL = {"clients": 8, "rounds": 4, "eval_every": 2, "local_steps": 2, "sampling_rate": 1.0}
PFEDME = {"algorithm": "mine:pfedme", "inner_steps": 2, "inner_learning_rate": 0.2, "lam": 3.0}
APFL = {"algorithm": "mine:apfl", "initial_mixing": 0.25, "mixing_learning_rate": 0.5}


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


def ask(*arguments: str) -> str:
    """The help that a new process shows, 80 columns wide, and on its last line what it imported."""
    script = (
        "import sys\nfrom fedjaxsim.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    print(*({'jax', 'numpy', 'flax'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=HANGS,
        env=os.environ | {"COLUMNS": "80"},
    )
    return done.stdout


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    """A folder with the code above, in which everything runs."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("mine", None)


# --- help -----------------------------------------------------------------------------------------


def test_help_fits_on_a_hundred_lines_imports_nothing_and_says_where_the_rest_is():
    *lines, imported = ask("run", "--help").splitlines()
    assert len(lines) <= 100
    assert imported == ""
    words = " ".join(" ".join(lines).split())
    assert "a part are shown once it is named, as by `run --algorithm pmtl --help`" in words
    assert "stage after the run are shown by `run --finetune mean --help`" in words
    assert "processes by `run --devices all --help`" in words
    assert not {"--lam", "--finetune-lam", "--coordinator"} & {*words.split()}


@pytest.mark.parametrize(
    ("named", "shown", "absent"),
    [
        ("--algorithm pmtl", "--lam --message --learning-rate", "--mu --rounds"),
        ("--algorithm fedprox", "--mu", "--lam --message"),
        ("--model mlp", "--hidden", "--lam --rounds"),
        ("--mechanism adaptive", "--target-quantile --noise-multiplier", "--lam"),
        ("--sampling passes", "--cohort --max-participations", "--sampling-rate"),
        ("--data csv", "--target --client --drop", "--alpha --rounds"),
        ("--partition dirichlet", "--alpha --clients", "--target"),
        ("--data synthetic --partition iid", "--offset-scale", "--alpha"),
        ("--algorithm pmtl --model mlp", "--lam --hidden", "--mu"),
        ("--finetune mean", "--finetune-lam --finetune-rounds", "--rounds"),
        ("--devices all", "--coordinator --cluster", "--rounds"),
        ("--algorithm mine:pfedme", "--inner-steps --inner-learning-rate --lam", "--mu --message"),
    ],
)
def test_help_shows_the_flags_of_the_parts_that_are_named(named, shown, absent, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["run", *named.split(), "--help"])
    assert stopped.value.code == 0
    found = {*re.findall(r"--[\w-]+", capsys.readouterr().out.partition(" options ")[2])}
    assert found >= {*shown.split()}
    assert not found & {*absent.split()}


def test_help_of_ones_own_part_has_its_words(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--algorithm", "mine:pfedme", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "θ is the proximal point of a client's loss at w." in shown
    assert "--inner-steps INT steps towards θ on every minibatch. (default: 3)" in shown
    assert "--lam FLOAT λ, the weight of the proximal term (default: 1.0)" in shown


# --- what nothing reads, and what cannot be -------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run --mu 1", "mu has no effect with algorithm pmtl, only with fedprox"),
        ("run --hidden 4", "hidden has no effect with model linear, only with mlp or gru or"),
        ("run --cohort 4", "cohort has no effect with sampling poisson, only with fixed or passes"),
        ("run --count-noise 1", "count-noise has no effect with mechanism gaussian, only with ada"),
        ("run --target y", "target has no effect with data digits, only with csv or parquet"),
        ("run --partition iid --alpha 1", "alpha has no effect with partition iid, only with dir"),
        ("run --data synthetic --alpha 1", "alpha has no effect on data with clients of their own"),
        ("tune --mu 1", "mu has no effect with algorithm pmtl, only with fedprox"),
        ("plan --mu 1", "mu has no effect with algorithm pmtl, only with fedprox"),
        ("audit --mu 1", "mu has no effect with algorithm pmtl, only with fedprox"),
        ("data show --rounds 3", "rounds has no effect on data"),
        ("run --algorithm mine:apfl --lam 1", "lam has no effect with algorithm mine:apfl, only"),
        ("run --lamm 1", "Unrecognized options: --lamm, 1; perhaps you meant --lam; see"),
        ("run --algorithm", "Missing value for argument '--algorithm'"),
        ("run --data", "Missing value for argument '--data'"),
        ("data show --partition", "Missing value for argument '--partition'"),
        ("run --algorithm=", "algorithm must be one of pmtl, .*, or MODULE:FACTORY .*, got ''"),
        ("run --sampling fixed", "Missing from fedjaxsim run: --cohort INT"),
        ("run --clip -1", "clip_norm must be positive .*, got -1"),
        ("run --processes a --algorithm mine:apfl", "processes must be a whole number, .*'a'"),
        ("run a.toml", "a.toml: sweep is for `fedjaxsim sweep`"),
        ("run b.toml", "b.toml: inner-steps must be a whole number, got 2.5"),
        ("run c.toml", "c.toml: lam must be a number, got 'x'"),
        ("sweep d.toml --out s", r"d.toml: value 2 of inner-steps in \[sweep\] must be a whole nu"),
        ("sweep e.toml --out s", r"initial_mixing must lie in \[0, 1\], got 2.0"),
        ("sweep f.toml --out s", r"no run reads what is swept: lam has no effect with algorithm"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_it(arguments, message, mine, capsys):
    pfedme, sweep = 'algorithm = "mine:pfedme"\n', "rounds = 1\n[sweep]\n"
    apfl = 'algorithm = "mine:apfl"\n'
    for name, text in (
        ("a", sweep + "lam = [1, 2]"),
        ("b", pfedme + "inner-steps = 2.5"),
        ("c", pfedme + "lam = 'x'"),
        ("d", pfedme + sweep + "inner-steps = [1, 2.5]"),
        ("e", apfl + sweep + "initial-mixing = [0.1, 2]"),
        ("f", apfl + sweep + "lam = [0.1, 2]"),
    ):
        (mine / f"{name}.toml").write_text(text)
    before = sorted(mine.rglob("*.*"))
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("fedjaxsim: error: ")
    assert re.search(message, error), error
    assert error.count("\n") == 1
    assert [path for path in sorted(mine.rglob("*.*")) if path.suffix != ".pyc"] == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("mine:pfedme --inner-learning-rate -1", "inner_learning_rate must be finite and at leas"),
        ("mine:pfedme --inner-learning-rate inf", "inner_learning_rate must be finite .*, got inf"),
        ("mine:pfedme --inner-learning-rate abc", "inner-learning-rate must be a number, got 'ab"),
        ("mine:pfedme --lam nan", "lam must be finite and at least 0, got nan"),
        ("mine:pfedme --inner-steps 2.5", "inner-steps must be a whole number, .*, got '2.5'"),
        ("mine:pfedme --inner-steps two", "inner-steps must be a whole number, .*, got 'two'"),
        ("mine:pfedme --mixing-learning-rate 1", "Unrecognized options: --mixing-learning-rate"),
        ("mine:apfl --initial-mixing 1.5", r"initial_mixing must lie in \[0, 1\], got 1.5"),
        ("mine:apfl --initial-mixing -0.1", r"initial_mixing must lie in \[0, 1\], got -0.1"),
        ("mine:apfl --inner-steps 2", "Unrecognized options: --inner-steps"),
        ("mine:forgets", "mine:forgets: hyperparameter '.*' is not declared .*reads declares them"),
        ("mine:clashes", "'rounds' is a setting of every run: no part may have one so called"),
    ],
)
def test_bad_values_of_ones_own_part_are_refused(given, message, mine, capsys):
    assert main(["run", *flags(SMALL), "--algorithm", *given.split(), "--out", "r"]) == 2
    error = capsys.readouterr().err
    assert re.match(f"fedjaxsim: error: .*{message}", error), error
    assert error.count("\n") == 1
    assert not (mine / "r").exists()


# --- algorithms of one's own ----------------------------------------------------------------------


@pytest.mark.parametrize("own", [PFEDME, APFL], ids=["pfedme", "apfl"])
def test_flags_a_file_and_python_are_one_run(own, mine):
    (mine / "run.toml").write_text(toml(SMALL, own))
    assert main(["run", *flags(SMALL, own), "--quiet", "--out", "flags"]) == 0
    assert main(["run", "run.toml", "--quiet", "--out", "file"]) == 0
    one, other = RunDirectory(mine / "flags"), RunDirectory(mine / "file")
    assert one.metrics() == other.metrics()
    assert one.config() == other.config()
    assert {name: one.config()[name] for name in own} == own
    assert read_toml(mine / "run.toml") == run_config(**SMALL, **own)
    hparams = prepare(run_config(**SMALL, **own)).hparams
    assert {name: hparams.get(name, value) for name, value in own.items()} == own
    plain = RunDirectory(mine / "plain")
    less = {name: value for name, value in own.items() if name != "algorithm"}
    changed = {name: 2 * value for name, value in less.items()}
    command = ["run", "run.toml", *flags(changed), "--quiet", "--out", "plain"]
    assert main(command) == 0
    assert plain.metrics() != one.metrics()
    assert {name: plain.config()[name] for name in less} == changed


def test_a_sweep_takes_settings_and_hyperparameters_of_ones_own(mine):
    own = {"algorithm": "mine:pfedme", "lam": 3.0}
    (mine / "sweep.toml").write_text(
        toml(SMALL, own) + "[sweep]\ninner-steps = [1, 2]\ninner-learning-rate = [0.05, 0.2]\n"
    )
    plan = read_sweep(mine / "sweep.toml")
    # A setting is another program, a hyperparameter is not.
    assert plan.groups() == ((0, 1), (2, 3))
    assert main(["sweep", "sweep.toml", "--quiet", "--out", "swept"]) == 0
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(mine / "swept" / "results.parquet").to_pylist()
    last = [row for row in rows if row["round"] == 4]
    assert [(row["inner_steps"], row["inner_learning_rate"]) for row in last] == [
        (1, 0.05), (1, 0.2), (2, 0.05), (2, 0.2),
    ]  # fmt: skip
    assert len({row["test_loss"] for row in last}) == 4
    assert main(["run", *flags(SMALL, PFEDME), "--quiet", "--out", "alone"]) == 0
    alone = RunDirectory(mine / "alone").metrics()[-1]
    assert last[-1]["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-5)


def test_tune_takes_a_hyperparameter_of_ones_own(mine):
    small = ["--seeds", "2", "--steps", "3", "--quiet", "--out", "tuned"]
    command = ["tune", *flags(SMALL, PFEDME), "--wrt", "inner-learning-rate", *small]
    assert main(command) == 0
    path = json.loads((mine / "tuned" / "path.json").read_text())
    assert path["steps"][0]["point"] == {"inner_learning_rate": 0.2}
    best = path["steps"][path["best"]]
    assert best["value"] < path["steps"][0]["value"]
    tuned = read_toml(mine / "tuned" / "tuned.toml")
    assert tuned.get("inner_learning_rate") == best["point"]["inner_learning_rate"]
    assert (tuned.algorithm, tuned.get("inner_steps")) == ("mine:pfedme", 2)


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


def test_every_client_learns_a_mixing_weight_of_its_own():
    experiment = prepare(run_config(**SMALL, **APFL))
    simulation, hparams = experiment.simulation, experiment.hparams
    state = simulation.init(0, hparams)
    np.testing.assert_array_equal(state.personal["alpha"], np.full(8, 0.25, np.float32))
    state, _ = simulation.run(state, hparams, 4)
    alphas = np.asarray(state.personal["alpha"])
    assert len({*alphas.tolist()}) == 8
    assert ((alphas > 0) & (alphas < 1) & (alphas != 0.25)).all()


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
