"""The settings of one run: flags, a TOML file, or both, where flags win.

A `RunConfig` holds what the user asked for: the settings of every run, and the settings and
hyperparameters of its parts. `run_config` composes them and refuses a setting that no part of the
run reads. Values that follow from settings (the noise multiplier behind an ε, the default δ, the
cohort's capacity) are computed where the run is built.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from tyro.conf import Fixed, Suppress

from fedjaxsim.algorithms.systems import SYSTEMS, System
from fedjaxsim.privacy.budget import Budget
from fedjaxsim.runs.fields import (
    GROUPS,
    BudgetSettings,
    DataSettings,
    Field,
    GuaranteeSettings,
    MinibatchSettings,
    RowSettings,
    ScheduleSettings,
    TargetSettings,
    groups_of,
    hyperparameter_field,
    optional,
    part_name,
    setting_field,
    settings_type,
)
from fedjaxsim.runs.parts import OWN, Part, absolute, check_parts, flag, names_of, part_of
from fedjaxsim.runs.unread import reasons_unread

if TYPE_CHECKING:
    from fedjaxsim.hyperparameters import Hyperparameter

_INT32, _MILLION = 2**31 - 1, 10**6
_LARGEST = {
    "seed": 2**32 - 1,
    **dict.fromkeys(("clients", "classes", "rounds", "eval_every", "chunk_size"), _INT32),
    **dict.fromkeys(("batch_size", "local_steps", "local_epochs", "passes", "hidden"), _MILLION),
    **dict.fromkeys(("cohort", "max_participations", "groups", "bands"), _INT32),
}
"""The largest whole numbers: sums over a run fit into int32."""
_EXAMPLES = ("example_epsilon", "example_noise_multiplier")
EXCLUSIVE = (("epsilon", "noise_multiplier"), ("local_steps", "local_epochs"), _EXAMPLES)
"""Pairs of settings of which a run is given one at most."""
_PREPROCESS = ("drop-constant", "invert", "unit-rows")
OUTPUT = ("out", "overwrite", "quiet")
"""Settings of the output: the directory of results and the display of progress."""


@dataclasses.dataclass(frozen=True)
class RunConfig(DataSettings):
    """The settings that every run has; a TOML file has the same keys, with - or _."""

    algorithm: Annotated[str, part_name("algorithm", "pmtl", "Federated algorithm")] = "pmtl"
    model: Annotated[str, part_name("model", "linear", "Model of every client")] = "linear"
    mechanism: Annotated[
        str | None, part_name("mechanism", "the algorithm's own", "Release of the messages")
    ] = None
    sampling: Annotated[str | None, part_name("sampling", "poisson", "Sampling of the cohorts")] = (
        None
    )
    availability: Annotated[
        str | None, part_name("availability", "always", "When drawn clients answer")
    ] = None
    compression: Annotated[
        str | None, part_name("compression", "none", "Compression of a client's message")
    ] = None
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
    audit_canaries: Annotated[int | None, optional("INT", "none")] = None
    """Artificial clients beside the real ones, whose messages bound ε from below."""
    chunk_size: Annotated[int | None, optional("INT", "by backend")] = None
    """Clients computed at once."""
    chunk_map: Annotated[Literal["vmap", "scan"] | None, optional("{vmap,scan}", "by backend")] = (
        None
    )
    """Mapping over a chunk's clients."""
    streamed: bool = False
    """Keep rows on disk (data folder:PATH) or host; a device holds one cohort."""

    public: Suppress[Fixed[tuple[str, ...]]] = ()
    """Sentences for every report of the run, on choices that read private rows; in files only."""

    out: Annotated[Path | None, optional("DIR", "none")] = None
    """Directory for the results."""
    overwrite: bool = False
    """Replace the run in the directory."""
    quiet: bool = False
    """One plain line per evaluation."""

    if TYPE_CHECKING:  # set by `config_type`
        parts: ClassVar[dict[str, Part]]
        """The parts by role."""
        records: ClassVar[dict[str, Hyperparameter]]
        """The hyperparameters of all parts, by name."""

    # --- its parts --------------------------------------------------------------------------------

    @property
    def system(self) -> System:
        """The record of the algorithm."""
        return SYSTEMS.get(self.algorithm, OWN)

    def arguments(self, role: str) -> dict[str, Any]:
        """Return the arguments of the factory of a role; none where the run lacks the role."""
        part = self.parts.get(role)
        return {} if part is None else part.arguments(self)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting, or the default where no part of the run has it."""
        return getattr(self, name, default)

    def replace(self, **changes: Any) -> "RunConfig":
        """Return the settings with changes, which may name other parts.

        Defaults, and settings of parts that the run no longer has, are left out.

        Raises:
          ValueError: for a change that no part reads.
        """
        kept = {name: value for name, value in self.given().items() if name not in changes}
        known = fields_of(kept | changes)
        return run_config(**{n: value for n, value in kept.items() if n in known}, **changes)

    def data_settings(self) -> set[str]:
        """Return the names of the settings of its data."""
        return {field.name for field in dataclasses.fields(data_type(vars(self)))}

    def settings(self) -> dict[str, Any]:
        """Return the keys of a TOML file that repeats the run from any folder.

        Settings of the output and unset ones are left out.
        """
        table = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in OUTPUT and value is not None:
                table[field.name] = list(value) if isinstance(value, tuple) else value
        return table | {"data": absolute(self.data)}

    # --- values that follow -----------------------------------------------------------------------

    @property
    def target_epsilon(self) -> float:
        """The target ε; ∞ without one."""
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
    def protects_examples(self) -> bool:
        """True if gradients protect single examples."""
        return any(self.get(name) is not None for name in _EXAMPLES)

    @property
    def clip_norm(self) -> float:
        """C of messages that are clipped; 1 by default."""
        clip = self.get("clip")
        return 1.0 if clip is None else clip

    @property
    def sampler(self) -> str:
        """The name of the sampler; a Poisson rate of 1 is full participation."""
        full = self.sampling is None and self.get("sampling_rate") == 1
        return "full" if full else self.parts["sampling"].name

    # --- checks -----------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check settings against each other, and sizes; the library checks hyperparameters.

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
        if math.isfinite(self.target_epsilon) and not math.isfinite(self.clip_norm):
            raise ValueError(f"clip must be finite where epsilon is, got {self.clip_norm}")
        if self.get("example_clip") is not None and not self.protects_examples:
            raise ValueError(f"example-clip needs one of {' and '.join(map(flag, _EXAMPLES))}")
        budget = self.get("budget_epsilon")
        if budget is not None and not budget > 0:
            raise ValueError(f"budget-epsilon must be positive, got {budget}")
        private = self.get("evaluate_privately")
        for name in ("budget_epsilon", "evaluate_privately"):
            if self.get(name) is not None and self.get("accountant") is not None:
                raise ValueError(f"accountant does not describe {flag(name)}: give one of them")
        if private is not None and self.patience is not None and not self.get("budget_epsilon"):
            raise ValueError(
                "patience with evaluate-privately needs budget-epsilon: rounds that follow from "
                "releases are covered by a budget alone"
            )
        if delta is not None and not 0 < delta < 1:
            raise ValueError(f"delta must lie in (0, 1), got {delta}")
        self._check_sizes()
        steps = [step for step in self.get("preprocess", ()) if step not in _PREPROCESS]
        if steps:
            raise ValueError(f"preprocess takes {', '.join(_PREPROCESS)}, got {steps[0]!r}")
        one = self.system.one_minibatch
        if self.get("passes") is not None and not one and self.get("local_steps") is None:
            raise ValueError(f"passes need local-steps, got passes {self.get('passes')} alone")
        self.spread.check(self.rounds)
        if not 0 <= self.held_out_clients < 1:
            raise ValueError(f"held-out-clients must lie in [0, 1), got {self.held_out_clients}")
        if self.clients_used == "held-out" and self.held_out_clients == 0:
            raise ValueError("clients-used held-out needs held-out-clients above 0, got 0")
        if len(self.get("fields", ())) not in (0, 2):
            raise ValueError(f"fields must be two names, got {', '.join(self.get('fields'))}")
        if self.data == "synthetic-stream" and (self.model, self.loss) != ("linear", "squared"):
            raise ValueError(
                "synthetic-stream is a linear regression: model must be linear and loss squared, "
                f"got model {self.model} and loss {self.loss}"
            )

    def _check_sizes(self) -> None:
        hidden = self.get("hidden", (1,))
        if not isinstance(hidden, tuple):  # a setting of one's own model
            hidden = (1,)
        if not hidden:
            raise ValueError("hidden must hold at least one width, got none")
        if any(width < 1 for width in hidden):
            raise ValueError(f"hidden widths must be at least 1, got {list(hidden)}")
        for name, least in {"rounds": 1, "eval_every": 1, "patience": 1, "classes": 2}.items():
            value = self.get(name)
            if value is not None and value < least:
                raise ValueError(f"{flag(name)} must be at least {least}, got {value}")
        for name, largest in _LARGEST.items():
            size = max(hidden) if name == "hidden" else self.get(name)
            if size is not None and size > largest:
                raise ValueError(f"{flag(name)} must be at most {largest}, got {size}")

    def require_no_canaries(self, what: str) -> None:
        """Check that the run has no canaries; raise a ValueError if it has."""
        if self.audit_canaries is not None:
            raise ValueError(f"audit-canaries is for one run, not for {what}: leave it out")

    def require_batchable(self, what: str) -> None:
        """Check that rows stay in memory and that no budget ends a run before others.

        Raises:
          ValueError: for a streamed run, or a budget.
        """
        for name in ("budget_epsilon", "evaluate_privately"):
            if self.get(name) is not None:
                raise ValueError(f"{flag(name)} is for single runs: those of {what} go on together")
        if self.streamed:
            raise ValueError(
                f"{what} needs all rows in memory and does not stream: leave out streamed"
            )


@dataclasses.dataclass(frozen=True)
class Everything(
    GuaranteeSettings, TargetSettings, BudgetSettings, ScheduleSettings, MinibatchSettings,
    RowSettings, RunConfig,
):  # fmt: skip
    """The settings that most runs have, for help.

    The flags of a part, such as --clip, are shown once it is named: `run --algorithm pmtl --help`;
    parts are algorithm, model, mechanism, sampling, availability, compression, data and partition.
    """


# --- composition ----------------------------------------------------------------------------------


def config_type(given: Mapping[str, Any]) -> type[RunConfig]:
    """Compose the settings of a run from the parts that `given` names, as typed or converted.

    Raises:
      ValueError: for an unknown part, a user's code that cannot be found, or names that clash.
    """
    from fedjaxsim.hyperparameters import compose

    names = names_of(given)
    parts = {role: part_of(role, name) for role, name in names.items()}
    records = compose(part.records(given) for part in parts.values())
    event = parts["mechanism"].event_kind(given)
    return _composed(tuple(names.items()), tuple(records.items()), event)


@functools.cache
def _composed(
    names: tuple[tuple[str, str], ...],
    records: "tuple[tuple[str, Hyperparameter], ...]",
    event: str,
) -> type[RunConfig]:
    parts, by_name = {role: part_of(role, name) for role, name in names}, dict(records)
    read = [group for part in parts.values() for group in groups_of(part, by_name, event)]
    bases = (*(group for group in reversed(GROUPS) if group in read), RunConfig)
    fields: dict[str, Field] = {
        record.setting: hyperparameter_field(record) for record in by_name.values()
    }
    for part in parts.values():
        declared = {record.setting for record in part.all_records}
        for name, setting in part.settings.items():
            if name in fields and name not in declared:
                raise ValueError(
                    f"{part.role} {part.name} has a setting {name!r}, as another part of the run "
                    "has: rename one of them"
                )
            fields.setdefault(name, setting_field(setting))
    for name in fields:
        if any(name in base.__dataclass_fields__ for base in bases):
            raise ValueError(f"{name!r} is a setting of every run: no part may have one so called")
    made = settings_type("RunConfig", fields, bases)
    made.__doc__ = RunConfig.__doc__
    made.parts, made.records = parts, by_name
    return made


def data_type(given: Mapping[str, Any]) -> type[DataSettings]:
    """Compose the settings of data from the reader and the partition that settings name."""
    names = names_of(given)
    parts = [part_of(role, names[role]) for role in ("data", "partition") if role in names]
    fields = {n: setting_field(setting) for part in parts for n, setting in part.settings.items()}
    return settings_type("DataSettings", fields, (*groups_of(parts[0], (), ""), DataSettings))


def fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the types of the settings that a run with these parts has, by name."""
    return _hints(config_type(given))


@functools.cache
def _hints(kind: type[RunConfig]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def run_config(**settings: Any) -> RunConfig:
    """Make the settings of a run; those not given have the defaults of the run and its parts.

    Raises:
      ValueError: for a setting that no part of the run reads, or a missing one without a default.
    """
    check_parts(settings)
    made = config_type(settings)
    require_read(settings, settings)
    for field in dataclasses.fields(made):
        if field.default is dataclasses.MISSING and field.name not in settings:
            raise ValueError(f"{flag(field.name)} must be given: it has no default")
    return made(**settings)


def unread(names: Iterable[str], given: Mapping[str, Any], others: Iterable[str] = ()) -> list[str]:
    """Return the reasons for which settings have no effect on a run; see `reasons_unread`."""
    made = config_type(given)
    return list(reasons_unread(names, _hints(made), made.parts, given, others))


def require_read(names: Iterable[str], given: Mapping[str, Any]) -> None:
    """Check that a run reads the settings of these names.

    Raises:
      ValueError: naming the settings without effect, and the parts that read them.
    """
    reasons = unread(names, given)
    if reasons:
        raise ValueError("; ".join(reasons))
