"""Each setting is read by the parts that declare it, and refused if no part of the run does."""

import hashlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import LAWFUL
from support.refusals import check_refusals

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.privacy.choices import MECHANISMS
from fedjaxsim.runs.assemble import population_of
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.parts import part_of
from fedjaxsim.runs.settings import DATA as OF_DATA
from fedjaxsim.runs.settings import GROUPS, RUN, run_config, table_of, unread

CHANGED = {
    "learning_rate": 0.7, "lam": 0.7, "mu": 0.7, "personalization": 0.7, "message": "update",
    "parametrization": "paper", "objective": "weighted", "averaged": True, "schedule": "cosine",
    "local_optimizer": "adam", "server_optimizer": "adam", "server_learning_rate": 0.5, "clip": 2.0,
    "delta": 1e-4, "epsilon": 5.0, "noise_multiplier": 3.0, "noise_schedule": "power:1",
    "penalty": "kl",
    "acceleration": "convex", "ridge": 0.5, "message_epsilon": 2.0, "protect_examples": True,
    "origin": "global", "head": ("kernel",), "personal": ("bias",),
    "lam2": 0.7, "outliers": "columns", "psd_deviations": 1.0, "fairness": 0.7, "mixture": 0.7,
    "adaptive": True, "envelope_rate": 0.7, "inner_steps": 3, "adaptation_rate": 0.7,
    "derivative": "hessian", "clusters": 3, "separation": 0.7,
    "aggregation_rate": 0.7, "exact_sums": True,
    "momentum": 0.7, "server_momentum": 0.7, "weight_decay": 0.7, "personal_optimizer": "adam",
    "personal_learning_rate": 0.7, "personal_epochs": 2, "head_epochs": 2, "weights": "rows",
    "max_weight": 3.0, "neighbours": 3, "datastore": 64, "neighbour_weight": 0.7,
    "neighbour_scale": 0.7, "typical_batches": 0.7, "pull": "rows", "lam_intercept": 0.7,
}  # fmt: skip
NEEDS = {
    "lam2": {"penalty": "decomposed"},
    "outliers": {"penalty": "decomposed"},
    "message_epsilon": {"protect_examples": True},
    "momentum": {"local_optimizer": "momentum"},
    "weight_decay": {"local_optimizer": "adam"},
    "server_momentum": {"server_optimizer": "momentum"},
    "personal_learning_rate": {"personal_optimizer": "sgd"},
    "weights": {"noise_multiplier": 0.0},
    "max_weight": {"weights": "rows", "max_weight": 50.0},
    "pull": {"lam": 0.5},
    "lam_intercept": {"pull": "rows", "lam": 0.5},
}
"""Other settings without which a setting has no effect."""
RELEASE = {
    "exact_sums": True, "bands": 2, "power": 0.7, "coefficients": (1.0, -0.2, -0.1),
    "clip": 2.0, "noise_multiplier": 0.4, "noise_schedule": "power:1", "target_quantile": 0.7,
    "clip_learning_rate": 0.7, "count_noise": 2.0, "max_weight": 3.0, "psd_deviations": 1.0,
}  # fmt: skip
DATA = {
    "clients": 7, "partition": "pathological", "alpha": 9.0, "offset_scale": 3.0,
    "test_fraction": 0.5,
    "validation_fraction": 0.3, "split_by": "time", "train_rows": 3, "max_rows": 400,
    "preprocess": ("unit-rows",),
    "shards_per_client": 3,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "digits": {"clients": 9},
    "digits, dealt evenly": {"clients": 9, "partition": "iid"},
    "digits, dealt in shards": {"clients": 9, "partition": "pathological"},
    "synthetic": {"data": "synthetic", "clients": 9, "loss": "squared"},
    "data that have clients": {"data": "npz:own.npz"},
    "one data set": {"data": "npz:one.npz", "clients": 4, "partition": "iid"},
}


def computed(algorithm: str, **changed: Any) -> str:
    """Return the code and numbers of a start, two rounds and an evaluation."""
    settings: dict[str, Any] = {
        "data": "synthetic",
        "loss": "squared",
        "clients": 5,
        "rounds": 2,
        "sampling": "full",
        **_noise(algorithm, changed),
    }
    fixed = {"head": ("bias",), "acceleration": "none"}
    own = part_of("algorithm", algorithm).settings
    settings |= {name: value for name, value in fixed.items() if name in own}
    experiment = prepare(run_config(algorithm=algorithm, **{**settings, **changed}))
    simulation, hparams = experiment.simulation, experiment.hparams.as_arrays()
    program, key = simulation.program, jax.random.key(0)
    start = simulation.algorithm.warm_start.start
    assert start is not None

    def work(rows, published, own):
        begun = start(key, hparams, published, own)
        state = program.init(key, hparams)
        state, metrics = program.rounds(state, hparams, rows["train"], 2)
        return begun, state, metrics, program.evaluate(state, hparams, rows["test"])

    # Numbers that nothing reads do not become constants of the code.
    model = simulation.task.init(key)
    code = jax.make_jaxpr(work)(simulation.rows, model, model)
    numbers = [np.asarray(const).tolist() for const in code.consts if not _is_key(const)]
    return re.sub(r"0x[0-9a-f]+", "", str(code)) + str(numbers)


def _noise(algorithm: str, changed: dict[str, Any]) -> dict[str, float]:
    """Some noise, which is calibrated where it can be."""
    if "noise_multiplier" in changed or "epsilon" in changed:
        return {}
    read = table_of({"algorithm": algorithm, **changed}).keys
    kinds = {"epsilon": 2.0, "noise_multiplier": 0.5}
    return next(({name: value} for name, value in kinds.items() if name in read), {})


def _is_key(const) -> bool:
    return jnp.issubdtype(const.dtype, jax.dtypes.prng_key)


def test_every_setting_of_a_system_is_changed_below():
    groups = [GROUPS[name].keys for name in ("rows", "minibatches", "examples")]
    shared = {setting.name for keys in (OF_DATA, RUN, *groups) for setting in keys}
    roles = {
        "model": "linear",
        "loss": "softmax",
        "sampling": "poisson",
        "data": "digits",
        "partition": "dirichlet",
    }
    shared |= {name for role, part in roles.items() for name in part_of(role, part).settings}
    known = set(CHANGED)
    for algorithm in SYSTEMS:
        for needed in ({}, *NEEDS.values()):
            if needed.keys() <= table_of({"algorithm": algorithm}).keys.keys():
                read = table_of({"algorithm": algorithm, **needed}).keys.keys()
                read -= {setting.name for setting in GROUPS["spending"].keys}
                assert read - shared <= set(CHANGED)
                known -= read
    assert not known


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", LAWFUL)
def test_a_system_reads_what_it_declares_and_nothing_else(algorithm):
    """Of hyperparameters and mechanisms, which systems share, in one of them.

    Those have laws of their own, here and in `tests/test_hyperparameters.py`.
    """
    others = {
        "mpmtl": {"penalty": "group-sparse"},
        "scaffold": {"message": "steps"},
        "feddyn": {"message": "state"},
    }
    changed = CHANGED | others.get(algorithm, {})
    plain: dict[str, str] = {}
    own = part_of("algorithm", algorithm).settings
    for name, value in changed.items():
        needed = NEEDS.get(name, {})
        if not needed.keys() <= table_of({"algorithm": algorithm}).keys.keys():
            needed = {}
        given = {"algorithm": algorithm, **needed}
        if name not in table_of(given).keys:
            with pytest.raises(ValueError, match="has no effect"):
                run_config(**given, **{name: value})
        elif name in own or algorithm == "pmtl":
            if str(needed) not in plain:
                plain[str(needed)] = computed(algorithm, **needed)
            assert computed(algorithm, **(needed | {name: value})) != plain[str(needed)], name


@pytest.mark.thorough
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_mechanism_reads_what_it_declares_and_nothing_else(mechanism):
    grams = dict.fromkeys(("gaussian-gram", "pure-gram", "wishart"), "mpmtl")
    behind = {"no-release": "local", "every-row": "naive-dp", **grams}
    algorithm = behind.get(mechanism, "fedavg")
    given: dict[str, Any] = {"algorithm": algorithm, "mechanism": mechanism}
    parts = {"parts": ("kernel", "bias"), "clip_kernel": 1.0, "clip_bias": 0.5}
    given |= parts if mechanism == "per-part" else {}
    turns = {"sampling": "groups", "groups": 3, "bands": 3} if mechanism == "banded" else {}
    given |= turns
    read = table_of(given).keys
    base = {"noise_multiplier": 0.3, "count_noise": 1.0}
    base = {name: value for name, value in base.items() if name in read}
    base |= {"weights": "rows", "max_weight": 50.0} if "weights" in read else {}
    base |= parts if mechanism == "per-part" else {}
    base |= turns
    plain = computed(algorithm, mechanism=mechanism, **base)
    for name, value in RELEASE.items():
        if name in read:
            changed = {**base, name: value}
            assert computed(algorithm, mechanism=mechanism, **changed) != plain, name
        else:
            with pytest.raises(ValueError, match="has no effect"):
                run_config(**given, **{name: value})
    part = part_of("mechanism", mechanism)
    declared = {*part.settings, *(record.name for record in part.records({}))}
    assert declared - parts.keys() <= set(RELEASE)


@pytest.mark.thorough
def test_an_availability_reads_what_it_declares():
    changed = {"dropout": 0.5, "least_work": 0.5, "period": 5, "window": 3}
    base = {"availability": "intermittent", "window": 2}
    plain = computed("fedavg", **base)
    assert plain != computed("fedavg")
    for setting in part_of("availability", "intermittent").settings:
        assert computed("fedavg", **(base | {setting: changed[setting]})) != plain, setting


@pytest.mark.parametrize("kind", KINDS)
def test_data_read_what_they_declare_and_nothing_else(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    one = {"x": rng.normal(size=(60, 3)).astype(np.float32), "y": np.arange(60) % 4}
    np.savez("one.npz", **one)
    np.savez("own.npz", **one, client=np.arange(60) // 20)

    def content(**settings):
        population = population_of(run_config(**settings))
        arrays = [*population.fields.values(), population.splits["train"].start]
        arrays += [population.splits[split].count for split in population.splits]
        arrays += [np.array([population.bound("train")])]
        return hashlib.sha256(b"|".join(array.tobytes() for array in arrays)).hexdigest()

    base = KINDS[kind]
    plain, read = content(**base), table_of(base).keys
    for name, value in DATA.items():
        changed = {**base, name: value}
        if name not in read:
            with pytest.raises(ValueError, match="has no effect"):
                content(**changed)
        elif name == "partition" and base.get("partition") == value:
            continue
        elif name == "partition" and "partition" not in run_config(**base).parts:
            with pytest.raises(ValueError, match="has its own clients"):
                content(**changed)
        else:
            assert content(**changed) != plain, name


@pytest.mark.parametrize(
    ("names", "given", "reasons"),
    [
        (["lam", "seed"], {}, []),
        (["mu"], {}, ["mu has no effect with algorithm pmtl, only with fedprox"]),
        (
            ["hidden", "cohort"],
            {},
            [
                "hidden has no effect with model linear, only with mlp or gru or transformer",
                "cohort has no effect with sampling poisson, only with fixed",
            ],
        ),
        (
            ["lam"],
            {"algorithm": "finetune", "penalty": "vanilla"},
            ["lam has no effect with these settings of algorithm finetune: see --algorithm"],
        ),
        (
            ["message_epsilon"],
            {"algorithm": "mpmtl"},
            ["message-epsilon has no effect with these settings of algorithm mpmtl"],
        ),
        (["dropout"], {}, ["dropout has no effect without availability intermittent"]),
        (["alpha"], {"data": "synthetic"}, ["alpha has no effect on data that have clients"]),
        (["alpha"], {"partition": "iid"}, ["alpha has no effect with partition iid, only with di"]),
        # Most mechanisms clip, and few algorithms do.
        (
            ["clip"],
            {"mechanism": "plain-mean"},
            ["clip has no effect with mechanism plain-mean, only with gaussian or adaptive or"],
        ),
        (["epsilon"], {"mechanism": "client-noise"}, ["epsilon has no effect with mechanism clie"]),
        (["epsilon"], {"algorithm": "local"}, ["epsilon has no effect, as nothing is released: l"]),
        (
            ["noise_schedule"],
            {"mechanism": "plain-mean"},
            ["noise-schedule has no effect with mechanism plain-mean, only with gaussian"],
        ),
        (["count_noise"], {}, ["count-noise has no effect with mechanism gaussian, only with ad"]),
        (["sampling_rate"], {"sampling": "fixed"}, ["sampling-rate has no effect with sampling"]),
        (
            ["weight_decay"],
            {},
            ["weight-decay has no effect with these settings of algor"],
        ),
        (
            ["personal_learning_rate"],
            {"algorithm": "ditto"},
            ["personal-learning-rate has no effect with these settings of algorithm ditto"],
        ),
        (
            ["server_optimizer"],
            {"algorithm": "ppsgd"},
            ["server-optimizer has no effect with algorithm ppsgd, only with pmtl"],
        ),
        (
            ["target"],
            {},
            ["target has no effect with data digits, only with csv or hf or images"],
        ),
        (["fields"], {}, ["fields has no effect with data digits, only with mat"]),
        (["local_steps"], {"algorithm": "stl"}, ["local-steps has no effect with algorithm stl"]),
        (["delta"], {"mechanism": "client-noise"}, ["delta has no effect with mechanism client-n"]),
        (["clients"], {"data": "mat:a"}, ["clients has no effect on data that have clients"]),
    ],
)
def test_what_has_no_effect_is_said_with_what_reads_it(names, given, reasons):
    found = unread(names, table_of(given))
    assert len(found) == len(reasons)
    assert all(map(str.startswith, found, reasons)), found
    if reasons:
        with pytest.raises(ValueError, match="; ".join(reasons) if len(names) == 1 else "; "):
            run_config(**dict.fromkeys(names), **given)


def test_settings_that_no_part_reads_are_refused():
    check_refusals(
        lambda settings: run_config(**dict(settings)),
        {
            (("lamm", 1.0),): "'lamm'.*'lam'",
            (("lr", 1.0),): "'lr' .did you mean 'learning-rate'",
            (("dataset", "digits"),): "'dataset' .did you mean 'data'",
            (("records", 1.0),): "'records'",
            (("xyzzy", 1.0),): "'xyzzy'$",
            (("sampling", "fixed"),): "cohort must be given",
            (("algorithm", "fedsgd"),): "algorithm .*MODULE:FACTORY.*'fedsgd'",
            (("algorithm", ("pmtl",)),): r"algorithm .*\('pmtl',\)",
            (("data", 3),): "data .*3",
            (("data", "digit"),): "data .*'digit'",
            (("partition", "even"),): "partition .*'even'",
        },
    )


def test_a_part_with_a_setting_that_others_have_is_refused(tmp_path, monkeypatch):
    (tmp_path / "clashing.py").write_text(
        "def rounds(task, *, rounds: int = 3): pass\n"
        "def capacity(task, *, capacity: int = 3): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="'rounds'"):
        run_config(algorithm="clashing:rounds")
    with pytest.raises(ValueError, match="sampling poisson"):
        run_config(algorithm="clashing:capacity")
