"""Personal models beside a global one on data that come along, private and not."""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.report import plots
from fedjaxsim.report.files import write_json
from fedjaxsim.report.progress import print_guarantee, print_table, stop_on_interrupt
from fedjaxsim.runs.build import Experiment, prepare
from fedjaxsim.runs.directory import GUARANTEE, RunDirectory
from fedjaxsim.runs.execute import execute
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.simulation import Simulation

TARGET = 1.6
"""The finite ε of the private runs, at the default δ = 1/(10·100)."""

_BASE = RunConfig(
    data="digits",
    clients=100,
    partition="dirichlet",
    alpha=0.3,
    test_fraction=0.3,
    rounds=100,
    sampling_rate=1.0,
    local_epochs=1,
    eval_every=5,
)
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
    base = dataclasses.replace(_BASE, seed=seed)
    runs = {"local": dataclasses.replace(base, algorithm="local", learning_rate=0.425)}
    for (algorithm, epsilon), settings in _SETTINGS.items():
        runs[f"{algorithm}-eps-{epsilon:g}"] = dataclasses.replace(
            base, algorithm=algorithm, epsilon=epsilon, **settings
        )
    return runs


def prepare_demo(
    out: Path, seed: int, *, overwrite: bool, quiet: bool, explain: bool
) -> Callable[[], int]:
    """Checks the input of the demo; what is returned runs it and gives the exit code.

    Args:
      out: directory for the runs, `curves.png` and `table.json`.
      seed: of all runs.
      overwrite: replace runs that the directory holds.
      quiet: no progress bars.
      explain: print all of each run's guarantee instead of one line.

    Raises:
      ValueError: for a bad seed, or if the directory holds runs or cannot be written to.
    """
    experiments: dict[str, Experiment] = {}
    simulations: dict[str, Simulation] = {}
    for name, config in configurations(seed).items():
        # Runs of one algorithm differ in hyperparameters only: one compilation serves them.
        experiments[name] = prepare(config, simulations.get(config.algorithm))
        simulations[config.algorithm] = experiments[name].simulation
    directories = {
        name: RunDirectory.create(out / name, overwrite=overwrite) for name in experiments
    }

    def work() -> int:
        rows, records, reports = [], {}, {}
        with stop_on_interrupt() as stop:
            for name, experiment in experiments.items():
                done = execute(experiment, directories[name], stop, quiet=quiet)
                rows.append({"run": name, **done.summary})
                reports[name] = done.report
                records[name] = directories[name].metrics()
                if stop.is_set():
                    break
        data = f"Digits over {rows[0]['clients']} clients"
        print_table(rows, title=f"{data}, by label Dirichlet")
        for name, report in reports.items():
            print(name, end=" ")
            print_guarantee(report, directories[name].path / GUARANTEE, explain=explain)
        print("Local releases nothing: its ε is 0 whatever the others spend.")
        write_json(out / "table.json", rows)
        panels = {
            f"ε = {TARGET:g} (zero-out, joint DP)": _curves(experiments, records, TARGET),
            "without noise (ε = ∞)": _curves(experiments, records, math.inf),
        }
        figure = plots.panels_figure(panels, f"{data}; Local releases nothing in either panel")
        plots.save(figure, out / "curves.png")
        print(f"files in {out}")
        if not stop.is_set():
            return 0
        print(f"stopped by Ctrl-C after {len(rows)} of {len(experiments)} runs", file=sys.stderr)
        return 130

    return work


def _curves(
    experiments: Mapping[str, Experiment], records: Mapping[str, plots.Records], epsilon: float
) -> list[plots.Curve]:
    """The finished runs at an ε, with Local, in the colours of the systems."""
    found = []
    for name, of_run in records.items():
        config = experiments[name].config
        if config.algorithm == "local" or config.target_epsilon == epsilon:
            title = SYSTEMS[config.algorithm].title
            found.append(plots.curve_of(title, of_run, config.algorithm))
    return found
