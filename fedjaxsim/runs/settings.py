"""The settings of one run: flags, a TOML file, or both, where flags win.

A `RunConfig` holds what the user asked for. Its fields are those that every run has and those of
its parts: the settings and hyperparameters of the algorithm, model, mechanism, sampler, reader and
partition that it names. `run_config` composes them; a setting that no part of the run reads is
refused. What follows from settings (the noise multiplier behind an ε, the default δ, the cohort's
capacity) is worked out where the run is built.
"""

import dataclasses
import difflib
import functools
import math
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from fedjaxsim.algorithms.systems import SYSTEMS, System
from fedjaxsim.factories import Setting
from fedjaxsim.privacy.budget import Budget
from fedjaxsim.runs.numbers import integers, words
from fedjaxsim.runs.parts import (
    OWN,
    ROLES,
    Part,
    names_of,
    part_of,
    spellings_of,
    unknown_part,
)

if TYPE_CHECKING:
    from fedjaxsim.hyperparameters import Hyperparameter

_MOST = 2**31 - 1
_MILLION = 10**6
_LARGEST = {
    "seed": 2**32 - 1,
    "clients": _MOST,
    "classes": _MOST,
    "rounds": _MOST,
    "eval_every": _MOST,
    "chunk_size": _MOST,
    "batch_size": _MILLION,
    "local_steps": _MILLION,
    "local_epochs": _MILLION,
    "passes": _MILLION,
    "hidden": _MILLION,
    "cohort": _MOST,
    "max_participations": _MOST,
}
"""The largest whole numbers: what is counted over a run fits into int32."""
PREPROCESS = ("drop-constant", "invert", "unit-rows")
Penalty = Literal["vanilla", "mean", "kl", "ewc"]
Origin = Literal["personal", "global"]
OUTPUT = ("out", "overwrite", "quiet")
"""Settings that say where results go and how progress is shown."""

_INTEGERS = PrimitiveConstructorSpec(
    nargs=1,
    metavar="INT[,INT...]",
    instance_from_str=lambda given: integers(given[0]),
    is_instance=lambda value: isinstance(value, tuple),
    str_from_instance=lambda value: [",".join(map(str, value))],
)


def _words(metavar: str) -> PrimitiveConstructorSpec:
    """Parse words between commas, each called by `metavar` in help."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{metavar}[,{metavar}...]",
        instance_from_str=lambda given: words(given[0]),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(value)],
    )


def _part_arg(role: str, default: str, text: str) -> Any:
    """Return tyro's description of the setting that names the part of a role."""
    *names, last = spellings_of(role)
    help_ = f"{text}: {', '.join(names)} or {last}."
    return tyro.conf.arg(metavar="NAME", help=help_, help_behavior_hint=f"(default: {default})")


def optional(metavar: str, default: str) -> Any:
    """Return tyro's description of a setting that need not be given."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """The clients of a run."""

    data: Annotated[str, _part_arg("data", "digits", "Source of the clients")] = "digits"
    partition: Annotated[
        str | None, _part_arg("partition", "dirichlet", "Division of data without clients")
    ] = None
    held_out_clients: float = 0.0
    """Part of the clients to leave out; `fedjaxsim tune` tunes on them."""
    seed: int = 0
    """Seed of partition, initial models, cohorts, minibatches and noise."""

    if TYPE_CHECKING:  # The settings of the parts are fields, too, of composed types.

        def __getattr__(self, name: str) -> Any: ...

    def given(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


@dataclasses.dataclass(frozen=True)
class RowSettings:
    """The rows of the clients."""

    test_fraction: Annotated[float | None, optional("FLOAT", "the data's test rows, or 0.2")] = None
    """Part of each client's rows for testing."""
    validation_fraction: float = 0.0
    """The same for validation."""
    classes: Annotated[int | None, optional("INT", "all")] = None
    """Number of classes to keep, the first ones, and clients that have some."""
    preprocess: Annotated[tuple[str, ...], _words("STEP")] = ()
    """Steps in order: drop-constant, invert (x to 1 - x), unit-rows."""


@dataclasses.dataclass(frozen=True)
class MinibatchSettings:
    """The minibatches of a client's round."""

    local_steps: Annotated[int | None, optional("INT", "local epochs")] = None
    """E, minibatches with replacement per round; instead of epochs (PP-SGD: 1)."""
    passes: Annotated[int | None, optional("INT", "no limit")] = None
    """Passes over a client's rows in the whole run, which consumes them."""
    local_epochs: Annotated[int | None, optional("INT", "1")] = None
    """E, passes over a client's rows per round; instead of steps."""
    batch_size: int = 10
    """b, rows in a minibatch."""


@dataclasses.dataclass(frozen=True)
class ScheduleSettings:
    """The local learning rate over the rounds."""

    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Schedule of η over rounds; cosine and linear end at 0."""


@dataclasses.dataclass(frozen=True)
class BudgetSettings:
    """The noise over the rounds."""

    budget: Annotated[str | None, optional("constant|power:A|geometric:Q", "constant")] = None
    """Share of the privacy budget by round, t^A or Q^-t; z is the constant noise of equal cost."""


@dataclasses.dataclass(frozen=True)
class TargetSettings:
    """The target of a run whose noise an accountant describes."""

    epsilon: Annotated[float | None, optional("FLOAT", "inf")] = None
    """Target ε of the run (joint DP, zero-out); inf: no noise, no clipping."""


@dataclasses.dataclass(frozen=True)
class GuaranteeSettings:
    """The guarantee of a run and of the stages before it."""

    delta: Annotated[float | None, optional("FLOAT", "1/(10 m)")] = None
    """δ of the guarantee, for m clients."""
    accountant: Annotated[str | None, optional("NAME", "the tightest")] = None
    """Accountant, by its name in `fedjaxsim privacy`."""


@dataclasses.dataclass(frozen=True)
class RunConfig(DataSettings):
    """The settings that every run has; a TOML file has the same keys, with - or _."""

    algorithm: Annotated[str, _part_arg("algorithm", "pmtl", "Federated algorithm")] = "pmtl"
    model: Annotated[str, _part_arg("model", "linear", "Model of every client")] = "linear"
    mechanism: Annotated[
        str | None, _part_arg("mechanism", "the algorithm's own", "Release of the messages")
    ] = None
    sampling: Annotated[str | None, _part_arg("sampling", "poisson", "Sampling of the cohorts")] = (
        None
    )
    loss: Literal["softmax", "one-vs-all", "squared", "logistic"] = "softmax"
    """Local loss; one-vs-all is squared, logistic takes labels ±1 or 0/1."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Precision of models; parameters, messages and noise are float32."""
    rounds: int = 100
    """T, communication rounds."""
    eval_every: int = 10
    """Rounds between evaluations."""
    patience: Annotated[int | None, optional("INT", "all rounds")] = None
    """Evaluations without a better validation metric before a stop; no ε covers that."""
    chunk_size: Annotated[int | None, optional("INT", "the cohort")] = None
    """Clients computed at once."""
    chunk_map: Annotated[Literal["vmap", "scan"] | None, optional("{vmap,scan}", "by backend")] = (
        None
    )
    """Mapping over a chunk's clients."""
    streamed: bool = False
    """Keep rows on disk (data folder:PATH) or host; a device holds one cohort."""

    out: Annotated[Path | None, optional("DIR", "none")] = None
    """Directory for the results."""
    overwrite: bool = False
    """Replace the run in the directory."""
    quiet: bool = False
    """One plain line per evaluation."""

    composition: ClassVar["Composition"]

    # --- its parts --------------------------------------------------------------------------------

    @property
    def system(self) -> System:
        """The record of the algorithm."""
        return SYSTEMS.get(self.algorithm, OWN)

    @property
    def parts(self) -> dict[str, Part]:
        """The parts by role."""
        return self.composition.parts

    @property
    def records(self) -> dict[str, "Hyperparameter"]:
        """The hyperparameters of all parts, by name."""
        return self.composition.records

    def part(self, role: str) -> Part:
        """Return the part of a role."""
        return self.parts[role]

    def arguments(self, role: str) -> dict[str, Any]:
        """Return the arguments of the factory of a role, as the settings say them."""
        part = self.parts.get(role)
        return {} if part is None else part.arguments(self)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting, or the default where no part of the run has it."""
        return getattr(self, name, default)

    def replace(self, **changes: Any) -> "RunConfig":
        """Return the settings with changes, which may name other parts.

        Settings of parts that the run no longer has are left out, as are defaults.

        Raises:
          ValueError: for a change that no part reads.
        """
        kept = {name: value for name, value in self.given().items() if name not in changes}
        known = fields_of(kept | changes)
        return run_config(**{n: value for n, value in kept.items() if n in known}, **changes)

    def data_settings(self) -> set[str]:
        """Return the names of the settings of its data."""
        groups = (DataSettings, RowSettings)
        names = {field.name for group in groups for field in dataclasses.fields(group)}
        parts = [part for role, part in self.parts.items() if role in ("data", "partition")]
        return names.union(*(part.settings for part in parts))

    def settings(self) -> dict[str, Any]:
        """Return what the run computes as TOML values: the keys of a file that repeats it.

        Output settings are left out, and what was not set.
        """
        table = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in OUTPUT and value is not None:
                table[field.name] = list(value) if isinstance(value, tuple) else value
        return table

    # --- what follows from settings ---------------------------------------------------------------

    @property
    def target_epsilon(self) -> float:
        """The ε asked for; ∞ where none was."""
        epsilon = self.get("epsilon")
        return math.inf if epsilon is None else epsilon

    @property
    def spread(self) -> Budget:
        """The spread of the budget over the rounds."""
        return Budget.parse(self.get("budget"))

    @property
    def clips(self) -> bool:
        """True if messages are clipped: with a given z or a finite ε; adaptively, always."""
        noise = self.get("noise_multiplier") is not None or math.isfinite(self.target_epsilon)
        return "clip_norm" in self.records and (noise or "target_quantile" in self.records)

    @property
    def clip_norm(self) -> float:
        """C of messages that are clipped: 1 where none was given."""
        clip = self.get("clip")
        return 1.0 if clip is None else clip

    @property
    def sampler(self) -> str:
        """The name of the sampler; a Poisson rate of 1 is everyone."""
        everyone = self.sampling is None and self.get("sampling_rate") == 1
        return "full" if everyone else self.parts["sampling"].name

    @property
    def diagonal(self) -> bool:
        """True if the algorithm needs only the diagonal of a Gram matrix."""
        return (self.get("penalty") or "").endswith("group-sparse")

    # --- checks -----------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check what concerns settings together; single numbers are checked by the library.

        Raises:
          ValueError: naming the settings, their values and what is allowed.
        """
        for one, other in EXCLUSIVE:
            first, second = self.get(one), self.get(other)
            if first is not None and second is not None:
                raise ValueError(
                    f"{flag(one)} and {flag(other)} exclude each other: give one of them, got "
                    f"{flag(one)} {first} and {flag(other)} {second}"
                )
        epsilon, delta = self.get("epsilon"), self.get("delta")
        if epsilon is not None and not epsilon > 0:
            raise ValueError(f"epsilon must be positive (inf: no privacy), got {epsilon}")
        if delta is not None and not 0 < delta < 1:
            raise ValueError(f"delta must lie in (0, 1), got {delta}")
        self._check_sizes()
        steps = [step for step in self.get("preprocess", ()) if step not in PREPROCESS]
        if steps:
            raise ValueError(f"preprocess takes {', '.join(PREPROCESS)}, got {steps[0]!r}")
        one = self.system.one_minibatch
        if self.get("passes") is not None and not one and self.get("local_steps") is None:
            raise ValueError(f"passes need local-steps, got passes {self.get('passes')} alone")
        self.spread.check(self.rounds)
        if not 0 <= self.held_out_clients < 1:
            raise ValueError(f"held-out-clients must lie in [0, 1), got {self.held_out_clients}")
        if len(self.get("fields", ())) not in (0, 2):
            raise ValueError(f"fields must be two names, got {', '.join(self.get('fields'))}")
        if self.get("classes") is not None and self.get("classes") < 2:
            raise ValueError(f"classes must be at least 2, got {self.get('classes')}")
        if self.data == "synthetic-stream" and (self.model, self.loss) != ("linear", "squared"):
            raise ValueError(
                "synthetic-stream is a linear regression: model must be linear and loss squared, "
                f"got model {self.model} and loss {self.loss}"
            )

    def _check_sizes(self) -> None:
        hidden = self.get("hidden", (1,))
        if not hidden:
            raise ValueError("hidden must hold at least one width, got none")
        if any(width < 1 for width in hidden):
            raise ValueError(f"hidden widths must be at least 1, got {list(hidden)}")
        for name in ("rounds", "eval_every", "patience"):
            value = self.get(name)
            if value is not None and value < 1:
                raise ValueError(f"{flag(name)} must be at least 1, got {value}")
        for name, largest in _LARGEST.items():
            size = max(hidden) if name == "hidden" else self.get(name)
            if size is not None and size > largest:
                raise ValueError(f"{flag(name)} must be at most {largest}, got {size}")

    def require_unstreamed(self, what: str) -> None:
        """Check that rows lie where many runs can read them again and again.

        Raises:
          ValueError: they are streamed.
        """
        if self.streamed:
            raise ValueError(
                f"{what} needs all rows in memory and does not stream: leave out streamed"
            )


# --- composition ----------------------------------------------------------------------------------

EXCLUSIVE = (("epsilon", "noise_multiplier"), ("local_steps", "local_epochs"))
"""Settings of which a run is given one at most."""
_CALIBRATED = ("gaussian", "pure")
"""Kinds of events whose noise follows from a target ε."""
_DERIVED = {
    "clip": "1 with noise, else inf",
    "noise_multiplier": "from epsilon",
    "count_noise": "cohort / 20",
}
"""Hyperparameters whose value follows from other settings where none is given."""


class Composition(typing.NamedTuple):
    """The settings of a run with some parts.

    Attributes:
      type: a `RunConfig` with the fields of these parts.
      parts: by role.
      records: the hyperparameters of all parts, by name.
    """

    type: type[RunConfig]
    parts: dict[str, Part]
    records: dict[str, "Hyperparameter"]


def composition_of(given: Mapping[str, Any]) -> Composition:
    """Compose the settings of the parts that some settings name.

    Args:
      given: settings by name; values may be as typed on a command line.

    Raises:
      ValueError: for an unknown part, own code that cannot be found, or names that clash.
    """
    from fedjaxsim.hyperparameters import compose

    names = names_of(given)
    parts = {role: _part(role, name) for role, name in names.items()}
    records = [part.records(given) for part in parts.values()]
    event = parts["mechanism"].event_kind(given)
    return _composed(tuple(names.items()), tuple(compose(records).items()), event)


@functools.cache
def _part(role: str, name: str) -> Part:
    return part_of(role, name)


@functools.cache
def _composed(
    names: tuple[tuple[str, str], ...],
    records: "tuple[tuple[str, Hyperparameter], ...]",
    event: str,
) -> Composition:
    parts = {role: _part(role, name) for role, name in names}
    by_name, fields = dict(records), {}
    system = SYSTEMS.get(parts["algorithm"].name, OWN)
    groups: list[type] = [] if parts["data"].name == "synthetic-stream" else [RowSettings]
    groups += [] if system.whole_pass else [MinibatchSettings]
    groups += [ScheduleSettings] if "local_optimizer" in parts["algorithm"].settings else []
    groups += [BudgetSettings] if "noise_multiplier" in by_name else []
    groups += [TargetSettings] if event in _CALIBRATED else []
    groups += [GuaranteeSettings] if event != "unprotected" else []
    for record in by_name.values():
        fields[record.setting] = _hyperparameter_field(record)
    for part in parts.values():
        for name, setting in part.settings.items():
            same = name in fields and any(r.setting == name for r in _all_records(part))
            if name in fields and not same:
                raise ValueError(
                    f"{part.role} {part.name} has a setting {name!r}, as another part of the run "
                    "has: rename one of them"
                )
            fields.setdefault(name, _setting_field(setting))
    taken = {field.name for group in (RunConfig, *groups) for field in dataclasses.fields(group)}
    for name in fields:
        if name in taken:
            raise ValueError(f"{name!r} is a setting of every run: no part may have one so called")
    made = dataclasses.make_dataclass(
        "RunConfig",
        [(name, hint, default) for name, (hint, default) in fields.items()],
        bases=(*groups[::-1], RunConfig),
        frozen=True,
        kw_only=True,
    )
    made.__doc__ = RunConfig.__doc__
    made.composition = Composition(made, parts, by_name)
    return made.composition


def _hyperparameter_field(record: "Hyperparameter") -> tuple[Any, Any]:
    derived = _DERIVED.get(record.setting)
    if derived is not None:
        arg = tyro.conf.arg(
            metavar="FLOAT", help=record.help, help_behavior_hint=f"(default: {derived})"
        )
        return Annotated[float | None, arg], dataclasses.field(default=None)
    arg = tyro.conf.arg(help=record.help)
    if record.default is None:
        return Annotated[float, arg], dataclasses.field()
    return Annotated[float, arg], dataclasses.field(default=record.default)


def _setting_field(setting: Setting) -> tuple[Any, Any]:
    hint, text = setting.hint, setting.help
    kinds: dict[Any, Any] = {tuple[str, ...]: _words("NAME"), tuple[int, ...]: _INTEGERS}
    metavars = {int: "INT", float: "FLOAT", str: "NAME", bool: "BOOL"}
    default = setting.default
    if setting.optional or (hint in kinds and default is None):
        choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
        metavar = f"{{{','.join(choices)}}}" if choices else metavars.get(hint, "NAME[,NAME...]")
        arg = tyro.conf.arg(metavar=metavar, help=text, help_behavior_hint="(default: none)")
        if hint in kinds:
            return Annotated[hint, arg, kinds[hint]], dataclasses.field(default=())
        field = dataclasses.field() if setting.required else dataclasses.field(default=default)
        return Annotated[hint | None, arg], field
    if isinstance(default, list | tuple):
        default = tuple(default)
    arg = tyro.conf.arg(help=text)
    kind = (kinds[hint],) if hint in kinds else ()
    annotated = Annotated[(hint, arg, *kind)]  # type: ignore[valid-type]
    return annotated, dataclasses.field() if setting.required else dataclasses.field(
        default=default
    )


def fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the types of the settings that a run with these parts has, by name."""
    return _hints(composition_of(given).type)


@functools.cache
def _hints(kind: type[RunConfig]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def run_config(**settings: Any) -> RunConfig:
    """Make the settings of a run.

    Args:
      **settings: by name; the defaults of the run and its parts stand in for the rest.

    Raises:
      ValueError: for a setting that no part of the run reads, or a missing one without a default.
    """
    check_parts(settings)
    made = composition_of(settings).type
    require_read(settings, settings)
    missing = [
        field.name
        for field in dataclasses.fields(made)
        if field.default is dataclasses.MISSING and field.name not in settings
    ]
    if missing:
        raise ValueError(f"{flag(missing[0])} must be given: it has no default")
    return made(**settings)


def check_parts(given: Mapping[str, Any]) -> None:
    """Check the names of the parts that settings have.

    Raises:
      ValueError: for an unknown one.
    """
    for role in ROLES:
        name = given.get(role)
        if name is None or (isinstance(name, str) and role in ("data", "partition")):
            continue
        if not isinstance(name, str):
            raise ValueError(f"{role} must be a name, got {name!r}")
        problem = unknown_part(role, name)
        if problem is not None:
            raise ValueError(problem)


def flag(name: str) -> str:
    """Return the spelling of a setting on the command line, without the dashes in front."""
    return name.replace("_", "-")


@dataclasses.dataclass(frozen=True)
class Everything(
    GuaranteeSettings, TargetSettings, BudgetSettings, ScheduleSettings, MinibatchSettings,
    RowSettings, RunConfig,
):  # fmt: skip
    """The settings that most runs have, for help.

    The flags of a part are shown once it is named, as by `run --algorithm pmtl --help`; parts are
    algorithm, model, mechanism, sampling, data and partition.
    """


def data_type(given: Mapping[str, Any]) -> type[DataSettings]:
    """Compose the settings of data: their reader's and their partition's.

    Args:
      given: settings that name them.

    Raises:
      ValueError: for an unknown reader or partition.
    """
    names = names_of(given)
    parts = [_part(role, names[role]) for role in ("data", "partition") if role in names]
    fields = {n: _setting_field(setting) for part in parts for n, setting in part.settings.items()}
    rows = () if names["data"] == "synthetic-stream" else (RowSettings,)
    return dataclasses.make_dataclass(
        "DataSettings",
        [(name, hint, default) for name, (hint, default) in fields.items()],
        bases=(*rows, DataSettings),
        frozen=True,
        kw_only=True,
    )


# --- settings that nothing reads ------------------------------------------------------------------


def require_read(names: Iterable[str], given: Mapping[str, Any]) -> None:
    """Check that a run with some parts reads settings of these names.

    Raises:
      ValueError: naming what has no effect, and what reads it.
    """
    reasons = unread(names, given)
    if reasons:
        raise ValueError("; ".join(reasons))


def unread(names: Iterable[str], given: Mapping[str, Any], others: Iterable[str] = ()) -> list[str]:
    """Return why settings of these names have no effect on a run, in words.

    Args:
      names: of the settings.
      given: settings that name the parts of the run.
      others: names that are no settings, but that an unknown one may be meant for.

    Raises:
      ValueError: for a name that no part of any run has, with the nearest one.
    """
    known = fields_of(given)
    parts = composition_of(given).parts
    reasons = []
    for name in names:
        if name in known:
            continue
        readers = _readers()
        if name not in readers:
            raise ValueError(unknown_key(name, [*known, *readers, *others]))
        # A role that the run lacks says the most, else the one with most parts that read it.
        role, choices = max(
            readers[name].items(), key=lambda item: (item[0] not in parts, len(item[1]))
        )
        if role not in parts:
            reasons.append(f"{flag(name)} has no effect on data with clients of their own")
            continue
        what, chosen = role, parts[role].name
        if chosen in choices:
            what, chosen, choices = _condition(parts[role], name, given)
        reasons.append(
            f"{flag(name)} has no effect with {what} {chosen}, only with {' or '.join(choices)}"
        )
    return reasons


def _condition(part: Part, name: str, given: Mapping[str, Any]) -> tuple[str, str, list[str]]:
    """The setting of a part on which it depends whether the part reads a hyperparameter.

    Returns:
      the setting, its value, and the values with which the part reads the hyperparameter.
    """
    from fedjaxsim.hyperparameters import declared_by

    for setting in part.settings.values():
        values = [
            value
            for value in setting.values
            if name in {r.setting for r in declared_by(part.factory, **{setting.name: value})}
        ]
        if values and len(values) < len(setting.values):
            chosen = given.get(setting.name, setting.default)
            return flag(setting.name), str(chosen), list(map(str, values))
    return part.role, part.name, [part.name]


def unknown_key(name: str, known: Iterable[str]) -> str:
    """Return the message about a name that is no setting, with the nearest one."""
    flags = list(dict.fromkeys(map(flag, known)))
    close = difflib.get_close_matches(flag(name), flags, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"unknown setting {flag(name)!r}{hint}"


@functools.cache
def _readers() -> dict[str, dict[str, list[str]]]:
    """The parts of the package that read a setting: by name, by role, their names."""
    found: dict[str, dict[str, list[str]]] = {}

    def add(setting: str, part: Part) -> None:
        names = found.setdefault(setting, {}).setdefault(part.role, [])
        if part.name not in names:
            names.append(part.name)

    for role, known in ROLES.items():
        for name in known.known:
            part = part_of(role, name)
            for setting in part.settings:
                add(setting, part)
            for record in _all_records(part):
                add(record.setting, part)
            if role == "algorithm":
                system = SYSTEMS[name]
                for group, read in (
                    (MinibatchSettings, not system.whole_pass),
                    (ScheduleSettings, "local_optimizer" in part.settings),
                ):
                    for field in dataclasses.fields(group) if read else ():
                        add(field.name, part)
            if role == "data" and name != "synthetic-stream":
                for field in dataclasses.fields(RowSettings):
                    add(field.name, part)
            if role == "mechanism":
                event = part.event_kind({})
                read = [TargetSettings] if event in _CALIBRATED else []
                read += [GuaranteeSettings] if event != "unprotected" else []
                for field in (field for group in read for field in dataclasses.fields(group)):
                    add(field.name, part)
                if any(record.name == "noise_multiplier" for record in _all_records(part)):
                    add("budget", part)
    return found


def _all_records(part: Part) -> "tuple[Hyperparameter, ...]":
    """The hyperparameters that a part reads with any of its settings."""
    if part.role not in ("algorithm", "mechanism", "sampling"):
        return ()
    from fedjaxsim.hyperparameters import ever_declared_by

    return ever_declared_by(part.factory)
