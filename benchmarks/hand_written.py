"""The engine against the same rounds written by hand in JAX.

    python benchmarks/hand_written.py [--processes 5]

PMTL of 1,000 clients with a linear model each (d = 784, c = 10), Poisson cohorts of expected size
100, 5 local steps of batch 10, clip, sum, noise; the loops run the whole cohort by `vmap` or by
`scan`.

Every process alternates the forms and takes medians; printed are medians and ranges over processes.
Memory is what the compiled program needs besides its arguments and results.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from common import alternate, in_process, random_population, show, spreads

import fedjaxsim as fjs
from fedjaxsim.bench.measure import machine
from fedjaxsim.report.files import write_json

D, C, BATCH = 784, 10, 10
M, ROWS, STEPS, P = 1000, 50, 5, 0.1
OWN = {"learning_rate": 0.01, "lam": 0.1, "clip": 1.0, "noise_multiplier": 1.0}
Run = Callable[[Any], Any]
"""From a state or carry to the one after some rounds."""


def cross_entropy(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean loss of softmax regression."""
    logits = x @ w[0] + w[1]
    return jnp.mean(optax.losses.softmax_cross_entropy_with_integer_labels(logits, y))


def engine(population: fjs.Population, rounds: int) -> tuple[Any, Any]:
    """Return the first state and the compiled program of the rounds of a simulation."""
    algorithm = fjs.pmtl(fjs.tasks.softmax(fjs.models.linear((D,), C), C), message="update")
    simulation = fjs.Simulation(
        algorithm, population, fjs.poisson(P), fjs.Minibatches(BATCH, steps=STEPS)
    )
    hparams = simulation.hyperparameters(**OWN)
    arrays, rows = hparams.as_arrays(), simulation.placed["train"]
    several: Any = simulation.compiled.rounds
    state = simulation.init(0, hparams)
    program = several.lower(state, arrays, rows, rounds=rounds).compile()
    return state, (program, lambda state: program(state, arrays, rows)[0])


def by_hand(round_: Callable[..., Any], carry: Any, rounds: int, x: Any, y: Any) -> tuple[Any, Any]:
    """Return the carry and the compiled scan of a round over (carry, t, x, y)."""

    def run(carry, x, y):
        return jax.lax.scan(lambda c, t: (round_(c, t, x, y), None), carry, jnp.arange(rounds))[0]

    program = jax.jit(run, donate_argnums=0).lower(carry, x, y).compile()
    return carry, (program, lambda carry: program(carry, x, y))


def pmtl_round(population: fjs.Population, capacity: int, over: str) -> Callable[..., Any]:
    """Return a PMTL round written out for this model, over the cohort by `vmap` or by `scan`."""
    eta, lam, clip, z = OWN.values()
    train = population.splits["train"]
    start, count = jnp.asarray(train.start), jnp.asarray(train.count)

    def client(w, w_tilde, k, key, x, y):
        original = w
        for step in range(STEPS):
            key_ = jax.random.fold_in(key, step)
            rows = start[k] + jax.random.randint(key_, (BATCH,), 0, count[k])
            g = jax.grad(cross_entropy)(w, x[rows], y[rows])
            w = jax.tree.map(lambda w, g, t: w - eta * (g + lam * (w - t)), w, g, w_tilde)
        delta = jax.tree.map(jnp.subtract, w, original)
        norm = jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in delta))
        factor = jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-12))
        return w, jax.tree.map(lambda leaf: leaf * factor, delta)

    def by_vmap(rows, w_tilde, ids, keys, mask, x, y):
        each = jax.vmap(client, in_axes=(0, None, 0, 0, None, None))
        rows, deltas = each(rows, w_tilde, ids, keys, x, y)
        return rows, jax.tree.map(lambda leaf: jnp.einsum("k,k...->...", mask, leaf), deltas)

    def by_scan(rows, w_tilde, ids, keys, mask, x, y):
        def body(total, slot):
            w, k, key, present = slot

            def work(total):
                new, delta = client(w, w_tilde, k, key, x, y)
                return jax.tree.map(jnp.add, total, delta), new

            return jax.lax.cond(present, work, lambda total: (total, w), total)

        zero = jax.tree.map(jnp.zeros_like, w_tilde)
        total, rows = jax.lax.scan(body, zero, (rows, ids, keys, mask))
        return rows, total

    def round_(carry, t, x, y):
        store, w_tilde, key = carry
        keys = jax.random.split(jax.random.fold_in(key, t), 3)
        drawn = jax.random.bits(keys[0], (M,), jnp.uint32) < jnp.uint32(int(P * 2**32))
        ids = jnp.nonzero(drawn, size=capacity, fill_value=M)[0]
        rows = jax.tree.map(lambda leaf: leaf.at[ids].get(mode="clip"), store)
        client_keys = jax.vmap(lambda k: jax.random.fold_in(keys[1], k))(ids)
        work = by_vmap if over == "vmap" else by_scan
        rows, total = work(rows, w_tilde, jnp.minimum(ids, M - 1), client_keys, ids < M, x, y)
        store = jax.tree.map(lambda leaf, new: leaf.at[ids].set(new, mode="drop"), store, rows)
        w_tilde = tuple(
            w + (s + z * clip * jax.random.normal(k, w.shape)) / (P * M)
            for w, s, k in zip(w_tilde, total, jax.random.split(keys[2], 2), strict=True)
        )
        return store, w_tilde, key

    return round_


def forms_of(rounds: int) -> dict[str, tuple[Any, Any]]:
    """Return the carry and the program of each form."""
    population = random_population(M, ROWS, D, C, test=0.2)
    x, y = (jnp.asarray(population.fields[name]) for name in ("x", "y"))
    forms = {"engine": engine(population, rounds)}
    capacity = fjs.poisson(P).for_clients(M).scheme.capacity
    for over in ("vmap", "scan"):
        store, w_tilde = ((jnp.zeros((*m, D, C)), jnp.zeros((*m, C))) for m in ((M,), ()))
        carry = store, w_tilde, jax.random.key(0)
        forms[over] = by_hand(pmtl_round(population, capacity, over), carry, rounds, x, y)
    return forms


def measure(rounds: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return seconds a round (median), of wall clock and of all cores, and MB, of each form."""
    forms = forms_of(rounds)
    carries = {name: carry for name, (carry, _) in forms.items()}

    def advance(name: str, run: Run) -> Any:
        carries[name] = run(carries[name])
        return carries[name]

    runs = {name: lambda n=name, r=run: advance(n, r) for name, (_, (_, run)) in forms.items()}
    wall = alternate(runs, repeats)
    cores = alternate(runs, repeats, time.process_time)
    return {
        name: {
            "mb": program.memory_analysis().temp_size_in_bytes / 1e6,
            "seconds": statistics.median(wall[name]) / rounds,
            "core_seconds": statistics.median(cores[name]) / rounds,
        }
        for name, (_, (program, _)) in forms.items()
    }


def main(processes: int = 5, rounds: int = 50, repeats: int = 7, out: Path | None = None) -> None:
    """Compare the engine with loops written by hand.

    Args:
      processes: that measure, one after the other.
      rounds: of a repetition.
      repeats: of each form in a process.
      out: a JSON file for the results.
    """
    rows = [in_process(measure, rounds, repeats) for _ in range(processes)]
    forms = {name: spreads([row[name] for row in rows]) for name in rows[0]}
    ratios = spreads(
        [{k: row["scan"][k] / row["engine"][k] for k in row["engine"]} for row in rows]
    )
    for name, numbers in forms.items():
        show(name, numbers)
    show("scan over engine", ratios)
    if out is not None:
        about = {"clients": M, "features": D, "classes": C, "batch": BATCH}
        record = {"forms": forms, "scan over engine": ratios, "processes": rows}
        write_json(out, {**about, "machine": in_process(machine), **record})


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
