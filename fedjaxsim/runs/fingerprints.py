"""Fingerprints of settings and data, with which a checkpoint identifies them."""

import hashlib
import json
from typing import Any

import numpy as np

from fedjaxsim.data.population import Population


def fingerprint_of(population: Population) -> str:
    """Return a hash of all rows and of the clients that have them."""
    generate = population.generate
    found = hashlib.sha256(getattr(generate, "__qualname__", repr(generate)).encode())
    arrays = {f"field {name}": values for name, values in population.fields.items()}
    for name, ranges in population.splits.items():
        arrays |= {f"start {name}": ranges.start, f"count {name}": ranges.count}
    for name, values in sorted((arrays | {"names": population.names}).items()):
        array = np.ascontiguousarray(values)
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()[:16]


def settings_digest(*settings: Any) -> str:
    """Return a hash of settings: JSON values, and objects that print alike if equal."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
