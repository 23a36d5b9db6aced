"""Several processes that compute one run together: start, agreement and end.

Every process runs the same program on the devices of all of them (`jax.distributed`), so all must
take the same decisions (to stop, to keep a checkpoint): values that may differ between processes go
through `from_all`. A single process asks nobody.
"""

import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from fedjaxsim.engine.devices import SAME, divided, mesh_of

WAIT = 300
"""Seconds for which processes wait for each other when they start."""
HEARTBEAT = 30
"""Seconds after which a process that does not answer counts as dead."""
LOST = 3
"""The exit code of a process that has lost another one."""
_LENGTH = 8192
_AXIS = "devices"


class DisagreeError(ValueError):
    """Not all processes can start, or not on the same run; raised in all of them."""


def join(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> None:
    """Join the other processes of a run; call it before JAX computes.

    Args:
      coordinator: "host:port" of the first process; None takes all three from the environment of
        a cluster (Slurm, Open MPI and others that `jax.distributed.initialize` knows).
      processes: number of processes.
      process: index of this process, from 0.

    Raises:
      ValueError: if the first process cannot listen there, the others do not find it, or there is
        no such environment.
    """
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        _check_free(int(port)) if process == 0 else _find(host, int(port))
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            initialization_timeout=WAIT,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=2 * HEARTBEAT,
        )
    except (RuntimeError, ValueError) as error:
        if coordinator is None:
            raise ValueError(
                f"no cluster here says where processes meet ({error}): give coordinator, processes "
                "and process"
            ) from error
        raise ValueError(f"the processes at {coordinator} do not meet: {error}") from error
    # Devices connect when they first compute together. CPUs (Gloo) give up if one of them is 30
    # seconds late, as after a long compilation; once connected, they wait without a limit.
    for together in (_firsts(), jax.devices()):
        _everywhere(_mesh(together))(_divided(np.zeros(1), together))


def _check_free(port: int) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            raise ValueError(f"port {port} of the coordinator: {error.strerror}") from None


def _find(host: str, port: int) -> None:
    """Wait for the first process; JAX would end this one with a traceback."""
    end = time.monotonic() + WAIT
    while True:
        try:
            socket.create_connection((host, port), WAIT).close()
        except OSError as error:
            if isinstance(error, socket.gaierror) or time.monotonic() > end:
                raise ValueError(f"no coordinator at {host}:{port}: {error.strerror}") from None
            time.sleep(0.1)
        else:
            return


def several() -> bool:
    """Return whether there are other processes."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Return whether this process writes files and prints."""
    return jax.process_index() == 0


def from_all(value: Any) -> list[Any]:
    """Gather a value of JSON, at most 8,192 bytes, from each process, in order.

    All processes must call it together.
    """
    if not several():
        return [value]
    words = np.frombuffer(json.dumps(value).encode().ljust(_LENGTH), np.uint8)
    assert len(words) == _LENGTH
    return [json.loads(each.tobytes()) for each in _gathered(words[None])]


def to_host(tree: Any) -> Any:
    """Return whole arrays on the host; all processes must call it together."""
    return jax.tree.map(_whole, tree)


def _whole(leaf: Any) -> np.ndarray:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    shards = sorted(leaf.addressable_shards, key=lambda shard: _order(shard.device))
    pieces = _gathered(np.stack([np.asarray(shard.data) for shard in shards]))
    indices = leaf.sharding.devices_indices_map(leaf.shape)
    whole = np.empty(leaf.shape, leaf.dtype)
    for device, piece in zip(sorted(indices, key=_order), pieces, strict=True):
        whole[indices[device]] = piece
    return whole


def _order(device: Any) -> tuple[int, int]:
    return device.process_index, device.id


def _gathered(pieces: np.ndarray) -> np.ndarray:
    """Gather pieces (k, ...) of all P processes, (P·k, ...)."""
    return np.asarray(_everywhere(_mesh(_firsts()))(_divided(pieces, _firsts())))


def _firsts() -> list[Any]:
    """Return one device of each process."""
    return [jax.local_devices(i)[0] for i in range(jax.process_count())]


def _mesh(devices: Sequence[Any]) -> Mesh:
    return mesh_of(devices, _AXIS)


def _divided(piece: np.ndarray, devices: Sequence[Any]) -> jax.Array:
    """Return an array divided over devices, each with the piece (k, ...) of its process."""
    shape = (len(piece) * len(devices), *piece.shape[1:])
    sharding = NamedSharding(_mesh(devices), divided(_AXIS))
    return jax.make_array_from_callback(shape, sharding, lambda _: piece)


@functools.cache
def _everywhere(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """Return the compiled function that copies an array to every device of a mesh."""
    return jax.jit(lambda leaf: leaf, out_shardings=NamedSharding(mesh, SAME))


def agree(facts: Mapping[str, str]) -> None:
    """Check that all processes are about to compute the same; all must call it together.

    Args:
      facts: fingerprints or names of settings, data and so on, by name.

    Raises:
      DisagreeError: in all processes, naming the one that differs, or that refuses to start.
    """
    first, *others = said = from_all({"facts": dict(facts)})
    for index, each in enumerate(said):
        if "refused" in each:
            raise DisagreeError(f"process {index} refuses: {each['refused']}")
    for index, each in enumerate(others, 1):
        names = {*first["facts"], *each["facts"]}
        differing = [n for n in sorted(names) if first["facts"].get(n) != each["facts"].get(n)]
        if differing:
            what = " and ".join(differing)
            raise DisagreeError(f"process {index} has other {what} than process 0")


def refuse(reason: str) -> None:
    """Tell the processes that `agree` that this one does not."""
    from_all({"refused": reason[: _LENGTH // 8]})


def is_loss(error: Exception) -> bool:
    """Return whether an error comes from a computation of all processes."""
    return isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)


def leave(code: int) -> NoReturn:
    """End this process at once; the others notice in their next common computation.

    An ordinary end would wait for them while they wait for this one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
