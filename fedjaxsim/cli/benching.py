"""The measurements of `fedjaxsim bench`, each in a new process, as table and file."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from fedjaxsim.bench.children import in_child
from fedjaxsim.bench.results import Results, print_comparison, print_results
from fedjaxsim.cli.messages import INTERRUPTED, one_line, say
from fedjaxsim.report.files import make_directory
from fedjaxsim.report.progress import COUNT, Bar, number
from fedjaxsim.runs.settings import RunConfig

RESULTS = "bench.json"


def prepare_show(path: Path, earlier: Path | None) -> Callable[[], int]:
    """Read results; return a function that prints them, and compares them with earlier ones.

    Raises:
      FileNotFoundError, ValueError: if a file holds no results.
    """
    show, results = _printer(earlier), Results.read(path)
    return lambda: show(results) or 0


def prepare_bench(
    runs: Mapping[str, RunConfig],
    out: Path | None,
    earlier: Path | None,
    *,
    repeats: int,
    devices: int | None,
    overwrite: bool,
    quiet: bool,
) -> Callable[[], int]:
    """Read earlier results; return a function that measures and gives the exit code.

    `repeats` processes measure each run, on `devices` devices (None for all).

    Raises:
      FileNotFoundError, ValueError: if `earlier` holds no results, or `out` holds some already.
    """
    show = _printer(earlier)
    if out is not None:
        make_directory(out, [RESULTS], "benchmark", overwrite=overwrite)

    def work() -> int:
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
            show(results)
            kept = "" if out is None else f"; {out / RESULTS} has what was measured"
            print(f"stopped by Ctrl-C{kept}", file=sys.stderr)
            return INTERRUPTED
        show(results)
        if out is not None and results.processes:
            print(f"files in {out}")
        for name, error in failures.items():
            say(f"error: {name}: {one_line(error)}")
        refused = any(isinstance(error, ValueError) for error in failures.values())
        return 2 if refused else int(bool(failures))

    return work


def _measure(name: str, config: RunConfig, devices: int | None, results: Results) -> float:
    """Measure a run once, add it to `results`, and return its rounds per second."""
    settings = config.settings()
    found = in_child(settings, devices)
    # The folder of a data file is no property of the run.
    kind, colon, path = settings["data"].partition(":")
    results.settings[name] = settings | {"data": f"{kind}{colon}{Path(path).name}"}
    results.machine = found.pop("machine")
    results.processes.setdefault(name, []).append(found)
    return found["rounds_per_second"]


def _printer(earlier: Path | None) -> Callable[[Results], None]:
    """Read earlier results; return a function that prints results beside them."""
    before = None if earlier is None else Results.read(earlier)

    def show(results: Results) -> None:
        if results.processes:
            print_results(results)
        if before is not None:
            print_comparison(results, before, str(earlier))

    return show
