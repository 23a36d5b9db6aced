"""`fedjaxsim bench`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fedjaxsim.cli.machines import Machines
from fedjaxsim.runs.settings import RunConfig


def bench(
    files: tuple[Path, ...] = (),
    *,
    settings: tuple[RunConfig, ...],
    repeats: int = 5,
    devices: str = "all",
    compare: Path | None = None,
) -> Callable[[], int]:
    """Measure the speed and memory of runs against this machine's ceilings.

    Args:
      files: TOML files, each with the settings of a run; flags win over them. Without a file the
        flags describe the run. A single bench.json is shown, and nothing is measured.
      settings: The settings of each run.
      repeats: Processes that measure each run.
      devices: Devices that share the clients, all or a number; of a CPU, its cores.
      compare: Earlier results to compare with, a bench.json.

    Raises:
      FileNotFoundError, ValueError: for bad input.
    """
    machines = Machines(devices=devices)
    machines.validate()
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    from fedjaxsim.cli.benching import prepare_bench, prepare_show

    shown = [file for file in files if file.suffix == ".json"]
    if shown:
        if files[1:]:
            raise ValueError("results are shown alone: give one bench.json, or files of settings")
        return prepare_show(shown[0], compare)
    return prepare_bench(
        named(files, settings), settings[0].out, compare, repeats=repeats, devices=machines.count,
        overwrite=settings[0].overwrite, quiet=settings[0].quiet,
    )  # fmt: skip


def named(files: Sequence[Path], settings: Sequence[RunConfig]) -> dict[str, RunConfig]:
    """Return runs by the names of their files or, without a file, of their parts."""
    runs: dict[str, RunConfig] = {}
    for index, each in enumerate(settings):
        parts = each.algorithm, each.model, each.data.partition(":")[0]
        name = files[index].stem if files else "-".join(parts).replace(":", ".")
        if name in runs:
            raise ValueError(f"two files of settings are called {name}")
        runs[name] = each
    return runs
