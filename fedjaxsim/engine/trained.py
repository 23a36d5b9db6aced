"""The models of a trained state: what they say of rows, and the start of another run from them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import keys
from fedjaxsim.algorithm import Algorithm
from fedjaxsim.data.aligned import no_model_for, numbers_of
from fedjaxsim.data.arrays import SPLITS
from fedjaxsim.data.population import Population
from fedjaxsim.engine.processes import to_host
from fedjaxsim.engine.program import ClientMetrics, Program
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.engine.work import row_of
from fedjaxsim.hyperparameters import Hyperparameters, client_values
from fedjaxsim.keys import Stream
from fedjaxsim.models.model import bind_weights
from fedjaxsim.tasks.in_source import TaskInSource, targets_of

PyTree = Any
_AT_ONCE = 2**26
"""Bytes of the models of the rows that are predicted at once."""


class TrainedFunctions(NamedTuple):
    """Compiled functions of a trained state; all calls share them.

    Attributes:
      models: `(state, hparams, rows) -> params` that each client predicts with, leaves (m, ...).
      predictions: `(state, hparams, rows, fields, clients, size) -> values`, a dict of rows, `size`
        at a time; of clients −1, by the published model.
      published: `(state, hparams, rows) -> ClientMetrics` of the published model.
    """

    models: Callable[..., PyTree]
    predictions: Callable[..., dict[str, jax.Array]]
    published: Callable[..., ClientMetrics]


def trained_functions(program: Program) -> TrainedFunctions:
    """Return the functions of a program's trained states, each compiled once for its shapes."""
    task, algorithm = program.algorithm.task, program.algorithm
    models_program: Any = dataclasses.replace(program, measure=lambda params, data: params)

    def predictions(state, hparams, rows, fields, clients, *, size, strangers):
        reading = program.plan_of_evaluation(state).reading
        published = algorithm.warm_start.published(state.shared) if strangers else None

        def of_row(row):
            fields, client = row
            safe_client = jnp.maximum(client, 0)
            personal = jax.tree.map(lambda leaf: leaf[safe_client], state.personal)
            with bind_weights(task.frozen, rows.frozen):
                params = program.predict(state, personal, hparams, safe_client, rows, reading)
                if strangers:
                    params = jax.tree.map(
                        lambda trained_leaf, published_leaf: jnp.where(
                            client < 0, published_leaf, trained_leaf
                        ),
                        params,
                        published,
                    )
                assert task.predict is not None
                predicted = task.predict(params, jax.tree.map(lambda leaf: leaf[None], fields))
            return jax.tree.map(lambda leaf: leaf[0], predicted)

        return jax.lax.map(of_row, (fields, clients), batch_size=size)

    def published(state, hparams, rows):
        reading = program.plan_of_evaluation(state).reading
        params = algorithm.warm_start.published(state.shared)

        def of_client(client_id):
            key = keys.stream(state.key, Stream.EVALUATION, state.round, client_id)
            with bind_weights(task.frozen, rows.frozen):
                data = rows.of(client_id, key, program.minibatches, reading)
                return program.measure(params, data)

        return jax.lax.map(of_client, jnp.arange(rows.count.shape[0], dtype=jnp.int32))

    def traced(function):
        @functools.wraps(function)
        def for_its_devices(*args, **kwargs):
            with program.tracing():
                return function(*args, **kwargs)

        return for_its_devices

    return TrainedFunctions(
        jax.jit(models_program.evaluate),
        jax.jit(traced(predictions), static_argnames=("size", "strangers")),
        jax.jit(traced(published)),
    )


def predictions_of(
    functions: TrainedFunctions,
    program: Program,
    reported: TaskInSource,
    trained: Population,
    state: SimulationState,
    hparams: Hyperparameters,
    population: Population,
    *,
    published_alone: bool = False,
) -> dict[str, np.ndarray]:
    """Return a dict of each client's model's values for its rows, each (N, ...); see `predict`."""
    task = program.algorithm.task
    if task.predict is None:
        raise ValueError(
            "the task says nothing of rows: give it a function "
            "`(params, fields) -> {'prediction': (b, ...)}` by task._replace(predict=…)"
        )
    owners = _owners(population)
    numbers = numbers_of(trained, population.names)
    rows, clients = training_rows(program, trained), numbers[owners]
    if published_alone:
        clients = np.full_like(clients, -1)
    stored, clipped = reported.stored(population)
    fields = jax.tree.map(jnp.asarray, stored)
    published = program.algorithm.warm_start.published(state.shared)
    strangers = bool(np.any(clients < 0))
    lacks_model = published is None or program.algorithm.predict_with_data is not None
    if strangers and lacks_model and published_alone:
        raise ValueError("the run publishes no model that predicts without a client's rows")
    if strangers and lacks_model:
        raise no_model_for(trained, population.names, "a new client could predict with")
    model = jax.eval_shape(task.init, keys.seed_key(0))
    size = max(1, min(1024, _AT_ONCE // max(1, bytes_of((model, row_of(state.personal))))))

    outputs = functions.predictions(
        on_host(state), hparams, rows, fields, clients, size=size, strangers=strangers
    )
    row = np.arange(len(owners)) if population.source_row is None else population.source_row
    split = [*SPLITS] if population is trained else ["new"] * len(SPLITS)
    counts = population.counts.ravel()  # clients follow one another, each with its splits in order
    split = np.repeat(np.tile(split, population.num_clients), counts)
    table = {"client": population.names[owners], "row": row, "split": split}
    table |= reported.predicted(outputs)
    table |= {} if clipped is None else {"clipped": clipped}
    table |= targets_of(population)
    order = np.argsort(row, kind="stable")
    return {name: values[order] for name, values in table.items()}


def published_metrics(
    functions: TrainedFunctions,
    program: Program,
    state: SimulationState,
    hparams: Hyperparameters,
    population: Population,
    split: str,
) -> ClientMetrics:
    """Return the metrics, (m', ...), of the published model on a population's rows of a split.

    The rows are in the terms of the run; see `aligned_with`.
    """
    published = program.algorithm.warm_start.published(state.shared)
    if published is None:
        raise ValueError("the run publishes no model: clients predict with their own alone")
    fields = jax.tree.map(jnp.asarray, dict(population.fields))
    rows = Rows.place(population, split, fields, program.algorithm)

    return to_host(functions.published(on_host(state), hparams, rows))


def on_host(state: SimulationState) -> SimulationState:
    """Return the parts of a state that predictions read, of whatever devices, on the host."""
    unread: Any = ()
    words = jax.random.key_data(state.key)
    round_, shared, personal, words = to_host((state.round, state.shared, state.personal, words))
    key = jax.random.wrap_key_data(words, impl=jax.random.key_impl(state.key))
    return SimulationState(round_, shared, personal, unread, unread, key)


def training_rows(program: Program, population: Population) -> Rows:
    """Return the clients' training rows; their fields only if predictions read them."""
    reads = program.algorithm.predict_with_data is not None
    fields = jax.tree.map(jnp.asarray, dict(population.fields)) if reads else {}
    return Rows.place(population, "train", fields, program.algorithm)


def _owners(population: Population) -> np.ndarray:
    """Return the number of each row's client, (N,) int32."""
    numbers, owners = np.arange(population.num_clients), np.zeros(population.num_rows, np.int32)
    for ranges in population.splits.values():
        owners[ranges.all_rows()] = np.repeat(numbers, ranges.count)
    return owners


def stage_key(key: jax.Array, round_: jax.Array) -> jax.Array:
    """Return the key of the stage after `round_` rounds."""
    return keys.stream(key, Stream.STAGE, round_)


def first_states(
    algorithm: Algorithm,
    num_clients: int,
    key: jax.Array,
    hparams: Hyperparameters,
    published: PyTree,
    personal: PyTree = (),
    model_of: Callable[[PyTree, jax.Array], PyTree] | None = None,
    origin: jax.Array | None = None,
) -> tuple[PyTree, PyTree]:
    """Return the server state and personal states (m, ...) that start from models.

    `key` is the stage's, as in `init`. Each client has the published one or, of its earlier
    personal state, `model_of(personal, id)`; `origin`, (m,), are their earlier ids, −1 for new
    clients, by default as now. The server state is made of zeros in place of a client's model, so
    it holds none of it.
    """
    start = algorithm.warm_start.start
    assert start is not None
    key = keys.stream(key, Stream.WARM_START)

    def own_model(personal, before):
        if model_of is None:
            return published
        model = model_of(personal, jnp.maximum(before, 0))
        return jax.tree.map(
            lambda trained_leaf, published_leaf: jnp.where(
                before < 0, published_leaf, trained_leaf
            ),
            model,
            published,
        )

    def of_one(personal, client_id, before):
        client_hparams = client_values(algorithm.hyperparameters, hparams, client_id)
        return start(key, client_hparams, published, own_model(personal, before))

    ids = jnp.arange(num_clients, dtype=jnp.int32)
    before = ids if origin is None else origin
    if origin is not None:
        personal = jax.tree.map(lambda leaf: leaf[jnp.maximum(origin, 0)], personal)
    first = jax.tree.map(lambda leaf: leaf[0], (personal, before))
    model = jax.tree.map(jnp.zeros_like, own_model(*first)) if model_of else published
    shared, _ = start(key, client_values(algorithm.hyperparameters, hparams, 0), published, model)
    # `out_axes` raises where the server state depends on a client's model.
    _, personal = jax.vmap(of_one, out_axes=(None, 0))(personal, ids, before)
    return shared, personal
