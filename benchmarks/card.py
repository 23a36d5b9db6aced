"""Five minutes with a card: rounds beside the same ones by hand, and the laws that they obey.

    python benchmarks/card.py                    # on a card
    python benchmarks/card.py --rehearse         # tiny sizes on a CPU
    python benchmarks/card.py --markdown         # the table of runs/card/card.json; nothing runs

Each workload has a process, which makes its programs beside the others': the engine's, and the same
rounds by hand (`hand_written.py`), by `jax.vmap` and by `lax.map` in batches of 64. Then they take
turns, one process at a time, medians of five. Before them, processes check of every system, and of
PMTL's larger models, that five rounds equal a CPU's and that the same seed gives the same bits, and
that the integers of exact sums and the norms that bound messages are a CPU's. Small rounds also run
with CUDA graphs of whole loops, three without autotuning, whose peak of memory is then the rounds'
alone, 64 learning rates as one program, and a step of the CNN with each form of its convolutions.
In the time that is left come pfl and FedJAX, if torch is there and their wheels are in
`peers/wheels` (`peers/README.md`). The file is written after each answer; a process that is not
ready in half of the time waits for the others, and one that fails, or a system, leaves them be.
What was measured stays after a stop by Ctrl-C or `kill`.
"""

import concurrent.futures
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from accelerator import OF_SYSTEMS, WHAT, settings_of, steps_of_convolutions, times_of
from common import Record, alternate, update
from hand_written import rounds_of_run

from fedjaxsim.bench.measure import Rounds, machine, spread
from fedjaxsim.cli.printing import print_rows
from fedjaxsim.data.npz import save_npz
from fedjaxsim.kernels import integer_sums
from fedjaxsim.privacy.messages import clip_by_global_norm, squared_norm
from fedjaxsim.report.files import read_json
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.memory import device_peak_bytes
from fedjaxsim.runs.settings import run_config
from fedjaxsim.runs.target import Target, compile_for
from fedjaxsim.simulation_batch import SimulationBatch

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
OF_BFLOAT16 = 1e-2
"""The same of a model in bfloat16, whose activations are rounded to 8 bits."""
LAW_ABIDING = (
    *OF_SYSTEMS, "text-gru-pmtl", "text-transformer-pmtl", "femnist-cnn-pmtl",
    "femnist-cnn-pmtl-bfloat16", "text-transformer-pmtl-bfloat16",
)  # fmt: skip
"""Systems, and workloads with other models: an embedding, attention, convolutions and bfloat16."""
OF_LOOPS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE"
)
ALONE = {
    f"{name}, graphs of loops": (name, OF_LOOPS)
    for name in ("softmax-1k-of-10k", "mlp-pmtl", "text-gru-pmtl")
} | {
    f"{name}, {how}": (name, flags)
    for name in ("softmax-10k", "million-own", "mlp-pmtl")
    for how, flags in {"alone": "", "not autotuned": "--xla_gpu_autotune_level=0"}.items()
}  # fmt: skip
"""Workloads that the engine also runs alone, with flags of XLA: with loops inside CUDA graphs, as
today's XLA has graphs of kernels only, and without the memory in which it times kernels."""
FORMS, RUNS = "a step of the CNN", "a round of the MLP"
RATES = 64
"""Learning rates in one program."""
PEERS, OF_PEERS = ("pfl", "fedjax", "ours"), ("cnn", "mlp")
PEERS_FOLDER = Path(__file__).parent / "peers"
PATIENCE, LEAST = 60, 10
"""Seconds of a peer, or of a process that measures, at most; without so many left none starts."""
FOR_PEERS = 0.2
"""The share of the time that processes which are slow leave to the peers."""


class Child:
    """A process of a script that answers one request, after `go`."""

    def __init__(
        self, arguments: Sequence[str], script: str = __file__, variables: Mapping[str, str] = {}
    ):
        self._process = subprocess.Popen(
            [sys.executable, script, *arguments], env={**os.environ, **variables},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        self._words: list[str] = []
        # The second one waits for the first, which has to run by then.
        self._threads = [threading.Thread(target=f, daemon=True) for f in (self._hear, self._read)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._threads[0].join(10)  # its last words
        self._lines.put("")

    def _hear(self) -> None:
        for line in self._process.stderr or ():
            self._words.append(line.strip())

    def line(self, seconds: float) -> Record:
        """Return the next answer; without one in so many seconds the process ends."""
        found = self.come(seconds)
        if found is None:
            self.end()
            return {"failed": f"not ready in {max(0, seconds):.0f} s"}
        return found

    def come(self, seconds: float) -> Record | None:
        """Return the next answer, or None if none comes in so many seconds."""
        end = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while line := self._lines.get(timeout=max(0.01, end - time.monotonic())):
                if line.startswith("{"):
                    return json.loads(line)
            errors = [word for word in self._words if re.match(r"[\w.]*(Error|Exception)\b", word)]
            return {"failed": (errors or self._words or ["no word"])[-1][:300]}
        return None

    def go(self) -> None:
        """Let the process measure."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def send(self, sent: signal.Signals) -> None:
        """Send the process a signal."""
        self._process.send_signal(sent)

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join(1)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def laws_of(waiting: dict[int, Child], end: float) -> Iterator[Record]:
    """Yield the processes' answers as they come; those that have more to say stay in `waiting`."""
    while waiting and time.monotonic() < end:
        for place, child in list(waiting.items()):
            found = child.come(0.1)
            if found is None:
                continue
            if {"failed", "last"} & set(found):
                del waiting[place]
                child.end()
            if "failed" in found:
                found = {f"law, process {place}": found}
            yield {name: law for name, law in found.items() if name != "last"}


def measured(
    children: Mapping[str, Child], half: float, end: float
) -> Iterator[tuple[str, Record]]:
    """Let the processes measure, one by one; yield their names and answers.

    Those that are not ready at `half` stand still, so as not to disturb the clock, and get ready
    one by one when the others have answered.
    """

    def seconds() -> float:
        return min(PATIENCE, end - time.monotonic())

    ready = {name: child.come(half - time.monotonic()) for name, child in children.items()}
    late = [name for name, answer in ready.items() if answer is None]
    for name in late:
        children[name].send(signal.SIGSTOP)
    for name in [*(name for name in children if name not in late), *late]:
        child, answer = children[name], ready[name]
        if answer is None:
            child.send(signal.SIGCONT)
            answer = child.line(seconds())
        if "failed" not in answer:
            child.go()
            answer = child.line(seconds())
        child.end()
        yield name, answer


def run(names: Sequence[str], systems: Sequence[str], minutes: float, rehearse: bool, out: Path):
    """Check the laws and measure the workloads until the time is over."""
    end = time.monotonic() + 60 * minutes
    path = out / "card.json"

    def start(flags: str = "", **request: Any) -> Child:
        asked = json.dumps(request | {"rehearse": rehearse})
        given = os.environ.get("XLA_FLAGS", "")
        return Child(["--child", asked], variables={"XLA_FLAGS": f"{given} {flags}".strip()})

    shares = [systems[k::LAWS] for k in range(LAWS)]
    laws = [start(laws=share) for share in shares if share]
    laws.append(start(laws=None))
    timed = {name: start(workload=name) for name in names}
    timed |= {
        title: start(flags, workload=name, alone=True)
        for title, (name, flags) in ALONE.items() if name in names
    } | {RUNS: start(runs=True), FORMS: start(forms=True)}  # fmt: skip
    try:
        # Half of the time to compile, also for the processes of laws: they disturb the clock.
        half, waiting = end - 30 * minutes, dict(enumerate(laws))
        for answer in laws_of(waiting, half):
            update(path, answer)
            print(answer, flush=True)
        for child in waiting.values():
            child.send(signal.SIGSTOP)
        for name, answer in measured(timed, half, end - 60 * minutes * FOR_PEERS):
            update(path, {name: answer})
            print(name, answer.get("failed") or _line(answer), flush=True)
        for title, report in peers(rehearse, lambda: end - time.monotonic()):
            update(path, {title: report})
            print(title, report, flush=True)
        for child in waiting.values():
            child.send(signal.SIGCONT)
        for answer in laws_of(waiting, end):
            update(path, answer)
            print(answer, flush=True)
        late = {f"law, process {place}": {"failed": "not ready in time"} for place in waiting}
        update(path, late)
    except KeyboardInterrupt:
        print(f"stopped; what was measured is in {path}", file=sys.stderr)
        return 130
    finally:
        for child in (*laws, *timed.values()):
            child.end()
    return 0


def peers(rehearse: bool, left: Callable[[], float]) -> Iterator[tuple[str, Record]]:
    """Run pfl, FedJAX and the engine on the same clients; yield names and reports."""
    if left() < LEAST:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clients.npz"
        # Cohorts are of a hundred.
        tiny = {"clients": 110, "rows": (5,)} if rehearse else {}
        settings = settings_of("femnist-cnn-fedavg", False, **tiny)
        save_npz(path, prepare(run_config(**settings), check_memory=False).simulation.population)
        wheels = sorted(map(str, (PEERS_FOLDER / "wheels").glob("*.whl")))
        search = os.pathsep.join([*wheels, *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {"PYTHONPATH": search} | ({"JAX_PLATFORMS": "cpu"} if rehearse else {})
        for workload in OF_PEERS:
            for peer in PEERS:
                script = "ours.py" if peer == "ours" else f"{peer}_rounds.py"
                setting = {"fedjax": "jit", "ours": "one device"}.get(peer, "")
                rounds = 1 if rehearse else 50 if peer == "ours" else 5
                arguments = [workload, "fedavg", "--data", str(path), "--rounds", str(rounds)]
                if left() < LEAST:
                    return
                child = Child(
                    [*arguments, "--setting", setting], str(PEERS_FOLDER / script), variables
                )
                try:
                    report = child.line(min(PATIENCE, left()))
                finally:
                    child.end()
                yield f"peer {peer}, {workload}", report


def _line(answer: Record) -> str:
    return ", ".join(
        f"{form} {1e3 * spread(took).median:.3g} ms" for form, took in answer["seconds"].items()
    )


# --- processes ------------------------------------------------------------------------------------


def answer(line: Record) -> None:
    """Print an answer of a process."""
    print(json.dumps(line), flush=True)


def wait_for_go(name: str) -> None:
    """Say that all is made, and wait; end where nobody is left to say a word, as after a kill."""
    answer({"ready": name})
    if not sys.stdin.readline():
        sys.exit(1)


def measure(name: str, rehearse: bool, alone: bool) -> None:
    """Make the forms of a workload, or the engine's `alone`, wait for a word, and time them."""
    experiment = prepare(run_config(**settings_of(name, rehearse)), check_memory=False)
    simulation, rounds = experiment.simulation, 1 if rehearse else 8
    hparams = experiment.hparams.as_arrays()
    engine, memory = Rounds(simulation, experiment.hparams), {"rows": memory_in_use()}
    carries: dict[str, Any] = {"engine": engine.start()}
    memory["states"] = memory_in_use()
    several: Any = simulation.compiled.rounds
    rows = simulation.placed["train"]
    lowered = several.lower(carries["engine"], hparams, rows, rounds=rounds)

    def compiled() -> Callable[[Any], Any]:
        program = lowered.compile()
        return lambda state: program(state, hparams, rows)[0]

    compilers: dict[str, Callable[[], Callable[[Any], Any]]] = {"engine": compiled}
    batch = 2 if rehearse else MAPPED
    by_hand = {} if alone else {"by hand, vmap": None, f"by hand, map of {batch}": batch}
    for form, size in by_hand.items():
        if size is None or size < simulation.sampler.scheme.capacity:
            carries[form], traced = rounds_of_run(experiment, size)
            compilers[form] = traced(rounds)
    forms: dict[str, Callable[[Any], Any]] = {}

    def advance(form: str) -> float:
        begin = time.perf_counter()
        carries[form] = jax.block_until_ready(forms[form](carries[form]))
        return time.perf_counter() - begin

    def first(form: str) -> float:
        begin = time.perf_counter()
        forms[form] = compilers[form]()
        advance(form)
        return time.perf_counter() - begin

    failed, compiling = {}, {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        planned = pool.submit(compile_for, Target.here(), simulation, experiment.hparams)
        if alone:
            concurrent.futures.wait([planned])
            memory["compilation"] = memory_in_use()
        for form, done in {form: pool.submit(first, form) for form in compilers}.items():
            error = done.exception()
            if error is not None:  # by hand, all slots at once may not fit
                failed[form] = " ".join(str(error).split())[:200]
                forms.pop(form, None)
            else:
                compiling[form] = done.result()
    forms = {form: forms[form] for form in compiling}  # not in the order in which they came
    if alone:
        memory["first rounds"] = memory_in_use()
        engine.evaluate(carries["engine"])
        memory["evaluation"] = memory_in_use()
    wait_for_go(name)
    times = {form: max(1, round(TURN / advance(form))) for form in forms}

    def turn(form: str) -> None:
        for _ in range(times[form]):
            carries[form] = forms[form](carries[form])
        jax.block_until_ready(carries[form])

    took = alternate({form: lambda form=form: turn(form) for form in forms}, repeats=5)
    answer({
        "seconds": {f: [t / (times[f] * rounds) for t in all_] for f, all_ in took.items()},
        "first_seconds": compiling,
        "refused": failed,
        "chunk_size": simulation.plan_for(experiment.hparams).chunk_size,
        "planned_bytes": planned.result().need.peak,
        "peak_bytes_of_all_forms": device_peak_bytes(tuple(jax.devices()[:1])),
        "memory": memory,
        "machine": machine(),
    })  # fmt: skip


def memory_in_use() -> Record:
    """Return the bytes that the device has allocated, had at most, and its largest array's."""
    found = jax.devices()[0].memory_stats() or {}  # a CPU tells none
    names = {"in use": "bytes_in_use", "peak": "peak_bytes_in_use", "largest": "largest_alloc_size"}
    return {name: found.get(key) for name, key in names.items()}


def time_forms(rehearse: bool) -> None:
    """Make a step of the CNN with each form of its convolutions, wait for a word, and time them."""
    steps = steps_of_convolutions(rehearse)
    wait_for_go(FORMS)
    answer({"seconds": {form: [took] for form, took in times_of(steps).items()}})


def time_runs(rehearse: bool) -> None:
    """Make runs of one program, and a run alone, wait for a word, and time rounds of each.

    A round's time is divided by the runs; an evaluation is among 40 rounds.
    """
    experiment = prepare(run_config(**settings_of("mlp-pmtl", rehearse)), check_memory=False)
    simulation, hparams = experiment.simulation, experiment.hparams
    number, rounds = (2, 1) if rehearse else (RATES, 40)
    rates = map(float, np.geomspace(0.01, 0.1, number))
    settings = [hparams.replace(learning_rate=rate) for rate in rates]
    many = SimulationBatch(simulation, settings, jax.devices()[:1])
    states: dict[str, Any] = {}

    def of_many() -> None:
        state = states.get("many") or many.init(0)
        states["many"], _ = many.run(state, rounds)

    def alone() -> None:
        state = states.get("alone") or simulation.init(0, hparams)
        states["alone"], _ = simulation.run(state, hparams, rounds)

    forms = {f"{number} runs, each": of_many, "a run alone": alone}
    for form in forms.values():
        form()
    wait_for_go(RUNS)
    took = alternate(forms, repeats=5)
    runs = dict(zip(forms, (number, 1), strict=True))
    answer({"seconds": {form: [t / (runs[form] * rounds) for t in all_]
                        for form, all_ in took.items()}})  # fmt: skip


def laws_of_systems(systems: Sequence[str], rehearse: bool) -> None:
    """Compare five rounds of each system with a CPU's, and with themselves."""
    for place, name in enumerate(systems):
        try:
            law = _law_of_a_system(name, rehearse)
        except Exception as error:  # the other systems go on
            law = {"failed": " ".join(str(error).split())[:200]}
        answer(({"last": True} if place == len(systems) - 1 else {}) | {f"law {name}": law})


def _law_of_a_system(name: str, rehearse: bool) -> Record:
    card, cpu = jax.devices()[0], jax.local_devices(backend="cpu")[0]
    settings = settings_of(name, True, seed=3) | ({} if rehearse else {"clients": 40})
    ends = [_after(settings, device) for device in (card, card, cpu)]
    pairs = list(zip(*map(jax.tree.leaves, ends), strict=True))
    same = all(np.array_equal(a, b, equal_nan=True) for a, b, _ in pairs)
    return {"same bits": same, "off by": max(_off(a, b) for a, _, b in pairs)}


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
    record, rows, ratios, others = read_json(path), [], [], []
    for name, found in record.items():
        if "seconds" not in found:
            continue
        medians = {form: spread(took).median for form, took in found["seconds"].items()}
        if "engine" not in medians or len(medians) == 1:
            words = [f"{name}: {_line(found)}", _memory(found), _peaks(found)]
            others.append(", ".join(filter(None, words)))
            continue
        hand = min(took for form, took in medians.items() if form != "engine")
        ratios.append(hand / medians["engine"])
        kinds = ("engine", "by hand, vmap", "by hand, map")
        by_kind = [[t for form, t in medians.items() if form.startswith(kind)] for kind in kinds]
        cells = [f"{1e3 * took[0]:.3g}" if took else "–" for took in by_kind]
        rows.append([name, *cells, f"{ratios[-1]:.2f}", str(found["chunk_size"]), _memory(found)])
    head = ["round", "ms", "by hand, vmap", "by hand, map", "faster by", "chunk", "plan / all"]
    print_rows(head, rows)
    if ratios:
        print(f"least ratio {min(ratios):.2f}, median {np.median(ratios):.2f}")
    reports = {name: found for name, found in record.items() if name.startswith("peer ")}
    print_peers(reports)
    others += [
        f"{name}: failed: {found['failed']}" for name, found in record.items()
        if "failed" in found and not name.startswith("law")
    ]  # fmt: skip
    print(*others, sep="\n")
    laws = {name: found for name, found in record.items() if name.startswith("law ")}
    broken = [
        f"{name}: {found}" for name, found in laws.items()
        if "failed" in found or not found.get("same bits", True)
        or not found.get("off by", 0) < (OF_BFLOAT16 if "bfloat16" in name else TOLERANCE)
        or not found.get("integers equal", True)
    ]  # fmt: skip
    unchecked = [name for name in record if name.startswith("law,")]
    print(*(f"{name} did not end: {record[name]['failed']}" for name in unchecked), sep="\n")
    print(f"{len(laws) - len(broken)} of {len(laws)} laws hold", *broken, sep="\n")


def _memory(found: Record) -> str:
    """Return the bytes of the plan and those that a device had at most, if they were measured."""
    if "planned_bytes" not in found:
        return ""
    plan, peak = found["planned_bytes"], found["peak_bytes_of_all_forms"] or 0
    return f"{plan / 1e6:.0f} / {peak / 1e6:.0f} MB"


def _peaks(found: Record) -> str:
    """Return the peak so far after each stage of a process, if its device tells it."""
    peaks = {stage: each["peak"] for stage, each in found.get("memory", {}).items()}
    if None in peaks.values() or not peaks:
        return ""
    return "peak after " + ", ".join(f"{stage} {peak / 1e6:.0f}" for stage, peak in peaks.items())


def print_peers(reports: Mapping[str, Record]) -> None:
    """Print milliseconds a round of each library, and how many times faster the engine is."""
    rates = {
        name: found["rounds_per_s"] for name, found in reports.items() if "failed" not in found
    }

    def cells(peer: str) -> list[str]:
        found = []
        for workload in OF_PEERS:
            rate, ours = (rates.get(f"peer {each}, {workload}") for each in (peer, "ours"))
            found.append("–" if rate is None else f"{1e3 / rate:.3g}")
            found.append("–" if rate is None or ours is None else f"{ours / rate:.1f}")
        return found

    if reports:
        head = [part for workload in OF_PEERS for part in (f"{workload}, ms", "ours is faster by")]
        print_rows(["round of", *head], [[peer, *cells(peer)] for peer in PEERS])


def main(
    workloads: tuple[str, ...] = tuple(WHAT),
    systems: tuple[str, ...] = LAW_ABIDING,
    minutes: float = 5.0,
    rehearse: bool = False,
    markdown: bool = False,
    child: str = "",
    out: Path = Path("runs/card"),
) -> int:
    """Measure rounds and check laws on a card.

    Args:
      workloads: some names of `accelerator.WHAT`.
      systems: some names of `accelerator.OF_SYSTEMS` or workloads, of which laws are checked.
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
            measure(request["workload"], request["rehearse"], request.get("alone", False))
        elif "forms" in request:
            time_forms(request["rehearse"])
        elif "runs" in request:
            time_runs(request["rehearse"])
        elif request["laws"] is None:
            laws_of_sums()
        else:
            laws_of_systems(request["laws"], request["rehearse"])
        return 0
    # `timeout` sends SIGTERM, and a shell's background process ignores SIGINT unless it is set.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    # Several processes share the card.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    code = 0 if markdown else run(workloads, systems, minutes, rehearse, out)
    if code == 0:
        print_table(out / "card.json")
    return code


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
