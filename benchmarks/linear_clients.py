"""What sending products instead of gradients gains: DP-FedAvg of a linear model, everybody in.

10,000 clients, softmax regression (d = 784, c = 10), one local step of batch 10, clip, sum, noise.
Four forms of the same round:

    products   the engine; a client sends two thin factors (`fedjaxsim.kernels.linear_steps`)
    chunks     the engine with clients' gradients, `jax.vmap` over 50 at a time
    default    the engine with clients' gradients, as its defaults lay them out
    vmap       written by hand: `jax.vmap(jax.grad)` over all clients at once, clip, sum

The engine divides clients over one device for each core; XLA divides the operations of the last
form over the cores.

    python benchmarks/linear_clients.py [--processes 3] [--rounds 2] [--repeats 7] [--out PATH]

Every process alternates the forms and takes medians; the parent reports, over the processes, the
median and the range of the seconds of a round, and of the ratio of the last form's to the first's.
Memory is what the compiled program needs besides its arguments and results.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import of_script, use_all_cores

import fedjaxsim as fjs

M, D, C, ROWS, BATCH = 10_000, 784, 10, 20, 10
ETA, CLIP, Z = 0.1, 0.5, 1.0
PRODUCTS_CHUNK, GRADIENTS_CHUNK = 40, 50


def make_population() -> fjs.Population:
    rng = np.random.default_rng(0)
    fields = {
        "x": rng.standard_normal((M * ROWS, D), dtype=np.float32),
        "y": rng.integers(0, C, M * ROWS).astype(np.int32),
    }
    return fjs.Population.from_flat(fields, [ROWS] * M)


def engine(population: fjs.Population, products: bool, size: int | None = None, chunk: Any = None):
    """A state, and a function that runs rounds on it."""
    task = fjs.tasks.softmax(fjs.models.linear((D,), C), C)
    simulation = fjs.Simulation(
        fjs.fedavg(task if products else task._replace(linear=None)),
        population,
        fjs.full_participation(),
        fjs.Minibatches(BATCH, steps=1),
        chunk_size=size,
        chunk_map=chunk,
        devices=jax.devices(),
    )
    values = {"learning_rate": ETA, "clip_norm": CLIP, "noise_multiplier": Z}
    hparams = simulation.hyperparameters(**values).as_arrays()
    rows = simulation.setup.placed["train"]
    several: Any = simulation.setup.compiled.rounds

    def compiled(rounds):
        program = several.lower(state, hparams, rows, rounds=rounds).compile()
        return program, lambda state: program(state, hparams, rows)[0]

    state = simulation.init(0, hparams)
    return state, compiled


def by_hand(population: fjs.Population):
    """The same round with all clients' gradients at once."""
    x, y = jnp.asarray(population.fields["x"]), jnp.asarray(population.fields["y"])

    def gradient(w, k, key, x, y):
        rows = k * ROWS + jax.random.randint(jax.random.fold_in(key, k), (BATCH,), 0, ROWS)

        def loss(w):
            logits = x[rows] @ w[0] + w[1]
            losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, y[rows])
            return jnp.mean(losses)

        return jax.grad(loss)(w)

    def round_(carry, t, x, y):
        w, key = carry
        keys = jax.random.split(jax.random.fold_in(key, t), 3)
        updates = jax.vmap(gradient, in_axes=(None, 0, None, None, None))(
            w, jnp.arange(M), keys[0], x, y
        )
        squares = [jnp.sum(jnp.square(g), axis=tuple(range(1, g.ndim))) for g in updates]
        norms = ETA * jnp.sqrt(squares[0] + squares[1])
        factors = jnp.minimum(1.0, CLIP / jnp.maximum(norms, 1e-12))

        def moved(w, g, key):
            total = -ETA * jnp.einsum("k,k...->...", factors, g)
            return w + (total + Z * CLIP * jax.random.normal(key, w.shape)) / M

        w = tuple(map(moved, w, updates, keys[1:]))
        return (w, key), None

    def run(carry, x, y, rounds):
        return jax.lax.scan(lambda c, t: round_(c, t, x, y), carry, jnp.arange(rounds))[0]

    def compiled(rounds):
        jitted = jax.jit(run, static_argnums=3, donate_argnums=0)
        program = jitted.lower(carry, x, y, rounds).compile()
        return program, lambda carry: program(carry, x, y)

    carry = ((jnp.zeros((D, C)), jnp.zeros(C)), jax.random.key(0))
    return carry, compiled


def one_process(rounds: int, repeats: int) -> dict[str, dict[str, float]]:
    """Seconds a round (median), of wall clock and of all cores, and MB, of each form."""
    population = make_population()
    forms: dict[str, tuple[Any, Any]] = {
        "products": engine(population, True, PRODUCTS_CHUNK, "vmap"),
        "chunks": engine(population, False, GRADIENTS_CHUNK, "vmap"),
        "default": engine(population, False),
        "vmap": by_hand(population),
    }
    results, carries, runs = {}, {}, {}
    for name, (carry, compiled) in forms.items():
        program, runs[name] = compiled(rounds)
        devices = 1 if name == "vmap" else len(jax.devices())
        results[name] = {"mb": devices * program.memory_analysis().temp_size_in_bytes / 1e6}
        carries[name] = jax.block_until_ready(runs[name](carry))
    wall, cpu = ({name: [] for name in forms} for _ in range(2))
    for _ in range(repeats):
        for name, run in runs.items():
            begin, begin_cpu = time.perf_counter(), time.process_time()
            carries[name] = jax.block_until_ready(run(carries[name]))
            wall[name].append((time.perf_counter() - begin) / rounds)
            cpu[name].append((time.process_time() - begin_cpu) / rounds)
    for name in forms:
        results[name]["seconds"] = statistics.median(wall[name])
        results[name]["core_seconds"] = statistics.median(cpu[name])
    return results


def summary(results: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians and ranges over processes."""

    def spread(values):
        return {"median": statistics.median(values), "range": [min(values), max(values)]}

    forms = {
        name: {key: spread([r[name][key] for r in results]) for key in results[0][name]}
        for name in results[0]
    }
    gains = {
        key: spread([r["vmap"][key] / r["products"][key] for r in results])
        for key in results[0]["vmap"]
    }
    return {"forms": forms, "vmap over products": gains}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        use_all_cores()
        print(json.dumps(one_process(args.rounds, args.repeats)))
        return
    results = []
    for _ in range(args.processes):
        results.append(of_script(__file__, "--rounds", args.rounds, "--repeats", args.repeats))
        for name, values in results[-1].items():
            print(
                f"{name:9s} {1e3 * values['seconds']:8.1f} ms a round, "
                f"{1e3 * values['core_seconds']:8.1f} ms of cores, {values['mb']:7.1f} MB",
                flush=True,
            )
    report = {
        "clients": M,
        "features": D,
        "classes": C,
        "batch": BATCH,
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "backend": jax.default_backend(),
        **summary(results),
        "processes": results,
    }
    gains = report["vmap over products"]
    for key, what in (("seconds", "time"), ("core_seconds", "core time"), ("mb", "memory")):
        low, high = gains[key]["range"]
        print(
            f"products take 1/{gains[key]['median']:.1f} of the {what} of vmap (1/{low:.1f} to "
            f"1/{high:.1f} over {len(results)} processes)"
        )
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
