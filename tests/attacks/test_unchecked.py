"""An unchecked simulation lets functions be debugged, and no way leads from it to an ε."""

import dataclasses
import math

import equinox
import jax
import numpy as np
import pytest
from support.problems import classification, read_by, same

import fedjaxsim as fjs
from fedjaxsim.engine.checkpoint import CheckpointFolder
from fedjaxsim.gradients import hypergradient, mean_metric
from fedjaxsim.privacy import compose_reports
from fedjaxsim.privacy.guarantee import Report
from fedjaxsim.simulation_batch import SimulationBatch

VALUES = {"clip": 1.0, "noise_multiplier": 4.0, "learning_rate": 0.1, "lam": 0.1}
POPULATION, TASK = classification([6, 7, 8, 9], features=3)
GOOD = fjs.pmtl(TASK)


def client(shared, personal, data, hparams, context):
    """PMTL's client, which tells its rows to whoever reads standard output."""
    jax.debug.print("client {} first row {}", context.client_id, data.full_pass(first, 0.0))
    kept, message, metrics = GOOD.client(shared, personal, data, hparams, context)
    return kept, equinox.error_if(message, jax.numpy.isnan(hparams.lam), "lam is nan"), metrics


def first(total, batch):
    return total + batch.sum(batch.fields["x"][:, 0])


def simulation(algorithm=GOOD, **settings):
    return fjs.Simulation(
        algorithm, POPULATION, fjs.poisson(0.5), fjs.Minibatches(4, steps=1), **settings
    )


PLAIN, LEAKS = simulation(), simulation(GOOD._replace(client=client), unchecked=True)
HPARAMS = read_by(PLAIN, **VALUES)


@pytest.fixture(scope="module")
def state():
    return LEAKS.round(LEAKS.init(0, HPARAMS), HPARAMS)[0]


def has_none(report):
    for each in report.guarantees:
        assert each.epsilon is None
        assert "unchecked=True" in each.reason
    assert "ε = " not in report.short()


@pytest.mark.thorough
def test_functions_are_debugged_with_the_numbers_of_the_checked_simulation(state, capfd):
    with pytest.raises(ValueError, match="debug_print"):
        simulation(GOOD._replace(client=client)).init(0, HPARAMS)
    plain, _ = PLAIN.round(PLAIN.init(0, HPARAMS), HPARAMS)
    for part in ("shared", "personal", "key", "round"):
        assert same(getattr(plain, part), getattr(state, part))
    LEAKS.round(LEAKS.init(1, HPARAMS), HPARAMS)
    jax.effects_barrier()
    assert "first row" in capfd.readouterr().out
    begun, bad = LEAKS.init(1, HPARAMS), HPARAMS.replace(lam=np.nan).as_arrays()
    with pytest.raises(Exception, match="lam is nan"):
        jax.block_until_ready(LEAKS.compiled.step(begun, bad, LEAKS.rows["train"]))


def test_no_report_of_its_states_has_an_epsilon(state, tmp_path):
    has_none(LEAKS.guarantee(state))
    has_none(LEAKS.guarantee(LEAKS.init(0, HPARAMS)))  # nothing was sent yet, but init was run
    has_none(PLAIN.guarantee(state))
    has_none(LEAKS.guarantee(PLAIN.init(0, HPARAMS)))
    has_none(Report.from_json(LEAKS.guarantee(state).to_json()))
    has_none(compose_reports([LEAKS.guarantee(state), PLAIN.guarantee(PLAIN.init(1, HPARAMS))]))
    assert math.isinf(LEAKS.epsilon(state))
    assert math.isinf(jax.jit(PLAIN.epsilon)(state))
    later = PLAIN.start_from(state, HPARAMS)
    has_none(PLAIN.guarantee(later))
    folder = CheckpointFolder(tmp_path)
    folder.save(1, state, {})
    saved = folder.last()
    assert saved is not None
    has_none(PLAIN.guarantee(saved.state(PLAIN.init(0, HPARAMS))))
    has_none(PLAIN.guarantee(PLAIN.round(state, HPARAMS)[0]))


@pytest.mark.parametrize(
    "ask",
    [
        lambda: LEAKS.calibrate(HPARAMS, epsilon=1.0, rounds=2),
        lambda: LEAKS.budget(HPARAMS, epsilon=1.0),
        lambda: hypergradient(LEAKS, mean_metric(LEAKS, split="test"), 2, "epsilon")(
            0, HPARAMS, 1.0
        ),
    ],
)
def test_nothing_is_planned_for_an_epsilon(ask):
    with pytest.raises(ValueError, match=r"unchecked|checks_skipped"):
        ask()


@pytest.mark.thorough
def test_runs_and_sweeps_tell_infinity(capsys):
    lines = []

    class Records(fjs.callbacks.Callback):
        def segment(self, state, segment):
            lines.extend(self.run.records(state, segment))
            assert all(map(math.isinf, self.run.rdp_epsilon(state)))

    # A budget of the checked simulation allows it no round.
    begun = LEAKS.with_budget(LEAKS.init(0, HPARAMS), PLAIN.budget(HPARAMS, epsilon=50.0))
    state, _ = LEAKS.run(begun, HPARAMS, 1, callbacks=[Records(), fjs.callbacks.Progress()])
    assert int(state.round) == 0
    has_none(LEAKS.guarantee(state))
    LEAKS.run(LEAKS.init(0, HPARAMS), HPARAMS, 1, callbacks=[Records()])
    batch = SimulationBatch(LEAKS, [HPARAMS, HPARAMS.replace(lam=0.2)], jax.devices()[:1])
    batch.run(batch.init(0), 1, callbacks=[Records()])
    assert lines
    assert all(math.isinf(line["epsilon"]) for line in lines)
    assert "ε ≤ " not in capsys.readouterr().out


@pytest.mark.thorough
def test_neither_examples_nor_silence_have_an_epsilon():
    examples = dataclasses.replace(LEAKS, algorithm=fjs.fedavg(fjs.private_examples(TASK)))
    values = VALUES | {"example_clip": 1.0, "example_noise_multiplier": 9.0}
    hparams = read_by(examples, **values)
    report = examples.guarantee(examples.round(examples.init(0, hparams), hparams)[0])
    has_none(report)
    assert report.examples is not None
    assert np.all(np.isinf(report.examples.replace))
    silent = dataclasses.replace(LEAKS, algorithm=fjs.local(TASK), mechanism=fjs.no_release())
    hparams = read_by(silent, **VALUES)
    has_none(silent.guarantee(silent.round(silent.init(0, hparams), hparams)[0]))
