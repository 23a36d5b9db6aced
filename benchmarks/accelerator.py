"""All that a person with a card can report, in ten minutes, as one file, bench.json.

    python benchmarks/accelerator.py                 # on a card
    python benchmarks/accelerator.py --rehearse      # tiny sizes on a CPU
    python benchmarks/accelerator.py --compile-only h100 v5e   # without a card: what would run

Every workload is measured as `fedjaxsim bench` does, in a process of its own: first all of them as
the defaults lay them out, then with other chunk sizes, named `WORKLOAD, chunks of N`. A process
has at most 90 seconds, and none starts when the time is over. Before them come the ceilings of the
card, and last a step of the CNN with each form of its convolutions. The file is written after each,
so that Ctrl-C loses nothing. The numbers of a rehearsal say nothing about a card; clients run as
batches, as they do on one.

`--compile-only` compiles the workloads for devices that need not be there (extras cuda and tpu) and
writes compiled.json: what a round starts there, and the time below which it cannot come.
"""

import functools
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from ceilings import Ceilings
from common import WORKLOADS, Record, in_process, median_of, time_left, update
from compiled import PARTS, started_by_a_round
from processes import Results, in_child, print_results
from tyro.conf import Positional
from work import work_of

import fedjaxsim as fjs
from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.cli.printing import print_rows
from fedjaxsim.engine.layout import expected_lengths
from fedjaxsim.models import network
from fedjaxsim.report.progress import number
from fedjaxsim.runs.build import Experiment, prepare
from fedjaxsim.runs.settings import run_config
from fedjaxsim.runs.settings_files import read_toml
from fedjaxsim.runs.target import Target, compile_for

PATIENCE = 90
"""Seconds of a process, at most."""
USUAL = 64
"""A chunk size that is tried with every workload."""
_LOW = {"compute": "bfloat16"}
_MILLION = {"shape": (32,), "clients": 10**6, "rows": (3,), "batch_size": 2,
            "loss": "softmax", "test_fraction": 1 / 3, "rounds": 20, "eval_every": 2}  # fmt: skip
_TENTH = {"sampling": "poisson", "sampling_rate": 0.1, "local_steps": 2}
WHAT: dict[str, tuple[str, Record]] = {
    "femnist-cnn-fedavg": ("femnist-cnn-fedavg", {}),
    "femnist-cnn-pmtl": ("femnist-cnn-pmtl", {}),
    "softmax-10k-own": ("softmax-10k-own", {}),
    "million-own": ("softmax-10k-own", _MILLION),
    "femnist-cnn-pmtl-bfloat16": ("femnist-cnn-pmtl", _LOW),
    "softmax-10k-local": ("softmax-10k-own", {"algorithm": "local"}),
    "softmax-10k": ("softmax-10k", {}),
    "softmax-1k-of-10k": ("softmax-10k", _TENTH),
    "softmax-1k-of-10k-own": ("softmax-10k-own", _TENTH),
    "mlp-pmtl": ("mlp-pmtl", {}),
    "text-gru-pmtl": ("text-gru-pmtl", {}),
    "text-transformer-pmtl": ("text-transformer-pmtl", {}),
    "text-transformer-pmtl-bfloat16": ("text-transformer-pmtl", _LOW),
}
"""The file of settings of each workload, and changes to it; what matters most comes first."""
OF_SYSTEMS: dict[str, tuple[str, Record]] = {
    name: (
        f"{'linear' if each.linear else 'mlp'}-{each.variant_of or name}",
        {"algorithm": name} | ({} if each.linear else {"layer_norm": True}),
    )
    for name, each in SYSTEMS.items()
}
"""A workload of each system, which can be named too."""
Device = Literal["h100", "v5e"]
LAUNCH = 2e-6
"""Seconds that a GPU takes to start a kernel: 2.1 µs in an H100's round of 3,344 (PMTL, GRU)."""
SPEEDS: dict[Device, tuple[float, float]] = {"h100": (3.352e12, 494.7e12), "v5e": (819e9, 197e12)}
"""Bytes and floating-point operations a second: products of float32 are TF32 on a GPU, and bfloat16
on a TPU."""
CYCLES = 1.5e9
"""Cycles of a TPU v5e a second."""
TINY = {"clients": 10, "hidden": (4,), "rounds": 1, "chunk_map": "vmap"}
"""Changes of a rehearsal, to the settings that a workload has."""


def settings_of(name: str, rehearse: bool, **changes: object) -> Record:
    """Return the settings of a workload."""
    file, of_workload = (WHAT | OF_SYSTEMS)[name]
    config = read_toml(WORKLOADS / f"{file}.toml").replace(**of_workload)
    if rehearse:
        known = {*config.settings(), "chunk_map"}
        config = config.replace(**{key: value for key, value in TINY.items() if key in known})
    return config.replace(**changes).settings()


def tried(default: int, cohort: float) -> list[int]:
    """Return the chunk sizes to try beside the default, none above the cohort.

    The largest comes last, as it may not fit. Far too small ones would take all the time.
    """
    most = max(default, int(cohort))
    usual = [USUAL] if default <= USUAL**2 else []
    sizes = [default // 4, *usual, default // 16, 4 * default]
    return [n for n in dict.fromkeys(sizes) if 2 <= n <= most and n != default]


def measure(results: Results, name: str, settings: Record) -> Record | None:
    """Measure a run into the results; None if it took too long, failed or was refused."""
    try:
        found = in_child(settings, seconds=PATIENCE)
    except (subprocess.TimeoutExpired, ChildProcessError, ValueError) as error:
        print(f"{name}: {error}", flush=True)
        return None
    results.machine, results.settings[name] = found.pop("machine"), settings
    results.processes[name] = [found]
    print(f"{name}: {number(found['rounds_per_second'])} rounds/s", flush=True)
    return found


def run(names: Sequence[str], minutes: float, rehearse: bool, out: Path) -> int:
    """Measure the workloads, writing results after each; return the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    results, defaults = Results(), {}
    try:
        results.ceilings = in_process(ceilings)
        left = time_left(minutes)
        for name, value in results.ceilings.items():
            print(f"{name}: {value / 1e12:.3g} T/s", flush=True)
        for name in names:
            if left():
                defaults[name] = measure(results, name, settings_of(name, rehearse))
                results.write(out / "bench.json")
        for name, default in defaults.items():
            sizes = default and tried(default["chunk_size"], default["clients_per_round"])
            for size in sizes or []:
                if left():
                    settings = settings_of(name, rehearse, chunk_size=size)
                    measure(results, f"{name}, chunks of {size}", settings)
                    results.write(out / "bench.json")
        for name, took in in_process(convolutions, rehearse).items():
            print(f"a step of the CNN, {name}: {1e3 * took:.3g} ms", flush=True)
    except KeyboardInterrupt:
        print(f"stopped by Ctrl-C; what was measured is in {out}", file=sys.stderr)
        return 130
    print_results(results)
    return 0


def ceilings() -> dict[str, float]:
    """Measure the bytes and floating-point operations a second that the devices reach."""
    usual = Ceilings(jax.devices())
    found = {"bytes": usual.bandwidth(), "flops": usual.flops()}
    with jax.default_matmul_precision("highest"):
        return found | {"flops at highest precision": Ceilings(jax.devices()).flops()}


def trips(experiment: Experiment, chunk_size: int) -> list[float]:
    """Return the expected trips of a round's loops of unknown length, the outer loop's first."""
    simulation, batches = experiment.simulation, experiment.simulation.minibatches
    cohort = float(simulation.sampler.rate(experiment.hparams.as_arrays())) * simulation.num_clients
    counts = np.asarray(simulation.population.splits["train"].count)
    steps = (batches.epochs or 1) * np.ceil(counts / batches.size)
    # In chunks, all clients wait for the longest of theirs.
    longest = expected_lengths(steps, cohort)[::chunk_size]
    sampler = simulation.sampler
    several = chunk_size < sampler.scheme.capacity and not sampler.takes_all
    return [*([len(longest)] if several else []), float(batches.steps or np.mean(longest))]


def compiled(name: str, target: Target, device: Device, rehearse: bool) -> Record:
    """Compile a workload; return what a round starts, per round, and the least time it takes."""
    experiment = prepare(run_config(**settings_of(name, rehearse)), check_memory=False)
    found = compile_for(target, experiment.simulation, experiment.hparams, rounds=8)
    started = started_by_a_round(found.rounds.as_text(), *trips(experiment, found.plan.chunk_size))
    work = work_of(experiment, experiment.state_shapes)
    bandwidth, flops = SPEEDS[device]
    starts = {"launches": LAUNCH * started.launches} if device == "h100" else {
        "cycles": started.cycles / CYCLES}  # fmt: skip
    bounds = {"bytes": work.bytes / bandwidth, "flops": work.flops / flops, **starts}
    return {
        "kernels": {part: started.kernels[part] for part in (*PARTS, "other")},
        "launches": started.launches,
        "waits": started.waits,
        "bytes": work.bytes,
        "moved_bytes": started.moved.total(),
        "flops": work.flops,
        "working_bytes": found.need.rounds,
        "peak_bytes": found.need.peak,
        "compiler_peak_bytes": max(
            program.memory_analysis().peak_memory_in_bytes
            for program in (found.rounds, found.evaluation)
        ),
        "chunk_size": found.plan.chunk_size,
        "seconds": bounds,
    }


def _sum(numbers: Iterable[float]) -> str:
    return " + ".join(f"{number:.0f}" for number in numbers)


def compile_for_devices(
    names: Sequence[str], devices: Sequence[Device], rehearse: bool, out: Path
) -> int:
    """Compile the workloads for devices that need not be there; print and write the table."""
    packages = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
    installed = {each.name for each in importlib.metadata.distributions()}
    versions = {each: importlib.metadata.version(each) for each in packages if each in installed}
    for device in devices:
        target, rows = Target.named(device), []
        for name in names:
            found = compiled(name, target, device, rehearse)
            moved = f"{found['moved_bytes'] / 1e6:.0f}"
            update(out / "compiled.json", {f"{name} {device}": found | {"versions": versions}})
            bound, least = max(found["seconds"].items(), key=lambda each: each[1])
            rows.append([
                name, f"{found['launches']:.0f} ({_sum(found['kernels'].values())})",
                f"{found['waits']:g}", f"{found['bytes'] / 1e6:.0f}", moved,
                f"{found['flops'] / 1e9:.2g}",
                f"{found['working_bytes'] / 1e6:.0f}", f"{1e3 * least:.2g} ({bound})",
            ])  # fmt: skip
        parts = " + ".join((*PARTS, "other"))
        head = [device, f"kernels ({parts})", "waits", "least MB", "MB moved", "GFLOP"]
        head += ["working MB", "least ms"]
        print_rows(head, rows)
    print("compiled, not timed:", ", ".join(f"{each} {v}" for each, v in versions.items()))
    return 0


CONVOLUTIONS = ("windows", "rows", "grouped", "tiles")
"""Forms of a convolution, the default of GPUs first; `rows` is here, others in `network.FORMS`."""


def conv_rows(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Compute a convolution of windows along the width; a product has all rows of the kernel.

    Of the CNN's second layer a GPU moves a tenth less for it, and multiplies half more: a card that
    is faster with it would make it a form of `network.FORMS`.
    """
    kh, kw, channels, features = kernel.shape
    height, width = x.shape[1] - kh + 1, x.shape[2] - kw + 1
    windows = jnp.concatenate([x[:, :, j : j + width] for j in range(kw)], axis=-1)
    weights = kernel.transpose(1, 2, 0, 3).reshape(kw * channels, kh * features)
    out = (windows @ weights).reshape(*windows.shape[:3], kh, features)
    return functools.reduce(jnp.add, [out[:, i : i + height, :, i] for i in range(kh)])


def convolutions(rehearse: bool) -> dict[str, float]:
    """Time a step of clients of the CNN side by side, by form of its convolutions, in seconds."""
    return times_of(steps_of_convolutions(rehearse))


def times_of(steps: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the least of three seconds of each step; one may not fit, and the others go on."""
    found = {}
    for name, step in steps.items():
        try:
            found[name] = median_of(step, repeats=3)[1]
        except jax.errors.JaxRuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr)
    return found


def steps_of_convolutions(rehearse: bool) -> dict[str, Callable[[], Any]]:
    """Compile a step of clients of the CNN side by side, by form of its convolutions."""
    clients, batch, classes, image = (2, 2, 62, (28, 28)) if rehearse else (100, 10, 62, (28, 28))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((clients, batch, *image), dtype=np.float32)
    y = rng.integers(0, classes, (clients, batch), dtype=np.int32)
    data = fjs.Batch({"x": jnp.asarray(x), "y": jnp.asarray(y)}, jnp.ones((clients, batch)))
    found: dict[str, Callable[[], Any]] = {}
    for name in CONVOLUTIONS:

        def form_of(x, kernel, name=name):
            return "one channel" if x.shape[3] == 1 and name != "grouped" else name

        forms = mock.patch.dict(network.FORMS, rows=conv_rows)
        with forms, mock.patch.object(network, "form_of", form_of):
            task = fjs.tasks.softmax(fjs.models.cnn(image, classes), classes)
            params = jax.vmap(task.init)(jax.random.split(jax.random.key(0), clients))

            def step(params, data, loss=task.loss):
                gradient = jax.vmap(jax.grad(loss))(params, data)
                return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

            try:
                program = jax.jit(step).lower(params, data).compile()
                found[name] = functools.partial(program, params, data)
            except jax.errors.JaxRuntimeError as error:  # as above
                print(f"{name}: {error}", file=sys.stderr)
    return found


def main(
    workloads: Positional[tuple[str, ...]] = (),
    rehearse: bool = False,
    compile_only: tuple[Device, ...] = (),
    minutes: float = 10.0,
    out: Path = Path("runs/accelerator"),
) -> int:
    """Measure what a card does.

    Args:
      workloads: some names, those of systems included; by default all but these.
      rehearse: tiny sizes, on a CPU unless they are only compiled.
      compile_only: devices to compile for, which need not be there; nothing is run.
      minutes: for the workloads.
      out: the folder of bench.json.
    """
    if unknown := [name for name in workloads if name not in WHAT | OF_SYSTEMS]:
        raise SystemExit(f"unknown workload {unknown[0]!r}; there are {', '.join(WHAT)}")
    if rehearse or compile_only:
        os.environ["JAX_PLATFORMS"] = "cpu"
    names = workloads or list(WHAT)
    if compile_only:
        return compile_for_devices(names, compile_only, rehearse, out)
    return run(names, minutes, rehearse, out)


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
