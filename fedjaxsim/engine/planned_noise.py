"""The noise of planned rounds: z of the mechanism's own releases, without messages.

An accountant reads no hyperparameter: the mechanism says what its noise costs, before a run as in
one.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from fedjaxsim.engine.program import Program
from fedjaxsim.engine.work import INTEGER
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.keys import seed_key

PyTree = Any
_CHUNK = 1024
"""Number of rounds whose noise is computed at once."""


@dataclasses.dataclass(frozen=True)
class PlannedNoise:
    """The noise multipliers that a mechanism returns, as a function of hyperparameters and round.

    Attributes:
      function: `(*leaves) -> [z]` of the hyperparameters' leaves and then, if `varies`, the round.
      leaves: which leaves of the hyperparameters it reads.
      varies: whether z follows from the round.
      known: whether z follows from nothing else: not from messages, the mechanism's state, that
        releases change, or random numbers.
    """

    function: Any
    leaves: tuple[bool, ...]
    varies: bool
    known: bool

    @classmethod
    def of(cls, program: Program, message: PyTree, hparams: Hyperparameters) -> "PlannedNoise":
        """Trace the mechanism's release; arguments may be shapes."""
        mechanism, sampling, m = program.mechanism, program.sampling, program.num_clients
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), message)

        def noise_multiplier(hparams, round_, total, state, key):
            expected = sampling.answer_rate(sampling.rate(hparams)) * m
            release = mechanism.release(total, expected, key, state, hparams, round_)
            return jnp.asarray(release.noise_multiplier)

        key = jax.eval_shape(lambda: seed_key(0))
        state = jax.eval_shape(mechanism.init, hparams)
        total = jax.eval_shape(lambda: mechanism.zero(shapes, m))
        traced = jax.make_jaxpr(noise_multiplier)(hparams, INTEGER, total, state, key)
        jaxpr, reads = dce_jaxpr(traced.jaxpr, [True])
        number = len(jax.tree.leaves(hparams))
        leaves, varies, other_reads = tuple(reads[:number]), reads[number], reads[number + 1 :]
        consts = [
            value
            for variable, value in zip(traced.jaxpr.constvars, traced.consts, strict=True)
            if variable in jaxpr.constvars
        ]
        closed = ClosedJaxpr(jaxpr, consts)
        function = jaxpr_as_fun(closed) if not jaxpr.eqns else jax.jit(jaxpr_as_fun(closed))
        if varies and not any(other_reads):
            function = jax.jit(jax.vmap(jaxpr_as_fun(closed), (*[None] * sum(leaves), 0)))
        return cls(function, leaves, varies and not any(other_reads), not any(other_reads))

    def values(self, hparams: Hyperparameters, begin: int, end: int) -> np.ndarray:
        """Return z of rounds `begin` to `end`, (rounds,), or (1,) if all rounds have the same one.

        It is NaN, which has no known ε, unless z follows from hyperparameters and round alone.
        """
        if not self.known:
            return np.full(1, np.nan, np.float32)
        leaves = zip(jax.tree.leaves(hparams), self.leaves, strict=True)
        read = [leaf for leaf, is_read in leaves if is_read]
        if not self.varies:
            return np.asarray(self.function(*read)[0]).reshape(1)
        firsts = range(begin, end, _CHUNK)
        rounds = (np.arange(first, first + _CHUNK, dtype=np.int32) for first in firsts)
        chunks = [np.asarray(self.function(*read, numbers)[0]) for numbers in rounds]
        return np.concatenate([np.zeros(0, np.float32), *chunks])[: end - begin]
