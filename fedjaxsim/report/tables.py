"""Tables of finished runs."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fedjaxsim.metrics import MAJORITY, in_tables
from fedjaxsim.report.labels import data_label
from fedjaxsim.report.progress import decimals, epsilon_text, number, print_rows


class RunsTable(NamedTuple):
    """Runs side by side: headings, a line of texts for each, and notes."""

    headings: list[str]
    lines: list[list[str]]
    notes: list[str]


def among(names: Sequence[str], runs: Collection[Any]) -> str:
    """Return the names of some of the runs in brackets; "" for all of them."""
    return "" if len(names) == len(runs) else f" ({', '.join(names)})"


def print_table(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> None:
    """Print runs side by side, one line each; `rows` as for `runs_table`."""
    headings, lines, notes = runs_table(rows)
    left = 1 + ("data" in headings)
    print_rows(headings, lines, title, left=left, padding=0)  # 80 columns are enough then
    for note in notes:
        print(note)


def runs_table(rows: Sequence[Mapping[str, Any]]) -> RunsTable:
    """Make a line for each summary of a run; its entry `run` is the name.

    Where data sets differ, a column names them.
    """
    data = [data_label(row.get("data", ""), row.get("clients")) for row in rows]
    several = len(set(data)) > 1
    qualities = [(key, metric) for key, metric in in_tables() if any(key in row for row in rows)]
    lines = []
    for row, of in zip(rows, data, strict=True):
        left = any(row.get(why) for why in ("interrupted", "stopped_early", "budget_spent"))
        planned = f" of {row['rounds_planned']}" if left else ""
        lines.append(
            [
                row["run"],
                *([of] if several else []),
                *(decimals(row.get(key + end)) for key, one in qualities for end in one.in_tables),
                *(epsilon_text(row[key]) for key in ("epsilon", "epsilon_replace")),
                number(row["delta"]),
                f"{row['rounds']}{planned}",
                number(row["rounds_per_second"]),
            ]
        )
    measured = [
        end[1:] or one.title + ("\npooled" if one.pooled else "")
        for _, one in qualities
        for end in one.in_tables
    ]
    headings = [
        "run",
        *(["data"] if several else []),
        *measured,
        "ε\nzero-out",
        "ε\nreplace",
        "δ",
        "rounds",
        "rounds\nper s",
    ]
    notes = []
    meanings = {f"test_{MAJORITY}": "accuracy of always saying the most frequent label"}
    meanings["test_failed"] = "clients whose model predicts NaN, which leaves a run without a value"
    meanings |= {f"{key}_undefined": f"clients left out of {one.title}" for key, one in qualities}
    for key, words in meanings.items():
        known: dict[str, list[str]] = {}
        for row in rows:
            if row.get(key):
                known.setdefault(number(row[key]), []).append(row["run"])
        found = [f"{value}{among(runs, rows)}" for value, runs in known.items()]
        if found:
            notes.append(f"{words}: {', '.join(found)}")
    return RunsTable(headings, lines, notes)
