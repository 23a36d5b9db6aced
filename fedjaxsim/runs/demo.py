"""Personal models beside a global one on data that come along, private and not."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.report.files import write_json
from fedjaxsim.report.progress import (
    can_draw,
    epsilon_text,
    number,
    print_guarantee,
    print_rows,
    stop_on_interrupt,
)
from fedjaxsim.report.seeds import standard_error
from fedjaxsim.runs.build import Experiment, prepare
from fedjaxsim.runs.directory import GUARANTEE, RunDirectory
from fedjaxsim.runs.execute import execute
from fedjaxsim.runs.settings import RunConfig, run_config
from fedjaxsim.simulation import Simulation

if TYPE_CHECKING:
    from fedjaxsim.report.plots import Curve

QUALITY = "test_accuracy"
_HEADINGS = ["run", "seeds", "accuracy", "p10", "p90", "ε\nzero-out", "ε\nreplace", "δ"]
TARGET = 1.6
"""The finite ε of the private runs, at the default δ = 1/(10·100)."""

_BASE: dict[str, Any] = {
    "data": "digits",
    "clients": 100,
    "partition": "dirichlet",
    "alpha": 0.3,
    "test_fraction": 0.3,
    "rounds": 100,
    "sampling_rate": 1.0,
    "local_epochs": 1,
    "eval_every": 5,
}
_SETTINGS: dict[tuple[str, float], dict[str, Any]] = {
    ("ditto", TARGET): {"learning_rate": 0.274, "lam": 0.601, "clip": 0.25},
    ("pmtl", TARGET): {"learning_rate": 1.34, "lam": 0.0755, "clip": 0.517, "message": "offset"},
    ("fedavg", TARGET): {"learning_rate": 2.12, "clip": 0.198},
    ("ditto", math.inf): {"learning_rate": 2.26, "lam": 0.0378},
    ("pmtl", math.inf): {"learning_rate": 0.239, "lam": 3.0, "message": "offset"},
    ("fedavg", math.inf): {"learning_rate": 2.12},
}
"""As `experiments/multi_task/equal_privacy.py` chose them on validation rows, with as many tries
for each system and ε."""


def configurations(seed: int) -> dict[str, RunConfig]:
    """The runs of the demo, by name: one population, model and number of rounds for all.

    Local appears once: it releases nothing, so it is the same run at every ε.
    """
    runs = {"local": run_config(**_BASE, seed=seed, algorithm="local", learning_rate=0.425)}
    for (algorithm, epsilon), settings in _SETTINGS.items():
        runs[f"{algorithm}-eps-{epsilon:g}"] = run_config(
            **_BASE, seed=seed, algorithm=algorithm, epsilon=epsilon, **settings
        )
    return runs


def prepare_demo(
    out: Path, seeds: range, *, overwrite: bool, quiet: bool, explain: bool
) -> Callable[[], int]:
    """Checks the input of the demo; what is returned runs it and gives the exit code.

    Args:
      out: directory for the runs, `curves.png` and `table.json`.
      seeds: each system runs once with each, as NAME-SEED.
      overwrite: replace runs that the directory holds.
      quiet: no progress bars.
      explain: print all of each guarantee instead of one line.

    Raises:
      ValueError: for a bad seed or none, or if the directory holds runs or cannot be written to.
    """
    if not seeds:
        raise ValueError("seeds must be at least 1, got none")
    experiments: dict[str, dict[int, Experiment]] = {}
    simulations: dict[tuple[int, str], Simulation] = {}
    for seed in seeds:
        for name, config in configurations(seed).items():
            # Runs of one algorithm differ in hyperparameters only: one compilation serves them.
            key = seed, config.algorithm
            experiment = prepare(config, simulations.get(key))
            simulations[key] = experiment.simulation
            experiments.setdefault(name, {})[seed] = experiment
    directories = {
        (name, seed): RunDirectory.create(out / f"{name}-{seed}", overwrite=overwrite)
        for name, of_name in experiments.items()
        for seed in of_name
    }

    def work() -> int:
        done: dict[str, list[RunDirectory]] = {}
        rows, reports = [], {}
        draws = can_draw()
        with stop_on_interrupt() as stop:
            for (name, seed), directory in directories.items():
                if stop.is_set():
                    break
                ran = execute(experiments[name][seed], directory, stop, quiet=quiet)
                rows.append({"run": directory.path.name, **ran.summary})
                done.setdefault(name, []).append(directory)
                reports.setdefault(name, ran.report)
        data = f"Digits over {rows[0]['clients']} clients"
        title = f"{data} by label Dirichlet, means ± standard error"
        lines = [_line(name, found) for name, found in done.items()]
        print_rows(_HEADINGS, lines, title, padding=0)  # 80 columns are enough then
        for name, report in reports.items():
            print(name, end=" ")
            print_guarantee(report, done[name][0].path / GUARANTEE, explain=explain)
        print("Local releases nothing: its ε is 0 whatever the others spend.")
        write_json(out / "table.json", rows)
        if draws:
            _draw(out, {name: (experiments[name], found) for name, found in done.items()}, data)
        print(f"files in {out}")
        if not stop.is_set():
            return 0
        print(f"stopped by Ctrl-C after {len(rows)} of {len(directories)} runs", file=sys.stderr)
        return 130

    return work


def _draw(
    out: Path,
    done: Mapping[str, tuple[Mapping[int, Experiment], Sequence[RunDirectory]]],
    data: str,
) -> None:
    """Draw the systems over rounds, a panel for each ε."""
    from fedjaxsim.report import plots

    def curves(epsilon: float) -> "list[Curve]":
        return [
            _curve(next(iter(of_seeds.values())).config.algorithm, found)
            for of_seeds, found in done.values()
            if _is_at(of_seeds, epsilon)
        ]

    panels = {
        f"ε = {TARGET:g} (zero-out, joint DP)": curves(TARGET),
        "without noise (ε = ∞)": curves(math.inf),
    }
    figure = plots.panels_figure(panels, f"{data}; Local releases nothing in either panel")
    plots.save(figure, out / "curves.png")


def _line(name: str, directories: Sequence[RunDirectory]) -> list[str]:
    """A system at an ε: its metrics over seeds; δ and ε are those of every seed."""
    summaries = [directory.summary() for directory in directories]
    shown = [_mean([each[f"{QUALITY}{end}"] for each in summaries]) for end in ("", "_p10", "_p90")]
    first = summaries[0]
    return [
        name,
        str(len(summaries)),
        " ± ".join(f"{each:.3f}" for each in shown[0]),
        *(f"{mean:.3f}" for mean, *_ in shown[1:]),
        *(epsilon_text(first[key]) for key in ("epsilon", "epsilon_replace")),
        number(first["delta"]),
    ]


def _mean(values: Sequence[float]) -> tuple[float, ...]:
    """The mean over seeds and, of several, its standard error."""
    mean = float(np.mean(values))
    if len(values) == 1:
        return (mean,)
    return mean, standard_error(np.asarray(values))


def _curve(algorithm: str, directories: Sequence[RunDirectory]) -> "Curve":
    """A system over rounds, with its standard error, in its colour."""
    from fedjaxsim.report import plots

    records = []
    for of_round in zip(*(directory.metrics() for directory in directories), strict=False):
        mean, *error = _mean([record[QUALITY] for record in of_round])
        record = {"round": of_round[0]["round"], QUALITY: mean}
        if error:
            record |= {f"{QUALITY}_low": mean - error[0], f"{QUALITY}_high": mean + error[0]}
        records.append(record)
    return plots.curve_of(SYSTEMS[algorithm].title, records, algorithm)


def _is_at(of_seeds: Mapping[int, Experiment], epsilon: float) -> bool:
    """Whether runs belong into the panel of an ε; Local does into each."""
    config = next(iter(of_seeds.values())).config
    return config.algorithm == "local" or config.target_epsilon == epsilon
