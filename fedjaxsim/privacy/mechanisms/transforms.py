"""Public transforms of messages before they are bounded, for any mechanism.

A client's message is encoded, by a function of it and of public randomness. The mechanism bounds,
sums and noises what is encoded, and the release is decoded. So the cost is the mechanism's own:
decoding is post-processing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.tree_util import register_dataclass
from numpy.typing import ArrayLike

from fedjaxsim import checks
from fedjaxsim.factories import made_by
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels import threefry
from fedjaxsim.kernels.primitives import check_alone
from fedjaxsim.keys import seed_key
from fedjaxsim.own_code import is_stamped
from fedjaxsim.privacy.mechanisms import protocol as base
from fedjaxsim.privacy.messages import widened

PyTree = Any
_CHOSEN = "Which numbers of a message clients send is given and taken as public."


class Transform(NamedTuple):
    """A public transform.

    Attributes:
      encode: `(message, key) -> encoded`, of one client; the key is public, one for each round.
      decode: `(encoded, message, key) -> message`, of the release; `message` is a pytree of shapes.
      public: sentences on what is taken as public, which each guarantee names.
      name: the transform in words; by default the factory of `encode`.
    """

    encode: Callable[[PyTree, jax.Array], PyTree]
    decode: Callable[[PyTree, PyTree, jax.Array], PyTree]
    public: tuple[str, ...] = ()
    name: str = ""


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """The total of encoded messages, and the shapes of one before it was encoded, static."""

    total: PyTree
    structure: Any = dataclasses.field(metadata={"static": True})
    shapes: tuple[tuple[tuple[int, ...], Any], ...] = dataclasses.field(metadata={"static": True})

    @property
    def message(self) -> PyTree:
        """One message as a pytree of shapes."""
        leaves = [jax.ShapeDtypeStruct(*shape) for shape in self.shapes]
        return jax.tree.unflatten(self.structure, leaves)


class EncodedState(NamedTuple):
    """The mechanism's state, and the number of releases, from which public keys follow."""

    inner: PyTree
    releases: jax.Array


def transformed(
    mechanism: base.Mechanism, transform: Transform, *, seed: int = 0
) -> base.Mechanism:
    """Return the mechanism behind a public transform of each client's message.

        mechanism = transformed(gaussian(), random_projection(1000))

    Formal guarantees:
      * The mechanism's, for messages that are encoded: what is bounded is what is summed, in
        float32 at least.
      * The transform follows from the seed and the number of releases, which are public, and from
        no client but the one whose message it encodes.

    Args:
      mechanism: A mechanism whose release looks like one message.
      transform: `random_projection`, `random_coordinates`, `chosen_coordinates`,
        `quantization`, or a `Transform`.
      seed: Public seed of the transform's randomness, no secret: unlike the seed of a run.

    Raises:
      ImpureError: from `zero`, if `encode` has its own rule for batches of clients.
    """

    def encode(message: PyTree, key: jax.Array) -> PyTree:
        return widened(transform.encode(message, key))

    def key_of(state: EncodedState) -> jax.Array:
        return threefry.fold_in(seed_key(seed), state.releases)

    def init(hparams: Hyperparameters) -> EncodedState:
        return EncodedState(mechanism.init(hparams), jnp.zeros((), jnp.int32))

    def zero(message, num_clients):
        check_alone(encode, message, seed_key(seed))
        like = jax.eval_shape(encode, message, seed_key(seed))
        accumulator = mechanism.zero(like, num_clients)
        leaves, structure = jax.tree.flatten(message)
        shapes = tuple((tuple(leaf.shape), jnp.dtype(leaf.dtype)) for leaf in leaves)
        return accumulator._replace(total=Encoded(accumulator.total, structure, shapes))

    def add(accumulator, messages, mask, ids, state, hparams):
        encoded, key = accumulator.total, key_of(state)
        inner = mechanism.add(
            accumulator._replace(total=encoded.total),
            messages.map(lambda message: encode(message, key)),
            mask, ids, state.inner, hparams,
        )  # fmt: skip
        return inner._replace(total=dataclasses.replace(encoded, total=inner.total))

    def release(accumulator, denominator, key, state, hparams, round_):
        encoded, public = accumulator.total, key_of(state)
        inner = accumulator._replace(total=encoded.total)
        out = mechanism.release(inner, denominator, key, state.inner, hparams, round_)
        wanted = jax.eval_shape(encode, encoded.message, public)
        if _shapes(out.value) != _shapes(wanted):
            raise ValueError(
                "a public transform needs a mechanism whose release looks like one message, as "
                f"{_shapes(wanted)}, got {_shapes(out.value)}"
            )
        value = transform.decode(out.value, encoded.message, public)
        return base.Release(
            value, EncodedState(out.state, state.releases + 1), out.noise_multiplier
        )

    public = (*mechanism.public, *transform.public)
    changed = mechanism._replace(
        init=init, zero=zero, add=add, release=release, public=public,
        transforms=(transform.name or made_by(transform.encode), *mechanism.transforms),
    )  # fmt: skip
    return base.stamped(changed) if is_stamped(mechanism) else changed


def _shapes(tree: PyTree) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in jax.tree.leaves(tree)]


def _flat(message: PyTree) -> jax.Array:
    return ravel_pytree(message)[0]


def _unflat(vector: jax.Array, message: PyTree) -> PyTree:
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), message)
    return ravel_pytree(zeros)[1](vector)


def random_projection(size: int) -> Transform:
    """Project a message's d numbers onto `size` sums with random signs (a count sketch).

    Number i is added with a sign s_i to sum h(i), and decoded as s_i times that sum: its mean over
    the public signs is the number itself (Charikar, Chen, Farach-Colton 2002). Signs and places are
    drawn anew in each round. Clients send `size` numbers. Each decoded number has the noise of its
    sum, as large as without a projection, and the numbers that share its sum besides.
    """
    checks.count(size=size)

    def places(count: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        bits = threefry.bits(key, (count,))
        return (bits >> 1) % jnp.uint32(size), jnp.where((bits & 1) == 0, 1.0, -1.0)

    def encode(message, key):
        vector = _flat(message)
        place, sign = places(vector.size, key)
        return jnp.zeros(size, vector.dtype).at[place].add(sign.astype(vector.dtype) * vector)

    def decode(encoded, message, key):
        count = sum(leaf.size for leaf in jax.tree.leaves(message))
        place, sign = places(count, key)
        return _unflat(sign.astype(encoded.dtype) * encoded[place], message)

    return Transform(encode, decode)


def chosen_coordinates(indices: ArrayLike) -> Transform:
    """Send a message's numbers at public positions of its flattened leaves; others become 0.

    The positions may have the largest changes of a model that was published, or that was
    trained on public data: they may not follow from the clients' rows in another way.

    Args:
      indices: Distinct positions, (k,) integers.
    """
    positions = np.asarray(indices)
    valid = positions.ndim == 1 and positions.size > 0 and positions.dtype.kind in "iu"
    if not valid or np.any(positions < 0) or np.unique(positions).size < positions.size:
        raise ValueError(f"indices must be distinct positions (k,) from 0 on, got {indices!r}")
    least = int(positions.max()) + 1
    chosen = _of_coordinates(least, lambda count, key: positions)
    return chosen._replace(public=(_CHOSEN,), name=f"chosen_coordinates of {len(positions)}")


def random_coordinates(size: int) -> Transform:
    """Send `size` of a message's d numbers, the same ones of all clients, drawn anew each round.

    The others are decoded as 0 and have no noise in that round; each has its turn every d/size
    rounds on average.
    """
    checks.count(size=size)
    drawn = _of_coordinates(
        size, lambda count, key: jnp.argsort(threefry.bits(key, (count,)))[:size]
    )
    return drawn._replace(name=f"random_coordinates(size={size})")


def _of_coordinates(least: int, places: Callable[[int, jax.Array], Any]) -> Transform:
    """Send the numbers at `places(size, key)` of messages of at least `least` numbers."""

    def encode(message, key):
        vector = _flat(message)
        if vector.size < least:
            raise ValueError(
                f"the transform needs messages of at least {least} numbers, got {vector.size}"
            )
        return vector[places(vector.size, key)]

    def decode(encoded, message, key):
        count = sum(leaf.size for leaf in jax.tree.leaves(message))
        vector = jnp.zeros(count, encoded.dtype).at[jnp.asarray(places(count, key))].set(encoded)
        return _unflat(vector, message)

    return Transform(encode, decode)


def quantization(step: float) -> Transform:
    """Round each number of a message to a multiple of a public step."""
    checks.positive(step=step)

    def encode(message, key):
        return jax.tree.map(lambda leaf: jnp.round(leaf / step) * step, message)

    return Transform(encode, lambda encoded, message, key: encoded)
