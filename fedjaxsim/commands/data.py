"""The actions of `fedjaxsim data`: show, convert and check a population."""

from collections.abc import Callable
from pathlib import Path

from fedjaxsim.data.describe import describe, in_words
from fedjaxsim.data.folder import check_folder, save_folder
from fedjaxsim.data.population import Population
from fedjaxsim.report.files import print_json
from fedjaxsim.report.progress import Bar
from fedjaxsim.runs.build import population_of
from fedjaxsim.runs.settings import RunConfig


def prepare_show(config: RunConfig, picture: Path | None, *, json: bool) -> Callable[[], int]:
    """Read a population; return a function that describes it, and draws it into `picture`."""
    if picture is not None:
        from fedjaxsim.report.plots import check_path

        check_path(picture)
    population = population_of(config)

    def work() -> int:
        _print_description(population, json=json)
        if picture is not None:
            from fedjaxsim.report import plots
            from fedjaxsim.report.population import population_figure

            plots.save(population_figure(population), picture)
        return 0

    return work


def prepare_convert(config: RunConfig, out: Path, *, json: bool) -> Callable[[], int]:
    """Write a population into a new folder; return a function that describes it.

    Raises:
      ValueError: if the folder exists.
    """
    if out.exists():
        raise ValueError(f"out must be a new folder to convert into, got {out}")
    population = population_of(config)
    save_folder(out, population)

    def work() -> int:
        _print_description(population, json=json)
        if not json:
            print(f"written to {out}, for --data folder:{out}")
        return 0

    return work


def prepare_check(path: str, *, json: bool) -> Callable[[], int]:
    """Compare a folder with the digests taken at writing; return a function that reports it."""
    with Bar("checking", 1, words="") as bar:
        size = check_folder(
            path,
            lambda done, size: bar.show(
                completed=done / size, words=f"{done / 1e9:.2f} of {size / 1e9:.2f} GB"
            ),
        )

    def work() -> int:
        if json:
            print_json({"bytes": size})
        else:
            print(f"{path} holds what was written: {size:,} bytes")
        return 0

    return work


def _print_description(population: Population, *, json: bool) -> None:
    found = describe(population)
    print_json(found) if json else print(in_words(found))
