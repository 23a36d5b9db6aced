"""All that a person with a card can report, in ten minutes: one JSON file and one page.

    python benchmarks/accelerator.py                 # on a card
    python benchmarks/accelerator.py --rehearse      # tiny sizes on a CPU, in the forms of a card

Every workload runs in a process of its own: first as the defaults lay it out, then with other sizes
of chunks, and is held against what the card multiplies and moves, which is measured first. The time
left is shared by the workloads that are left; one that is slow is cut and keeps what it has told.
Both files are written after each, so that Ctrl-C loses nothing.

    --minutes 10           for everything
    --workloads NAME,...   only some (`--list` says which there are)
    --out FOLDER           of accelerator.json and accelerator.md

In a rehearsal JAX has a CPU and takes it for an accelerator with 64 MiB: clients run as batches of
a size that memory gives, convolutions multiply patches. Its figures say nothing of any card.
"""

import argparse
import dataclasses
import functools
import gc
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import models, tasks
from fedjaxsim.bench import problems, systems
from fedjaxsim.bench.ceilings import Ceilings
from fedjaxsim.bench.children import end_with_parent, reports
from fedjaxsim.bench.machine import machine
from fedjaxsim.bench.measure import measure, seconds
from fedjaxsim.bench.work import cnn_flops
from fedjaxsim.bench.workload import Load, Workload
from fedjaxsim.bench.workloads import WORKLOADS
from fedjaxsim.data.minibatches import Batch
from fedjaxsim.data.npz import save_npz
from fedjaxsim.engine import layout
from fedjaxsim.fast import winograd
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.models import convolution, network
from fedjaxsim.report.files import write_json
from fedjaxsim.report.progress import number

Record = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
PEERS = Path(__file__).parent / "peers"
PATIENCE = 90
"""Seconds that a workload may take for its defaults, where there is time."""
REPEATS = 3
PRETENDED = 2**26
"""Bytes of a rehearsal's device."""
USUAL = 64
"""A size of chunks that is tried with every workload."""
CEILINGS, FORMS, PEER = "ceilings", "convolutions", "peer-"


def _settings(count: int) -> list[Hyperparameters]:
    """Return the first settings of PP-SGD's grid, without a simulation, which takes the device."""
    rate, level, noises = systems.RATES[0], systems.LEVELS[0], systems.NOISES[:count]
    values = {"learning_rate": rate, "personalization": level, "clip_norm": 10.0}
    return [Hyperparameters(**values, noise_multiplier=z) for z in noises]


@functools.cache
def workloads() -> dict[str, tuple[Workload, Record]]:
    """By name: the workload, and what a rehearsal changes; what matters most comes first."""
    few, cnn = {"clients": 6, "rounds": 1}, {"clients": 4, "rounds": 1}
    own = WORKLOADS["softmax-10k-own"]
    local = {**own.settings, "algorithm": "local"}
    million = {**own.settings, "widths": (32, 10), "clients": 10**6, "rows": (2, 0), "batch": 2,
               "rounds": 2}  # fmt: skip
    text = {"clients": 6, "expected": 3, "length": 3, "hidden": (4,), "rounds": 1}

    def low(name: str, of: str) -> Workload:
        found = WORKLOADS[of]
        settings = {**found.settings, "compute": "bfloat16"}
        summary = f"{found.summary}, in bfloat16"
        return dataclasses.replace(found, name=name, settings=settings, summary=summary)

    listed = [
        (WORKLOADS["femnist-cnn-fedavg"], cnn),
        (WORKLOADS["femnist-cnn-pmtl"], cnn),
        (own, few),
        (Workload("million-own", "10⁶ clients with linear models of their own, everyone",
                  systems.dense, million), {**few, "clients": 40}),
        (WORKLOADS["ppsgd-grid"], {"clients": 6, "settings": _settings(3)}),
        (low("femnist-cnn-pmtl-bfloat16", "femnist-cnn-pmtl"), cnn),
        (Workload("softmax-10k-local", "10,000 clients that learn linear models alone",
                  systems.dense, local), few),
        (WORKLOADS["softmax-10k"], few),
        (WORKLOADS["mlp-pmtl"], {**few, "expected": 3}),
        (WORKLOADS["text-gru-pmtl"], text),
        (WORKLOADS["text-transformer-pmtl"], text),
        (low("text-transformer-pmtl-bfloat16", "text-transformer-pmtl"), text),
    ]  # fmt: skip
    return {workload.name: (workload, changes) for workload, changes in listed}


def all_names() -> list[str]:
    """Everything that can be measured, in the order in which it is."""
    return [*workloads(), FORMS, f"{PEER}pfl", f"{PEER}fedjax"]


# --- a child --------------------------------------------------------------------------------------


def tell(record: Record) -> None:
    """A line for the parent."""
    print(json.dumps(record), flush=True)


def tried(default: int, updates: float) -> list[int]:
    """Sizes of chunks to be tried beside the default, in this order, none above the cohort.

    The largest comes last, as it may not fit. Far too small ones would take all the time.
    """
    most = max(default, int(updates))
    usual = [USUAL] if default <= USUAL**2 else []
    sizes = [default // 4, *usual, default // 16, 4 * default]
    return [n for n in dict.fromkeys(sizes) if 2 <= n <= most and n != default]


def of_workload(name: str, rehearse: bool, share: float) -> None:
    """Tells what a workload takes by default, then with other sizes while time is left."""
    begin = time.perf_counter()
    workload, changes = workloads()[name]
    build = functools.partial(workload.build, **(changes if rehearse else {}))

    def run(repeats: int, ceilings: bool, **chosen: int) -> Record:
        load: Load = build(**chosen)
        numbers = measure(load, repeats, ceilings=ceilings)
        return {**numbers, "updates": load.work.updates}

    default = run(1 if rehearse else REPEATS, not rehearse)
    tell({"default": default})
    if default["chunk_size"] is None:
        return
    for size in tried(default["chunk_size"], default["updates"]):
        if time.perf_counter() - begin > share:
            return
        gc.collect()  # what the device holds of the size before
        try:
            numbers = run(1, False, chunk_size=size)
        except jax.errors.JaxRuntimeError as error:  # it does not fit
            tell({"chunk": {"chunk_size": size, "error": str(error).splitlines()[0]}})
            continue
        kept = ("rounds_per_second", "compile_seconds", "device_peak_mb", "peak_mb")
        tell({"chunk": {"chunk_size": size, **{key: numbers[key] for key in kept}}})


def of_ceilings(rehearse: bool) -> None:
    """Tells what the machine is, and how fast it multiplies and moves."""
    found: Record = {"machine": machine(), "memory_bytes": layout.device_memory()}
    devices = jax.devices()
    for dtype in (jnp.float32, jnp.bfloat16):
        ceilings = Ceilings(devices, dtype)
        found[f"{jnp.dtype(dtype).name}_gflops"] = ceilings.flops() / 1e9
        found["memory_gb_per_s"] = ceilings.bandwidth() / 1e9
        if rehearse:  # where a product of bfloat16 takes a minute
            break
    tell(found)


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
    "patches, channels last": convolution._conv_wide,
    "patches, by height and width": convolution._conv_in_cache,
    "Winograd": _in_tiles,
    "lax.conv": _direct,
}


def of_forms(rehearse: bool) -> None:
    """Tells how fast clients of the CNN take a step side by side, by form of its convolutions."""
    clients, classes = (2, problems.FEMNIST_CLASSES) if rehearse else (100, 62)
    batch = 2 if rehearse else systems.BATCH
    rng = np.random.default_rng(0)
    x = rng.standard_normal((clients, batch, *problems.IMAGE), dtype=np.float32)
    y = rng.integers(0, classes, (clients, batch), dtype=np.int32)
    data = Batch({"x": jnp.asarray(x), "y": jnp.asarray(y)}, jnp.ones((clients, batch)))
    work = clients * batch * cnn_flops(problems.IMAGE[0], classes)
    for name, form in CONVOLUTIONS.items():
        with mock.patch.object(network, "conv2d", form):
            task = tasks.softmax(models.cnn(problems.IMAGE, classes), classes)
            params = jax.vmap(task.init)(jax.random.split(jax.random.key(0), clients))

            def steps(params, loss=task.loss):
                gradient = jax.vmap(jax.grad(loss))(params, data)
                return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

            step = functools.partial(jax.jit(steps), params)
            first, *others = (
                seconds(functools.partial(_finished, step)) for _ in range(1 + REPEATS)
            )
        numbers = {"seconds": min(others), "first_seconds": first, "flops": work}
        tell({"form": {"name": name, **numbers}})


def _finished(function: Callable[[], Any]) -> None:
    jax.block_until_ready(function())


def of_peer(name: str, limit: float) -> None:
    """Tells what a peer does on random images of FEMNIST's shapes, where it is installed."""
    sys.path.insert(0, str(PEERS))
    compare = importlib.import_module("compare")
    folder = PEERS / f".venv-{name}" / ("Scripts" if os.name == "nt" else "bin")
    python = folder / "python"
    if not python.exists():
        if importlib.util.find_spec(name) is None:
            tell({"peer": {"name": name, "error": "not installed here"}})
            return
        python = Path(sys.executable)
    train, test = problems.femnist_counts()
    images = problems.classification(train, test, problems.IMAGE, problems.FEMNIST_CLASSES)
    run = next(run for run in compare.RUNS.values() if run.peer == name)
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "clients.npz"
        save_npz(data, images)
        way = compare.settings(os.cpu_count() or 1)[name][0]
        with mock.patch.object(compare, "TIME_LIMIT", limit):
            found = compare.start(run, way, python, data, 2, run.rounds, 0)
    kept = ("rounds_per_s", "error")
    tell({"peer": {"name": name, "what": run.what, **{k: found[k] for k in kept if k in found}}})


def child(name: str, rehearse: bool, share: float) -> None:
    """Measures one thing."""
    end_with_parent()
    jax.config.update("jax_enable_compilation_cache", False)
    if rehearse:
        mock.patch.object(jax, "default_backend", return_value="gpu").start()
        mock.patch.object(layout, "device_memory", return_value=PRETENDED).start()
    if name == CEILINGS:
        of_ceilings(rehearse)
    elif name == FORMS:
        of_forms(rehearse)
    elif name.startswith(PEER):
        of_peer(name.removeprefix(PEER), share)
    else:
        of_workload(name, rehearse, share)


# --- the parent -----------------------------------------------------------------------------------


def ask(name: str, rehearse: bool, share: float, limit: float) -> Iterator[Record]:
    """What a child tells; it stops trying sizes after its share, and is cut at the limit."""
    command = [sys.executable, __file__, "--child", name, "--share", str(share)]
    return reports(command + ["--rehearse"] * rehearse, limit)


def empty(name: str) -> Record:
    """What is known of something that has not been measured."""
    summary = workloads()[name][0].summary if name in workloads() else name
    return {"summary": summary, "status": "not begun", "default": None, "chunks": [], "told": []}


def listen(record: Record, told: Iterator[Record]) -> None:
    """Keeps what a child tells, and how it ended."""
    try:
        for line in told:
            if "default" in line:
                record["default"] = line["default"]
            elif "chunk" in line:
                record["chunks"].append(line["chunk"])
            else:
                record["told"].append(next(iter(line.values())))
        record["status"] = "done"
    except (TimeoutError, ChildProcessError) as error:
        record["status"] = str(error)
    except KeyboardInterrupt:
        record["status"] = "stopped by Ctrl-C"
        raise


def place(record: Mapping[str, Any]) -> tuple[int, int] | None:
    """The default's place among the sizes that were tried, 1 for the fastest, and how many."""
    if record["default"] is None or not record["chunks"]:
        return None
    speed = record["default"]["rounds_per_second"]
    others = [each.get("rounds_per_second", 0.0) for each in record["chunks"]]
    return 1 + sum(other > speed for other in others), 1 + len(others)


def run(names: Sequence[str], minutes: float, rehearse: bool, out: Path) -> int:
    """Measures, writing both files after each; the exit code."""
    begin = time.perf_counter()
    results: Record = {"rehearsal": rehearse, "ceilings": None, "seconds": 0.0}
    results["measured"] = {name: empty(name) for name in names}

    def keep() -> None:
        results["seconds"] = time.perf_counter() - begin
        write_json(out / "accelerator.json", results)
        (out / "accelerator.md").write_text(page(results), encoding="utf-8")

    out.mkdir(parents=True, exist_ok=True)
    try:
        (results["ceilings"],) = ask(CEILINGS, rehearse, PATIENCE, 2 * PATIENCE)
        keep()
        for index, (name, record) in enumerate(results["measured"].items()):
            left = 60 * minutes - (time.perf_counter() - begin)
            if left <= 0:
                record["status"] = "no time left"
                continue
            share = left / (len(names) - index)
            listen(record, ask(name, rehearse, share, min(left, max(PATIENCE, share))))
            keep()
            print(f"{index + 1}/{len(names)}  {name}  {in_words(record)}", flush=True)
    except (TimeoutError, ChildProcessError) as error:
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
    """A workload in a line."""
    words = [] if record["status"] == "done" else [record["status"]]
    if record["default"] is not None:
        words.insert(0, f"{number(record['default']['rounds_per_second'])} rounds/s")
    rank = place(record)
    if rank is not None:
        words.append(f"default chunk size {rank[0]} of {rank[1]}")
    return ", ".join(words) or f"{len(record['told'])} told"


# --- the page -------------------------------------------------------------------------------------


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def of(value: float, ceiling: float | None) -> str:
    """A rate as a part of a ceiling."""
    return "–" if not ceiling else f"{100 * value / ceiling:.3g} %"


def megabytes(numbers: Mapping[str, Any]) -> str:
    """The device's peak, where it tells; else that of the process."""
    peak = numbers["device_peak_mb"]
    return number(numbers["peak_mb"] if peak is None else peak)


def page(results: Mapping[str, Any]) -> str:
    """Everything as Markdown."""
    limits = results["ceilings"] or {}
    lines = ["# An accelerator", ""]
    if results["rehearsal"]:
        lines += ["A rehearsal: tiny sizes on a CPU, in the forms of an accelerator.", ""]
    if limits:
        there = limits["machine"]
        lines += [
            f"{there['devices']} {there['device_kind']} ({there['platform']}), "
            f"{limits['memory_bytes'] / 2**30:.3g} GiB to be allocated, JAX "
            f"{there['versions']['jax']}; {results['seconds']:.0f} s for everything.",
            "",
            f"Products of float32 {number(limits['float32_gflops'])} GFLOP/s, of bfloat16 "
            f"{number(limits.get('bfloat16_gflops'))}; memory {number(limits['memory_gb_per_s'])} "
            "GB/s.",
            "",
        ]
    rows, chunks = [], []
    for name, record in results["measured"].items():
        default = record["default"]
        if default is None:
            if name in workloads():
                rows.append([name, record["status"], *["–"] * 7])
            continue
        speed = default["rounds_per_second"]
        flops, moved = default["gflop_per_round"] * speed, default["mb_per_round"] * speed / 1e3
        rows.append(
            [
                name,
                number(speed),
                number(default["updates_per_second"]),
                number(default["compile_seconds"]),
                megabytes(default),
                number(flops),
                of(flops, limits.get("float32_gflops")),
                of(flops, limits.get("bfloat16_gflops")),
                of(moved, limits.get("memory_gb_per_s")),
            ]
        )
        for each in [{**default, "default": True}, *record["chunks"]]:
            if each["chunk_size"] is None:
                continue
            size = f"{each['chunk_size']} (default)" if "default" in each else each["chunk_size"]
            if "error" in each:
                chunks.append([name, str(size), each["error"], "–", "–", "–"])
                continue
            quotient = each["rounds_per_second"] / speed
            chunks.append(
                [name, str(size), number(each["rounds_per_second"]), f"{quotient:.3g}",
                 number(each["compile_seconds"]), megabytes(each)]
            )  # fmt: skip
    lines += ["## Workloads", ""]
    lines += table(
        ["workload", "rounds/s", "updates/s", "compile s", "MB", "GFLOP/s", "of float32",
         "of bfloat16", "of memory"],
        rows,
    )  # fmt: skip
    lines += ["## Clients at once", ""]
    lines += table(
        ["workload", "chunk size", "rounds/s", "of the default's", "compile s", "MB"], chunks
    )
    ranks = {name: place(record) for name, record in results["measured"].items()}
    lines += [f"- {name}: the default is {r[0]} of {r[1]}" for name, r in ranks.items() if r]
    lines += [""]
    forms = results["measured"].get(FORMS, {"told": []})["told"]
    if forms:
        lines += [
            "## Convolutions",
            "",
            "A step of SGD of the papers' CNN, clients side by side.",
            "",
        ]
        rates = [(each, each["flops"] / each["seconds"] / 1e9) for each in forms]
        lines += table(
            ["form", "ms", "GFLOP/s", "of float32", "first s"],
            [
                [each["name"], number(1e3 * each["seconds"]), number(rate),
                 of(rate, limits.get("float32_gflops")), number(each["first_seconds"])]
                for each, rate in rates
            ],
        )  # fmt: skip
    told = [results["measured"][name]["told"] for name in results["measured"] if PEER in name]
    if peers := [each for answers in told for each in answers]:
        lines += ["## Peers", "", "The CNN, 100 of 206 writers a round, random images.", ""]
        rows = []
        for each in peers:
            speed = each.get("rounds_per_s")
            words = each["error"].splitlines()[-1] if speed is None else number(speed)
            rows.append([each["name"], words])
        lines += table(["peer", "rounds/s"], rows)
    return "\n".join(lines)


def chosen(names: str | None) -> list[str]:
    """Some of `all_names`, in their order.

    Raises:
      ValueError: for a name that is not among them.
    """
    known = all_names()
    wanted = known if names is None else [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"unknown workload {unknown[0]!r}; --list shows all")
    return [name for name in known if name in wanted]


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
    parser.add_argument("--share", type=float, default=PATIENCE, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.child, args.rehearse, args.share)
        return 0
    if args.list:
        for name in all_names():
            print(f"{name:32s} {empty(name)['summary']}")
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
