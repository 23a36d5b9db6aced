"""A test of the billboard lemma's premise on any simulation.

By the lemma (Hsu et al. 2016) personal models are jointly private if the releases are private and
each client's state is a function of the releases and that client's data. `check_billboard` tests
the second condition on any parts, without a test framework.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.data.population import Population
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.state import PARTS
from fedjaxsim.engine.traced_checks import closed_over
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.mechanisms import Mechanism
from fedjaxsim.simulation import Simulation, SimulationState, with_parts

PyTree = Any
_LARGE = 1e3
"""Standard deviation of the numbers that replace a client's data."""


def check_billboard(
    simulation: Simulation,
    hparams: Hyperparameters,
    *,
    rounds: int = 3,
    client: int = 0,
    seed: int = 0,
    build: Callable[[Population], Simulation] | None = None,
) -> None:
    """Check that one client's data reach other clients only through the releases.

    A first run records its releases. Then all rows of one client, in every split, are replaced
    (large random numbers, other labels that occur), and a second run through the same compiled
    functions uses the recorded releases and mechanism states. After every round the server state,
    the ledger, and every other client's personal state and minibatch counter must equal the first
    run's bit for bit; before the first round everything must.

    The check does not cover:

    * Data in a function's closure: it finds rows of the population there, but no numbers *computed*
      from them (a mean, a vocabulary). If a factory makes the simulation from a population, give it
      as `build`: the second run then uses the simulation of the altered data.
    * The numbers of rows, which stay the same, and data named in `Simulation.setup.public`.
    * Leaks in the releases themselves, which the mechanism's `event` bounds and `fedjaxsim audit`
      tests. The record replaces all of `release` but the charged noise multiplier.

    Args:
      simulation: the simulation.
      hparams: its hyperparameters.
      rounds: number of rounds.
      client: index of the client whose data change, in [0, m).
      seed: seed of the run and of the replacing data.
      build: the function `(population) -> Simulation` that made the simulation, if it reads data.

    Raises:
      AssertionError: naming the dependency on the client's data: the round, the function or the
        path of the leaf, and the client who holds it.
      ValueError: if the client does not exist, the arguments do not suit the simulation, or the
        changed data had no effect (the client was never drawn), so that nothing was tested.
    """
    population = simulation.population
    if not 0 <= client < population.num_clients:
        raise ValueError(f"client must lie in [0, {population.num_clients}), got {client}")
    simulation.setup.check_rounds(hparams, 0, rounds, None)
    _check_constants(simulation, hparams, client)
    changed = _altered(population, client, seed)
    first = _with_tape(simulation, hparams, rounds)
    if build is None:
        second = first.with_population(changed)
    else:
        second = _with_tape(build(changed), hparams, rounds)

    state = first.init(seed, hparams)
    other = second.init(seed, hparams)
    _compare_states("init", state, other, client, all_clients=True)
    records = []
    for _ in range(rounds):
        state, metrics = first.round(state, hparams)
        records.append((_without_tape(state), metrics))
    tape = state.mechanism._replace(inner=other.mechanism.inner, recording=jnp.array(False))
    other = dataclasses.replace(other, mechanism=tape)
    reached = False
    for number, (record, metrics) in enumerate(records, 1):
        other, others_metrics = second.round(other, hparams)
        _compare_states(f"round {number}", record, _without_tape(other), client, all_clients=False)
        reached |= _differ(metrics, others_metrics) or _differ(
            _of_client(record, client), _of_client(other, client)
        )
    if not reached and not _differ(state.mechanism.computed, other.mechanism.computed):
        raise ValueError(
            f"other data of client {client} changed nothing in {rounds} rounds, so nothing was "
            "tested; give more rounds, a higher sampling rate, another seed or another client"
        )
    if build is not None:
        one, two = (_predictions(each, other, hparams) for each in (first, second))
        _compare("predict", "params", one, two, client)


# --- the recorded releases ------------------------------------------------------------------------


class _Tape(NamedTuple):
    """State of a mechanism with recorded releases.

    Attributes:
      inner: state of the plain mechanism.
      played: releases and next states that the run uses, leaves (rounds, ...).
      computed: releases and next states computed from the messages, leaves (rounds, ...).
      recording: () bool; whether `played` is recorded, else it is played back.
    """

    inner: PyTree
    played: PyTree
    computed: PyTree
    recording: jax.Array


def _with_tape(simulation: Simulation, hparams: Hyperparameters, rounds: int) -> Simulation:
    """Return the simulation with a mechanism that records and plays back, in one program."""
    mechanism, arrays = simulation.mechanism, simulation.setup.check(hparams)
    key = jax.random.key(0, impl="threefry2x32")
    message = simulation.setup.message_shapes(key, arrays)

    def one_release():
        zero, state = mechanism.zero(message, simulation.num_clients), mechanism.init(arrays)
        out = mechanism.release(zero, jnp.ones(()), key, state, arrays, jnp.int32(0))
        return out.value, out.state

    shapes = jax.eval_shape(one_release)
    return with_parts(simulation, mechanism=_taped(mechanism, shapes, rounds))


def _taped(mechanism: Mechanism, shapes: PyTree, rounds: int) -> Mechanism:
    def init(hparams):
        blank = jax.tree.map(lambda leaf: jnp.zeros((rounds, *leaf.shape), leaf.dtype), shapes)
        return _Tape(mechanism.init(hparams), blank, blank, jnp.array(True))

    def add(accumulator, messages, mask, ids, state, hparams):
        return mechanism.add(accumulator, messages, mask, ids, state.inner, hparams)

    def release(accumulator, denominator, key, state, hparams, round_):
        out = mechanism.release(accumulator, denominator, key, state.inner, hparams, round_)

        def note(tape):
            return jax.tree.map(lambda t, v: t.at[round_].set(v), tape, (out.value, out.state))

        noted = note(state.played)
        played = jax.tree.map(
            lambda new, old: jnp.where(state.recording, new, old), noted, state.played
        )
        value, inner = jax.tree.map(lambda leaf: leaf[round_], played)
        tape = _Tape(inner, played, note(state.computed), state.recording)
        return out._replace(value=value, state=tape)

    return mechanism._replace(init=init, add=add, release=release)


def _without_tape(state: SimulationState) -> SimulationState:
    return dataclasses.replace(state, mechanism=state.mechanism.inner)


# --- other data -----------------------------------------------------------------------------------


def _altered(population: Population, client: int, seed: int) -> Population:
    """Return the population with other rows of one client, as many in every split.

    Floats become large random numbers; an integer, such as a label, becomes the next larger one
    that occurs, and the largest becomes the smallest.
    """
    rng = np.random.default_rng((seed, client))
    rows = np.concatenate([ranges.rows(client) for ranges in population.splits.values()])
    fields = {}
    for name, values in population.fields.items():
        new = np.array(values)
        if np.issubdtype(new.dtype, np.integer):
            occurring, index = np.unique(values, return_inverse=True)
            new[rows] = occurring[(index.reshape(values.shape)[rows] + 1) % len(occurring)]
        else:
            new[rows] = _LARGE * rng.normal(size=new[rows].shape)
        fields[name] = new
    return dataclasses.replace(population, fields=fields)


def _check_constants(simulation: Simulation, hparams: Hyperparameters, client: int) -> None:
    """Check that no function closes over a field of the population or the client's rows."""
    population = simulation.population
    pieces = [(name, "", values) for name, values in population.fields.items()]
    for split in population.splits:
        rows = population.rows(client, split)
        pieces += [(name, f" of client {client}", values) for name, values in rows.items()]
    pieces = [piece for piece in pieces if np.size(piece[2]) and np.ptp(piece[2]) > 0]
    key = jax.random.key(0, impl="threefry2x32")
    rows, hparams = Rows.shapes(population, "train"), simulation.setup.check(hparams)
    for constant in closed_over(simulation.program, rows, key, hparams):
        for name, whose, values in pieces:
            if constant.shape == values.shape and np.array_equal(
                constant, values.astype(constant.dtype)
            ):
                raise AssertionError(
                    f"a function of the simulation closes over the rows {name!r}{whose}, "
                    f"{constant.dtype}{list(constant.shape)}: clients must read their view only"
                )


# --- comparing, bit for bit -----------------------------------------------------------------------


def _compare_states(
    when: str, one: SimulationState, two: SimulationState, client: int, *, all_clients: bool
) -> None:
    """Compare two states; the client's own part only if `all_clients`."""
    for name, part in PARTS.items():
        parts, by_client = (getattr(one, name), getattr(two, name)), part.owner == "clients"
        _compare(when, name, *parts, client, by_client=by_client, all_clients=all_clients)


def _compare(
    when: str,
    name: str,
    one: PyTree,
    two: PyTree,
    client: int,
    *,
    by_client: bool = True,
    all_clients: bool = False,
) -> None:
    """Compare two pytrees; `by_client`, leaves (m, ...), without the client's unless `all_clients`.

    Raises:
      AssertionError: naming the leaf, and the client whose part of it differs.
    """

    def require(same: bool, what: str) -> None:
        if not same:
            raise AssertionError(
                f"{when}: {what} depends on the data of client {client} other than by the releases"
            )

    same = jax.tree.structure(one) == jax.tree.structure(two)
    require(same, f"the structure of `{name}`")
    paths = jax.tree_util.tree_leaves_with_path(one)
    for (path, a), b in zip(paths, jax.tree.leaves(two), strict=True):
        where = f"`{name}`" + (f" at {jax.tree_util.keystr(path)}" if path else "")
        if not by_client:
            require(_bits(a) == _bits(b), where)
            continue
        for k, (x, y) in enumerate(zip(_host(a), _host(b), strict=True)):
            if all_clients or k != client:
                require(_bits(x) == _bits(y), f"{where} of client {k}")


def _host(leaf: jax.Array) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _bits(leaf: Any) -> tuple[Any, ...]:
    array = _host(leaf)
    return array.shape, array.dtype, array.tobytes()


def _differ(one: PyTree, two: PyTree) -> bool:
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return any(_bits(a) != _bits(b) for a, b in leaves)


def _of_client(state: SimulationState, client: int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[client], (state.personal, state.consumed))


def _predictions(
    simulation: Simulation, state: SimulationState, hparams: Hyperparameters
) -> PyTree:
    """Return the parameters that each client predicts with, leaves (m, ...)."""
    predict = jax.jit(jax.vmap(simulation.algorithm.predict, in_axes=(None, 0, None, 0)))
    ids = jnp.arange(simulation.num_clients, dtype=jnp.int32)
    return predict(state.shared, state.personal, hparams.as_arrays(), ids)
