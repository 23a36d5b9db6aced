"""Protocol of a mechanism, the only way for messages of clients to reach the server.

A `Mechanism` bounds each message, sums, draws noise once and divides. No other reduction over
clients reaches the server, so the server's state is a function of the releases alone, and the
billboard lemma (Hsu et al. 2016) turns the (ε, δ) of the releases into joint differential privacy
of all personal models.
"""

import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.checks import Name, SettingError
from fedjaxsim.hyperparameters import (
    Declarations,
    Hyperparameter,
    HyperparameterCheck,
    Hyperparameters,
    defaults_in_words,
    keeps_ranges,
    on_host,
)
from fedjaxsim.own_code import stamp
from fedjaxsim.privacy.entries import LARGEST_NOISE, SMALLEST_NOISE
from fedjaxsim.privacy.events import PrivacyEvent
from fedjaxsim.privacy.messages import Bounded, Messages
from fedjaxsim.privacy.noise import normal

PyTree = Any
SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM = 1e-12, 1e15
"""Range of finite clip norms: their squares exist in float32."""
CLIP_NORM = Hyperparameter(
    "clip",
    default=math.inf,
    range=(SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM),
    also=(math.inf,),
    allowed=(
        "be positive (inf is no clipping) and, as its square is a float32, lie in "
        f"[{SMALLEST_CLIP_NORM:g}, {LARGEST_CLIP_NORM:g}]"
    ),
    scale="log",
    help="C, the bound on the L2 norm of a message; the start of adaptive clipping.",
)
NOISE_MULTIPLIER = Hyperparameter(
    "noise_multiplier",
    default=0.0,
    range=(SMALLEST_NOISE, LARGEST_NOISE),
    also=(0.0,),
    allowed=(
        f"be finite and at least 0: 0 is no noise, else it must lie in "
        f"[{SMALLEST_NOISE:g}, {LARGEST_NOISE:g}]"
    ),
    schedule=True,
    help="z, the standard deviation of the noise on the sum of clipped messages, divided by C.",
)


class Accumulator(NamedTuple):
    """A sum over the messages added so far; the sum of two accumulators is an accumulator.

    `total` is the sum of bounded messages, or of a function of each. The numbers of messages scaled
    down and of those not finite, which count as zero, () int32, are diagnostics, never released.
    """

    total: PyTree
    clipped: jax.Array
    nonfinite: jax.Array


class Release(NamedTuple):
    """The output of a mechanism in one round.

    Attributes:
      value: pytree, like one message unless the mechanism says otherwise; all that the server
        reads.
      state: the mechanism's next (public) state.
      noise_multiplier: () z of the noise actually drawn, charged to the ledger; NaN if there is no
        guarantee.
    """

    value: PyTree
    state: PyTree
    noise_multiplier: jax.Array


class InitFunction(Protocol):
    """The mechanism's first state."""

    def __call__(self, hparams: Hyperparameters, /) -> PyTree:
        """Return the public state, such as an adaptive clip norm, or `()`."""
        ...


class ZeroFunction(Protocol):
    """The accumulator of no messages."""

    def __call__(self, message: PyTree, num_clients: int, /) -> Accumulator:
        """Return it, from one client's message as a pytree of shapes, and m; see `zeros`."""
        ...


class AddFunction(Protocol):
    """The only reduction over clients whose result reaches the server."""

    def __call__(
        self,
        accumulator: Accumulator,
        messages: Messages,
        mask: jax.Array,
        ids: jax.Array,
        state: PyTree,
        hparams: Hyperparameters,
        /,
    ) -> Accumulator:
        """Bound the messages of a chunk of k clients, and add them.

        Each client may change the accumulator by no more than what the event charges, whatever it
        sends; what is not finite counts as zero. See `Messages.bound` and `accumulate`.

        Args:
          accumulator: the sum so far, from `zero`; other devices' sums are added to it.
          messages: of the chunk.
          mask: (k,) bool; False for clients that are absent.
          ids: (k,) int32 client ids; m or more for some of the absent.
          state: the mechanism's public state.
          hparams: hyperparameters that have one value for all clients.
        """
        ...


class ReleaseFunction(Protocol):
    """The noise of a round, drawn once for all clients."""

    def __call__(
        self,
        accumulator: Accumulator,
        denominator: Any,
        key: jax.Array,
        state: PyTree,
        hparams: Hyperparameters,
        round_: Any,
        /,
    ) -> Release:
        """Return what the server may read, and the noise multiplier that is charged.

        Args:
          accumulator: the sum over all clients of the round.
          denominator: (), the expected number of messages p·m, which is public.
          key: of the round's noise, or of all rounds' if noise is correlated.
          state: the mechanism's public state.
          hparams: as in `add`.
          round_: () int32, counted from 0.
        """
        ...


class Mechanism(NamedTuple):
    """A mechanism, as pure functions. Only `add` reduces over clients for the server.

    A leaf of a message is float32 or float64, whatever the algorithm sends; accumulators and
    releases have the same types.

    Attributes:
      event: the cost of one release, for the accountants.
      init: `(hparams) -> state`: public state, such as an adaptive clip norm.
      zero: `(message, m) -> Accumulator`, from one message as a pytree of shapes.
      add: `(accumulator, messages, mask, ids, state, hparams) -> accumulator`: bounds and adds the
        `Messages` of the clients `ids` (k,); clients with mask (k,) False count as absent.
      release: `(accumulator, denominator, key, state, hparams, round) -> Release`; denominator and
        round are ().
      hyperparameters: records of the hyperparameters read; `hyperparameters.reads` sets them.
      check: `(hparams)`; raises ValueError for unsuitable hyperparameters known on the host.
      num_clients: m, if the mechanism fits one number of clients only; else None.
      public: sentences that each guarantee names, on how messages are summed and on numbers that
        may be computed from private data but are taken as public; see `Algorithm`.
      transforms: the public transforms that a message goes through before `add` bounds it, in their
        order, in words.
      adds_chunks: whether `add` gets a whole chunk of messages even where clients run one after
        another: it pays where the messages of a chunk are one matrix product.

    Example:
      >>> mechanism = fjs.gaussian()
      >>> mechanism.event.kind, mechanism.event.releases
      ('gaussian', True)
    """

    event: PrivacyEvent
    init: InitFunction
    zero: ZeroFunction
    add: AddFunction
    release: ReleaseFunction
    hyperparameters: Declarations = ()
    check: HyperparameterCheck = lambda hparams: None
    num_clients: int | None = None
    public: tuple[str, ...] = ()
    adds_chunks: bool = False
    transforms: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Name its cost, its transforms, and the hyperparameters with their defaults."""
        behind = f" behind {', '.join(self.transforms)}" if self.transforms else ""
        reads = defaults_in_words(self.hyperparameters)
        return f"Mechanism {self.event.kind}{behind}\n  reads {reads}"


def stamped(mechanism: Mechanism) -> Mechanism:
    """Return a mechanism of the package, whose event is the cost of its functions.

    `_replace` of one of them, or of a range that they rely on, makes a mechanism that is not.
    """
    return stamp(mechanism, _same_cost)


def _same_cost(before: Mechanism, after: Mechanism) -> bool:
    names = "event", "init", "zero", "add", "release"
    same = all(getattr(before, name) is getattr(after, name) for name in names)
    ranges = keeps_ranges(before.hyperparameters, after.hyperparameters)
    return same and ranges and {*before.public} <= {*after.public}


def check_noise(hparams: Hyperparameters) -> None:
    """Raise ValueError for a positive noise multiplier with an infinite clip norm."""
    if "noise_multiplier" not in hparams or "clip" not in hparams:
        return
    z, clip_norm = on_host(hparams.noise_multiplier), on_host(hparams.clip)
    if z is None or clip_norm is None:
        return
    if np.any(z > 0) and not np.all(np.isfinite(clip_norm)):
        raise SettingError(
            Name("noise_multiplier"),
            " > 0 needs a finite clip, since no noise protects unbounded messages, got ",
            Name("noise_multiplier"),
            f" {z}, clip {clip_norm}",
        )


def check_statistics(hparams: Hyperparameters) -> None:
    """Raise ValueError if a mean of running statistics would be clipped or noised."""
    z, clip_norm = on_host(hparams.get("noise_multiplier", 0)), on_host(hparams.get("clip", np.inf))
    if (z is not None and np.any(z > 0)) or (clip_norm is not None and np.any(clip_norm < np.inf)):
        raise ValueError(
            "the running statistics of BatchNorm are averaged only without noise and clipping: "
            "use GroupNorm or LayerNorm, freeze them with models.trainable, or keep them with "
            "their clients (fedbn, fedper, fedrep, dpfedmtl, local)"
        )


def zeros(shapes: PyTree, num_clients: int = 0) -> Accumulator:
    """Return the accumulator of no messages, for sums of these shapes."""
    total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return Accumulator(total, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def accumulate(accumulator: Accumulator, bounded: Bounded, chunk_total: PyTree) -> Accumulator:
    """Add the total of a chunk of bounded messages."""
    return with_total(accumulator, bounded, jax.tree.map(jnp.add, accumulator.total, chunk_total))


def with_total(accumulator: Accumulator, bounded: Bounded, total: PyTree) -> Accumulator:
    """Return the accumulator with a new total, and the counts of a chunk of messages added."""
    return Accumulator(
        total,
        accumulator.clipped + jnp.sum(bounded.clipped, dtype=jnp.int32),
        accumulator.nonfinite + jnp.sum(~bounded.finite, dtype=jnp.int32),
    )


def noise_like(key: jax.Array, tree: PyTree, scale: PyTree) -> PyTree:
    """Draw independent N(0, scale²) for every number in `tree`, all in one draw.

    The scale is () or a pytree of (), one for each leaf.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    offsets = np.cumsum([leaf.size for leaf in leaves])
    draws = normal(key, (int(offsets[-1]),), jnp.result_type(*leaves))
    parts = [
        part.reshape(leaf.shape).astype(leaf.dtype)
        for leaf, part in zip(leaves, jnp.split(draws, offsets[:-1]), strict=True)
    ]
    return scaled(jax.tree.unflatten(structure, parts), scale)


def scaled(tree: PyTree, scale: PyTree) -> PyTree:
    """Multiply a pytree by a scale, () or a pytree of (), one for each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    scales = jax.tree.leaves(scale)
    scales = scales * len(leaves) if len(scales) == 1 else scales
    products = (s.astype(leaf.dtype) * leaf for leaf, s in zip(leaves, scales, strict=True))
    return jax.tree.unflatten(structure, products)


def noise_scale(noise_multiplier: jax.Array, clip_norm: jax.Array, degree: int = 1) -> jax.Array:
    """Return z·C, or z·C² for products; 0, not NaN, without noise and clipping (z = 0, C = ∞)."""
    usable = (noise_multiplier > 0) | jnp.isfinite(clip_norm)
    return noise_multiplier * jnp.where(usable, clip_norm, 1.0) ** degree


def noised_mean(total: PyTree, noise: PyTree, denominator: jax.Array) -> PyTree:
    """Return (total + noise)/denominator, in the precision of the total."""
    return divided(jax.tree.map(jnp.add, total, noise), denominator)


def divided(total: PyTree, denominator: jax.Array) -> PyTree:
    """Return total/denominator, in the precision of the total."""
    return jax.tree.map(lambda leaf: leaf / jnp.asarray(denominator, leaf.dtype), total)


def round_value(schedule: jax.Array, round_: jax.Array) -> jax.Array:
    """Return the value for one round of a number () or of a schedule (T,)."""
    return schedule if jnp.ndim(schedule) == 0 else schedule[round_]
