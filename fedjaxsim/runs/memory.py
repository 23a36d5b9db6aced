"""Bytes: of one more run in a program and of what passes in a round, from shapes; of a process."""

import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjaxsim.algorithm import Context
from fedjaxsim.engine.layout import ROW_COPIES, bytes_of, intermediate_bytes
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels.products import unsealed
from fedjaxsim.report.files import Record
from fedjaxsim.simulation import Simulation

_STATE_COPIES = 2
"""The state, and a copy of it while it is made or saved."""
_MANY = 1000
"""Runs of a program for which memory matters."""


def bytes_per_run(simulation: Simulation, hparams: Hyperparameters) -> int:
    """An estimate from above of what one more run in a program needs, in bytes.

    It counts the state, the personal states of one chunk of clients, and every intermediate value
    of one client's round (loops once), as if all of them lived at the same time.

    Args:
      simulation: what is run.
      hparams: of any of the runs.
    """
    program, rows = simulation.program, simulation.setup.rows["train"]
    hparams = hparams.as_arrays()
    key = jax.random.key(0, impl="threefry2x32")

    def one(key, hparams, rows):
        shared, personal = program.algorithm.init(key, hparams)
        client_id = jnp.int32(0)
        data = rows.of(client_id, key, program.minibatches, program.layout, jnp.int32(0), key)
        context = Context(jnp.int32(0), key, client_id, program.num_clients, jnp.ones(()))
        return unsealed(program.algorithm.client(shared, personal, data, hparams, context))

    state = jax.eval_shape(program.init, key, hparams)
    personal, shared = bytes_of(state.personal), bytes_of((state.shared, state.mechanism))
    client = intermediate_bytes(jax.make_jaxpr(one)(key, hparams, rows).jaxpr)
    layout = simulation.setup.layout_of(_MANY)
    at_once = 1 if layout.scans else layout.chunk_size
    rows_of_chunk = layout.chunk_size * personal // program.num_clients
    return _STATE_COPIES * (personal + 4 * shared) + ROW_COPIES * rows_of_chunk + at_once * client


def traffic(simulation: Simulation, hparams: Hyperparameters) -> Record:
    """What passes between the server and the clients of one round.

    Numbers count as the simulation holds them, mostly as float32: nothing is compressed, quantized
    or packed, and secure aggregation would add its own. The server state is all that a client is
    told, so it includes moments of a server's optimizer.

    Args:
      simulation: what is run.
      hparams: of the run.

    Returns:
      `message_bytes`, what one client sends in a round (0 where nothing is released);
      `server_bytes`, what it is told; `cohort`, the number of clients in a round, as expected.
    """
    hparams, key = hparams.as_arrays(), jax.random.key(0, impl="threefry2x32")
    sends = simulation.mechanism.event.kind != "none"
    state = jax.eval_shape(simulation.program.init, key, hparams)
    return {
        "message_bytes": bytes_of(simulation.setup.message_shapes(key, hparams)) if sends else 0,
        "server_bytes": bytes_of((state.shared, state.mechanism)),
        "cohort": simulation.num_clients * float(simulation.sampling.rate(hparams)),
    }


def peak_bytes() -> int:
    """The peak of resident memory of this process."""
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage tells may be the peak of the parent, before the fork
        (peak,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(peak.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in kilobytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


class Machine(NamedTuple):
    """What memory there is, in bytes.

    Attributes:
      devices: how many.
      device: of each; None where they use the host's, as those of a CPU.
      host: the machine's own.
    """

    devices: int
    device: int | None
    host: int

    @property
    def of_devices(self) -> int:
        """Of all devices together, or of the host where they use that."""
        return self.host if self.device is None else self.devices * self.device


def this_machine() -> Machine:
    """The devices of this process and the machine it runs on."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    told = [limit for limit in limits if limit is not None]
    device = min(told) if len(told) == len(limits) else None
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(len(limits), device, host)


def device_peak_bytes(devices: Iterable[Any]) -> int | None:
    """The peak of allocated memory, summed over devices of this process; None if untold."""
    own = [device for device in devices if device.process_index == jax.process_index()]
    stats = [device.memory_stats() for device in own]
    if any(stat is None or "peak_bytes_in_use" not in stat for stat in stats):
        return None
    return sum(stat["peak_bytes_in_use"] for stat in stats)
