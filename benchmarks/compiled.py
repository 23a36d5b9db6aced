"""The work that a compiled program starts on its device, read from the compiler's text.

Loops count with their trips, and of a branch's sides the longer one. On a GPU each kernel is a
launch, and the host reads each condition that the compiler does not know. A TPU runs a program by
itself; its compiler estimates the cycles of each kernel.
"""

import re
from collections import Counter
from typing import NamedTuple

PARTS = ("draw", "work", "server")
"""Names of a round's parts in the engine's programs; anything else is "other"."""
_PART = re.compile(rf'op_name="[^"]*\b({"|".join(PARTS)})\b')
_OPERATION = re.compile(r"  (?:ROOT )?%\S+ = (.*?) ([a-z][a-z\d\-]*)\(")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_BOUND = re.compile(r" s32\[\]\S* constant\((\d+)\)")
_COLLECTIVE = re.compile(r"all-|reduce-scatter|collective-|ragged-all")
_FREE = re.compile(
    r"parameter|constant|tuple|get-tuple-element|bitcast|after-all|opt-barrier|add-dependency"
    r"|partition-id|replica-id|.*-done"
)


class Started(NamedTuple):
    """The work that a program starts.

    Attributes:
      kernels: number of fusions, library calls and copies by part of the round.
      waits: number of conditions that are not known when the program is compiled.
      cycles: a TPU's estimated cycles.
      collectives: number of collective operations by name and shape.
    """

    kernels: Counter[str]
    waits: int
    cycles: int
    collectives: Counter[str]

    @property
    def launches(self) -> int:
        """The number of kernels."""
        return self.kernels.total()

    def plus(self, other: "Started", times: int = 1) -> "Started":
        """Return the sum with `times` the other."""
        return Started(
            self.kernels + _times(other.kernels, times),
            self.waits + times * other.waits,
            self.cycles + times * other.cycles,
            self.collectives + _times(other.collectives, times),
        )


_NOTHING = Started(Counter(), 0, 0, Counter())


class _Operation(NamedTuple):
    name: str
    shape: str
    line: str

    def called(self, *attributes: str) -> list[str]:
        found = re.findall(
            rf"(?:{'|'.join(attributes)})=\{{?(%[\w.\-]+(?:, %[\w.\-]+)*)", self.line
        )
        return [name for names in found for name in names.split(", ")]


def started_by_a_round(text: str, steps: int) -> Started:
    """Return the work that one iteration of a program's outermost loop starts.

    Args:
      text: of a compiled program, whose longest outermost loop is that over rounds.
      steps: assumed trips of a loop whose length depends on data.
    """
    return _Program(text, steps).round()


class _Program:
    def __init__(self, text: str, steps: int):
        self._computations: dict[str, list[_Operation]] = {}
        self._steps, self._entry, self._estimated = steps, "", "estimated_cycles" in text
        current = ""
        for line in text.splitlines():
            if line.endswith("{") and line.startswith(("%", "ENTRY")):
                current = line.removeprefix("ENTRY ").split(" ")[0]
                self._entry = current if line.startswith("ENTRY") else self._entry
                self._computations[current] = []
            elif found := _OPERATION.match(line):
                self._computations[current].append(_Operation(found[2], found[1], line))

    def round(self) -> Started:
        bodies = [n for each in self._computations[self._entry] for n in each.called("body")]
        return max((self._count(n, "other") for n in bodies), key=lambda found: found.launches)

    def _count(self, name: str, part: str) -> Started:
        total = _NOTHING
        for each in self._computations[name]:
            found = _PART.search(each.line)
            total = total.plus(self._started(each, found[1] if found else part))
        return total

    def _trips(self, loop: _Operation, test: str) -> int | None:
        """Return the trips of a loop if they are known; it may count up to a constant."""
        if known := _TRIPS.search(loop.line):
            return int(known[1])
        *others, last = self._computations[test]
        bounds = [found[1] for each in others if (found := _BOUND.search(each.line))]
        return int(bounds[0]) if last.name == "compare" and len(bounds) == 1 else None

    def _started(self, each: _Operation, part: str) -> Started:
        if each.name == "while":
            (body,), (test,) = each.called("body"), each.called("condition")
            trips = self._trips(each, test)
            if trips is not None:
                return _NOTHING.plus(self._count(body, part), trips)
            tests = self._count(test, part)._replace(waits=1)
            found = _NOTHING.plus(tests, self._steps + 1)
            return found.plus(self._count(body, part), self._steps)
        if each.name == "conditional":
            names = each.called("true_computation", "false_computation", "branch_computations")
            sides = (self._count(name, part) for name in names)
            return max(sides, key=lambda found: found.launches).plus(_NOTHING._replace(waits=1))
        if each.name == "call":
            return self._count(each.called("to_apply")[0], part)
        collectives = Counter([f"{each.name} {each.shape}"] if _COLLECTIVE.match(each.name) else [])
        cycles = _CYCLES.search(each.line)
        scalar = self._estimated and cycles is None  # an instruction of a TPU's scalar core
        if _FREE.fullmatch(each.name) or "AllocateBuffer" in each.line:
            return _NOTHING
        kernels = Counter([] if scalar else [part])
        return Started(kernels, 0, int(cycles[1]) if cycles else 0, collectives)


def _times(counter: Counter[str], times: int) -> Counter[str]:
    return Counter({name: times * number for name, number in counter.items()})
