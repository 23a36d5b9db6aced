"""Named factories and their settings: typed keys with one converter.

A factory makes a part of a run (algorithm, model, mechanism, sampler, reader of data); a user's own
is named "module:factory". Its keyword arguments of plain types are the part's settings: flags, keys
of files and their help come from its signature and docstring, or from an `Annotated` type. A
command of the program is a function whose keyword arguments are its flags.
"""

import contextlib
import dataclasses
import decimal
import inspect
import math
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from fedjaxsim.own_code import layers_of

Count = Annotated[int, range(1, 2**31)]
"""A whole number from 1 on, as a type of an argument: its range says what it may be."""
Factory = Callable[..., Any]
REQUIRED = inspect.Parameter.empty
"""The default of a setting that must be given."""
_PLAIN = (bool, int, float, str, Path)
_DIGITS = 100
"""The most digits of whole numbers: no setting takes more."""


class Options:
    """Base of a dataclass of settings: an argument of its type stands for all of its fields."""


class CommandLineText(str):
    """Text of a command line, in which numbers and lists are still to be read."""


def flag(name: str) -> str:
    """Return the spelling of a setting on the command line, without the dashes in front."""
    return name.strip("_").replace("_", "-")


@dataclasses.dataclass(frozen=True)
class Setting:
    """Typed key: an argument of a factory, a flag of a command, a key of a file.

    Attributes:
      hint: bool, int, float, str, Path, a `Literal` of strings, a number or such a literal, or a
        tuple of a plain type.
      default: default value, or `REQUIRED`.
      optional: whether None is allowed, as it is for a default of None.
      shown: its default in words, if that follows from other settings.
      argument: name of the factory's argument.
      per_client: whether a number may also be a list of one per client.
      evaluates: whether it says what evaluations compute and when, and changes nothing else.
      unread_by: the commands with settings of a run that do not read it.
      has_flag: whether it has a flag; without one it is for files alone.
      of_releases: whether a stage that sends nothing, such as fine-tuning, does not inherit it.
      is_secret: whether what may be handed on must not hold it.
      check: raises ValueError for a converted value that is not allowed; None takes all.
    """

    name: str
    hint: Any
    default: Any = None
    help: str = ""
    optional: bool = False
    shown: str = ""
    least: float = -math.inf
    most: float = math.inf
    argument: str = ""
    per_client: bool = False
    evaluates: bool = False
    unread_by: tuple[str, ...] = ()
    has_flag: bool = True
    of_releases: bool = False
    is_secret: bool = False
    check: Callable[[Any], None] | None = dataclasses.field(default=None, compare=False)

    @property
    def required(self) -> bool:
        """Return whether the setting lacks a default."""
        return self.default is REQUIRED

    @property
    def values(self) -> tuple[Any, ...]:
        """All values of a `Literal` or bool; empty for other types."""
        if typing.get_origin(self.hint) is Literal:
            return typing.get_args(self.hint)
        return (False, True) if self.hint is bool else ()

    @property
    def item(self) -> Any:
        """The type of a tuple's items; None for other types."""
        return typing.get_args(self.hint)[0] if typing.get_origin(self.hint) is tuple else None

    def convert(self, value: Any, called: str | None = None) -> Any:
        """Convert a value of a file, of Python or a `CommandLineText` to the type.

        A ValueError names the setting as `called`, what is allowed and what was got.
        """
        converted = self._convert(value, flag(self.name) if called is None else called)
        if converted is not None and self.check is not None:
            self.check(converted)
        return converted

    def _convert(self, value: Any, called: str) -> Any:
        """Convert a value; see `convert`."""
        if value is None or (isinstance(value, CommandLineText) and value == "None"):
            if self.optional or self.default is None:
                return None
            raise ValueError(f"{called} must be given, got None")
        if self.item is float and type(value) in (int, float):  # one number for all of a shape
            value = [value]
        if self.item is not None and isinstance(value, str | list | tuple):
            single = dataclasses.replace(self, hint=self.item, default=REQUIRED, optional=False)
            if isinstance(value, str):
                text, value = value, [CommandLineText(word.strip()) for word in value.split(",")]
                if not all(value):
                    raise ValueError(f"{called} must be a list, as in a,b, got {text!r}")
            return tuple(single._convert(entry, called) for entry in value)
        if self.per_client and isinstance(value, list | tuple):
            single = dataclasses.replace(self, per_client=False)
            return tuple(
                single._convert(entry, f"{called} of client {k}") for k, entry in enumerate(value)
            )
        converted, allowed = _read(value, self.hint)
        allowed += " or, in a file, a list of one per client" * self.per_client
        if converted is None:
            raise ValueError(f"{called} must be {allowed}, got {value!r}")
        if isinstance(converted, int | float) and (converted < self.least or converted > self.most):
            bound = f"least {self.least}" if converted < self.least else f"most {self.most}"
            raise ValueError(f"{called} must be at {bound}, got {converted}")
        return converted


def _read(value: Any, hint: Any) -> tuple[Any, str]:
    """Return a value as the plain type `hint`, None if it is none, and what is allowed."""
    word = isinstance(value, CommandLineText)
    number = type(value) in (int, float) or (
        isinstance(value, Integral | float) and not isinstance(value, bool)
    )
    if typing.get_origin(hint) is Union:
        either = [_read(value, option) for option in typing.get_args(hint)]
        converted = next((converted for converted, _ in either if converted is not None), None)
        return converted, ", or ".join(allowed for _, allowed in either)
    if typing.get_origin(hint) is Literal:
        values = typing.get_args(hint)
        allowed = ("one of " if len(values) > 1 else "") + ", ".join(values)
        return (str(value) if value in values else None), allowed
    if hint is bool:
        truth = {"true": True, "false": False}.get(value) if word else None
        return value if isinstance(value, bool) else truth, "true or false"
    if hint is int:
        return _whole(value) if word or number else None, "a whole number, as 1000000 or 1e6"
    if hint is float:
        if word or number or value in ("inf", "∞"):
            with contextlib.suppress(ValueError, OverflowError):
                return float("inf" if value == "∞" else value), ""
        return None, "a number"
    if hint is Path:
        return Path(value) if isinstance(value, str | Path) and str(value) else None, "a path"
    return (str(value) if isinstance(value, str) else None), "a text"


def _whole(value: Any) -> int | None:
    """Return a whole number (1000000, 1_000_000 or 1e6), or None if it is none."""
    with contextlib.suppress(decimal.InvalidOperation):
        number = decimal.Decimal(str(value))
        if (
            number.is_finite()
            and number.adjusted() < _DIGITS
            and number == number.to_integral_value()
        ):
            return int(number)
    return None


def is_user_code(name: str) -> bool:
    """Return whether a name stands for a user's part: "module:factory"."""
    module, _, factory = name.partition(":")
    return bool(module) and factory.isidentifier()


def import_factory(path: str) -> Factory:
    """Import the function that "module:function" names."""
    return pkgutil.resolve_name(path)


def make(factory: Factory | str, *args: Any, supplied: Mapping[str, Any] = {}, **settings: Any):
    """Call a factory, or "module:factory", with the `supplied` values that it takes."""
    function = import_factory(factory) if isinstance(factory, str) else factory
    taken = taken_by(function)
    taken_values = {name: value for name, value in supplied.items() if name in taken}
    return function(*args, **gathered(function, taken_values | settings))


def taken_by(factory: Factory) -> list[str]:
    """Return the names of the values that a factory takes: arguments, and fields of `Options`."""
    options, names = _options_of(factory), list[str]()
    for name in inspect.signature(factory).parameters:
        names += settings_of(options[name]) if name in options else [name]
    return names


def gathered(factory: Factory, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a factory for values by the names of `taken_by`."""
    arguments = dict(values)
    for argument, options in _options_of(factory).items():
        fields = [name for name in settings_of(options) if name in arguments]
        arguments[argument] = options(**{name: arguments.pop(name) for name in fields})
    return arguments


def _options_of(factory: Factory) -> dict[str, type[Options]]:
    """Return the arguments of a factory that are `Options`, with their types."""
    hints = {name: hint for name, (hint, *_) in _hints(factory).items() if name != "return"}
    return {n: of for n, of in hints.items() if inspect.isclass(of) and issubclass(of, Options)}


def maker(function: Any) -> str:
    """Return the name of the factory that made a part's function, or of the function."""
    *_, function = layers_of(function)
    return getattr(function, "__qualname__", type(function).__name__).partition(".<locals>")[0]


def made_by(function: Any) -> str:
    """Return the factory that made a part's function, with its settings that the function reads."""
    *_, function = layers_of(function)
    name, values = maker(function), dict[str, Any]()
    factory = getattr(function, "__globals__", {}).get(name)
    if inspect.isfunction(factory):
        values = inspect.getclosurevars(function).nonlocals
        values = {key: values[key] for key in settings_of(factory) if key in values}
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def settings_of(factory: Factory, supplied: Sequence[str] = ()) -> dict[str, Setting]:
    """Read the named settings of a factory from its signature and docstring.

    Arguments named in `supplied` are passed by the caller: they are no settings.
    """
    hints = _hints(factory)
    texts = described(inspect.getdoc(factory) or "")
    options, settings = _options_of(factory), dict[str, Setting]()
    for name, parameter in inspect.signature(factory).parameters.items():
        if name in options:
            settings |= settings_of(options[name])
            continue
        kind, text, limits = hints.get(name, (None, "", None))
        plain = _plain(kind)
        if name in supplied or plain is None or parameter.kind is parameter.VAR_KEYWORD:
            continue
        hint, optional = plain
        default = parameter.default
        default = tuple(default) if isinstance(default, list) else default
        settings[name] = Setting(
            name, hint, default, texts.get(name, text), optional, argument=name
        )
        if limits is not None:
            settings[name] = dataclasses.replace(settings[name], least=limits[0], most=limits[-1])
    return settings


def _hints(factory: Factory) -> dict[str, tuple[Any, str, range | None]]:
    """Return the resolvable type hints of a factory by argument, with annotated text and range."""
    function = inspect.unwrap(factory)
    hints, annotations = {}, dict[str, Any]()
    for owner in reversed(inspect.getmro(function) if inspect.isclass(function) else [function]):
        annotations |= inspect.get_annotations(owner)
    for name, hint in annotations.items():
        alone = types.SimpleNamespace(__annotations__={name: hint})
        with contextlib.suppress(NameError):  # imported for type checkers alone
            names = getattr(function, "__globals__", {})
            annotated = typing.get_type_hints(alone, names, include_extras=True)[name]
            members = (annotated, *typing.get_args(annotated))
            notes = [note for member in members for note in getattr(member, "__metadata__", ())]
            text = next((note for note in notes if isinstance(note, str)), "")
            limits = next((note for note in notes if isinstance(note, range)), None)
            hints[name] = typing.get_type_hints(alone, names)[name], text, limits
    return hints


def described(docstring: str) -> dict[str, str]:
    """Map each argument in a docstring's Args section to its description."""
    section = re.search(r"^(?:Args|Attributes):\n((?:[ ]+.*\n?|\n)*)", docstring, re.MULTILINE)
    if section is None:
        return {}
    texts: dict[str, str] = {}
    name, indent = "", len(section[1]) - len(section[1].lstrip(" "))
    for line in section[1].splitlines():
        match = re.match(rf" {{{indent}}}(\w+): (.*)", line)
        if match is not None:
            name = match[1]
            texts[name] = match[2]
        elif name and line.strip():
            texts[name] += f" {line.strip()}"
    return texts


def _plain(hint: Any) -> tuple[Any, bool] | None:
    """Return the type of a flag and whether it may be None; None for a hint that no flag fits."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else ()
    kinds = [kind for kind in members or (hint,) if kind is not type(None)]
    if complex in kinds:  # a union of all that numpy takes for an array
        return None
    optional = type(None) in members
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            return kind, optional
    for kind in kinds:
        if typing.get_origin(kind) in (tuple, Sequence) and typing.get_args(kind)[0] in _PLAIN:
            return tuple[typing.get_args(kind)[0], ...], optional
    for kind in kinds:
        if kind in _PLAIN:
            return kind, optional
    return None
