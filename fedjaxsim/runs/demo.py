"""Personal models beside a global one on digits, private and not."""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjaxsim.extras import missing
from fedjaxsim.report import progress
from fedjaxsim.report.files import Record, write_json
from fedjaxsim.report.progress import epsilon_text, number
from fedjaxsim.report.seeds import standard_error
from fedjaxsim.runs.build import Experiment, prepare
from fedjaxsim.runs.directory import GUARANTEE, RunDirectory
from fedjaxsim.runs.execute import execute
from fedjaxsim.runs.settings import RunConfig, run_config
from fedjaxsim.signals import stop_on_signal, stopped
from fedjaxsim.simulation import Simulation

QUALITY = "test_accuracy"
_HEADINGS = ["run", "seeds", "accuracy", "p10", "p90", "ε\nzero-out", "ε\nreplace", "δ"]
_SPREAD = ("", "_p10", "_p90")
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
    ("pmtl", TARGET): {"learning_rate": 1.34, "lam": 0.0755, "clip": 0.517},
    ("fedavg", TARGET): {"learning_rate": 2.12, "clip": 0.198},
    ("ditto", math.inf): {"learning_rate": 2.26, "lam": 0.0378},
    ("pmtl", math.inf): {"learning_rate": 0.239, "lam": 3.0},
    ("fedavg", math.inf): {"learning_rate": 2.12},
}
"""By algorithm and ε, chosen on validation rows by `experiments/multi_task/equal_privacy.py` from
equally many points each."""


def configurations(seed: int) -> dict[str, RunConfig]:
    """Return the runs of the demo by name; Local, which releases nothing, serves every ε."""
    runs = {"local": run_config(**_BASE, seed=seed, algorithm="local", learning_rate=0.425)}
    for (algorithm, epsilon), settings in _SETTINGS.items():
        runs[f"{algorithm}-eps-{epsilon:g}"] = run_config(
            **_BASE, seed=seed, algorithm=algorithm, epsilon=epsilon, **settings
        )
    return runs


def prepare_demo(
    out: Path, seeds: range, *, overwrite: bool, quiet: bool, explain: bool
) -> Callable[[], int]:
    """Check the input of the demo; return a function that runs it and gives the exit code.

    Args:
      out: directory for the runs (NAME-SEED), `curves.png` and `table.json`.
      seeds: seeds of each system.
      overwrite: replace runs that the directory holds.
      quiet: no progress bars.
      explain: print all of each guarantee instead of one line.

    Raises:
      ValueError: for a bad seed or none, or if the directory holds runs or cannot be written to.
    """
    if not seeds:
        raise ValueError("seeds must be at least 1, got none")
    experiments: dict[tuple[str, int], Experiment] = {}
    for seed in seeds:
        # Runs of one algorithm differ in hyperparameters only: one compilation serves them.
        simulations: dict[str, Simulation] = {}
        for name, config in configurations(seed).items():
            made = prepare(config, simulations.get(config.algorithm))
            experiments[name, seed], simulations[config.algorithm] = made, made.simulation
    directories = {
        (name, seed): RunDirectory.create(out / f"{name}-{seed}", overwrite=overwrite)
        for name in configurations(seeds[0])
        for seed in seeds
    }

    def work() -> int:
        done: dict[str, list[RunDirectory]] = {}
        rows, reports, curves = [], {}, []
        why = missing("plots") or missing("tables")
        if why is not None:
            print(f"fedjaxsim: warning: no picture will be drawn: {why}", file=sys.stderr)
        with stop_on_signal() as stop:
            for (name, seed), directory in directories.items():
                if stop.is_set():
                    break
                experiment = experiments[name, seed]
                ran = execute(experiment, directory, stop, quiet=quiet)
                rows.append({"run": directory.path.name, **ran.summary})
                done.setdefault(name, []).append(directory)
                reports.setdefault(name, ran.report)
                curves += _evaluations(experiment.config, directory)
        data = f"Digits over {rows[0]['clients']} clients"
        title = f"{data} by label Dirichlet, means ± standard error"
        lines = [_line(name, found) for name, found in done.items()]
        progress.print_rows(_HEADINGS, lines, title, padding=0)  # 80 columns are enough then
        for name, report in reports.items():
            print(name, end=" ")
            progress.print_guarantee(report, done[name][0].path / GUARANTEE, explain=explain)
        print("Local releases nothing: its ε is 0 whatever the others spend.")
        write_json(out / "table.json", rows)
        if why is None:
            _draw(curves, f"{data}; Local releases nothing in either panel", out / "curves.png")
        print(f"files in {out}")
        if not stop.is_set():
            return 0
        name, code = stopped([stop.number])
        print(f"stopped by {name} after {len(rows)} of {len(directories)} runs", file=sys.stderr)
        return code

    return work


def _evaluations(config: RunConfig, directory: RunDirectory) -> list[Record]:
    """Return the evaluations of a run at its ε; for Local, at every ε."""
    levels = (TARGET, math.inf) if config.algorithm == "local" else (config.target_epsilon,)
    return [
        {"target_epsilon": epsilon, "algorithm": config.algorithm, **record}
        for epsilon in levels
        for record in directory.metrics()
    ]


def _draw(evaluations: Sequence[Record], title: str, path: Path) -> None:
    """Draw the systems over rounds with standard errors, a panel for each ε."""
    import pandas as pd

    from fedjaxsim.report.figures import envelope_figure
    from fedjaxsim.report.plots import save

    keys = ["target_epsilon", "algorithm", "round"]
    found = pd.DataFrame(evaluations).groupby(keys, as_index=False).agg(
        value=(QUALITY, "mean"), standard_error=(QUALITY, "sem"), epsilon=("epsilon", "max")
    )  # fmt: skip
    panels, lines = keys[:1], keys[1:2]
    figure = envelope_figure(found.assign(metric=QUALITY), panels=panels, lines=lines, title=title)
    save(figure, path)


def _line(name: str, directories: Sequence[RunDirectory]) -> list[str]:
    """Format the metrics of a system over seeds; δ and ε are equal for all seeds."""
    summaries = [directory.summary() for directory in directories]
    values = np.array([[each[f"{QUALITY}{end}"] for each in summaries] for end in _SPREAD])
    accuracy, *percentiles = (f"{mean:.3f}" for mean in values.mean(axis=1))
    if len(summaries) > 1:
        accuracy += f" ± {standard_error(values[0]):.3f}"
    first = summaries[0]
    spent = [epsilon_text(first[key]) for key in ("epsilon", "epsilon_replace")]
    return [name, str(len(summaries)), accuracy, *percentiles, *spent, number(first["delta"])]
