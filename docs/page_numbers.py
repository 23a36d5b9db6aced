"""The short numbers of the pages, made again, and which of them differ.

    python docs/page_numbers.py            # what takes seconds
    python docs/page_numbers.py --all      # and what takes minutes
    python docs/page_numbers.py --write    # put today's numbers on the pages

A row names a page, the text around numbers, with {} for each, and what makes them: a command, whose
output has the same text, the Python of a page, or a function. A number on a page is wrong if it is
not today's, rounded to the digits that the page has. Other processors round otherwise, so results
of training may differ by TRAINED.
"""

import argparse
import contextlib
import csv
import functools
import importlib
import io
import math
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

import fedjaxsim as fjs
from fedjaxsim.cli import main as fedjaxsim
from fedjaxsim.privacy import SamplingScheme
from fedjaxsim.privacy.entries import Adjacency, Entry, round_up
from fedjaxsim.privacy.events import GAUSSIAN, PrivacySpend
from fedjaxsim.privacy.guarantee import tight_epsilon
from fedjaxsim.report.results import difference

ROOT = Path(__file__).resolve().parents[1]
SAMPLING = ROOT / "experiments" / "results" / "sampling.csv"
TRAINED = 0.004
"""How far an accuracy or a loss may differ on another machine."""
DEMO = 0.01
"""And the interval of a mean over the demo's three seeds, all of whose settings are chosen."""
NUMBER = r"(\d[\d,]*(?:\.\d+)?)"

Made = str | tuple[float, ...]
"""An output that has the text of a row, or the numbers in their order."""


class Row(NamedTuple):
    """Numbers on a page: the text around them, what makes them, and how far they may be off."""

    page: str
    text: str
    make: Callable[[], Made]
    within: float = 0.0
    takes_minutes: bool = False


class Difference(NamedTuple):
    """A number on a page that is not today's, and where it stands: `page[start:end]`."""

    page: str
    start: int
    end: int
    written: str
    today: str


def pattern(text: str) -> re.Pattern[str]:
    """Return the pattern of a text with {} for numbers; spaces may be many, as in a table."""
    pieces = (r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in text.split("{}"))
    return re.compile(NUMBER.join(pieces))


def value(number: str) -> float:
    """Return the value of a number as pages write it, such as 1,406."""
    return float(number.replace(",", ""))


def differences(row: Row, page: str) -> list[Difference]:
    """Make the numbers of a row again and compare them with the text of its page."""
    matches = list(pattern(row.text).finditer(page))
    if len(matches) != 1:
        raise ValueError(f"{row.page} has {len(matches)} times: {row.text}")
    written, made = matches[0], row.make()
    if isinstance(made, str):
        output = pattern(row.text).search(made)
        if output is None:
            raise ValueError(f"{row.page}: the output has no {row.text!r}:\n{made}")
        made = tuple(map(value, output.groups()))
    wrong = []
    for place, (shown, number) in enumerate(zip(written.groups(), made, strict=True), 1):
        digits = len(shown.partition(".")[2])
        unit = 10.0**-digits
        if not abs(value(shown) - number) <= 0.501 * unit + row.within:
            comma = "," if "," in shown else ""
            today = f"{number:{comma}.{digits}f}"
            wrong.append(Difference(row.page, *written.span(place), shown, today))
    return wrong


@functools.cache
def printed(*commands: str) -> str:
    """Return what commands print, one after another in an empty folder."""
    output = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder),
        contextlib.redirect_stdout(output),
    ):  # fmt: skip
        for command in commands:
            if fedjaxsim(shlex.split(command)):
                raise ValueError(f"fedjaxsim {command} failed")
    return output.getvalue()


def commands_of(page: str, containing: str) -> tuple[str, ...]:
    """Return the commands of a page, without the program, that have a text in them."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^ {4}fedjaxsim (.*)$", text, re.MULTILINE)
    return tuple(command for command in commands if containing in command)


@functools.cache
def python_of(page: str, block: int) -> tuple[str, dict]:
    """Run one block of Python of a page: what it prints, and the names that it leaves."""
    text = (ROOT / page).read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[block]
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(code, page, "exec"), names)
    return output.getvalue(), names


def epsilon(
    z: float, p: float, rounds: int, delta: float, adjacency: Adjacency = "zero_out", every: int = 0
) -> float:
    """Compute ε of a plan of 10,000 clients, rounded up as reports print it.

    With p < 1 sampling is Poisson, with a period (`every`) random allocation.
    """
    clients, kind = 10_000, "allocation" if every else "poisson" if p < 1 else "full"
    scheme = SamplingScheme(kind, clients, clients, period=every or None)
    charges = [PrivacySpend(scheme, GAUSSIAN, (Entry(z, p, rounds),))]
    return round_up(tight_epsilon(charges, delta, adjacency))


def allocation(every: int, z: float, rounds: int) -> tuple[float, ...]:
    """Compute ε of Poisson sampling, random allocation, and fixed groups that take turns."""
    p, delta = 1 / every, 1e-5
    by_allocation = epsilon(z, p, rounds, delta, every=every)
    return epsilon(z, p, rounds, delta), by_allocation, epsilon(z, 1, rounds // every, delta)


def guess(level: float, delta: float = 0.0) -> float:
    """Return the largest probability of a right guess between two equally likely runs."""
    return (math.exp(level) + delta) / (1 + math.exp(level))


def plan_of_shares() -> tuple[float, ...]:
    """Return the shares of the two groups on the page."""
    scheme = SamplingScheme("poisson", 100, 100)
    plan = {"rounds": 200, "sampling_rate": 0.2, "scheme": scheme}
    z = fjs.privacy.noise_multiplier(4.0, 1e-4, **plan)
    return tuple(fjs.privacy.shares([4.0, 1.0], 1e-4, noise_multiplier=z, **plan))


def clients_needed(columns: int) -> float:
    """Return how many clients private ranges need with z = 1, from the words of the refusal."""
    rows = [{"x": np.zeros((2, columns)), "y": np.zeros(2)}] * 2
    try:
        fjs.privacy.scale_privately(fjs.Population.from_clients(rows), 1.0)
    except ValueError as refusal:
        return value(re.findall(r"need (\d+) clients", str(refusal))[0])
    raise AssertionError("two clients are never enough")


def noise_on_sums(plan: str) -> tuple[float, ...]:
    """Read the noise on sums of releases of a plan, by sampling."""
    with SAMPLING.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["plan"] == plan]
    by_sampling = {row["sampling"]: float(row["noise_on_sums"]) for row in reversed(rows)}
    return tuple(by_sampling[name] for name in ("poisson", "allocation", "groups", "banded"))


def accuracy(table: str, system: str) -> float:
    """Read a system's accuracy from a table of runs, as `compare` and `demo` print it."""
    (cell,) = re.findall(rf"^ *(?:\S*/)?{system}\b.*?(0\.\d+)", table, re.MULTILINE)[:1]
    return float(cell)


def first_runs() -> tuple[float, ...]:
    """Return the accuracies of the three runs of start.md."""
    output = printed(*(f"{each} --quiet" for each in commands_of("docs/start.md", "--clients 50")))
    fedavg, pmtl, local = (accuracy(output, name) for name in ("fedavg", "pmtl", "local"))
    if round(pmtl, 2) != round(local, 2):
        raise ValueError(f"PMTL ({pmtl}) and Local ({local}) no longer have one number")
    return fedavg, pmtl


def demo(system: str, *, noisy: bool) -> tuple[float, ...]:
    """Read one line of the demo's table, without columns of hyperparameters and failures."""
    output = printed("demo --out demo --quiet")
    level = r"\d\S*" if noisy else r"(?:∞ \(no noise\)|–)"
    (line,) = re.findall(rf"^ *{system} +({level} .*)$", output, re.MULTILINE)
    before, _, after = line.partition(" ± ")
    half, _, seeds, _, _, _, *epsilons = after.split()
    shown = [*before.split()[-1:], half, seeds, *(each for each in epsilons if each not in "∞0")]
    return tuple(map(value, [before.split()[0]] * noisy + shown))


def demo_of_start() -> tuple[float, ...]:
    """Return Local's and FedAvg's accuracy at ε = 1.6 from the table on start.md."""
    table = (ROOT / "docs/start.md").read_text(encoding="utf-8")
    (local,) = re.findall(r"^ +local +(0\.\d+)", table, re.MULTILINE)
    (fedavg,) = re.findall(r"^ +fedavg +1\.6 +(0\.\d+)", table, re.MULTILINE)
    return float(local), float(fedavg)


def script(name: str) -> ModuleType:
    """Import a script of the experiments as it imports what lies beside it."""
    path = ROOT / "experiments" / f"{name}.py"
    sys.path.insert(0, str(path.parent))
    try:
        return importlib.import_module(path.stem)
    finally:
        sys.path.pop(0)


def published(setting: str) -> tuple[float, ...]:
    """Return ε by the method of a paper's claim, and the sound one."""
    claims = script("published_claims")
    (claim,) = (claim for claim in claims.CLAIMS if setting in claim.setting)
    return claims.published(claim), claims.sound(claim, "zero_out")


def ppsgd(epsilon: float, first: float, *others: float) -> tuple[float, ...]:
    """Return the accuracy of a level of personalization on digits, and by how much it is ahead."""
    at_epsilon = {
        point.personalization: point.values
        for point in script("ppsgd/best").read()
        if point.data == "digits" and math.isclose(point.epsilon, epsilon, rel_tol=0.05)
    }
    numbers = [float(np.mean(at_epsilon[first]))]
    for other in others:
        mean, half, *_ = difference(at_epsilon[first], at_epsilon[other])[0]
        numbers += [mean or math.nan, half or math.nan]
    return tuple(numbers)


def _of_table(plan: str, cells: str) -> Row:
    return Row("docs/privacy.md", f"| {plan} | {cells} |", functools.partial(noise_on_sums, plan))


def _of_allocation(every: int, z: float, rounds: int) -> Row:
    text = f"| 1/{every} | {rounds:,} | {z:g} | {{}} | {{}} | {{}} |"
    return Row("docs/privacy.md", text, functools.partial(allocation, every, z, rounds))


_REPRODUCED = "experiments/reproductions.md"
_README = functools.partial(python_of, "README.md", 0)
_TUNED = functools.partial(printed, *commands_of("docs/sweeps.md", "runs/tuned")[:1])
ROWS = (
    Row("README.md", "\n 50 {} {}\n", lambda: _README()[0], TRAINED),
    Row("README.md", "\n 100 {} {}\n", lambda: _README()[0], TRAINED),
    Row("README.md", "ε = {} zero-out, ε = {} replace, δ = {} (joint DP, exact)",
        lambda: _README()[0]),
    Row("README.md", "Local ends at {}, FedAvg {}.", demo_of_start),
    Row("docs/start.md", "FedAvg {}, PMTL and Local {} with this seed", first_runs, TRAINED),
    Row("docs/privacy.md", "{} at ε = 1, {} at ε = 4", lambda: (guess(1), guess(4))),
    Row("docs/privacy.md", "{} instead of {} for ε = {} in the [table",
        lambda: (float(printed(commands_of("docs/privacy.md", "--every 100")[0])
                       .partition("probability of at most ")[2].split(" %")[0]) / 100,
                 guess(allocation(100, 0.8, 1000)[1], 1e-5), allocation(100, 0.8, 1000)[1])),
    _of_allocation(10, 1, 100), _of_allocation(100, 0.6, 100), _of_allocation(100, 0.8, 1000),
    Row("docs/privacy.md", "({} against {} in the last row)",
        lambda: (epsilon(0.8, 0.01, 1000, 1e-5, "replace"),
                 epsilon(0.8, 0.01, 1000, 1e-5, "replace", 100))),
    Row("docs/privacy.md", "# ({}, {})", plan_of_shares),
    _of_table("100 of 1,000 clients, 100 rounds", "{} | **{}** | {} | {} (2)"),
    _of_table("100 of 1,000 clients, 1,000 rounds", "{} | **{}** | {} | {} (2)"),
    _of_table("one pass, 100 of 10,000 clients", "{} | {} | {} | **{}** (8)"),
    _of_table("ten passes, 100 of 10,000 clients", "{} | {} | {} | **{}** (4)"),
    _of_table("one pass, 1,000 of 10⁶ clients", "{} | {} | {} | **{}** (64)"),
    Row("docs/data.md", "needs {} clients for three columns and {} for ten",
        lambda: (clients_needed(3), clients_needed(10))),
    Row("docs/reference/sharp-edges.md", "{} instead of {}. → Every accountant",
        functools.partial(published, "CelebA, σ = 0.65")),
    Row(_REPRODUCED, "global ({}) is ahead of level 3 by {} ± {}, and of level 10 by {} ± {}",
        functools.partial(ppsgd, math.inf, math.inf, 3, 10)),
    Row(_REPRODUCED, "level 10 ({}) is ahead of global by {} ± {} and of local by {} ± {}",
        functools.partial(ppsgd, 3.6, 10, math.inf, 0)),
    Row(_REPRODUCED, "level 0.1 ({}) is ahead of global by {} ± {}, not surely of local ({} ± {})",
        functools.partial(ppsgd, 1.15, 0.1, math.inf, 0)),
    Row("docs/sweeps.md", "a loss of {}, which a larger λ would raise",
        lambda: (float(python_of("docs/sweeps.md", 1)[1]["value"]),), TRAINED),
    Row("docs/command-line.md", "ε ≤ {} zero-out, ε ≤ {} replace, δ = {} (joint DP, upper bound)",
        lambda: printed("run --algorithm pmtl --epsilon 1 --quiet --out runs/pmtl"),
        takes_minutes=True),
    Row("docs/audit.md",
        "ε ≥ {} zero-out at δ = {} with {} % confidence ({} canaries, {} of {} guesses right)",
        lambda: printed(f"{commands_of('docs/audit.md', '--audit-canaries')[0]} --quiet --out a"),
        takes_minutes=True),
    *(Row("docs/start.md", f"{system} {{}} {{}} ± {{}} {{}} {{}} {{}} {{}}",
          functools.partial(demo, system, noisy=True), DEMO, True)
      for system in ("ditto", "fedavg", "pmtl")),
    *(Row("docs/start.md", f"{system} ∞ {{}} ± {{}} {{}} ∞ ∞ {{}}",
          functools.partial(demo, system, noisy=False), DEMO, True)
      for system in ("ditto", "fedavg", "pmtl")),
    Row("docs/start.md", "local {} ± {} {} 0 0 {}",
        functools.partial(demo, "local", noisy=False), DEMO, True),
    *(Row("docs/sweeps.md", text, _TUNED, 2 * TRAINED, True)
      for text in ("start {} {} {} {} ± {} {} ± {}", "tuned {} {} {} {} ± {} {} ± {}",
                   "loss fell by {} ± {} on 4 fresh seeds")),
)  # fmt: skip
"""Pages with text around numbers, and what makes them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the numbers that differ; return 1 if there are any."""
    parser = argparse.ArgumentParser(description="Make the short numbers of the pages again.")
    parser.add_argument("--all", action="store_true", help="also numbers that take minutes")
    parser.add_argument("--write", action="store_true", help="put today's numbers on the pages")
    args = parser.parse_args(arguments)
    rows = [row for row in ROWS if args.all or not row.takes_minutes]
    pages = {row.page: (ROOT / row.page).read_text(encoding="utf-8") for row in rows}
    wrong = []
    for row in rows:
        for each in differences(row, pages[row.page]):
            line = pages[row.page].count("\n", 0, each.start) + 1
            print(f"{each.page}:{line}: {each.written} is {each.today} today", flush=True)
            wrong.append(each)
    print(f"{len(rows)} texts with numbers made again, {len(wrong)} numbers differ")
    if args.write:
        for each in sorted(wrong, key=lambda each: -each.start):
            text = pages[each.page]
            pages[each.page] = text[: each.start] + each.today + text[each.end :]
        for page in {each.page for each in wrong}:
            (ROOT / page).write_text(pages[page], encoding="utf-8")
    return int(bool(wrong) and not args.write)


if __name__ == "__main__":
    sys.exit(main())
