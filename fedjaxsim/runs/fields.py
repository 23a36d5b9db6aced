"""Fields of the settings: the groups that runs have, and the fields that parts add."""

import dataclasses
import typing
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.factories import Setting
from fedjaxsim.runs.numbers import integers, words
from fedjaxsim.runs.parts import OWN, Part, spellings_of
from fedjaxsim.runs.user_code import is_own

if TYPE_CHECKING:
    from fedjaxsim.hyperparameters import Hyperparameter

_CALIBRATED = ("gaussian", "correlated", "pure")
"""Kinds of events whose noise follows from a target ε."""
_DERIVED = {
    "clip": "1 with noise, else inf",
    "noise_multiplier": "from epsilon",
    "count_noise": "cohort / 20",
}
"""Hyperparameters with a default that follows from other settings."""


def optional(metavar: str, default: str, text: str | None = None) -> Any:
    """Return tyro's description of a setting that need not be given."""
    hint = f"(default: {default})"
    return tyro.conf.arg(metavar=metavar, help=text, help_behavior_hint=hint)


def part_name(role: str, default: str, text: str) -> Any:
    """Return tyro's description of the setting that names the part of a role."""
    *names, last = spellings_of(role)
    return optional("NAME", default, f"{text}: {', '.join(names)} or {last}.")


def listed(
    metavar: str, parse: Callable[[str], tuple[Any, ...]] = words
) -> PrimitiveConstructorSpec:
    """Return tyro's description of values between commas, each called `metavar` in help."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{metavar}[,{metavar}...]",
        instance_from_str=lambda given: parse(given[0]),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(map(str, value))],
    )


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """The clients of a run."""

    data: Annotated[str, part_name("data", "digits", "Source of the clients")] = "digits"
    partition: Annotated[
        str | None, part_name("partition", "dirichlet", "Division of data without clients")
    ] = None
    held_out_clients: float = 0.0
    """Fraction to leave out, to tune on."""
    clients_used: Literal["kept", "held-out"] = "kept"
    """Clients of the run, left or held out."""
    seed: int = 0
    """Seed of all random numbers."""

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
    """Fraction of each client's rows for testing."""
    validation_fraction: float = 0.0
    """Fraction of each client's rows for validation."""
    classes: Annotated[int | None, optional("INT", "all")] = None
    """Number of classes to keep, the first ones, and clients that have some."""
    preprocess: Annotated[tuple[str, ...], listed("STEP")] = ()
    """Steps in order: drop-constant, invert (x to 1 - x), unit-rows."""


@dataclasses.dataclass(frozen=True)
class MinibatchSettings:
    """The minibatches of a client's round."""

    local_steps: Annotated[int | None, optional("INT", "local epochs")] = None
    """E, minibatches with replacement per round; instead of epochs (PP-SGD: 1)."""
    passes: Annotated[int | None, optional("INT", "no limit")] = None
    """Passes over a client's rows in the whole run, which consumes them."""
    local_epochs: Annotated[int | None, optional("INT", "1")] = None
    """E, passes over a client's rows per round."""
    batch_size: int = 10
    """b, rows in a minibatch."""


@dataclasses.dataclass(frozen=True)
class ExampleSettings:
    """The protection of single examples; help shows it with an algorithm's flags."""

    example_epsilon: Annotated[float | None, optional("FLOAT", "no such protection")] = None
    """ε of each example of a client in all rounds (less of others), by noise in gradients."""
    example_noise_multiplier: Annotated[float | None, optional("FLOAT", "by ε")] = None
    """z of that noise, the same for all clients, in place of their ε."""
    example_clip: Annotated[float | None, optional("FLOAT", "1 with that noise")] = None
    """C of an example, the bound on the norm of its gradient."""


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
    accountant: Annotated[str | None, optional("NAME", "tightest")] = None
    """Accountant of `fedjaxsim privacy`."""


@dataclasses.dataclass(frozen=True)
class OwnCodeSettings:
    """The check of an algorithm or a model of one's own."""

    trust_own_code: bool = False
    """Leave out the check that your code keeps clients apart."""


@dataclasses.dataclass(frozen=True)
class SpendingSettings:
    """Privacy that is spent up to a budget, and on evaluations; shown with a mechanism's flags."""

    budget_epsilon: Annotated[float | None, optional("FLOAT", "none")] = None
    """ε at which the run and its stages stop; noise and rounds may follow from releases."""
    evaluate_privately: Annotated[float | None, optional("Z", "none")] = None
    """z of the noise with which evaluations release a validation metric, charged to ε."""
    evaluation_largest: float = 1.0
    """Public bound to which clients' metrics are clipped for that."""


GROUPS: tuple[type, ...] = (
    RowSettings, MinibatchSettings, ExampleSettings, ScheduleSettings, BudgetSettings,
    TargetSettings, GuaranteeSettings, SpendingSettings, OwnCodeSettings,
)  # fmt: skip
"""The groups that parts add to a run, in the order of help and of files."""


def groups_of(part: Part, hyperparameters: Collection[str], event: str) -> list[type]:
    """Return the groups of settings that a part with these hyperparameters and event adds."""
    read: dict[type, bool] = {}
    if part.role == "data":
        read = {RowSettings: part.name != "synthetic-stream"}
    elif part.role == "algorithm":
        read = {
            MinibatchSettings: not SYSTEMS.get(part.name, OWN).whole_pass,
            ExampleSettings: not SYSTEMS.get(part.name, OWN).whole_pass,
            ScheduleSettings: "local_optimizer" in part.settings,
        }
    elif part.role == "mechanism":
        read = {
            BudgetSettings: "noise_multiplier" in hyperparameters and event != "correlated",
            TargetSettings: event in _CALIBRATED,
            GuaranteeSettings: event != "unprotected",
            SpendingSettings: event != "unprotected",
        }
    read[OwnCodeSettings] = part.role in ("algorithm", "model") and is_own(part.name)
    return [group for group in GROUPS if read.get(group)]


Field = tuple[Any, Any]
"""A type with tyro's description, and a dataclass field."""


def settings_type(name: str, fields: Mapping[str, Field], bases: tuple[type, ...]) -> type:
    """Make the dataclass of settings with more fields."""
    made = [(name, hint, default) for name, (hint, default) in fields.items()]
    return dataclasses.make_dataclass(name, made, bases=bases, frozen=True, kw_only=True)


def hyperparameter_field(record: "Hyperparameter") -> Field:
    """Return the field of a hyperparameter."""
    derived = record.default if isinstance(record.default, str) else _DERIVED.get(record.setting)
    if derived is not None:
        return Annotated[float | None, optional("FLOAT", derived, record.help)], _field(None)
    default = dataclasses.MISSING if record.default is None else record.default
    return Annotated[float, tyro.conf.arg(help=record.help)], _field(default)


def setting_field(setting: Setting) -> Field:
    """Return the field of a part's setting."""
    hint, default = setting.hint, setting.default
    lists = {tuple[str, ...]: listed("NAME"), tuple[int, ...]: listed("INT", integers)}
    kind = [lists[hint]] if hint in lists else []
    if setting.optional or (kind and default is None):
        names = {int: "INT", float: "FLOAT", str: "NAME", bool: "BOOL"}
        metavar = names.get(hint, "NAME[,NAME...]")
        if typing.get_origin(hint) is Literal:
            metavar = f"{{{','.join(typing.get_args(hint))}}}"
        arg = optional(metavar, "none", setting.help)
        hint, default = (hint, ()) if kind else (hint | None, default)
    else:
        arg = tyro.conf.arg(help=setting.help)
        default = tuple(default) if isinstance(default, list) else default
    made = Annotated[(hint, arg, *kind)]  # type: ignore[valid-type]
    return made, _field(dataclasses.MISSING if setting.required else default)


def _field(default: Any) -> Any:
    return dataclasses.field(default=default)
