"""The parts of a run by name, and the settings and hyperparameters that each of them has."""

import dataclasses
import functools
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjaxsim.algorithms.systems import SYSTEMS, System
from fedjaxsim.data.readers import IN_FILES, PARTITIONS, READERS
from fedjaxsim.factories import Setting, resolve, settings_of
from fedjaxsim.privacy.choices import MECHANISMS, SAMPLERS
from fedjaxsim.runs.user_code import find_own, is_own

if TYPE_CHECKING:
    from fedjaxsim.hyperparameters import Records

_MODELS = "fedjaxsim.models"
MODELS = {
    "linear": f"{_MODELS}.model:linear",
    "mlp": f"{_MODELS}.network:mlp",
    "cnn": f"{_MODELS}.network:cnn",
    "gru": f"{_MODELS}.sequences:gru",
    "transformer": f"{_MODELS}.sequences:transformer",
}
OF_TOKENS = ("gru", "transformer")
"""The models of text; all others take integers for numbers."""
OWN = System("", "an algorithm of one's own", "")
"""The record of a user's own algorithm, with nothing assumed of it."""


class Role(NamedTuple):
    """A place in a run that a part fills.

    Attributes:
      known: the parts by name, as "module:function".
      supplied: arguments of their factories that the run supplies; they are no settings.
      own: whether a user's own "module:factory" may fill it.
    """

    known: Mapping[str, str]
    supplied: tuple[str, ...] = ()
    own: bool = False


ROLES = {
    "algorithm": Role(
        {name: system.factory for name, system in SYSTEMS.items()},
        ("task", "num_clients", "sizes"),
        own=True,
    ),
    "model": Role(
        MODELS, ("input_shape", "num_outputs", "num_tokens", "last", "padding"), own=True
    ),
    "mechanism": Role(MECHANISMS, ("diagonal", "max_weight"), own=True),
    "sampling": Role(SAMPLERS, (), own=True),
    "data": Role(READERS, ("path", "seed", "has_clients")),
    "partition": Role(PARTITIONS, ("fields", "seed", "label", "field", "min_rows", "column")),
}
"""In the order in which help lists their settings."""
_SETTINGS = {
    "num_clients": "clients",
    "bias": "intercept",
    "variance": "feature_noise",
    "hidden": "hidden",
}
"""Names of settings that differ from the factory's argument."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part that fills a role.

    Attributes:
      role: which one.
      name: the part's, as given.
      factory: the function that makes it.
    """

    role: str
    name: str
    factory: Callable[..., Any] = dataclasses.field(repr=False)

    @functools.cached_property
    def settings(self) -> dict[str, Setting]:
        """The settings of the factory, by the name of their flag."""
        found = settings_of(self.factory, ROLES[self.role].supplied)
        return {_SETTINGS.get(name, name): setting for name, setting in found.items()}

    def records(self, given: Mapping[str, Any]) -> "Records":
        """Return the hyperparameters that the part reads with some settings.

        The default of one that is a setting, too, is the factory's, whatever its value.

        Args:
          given: settings by name, as typed.
        """
        if self.role not in ("algorithm", "mechanism", "sampling"):
            return ()
        from fedjaxsim.hyperparameters import declared_by

        known = {
            setting.name: typed_as(given[name], setting)
            for name, setting in self.settings.items()
            if name in given
        }
        return tuple(
            dataclasses.replace(record, default=self.settings[record.setting].default)
            if record.setting in self.settings
            else record
            for record in declared_by(self.factory, **known)
        )

    def event_kind(self, given: Mapping[str, Any]) -> str:
        """Return the kind of event of a mechanism with some settings; "" for any other part."""
        if self.role != "mechanism":
            return ""
        known = {
            setting.name: typed_as(given[name], setting)
            for name, setting in self.settings.items()
            if name in given
        }
        needed = {s.name for s in self.settings.values() if s.required}
        # One that misses a setting will be refused, by the parser, with the flags of most.
        return self.factory(**known).event.kind if needed <= known.keys() else "gaussian"

    def arguments(self, config: Any) -> dict[str, Any]:
        """Return the arguments of the factory as the settings of a run say them."""
        return {
            setting.name: None
            if setting.default is None and getattr(config, name) == ()
            else getattr(config, name)
            for name, setting in self.settings.items()
        }


def typed_as(value: Any, setting: Setting) -> Any:
    """Return a value as typed with the type of a setting; the default where it has another."""
    if not isinstance(value, bool | int | float | str):
        return setting.default
    if isinstance(value, str) and setting.hint in (int, float):
        try:
            return setting.hint(value)
        except ValueError:
            return setting.default
    return value


def part_of(role: str, name: str) -> Part:
    """Find a part by name.

    Raises:
      ValueError: for an unknown name, or own code that cannot be found.
    """
    found = ROLES[role]
    if found.own and is_own(name):
        return Part(role, name, find_own(role, name))
    if name not in found.known:
        raise ValueError(unknown_part(role, name))
    return Part(role, name, resolve(found.known[name]))


def unknown_part(role: str, name: Any) -> str | None:
    """Return the message about a name that no part of the role has; None for a known one."""
    found = ROLES[role]
    if name in found.known or (found.own and isinstance(name, str) and is_own(name)):
        return None
    *names, last = spellings_of(role)
    own = " for one of your own" if found.own else ""
    return f"{role} must be one of {', '.join(names)}, or {last}{own}, got {name!r}"


def spellings_of(role: str) -> list[str]:
    """Return the parts of a role as a command line spells them."""
    arguments = dict.fromkeys(IN_FILES, ":PATH") | {"column": ":NAME"}
    own = ["MODULE:FACTORY"] if ROLES[role].own else []
    return [f"{name}{arguments.get(name, '')}" for name in ROLES[role].known] + own


def names_of(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of the part in each role that some settings have.

    Args:
      given: settings by name, as typed; those that are missing have their defaults.
    """
    texts = {role: given[role] for role in ROLES if isinstance(given.get(role), str)}
    algorithm = texts.get("algorithm", "pmtl")
    system = SYSTEMS.get(algorithm, OWN)
    names = {
        "algorithm": algorithm,
        "model": texts.get("model", "linear"),
        "mechanism": texts.get("mechanism", system.mechanism),
        "sampling": texts.get("sampling", "full" if system.full_participation else "poisson"),
        "data": texts.get("data", "digits").partition(":")[0],
    }
    if is_divided(given):
        names["partition"] = texts.get("partition", "dirichlet").partition(":")[0]
    return names


def is_divided(given: Mapping[str, Any]) -> bool:
    """Return whether the data have no clients of their own, so that a partition divides them."""
    data = given.get("data")
    kind, _, path = (data if isinstance(data, str) else "digits").partition(":")
    if kind == "npz":
        try:
            with zipfile.ZipFile(path) as archive:
                return not {"client.npy", "counts.npy"} & set(archive.namelist())
        except (OSError, ValueError, zipfile.BadZipFile):
            return given.get("partition") is not None
    if kind in ("csv", "parquet"):
        return given.get("client") is None
    return kind == "digits" or (kind == "images" and given.get("partition") is not None)


def all_parts() -> Iterator[Part]:
    """Yield every part of the package."""
    for role, found in ROLES.items():
        for name in found.known:
            yield part_of(role, name)
