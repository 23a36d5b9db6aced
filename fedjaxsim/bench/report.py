"""Results as tables on the terminal."""

from collections.abc import Sequence

import rich.box
from rich.console import JustifyMethod
from rich.table import Table

from fedjaxsim.bench.results import Results
from fedjaxsim.bench.spread import Spread, differs, ratio
from fedjaxsim.bench.workload import Workload
from fedjaxsim.report.progress import number, print_whole

BOUNDS = {"gemm": "GEMM", "memory": "memory", None: "–"}
LEAST = {"memory_mb": 1.0, "compile_seconds": 0.1}
"""What is below this is not told apart from nothing in a comparison."""


def range_of(spread: Spread | None) -> str:
    """A median with its range, e.g. `2.9 (2.7–3.1)`."""
    if spread is None:
        return "–"
    return f"{number(spread.median)} ({number(spread.least)}–{number(spread.greatest)})"


def print_results(results: Results) -> None:
    """Prints one line per workload: speed, memory, compilation and the ceiling's fraction."""
    table = _table(
        "workload",
        [
            "rounds/s",
            "updates/s",
            "of ceiling",
            "bound",
            "compile s",
            "MB",
            "MB compiling",
            "evaluation",
        ],
    )
    for name in results.processes:
        updates = results.spread(name, "updates_per_second")
        memory, compiling = (
            results.spread(name, key) for key in ("memory_mb", "compiling_memory_mb")
        )
        table.add_row(
            name,
            range_of(results.spread(name, "rounds_per_second")),
            number(updates.median if updates else None),
            _percent(results.fraction(name)),
            BOUNDS[results.bound(name)],
            range_of(results.spread(name, "compile_seconds")),
            number(memory.median if memory else None),
            number(compiling.median if compiling else None),
            _percent(results.spread(name, "evaluation_share")),
        )
    print_whole(table)


def compare(new: Results, old: Results) -> list[dict[str, str]]:
    """Speed, memory and compile time of the workloads that two files share, as text by column.

    A number is called faster or slower, less or more, shorter or longer, only where every process
    of the one file lies beyond every process of the other.

    Args:
      new: what is judged.
      old: what it is compared with.
    """
    lines = []
    for name in new.processes:
        if name not in old.processes:
            continue
        line = {"workload": name}
        for key, unit, words in (
            ("rounds_per_second", "rounds/s", ("slower", "", "faster")),
            ("memory_mb", "MB", ("less", "", "more")),
            ("compile_seconds", "compile s", ("shorter", "", "longer")),
        ):
            now, then = _positive(new, name, key), _positive(old, name, key)
            if now is None or then is None:
                line |= {f"{unit} old": "–", f"{unit} new": "–", f"{unit} ratio": "–", words[2]: ""}
                continue
            times = ratio(now, then)
            line |= {
                f"{unit} old": number(then.median),
                f"{unit} new": number(now.median),
                f"{unit} ratio": range_of(times),
                words[2]: words[differs(times) + 1],
            }
        lines.append(line)
    return lines


def print_comparison(new: Results, old: Results, name: str) -> None:
    """Prints `compare` as a table, and what makes the two hard to compare.

    Args:
      new: what is judged.
      old: what it is compared with.
      name: of the old results.
    """
    lines = compare(new, old)
    if not lines:
        print(f"no workload of {name} was measured here")
        return
    headings = list(lines[0])[1:]
    table = _table("workload", [_VERDICTS.get(heading, heading) for heading in headings])
    for line in lines:
        table.add_row(*line.values())
    print_whole(table)
    print("ratios are new/old; in brackets the range over pairs of processes")
    for key in ("name", "processor", "cores", "device_kind", "devices"):
        if new.machine.get(key) != old.machine.get(key):
            was, now = old.machine.get(key), new.machine.get(key)
            print(f"not the same machine: {key} was {was!r} and is {now!r}")


_VERDICTS = {"faster": "speed is", "more": "memory is", "longer": "compiling is"}


def print_list(workloads: Sequence[Workload]) -> None:
    """Prints the names of workloads, those of a growth curve in one line."""
    table = _table("workload", ["what it is"], justify="left")
    for curve in dict.fromkeys(w.curve or w.name for w in workloads):
        members = [w for w in workloads if curve in (w.curve, w.name)]
        sizes = f": {', '.join(f'{w.size:,}' for w in members)}" if members[0].curve else ""
        table.add_row(curve, members[0].summary + sizes)
    print_whole(table)


def _positive(results: Results, workload: str, key: str) -> Spread | None:
    found = results.spread(workload, key)
    if found is None or key not in LEAST:
        return found
    return Spread(*(max(LEAST[key], value) for value in found))


def _percent(spread: Spread | None) -> str:
    return "–" if spread is None else f"{100 * spread.median:.3g} %"


def _table(first: str, headings: Sequence[str], justify: JustifyMethod = "right") -> Table:
    table = Table(box=rich.box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify=justify)
    return table
