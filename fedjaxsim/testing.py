"""A test of the billboard lemma's premise on any simulation.

By the lemma (Hsu et al. 2016) personal models are jointly private if the releases are private and
each client's state is a function of the releases and that client's data. `check_billboard` tests
the second condition on any parts, without a test framework.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks
from fedjaxsim.data.population import Population, with_other_counts, with_other_rows
from fedjaxsim.engine.evaluation import targets_of
from fedjaxsim.engine.state import PARTS
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.keys import seed_key
from fedjaxsim.privacy.mechanisms.protocol import stamped
from fedjaxsim.simulation import Simulation, SimulationState

PyTree = Any


class NothingTestedError(ValueError):
    """Error of a `check_billboard` in which other data changed nothing."""


def check_billboard(
    simulation: Simulation,
    hparams: Hyperparameters,
    *,
    rounds: int = 3,
    clients: Sequence[int] | None = None,
    seed: int = 0,
    build: Callable[[Population], Simulation] | None = None,
    split: str | None = "train",
) -> None:
    """Check that one client's data reach other clients only through the releases.

    Each round of a first run is computed twice: for its release, and with that release played back.
    Then all rows of one client are replaced (large random numbers, other labels that occur), and
    its numbers of rows in each split change, unless its examples are protected, whose numbers are
    public. A second run through the same compiled functions is played the same releases and
    mechanism states. Every other client's message, state, minibatch counter and metrics, the server
    state and the ledger must equal the first run's bit for bit.

    `Population.max_rows` is declared in both runs. The check does not cover data named in
    `Simulation.public`, and leaks in the releases themselves, which `fedjaxsim audit` tests; nor
    numbers computed from the population in a function's closure, unless the factory is given as
    `build`.

    Args:
      simulation: the simulation.
      hparams: its hyperparameters.
      rounds: number of rounds.
      clients: the clients whose data change, one after another, in [0, m); by default the first,
        a middle one and the last of those who take part.
      seed: seed of the run and of the replacing data.
      build: the function `(population) -> Simulation` that made the simulation, if it reads data.
      split: the split on which metrics are computed; None for none.

    Raises:
      AssertionError: naming the round, the function or leaf, and the client who holds it.
      NothingTestedError: if the changed data had no effect, as if the client was never drawn.
    """
    m = simulation.num_clients
    for client in clients or ():
        checks.count(0, m - 1, client=client)
    simulation.check_rounds(hparams, 0, rounds, None)
    population = simulation.population
    # With room for a row more, so that full splits may have other counts, too.
    largest = population.max_rows or int(population.counts.max()) + 1
    population = dataclasses.replace(population, max_rows=largest)
    simulation = build(population) if build else simulation
    first = _with_tape(simulation, hparams, population)
    begun = state = first.init(seed, hparams)
    records = []
    for _ in range(rounds):
        released = first.round(state, hparams)[0].mechanism.computed
        state, metrics = _played(first, state, hparams, released)
        records.append((state, metrics))
    if clients is None:
        drawn = np.flatnonzero(np.any([record.mechanism.present for record, _ in records], axis=0))
        clients = [*dict.fromkeys(drawn[[0, len(drawn) // 2, -1]].tolist())] if len(drawn) else []
    if not clients:
        raise NothingTestedError(f"no client took part in {rounds} rounds, so nothing was tested")
    for client in clients:
        changed = with_other_rows(population, [client], seed)
        if simulation.examples is None:
            changed = with_other_counts(changed, client)
        if build is None:
            second = first.with_population(changed)
        else:
            second = _with_tape(build(changed), hparams, changed)
        other, reached = second.init(seed, hparams), False
        _compare("init", client, _facts(begun, range(m)), _facts(other, range(m)))
        other_clients = [k for k in range(m) if k != client]
        for number, (record, told) in enumerate(records, 1):
            other, other_told = _played(second, other, hparams, record.mechanism.played)
            _compare(
                f"round {number}",
                client,
                _facts(record, other_clients),
                _facts(other, other_clients),
            )
            facts, other_facts = (
                _bytes("", (metrics, state.mechanism.computed))
                | _bytes("", (state.personal, state.consumed), [client])
                for state, metrics in ((record, told), (other, other_told))
            )
            reached |= facts != other_facts
        if not reached:
            raise NothingTestedError(
                f"other data of client {client} changed nothing in {rounds} rounds, so nothing "
                "was tested; give more rounds, a higher sampling rate, another seed or another "
                "client"
            )
        if split is not None:
            facts, other_facts = (
                _metrics(sim, ended, hparams, split, other_clients)
                for sim, ended in ((first, state), (second, other))
            )
            _compare(f"evaluation on {split} rows", client, facts, other_facts)
        if build is not None:
            facts, other_facts = (
                _predictions(sim, other, hparams, other_clients) for sim in (first, second)
            )
            _compare("predict", client, facts, other_facts)


class _Tape(NamedTuple):
    """State of a mechanism, `inner`, in whose place releases are played.

    `computed` are the last round's release and next state, and `played` those that it used. `sent`
    are the clients' messages before the mechanism, leaves (m, ...), and `present`, (m,) bool, says
    who took part. A release is always played, since a program that also took the one it computes
    could round it in another way there.
    """

    inner: PyTree
    played: PyTree
    computed: PyTree
    sent: PyTree
    present: jax.Array


def _played(
    simulation: Simulation, state: SimulationState, hparams: Hyperparameters, release: PyTree
) -> tuple[SimulationState, Any]:
    """Compute a round with a release and a next state of the mechanism that are given."""
    tape = state.mechanism._replace(played=release)
    return simulation.round(dataclasses.replace(state, mechanism=tape), hparams)


def _with_tape(
    simulation: Simulation, hparams: Hyperparameters, population: Population
) -> Simulation:
    """Return a simulation with a mechanism that records its releases and plays others."""
    mechanism, arrays, m = simulation.mechanism, simulation.check(hparams), simulation.num_clients
    key = seed_key(0)
    message = simulation.message_shapes(key, arrays)

    def one_release():
        state, total = mechanism.init(arrays), mechanism.zero(message, m)
        out = mechanism.release(total, jnp.ones(()), key, state, arrays, jnp.int32(0))
        return out.value, out.state

    def unsent():
        sent = jax.tree.map(lambda leaf: jnp.zeros((m, *leaf.shape), leaf.dtype), message)
        return sent, jnp.zeros(m, jnp.int32)

    def init(hparams):
        shapes = jax.eval_shape(one_release)
        blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return _Tape(mechanism.init(hparams), blank, blank, *unsent())

    def zero(message, num_clients):
        inner = mechanism.zero(message, num_clients)
        return inner._replace(total=(inner.total, *unsent()))

    def add(accumulator, messages, mask, ids, state, hparams):
        total, sent, present = accumulator.total
        inner = accumulator._replace(total=total)
        inner = mechanism.add(inner, messages, mask, ids, state.inner, hparams)

        def note(noted, leaf):
            here = mask.reshape(-1, *[1] * (leaf.ndim - 1))
            return noted.at[ids].add(jnp.where(here, leaf, 0))

        sent = jax.tree.map(note, sent, messages.dense())
        return inner._replace(total=(inner.total, sent, present.at[ids].add(mask)))

    def release(accumulator, denominator, key, state, hparams, round_):
        total, sent, present = accumulator.total
        inner = accumulator._replace(total=total)
        out = mechanism.release(inner, denominator, key, state.inner, hparams, round_)
        value, state_after = state.played
        tape = _Tape(state_after, state.played, (out.value, out.state), sent, present > 0)
        return out._replace(value=value, state=tape)

    taped = stamped(mechanism._replace(init=init, zero=zero, add=add, release=release))
    return dataclasses.replace(simulation, mechanism=taped, population=population)


# --- comparing, bit for bit -----------------------------------------------------------------------

Facts = dict[str, tuple[Any, ...]]
"""Type and bytes of each named leaf, clients' leaves one by one."""


def _facts(state: SimulationState, clients: Iterable[int]) -> Facts:
    """Return the facts of a state, and of the messages before it, that are held by clients."""
    facts = _bytes("message", state.mechanism.sent, clients)
    state = dataclasses.replace(state, mechanism=state.mechanism.inner)
    for name, part in PARTS.items():
        of_clients = clients if part.owner == "clients" else None
        facts |= _bytes(name, getattr(state, name), of_clients)
    return facts


def _bytes(name: str, tree: PyTree, clients: Iterable[int] | None = None) -> Facts:
    """Return the facts of a pytree or, of leaves (m, ...), of some clients."""
    facts: Facts = {f"the structure of `{name}`": (jax.tree.structure(tree),)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        where = f"`{name}`" + (f" at {jax.tree_util.keystr(path)}" if path else "")
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        rows = {where: array}
        if clients is not None:
            rows = {f"{where} of client {k}": array[k] for k in clients}
        facts |= {at: (row.shape, row.dtype, row.tobytes()) for at, row in rows.items()}
    return facts


def _compare(when: str, client: int, facts: Facts, other_facts: Facts) -> None:
    for where in facts | other_facts:
        if facts.get(where) != other_facts.get(where):
            raise AssertionError(
                f"{when}: {where} depends on the data of client {client} other than by the releases"
            )


def _metrics(
    simulation: Simulation,
    state: SimulationState,
    hparams: Hyperparameters,
    split: str,
    clients: Iterable[int],
) -> Facts:
    """Return the facts of some clients' metrics and numbers of targets."""
    rows, arrays = simulation.placed[split], hparams.as_arrays()
    measured = simulation.compiled.evaluate(state, arrays, rows, None)
    targets = targets_of(simulation.population, split, simulation.program.algorithm.task)
    return _bytes("metrics", measured, clients) | _bytes("targets", targets, clients)


def _predictions(
    simulation: Simulation,
    state: SimulationState,
    hparams: Hyperparameters,
    clients: Iterable[int],
) -> Facts:
    """Return the facts of the parameters with which some clients predict."""
    predict = jax.jit(jax.vmap(simulation.algorithm.predict, in_axes=(None, 0, None, 0)))
    ids = jnp.arange(simulation.num_clients, dtype=jnp.int32)
    params = predict(state.shared, state.personal, hparams.as_arrays(), ids)
    return _bytes("params", params, clients)
