"""Records of a run's evaluations, in memory or in a file of lines, and the table of several."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjaxsim import checks, store
from fedjaxsim.checks import described
from fedjaxsim.divergence import failures
from fedjaxsim.engine.loop import Callback, Record, Segment
from fedjaxsim.engine.processes import is_first
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.report.files import lines, strict
from fedjaxsim.report.progress import epsilon_text
from fedjaxsim.report.results import SPENT, Run, System, cells, compared, headings

_NONE = -1
"""The round of the last line of an empty file."""


class Records(Callback):
    """Keep the records of all evaluations in `rows` (see `Run.records`)."""

    initial = True
    released = 0
    """As of a `MetricsFile`; memory keeps no round that a checkpoint does not."""

    def __init__(self):
        self.memory = list[Record]()

    @property
    def rows(self) -> list[Record]:
        """The records."""
        return self.memory

    def start(self, state: SimulationState) -> None:
        """Forget evaluations after `state`."""
        done = int(state.round)
        self.memory = [row for row in self.memory if 0 < done >= row["round"]]

    def segment(self, state: SimulationState, segment: Segment) -> None:
        """Add an evaluation, in place of an earlier one of this round."""
        while self.memory and self.memory[-1]["round"] == segment.round:
            self.memory.pop()
        self.memory += self.run.records(state, segment)


class MetricsFile(Callback):
    """Write the records of all evaluations to a file, a line of JSON each.

    A checkpoint keeps the round of the last line. Lines after it stay in the file until their
    evaluation is done again, for they say what was released. Without a checkpoint a start replaces
    the file.

    Args:
      path: the file; its folders are made.
      exact: whether numbers that are not finite are written as they are, not as null.
    """

    initial = True

    def __init__(self, path: Path | str, *, exact: bool = False):
        self._path, self._exact, self._last = Path(path), exact, _NONE
        self._later: list[bytes] = []

    @property
    def memory(self) -> Any:
        """The round of the last line."""
        return self._last

    @memory.setter
    def memory(self, kept: Any) -> None:
        _, self._later = divided(self._path, kept)
        self._last = kept

    @property
    def rows(self) -> list[Record]:
        """The records, read from the file; null is NaN."""
        rows = (json.loads(line) for line in self._lines())
        return [{k: math.nan if v is None else v for k, v in row.items()} for row in rows]

    @property
    def released(self) -> int:
        """The last round whose evaluation is in the file and still to be done again, or 0."""
        return last_round(self._later)

    def keep_lines(self) -> None:
        """Keep the lines that the file holds until their evaluations are done again."""
        self._later = divided(self._path, _NONE)[1]

    def start(self, state: SimulationState) -> None:
        """Cut the file after the evaluations up to `state`."""
        done = int(state.round)
        if done == 0 and self._last > _NONE:
            self._later = []  # another run with this callback
        if done == 0:
            self._last = _NONE
        if is_first():
            store.make_folder(self._path.parent)
            kept = [line for line in self._lines() if last_round([line]) <= done]
            store.write(self._path, b"".join([*kept, *self._later]))
        self._last = min(self._last, done)

    def segment(self, state: SimulationState, segment: Segment) -> None:
        """Add an evaluation to the file, in place of an earlier one of this round."""
        records = self.run.records(state, segment)
        added = lines(records, exact=self._exact)
        before = [line for line in self._later if last_round([line]) <= segment.round]
        self._later = self._later[len(before) :]
        if is_first():
            again = segment.round == self._last
            if not again and not before and not self._later:
                store.append(self._path, added)
            elif again or added != b"".join(before):
                kept = [line for line in self._lines() if last_round([line]) < segment.round]
                store.write(self._path, b"".join([*kept, added, *self._later]))
        self._last = segment.round

    def _lines(self) -> list[bytes]:
        return divided(self._path, self._last)[0]

    def sync(self) -> None:
        """Make the file durable."""
        if is_first() and self._last > _NONE:
            store.sync(self._path)


Recorded = Records | MetricsFile


class RunsReport(NamedTuple):
    """Table of runs, which prints itself.

    Each of `rows` is a label: its mean over seeds with a 95 % interval, its difference from the
    first label on the seeds that both have, with p (see `fedjaxsim compare`), and its largest
    `epsilon`, `epsilon_replace` and `delta`.
    """

    rows: list[Record]

    def __repr__(self) -> str:
        """Align the columns."""
        found = headings(self.rows, self.rows[0]["metric"])
        table = [[each.replace("\n", " ") for each in (*found, "ε zero-out", "ε replace")]]
        table += [[*cells(row), *map(epsilon_text, map(row.get, SPENT[:2]))] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ("  ".join(map(str.ljust, line, widths)) for line in table)
        return "\n".join(line.rstrip() for line in lines)


def report(
    runs: Mapping[str, Recorded | Sequence[Recorded]], metric: str | None = None
) -> RunsReport:
    """Make the table of runs of `fedjaxsim compare`: means over seeds, differences and ε.

    Publish private runs of one system only if their seeds differ.

    Args:
      runs: by label, the `Records` or `MetricsFile` of a finished run, or a list of them, a seed
        each. Differences are from the first label.
      metric: a column of the records; by default the one that judges the first run.
    """
    if not isinstance(runs, Mapping) or not runs:
        raise ValueError(f"runs must be a dict of Records by label, got {runs!r}")
    found = []
    for label, given in runs.items():
        of_seeds = {}
        for seed, each in enumerate(given if isinstance(given, Sequence) else [given]):
            rows = each.rows if isinstance(each, Recorded) else []
            if not rows or each.run.size is not None:
                raise ValueError(
                    f"{label!r} needs Records that were callbacks of one finished run, or a list "
                    f"of them with a seed each, got {described(each)}"
                )
            table = [
                row | {"failed": failed, "delta": each.run.delta}
                for row, failed in zip(strict(rows), failures(rows), strict=True)
            ]
            of_seeds[seed] = Run(label, {}, seed, table)
        found.append(System(label, label, of_seeds, {}))
    if metric is not None:
        checks.one_of(found[0].first.rows[-1], metric=metric)
    rows = compared(found, metric)
    for row, system in zip(rows, found, strict=True):
        ends = [run.rows[-1] for run in system.runs.values()]
        for name in SPENT:
            values: list[Any] = [end.get(name) for end in ends]
            row[name] = None if None in values else max(values)
    return RunsReport(rows)


def fits(path: Path) -> Callable[[Mapping[str, Any]], None]:
    """Return the check that a checkpoint's note belongs to the `MetricsFile` at a path."""

    def check(note: Mapping[str, Any]) -> None:
        kept = note.get("memory", {}).get(MetricsFile.__name__)
        if kept is not None:
            divided(path, kept)

    return check


def divided(path: Path, last: int) -> tuple[list[bytes], list[bytes]]:
    """Return the whole lines of a file (none if it is missing) up to a round, and those after it.

    Round -1 is before all lines. Raises ValueError if no line is of that round, or one is no
    record.
    """
    content = path.read_bytes() if path.is_file() else b""
    *found, _ = content.split(b"\n")  # the last one is empty, or was cut
    while found and _round(found[-1]) is None:
        found.pop()  # never reached the disk
    rounds = list(map(_round, found))
    if None in rounds:
        raise ValueError(f"{path} has a line that is no record")
    if last > _NONE and last not in rounds:
        raise ValueError(f"{path} lacks the line of round {last}")
    count = sum(round_ is not None and round_ <= last for round_ in rounds)
    whole = [line + b"\n" for line in found]
    return whole[:count], whole[count:]


def last_round(rows: Sequence[bytes]) -> int:
    """Return the last round of some lines; 0 without any."""
    return max((_round(line) or 0 for line in rows), default=0)


def _round(line: bytes) -> int | None:
    """Return the round of a record; None if the line holds none."""
    try:
        return int(json.loads(line)["round"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
