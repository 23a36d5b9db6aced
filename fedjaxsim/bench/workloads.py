"""The list of workloads. A new one is one entry, with a function that builds it."""

import difflib
import functools
from collections.abc import Callable

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.bench import growth, systems
from fedjaxsim.bench.workload import Load, Workload


def _on_random_data(build: Callable[[], Load]) -> Callable[[str | None], Load]:
    """What builds a workload that has no use for real data."""
    return lambda data: build()


def _workload(name: str, summary: str, build: Callable[..., Load], *args, **kwargs) -> Workload:
    return Workload(name, summary, _on_random_data(functools.partial(build, *args, **kwargs)))


def _femnist(algorithm: str) -> Workload:
    return Workload(
        f"femnist-cnn-{algorithm}",
        f"{SYSTEMS[algorithm].title} of the papers' CNN, 100 of 206 writers, "
        "one epoch of batches of 10",
        lambda data: systems.femnist_cnn(data, algorithm),
    )


OF_SYSTEMS = (
    _femnist("fedavg"),
    _femnist("pmtl"),
    _workload(
        "softmax-1k",
        "softmax regression with shared weights, d = 784, 1,000 clients, one step",
        systems.softmax_regression,
        1000,
        own=False,
        rounds=10,
    ),
    _workload(
        "softmax-10k",
        "the same with 10,000 clients",
        systems.softmax_regression,
        10_000,
        own=False,
        rounds=1,
    ),
    _workload(
        "softmax-1k-own",
        "softmax regression with weights of each client's own, 1,000 clients, one step",
        systems.softmax_regression,
        1000,
        own=True,
        rounds=10,
    ),
    _workload(
        "softmax-10k-own",
        "the same with 10,000 clients",
        systems.softmax_regression,
        10_000,
        own=True,
        rounds=1,
    ),
    *(
        _workload(
            f"mlp-{name}",
            f"{system.title} of an MLP 784-128-10, 100 of 200 clients, "
            f"{'1 step' if system.one_minibatch else '5 steps'}",
            systems.perceptron,
            name,
        )
        for name, system in SYSTEMS.items()
    ),
    _workload(
        "ppsgd-synthetic",
        "PP-SGD on fresh synthetic data, 1,000 clients, d = 100, batches of 10",
        systems.ppsgd_synthetic,
    ),
    _workload("ppsgd-grid", "990 settings of it as one program", systems.ppsgd_grid),
    _workload("empty-round", "nobody is drawn, 20 leaves of state", systems.empty_round),
    _workload("tiny-round", "10 clients with 22 parameters each", systems.tiny_round),
)
"""What a table of the systems has in its lines."""


def _curve(
    name: str, summary: str, build: Callable[[int], Load], sizes: dict[int, int]
) -> tuple[Workload, ...]:
    """One workload for each size; `sizes` gives what `build` takes for it."""
    return tuple(
        Workload(
            f"{name}-{size}",
            summary,
            _on_random_data(functools.partial(build, argument)),
            name,
            size,
        )
        for size, argument in sizes.items()
    )


def _powers(first: int, last: int) -> dict[int, int]:
    return {10**k: 10**k for k in range(first, last + 1)}


GROWTH = (
    *_curve("growth-cohort", "expected cohort, of 20,000 clients", growth.cohort, _powers(1, 4)),
    *_curve(
        "growth-population", "clients, of which 100 are drawn", growth.population, _powers(2, 6)
    ),
    *_curve(
        "growth-parameters",
        "parameters of each of 100 clients",
        growth.parameters,
        {75 * hidden + 10: hidden for hidden in (13, 133, 1333, 13_333)},
    ),
    *_curve("growth-steps", "local steps of 100 clients", growth.steps, _powers(0, 3)),
)
"""What growth curves have for their points."""

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
