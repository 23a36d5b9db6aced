"""A check that a client's rows leave it through protected gradients alone.

The round of one client is traced with one minibatch per fold, a fixed one, and a mark in place of
every protected gradient. Rows are then followed through all equations to the results.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjaxsim.algorithm import Algorithm, Context
from fedjaxsim.data.batch import Batch, ProtectedBatches, Protection
from fedjaxsim.data.minibatches import ClientData, Minibatches, protected_view
from fedjaxsim.engine.rows import Rows
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.private_examples import losses

_ROWS = 1
"""Label of a value computed from rows. Leaf i of the minibatch, unchanged, adds 2(i + 1)."""
_MARK = "example_gradient"
"""The name of `private_examples.example_gradient` in a trace."""
_NUMBER: Any = jax.ShapeDtypeStruct((), jnp.float32)


class UnprotectedError(ValueError):
    """A refusal by this module."""


def gradients_per_minibatch(
    algorithm: Algorithm,
    minibatches: Minibatches,
    rows: Rows,
    num_clients: int,
    hparams: Hyperparameters | None = None,
) -> int:
    """Return the largest number of protected gradients of one minibatch in a client's round.

    Args:
      algorithm: with a task from `private_examples`.
      minibatches: of the local steps.
      rows: the training rows, or their shapes.
      num_clients: m.
      hparams: hyperparameters as a client sees them, as arrays; by default one number each.

    Raises:
      UnprotectedError: if a personal state or a message depends on rows in another way, or a loop
        of unknown length takes gradients.
    """
    if algorithm.predict_with_data is not None:
        raise UnprotectedError(
            "the algorithm predicts with a client's rows themselves, which noise in gradients does "
            "not protect: examples cannot be private"
        )
    if hparams is None:
        records = (*algorithm.hyperparameters, *algorithm.task.examples.hyperparameters)
        hparams = Hyperparameters(**{record.name: _NUMBER for record in records})
    size = algorithm.task.examples.capacity(minibatches.size)
    fields: Any = {
        name: jax.ShapeDtypeStruct((size, *field.shape[1:]), field.dtype)
        for name, field in rows.fields.items()
    }
    weight: Any = jax.ShapeDtypeStruct((size,), jnp.zeros(()).dtype)
    key = jax.random.key(0, impl="threefry2x32")
    secret: Any = jax.eval_shape(lambda: key)
    noise = Protection(secret, _NUMBER, _NUMBER, _NUMBER)

    def results(batch, hparams, count, round_, client_id):
        def read(position):
            first = {name: field[0] for name, field in batch.fields.items()}
            return {
                name: jnp.broadcast_to(row, (*position.shape, *row.shape))
                for name, row in first.items()
            }

        data = ClientData(read, count, key, minibatches, most_rows=rows.most_rows)
        checked = ProtectedBatches(size, hparams.example_clip, jnp.zeros(()), batch)
        data = protected_view(data, checked)
        shared, personal = algorithm.init(key, hparams)
        context = Context(round_, key, client_id, num_clients, jnp.ones(()))
        return algorithm.client(shared, personal, data, hparams, context)[:2]

    integer = jax.ShapeDtypeStruct((), jnp.int32)
    batch = Batch(fields, weight, noise)
    met: set[Any] = set()
    token = losses.set(met)
    try:
        traced = jax.make_jaxpr(results)(batch, hparams, integer, integer, integer)
    finally:
        losses.reset(token)
    if len(met) > 1:
        raise UnprotectedError(
            "the algorithm takes gradients of several losses, or at parameters of several shapes: "
            "their noise would cancel; use one task"
        )
    own = len(jax.tree.leaves(batch))
    # The key of the noise is as secret as rows. C, z and the expected number are public.
    labels = [2 * (i + 1) | (_ROWS if i < own - 3 else 0) for i in range(own)]
    labels += [0] * (len(traced.jaxpr.invars) - own)
    follow = _Follow([shape for _, _, shapes in met for shape in shapes])
    if any(label & _ROWS for label in follow.jaxpr(traced.jaxpr, labels)):
        raise UnprotectedError(
            "the algorithm uses a client's rows, or their losses, other than by gradients of the "
            "task's loss on minibatches of `fold`: its examples cannot be private"
        )
    if not follow.gradients:
        raise UnprotectedError("the algorithm takes no gradient that could protect examples")
    return follow.gradients


class _Follow:
    """Labels that follow values through a trace, and the number of protected gradients."""

    def __init__(self, shapes: Sequence[tuple[int, ...]] = ()):
        """Start at no gradient; its arguments must have these shapes."""
        self.gradients, self._shapes = 0, [*shapes]

    def jaxpr(self, jaxpr: Any, labels: Sequence[int]) -> list[int]:
        """Return the labels of a jaxpr's results, given those of its arguments."""
        jaxpr = _plain(jaxpr)
        known = dict(zip(jaxpr.invars, labels, strict=True))

        def of(value):
            return 0 if hasattr(value, "val") else known.get(value, 0)

        for equation in jaxpr.eqns:
            results = self._equation(equation, [of(value) for value in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [of(value) for value in jaxpr.outvars]

    def _equation(self, equation: Any, labels: list[int]) -> list[int]:
        name, params = equation.primitive.name, equation.params
        if equation.effects:
            raise UnprotectedError(
                "the algorithm writes to an array in place (jax.new_ref), where rows cannot be "
                "followed: examples cannot be private"
            )
        if params.get("name") == _MARK and self._is_mark(params["jaxpr"]):
            return self._gradient(equation, labels)
        if name == "scan":
            inner = _plain(params["jaxpr"])
            scanned = _sliced(equation.invars, inner.invars)
            carried = len(equation.outvars) - _sliced(equation.outvars, inner.outvars)
            fixed = len(labels) - carried - scanned
            return self._loop(
                lambda carry: self.jaxpr(
                    params["jaxpr"],
                    [*labels[:fixed], *carry, *(x & _ROWS for x in labels[fixed + carried :])],
                ),
                labels[fixed : fixed + carried],
                params["length"],
            )
        if name == "while":
            tests, fixed = params["cond_nconsts"], params["body_nconsts"]
            carry = self._loop(
                lambda carry: self.jaxpr(
                    params["body_jaxpr"], [*labels[tests : tests + fixed], *carry]
                ),
                labels[tests + fixed :],
                None,
            )
            before = self.gradients
            stops = self.jaxpr(params["cond_jaxpr"], [*labels[:tests], *carry])
            if self.gradients > before:
                raise UnprotectedError(_ENDLESS)
            return [label | (stops[0] & _ROWS) for label in carry]
        if name == "cond":
            each, before, most = [], self.gradients, self.gradients
            for branch in params["branches"]:
                self.gradients = before
                each.append(self.jaxpr(branch, labels[1:]))
                most = max(most, self.gradients)
            self.gradients = most
            if labels[0] & _ROWS and most > before:
                raise UnprotectedError(_CHOSEN)
            return [_either(some, labels[0] & _ROWS) for some in zip(*each, strict=True)]
        inner = [value for value in params.values() if hasattr(value, "eqns")]
        if len(inner) == 1 and len(_plain(inner[0]).invars) == len(labels):
            return self.jaxpr(inner[0], labels)
        return [_either((0, *labels), 0)] * len(equation.outvars)

    def _loop(
        self, body: Callable[[list[int]], list[int]], carry: list[int], length: int | None
    ) -> list[int]:
        """Return the labels after a loop, where those of the carry no longer grow."""
        before, carried = self.gradients, len(carry)
        carry = [label & _ROWS for label in carry]
        while True:
            self.gradients = before
            results = body(carry)
            wider = [a | (b & _ROWS) for a, b in zip(carry, results, strict=False)]
            if wider == carry:
                break
            carry = wider
        taken = self.gradients - before
        if taken and length is None:
            raise UnprotectedError(_ENDLESS)
        self.gradients = before + taken * (1 if length is None else length)
        # A minibatch that is kept could be used again, beyond the gradients that are counted.
        if any(label > _ROWS for label in results[:carried]):
            raise UnprotectedError(
                "the algorithm keeps a minibatch beyond its step: the ε of examples cannot be told"
            )
        return [*carry, *(label & _ROWS for label in results[carried:])]

    def _is_mark(self, jaxpr: Any) -> bool:
        """Return whether the results depend on no argument, as those of `example_gradient`."""
        return not any(_Follow().jaxpr(jaxpr, [_ROWS] * len(_plain(jaxpr).invars)))

    def _gradient(self, equation: Any, labels: list[int]) -> list[int]:
        """Count a gradient; its parameters must be public, its minibatch unchanged."""
        parameters = len(equation.outvars)
        if any(label & _ROWS for label in labels[:parameters]):
            raise UnprotectedError(
                "the algorithm takes gradients at parameters that depend on rows without noise: "
                "examples cannot be private"
            )
        leaves = [label >> 1 for label in labels[parameters:]]
        if leaves != [*range(1, len(leaves) + 1)]:
            raise UnprotectedError(
                "the algorithm changes a minibatch before its gradient: examples cannot be private"
            )
        if [value.aval.shape for value in equation.invars] != self._shapes:
            raise UnprotectedError(
                "the algorithm takes many gradients at once (jax.vmap), which are not counted: "
                "examples cannot be private; take one after another, by jax.lax.map"
            )
        self.gradients += 1
        return [0] * parameters


def _sliced(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """Count what a scan slices; the names by which its parameters say so depend on JAX."""
    return sum(one.aval.ndim > other.aval.ndim for one, other in zip(outside, inside, strict=True))


_ENDLESS = (
    "the algorithm takes gradients in a loop whose length is not known before: the ε of examples "
    "cannot be told"
)
_CHOSEN = (
    "the algorithm chooses by rows whether to take a gradient: the ε of examples cannot be told"
)


def _plain(jaxpr: Any) -> Any:
    """Return a jaxpr without its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _either(labels: Sequence[int], also: int) -> int:
    """Return the label of a value that is one of several: a leaf only if all are the same one."""
    rows = also | any(label & _ROWS for label in labels)
    return (labels[0] & ~_ROWS if len({label >> 1 for label in labels}) == 1 else 0) | rows
