"""The law behind joint differential privacy, as a test of any simulation.

By the billboard lemma (Hsu et al. 2016) personal models are jointly private as soon as the releases
are private: given those, what a client holds is a function of them and of its own data. The engine
is built so. `check_billboard` tries it on an algorithm, a mechanism, a sampler and data of one's
own; it needs no test framework.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.data.population import Population
from fedjaxsim.engine import traced_checks
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.mechanisms import Mechanism
from fedjaxsim.simulation import Simulation, SimulationState, with_parts

PyTree = Any
_LARGE = 1e3
"""Standard deviation of the numbers that replace a client's."""


def check_billboard(
    simulation: Simulation,
    hparams: Hyperparameters,
    *,
    rounds: int = 3,
    client: int = 0,
    seed: int = 0,
    build: Callable[[Population], Simulation] | None = None,
) -> None:
    """Checks that one client's data reach the others through the releases and in no other way.

    The simulation runs and its releases are recorded. Then all rows of one client, in every split,
    become other ones (large random numbers, other labels that occur), and it runs again through the
    same compiled functions, each release and mechanism state being replaced by the recorded one.
    After every round the billboard, the ledger, and the personal state and the minibatch counter of
    every other client must be those of the first run, bit for bit; at the start everything must be.

    What it cannot see:

    * What a function has been given by its author. A function that closes over rows of the
      population as they are is found; one that closes over numbers *made* of them (a mean, a
      vocabulary) is the same function in both runs. That no function is made of data is its
      author's duty; where a factory makes the simulation of a population, give it as `build`, and
      the second run is of the simulation that it makes of the altered data.
    * The numbers of rows, which stay what they are, and what `Simulation.public` names.
    * What the releases themselves tell: that is the mechanism's `event`, which `fedjaxsim audit`
      tries to refute. What `release` does with the accumulator is replaced by the record, but for
      the noise multiplier that the ledger is charged.

    Args:
      simulation: any.
      hparams: with which it runs.
      rounds: how many.
      client: whose data change, in [0, m).
      seed: of the run and of the data that take the place of the client's.
      build: `(population) -> Simulation`, how the simulation was made, where that reads data.

    Raises:
      AssertionError: naming what depends on the client's data: the round, the function or the
        path of the leaf, and the client who holds it.
      ValueError: if there is no such client, the arguments do not suit the simulation, or the
        change of data changed nothing, as where the client was not drawn: nothing was tried then.
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

    compare = _Comparison(client)
    state = first.init(seed, hparams)
    other = second.init(seed, hparams)
    compare.states("init", state, other, everybody=True)
    records = []
    for _ in range(rounds):
        state, metrics = first.round(state, hparams)
        records.append((_without_tape(state), metrics))
    tape = state.mechanism._replace(inner=other.mechanism.inner, recording=jnp.array(False))
    other = dataclasses.replace(other, mechanism=tape)
    reached = False
    for number, (record, metrics) in enumerate(records, 1):
        other, others_metrics = second.round(other, hparams)
        compare.states(f"round {number}", record, _without_tape(other), everybody=False)
        reached |= _differ(metrics, others_metrics) or _differ(
            _of_client(record, client), _of_client(other, client)
        )
    if not reached and not _differ(state.mechanism.computed, other.mechanism.computed):
        raise ValueError(
            f"other data of client {client} changed nothing in {rounds} rounds, so nothing was "
            "tried; give more rounds, a higher sampling rate, another seed or another client"
        )
    if build is not None:
        compare.predictions(
            _predictions(first, other, hparams), _predictions(second, other, hparams)
        )


# --- the recorded releases ------------------------------------------------------------------------


class _Tape(NamedTuple):
    """The state of a mechanism with a tape.

    Attributes:
      inner: the mechanism's own state.
      played: the releases and the next states, leaves (rounds, ...): noted while recording.
      computed: what the mechanism made of the messages, likewise; for comparison only.
      recording: () bool; afterwards the tape is played back whatever the messages are.
    """

    inner: PyTree
    played: PyTree
    computed: PyTree
    recording: jax.Array


def _with_tape(simulation: Simulation, hparams: Hyperparameters, rounds: int) -> Simulation:
    """The simulation behind its door with a tape; one program records and plays back."""
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
    """The population with other rows of one client, as many in every split.

    Numbers become large random ones; of whole numbers, such as labels, each becomes the next larger
    one that occurs, and the largest the smallest.
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
    """No function may close over a field of the population, or over the client's rows of it."""
    population = simulation.population
    pieces = [(name, "", values) for name, values in population.fields.items()]
    for split in population.splits:
        own = population.rows(client, split)
        pieces += [(name, f" of client {client}", values) for name, values in own.items()]
    pieces = [piece for piece in pieces if np.size(piece[2]) and np.ptp(piece[2]) > 0]
    key = jax.random.key(0, impl="threefry2x32")
    for constant in traced_checks.closed_over(
        simulation.setup.functions(), key, simulation.setup.check(hparams)
    ):
        for name, whose, values in pieces:
            if constant.shape == values.shape and np.array_equal(
                constant, values.astype(constant.dtype)
            ):
                raise AssertionError(
                    f"a function of the simulation closes over the rows {name!r}{whose}, "
                    f"{constant.dtype}{list(constant.shape)}: a client gets data by its view alone"
                )


# --- comparing, bit for bit -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """Raises AssertionError where two runs differ in what the client's data must not reach.

    Attributes:
      client: whose data differ.
    """

    client: int

    def states(
        self, when: str, one: SimulationState, two: SimulationState, *, everybody: bool
    ) -> None:
        """Compares two states; the client's own part too where `everybody` is to agree."""
        for name in ("round", "key", "mechanism", "privacy", "shared"):
            for where, a, b in self._leaves(when, name, getattr(one, name), getattr(two, name)):
                if _bits(a) != _bits(b):
                    raise AssertionError(self._message(when, f"`{name}`{where}"))
        for name in ("personal", "consumed"):
            self._by_client(when, name, getattr(one, name), getattr(two, name), everybody)

    def predictions(self, one: PyTree, two: PyTree) -> None:
        """Compares what clients predict with, leaves (m, ...)."""
        self._by_client("predict", "params", one, two, everybody=False)

    def _by_client(self, when, name, one, two, everybody):
        for where, a, b in self._leaves(when, name, one, two):
            for k, (x, y) in enumerate(zip(_host(a), _host(b), strict=True)):
                if (everybody or k != self.client) and _bits(x) != _bits(y):
                    what = f"`{name}`{where} of client {k}"
                    raise AssertionError(self._message(when, what))

    def _leaves(self, when, name, one, two):
        if jax.tree.structure(one) != jax.tree.structure(two):
            raise AssertionError(self._message(when, f"the structure of `{name}`"))
        paths = jax.tree_util.tree_leaves_with_path(one)
        for (path, a), b in zip(paths, jax.tree.leaves(two), strict=True):
            yield f" at {jax.tree_util.keystr(path)}" if path else "", a, b

    def _message(self, when: str, what: str) -> str:
        return (
            f"{when}: {what} depends on the data of client {self.client} other than by the releases"
        )


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
    """What every client predicts with, leaves (m, ...)."""
    predict = jax.jit(jax.vmap(simulation.algorithm.predict, in_axes=(None, 0, None, 0)))
    ids = jnp.arange(simulation.num_clients, dtype=jnp.int32)
    return predict(state.shared, state.personal, hparams.as_arrays(), ids)
