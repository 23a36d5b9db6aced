"""Settings of factories are read from their signatures and docstrings."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import pytest

from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.factories import (
    CommandLineText,
    Count,
    Options,
    described,
    import_factory,
    make,
    settings_of,
    taken_by,
)
from fedjaxsim.privacy.choices import MECHANISMS, SAMPLERS

Size = Literal["small", "large"]


def part(
    task: Any,
    *,
    cohort: int,
    size: Size = "small",
    fast: bool = False,
    capacity: int | None = None,
    rate: float = 0.5,
    words: tuple[str, ...] = (),
    paths: str | Sequence[str] | Callable[[str], bool] | None = None,
    hidden: tuple[int, ...] = (8,),
    optimizer: Annotated[Callable[[float], Any] | Literal["sgd", "adam"], "its steps."] = "sgd",
    num_clients: int = 3,
    function: Callable[[], None] | None = None,
    **others: int,
) -> tuple[Any, ...]:
    """Make a part.

    What it does takes: a sentence with a colon.

    Args:
      task: model and loss.
      cohort: clients in a round.
      size: how large it is, in words
        that take two lines.
      rate: p in (0, 1]; see `cohort: int`.
      paths: of parameters.

    Raises:
      ValueError: never.
    """
    del size, fast, capacity, rate, words, paths, hidden, optimizer, function, others
    return task, cohort, num_clients


def test_settings_are_the_arguments_of_plain_types():
    found = settings_of(part, supplied=("num_clients",))
    assert {name: (setting.hint, setting.optional) for name, setting in found.items()} == {
        "cohort": (int, False),
        "size": (Size, False),
        "fast": (bool, False),
        "capacity": (int, True),
        "rate": (float, False),
        "words": (tuple[str, ...], False),
        "paths": (tuple[str, ...], True),
        "hidden": (tuple[int, ...], False),
        "optimizer": (Literal["sgd", "adam"], False),
    }
    assert all(name == setting.name for name, setting in found.items())
    assert "num_clients" in settings_of(part)


def test_a_setting_without_a_default_is_required():
    found = settings_of(part)
    assert [name for name, setting in found.items() if setting.required] == ["cohort"]
    assert found["cohort"].default is inspect.Parameter.empty
    assert (found["hidden"].default, found["capacity"].default) == ((8,), None)


def test_a_count_lies_in_the_range_of_its_type():
    def command(
        every: Count | None = None, seeds: Annotated[int, range(2, 9)] = 4, rounds: int = 1
    ): ...

    found = settings_of(command)
    assert (found["every"].hint, found["every"].optional) == (int, True)
    assert (
        found["every"].convert(CommandLineText("1")),
        found["rounds"].convert(CommandLineText("-1")),
    ) == (1, -1)
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        found["every"].convert(CommandLineText("0"))
    with pytest.raises(ValueError, match="seeds must be at least 2, got 1"):
        found["seeds"].convert(1)
    with pytest.raises(ValueError, match="seeds must be at most 8, got 9"):
        found["seeds"].convert(9)


def test_help_is_that_of_the_docstring_or_of_the_type():
    found = settings_of(part)
    assert found["cohort"].help == "clients in a round."
    assert found["size"].help == "how large it is, in words that take two lines."
    assert found["rate"].help == "p in (0, 1]; see `cohort: int`."
    assert (found["fast"].help, found["optimizer"].help) == ("", "its steps.")
    assert set(described(inspect.getdoc(part) or "")) == {"task", "cohort", "size", "rate", "paths"}
    assert described("One line.") == {}


def test_a_factory_may_be_an_object_without_a_hash():
    @dataclasses.dataclass
    class Times:
        by: float

        def __call__(self, value, plus=1.0):
            return self.by * value + plus

    assert make(Times(3.0), 2.0, supplied={"plus": 0.5, "minus": 9.0}) == 6.5


def test_a_factory_is_called_with_what_it_takes_of_what_is_supplied():
    supplied = {"num_clients": 7, "sizes": [1, 2]}
    assert make(part, "task", supplied=supplied, cohort=2) == ("task", 2, 7)
    assert make(part, "task", supplied=supplied, cohort=2, num_clients=5) == ("task", 2, 5)
    assert make(part, "task", cohort=2) == ("task", 2, 3)


def test_an_argument_of_options_stands_for_their_fields():
    @dataclasses.dataclass(frozen=True)
    class Clock(Options):
        speed: float = 1.0
        zone: Annotated[str, "Name of the zone."] = "UTC"

    def show(hour: int, clock: Clock) -> tuple[int, Clock]:
        return hour, clock

    assert list(settings_of(show)) == taken_by(show) == ["hour", "speed", "zone"]
    assert settings_of(show)["zone"].help == "Name of the zone."
    assert make(show, 3, zone="CET") == (3, Clock(zone="CET"))
    assert make(show, 3, supplied={"speed": 2.0, "year": 2000}) == (3, Clock(speed=2.0))


def test_a_name_stands_for_a_function():
    assert import_factory("fedjaxsim.algorithms.fedavg:fedavg") is fedavg
    assert make("fedjaxsim.privacy.mechanisms:no_release").event.kind == "no_release"
    with pytest.raises(AttributeError):
        import_factory("fedjaxsim.algorithms.fedavg:missing")


def test_every_setting_of_every_part_has_help():
    paths = *(s.factory for s in SYSTEMS.values()), *MECHANISMS.values(), *SAMPLERS.values()
    settings = {
        (path, setting.name): setting.help
        for path in paths
        for setting in settings_of(import_factory(path)).values()
    }
    assert [place for place, words in settings.items() if not words] == []


def test_settings_of_parts_keep_their_types_behind_decorators():
    penalty = settings_of(import_factory(SYSTEMS["mpmtl"].factory))["penalty"]
    assert "group-sparse" in penalty.hint.__args__
    assert penalty.default == "low-rank"
    head = settings_of(import_factory(SYSTEMS["dpfedmtl"].factory))["head"]
    assert (head.hint, head.optional) == (tuple[str, ...], True)
    assert "task" not in settings_of(import_factory(SYSTEMS["pmtl"].factory))
