"""`fedjaxsim compare`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def _of(run: str, assumed: Mapping[str, Sequence[str]]) -> list[str]:
    return [sentence for sentence, names in assumed.items() if run in names]


def compare(
    runs: tuple[Path, ...],
    *,
    out: Path | None = None,
    json: bool = False,
) -> Callable[[], int]:
    """Compare finished runs, and settings over their seeds, in tables and in a figure.

    Args:
      runs: Directories of the runs.
      out: Figure of the runs: .png, .pdf or .svg.
      json: Print JSON instead of a table.
    """
    import sys

    from fedjaxsim import metrics
    from fedjaxsim.report.files import print_json
    from fedjaxsim.report.labels import data_label
    from fedjaxsim.report.progress import print_rows
    from fedjaxsim.report.results import cells, compared, headings, systems
    from fedjaxsim.report.tables import among, print_table
    from fedjaxsim.runs.directory import drawn_twice, named, runs_of

    if not runs:
        raise ValueError("compare needs at least one run directory, got none")
    if out is not None:
        from fedjaxsim.report.plots import check_path

        check_path(out)
    directories = named(runs)
    finished = runs_of(directories)
    rows = [{"run": run.name, **run.summary} for run in finished]
    assumed: dict[str, list[str]] = {}
    promised: dict[str, list[str]] = {}
    for name, directory in directories.items():
        for sentence in directory.assumed():
            assumed.setdefault(sentence, []).append(name)
        for sentence in directory.promised_to_examples():
            promised.setdefault(sentence, []).append(name)
    found = systems(finished)
    several = len(found) < len(finished)
    twice = drawn_twice(directories)
    figure = None
    if out is not None:
        from fedjaxsim.report.figures import comparison_figure

        figure = comparison_figure(found)

    def work() -> int:
        means = compared(found) if several else []
        if json:
            shown = [row | {"assumed": _of(row["run"], assumed)} for row in rows]
            print_json({"runs": shown, "systems": means} if several else shown)
        else:
            data = {data_label(row.get("data", ""), row.get("clients")) for row in rows}
            print_table(rows, data.pop() if len(data) == 1 else None)
            for sentence, names in (promised | assumed).items():
                print(f"{sentence}{among(names, rows)}")
        if several and not json:
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
