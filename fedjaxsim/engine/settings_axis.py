"""Many settings as one program: every function of a run, mapped over a trailing axis of settings.

Runs that share a seed and a sampling rate share their cohorts and minibatches. So only what an
algorithm, a mechanism and a ledger compute is mapped; drawing cohorts and reading data are not, and
happen once. The axis comes last: the personal states of all settings are (m, ..., S), and where a
minibatch (b, d) of one client meets all its models (d, S), that is one matrix product.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.engine.program import Program
from fedjaxsim.fast.map_last import map_last
from fedjaxsim.fast.products import dense, unsealed
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.mechanisms import Mechanism
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
    """The program of S runs.

    Args:
      program: of one run.
      axes: the axis of each hyperparameter that is mapped over, 0 or None, as from `varying`.
      size: S.

    Returns:
      A program whose state and metrics have a last axis of length S, but for what all runs share:
      the round, the key, the cohorts and the minibatches that were consumed.
    """

    def many(function, *in_axes):
        return map_last(function, in_axes, size)

    def measure(params, data, most_rows):
        return many(lambda params: program.measure(params, data, most_rows), -1)(params)

    return dataclasses.replace(
        program,
        algorithm=_algorithm(program.algorithm, axes, many),
        mechanism=_mechanism(program.mechanism, axes, many, size),
        measure=measure,
        no_charges=lambda: _repeat(program.no_charges(), size),
        charge=many(program.charge, -1, -1, None, None),
    )


def _algorithm(one: Algorithm, axes: Hyperparameters, many: Any) -> Algorithm:
    def client(shared, personal, data, hparams, context):
        def of_one(shared, personal, hparams):
            # Of a product leftᵀ·right the settings share the left factor: formed here, it is one
            # matrix product for all of them.
            personal, message, metrics = one.client(shared, personal, data, hparams, context)
            return personal, dense(unsealed(message)), metrics

        return many(of_one, -1, -1, axes)(shared, personal, hparams)

    return one._replace(
        init=many(one.init, None, axes),
        client=client,
        server=many(one.server, -1, -1, axes, None),
        predict=many(one.predict, -1, -1, axes, None),
    )


def _mechanism(one: Mechanism, axes: Hyperparameters, many: Any, size: int) -> Mechanism:
    def zero(message, num_clients):
        single = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[:-1], leaf.dtype), message
        )
        return _repeat(one.zero(single, num_clients), size)

    def add_one(accumulator, messages, *others):
        return one.add(accumulator, Messages(messages), *others)

    def add(accumulator, messages, *others):
        of_settings = many(add_one, -1, -1, None, None, -1, axes)
        return of_settings(accumulator, messages.dense(), *others)

    return one._replace(
        init=many(one.init, axes),
        zero=zero,
        add=add,
        release=many(one.release, -1, None, None, -1, axes, None),
    )


def _repeat(tree: PyTree, size: int) -> PyTree:
    """Every leaf S times, along a new last axis."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[..., None], (*leaf.shape, size)), tree)
