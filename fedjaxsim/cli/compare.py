"""`fedjaxsim compare`: finished runs side by side."""

import base64
import contextlib
import html
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedjaxsim.cli.flags import Work

if TYPE_CHECKING:
    from fedjaxsim.runs.directory import RunDirectory

PAGE = ".html"


def compare(runs: tuple[Path, ...], *, out: Path | None = None, json: bool = False) -> Work:
    """Compare finished runs, and settings over their seeds, in tables and in a figure.

    Args:
      runs: Directories of the runs.
      out: Figure of the runs (.png, .pdf or .svg), or a page (.html) with it, the tables, and the
        guarantees and settings in full.
      json: Print JSON instead of a table.
    """
    from fedjaxsim import store
    from fedjaxsim.metrics import column_label
    from fedjaxsim.report.files import print_json
    from fedjaxsim.report.labels import data_label
    from fedjaxsim.report.progress import doing, print_rows
    from fedjaxsim.report.results import (
        cells,
        compared,
        headings,
        metrics_of,
        name_subset,
        print_table,
        systems,
    )
    from fedjaxsim.runs.directory import drawn_twice, named, runs_of

    if not runs:
        raise ValueError("compare needs at least one run directory, got none")
    if out is not None:
        from fedjaxsim.report.plots import FORMATS, check_path

        check_path(out, (*FORMATS, PAGE))
    with doing("reading the runs", quiet=json):
        directories = named(runs)
        finished = runs_of(directories)
        metrics = metrics_of(finished)
        rows = [{"run": run.name, **run.summary} for run in finished]
        guarantees = {name: each.guarantee() for name, each in directories.items()}
        assumed = {name: each["assumed"] for name, each in guarantees.items()}
        said: dict[str, list[str]] = {}
        for name, each in directories.items():
            # Reports of clients alone need no accountants here.
            all_of = each.report().guarantees if "example" in guarantees[name] else ()
            of_examples = [str(one) for one in all_of if one.unit == "example"]
            for sentence in (*of_examples, *assumed[name]):
                said.setdefault(sentence, []).append(name)
        found, twice = systems(finished), drawn_twice(directories)
        means = compared(found) if len(found) < len(finished) else []
        figure = None
        if out is not None:
            from fedjaxsim.report.figures import comparison_figure

            figure = comparison_figure(found)

    def print_all() -> None:
        data = {data_label(row.get("data", ""), row.get("clients")) for row in rows}
        print_table(rows, data.pop() if len(data) == 1 else None, metrics)
        for sentence, names in said.items():
            print(f"{sentence}{name_subset(names, rows)}")
        if means:
            label = column_label(means[0]["metric"], metrics)
            print_rows(headings(means, label), [cells(row) for row in means])
            print("means over seeds with 95 % intervals; differences on seeds that both have")
        if twice:
            print(twice)

    def work() -> int:
        if json:
            shown = [row | {"assumed": assumed[row["run"]]} for row in rows]
            print_json({"runs": shown, "systems": means} if means else shown)
            if twice:
                print(twice, file=sys.stderr)
        else:
            print_all()
        if figure is not None and out is not None:
            from fedjaxsim.report.plots import content

            if out.suffix == PAGE:
                with contextlib.redirect_stdout(io.StringIO()) as tables:
                    print_all()
                store.write(out, _page(tables.getvalue(), content(figure), directories))
            else:
                store.write(out, content(figure, out.suffix[1:]))
        return 0

    return work


def _page(tables: str, curves: bytes, directories: "Mapping[str, RunDirectory]") -> bytes:
    """Return a page without scripts or network access."""
    texts = [tables]
    for name, run in directories.items():
        texts += [f"{name}\n\n{run.report()}", (run.path / "config.toml").read_text("utf-8")]
    return "\n".join([
        '<!DOCTYPE html>\n<meta charset="utf-8">\n<title>Runs</title>',
        "<p>For the person who ran the simulation: metrics are without noise, which no guarantee "
        "covers, and the noise follows from the seed.</p>",
        f'<img src="data:image/png;base64,{base64.b64encode(curves).decode()}" alt="Curves">',
        *(f"<pre>{html.escape(text)}</pre>" for text in texts),
    ]).encode(errors="replace")  # fmt: skip
