"""Contents of the HTML report of a tuning, read from its files."""

from pathlib import Path

from fedjaxsim import metrics
from fedjaxsim.report.files import read_json
from fedjaxsim.report.page import reading, render
from fedjaxsim.report.progress import number
from fedjaxsim.report.symbols import key_label, remember
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.pages import Card, run_content
from fedjaxsim.runs.settings import flag
from fedjaxsim.runs.settings_files import read_toml
from fedjaxsim.tune.files import PATH_JSON, PICTURE, RUN, TUNED
from fedjaxsim.tune.watch import cells, compared_points, gain_text


def tune_page(path: Path) -> bytes:
    """Render the report of a tuning in a directory.

    Raises:
      FileNotFoundError: if a file is missing, or the final run was not made.
      ValueError: if a file is damaged.
    """
    picture = path / PICTURE  # absent where matplotlib was
    with reading(path, "tuning", (PATH_JSON, TUNED)):
        final = run_content({"final run": RunDirectory(path / RUN)})
        record = read_json(path / PATH_JSON)
        remember(read_toml(path / TUNED).records.values())
        steps = record["steps"]
        split = metrics.label(f"{record['split']}_{record['metric']}")
        title, fell = metrics.metric(record["metric"]).title, gain_text(record)
        note = f"on {record['seeds']} fresh seeds"
        of_tuning = {
            "title": f"Tuning of {final['title']}",
            "record": record,
            "tuned": ", ".join(f"{flag(name)} ({key_label(name)})" for name in steps[0]["point"]),
            "gain": f"{title} fell by {fell} {note}" if record["test"] else f"{title} was {fell}",
            "cards": [Card(f"{title} fell by", fell, note), *final["cards"]],
            "picture_of_tuning": picture.read_bytes() if picture.is_file() else None,
            "names": [*map(key_label, steps[0]["point"]), split],
            "found": compared_points(record),
            "descent": [
                [str(index), *cells(step["point"], step["values"]), number(step["runs"]),
                 "kept" if step["accepted"] else "taken back"]
                for index, step in enumerate(steps)
            ],
            "settings": (path / TUNED).read_text(encoding="utf-8"),
            "file": TUNED,
            "commands": [["fedjaxsim", "run", TUNED]],
        }  # fmt: skip
        return render("tune", **final | of_tuning)
