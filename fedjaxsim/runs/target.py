"""A run's programs, compiled for this machine or for devices that are not there.

A compiler needs only a description of its devices. `Target.named` takes TPUs from libtpu, and GPUs
from the numbers of their data sheets. What a program needs is what its compiler says.
"""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Self, cast

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from fedjaxsim import extras
from fedjaxsim.data.arrays import ALIGNMENT
from fedjaxsim.data.population import Population
from fedjaxsim.engine.layout import Plan
from fedjaxsim.engine.processes import SAME, mesh_of
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.engine.shard import CLIENTS, pieces_of, specs_of_rows
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels import backend
from fedjaxsim.keys import seed_key
from fedjaxsim.runs.build import Experiment, everyone_of
from fedjaxsim.runs.memory import host_bytes, mapped_bytes, peak_bytes, private_bytes
from fedjaxsim.simulation import Simulation

PyTree = Any

_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {block}
  cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""
_GPUS: dict[str, dict[str, Any]] = {
    "h100": {
        "name": "NVIDIA H100 80GB HBM3", "major": 9, "cores": 132, "units": 128, "clock": 1.98,
        "shared": 233472, "block": 232448, "cache": 52428800, "bandwidth": 3352320000000,
        "memory": 84942979072,
    },
    "a100": {
        "name": "NVIDIA A100-SXM4-80GB", "major": 8, "cores": 108, "units": 64, "clock": 1.41,
        "shared": 167936, "block": 166912, "cache": 41943040, "bandwidth": 2039000000000,
        "memory": 84987740160,
    },
}  # fmt: skip
"""Numbers of data sheets, as XLA describes a GPU to its compiler."""
_OF_A_GPU = 0.75
"""The part of a GPU's memory that JAX allocates by default."""
_OF_V5E = int(15.75 * 2**30)
"""Bytes that JAX may allocate on a TPU v5e."""
_V5E = {1: "2x2", 2: "2x2", 4: "2x2", 8: "2x4", 16: "4x4"}


class Target(NamedTuple):
    """Devices to compile for, or their descriptions; `name` names one.

    Attributes:
      lowering: the platform's name for lowering; None for this process's devices.
      backend: their platform and memory.
    """

    name: str
    lowering: str | None
    backend: backend.Backend
    devices: tuple[Any, ...]

    @classmethod
    def here(cls) -> Self:
        """Return this process's devices."""
        devices = tuple(jax.devices())
        device_backend = backend.Backend(backend.platform(), backend.memory())
        return cls(devices[0].device_kind, None, device_backend, devices)

    @classmethod
    def named(cls, name: str, count: int = 1) -> Self:
        """Return `count` devices of a kind: h100, a100 or v5e."""
        if name in _GPUS:
            extras.require("cuda")
            memory = int(_OF_A_GPU * _GPUS[name]["memory"])
            topology = topologies.get_topology_desc(
                name, "cuda", target_config=_GPU.format(**_GPUS[name]), topology=f"1x1x{count}"
            )
            return cls(name, "cuda", backend.Backend("gpu", memory), tuple(topology.devices))
        extras.require("tpu")
        if count not in _V5E:
            raise ValueError(f"devices must be {', '.join(map(str, _V5E))} for {name}, got {count}")
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # of a machine in Google's cloud
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is used
        topology = topologies.get_topology_desc(f"v5e:{_V5E[count]}", "tpu")
        return cls(name, "tpu", backend.Backend("tpu", _OF_V5E), tuple(topology.devices)[:count])


class Need(NamedTuple):
    """Bytes that one device needs.

    Attributes:
      states: the clients' parts of the state; `server` is the rest.
      rounds, evaluation: of the programs beyond their arguments.
      compiler: of the programs' code, and of their arguments where a compiler pads them: a TPU's.
    """

    rows: int
    states: int
    server: int
    rounds: int
    evaluation: int
    compiler: int = 0

    @property
    def peak(self) -> int:
        """All of it at once, but for the smaller of the two programs."""
        programs = max(self.rounds, self.evaluation) + self.compiler
        return self.rows + self.states + self.server + programs


class Compiled(NamedTuple):
    """The programs of a run, compiled, with the bytes that each device needs."""

    simulation: Simulation
    rounds: Any
    evaluation: Any
    need: Need
    plan: Plan


def compile_for(
    target: Target, simulation: Simulation, hparams: Hyperparameters, rounds: int = 2
) -> Compiled:
    """Compile a run's programs for the devices of a target; nothing is allocated there."""
    with contextlib.ExitStack() as stack:
        if target.lowering is not None:
            stack.enter_context(backend.planning_for(target.backend))
            # Donation is decided for this process's devices, and a warning if they have none.
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", UserWarning)
            sharded_over = target.devices if len(target.devices) > 1 else None
            simulation = dataclasses.replace(simulation, devices=sharded_over)
        hparams = hparams.as_arrays()
        state = jax.eval_shape(simulation.program.init, seed_key(0), hparams)
        population, program = simulation.population, cast(Any, simulation.transformed)
        devices = len(simulation.devices or (None,))
        place = _placing(target, simulation)
        rows: dict[str, Rows] = {}
        for split in ("train", "test"):
            shapes = Rows.shapes(population, split, simulation.algorithm)
            specs: Any = SAME
            if devices > 1:
                length = devices * pieces_of(population, devices)[1]
                fields: Any = {
                    name: jax.ShapeDtypeStruct((length, *leaf.shape[1:]), leaf.dtype)
                    for name, leaf in shapes.fields.items()
                }
                shapes = dataclasses.replace(shapes, fields=fields)
                specs = specs_of_rows(shapes)
            rows[split] = place(shapes, specs)
        # One device keeps a client's state unless their number is not a multiple of the devices'.
        even = simulation.num_clients % devices == 0
        state = place(state, program.specs(state) if devices > 1 and even else SAME)
        placed, functions = place(hparams), program.compiled()

        def compiled(function: Any, rows: Rows, **static: Any) -> Any:
            platforms = None if target.lowering is None else (target.lowering,)
            traced = function.trace(state, placed, rows, **static)
            return traced.lower(lowering_platforms=platforms).compile()

        advance = compiled(functions.rounds, rows["train"], rounds=rounds)
        measure = compiled(functions.evaluate, rows["test"])
        of_clients = bytes_of((state.personal, state.consumed))
        need = Need(
            rows=bytes_of(rows["train"].fields) // devices
            + bytes_of(rows["train"].frozen)
            + sum(bytes_of((split_rows.start, split_rows.count)) for split_rows in rows.values()),
            states=of_clients // devices if even else of_clients,
            server=bytes_of(state) - of_clients,
            rounds=_working(advance),
            evaluation=_working(measure),
        )
        allocated = _allocated(advance, measure)
        need = need._replace(compiler=max(0, allocated - need.peak))
        return Compiled(simulation, advance, measure, need, simulation.plan_for(hparams))


def _placing(target: Target, simulation: Simulation) -> Callable[..., PyTree]:
    """Return `(tree, specs) -> shapes of the tree on the target's devices`."""
    is_sharded = simulation.devices is not None
    on_this_device = target.lowering is None and not is_sharded
    mesh = None if on_this_device else mesh_of(target.devices[: None if is_sharded else 1], CLIENTS)

    def one(spec: Any, subtree: PyTree) -> PyTree:
        sharding = None if mesh is None else NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), subtree
        )

    def placed(tree: PyTree, specs: Any = SAME) -> PyTree:
        return jax.tree.map(one, specs, tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))

    return placed


def copied_bytes(population: Population, devices: int) -> int:
    """Return the most bytes of rows that one of a CPU's devices copies.

    It reads those in the host's array that begin at a multiple of `ALIGNMENT`.
    """
    begins, longest = pieces_of(population, devices)

    def copied(begin: int) -> int:
        sizes = {name: field[:1].nbytes for name, field in population.fields.items()}
        places = {name: population.fields[name].ctypes.data + begin * sizes[name] for name in sizes}
        return sum(longest * sizes[name] for name in sizes if places[name] % ALIGNMENT)

    return max(map(copied, begins))


def _allocated(*programs: Any) -> int:
    """Return the bytes of programs with their code, if one runs at a time.

    The peak that a compiler tells is none of memory alone: a TPU's has what stays on the chip.
    """
    analyses = [program.memory_analysis() for program in programs]
    held = [
        analysis.argument_size_in_bytes + _working(program)
        for analysis, program in zip(analyses, programs, strict=True)
    ]
    return max(held) + sum(analysis.generated_code_size_in_bytes for analysis in analyses)


def _working(compiled: Any) -> int:
    """Return the bytes that a program needs beyond its arguments."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise ValueError("the compiler of this machine's devices has no memory analysis")
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + outputs


def plan_memory(experiment: Experiment, target: Target) -> dict[str, Any]:
    """Return a dict of the bytes that a run needs on a target; compiles its programs.

    A CPU's devices use the memory of this process, which is measured: Python, JAX, the programs and
    the host's rows. The peak is that which the system will count: with pages of mapped files, which
    it can drop, a copy of the states, and at least what reading the data and compiling take here.
    """
    sim, hparams = experiment.simulation, experiment.hparams
    streamed, clients, cohort = sim.streamed, sim.num_clients, sim.sampler.scheme.capacity
    if streamed:
        # A streamed round is one of its cohort in memory: here, of the clients with the most rows.
        most = np.argsort(-sim.population.counts.sum(axis=1), kind="stable")[:cohort]
        sim, hparams = everyone_of(experiment, sim.population.of_clients(np.sort(most)))
    compiled = compile_for(target, sim, hparams)
    sim, need = compiled.simulation, compiled.need
    if streamed:  # A round reads states as fetched and those of the round before.
        need = need._replace(states=2 * need.states)
    number = len(sim.devices or (None,))
    parts = need._asdict() | {"process": 0, "host_states": 0, "peak": need.peak}
    needs, has = need.peak, target.backend.memory
    if target.backend.platform == "cpu":
        rows = need.rows if streamed else copied_bytes(sim.population, number)
        parts |= {"rows": rows, "process": private_bytes()}
        if streamed:
            personal = experiment.state_shapes.personal, experiment.state_shapes.consumed
            parts["host_states"] = bytes_of(personal)
        needs = parts["process"] + parts["host_states"] + number * need._replace(rows=rows).peak
        copied = parts["host_states"] or number * need.states
        parts["peak"] = max(needs + copied + mapped_bytes(), peak_bytes())
        has = host_bytes()
    return {
        "device": target.name,
        "devices": number,
        "placement": "streamed" if streamed else "in memory",
        "clients": clients,
        "cohort": cohort,
        "chunk_size": compiled.plan.chunk_size,
        "chunk_map": compiled.plan.chunk_map,
        **parts,
        "needs": needs,
        "has": has,
        "fits": None if has is None else needs <= has,
    }
