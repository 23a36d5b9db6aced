"""What the abstraction costs: the engine against hand-written JAX loops for the same PMTL round.

1,000 clients, a linear model (d = 784, c = 10) of one's own for each, Poisson cohorts of expected
size 100 in the same static capacity, 5 local steps of batch 10, clip, sum, noise. The loops below
know nothing of algorithms, mechanisms or ledgers; each is what one would write for this one case.

    python benchmarks/engine_overhead.py [--processes 5] [--rounds 50] [--repeats 9]

Every process alternates engine and loops and takes medians; the parent reports the median and range
over processes of the ratio of rates.
"""

import argparse
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import of_script

import fedjaxsim as fjs
from fedjaxsim.bench.measure import Rounds

M, D, C, ROWS, BATCH, STEPS, P = 1000, 784, 10, 50, 10, 5, 0.1
ETA, LAM, CLIP, Z = 0.01, 0.1, 1.0, 1.0


def make_population() -> fjs.Population:
    rng = np.random.default_rng(0)
    fields = {
        "x": rng.normal(size=(M * ROWS, D)).astype(np.float32),
        "y": rng.integers(0, C, M * ROWS).astype(np.int32),
    }
    return fjs.data.split(fjs.Population.from_flat(fields, [ROWS] * M), test=0.2)


def hand_written(population: fjs.Population, capacity: int, client_map: str):
    """A PMTL round written out for this model, over the whole cohort by `vmap` or by `scan`."""
    x, y = jnp.asarray(population.fields["x"]), jnp.asarray(population.fields["y"])
    train = population.splits["train"]
    start, count = jnp.asarray(train.start), jnp.asarray(train.count)

    def client(w, w_tilde, k, key, x, y):
        original = w
        for step in range(STEPS):
            rows = start[k] + jax.random.randint(
                jax.random.fold_in(key, step), (BATCH,), 0, count[k]
            )
            xb, yb = x[rows], y[rows]

            def loss(w, xb=xb, yb=yb):
                logits = xb @ w[0] + w[1]
                return jnp.mean(optax.losses.softmax_cross_entropy_with_integer_labels(logits, yb))

            g = jax.grad(loss)(w)
            w = jax.tree.map(lambda w, g, t: w - ETA * (g + LAM * (w - t)), w, g, w_tilde)
        delta = jax.tree.map(jnp.subtract, w, original)
        norm = jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in delta))
        factor = jnp.minimum(1.0, CLIP / jnp.maximum(norm, 1e-12))
        return w, jax.tree.map(lambda leaf: leaf * factor, delta)

    def round_(carry, t, x, y):
        store, w_tilde, key = carry
        keys = jax.random.split(jax.random.fold_in(key, t), 3)
        drawn = jax.random.bits(keys[0], (M,), jnp.uint32) < jnp.uint32(int(P * 2**32))
        ids = jnp.nonzero(drawn, size=capacity, fill_value=M)[0]
        mask = ids < M
        rows = jax.tree.map(lambda leaf: leaf.at[ids].get(mode="clip"), store)
        client_keys = jax.vmap(lambda k: jax.random.fold_in(keys[1], k))(ids)
        safe = jnp.minimum(ids, M - 1)
        if client_map == "vmap":
            rows, deltas = jax.vmap(client, in_axes=(0, None, 0, 0, None, None))(
                rows, w_tilde, safe, client_keys, x, y
            )
            total = jax.tree.map(
                lambda leaf: jnp.sum(
                    jnp.where(mask.reshape((-1,) + (1,) * (leaf.ndim - 1)), leaf, 0), 0
                ),
                deltas,
            )
        else:

            def body(total, place):
                w, k, key, present = place

                def work(total):
                    new, delta = client(w, w_tilde, k, key, x, y)
                    return jax.tree.map(jnp.add, total, delta), new

                return jax.lax.cond(present, work, lambda total: (total, w), total)

            zero = jax.tree.map(jnp.zeros_like, w_tilde)
            total, rows = jax.lax.scan(body, zero, (rows, safe, client_keys, mask))
        store = jax.tree.map(lambda leaf, new: leaf.at[ids].set(new, mode="drop"), store, rows)
        noise_keys = jax.random.split(keys[2], 2)
        w_tilde = tuple(
            w + (s + Z * CLIP * jax.random.normal(k, w.shape)) / (P * M)
            for w, s, k in zip(w_tilde, total, noise_keys, strict=True)
        )
        return (store, w_tilde, key), None

    def run(carry, x, y, rounds):
        return jax.lax.scan(lambda c, t: round_(c, t, x, y), carry, jnp.arange(rounds))[0]

    compiled = jax.jit(run, static_argnums=3, donate_argnums=0)
    carry = (
        (jnp.zeros((M, D, C)), jnp.zeros((M, C))),
        (jnp.zeros((D, C)), jnp.zeros(C)),
        jax.random.key(0),
    )
    return carry, lambda carry, rounds: compiled(carry, x, y, rounds)


def one_process(rounds: int, repeats: int) -> dict[str, float]:
    """Medians of seconds per round of each form, alternating."""
    population = make_population()
    task = fjs.tasks.softmax(fjs.models.linear((D,), C), C)
    simulation = fjs.Simulation(
        fjs.pmtl(task), population, fjs.poisson(P), fjs.Minibatches(BATCH, steps=STEPS)
    )
    hparams = simulation.hyperparameters(
        learning_rate=ETA, lam=LAM, clip_norm=CLIP, noise_multiplier=Z
    )
    engine = Rounds(simulation, hparams)
    forms: dict[str, tuple[Any, Any]] = {"engine": (engine.start(), engine.advance)}
    for client_map in ("vmap", "scan"):
        forms[client_map] = hand_written(
            population, simulation.sampling.scheme.capacity, client_map
        )
    carries = {name: jax.block_until_ready(run(c, rounds)) for name, (c, run) in forms.items()}
    seconds = {name: [] for name in forms}
    for _ in range(repeats):
        for name, (_, run) in forms.items():
            begin = time.perf_counter()
            carries[name] = jax.block_until_ready(run(carries[name], rounds))
            seconds[name].append((time.perf_counter() - begin) / rounds)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(one_process(args.rounds, args.repeats)))
        return
    results = []
    for _ in range(args.processes):
        results.append(of_script(__file__, "--rounds", args.rounds, "--repeats", args.repeats))
        r = results[-1]
        print({name: f"{1e3 * value:.2f} ms" for name, value in r.items()}, flush=True)
    ratios = [r["engine"] / min(r["vmap"], r["scan"]) for r in results]
    print(
        f"the faster hand-written loop runs {statistics.median(ratios):.3f} times as fast as the "
        f"engine (range {min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} processes)"
    )


if __name__ == "__main__":
    main()
