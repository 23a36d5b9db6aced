"""Modules of users in the functions of a simulation's parts, and the assumptions about them."""

import contextlib
import functools
import sys
from typing import Any

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.privacy.mechanisms import Mechanism
from fedjaxsim.privacy.samplers import Sampler

_LIBRARIES = {
    *sys.stdlib_module_names,
    "fedjaxsim", "jax", "jaxlib", "numpy", "optax", "flax", "equinox", "haiku",
}  # fmt: skip


def own_modules(part: Any) -> list[str]:
    """Return the modules, no libraries, of a part's functions and of all they close over."""
    found, seen = set(), set()
    left: list[Any] = [part]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (tuple, list)):
            left.extend(value)
        elif isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, functools.partial):
            left.extend([value.func, value.args, value.keywords])
        else:
            module = getattr(value, "__module__", None) or type(value).__module__
            if module.partition(".")[0] not in _LIBRARIES:
                found.add(module)
            for cell in getattr(value, "__closure__", None) or ():
                with contextlib.suppress(ValueError):  # an empty cell
                    left.append(cell.cell_contents)
            left.extend(
                inner
                for name in ("__defaults__", "__wrapped__", "__self__")
                if (inner := getattr(value, name, None)) is not None
            )
    return sorted(found)


def assumptions_of(algorithm: Algorithm, mechanism: Mechanism, sampler: Sampler) -> tuple[str, ...]:
    """Return what a guarantee assumes of users' functions; nothing if there are none."""
    found = []
    if sampler.availability is not None:
        found.append(
            "Whether a drawn client answers, and how many local steps it takes, does not follow "
            "from data; whoever is drawn is charged, and who answers is as secret as who is drawn."
        )
    if modules := own_modules(algorithm):
        found.append(
            f"Functions of {', '.join(modules)} depend on their arguments alone: they read no data "
            "but the client's that they are given, keep nothing between calls, and hold no numbers "
            "computed from clients' rows."
        )
    if modules := own_modules(mechanism):
        found.append(
            f"The mechanism of {', '.join(modules)} bounds each message and draws the noise that "
            "it charges, as its event says; no check of a run tests that."
        )
    if modules := own_modules(sampler):
        found.append(
            f"The sampler of {', '.join(modules)} draws clients as its scheme says, of which "
            "single clients, pairs and rounds were tested."
        )
    return tuple(found)
