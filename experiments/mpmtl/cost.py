"""What a round of MP-MTL costs as tasks become many.

    python experiments/mpmtl/cost.py --figure FILE [--out FILE] [--tasks M M …]

Low-rank, d = 30 features, n = 30 rows, by default m = 100 to 100,000 tasks, everybody in a round,
sound noise: the median time of a round, the smallest and largest of the repetitions, and the memory
that the compiled round takes beside its arguments. m × d × d numbers would be 360 MB at 100,000.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib as mpl
import numpy as np

import fedjaxsim as fjs
from fedjaxsim.models import linear
from fedjaxsim.privacy.mechanisms.gram import gaussian_gram
from fedjaxsim.report.files import write_atomically
from fedjaxsim.report.plots import COLOURS, STYLE, line, picture
from fedjaxsim.tasks import squared

FEATURES, ROWS, REPETITIONS, WARM = 30, 30, 15, 3
MANY = (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)


def measure(clients: int) -> dict[str, Any]:
    """Seconds of rounds, and bytes of the compiled round."""
    rng = np.random.default_rng(0)
    fields = {
        "x": rng.standard_normal((clients * ROWS, FEATURES), np.float32) / np.sqrt(FEATURES),
        "y": rng.standard_normal(clients * ROWS, np.float32),
    }
    population = fjs.Population.from_flat(fields, np.full(clients, ROWS))
    task = squared(linear((FEATURES,), 1, bias=False))
    simulation = fjs.Simulation(
        fjs.mpmtl(task), population, fjs.full_participation(), fjs.Minibatches(1, steps=1),
        gaussian_gram(),
    )  # fmt: skip
    hparams = simulation.setup.check(
        simulation.hyperparameters(learning_rate=0.5, lam=1.0, clip_norm=2.0, noise_multiplier=4.0)
    )
    program, rows = simulation.program, simulation.setup.rows["train"]
    state = program.init(jax.random.key(0, impl="threefry2x32"), hparams)
    compiled = jax.jit(program.step, donate_argnums=0).lower(state, hparams, rows).compile()
    seconds = []
    for _ in range(WARM + REPETITIONS):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(compiled(state, hparams, rows))
        seconds.append(time.perf_counter() - start)
    memory = compiled.memory_analysis()
    beside = None if memory is None else int(memory.temp_size_in_bytes)
    return {"clients": clients, "seconds": seconds[WARM:], "beside": beside}


def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the measurements of each number of tasks."""
    with mpl.rc_context(STYLE):
        figure = picture(f"A round of MP-MTL: d = {FEATURES}, {ROWS} rows a task", 6, 3.2)
        axes = figure.subplots()
        many = np.array([of["clients"] for of in found])
        every = 1e3 * np.array([of["seconds"] for of in found])
        middles, ends = np.median(every, axis=1), (every.min(axis=1), every.max(axis=1))
        looks = {"color": COLOURS[0], "marker": "o", "label": "median"}
        line(axes, many, middles, ends, band_label=f"all {REPETITIONS} rounds", **looks)
        straight = middles[-1] * many / many[-1]
        axes.plot(many, straight, ":", color="black", label="in proportion to m")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("tasks m")
        axes.set_ylabel("milliseconds")
        axes.legend()
        figure.savefig(path, dpi=100)


def main() -> None:
    """Measures, prints the table and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", type=Path, required=True, help="a .png file")
    parser.add_argument("--out", type=Path, help="a .json file for what was measured")
    parser.add_argument("--tasks", type=int, nargs="+", default=MANY, metavar="M")
    options = parser.parse_args()
    found = []
    for m in options.tasks:
        found.append(measure(m))
        *_, of = found
        middle, beside = np.median(of["seconds"]), of["beside"] or 0
        print(
            f"m = {m:7,}: {1e3 * middle:9.2f} ms ({1e3 * min(of['seconds']):.2f} to "
            f"{1e3 * max(of['seconds']):.2f}), {1e6 * middle / m:6.3f} µs a task; beside its "
            f"arguments {beside / 1e6:.2f} MB, m × d × d would be "
            f"{4 * m * FEATURES**2 / 1e6:.1f} MB",
            flush=True,
        )
    if options.out:
        write_atomically(options.out, (json.dumps(found) + "\n").encode())
    draw(found, options.figure)


if __name__ == "__main__":
    main()
