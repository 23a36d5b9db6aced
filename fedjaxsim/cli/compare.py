"""`fedjaxsim compare` and `fedjaxsim report`: finished runs side by side."""

import sys
from pathlib import Path

from fedjaxsim.cli.flags import Work


def compare(runs: tuple[Path, ...], *, out: Path | None = None, json: bool = False) -> Work:
    """Compare finished runs, and settings over their seeds, in tables and in a figure.

    Args:
      runs: Directories of the runs.
      out: Figure of the runs: .png, .pdf or .svg.
      json: Print JSON instead of a table.
    """
    from fedjaxsim import metrics
    from fedjaxsim.report.files import print_json
    from fedjaxsim.report.labels import data_label
    from fedjaxsim.report.progress import print_rows
    from fedjaxsim.report.results import among, cells, compared, headings, print_table, systems
    from fedjaxsim.runs.directory import drawn_twice, named, runs_of

    if not runs:
        raise ValueError("compare needs at least one run directory, got none")
    if out is not None:
        from fedjaxsim.report.plots import check_path

        check_path(out)
    directories = named(runs)
    finished = runs_of(directories)
    rows = [{"run": run.name, **run.summary} for run in finished]
    assumed = {name: each.assumed() for name, each in directories.items()}
    promised = {name: each.promised_to_examples() for name, each in directories.items()}
    found, twice = systems(finished), drawn_twice(directories)
    means = compared(found) if len(found) < len(finished) else []
    figure = None
    if out is not None:
        from fedjaxsim.report.figures import comparison_figure

        figure = comparison_figure(found)

    def work() -> int:
        if json:
            shown = [row | {"assumed": assumed[row["run"]]} for row in rows]
            print_json({"runs": shown, "systems": means} if means else shown)
        else:
            data = {data_label(row.get("data", ""), row.get("clients")) for row in rows}
            print_table(rows, data.pop() if len(data) == 1 else None)
            for of_runs in (promised, assumed):
                for sentence in dict.fromkeys(each for of in of_runs.values() for each in of):
                    names = [name for name, said in of_runs.items() if sentence in said]
                    print(f"{sentence}{among(names, rows)}")
        if means and not json:
            label = metrics.label(means[0]["metric"])
            print_rows(headings(means, label), [cells(row) for row in means])
            print("means over seeds with 95 % intervals; differences on seeds that both have")
        if twice:
            print(twice, file=sys.stderr if json else None)
        if figure is not None and out is not None:
            from fedjaxsim.report.plots import save

            save(figure, out)
        return 0

    return work


def report(directories: tuple[Path, ...], *, out: Path | None = None) -> Work:
    """Write one HTML file about a run, or about several runs side by side.

    Args:
      directories: Directories of runs.
      out: File to write, FILE.html; needed for several runs, by default report.html in DIR.
    """
    from fedjaxsim import store
    from fedjaxsim.runs.directory import PAGE

    if not directories:
        raise ValueError("report needs the directory of a run, got none")
    first, *others = directories
    if out is None and others:
        raise ValueError("a report of several runs needs --out FILE.html")
    file = first / PAGE if out is None else out
    if file.suffix != ".html" or (out is not None and not file.parent.is_dir()):
        raise ValueError(f"out must be a .html file in a folder that exists, got {file}")
    from fedjaxsim.runs.pages import runs_page

    page = runs_page(directories)

    def work() -> int:
        store.write(file, page)
        print(f"report in {file}")
        return 0

    return work
