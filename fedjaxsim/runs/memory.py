"""The traffic of a round, and the memory of this process and machine."""

import ctypes
import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from fedjaxsim.divergence import Record
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.keys import seed_key
from fedjaxsim.simulation import Simulation

_MANY, _STATE_COPIES = 1000, 2
"""Memory matters with many runs; a state is copied while it is initialized, evaluated or saved."""


def traffic(simulation: Simulation, hparams: Hyperparameters) -> Record:
    """Compute the traffic between the server and the clients of a round.

    `message_bytes` is a client's upload (0 if nothing is released), `server_bytes` its download:
    the server state with the moments of its optimizer. `cohort` is the expected number of clients
    that answer in a round. Numbers count with the types of the simulation, mostly float32. Secure
    aggregation would add to it.
    """
    hparams, key = hparams.as_arrays(), seed_key(0)
    sends = simulation.mechanism.event.releases
    state = simulation.state_shapes(hparams)
    sampler = simulation.sampler
    return {
        "message_bytes": bytes_of(simulation.message_shapes(key, hparams)) if sends else 0,
        "server_bytes": bytes_of((state.shared, state.mechanism)),
        "cohort": simulation.num_clients * float(sampler.answer_rate(sampler.rate(hparams))),
    }


def bytes_per_run(simulation: Simulation, hparams: Hyperparameters) -> int:
    """Estimate from above the bytes that one more run of many in a batched program needs."""
    hparams, program = hparams.as_arrays(), simulation.program
    rows = Rows.shapes(simulation.population, "train", simulation.algorithm)
    state = simulation.state_shapes(hparams)
    plan = program.plan.for_runs(_MANY)
    batch = 1 if plan.scans else plan.chunk_size
    return _STATE_COPIES * bytes_of(state) + batch * program.client_bytes(hparams, rows)


def peak_bytes() -> int:
    """Return the peak of resident memory of this process."""
    status = _status("VmHWM")
    if status is not None:  # getrusage may report the peak of the parent before the fork
        return status
    scale = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in kilobytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def give_back() -> None:
    """Give memory back to the system that glibc keeps, as after a compiler has freed its own."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def private_bytes() -> int:
    """Return the memory of this process in use, without mapped files and code where Linux tells."""
    give_back()
    private = _status("RssAnon")
    return peak_bytes() if private is None else private


def mapped_bytes() -> int:
    """Return the memory of this process that mapped files and code take; 0 if unknown."""
    return _status("RssFile") or 0


def _status(name: str) -> int | None:
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith(name)]
    return sizes[0] if sizes else None


def host_bytes() -> int:
    """Return the memory of this machine's host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_peak_bytes(devices: Iterable[Any]) -> int | None:
    """Return the peak of allocated memory, summed over this process's devices; None if unknown."""
    local_devices = [device for device in devices if device.process_index == jax.process_index()]
    stats = [device.memory_stats() for device in local_devices]
    if any(stat is None or "peak_bytes_in_use" not in stat for stat in stats):
        return None
    return sum(stat["peak_bytes_in_use"] for stat in stats)
