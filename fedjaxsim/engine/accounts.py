"""The accounts of a run: what its releases cost clients and, if clients add noise, examples."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.algorithm import Algorithm, Context
from fedjaxsim.data.minibatches import (
    ClientData,
    ExampleLeakError,
    Minibatches,
    RowReader,
    view_here,
)
from fedjaxsim.data.population import Population
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.keys import seed_key
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.accounting.in_loop import room_of
from fedjaxsim.privacy.calibration import equal_example_noise
from fedjaxsim.privacy.entries import SamplingScheme
from fedjaxsim.privacy.events import (
    EXAMPLE,
    Account,
    ChecksSkipped,
    Examples,
    PrivacyEvent,
    PrivacySpend,
    Silos,
)
from fedjaxsim.privacy.ledger import Charges, Ledger
from fedjaxsim.privacy.mechanisms import Mechanism
from fedjaxsim.privacy.samplers import Sampler

_PLACES = 8
"""Number of distinct (z, p) that a run with a constant z can be charged for over its life."""


def accounts_of(
    algorithm: Algorithm,
    mechanism: Mechanism,
    sampler: Sampler,
    examples: PrivacyEvent | None = None,
    no_epsilon: str = "",
) -> tuple[Account, ...]:
    """Return the accounts that a run is charged to: the clients', and the examples' if protected.

    `examples` is the event of a task that protects examples; `no_epsilon` says why there is none.
    """
    m = sampler.scheme.clients
    release = ChecksSkipped(reason=no_epsilon) if no_epsilon else mechanism.event
    event = EXAMPLE if algorithm.example_epsilon is not None else examples
    if event is None:
        return ((sampler.scheme, release),)
    client_release = dataclasses.replace(release, of_protected=not no_epsilon)
    # Whoever sees a client's message knows that it took part.
    return (sampler.scheme, client_release), (SamplingScheme("full", m, m), event)


def costs_of(
    algorithm: Algorithm,
    examples: PrivacyEvent | None,
    hparams: Hyperparameters,
    client_cost: tuple[Any, Any],
) -> list[tuple[Any, Any]]:
    """Return noise multiplier and rate of one round for each account, `client_cost` for clients."""
    full_rate = jnp.ones(())
    if algorithm.example_epsilon is not None:
        # Rounding of the quotient must not make ε smaller.
        return [client_cost, ((1 - 2.0**-22) / algorithm.example_epsilon(hparams), full_rate)]
    if examples is None:
        return [client_cost]
    # A table of noise is in the event itself. The shape is that of the settings of a sweep.
    noise = hparams.get("example_noise_multiplier", jnp.ones_like(client_cost[0]))
    return [
        client_cost,
        (jnp.broadcast_to(jnp.asarray(noise), jnp.shape(client_cost[0])), full_rate),
    ]


def example_event(
    algorithm: Algorithm, minibatches: Minibatches, population: Population
) -> PrivacyEvent | None:
    """Return the event of a round that protects examples; None if the task does not."""
    examples = algorithm.task.examples
    if examples is None:
        return None
    if algorithm.example_epsilon is not None:
        raise ValueError("the algorithm protects examples itself: leave out private_examples")
    if population.generate is not None or minibatches.passes is not None:
        raise ValueError(
            "private examples need minibatches drawn from rows with replacement or in epochs: no "
            "passes, and no minibatches made afresh"
        )
    counts, size = population.splits["train"].count, minibatches.size
    rows = Rows.shapes(population, "train")
    gradients = gradients_of(algorithm, minibatches, rows, len(counts))
    silos = Silos(
        tuple(counts.tolist()), size, examples.capacity(size), gradients, minibatches.steps,
        minibatches.epochs, examples.delta,
    )  # fmt: skip
    if examples.epsilon is not None:
        noise = equal_example_noise(silos, examples.epsilon, examples.rounds)
        silos = dataclasses.replace(silos, noise=noise)
    return Examples(silos=silos)


def gradients_of(
    algorithm: Algorithm, minibatches: Minibatches, rows: Rows, num_clients: int
) -> int:
    """Return G, the gradients that a client takes of each minibatch, by tracing its round.

    The task is from `private_examples`; `rows` may be shapes.
    """
    if algorithm.predict_with_data is not None:
        raise ExampleLeakError(
            "the algorithm predicts with a client's own rows (predict_with_data), which noise in "
            "gradients does not protect: examples cannot be private"
        )
    algorithm, examples, tickets = algorithm.on_fields(rows.fields), algorithm.task.examples, []
    integer = jax.ShapeDtypeStruct((), jnp.int32)
    records = (*algorithm.hyperparameters, *examples.hyperparameters)
    values: dict[str, Any] = {
        record.name: jax.ShapeDtypeStruct(record.shape, jnp.float32) for record in records
    }
    hparams = Hyperparameters(**values)

    def a_round(fields, hparams, count, round_, client_id):
        key = seed_key(0)
        data = ClientData(RowReader(fields, count, count), count, key, minibatches)
        view = view_here(data, examples.of_client(count, minibatches.size, hparams, ()))
        shared, personal = algorithm.init(key, hparams)
        context = Context(round_, key, client_id, num_clients, jnp.ones(()))
        algorithm.client(shared, personal, view, hparams, context)
        tickets.append(view.tickets)

    jax.eval_shape(a_round, rows.fields, hparams, *[integer] * 3)
    if not tickets[-1]:
        raise ExampleLeakError("the algorithm takes no gradient that could protect examples")
    return tickets[-1]


def minibatches_taken(
    examples: PrivacyEvent | None, consumed: jax.Array | None
) -> list[int] | None:
    """Return the minibatches that each client has taken, (m,), if they are known."""
    if examples is None or consumed is None or not getattr(consumed, "is_fully_addressable", True):
        return None
    assert isinstance(examples, Examples)
    assert examples.silos is not None
    return np.asarray(consumed)[: len(examples.silos.counts)].tolist()


def require_protection(privacy: Ledger, accounts: Sequence[Account]) -> None:
    """Check that rounds that protect examples follow no others that send, and the reverse."""
    events = [charges.event for charges in privacy.charges], [event for _, event in accounts]
    had, has = (any(isinstance(event, Examples) for event in side) for side in events)
    sent, sends = (any(event.releases for event in side) for side in events)
    protected, protects = (any(event.unit == "example" for event in side) for side in events)
    if had != has or (sent and sends and protected != protects):
        raise ValueError(
            "the state's rounds protect examples and this simulation's do not, or the "
            "reverse: no ε of examples would hold for both"
        )


def current_part(state: SimulationState, accounts: Sequence[Account]) -> SimulationState:
    """Return the state with the part of its ledger that rounds of these accounts change."""
    part = ledger.current(state.privacy, accounts)
    part = dataclasses.replace(part, room=room_of(state.privacy, part))
    return dataclasses.replace(state, privacy=part)


def charged_alone(
    rounds: Callable[..., tuple[SimulationState, Any]], accounts: Sequence[Account]
) -> Callable[..., tuple[SimulationState, Any]]:
    """Return the compiled rounds of a state whose ledger may have stages, sentences and a budget.

    `rounds`, `(state, ...) -> (state, metrics)`, gets its own stage's accounts alone, and what the
    budget leaves to them as arrays: whatever came before, it is compiled once.
    """

    def called(state, *args, **kwargs):
        after, metrics = rounds(current_part(state, accounts), *args, **kwargs)
        privacy = ledger.rejoined(state.privacy, after.privacy)
        return dataclasses.replace(after, privacy=privacy), metrics

    return called


def places_for(hparams: Hyperparameters | None) -> int:
    """Return the number of distinct (z, p) that an account has room for, all of a schedule."""
    shape = () if hparams is None else np.shape(hparams.get("noise_multiplier", 0.0))
    return max((_PLACES, *shape))


def no_charges(
    accounts: Sequence[Account], prepared: Sequence[PrivacySpend] = ()
) -> Callable[[Hyperparameters], tuple[Charges, ...]]:
    """Return the `no_charges` of a program: only releases before round 1."""
    return lambda hparams: (
        *(ledger.no_charges(*account, places_for(hparams)) for account in accounts),
        *map(ledger.charges_of, prepared),
    )
