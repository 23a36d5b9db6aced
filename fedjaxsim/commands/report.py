"""The page of `fedjaxsim report`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fedjaxsim import store
from fedjaxsim.runs.directory import PAGE
from fedjaxsim.runs.settings_files import kind_of


def prepare_report(paths: Sequence[Path], out: Path | None) -> Callable[[], int]:
    """Make the page of a sweep, a tuning or of runs; return a function that writes it.

    Raises:
      FileNotFoundError, ValueError: for bad input.
    """
    if not paths:
        raise ValueError("report needs the directory of a run, sweep or tuning, got none")
    if out is None and len(paths) > 1:
        raise ValueError("a report of several runs needs --out FILE.html")
    file = paths[0] / PAGE if out is None else out
    if file.suffix != ".html" or (out is not None and not file.parent.is_dir()):
        raise ValueError(f"out must be a .html file in a folder that exists, got {file}")
    kind = kind_of(paths[0])
    for path in paths if len(paths) > 1 else ():
        if kind_of(path) != "run":
            raise ValueError(f"{path} holds a {kind_of(path)}, and only runs go side by side")
    if kind == "sweep":
        from fedjaxsim.runs.sweep_report import sweep_page

        page = sweep_page(paths[0])
    elif kind == "tuning":
        from fedjaxsim.tune.page import tune_page

        page = tune_page(paths[0])
    else:
        from fedjaxsim.runs.pages import runs_page

        page = runs_page(paths)

    def work() -> int:
        store.write(file, page)
        print(f"report in {file}")
        return 0

    return work
