"""The main job on data that come along: personalized against global learning, private and not."""

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path

from fedjaxsim.report import plots
from fedjaxsim.report.files import write_json
from fedjaxsim.report.progress import print_guarantee, print_table, stop_on_interrupt
from fedjaxsim.runs.build import Experiment, prepare
from fedjaxsim.runs.directory import GUARANTEE, RunDirectory
from fedjaxsim.runs.execute import execute
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.simulation import Simulation

TARGET = 1.0
"""The finite ε of the private runs, at the default δ = 1/(10·100)."""

_BASE = RunConfig(
    data="digits",
    clients=100,
    partition="dirichlet",
    alpha=0.3,
    test_fraction=0.3,
    rounds=100,
    sampling_rate=0.2,
    local_epochs=1,
    learning_rate=0.3,
    clip=0.2,
    mu=1.0,
    eval_every=5,
)
_LAM = {TARGET: 0.03, math.inf: 0.1}
"""λ of PMTL for each ε: the noisier w̃ is, the weaker the best pull towards it."""


def configurations(seed: int) -> dict[str, RunConfig]:
    """The runs of the demo, by name: one population, model, η, C and number of rounds for all.

    Local appears once: it releases nothing, so it is the same run at every ε.
    """
    runs = {"local": dataclasses.replace(_BASE, algorithm="local", seed=seed)}
    for epsilon in (TARGET, math.inf):
        for algorithm in ("pmtl", "fedavg", "fedprox"):
            runs[f"{algorithm}-eps-{epsilon:g}"] = dataclasses.replace(
                _BASE, algorithm=algorithm, epsilon=epsilon, lam=_LAM[epsilon], seed=seed
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
        rows, curves, reports = [], [], {}
        with stop_on_interrupt() as stop:
            for name, experiment in experiments.items():
                done = execute(experiment, directories[name], stop, quiet=quiet)
                rows.append({"run": name, **done.summary})
                reports[name] = done.report
                curves.append(_curve(name, experiment.config, directories[name]))
                if stop.is_set():
                    break
        data = f"Digits over {rows[0]['clients']} clients"
        print_table(rows, title=f"{data}, by label Dirichlet")
        for name, report in reports.items():
            print(name, end=" ")
            print_guarantee(report, directories[name].path / GUARANTEE, explain=explain)
        print("Local releases nothing: its ε is 0 whatever the others spend.")
        write_json(out / "table.json", rows)
        figure = plots.comparison_figure(curves, f"{data}: private (solid) and not (dashed)")
        plots.save(figure, out / "curves.png")
        print(f"files in {out}")
        if not stop.is_set():
            return 0
        print(f"stopped by Ctrl-C after {len(rows)} of {len(experiments)} runs", file=sys.stderr)
        return 130

    return work


def _curve(name: str, config: RunConfig, directory: RunDirectory) -> plots.Curve:
    """One colour per algorithm; what is not private is dashed."""
    colour = ("pmtl", "fedavg", "fedprox", "local").index(config.algorithm)
    private = config.algorithm == "local" or math.isfinite(config.target_epsilon)
    return plots.Curve(name, directory.metrics(), colour, 0 if private else 1)
