"""`fedjaxsim ls`: the runs, sweeps and tunings in folders."""

from pathlib import Path

from fedjaxsim.cli.flags import Json, Work

_HEADINGS = ("path", "kind", "algorithm", "data", "rounds", "metric", "ε", "tags")


def ls(folders: tuple[Path, ...] = (), *, tag: str | None = None, json: Json = False) -> Work:
    """List the runs, sweeps and tunings in folders.

    Args:
      folders: Folders, by default runs.
      tag: List only runs with this tag.
    """
    from fedjaxsim.cli.messages import say
    from fedjaxsim.cli.printing import print_json, print_rows
    from fedjaxsim.privacy.entries import epsilon_text
    from fedjaxsim.report.progress import decimals
    from fedjaxsim.runs.listing import KEYS, results_in

    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"no directory {folder}")
    roots = folders or (Path("runs") if Path("runs").is_dir() else Path(),)
    rows = [row for root in roots for row in results_in(root)]
    if tag is not None:
        rows = [row for row in rows if tag in row.get("tags", ())]

    def work() -> None:
        if json:
            print_json([dict.fromkeys(KEYS) | row for row in rows])
            return
        lines = []
        for row in rows:
            name = row.get("name")
            value = row.get("metric")
            epsilon = epsilon_text(row["epsilon"]) if "epsilon" in row else ""
            lines.append([
                f"{row['path']} ({name})" if name else row["path"], row["kind"],
                row.get("algorithm", ""), row.get("data", ""), row["rounds"],
                f"{row['metric_name']} {decimals(value)}" if value is not None else "",
                epsilon, ", ".join(row.get("tags", ())),
            ])  # fmt: skip
        print_rows(_HEADINGS, lines, left=4)
        for problem in filter(None, (row.get("problem") for row in rows)):
            say(f"warning: {problem}")

    return work
