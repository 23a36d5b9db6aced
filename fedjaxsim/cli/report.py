"""`fedjaxsim report`."""

from collections.abc import Callable
from pathlib import Path


def report(directories: tuple[Path, ...], *, out: Path | None = None) -> Callable[[], int]:
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
