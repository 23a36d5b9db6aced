"""The page of `fedjaxsim report`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fedjaxsim.report.files import write_atomically
from fedjaxsim.runs.directory import PAGE

_KINDS = {"sweep": "sweep.toml", "tuning": "path.json"}


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
    held = {kind: path for path in paths for kind, name in _KINDS.items() if (path / name).exists()}
    if held and len(paths) > 1:
        kind, path = next(iter(held.items()))
        raise ValueError(f"{path} holds a {kind}, and only runs go side by side")
    if "sweep" in held:
        from fedjaxsim.runs.sweep_page import sweep_page

        page = sweep_page(paths[0])
    elif "tuning" in held:
        from fedjaxsim.tune.page import tune_page

        page = tune_page(paths[0])
    else:
        from fedjaxsim.runs.pages import runs_page

        page = runs_page(paths)

    def work() -> int:
        write_atomically(file, page)
        print(f"report in {file}")
        return 0

    return work
