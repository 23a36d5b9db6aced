"""Many settings as one program: the functions of a run, mapped over an axis of settings.

Runs that share a seed and a sampling rate share their cohorts and minibatches. So only what an
algorithm, a mechanism and a ledger compute is mapped; drawing cohorts and reading data are not, and
happen once. The personal states of all settings are (m, S, ...): the models of one client are one
piece of memory, and where a minibatch (b, d) meets linear models (S, c, d), that is one product.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.engine.program import Program
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels.products import dense, unsealed
from fedjaxsim.privacy.messages import Messages

PyTree = Any


def varying(settings: Sequence[Hyperparameters]) -> Hyperparameters:
    """Which hyperparameters differ between settings: for each the axis to map over, 0 or None.

    Args:
      settings: S hyperparameters of one class.
    """

    def axis(*values):
        first = np.asarray(values[0])
        return None if all(np.array_equal(first, value) for value in values) else 0

    return settings[0].map(axis, *settings[1:])


def stack(settings: Sequence[Hyperparameters], axes: Hyperparameters) -> Hyperparameters:
    """Many settings as one, leaves (S, ...) where they are mapped over.

    Args:
      settings: S hyperparameters of one class.
      axes: as from `varying`.

    Raises:
      ValueError: where the noise multiplier is a schedule in some settings and not in others, or
        of another length; or where settings differ in what is not mapped over.
    """
    differ = varying(settings)
    fields = {}
    for name in axes:
        values = [np.asarray(getattr(setting, name)) for setting in settings]
        if len({value.shape for value in values}) > 1:
            shapes = sorted({value.shape for value in values})
            raise ValueError(f"{name} must have one shape in all settings, got {shapes}")
        if getattr(axes, name) is not None:
            fields[name] = np.stack(values)
        elif getattr(differ, name) is None:
            fields[name] = values[0]
        else:
            raise ValueError(
                f"{name} does not vary in this program, got {[v.tolist() for v in values]}"
            )
    return Hyperparameters(**fields)


def over_settings(program: Program, axes: Hyperparameters, size: int) -> Program:
    """Map a program over settings that share cohorts and minibatches.

    Args:
      program: of one run.
      axes: the axis of each hyperparameter that is mapped over, 0 or None, as from `varying`.
      size: S.

    Returns:
      A program whose state has an axis of length S: the first of what belongs to the server, the
      second, after the clients, of what belongs to clients. The round, the key, the cohorts and the
      consumed minibatches are shared and have none. Metrics are (S,).
    """

    def many(function, *in_axes):
        return jax.vmap(function, in_axes, axis_size=size)

    def client(shared, personal, data, hparams, context):
        def of_one(shared, personal, hparams):
            # All settings share the factor X of a product XᵀR: multiplied here, it is one matrix
            # product for all of them.
            personal, message, metrics = one.client(shared, personal, data, hparams, context)
            return personal, dense(unsealed(message)), metrics

        return many(of_one, 0, 0, axes)(shared, personal, hparams)

    def zero(message, num_clients):
        single = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), message
        )
        return _repeat(mechanism.zero(single, num_clients), size)

    def add(accumulator, messages, mask, ids, state, hparams):
        def of_one(accumulator, messages, state, hparams):
            return mechanism.add(accumulator, Messages(messages), mask, ids, state, hparams)

        return many(of_one, 0, 1, 0, axes)(accumulator, messages.dense(), state, hparams)

    def measure(params, data, most_rows):
        return many(lambda params: program.measure(params, data, most_rows), 0)(params)

    one, mechanism = program.algorithm, program.mechanism
    return dataclasses.replace(
        program,
        algorithm=one._replace(
            init=many(one.init, None, axes),
            client=client,
            server=many(one.server, 0, 0, axes, None),
            predict=many(one.predict, 0, 0, axes, None),
        ),
        mechanism=mechanism._replace(
            init=many(mechanism.init, axes),
            zero=zero,
            add=add,
            release=many(mechanism.release, 0, None, None, 0, axes, None),
        ),
        measure=measure,
        no_charges=lambda: _repeat(program.no_charges(), size),
        charge=many(program.charge, 0, 0, None, None),
    )


def _repeat(tree: PyTree, size: int) -> PyTree:
    """Repeat every leaf S times along a new first axis."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (size, *jnp.shape(leaf))), tree)
