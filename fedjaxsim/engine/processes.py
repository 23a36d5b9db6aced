"""Several processes that compute one run together: start, agreement and end.

Every process runs the same program on the devices of all of them (`jax.distributed`), so all must
take the same decisions (to stop, to keep a checkpoint): values that may differ between processes go
through `from_all`. A single process asks nobody.
"""

import atexit
import contextlib
import functools
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from fedjaxsim.engine import liveness
from fedjaxsim.engine.devices import SAME, divided, mesh_of

WAIT = 60
"""Seconds in which all processes must connect."""
LOST = 3
"""The exit code of a process that has lost another one."""
_DAY = 86_400
_LENGTH = 8192
_AXIS = "devices"
_peers: liveness.Peers | None = None
"""The connections to the other processes."""
_ending = threading.Lock()
"""Held by the thread that ends this process, so that there is one line."""


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
    address, heartbeat = coordinator, liveness.SILENCE
    if coordinator is not None and processes is not None and process is not None:
        heartbeat = _DAY  # `liveness` is faster, and names the process
        address = _meet(coordinator, processes, process)
    with contextlib.suppress(AttributeError):  # JAX's service would take SIGTERM for itself
        jax.config.update("jax_enable_preemption_service", False)
    news = f"not all processes have come within {WAIT} seconds"
    late = threading.Timer(WAIT, lose, [news])
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            address,
            processes,
            process,
            initialization_timeout=2 * WAIT,
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=WAIT,
        )
    except (RuntimeError, ValueError) as error:
        if coordinator is None:
            raise ValueError(
                f"no cluster here says where processes meet ({error}): give coordinator, processes "
                "and process"
            ) from error
        raise ValueError(f"the processes at {coordinator} do not meet: {error}") from error
    finally:
        late.cancel()
    # Devices connect when they first compute together. CPUs (Gloo) give up if one of them is 30
    # seconds late, as after a long compilation; once connected, they wait without a limit.
    for together in (_firsts(), jax.devices()):
        _everywhere(_mesh(together))(_divided(np.zeros(1), together))
    if _peers is None and several():
        _watch_cluster()
    atexit.register(lambda: _peers and _peers.leave())  # an end that is no loss


def _meet(coordinator: str, processes: int, process: int) -> str:
    """Wait until all processes are there, watch them from here on, and return JAX's address."""
    global _peers
    host, _, port = coordinator.rpartition(":")
    if process == 0:
        _peers = liveness.Peers(liveness.gather(liveness.listen(int(port)), processes), lose)
        return coordinator
    link = liveness.find(host, int(port), liveness.TOGETHER)
    liveness.greet(link, process, processes)
    _peers = liveness.Peers({0: link}, lose)
    return f"127.0.0.1:{liveness.bridge(host, int(port))}"


def _watch_cluster() -> None:
    """Watch the other processes of a cluster's job, if they reach the first one by its name."""
    global _peers
    count, index = jax.process_count(), jax.process_index()
    listener = liveness.listen(0) if index == 0 else None
    mine = [socket.gethostname(), listener.getsockname()[1]] if listener is not None else None
    host, port = from_all(mine)[0]
    link = None
    if index:
        with contextlib.suppress(ValueError):
            link = liveness.find(host, port, 5.0)
    if not all(from_all(index == 0 or link is not None)):
        return
    if link is not None:
        liveness.greet(link, index, count)
    links = {0: link} if link is not None else liveness.gather(cast(Any, listener), count)
    _peers = liveness.Peers(links, lose)


def lose(news: str) -> NoReturn:
    """End this process because another one has ended; `news` names it."""
    _ending.acquire()
    with contextlib.suppress(OSError, ValueError):
        print(f"fedjaxsim: error: {news}, and with it the run of all", file=sys.stderr, flush=True)
    if _peers is not None:
        _peers.leave(news)
    os._exit(LOST)


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


def await_news() -> str:
    """Return a sentence on the process whose end made a common computation fail, if known."""
    return "" if _peers is None else _peers.await_news(5.0)


def leave(code: int) -> NoReturn:
    """End this process at once, and tell the others.

    An ordinary end would wait for them while they wait for this one.
    """
    _ending.acquire()
    if _peers is not None:
        _peers.leave(f"process {jax.process_index()} has failed with exit code {code}")
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
