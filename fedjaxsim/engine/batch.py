"""`batch`: several runs as one program, by `jax.vmap` over settings.

Runs that differ in hyperparameters share a seed and a sampling rate, so they share cohorts and
minibatches. Only the functions of algorithm, mechanism and ledger are mapped; cohorts are drawn and
rows are read once. Personal states are (m, S, ...): one client's models are adjacent, so a
minibatch (b, d) and linear models (S, c, d) make one product.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.checks import Name, SettingError
from fedjaxsim.engine.program import Program, Runs
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels.products import dense, unsealed
from fedjaxsim.privacy.messages import Messages

PyTree = Any


def batch(program: Program, axes: Hyperparameters, size: int) -> Program:
    """Return one program for S runs of one key that differ in hyperparameters.

    `axes` has the axis of each hyperparameter that is mapped over, 0 or None, as from `varying`.
    The state has an axis of S: the first of the server's parts, the second of the clients' parts.
    Round, key and consumed minibatches are shared. Metrics are (S,), and `evaluate` gives (m, S).

    Example:
      >>> axes = hparams.map(lambda value: None).replace(learning_rate=0)  # as in `Simulation`
      >>> fjs.batch(sim.program, axes, size=3).runs.size
      3
    """
    if program.runs is not None:
        raise ValueError("the program is a batch already: map over its functions by jax.vmap")

    def many(function, *in_axes):
        return jax.vmap(function, in_axes, axis_size=size)

    def client(shared, personal, data, hparams, context):
        def of_one(shared, personal, hparams):
            # Settings share the factor X of a product XᵀR: here it is one matrix product for all.
            personal, message, metrics = algorithm.client(shared, personal, data, hparams, context)
            return personal, dense(unsealed(message)), metrics

        return many(of_one, 0, 0, axes)(shared, personal, hparams)

    def zero(message, num_clients):
        single = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), message
        )
        return jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (size, *jnp.shape(leaf))),
            mechanism.zero(single, num_clients),
        )

    def add(accumulator, messages, mask, ids, state, hparams):
        def of_one(accumulator, messages, state, hparams):
            return mechanism.add(accumulator, Messages(messages), mask, ids, state, hparams)

        return many(of_one, 0, 1, 0, axes)(accumulator, messages.dense(), state, hparams)

    def predict_with_data(shared, personal, data, hparams, client_id):
        def of_one(shared, personal, hparams):
            assert algorithm.predict_with_data is not None
            return algorithm.predict_with_data(shared, personal, data, hparams, client_id)

        return many(of_one, 0, 0, axes)(shared, personal, hparams)

    def measure(params, data):
        return many(lambda params: program.measure(params, data), 0)(params)

    algorithm, mechanism = program.algorithm, program.mechanism
    return dataclasses.replace(
        program,
        algorithm=algorithm._replace(
            init=many(algorithm.init, None, axes, None),
            client=client,
            server=many(algorithm.server, 0, 0, axes, None),
            predict=many(algorithm.predict, 0, 0, axes, None),
            predict_with_data=None if algorithm.predict_with_data is None else predict_with_data,
            example_epsilon=algorithm.example_epsilon and many(algorithm.example_epsilon, axes),
        ),
        mechanism=mechanism._replace(
            init=many(mechanism.init, axes),
            zero=zero,
            add=add,
            release=many(mechanism.release, 0, None, None, 0, axes, None),
        ),
        measure=measure,
        no_charges=many(program.no_charges, axes),
        charge=many(program.charge, 0, 0, None, None),
        runs=Runs(program, axes, size),
        plan=program.plan.for_runs(size),
    )


def varying(settings: Sequence[Hyperparameters]) -> Hyperparameters:
    """Return for each hyperparameter the axis to map over: 0 where settings differ, else None."""

    def axis(*values):
        first = np.asarray(values[0])
        return None if all(np.array_equal(first, value) for value in values) else 0

    return settings[0].map(axis, *settings[1:])


def stack(settings: Sequence[Hyperparameters], axes: Hyperparameters) -> Hyperparameters:
    """Stack S settings; hyperparameters that vary in `axes`, from `varying`, become (S, ...)."""
    differ = varying(settings)
    fields = {}
    for name in axes:
        values = [np.asarray(getattr(setting, name)) for setting in settings]
        if len({value.shape for value in values}) > 1:
            shapes = sorted({value.shape for value in values})
            raise SettingError(Name(name), f" must have one shape in all settings, got {shapes}")
        if getattr(axes, name) is not None:
            fields[name] = np.stack(values)
        elif getattr(differ, name) is None:
            fields[name] = values[0]
        else:
            raise ValueError(
                f"{name} does not vary in this program, got {[v.tolist() for v in values]}"
            )
    return Hyperparameters(**fields)
