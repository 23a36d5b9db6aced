"""The methods that are compared, and the points at which each of them is tuned."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

import fedjaxsim as fjs
from fedjaxsim.factories import make, resolve
from fedjaxsim.hyperparameters import declared_by
from fedjaxsim.privacy.choices import MECHANISMS
from fedjaxsim.report.plots import COLOURS

Point = dict[str, float]
Box = Mapping[str, tuple[float, float]]
"""From where to where each hyperparameter is looked for, on a logarithmic scale."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A system as it is compared.

    Attributes:
      title: its name in tables and figures.
      system: its name in `fjs.SYSTEMS`.
      colour: in every figure.
      arguments: of its factory.
      mechanism: the mechanism by name, where it is not the system's own.
      dashes: in every figure.
      fixed: the hyperparameters that are not tuned.
      box: where its own hyperparameters are looked for, beside or instead of the problem's.
    """

    title: str
    system: str
    colour: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mechanism: str | None = None
    dashes: str = "solid"
    fixed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    box: Box = dataclasses.field(default_factory=dict)

    @property
    def sends(self) -> bool:
        """Whether clients send anything; else it is at ε = 0 whatever the target."""
        return fjs.SYSTEMS[self.system].sends

    @property
    def tuned(self) -> tuple[str, ...]:
        """The hyperparameters that are chosen."""
        factory = resolve(fjs.SYSTEMS[self.system].factory)
        reads = [record.name for record in declared_by(factory, **self.arguments)]
        left_out = {"server_learning_rate"} - self.box.keys()
        left_out |= {"clip_norm", "noise_multiplier", *self.fixed}
        names = tuple(name for name in reads if name not in left_out)
        return (*names, "clip_norm") if self.sends else names

    def make(self, task: fjs.Task, clients: int) -> tuple[fjs.Algorithm, fjs.Mechanism]:
        """Make the algorithm for a task, and its mechanism."""
        system = fjs.SYSTEMS[self.system]
        options: dict[str, Any] = (
            {"diagonal": True} if self.arguments.get("penalty") == "group-sparse" else {}
        )
        mechanism = make(MECHANISMS[self.mechanism or system.mechanism], **options)
        return system.make(task, clients, **self.arguments), mechanism

    def points(self, count: int, box: Box) -> list[Point]:
        """So many points, spread evenly over the logarithms of what is tuned.

        Args:
          count: as many as for every other method.
          box: of all hyperparameters.
        """
        box = {**box, **self.box}
        low, high = np.log([box[name] for name in self.tuned]).T
        values = np.exp(low + (high - low) * spread(count, len(self.tuned)))
        places = [_point(dict(zip(self.tuned, row, strict=True))) for row in values]
        return [{**place, **self.fixed} for place in places]


_MODELS: Box = {"lam": (0.01, 30.0), "ridge": (1e-4, 0.3), "clip_norm": (0.1, 10.0)}
"""Of MP-MTL, whose messages are models, and whose ηλ is weighed against singular values."""
METHODS = {
    "pmtl": Method(
        "PMTL update", "pmtl", COLOURS[0], {"message": "update"},
        fixed={"server_learning_rate": 1.0},
    ),
    "pmtl-offset": Method("PMTL offset", "pmtl", COLOURS[1], {"message": "offset"}),
    "ditto": Method("Ditto", "ditto", COLOURS[2]),
    "fedavg": Method("FedAvg", "fedavg", COLOURS[3]),
    "fedprox": Method("FedProx", "fedprox", COLOURS[4], dashes="dashed"),
    "local": Method("Local", "local", COLOURS[6], dashes="dashed"),
    "naive-dp": Method("naive DP of all models", "naive-dp", "0.55"),
    "fedavg-as-published": Method(
        "DPFedAvg, noise at clients", "fedavg", COLOURS[3], mechanism="client-noise",
        dashes="dashed",
    ),
    "dpfedmtl": Method("FedMTL", "dpfedmtl", COLOURS[5]),
    "dpfedmtl-head-first": Method(
        "FedMTL, head first", "dpfedmtl", COLOURS[5], {"order": "head-first"}, dashes="dotted"
    ),
    "dpfedmtl-as-published": Method(
        "DPFedMTL as published", "dpfedmtl-as-published", COLOURS[5], dashes="dashed"
    ),
    "stl": Method(
        "ridge STL", "stl", "0.3", {"acceleration": "convex"}, dashes="dotted",
        fixed={"lam": 0.0}, box=_MODELS,
    ),
    "ppsgd": Method("PP-SGD", "ppsgd", COLOURS[4], box={"personalization": (0.01, 100.0)}),
    "dpfedmtl-intercepts": Method(
        "DPFedMTL, trivial trunk", "dpfedmtl", COLOURS[5], {"head": "bias"}
    ),
    "mpmtl-low-rank": Method(
        "MP-MTL low-rank", "mpmtl", COLOURS[2], {"acceleration": "convex"}, box=_MODELS
    ),
    "mpmtl-group-sparse": Method(
        "MP-MTL group-sparse", "mpmtl", COLOURS[2],
        {"penalty": "group-sparse", "acceleration": "convex"}, dashes="dashed", box=_MODELS,
    ),
    "scaffold": Method("SCAFFOLD, update", "scaffold", COLOURS[0], {"message": "update"}),
    "scaffold-steps": Method("SCAFFOLD, steps", "scaffold", COLOURS[0], {"message": "steps"}),
    "feddyn": Method("FedDyn, update", "feddyn", COLOURS[0], {"message": "update"}),
    "feddyn-state": Method("FedDyn, state", "feddyn", COLOURS[0], {"message": "state"}),
    "qffl": Method("q-FFL", "qffl", COLOURS[0], box={"fairness": (0.1, 2.0)}),
    "apfl": Method("APFL", "apfl", COLOURS[0], box={"mixture": (0.1, 1.0)}),
    "apfl-adaptive": Method("APFL, adaptive", "apfl", COLOURS[0], {"adaptive": True},
                            fixed={"mixture": 0.5}),
    "pfedme": Method("pFedMe", "pfedme", COLOURS[0], box={"envelope_rate": (0.03, 1.0)}),
    "per-fedavg": Method("Per-FedAvg", "per-fedavg", COLOURS[0],
                         box={"adaptation_rate": (0.01, 5.0)}),
    "per-fedavg-hessian": Method("Per-FedAvg, Hessian", "per-fedavg", COLOURS[0],
                                 {"derivative": "hessian"}, box={"adaptation_rate": (0.01, 5.0)}),
    "ifca": Method("IFCA, k = 2", "ifca", COLOURS[0], fixed={"separation": 0.1}),
    "fedala": Method("FedALA", "fedala", COLOURS[0], box={"aggregation_rate": (0.1, 10.0)}),
    "knn-per": Method(
        "kNN-Per", "knn-per", COLOURS[0],
        box={"neighbour_weight": (0.1, 1.0), "neighbour_scale": (0.1, 10.0)},
    ),
    "fedavgm": Method("FedAvgM", "fedavgm", COLOURS[0]),
    "fedadam": Method("FedAdam", "fedadam", COLOURS[0],
                      box={"server_learning_rate": (0.003, 0.3)}),
    "fedyogi": Method("FedYogi", "fedyogi", COLOURS[0],
                      box={"server_learning_rate": (0.003, 0.3)}),
    "fedper-intercepts": Method("FedPer, intercepts", "fedper", COLOURS[0], {"head": "bias"}),
    "fedrep-intercepts": Method("FedRep, intercepts", "fedrep", COLOURS[0], {"head": "bias"}),
}  # fmt: skip
COMPARED = ("pmtl", "pmtl-offset", "ditto", "fedavg", "fedprox", "local")
"""The methods of the comparison at equal ε."""


RELATIVE = {"lam": "learning_rate", "mu": "learning_rate", "envelope_rate": "lam"}
"""Hyperparameters that are given in a box times another one: the part of the way to another model
that one step takes, which is stable below 2."""


def _point(place: Mapping[str, float]) -> Point:
    """Return the hyperparameters of a point in the box, to three digits."""
    values = dict(place)
    for name, other in RELATIVE.items():
        if name in place:
            values[name] /= values[other]
    return {name: float(f"{value:.3g}") for name, value in values.items()}


def spread(count: int, dimensions: int) -> np.ndarray:
    """Points in the unit cube, evenly spread however many they are, (count, dimensions).

    Roberts' additive recurrence, whose steps are powers of the root of x^(d+1) = x + 1: each
    coordinate alone is spread evenly too.
    """
    root = 2.0
    for _ in range(60):
        root = (1 + root) ** (1 / (dimensions + 1))
    steps = root ** -np.arange(1.0, dimensions + 1)
    return (0.5 + np.arange(1, count + 1)[:, None] * steps) % 1


def at_edge(point: Point, box: Box, *, private: bool, margin: float = 0.05) -> list[str]:
    """Return the hyperparameters at an end of their range.

    Args:
      point: what was chosen.
      box: where it was looked for.
      private: whether clip norms mean anything.
      margin: what counts as an end, as a part of the box.
    """
    found = []
    for name, value in point.items():
        if name == "clip_norm" and not private:
            continue
        low, high = np.log(box[name])
        if name in RELATIVE:
            value *= point[RELATIVE[name]]
        place = (np.log(value) - low) / (high - low)
        if not margin <= place <= 1 - margin:
            found.append(f"{name} {'low' if place < margin else 'high'}")
    return found


def hyperparameters(simulation: fjs.Simulation, point: Point) -> fjs.Hyperparameters:
    """Return a point with its noise multiplier; without noise nothing is clipped."""
    changes: dict[str, Any] = dict(point)
    if not point["noise_multiplier"]:
        changes["clip_norm"] = math.inf
    released = ("clip_norm", "noise_multiplier")  # read only where something is sent
    read = {n: v for n, v in changes.items() if n not in released or n in simulation.records}
    return simulation.hyperparameters(**read)
