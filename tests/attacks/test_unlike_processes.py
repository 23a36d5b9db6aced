"""Processes of one run that are unlike: one reports the ε of noise that another did not draw."""

import dataclasses

import jax
import pytest
from support.problems import classification, read_by, untrained

import fedjaxsim as fjs
from fedjaxsim import simulation, simulation_batch
from fedjaxsim.engine import processes
from fedjaxsim.privacy.events import PrivacyLimit

POPULATION, TASK = classification([6, 7, 8, 9])
BASE = fjs.privacy.adaptive_clipping()
VALUES = {
    "clip": 1.0, "noise_multiplier": 4.0, "count_noise": 5.0, "learning_rate": 0.1,
    "target_quantile": 0.5, "clip_learning_rate": 0.2,
}  # fmt: skip


def less_in_the_second(accumulator, denominator, key, state, hparams, round_):
    """Draw a thousandth of the noise, where there is a mesh, in the second process."""
    quiet = jax.sharding.get_abstract_mesh().axis_names and jax.process_index() == 1
    changed = hparams.replace(noise_multiplier=hparams.noise_multiplier * (1e-3 if quiet else 1))
    out = BASE.release(accumulator, denominator, key, state, changed, round_)
    return out._replace(noise_multiplier=hparams.noise_multiplier)


def on_devices():
    """A simulation over a mesh of one device."""
    return fjs.Simulation(
        untrained(TASK), POPULATION, fjs.full_participation(), fjs.Minibatches(4, steps=1),
        BASE._replace(release=less_in_the_second), devices=jax.devices()[:1],
    )  # fmt: skip


FIRST = on_devices()
HPARAMS = read_by(FIRST, **VALUES)


def test_code_that_differs_on_several_devices_alone_is_other_code(monkeypatch):
    """Processes compared a trace for one device, in which this function draws all noise."""
    facts = FIRST.facts(HPARAMS)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert on_devices().facts(HPARAMS) != facts


@pytest.fixture
def brought(monkeypatch):
    """All that this process brings to the others, of whom one brings what came first."""
    values = []

    def from_all(value):
        values.append(value)
        return [values[0], value]

    monkeypatch.setattr(processes, "from_all", from_all)
    for module in (simulation, simulation_batch):
        monkeypatch.setattr(module, "spans_processes", lambda devices: True)
    return values


def test_processes_go_on_with_one_key_ledger_mechanism_and_one_set_of_hyperparameters(brought):
    begun, other = FIRST.init(0, HPARAMS), FIRST.init(1, HPARAMS)
    FIRST._agree(begun, HPARAMS)
    FIRST._agree(FIRST.init(0, HPARAMS), HPARAMS)
    all_but = "key, ledger or hyperparameters"
    limited = dataclasses.replace(begun.privacy, limit=PrivacyLimit(1.0, 1e-5, ()))
    unlike = (
        (other, HPARAMS, all_but),
        (dataclasses.replace(begun, privacy=limited), HPARAMS, all_but),
        (dataclasses.replace(begun, privacy=other.privacy), HPARAMS, all_but),
        (dataclasses.replace(begun, round=begun.round + 1), HPARAMS, all_but),
        (begun, HPARAMS.replace(noise_multiplier=0.01), all_but),
        (dataclasses.replace(begun, mechanism=9 * begun.mechanism), HPARAMS, "state of the mech"),
    )
    for state, hparams, what in unlike:
        with pytest.raises(processes.DisagreeError, match=f"process 1 has other {what}"):
            FIRST.round(state, hparams)
    assert len(brought) == 2 + len(unlike)


def test_processes_compare_a_batch_of_runs_too(brought):
    batch = fjs.SimulationBatch(FIRST, [HPARAMS, HPARAMS.replace(clip=9.0)], FIRST.devices)
    brought.append({"facts": {}})
    with pytest.raises(processes.DisagreeError, match="other code of a round and key, ledger"):
        batch.run(batch.init(0), 1)
