"""Devices of a run, and several processes that compute it together: start, agreement and end.

Every process runs the same program on the devices of all of them (`jax.distributed`), so all must
take the same decisions (to stop, to keep a checkpoint): values that may differ between processes go
through `from_all`. A single process asks nobody. JAX's coordination service watches the processes:
where one is lost, a computation of all fails in the others, or the service ends them.
"""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fedjaxsim.extras import missing

SAME: Any = PartitionSpec()
"""The spec of an array that every device holds whole."""
THREADS = "PJRT_NPROC"
"""Environment variable: threads of XLA on a CPU, which are never fewer than devices."""


def use_all_cores() -> None:
    """Make one device per core of a CPU, for `Simulation(…, devices=jax.devices())`.

    Call it before JAX computes anything: later it has no effect.
    """
    use_devices(None)


def use_devices(wanted: int | None) -> None:
    """Use `wanted` cores of a CPU or GPUs, by default all; call `require` after JAX computes.

    XLA takes as many threads as cores are wanted, on machines without an accelerator: spread over
    more, a round of small models takes twice the time.
    """
    config: Any = jax.config
    cores = os.cpu_count() or 1
    # JAX may have computed already, as in a notebook or in tests.
    with contextlib.suppress(RuntimeError):
        config.update("jax_num_cpu_devices", min(wanted or cores, cores))
        if wanted is not None:
            config.update("jax_cuda_visible_devices", ",".join(map(str, range(wanted))))
            # An accelerator's programs are compiled, and its rows copied, by the same threads.
            if config.jax_platforms == "cpu" or (missing("cuda") and missing("tpu")):
                os.environ.setdefault(THREADS, str(min(wanted, cores)))


def require(wanted: int | None) -> None:
    """Check that this process uses `wanted` devices."""
    there = jax.local_device_count()
    if wanted is not None and wanted != there:
        kind = jax.local_devices()[0].platform
        raise ValueError(f"devices must be all, or at most the {there} ({kind}), got {wanted}")


def require_devices(devices: Any) -> None:
    """Raise ValueError if an argument is no sequence of JAX devices, or an empty one."""
    listed = isinstance(devices, Sequence | np.ndarray) and all(
        isinstance(device, jax.Device) for device in devices
    )
    if not listed or not len(devices):
        raise ValueError(
            f"devices must be a list of JAX devices, such as jax.devices()[:2], got {devices!r}"
        )


def placed(array: np.ndarray, sharding: Any) -> jax.Array:
    """Put a host array on devices, also on devices of other processes."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def mesh_of(devices: Sequence[Any], axes: str | Mapping[str, int]) -> Mesh:
    """Return a mesh of devices along one named axis, or with the given size along each."""
    sizes = {axes: len(devices)} if isinstance(axes, str) else axes
    grid = np.array(devices).reshape(*sizes.values())
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def across(function: Callable[..., Any], mesh: Mesh, inputs: Any, outputs: Any) -> Any:
    """Return a function of whole arrays, given the function of each device's part.

    The function sums over devices itself. Derivatives in replicated values must not be summed over
    the devices, hence `check_vma=False`.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


WAIT = 60
"""Seconds in which all processes must connect."""
LOST = 3
"""The exit code of a process that has lost another one."""
_HEARTBEAT = 60
"""Seconds without a heartbeat after which a process counts as lost."""
_FIRST_WAITS = 5
"""Seconds for which process 0, which holds the service, lets others fail of the same cause."""
_LENGTH = 8192
_PIECE = 64 * 2**20
"""Bytes that one process sends to the others at once."""
_recovery_hint: Callable[[], str] | None = None
"""Says what is kept if another process is lost."""


class DisagreeError(ValueError):
    """Not all processes can start, or not on the same run; raised in all of them."""


def join(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> None:
    """Join the other processes of a run; call it before JAX computes.

    `coordinator` is "host:port" of the first of `processes`, and `process` this one's index from 0;
    without a coordinator they come from the environment of a cluster (Slurm, Open MPI and others
    that `jax.distributed.initialize` knows).
    """
    if coordinator is not None and process == 0:
        port = int(coordinator.rpartition(":")[2])
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", port))
            except OSError as error:
                raise ValueError(f"port {port} of the coordinator: {error.strerror}") from None
    with contextlib.suppress(AttributeError):  # JAX's service would take SIGTERM for itself
        jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            initialization_timeout=WAIT,
            heartbeat_timeout_seconds=_HEARTBEAT,
            shutdown_timeout_seconds=WAIT,
        )
        devices = jax.devices()
    except (RuntimeError, ValueError) as error:
        if coordinator is None:
            raise ValueError(
                f"no cluster here says where processes meet ({error}): give coordinator, processes "
                "and process"
            ) from error
        raise ValueError(
            f"the processes at {coordinator} do not meet within {WAIT} seconds: {error}"
        ) from error
    counts = [len(jax.local_devices(index)) for index in range(jax.process_count())]
    if len({*counts}) > 1:
        raise ValueError(f"processes must have as many devices as each other, got {counts}")
    # Devices connect when they first compute together. CPUs (Gloo) give up if one of them is 30
    # seconds late, as after a long compilation; once connected, they wait without a limit.
    multihost_utils.sync_global_devices("join")
    mesh = mesh_of(devices, "devices")
    parts = placed(np.zeros(len(devices)), NamedSharding(mesh, PartitionSpec("devices")))
    together = jax.jit(lambda leaf: leaf, out_shardings=NamedSharding(mesh, SAME))
    jax.block_until_ready(together(parts))


def when_lost(recovery_hint: Callable[[], str] | None) -> None:
    """Let `lose` say what is kept, and how to continue."""
    global _recovery_hint
    _recovery_hint = recovery_hint


def lose(why: str) -> NoReturn:
    """End this process because another one has ended."""
    after = "" if _recovery_hint is None else f"; {_recovery_hint()}"
    message = f"another process has ended, and with it the run of all ({why}){after}"
    _end(LOST, f"fedjaxsim: error: {message}")


def several() -> bool:
    """Return whether there are other processes."""
    return jax.process_count() > 1


def spans_processes(devices: Sequence[Any]) -> bool:
    """Return whether devices belong to more than one process."""
    return len({device.process_index for device in devices}) > 1


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
    if len(words) != _LENGTH:
        raise ValueError(f"a message to other processes takes {_LENGTH} bytes, got {len(words)}")
    return [json.loads(row.tobytes()) for row in multihost_utils.process_allgather(words)]


def to_host(tree: Any) -> Any:
    """Return whole arrays on the host; all processes must call it together."""
    return jax.tree.map(_whole, tree)


def _whole(leaf: Any) -> np.ndarray:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    return multihost_utils.process_allgather(leaf, tiled=True)


def pieces_of(leaf: Any) -> Iterator[np.ndarray]:
    """Yield the bytes of an array in order, (k,) uint8, one device's rows at a time.

    All processes must read them together, unless one has them all.
    """
    if not isinstance(leaf, jax.Array) or leaf.is_fully_replicated or not _by_rows(leaf):
        yield _bytes(_whole(leaf))
        return
    local_shards = {shard.device: shard for shard in leaf.addressable_shards}
    indices = leaf.sharding.devices_indices_map(leaf.shape)
    for device in sorted(indices, key=lambda device: indices[device][0].start or 0):
        shape = leaf.sharding.shard_shape(leaf.shape)
        rows = (
            np.asarray(local_shards[device].data)
            if device in local_shards
            else np.zeros(shape, leaf.dtype)
        )
        piece = _bytes(rows)
        if leaf.is_fully_addressable:
            yield piece
            continue
        for begin in range(0, len(piece), _PIECE):
            part = piece[begin : begin + _PIECE]
            yield np.asarray(multihost_utils.broadcast_one_to_all(part, device in local_shards))


def _by_rows(leaf: jax.Array) -> bool:
    """Return whether devices hold different rows of an array, each once."""
    indices = leaf.sharding.devices_indices_map(leaf.shape).values()
    everything = slice(None)
    keeps_columns = all(index[1:] == (everything,) * (leaf.ndim - 1) for index in indices)
    return (
        leaf.ndim > 0
        and keeps_columns
        and len({index[0].start for index in indices}) == len(indices)
    )


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def agree(facts: Mapping[str, str]) -> None:
    """Check that all processes have the same named facts, such as fingerprints of settings."""
    first, *later = answers = from_all({"facts": dict(facts)})
    for index, answer in enumerate(answers):
        if "refused" in answer:
            raise DisagreeError(f"process {index} refuses: {answer['refused']}")
    for index, answer in enumerate(later, 1):
        names = {*first["facts"], *answer["facts"]}
        differing = [n for n in sorted(names) if first["facts"].get(n) != answer["facts"].get(n)]
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
    """End this process at once; an ordinary end would wait for others, while they wait for it."""
    _end(code)


def _end(code: int, message: str = "") -> NoReturn:
    with contextlib.suppress(OSError, ValueError):
        if message:
            print(message, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    if is_first():
        time.sleep(_FIRST_WAITS)
    os._exit(code)
