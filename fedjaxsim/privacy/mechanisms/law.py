"""Tests of a mechanism of a user's own, before an accountant believes its event.

How large its bound and its noise are is not tested: that stays an assumption of the guarantee.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.hyperparameters import Hyperparameters, on_host
from fedjaxsim.keys import seed_key
from fedjaxsim.privacy.mechanisms.protocol import Mechanism
from fedjaxsim.privacy.messages import Messages

PyTree = Any
_KEYS, _ROUNDS = 8, 2
_LARGE = 1e12, 1e15
"""Numbers of two messages that no bound tells apart; the sum of their squares is finite."""
_GROWTH = 100
"""Growth between them that no bound explains."""


def answers_of(mechanism: Mechanism, num_clients: int) -> Callable[..., Any]:
    """Return `(message, hparams) -> (z, varies, sizes)`, how a mechanism answers; compiled.

    In the first rounds a release of one message of zeros, like `message`, has z, (2,), and varies
    with its key or not, (2,). A sum of one large message, and of a larger one, has sizes, (2,).
    """

    @jax.jit
    def answers(message, hparams):
        state, zero = mechanism.init(hparams), mechanism.zero(message, num_clients)

        def added(number):
            sent = jax.tree.map(
                lambda leaf: jnp.full((1, *leaf.shape), number, leaf.dtype), message
            )
            of_one = jnp.ones(1, bool), jnp.zeros(1, jnp.int32)
            return mechanism.add(zero, Messages(sent), *of_one, state, hparams)

        of_zeros = added(0)

        def releases(number):
            key = jax.random.fold_in(seed_key(0), number)
            return [
                mechanism.release(of_zeros, jnp.ones(()), key, state, hparams, jnp.int32(round_))
                for round_ in range(_ROUNDS)
            ]

        def differs(number):
            pairs = zip(releases(number), first, strict=True)
            return jnp.stack([_largest(a.value, b.value) > 0 for a, b in pairs])

        first = releases(0)
        varies = jnp.any(jax.lax.map(differs, jnp.arange(1, _KEYS)), axis=0)
        z = jnp.stack([jnp.asarray(release.noise_multiplier) for release in first])
        sizes = [_largest(added(number).total, zero.total) for number in _LARGE]
        return z, varies, jnp.stack(sizes)

    return answers


def check_own(answers: Callable[..., Any], message: PyTree, hparams: Hyperparameters) -> None:
    """Check that a mechanism bounds messages and draws noise from its key, if it charges for some.

    `message` is a pytree of shapes. Traced hyperparameters are skipped.
    """
    if any(on_host(value) is None for value in jax.tree.leaves(hparams)):
        return
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), message)
    z, varies, sizes = map(np.asarray, answers(zeros, hparams))
    charged = np.isfinite(z) & (z > 0)
    if np.any(charged & ~varies):
        raise ValueError(
            f"the mechanism charges noise of multiplier {z[charged & ~varies][0]:.3g}, but its "
            "release is the same for every key: draw noise from `key`, or return a "
            "noise_multiplier of 0, which has no ε"
        )
    if np.any(charged) and sizes[1] > _GROWTH * sizes[0]:
        raise ValueError(
            "the mechanism charges noise, but the larger a message, the more it counts in `add`, "
            "so no noise hides it: bound it, as by messages.bound(hparams.clip, mask)"
        )


def _largest(tree: PyTree, other: PyTree) -> jax.Array:
    """Return the largest difference between the numbers of two trees."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return jnp.max(jnp.stack([jnp.max(jnp.abs(leaf - before)) for leaf, before in pairs]))
