"""`fedjaxsim bench`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fedjaxsim import checks
from fedjaxsim.cli.flags import UNEVALUATED, without
from fedjaxsim.cli.machines import Machines
from fedjaxsim.runs.settings import RunConfig

_MEDIANS = {
    "compile_seconds": "compile s", "evaluation_seconds": "evaluation s", "rounds_mb": "MB",
}  # fmt: skip


@without(*(name for name in UNEVALUATED if name != "eval_every"))
def bench(
    files: tuple[Path, ...] = (),
    *,
    settings: tuple[RunConfig, ...],
    repeats: int = 5,
    devices: str = "all",
    json: bool = False,
    quiet: bool = False,
) -> Callable[[], int]:
    """Measure the speed and memory of runs.

    Args:
      files: TOML files, each with the settings of a run; flags win over them. Without a file the
        flags describe the run.
      settings: The settings of each run.
      repeats: Measurements of each run.
      devices: Devices that share the clients, all or a number; of a CPU, its cores.
      json: Print JSON, with all numbers and the machine, instead of a table.
      quiet: Print the result and errors only.
    """
    checks.count(repeats=repeats)
    names = _names(files, settings)
    machines = Machines(devices=devices)
    machines.start()
    from fedjaxsim.bench.measure import Spread, machine, measure
    from fedjaxsim.engine.devices import require
    from fedjaxsim.report.files import print_json
    from fedjaxsim.report.progress import doing, number, print_rows
    from fedjaxsim.runs.build import prepare

    require(machines.count)
    experiments = [prepare(each) for each in settings]

    def work() -> int:
        found = {}
        for name, experiment in zip(names, experiments, strict=True):
            with doing(f"measuring {name}", quiet=quiet):
                found[name] = measure(experiment, repeats)
        if json:
            runs = {
                name: {"settings": each.config.settings(), **found[name]}
                for name, each in zip(names, experiments, strict=True)
            }
            print_json({"machine": machine(), "runs": runs})
            return 0
        rows = []
        for name, each in found.items():
            speed = Spread(each["rounds_per_second"], *each["rounds_per_second_range"])
            rows.append([name, str(speed), *(number(each[of]) for of in _MEDIANS)])
        print_rows(["run", "rounds/s", *_MEDIANS.values()], rows, no_wrap=True)
        return 0

    return work


def _names(files: Sequence[Path], settings: Sequence[RunConfig]) -> list[str]:
    """Name runs by their files or, without a file, by their parts."""
    if not files:
        parts = settings[0].algorithm, settings[0].model, settings[0].data.partition(":")[0]
        return ["-".join(parts).replace(":", ".")]
    names = [file.stem for file in files]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two files of settings are called {name}")
    return names
