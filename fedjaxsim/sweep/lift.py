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
from fedjaxsim.hparams import Hyperparameters
from fedjaxsim.loop import Program
from fedjaxsim.privacy.mechanisms import Mechanism
from fedjaxsim.sweep.map_last import map_last

PyTree = Any


def stack(settings: Sequence[Hyperparameters]) -> tuple[Hyperparameters, Hyperparameters]:
    """Many settings as one: leaves that differ are stacked, the others stay as they are.

    Args:
      settings: S hyperparameters of one class.

    Returns:
      The hyperparameters, leaves (S, ...) where they differ; and in each leaf's place the axis to
      map over, 0 or None.

    Raises:
      ValueError: where the noise multiplier is a schedule in some settings and not in others, or
        of another length.
    """
    arrays = [
        jax.tree.map(np.asarray, setting, is_leaf=lambda leaf: isinstance(leaf, list | tuple))
        for setting in settings
    ]
    stacked, axes = {}, {}
    for field in dataclasses.fields(arrays[0]):
        values = [getattr(setting, field.name) for setting in arrays]
        shapes = {value.shape for value in values}
        if len(shapes) > 1:
            raise ValueError(
                f"{field.name} must have one shape in all settings, got {sorted(shapes)}"
            )
        same = all(np.array_equal(value, values[0]) for value in values)
        stacked[field.name] = values[0] if same else np.stack(values)
        axes[field.name] = None if same else 0
    kind = type(settings[0])
    return kind(**stacked), kind(**axes)


def over_settings(program: Program, axes: Hyperparameters, size: int) -> Program:
    """The program of S runs.

    Args:
      program: of one run.
      axes: the axis of each hyperparameter that is mapped over, 0 or None, as from `stack`.
      size: S.

    Returns:
      A program whose state and metrics have a last axis of length S, but for what all runs share:
      the round, the key, the cohorts and the minibatches that were consumed.
    """

    def many(function, *in_axes):
        return map_last(function, in_axes, size)

    return dataclasses.replace(
        program,
        algorithm=_algorithm(program.algorithm, axes, many),
        mechanism=_mechanism(program.mechanism, axes, many, size),
        measure=lambda params, data: many(lambda params: program.measure(params, data), -1)(params),
        empty_ledger=lambda: _repeat(program.empty_ledger(), size),
        charge=lambda ledger, z, rate: many(program.charge, -1, -1, None)(ledger, z, rate),
    )


def _algorithm(one: Algorithm, axes: Hyperparameters, many: Any) -> Algorithm:
    def client(shared, personal, data, hparams, context):
        def of_one(shared, personal, hparams):
            return one.client(shared, personal, data, hparams, context)

        return many(of_one, -1, -1, axes)(shared, personal, hparams)

    return one._replace(
        init=many(one.init, None, axes),
        client=client,
        server=many(one.server, -1, -1, axes, None),
        predict=many(one.predict, -1, -1, axes, None),
    )


def _mechanism(one: Mechanism, axes: Hyperparameters, many: Any, size: int) -> Mechanism:
    def zero(message):
        single = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[:-1], leaf.dtype), message
        )
        return _repeat(one.zero(single), size)

    return one._replace(
        init=many(one.init, axes),
        zero=zero,
        add=many(one.add, -1, -1, None, None, -1, axes),
        release=many(one.release, -1, None, None, -1, axes, None),
    )


def _repeat(tree: PyTree, size: int) -> PyTree:
    """Every leaf S times, along a new last axis."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[..., None], (*leaf.shape, size)), tree)
