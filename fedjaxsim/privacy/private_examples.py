"""Example-level privacy inside clients: a task whose gradients are clipped and noised.

A client's minibatches are opaque. The one thing that `Task.gradient` takes from them is

    (Σ_i clip(∇ℓ_i, C) + N(0, (zC)²)) / (expected number of examples)

over a Poisson minibatch of the client's rows (DP-SGD; Abadi et al. 2016). All else that an
algorithm computes is post-processing, so none needs a changed line.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks, keys
from fedjaxsim.data.minibatches import Batch, Reader, value_and_gradient
from fedjaxsim.hyperparameters import Declarations, Hyperparameters
from fedjaxsim.kernels import integer_sums, threefry
from fedjaxsim.kernels.primitives import check_alone
from fedjaxsim.keys import Stream
from fedjaxsim.privacy.entries import check_delta, check_epsilon, least_count
from fedjaxsim.privacy.mechanisms import CLIP_NORM, NOISE_MULTIPLIER, noise_like
from fedjaxsim.privacy.messages import clip_by_global_norm, clip_factor, widened
from fedjaxsim.tasks.task import Task

PyTree = Any
EXAMPLE_CLIP = dataclasses.replace(
    CLIP_NORM,
    name="example_clip",
    default=1.0,
    also=(),
    allowed=CLIP_NORM.allowed.replace(" (inf is no clipping)", ""),
    help="C of an example, the bound on the L2 norm of its gradient.",
)
EXAMPLE_NOISE = dataclasses.replace(
    NOISE_MULTIPLIER,
    name="example_noise_multiplier",
    default=None,
    schedule=False,
    help="z of an example, the standard deviation of a gradient's noise, divided by its C.",
)
_TAIL = 1e-15
"""Probability of a minibatch above capacity; its part of δ is negligible for 10⁶ minibatches."""
_ROWS = 2**20
"""Rows of the client for which the capacity is computed: the binomial tail grows with them."""
_BITS = 16
"""Least significant bits of a rate, which is cut to them. The rate that is charged is not cut."""
_FEW_WORDS = 32
"""Words of a client's coins, 1,024 rows, among which places are found without reading by index."""
_LEAST_SHARE = 0.999
"""Share of C that sums of one word must leave, else they take two."""


class Sampled(NamedTuple):
    """A Poisson minibatch, with keys of its noise and of its random layers.

    `rows`, (places,), are the `drawn` rows, in order, and then any. `expected` are expected, ().
    """

    rows: jax.Array
    drawn: jax.Array
    key: jax.Array
    expected: jax.Array
    random: jax.Array


class GradientNoise(NamedTuple):
    """The protection of one client's minibatches, by noise zC on sums of gradients of norm ≤ C.

    A minibatch above its `capacity` loses its last examples, and the gradients of
    `microbatch_size` examples are in memory at once. Both numbers are static.
    """

    capacity: int
    microbatch_size: int
    clip_norm: jax.Array
    noise_multiplier: jax.Array

    def sample(self, key: jax.Array, size: int, count: jax.Array, most_rows: int) -> Sampled:
        """Draw each of `count` = n rows, at most `most_rows`, with probability min(1, size/n)."""
        coin_key, noise_key, random_key = keys.streams(
            key, (Stream.EXAMPLE_COINS, 0), (Stream.GRADIENT_NOISE, 0), (Stream.EXAMPLES, 0)
        )
        rate = jnp.minimum(1.0, jnp.float32(size) / jnp.maximum(count, 1).astype(jnp.float32))
        words = -(-max(most_rows, 1) // 32)
        rows = jnp.clip(count - 32 * jnp.arange(words), 0, 32)
        full = (jnp.uint32(1) << (rows % 32).astype(jnp.uint32)) - 1
        full = jnp.where(rows < 32, full, ~jnp.uint32(0))
        bits = _BITS + max(0.0, math.log2(32 * words / size))
        coins = _coins(coin_key, words, rate, min(32, 2 * math.ceil(bits / 2)))
        coins = full & jnp.where(rate < 1, coins, ~jnp.uint32(0))
        chosen, drawn = _chosen(coins, self.capacity)
        return Sampled(chosen, drawn, noise_key, rate * count, random_key)

    def read(self, sampled: Sampled, read: Reader) -> Batch:
        """Read all places of a minibatch, examples first."""
        return _microbatch(sampled, read, jnp.int32(0), self.capacity)

    def gradient(
        self, task: Task, params: PyTree, sampled: Sampled, rows: Reader | Batch, ticket: int
    ) -> tuple[jax.Array, PyTree]:
        """Compute the mean loss of a minibatch, without noise, and its noised gradient.

        `rows` is the client's reader, for a loop over the places that are filled, or all places as
        read, for one with a derivative in reverse mode. Each gradient of a minibatch has its own
        `ticket`, and so its own noise.
        """
        value, total, exact = self._clipped_sum(task, params, sampled, rows)
        key = keys.stream(sampled.key, Stream.GRADIENT_NOISE, ticket)
        noise = noise_like(key, total, jnp.asarray(self.noise_multiplier * self.clip_norm))
        released = integer_sums.plus(exact, *jax.lax.stop_gradient((noise, self.clip_norm)))
        gradient = jax.tree.map(
            lambda s, n, exact, w: (
                _with_derivative_of(s + n, exact) / sampled.expected.astype(s.dtype)
            ).astype(w.dtype),
            total,
            noise,
            released,
            params,
        )
        return value / jnp.maximum(sampled.drawn, 1).astype(value.dtype), gradient

    def _clipped_sum(
        self, task: Task, params: PyTree, sampled: Sampled, rows: Reader | Batch
    ) -> tuple[jax.Array, PyTree, integer_sums.IntegerSum]:
        """Sum losses and clipped gradients, in floats for derivatives and exactly.

        One example moves the exact sum by at most C.

        Gradients are added as integers, exactly, so no other example's rounding follows from one
        that is drawn and moves the others to other microbatches. Dense layers have no gradients of
        examples, but float32 sums of microbatches, whose error is bounded.
        """
        size, chunks = self.microbatch_size, self.capacity // self.microbatch_size
        like = jax.tree.map(jnp.zeros_like, widened(params))
        by_layers = task.layers is not None and task.layers.of is task.loss
        shapes = jax.eval_shape(lambda: like)
        nothing = integer_sums.zero(shapes, self.capacity)
        bound, sums = self.clip_norm, _gradients_of_examples
        if by_layers:
            share = _share(like, size, chunks, nothing.bits)
            if share < _LEAST_SHARE:
                nothing = integer_sums.zero(shapes, self.capacity, fine=True)
                share = _share(like, size, chunks, nothing.bits)
            bound, sums = bound * share, _sums_of_layers

        def add(carry, batch):
            value, total, exact = carry
            more, gradients = sums(task, params, batch, bound)
            # A sum of another shape would be broadcast to a parameter's, and so stretched.
            gradients = jax.tree.map(
                lambda leaf, w: leaf.reshape(len(leaf), *w.shape), gradients, like
            )
            fixed = jax.lax.stop_gradient(gradients)
            exact = integer_sums.add(exact, fixed, jax.lax.stop_gradient(self.clip_norm))
            plus = jax.tree.map(
                lambda summed, terms: summed + jnp.sum(terms, axis=0), total, gradients
            )
            return value + more, plus, exact

        if isinstance(rows, Batch):
            microbatches = jax.tree.map(
                lambda leaf: leaf.reshape(chunks, size, *leaf.shape[1:]), rows
            )
            value = jax.eval_shape(
                functools.partial(sums, task), params, _first(microbatches), bound
            )[0]

            def maybe(carry, batch):
                # Examples come first, so a microbatch whose first place is empty has none.
                return jax.lax.cond(batch.weight[0] > 0, add, lambda c, _: c, carry, batch), None

            start = jnp.zeros((), value.dtype), like, nothing
            (value, total, exact), _ = jax.lax.scan(maybe, start, microbatches)
        else:
            read = rows

            def microbatch(k):
                return _microbatch(sampled, read, k * size, size)

            value = jax.eval_shape(lambda: sums(task, params, microbatch(jnp.int32(0)), bound)[0])
            value, total, exact = jax.lax.fori_loop(
                0,
                -(-sampled.drawn // size),
                lambda k, carry: add(carry, microbatch(k)),
                (jnp.zeros((), value.dtype), like, nothing),
            )
        return value, total, exact


def _coins(key: jax.Array, words: int, rate: jax.Array, bits: int) -> jax.Array:
    """Toss coins, (words,) uint32, each bit with the probability `rate` cut to `bits` ≤ 32 bits.

    A coin is whether a random number is below a threshold. All numbers are compared bit by bit,
    from the lowest on, so that one hash gives two bits of 32 numbers.
    """
    # At rate 1, where every row is drawn, the threshold does not fit.
    threshold = jnp.floor(jnp.where(rate < 1, rate, 0) * 2.0**bits).astype(jnp.uint32)
    lanes, key = jax.lax.iota(jnp.uint32, words), jax.random.key_data(key)

    def compare(pair, below):
        pair = jnp.uint32(pair)
        for bit, number in enumerate(threefry.words(key, jnp.full_like(lanes, pair), lanes)):
            threshold_bits = -((threshold >> (2 * pair + bit)) & 1)
            below = (below & (threshold_bits | ~number)) | (threshold_bits & ~number)
        return below

    return jax.lax.fori_loop(0, bits // 2, compare, jnp.zeros_like(lanes))


def _chosen(coins: jax.Array, places: int) -> tuple[jax.Array, jax.Array]:
    """Return the rows whose bits are set, in order and then any, (places,), and their number."""
    counts = jax.lax.population_count(coins).astype(jnp.int32)
    after = jnp.cumsum(counts)
    before, place = after - counts, jnp.arange(places)
    if coins.size <= _FEW_WORDS:  # a CPU reads numbers one by one, but masks many at once
        word, left, bits = jnp.zeros_like(place), place, jnp.broadcast_to(coins[0], place.shape)
        for number in range(1, coins.size):
            passed = before[number] <= place
            word = jnp.where(passed, number, word)
            left = jnp.where(passed, place - before[number], left)
            bits = jnp.where(passed, coins[number], bits)
    else:
        word = jnp.searchsorted(before, place, side="right") - 1
        left, bits = place - before[word], coins[word]
    return 32 * word + _bit(bits, left.astype(jnp.uint32)), jnp.minimum(after[-1], places)


def _bit(word: jax.Array, number: jax.Array) -> jax.Array:
    """Return the position of the bit of this number, from 0, among those that are set, int32."""
    # Counts of the bits in groups of 2, 4 and 8, and of the lower 16: CPUs count no vectors' bits.
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    groups = (eights + (eights >> 8), 16), (eights, 8), (fours, 4), (pairs, 2), (word, 1)
    position = jnp.zeros_like(word)
    for counts, size in groups:
        lower = (counts >> position) & (2 * size - 1)
        beyond = number >= lower
        position = jnp.where(beyond, position + size, position)
        number = jnp.where(beyond, number - lower, number)
    return position.astype(jnp.int32)


def _microbatch(sampled: Sampled, read: Reader, first: jax.Array, size: int) -> Batch:
    """Read `size` places of a minibatch from the `first` on."""
    places = first + jnp.arange(size)
    weight = (places < sampled.drawn).astype(float)
    rows = jax.lax.dynamic_slice(sampled.rows, (first,), (size,))
    # Without the barrier XLA reads the rows again in every consumer.
    batch = jax.lax.optimization_barrier(Batch(read(rows), weight))
    return batch._replace(keys=keys.stream(sampled.random, Stream.EXAMPLES, places))


def _first(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)


def _gradients_of_examples(task, params, batch, bound):
    """Sum losses of a microbatch, and compute the clipped gradients, leaves (k, …)."""

    def of_example(fields, key):
        alone = jax.tree.map(lambda leaf: leaf[None], (fields, jnp.ones(()), key))
        value, gradient = value_and_gradient(task, params, Batch(*alone))
        return value, clip_by_global_norm(widened(gradient), bound).messages

    def present(leaf):
        return jnp.where(batch.weight.reshape(-1, *(1,) * (leaf.ndim - 1)) > 0, leaf, 0)

    check_alone(of_example, *_first((batch.fields, batch.keys)))
    values, gradients = jax.vmap(of_example)(batch.fields, batch.keys)
    return jnp.sum(present(values)), jax.tree.map(present, gradients)


def _sums_of_layers(task, params, batch, bound):
    """Compute the sum of `_gradients_of_examples` of dense layers, leaves (1, …), without them.

    An example's gradient is δxᵀ in a layer of inputs x whose outputs have the derivatives δ, of
    norm ‖δ‖ ‖x‖ (Goodfellow 2015). So the clipped sum is a product for each layer.
    """
    layers, dense = task.layers, task.layers.dense
    wide = widened(params)
    dtype = jax.tree.leaves(wide)[0].dtype

    def loss(shifts, fields):
        alone = jax.tree.map(lambda leaf: leaf[None], fields)
        outputs, inputs = dense.apply(wide, alone["x"], shifts)
        return layers.losses(outputs, alone)[0], inputs

    # Each example by itself, so that no layer or loss can mix them.
    shifts = [jnp.zeros((1, width), dtype) for width in dense.widths]
    of_example = jax.value_and_grad(loss, has_aux=True)
    check_alone(of_example, shifts, _first(batch.fields))
    of_rows = jax.vmap(of_example, (None, 0))(shifts, batch.fields)
    (values, inputs), derivatives = jax.tree.map(
        lambda leaf: leaf.reshape(batch.weight.size, -1), of_rows
    )
    values = values[:, 0]
    squares = jnp.zeros(batch.weight.size, dtype)
    for x, d in zip(inputs, derivatives, strict=True):
        squares += _squares(d) * (_squares(x) + (1 if dense.biased else 0))
    factor = jnp.where(batch.weight > 0, clip_factor(squares, bound), 0)[:, None]
    # Without the barrier XLA computes them again in every consumer.
    factor, derivatives = jax.lax.optimization_barrier((factor, derivatives))

    def kept(leaf):  # where the factor is 0, numbers need not be finite
        return jnp.where(factor > 0, leaf, 0)

    inputs, derivatives = list(map(kept, inputs)), [kept(d) * factor for d in derivatives]

    def layer(x, d):
        left, right = (x, d) if dense.names else (d, x)
        both, exact = (((0,), (0,)), ((), ())), jax.lax.Precision.HIGHEST
        kernel = {"kernel": jax.lax.dot_general(left, right, both, precision=exact)[None]}
        return kernel | ({"bias": jnp.sum(d, axis=0)[None]} if dense.biased else {})

    of_layers = list(map(layer, inputs, derivatives))
    total = dict(zip(dense.names, of_layers, strict=True)) if dense.names else of_layers[0]
    return jnp.sum(jnp.where(batch.weight > 0, values, 0)), total


def _squares(rows: jax.Array) -> jax.Array:
    """Return an upper bound on ‖x‖² of each row, (b,): squares below 2⁻¹²⁶ may count as 0."""
    return jnp.sum(rows * rows, axis=1) + rows.shape[1] * 2.0**-126


def _share(like: PyTree, size: int, chunks: int, bits: int) -> float:
    """Return the share of C to clip to, so that with all rounding one example moves a sum by C.

    An example that is drawn moves all later ones by one place, so every microbatch may differ. A
    float32 sum of k gradients is off by at most (k + 2)·2⁻²⁴ times the sum of their norms, whatever
    the order (Higham 2002, section 3.1); of all gradients, in both minibatches, that is at most
    twice the capacity. Truncation to multiples of C·2⁻ᵇⁱᵗˢ adds less than one such unit to each of
    p numbers of each microbatch.
    """
    numbers = sum(leaf.size for leaf in jax.tree.leaves(like))
    rounding = 2 * size * chunks * (size + 2) * 2.0**-24
    units = 2 * chunks * np.sqrt(numbers) * 2.0**-bits
    if rounding > 0.5 or units > 0.5:
        raise ValueError(
            f"exact sums of gradients with {numbers} numbers need smaller minibatches, or a model "
            "with fewer parameters"
        )
    return float((1 - units) / (1 + rounding))


@jax.custom_jvp
def _with_derivative_of(total: jax.Array, exact: jax.Array) -> jax.Array:
    """Return the noised exact sum, with the derivative of the noised float sum."""
    return exact


@_with_derivative_of.defjvp
def _(primals, tangents):
    return primals[1], tangents[0]


@dataclasses.dataclass(frozen=True)
class PrivateExamples:
    """The protection of single examples; see `private_examples`.

    Of about b + 3√b gradients `most_at_once` are in memory, so sums of layers are off by little.
    """

    epsilon: float | None
    rounds: int | None
    delta: float | None
    most_at_once: int

    @property
    def hyperparameters(self) -> Declarations:
        """The hyperparameters that the protection reads."""
        return (EXAMPLE_CLIP, EXAMPLE_NOISE) if self.epsilon is None else (EXAMPLE_CLIP,)

    def microbatch(self, size: int) -> int:
        """Return the places of a microbatch: few minibatches need another one."""
        likely = size + 3 * math.sqrt(size)
        return 4 * math.ceil(likely / math.ceil(likely / self.most_at_once) / 4)

    def capacity(self, size: int) -> int:
        """Return the places of a Poisson minibatch of expected size b, whole microbatches."""
        places = max(size, least_count(_TAIL, _ROWS, min(1.0, size / _ROWS)))
        return self.microbatch(size) * math.ceil(places / self.microbatch(size))

    def of_client(
        self,
        count: jax.Array,
        size: int,
        hparams: Hyperparameters,
        noise: tuple[tuple[int, float], ...],
    ) -> GradientNoise:
        """Return the protection of a client with `count` rows; `noise` as in `Silos`."""
        if noise:
            counts, values = map(np.array, zip(*noise, strict=True))
            # Numbers of rows that are not in the table get noise without bound.
            matches = jnp.asarray(counts) == count
            z = jnp.where(jnp.any(matches), jnp.sum(jnp.where(matches, values, 0)), jnp.inf)
        else:
            z = jnp.asarray(hparams.get("example_noise_multiplier", 1.0))
        clip_norm = jnp.asarray(hparams.example_clip)
        return GradientNoise(self.capacity(size), self.microbatch(size), clip_norm, z)


def private_examples(
    task: Task,
    *,
    epsilon: float | None = None,
    rounds: int | None = None,
    delta: float | None = None,
) -> Task:
    """Make a task whose gradients of minibatches protect each of a client's examples.

    Each of a client's n rows is in a minibatch with probability min(1, b/n). The gradient of each
    example is clipped to C = `hparams.example_clip`, and their sum gets Gaussian noise of standard
    deviation zC. All clients have z = `hparams.example_noise_multiplier` or, with `epsilon`, each
    the z with which it spends ε in `rounds` rounds. Every gradient of a minibatch is charged, and
    draws its own noise.

    `Task.gradient` is the only use of a minibatch. Algorithms that use rows in other ways are
    refused when a simulation is made. An example's loss is the loss of a minibatch of it alone.

    Args:
      task: model and loss.
      epsilon: ε > 0 of every client that takes part in all rounds (zero-out).
      rounds: T, with `epsilon`.
      delta: δ of every client; by default 1/(10 n).

    Raises:
      ValueError: if a number is out of range, only one of `epsilon` and `rounds` is given, the task
        protects examples already, or its model keeps running statistics.

    Example:
      >>> protected = fjs.private_examples(task)  # `task` as in `Simulation`
      >>> [record.name for record in protected.examples.hyperparameters]
      ['example_clip', 'example_noise_multiplier']
    """
    if not isinstance(task, Task):
        raise ValueError(f"private_examples needs a Task, got a {type(task).__name__}")
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
    if task.track is not None:
        raise ValueError(
            "running statistics (BatchNorm) are made of rows without noise: examples cannot be "
            "private; use GroupNorm or LayerNorm"
        )
    on_model = task.on_model

    def protected(task: Task) -> Task:
        return task._replace(on_model=on_model and again, examples=examples)

    def again(model):
        assert on_model is not None
        return protected(on_model(model))

    most_at_once = 16 if task.layers is None else 64
    examples = PrivateExamples(epsilon, rounds, delta, most_at_once)
    return protected(task)
