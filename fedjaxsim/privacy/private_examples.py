"""Example-level privacy inside clients: a task whose gradients are clipped and noised.

An algorithm takes gradients of `task.loss` and needs no changed line: of the task made here, the
derivative of the loss at a minibatch is

    (Σ_i clip(∇ℓ_i, C) + N(0, (zC)²)) / (expected number of examples)

over a Poisson minibatch of the client's rows (DP-SGD; Abadi et al. 2016). Everything that is
computed from it is post-processing. `engine/example_checks.py` refuses all other uses of rows.
"""

import contextvars
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks
from fedjaxsim.data.batch import Batch, ProtectedBatches
from fedjaxsim.hyperparameters import Hyperparameters, Records
from fedjaxsim.kernels import threefry
from fedjaxsim.privacy.binomial import least_count
from fedjaxsim.privacy.clipping import clip_by_global_norm
from fedjaxsim.privacy.events import check_delta, check_epsilon
from fedjaxsim.privacy.mechanisms import CLIP_NORM, NOISE_MULTIPLIER, noise_like
from fedjaxsim.privacy.messages import widened
from fedjaxsim.tasks.task import Task

PyTree = Any
EXAMPLE_CLIP = dataclasses.replace(
    CLIP_NORM,
    name="example_clip",
    default=1.0,
    also=(),
    flag=None,
    allowed=CLIP_NORM.allowed.replace(" (inf is no clipping)", ""),
    symbol="C of an example",
    label="clip norm of an example",
    help="C of an example, the bound on the L2 norm of its gradient.",
)
EXAMPLE_NOISE = dataclasses.replace(
    NOISE_MULTIPLIER,
    name="example_noise_multiplier",
    default=None,
    schedule=False,
    symbol="z of an example",
    help="z of an example, the standard deviation of a gradient's noise, divided by its C.",
)
_TAIL = 1e-15
"""Probability of a minibatch above capacity; its part of δ is negligible for 10⁶ minibatches."""
_ROWS = 2**20
"""Rows of the client for which the capacity is computed: the binomial tail grows with them."""


losses: contextvars.ContextVar[set[Any] | None] = contextvars.ContextVar("losses", default=None)
"""The losses whose gradients a check has met, each with the structure and the shapes of its
arguments: gradients of two at one place would share noise. None in a run."""


@dataclasses.dataclass(frozen=True)
class PrivateExamples:
    """The protection of single examples; see `private_examples`."""

    epsilon: float | None
    rounds: int | None
    delta: float | None
    microbatch_size: int

    @property
    def hyperparameters(self) -> Records:
        """The hyperparameters that the protection reads."""
        return (EXAMPLE_CLIP, EXAMPLE_NOISE) if self.epsilon is None else (EXAMPLE_CLIP,)

    def capacity(self, size: int) -> int:
        """Return the places of a Poisson minibatch of expected size b, whole microbatches."""
        places = max(size, least_count(_TAIL, _ROWS, min(1.0, size / _ROWS)))
        return -(-places // self.microbatch_size) * self.microbatch_size

    def batches(
        self,
        count: jax.Array,
        size: int,
        hparams: Hyperparameters,
        noise: tuple[tuple[int, float], ...],
    ) -> ProtectedBatches:
        """Return the minibatches of a client.

        Args:
          count: n, the client's number of rows, ().
          size: b.
          hparams: hyperparameters.
          noise: (n, z) for every number of rows; () if z is a hyperparameter.
        """
        if noise:
            counts, values = map(np.array, zip(*noise, strict=True))
            # Numbers of rows that are not in the table get noise without bound.
            found = jnp.asarray(counts) == count
            z = jnp.where(jnp.any(found), jnp.sum(jnp.where(found, values, 0)), jnp.inf)
        else:
            z = jnp.asarray(hparams.example_noise_multiplier)
        return ProtectedBatches(self.capacity(size), jnp.asarray(hparams.example_clip), z)


def private_examples(
    task: Task,
    *,
    epsilon: float | None = None,
    rounds: int | None = None,
    delta: float | None = None,
    microbatch_size: int = 16,
) -> Task:
    """Make a task whose gradients of minibatches protect each of a client's examples.

    Each of a client's n rows is in a minibatch with probability min(1, b/n). The gradient of each
    example is clipped to C = `hparams.example_clip`, and their sum gets Gaussian noise of standard
    deviation zC. All clients have z = `hparams.example_noise_multiplier` or, with `epsilon`, each
    the z with which it spends ε in `rounds` rounds. In a minibatch a gradient at other parameters
    draws other noise, and one at the same parameters the same. So where sums round differently, as
    on several devices, a run draws other noise of the same law.

    The loss must be a mean of losses of examples. Its value has no noise, so an algorithm may
    report it and use it for nothing else.

    Args:
      task: model and loss.
      epsilon: ε > 0 of every client that takes part in all rounds (zero-out).
      rounds: T, with `epsilon`.
      delta: δ of every client; by default 1/(10 n).
      microbatch_size: examples whose gradients are in memory at once.

    Raises:
      ValueError: if a number is out of range, only one of `epsilon` and `rounds` is given, or the
        task protects examples already.
    """
    if not isinstance(task, Task):
        raise ValueError(f"private_examples needs a Task, got a {type(task).__name__}")
    checks.count(microbatch_size=microbatch_size)
    if epsilon is not None:
        check_epsilon(epsilon)
    if (epsilon is None) != (rounds is None):
        raise ValueError(f"give epsilon with rounds, got {epsilon} and {rounds}")
    if rounds is not None:
        checks.count(rounds=rounds)
    if delta is not None:
        check_delta(delta)
    if task.examples is not None:
        raise ValueError("the task protects its examples already: apply private_examples once")
    on_model, plain = task.on_model, task.loss

    @jax.custom_jvp
    def loss(params, batch):
        return plain(params, batch)

    @loss.defjvp
    def _(primals, tangents):
        params, batch = primals
        if batch.protection is None:
            return jax.jvp(lambda params: plain(params, batch), (params,), tangents[:1])
        value, gradient = private_gradient(plain, params, batch, microbatch_size)
        products = jax.tree.map(lambda g, t: jnp.sum(g * t), gradient, tangents[0])
        return value, sum(jax.tree.leaves(products), jnp.zeros_like(value))

    def again(model):
        assert on_model is not None
        return private_examples(
            on_model(model),
            epsilon=epsilon,
            rounds=rounds,
            delta=delta,
            microbatch_size=microbatch_size,
        )

    return task._replace(
        loss=loss,
        linear=None,  # its kernels take gradients of their own
        on_model=None if on_model is None else again,
        examples=PrivateExamples(epsilon, rounds, delta, microbatch_size),
    )


def private_gradient(
    loss: Callable[[PyTree, Batch], jax.Array], params: PyTree, batch: Batch, microbatch_size: int
) -> tuple[jax.Array, PyTree]:
    """Compute the mean loss of a minibatch, without noise, and its noised gradient.

    Args:
      loss: `(params, batch) -> ()`.
      params: where.
      batch: a minibatch with a protection; its size is a multiple of `microbatch_size`.
      microbatch_size: examples whose gradients are in memory at once.
    """
    protection = batch.protection
    assert protection is not None
    if (met := losses.get()) is not None:
        leaves, structure = jax.tree.flatten((params, batch))
        met.add((loss, structure, tuple(jnp.shape(leaf) for leaf in leaves)))
        return loss(params, batch._replace(protection=None)), _stand_in(params, batch)

    def of_example(fields):
        one = jax.tree.map(lambda leaf: leaf[None], fields)
        value, gradient = jax.value_and_grad(loss)(params, Batch(one, jnp.ones(1)))
        return value, clip_by_global_norm(widened(gradient), protection.clip_norm).message

    def add(carry, chunk):
        fields, weight = chunk

        def work(carry):
            values, gradients = jax.vmap(of_example)(fields)
            return jax.tree.map(
                lambda total, leaf: total + jnp.tensordot(weight.astype(leaf.dtype), leaf, 1),
                carry,
                (jnp.where(weight > 0, values, 0), gradients),
            )

        # Examples come first, so a microbatch whose first place is empty has none.
        return jax.lax.cond(weight[0] > 0, work, lambda carry: carry, carry), None

    chunks = jax.tree.map(
        lambda leaf: leaf.reshape(-1, microbatch_size, *leaf.shape[1:]),
        (batch.fields, batch.weight),
    )
    value_type = jax.eval_shape(loss, params, batch).dtype
    zero = jnp.zeros((), value_type), jax.tree.map(jnp.zeros_like, widened(params))
    (value, total), _ = jax.lax.scan(add, zero, chunks)
    noise = noise_like(
        _query_key(protection.key, params),
        total,
        jnp.asarray(protection.noise_multiplier * protection.clip_norm),
    )
    gradient = jax.tree.map(
        lambda s, n, w: ((s + n) / protection.expected.astype(s.dtype)).astype(w.dtype),
        total,
        noise,
        params,
    )
    count = jnp.maximum(jnp.sum(batch.weight), 1).astype(value_type)
    return value / count, gradient


def _query_key(key: jax.Array, params: PyTree) -> jax.Array:
    """Fold 64 bits of a keyed hash of the parameters into a key.

    Noise drawn twice for different parameters could be subtracted, and an algorithm may take
    several gradients of one minibatch, also in a loop, where no call has a number.
    """
    salts = threefry.bits(key, (2,))
    for salt in salts:
        digest, start = jnp.zeros((), jnp.uint32), 0
        for leaf in jax.tree.leaves(params):
            words = _words(leaf)
            place = jax.lax.iota(jnp.uint32, words.size) + jnp.uint32(start % 2**32)
            digest += jnp.sum(_mixed(words ^ _mixed(place ^ salt)), dtype=jnp.uint32)
            start += words.size
        key = threefry.fold_in(key, digest)
    return key


def _words(leaf: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32, (k,)."""
    leaf = jax.lax.stop_gradient(leaf)
    bits = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(leaf, bits).astype(jnp.uint32).ravel()


def _mixed(x: jax.Array) -> jax.Array:
    """Mix the bits of uint32 (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


@jax.custom_jvp
def _stand_in(params: PyTree, batch: Batch) -> PyTree:
    """Return zeros in place of a gradient, in an equation that `example_checks` recognizes."""
    assert batch.protection is not None
    return example_gradient(params, batch.fields, batch.weight, batch.protection)


@_stand_in.defjvp
def _(primals, tangents):
    raise ValueError(
        "the algorithm takes second derivatives of the loss, which noise in gradients does not "
        "protect: examples cannot be private"
    )


@jax.jit
def example_gradient(params, fields, weight, noise):
    """Return zeros like the parameters: the mark of a protected gradient in a trace."""
    del fields, weight, noise
    return jax.tree.map(jnp.zeros_like, params)
