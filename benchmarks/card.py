"""Five minutes with a card: rounds beside the same ones by hand, and the laws that they obey.

    python benchmarks/card.py                    # on a card
    python benchmarks/card.py --rehearse         # tiny sizes on a CPU
    python benchmarks/card.py --markdown         # the table of runs/card/card.json; nothing runs

Each workload has a process, which makes its programs beside the others': the engine's, and the same
rounds by hand (`hand_written.py`), by `jax.vmap` and by `lax.map` in batches of 64. Then they take
turns, one process at a time, medians of five. Before them, processes check of every system that
five rounds equal a CPU's and that the same seed gives the same bits, and that the integers of exact
sums and the norms that bound messages are a CPU's. The file is written after each answer; a process
that is not ready in time is ended.
"""

import concurrent.futures
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from accelerator import OF_SYSTEMS, WHAT, settings_of
from common import Record, alternate, update
from hand_written import rounds_of_run

from fedjaxsim.bench.measure import Rounds, machine, spread
from fedjaxsim.cli.printing import print_rows
from fedjaxsim.kernels import integer_sums
from fedjaxsim.privacy.messages import clip_by_global_norm, squared_norm
from fedjaxsim.report.files import read_json
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.memory import device_peak_bytes
from fedjaxsim.runs.settings import run_config
from fedjaxsim.runs.target import Target, compile_for

MAPPED = 64
"""Clients in a batch of `lax.map`."""
TURN = 0.1
"""Seconds of a turn, about."""
LAWS = 6
"""Processes that check systems, each a part of them."""
ROUNDS = 5
"""Rounds after which a card's numbers are compared with a CPU's."""
TOLERANCE = 1e-4
"""Relative to the largest number; 7·10⁻⁶ was seen on an H100, and 5·10⁻⁵ of SCAFFOLD."""


class Child:
    """A process of a script that answers one request, after `go`."""

    def __init__(self, request: Record, script: str = __file__):
        self._process = subprocess.Popen(
            [sys.executable, script, "--child", json.dumps(request)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        self._words: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._listen, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put("")

    def _listen(self) -> None:
        for line in self._process.stderr or ():
            self._words.append(line.strip())

    def line(self, seconds: float) -> Record:
        """Return the next answer; without one in so many seconds the process ends."""
        end = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while line := self._lines.get(timeout=max(0.01, end - time.monotonic())):
                if line.startswith("{"):
                    return json.loads(line)
            return {"failed": (self._words or ["no word"])[-1]}
        self.end()
        return {"failed": f"not ready in {seconds:.0f} s"}

    def go(self) -> None:
        """Let the process measure."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def run(names: Sequence[str], systems: Sequence[str], minutes: float, rehearse: bool, out: Path):
    """Check the laws and measure the workloads until the time is over."""
    end = time.monotonic() + 60 * minutes
    path = out / "card.json"
    shares = [systems[k::LAWS] for k in range(LAWS)]
    laws = [Child({"laws": share, "rehearse": rehearse}) for share in shares if share]
    laws.append(Child({"laws": None, "rehearse": rehearse}))
    timed = {name: Child({"workload": name, "rehearse": rehearse}) for name in names}
    try:
        # Half of the time to compile, also for the processes of laws: they disturb the clock.
        half = end - 30 * minutes
        for place, child in enumerate(laws):
            answer = {}
            while not {"failed", "last"} & set(answer):
                answer = child.line(half - time.monotonic())
                if "failed" in answer:
                    answer = {f"law, process {place}": answer, "failed": True}
                update(path, {name: each for name, each in answer.items() if "law" in name})
                print(answer, flush=True)
            child.end()
        ready = {name: child.line(half - time.monotonic()) for name, child in timed.items()}
        for name, child in timed.items():
            answer = ready[name]
            if "failed" not in answer:
                child.go()
                answer = child.line(end - time.monotonic())
            child.end()
            update(path, {name: answer})
            print(name, answer.get("failed") or _line(answer), flush=True)
    except KeyboardInterrupt:
        print(f"stopped by Ctrl-C; what was measured is in {path}", file=sys.stderr)
        return 130
    finally:
        for child in (*laws, *timed.values()):
            child.end()
    return 0


def _line(answer: Record) -> str:
    return ", ".join(
        f"{form} {1e3 * spread(took).median:.3g} ms" for form, took in answer["seconds"].items()
    )


# --- processes ------------------------------------------------------------------------------------


def answer(line: Record) -> None:
    """Print an answer of a process."""
    print(json.dumps(line), flush=True)


def measure(name: str, rehearse: bool) -> None:
    """Make the forms of a workload, wait for a word, and time them in turn."""
    experiment = prepare(run_config(**settings_of(name, rehearse)), check_memory=False)
    simulation, rounds = experiment.simulation, 1 if rehearse else 8
    engine = Rounds(simulation, experiment.hparams)
    forms: dict[str, Callable[[Any, int], Any]] = {"engine": engine.advance}
    carries: dict[str, Any] = {"engine": engine.start()}
    for form, size in (("by hand, vmap", None), (f"by hand, map of {MAPPED}", MAPPED)):
        if size is None or size < simulation.sampler.scheme.capacity:
            carries[form], forms[form] = rounds_of_run(experiment, size)

    def first(form: str) -> None:
        carries[form] = jax.block_until_ready(forms[form](carries[form], rounds))

    failed = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for form, done in {form: pool.submit(first, form) for form in forms}.items():
            error = done.exception()
            if error is not None:  # by hand, all slots at once may not fit
                failed[form] = " ".join(str(error).split())[:200]
                del forms[form]
    need = compile_for(Target.here(), simulation, experiment.hparams).need
    answer({"ready": name})
    sys.stdin.readline()
    times = {}
    for form in forms:
        begin = time.perf_counter()
        first(form)
        times[form] = max(1, round(TURN / (time.perf_counter() - begin)))

    def turn(form: str) -> None:
        for _ in range(times[form]):
            carries[form] = forms[form](carries[form], rounds)
        jax.block_until_ready(carries[form])

    took = alternate({form: lambda form=form: turn(form) for form in forms}, repeats=5)
    answer({
        "seconds": {f: [t / (times[f] * rounds) for t in all_] for f, all_ in took.items()},
        "refused": failed,
        "chunk_size": simulation.plan_for(experiment.hparams).chunk_size,
        "planned_bytes": need.peak,
        "peak_bytes_of_all_forms": device_peak_bytes(tuple(jax.devices()[:1])),
        "machine": machine(),
    })  # fmt: skip


def laws_of_systems(systems: Sequence[str], rehearse: bool) -> None:
    """Compare five rounds of each system with a CPU's, and with themselves."""
    card, cpu = jax.devices()[0], jax.local_devices(backend="cpu")[0]
    for place, name in enumerate(systems):
        settings = settings_of(name, True, seed=3) | ({} if rehearse else {"clients": 40})
        ends = [_after(settings, device) for device in (card, card, cpu)]
        pairs = list(zip(*map(jax.tree.leaves, ends), strict=True))
        last = {"last": True} if place == len(systems) - 1 else {}
        same = all(np.array_equal(a, b, equal_nan=True) for a, b, _ in pairs)
        off = max(_off(a, b) for a, _, b in pairs)
        answer(last | {f"law {name}": {"same bits": same, "off by": off}})


def _off(value: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference relative to the largest number."""
    largest = max(float(np.max(np.abs(expected), initial=0)), 1e-6)
    return float(np.max(np.abs(value - expected), initial=0)) / largest


def _after(settings: Record, device: Any) -> Any:
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        experiment = prepare(run_config(**settings), check_memory=False)
        simulation, hparams = experiment.simulation, experiment.hparams
        state = simulation.init(settings["seed"], hparams)
        for _ in range(ROUNDS):
            state, _ = simulation.round(state, hparams)
        floats = [x for x in jax.tree.leaves((state.shared, state.personal)) if x.dtype.kind == "f"]
        return jax.tree.map(np.asarray, floats)


def laws_of_sums() -> None:
    """Compare norms, bounded messages and integers of exact sums with a CPU's, bit by bit."""
    rng = np.random.default_rng(0)
    message = {"w": rng.standard_normal((64, 7850), dtype=np.float32)}
    found = []
    for device in (jax.devices()[0], jax.local_devices(backend="cpu")[0]):
        with jax.default_device(device):
            bounded, norms = jax.jit(_bounded)(jax.tree.map(jnp.asarray, message))
            found.append((np.asarray(norms), np.asarray(bounded["w"])))
    # The same floats on both: what remains is the sum's own.
    sums = []
    for device in (jax.devices()[0], jax.local_devices(backend="cpu")[0]):
        with jax.default_device(device):
            values = {"w": jnp.asarray(found[1][1])}
            zero = integer_sums.zero({"w": values["w"][0]}, 64)
            total = jax.jit(integer_sums.add)(zero, values, jnp.float32(1))
            sums.append([np.asarray(word["w"]) for word in total.words])
    (norms, bounded), (expected_norms, expected) = found
    units = np.abs(norms.view(np.int32) - expected_norms.view(np.int32)).max()
    answer({
        "last": True,
        "law exact sums": {
            "integers equal": all(map(np.array_equal, *sums)),
            "units in the last place of a squared norm": int(units),
            "share of bounded numbers equal": float(np.mean(bounded == expected)),
        },
    })  # fmt: skip


def _bounded(message: Any) -> tuple[Any, jax.Array]:
    bounded = jax.vmap(clip_by_global_norm, (0, None))(message, jnp.float32(1))
    return bounded.messages, jax.vmap(squared_norm)(message)


# --- the table ------------------------------------------------------------------------------------


def print_table(path: Path) -> None:
    """Print milliseconds, ratios to the faster form by hand, and broken laws."""
    record, rows, ratios = read_json(path), [], []
    for name, found in record.items():
        if "seconds" not in found if isinstance(found, dict) else True:
            continue
        medians = {form: spread(took).median for form, took in found["seconds"].items()}
        hand = min(took for form, took in medians.items() if form != "engine")
        ratios.append(hand / medians["engine"])
        cells = [f"{1e3 * took:.3g}" for took in medians.values()]
        cells += ["–"] * (3 - len(cells))
        plan, peak = found["planned_bytes"], found["peak_bytes_of_all_forms"] or 0
        memory = f"{plan / 1e6:.0f} / {peak / 1e6:.0f}"
        rows.append([name, *cells, f"{ratios[-1]:.2f}", str(found["chunk_size"]), memory])
    head = ["round", "ms", "by hand, vmap", "by hand, map", "faster by", "chunk", "MB plan / all"]
    print_rows(head, rows)
    if ratios:
        print(f"least ratio {min(ratios):.2f}, median {np.median(ratios):.2f}")
    laws = {name: found for name, found in record.items() if name.startswith("law ")}
    broken = [
        f"{name}: {found}" for name, found in laws.items()
        if not found.get("same bits", True) or not found.get("off by", 0) < TOLERANCE
        or not found.get("integers equal", True)
    ]  # fmt: skip
    unchecked = [name for name in record if name.startswith("law,")]
    print(*(f"{name} did not end: {record[name]['failed']}" for name in unchecked), sep="\n")
    print(f"{len(laws) - len(broken)} of {len(laws)} laws hold", *broken, sep="\n")


def main(
    workloads: tuple[str, ...] = tuple(WHAT),
    systems: tuple[str, ...] = tuple(OF_SYSTEMS),
    minutes: float = 5.0,
    rehearse: bool = False,
    markdown: bool = False,
    child: str = "",
    out: Path = Path("runs/card"),
) -> int:
    """Measure rounds and check laws on a card.

    Args:
      workloads: some names of `accelerator.WHAT`.
      systems: some names of `accelerator.OF_SYSTEMS`.
      minutes: for everything.
      rehearse: tiny sizes, on a CPU.
      markdown: print the table alone.
      child: the request of a process, for this script alone.
      out: the folder of card.json.
    """
    if child:
        request = json.loads(child)
        if request["rehearse"]:
            jax.config.update("jax_platforms", "cpu")
        if "workload" in request:
            measure(request["workload"], request["rehearse"])
        elif request["laws"] is None:
            laws_of_sums()
        else:
            laws_of_systems(request["laws"], request["rehearse"])
        return 0
    # Several processes share the card.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    code = 0 if markdown else run(workloads, systems, minutes, rehearse, out)
    if code == 0:
        print_table(out / "card.json")
    return code


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
