"""The models that clients predict with after a run, and what they say of rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.data.population import Population
from fedjaxsim.engine.processes import to_host
from fedjaxsim.engine.program import Program
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.engine.work import map_clients
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.models.model import bound

PyTree = Any
_AT_ONCE = 2**26
"""Bytes of the models of the rows that are predicted at once."""


def models_of(
    program: Program, population: Population, state: SimulationState, hparams: Hyperparameters
) -> PyTree:
    """Return the parameters that each client predicts with, leaves (m, ...)."""
    rows = _training(program, population)

    def models(state, hparams, rows):
        layout = program.layout.for_evaluation(state.personal)

        def one(personal, client_id):
            with bound(program.algorithm.task.frozen, rows.frozen):
                return program.predict(state, personal, hparams, client_id, rows, layout)

        return map_clients(one, state.personal, jnp.arange(program.num_clients), layout, rows)

    return to_host(jax.jit(models)(_on_host(state), hparams, rows))


def predictions_of(
    program: Program,
    trained: Population,
    state: SimulationState,
    hparams: Hyperparameters,
    population: Population,
) -> dict[str, np.ndarray]:
    """Return what each client's model says of its rows, by name, each (N, ...)."""
    task = program.algorithm.task
    if task.predict is None:
        raise ValueError(
            "the task says nothing of rows: give it a function "
            "`(params, fields) -> {'prediction': (b, ...)}` by task._replace(predict=…)"
        )
    says = task.predict
    rows, clients = _training(program, trained), _clients_of_rows(trained, population)
    fields = jax.tree.map(jnp.asarray, dict(population.fields))
    row = jax.eval_shape(functools.partial(_row, 0), state.personal)
    models = bytes_of(jax.eval_shape(task.init, jax.random.key(0))) + bytes_of(row)
    size = max(1, min(1024, _AT_ONCE // max(1, models)))

    def all_rows(state, hparams, rows, fields, clients):
        layout = program.layout.for_evaluation(state.personal)

        def one(each):
            fields, client = each
            personal = _row(client, state.personal)
            with bound(task.frozen, rows.frozen):
                params = program.predict(state, personal, hparams, client, rows, layout)
                said = says(params, jax.tree.map(lambda leaf: leaf[None], fields))
            return jax.tree.map(lambda leaf: leaf[0], said)

        return jax.lax.map(one, (fields, clients), batch_size=size)

    said = jax.jit(all_rows)(_on_host(state), hparams, rows, fields, clients)
    return {name: np.asarray(value) for name, value in said.items()}


def _on_host(state: SimulationState) -> SimulationState:
    """Return the parts of a state that predictions read, of whatever devices, on the host."""
    unread: Any = ()
    words = to_host(jax.random.key_data(state.key))
    key = jax.random.wrap_key_data(words, impl=jax.random.key_impl(state.key))
    shared, personal = to_host((state.shared, state.personal))
    return SimulationState(to_host(state.round), shared, personal, unread, unread, key)


def _row(index: Any, personal: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[index], personal)


def _training(program: Program, population: Population) -> Rows:
    """Return the clients' training rows; their fields only if predictions read them."""
    reads = program.algorithm.predict_with_data is not None
    fields = jax.tree.map(jnp.asarray, dict(population.fields)) if reads else {}
    return Rows.place(population, "train", fields, program.algorithm)


def _clients_of_rows(trained: Population, population: Population) -> np.ndarray:
    """Return for each row of a population the trained client of its client's name, (N,) int32."""
    numbers = {name: number for number, name in enumerate(trained.names.tolist())}
    unknown = [name for name in population.names.tolist() if name not in numbers]
    if unknown:
        raise ValueError(
            f"client {unknown[0]!r} took no part in the run ({len(unknown)} such clients): "
            "`start_new_clients` gives new clients a state"
        )
    number = np.array([numbers[name] for name in population.names.tolist()], np.int32)
    clients = np.zeros(len(next(iter(population.fields.values()))), np.int32)
    for ranges in population.splits.values():
        clients[ranges.all_rows()] = np.repeat(number, ranges.count)
    return clients
