"""The files of one run, written by `fedjaxsim.store` and read back with clear errors.

A run directory holds

    config.toml     the settings, resolved values (`resolved`) and `versions`
    metrics.jsonl   one strict JSON object per evaluation
    checkpoints/    the whole state after the last round, and before; see `engine/checkpoint.py`
    guarantee.json  adjacency -> view -> accountant -> ε, δ and their assumptions
    summary.json    the last metrics, speed, whether the run was interrupted; written last
    clients.csv     one line of test metrics per client
    public/         what may be handed on, if a guarantee covers it; see `runs/public.py`
    curves.png      loss, quality and ε over rounds; or .pdf, .svg
    loggers/        what trackers of experiments keep; see `loggers.py`

JSON has no infinity: null stands for "no finite number", e.g. for ε without a guarantee.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedjaxsim import store
from fedjaxsim.data.files import read_tables
from fedjaxsim.divergence import Record, failures
from fedjaxsim.factories import flag
from fedjaxsim.metrics import METRICS as PACKAGE_METRICS
from fedjaxsim.metrics import MetricRecords, metrics_from_tables
from fedjaxsim.privacy import entries
from fedjaxsim.report.files import (
    intact,
    make_directory,
    not_a_run,
    parse_json,
    read_json,
    write_tables,
)
from fedjaxsim.report.results import SPENT_OF_EXAMPLES, Run
from fedjaxsim.runs.loggers import FOLDER as LOGS
from fedjaxsim.runs.public import PUBLIC
from fedjaxsim.runs.seeds import SECRET, number_of
from fedjaxsim.runs.settings import static_keys
from fedjaxsim.runs.settings_files import CONFIG, RECORDS

if TYPE_CHECKING:
    from fedjaxsim.privacy.guarantee import Report

METRICS = "metrics.jsonl"
GUARANTEE = "guarantee.json"
SUMMARY = "summary.json"
CURVES = "curves"
CLIENTS = "clients.csv"
CHECKPOINTS = "checkpoints"
_TEXTS = ("algorithm", "data", "model", "worse_than_constant")
_SUMMARIZED = (
    "rounds", "rounds_planned", "interrupted", "epsilon", "epsilon_replace", "delta",
    "rounds_per_second",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The directory of one run.

    Methods that read raise FileNotFoundError for a missing file and ValueError for a damaged one.
    """

    path: Path

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False) -> "RunDirectory":
        """Make the directory, and with `overwrite` remove the files of the run it holds.

        Of several processes, the first does. Without `overwrite`, a run there is refused.
        """
        from fedjaxsim.engine.processes import is_first

        names = (CONFIG, METRICS, GUARANTEE, SUMMARY, CLIENTS, CHECKPOINTS, PUBLIC, LOGS)
        pictures = [f"{CURVES}.{ending}" for ending in ("png", "pdf", "svg")]
        if is_first():
            make_directory(path, names, "run", overwrite=overwrite, pictures=pictures)
        return cls(path)

    def checkpoints(self, about: Mapping[str, str] | None = None) -> Any:
        """Return the `CheckpointFolder` of states that were made with `about`."""
        from fedjaxsim.callbacks import fits
        from fedjaxsim.engine.checkpoint import CheckpointFolder

        return CheckpointFolder(self.path / CHECKPOINTS, about or {}, fits(self.path / METRICS))

    def write_config(self, tables: Mapping[str, Any]) -> None:
        """Write the resolved settings and versions; results of fewer rounds are removed."""
        for name in (SUMMARY, GUARANTEE, PUBLIC):
            store.remove(self.path / name)
        write_tables(self.path / CONFIG, tables)

    def label(self, labels: Mapping[str, Any]) -> None:
        """Give the run a name or tags, in place of those it has."""
        tables = self.config()
        known_as = tables.get("known_as", {}) | dict(labels)
        if known_as != tables.get("known_as", {}):
            write_tables(self.path / CONFIG, tables | {"known_as": known_as})

    def config(self) -> dict[str, Any]:
        """Read the resolved settings, as nested tables."""
        return read_tables(self._existing(CONFIG))

    def metrics(self) -> list[Record]:
        """Read all evaluations, in the order of rounds."""
        path = self._existing(METRICS)
        lines = store.whole_lines(path) or ["null"]
        return [_checked(parse_json(line, path), path, ("round",)) for line in lines]

    def released(self) -> int:
        """Return the last round with an evaluation on record; 0 without any."""
        from fedjaxsim.callbacks import last_round, split_lines_at_round

        return last_round(split_lines_at_round(self.path / METRICS, -1)[1])

    def guarantee(self) -> Record:
        """Read the privacy report."""
        path = self._existing(GUARANTEE)
        return check_guarantee(read_json(path), path)

    def report(self) -> "Report":
        """Read the privacy report as an object."""
        from fedjaxsim.privacy.guarantee import Report  # a comparison needs no accountants

        content = self.guarantee()
        with intact(self.path / GUARANTEE):
            return Report.from_json(content)

    def draws(self) -> tuple[entries.Drawn, ...]:
        """Read the rounds that the run drew from each key."""
        content = self.guarantee()
        with intact(self.path / GUARANTEE):
            return entries.read_draws(content["draws"])

    def summary(self) -> Record:
        """Read the summary."""
        path = self._existing(SUMMARY)
        return _checked(read_json(path), path, _SUMMARIZED)

    def is_finished(self) -> bool:
        """Return whether all files are there, and the run was not interrupted."""
        return (self.path / SUMMARY).is_file() and self.summary().get("interrupted") is False

    def _existing(self, name: str) -> Path:
        if not (self.path / name).is_file():
            raise self.missing(name)
        return self.path / name

    def missing(self, name: str) -> FileNotFoundError:
        """Return the error for a file that the directory does not hold."""
        return not_a_run(self.path, name)


def named(paths: Iterable[Path]) -> dict[str, RunDirectory]:
    """Return directories by the names of their folders, or by their paths if two names agree."""
    paths = list(paths)
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return {name: RunDirectory(path) for name, path in zip(names, paths, strict=True)}


def read_run(name: str, directory: RunDirectory) -> Run:
    """Read a run, by the name that the user gave it, or else by `name`.

    A run that was extended or interrupted has its rounds as a setting, `rounds_done`, and a stage
    those before it, `after`.
    """
    config, summary, rows = directory.config(), directory.summary(), directory.metrics()
    table = [
        {**row, "delta": summary["delta"], "failed": failed}
        for row, failed in zip(rows, failures(rows), strict=True)
    ]
    spent = ("epsilon_replace", *SPENT_OF_EXAMPLES)
    table[-1] |= {name: summary[name] for name in spent if name in summary}
    label, seed = config.get("known_as", {}).get("name", name), number_of(config.get("seed", 0))
    metrics = metrics_in(config, directory.path / CONFIG)
    rounds = summary["rounds" if summary["interrupted"] else "rounds_planned"]
    settings = settings_of_system(config)
    if rounds != config.get("rounds", rounds):
        settings["rounds_done"] = rounds
    if stages := config.get("stages"):
        before = [f"{stage['algorithm']} ({stage['rounds']} rounds)" for stage in stages]
        settings["after"] = ", then ".join(before)
    return Run(label, settings, seed, table, config, summary, metrics)


def settings_of_system(config: Record) -> Record:
    """Return the settings of a run by which systems differ: not its seed, nor its evaluations."""
    evaluates = [name for name, setting in static_keys().items() if setting.evaluates]
    without = {"seed", "public", *RECORDS, *evaluates}
    return {key: value for key, value in config.items() if key not in without}


def metrics_in(config: Record, path: Path) -> MetricRecords:
    """Return the records of a run's metrics; the package's for a run of an earlier version."""
    with intact(path):
        stated = config.get("resolved", {}).get("metrics")
        return PACKAGE_METRICS if stated is None else metrics_from_tables(stated)


def _checked(content: Any, path: Path, needed: Collection[str]) -> Record:
    """Return a record if its values are finite numbers or null, and none is missing."""
    if isinstance(content, dict) and all(name in content for name in needed):
        values = [value for name, value in content.items() if name not in _TEXTS]
        numbers = [value for value in values if value is not None]
        if all(isinstance(value, int | float) and math.isfinite(value) for value in numbers):
            return content
    raise ValueError(f"{path} is damaged: it does not hold what a run writes")


# --- fingerprints ---------------------------------------------------------------------------------


def check_guarantee(report: Any, path: Path) -> Record:
    """Return a privacy report that is read; raise ValueError if it is none."""
    sentences = report.get("assumed") if isinstance(report, dict) else None
    if not isinstance(sentences, list) or not all(
        isinstance(sentence, str) for sentence in sentences
    ):
        raise ValueError(f"{path} is damaged: it is no privacy report")
    return report


OTHER_DATA = "on other data"
OTHER_CODE = "of other code of yours"
OTHER_VERSION = "of the same settings, but combined otherwise or by another version"


def other_results(
    path: Path, kind: str, theirs: Record, ours: Record, otherwise: str = OTHER_VERSION
) -> ValueError:
    """Return the error about a folder with other results than asked, which cannot go on.

    It names the settings that differ, as in `lam 0.1 there and 0.3 here`; else it says `otherwise`.
    """

    def text(settings: Mapping[str, Any], name: str) -> str:
        value = settings.get(name)
        if name == "seed" and str(value).startswith(SECRET):  # an error may be handed on
            return SECRET
        listed = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        return "not given" if value is None else listed

    other = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    parts = [
        f"{flag(name)} {text(theirs, name)} there and {text(ours, name)} here" for name in other[:3]
    ]
    if more := len(other) - len(parts):
        parts.append(f"and {more} other{'s' if more > 1 else ''}")
    what = f"with other settings ({', '.join(parts)})" if parts else otherwise
    return ValueError(
        f"{path} already holds a {kind} {what}: choose another directory or say --overwrite"
    )


def settings_digest(*settings: Any) -> str:
    """Return a hash of settings: JSON values, and objects that print alike if equal."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
