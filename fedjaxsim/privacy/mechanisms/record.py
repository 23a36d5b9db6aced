"""A mechanism as a record of its choices: a statistic, a bound, noise and a divisor.

`mechanism_of` writes `zero`, `add` and `release` once for all of them. The event follows from the
choices by `SOUND`; choices that are not in it are refused. Choices have a stamp, as SOUND speaks of
those that are here: one with another function under its name makes no mechanism of the package.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjaxsim import checks
from fedjaxsim.hyperparameters import Declarations, HyperparameterCheck, Hyperparameters, on_host
from fedjaxsim.kernels import integer_sums, threefry
from fedjaxsim.own_code import is_stamped, stamp
from fedjaxsim.privacy.accounting.gaussian import inverse_series
from fedjaxsim.privacy.events import Banded, Correlated, Gaussian, NoKnownCost, PrivacyEvent, Pure
from fedjaxsim.privacy.mechanisms import protocol as base
from fedjaxsim.privacy.messages import Bounded, Messages, paths_of
from fedjaxsim.privacy.noise import radius

PyTree = Any
Divisor = Literal["expected", "one", "cohort"]
"""Divisor of a release: the expected cohort size, 1, or the realised cohort size, which is private
and has no known cost."""
_WEIGHTS = (
    "The clients' weights, and their sum that divides the release, are taken as public; weights "
    "computed from data, such as numbers of examples, are not covered by the guarantee."
)
EXACT = (
    "Messages of rounds are summed as integers, truncated to multiples of a public share of C, so "
    "that no rounding of their sum depends on a client."
)


class Statistic(NamedTuple):
    """Sum over clients that a mechanism releases.

    Attributes:
      kind: name in `SOUND`.
      zero: `(message, m) -> total` of no messages; the message is a pytree of shapes.
      add: `(total, messages, ids, C) -> total`, of bounded `Messages`; C bounds the whole
        message, or one for each leaf.
      plus: `(total, noise, C) -> value`.
      like: `(total) -> pytree` with the shapes of the noise.
      normal: `(key, like, scale) -> noise`, isotropic in the norm in which messages are bounded.
      coordinates: `(like) -> n`, the dimension of that noise.
      degree: power of C by which one message may move the total.
      replace: sensitivity when one client's whole data changes, see `PrivacyEvent`.
      adds_chunks: see `Mechanism`.
    """

    kind: str
    zero: Callable[[PyTree, int], PyTree]
    add: Callable[[PyTree, Messages, jax.Array, PyTree], PyTree]
    plus: Callable[[PyTree, PyTree, PyTree], PyTree]
    like: Callable[[PyTree], PyTree]
    normal: Callable[[jax.Array, PyTree, PyTree], PyTree]
    coordinates: Callable[[PyTree], int]
    degree: int = 1
    replace: float = 2.0
    adds_chunks: bool = False


class Adaptation(NamedTuple):
    """The second release of a round, a count, from which the bound of the next round follows.

    Attributes:
      tally: `(bounded) -> ()`: the sum of ±1/2 over the clients of a chunk.
      split: `(z, hparams) -> (z of the sum, charged z)`.
      noise: `(hparams) -> ()`, the standard deviation of the noise on the count.
      step: `(state, noised count / denominator, hparams) -> state`.
    """

    tally: Callable[[Bounded], jax.Array]
    split: Callable[[jax.Array, Hyperparameters], tuple[jax.Array, jax.Array]]
    noise: Callable[[Hyperparameters], jax.Array]
    step: Callable[[PyTree, jax.Array, Hyperparameters], PyTree]


class Bound(NamedTuple):
    """Bound on messages.

    Attributes:
      kind: name in `SOUND`.
      norm: `(state, hparams) -> C`, (), a bound on the norm of a whole message.
      clip: `(messages, mask, state, hparams) -> Bounded`.
      norms: `(paths, hparams) -> bounds` on the norm of each leaf; None for C.
      scales: `(paths, hparams) -> c`, one for each leaf, whose noise has standard deviation z·c;
        None for C in all of them. If a message moves part g by at most C_g, then Σ (C_g/c_g)² ≤ 1.
      init: `(hparams) -> state`, public.
      hyperparameters: records of the hyperparameters read.
      clips: names of those that are clip norms.
      check: `(hparams)`, see `Mechanism`.
      fits: `(message)`, a pytree of shapes; raises ValueError if it cannot be bounded so.
      adaptation: of a bound that follows from releases; else None.
    """

    kind: str
    norm: Callable[[PyTree, Hyperparameters], jax.Array]
    clip: Callable[[Messages, jax.Array, PyTree, Hyperparameters], Bounded]
    norms: Callable[[list[str], Hyperparameters], list[Any]] | None = None
    scales: Callable[[list[str], Hyperparameters], list[Any]] | None = None
    init: Callable[[Hyperparameters], PyTree] = lambda hparams: ()
    hyperparameters: Declarations = ()
    clips: tuple[str, ...] = ()
    check: HyperparameterCheck = lambda hparams: None
    fits: Callable[[PyTree], Any] = lambda message: None
    adaptation: Adaptation | None = None


class Noise(NamedTuple):
    """Noise on a statistic.

    Attributes:
      kind: name in `SOUND`; noise that is not in it has no known cost.
      draw: `(statistic, key, like, scale, round) -> noise`; None for none.
      event: `(replace) -> event`, the cost of one release if the choices are in `SOUND`.
      hyperparameters: records of the hyperparameters read.
    """

    kind: str
    draw: Callable[[Statistic, jax.Array, PyTree, PyTree, jax.Array], PyTree] | None
    event: Callable[[float], PrivacyEvent] = lambda replace: NoKnownCost()
    hyperparameters: Declarations = ()


_SUMS = "sum", "exact sum"
SOUND: dict[str, dict[str, tuple[str, ...]]] = {
    "gaussian": {
        "clip norm": (*_SUMS, "rows", "Gram matrix"),
        "layers": (*_SUMS, "rows"),
        "parts": (*_SUMS, "rows"),
        "adaptive": (*_SUMS, "rows"),
    },
    # Its density falls with the norm of the whole message, so its scale is one, and the count of
    # adaptive clipping has Gaussian noise.
    "pure": {"clip norm": (*_SUMS, "rows", "Gram matrix"), "layers": (*_SUMS, "rows")},
    # All rounds are one Gaussian release, with one z for each leaf; that of a count is another one.
    "correlated": {"clip norm": _SUMS, "layers": _SUMS, "parts": _SUMS},
    "banded": {"clip norm": _SUMS, "layers": _SUMS, "parts": _SUMS},
}
"""The statistics whose cost is known, by noise and bound, if the divisor is public."""


def event_of(
    statistic: Statistic, bound: Bound, noise: Noise, divisor: Divisor = "expected"
) -> PrivacyEvent:
    """Return the cost of one release; raise ValueError if the choices do not fit together."""
    if divisor == "cohort" or noise.kind not in SOUND:
        return NoKnownCost()
    by_bound = SOUND[noise.kind]
    if statistic.kind not in by_bound.get(bound.kind, ()):
        fitting = [kind for kind, statistics in by_bound.items() if statistic.kind in statistics]
        raise ValueError(
            f"{noise.kind} noise on a {statistic.kind!r} with the bound {bound.kind!r} has no "
            f"known cost; the bound must be {' or '.join(fitting) or 'another mechanism’s'}"
        )
    return noise.event(statistic.replace)


def mechanism_of(
    statistic: Statistic,
    bound: Bound,
    noise: Noise,
    divisor: Divisor = "expected",
    *,
    weights: ArrayLike | None = None,
    max_weight: float | None = None,
    shift: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> base.Mechanism:
    """Return the mechanism of these choices; raise ValueError if they do not fit together.

    release = (statistic of bounded messages + z·noise + shift) / divisor.

    Args:
      statistic: What is summed.
      bound: How messages are bounded.
      noise: Noise on the statistic.
      divisor: Divisor of the release.
      weights: w_k > 0, (m,), as in `gaussian`.
      max_weight: Public bound on the weights, as in `gaussian`.
      shift: `(noise scale, like) -> array` that is added, whatever the messages are.
    """
    event = event_of(statistic, bound, noise, divisor)
    shares = None if weights is None else _shares(weights, max_weight)
    share = 1.0 if shares is None or max_weight is not None else float(shares.mean())
    adaptation, counts = bound.adaptation, divisor == "cohort" or bound.adaptation is not None

    def norms_of(paths, state, hparams):
        if bound.norms is None:
            return bound.norm(state, hparams)
        return bound.norms(paths, hparams)

    def zero(message, num_clients):
        bound.fits(message)
        total = statistic.zero(message, num_clients)
        number = jnp.zeros((), jnp.result_type(float))
        return base.zeros(())._replace(total=(total, number) if counts else total)

    def add(accumulator, messages, mask, ids, state, hparams):
        bounded = bound.clip(messages, mask, state, hparams)
        terms = bounded.messages
        if shares is not None:
            terms = terms.scale(jnp.asarray(shares, dtype=float)[ids])
        total, count = accumulator.total if counts else (accumulator.total, jnp.zeros(()))
        total = statistic.add(total, terms, ids, norms_of(messages.paths(), state, hparams))
        if adaptation is not None:
            more = adaptation.tally(bounded)
        else:
            more = jnp.sum(mask, dtype=jnp.result_type(float))
        return base.with_total(accumulator, bounded, (total, count + more) if counts else total)

    def release(accumulator, denominator, key, state, hparams, round_):
        total, count = accumulator.total if counts else (accumulator.total, jnp.zeros(()))
        z = jnp.zeros(())
        if noise.draw is not None:
            z = base.round_value(hparams.noise_multiplier, round_)
        of_sum, charged, state_after = z, z, state
        if adaptation is not None:
            of_sum, charged = adaptation.split(z, hparams)
            key, count_key = jax.random.split(key)
            noised = count + base.noise_like(count_key, count, adaptation.noise(hparams))
            state_after = adaptation.step(state, noised / denominator, hparams)
        like = statistic.like(total)
        paths, scales = paths_of(like), bound.norm(state, hparams)
        scales = scales if bound.scales is None else bound.scales(paths, hparams)
        scales = jax.tree.map(lambda c: base.noise_scale(of_sum, c, statistic.degree), scales)
        if divisor == "cohort":
            scales = jax.tree.map(lambda scale: scale * jnp.sqrt(count), scales)
        if noise.draw is None:
            drawn = _zeros(like)
        else:
            drawn = noise.draw(statistic, key, like, scales, round_)
        value = statistic.plus(total, drawn, norms_of(paths, state, hparams))
        if shift is not None:
            value = value + shift(scales, like)
        if divisor == "expected":
            value = base.divided(value, denominator * share)
        elif divisor == "cohort":
            value = base.divided(value, jnp.maximum(count, 1))
        return base.Release(value, state_after, charged)

    def check(hparams):
        bound.check(hparams)
        z = on_host(hparams.get("noise_multiplier", 0.0))
        noised, exact = z is not None and np.any(z > 0), statistic.kind == "exact sum"
        for name in bound.clips:
            norm = on_host(hparams.get(name))
            if norm is not None and not np.all(np.isfinite(norm)) and (noised or exact):
                who = "exact_sums need" if exact else "noise needs"
                raise ValueError(f"{who} a finite {name}, got {norm}")

    public = (_WEIGHTS,) if shares is not None and max_weight is None else ()
    made = base.Mechanism(
        event,
        bound.init,
        zero,
        add,
        release,
        hyperparameters=(*bound.hyperparameters, *noise.hyperparameters),
        check=check,
        num_clients=None if shares is None else len(shares),
        public=public + (EXACT,) * (statistic.kind == "exact sum"),
        adds_chunks=statistic.adds_chunks,
    )
    return base.stamped(made) if all(map(is_stamped, (statistic, bound, noise))) else made


def _shares(weights: ArrayLike, max_weight: float | None) -> np.ndarray:
    """Return min(w_k, w_max)/w_max, (m,) float64, at most 1."""
    w = np.asarray(weights, np.float64)
    if w.ndim != 1 or w.size == 0:
        raise ValueError(f"weights must have one number per client, (m,), got shape {w.shape}")
    if not (np.all(np.isfinite(w)) and np.all(w > 0)):
        raise ValueError(f"weights must be positive and finite, got {w.min()} to {w.max()}")
    largest = float(w.max()) if max_weight is None else max_weight
    checks.positive(max_weight=largest)
    return np.minimum(w / largest, 1.0)


# --- statistics -----------------------------------------------------------------------------------


def _zeros(message: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), message)


def _plus(total: PyTree, noise: PyTree, norm: jax.Array) -> PyTree:
    return jax.tree.map(jnp.add, total, noise)


def _numbers(tree: PyTree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


SUM: Statistic = stamp(
    Statistic(
        "sum",
        lambda message, num_clients: _zeros(message),
        lambda total, terms, ids, norm: jax.tree.map(jnp.add, total, terms.total()),
        _plus,
        lambda total: total,
        base.noise_like,
        _numbers,
    )
)
EXACT_SUM: Statistic = stamp(
    Statistic(
        "exact sum",
        integer_sums.zero,
        lambda total, terms, ids, norm: integer_sums.add(total, terms.dense(), norm),
        integer_sums.plus,
        lambda total: total.shapes,
        base.noise_like,
        _numbers,
    )
)
ROWS: Statistic = stamp(
    Statistic(
        "rows",
        lambda message, num_clients: jax.tree.map(
            lambda leaf: jnp.zeros((num_clients, *leaf.shape), leaf.dtype), message
        ),
        lambda total, terms, ids, norm: terms.add_rows(total, ids),
        _plus,
        lambda total: total,
        base.noise_like,
        _numbers,
    )
)
"""The matrix of all clients' messages, a row each."""


# --- bounds ---------------------------------------------------------------------------------------

CLIP: Bound = stamp(
    Bound(
        "clip norm",
        lambda state, hparams: hparams.clip,
        lambda messages, mask, state, hparams: messages.bound(hparams.clip, mask),
        hyperparameters=(base.CLIP_NORM,),
        clips=(base.CLIP_NORM.name,),
    )
)
"""The L2 norm of a message is at most C."""
UNBOUNDED: Bound = stamp(
    Bound(
        "none",
        lambda state, hparams: jnp.asarray(jnp.inf),
        lambda messages, mask, state, hparams: messages.bound(jnp.asarray(jnp.inf), mask),
    )
)


def _layer(path: str) -> str:
    return path.rpartition("/")[0]


def _norms_of_layers(paths: list[str], hparams: Hyperparameters) -> list[Any]:
    return [hparams.clip / math.sqrt(len({*map(_layer, paths)}))] * len(paths)


def _clip_layers(
    messages: Messages, mask: jax.Array, state: PyTree, hparams: Hyperparameters
) -> Bounded:
    layers = [_layer(path) for path in messages.paths()]
    norms = zip(layers, _norms_of_layers(messages.paths(), hparams), strict=True)
    return messages.bound_parts(layers, dict(norms), mask)


LAYERS: Bound = stamp(CLIP._replace(kind="layers", clip=_clip_layers, norms=_norms_of_layers))
"""Each of G layers has norm at most C/√G, so a message's norm is at most C."""


def parts_bound(parts: Sequence[str], records: Declarations) -> Bound:
    """Bound each part of a message by its own clip norm, as `per_part`.

    `records` are the clip norms of the parts and then their shares.
    """
    clips, shares = (
        [r.name for r in half] for half in (records[: len(parts)], records[len(parts) :])
    )

    def norms(hparams):
        return {
            part: jnp.asarray(getattr(hparams, n)) for part, n in zip(parts, clips, strict=True)
        }

    def norm(state, hparams):
        return jnp.sqrt(sum(jnp.square(c) for c in norms(hparams).values()))

    def clip(messages, mask, state, hparams):
        return messages.bound_parts(_parts_of(messages.paths(), parts), norms(hparams), mask)

    def norms_of_leaves(paths, hparams):
        return [norms(hparams)[part] for part in _parts_of(paths, parts)]

    def scales(paths, hparams):
        by_part = [getattr(hparams, name) for name in shares]
        every = sum(by_part[1:], start=jnp.asarray(by_part[0]))
        # C_g/c_g = √share_g, and shares add up to 1.
        of_part = {
            part: c * jnp.sqrt(every / share)
            for (part, c), share in zip(norms(hparams).items(), by_part, strict=True)
        }
        return [of_part[part] for part in _parts_of(paths, parts)]

    def fits(message):
        _parts_of(paths_of(message), parts)

    bound = Bound(
        "parts",
        norm,
        clip,
        norms_of_leaves,
        scales,
        hyperparameters=records,
        clips=tuple(clips),
        fits=fits,
    )
    return stamp(bound)


def _parts_of(paths: Sequence[str], parts: Sequence[str]) -> list[str]:
    """Return the part of each leaf; raise ValueError for a leaf or a part without the other."""
    of_leaf = []
    for path in paths:
        fitting = [part for part in parts if f"{path}/".startswith(f"{part}/")]
        if len(fitting) != 1:
            raise ValueError(
                f"each leaf of a message must be in one of the parts {', '.join(parts)}: "
                f"{path or 'its only leaf'!r} is in {' and '.join(fitting) or 'none'}"
            )
        of_leaf += fitting
    if empty := [part for part in parts if part not in of_leaf]:
        raise ValueError(f"the message has no part {empty[0]!r}; its leaves are {', '.join(paths)}")
    return of_leaf


# --- noise ----------------------------------------------------------------------------------------

CONSTANT_NOISE = dataclasses.replace(
    base.NOISE_MULTIPLIER,
    schedule=False,
    help="z, the standard deviation of the independent noise that is correlated, divided by C; one "
    "number for all rounds.",
)


def _gaussian(statistic, key, like, scale, round_):
    return statistic.normal(key, like, scale)


def _pure(statistic, key, like, scale, round_):
    radius_key, normal_key = jax.random.split(key)
    size = radius(radius_key, statistic.coordinates(like))
    return statistic.normal(normal_key, like, jax.tree.map(lambda of_leaf: of_leaf * size, scale))


def correlated_noise(of_clients: Correlated) -> Noise:
    """Return zC Σ_{j<b} d_j ξ_{t−j}, as in `correlated`; `of_clients` has its coefficients."""
    weights = of_clients.series

    def draw(statistic, key, like, scale, round_):
        def add_band(noise, band):
            rounds_ago, weight = band
            # There is no noise before the first round.
            weight = jnp.where(rounds_ago <= round_, weight, 0.0)
            past = threefry.fold_in(key, round_ - rounds_ago)
            weighted = jax.tree.map(lambda of_leaf: of_leaf * weight, scale)
            more = statistic.normal(past, noise, weighted)
            return jax.tree.map(jnp.add, noise, more), None

        none = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        by_band = jnp.arange(len(weights)), jnp.asarray(weights, dtype=float)
        noise, _ = jax.lax.scan(add_band, none, by_band)
        return noise

    def event(replace):
        return dataclasses.replace(of_clients, replace=replace)

    return stamp(Noise("correlated", draw, event, (CONSTANT_NOISE,)))


def banded_noise(coefficients: tuple[float, ...]) -> Noise:
    """Return zC Σ_j w_j ξ_{t−j}, w the series of 1/c, as in `banded`."""

    def draw(statistic, key, like, scale, round_):
        weights = inverse_series(coefficients)  # here, as scipy takes half a second to import
        of_round = jnp.asarray(weights, dtype=float)

        def add(rounds_ago, noise):
            past = threefry.fold_in(key, round_ - rounds_ago)
            more = statistic.normal(past, noise, of_round[rounds_ago])
            return jax.tree.map(jnp.add, noise, more)

        none = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        number = jnp.minimum(round_ + 1, len(weights))
        # The scale is outside of the loop, which has no derivative in reverse mode.
        return base.scaled(jax.lax.fori_loop(0, number, add, none), scale)

    def event(replace):
        return Banded(replace=replace, coefficients=coefficients)

    return stamp(Noise("banded", draw, event, (CONSTANT_NOISE,)))


GAUSSIAN_NOISE: Noise = stamp(
    Noise(
        "gaussian", _gaussian, lambda replace: Gaussian(replace=replace), (base.NOISE_MULTIPLIER,)
    )
)
PURE_NOISE: Noise = stamp(
    Noise("pure", _pure, lambda replace: Pure(replace=replace), (base.NOISE_MULTIPLIER,))
)
CLIENTS_NOISE: Noise = stamp(
    Noise("of clients", _gaussian, hyperparameters=(base.NOISE_MULTIPLIER,))
)
"""Noise of clients, whose sum is drawn at once; it has no known cost."""
NO_NOISE: Noise = stamp(Noise("none", None))
