"""The named parts of a run, the package's and users', with their settings."""

import dataclasses
import functools
import importlib
import inspect
import os
import sys
import traceback
import zipfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fedjaxsim import checks
from fedjaxsim.algorithms.systems import SYSTEMS, System
from fedjaxsim.data.readers import PARTITIONS, READERS, SPELLINGS, DataSpec
from fedjaxsim.factories import (
    Setting,
    gathered,
    import_factory,
    is_user_code,
    make,
    settings_of,
    taken_by,
)
from fedjaxsim.privacy.choices import AVAILABILITIES, MECHANISMS, SAMPLERS

if TYPE_CHECKING:
    from fedjaxsim.hyperparameters import Declarations


_MODELS = "fedjaxsim.models"
MODELS = {
    "linear": f"{_MODELS}.model:linear",
    "mlp": f"{_MODELS}.network:mlp",
    "cnn": f"{_MODELS}.network:cnn",
    "gru": f"{_MODELS}.sequences:gru",
    "transformer": f"{_MODELS}.sequences:transformer",
}


class Loss(NamedTuple):
    """A loss of the package.

    Attributes:
      factory: the factory of its task, as "module:function".
      targets: what it takes for the target of a row: one of the classes (with an output for each),
        a rank (a class of an order), one of two classes, a number, a count, several targets (with
        an output for each), or, as a user's loss, anything.
      has_bound: whether its curvature has a bound.
    """

    factory: str
    targets: Literal["class", "rank", "one of two", "number", "count", "several", "any"]
    has_bound: bool = True


_TASKS, _REGRESSIONS = "fedjaxsim.tasks.task", "fedjaxsim.tasks.regressions"
_SEVERAL = "fedjaxsim.tasks.several_targets"
LOSSES = {
    "softmax": Loss(f"{_TASKS}:softmax", "class"),
    "one-vs-all": Loss(f"{_TASKS}:one_vs_all", "class"),
    "squared": Loss(f"{_TASKS}:squared", "number"),
    "logistic": Loss(f"{_TASKS}:logistic", "one of two"),
    "ordinal": Loss(f"{_REGRESSIONS}:ordinal", "rank", has_bound=False),
    "poisson": Loss(f"{_REGRESSIONS}:poisson", "count", has_bound=False),
    "negative-binomial": Loss(f"{_REGRESSIONS}:negative_binomial", "count", has_bound=False),
    "gamma": Loss(f"{_REGRESSIONS}:gamma", "number", has_bound=False),
    "cox": Loss(f"{_REGRESSIONS}:cox", "number"),
    "quantile": Loss(f"{_REGRESSIONS}:quantile", "number"),
    "multilabel": Loss(f"{_SEVERAL}:multilabel", "several"),
    "squared-targets": Loss(f"{_SEVERAL}:squared_targets", "several"),
}
USER_LOSS = Loss("", "any")
"""The record of a user's loss, with no assumptions."""
OF_TOKENS = ("gru", "transformer")
"""The models of text; all others take integers for numbers."""
USER_SYSTEM = System("", "a user's algorithm")
"""The record of a user's algorithm, with no assumptions."""


class Role(NamedTuple):
    """A place in a run that a part fills.

    Attributes:
      known: a dict of the parts, as "module:function".
      help: what the part is, for help.
      default: the part of a run that names none; None if that follows from other settings.
      shown: the default in words, where it follows.
      supplied: arguments of their factories that are no settings.
      takes: positional arguments of a user's "module:factory"; None if users have none here.
      has_hyperparameters: whether the parts read hyperparameters.
    """

    known: Mapping[str, str]
    help: str
    default: str | None = None
    shown: str = ""
    supplied: tuple[str, ...] = ()
    takes: str | None = None
    has_hyperparameters: bool = False

    @property
    def takes_user_code(self) -> bool:
        """Return whether a user's "module:factory" may fill it."""
        return self.takes is not None


ROLES = {
    "algorithm": Role(
        {name: system.factory for name, system in SYSTEMS.items()},
        "Federated algorithm",
        "pmtl",
        supplied=("task", "num_clients", "sizes", "server_map"),
        takes="task",
        has_hyperparameters=True,
    ),
    "model": Role(
        MODELS,
        "Model of every client",
        "linear",
        supplied=("input_shape", "num_outputs", "num_tokens", "last", "padding"),
        takes="shape, outputs",
    ),
    "loss": Role(
        {name: loss.factory for name, loss in LOSSES.items()},
        "Local loss; one-vs-all is squared, logistic takes two classes, cox times",
        "softmax",
        supplied=("model", "num_outputs", "num_classes", "loss"),
        takes="model, outputs",
    ),
    "mechanism": Role(
        MECHANISMS,
        "Release of the messages",
        shown="the algorithm's own",
        supplied=("diagonal", "weights"),
        takes="",
        has_hyperparameters=True,
    ),
    "sampling": Role(
        SAMPLERS,
        "Sampling of the cohorts",
        shown="poisson",
        takes="",
        has_hyperparameters=True,
    ),
    "availability": Role(AVAILABILITIES, "When drawn clients answer", shown="always", takes=""),
    "data": Role(READERS, "Source of the clients", "digits", supplied=("path", "seed"), takes=""),
    "partition": Role(
        PARTITIONS,
        "Division of data without clients",
        "dirichlet",
        supplied=("fields", "seed", "min_rows"),
    ),
}
"""In the order in which help lists their settings."""
_SHOWN = 160
"""Characters of names that fit into a message."""
SETTINGS = {"num_clients": "clients", "bias": "intercept"}
"""Names of settings that differ from the factory's argument."""
_BOUNDED = ("clients", "cohort", "groups", "bands")
_BOUNDS = {name: {"most": 2**31 - 1} for name in _BOUNDED} | {
    "hidden": {"least": 1, "most": 10**6}, "clusters": {"most": 10**4},
    "every": {"most": 2**16 - 1},
}  # fmt: skip
"""Limits of settings: sums over a run fit into int32; each cluster's first model is traced."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part that fills a role, with the factory that makes it."""

    role: str
    name: str
    factory: Callable[..., Any] = dataclasses.field(repr=False)

    @functools.cached_property
    def settings(self) -> dict[str, Setting]:
        """The settings of the factory, by the name of their flag."""
        supplied = ROLES[self.role].supplied
        if is_user_code(self.name):  # which may call what it gets as it likes
            takes = ROLES[self.role].takes
            count = len(takes.split(",")) if takes else 0
            supplied += tuple(inspect.signature(self.factory).parameters)[:count]
        declared = settings_of(self.factory, supplied)
        if self.role == "data" and is_user_code(self.name):  # it may return a data frame
            from fedjaxsim.data.tables.table import Roles

            declared = settings_of(Roles) | settings_of(self.factory, ("seed",))
        named = {SETTINGS.get(name, name): setting for name, setting in declared.items()}
        return {
            name: dataclasses.replace(setting, name=name, **_BOUNDS.get(name, {}))
            for name, setting in named.items()
        }

    @functools.cached_property
    def all_records(self) -> "Declarations":
        """The hyperparameters that the part reads with any of its settings."""
        if not ROLES[self.role].has_hyperparameters:
            return ()
        from fedjaxsim.hyperparameters import ever_declared_by

        return ever_declared_by(self.factory)

    def records(self, settings: Mapping[str, Any]) -> "Declarations":
        """Return the hyperparameters that the part reads with some settings, as typed.

        A hyperparameter that is also an argument of the factory keeps the default that it has if
        the argument is not given.
        """
        if not ROLES[self.role].has_hyperparameters:
            return ()
        from fedjaxsim.hyperparameters import declared_by

        typed = self._typed(settings)
        records = declared_by(self.factory, **typed)
        arguments = {self.settings[r.name].argument for r in records if r.name in self.settings}
        other_arguments = {name: value for name, value in typed.items() if name not in arguments}
        default = {r.name: r.default for r in declared_by(self.factory, **other_arguments)}
        return tuple(
            dataclasses.replace(record, default=default.get(record.name, record.default))
            for record in records
        )

    def event_kind(self, settings: Mapping[str, Any]) -> str:
        """Return the kind of event of a mechanism with some settings; "" for any other part."""
        if self.role != "mechanism":
            return ""
        arguments = self._typed(settings)
        needed = {setting.argument for setting in self.settings.values() if setting.required}
        # The parser refuses a mechanism that lacks a setting, with the flags of most mechanisms.
        if not needed <= arguments.keys():
            return "gaussian"
        from fedjaxsim.privacy.mechanisms import Mechanism

        return self.make(Mechanism, {}, **arguments).event.kind

    def _typed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the factory that settings give; a bad one has its default."""
        arguments = {}
        for name, setting in self.settings.items():
            if name in settings:
                try:
                    arguments[setting.argument] = setting.convert(settings[name])
                except ValueError:  # which the table reports
                    if not setting.required:
                        arguments[setting.argument] = setting.default
        return arguments

    def arguments(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the factory in the settings of a run."""
        values = {setting.argument: settings[name] for name, setting in self.settings.items()}
        unset = {setting.argument for setting in self.settings.values() if setting.default is None}
        return {n: None if n in unset and value == () else value for n, value in values.items()}

    def rows(self, arguments: Mapping[str, Any], seed: int) -> tuple[Any, dict[str, Any]]:
        """Return what a user's reader returns, and the arguments that name columns of it."""
        taken = taken_by(self.factory)
        settings = {name: value for name, value in arguments.items() if name in taken}
        roles = {name: value for name, value in arguments.items() if name not in taken}
        return self.make(object, {"seed": seed}, **settings), roles

    def make(self, kind: type, supplied: Mapping[str, Any], /, *args: Any, **settings: Any) -> Any:
        """Call the factory, with the `supplied` arguments that it takes.

        A user's factory must return a `kind`; its errors take one line.
        """
        if not is_user_code(self.name):
            return make(self.factory, *args, supplied=supplied, **settings)
        name, taken = f"{self.role} {self.name}", taken_by(self.factory)
        settings |= {n: value for n, value in supplied.items() if n in taken}
        settings = gathered(self.factory, settings)
        check_takes(self.role, self.name, self.factory, *args, **settings)
        made = run_user_code(name, lambda: self.factory(*args, **settings))
        if self.role == "model":
            from fedjaxsim.models.model import require_model  # needs JAX, as the factory does

            return require_model(f"{name} must return", made)
        if not isinstance(made, kind):
            raise ValueError(f"{name} must return {kind.__name__}, got {type(made).__name__}")
        return made


@functools.cache
def part_of(role: str, name: str) -> Part:
    """Find a part by name; raise a ValueError for an unknown one."""
    if ROLES[role].takes_user_code and is_user_code(name):
        return Part(role, name, find_user_code(role, name))
    _check_name(role, name)
    return Part(role, name, import_factory(ROLES[role].known[name]))


def check_parts(settings: Mapping[str, Any]) -> None:
    """Check the names of the parts in some settings; raise a ValueError for an unknown one."""
    for role in ROLES:
        name = settings.get(role)
        if name is None or (isinstance(name, str) and role in ("data", "partition")):
            continue
        if not isinstance(name, str):
            raise ValueError(f"{role} must be a name, got {name!r}")
        _check_name(role, name)


def _check_name(role: str, name: str) -> None:
    builtin, allows_user_code = ROLES[role].known, ROLES[role].takes_user_code
    if role == "data":
        DataSpec(name).require_reader()
    if name not in builtin and not (allows_user_code and is_user_code(name)):
        *names, last = spellings_of(role)
        allowed = f"{', '.join(names)} or {last}"
        if len(allowed) > _SHOWN:
            hint = checks.did_you_mean(name, builtin, cutoff=0.5)
            allowed = (
                f"a name in `fedjaxsim run --help`{hint}{f' or {last}' if allows_user_code else ''}"
            )
        raise ValueError(f"{role} must be {allowed}, got {name[:40]!r}")


def spellings_of(role: str) -> list[str]:
    """Return the parts of a role as a command line spells them."""
    user_spelling = ["MODULE:FACTORY"] if ROLES[role].takes_user_code else []
    return [SPELLINGS.get(name, name) for name in ROLES[role].known] + user_spelling


def names_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of the part in each role of a run with some settings, as typed."""
    names = {
        role: settings[role] if isinstance(settings.get(role), str) else ROLES[role].default
        for role in ROLES
    }
    system = SYSTEMS.get(str(names["algorithm"]), USER_SYSTEM)
    names["mechanism"] = names["mechanism"] or system.mechanism
    names["sampling"] = names["sampling"] or ("full" if system.full_participation else "poisson")
    data = DataSpec(names["data"] or "").require_reader()
    if not _is_divided(data, settings):
        del names["partition"]
    names["data"] = data.kind
    return {role: name for role, name in names.items() if name is not None}


def _is_divided(spec: DataSpec, settings: Mapping[str, Any]) -> bool:
    """Return whether a partition divides the data, since they have no clients."""
    kind = spec.kind
    if kind == "npz":
        try:
            with zipfile.ZipFile(spec.path) as archive:
                return not {"client.npy", "counts.npy"} & set(archive.namelist())
        except (OSError, ValueError, zipfile.BadZipFile):
            return settings.get("partition") is not None
    if kind in ("csv", "hf", "parquet"):
        return settings.get("client") is None
    if kind == "images" or spec.is_user_code:  # folders, or rows, may say the clients
        return settings.get("partition") is not None
    return kind == "digits"


def absolute(data: str) -> str:
    """Return a source of data with an absolute path; a name on Hugging Face's hub stays."""
    spec = DataSpec(data)
    return data if spec.file is None else f"{spec.kind}:{spec.file.absolute()}"


# --- users' parts ---------------------------------------------------------------------------------

_OTHERS_TAKE = {"logger": "settings, path", "metrics": "task"}
"""Positional arguments of users' factories that make no part of a run."""
_PACKAGES: set[str] = set()
"""Packages with the parts of users."""


def find_user_code(role: str, path: str) -> Callable[..., Any]:
    """Import the factory "module:factory" of a user's part; it may be in the current folder.

    "folder/file.py:factory" is the same as "folder.file:factory". Errors take one line.
    """
    name = f"{role} {path}"
    module_name, _, function = path.partition(":")
    if module_name.endswith(".py"):
        inside = os.path.relpath(module_name)
        if inside.startswith(os.pardir):
            raise ValueError(f"{name}: the file must be in or below {os.getcwd()}")
        module_name = inside.removesuffix(".py").replace(os.sep, ".")
    package = module_name.partition(".")[0]
    if package != __name__.partition(".")[0]:
        _PACKAGES.add(package)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = run_user_code(name, lambda: importlib.import_module(module_name))
    except ValueError as error:
        missing = getattr(error.__cause__, "name", None)
        absent = isinstance(error.__cause__, ModuleNotFoundError) and missing is not None
        if absent and f"{module_name}.".startswith(f"{missing}."):
            hint = checks.did_you_mean(module_name, ROLES[role].known) if role in ROLES else ""
            raise ValueError(
                f"{name}: there is no module {missing!r} in {os.getcwd()} or installed{hint}"
            ) from error
        raise
    file, origin = f"{module_name.replace('.', os.sep)}.py", getattr(module, "__file__", None)
    if os.path.isfile(file) and not (origin and os.path.samefile(origin, file)):
        raise ValueError(f"{name}: Python has another module {module_name!r}: rename {file}")
    if not hasattr(module, function):
        hint = checks.did_you_mean(function, dir(module))
        raise ValueError(f"{name}: {module_name} has no {function!r}{hint}")
    factory = getattr(module, function)
    if not callable(factory):
        raise ValueError(
            f"{name} must be a function of ({_takes(role)}), got {type(factory).__name__} "
            f"{factory!r}"
        )
    return factory


def check_takes(
    role: str, name: str, factory: Callable[..., Any], /, *args: Any, **settings: Any
) -> None:
    """Check that a user's factory takes some arguments."""
    signature = inspect.signature(factory)
    try:
        signature.bind(*args, **settings)
    except TypeError:
        takes = str(signature.replace(return_annotation=signature.empty))
        after = " and settings after *" if role in ROLES else ""
        raise ValueError(
            f"{role} {name} must take ({_takes(role)}){after}, but takes {takes}"
        ) from None


def _takes(role: str) -> str | None:
    return ROLES[role].takes if role in ROLES else _OTHERS_TAKE[role]


def run_user_code(name: str, function: Callable[[], Any]) -> Any:
    """Call a user's code; an error names its line."""
    try:
        return function()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = user_code_location(error) or f"{last.filename}:{last.lineno}"
        raise ValueError(f"{name} fails at {place}: {type(error).__name__}: {error}") from error


def user_code_location(error: BaseException) -> str | None:
    """Return the last line of a user's code that an error passed, as FILE:LINE; else None."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
            return f"{frame.f_code.co_filename}:{line}"
    return None
