"""Which settings a run reads: one table, by what the run is made of.

A setting that a run does not read would be ignored without a word, and whoever gave it would think
that it did something.
"""

import dataclasses
import zipfile
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from fedjaxsim.algorithms.systems import SYSTEMS, System
from fedjaxsim.privacy.choices import MECHANISMS, NOISE, SAMPLERS
from fedjaxsim.runs.settings import MODELS, OWN_SYSTEM, RunConfig, flag, is_own

_OWN = "of one's own"
_DEALT = ("clients", "partition", "alpha", "feature_noise")
_COLUMNS = ("client", "target", "one_hot", "drop")
_MADE = {"num_clients": (), "protect_examples": ("example_epsilon",)}
"""Arguments of systems that are no settings, and the settings that they are made of."""
_MINIBATCHES = ("batch_size", "local_steps", "local_epochs", "passes")
_ROWS = ("test_fraction", "validation_fraction", "classes", "preprocess", "intercept", "compute")


class Part(NamedTuple):
    """Something that a run is made of, and what each choice of it reads.

    Attributes:
      name: for people.
      chosen: `(config) -> choice`, or None where the data have to be read to tell.
      reads: the settings of each choice, by field name. What no choice of any part names is read
        by every run.
    """

    name: str
    chosen: Callable[[RunConfig], str | None]
    reads: dict[str, tuple[str, ...]]


def _kind_of_data(config: RunConfig) -> str | None:
    """The kind of data, where a file, a table or a folder has clients of its own or not."""
    kind, _, path = config.data.partition(":")
    if kind == "images":
        return f"images {'with' if config.partition is None else 'without'} clients"
    if kind in ("csv", "parquet"):
        return f"table {'without' if config.client is None else 'with'} clients"
    if kind != "npz":
        return kind
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
    except (OSError, ValueError, zipfile.BadZipFile):
        return None
    return "npz with clients" if names & {"client.npy", "counts.npy"} else "npz without clients"


def _dealing(config: RunConfig) -> str:
    return (config.partition or "dirichlet").partition(":")[0]


def _noised_by(config: RunConfig) -> str:
    """Who clips and adds noise: the mechanism, or the system whose clients do it themselves."""
    return config.algorithm if config.noised_by_clients else config.door_name


def settings_of(system: System, penalty: str | None = None) -> tuple[str, ...]:
    """The settings that a system reads and that not every run does, by field name.

    Args:
      system: which one.
      penalty: by default its first.
    """
    of_penalties = {name for names in system.penalties.values() for name in names}
    read = system.penalties.get(penalty or next(iter(system.penalties), ""), ())
    return tuple(
        name for name in _all_settings_of(system) if name not in of_penalties or name in read
    )


def _all_settings_of(system: System) -> tuple[str, ...]:
    """Those that it reads with some penalty or other."""
    schedule = ("schedule",) if "local_optimizer" in system.arguments else ()
    given = (name for argument in system.arguments for name in _MADE.get(argument, (argument,)))
    of_penalties = (name for names in system.penalties.values() for name in names)
    return tuple(dict.fromkeys((*system.reads, *given, *of_penalties, *schedule)))


PARTS = (
    Part(
        "algorithm",
        lambda config: _OWN if is_own(config.algorithm) else config.algorithm,
        {
            name: (*_all_settings_of(system), *(() if system.whole_pass else _MINIBATCHES))
            for name, system in (*SYSTEMS.items(), (_OWN, OWN_SYSTEM))
        },
    ),
    Part(
        "penalty",
        lambda config: config.penalty_name,
        {name: read for system in SYSTEMS.values() for name, read in system.penalties.items()},
    ),
    Part(
        "mechanism",
        _noised_by,
        {
            **{name: choice.reads for name, choice in MECHANISMS.items()},
            **{name: NOISE for name, system in SYSTEMS.items() if system.noised_by_clients},
        },
    ),
    Part(
        "sampling",
        lambda config: config.sampling or ("everyone" if config.system.everyone else "poisson"),
        {name: choice.reads for name, choice in SAMPLERS.items()},
    ),
    Part(
        "model",
        lambda config: _OWN if is_own(config.model) else config.model,
        {**dict.fromkeys(MODELS, ("hidden",)), "linear": ("intercept",), "cnn": (), _OWN: ()},
    ),
    Part(
        "data",
        _kind_of_data,
        {
            "digits": (*_DEALT, *_ROWS),
            "npz without clients": (*_DEALT, *_ROWS),
            "npz with clients": _ROWS,
            "images with clients": _ROWS,
            "images without clients": (*_DEALT, *_ROWS),
            "table with clients": (*_COLUMNS, "split", *_ROWS),
            "table without clients": (*_COLUMNS, *_DEALT, *_ROWS),
            "leaf": _ROWS,
            "folder": _ROWS,
            "mat": ("fields", *_ROWS),
            "synthetic": ("clients", "offset_scale", *_ROWS),
            "synthetic-low-rank": ("clients", *_ROWS),
            "synthetic-group-sparse": ("clients", *_ROWS),
            "synthetic-stream": ("clients", "offset_scale"),
        },
    ),
    Part(
        "partition",
        _dealing,
        {"dirichlet": ("clients", "alpha"), "quantity": ("clients", "alpha"),
         "feature-noise": ("clients", "feature_noise"), "iid": ("clients",),
         "shards": ("clients",), "column": ()},
    ),
)  # fmt: skip


def unread(config: RunConfig, given: Iterable[str]) -> list[str]:
    """Which settings have no effect on a run, each with the reason, for people.

    Args:
      config: the settings.
      given: field names of those that somebody set.
    """
    reasons = []
    for name in given:
        for part in PARTS:
            reading = [one for one, names in part.reads.items() if name in names]
            choice = part.chosen(config) if reading else None
            if choice not in part.reads or choice in reading:
                continue
            reasons.append(
                f"{flag(name)} has no effect with {part.name} {choice}, "
                f"only with {' or '.join(one for one in reading if one != _OWN)}"
            )
            break
    return reasons


def require_read(config: RunConfig, given: Collection[str]) -> None:
    """Checks that everything that somebody set has an effect.

    Raises:
      ValueError: naming what has none, and what reads it.
    """
    reasons = unread(config, given)
    if reasons:
        raise ValueError("; ".join(reasons))


def different(config: RunConfig) -> set[str]:
    """The settings that are not at their defaults, by field name.

    A file that a run wrote holds every setting, so that one stands there does not say that somebody
    wanted it.
    """
    default = RunConfig()
    fields = [field.name for field in dataclasses.fields(config)]
    return {name for name in fields if getattr(config, name) != getattr(default, name)}


def given_flags(arguments: Iterable[str]) -> set[str]:
    """The settings that a command line sets, by field name."""
    words = {
        word.partition("=")[0].removeprefix("--").replace("-", "_")
        for word in arguments
        if word.startswith("--")
    }
    fields = {field.name for field in dataclasses.fields(RunConfig)}
    return (words | {word.removeprefix("no_") for word in words}) & fields
