"""`fedjaxsim report`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional


@dataclasses.dataclass(frozen=True)
class Report:
    """Write one HTML file about a run, a sweep, a tuning, or several runs side by side."""

    directories: Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="DIR")]]
    """The directory of a run, of a sweep or of a tuning, or those of several runs."""
    out: Annotated[
        Path | None,
        tyro.conf.arg(metavar="FILE.html", help_behavior_hint="(default: report.html in DIR)"),
    ] = None
    """Where to write it; needed for several runs."""

    def prepare(self) -> Callable[[], int]:
        """Reads everything; what is returned writes the file.

        Raises:
          FileNotFoundError, ValueError: for bad input.
        """
        from fedjaxsim.report.files import write_atomically
        from fedjaxsim.runs.directory import PAGE

        paths: list[Path] = list(self.directories)
        if not paths:
            raise ValueError("report needs the directory of a run, sweep or tuning, got none")
        if self.out is None and len(paths) > 1:
            raise ValueError("a report of several runs needs --out FILE.html")
        out = paths[0] / PAGE if self.out is None else self.out
        if out.suffix != ".html" or (self.out is not None and not out.parent.is_dir()):
            raise ValueError(f"out must be a .html file in a folder that exists, got {out}")
        kinds = {"sweep": "sweep.toml", "tuning": "path.json"}
        for kind, file in kinds.items():
            for path in paths if len(paths) > 1 else ():
                if (path / file).exists():
                    raise ValueError(f"{path} holds a {kind}, and only runs go side by side")
        if (paths[0] / kinds["sweep"]).exists():
            from fedjaxsim.runs.sweep_page import sweep_page

            page = sweep_page(paths[0])
        elif (paths[0] / kinds["tuning"]).exists():
            from fedjaxsim.tune.page import tune_page

            page = tune_page(paths[0])
        else:
            from fedjaxsim.runs.pages import runs_page

            page = runs_page(paths)

        def work() -> int:
            write_atomically(out, page)
            print(f"report in {out}")
            return 0

        return work
