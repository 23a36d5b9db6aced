"""A simulation in a few lines of text."""

from collections.abc import Callable
from typing import Any

from fedjaxsim.engine.setup import Setup


def describe(setup: Setup) -> str:
    """Return the parts in a few lines: algorithm, data, sampling, mechanism, minibatches."""
    scheme, batches = setup.sampling.scheme, setup.minibatches
    amount = f"steps {batches.steps}" if batches.epochs is None else f"epochs {batches.epochs}"
    fields = (f"{name} {values.shape}" for name, values in setup.population.fields.items())
    where = "streamed" if setup.streamed else "in memory"
    lines = [
        f"Simulation of {_name_of(setup.algorithm.client)}",
        f"  {repr(setup.population).splitlines()[0]}",
        f"  fields: {', '.join(fields)}",
        f"  sampling: {scheme.kind}, at most {scheme.capacity} clients a round",
        f"  mechanism: {setup.mechanism.event.kind}",
        f"  minibatches: size {batches.size}, {amount}",
        f"  data: {where}, devices: {len(setup.devices or (None,))}",
    ]
    return "\n".join(lines)


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name of the public function or class that made a function, or of its module."""
    name = getattr(function, "__qualname__", type(function).__qualname__).partition(".")[0]
    return function.__module__.rpartition(".")[2] if name.startswith("_") else name
