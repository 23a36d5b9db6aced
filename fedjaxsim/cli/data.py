"""`fedjaxsim data`."""

from pathlib import Path
from typing import Literal

from fedjaxsim.cli.flags import Json, Work
from fedjaxsim.cli.messages import in_flags, one_line
from fedjaxsim.factories import flag
from fedjaxsim.runs.settings import RunConfig


def data(
    what: Literal["show", "convert"],
    *,
    settings: RunConfig,
    out: Path | None = None,
    json: Json = False,
) -> Work:
    """Show the clients of a run with their rows and labels, or keep them in a folder.

    A converted population is split already and kept on disk; a run maps it into memory with --data
    folder:PATH, and every load compares its sizes. The flags of a source or a partition are shown
    once it is named, as by `data --data csv --help`.

    Args:
      what: Action.
      out: New folder to convert into.
    """
    changed = settings.given()
    if other := sorted(changed.keys() - settings.data_settings()):
        raise ValueError(f"{flag(other[0])} has no effect on data")
    if what == "convert" and out is None:
        raise ValueError("fedjaxsim data convert needs --out")
    if what == "show" and out is not None:
        raise ValueError(f"out is for data convert, got {out}")
    if out is not None and out.exists():
        raise ValueError(f"out must be a new folder to convert into, got {out}")
    from fedjaxsim.cli.printing import print_json
    from fedjaxsim.data.files import in_file
    from fedjaxsim.data.npz import save_folder
    from fedjaxsim.data.readers import DataSpec
    from fedjaxsim.data.tables.describe import columns_in_words, columns_of, describe, in_words
    from fedjaxsim.data.transforms import ranges_of
    from fedjaxsim.report.files import check_place
    from fedjaxsim.report.progress import doing
    from fedjaxsim.runs.assemble import population_of, source_frame

    if out is not None:
        check_place(out, "population")
    ranges, columns = ranges_of(settings.get("range", ())), None
    try:
        with doing(f"reading {settings.data}", quiet=json):
            if what == "show" and (frame := source_frame(settings)) is not None:
                arguments = settings.arguments("data")
                all_scaled = settings.get("scale", "none") != "none"
                with in_file(DataSpec(settings.data).path or None):
                    columns = columns_of(frame, arguments, ranges, all_scaled=all_scaled)
            population = population_of(settings)
        description = describe(population)
        if out is not None:
            with doing(f"writing {out}", quiet=json):
                save_folder(out, population)
    except ValueError as error:
        if columns is None or not any(column["flag"] for column in columns):
            raise
        description = {"refused": one_line(in_flags(error))}

    def work() -> None:
        if json:
            print_json({"columns": columns or [], "refused": None} | description)
            return
        if columns is not None:
            print(columns_in_words(columns))
        if "refused" in description:
            why = description["refused"]
            print(f"clients, rows and labels are shown with such flags; without: {why}")
        else:
            print(in_words(description))
        if out is not None:
            print(f"written to {out}, for --data folder:{out}")

    return work
