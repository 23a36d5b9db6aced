"""Results as tables on the terminal."""

from collections.abc import Sequence

from fedjaxsim.bench.results import Results, Spread
from fedjaxsim.bench.workload import Workload
from fedjaxsim.report.progress import number, print_rows

BOUNDS = {"gemm": "GEMM", "memory": "memory", None: "–"}
_COMPARED = (
    ("rounds_per_second", "rounds/s", "speed is", ("slower", "", "faster"), 0.0),
    ("memory_mb", "MB", "memory is", ("less", "", "more"), 1.0),
    ("compile_seconds", "compile s", "compiling is", ("shorter", "", "longer"), 0.1),
)
"""A number, its unit, what a verdict is on, the verdicts, and below what it counts as nothing."""


def range_of(spread: Spread | None) -> str:
    """A median with its range, e.g. `2.9 (2.7–3.1)`."""
    if spread is None:
        return "–"
    return f"{number(spread.median)} ({number(spread.least)}–{number(spread.greatest)})"


def print_results(results: Results) -> None:
    """Prints one line per workload: speed, memory, compilation and the ceiling's fraction."""
    rows = []
    for name in results.processes:
        speed, updates, compilation, memory, compiling, evaluation = (
            results.spread(name, key)
            for key in (
                "rounds_per_second", "updates_per_second", "compile_seconds", "memory_mb",
                "compiling_memory_mb", "evaluation_share",
            )
        )  # fmt: skip
        rows.append(
            [
                name,
                range_of(speed),
                _median(updates),
                _percent(results.fraction(name)),
                BOUNDS[results.bound(name)],
                range_of(compilation),
                _median(memory),
                _median(compiling),
                _percent(evaluation),
            ]
        )
    headings = [
        "workload", "rounds/s", "updates/s", "of ceiling", "bound", "compile s", "MB",
        "MB compiling", "evaluation",
    ]  # fmt: skip
    print_rows(headings, rows, no_wrap=True)


def _median(spread: Spread | None) -> str:
    return number(spread and spread.median)


def _percent(spread: Spread | None) -> str:
    return "–" if spread is None else f"{100 * spread.median:.3g} %"


def compare(new: Results, old: Results) -> list[dict[str, str]]:
    """Speed, memory and compile time of the workloads that two files share, as text by column.

    A number is called faster or slower, less or more, shorter or longer, only where every process
    of the one file lies beyond every process of the other. With five processes each, equal
    distributions come apart like this once in 126 comparisons.

    Args:
      new: what is judged.
      old: what it is compared with.
    """
    rows = []
    for name in new.processes:
        if name not in old.processes:
            continue
        row = {"workload": name}
        for key, unit, judged, verdicts, least in _COMPARED:
            now, then = (each.spread(name, key) for each in (new, old))
            texts = ("–", "–", "–", "")
            if now is not None and then is not None:
                now, then = (Spread(*(max(least, value) for value in each)) for each in (now, then))
                ratio = now.over(then)
                verdict = verdicts[1 + (ratio.least > 1) - (ratio.greatest < 1)]
                texts = (number(then.median), number(now.median), range_of(ratio), verdict)
            headings = (f"{unit} old", f"{unit} new", f"{unit} ratio", judged)
            row |= zip(headings, texts, strict=True)
        rows.append(row)
    return rows


def print_comparison(new: Results, old: Results, name: str) -> None:
    """Prints `compare` as a table, and what makes the two hard to compare.

    Args:
      new: what is judged.
      old: what it is compared with.
      name: of the old results.
    """
    rows = compare(new, old)
    if not rows:
        print(f"no workload of {name} was measured here")
        return
    print_rows(list(rows[0]), [list(row.values()) for row in rows], no_wrap=True)
    print("ratios are new/old; in brackets the range over pairs of processes")
    for key in ("name", "processor", "cores", "device_kind", "devices"):
        was, now = old.machine.get(key), new.machine.get(key)
        if was != now:
            print(f"not the same machine: {key} was {was!r} and is {now!r}")


def print_list(workloads: Sequence[Workload]) -> None:
    """Prints the names of workloads, those of a growth curve in one line."""
    rows = []
    for curve in dict.fromkeys(w.curve or w.name for w in workloads):
        members = [w for w in workloads if curve in (w.curve, w.name)]
        sizes = f": {', '.join(f'{w.size:,}' for w in members)}" if members[0].curve else ""
        rows.append([curve, members[0].summary + sizes])
    print_rows(["workload", "what it is"], rows, left=2, no_wrap=True)
