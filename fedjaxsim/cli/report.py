"""`fedjaxsim report`."""

from collections.abc import Callable
from pathlib import Path


def report(directories: tuple[Path, ...], *, out: Path | None = None) -> Callable[[], int]:
    """Write one HTML file about a run, the final run of a tuning, or several runs side by side.

    Args:
      directories: Directory of a run or tuning, or directories of several runs.
      out: File to write, FILE.html; needed for several runs, by default report.html in DIR.
    """
    from fedjaxsim import store
    from fedjaxsim.runs.directory import PAGE
    from fedjaxsim.runs.settings_files import kind_of

    if not directories:
        raise ValueError("report needs the directory of a run or tuning, got none")
    first, *others = directories
    if out is None and others:
        raise ValueError("a report of several runs needs --out FILE.html")
    file = first / PAGE if out is None else out
    if file.suffix != ".html" or (out is not None and not file.parent.is_dir()):
        raise ValueError(f"out must be a .html file in a folder that exists, got {file}")
    kind = kind_of(first)
    for path in directories if others else ():
        if kind_of(path) != "run":
            raise ValueError(f"{path} holds a {kind_of(path)}, and only runs go side by side")
    from fedjaxsim.runs.pages import runs_page

    # What a tuning found is its final run, whose report says how it was chosen.
    page = runs_page([first / "run"] if kind == "tuning" else directories)

    def work() -> int:
        store.write(file, page)
        print(f"report in {file}")
        return 0

    return work
