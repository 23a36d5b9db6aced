"""The loop as pure functions: what is compiled, without anything that checks or reports.

`Simulation` builds a `Program` and calls it; a sweep maps its parts over many settings first.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from fedjaxsim.algorithm import Algorithm, Metrics
from fedjaxsim.data.minibatches import ClientData, Minibatches
from fedjaxsim.engine.rounds import (
    TOGETHER,
    Chunking,
    Rows,
    Shard,
    Store,
    map_clients,
    run_cohort,
)
from fedjaxsim.fast import threefry
from fedjaxsim.hparams import Hyperparameters
from fedjaxsim.models.task import Task
from fedjaxsim.privacy import ledger, streams
from fedjaxsim.privacy.ledger import Charges, Ledger
from fedjaxsim.privacy.mechanisms import Mechanism
from fedjaxsim.privacy.sampling import Cohort, Sampling

PyTree = Any
_ORDER = 2**32 - 1
"""Folded into the clients' key for what lasts the whole run; rounds are numbered below 2³¹."""


@register_dataclass
@dataclasses.dataclass(frozen=True)
class SimulationState:
    """Everything a run carries from round to round, as one pytree. Nothing else holds state.

    Attributes:
      round: () int32, rounds done.
      shared: the billboard.
      personal: all clients' personal states, leaves (m, ...).
      mechanism: the mechanism's public state.
      privacy: the ledger of what was released.
      key: the run's random key; rounds and clients fold their numbers into it.
      fingerprint: (2,) uint32, folded into the noise's part of the key; see `privacy/streams.py`.
      taken: (m,) int32, how many minibatches each client has consumed; None where minibatches are
        not consumed.
    """

    round: jax.Array
    shared: PyTree
    personal: PyTree
    mechanism: PyTree
    privacy: Ledger
    key: jax.Array
    fingerprint: jax.Array
    taken: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """The parts of a simulation as pure functions, with the settings that fix shapes.

    Attributes:
      algorithm: four functions for one client.
      mechanism: the door.
      sampling: who takes part.
      measure: `(params, data) -> {name: ()}`: sums of metrics over all rows of one client.
      minibatches: of the local steps.
      chunking: how a cohort is laid out.
      num_clients: m.
      no_charges: `() -> Charges`, the account of the sampler and the mechanism before any round.
      charge: `(charges, noise multiplier, sampling rate, round) -> charges`.
      rematerialize: whether reverse mode does a client's work again; see `run_cohort`.
      shard: the clients of this device, where they are divided over several; see
        `engine/sharding.py`.
      linear: whether the model is linear. Clients who share one are then evaluated in batches, on
        a CPU, too: a chunk's rows are one matrix product.
    """

    algorithm: Algorithm
    mechanism: Mechanism
    sampling: Sampling
    measure: Callable[[PyTree, ClientData], dict[str, jax.Array]]
    minibatches: Minibatches
    chunking: Chunking
    num_clients: int
    no_charges: Callable[[], Charges]
    charge: Callable[..., Charges] = ledger.charge
    rematerialize: bool = False
    shard: Shard | None = None
    linear: bool = False

    def init(self, key: jax.Array, hparams: Hyperparameters) -> SimulationState:
        """The state before the first round."""
        init_key, run_key = jax.random.split(key)
        shared, personal = self.algorithm.init(init_key, hparams)

        clients = self.num_clients if self.shard is None else self.shard.size

        def for_all(leaf):
            return jnp.broadcast_to(leaf, (clients, *leaf.shape))

        consumes = self.minibatches.passes is not None
        return SimulationState(
            round=jnp.zeros((), jnp.int32),
            shared=shared,
            personal=jax.tree.map(for_all, personal),
            mechanism=self.mechanism.init(hparams),
            privacy=ledger.empty(self.no_charges()),
            key=run_key,
            fingerprint=jnp.asarray(streams.COMMON),
            taken=jnp.zeros(clients, jnp.int32) if consumes else None,
        )

    def round(
        self, state: SimulationState, hparams: Hyperparameters, rows: Rows
    ) -> tuple[SimulationState, Metrics]:
        """One round, and its metrics."""
        keys = threefry.split(state.key, 3)
        sampling_key = keys[0]
        client_key = threefry.fold_in(keys[1], state.round)
        noise_key = threefry.fold_in(_noise_of(keys[2], state.fingerprint), state.round)
        cohort = self.sampling.draw(sampling_key, state.round, hparams)
        places, slots = self._places(cohort)
        result = run_cohort(
            self.algorithm,
            self.mechanism,
            self.minibatches,
            self.chunking,
            store=Store(state.personal, state.taken),
            slots=slots,
            cohort=places,
            rows=rows,
            shared=state.shared,
            mechanism_state=state.mechanism,
            hparams=hparams,
            round_=state.round,
            key=client_key,
            order=threefry.fold_in(keys[1], _ORDER),
            num_clients=self.num_clients,
            everyone=self._all_filled(),
            rematerialize=self.rematerialize,
        )
        accumulator, totals = result.accumulator, result.metrics
        if self.shard is not None:
            accumulator, totals = self.shard.total((accumulator, totals))
        rate = self.sampling.rate(hparams)
        release = self.mechanism.release(
            accumulator,
            rate * self.num_clients,
            noise_key,
            state.mechanism,
            hparams,
            state.round,
        )
        # From here on the server sees the release alone.
        privacy = state.privacy
        if self.mechanism.event.kind != "none":
            privacy = ledger.update(
                privacy,
                self.sampling.scheme,
                self.mechanism.event,
                lambda charges: self.charge(charges, release.noise_multiplier, rate, state.round),
            )
        new_state = SimulationState(
            round=state.round + 1,
            shared=_with_types_of(
                state.shared,
                self.algorithm.server(state.shared, release.value, hparams, state.round),
            ),
            personal=result.store.personal,
            mechanism=release.state,
            privacy=privacy,
            key=state.key,
            fingerprint=state.fingerprint,
            taken=result.store.taken,
        )
        participants = jnp.sum(cohort.mask, dtype=jnp.int32)
        means = jax.tree.map(lambda total: total / participants, totals)
        return new_state, means | {
            "participants": participants,
            "overflow": cohort.overflow,
            "clipped": accumulator.clipped,
            "nonfinite": accumulator.nonfinite,
            "noise_multiplier": release.noise_multiplier,
        }

    def rounds(
        self, state: SimulationState, hparams: Hyperparameters, rows: Rows, rounds: int
    ) -> tuple[SimulationState, Metrics]:
        """So many rounds, and their metrics, each (rounds, ...)."""
        return jax.lax.scan(lambda state, _: self.round(state, hparams, rows), state, length=rounds)

    def evaluate(
        self, state: SimulationState, hparams: Hyperparameters, rows: Rows
    ) -> dict[str, jax.Array]:
        """Sums of the metrics over each client's rows, (m, ...)."""

        def one(personal, client_id):
            params = self.algorithm.predict(state.shared, personal, hparams, client_id)
            alone = chunking.map == "scan"
            data = rows.of(client_id, state.key, self.minibatches, alone=alone)
            return self.measure(params, data)

        ids = jnp.arange(self.num_clients, dtype=jnp.int32)
        if self.shard is not None:
            ids, _ = self.shard.ids()
        chunking = self.chunking
        if self.linear and not chunking.fixed and not jax.tree.leaves(state.personal):
            chunking = TOGETHER
        return map_clients(one, state.personal, ids, chunking)

    def _places(self, cohort: Cohort) -> tuple[Cohort, jax.Array]:
        """The part of a cohort that is worked on here, and its slots in the personal states."""
        if self.shard is None:
            return cohort, cohort.ids
        if self.sampling.scheme.kind != "everyone":
            return self.shard.own(cohort)
        ids, exist = self.shard.ids()
        return Cohort(ids, exist, cohort.overflow), jnp.arange(self.shard.size, dtype=jnp.int32)

    def _all_filled(self) -> bool:
        """Whether every place is filled in every round."""
        even = self.shard is None or self.shard.even
        return even and self.sampling.scheme.kind == "everyone"


def _noise_of(key: jax.Array, fingerprint: jax.Array) -> jax.Array:
    """The key of a stream of noise."""
    return threefry.fold_in(threefry.fold_in(key, fingerprint[0]), fingerprint[1])


def _with_types_of(old: PyTree, new: PyTree) -> PyTree:
    """The new billboard with the floating types of the old one: releases are float32 at least."""

    def one(before, after):
        both = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in (before, after))
        return after.astype(before.dtype) if both else after

    return jax.tree.map(one, old, new)


def measure_with(task: Task) -> Callable[[PyTree, ClientData], dict[str, jax.Array]]:
    """The `measure` of a `Program`: sums of the task's metrics, in one pass over the rows."""

    def measure(params, data):
        def add(totals, batch):
            values = task.metrics(params, batch)
            return {name: totals[name] + batch.sum(values[name]) for name in totals}

        shapes = jax.eval_shape(task.metrics, params, data.batch_shapes())
        return data.full_pass(add, {name: jnp.zeros((), v.dtype) for name, v in shapes.items()})

    return measure
