"""Growth curves: one problem at ever larger sizes, each in a process of its own."""

from fedjaxsim import models
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.bench import problems
from fedjaxsim.bench.systems import BATCH, PRIVATE, work_of
from fedjaxsim.bench.work import dense_flops
from fedjaxsim.bench.workload import Load, simulate
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.privacy.sampling import everyone, poisson

CLASSES = 10


def cohort(expected: int, clients: int = 20_000, rounds: int | None = None) -> Load:
    """Poisson cohorts of ever more of 20,000 clients, each with 330 parameters of its own.

    Args:
      expected: size of the cohort.
      clients: m.
      rounds: in one compiled segment; by default more for small cohorts.
    """
    d, p = 32, expected / clients
    task = models.softmax(models.linear((d,), CLASSES), CLASSES)
    return simulate(
        pmtl(task),
        task,
        problems.equal_clients(clients, 10, 0, (d,), CLASSES),
        poisson(clients, max_rate=p),
        Minibatches(BATCH, steps=1),
        PRIVATE.replace(sampling_rate=p),
        work_of("pmtl", task, expected, expected * BATCH, dense_flops((d, CLASSES)), d),
        rounds=rounds or max(2, 10_000 // expected),
        evaluates=False,
    )


def population(clients: int, expected: int = 100, rounds: int = 100) -> Load:
    """Poisson cohorts of 100 of ever more clients, each with 22 parameters and 2 rows.

    Args:
      clients: m, at least the cohort.
      expected: size of the cohort.
      rounds: in one compiled segment.
    """
    d, classes, p = 10, 2, expected / clients
    task = models.softmax(models.linear((d,), classes), classes)
    return simulate(
        pmtl(task),
        task,
        problems.equal_clients(clients, 2, 0, (d,), classes),
        poisson(clients, max_rate=p),
        Minibatches(2, steps=1),
        PRIVATE.replace(sampling_rate=p),
        work_of("pmtl", task, expected, expected * 2, dense_flops((d, classes)), d),
        rounds=rounds,
        evaluates=False,
    )


def parameters(hidden: int, clients: int = 100, rounds: int = 4) -> Load:
    """100 clients with an ever wider MLP 64-h-10 of their own, 75·h + 10 parameters.

    Args:
      hidden: h.
      clients: m, who all take part with one step.
      rounds: in one compiled segment.
    """
    d = 64
    task = models.softmax(models.mlp((d,), CLASSES, (hidden,)), CLASSES)
    flops = dense_flops((d, hidden, CLASSES))
    return simulate(
        pmtl(task),
        task,
        problems.equal_clients(clients, 10, 0, (d,), CLASSES),
        everyone(clients),
        Minibatches(BATCH, steps=1),
        PRIVATE,
        work_of("pmtl", task, clients, clients * BATCH, flops, d),
        rounds=rounds,
        evaluates=False,
    )


def steps(number: int, clients: int = 100, rounds: int | None = None) -> Load:
    """100 clients with 650 parameters of their own that take ever more local steps.

    Args:
      number: E.
      clients: m, who all take part.
      rounds: in one compiled segment; by default more for few steps.
    """
    d = 64
    task = models.softmax(models.linear((d,), CLASSES), CLASSES)
    examples = clients * number * BATCH
    return simulate(
        pmtl(task),
        task,
        problems.equal_clients(clients, 20, 0, (d,), CLASSES),
        everyone(clients),
        Minibatches(BATCH, steps=number),
        PRIVATE,
        work_of("pmtl", task, clients, examples, dense_flops((d, CLASSES)), d),
        rounds=rounds or max(1, 100 // number),
        evaluates=False,
    )
