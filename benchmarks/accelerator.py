"""All that a person with a card can report, in ten minutes: one JSON file and one page.

    python benchmarks/accelerator.py                 # on a card
    python benchmarks/accelerator.py --rehearse      # tiny sizes on a CPU
    python benchmarks/accelerator.py --list

Every workload is measured as `fedjaxsim bench` does, in a process of its own: first as the defaults
lay it out, then with other sizes of chunks, and is held against the speed of the card's products
and memory, measured first. The time left is shared by the workloads that are left; one that is slow
is cut and keeps what was measured. Both files are written after each, so that Ctrl-C loses nothing.

    --minutes 10           for everything
    --workloads NAME,...   only some
    --out FOLDER           of accelerator.json and accelerator.md

The figures of a rehearsal say nothing of any card: clients run as batches, as they do on one.
"""

import argparse
import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from accelerator_page import FORMS, PEER, page, place
from common import WORKLOADS, of_script

import fedjaxsim as fjs
from fedjaxsim.bench.ceilings import Ceilings, seconds
from fedjaxsim.bench.children import in_child
from fedjaxsim.bench.measure import machine
from fedjaxsim.data.npz import save_npz
from fedjaxsim.kernels import winograd
from fedjaxsim.models import convolution, network
from fedjaxsim.report.files import write_json
from fedjaxsim.report.progress import number
from fedjaxsim.runs.settings_files import read_toml

Record = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
PEERS = Path(__file__).parent / "peers"
PATIENCE = 90
"""Seconds that a workload may take for its defaults, where there is time."""
REPEATS = 3
USUAL = 64
"""A size of chunks that is tried with every workload."""
CEILINGS, GRID = "ceilings", "ppsgd-grid"
_LOW = {"compute": "bfloat16"}
_MILLION = {"shape": (32,), "clients": 10**6, "rows": (3,), "batch_size": 2,
            "test_fraction": 1 / 3, "rounds": 20, "eval_every": 2}  # fmt: skip
WHAT: dict[str, tuple[str, Record]] = {
    "femnist-cnn-fedavg": ("femnist-cnn-fedavg", {}),
    "femnist-cnn-pmtl": ("femnist-cnn-pmtl", {}),
    "softmax-10k-own": ("softmax-10k-own", {}),
    "million-own": ("softmax-10k-own", _MILLION),
    "femnist-cnn-pmtl-bfloat16": ("femnist-cnn-pmtl", _LOW),
    "softmax-10k-local": ("softmax-10k-own", {"algorithm": "local"}),
    "softmax-10k": ("softmax-10k", {}),
    "mlp-pmtl": ("mlp-pmtl", {}),
    "text-gru-pmtl": ("text-gru-pmtl", {}),
    "text-transformer-pmtl": ("text-transformer-pmtl", {}),
    "text-transformer-pmtl-bfloat16": ("text-transformer-pmtl", _LOW),
}
"""By name: the file of settings, and changes to it; what matters most comes first."""
TINY = {"clients": 6, "hidden": (4,), "rounds": 1, "chunk_map": "vmap"}
"""Changes of a rehearsal, to the settings that a workload has."""
NAMES = (*list(WHAT)[:4], GRID, *list(WHAT)[4:], FORMS, f"{PEER}pfl", f"{PEER}fedjax")


def settings_of(name: str, rehearse: bool, **changes: Any) -> Record:
    """Return the settings of a workload."""
    file, own = WHAT[name]
    config = read_toml(WORKLOADS / f"{file}.toml").replace(**own)
    if rehearse:
        known = {*config.settings(), "chunk_map"}
        config = config.replace(**{key: value for key, value in TINY.items() if key in known})
    return config.replace(**changes).settings()


def tried(default: int, cohort: float) -> list[int]:
    """Return the sizes of chunks to try beside the default, in this order, none above the cohort.

    The largest comes last, as it may not fit. Far too small ones would take all the time.
    """
    most = max(default, int(cohort))
    usual = [USUAL] if default <= USUAL**2 else []
    sizes = [default // 4, *usual, default // 16, 4 * default]
    return [n for n in dict.fromkeys(sizes) if 2 <= n <= most and n != default]


def measure(name: str, rehearse: bool, share: float, limit: float, record: Record) -> None:
    """Measure a workload by default, then with other sizes while its share of time lasts."""
    begin = time.perf_counter()
    default = in_child(settings_of(name, rehearse), seconds=limit)
    record["default"] = default
    for size in tried(default["chunk_size"], default["clients_per_round"]):
        left = share - (time.perf_counter() - begin)
        if left < 0:
            return
        try:
            found = in_child(
                settings_of(name, rehearse, chunk_size=size), seconds=max(left, PATIENCE)
            )
        except ChildProcessError as error:  # it does not fit
            record["chunks"].append({"chunk_size": size, "error": str(error)})
            continue
        kept = ("rounds_per_second", "compile_seconds", "device_peak_mb", "rounds_mb")
        record["chunks"].append({"chunk_size": size, **{key: found[key] for key in kept}})


# --- children -------------------------------------------------------------------------------------


def of_ceilings(rehearse: bool) -> Record:
    """Describe the machine, and the speed of its products and memory."""
    stats = jax.local_devices()[0].memory_stats() or {}
    found: Record = {"machine": machine(), "memory_bytes": stats.get("bytes_limit")}
    for dtype in (jnp.float32, jnp.bfloat16):
        ceilings = Ceilings(jax.devices(), dtype)
        found[f"{jnp.dtype(dtype).name}_gflops"] = ceilings.flops() / 1e9
        found["memory_gb_per_s"] = ceilings.bandwidth() / 1e9
        if rehearse:  # where a product of bfloat16 takes a minute
            break
    return found


def _direct(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _in_tiles(x: jax.Array, kernel: jax.Array) -> jax.Array:
    tile = winograd.best_tile(x.shape, kernel.shape)
    if x.shape[3] == 1 or tile is None:
        return convolution.conv2d(x, kernel)
    return winograd.conv2d(x, kernel, tile)


CONVOLUTIONS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "default": convolution.conv2d,
    "Winograd": _in_tiles,
    "lax.conv": _direct,
}


def of_forms(rehearse: bool) -> list[Record]:
    """Time a step of clients of the CNN side by side, by form of its convolutions."""
    clients, batch, classes, image = (2, 2, 62, (28, 28)) if rehearse else (100, 10, 62, (28, 28))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((clients, batch, *image), dtype=np.float32)
    y = rng.integers(0, classes, (clients, batch), dtype=np.int32)
    data = fjs.Batch({"x": jnp.asarray(x), "y": jnp.asarray(y)}, jnp.ones((clients, batch)))
    told = []
    for name, form in CONVOLUTIONS.items():
        with mock.patch.object(network, "conv2d", form):
            task = fjs.tasks.softmax(fjs.models.cnn(image, classes), classes)
            params = jax.vmap(task.init)(jax.random.split(jax.random.key(0), clients))

            def steps(params, loss=task.loss):
                gradient = jax.vmap(jax.grad(loss))(params, data)
                return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

            step = functools.partial(jax.jit(steps), params)
            took = [seconds(lambda step=step: jax.block_until_ready(step())) for _ in range(4)]
        told.append({"name": name, "seconds": min(took[1:]), "first_seconds": took[0]})
    return told


def of_grid(rehearse: bool) -> Record:
    """Time the 990 runs of PP-SGD's grid as one program, with an evaluation every ten rounds."""
    import ppsgd_grid as grid

    simulation, _ = grid.make_simulation()
    settings = grid.SETTINGS[:3] if rehearse else grid.SETTINGS
    many = fjs.sweep.SimulationBatch(
        simulation, [grid.hyperparameters(simulation, s) for s in settings]
    )
    state: Any = many.init(0)

    def advance() -> None:
        nonlocal state
        state, _ = many.run(state, 10)

    first, *others = (seconds(advance) for _ in range(1 + (1 if rehearse else REPEATS)))
    took = min(others) / 10
    return {
        "rounds_per_second": 1 / took,
        "compile_seconds": first - 10 * took,
        "gflop_per_round": len(settings) * grid.GFLOP,
        "mb_per_round": 2 * 4e-6 * grid.N * grid.D * len(settings),
        "clients_per_round": grid.N * len(settings),
        "device_peak_mb": None,
        "rounds_mb": None,
        "chunk_size": None,
    }


def of_peer(name: str, limit: float) -> list[Record]:
    """Time a peer on random images of FEMNIST's shapes, where it is installed."""
    sys.path.insert(0, str(PEERS))
    compare = importlib.import_module("compare")
    folder = PEERS / f".venv-{name}" / ("Scripts" if os.name == "nt" else "bin")
    python = folder / "python"
    if not python.exists():
        if importlib.util.find_spec(name) is None:
            return [{"name": name, "error": "not installed here"}]
        python = Path(sys.executable)
    run = next(run for run in compare.RUNS.values() if run.peer == name)
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "clients.npz"
        sizes = {"num_clients": 206, "shape": (28, 28), "rows": (5, 69), "labels": 62}
        save_npz(data, fjs.data.load("random", **sizes))
        way = compare.settings(os.cpu_count() or 1)[name][0]
        with mock.patch.object(compare, "TIME_LIMIT", limit):
            found = compare.start(run, way, python, data, 2, run.rounds, 0)
    kept = ("rounds_per_s", "error")
    return [{"name": name, "what": run.what, **{k: found[k] for k in kept if k in found}}]


def child(name: str, rehearse: bool, limit: float) -> Any:
    """Measure one thing that is no run of settings."""
    jax.config.update("jax_enable_compilation_cache", False)
    if name.startswith(PEER):
        return of_peer(name.removeprefix(PEER), limit)
    return {CEILINGS: of_ceilings, FORMS: of_forms, GRID: of_grid}[name](rehearse)


# --- the parent -----------------------------------------------------------------------------------


def ask(name: str, rehearse: bool, limit: float) -> Any:
    """Return what a child of this script measures."""
    flags = ["--rehearse"] * rehearse
    return of_script(__file__, name, "--limit", limit, *flags, seconds=limit)


def empty() -> Record:
    """Return the record of something that has not been measured."""
    return {"status": "not begun", "default": None, "chunks": [], "told": []}


def listen(name: str, record: Record, rehearse: bool, share: float, left: float) -> None:
    """Measure something into its record, with how it ended."""
    limit = min(left, max(PATIENCE, share))
    try:
        if name in WHAT:
            measure(name, rehearse, share, limit, record)
        else:
            record["default" if name == GRID else "told"] = ask(name, rehearse, limit)
        record["status"] = "done"
    except subprocess.TimeoutExpired as error:
        record["status"] = f"cut after {error.timeout:.0f} s"
    except (ChildProcessError, subprocess.CalledProcessError) as error:
        record["status"] = str(error)
    except KeyboardInterrupt:
        record["status"] = "stopped by Ctrl-C"
        raise


def run(names: Sequence[str], minutes: float, rehearse: bool, out: Path) -> int:
    """Measure, writing both files after each; return the exit code."""
    begin = time.perf_counter()
    results: Record = {"rehearsal": rehearse, "ceilings": None, "seconds": 0.0}
    results["measured"] = {name: empty() for name in names}

    def keep() -> None:
        results["seconds"] = time.perf_counter() - begin
        write_json(out / "accelerator.json", results)
        (out / "accelerator.md").write_text(page(results), encoding="utf-8")

    out.mkdir(parents=True, exist_ok=True)
    try:
        results["ceilings"] = ask(CEILINGS, rehearse, 2 * PATIENCE)
        keep()
        for index, (name, record) in enumerate(results["measured"].items()):
            left = 60 * minutes - (time.perf_counter() - begin)
            if left <= 0:
                record["status"] = "no time left"
                continue
            listen(name, record, rehearse, left / (len(names) - index), left)
            keep()
            print(f"{index + 1}/{len(names)}  {name}  {in_words(record)}", flush=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        print(f"the machine cannot be measured: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"stopped by Ctrl-C; what was measured is in {out}", file=sys.stderr)
        return 130
    finally:
        keep()
    print(f"{out / 'accelerator.json'} and {out / 'accelerator.md'}")
    return 0


def in_words(record: Mapping[str, Any]) -> str:
    """Return a workload in a line."""
    words = [] if record["status"] == "done" else [record["status"]]
    if record["default"] is not None:
        words.insert(0, f"{number(record['default']['rounds_per_second'])} rounds/s")
    rank = place(record)
    if rank is not None:
        words.append(f"default chunk size {rank[0]} of {rank[1]}")
    return ", ".join(words) or f"{len(record['told'])} told"


def chosen(names: str | None) -> list[str]:
    """Return some of `NAMES`, in their order.

    Raises:
      ValueError: for a name that is not among them.
    """
    wanted = list(NAMES) if names is None else [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in NAMES]:
        raise ValueError(f"unknown workload {unknown[0]!r}; --list shows all")
    return [name for name in NAMES if name in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workloads")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=PATIENCE, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(child(args.child, args.rehearse, args.limit)))
        return 0
    if args.list:
        print("\n".join(NAMES))
        return 0
    try:
        names = chosen(args.workloads)
    except ValueError as error:
        parser.error(str(error))
    if args.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
    out = args.out or (Path("runs/rehearsal") if args.rehearse else RESULTS)
    return run(names, args.minutes, args.rehearse, out)


if __name__ == "__main__":
    sys.exit(main())
