"""Canary clients, by whose messages an adversary tests the releases.

Each of n canaries is in the run with probability 1/2: then it sends one fixed direction, else zero.
Messages of canaries pass the mechanism like all others. The real clients' update is undisturbed but
for the canaries' messages, which act as further noise.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedjaxsim import keys
from fedjaxsim.algorithm import Algorithm, WarmStart
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.data.population import Population
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels import threefry
from fedjaxsim.kernels.products import dense, unsealed
from fedjaxsim.keys import Stream
from fedjaxsim.own_code import is_stamped, stamp
from fedjaxsim.privacy.entries import MOST_ROUNDS
from fedjaxsim.simulation import Simulation

PyTree = Any
OVERSHOOT = 10.0
"""Norm of a canary's message over the clip norm: a missing clip cannot be missed."""


class Directions(NamedTuple):
    """Orthonormal directions of n canaries: each has random signs on its own coordinates.

    `owner`, (p,) int32, and `sign`, (p,) int8, are of each coordinate; `size` (n,) counts them.
    """

    owner: jax.Array
    sign: jax.Array
    size: jax.Array

    @classmethod
    def draw(cls, canaries: int, size: int) -> "Directions":
        """Draw the directions of `canaries` clients among `size` ≥ `canaries` coordinates."""
        # They may be public, and are the same in every run.
        order, signs = threefry.split(keys.seed_key(0))
        owner = jax.random.permutation(order, size).astype(jnp.int32) % canaries
        sign = 1 - 2 * (threefry.bits(signs, (size,)) & 1).astype(jnp.int8)
        return cls(owner, sign, jnp.bincount(owner, length=canaries).astype(jnp.int32))

    def along(self, observed: np.ndarray) -> np.ndarray:
        """Return the inner product of each direction with `observed`, (p,), as (n,) float64."""
        owner, sign, size = map(np.asarray, self)
        return np.bincount(owner, observed * sign, len(size)) / np.sqrt(size)


class Watched(NamedTuple):
    """A server state, and an adversary's notes on it: what the canaries send, and who did.

    `observed`, (p,), is the sum of all releases with alternating signs, `sent`, (n,), their coins.
    """

    inner: PyTree
    directions: Directions
    observed: jax.Array
    sent: jax.Array


def with_canaries(simulation: Simulation, hparams: Hyperparameters, canaries: int) -> Simulation:
    """Return the simulation with `canaries` more clients; `result` reads the state of its run.

    Canaries have ids from m on, one row of no meaning, no test rows, and a personal state that is
    nobody's. Releases are divided by the expected cohort of real clients, so that these train as
    without canaries. A canary that is in sends 10·C in its direction, with a sign that alternates
    from one participation to the next: so the drift of the model cancels, as does noise that is
    drawn twice. (With correlated noise canaries keep their sign.)

    Raises:
      ValueError: if `canaries` lies outside [1, p], the algorithm sends nothing, a release has
        another shape than a message, clients have their own hyperparameters, weights or
        privacy levels, or canaries would take the places of real clients.
    """
    scheme = simulation.sampler.scheme
    if scheme.kind not in ("poisson", "full", "groups", "cyclic"):
        raise SettingError(
            Name("audit_canaries"),
            " needs poisson, full, groups or cyclic sampling: in cohorts of a fixed "
            f"size canaries take the places of clients, got {scheme.kind} sampling",
        )
    if scheme.levels:
        raise SettingError(
            Name("audit_canaries"),
            " needs clients of one privacy level: canaries, which are more clients, "
            "would be in no group; audit a run without privacy_levels",
        )
    if simulation.mechanism.num_clients is not None:
        raise SettingError(
            Name("audit_canaries"),
            " needs a mechanism for any number of clients: canaries, which are more "
            "clients, would have no weight; audit a run without weights",
        )
    if simulation.assumed_of(hparams):
        raise SettingError(
            Name("audit_canaries"), " needs hyperparameters with one value for all clients"
        )
    simulation.check_in_memory()
    message, release = _shapes(simulation, hparams)
    size = sum(map(math.prod, message))
    if not simulation.mechanism.event.releases:
        raise ValueError("an audit needs messages, and the algorithm sends none")
    if not 1 <= canaries <= size:
        raise ValueError(
            f"the number of canaries must lie in [1, {size}], the number of parameters in a "
            f"message, got {canaries}"
        )
    if message != release:
        raise SettingError(
            Name("audit_canaries"),
            f" needs releases of the shapes of a message, {message}, got {release}",
        )
    # Correlated noise cancels best in plain sums, so canaries keep their sign.
    same = simulation.mechanism.event.of_whole_run
    period = MOST_ROUNDS if same else scheme.groups or 1
    algorithm = _watched(simulation.algorithm, simulation.num_clients, canaries, size, period)
    population = _extended(simulation.population, canaries)
    return dataclasses.replace(simulation, algorithm=algorithm, population=population)


def _shapes(simulation: Simulation, hparams: Hyperparameters) -> tuple[list[Any], list[Any]]:
    """Return the shapes of the leaves of a message and of a release."""
    key, arrays = keys.seed_key(0), hparams.as_arrays()
    message, mechanism = simulation.message_shapes(key, arrays), simulation.mechanism

    def release():
        zero, state = mechanism.zero(message, simulation.num_clients), mechanism.init(arrays)
        return mechanism.release(zero, jnp.ones(()), key, state, arrays, jnp.int32(0)).value

    sent, released = jax.tree.leaves(message), jax.tree.leaves(jax.eval_shape(release))
    return [leaf.shape for leaf in sent], [leaf.shape for leaf in released]


def _extended(population: Population, canaries: int) -> Population:
    """Return the population with one row, each value the field's smallest, for each canary."""
    fields = {
        name: np.concatenate([v, np.full((canaries, *v.shape[1:]), v.min(), v.dtype)])
        for name, v in population.fields.items()
    }
    counts = np.concatenate([population.counts, [[1, 0, 0]] * canaries])
    names = [*map(str, population.names), *(f"canary {k}" for k in range(canaries))]
    rows = population.source_row
    if rows is not None:
        rows = np.concatenate([rows, np.max(rows) + 1 + np.arange(canaries)])
    return dataclasses.replace(
        population, fields=fields, counts=counts, names=np.asarray(names), source_row=rows
    )


def _watched(
    algorithm: Algorithm, num_clients: int, canaries: int, size: int, period: int
) -> Algorithm:
    """Return the algorithm with canaries, and an adversary who adds up the releases."""
    share = (num_clients + canaries) / num_clients

    def alternating(round_):
        return 1.0 - 2.0 * (round_ // period % 2)

    @functools.wraps(algorithm.init)
    def init(key, *arguments):
        shared, personal = algorithm.init(key, *arguments)
        coins = threefry.bits(keys.stream(key, Stream.CANARIES), (canaries,))
        directions = Directions.draw(canaries, size)
        return Watched(shared, directions, jnp.zeros(size), (coins & 1).astype(bool)), personal

    def client(shared, personal, data, hparams, context):
        number, directions = context.client_id - num_clients, shared.directions
        personal, message, metrics = algorithm.client(
            shared.inner, personal, data, hparams, context._replace(num_clients=num_clients)
        )
        flat, unravel = ravel_pytree(dense(unsealed(message)))
        clip_norm = jnp.asarray(hparams.get("clip", jnp.inf))
        norm = jnp.where(jnp.isfinite(clip_norm), OVERSHOOT * clip_norm, 1.0)
        norm = norm * shared.sent[number] * alternating(context.round)
        signs = jnp.where(directions.owner == number, directions.sign, 0)
        crafted = norm / jnp.sqrt(directions.size[number]) * signs
        real = number < 0  # means over the cohort are means over real clients
        sent = jnp.where(real, flat, crafted.astype(flat.dtype))
        metrics = jax.tree.map(lambda x: jnp.where(real, share * x, 0), metrics)
        return personal, unravel(sent), metrics

    def server(shared, release, hparams, round_):
        flat, _ = ravel_pytree(release)
        more = alternating(round_) * flat.astype(shared.observed.dtype)
        release = jax.tree.map(lambda leaf: share * leaf, release)
        inner = algorithm.server(shared.inner, release, hparams, round_)
        return shared._replace(inner=inner, observed=shared.observed + more)

    def predict(shared, *arguments):
        return algorithm.predict(shared.inner, *arguments)

    def predict_with_data(shared, *arguments):
        assert algorithm.predict_with_data is not None
        return algorithm.predict_with_data(shared.inner, *arguments)

    watched = algorithm._replace(
        init=init,
        client=client,
        server=server,
        predict=predict,
        predict_with_data=algorithm.predict_with_data and predict_with_data,
        warm_start=WarmStart(),
    )
    return stamp(watched) if is_stamped(algorithm) else watched
