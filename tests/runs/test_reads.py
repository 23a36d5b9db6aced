"""Each setting is read by what the table says reads it, and by nothing else."""

import hashlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.privacy.choices import MECHANISMS
from fedjaxsim.runs.build import population_of, prepare
from fedjaxsim.runs.reads import settings_of, unread
from fedjaxsim.runs.settings import RunConfig

CHANGED = {
    "learning_rate": 0.7, "lam": 0.7, "mu": 0.7, "personalization": 0.7, "message": "offset",
    "parametrization": "paper", "objective": "weighted", "averaged": True, "schedule": "cosine",
    "local_optimizer": "adam", "server_optimizer": "adam", "server_learning_rate": 0.5, "clip": 2.0,
    "delta": 1e-4, "epsilon": 5.0, "noise_multiplier": 3.0, "budget": "power:1", "penalty": "kl",
    "acceleration": "convex", "ridge": 0.5, "example_epsilon": 2.0,
    "origin": "global", "head": ("kernel",), "order": "head-first",
}  # fmt: skip
RELEASE = {
    "clip": 2.0, "noise_multiplier": 0.4, "budget": "power:1", "target_quantile": 0.7,
    "clip_learning_rate": 0.7, "count_noise": 2.0,
}  # fmt: skip
DATA = {
    "clients": 7, "partition": "shards", "alpha": 9.0, "offset_scale": 3.0, "test_fraction": 0.5,
    "validation_fraction": 0.3, "classes": 3, "preprocess": ("unit-rows",),
}  # fmt: skip
KINDS = {
    "digits": RunConfig(clients=9),
    "digits, dealt evenly": RunConfig(clients=9, partition="iid"),
    "synthetic": RunConfig(data="synthetic", clients=9, loss="squared"),
    "clients of their own": RunConfig(data="npz:own.npz"),
    "one data set": RunConfig(data="npz:one.npz", clients=4, partition="iid"),
}


def computed(algorithm: str, **changed: Any) -> str:
    """What a start, two rounds and an evaluation compute, as code and numbers."""
    settings: dict[str, Any] = {
        "data": "synthetic",
        "loss": "squared",
        "clients": 5,
        "rounds": 2,
        **_noise(algorithm, changed),
    }
    if "head" in SYSTEMS[algorithm].arguments:
        settings["head"] = ("bias",)
    experiment = prepare(
        RunConfig(algorithm=algorithm, sampling_rate=1.0, **{**settings, **changed})
    )
    simulation, hparams = experiment.simulation, experiment.hparams.as_arrays()
    program, key, start = simulation.program, jax.random.key(0), simulation.algorithm.start
    assert start is not None

    def work(rows, published, own):
        begun = start(hparams, published, own)
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
    return {"noise_multiplier": 0.5} if SYSTEMS[algorithm].noised_by_clients else {"epsilon": 2.0}


def _is_key(const) -> bool:
    return jnp.issubdtype(const.dtype, jax.dtypes.prng_key)


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", SYSTEMS)
def test_a_system_reads_what_its_table_says_and_nothing_else(algorithm):
    plain, config = computed(algorithm), RunConfig(algorithm=algorithm)
    known = {name for system in SYSTEMS.values() for name in settings_of(system)}
    # An accountant is part of the report, and an error where it does not describe the run.
    known |= {*MECHANISMS["gaussian"].reads} - {"accountant"}
    assert known == set(CHANGED)
    changed = CHANGED | ({"penalty": "group-sparse"} if algorithm == "mpmtl" else {})
    for name, value in changed.items():
        reads = name in (*settings_of(SYSTEMS[algorithm]), *config.release_reads)
        assert bool(unread(config, [name])) != reads
        if name == "epsilon" and config.noised_by_clients:
            with pytest.raises(ValueError, match="epsilon cannot be aimed at"):
                computed(algorithm, epsilon=value)
        else:
            assert (computed(algorithm, **{name: value}) != plain) == reads, name


@pytest.mark.parametrize(
    "mechanism",
    [
        pytest.param(name, marks=() if name == "adaptive" else pytest.mark.thorough)
        for name in MECHANISMS
    ],
)
def test_a_mechanism_reads_what_its_table_says_and_nothing_else(mechanism):
    base = {"mechanism": mechanism, "noise_multiplier": 0.3, "count_noise": 1.0}
    grams = dict.fromkeys(("gaussian-gram", "pure-gram", "wishart"), "mpmtl")
    behind = {"closed": "local", "every-row": "naive-dp", **grams}
    algorithm = behind.get(mechanism, "fedavg")
    plain, config = computed(algorithm, **base), RunConfig(algorithm=algorithm, mechanism=mechanism)
    for name, value in RELEASE.items():
        reads = name in config.door.reads
        assert (computed(algorithm, **{**base, name: value}) != plain) == reads, name
        assert bool(unread(config, [name])) != reads
    # δ and accountant are part of the report, and of the noise where that follows from ε.
    left = {"delta", "accountant", "epsilon"}
    assert {name for choice in MECHANISMS.values() for name in choice.reads} - left == set(RELEASE)


@pytest.mark.parametrize("kind", KINDS)
def test_data_read_what_their_table_says_and_nothing_else(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    one = {"x": rng.normal(size=(60, 3)).astype(np.float32), "y": np.arange(60) % 4}
    np.savez("one.npz", **one)
    np.savez("own.npz", **one, client=np.arange(60) // 20)

    def content(config):
        population = population_of(config)
        arrays = [*population.fields.values(), population.splits["train"].start]
        arrays += [population.splits[split].count for split in population.splits]
        return hashlib.sha256(b"|".join(array.tobytes() for array in arrays)).hexdigest()

    config = KINDS[kind]
    plain = content(config)
    for name, value in DATA.items():
        settings = {**vars(config), name: value}
        if not unread(config, [name]):
            # Of synthetic data, which have no classes, all rows may go: refused or another content.
            if (name, kind) != ("classes", "synthetic"):
                assert content(RunConfig(**settings)) != plain, name
        elif name == "partition":  # not only ignored
            with pytest.raises(ValueError, match="has its own clients"):
                content(RunConfig(**settings))
        else:
            assert content(RunConfig(**settings)) == plain, name
