"""The settings of one run: flags, a TOML file, or both, where flags win.

A `RunConfig` says what the user asked for. What follows from it (the noise multiplier behind an ε,
the default δ, the cohort's capacity) is worked out where the run is built.
"""

import contextlib
import dataclasses
import decimal
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from fedjaxsim.algorithms.systems import SYSTEMS, System
from fedjaxsim.hparam_fields import HparamFields
from fedjaxsim.privacy.budget import Budget
from fedjaxsim.privacy.choices import MECHANISMS, NOISE, SAMPLERS, Choice

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
_DIGITS = 100
"""Of whole numbers with exponents, at most: no setting takes more."""
PREPROCESS = ("drop-constant", "invert", "unit-rows")
OF_TOKENS = ("gru", "transformer")
"""The models of text; all others take integers for numbers."""
MODELS = ("linear", "mlp", "cnn", *OF_TOKENS)
Penalty = Literal["vanilla", "mean", "kl", "ewc"]
Origin = Literal["personal", "global"]
_CHOICES = {
    "algorithm": SYSTEMS, "model": MODELS, "mechanism": MECHANISMS, "sampling": SAMPLERS
}  # fmt: skip
_READ = (
    names for system in SYSTEMS.values() for names in (system.reads, *system.penalties.values())
)
OWN_SYSTEM = System(
    "",
    "an algorithm of one's own",
    "",
    reads=tuple(dict.fromkeys(n for names in _READ for n in names if hasattr(HparamFields, n))),
    noised_by_clients=True,
)
"""What is known of a user's own algorithm: it may read whatever some system reads."""

_INTEGERS = PrimitiveConstructorSpec(
    nargs=1,
    metavar="INT[,INT...]",
    instance_from_str=lambda given: integers(given[0]),
    is_instance=lambda value: isinstance(value, tuple),
    str_from_instance=lambda value: [",".join(map(str, value))],
)


def _words(metavar: str) -> PrimitiveConstructorSpec:
    """What stands between commas, each called by `metavar` in help."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{metavar}[,{metavar}...]",
        instance_from_str=lambda given: words(given[0]),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(value)],
    )


def _one_of_or_own(names: Iterable[str]) -> Any:
    """How help shows a name from a list, in whose place one's own may stand."""
    return tyro.conf.arg(metavar=f"{{{','.join(names)},MODULE:FACTORY}}")


def _optional_one_of(names: Iterable[str], default: str) -> Any:
    return optional(f"{{{','.join(names)}}}", default)


_PENALTIES = tuple(dict.fromkeys(name for s in SYSTEMS.values() for name in s.penalties))


def is_own(name: str) -> bool:
    """Whether an algorithm or a model is a user's own: "module:factory"."""
    module, _, factory = name.partition(":")
    return bool(module and factory)


def unknown_choice(key: str, value: Any) -> str | None:
    """What is wrong with a name from a list, if anything is."""
    names = _CHOICES.get(key)
    own = key in ("algorithm", "model")
    if names is None or value is None or value in names or (own and is_own(value)):
        return None
    other = ", or MODULE:FACTORY for one of your own" if own else ""
    return f"{key} must be one of {', '.join(names)}{other}, got {value!r}"


def optional(metavar: str, default: str) -> Any:
    """How help shows a setting that need not be given."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


def words(text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def integers(text: str) -> tuple[int, ...]:
    """The whole numbers between commas."""
    return tuple(whole(word) for word in words(text))


def whole(text: str) -> int:
    """The whole number that a text says: 1000000, 1_000_000 or 1e6.

    Raises:
      ValueError: it says none.
    """
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(decimal.InvalidOperation):
        found = decimal.Decimal(text)
        if found.is_finite() and found == found.to_integral_value():
            if found.adjusted() >= _DIGITS:
                raise ValueError(f"must have at most {_DIGITS} digits, got {text!r}")
            return int(found)
    raise ValueError(f"must be a whole number, as 1000000 or 1e6, got {text!r}")


def number(text: str) -> float:
    """The number that a text says.

    Raises:
      ValueError: it says none.
    """
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be a number, got {text!r}") from None


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Where a run's clients come from."""

    data: str = "digits"
    """Where the clients come from: digits, synthetic, synthetic-low-rank, synthetic-group-sparse,
    synthetic-stream (fresh examples in every round, evaluated by the excess risk), csv:PATH,
    folder:PATH (as `fedjaxsim data convert` writes), images:PATH, leaf:PATH, mat:PATH, npz:PATH or
    parquet:PATH."""
    clients: Annotated[int | None, optional("INT", "100; synthetic 1000 or 320")] = None
    """Number of clients of synthetic data and of data that come without clients of their own."""
    partition: Annotated[str | None, optional("NAME", "dirichlet")] = None
    """How data without clients of their own are dealt: dirichlet (labels), quantity (numbers of
    rows), feature-noise, iid, shards or column:NAME."""
    alpha: float = 0.5
    """Concentration of the partitions dirichlet and quantity: small is heterogeneous."""
    feature_noise: float = 0.1
    """σ of the partition feature-noise: features of client k of m get noise of variance σ k/m."""
    client: Annotated[str | None, optional("COLUMN", "none")] = None
    """Of csv and parquet: the column that says whose a row is; without it, give a partition."""
    target: Annotated[str | None, optional("COLUMN", "none")] = None
    """Of csv and parquet: the column that is to be predicted."""
    split: Annotated[str | None, optional("COLUMN", "none")] = None
    """Of csv and parquet with clients: the column that holds train, validation or test."""
    one_hot: Annotated[tuple[str, ...], _words("COLUMN")] = ()
    """Of csv and parquet: columns of which each becomes one of 0 and 1 per value."""
    drop: Annotated[tuple[str, ...], _words("COLUMN")] = ()
    """Of csv and parquet: columns that are no features."""
    fields: Annotated[tuple[str, ...], _words("NAME")] = ()
    """Of mat: the cell arrays of features and labels; by default X,Y or the only two that fit."""
    test_fraction: Annotated[float | None, optional("FLOAT", "the data's test rows, or 0.2")] = None
    """Part of each client's rows kept for testing; given, it replaces the data's own split."""
    validation_fraction: float = 0.0
    """Part of each client's rows kept for validation."""
    held_out_clients: float = 0.0
    """Part of the clients that the run leaves out; `fedjaxsim tune` tunes on them."""
    classes: Annotated[int | None, optional("INT", "all")] = None
    """Keep the rows of the first so many classes only, and the clients that have some."""
    preprocess: Annotated[tuple[str, ...], _words("STEP")] = ()
    """Comma-separated steps, in the order given: drop-constant, invert (x to 1 - x), unit-rows."""
    offset_scale: float = 0.1
    """Standard deviation of what is personal in the coefficients of synthetic data."""
    seed: int = 0
    """Seed of everything random: partition, initial models, cohorts, minibatches, noise."""


@dataclasses.dataclass(frozen=True)
class _SystemSettings:
    """What is run, and on which model."""

    algorithm: Annotated[str, _one_of_or_own(SYSTEMS)] = "pmtl"
    """The federated algorithm; a module's factory is called with the task."""
    message: Literal["update", "offset"] = "update"
    """What PMTL's clients send: their model's update, as in the paper, or its offset from w̃."""
    parametrization: Literal["grid", "paper"] = "grid"
    """How PP-SGD's level gives its two step sizes; grid is that of the experiments."""
    objective: Literal["average", "weighted"] = "average"
    """What PP-SGD minimizes: the clients' average risk, or weighted by min(batch size, rows)."""
    averaged: bool = False
    """PP-SGD predicts with the average of its iterates, as in its theorems."""
    penalty: Annotated[str | None, _optional_one_of(_PENALTIES, "mean; low-rank")] = None
    """What fine-tuning adds to the loss, a penalty towards what was published (vanilla: none); or
    MP-MTL's on the matrix of all models."""
    outliers: Literal["entries", "columns", "frobenius"] = "entries"
    """What a decomposed MP-MTL penalizes in the part of a model that its client keeps."""
    acceleration: Literal["none", "convex", "strongly-convex"] = "none"
    """MP-MTL's momentum; the strongly convex one needs a ridge."""
    origin: Origin = "personal"
    """Where fine-tuning starts: from clients' own models or from what was published."""
    head: Annotated[tuple[str, ...], _words("NAME")] = ()
    """Comma-separated layers or parameters, as Dense_1 or Dense_1/bias, that DPFedMTL leaves with
    their client; by default the model's output layer."""
    order: Literal["together", "head-first"] = "together"
    """How DPFedMTL takes its local steps: of head and trunk at once, or all of the head's first."""
    model: Annotated[str, _one_of_or_own(MODELS)] = "linear"
    """The model every client has; a module's factory is called with the shape of an example and the
    number of outputs."""
    hidden: Annotated[tuple[int, ...], _INTEGERS] = (64,)
    """Comma-separated widths of the hidden layers of MLP and GRU, and of a transformer's blocks."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """What models compute in; parameters, messages and noise are float32 always."""
    intercept: bool = True
    """The linear model has one; --no-intercept leaves it out."""
    loss: Literal["softmax", "one-vs-all", "squared", "logistic"] = "softmax"
    """The local loss: softmax (of rows, or of tokens where each has a label), one-vs-all (squared;
    c classes), logistic (labels ±1 or 0/1) or squared."""


@dataclasses.dataclass(frozen=True)
class RunConfig(HparamFields, _SystemSettings, DataSettings):
    """Everything that one run is told; a TOML file has the same keys, with - or _."""

    rounds: int = 100
    """T, the number of communication rounds."""
    local_steps: Annotated[int | None, optional("INT", "local epochs")] = None
    """E, minibatches with replacement per client and round; instead of local epochs (PP-SGD: 1)."""
    passes: Annotated[int | None, optional("INT", "no limit")] = None
    """With local steps: a client's rows are consumed, so many times over the whole run."""
    local_epochs: Annotated[int | None, optional("INT", "1")] = None
    """E, passes over a client's rows per round; instead of local steps."""
    batch_size: int = 10
    """b, rows in a minibatch."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How η changes over rounds: cosine and linear decay to 0."""
    local_optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    """The clients' optimizer."""
    server_optimizer: Literal["sgd", "momentum", "adam", "adagrad", "yogi"] = "sgd"
    """The server's optimizer, applied to the released mean update."""

    lam: float = 0.1
    lam2: float = 0.1
    example_epsilon: float = math.inf
    mu: float = 0.1
    sampling_rate: float = 0.2
    sampling: Annotated[str | None, _optional_one_of(SAMPLERS, "poisson")] = None
    """How cohorts are drawn: poisson and everyone; fixed and passes take a cohort's size."""
    cohort: Annotated[int | None, optional("INT", "none")] = None
    """q, the clients in every cohort (fixed, passes), instead of a sampling rate."""
    max_participations: Annotated[int | None, optional("INT", "none")] = None
    """How often one client takes part at most (passes)."""

    mechanism: Annotated[str | None, _optional_one_of(MECHANISMS, "the algorithm's own")] = None
    """How messages are released; client-noise and plain-mean, as published, have no ε. By default
    gaussian for most algorithms, and closed where nothing is sent."""
    count_noise: Annotated[float | None, optional("FLOAT", "cohort / 20")] = None
    """σ_b of adaptive clipping, the noise on the number of clipped messages; by default a twentieth
    of the expected cohort."""
    accountant: Annotated[str | None, optional("NAME", "the tightest")] = None
    """The accountant that the guarantee comes from, as `fedjaxsim privacy` knows them by name."""
    clip: float = 1.0
    """C, the L2 norm to which a message is clipped; at ε = ∞ nothing is (unless z = 0 is given)."""
    noise_multiplier: Annotated[float | None, optional("FLOAT", "from epsilon")] = None
    """z, the noise on the sum of clipped messages divided by C; instead of epsilon."""
    budget: Annotated[str | None, optional("constant|power:A|geometric:Q", "constant")] = None
    """How the budget is spread over the rounds: round t gets a share t^A or Q^-t, and so much less
    noise; z is then that constant noise which costs everyone as much."""
    epsilon: Annotated[float | None, optional("FLOAT", "inf")] = None
    """Target ε of the whole run (joint DP, zero-out); inf means no noise and no clipping."""
    delta: Annotated[float | None, optional("FLOAT", "1/(10 m)")] = None
    """δ of the guarantee; m is the number of clients."""

    eval_every: int = 10
    """Rounds between evaluations; rounds in between are one compiled segment."""
    patience: Annotated[int | None, optional("INT", "all rounds")] = None
    """Stop after so many evaluations without a better metric on validation rows; the guarantee does
    not cover that choice."""
    common_noise: bool = False
    """Draw the noise that all settings share under a seed, as sweeps do; of such runs, publish one
    at most."""
    chunk_size: Annotated[int | None, optional("INT", "the cohort")] = None
    """Clients computed at once."""
    chunk_map: Annotated[Literal["vmap", "scan"] | None, optional("{vmap,scan}", "by backend")] = (
        None
    )
    """How the clients of a chunk are mapped."""
    streamed: bool = False
    """Rows stay on disk (data folder:PATH) or in the host's memory, where personal states are, too;
    the first device holds those of one cohort at a time."""

    out: Annotated[Path | None, optional("DIR", "none")] = None
    """Directory for the results; without it only the terminal shows them."""
    overwrite: bool = False
    """Replace the run that the directory already holds."""
    quiet: bool = False
    """No progress bar: one plain line per evaluation."""

    def validate(self) -> None:
        """Checks what concerns settings together; single numbers are checked by the library.

        Raises:
          ValueError: naming the settings, their values and what is allowed.
        """
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise ValueError(
                "epsilon and noise-multiplier exclude each other: give one of them, got "
                f"epsilon {self.epsilon} and noise-multiplier {self.noise_multiplier}"
            )
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError(
                "local-steps and local-epochs exclude each other: give one of them, got "
                f"local-steps {self.local_steps} and local-epochs {self.local_epochs}"
            )
        if self.epsilon is not None and not self.epsilon > 0:
            raise ValueError(f"epsilon must be positive (inf: no privacy), got {self.epsilon}")
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"delta must lie in (0, 1), got {self.delta}")
        self._check_sizes()
        steps = [step for step in self.preprocess if step not in PREPROCESS]
        if steps:
            raise ValueError(f"preprocess takes {', '.join(PREPROCESS)}, got {steps[0]!r}")
        for name in _CHOICES:
            if problem := unknown_choice(name, getattr(self, name)):
                raise ValueError(problem)
        if self.system.penalties and self.penalty_name not in self.system.penalties:
            raise ValueError(
                f"penalty must be one of {', '.join(self.system.penalties)} with algorithm "
                f"{self.algorithm}, got {self.penalty!r}"
            )
        one = self.system.one_minibatch
        if self.passes is not None and not one and self.local_steps is None:
            raise ValueError(f"passes need local-steps, got passes {self.passes} alone")
        self._check_release()
        self.spread.check(self.rounds)
        if not 0 <= self.held_out_clients < 1:
            raise ValueError(f"held-out-clients must lie in [0, 1), got {self.held_out_clients}")
        if len(self.fields) not in (0, 2):
            raise ValueError(f"fields must be two names, got {', '.join(self.fields)}")
        if self.classes is not None and self.classes < 2:
            raise ValueError(f"classes must be at least 2, got {self.classes}")
        if self.data == "synthetic-stream" and (self.model, self.loss) != ("linear", "squared"):
            raise ValueError(
                "synthetic-stream is a linear regression: model must be linear and loss squared, "
                f"got model {self.model} and loss {self.loss}"
            )

    def _check_release(self) -> None:
        for name in ("cohort", "max_participations"):
            if name in self.sampler.reads and getattr(self, name) is None:
                raise ValueError(f"sampling {self.sampling} needs {flag(name)}")
        aims = math.isfinite(self.target_epsilon)
        if aims and "epsilon" not in self.door.reads and self.door_name != "closed":
            raise ValueError(
                f"epsilon cannot be aimed at with mechanism {self.door_name}: give the noise, "
                f"noise-multiplier, got epsilon {self.epsilon}"
            )

    def _check_sizes(self) -> None:
        if not self.hidden:
            raise ValueError("hidden must hold at least one width, got none")
        if any(width < 1 for width in self.hidden):
            raise ValueError(f"hidden widths must be at least 1, got {list(self.hidden)}")
        for name in ("rounds", "eval_every", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{flag(name)} must be at least 1, got {value}")
        for name, largest in _LARGEST.items():
            size = max(self.hidden) if name == "hidden" else getattr(self, name)
            if size is not None and size > largest:
                raise ValueError(f"{flag(name)} must be at most {largest}, got {size}")

    @property
    def system(self) -> System:
        """What is known of the algorithm."""
        return SYSTEMS.get(self.algorithm, OWN_SYSTEM)

    @property
    def door_name(self) -> str:
        """The name of the mechanism."""
        return self.mechanism or self.system.door

    @property
    def door(self) -> Choice:
        """What is known of the mechanism."""
        return MECHANISMS[self.door_name]

    @property
    def penalty_name(self) -> str | None:
        """The name of the penalty; None where the algorithm has none."""
        known = self.system.penalties
        return (self.penalty or next(iter(known))) if known else None

    @property
    def diagonal(self) -> bool:
        """Whether the diagonal is all that is needed of a Gram matrix."""
        return (self.penalty_name or "").endswith("group-sparse")

    @property
    def protect_examples(self) -> bool:
        """Whether clients noise what they send for the sake of single examples."""
        return math.isfinite(self.example_epsilon)

    @property
    def spread(self) -> Budget:
        """How the budget is spread over the rounds."""
        return Budget.parse(self.budget)

    @property
    def noised_by_clients(self) -> bool:
        """Whether clip and noise are the clients' own work, and not the mechanism's."""
        return self.system.noised_by_clients and "clip" not in self.door.reads

    @property
    def release_reads(self) -> tuple[str, ...]:
        """The settings of clip and noise that the run reads."""
        return (*self.door.reads, *(NOISE if self.noised_by_clients else ()))

    @property
    def sampler(self) -> Choice:
        """What is known of the sampler."""
        everyone = self.system.everyone or self.sampling_rate == 1
        return SAMPLERS[self.sampling or ("everyone" if everyone else "poisson")]

    @property
    def clips(self) -> bool:
        """Whether messages are clipped: where z was given, or a finite ε; adaptively, always."""
        if "clip" not in self.release_reads:
            return False
        noise = self.noise_multiplier is not None or math.isfinite(self.target_epsilon)
        return noise or "target_quantile" in self.door.reads

    @property
    def target_epsilon(self) -> float:
        """The ε asked for; ∞ where none was."""
        return math.inf if self.epsilon is None else self.epsilon

    def require_unstreamed(self, what: str) -> None:
        """That rows lie where what goes over many runs can read them again and again.

        Raises:
          ValueError: they are streamed.
        """
        if self.streamed:
            raise ValueError(
                f"{what} needs all rows in memory and does not stream: leave out streamed"
            )

    def settings(self) -> dict[str, Any]:
        """What the run computes, as TOML values: the keys of a configuration that repeats it.

        Where the results go and how progress is shown are left out, as is what was not set.
        """
        table = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("out", "overwrite", "quiet") or value is None:
                continue
            table[field.name] = list(value) if isinstance(value, tuple) else value
        return table


def flag(name: str) -> str:
    """The spelling of a setting on the command line, without the dashes in front."""
    return name.replace("_", "-")
