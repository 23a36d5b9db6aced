"""The list of workloads. A new one is one entry, with the function that builds it."""

import difflib
from typing import Any

from fedjaxsim.algorithms.systems import SYSTEMS, System
from fedjaxsim.bench.systems import (
    PIXELS,
    dense,
    empty_round,
    femnist_cnn,
    ppsgd_grid,
    ppsgd_synthetic,
    text,
)
from fedjaxsim.bench.workload import Workload


def _dense(
    name: str, summary: str, *widths: int, curve: str | None = None, size: int | None = None,
    algorithm: str = "pmtl", **settings: Any,
) -> Workload:  # fmt: skip
    given = {"algorithm": algorithm, "widths": widths, **settings}
    return Workload(name, summary, dense, given, curve, size)


def _cnn(name: str, title: str, algorithm: str, **arguments: str) -> Workload:
    words = f"{title} of the papers' CNN, 100 of 206 writers, one epoch of batches of 10"
    given = {"data": None, "algorithm": algorithm, **arguments}
    return Workload(f"femnist-cnn-{name}", words, femnist_cnn, given)


def _mlp(name: str, system: System) -> Workload:
    steps = 1 if system.one_minibatch else 5
    words = "1 step" if steps == 1 else f"{steps} steps"
    return _dense(
        f"mlp-{name}", f"{system.title} of an MLP 784-128-10, 100 of 200 clients, {words}",
        PIXELS, 128, 10, algorithm=name, clients=200, expected=100, rows=(40, 10), steps=steps,
        rounds=10,
    )  # fmt: skip


def _linear(name: str, system: System) -> Workload:
    return _dense(
        f"linear-{name}", f"{system.title} of softmax regression, d = 100, 1,000 clients, one pass",
        100, 2, algorithm=name, clients=1000, rows=(16, 4), rounds=10,
    )  # fmt: skip


def _softmax(name: str, summary: str, algorithm: str, clients: int) -> Workload:
    sizes = {"clients": clients, "rows": (16, 4), "rounds": 10_000 // clients}
    return _dense(name, summary, PIXELS, 10, algorithm=algorithm, **sizes)


def _text(model: str, title: str, algorithm: str, system: str) -> Workload:
    words = f"{system} of a {title}, 80 characters a row, 20 of 100 clients, 2 steps"
    given = {"model": model, "algorithm": algorithm, "hidden": (64,), "clients": 100,
             "expected": 20, "rows": (20, 4), "length": 80, "steps": 2, "rounds": 2}  # fmt: skip
    return Workload(f"text-{model}-{algorithm}", words, text, given)


_SHARED = "softmax regression with shared weights, d = 784, 1,000 clients, one step"
_OWN = "softmax regression with weights of each client's own, 1,000 clients, one step"
_STREAM = "PP-SGD on fresh synthetic data, 1,000 clients, d = 100, batches of 10"
_TINY = "10 clients with 22 parameters each"

OF_SYSTEMS = (
    _cnn("fedavg", "FedAvg", "fedavg"),
    _cnn("pmtl", "PMTL", "pmtl"),
    _cnn("pmtl-offset", "PMTL with offsets", "pmtl", message="offset"),
    _cnn("dpfedmtl", "DPFedMTL", "dpfedmtl"),
    _softmax("softmax-1k", _SHARED, "fedavg", 1000),
    _softmax("softmax-10k", "the same with 10,000 clients", "fedavg", 10_000),
    _softmax("softmax-1k-own", _OWN, "pmtl", 1000),
    _softmax("softmax-10k-own", "the same with 10,000 clients", "pmtl", 10_000),
    *((_linear if item[1].linear else _mlp)(*item) for item in SYSTEMS.items()),
    _text("gru", "GRU with 64 units", "fedavg", "FedAvg"),
    _text("gru", "GRU with 64 units", "pmtl", "PMTL"),
    _text("transformer", "transformer of one block of width 64", "fedavg", "FedAvg"),
    _text("transformer", "transformer of one block of width 64", "pmtl", "PMTL"),
    Workload("ppsgd-synthetic", _STREAM, ppsgd_synthetic),
    Workload("ppsgd-grid", "990 settings of it as one program", ppsgd_grid),
    Workload("empty-round", "nobody is drawn, 20 leaves of state", empty_round),
    _dense("tiny-round", _TINY, 10, 2, clients=10, rounds=500, divided=False),
)
"""What a table of the systems has in its lines."""


def _point(curve: str, summary: str, size: int, *widths: int, **settings: Any) -> Workload:
    return _dense(f"{curve}-{size}", summary, *widths, curve=curve, size=size, **settings)


GROWTH = (
    *(
        _point("growth-cohort", "expected cohort, of 20,000 clients", q, 32, 10,
               clients=20_000, expected=q, rounds=max(2, 10_000 // q))
        for q in (10, 100, 1000, 10_000)
    ),
    *(
        _point("growth-population", "clients, of which 100 are drawn", m, 10, 2,
               clients=m, expected=100, rows=(2, 0), batch=2, rounds=100)
        for m in (100, 1000, 10_000, 100_000, 1_000_000)
    ),
    *(
        _point("growth-parameters", "parameters of each of 100 clients", 75 * h + 10, 64, h, 10,
               clients=100, rounds=4)
        for h in (13, 133, 1333, 13_333)
    ),
    *(
        _point("growth-steps", "local steps of 100 clients", steps, 64, 10,
               clients=100, rows=(20, 0), steps=steps, rounds=max(1, 100 // steps))
        for steps in (1, 10, 100, 1000)
    ),
)  # fmt: skip
"""What growth curves have for their points: PMTL at ever larger sizes."""

WORKLOADS = {workload.name: workload for workload in OF_SYSTEMS + GROWTH}


def select(names: str | None) -> tuple[Workload, ...]:
    """The workloads that a user asks for.

    Args:
      names: comma-separated names of workloads or of whole curves; None for all.

    Returns:
      Each once, in the order of the list.

    Raises:
      ValueError: for a name that is not known, with the closest one that is; or for no name.
    """
    if names is None:
        return tuple(WORKLOADS.values())
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise ValueError("workloads must be names separated by commas, got none")
    curves = list(dict.fromkeys(w.curve for w in GROWTH if w.curve is not None))
    known = [*WORKLOADS, *curves]
    for name in wanted:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"unknown workload {name!r}{hint}; --list shows all")
    return tuple(w for w in WORKLOADS.values() if w.name in wanted or w.curve in wanted)
