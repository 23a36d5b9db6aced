"""The engine against the same rounds written by hand in JAX.

    python benchmarks/hand_written.py [--cores 1] [--minutes 12] [--short]
    python benchmarks/hand_written.py --cores 1 --markdown    # the table of what has been measured

FedAvg with clip and noise, 20 rows a client, one epoch of batches of 10; and PMTL of 1,000 linear
models of 7,850 parameters, 50 rows, five steps. The loop by hand is what anybody writes: Poisson
cohorts, `jax.random.permutation`, `jax.vmap` of a client, clip, sum, noise, one `lax.scan` over
rounds. PMTL's cohort also runs by `scan`.

Every process alternates the forms and takes medians; the table has medians and ranges over
processes. The first call is from the data in memory to the end of the first rounds, by a process
that has imported everything. On several cores the engine also divides clients over a device per
core. Memory is what the compiled program needs besides its arguments and results. The results file
is written after each process, and the same command goes on from it.
"""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import tyro
from common import alternate, in_process, random_population, spreads, time_left

import fedjaxsim as fjs
from fedjaxsim.bench.measure import machine
from fedjaxsim.models import network
from fedjaxsim.models.model import Model
from fedjaxsim.report.files import read_json, write_json
from fedjaxsim.report.progress import number
from fedjaxsim.runs.build import Experiment

BATCH, CLASSES, STEPS = 10, 10, 5
VALUES = {"learning_rate": 0.05, "lam": 0.1, "clip": 1.0, "noise_multiplier": 1.0}
Form = tuple[Any, Callable[[int], tuple[Any, Callable[[Any], Any]]]]
"""A first carry, and a function from a number of rounds to a program and a function of a carry."""


class Row(NamedTuple):
    """A workload: m clients, of whom each takes part with probability p."""

    model: str
    clients: int
    p: float
    system: str = "fedavg"

    def __str__(self) -> str:
        cohort = "all" if self.p == 1 else f"{self.p * self.clients:g}"
        return f"{self.system} {self.model}, {cohort} of {self.clients}"


ROWS = [
    *(Row("softmax 64→10", m, p) for m, p in ((100, 0.1), (1000, 1))),
    *(Row("MLP 64-64-10", m, p) for m, p in ((1000, 0.1), (100, 1))),
    Row("softmax 784→10", 1000, 0.1, "pmtl"),
    *(Row("softmax 64→10", m, p) for m, p in ((100, 1), (1000, 0.1), (10_000, 0.1))),
    *(Row("MLP 64-64-10", m, p) for m, p in ((10_000, 0.01), (1000, 1))),
]


def parts(row: Row) -> tuple[fjs.Population, Model]:
    """Return the clients and the model of a workload."""
    features = 784 if row.system == "pmtl" else 64
    population = random_population(
        row.clients, 50 if row.system == "pmtl" else 20, features, CLASSES
    )
    make = fjs.models.linear if row.model.startswith("softmax") else fjs.models.mlp
    return population, make((features,), CLASSES)


def sampling(row: Row) -> Any:
    """Return the engine's sampling."""
    return fjs.full_participation() if row.p == 1 else fjs.poisson(row.p)


def engine(row: Row, devices: int) -> Form:
    """Return the form of the engine."""
    population, model = parts(row)
    task = fjs.tasks.softmax(model, CLASSES)
    pmtl = row.system == "pmtl"
    simulation = fjs.Simulation(
        fjs.pmtl(task, message="update") if pmtl else fjs.fedavg(task),
        population,
        sampling(row),
        fjs.Minibatches(BATCH, steps=STEPS) if pmtl else fjs.Minibatches(BATCH, epochs=1),
        devices=jax.devices()[:devices] if devices > 1 else None,
    )
    read = {name: value for name, value in VALUES.items() if name in simulation.records}
    hparams = simulation.hyperparameters(**read)
    arrays, rows = hparams.as_arrays(), simulation.placed["train"]
    several: Any = simulation.compiled.rounds
    state = simulation.init(0, hparams)

    def compiled(rounds):
        program = several.lower(state, arrays, rows, rounds=rounds).compile()
        return program, lambda state: program(state, arrays, rows)[0]

    return state, compiled


def by_hand(row: Row, over: str) -> Form:
    """Return the form by hand, over the cohort by `vmap` or by `scan`."""
    population, model = parts(row)
    fields = [jnp.asarray(population.fields[name]) for name in ("x", "y")]
    train = population.splits["train"]
    start, count = jnp.asarray(train.start), jnp.asarray(train.count)
    eta, lam, clip, z = VALUES.values()
    m, p, pmtl = row.clients, row.p, row.system == "pmtl"
    capacity = sampling(row).for_clients(m).scheme.capacity if p < 1 else m

    def loss(w, x, y):
        logits = model.apply(w, x)
        return jnp.mean(optax.losses.softmax_cross_entropy_with_integer_labels(logits, y))

    def fedavg_client(w, _, k, key, x, y):
        new = w
        order = start[k] + jax.random.permutation(key, 20)
        for step in range(2):
            rows = order[step * BATCH : (step + 1) * BATCH]
            g = jax.grad(loss)(new, x[rows], y[rows])
            new = jax.tree.map(lambda w, g: w - eta * g, new, g)
        return (), jax.tree.map(jnp.subtract, new, w)

    def pmtl_client(w_tilde, w, k, key, x, y):
        new = w
        for step in range(STEPS):
            key_ = jax.random.fold_in(key, step)
            rows = start[k] + jax.random.randint(key_, (BATCH,), 0, count[k])
            g = jax.grad(loss)(new, x[rows], y[rows])
            new = jax.tree.map(lambda w, g, t: w - eta * (g + lam * (w - t)), new, g, w_tilde)
        return new, jax.tree.map(jnp.subtract, new, w)

    def client(w, own, k, key, x, y):
        own, delta = (pmtl_client if pmtl else fedavg_client)(w, own, k, key, x, y)
        norm = jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(delta)))
        factor = jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-12))
        return own, jax.tree.map(lambda leaf: leaf * factor, delta)

    def by_vmap(own, w, ids, keys, mask, x, y):
        each = jax.vmap(client, in_axes=(None, 0, 0, 0, None, None))
        own, deltas = each(w, own, ids, keys, x, y)
        return own, jax.tree.map(lambda leaf: jnp.einsum("k,k...->...", mask, leaf), deltas)

    def by_scan(own, w, ids, keys, mask, x, y):
        def body(total, slot):
            own, k, key, present = slot

            def run(total):
                new, delta = client(w, own, k, key, x, y)
                return jax.tree.map(jnp.add, total, delta), new

            return jax.lax.cond(present, run, lambda total: (total, own), total)

        total, own = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, w), (own, ids, keys, mask))
        return own, total

    def round_(carry, t, x, y):
        store, w, key = carry
        for_cohort, for_clients, for_noise = jax.random.split(jax.random.fold_in(key, t), 3)
        ids = jnp.arange(m)
        if p < 1:
            drawn = jax.random.bits(for_cohort, (m,), jnp.uint32) < jnp.uint32(int(p * 2**32))
            ids = jnp.nonzero(drawn, size=capacity, fill_value=m)[0]
        own = jax.tree.map(lambda leaf: leaf.at[ids].get(mode="clip"), store)
        keys = jax.vmap(lambda k: jax.random.fold_in(for_clients, k))(ids)
        run = by_vmap if over == "vmap" else by_scan
        own, total = run(own, w, jnp.minimum(ids, m - 1), keys, ids < m, x, y)
        store = jax.tree.map(lambda leaf, new: leaf.at[ids].set(new, mode="drop"), store, own)
        leaves, tree = jax.tree.flatten(w)
        noise = [
            z * clip * jax.random.normal(k, leaf.shape)
            for k, leaf in zip(jax.random.split(for_noise, len(leaves)), leaves, strict=True)
        ]
        w = jax.tree.map(lambda w, s, n: w + (s + n) / (p * m), w, total, tree.unflatten(noise))
        return store, w, key

    w = model.init(jax.random.key(1))
    store = jax.tree.map(lambda leaf: jnp.zeros((m, *leaf.shape)), w) if pmtl else ()
    carry = store, w, jax.random.key(0)

    def compiled(rounds):
        def run(carry, x, y):
            body = lambda carry, t: (round_(carry, t, x, y), None)  # noqa: E731
            return jax.lax.scan(body, carry, jnp.arange(rounds))[0]

        program = jax.jit(run, donate_argnums=0).lower(carry, *fields).compile()
        return program, lambda carry: program(carry, *fields)

    return carry, compiled


def rounds_of_run(experiment: Experiment, batch_size: int | None = None) -> tuple[Any, Any]:
    """Return the rounds of a run of FedAvg, PMTL or local training by hand.

    The cohort runs by `jax.vmap`, or by `jax.lax.map` in batches of that size. Clients of unequal
    length all take the steps of the longest, and a convolution is `lax.conv`.

    Returns:
      A first carry, and a function that traces a number of rounds. It returns a function that
      compiles them and returns one from a carry to the next, which reuses the carry's buffers.
      While it traces, convolutions of other threads are `lax.conv` too.
    """
    simulation, system = experiment.simulation, experiment.config.algorithm
    population, batches, task = simulation.population, simulation.minibatches, simulation.task
    personal, hparams = system in ("pmtl", "local"), experiment.hparams.as_arrays()
    fields = {name: jnp.asarray(field) for name, field in population.fields.items()}
    train = population.splits["train"]
    start, count = jnp.asarray(train.start), jnp.asarray(train.count)
    m, slots = simulation.num_clients, simulation.sampler.scheme.capacity
    p, size = float(simulation.sampler.rate(hparams)), batches.size
    most, eta = int(train.count.max()), hparams.learning_rate

    def pulled(g, v, w, lam):
        return jax.tree.map(lambda g, v, t: g + lam * (v - t), g, v, w)

    def client(w, own, k, key, fields):
        order = jax.random.uniform(key, (most,)) + (jnp.arange(most) >= count[k])
        order = jnp.pad(jnp.argsort(order), (0, -most % size))
        first = own if personal else w
        new = first
        for step in range(batches.steps or -(-most // size)):
            place = step * size + jnp.arange(size)
            weight = (place < count[k]).astype(jnp.float32)
            rows = order[place]
            if batches.steps:
                key_, weight = jax.random.fold_in(key, step), jnp.ones(size)
                rows = jax.random.randint(key_, (size,), 0, count[k])
            batch = fjs.Batch({name: f[start[k] + rows] for name, f in fields.items()}, weight)
            g = jax.grad(task.loss)(new, batch)
            if system == "pmtl":
                g = pulled(g, new, w, hparams.lam * (jnp.sum(weight) > 0))
            new = jax.tree.map(lambda v, g: v - eta * g, new, g)
        delta = jax.tree.map(jnp.subtract, new, first)
        norm = jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(delta)))
        factor = jnp.minimum(1.0, hparams.clip / jnp.maximum(norm, 1e-12)) if shared else 0.0
        return (new if personal else ()), jax.tree.map(lambda leaf: leaf * factor, delta)

    shared = system != "local"

    def round_(carry, t, fields):
        store, w, key = carry
        for_cohort, for_clients, for_noise = jax.random.split(jax.random.fold_in(key, t), 3)
        ids = jnp.arange(m)
        if slots < m:
            ids = jnp.nonzero(jax.random.bernoulli(for_cohort, p, (m,)), size=slots, fill_value=m)
            ids = ids[0]
        own = jax.tree.map(lambda leaf: leaf.at[ids].get(mode="clip"), store)
        keys = jax.vmap(lambda k: jax.random.fold_in(for_clients, k))(ids)
        cohort = own, jnp.minimum(ids, m - 1), keys
        if batch_size is None:
            own, deltas = jax.vmap(client, (None, 0, 0, 0, None))(w, *cohort, fields)
        else:

            def one(of_client):
                own, k, key = of_client
                return client(w, own, k, key, fields)

            own, deltas = jax.lax.map(one, cohort, batch_size=batch_size)
        store = jax.tree.map(lambda leaf, new: leaf.at[ids].set(new, mode="drop"), store, own)
        if shared:
            mask = (ids < m).astype(jnp.float32)
            keys = iter(jax.random.split(for_noise, len(jax.tree.leaves(w))))
            std = hparams.clip * hparams.noise_multiplier

            def moved(w, delta):
                noise = std * jax.random.normal(next(keys), w.shape)
                return w + (jnp.einsum("k,k...->...", mask, delta) + noise) / (p * m)

            w = jax.tree.map(moved, w, deltas)
        return store, w, key

    def several(carry, fields, rounds):
        body = lambda carry, t: (round_(carry, t, fields), None)  # noqa: E731
        return jax.lax.scan(body, carry, jnp.arange(rounds))[0]

    w = task.init(jax.random.key(1))
    copies = lambda leaf: jnp.repeat(leaf[None], m, axis=0)  # noqa: E731
    carry = jax.tree.map(copies, w) if personal else (), w, jax.random.key(0)
    jitted = jax.jit(several, static_argnums=2, donate_argnums=0)

    def traced(rounds: int) -> Callable[[], Callable[[Any], Any]]:
        with mock.patch.object(network, "conv2d", direct):
            lowered = jitted.lower(carry, fields, rounds)

        def compiled() -> Callable[[Any], Any]:
            program = lowered.compile()
            return lambda carry: program(carry, fields)

        return compiled

    return carry, traced


def direct(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Compute `network.conv2d` by `lax.conv`."""
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def measure(row: Row, cores: int, seconds: float, repeats: int, turn: int) -> dict[str, Any]:
    """Return, of each form, seconds a round (median), of the first call, and MB."""
    jax.config.update("jax_num_cpu_devices", cores)
    makers: dict[str, Callable[[], Form]] = {
        "engine": lambda: engine(row, 1), "by hand": lambda: by_hand(row, "vmap"),
    }  # fmt: skip
    if cores > 1:
        makers["engine, a device per core"] = lambda: engine(row, cores)
    if row.system == "pmtl":
        makers["by hand, scan"] = lambda: by_hand(row, "scan")
    jnp.zeros(1).block_until_ready()
    carries, runs, found, rounds = {}, {}, {}, 20
    for name in list(makers)[:: 1 - 2 * (turn % 2)]:
        begin = time.perf_counter()
        carry, compiled = makers[name]()
        program, run = compiled(rounds)
        carries[name] = jax.block_until_ready(run(carry))
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        carries[name] = jax.block_until_ready(run(carries[name]))
        each = (time.perf_counter() - begin) / rounds
        mb = program.memory_analysis().temp_size_in_bytes / 1e6
        found[name] = {"first": first, "mb": mb}
        # One number of rounds for all forms: half as many compilations, and equal shares.
        runs[name] = run, max(1, min(2000, round(seconds / each / rounds)))

    def advance(name):
        run, times = runs[name]
        for _ in range(times):
            carries[name] = run(carries[name])
        return carries[name]

    forms = {name: lambda name=name: advance(name) for name in runs}
    wall = alternate(forms, repeats)
    for name in runs:
        found[name]["seconds"] = statistics.median(wall[name]) / (runs[name][1] * rounds)
        found[name]["least_seconds"] = min(wall[name]) / (runs[name][1] * rounds)
    return found


def table(results: dict[str, Any], cores: int) -> str:
    """Return the results as Markdown; ratios are taken within a process, to the faster loop."""
    head = ("", "engine, rounds/s", "by hand", "engine is faster by", "first call, s", "by hand",
            "MB", "by hand")  # fmt: skip
    rows, ratios = [head, ["---"] * len(head)], []
    for name, processes in results.items():
        ours = [form for form in processes[0] if form.startswith("engine")]
        loops = [form for form in processes[0] if form.startswith("by hand")]
        for form in ours:
            pairs = [
                (each[form], min((each[loop] for loop in loops), key=lambda loop: loop["seconds"]))
                for each in processes
            ]
            each = spreads([
                {
                    "ours": 1 / a["seconds"], "hand": 1 / b["seconds"],
                    "ratio": b["seconds"] / a["seconds"], "first": a["first"],
                    "hand first": b["first"], "mb": a["mb"], "hand mb": b["mb"],
                }
                for a, b in pairs
            ])  # fmt: skip
            median = {key: value["median"] for key, value in each.items()}
            least, most = each["ratio"]["least"], each["ratio"]["greatest"]
            ratio = f"{median['ratio']:.2f} ({least:.2f} to {most:.2f})"
            title = name + form.removeprefix("engine")
            if form == ours[-1]:
                ratios.append(median["ratio"])
            rows.append((
                title, number(median["ours"]), number(median["hand"]), ratio,
                f"{median['first']:.1f}", f"{median['hand first']:.1f}", f"{median['mb']:.1f}",
                f"{median['hand mb']:.1f}",
            ))  # fmt: skip
    lines = [f"On {cores} core{'s' * (cores > 1)}:", ""]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    if ratios:
        lines += ["", f"Least ratio {min(ratios):.2f}, median {statistics.median(ratios):.2f}."]
    return "\n".join(lines)


def main(
    cores: int | None = None,
    only: str = "",
    processes: int = 5,
    seconds: float = 0.3,
    repeats: int = 5,
    short: bool = False,
    minutes: float = float("inf"),
    markdown: bool = False,
    out: Path = Path(__file__).parent / "results" / "hand_written.json",
) -> None:
    """Compare the engine with loops written by hand.

    Args:
      cores: that the processes may use; by default all.
      only: a part of the names of workloads.
      processes: of each workload, one after the other.
      seconds: of a turn.
      repeats: of each form in a process.
      short: one process with one short turn.
      minutes: after which no further process starts.
      markdown: measure nothing.
      out: a JSON file for the results; a second call goes on from it.
    """
    cores = cores or os.cpu_count() or 1
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    record = read_json(out) if out.exists() else {}
    left = time_left(0 if markdown else minutes)
    results = record.setdefault(f"{cores} cores", {})
    processes, seconds, repeats = (1, 0.05, 1) if short else (processes, seconds, repeats)
    for turn in range(processes):
        for row in ROWS:
            done = results.get(str(row), [])
            if only in str(row) and len(done) <= turn and left():
                record["machine"] = in_process(machine)
                results[str(row)] = done
                done.append(in_process(measure, row, cores, seconds, repeats, turn))
                times = {form: f"{1e6 * each['seconds']:.0f}" for form, each in done[-1].items()}
                print(f"{row}, µs a round: {times}", flush=True)
                write_json(out, record)
    print(table(results, cores))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
