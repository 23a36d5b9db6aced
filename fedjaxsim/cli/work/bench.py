"""The command `fedjaxsim bench`: workloads in processes of their own, into a file and figures."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedjaxsim.bench.children import in_child
from fedjaxsim.bench.report import print_comparison, print_list, print_results
from fedjaxsim.bench.results import Results
from fedjaxsim.bench.workload import Workload
from fedjaxsim.bench.workloads import select
from fedjaxsim.cli.start import INTERRUPTED
from fedjaxsim.report.files import make_directory
from fedjaxsim.report.progress import COUNT, Bar, can_draw, number

if TYPE_CHECKING:
    from fedjaxsim.cli.bench import Bench

RESULTS = "bench.json"
SYSTEMS_FIGURE, GROWTH_FIGURE = "bench.png", "growth.png"
FEMNIST = Path("femnist", "mytest.json.zip")
"""Where FEMNIST lies in the folder that FEDJAXSIM_DATA names."""
CURVE_PROCESSES = 3
"""The most processes for a point of a growth curve: the curve itself shows what is an outlier."""
_REPEATS, _CURVE_REPEATS = 5, 3


def prepare_bench(command: "Bench") -> Callable[[], int]:
    """Checks all input; what is returned measures and gives the exit code.

    Raises:
      FileNotFoundError: if there are no data or no results where the command says.
      ValueError: for an unknown workload, a number out of range, or results that are in the way or
        cannot be read.
    """
    workloads = select(command.workloads)
    if command.list:
        return lambda: print_list(workloads) or 0
    if len(command.compare) > 2:
        raise ValueError(f"compare takes one file or two, got {len(command.compare)}")
    earlier = [Results.read(path) for path in command.compare]
    if len(earlier) == 2:
        old, new = earlier
        return lambda: print_comparison(new, old, str(command.compare[0])) or 0
    if command.processes < 1:
        raise ValueError(f"processes must be at least 1, got {command.processes}")
    data = _data(command.data)
    if command.out is not None:
        pictures = (SYSTEMS_FIGURE, GROWTH_FIGURE)
        make_directory(
            command.out,
            [RESULTS],
            "benchmark",
            overwrite=command.overwrite,
            pictures=pictures,
        )

    def work() -> int:
        draws = command.out is not None and can_draw()
        results, failures, interrupted = _measure(workloads, command.processes, data, command.out)
        if results.processes:
            print_results(results)
        if earlier:
            print_comparison(results, earlier[0], str(command.compare[0]))
        if command.out is not None and results.processes:
            if draws:
                _draw(results, workloads, command.out)
            print(f"files in {command.out}")
        for name, words in failures.items():
            print(f"fedjaxsim: {name} failed: {words}", file=sys.stderr)
        if interrupted:
            kept = "" if command.out is None else "; what was measured is kept"
            print(f"stopped by Ctrl-C{kept}", file=sys.stderr)
            return INTERRUPTED
        return 1 if failures else 0

    return work


def _data(spec: str | None) -> str | None:
    """The specification of FEMNIST, or None where there is none.

    Raises:
      FileNotFoundError: if there is nothing where the specification says.
      ValueError: if it is none of a LEAF file.
    """
    if spec is None:
        folder = os.environ.get("FEDJAXSIM_DATA")
        path = None if folder is None else Path(folder) / FEMNIST
        return f"leaf:{path}" if path is not None and path.exists() else None
    kind, _, path = spec.partition(":")
    if kind != "leaf" or not path:
        raise ValueError(f"data must be leaf:PATH, got {spec!r}")
    if not Path(path).exists():
        raise FileNotFoundError(f"no data {path}")
    return spec


def _measure(
    workloads: Sequence[Workload], processes: int, data: str | None, out: Path | None
) -> tuple[Results, dict[str, str], bool]:
    """Measures, and keeps what is known after every process.

    Returns:
      The results, what failed and why, and whether the user has interrupted.
    """
    results, failures = Results({}), {}
    plan = list(_plan(workloads, processes))
    with _Watch("bench", len(plan), before=(COUNT,)) as watch:
        try:
            idle = in_child(None, None, 0)
            results.machine, results.idle_mb = idle["machine"], idle["peak_mb"]
            for done, workload in enumerate(plan):
                watch.show(completed=done, words=workload.name)
                if workload.name in failures:
                    continue
                repeats = _REPEATS if workload.curve is None else _CURVE_REPEATS
                try:
                    numbers = in_child(workload.name, data, repeats)
                except ChildProcessError as error:
                    failures[workload.name] = str(error)
                    continue
                results.add(workload.name, numbers)
                speed = f"{workload.name}  {number(numbers['rounds_per_second'])} rounds/s"
                watch.tell(speed, f"{done + 1}/{len(plan)}")
                if out is not None:
                    results.write(out / RESULTS)
            watch.show(completed=len(plan))
        except KeyboardInterrupt:
            return results, failures, True
    return results, failures, False


class _Watch(Bar):
    """A bar on a terminal, with a line above it for each process; elsewhere the lines alone."""

    def tell(self, words: str, done: str) -> None:
        if self._bar is not None:
            self._bar.console.print(words)
        else:
            print(f"{done}  {words}", flush=True)


def _plan(workloads: Sequence[Workload], processes: int) -> Iterator[Workload]:
    """All processes, the first of every workload before the second of any."""
    for index in range(processes):
        for workload in workloads:
            if workload.curve is None or index < CURVE_PROCESSES:
                yield workload


def _draw(results: Results, workloads: Sequence[Workload], out: Path) -> None:
    from fedjaxsim.bench.figure import growth_figure, systems_figure
    from fedjaxsim.report import plots

    known = [workload for workload in workloads if workload.name in results.processes]
    systems = [workload.name for workload in known if workload.curve is None]
    points = [workload for workload in known if workload.curve is not None]
    if systems:
        plots.save(systems_figure(results, systems), out / SYSTEMS_FIGURE)
    if points:
        plots.save(growth_figure(results, points), out / GROWTH_FIGURE)
