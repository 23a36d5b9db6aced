"""A test of the billboard lemma's premise on any simulation.

By the lemma (Hsu et al. 2016) personal models are jointly private if the releases are private and
each client's state is a function of the releases and that client's data. `check_billboard` tests
the second condition on any parts, without a test framework.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks
from fedjaxsim.algorithm import Metrics
from fedjaxsim.data.population import Population, with_other_rows
from fedjaxsim.engine.state import PARTS
from fedjaxsim.hyperparameters import Hyperparameters
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
) -> None:
    """Check that one client's data reach other clients only through the releases.

    A first run records its releases. Then all rows of one client, in every split, are replaced
    (large random numbers, other labels that occur), and a second run through the same compiled
    functions uses the recorded releases and mechanism states. In every round each other client's
    message, and after it the server state, the ledger, and every other client's personal state and
    minibatch counter must equal the first run's bit for bit; before the first round everything
    must. This is repeated for several clients.

    The check does not cover:

    * Numbers *computed* from the population in a function's closure (a mean, a vocabulary);
      `Simulation.init` refuses rows there. If a factory makes the simulation from a population,
      give it as `build`: the second run then uses the simulation of the altered data.
    * The numbers of rows, which stay the same, and data named in `Simulation.public`.
    * Leaks in the releases themselves, which the mechanism's `event` bounds and `fedjaxsim audit`
      tests. The record replaces all of `release` but the charged noise multiplier.

    Args:
      simulation: the simulation.
      hparams: its hyperparameters.
      rounds: number of rounds.
      clients: the clients whose data change, one after another, in [0, m); by default the first,
        a middle one and the last of those who take part.
      seed: seed of the run and of the replacing data.
      build: the function `(population) -> Simulation` that made the simulation, if it reads data.

    Raises:
      AssertionError: naming the round, the function or leaf, and the client who holds it.
      NothingTestedError: if the changed data had no effect, as of a client who was never drawn.
    """
    m = simulation.num_clients
    for client in clients or ():
        checks.count(0, m - 1, client=client)
    simulation.check_rounds(hparams, 0, rounds, None)
    first = _with_tape(simulation, hparams)
    begun = state = first.init(seed, hparams)
    records = []
    for _ in range(rounds):
        state, metrics = first.round(state, hparams)
        records.append((state, metrics))
    if clients is None:
        drawn = np.flatnonzero(np.any([each.mechanism.present for each, _ in records], axis=0))
        clients = [*dict.fromkeys(drawn[[0, len(drawn) // 2, -1]].tolist())] if len(drawn) else []
    if not clients:
        raise NothingTestedError(f"no client took part in {rounds} rounds, so nothing was tested")
    for client in clients:
        changed = with_other_rows(simulation.population, [client], seed)
        if build is None:
            second = first.with_population(changed)
        else:
            second = _with_tape(build(changed), hparams)
        other = second.init(seed, hparams)
        _compare_states("init", begun, other, client, all_clients=True)
        other = _replay(second, hparams, records, other, client)
        if build is not None:
            one, two = (_predictions(each, other, hparams) for each in (first, second))
            _compare("predict", "params", one, two, client)


def _replay(
    second: Simulation,
    hparams: Hyperparameters,
    records: Sequence[tuple[SimulationState, Metrics]],
    other: SimulationState,
    client: int,
) -> SimulationState:
    """Run the recorded rounds on other data of a client, comparing; return the last state."""
    reached = False
    for number, (record, metrics) in enumerate(records, 1):
        taped = record.mechanism
        tape = other.mechanism._replace(played=taped.computed, recording=jnp.array(False))
        other = dataclasses.replace(other, mechanism=tape)
        other, others_metrics = second.round(other, hparams)
        _compare_states(f"round {number}", record, other, client, all_clients=False)
        _compare(f"round {number}", "message", taped.sent, other.mechanism.sent, client)
        one, two = (
            (told, each.mechanism.computed, _at((each.personal, each.consumed), client))
            for told, each in ((metrics, record), (others_metrics, other))
        )
        leaves = zip(*map(jax.tree.leaves, (one, two)), strict=True)
        reached |= any(_bits(a) != _bits(b) for a, b in leaves)
    if not reached:
        raise NothingTestedError(
            f"other data of client {client} changed nothing in {len(records)} rounds, so nothing "
            "was tested; give more rounds, a higher sampling rate, another seed or another client"
        )
    return other


# --- the recorded releases ------------------------------------------------------------------------


class _Tape(NamedTuple):
    """State of a mechanism that records its release, or plays one back.

    Attributes:
      inner: state of the plain mechanism.
      played: the release and the next state that a round uses if it is not `recording`, () bool.
      computed: the last round's release and next state, computed from the messages.
      sent: uint32 digests of the clients' messages before the mechanism, leaves (m,).
      present: the clients who took part, (m,) bool.
    """

    inner: PyTree
    played: PyTree
    recording: jax.Array
    computed: PyTree
    sent: PyTree
    present: jax.Array


def _with_tape(simulation: Simulation, hparams: Hyperparameters) -> Simulation:
    """Return the simulation with a mechanism that records and plays back, in one program."""
    mechanism, arrays, m = simulation.mechanism, simulation.check(hparams), simulation.num_clients
    key = jax.random.key(0, impl="threefry2x32")
    message = simulation.message_shapes(key, arrays)

    def one_release():
        state = mechanism.init(arrays)
        total = mechanism.zero(message, m)
        out = mechanism.release(total, jnp.ones(()), key, state, arrays, jnp.int32(0))
        return out.value, out.state

    def unsent():
        return jax.tree.map(lambda _: jnp.zeros(m, jnp.uint32), message), jnp.zeros(m, bool)

    def init(hparams):
        shapes = jax.eval_shape(one_release)
        blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return _Tape(mechanism.init(hparams), blank, jnp.array(True), blank, *unsent())

    def zero(message, num_clients):
        inner = mechanism.zero(message, num_clients)
        sent, present = unsent()
        return inner._replace(total=(inner.total, sent, present.astype(jnp.int32)))

    def add(accumulator, messages, mask, ids, state, hparams):
        total, sent, present = accumulator.total
        inner = accumulator._replace(total=total)
        inner = mechanism.add(inner, messages, mask, ids, state.inner, hparams)
        sent = jax.tree.map(
            lambda noted, leaf: noted.at[ids].add(jnp.where(mask, _digests(leaf), 0)),
            sent,
            messages.dense(),
        )
        return inner._replace(total=(inner.total, sent, present.at[ids].add(mask)))

    def release(accumulator, denominator, key, state, hparams, round_):
        total, sent, present = accumulator.total
        inner = accumulator._replace(total=total)
        out = mechanism.release(inner, denominator, key, state.inner, hparams, round_)
        computed = (out.value, out.state)
        value, kept = jax.tree.map(
            lambda new, old: jnp.where(state.recording, new, old), computed, state.played
        )
        tape = _Tape(kept, state.played, state.recording, computed, sent, present > 0)
        return out._replace(value=value, state=tape)

    taped = mechanism._replace(init=init, zero=zero, add=add, release=release)
    return dataclasses.replace(simulation, mechanism=taped)


def _digests(messages: jax.Array) -> jax.Array:
    """Compute a number of 32 bits for each of k messages, (k, ...), of all their bits."""
    words = jax.lax.bitcast_convert_type(messages, jnp.uint32).reshape(messages.shape[0], -1)
    place = jnp.arange(words.shape[1], dtype=jnp.uint32) * jnp.uint32(0x9E3779B1)
    mixed = (words ^ place) * jnp.uint32(0x85EBCA6B)
    return jnp.sum((mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE35), axis=1, dtype=jnp.uint32)


# --- comparing, bit for bit -----------------------------------------------------------------------


def _compare_states(
    when: str, one: SimulationState, two: SimulationState, client: int, *, all_clients: bool
) -> None:
    """Compare two states; the client's own part only if `all_clients`."""
    for name, part in PARTS.items():
        parts, by_client = [getattr(each, name) for each in (one, two)], part.owner == "clients"
        if name == "mechanism":
            parts = [tape.inner for tape in parts]
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
    """Compare two pytrees; `by_client` ones, (m, ...), without one client or with `all_clients`."""

    def require(a: Any, b: Any, what: str) -> None:
        if a != b:
            raise AssertionError(
                f"{when}: {what} depends on the data of client {client} other than by the releases"
            )

    require(jax.tree.structure(one), jax.tree.structure(two), f"the structure of `{name}`")
    paths = jax.tree_util.tree_leaves_with_path(one)
    for (path, a), b in zip(paths, jax.tree.leaves(two), strict=True):
        where = f"`{name}`" + (f" at {jax.tree_util.keystr(path)}" if path else "")
        if not by_client:
            require(_bits(a), _bits(b), where)
            continue
        for k, (x, y) in enumerate(zip(_host(a), _host(b), strict=True)):
            if all_clients or k != client:
                require(_bits(x), _bits(y), f"{where} of client {k}")


def _at(tree: PyTree, index: int) -> PyTree:
    return jax.tree.map(lambda leaf: _host(leaf)[index], tree)


def _host(leaf: jax.Array | np.ndarray) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _bits(leaf: Any) -> tuple[Any, ...]:
    array = _host(leaf)
    return array.shape, array.dtype, array.tobytes()


def _predictions(
    simulation: Simulation, state: SimulationState, hparams: Hyperparameters
) -> PyTree:
    """Return the parameters that each client predicts with, leaves (m, ...)."""
    predict = jax.jit(jax.vmap(simulation.algorithm.predict, in_axes=(None, 0, None, 0)))
    ids = jnp.arange(simulation.num_clients, dtype=jnp.int32)
    return predict(state.shared, state.personal, hparams.as_arrays(), ids)
