"""`fedjaxsim bench`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedjaxsim import checks
from fedjaxsim.cli.machines import Machines
from fedjaxsim.runs.settings import RunConfig

if TYPE_CHECKING:
    from fedjaxsim.bench.results import Results

RESULTS = "bench.json"


def bench(
    files: tuple[Path, ...] = (),
    *,
    settings: tuple[RunConfig, ...],
    repeats: int = 5,
    devices: str = "all",
) -> Callable[[], int]:
    """Measure the speed and memory of runs.

    Args:
      files: TOML files, each with the settings of a run; flags win over them. Without a file the
        flags describe the run.
      settings: The settings of each run.
      repeats: Processes that measure each run.
      devices: Devices that share the clients, all or a number; of a CPU, its cores.
    """
    machines = Machines(devices=devices)
    machines.validate()
    checks.count(repeats=repeats)
    from fedjaxsim.report.files import make_directory

    runs, out = named(files, settings), settings[0].out
    if out is not None:
        make_directory(out, [RESULTS], "benchmark", overwrite=settings[0].overwrite)
    return lambda: _measure_all(
        runs, out, repeats=repeats, devices=machines.count, quiet=settings[0].quiet
    )


def named(files: Sequence[Path], settings: Sequence[RunConfig]) -> dict[str, RunConfig]:
    """Return runs by the names of their files or, without a file, of their parts."""
    runs: dict[str, RunConfig] = {}
    for index, each in enumerate(settings):
        parts = each.algorithm, each.model, each.data.partition(":")[0]
        name = files[index].stem if files else "-".join(parts).replace(":", ".")
        if name in runs:
            raise ValueError(f"two files of settings are called {name}")
        runs[name] = each
    return runs


def _measure_all(
    runs: Mapping[str, RunConfig],
    out: Path | None,
    *,
    repeats: int,
    devices: int | None,
    quiet: bool,
) -> int:
    """Measure each run in `repeats` new processes, and show the results; return the exit code.

    Args:
      runs: settings, by name.
      out: folder of bench.json, which is written after each process; None for none.
      repeats: processes of each run.
      devices: the number of devices; None for all.
      quiet: no progress bar.
    """
    from fedjaxsim.bench.results import Results, print_results
    from fedjaxsim.cli.messages import INTERRUPTED, one_line, say
    from fedjaxsim.report.progress import COUNT, Bar, number

    results, failures = Results(), dict[str, Exception]()
    # Every run is measured once before any run twice.
    plan = [name for _ in range(repeats) for name in runs]
    try:
        with Bar("bench", len(plan), before=(COUNT,), quiet=quiet) as bar:
            for done, name in enumerate(plan, 1):
                bar.show(completed=done - 1, words=name)
                if name in failures:
                    continue
                try:
                    speed = _measure(name, runs[name], devices, results)
                except (ValueError, ChildProcessError) as error:
                    failures[name] = error
                    continue
                if out is not None:
                    results.write(out / RESULTS)
                words = f"{name}  {number(speed)} rounds/s"
                bar.show(f"{done}/{len(plan)}  {words}", completed=done, words=words)
    except KeyboardInterrupt:
        print_results(results)
        kept = "" if out is None else f"; {out / RESULTS} has what was measured"
        print(f"stopped by Ctrl-C{kept}", file=sys.stderr)
        return INTERRUPTED
    print_results(results)
    if out is not None and results.processes:
        print(f"files in {out}")
    for name, error in failures.items():
        say(f"error: {name}: {one_line(error)}")
    refused = any(isinstance(error, ValueError) for error in failures.values())
    return 2 if refused else int(bool(failures))


def _measure(name: str, config: RunConfig, devices: int | None, results: "Results") -> float:
    """Measure a run once, add it to `results`, and return its rounds per second."""
    settings = config.settings()
    from fedjaxsim.bench import results as measured

    found = measured.in_child(settings, devices)
    # The folder of a data file is no property of the run.
    kind, colon, path = settings["data"].partition(":")
    results.settings[name] = settings | {"data": f"{kind}{colon}{Path(path).name}"}
    results.machine = found.pop("machine")
    results.processes.setdefault(name, []).append(found)
    return found["rounds_per_second"]
