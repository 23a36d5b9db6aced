"""Linear models of each client's own: the engine against a plain numpy loop over clients.

PMTL of softmax regression (d = 784, c = 10), everybody in, one local step of batch 10, clip, sum,
noise. The loop is what one would write in numpy, float32, matrix products by its BLAS.

    python benchmarks/own_linear.py [--clients 1000] [--processes 5] [--repeats 5]

Every process alternates the two and takes medians; the parent reports the median and the range over
processes of both, and of their ratio.
"""

import argparse
import json
import statistics
import time

import numpy as np
from common import experiment_of, of_script, use_all_cores

from fedjaxsim.bench.measure import Rounds

PIXELS, CLASSES, ROWS, BATCH = 784, 10, 16, 10


def numpy_round(hparams, rng, x, y, own, w_tilde) -> None:
    """A round of Algorithm 1 of PMTL, in place; own: (m, d, c)."""
    given = (hparams.learning_rate, hparams.lam, hparams.clip_norm)
    eta, lam, clip = (np.asarray(value, np.float32) for value in given)
    total = np.zeros_like(w_tilde)
    for k, w in enumerate(own):
        rows = k * ROWS + rng.integers(0, ROWS, BATCH)
        batch = x[rows]
        outputs = batch @ w
        outputs = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        outputs /= outputs.sum(axis=1, keepdims=True)
        outputs[np.arange(BATCH), y[rows]] -= 1
        update = -eta * (batch.T @ outputs / BATCH + lam * (w - w_tilde))
        w += update
        total += update * min(1.0, clip / np.linalg.norm(update))
    noise = clip * rng.standard_normal(total.shape, dtype=np.float32)
    w_tilde += (total + noise) / len(own)


def one_process(clients: int, repeats: int) -> dict[str, float]:
    """Seconds of a round in either form."""
    rounds = max(10, 5000 // clients)
    # A fifth of 20 rows is for testing.
    experiment = experiment_of("softmax-1k-own", clients=clients)
    run = Rounds(experiment.simulation, experiment.hparams)
    state = run.start()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((clients * ROWS, PIXELS), dtype=np.float32)
    y = rng.integers(0, CLASSES, clients * ROWS)
    own = np.zeros((clients, PIXELS, CLASSES), np.float32)
    w_tilde = np.zeros((PIXELS, CLASSES), np.float32)
    seconds = {"engine": [], "numpy": []}
    for _ in range(1 + repeats):  # the first, which compiles, is left out
        begin = time.perf_counter()
        state = run.advance(state, rounds)
        seconds["engine"].append((time.perf_counter() - begin) / rounds)
        begin = time.perf_counter()
        numpy_round(experiment.hparams, rng, x, y, own, w_tilde)
        seconds["numpy"].append(time.perf_counter() - begin)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        use_all_cores()
        print(json.dumps(one_process(args.clients, args.repeats)))
        return
    given = ("--clients", args.clients, "--repeats", args.repeats)
    results = [of_script(__file__, *given) for _ in range(args.processes)]
    for name in ("engine", "numpy"):
        values = [1e3 * result[name] for result in results]
        print(
            f"{name:6s} {statistics.median(values):7.1f} ms ({min(values):.1f}-{max(values):.1f})"
        )
    ratios = [result["numpy"] / result["engine"] for result in results]
    print(f"ratio  {statistics.median(ratios):7.2f}    ({min(ratios):.2f}-{max(ratios):.2f})")


if __name__ == "__main__":
    main()
