"""The methods that are compared: an algorithm, a mechanism, and the noise that is charged ε."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import fedjaxsim as fjs
from fedjaxsim.algorithms.mpmtl import Penalty
from fedjaxsim.factories import make
from fedjaxsim.privacy.accounting import kov
from fedjaxsim.privacy.calibration import noise_multiplier
from fedjaxsim.privacy.choices import MECHANISMS
from fedjaxsim.privacy.events import Entry, SamplingScheme
from fedjaxsim.report.plots import COLOURS

Noise = Callable[[fjs.Mechanism, float, float, int, int], float]
"""(mechanism, ε, δ, rounds, clients) -> the noise multiplier of a run, replacing a client's data
being what neighbours are."""


def _sound(
    mechanism: fjs.Mechanism, epsilon: float, delta: float, rounds: int, clients: int
) -> float:
    if math.isinf(epsilon):
        return 0.0
    if mechanism.event.kind == "pure":  # of one release, with δ = 0
        return 2 / epsilon
    scheme = SamplingScheme("full", clients, clients)
    return noise_multiplier(
        epsilon, delta, rounds=rounds, sampling_rate=1.0, scheme=scheme, event=mechanism.event,
        adjacency="replace",
    )  # fmt: skip


def _as_published(
    mechanism: fjs.Mechanism, epsilon: float, delta: float, rounds: int, clients: int
) -> float:
    """1/ε_t of equal ε_t that compose to ε by the paper's equation 6, were each release ε_t-DP."""
    del mechanism, clients
    if math.isinf(epsilon):
        return 0.0
    low, high = 0.0, epsilon
    for _ in range(60):
        middle = (low + high) / 2
        fits = kov.compose([Entry(middle, 1.0, rounds)], delta) <= epsilon
        low, high = (middle, high) if fits else (low, middle)
    return 1 / low


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of the comparison.

    Attributes:
      title: its name in figures.
      make: `(task, clients) -> Algorithm`.
      release: the name of its mechanism.
      colour: in every figure.
      style: of its line; dashed where its ε is only claimed.
      diagonal: whether the mechanism releases a diagonal only.
      noise: see `Noise`.
      rounds: from which it chooses.
      warm: whether it starts from the models of single-task learning.
      squared: whether its penalty is a squared norm: its λ is then divided by K√m, a public number
        of the size of that norm.
      epochs: local epochs of full batches in a round; None for an exact pass.
    """

    title: str
    make: Callable[[fjs.Task, int], fjs.Algorithm]
    release: str
    colour: str
    style: str = "solid"
    diagonal: bool = False
    noise: Noise = _sound
    rounds: tuple[int, ...] = (1, 3, 12)
    warm: bool = True
    squared: bool = False
    epochs: int | None = None

    def mechanism(self) -> fjs.Mechanism:
        """Make its mechanism."""
        options: dict[str, Any] = {"diagonal": True} if self.diagonal else {}
        return make(MECHANISMS[self.release], **options)


def _mpmtl(penalty: Penalty) -> Callable[[fjs.Task, int], fjs.Algorithm]:
    return lambda task, clients: fjs.mpmtl(task, penalty=penalty, acceleration="convex")


def _dp_mtrl(task: fjs.Task, clients: int) -> fjs.Algorithm:
    return fjs.dp_mtrl(task, num_clients=clients, acceleration="convex")


METHODS = {
    "low-rank": Method("MP-MTL low-rank", _mpmtl("low-rank"), "gaussian-gram", COLOURS[0]),
    "group-sparse": Method(
        "MP-MTL group-sparse", _mpmtl("group-sparse"), "gaussian-gram", COLOURS[1], diagonal=True
    ),
    "low-rank-published": Method(
        "low-rank, as published (no ε)", _mpmtl("low-rank"), "wishart", COLOURS[0], "dashed",
        noise=_as_published,
    ),
    "group-sparse-published": Method(
        "group-sparse, as published (no ε)", _mpmtl("group-sparse"), "wishart", COLOURS[1],
        "dashed", noise=_as_published,
    ),
    "relationship": Method(
        "MP-MTL relationship", _mpmtl("relationship"), "gaussian-gram", COLOURS[4], squared=True
    ),
    "dp-mtrl": Method("DP-MTRL", _dp_mtrl, "every-row", COLOURS[2], squared=True),
    "dp-aggr": Method(
        "DP-AGGR", lambda task, clients: fjs.fedprox(task), "pure", COLOURS[3], rounds=(1,),
        warm=False, epochs=50,
    ),
}  # fmt: skip
"""Those whose mechanism is Wishart noise have no ε: theirs is what the paper claims."""
