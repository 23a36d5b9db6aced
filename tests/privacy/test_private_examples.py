"""Example-level privacy: leaks are refused, the rest is DP-SGD, and its ε is the known one."""

import copy
import functools
import gc
import math

import dp_accounting
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from support import own_algorithms
from support.problems import after, least_squares

import fedjaxsim as fjs
from fedjaxsim.algorithm import Context
from fedjaxsim.algorithms import SYSTEMS
from fedjaxsim.audit.bounds import of_scores
from fedjaxsim.data.minibatches import BatchReadOptions, ExampleLeakError, view_here
from fedjaxsim.engine.accounts import gradients_of, require_protection
from fedjaxsim.engine.rows import Rows
from fedjaxsim.gradients.modes import Reverse
from fedjaxsim.kernels import threefry
from fedjaxsim.kernels.primitives import ImpureError
from fedjaxsim.kernels.traces import noted_losses
from fedjaxsim.keys import Stream, stream
from fedjaxsim.models.model import Dense, Model
from fedjaxsim.privacy import silos as of_silos
from fedjaxsim.privacy.accounting import gaussian, losses
from fedjaxsim.privacy.calibration import equal_example_noise
from fedjaxsim.privacy.entries import ADJACENCIES, Drawn, Entry, SamplingScheme
from fedjaxsim.privacy.events import (
    EXAMPLE,
    GAUSSIAN,
    Examples,
    NoRelease,
    PrivacySpend,
    Silos,
)
from fedjaxsim.privacy.guarantee import compose_reports, report, tight_epsilon
from fedjaxsim.privacy.ledger import Ledger, no_charges
from fedjaxsim.privacy.mechanisms import NOISE_MULTIPLIER, noise_like
from fedjaxsim.privacy.private_examples import (
    GradientNoise,
    Sampled,
    _chosen,
    _gradients_of_examples,
    _sums_of_layers,
)
from fedjaxsim.privacy.silos import SiloMinibatches
from fedjaxsim.simulation_batch import SimulationBatch

STEPS, SIZE = 4, 2
POPULATION, TASK = least_squares([5, 30, 9])
PRIVATE = fjs.private_examples(TASK)


def gradients(algorithm, minibatches=fjs.Minibatches(SIZE, steps=STEPS), population=POPULATION):
    rows = Rows.shapes(population, "train")
    return gradients_of(algorithm, minibatches, rows, population.num_clients)


# --- attacks: ways of an example past the noise ---------------------------------------------------


def own(step, task=PRIVATE):
    """FedAvg whose clients do something else with their rows."""
    base = fjs.fedavg(task)

    def client(shared, personal, data, hparams, context):
        update = step(shared.params, data)
        return (
            personal,
            jax.tree.map(lambda leaf, w: leaf.astype(w.dtype), update, shared.params),
            {},
        )

    return base._replace(client=client)


def zeros(w):
    return jax.tree.map(jnp.zeros_like, w)


def filled(w, value):
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, value), w)


def sends_losses(w, data):
    return filled(w, data.fold(lambda total, batch: total + PRIVATE.loss(w, batch), jnp.zeros(())))


def sends_rows(w, data):
    return filled(w, data.fold(lambda total, batch: total + batch.fields["y"][0], jnp.zeros(())))


def counts_examples(w, data):
    return filled(w, data.fold(lambda total, batch: total + batch.weight.sum(), jnp.zeros(())))


def reads_all_rows(w, data):
    def add(total, batch):
        return jax.tree.map(jnp.add, total, jax.grad(PRIVATE.loss)(w, batch))

    return data.full_pass(add, zeros(w))


def keeps_a_minibatch(w, data):
    kept = []

    def step(carry, batch):
        kept.append(batch)
        return PRIVATE.gradient(w, batch)

    data.fold(step, zeros(w))
    return PRIVATE.gradient(w, kept[0])


def gives_a_minibatch_to_the_next_fold(w, data):
    kept = []
    data.fold(lambda carry, batch: kept.append(batch) or carry, w)
    return data.fold(lambda carry, batch: PRIVATE.gradient(carry, kept[0]), w)


def leaks_an_example_from_its_loss(w, data):
    kept = []

    def loss(params, batch):
        kept.append(batch.fields["y"][0])
        return TASK.loss(params, batch)

    def step(carry, batch):
        PRIVATE._replace(loss=loss).gradient(w, batch)
        return carry + kept[-1]

    return filled(w, data.fold(step, jnp.zeros(())))


def in_a_step(repeat):
    """Gradients taken in another way than directly, `repeat(gradient, w)` in a step."""

    def step(w, data):
        return data.fold(lambda w, batch: repeat(lambda w: PRIVATE.gradient(w, batch), w), w)

    step.__name__ = repeat.__name__
    return step


@in_a_step
def scans(gradient, w):
    return jax.lax.scan(lambda w, _: (gradient(w), None), w, length=5)[0]


@in_a_step
def maps(gradient, w):
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1e-6]), w)
    return jax.tree.map(lambda leaf: leaf.mean(0), jax.vmap(gradient)(many))


@in_a_step
def chooses(gradient, w):
    return jax.lax.cond(w["bias"][0] > 0, gradient, lambda w: w, w)


@in_a_step
def differentiates_twice(gradient, w):
    return jax.grad(lambda w: sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient(w))))(w)


@in_a_step
def linearizes(gradient, w):
    return jax.jvp(gradient, (w,), (w,))[1]


@in_a_step
def goes_on_until(gradient, w):
    return jax.lax.while_loop(lambda w: w["bias"][0] < 1, gradient, w)


@in_a_step
def compiles(gradient, w):
    once = jax.jit(gradient)
    return once(once(w))


@in_a_step
def checkpoints(gradient, w):
    once = jax.checkpoint(gradient)
    return once(once(w))


def folds_inside(wrapper):
    """Folds elsewhere than directly in the client."""

    def step(w, data):
        def epoch(w):
            return data.fold(lambda w, batch: PRIVATE.gradient(w, batch), w)

        return wrapper(epoch, w, data)

    step.__name__ = wrapper.__name__
    return step


@folds_inside
def a_fold(epoch, w, data):
    return data.fold(lambda w, _: epoch(w), w)


@folds_inside
def a_loop(epoch, w, data):
    return jax.lax.fori_loop(0, 3, lambda _, w: epoch(w), w)


@folds_inside
def a_function_compiled_before(epoch, w, data):
    once = jax.jit(epoch)
    w = once(w)
    return data.fold(lambda w, _: once(w), w)


@folds_inside
def a_checkpoint(epoch, w, data):
    once = jax.checkpoint(epoch)
    w = once(w)
    return data.fold(lambda w, _: once(w), w)


REFUSED = [
    sends_losses, sends_rows, counts_examples, reads_all_rows, keeps_a_minibatch,
    gives_a_minibatch_to_the_next_fold, scans, maps, chooses, differentiates_twice, linearizes,
    goes_on_until, compiles, checkpoints, a_fold, a_loop, a_function_compiled_before, a_checkpoint,
]  # fmt: skip


@pytest.mark.parametrize("leak", REFUSED, ids=lambda leak: leak.__name__)
def test_other_ways_of_rows_are_refused(leak):
    with pytest.raises(ExampleLeakError, match=r"examples|no noise") as caught:
        gradients(own(leak))
    assert "task.gradient" in str(caught.value) or "directly" in str(caught.value)


def test_an_example_does_not_leave_the_function_of_its_loss():
    with pytest.raises(jax.errors.UnexpectedTracerError):
        gradients(own(leaks_an_example_from_its_loss))


def test_a_jax_that_cannot_tell_traces_refuses(monkeypatch):
    monkeypatch.delattr(jax.extend.core, "get_opaque_trace_state")
    with pytest.raises(ExampleLeakError, match="directly"):
        gradients(fjs.fedavg(PRIVATE))


def test_a_client_s_settings_cannot_be_changed():
    def takes_all_rows(w, data):
        data.minibatches = fjs.Minibatches(30, steps=100)

    with pytest.raises(AttributeError, match="cannot be changed"):
        gradients(own(takes_all_rows))


def reads_the_mean_loss(w, data):
    data.fold(PRIVATE.gradient, w)
    return filled(w, data.metrics()["loss"])


def puts_a_ticket_back(w, data):
    def step(w, batch):
        one = PRIVATE.gradient(w, batch)
        batch.tickets = 0
        return jax.tree.map(jnp.subtract, one, PRIVATE.gradient(zeros(w), batch))

    return data.fold(step, w)


def copies_a_minibatch(w, data):
    def step(w, batch):
        one = PRIVATE.gradient(w, copy.copy(batch))
        return jax.tree.map(jnp.subtract, one, PRIVATE.gradient(zeros(w), copy.copy(batch)))

    return data.fold(step, w)


def copies_its_view(w, data):
    one = copy.copy(data).fold(lambda w, batch: PRIVATE.gradient(w, batch), w)
    return data.fold(lambda w, batch: PRIVATE.gradient(w, batch), one)


def asks_for_a_plain_view(w, data):
    return view_here(data).fold(lambda w, batch: TASK.gradient(w, batch), w)


@pytest.mark.parametrize(
    "leak",
    [reads_the_mean_loss, puts_a_ticket_back, copies_a_minibatch, copies_its_view,
     asks_for_a_plain_view],
    ids=lambda leak: leak.__name__,
)  # fmt: skip
def test_tickets_losses_and_plain_views_are_out_of_reach(leak):
    with pytest.raises((AttributeError, ExampleLeakError), match=r"have no|keeps|changed|view"):
        gradients(own(leak))


def test_a_loss_is_not_noted_for_a_client():
    noted = []

    def step(w, batch):
        with noted_losses() as losses:
            w = PRIVATE.gradient(w, batch)
        noted.append(losses)
        return w

    assert gradients(own(lambda w, data: data.fold(step, w))) == 1
    assert noted[-1] == []


@jax.custom_batching.custom_vmap
def largest_of_all(x):
    return x


@largest_of_all.def_vmap
def _(size, batched, x):
    return jnp.broadcast_to(x.max(0), x.shape), True


@pytest.mark.parametrize("by_layers", [False, True])
def test_a_loss_with_a_rule_for_batches_sees_no_minibatch(by_layers):
    """The rule vanishes in the trace of a client, whose gradients are mapped over examples."""

    def losses(outputs, fields):
        return jnp.square(outputs[:, 0] - fields["y"]) * largest_of_all(fields["y"])

    def loss(params, batch):
        outputs = batch.fields["x"] @ params["kernel"].T
        return batch.mean(losses(outputs, batch.fields))

    assert TASK.layers is not None
    layers = TASK.layers._replace(of=loss, losses=losses) if by_layers else None
    mixes = PRIVATE._replace(loss=loss, layers=layers)
    with pytest.raises(ImpureError, match=r"losses .* calls custom_vmap_call"):
        gradients(own(lambda w, data: data.fold(mixes.gradient, w)))


@pytest.mark.thorough
def test_gradients_of_folds_that_fail_are_charged():
    """Without `jax.jit` a loop is Python's: gradients leave a step that then raises an error."""
    kept = []

    def failing(w, batch):
        kept.append(PRIVATE.gradient(w, batch))
        raise KeyError

    def twice(w, data):
        with jax.disable_jit():
            for start in (w, zeros(w)):
                with pytest.raises(KeyError):
                    data.fold(failing, start)
        return jax.tree.map(jnp.subtract, *kept[-2:])

    assert gradients(own(twice)) == 2


def test_an_algorithm_without_gradients_is_refused():
    with pytest.raises(ExampleLeakError, match="no gradient"):
        gradients(own(lambda w, data: zeros(w)))


def test_running_statistics_are_refused():
    with pytest.raises(ValueError, match="LayerNorm"):
        fjs.private_examples(TASK._replace(track=lambda params, moved, batch: moved))


def test_gradients_are_counted_with_the_hyperparameters_of_the_run():
    algorithm = fjs.fedavg(PRIVATE)

    def client(shared, personal, data, hparams, context):
        def step(w, batch):
            for _ in range(jnp.size(hparams.noise_multiplier)):
                w = PRIVATE.gradient(w, batch)
            return w

        return personal, data.fold(step, shared.params), {}

    known = (*algorithm.hyperparameters, NOISE_MULTIPLIER)
    sim = simulation(algorithm._replace(client=client, hyperparameters=known))
    hparams = values(sim, noise_multiplier=jnp.ones(3), clip=1.0)
    with pytest.raises(ExampleLeakError, match="takes 3 gradients"):
        sim.init(0, hparams)


COUNTS = {
    "pmtl": 1, "ditto": 2, "ppsgd": 1, "dpfedmtl": 1, "dpfedmtl-as-published": 1, "fedavg": 1,
    "fedprox": 1, "naive-dp": 1, "local": 1, "finetune": 1, "scaffold": 1, "feddyn": 1, "apfl": 2,
    "pfedme": 5, "fedala": 2, "fedper": 1, "fedrep": 2, "fedavgm": 1, "fedadam": 1, "fedyogi": 1,
    "fedbn": 1,
}  # fmt: skip
"""The gradients of a minibatch that each system takes; the others are refused."""
QUICK = {"ditto"}
"""Protected systems that `make test` runs."""


@functools.cache
def network():
    """Three clients with classes, and a network whose layers can be told apart."""
    rng = np.random.default_rng(0)
    rows = [
        {"x": rng.normal(size=(n, 3)), "y": rng.integers(0, 3, n).astype(np.int32)}
        for n in (5, 30, 9)
    ]
    model = fjs.models.mlp((3,), 3, (4,), layer_norm=True)
    return fjs.data.Population.from_clients(rows), fjs.tasks.softmax(model, 3)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] if name in COUNTS.keys() - QUICK else [])
        for name in sorted(SYSTEMS)
    ],
)
def test_every_system_is_protected_or_refused(name):
    """By law: gradients at run time, counted as their noise is drawn, are those charged."""
    system = SYSTEMS[name]
    population, task = network()
    task = fjs.tasks.softmax(fjs.models.linear((3,), 3), 3) if system.linear else task
    private = fjs.private_examples(task)
    algorithm = system.make(private, 3)
    steps = 1 if system.one_minibatch else STEPS
    minibatches = fjs.Minibatches(SIZE, steps=steps)
    if name not in COUNTS:
        with pytest.raises(ExampleLeakError, match=r"examples cannot be private|no noise"):
            gradients(algorithm, minibatches, population)
        return
    counted = []

    def noise(key, tree, scale):
        jax.debug.callback(lambda: counted.append(1))
        return noise_like(key, tree, scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedjaxsim.privacy.private_examples.noise_like", noise)
        found = taken_by_a_client(algorithm, minibatches, population)
    assert found == COUNTS[name]
    assert len(counted) == COUNTS[name] * steps


def taken_by_a_client(algorithm, minibatches, population):
    """Run a round of client 1, compiled; return the tickets that its minibatches have given."""
    fields = jax.tree.map(jnp.asarray, dict(population.fields))
    rows, tickets = Rows.place(population, "train", fields), []
    records = (*algorithm.hyperparameters, *PRIVATE.examples.hyperparameters)
    hparams = fjs.Hyperparameters(**{record.name: jnp.float32(0.5) for record in records})

    @jax.jit
    def a_round(key):
        client = jnp.int32(1)
        data = rows.of(client, key, minibatches, BatchReadOptions())
        view = view_here(data, PRIVATE.examples.of_client(data.count, SIZE, hparams, ()))
        states = algorithm.init(key, hparams)
        context = Context(jnp.int32(0), key, client, population.num_clients, jnp.ones(()))
        results = algorithm.client(*states, view, hparams, context)[:2]
        tickets.append(view.tickets)
        return results

    jax.block_until_ready(a_round(jax.random.key(0, impl="threefry2x32")))
    jax.effects_barrier()
    return tickets[-1]


def test_a_fold_of_more_epochs_takes_that_many_more_gradients():
    batches = fjs.Minibatches(SIZE, epochs=2)
    assert gradients(fjs.ditto(PRIVATE, personal_epochs=6), batches) == 1 + 3
    with pytest.raises(ValueError, match="multiples of 2, got 3"):
        gradients(fjs.ditto(PRIVATE, personal_epochs=3), batches)


def test_own_algorithms_are_protected_without_a_change():
    assert gradients(own_algorithms.apfl(PRIVATE)) == 2
    assert gradients(own_algorithms.pfedme(PRIVATE, inner_steps=3)) == 3


@functools.cache
def both_kinds():
    return tuple(simulation(fjs.fedavg(task)) for task in (TASK, PRIVATE))


def test_a_state_keeps_its_kind_of_protection():
    plain, private = both_kinds()
    for one, other in ((plain, private), (private, plain)):
        state = one.init(0, values(one))
        with pytest.raises(ValueError, match="protect examples"):
            other.guarantee(state)


def test_a_checkpoint_of_protected_examples_begins_no_plain_run(tmp_path):
    plain, private = both_kinds()
    fjs.callbacks.Checkpoints(tmp_path).save(private.init(0, values(private)))
    with pytest.raises(ValueError, match="consumed"):
        fjs.callbacks.Checkpoints(tmp_path).restore(plain.init(0, values(plain)))


def test_clients_of_other_data_have_the_epsilon_of_their_own_numbers_of_rows():
    """As those of another seed of a sweep; equal numbers share the program."""
    _, private = both_kinds()
    for counts, shares in (([9, 5, 30], False), ([5, 30, 9], True)):
        other = private.with_population(least_squares(counts, seed=1)[0])
        event = other.accounts[1][1]
        assert isinstance(event, Examples)
        assert event.silos is not None
        assert event.silos.counts == tuple(counts)
        assert (other.program is private.program) == shares


@pytest.mark.thorough
def test_a_run_resumed_with_other_noise_is_charged_for_both(tmp_path):
    strong, weak = (
        simulation(fjs.fedavg(fjs.private_examples(TASK, epsilon=epsilon, rounds=2)))
        for epsilon in (0.5, 5.0)
    )

    def a_round(sim, state):
        after, _ = sim.round(state, values(sim))
        return after, np.array(sim.guarantee(after).examples.zero_out)

    first, of_strong = a_round(strong, strong.init(0, values(strong)))
    fjs.callbacks.Checkpoints(tmp_path).save(first)
    start = weak.init(0, values(weak))
    _, of_weak = a_round(weak, start)
    _, of_both = a_round(weak, fjs.callbacks.Checkpoints(tmp_path).restore(start))
    assert np.all(of_both > np.maximum(of_strong, of_weak))


def test_a_stage_without_protected_messages_may_follow_if_it_sends_nothing():
    scheme = SamplingScheme("full", 3, 3)
    protected = [(scheme, GAUSSIAN), (scheme, EXAMPLE)]
    state = Ledger(tuple(no_charges(scheme, event, 1) for scheme, event in protected))
    require_protection(state, protected)
    require_protection(state, [(scheme, NoRelease())])
    with pytest.raises(ValueError, match="protect examples"):
        require_protection(state, [(scheme, GAUSSIAN)])


# --- the mechanism --------------------------------------------------------------------------------


def simulation(algorithm, population=POPULATION, **settings):
    return fjs.Simulation(
        algorithm, population, fjs.full_participation(), fjs.Minibatches(SIZE, steps=STEPS),
        **settings,
    )  # fmt: skip


def values(sim, **changes):
    known = {"example_noise_multiplier": 0.7, "example_clip": 0.3, "learning_rate": 0.1} | changes
    return sim.hyperparameters(**{name: v for name, v in known.items() if name in sim.records})


def test_one_client_runs_dp_sgd():
    """Against numpy, with the gradients of least squares, on the same coins and noise."""
    population, task = least_squares([7])
    private = fjs.private_examples(task)
    sim = fjs.Simulation(
        fjs.local(private), population, fjs.full_participation(), fjs.Minibatches(SIZE, steps=1),
        fjs.no_release(),
    )  # fmt: skip
    hparams = values(sim)
    state, x, y = sim.init(3, hparams), population.fields["x"], population.fields["y"]
    rate = np.float32(SIZE) / np.float32(7)
    # Bit k of each row's number is the row's bit of word k; it has 16 bits beside those with
    # which the rate of 32 rows begins.
    bits = 16 + 2 * math.ceil(math.log2(32 / SIZE) / 2)

    @jax.jit
    def words_and_noise(state, w):
        drawn = sim.program.draw(state, hparams.as_arrays())
        key = stream(stream(drawn.clients, Stream.MINIBATCHES, 0), Stream.PROTECTED, 0)
        coin, noise = (stream(key, name) for name in (Stream.EXAMPLE_COINS, Stream.GRADIENT_NOISE))
        pairs = threefry.words(
            jax.random.key_data(coin), jnp.arange(bits // 2, dtype=np.uint32), jnp.uint32(0)
        )
        ticket = stream(noise, Stream.GRADIENT_NOISE, 0)
        added = noise_like(ticket, w, jnp.float32(0.7) * jnp.float32(0.3))
        return jnp.stack(pairs, axis=1).ravel(), added

    for _ in range(3):
        w = {name: np.asarray(leaf)[0] for name, leaf in state.personal.items()}
        coins, added = words_and_noise(state, w)
        words = [*enumerate(coins.tolist())]
        numbers = [sum((word >> row & 1) << k for k, word in words) for row in range(7)]
        heads = np.array(numbers) < np.floor(float(rate) * 2.0**bits)
        total = {name: np.zeros(leaf.shape) for name, leaf in w.items()}
        for row in np.flatnonzero(heads):
            residual = w["kernel"] @ x[row] + w["bias"] - y[row]
            gradient = {"kernel": np.outer(residual, x[row]), "bias": residual}
            norm = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
            for name in total:
                total[name] += gradient[name] * min(1, 0.3 / norm)
        state, _ = sim.round(state, hparams)
        for name, leaf in state.personal.items():
            step = (total[name] + np.asarray(added[name])) / (float(rate) * 7)
            np.testing.assert_allclose(leaf[0], w[name] - 0.1 * step, rtol=1e-4, atol=1e-5)
    assert np.asarray(state.consumed).tolist() == [3]


def noise_of(z=1.0, clip=1.0, capacity=8, size=8):
    return GradientNoise(capacity, size, jnp.float32(clip), jnp.float32(z))


def sampled(key, drawn, expected):
    """A minibatch whose rows are at hand."""
    return Sampled(
        jnp.asarray(np.zeros(0, np.int32)), jnp.int32(drawn), key, jnp.float32(expected), key
    )


def in_float32(fields, weight):
    """A minibatch without programs that convert it."""
    fields = {name: jnp.asarray(np.asarray(field, np.float32)) for name, field in fields.items()}
    return fjs.Batch(fields, jnp.asarray(np.asarray(weight, np.float32)))


def batch_of(rows, places=8):
    fields = {"x": np.ones((places, 3)), "y": np.zeros(places)}
    return in_float32(fields, np.arange(places) < rows)


def test_every_ticket_has_noise_of_its_own():
    """Whatever the parameters: of standard deviation zC, and independent."""

    @jax.jit
    @jax.vmap
    def noise(seed):
        w = {"kernel": jnp.ones((1, 3)), "bias": jnp.zeros(1)}
        drawn = sampled(jax.random.key(seed, impl="threefry2x32"), 0, expected=1.0)
        rows = batch_of(0)
        found = (noise_of(clip=2.0).gradient(TASK, w, drawn, rows, ticket) for ticket in (0, 1))
        return [gradient["kernel"].ravel() for _, gradient in found]

    one, other = map(np.asarray, noise(jnp.arange(2000)))
    # Of 6,000 numbers: five standard errors.
    assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 5 / np.sqrt(6000)
    for each in (one, other):
        assert abs(each.std() / 2 - 1) < 5 / np.sqrt(2 * 6000)


def test_an_example_whose_gradient_is_not_finite_adds_nothing():
    """Of six rows with gradient (1, 1, 1, 1), clipped to half of it, four are finite."""
    batch = batch_of(6)
    batch.fields["y"] = jnp.asarray(np.array([np.nan, np.inf, *[-1] * 6], np.float32))
    w = {"kernel": np.zeros((1, 3), np.float32), "bias": np.zeros(1, np.float32)}
    drawn = sampled(jax.random.key(0), 6, 6)
    gradient = jax.jit(lambda w: noise_of(0.0).gradient(TASK, w, drawn, batch, 0)[1])(w)
    for leaf in jax.tree.leaves(gradient):
        np.testing.assert_allclose(leaf, 4 * 0.5 / 6, rtol=1e-4)  # the clip is a little below C


def test_one_example_moves_the_sum_by_no_more_than_the_clip_norm():
    """Where rounding is worst for a sum in float32 (Casacuberta et al. 2022): it moves by 20 C."""
    unit, half = 2.0**-8, 2**12
    chunk = [[sign * unit, *[0.0] * 15] for sign in (0.51, -0.49)]
    targets = [0.5] * (half * 16 - 16), [0.5] * 15, [0.75], chunk * 64
    rows = np.concatenate([np.ravel(each) for each in targets]).astype(np.float32)
    w, places = {"kernel": jnp.zeros((1, 1)), "bias": jnp.zeros(1)}, len(rows)
    task = TASK._replace(loss=lambda w, batch: batch.mean(batch.fields["y"] * w["kernel"][0, 0]))

    @jax.jit
    def total(rows):
        batch = fjs.Batch({"y": rows}, jnp.ones(places))
        noise = noise_of(0.0, capacity=places, size=16)
        return noise.gradient(task, w, sampled(jax.random.key(0), places, 1), batch, 0)[1]

    without = rows.copy()
    without[half * 16 - 1] = 0
    moved = float(total(rows)["kernel"][0, 0]) - float(total(without)["kernel"][0, 0])
    whole = rows.astype(np.float64).sum()
    assert abs(moved - 0.75) < 1e-3 + 2 * np.spacing(np.float32(whole))


@pytest.mark.parametrize("by_layers", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_an_example_that_is_drawn_moves_no_other_one_s_rounding(by_layers):
    """It moves halves of C/2²¹ to other microbatches, where one half alone is truncated."""
    places, width = 512, 4096
    rest = np.where(np.isin(np.arange(places - 1) % 32, (0, 15)), 2.0**-22, 0.0)
    task = fjs.tasks.squared(fjs.models.linear((width,), 1))
    if not by_layers:
        task = task._replace(layers=None)
    params = jax.tree.map(jnp.zeros_like, task.init(jax.random.key(0)))
    noise = noise_of(0.0, capacity=places, size=16)

    @jax.jit
    def total(targets, drawn):
        fields = {"x": jnp.ones((places, width)), "y": targets}
        batch = fjs.Batch(fields, (jnp.arange(places) < drawn).astype(float))
        minibatch = sampled(jax.random.key(0), drawn, 1)
        gradient = noise.gradient(task, params, minibatch, batch, 0)[1]
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradient)])

    drawn, absent = (
        np.asarray(total(jnp.asarray(targets, jnp.float32), n), np.float64)
        for targets, n in (([-1.0, *rest], places), ([*rest, 0.0], places - 1))
    )
    assert 0.99 < np.linalg.norm(drawn - absent) <= 1


@pytest.mark.parametrize(
    "hidden", [*(pytest.param(each, marks=pytest.mark.thorough) for each in ((), (5,))), (4, 3)]
)
def test_sums_of_dense_layers_are_sums_over_examples(hidden):
    """The plain form of the same sum, with examples that are clipped, absent or not finite."""
    rng = np.random.default_rng(1)
    model = fjs.models.mlp((3,), 4, hidden) if hidden else fjs.models.linear((3,), 4)
    task = fjs.tasks.softmax(model, 4)
    params = jax.tree.map(
        lambda leaf: leaf + 0.3 * rng.normal(size=leaf.shape).astype(np.float32),
        jax.device_get(jax.jit(task.init)(jax.random.key(0))),
    )
    x = rng.normal(size=(16, 3)).astype(np.float32) * np.geomspace(1e-3, 1e3, 16)[:, None]
    x[3], x[5, 1] = np.nan, np.inf
    batch = in_float32({"x": x}, np.arange(16) < 14)
    batch.fields["y"] = jnp.asarray(np.arange(16) % 4)
    assert task.layers is not None
    assert task.layers.of is task.loss
    (_, one), (_, other) = (
        jax.jit(functools.partial(sums, task))(params, batch, jnp.float32(0.5))
        for sums in (_sums_of_layers, _gradients_of_examples)
    )
    other = jax.tree.map(lambda leaf: np.asarray(leaf).sum(axis=0, keepdims=True), other)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
        assert np.abs(b).max() > 0.01


def test_dense_layers_whose_loss_mixes_examples_see_one_at_a_time():
    """Outputs less their mean: jointly, one example would move the gradients of all the others."""
    model = fjs.models.linear((3,), 4)
    task = fjs.tasks.softmax(model, 4)
    assert task.layers is not None
    plain = task.layers.losses
    mixed = task._replace(
        layers=task.layers._replace(losses=lambda o, f: plain(o + 9 * o.sum(0) - 9 * o, f))
    )
    params = jax.jit(lambda key: jax.tree.map(lambda leaf: leaf + 0.3, task.init(key)))(
        jax.random.key(0)
    )
    x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    batch = in_float32({"x": x}, np.ones(16))
    batch.fields["y"] = jnp.asarray(np.arange(16) % 4)
    sums = [
        jax.jit(functools.partial(_sums_of_layers, each))(params, batch, jnp.float32(0.5))
        for each in (mixed, task)
    ]
    for one, other in zip(*map(jax.tree.leaves, sums), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_dense_layers_of_ones_own_cannot_stretch_a_clipped_gradient(biased):
    """They say a thousandth of their inputs, or no bias: the sum is of what they say, clipped."""
    task = fjs.tasks.squared(fjs.models.linear((3,), 1))
    assert task.layers is not None
    dense = task.layers.dense

    def understated(params, x, shifts):
        outputs, inputs = dense.apply(params, x, shifts)
        return outputs, [1e-3 * each for each in inputs]

    layers = task.layers._replace(dense=dense._replace(apply=understated, biased=biased))
    batch = fjs.Batch({"x": jnp.full((1, 3), 10.0), "y": jnp.full(1, 1e4)}, jnp.ones(1))
    params = task.init(jax.random.key(0))
    sums = jax.jit(functools.partial(_sums_of_layers, task._replace(layers=layers)))
    _, total = sums(params, batch, jnp.float32(0.5))
    moved = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(total)])
    assert 0.49 < np.linalg.norm(moved) <= 0.5


def test_a_layer_that_says_fewer_inputs_than_its_kernel_has_rows_is_refused():
    """Its gradient would be added to each of the 50 rows: √50 times the bound."""
    rows = {"kernel": jnp.ones((50, 1)), "bias": jnp.zeros(1)}

    def shifted(params, x, shifts):
        return x * params["a"]["kernel"].sum(0) + params["a"]["bias"] + shifts[0], [x]

    def apply(params, x):
        return shifted(params, x, [0.0])[0]

    dense = Dense(apply, (1,), shifted, ("a",))
    task = fjs.tasks.squared(Model(lambda key: {"a": rows}, apply, dense=dense))
    batch = fjs.Batch({"x": jnp.ones((1, 1)), "y": jnp.zeros(1)}, jnp.ones(1))
    noise = GradientNoise(1, 1, jnp.float32(0.5), jnp.float32(0.0))
    with pytest.raises(TypeError, match="reshape"):
        noise._clipped_sum(task, {"a": rows}, sampled(jax.random.key(0), 1, 1), batch)


@pytest.mark.parametrize("size", [224, 6400])
def test_the_places_of_a_minibatch_are_its_rows_in_order(size):
    drawn = np.random.default_rng(0).random(size) < 0.3
    words = np.packbits(drawn.reshape(-1, 32), axis=1, bitorder="little")
    coins = words.view(np.uint32).ravel()
    found, number = jax.jit(_chosen, static_argnums=1)(jnp.asarray(coins), size)
    assert number == drawn.sum()
    np.testing.assert_array_equal(found[:number], np.flatnonzero(drawn))


def test_minibatches_are_poisson_samples():
    """The number of inclusions of each row and the size of minibatches, by five standard errors."""
    batches = noise_of(capacity=32)

    @jax.jit
    @jax.vmap
    def drawn(seed):
        key = jax.random.key(seed, impl="threefry2x32")
        drawn = batches.sample(key, 3, jnp.int32(10), 16)
        batch = batches.read(drawn, lambda position: {"x": position})
        return jnp.zeros(32).at[batch.fields["x"]].add(batch.weight)

    counts = np.asarray(drawn(jnp.arange(4000)))
    error = 5 * np.sqrt(0.3 * 0.7 / 4000)
    assert np.abs(counts[:, :10].mean(0) - 0.3).max() < error
    assert counts[:, 10:].sum() == 0
    assert counts.max() == 1
    sizes = counts.sum(1)
    assert abs(sizes.var() / (10 * 0.3 * 0.7) - 1) < 5 * np.sqrt(2 / 4000)


@pytest.mark.thorough
def test_own_apfl_runs_under_both_kinds_of_privacy():
    sim = simulation(own_algorithms.apfl(PRIVATE))
    hparams = values(sim, clip=1.0, noise_multiplier=3.0, example_noise_multiplier=2.0)
    state, _ = sim.run(sim.init(0, hparams), hparams, 2)
    report = sim.guarantee(state)
    assert report.examples is not None
    assert {each.unit for each in report.guarantees} == {"client", "example"}
    assert all(each.epsilon is not None for each in report.guarantees)
    assert np.asarray(state.consumed).tolist() == [2 * STEPS] * 3
    # Two gradients of one minibatch are one release with noise z/√2.
    known = tight_epsilon([SiloMinibatches(30, SIZE, 2 * STEPS, 2 / np.sqrt(2)).spend()], 1 / 300)
    assert known <= report.examples.zero_out[1] < 1.001 * known
    shown = report.to_json()["example"]["clients"]["zero_out"]
    assert shown["min"] == report.examples.zero_out.min()
    assert "one example, zero_out: ε of clients" in str(report)


@pytest.mark.thorough
def test_rounds_and_noise_agree_on_all_placements():
    """Chunks, devices, streams and sweeps change nothing beyond rounding."""
    algorithm = fjs.pmtl(PRIVATE)
    usual = simulation(algorithm)
    hparams = values(usual, lam=0.5)
    wanted, _ = usual.round(usual.init(0, hparams), hparams)
    others = [
        simulation(algorithm, chunk_map="scan"),
        simulation(algorithm, devices=jax.devices()[:1]),
    ]
    for sim in others:
        got, _ = sim.round(sim.init(0, hparams), hparams)
        for one, other in zip(*map(jax.tree.leaves, (wanted.personal, got.personal)), strict=True):
            np.testing.assert_allclose(np.asarray(one)[:3], np.asarray(other)[:3], atol=1e-5)
        assert np.asarray(got.consumed)[:3].tolist() == [STEPS] * 3


@pytest.mark.thorough
def test_streams_and_sweeps_are_the_plain_run():
    task = fjs.private_examples(TASK)
    parts = (fjs.fedavg(task), POPULATION, fjs.poisson(0.7), fjs.Minibatches(SIZE, steps=STEPS))
    plain, streamed = fjs.Simulation(*parts), fjs.Simulation(*parts, streamed=True)
    points = [values(plain, example_noise_multiplier=z) for z in (0.5, 2.0)]
    many = SimulationBatch(plain, points)
    together, _ = many.run(many.init(0), 2)
    for index, point in enumerate(points):
        wanted, _ = plain.run(plain.init(0, point), point, 2)
        got, _ = streamed.run(streamed.init(0, point), point, 2)
        for name, leaf in wanted.shared.params.items():
            np.testing.assert_allclose(leaf, got.shared.params[name], atol=1e-5)
            np.testing.assert_allclose(leaf, together.shared.params[name][index], atol=1e-5)
        assert np.asarray(wanted.consumed).tolist() == np.asarray(got.consumed).tolist()
        one, other = plain.guarantee(wanted).examples, streamed.guarantee(got).examples
        assert one is not None
        assert other is not None
        assert np.array_equal(one.zero_out, other.zero_out)


@pytest.mark.thorough
def test_a_run_is_differentiable_through_its_private_gradients():
    """In z, by central differences."""
    sim = fjs.Simulation(
        fjs.fedavg(PRIVATE), POPULATION, fjs.full_participation(), fjs.Minibatches(SIZE, steps=1)
    )
    state, rows = sim.init(0, values(sim)), sim.rows["train"]

    def after(z, program=sim.program):
        hparams = values(sim).as_arrays().replace(example_noise_multiplier=z)
        later, _ = program.step(state, hparams, rows)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(later.shared.params))

    of_reverse = functools.partial(after, program=Reverse().program(sim.program, rows))
    slope, step = jax.jit(jax.grad(of_reverse))(jnp.float32(0.7)), 0.05
    plain = jax.jit(after)
    wanted = (plain(jnp.float32(0.7 + step)) - plain(jnp.float32(0.7 - step))) / (2 * step)
    assert slope == pytest.approx(float(wanted), rel=1e-2)
    forward = jax.jit(lambda z: jax.jvp(after, (z,), (jnp.float32(1),))[1])(jnp.float32(0.7))
    assert forward == pytest.approx(float(wanted), rel=1e-2)


# --- ε --------------------------------------------------------------------------------------------


def make_silos(counts, **settings):
    known = {"size": 4, "capacity": 40, "gradients": 1, "steps": 3, "epochs": None} | settings
    return Silos(tuple(counts), **known)


def charge(counts, z, rounds, **settings):
    event, m = Examples(silos=make_silos(counts, **settings)), len(counts)
    return PrivacySpend(SamplingScheme("full", m, m), event, (Entry(z, 1.0, rounds),))


@pytest.mark.thorough
def test_epsilon_of_twenty_silos_is_that_of_dp_accounting():
    rng = np.random.default_rng(0)
    counts = rng.integers(5, 400, 20).tolist()
    taken = rng.integers(1, 60, 20)
    found = of_silos.epsilons([charge(counts, 1.1, 20)], minibatches=taken.tolist())
    for n, steps, delta, epsilon in zip(counts, taken, found.delta, found.zero_out, strict=True):
        event = dp_accounting.PoissonSampledDpEvent(
            min(1.0, 4 / n), dp_accounting.GaussianDpEvent(1.1)
        )
        accountant = PLDAccountant(value_discretization_interval=1e-3)
        known = accountant.compose(event, int(steps)).get_epsilon(delta)
        assert 0.999 * known < epsilon < 1.002 * known
        assert delta == 1 / (10 * n)


@pytest.mark.parametrize(
    ("rows", "size", "number", "z", "replace"),
    [
        (40, 4, 6, 0.56, 4.45),
        (100, 16, 100, 1.0, 14.0),
        (10_000, 64, 2000, 0.6, 7.89),
        (1000, 32, 500, 1.0, 6.29),
    ],
)
def test_examples_cost_the_divergence_of_their_pair(rows, size, number, z, replace):
    """Within 2 % of the tight value for both adjacencies, at δ = 1/(10 n)."""
    taken, delta = (SiloMinibatches(rows, size, number, z),), 1 / (10 * rows)
    for adjacency, tight in zip(ADJACENCIES, (None, replace), strict=True):
        found = of_silos.profile(taken, adjacency).epsilon(delta)
        exact = tight_epsilon([taken[0].spend()], delta, adjacency)
        assert exact <= found < 1.002 * exact
        assert tight is None or found == pytest.approx(tight, rel=0.02)


def test_a_release_costs_examples_what_replacing_their_client_costs_in_every_round():
    """Who sees a message knows that its client took part, so sampling hides nothing."""
    scheme = SamplingScheme("poisson", 100, 100)
    released = PrivacySpend(scheme, GAUSSIAN, (Entry(4.0, 0.1, 5),))
    found = of_silos.profile((), "zero_out", (of_silos._to_examples(released),))
    # Five Gaussian releases at distance 2 and z = 4 are one of μ = 2 √5/4.
    assert found.epsilon(1e-3) == pytest.approx(gaussian.epsilon(1e-3, math.sqrt(5) / 2), rel=1e-9)


def test_stages_and_runs_count_their_own_rows():
    """A run of 20 rows costs its rate, whatever the numbers of rows of one composed before it."""
    few, many = charge([20], 1.1, 10, delta=1e-3), charge([4000], 1.1, 10, delta=1e-3)
    alone = of_silos.epsilons([few]).zero_out[0]
    for order in ([few, many], [many, few]):
        found = of_silos.epsilons(order)
        assert found.zero_out[0] > alone
        assert found.counts.tolist() == [4000]


def test_runs_with_and_without_protection_do_not_compose():
    """The plain run may give away what the other protects."""
    plain = PrivacySpend(SamplingScheme("full", 1, 1), GAUSSIAN, (Entry(5.0, 1.0, 3),))
    reports = [
        report([plain, charge([20], 1.1, 3)], 0.1, draws=(Drawn("a", 3),)),
        report([plain], 0.1, draws=(Drawn("b", 3),)),
    ]
    with pytest.raises(ValueError, match="no ε of examples"):
        compose_reports(reports)
    assert compose_reports(reports[:1]).examples is not None


def test_noise_for_equal_epsilon_meets_it():
    noise = equal_example_noise(make_silos([3, 20, 300], gradients=2), 2.0, 10)
    spend = charge([3, 20, 300], 1.0, 10, gradients=2, noise=noise)
    found = of_silos.epsilons([spend])
    np.testing.assert_array_less(found.zero_out, 2.0 + 1e-9)
    np.testing.assert_array_less(1.99, found.zero_out)


def test_calibrated_noise_is_the_run_s():
    task = fjs.private_examples(TASK, epsilon=3.0, rounds=1, delta=1e-3)
    sim = simulation(fjs.local(task), mechanism=fjs.no_release())
    assert "example_noise_multiplier" not in sim.records
    found = sim.guarantee(after(sim, values(sim), 1)).examples
    assert found is not None
    assert set(found.delta) == {1e-3}
    assert 2.98 < found.zero_out.min() <= found.zero_out.max() <= 3.0


# --- an audit with canary examples ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("z", "refuted"), [pytest.param(4.0, False, marks=pytest.mark.thorough), (0.05, True)]
)
def test_canary_examples_bound_epsilon_from_below(z, refuted):
    """Half of 200 orthogonal examples are in the one minibatch of a step: guess which.

    The reported ε is that of z = 4: with less noise than claimed, the audit refutes it.
    """
    canaries = 200
    present = (np.random.default_rng(1).random(canaries) < 0.5).astype(np.float32)
    ones = np.ones(canaries, np.float32)
    batch = in_float32({"x": np.eye(canaries), "y": ones}, ones)
    drawn = sampled(jax.random.key(0, impl="threefry2x32"), canaries, canaries)

    def loss(w, batch):
        of_rows = jnp.asarray(present)[jnp.argmax(batch.fields["x"], 1)]
        return batch.mean(-of_rows * (batch.fields["x"] @ w))

    task = TASK._replace(loss=loss)
    noise = noise_of(z, capacity=canaries, size=50)
    gradient = jax.jit(lambda w: noise.gradient(task, w, drawn, batch, 0)[1])(0 * ones)
    taken = (SiloMinibatches(canaries, canaries, 1, 4.0),)
    claimed = of_silos.profile(taken, "zero_out").epsilon(1e-3)
    bound = of_scores(-np.asarray(gradient), present > 0, 1e-3)
    assert (bound.epsilon > claimed) == refuted


@pytest.mark.thorough
def test_epsilons_of_many_kinds_of_clients_keep_few_grids_in_memory():
    """Each profile holds the losses of a run on a grid; numbers alone are kept of most."""
    counts = tuple(range(10, 110))
    event = Examples(silos=Silos(counts, 5, 40, 1, 2, None))
    m = len(counts)
    charge = PrivacySpend(SamplingScheme("full", m, m), event, (Entry(2.0, 1.0, 3),))
    of_silos.profile.cache_clear()
    found = of_silos.epsilons([charge])
    assert len(found.zero_out) == m
    gc.collect()
    grids = [each for each in gc.get_objects() if isinstance(each, losses._Sum)]
    assert len(grids) <= 2 * (of_silos._GRIDS + 16)
