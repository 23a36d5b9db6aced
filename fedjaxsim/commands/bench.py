"""The command `fedjaxsim bench`: runs measured in processes of their own, as table and file."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedjaxsim.bench.children import in_child
from fedjaxsim.bench.results import Results, print_comparison, print_results
from fedjaxsim.cli.refusals import one_line
from fedjaxsim.cli.start import INTERRUPTED, Machines
from fedjaxsim.report.files import make_directory
from fedjaxsim.report.progress import COUNT, Bar, number
from fedjaxsim.runs.settings import flag

if TYPE_CHECKING:
    from fedjaxsim.cli.bench import Bench

RESULTS = "bench.json"


def prepare_bench(command: "Bench") -> Callable[[], int]:
    """Read earlier results; the returned function measures and returns the exit code.

    Raises:
      FileNotFoundError: if there are no such results.
      ValueError: if a file holds none, or results are in the way.
    """
    earlier = None if command.compare is None else Results.read(command.compare)

    def show(results: Results) -> None:
        if results.processes:
            print_results(results)
        if earlier is not None:
            print_comparison(results, earlier, str(command.compare))

    if not command.runs:
        path, *others = command.files
        if others:
            raise ValueError("results are shown alone: give one bench.json, or files of settings")
        if given := command.settings.given():
            raise ValueError(f"{flag(next(iter(given)))} has no effect where results are shown")
        results = Results.read(path)
        return lambda: show(results) or 0
    out = command.settings.out
    if out is not None:
        make_directory(out, [RESULTS], "benchmark", overwrite=command.settings.overwrite)

    def work() -> int:
        results, failures = Results(), {}
        try:
            _measure(command, results, failures)
        except KeyboardInterrupt:
            show(results)
            kept = "" if out is None else f"; {out / RESULTS} has what was measured"
            print(f"stopped by Ctrl-C{kept}", file=sys.stderr)
            return INTERRUPTED
        show(results)
        if out is not None and results.processes:
            print(f"files in {out}")
        for name, error in failures.items():
            print(f"fedjaxsim: error: {name}: {one_line(error)}", file=sys.stderr)
        refused = any(isinstance(error, ValueError) for error in failures.values())
        return 2 if refused else int(bool(failures))

    return work


def _measure(command: "Bench", results: Results, failures: dict[str, Exception]) -> None:
    """Measure every run once before any run twice, and write the file after each process."""
    plan = [name for _ in range(command.repeats) for name in command.runs]
    devices, out = Machines(devices=command.devices).wanted, command.settings.out
    with Bar("bench", len(plan), before=(COUNT,), quiet=command.settings.quiet) as bar:
        for done, name in enumerate(plan):
            bar.show(completed=done, words=name)
            if name in failures:
                continue
            settings = command.runs[name].settings()
            try:
                found = in_child(settings, devices)
            except (ValueError, ChildProcessError) as error:
                failures[name] = error
                continue
            # A file of data may lie elsewhere tomorrow.
            kind, colon, path = settings["data"].partition(":")
            results.settings[name] = settings | {"data": f"{kind}{colon}{Path(path).name}"}
            results.machine = found.pop("machine")
            results.processes.setdefault(name, []).append(found)
            if out is not None:
                results.write(out / RESULTS)
            words = f"{name}  {number(found['rounds_per_second'])} rounds/s"
            bar.show(f"{done + 1}/{len(plan)}  {words}", completed=done + 1, words=words)
