"""Factories of parts by name, and their settings.

A factory makes a part of a run (algorithm, model, mechanism, sampler, reader of data); a user's own
is named "module:factory". Its keyword arguments of plain types are the part's settings: flags, keys
of files and their help come from its signature and docstring.
"""

import contextlib
import dataclasses
import inspect
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

Factory = Callable[..., Any]
_WORDS = (Sequence[str], tuple[str, ...])
_INTEGERS = (Sequence[int], tuple[int, ...])
_PLAIN = (bool, int, float, str)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A keyword argument of a factory, settable by a flag.

    Attributes:
      name: name of the argument.
      hint: bool, int, float, str, a `Literal` of strings, or a tuple of str or int.
      optional: whether None is allowed.
      default: default value, or `inspect.Parameter.empty`.
      help: description in the factory's docstring.
    """

    name: str
    hint: Any
    optional: bool
    default: Any
    help: str

    @property
    def required(self) -> bool:
        """Return whether the setting lacks a default."""
        return self.default is inspect.Parameter.empty

    @property
    def values(self) -> tuple[Any, ...]:
        """All values of a `Literal` or bool; empty for other types."""
        if typing.get_origin(self.hint) is Literal:
            return typing.get_args(self.hint)
        return (False, True) if self.hint is bool else ()


def resolve(path: str) -> Factory:
    """Import the function that "module:function" names."""
    return pkgutil.resolve_name(path)


def make(factory: Factory | str, *args: Any, supplied: Mapping[str, Any] = {}, **settings: Any):
    """Call a factory.

    Args:
      factory: the function, or "module:function".
      *args: positional arguments.
      supplied: values by name; the factory gets those among its arguments.
      **settings: keyword arguments.
    """
    function = resolve(factory) if isinstance(factory, str) else factory
    taken = inspect.signature(function).parameters
    known = {name: value for name, value in supplied.items() if name in taken}
    return function(*args, **(known | settings))


def settings_of(factory: Factory, supplied: Sequence[str] = ()) -> dict[str, Setting]:
    """Read the settings of a factory from its signature and docstring, by name.

    Args:
      factory: the function.
      supplied: names of arguments that the caller passes; they are no settings.
    """
    hints = _hints(factory)
    texts = described(inspect.getdoc(factory) or "")
    found = {}
    for name, parameter in inspect.signature(factory).parameters.items():
        plain = _plain(hints.get(name))
        if name in supplied or plain is None or parameter.kind is parameter.VAR_KEYWORD:
            continue
        hint, optional = plain
        found[name] = Setting(name, hint, optional, parameter.default, texts.get(name, ""))
    return found


def _hints(factory: Factory) -> dict[str, Any]:
    """Return the resolvable type hints of a factory by argument."""
    function = inspect.unwrap(factory)
    found = {}
    for name, hint in getattr(function, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: hint})
        with contextlib.suppress(NameError):  # imported for type checkers alone
            found |= typing.get_type_hints(alone, getattr(function, "__globals__", {}))
    return found


def described(docstring: str) -> dict[str, str]:
    """Return the descriptions of the arguments in a docstring's Args section, by name."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", docstring, re.MULTILINE)
    if section is None:
        return {}
    found: dict[str, str] = {}
    name, indent = "", len(section[1]) - len(section[1].lstrip(" "))
    for line in section[1].splitlines():
        new = re.match(rf" {{{indent}}}(\w+): (.*)", line)
        if new is not None:
            name = new[1]
            found[name] = new[2]
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return found


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
    if any(kind in _WORDS for kind in kinds):
        return tuple[str, ...], optional
    if any(kind in _INTEGERS for kind in kinds):
        return tuple[int, ...], optional
    for kind in kinds:
        if kind in _PLAIN:
            return kind, optional
    return None


def factory_of(function: Callable[..., Any]) -> str:
    """Return the name of the public function or class that made a function, or of its module."""
    name = getattr(function, "__qualname__", type(function).__qualname__).partition(".")[0]
    return function.__module__.rpartition(".")[2] if name.startswith("_") else name
