"""The settings of one run: a table of typed keys, made of what every run and its parts declare.

`layered` makes a `RunConfig`, whether of flags, files or Python: it composes the table of the parts
that settings name, converts values, and refuses a setting that no part of the run reads. Values
that follow from settings (the noise multiplier behind an ε, the default δ) are computed where the
run is built.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fedjaxsim import checks
from fedjaxsim.algorithms.systems import SYSTEMS, System
from fedjaxsim.data.files import in_file
from fedjaxsim.factories import REQUIRED, Setting, flag, is_user_code
from fedjaxsim.privacy.entries import LARGEST_NOISE, SMALLEST_NOISE
from fedjaxsim.privacy.schedule import Schedule
from fedjaxsim.runs.parts import (
    LOSSES,
    ROLES,
    USER_LOSS,
    USER_SYSTEM,
    Loss,
    Part,
    absolute,
    check_parts,
    names_of,
    part_of,
    spellings_of,
)
from fedjaxsim.runs.seeds import SecretSeed, SeedSetting, number_of

if TYPE_CHECKING:
    from fedjaxsim.hyperparameters import Hyperparameter

_INT32, _MILLION = 2**31 - 1, 10**6
"""Largest whole numbers: sums over a run fit into int32."""
_EXAMPLES = ("example_epsilon", "example_noise_multiplier")
EXCLUSIVE = (
    ("epsilon", "noise_multiplier"), ("local_steps", "local_epochs"), _EXAMPLES,
)  # fmt: skip
"""Pairs of settings; a run is given one at most."""
_MEASURING = "audit", "bench", "plan"
"""Commands without evaluations on the way."""
_OF_SINGLE_RUNS = *_MEASURING, "tune", "sweep"
"""Commands with other runs than one that goes on by itself."""
_CALIBRATED = ("gaussian", "correlated", "banded", "pure")
"""Kinds of events whose noise follows from a target ε."""
_DERIVED = {
    "clip": "with noise 1, or 0.1/√L on bounded rows; else inf",
    "noise_multiplier": "from epsilon",
    "count_noise": "cohort / 20",
}
"""Hyperparameters with a default that follows from other settings."""
COMMAND_FLAGS = {
    "bandwidth", "best_over", "canaries", "checkpoint_every", "cluster", "coordinator", "device",
    "devices", "explain", "format", "from", "json", "logger", "memory", "name", "no_client_table",
    "out", "over", "overwrite", "points", "process", "processes", "profile", "quiet", "repeats",
    "runs", "score_largest", "score_noise", "seeds", "select_privately", "speed", "spread", "steps",
    "tags", "wrt",
}  # fmt: skip
"""Flags of commands that take settings of runs: a command line could not tell them apart."""
ALIASES = {
    "lr": "learning_rate", "eta": "learning_rate", "client_lr": "learning_rate",
    "server_lr": "server_learning_rate", "lambda": "lam", "prox": "mu", "epochs": "local_epochs",
    "steps": "local_steps", "bs": "batch_size", "batch": "batch_size", "eps": "epsilon",
    "sigma": "noise_multiplier", "noise": "noise_multiplier", "max_grad_norm": "clip",
    "clip_norm": "clip", "clipping_norm": "clip", "dataset": "data", "num_clients": "clients",
    "num_rounds": "rounds", "global_rounds": "rounds", "fraction": "sampling_rate",
    "participation": "sampling_rate", "dirichlet_alpha": "alpha", "output": "out",
    "optimizer": "local_optimizer", "network": "model", "algo": "algorithm", "val_fraction":
    "validation_fraction", "beta": "momentum", "wd": "weight_decay", "tau": "head_epochs",
    "personal_lr": "personal_learning_rate", "split_seed": "partition_seed", "data_seed":
    "partition_seed", "client_weights": "weights",
}  # fmt: skip
"""Names that others give to settings: suggested, never taken."""


def _name_of(role: str, *, of_releases: bool = False, is_optional: bool = False) -> Setting:
    """Return the setting that names the part of a role; None may differ from the default's name."""
    *names, last = spellings_of(role)
    text = f"{ROLES[role].help}: {', '.join(names)} or {last}."
    default, shown = ROLES[role].default, ROLES[role].shown
    if is_optional:
        default, shown = None, shown or default or ""
    return Setting(role, str, default, text, shown=shown, of_releases=of_releases)


DATA = (
    _name_of("data"),
    _name_of("partition", is_optional=True),
    Setting("held_out_clients", float, 0.0, "Fraction to leave out, to tune on."),
    Setting(
        "clients_used",
        Literal["kept", "held-out", "all"],
        "kept",
        "Clients that the run uses; by all, held-out ones join a stage after a run of the kept.",
        unread_by=("tune",),
    ),
    SeedSetting(
        "seed",
        int,
        0,
        "Seed of all random numbers; secret: the operating system draws it, for a run to publish.",
        least=0,
        most=2**32 - 1,
        is_secret=True,
    ),
    Setting(
        "partition_seed",
        int,
        None,
        "Seed of the data alone: partition, split, held-out clients, synthetic rows, ranges.",
        shown="seed",
        least=0,
        most=2**63 - 1,
        is_secret=True,
    ),
)
"""The clients of a run."""
RUN = (
    _name_of("algorithm"),
    _name_of("model"),
    _name_of("mechanism"),
    _name_of("sampling", of_releases=True),
    _name_of("availability"),
    _name_of("loss", is_optional=True),
    Setting(
        "compute", Literal["float32", "bfloat16"], "float32",
        "Precision of models; parameters, messages and noise are float32.",
    ),
    Setting("rounds", int, 100, "T, communication rounds.", least=1, most=_INT32),
    Setting(
        "eval_every", int, 10, "Rounds between evaluations.", least=1, most=_INT32, evaluates=True,
        unread_by=("audit", "plan"),
    ),
    Setting(
        "eval_clients", int | Literal["all"], 1000,
        "Clients whom evaluations before the last one sample.", least=1, most=_INT32,
        evaluates=True, unread_by=_MEASURING,
    ),
    Setting(
        "metrics", tuple[str, ...], (),
        "More metrics of classes: f1, balanced-accuracy, precision, recall, top-5, ece, log-loss, "
        "auc-pooled, or your own, MODULE:FACTORY.",
        evaluates=True,
    ),
    Setting(
        "metric", str, None,
        "Metric by which runs are judged: patience, choices and pictures read it, and it is the "
        "first in tables.",
        shown="the first one in tables with a direction", evaluates=True,
        unread_by=_MEASURING,
    ),
    Setting(
        "patience", int, None,
        "Evaluations without a better validation metric before a stop; no ε covers that.",
        shown="all rounds", least=1, unread_by=_OF_SINGLE_RUNS,
    ),
    Setting(
        "audit_canaries", int, None,
        "Canary clients that yield an empirical lower bound on ε.", shown="none",
        unread_by=("audit", "tune", "sweep"),
    ),
    Setting(
        "chunk_size", int, None, "Clients computed at once.", shown="by backend", most=_INT32
    ),
    Setting(
        "chunk_map", Literal["vmap", "scan"], None, "Mapping over a chunk's clients.",
        shown="by backend",
    ),
    Setting(
        "streamed", bool, False,
        "Keep rows on disk (data folder:PATH) or host; a device holds one cohort.",
        unread_by=("tune",),
    ),
    Setting(
        "public", tuple[str, ...], (),
        "Sentences for every report of the run, on choices that read private rows.",
        has_flag=False,
    ),
)  # fmt: skip
"""The parts of a run and what all of them share."""


class Group(NamedTuple):
    """Settings that a part adds to a run if `is_read(part, hyperparameters, event)`."""

    role: str
    is_read: Callable[[Part, Collection[str], str], bool]
    keys: tuple[Setting, ...]


def _group(role: str, is_read: Callable[..., bool], *keys: Setting) -> Group:
    return Group(role, is_read, keys)


def _has_minibatches(part: Part, *_: Any) -> bool:
    return not SYSTEMS.get(part.name, USER_SYSTEM).whole_pass


def _protects(part: Part, hyperparameters: Collection[str], event: str) -> bool:
    return event != "no_known_cost"


def _is_calibrated(part: Part, hyperparameters: Collection[str], event: str) -> bool:
    """Return whether a target ε sets a mechanism's noise; a user's event states its own cost."""
    of_user = _is_users(part) and "noise_multiplier" in hyperparameters
    return event in _CALIBRATED or (of_user and event not in ("no_known_cost", "no_release"))


def _is_users(part: Part, *_: Any) -> bool:
    return is_user_code(part.name)


_TRUST = (
    Setting(
        "trust_own_code", bool, False, "Leave out the check that your code keeps clients apart."
    ),
)
GROUPS = {
    "rows": _group(
        "data", lambda part, *_: part.name != "synthetic-stream",
        Setting(
            "test_fraction", float, None, "Fraction of each client's rows for testing.",
            shown="the data's test rows, or 0.2", least=0, most=1,
        ),
        Setting(
            "validation_fraction", float, 0.0, "Fraction of each client's rows for validation.",
            least=0, most=1,
        ),
        Setting(
            "split_by", Literal["random", "time"], None,
            "Rows for testing and validation: random ones, or the last ones of each client in the "
            "order of the source.",
            shown="time for overlapping windows, with a gap of a window; else random",
        ),
        Setting(
            "train_rows", int, None,
            "Training rows of a client at most: random ones, the others are left out.",
            shown="all of them", least=1, most=_INT32,
        ),
        Setting(
            "max_rows", int, None,
            "Public bound on the rows of a client in each split; a client with more is refused.",
            shown="the largest client's, which a report then takes as public", least=1, most=_INT32,
        ),
        Setting(
            "scale", Literal["none", "all", "private"], "none",
            "Map columns to [-1, 1] by ranges: all, of all rows, without an ε; private, "
            "released by all clients with noise, which ε covers.",
        ),
        Setting(
            "scale_noise", float, None,
            "z of private ranges, charged as one round of all clients.",
            shown="the most that m clients allow", least=SMALLEST_NOISE, most=LARGEST_NOISE,
        ),
        Setting(
            "range", tuple[str, ...], (),
            "Public range of a column, which is mapped to [-1, 1], as age=0:100; repeatable.",
        ),
        Setting(
            "preprocess", tuple[Literal["drop-constant", "invert", "unit-rows"], ...], (),
            "Steps in order: drop-constant, invert (x to 1 - x), unit-rows.",
        ),
    ),
    "minibatches": _group(
        "algorithm", _has_minibatches,
        Setting(
            "local_steps", int, None,
            "E, minibatches with replacement per round; instead of epochs (PP-SGD: 1).",
            shown="local epochs", least=1, most=_MILLION,
        ),
        Setting(
            "passes", int, None,
            "Passes over a client's rows in the whole run; after the last one it trains no more.",
            shown="no limit", least=1, most=_MILLION, of_releases=True,
        ),
        Setting(
            "local_epochs", int, None, "E, passes over a client's rows per round.",
            shown="1", least=1, most=_MILLION,
        ),
        Setting("batch_size", int, 10, "b, rows in a minibatch.", least=1, most=_MILLION),
    ),
    "examples": _group(
        "algorithm", _has_minibatches,
        Setting(
            "example_epsilon", float, None,
            "Largest per-example ε over all rounds; noise goes into gradients.",
            shown="no such protection", least=1e-6, most=1e6,
        ),
        Setting(
            "example_noise_multiplier", float, None,
            "z of that noise, the same for all clients, in place of their ε.", shown="by ε",
        ),
        Setting(
            "example_clip", float, None,
            "C of an example, the bound on the norm of its gradient.",
            shown="1 with that noise",
        ),
    ),
    "schedule": _group(
        "algorithm", lambda part, *_: "local_optimizer" in part.settings,
        Setting(
            "schedule", Literal["constant", "cosine", "linear"], "constant",
            "Schedule of η over rounds; cosine and linear end at 0.",
            of_releases=True,
        ),
    ),
    "noise_schedule": _group(
        "mechanism",
        lambda _, hyperparameters, event: (
            "noise_multiplier" in hyperparameters and event not in ("correlated", "banded")
        ),
        Setting(
            "noise_schedule", str, None,
            "Share of the privacy cost by round: constant, power:A for t^A or geometric:Q "
            "for Q^-t; z is the constant noise of equal cost.", shown="constant",
        ),
    ),
    "target": _group(
        "mechanism", _is_calibrated,
        Setting(
            "epsilon", float, None,
            "Target ε of the run (joint DP, zero-out), which sets the noise; inf: no noise, no "
            "clipping.",
            shown="no noise, unless noise-multiplier is given",
        ),
    ),
    "guarantee": _group(
        "mechanism", _protects,
        Setting(
            "delta", float, None, "δ of the guarantee, for m clients.", shown="1/(10 m)"
        ),
    ),
    "spending": _group(
        "mechanism", _protects,
        Setting(
            "budget_epsilon", float, None,
            "ε at which the run and its stages stop; noise and rounds may follow from "
            "releases.", shown="none", unread_by=_OF_SINGLE_RUNS,
        ),
        Setting(
            "evaluate_privately", float, None,
            "z of the noise with which evaluations release a validation metric, charged to ε.",
            shown="none", least=SMALLEST_NOISE, most=LARGEST_NOISE, unread_by=_OF_SINGLE_RUNS,
        ),
        Setting(
            "evaluation_largest", float, 1.0,
            "Public bound to which clients' metrics are clipped for that.",
            unread_by=_OF_SINGLE_RUNS,
        ),
    ),
    "weights": _group(
        "mechanism", lambda part, *_: "weights" in inspect.signature(part.factory).parameters,
        Setting(
            "weights", Literal["equal", "rows"], "equal",
            "Weights of clients in the mean: their training rows, with noise up to max-weight.",
        ),
    ),
    "own algorithm": _group("algorithm", _is_users, *_TRUST),
    "own model": _group("model", _is_users, *_TRUST),
    "own loss": _group(
        "loss", _is_users,
        *_TRUST,
        Setting(
            "as_classes", bool, False,
            "Number the target's whole numbers from 0, as 1 and 2; predictions keep their names.",
        ),
        Setting(
            "outputs", int, None, "Outputs of the model for your loss.",
            shown="the classes of text, else the targets", least=1, most=_MILLION,
        ),
    ),
}  # fmt: skip
"""The groups that parts add to a run, in the order of help and of files."""


@functools.cache
def static_keys() -> dict[str, Setting]:
    """Return a dict of the keys that are known before the parts of a run are."""
    groups = [setting for group in GROUPS.values() for setting in group.keys]
    return {setting.name: setting for setting in (*DATA, *RUN, *groups)}


def unread_by(command: str) -> set[str]:
    """Return the names of the settings that a command does not read."""
    if command == "data":
        return static_keys().keys() - {setting.name for setting in (*DATA, *GROUPS["rows"].keys)}
    return {name for name, setting in static_keys().items() if command in setting.unread_by}


@dataclasses.dataclass(frozen=True)
class SettingsTable:
    """The keys of runs with certain parts.

    Attributes:
      parts: the parts by role.
      records: a dict of the hyperparameters of all parts.
      keys: a dict of the settings, in the order of files.
    """

    parts: Mapping[str, Part] = dataclasses.field(repr=False, compare=False)
    records: "Mapping[str, Hyperparameter]" = dataclasses.field(repr=False, compare=False)
    keys: dict[str, Setting] = dataclasses.field(repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class RunConfig(SettingsTable):
    """The settings of a run as asked for; each is an attribute.

    Attributes:
      notes: what a file says that the run does not read.

    Raises:
      ValueError: if settings contradict each other, naming them and what is allowed.
    """

    values: Mapping[str, Any]
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(f"this run has no setting {name!r}") from None

    def __hash__(self) -> int:
        return hash(tuple(self.values.items()))

    @property
    def system(self) -> System:
        """The record of the algorithm."""
        return SYSTEMS.get(self.algorithm, USER_SYSTEM)

    @property
    def loss_record(self) -> Loss:
        """The record of the loss."""
        return LOSSES.get(self.loss, USER_LOSS)

    def arguments(self, role: str) -> dict[str, Any]:
        """Return the arguments of the factory of a role; none where the run lacks the role."""
        part = self.parts.get(role)
        return {} if part is None else part.arguments(self.values)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting; if no part of the run has it, `default` or the declared default."""
        declared = static_keys().get(name)
        if default is None and declared is not None:
            default = declared.default
        return self.values.get(name, default)

    def given(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        return {n: value for n, value in self.values.items() if value != self.keys[n].default}

    def replace(self, **changes: Any) -> "RunConfig":
        """Return the settings with changes, which may name other parts.

        Defaults, and settings that exclude a change or that the run no longer reads, are left out.
        """
        return layered(Layer(self.given(), unread="left out"), Layer(changes))

    def settings(self) -> dict[str, Any]:
        """Return the keys of a TOML file that repeats the run from any folder."""
        table = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self.values.items()
            if value is not None
        }
        seed = self.seed.saved if self.has_secret_seed else self.seed
        return table | {"data": absolute(self.data), "seed": seed}

    def data_settings(self) -> set[str]:
        """Return the names of the settings of its data."""
        rows = {setting.name for setting in (*DATA, *GROUPS["rows"].keys)}
        roles = self.parts.keys() & {"data", "partition"}
        return rows.union(*(self.parts[role].settings for role in roles)) & self.values.keys()

    # --- values that follow -----------------------------------------------------------------------

    @property
    def has_secret_seed(self) -> bool:
        """True if the operating system drew the seed."""
        return isinstance(self.seed, SecretSeed)

    @property
    def hides_noise(self) -> bool:
        """True if all noise follows from a secret seed: private ranges' noise from the data's."""
        of_data = self.get("scale") == "private" and self.partition_seed is not None
        return self.has_secret_seed and not of_data

    @property
    def loss(self) -> str:
        """The name of the loss; `get` returns None if it is not chosen."""
        return self.values["loss"] or str(ROLES["loss"].default)

    def judged_by(self, names: Collection[str]) -> str | None:
        """Return the metric among `names` that judges runs; None for the task's own choice."""
        from fedjaxsim.metrics import named_metric  # late: help needs no metrics

        return None if self.metric is None else named_metric(self.metric, names)

    @property
    def data_seed(self) -> int:
        """The seed of the data."""
        return self.seed if self.partition_seed is None else self.partition_seed

    @property
    def sample(self) -> int | None:
        """The number of clients whom evaluations before the last one sample; None for all."""
        return None if self.eval_clients == "all" else self.eval_clients

    @property
    def reads_rows(self) -> bool:
        """True if parts or hyperparameters are made of the clients' rows or their numbers."""
        from fedjaxsim.hyperparameters import Default  # late: help needs no records

        ratios = [n for n, record in self.records.items() if record.default is Default.RATIO]
        estimates = bool(ratios) and all(self.get(name) is None for name in ratios)
        return estimates or self.get("weights") == "rows" or self.get("objective") == "weighted"

    @property
    def target_epsilon(self) -> float:
        """The target ε; ∞ without one."""
        epsilon = self.get("epsilon")
        return math.inf if epsilon is None else epsilon

    @property
    def noise_schedule(self) -> Schedule:
        """The schedule of the noise over the rounds."""
        return Schedule.parse(self.get("noise_schedule"))

    @property
    def clips(self) -> bool:
        """True if messages are clipped: if C adapts, z or a finite ε is given, or C and no ε."""
        asked = self.get("noise_multiplier" if self.get("epsilon") == math.inf else "clip")
        noise = math.isfinite(self.target_epsilon) or self.get("noise_multiplier") is not None
        adapts = "target_quantile" in self.records
        return "clip" in self.records and (adapts or noise or asked is not None)

    @property
    def protects_examples(self) -> bool:
        """True if gradients protect single examples."""
        return any(self.get(name) is not None for name in _EXAMPLES)

    @property
    def sampler(self) -> str:
        """The name of the sampler; a Poisson rate of 1 is full participation."""
        full = self.sampling is None and self.get("sampling_rate") == 1
        return "full" if full else self.parts["sampling"].name

    # --- checks -----------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        """Check settings against each other; the library checks hyperparameters."""
        for key, other in EXCLUSIVE:
            first, second = self.get(key), self.get(other)
            if first is not None and second is not None:
                raise ValueError(
                    f"{flag(key)} and {flag(other)} exclude each other: give one of them, got "
                    f"{flag(key)} {first} and {flag(other)} {second}"
                )
        for name in ("epsilon", "budget_epsilon"):
            value = self.get(name)
            if value is not None and not value > 0:
                raise ValueError(f"{flag(name)} must be positive (inf: no limit), got {value}")
        if self.get("delta") is not None:
            checks.in_range("(0, 1)", delta=self.delta)
        checks.in_range("[0, 1)", held_out_clients=self.held_out_clients)
        self.noise_schedule.check(self.rounds)
        by_rows, bounded = self.get("weights") == "rows", self.get("max_weight") is not None
        private = math.isfinite(self.target_epsilon)
        noise = private or (self.get("noise_multiplier") or 0) > 0
        consumes = self.get("passes") is not None and not self.system.one_minibatch
        releases = self.get("evaluate_privately") is not None and self.patience is not None
        explicit = self.given()
        contradictions = {
            f"clip must be finite where epsilon is, got {self.get('clip')}":
                private and self.get("clip") == math.inf,
            f"example-clip needs one of {' and '.join(map(flag, _EXAMPLES))}":
                self.get("example_clip") is not None and not self.protects_examples,
            "weights rows with noise need max-weight: numbers of rows are private, and it is their "
            "public bound": by_rows and noise and not bounded,
            "max-weight has no effect with weights equal, only with rows": bounded and not by_rows,
            "patience with evaluate-privately needs budget-epsilon: rounds that follow from "
            "releases are covered by a budget alone": releases and not self.get("budget_epsilon"),
            "evaluation-largest has no effect without evaluate-privately":
                "evaluation_largest" in explicit and "evaluate_privately" not in explicit,
            "scale-noise has no effect without scale private":
                self.get("scale_noise") is not None and self.get("scale") != "private",
            "hidden must hold at least one width, got none": self.get("hidden", (1,)) == (),
            f"passes need local-steps, got passes {self.get('passes')} alone":
                consumes and self.get("local_steps") is None,
        }  # fmt: skip
        for message, holds in contradictions.items():
            if holds:
                raise ValueError(message)


# --- composition ----------------------------------------------------------------------------------


class Layer(NamedTuple):
    """Settings from one place, as typed or converted, that win over the layers before.

    Attributes:
      path: the file that errors name; None for a command line or Python.
      unread: what becomes of those that the run does not read; notes say so in `RunConfig.notes`.
    """

    values: Mapping[str, Any]
    path: Path | None = None
    unread: Literal["refused", "noted", "left out"] = "refused"


def run_config(**settings: Any) -> RunConfig:
    """Make the settings of a run; those not given have the defaults of the run and its parts.

    Raises:
      ValueError: for a setting that no part of the run reads, a value of another type, a missing
        one without a default, or settings that contradict each other.
    """
    return layered(Layer(settings))


def layered(*layers: Layer, ignored: Mapping[str, str] = {}) -> RunConfig:
    """Make the settings of a run from layers; the last one wins.

    Settings in `ignored` are not read, for the reason there: they have their defaults.
    """
    merged, places, notes = {}, {}, []
    for layer in reversed(layers):
        with in_file(layer.path):
            check_parts(layer.values)
    for layer in layers:
        merged = displaced(merged, layer.values) | dict(layer.values)
        places |= dict.fromkeys(layer.values, layer.path)
    table = table_of(merged)
    for layer in reversed(layers):
        if layer.unread == "left out":
            continue
        with in_file(layer.path):
            left = unread(layer.values, table)
            for name in ignored.keys() & layer.values.keys() & table.keys.keys():
                if layer.values[name] != table.keys[name].default:
                    left.append(f"{flag(name)} {ignored[name]}")
            if left and layer.unread == "refused":
                raise ValueError("; ".join(left))
            if left:
                notes.append(f"{layer.path}: {'; '.join(left)}")
    values = {}
    for name, setting in table.keys.items():
        if name in merged and name not in ignored:
            with in_file(places[name]):
                values[name] = setting.convert(merged[name])
        elif setting.required:
            raise ValueError(f"{flag(name)} must be given: {setting.help or 'it has no default'}")
        else:
            values[name] = setting.default
    files = {places[name] for name in merged}
    with in_file(files.pop() if len(files) == 1 else None):
        return RunConfig(**vars(table), values=values, notes=tuple(notes))


def check_flags(names: Iterable[str], ignored: Mapping[str, str]) -> None:
    """Refuse flags that a command ignores, with the reason, and settings that have no flag."""
    settings = static_keys()
    for name in names:
        if name in ignored:
            raise ValueError(f"{flag(name)} {ignored[name]}")
        if name in settings and not settings[name].has_flag:
            raise ValueError(f"{flag(name)} is for files alone")


def layered_config(
    flags: Mapping[str, Any], file: Layer, earlier: Layer, ignored: Mapping[str, str]
) -> RunConfig:
    """Make the settings of a run from flags, a file and an earlier run; the first wins.

    Settings of the earlier run that this run does not read are left out. `ignored` holds settings
    that the caller does not read, with the reason.
    """
    check_flags(flags, ignored)
    inherited = dict(earlier.values)
    asked = {**inherited, **file.values, **flags}
    if str(asked.get("seed")) != str(inherited.get("seed", asked.get("seed"))):
        # A stage with another seed is on the same data.
        inherited = {"partition_seed": number_of(inherited["seed"])} | inherited
    system = SYSTEMS.get(str(asked.get("algorithm")))
    if system is not None and not system.sends:
        left_out = {name for name, setting in static_keys().items() if setting.of_releases}
        inherited = {name: inherited[name] for name in inherited if name not in left_out}
    return layered(earlier._replace(values=inherited), file, Layer(flags), ignored=ignored)


def excluded(settings: Mapping[str, Any]) -> set[str]:
    """Return the settings that exclude some of the given ones."""
    set_ = {name for name, value in settings.items() if value is not None}
    return {pair[1 - place] for pair in EXCLUSIVE for place in (0, 1) if pair[place] in set_}


def displaced(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those that exclude some of the given ones."""
    left_out = excluded(overrides)
    return {name: value for name, value in settings.items() if name not in left_out}


def table_of(settings: Mapping[str, Any]) -> SettingsTable:
    """Compose the keys of a run from the parts that `settings` names, as typed or converted."""
    from fedjaxsim.hyperparameters import compose

    names = names_of(settings)
    parts = {role: part_of(role, name) for role, name in names.items()}
    records = compose(part.records(settings) for part in parts.values())
    event = parts["mechanism"].event_kind(settings)
    return _composed(tuple(names.items()), tuple(records.items()), event)


@functools.cache
def _composed(
    names: tuple[tuple[str, str], ...],
    records: "tuple[tuple[str, Hyperparameter], ...]",
    event: str,
) -> SettingsTable:
    parts, by_name = {role: part_of(role, name) for role, name in names}, dict(records)
    keys = {setting.name: setting for setting in (*DATA, *RUN)}
    for group in GROUPS.values():
        if group.role in parts and group.is_read(parts[group.role], by_name, event):
            keys |= {setting.name: setting for setting in group.keys}
    of_parts = {record.name: _key_of(record) for record in by_name.values()}
    for part in parts.values():
        declared = {record.name for record in part.all_records}
        for name, setting in part.settings.items():
            if name in of_parts and name not in declared:
                read = {p: {*p.settings, *(r.name for r in p.all_records)} for p in parts.values()}
                both = " and ".join(f"{p.role} {p.name}" for p in read if name in read[p])
                raise ValueError(f"{both} have settings of one name, {name!r}: rename yours")
            of_parts.setdefault(name, setting)
    if common := (keys.keys() | COMMAND_FLAGS) & of_parts.keys():
        name = min(common)
        what = "a setting of every run" if name in keys else "a flag of commands"
        raise ValueError(f"{name!r} is {what}: no part may have a setting so called")
    return SettingsTable(parts, by_name, keys | of_parts)


def _key_of(record: "Hyperparameter") -> Setting:
    """Return the key of a hyperparameter."""
    from fedjaxsim.hyperparameters import Default

    default, shown = record.default, _DERIVED.get(record.name, "")
    if isinstance(default, Default):
        shown = default.value
    default = None if shown else REQUIRED if default is None else default
    of_each, hint = record.per_client, tuple[float, ...] if record.shape else float
    if record.shape and isinstance(default, float):
        default = (default,)
    return Setting(
        record.name, hint, default, record.help, shown=shown, per_client=of_each,
        check=lambda value: record.check(record.of_shape(value)),
    )  # fmt: skip


# --- what nothing reads ---------------------------------------------------------------------------

_SHOWN = 6
"""Names that fit into a message."""


def unread(
    names: Iterable[str], table: SettingsTable, other_names: Iterable[str] = ()
) -> list[str]:
    """Return the reasons for which settings `names` have no effect on runs with a table.

    A name that no part of any run has is a ValueError with the nearest one, maybe of `other_names`.
    """
    parts, reasons = table.parts, []
    for name in names:
        if name in table.keys:
            continue
        readers_by_name = readers()
        if name not in readers_by_name:
            raise ValueError(unknown(name, [*table.keys, *readers_by_name, *other_names]))
        # A role that the run lacks says the most, else the one with most parts that read it.
        role, choices = max(
            readers_by_name[name].items(), key=lambda item: (item[0] not in parts, len(item[1]))
        )
        if role not in parts:
            without = f"without {role} {' or '.join(choices)}"
            why = " on data that have clients" if role == "partition" else f" {without}"
        elif parts[role].name == "no-release":
            why = ", as nothing is released: leave it out"
        elif (chosen := parts[role].name) in choices:
            why = f" with these settings of {role} {chosen}: see --{role} {chosen} --help"
        else:
            more = len(choices) - _SHOWN
            listed = " or ".join(choices if more < 2 else [*choices[:_SHOWN], f"{more} others"])
            why = f" with {role} {chosen}, only with {listed}"
            if is_user_code(chosen) and role in ("algorithm", "mechanism", "sampling"):
                why += f"; declare it by @fjs.reads if {chosen} reads it"
            steps = SYSTEMS.get(chosen, USER_SYSTEM).fixed_steps if role == "algorithm" else ""
            if steps and name in ("local_optimizer", "schedule"):
                why = f" with {role} {chosen}: {steps}"
        reasons.append(f"{flag(name)} has no effect{why}")
    return reasons


def unknown(name: str, allowed: Iterable[str], kind: str = "setting") -> str:
    """Return the message about an unknown name, with the nearest known one."""
    names = {flag(spelling) for spelling in allowed}
    meant = flag(ALIASES.get(name, ""))
    hint = checks.did_you_mean(flag(name), names)
    if meant in names:
        hint = f" (did you mean {meant!r}?)"
    return f"unknown {kind} {flag(name)!r}{hint}"


@functools.cache
def readers() -> Mapping[str, Mapping[str, list[str]]]:
    """Return the parts of the package that read each setting, by role."""
    by_name: dict[str, dict[str, list[str]]] = {}
    for part in (part_of(role, name) for role, choices in ROLES.items() for name in choices.known):
        records = part.all_records
        read = {record.name for record in records}, part.event_kind({})
        grouped = [
            setting.name
            for group in GROUPS.values()
            if group.role == part.role and group.is_read(part, *read)
            for setting in group.keys
        ]
        for name in dict.fromkeys([*part.settings, *(r.name for r in records), *grouped]):
            by_name.setdefault(name, {}).setdefault(part.role, []).append(part.name)
    for group in GROUPS.values():  # those that users' parts alone add
        for setting in group.keys:
            by_name.setdefault(setting.name, {group.role: ["MODULE:FACTORY"]})
    return by_name
