"""Parts of two records of the package put together: no code of a user, and a cost of neither."""

import dataclasses
from typing import Any

import jax
import pytest
from support.problems import classification

import fedjaxsim as fjs
from fedjaxsim.algorithms.mpmtl import mpmtl
from fedjaxsim.engine.evaluation import EvaluationPlan
from fedjaxsim.keys import seed_key
from fedjaxsim.privacy.entries import Entry
from fedjaxsim.privacy.events import event_from
from fedjaxsim.privacy.mechanisms import CLIP_NORM, NOISE_MULTIPLIER, record
from fedjaxsim.privacy.mechanisms.record import CLIP, GAUSSIAN_NOISE, SUM, mechanism_of

POPULATION, TASK = classification([3] * 4)
GAUSSIAN, PURE, PLAIN = fjs.gaussian(), fjs.privacy.pure(), fjs.privacy.plain_mean()
WIDE = dataclasses.replace(CLIP_NORM, range=(0.0, 1e15))
WEIGHTED = fjs.gaussian([1.0, 2.0, 3.0, 4.0])
EXAMPLES = mpmtl(TASK, protect_examples=True)


def simulation(mechanism=GAUSSIAN, algorithm=None):
    algorithm = fjs.fedavg(TASK) if algorithm is None else algorithm
    return fjs.Simulation(algorithm, POPULATION, fjs.full_participation(), mechanism=mechanism)


def choices(statistic=SUM, bound=CLIP, noise=GAUSSIAN_NOISE):
    return mechanism_of(statistic, bound, noise)


EXCHANGED = {
    "event": GAUSSIAN._replace(event=PURE.event),
    "event without a release": GAUSSIAN._replace(event=fjs.no_release().event),
    "event of half the sensitivity": GAUSSIAN._replace(event=fjs.privacy.Gaussian(replace=1.0)),
    "known event": fjs.privacy.client_noise()._replace(event=GAUSSIAN.event),
    "bound": GAUSSIAN._replace(add=PLAIN.add, zero=PLAIN.zero),
    "noise": GAUSSIAN._replace(release=PLAIN.release),
    "state": fjs.privacy.adaptive_clipping()._replace(init=GAUSSIAN.init),
    "one by one": fjs.Mechanism(PURE.event, *GAUSSIAN[1:]),
    "by its type": type(GAUSSIAN)(PURE.event, *GAUSSIAN[1:]),
    "by a map": jax.tree.map(
        lambda mine, other: other if mine is GAUSSIAN.event else mine, GAUSSIAN, PURE
    ),
    "behind a transform": fjs.privacy.transformed(
        GAUSSIAN._replace(event=PURE.event), fjs.privacy.quantization(0.1)
    ),
    "range": GAUSSIAN._replace(hyperparameters=(WIDE, NOISE_MULTIPLIER)),
    "no range": GAUSSIAN._replace(hyperparameters=()),
    "sentence": WEIGHTED._replace(public=()),
    "clipping that clips nothing": choices(bound=CLIP._replace(clip=record.UNBOUNDED.clip)),
    "half a sensitivity": choices(statistic=SUM._replace(replace=1.0)),
    "name of noise": choices(noise=GAUSSIAN_NOISE._replace(event=record.PURE_NOISE.event)),
}


@pytest.mark.parametrize("mechanism", EXCHANGED.values(), ids=EXCHANGED)
def test_a_mechanism_of_parts_of_several_is_refused(mechanism):
    """The first reported an ε of 0.248 where 0.592 is right, and no sentence named it."""
    with pytest.raises(ValueError, match="mechanism is made of parts that do not belong together"):
        simulation(mechanism)


def test_the_noise_of_one_algorithm_protects_no_examples_of_another():
    taken = fjs.fedavg(TASK)._replace(
        example_epsilon=EXAMPLES.example_epsilon, hyperparameters=EXAMPLES.hyperparameters
    )
    with pytest.raises(ValueError, match=r"algorithm is made of .* so its example_epsilon"):
        simulation(algorithm=taken)
    own = taken._replace(client=lambda *args: EXAMPLES.client(*args))
    gram = fjs.privacy.gaussian_gram()
    assert any("as `example_epsilon` of" in each for each in simulation(gram, own).public)
    assert not any("example_epsilon" in each for each in simulation(gram, EXAMPLES).public)


@fjs.reads(dataclasses.replace(CLIP_NORM, default=1.0), NOISE_MULTIPLIER)
def with_a_default():
    return fjs.gaussian()


def test_what_leaves_bound_noise_and_cost_as_they_were_is_the_packages():
    sentence = "The weights are those of a census."
    for mechanism in (
        with_a_default(),
        WEIGHTED._replace(public=(*WEIGHTED.public, sentence)),
        GAUSSIAN._replace(adds_chunks=True)._replace(num_clients=4),
        EXCHANGED["known event"]._replace(event=fjs.privacy.NoKnownCost()),
    ):
        assert not any("mechanism of" in each for each in simulation(mechanism).public)


def test_a_mechanism_of_ones_own_is_an_assumption():
    own = GAUSSIAN._replace(event=PURE.event, add=lambda *args: GAUSSIAN.add(*args))
    assert any(f"The mechanism of {__name__}" in each for each in simulation(own).public)


def subclassed(part: Any, **inside: Any) -> Any:
    """The same record, of a class of a user's that could answer otherwise each time."""
    names = getattr(part, "_fields", None) or [field.name for field in dataclasses.fields(part)]
    values = {name: getattr(part, name) for name in names}
    return type("Mine", (type(part),), inside)(**values)


def replaced(sim, **parts):
    """The simulation with parts of users' classes, wherever they are."""
    task, sampling, scheme = sim.task, sim.sampling, sim.sampler.scheme
    if "examples" in parts:
        task = fjs.private_examples(task)
        task = task._replace(examples=subclassed(task.examples))
    if "scheme" in parts:
        sampler = sim.sampler._replace(scheme=subclassed(scheme))
        sampling = sampling._replace(for_clients=lambda m: sampler)
    if "availability" in parts:
        levels = ((2, 1.0), (2, 0.01))  # which nobody tosses coins for
        work = fjs.privacy.intermittent(dropout=0.5)
        sampling = fjs.privacy.available(sampling, subclassed(work, levels=levels))
    changed = {"algorithm": sim.algorithm._replace(task=task), "sampling": sampling}
    return dataclasses.replace(sim, **changed | {k: v for k, v in parts.items() if v is not None})


def test_no_part_may_be_of_a_subclass():
    sim = simulation()
    for name in ("algorithm", "population", "sampling", "minibatches"):
        with pytest.raises(ValueError, match=f"{name} must be of type"):
            replaced(sim, **{name: subclassed(getattr(sim, name))})
    cheap = type("Mine", (fjs.Mechanism,), {"event": PURE.event})(*GAUSSIAN)
    with pytest.raises(ValueError, match="mechanism must be of type Mechanism"):
        replaced(sim, mechanism=cheap)
    with pytest.raises(ValueError, match="task must be of type Task"):
        replaced(sim, algorithm=fjs.fedavg(TASK)._replace(task=subclassed(TASK)))
    for name in ("examples", "scheme", "availability"):
        with pytest.raises(ValueError, match=f"{name} must be of type"):
            replaced(sim, **{name: None})


def test_a_plan_of_evaluations_charges_the_noise_that_it_draws():
    """A subclass with a charge of z = 10⁶ said 0.89 for 7.74."""
    sim = simulation()
    hparams = sim.hyperparameters(clip=1.0, noise_multiplier=4.0, learning_rate=0.1)
    plan = subclassed(EvaluationPlan(0.5, "accuracy"))
    with pytest.raises(ValueError, match="must be an EvaluationPlan, got a Mine"):
        sim.run(sim.init(0, hparams), hparams, 1, evaluate_privately=plan)


def test_a_simulation_stays_as_it_was_made():
    """Once the own mechanism of a simulation ran under the sentences of the package's."""
    sim = simulation()
    for name in ("mechanism", "population", "program", "compiled", "accounts", "unchecked"):
        with pytest.raises(AttributeError, match=f"{name} of a Simulation stays as it is"):
            setattr(sim, name, getattr(sim, name))
    other = dataclasses.replace(POPULATION, voids_epsilon=("Ranges follow from all rows.",))
    assert sim.with_population(other).population is other
    hparams = sim.hyperparameters(clip=1.0, noise_multiplier=4.0, learning_rate=0.1)
    batch = fjs.SimulationBatch(sim, [hparams])
    with pytest.raises(AttributeError, match="settings of a SimulationBatch stays as it is"):
        batch.settings = ()
    # Its program is of its simulation, whose sentences a guarantee has.
    own = simulation(GAUSSIAN._replace(release=lambda *args: PLAIN.release(*args)))
    of_own: Any = batch.with_runs(own, [hparams]).program.runs
    assert of_own.program is own.program
    assert batch.with_runs(sim.with_population(POPULATION), [hparams]).program is batch.program


def test_an_event_of_ones_own_takes_no_name_of_the_packages():
    """Ledgers in files name their events: they would have been read at another cost."""
    for name, inside in (("Cheap", {"kind": "gaussian"}), ("gaussian", {})):
        with pytest.raises(ValueError, match="kind 'gaussian' is an event of fedjaxsim"):
            type(name, (fjs.privacy.PrivacyEvent,), inside)
    assert event_from({"kind": "gaussian"}) == GAUSSIAN.event


def test_events_of_two_files_and_of_two_calls_are_not_taken_for_each_other():
    """Two classes of one name: a sweep's ledgers and stages were once read at the later one's."""

    def cheap_in(module):
        return type("Cheap", (fjs.privacy.PrivacyEvent,), {"__module__": module})

    first, second = cheap_in("one"), cheap_in("two")
    assert [type(event_from(kind().to_dict())) for kind in (first, second)] == [first, second]
    with pytest.raises(ValueError, match=r"kind 'one\.Cheap' is an event of one"):
        type("Other", (fjs.privacy.PrivacyEvent,), {"kind": "one.Cheap", "__module__": "two"})

    def of(cost):
        class Own(fjs.privacy.PrivacyEvent):
            def largest_loss(self, entry, adjacency):
                return cost

        return Own()

    ledger = of(4.0).to_dict()
    of(4.0)
    assert event_from(ledger).largest_loss(Entry(1.0, 1.0, 1), "zero_out") == 4.0
    of(1.0)
    with pytest.raises(ValueError, match="several meanings"):
        event_from(ledger)


def test_a_state_of_a_pure_program_names_the_code_that_it_ran():
    """Read by a simulation of the package's mechanism, it once had no sentence on the other."""
    own = simulation(GAUSSIAN._replace(release=lambda *args: PLAIN.release(*args)))
    hparams = own.hyperparameters(clip=1.0, noise_multiplier=4.0, learning_rate=0.1).as_arrays()
    state = jax.eval_shape(own.program.init, seed_key(0), hparams)
    assert any(f"The mechanism of {__name__}" in each for each in state.privacy.public)
