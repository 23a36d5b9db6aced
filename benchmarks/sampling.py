"""What drawing a Poisson cohort costs, against the population and against the cohort.

    python benchmarks/sampling.py

Times a compiled draw (median and range of 30 after compilation) for cohorts of expected size q from
m clients.
"""

import statistics
import time

import jax
import jax.numpy as jnp

from fedjaxsim import Hyperparameters, poisson


def seconds(num_clients: int, cohort: int) -> list[float]:
    """Times of 30 draws."""
    p = cohort / num_clients
    sampling = poisson(p).for_clients(num_clients)
    hparams = Hyperparameters(sampling_rate=p).as_arrays()
    draw = jax.jit(sampling.draw)
    key, times = jax.random.key(0), []
    jax.block_until_ready(draw(key, jnp.int32(0), hparams))
    for t in range(1, 31):
        begin = time.perf_counter()
        jax.block_until_ready(draw(key, jnp.int32(t), hparams))
        times.append(time.perf_counter() - begin)
    return times


def main() -> None:
    """Prints a table."""
    print("| m | q | ms a draw (range) |\n|---|---|---|")
    for m, q in [(10**4, 100), (10**5, 100), (10**6, 100), (10**7, 100), (10**7, 10**4)]:
        times = [1e3 * value for value in seconds(m, q)]
        middle = statistics.median(times)
        print(f"| {m:,} | {q:,} | {middle:.2f} ({min(times):.2f} to {max(times):.2f}) |")


if __name__ == "__main__":
    main()
