"""Hyperparameters: the numbers of a run that one may tune, sweep or differentiate.

A part of a simulation (an algorithm, a mechanism, a sampler) declares each number that it reads as
a `Hyperparameter`, in the file that reads it. Flags, keys of TOML files, axes of sweeps, tuning,
derivatives, labels and checks are derived from these records. Settings that fix a shape or a branch
are arguments of the part's factory instead: changing a hyperparameter never recompiles.
"""

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, ParamSpec, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from fedjaxsim import checks
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.factories import settings_of

Value = ArrayLike | Sequence[float]
USUAL_STEP, USUAL_CLIP = 0.1, 1.0
LARGEST_FLOAT32 = 3.4028234663852886e38
_P = ParamSpec("_P")
_Part = TypeVar("_Part", bound=Any)


class Default(enum.Enum):
    """Default that follows from the run; its value is how `--help` shows it.

    Attributes:
      STEP: 1/L for a known bound L, see `Algorithm.curvature`, or `USUAL_STEP`.
      RATE: the rate p of the run's sampler.
      SAMPLED: the same, for the hyperparameter that a sampler with its usual rate reads.
      RATIO: a ratio of variances: another such one that is given; else a run without noise
        estimates it from its rows, see `data.variance_ratios`, and a private run takes 1.
    """

    STEP = "0.1, or 1/L on bounded rows"
    RATE = "sampling rate"
    SAMPLED = "max(0.2, 10 / clients)"
    RATIO = "the other λ; else estimated, or 1 in a private run"


@dataclasses.dataclass(frozen=True)
class Hyperparameter:
    """Number that a part of a simulation reads.

    Attributes:
      name: its name in `Hyperparameters`, in files and, with dashes, on the command line.
      default: its value where none is given; a `Default` if it follows from the run's sampler or
        data; None if one must be given.
      help: its meaning and unit, for `--help` and docs.
      range: the smallest and the largest allowed value.
      also: allowed values outside the range.
      allowed: the allowed values in words, which follow "must" in an error.
      scale: "log" for a positive number that `fedjaxsim tune` may search on a logarithmic scale.
      schedule: whether it may have one value per round, shape (T,), instead of ().
      per_client: whether it may have one value per client, shape (m,), but no schedule; `init`,
        `client` and `predict` then read their client's, (), and nothing else may.
      shape: shape of the value, as (k,) for one learning rate for each of k layers; one number
        stands for all, and a flat list for the numbers of all rows.

    Example:
      >>> decay = fjs.Hyperparameter("decay", 0.9, range=(0.0, 1.0), allowed="lie in [0, 1]")
      >>> decay.check(1.5)
      Traceback (most recent call last):
      fedjaxsim.checks.SettingError: decay must lie in [0, 1], got 1.5
    """

    name: str
    default: float | Default | None = None
    help: str = ""
    range: tuple[float, float] = (0.0, LARGEST_FLOAT32)
    also: tuple[float, ...] = ()
    allowed: str = "be finite and at least 0"
    scale: Literal["linear", "log"] = "linear"
    schedule: bool = False
    per_client: bool = False
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.default, str):
            raise ValueError(
                f"the default of {self.name} must be a number, a Default or None, got "
                f"{self.default!r}; describe it in help"
            )
        if self.schedule and self.per_client:
            raise SettingError(
                Name(self.name), " may have a value per round or per client, not both"
            )
        if self.shape and (self.schedule or self.per_client):
            raise ValueError(f"{self.name} has a shape, so it has no value per round or per client")
        is_shape = isinstance(self.shape, tuple)
        if not is_shape or any(type(size) is not int or size < 1 for size in self.shape):
            raise ValueError(
                f"the shape of {self.name} must be a tuple of sizes above 0: {self.shape}"
            )

    def check(self, value: Value, clients: int | None = None) -> None:
        """Check the shape, for m `clients` if known, and the range if the value is on the host."""
        self.check_shape(value, clients)
        numbers = on_host(value)
        if numbers is None:
            return
        allowed = self.allows(numbers)
        if not allowed.all():
            got = numbers if numbers.ndim == 0 else numbers[~allowed]
            raise SettingError(Name(self.name), f" must {self.allowed}, got {got}")

    def check_shape(self, value: Any, clients: int | None = None) -> None:
        """Check shape and type of a value, which may be traced, for m `clients` if known."""
        may_differ = self.schedule or self.per_client
        of_each = "round" if self.schedule else "client" + (f" ({clients})" if clients else "")
        wanted = f"a number or one number per {of_each}" if may_differ else "one number"
        if self.shape:
            wanted = f"numbers of shape {self.shape}"
        dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
        if not jnp.issubdtype(dtype, jnp.floating) and dtype.kind not in "iub":
            raise SettingError(Name(self.name), f" must be {wanted}, got {value!r}")
        shape = np.shape(value)
        if self.shape and shape == self.shape:
            return
        wrong = self.per_client and clients is not None and shape not in ((), (clients,))
        if wrong or self.shape or len(shape) > may_differ or 0 in shape:
            raise SettingError(Name(self.name), f" must be {wanted}, got shape {shape}")

    def of_shape(self, value: Any) -> Any:
        """Return a value, or one number for all, in the declared shape."""
        if not self.shape or isinstance(value, Default | None):
            return value
        if np.size(value) == 1 and isinstance(value, jax.Array):
            return jnp.broadcast_to(value.reshape(()), self.shape)
        if np.size(value) == 1:
            return np.broadcast_to(np.ravel(value)[0], self.shape)
        if not isinstance(value, list | tuple):
            return value
        numbers = np.asarray(value)
        listed = numbers.ndim == 1 and numbers.size == np.prod(self.shape)  # row by row
        return numbers.reshape(self.shape) if listed else numbers

    def allows(self, value: Any) -> Any:
        """Return whether each number, on the host or traced, lies in the range; NaN does not."""
        inside = (value >= self.range[0]) & (value <= self.range[1])
        for other in self.also:
            inside |= value == other
        return inside


@jax.tree_util.register_pytree_with_keys_class
class Hyperparameters:
    """The values of all hyperparameters of one simulation: a pytree of arrays, from its method.

    Values are attributes, as in `hparams.learning_rate`: each (), of its declared shape, or one per
    round or client.

    Example:
      >>> hparams.replace(clip=0.5).clip  # `hparams` as in `Simulation`
      0.5
    """

    def __init__(self, **values: Value):
        self.__dict__["_values"] = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(
                f"hyperparameter {name!r} is not declared by a part of the simulation, or has a "
                "value for each client, which no server reads; there are "
                f"{', '.join(self.__dict__.get('_values', ())) or 'none'}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"hyperparameters are immutable: use replace({name}=…)")

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Hyperparameters) or self._values.keys() != other._values.keys():
            return False
        return all(np.array_equal(v, other._values[name]) for name, v in self._values.items())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        def shown(value: Any) -> str:
            if isinstance(value, Tracer) or np.ndim(value):
                return f"array{list(np.shape(value))}"
            return f"{float(value):.6g}"

        return f"Hyperparameters({', '.join(f'{k}={shown(v)}' for k, v in self._values.items())})"

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of that name, or the default if no part declares it."""
        return self._values.get(name, default)

    def replace(self, **changes: Value) -> Self:
        """Return a copy with other values; raise ValueError for a name that is not among them."""
        for name in changes:
            checks.one_of(self._values, hyperparameter=name)
        return self.having(**changes)

    def having(self, **values: Value) -> Self:
        """Return a copy with more values, or other ones."""
        return type(self)(**(self._values | values))

    def as_arrays(self) -> Self:
        """Return a copy with float arrays of the default precision, which share one program."""
        dtype = jnp.result_type(float)

        def as_array(leaf: Any) -> Any:
            done = isinstance(leaf, jax.Array) and leaf.dtype == dtype and not leaf.weak_type
            return leaf if done or leaf is None else jnp.asarray(leaf, dtype=dtype)

        return self.map(as_array)

    def map(self, function: Callable[..., Any], *others: "Hyperparameters") -> Self:
        """Apply `function(value, …)` to every value and the values of `others` of its name."""
        return type(self)(
            **{
                name: function(value, *(other._values[name] for other in others))
                for name, value in self._values.items()
            }
        )

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[str, ...]]:
        """Flatten for JAX."""
        names = tuple(self._values)
        return [(jax.tree_util.GetAttrKey(name), self._values[name]) for name in names], names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], leaves: Iterable[Any]) -> Self:
        """Unflatten for JAX."""
        return cls(**dict(zip(names, leaves, strict=True)))


class HyperparameterCheck(Protocol):
    """A part's check of its hyperparameters."""

    def __call__(self, hparams: "Hyperparameters", /) -> None:
        """Raise ValueError if hyperparameters that are known on the host do not suit the part."""
        ...


Declarations = tuple[Hyperparameter, ...]


def reads(
    *records: Hyperparameter | Callable[..., Any],
) -> Callable[[Callable[_P, _Part]], Callable[_P, _Part]]:
    """Declare the hyperparameters that the part made by a factory reads, its `hyperparameters`.

    A function among `records` returns those that the factory's keyword arguments decide on, and
    another factory stands for what it reads itself, with the arguments that both take.

    Example:
      >>> @fjs.reads(fjs.PULL)
      ... def pulled(task):
      ...     return fjs.fedavg(task)
      >>> [record.name for record in pulled(task).hyperparameters]  # task as in `Simulation`
      ['lam']
    """
    for record in records:
        if not isinstance(record, Hyperparameter) and not callable(record):
            example = f"fjs.Hyperparameter({str(record)!r}, 0.1)"
            raise ValueError(f"reads takes hyperparameters, such as {example}, got {record!r}")

    def decorate(factory: Callable[_P, _Part]) -> Callable[_P, _Part]:
        @functools.wraps(factory)
        def make(*args: _P.args, **kwargs: _P.kwargs) -> _Part:
            part = factory(*args, **kwargs)
            if part is None:
                raise ValueError(f"{factory.__name__} returns None: does it lack a `return`?")
            return part._replace(hyperparameters=declared_by(make, *args, **kwargs))

        make.declared = records  # type: ignore[attr-defined]
        return make

    return decorate


def declared_by(factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Declarations:
    """Return the records that `reads` declares for a factory with these arguments."""
    call = inspect.signature(factory).bind_partial(*args, **kwargs)
    call.apply_defaults()
    declared: list[Hyperparameter] = []
    for record in getattr(factory, "declared", ()):
        if isinstance(record, Hyperparameter):
            declared.append(record)
        elif hasattr(record, "declared"):
            both = inspect.signature(record).parameters.keys() & call.arguments.keys()
            declared += declared_by(record, **{name: call.arguments[name] for name in both})
        else:
            declared += record(**call.arguments)
    return tuple(dict.fromkeys(declared))


def defaults_in_words(records: Declarations) -> str:
    """Return the names of hyperparameters with their defaults, as in `lam (0.1)`."""

    def default(record: Hyperparameter) -> Any:
        value = record.default
        return value.value if isinstance(value, Default) else "required" if value is None else value

    return ", ".join(f"{record.name} ({default(record)})" for record in records) or "nothing"


def ever_declared_by(factory: Callable[..., Any]) -> Declarations:
    """Return the records that `reads` declares for any values of a factory's settings."""
    records = dict.fromkeys(declared_by(factory))
    for setting in settings_of(factory).values():
        for value in setting.values:
            records |= dict.fromkeys(declared_by(factory, **{setting.name: value}))
    return tuple(records)


def keeps_ranges(before: Iterable[Hyperparameter], after: Iterable[Hyperparameter]) -> bool:
    """Return whether all records before are there after, with the same values allowed."""

    def allowed(record):
        return type(record), record.name, record.range, record.also, record.schedule, record.shape

    return {*map(allowed, before)} <= {*map(allowed, after)}


def compose(parts: Iterable[Declarations]) -> dict[str, Hyperparameter]:
    """Join the hyperparameters of several parts into one namespace."""
    by_name: dict[str, Hyperparameter] = {}
    for record in (record for records in parts for record in records):
        if by_name.setdefault(record.name, record) != record:
            raise ValueError(
                f"two parts of the simulation declare hyperparameter {record.name!r} differently: "
                f"{by_name[record.name]} and {record}"
            )
    return by_name


def per_client(records: Iterable[Hyperparameter], hparams: Hyperparameters) -> tuple[str, ...]:
    """Return the names of the hyperparameters with a value for each client, (m,)."""
    return tuple(r.name for r in records if r.per_client and np.ndim(hparams.get(r.name, 0.0)))


def client_values(
    records: Declarations, hparams: Hyperparameters, client_id: Any
) -> Hyperparameters:
    """Return one client's hyperparameters, () each but for schedules."""
    values = {name: jnp.asarray(getattr(hparams, name)) for name in per_client(records, hparams)}
    of_client = {
        name: of_clients.at[client_id].get(mode="clip") for name, of_clients in values.items()
    }
    return hparams.having(**of_client)


def server_values(records: Iterable[Hyperparameter], hparams: Hyperparameters) -> Hyperparameters:
    """Return the hyperparameters but for those with a value for each client."""
    hidden = per_client(records, hparams)
    return Hyperparameters(**{n: getattr(hparams, n) for n in hparams if n not in hidden})


def fill(
    records: Mapping[str, Hyperparameter],
    values: Mapping[str, Value],
    rate: Callable[[Hyperparameters], Value] = lambda hparams: 1.0,
    step: Callable[[Hyperparameters], Value] = lambda hparams: USUAL_STEP,
    *,
    clients: int | None = None,
) -> Hyperparameters:
    """Complete values by defaults and check them.

    A `Default` follows from `rate`, `(hparams) -> p`, or `step`, `(hparams) -> η`. Ratios of
    variances are made of rows: one of them must be given, and is the default of the others.
    """
    for name in values:
        checks.one_of(records, hyperparameter=name)
    values = {name: records[name].of_shape(value) for name, value in values.items()}
    for name, value in values.items():
        records[name].check(value, clients)  # before defaults
    missing = [n for n, record in records.items() if n not in values and record.default is None]
    if missing:
        raise ValueError(
            f"hyperparameter {missing[0]!r} must be given: it has no default "
            f"({records[missing[0]].help})"
        )
    complete: dict[str, Any] = {n: values.get(n, record.default) for n, record in records.items()}
    for name in complete:  # a default η may follow from a list of the clients' values
        if records[name].per_client and isinstance(complete[name], list | tuple):
            complete[name] = np.asarray(complete[name])
    derived = {name: value for name, value in complete.items() if isinstance(value, Default)}
    of_rows = [name for name, kind in derived.items() if kind is Default.RATIO]
    alike = [name for name, r in records.items() if r.default is Default.RATIO]
    if of_rows and len(of_rows) < len(alike):  # a ratio that is given is all of them
        [first, *_] = (name for name in alike if name not in of_rows)
        complete |= dict.fromkeys(of_rows, complete[first])
        derived = {name: kind for name, kind in derived.items() if name not in of_rows}
    elif of_rows:
        raise ValueError(
            f"{' and '.join(of_rows)} must be given: fjs.data.variance_ratios(population) "
            "estimates them from rows, which no ε covers"
        )
    if derived:
        independent = Hyperparameters(**{n: v for n, v in complete.items() if n not in derived})
        p = independent.sampling_rate if "sampling_rate" in independent else rate(independent)
        eta = step(independent)
        complete |= {n: eta if kind is Default.STEP else p for n, kind in derived.items()}
    for name in complete.keys() - values.keys():
        complete[name] = records[name].of_shape(complete[name])
        records[name].check(complete[name], clients)
    return Hyperparameters(**complete)


def on_host(value: Value) -> np.ndarray | None:
    """Return the value on the host, or None while it is traced (mapped or differentiated)."""
    return None if isinstance(value, Tracer) else np.asarray(value, dtype=np.float64)
