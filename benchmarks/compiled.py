"""The work that a compiled program starts on its device, read from the compiler's text.

Loops count with their trips, and of a branch's sides the longer one. On a GPU each kernel is a
launch, and the host reads each condition that the compiler does not know. A TPU runs a program by
itself; its compiler estimates the cycles of each kernel.

A kernel moves the bytes of its operands and results: of an operand that it only slices or gathers
from, those pieces, and of one that it updates in place, the update. What stays in a TPU's own
memory moves nothing.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

PARTS = ("draw", "work", "server")
"""Names of a round's parts in the engine's programs; anything else is "other"."""
_PART = re.compile(rf'op_name="[^"]*\b({"|".join(PARTS)})\b')
_OPERATION = re.compile(r"  (ROOT )?(%\S+) = (.*?) ([a-z][a-z\d\-]*)\((.*?)\)(?:,|$)")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\w*\[([\d,]*)\](\{[^}]*\})?")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_BOUND = re.compile(r" s32\[\]\S* constant\((\d+)\)")
_COLLECTIVE = re.compile(r"all-|reduce-scatter|collective-|ragged-all")
_IN_PLACE = ("dynamic-update-slice", "scatter")
_FREE = re.compile(
    r"parameter|constant|tuple|get-tuple-element|bitcast|after-all|opt-barrier|add-dependency"
    r"|partition-id|replica-id|.*-done"
)


class Started(NamedTuple):
    """The work that a program starts.

    Attributes:
      kernels: number of fusions, library calls and copies by part of the round.
      moved: bytes that kernels read and write, by their names.
      waits: number of conditions that are not known when the program is compiled.
      cycles: a TPU's estimated cycles.
      collectives: number of collective operations by name and shape.
    """

    kernels: Counter[str]
    moved: Counter[str]
    waits: float
    cycles: float
    collectives: Counter[str]

    @property
    def launches(self) -> float:
        """The number of kernels."""
        return self.kernels.total()

    def plus(self, other: "Started", times: float = 1) -> "Started":
        """Return the sum with `times` the other."""
        return Started(
            self.kernels + _times(other.kernels, times),
            self.moved + _times(other.moved, times),
            self.waits + times * other.waits,
            self.cycles + times * other.cycles,
            self.collectives + _times(other.collectives, times),
        )


_NOTHING = Started(Counter(), Counter(), 0, 0, Counter())


class _Operation(NamedTuple):
    name: str
    shape: str
    line: str
    result: str
    operands: list[str]
    root: bool

    def called(self, *attributes: str) -> list[str]:
        found = re.findall(
            rf"(?:{'|'.join(attributes)})=\{{?(%[\w.\-]+(?:, %[\w.\-]+)*)", self.line
        )
        return [name for names in found for name in names.split(", ")]


def started_by_a_round(text: str, *steps: float) -> Started:
    """Return the work that one iteration of a program's outermost loop starts.

    Args:
      text: of a compiled program, whose longest outermost loop is that over rounds.
      steps: assumed trips of loops whose lengths depend on data, the outer loop's first.
    """
    return _Program(text, steps).round()


class _Program:
    def __init__(self, text: str, steps: Sequence[float]):
        self._computations: dict[str, list[_Operation]] = {}
        self._steps, self._entry, self._estimated = steps, "", "estimated_cycles" in text
        current = ""
        for line in text.splitlines():
            if line.endswith("{") and line.startswith(("%", "ENTRY")):
                current = line.removeprefix("ENTRY ").split(" ")[0]
                self._entry = current if line.startswith("ENTRY") else self._entry
                self._computations[current] = []
            elif found := _OPERATION.match(line):
                operands = re.findall(r"%[\w.\-]+", found[5])
                self._computations[current].append(
                    _Operation(found[4], found[3], line, found[2], operands, bool(found[1]))
                )

    def round(self) -> Started:
        bodies = [n for each in self._computations[self._entry] for n in each.called("body")]
        return max((self._count(n, "other", 0) for n in bodies), key=lambda found: found.launches)

    def _count(self, name: str, part: str, depth: int) -> Started:
        total = _NOTHING
        shapes = {each.result: each.shape for each in self._computations[name]}
        for each in self._computations[name]:
            found = _PART.search(each.line)
            total = total.plus(self._started(each, found[1] if found else part, depth, shapes))
        return total

    def _trips(self, loop: _Operation, test: str) -> int | None:
        """Return the trips of a loop if they are known; it may count up to a constant."""
        if known := _TRIPS.search(loop.line):
            return int(known[1])
        *others, last = self._computations[test]
        bounds = [found[1] for each in others if (found := _BOUND.search(each.line))]
        return int(bounds[0]) if last.name == "compare" and len(bounds) == 1 else None

    def _started(self, each: _Operation, part: str, depth: int, shapes: dict[str, str]) -> Started:
        if each.name == "while":
            (body,), (test,) = each.called("body"), each.called("condition")
            trips = self._trips(each, test)
            if trips is not None:
                return _NOTHING.plus(self._count(body, part, depth), trips)
            tests = self._count(test, part, depth)._replace(waits=1)
            steps = self._steps[min(depth, len(self._steps) - 1)]
            found = _NOTHING.plus(tests, steps + 1)
            return found.plus(self._count(body, part, depth + 1), steps)
        if each.name == "conditional":
            names = each.called("true_computation", "false_computation", "branch_computations")
            sides = (self._count(name, part, depth) for name in names)
            return max(sides, key=lambda found: found.launches).plus(_NOTHING._replace(waits=1))
        if each.name == "call":
            return self._count(each.called("to_apply")[0], part, depth)
        collectives = Counter([f"{each.name} {each.shape}"] if _COLLECTIVE.match(each.name) else [])
        cycles = _CYCLES.search(each.line)
        scalar = self._estimated and cycles is None  # an instruction of a TPU's scalar core
        if _FREE.fullmatch(each.name) or "AllocateBuffer" in each.line:
            return _NOTHING
        kernels = Counter([] if scalar else [part])
        moved = Counter({each.result: 0 if scalar else self._moved(each, shapes)})
        return Started(kernels, moved, 0, int(cycles[1]) if cycles else 0, collectives)

    def _moved(self, each: _Operation, shapes: dict[str, str]) -> int:
        """Return the bytes that a kernel reads and writes."""
        read = [_bytes_of(shapes.get(name, "")) for name in each.operands]
        inside = each.called("calls") if each.name == "fusion" else []
        operations = self._computations.get(inside[0]) if inside else None
        if operations is None:
            return _of_operation(each, read, shapes)
        parameters = {
            int(re.findall(r"parameter\((\d+)\)", operation.line)[0]): operation.result
            for operation in operations
            if operation.name == "parameter"
        }
        total = sum(
            min(size, _used(parameters[place], size, operations)) for place, size in enumerate(read)
        )
        return total + _written(operations)


def _used(name: str, size: int, operations: list[_Operation]) -> int:
    """Return the bytes of a value of `size` bytes that a fusion reads of it."""
    total = 0
    for each in operations:
        if name not in each.operands:
            continue
        if each.name in ("bitcast", "reshape"):
            total += _used(each.result, size, operations)
        elif each.name in ("slice", "dynamic-slice", "gather") and each.operands[0] == name:
            total += _bytes_of(each.shape)
        elif not (each.name in _IN_PLACE and each.operands[0] == name):
            return size
    return total


def _written(operations: list[_Operation]) -> int:
    """Return the bytes that a fusion writes."""
    by_name = {each.result: each for each in operations}
    shapes = {each.result: each.shape for each in operations}
    (root,) = (each for each in operations if each.root)
    results = [by_name[name] for name in root.operands] if root.name == "tuple" else [root]
    total = 0
    for each in results:
        while each.name == "bitcast" and each.operands[0] in by_name:
            each = by_name[each.operands[0]]
        total += _updated(each, shapes) if each.name in _IN_PLACE else _bytes_of(each.shape)
    return total


def _of_operation(each: _Operation, read: list[int], shapes: dict[str, str]) -> int:
    """Return the bytes that an operation by itself reads and writes."""
    if each.name in _IN_PLACE:
        return 2 * _updated(each, shapes)
    if each.name in ("slice", "dynamic-slice", "gather"):
        return 2 * _bytes_of(each.shape)
    # Bytes among a library's results are its workspace.
    shape = re.sub(r"\b[su]8\[\d*\]", "", each.shape) if each.name == "custom-call" else each.shape
    return sum(read) + _bytes_of(shape)


def _updated(each: _Operation, shapes: dict[str, str]) -> int:
    return _bytes_of(shapes.get(each.operands[2 if each.name == "scatter" else 1], ""))


def _bytes_of(shape: str) -> int:
    """Return the bytes in memory of an array or a tuple."""
    total = 0
    for kind, dimensions, layout in _ARRAY.findall(shape):
        bits = 8 if kind == "pred" else int(re.sub(r"\D", "", kind))
        numbers = math.prod(int(n) for n in dimensions.split(",") if n)
        total += 0 if "S(" in layout else numbers * max(bits, 8) // 8
    return total


def _times(counter: Counter[str], times: float) -> Counter[str]:
    return Counter({name: times * number for name, number in counter.items()})  # pyright: ignore
