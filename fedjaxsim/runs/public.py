"""The folder of a run that may be handed on: what its guarantee covers, and nothing else.

    model.npz        the server's state, computed from releases alone; names are paths of its leaves
    guarantee.json   the guarantee, without digests of the key and rows of single clients
    guarantee.txt    the same in words
    settings.toml    the settings, without seeds and paths, and what followed from them
    metrics.jsonl    the metrics that evaluations released with noise, if any, at their charge

A folder lists what it takes; what is not listed stays private.
"""

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjaxsim import store
from fedjaxsim.data.readers import DataSpec
from fedjaxsim.divergence import Record
from fedjaxsim.factories import is_user_code
from fedjaxsim.report.files import lines, write_json, write_tables
from fedjaxsim.runs.parts import names_of, part_of
from fedjaxsim.runs.settings import readers, static_keys

if TYPE_CHECKING:
    from fedjaxsim.privacy.guarantee import Report

PUBLIC = "public"
"""The folder's name in the directory of a run."""
MODEL = "model.npz"
_FILES = (MODEL, "guarantee.json", "guarantee.txt", "settings.toml", "metrics.jsonl")
_RESOLVED = (
    "rounds", "clients", "capacity", "noise_multiplier", "noise_first", "noise_last", "clip",
    "bytes_sent", "delta", "learning_rate", "personal_learning_rate", "sampling_rate",
    "local_epochs", "local_steps",
)  # fmt: skip
"""Values that follow from settings and public facts."""


def is_covered(report: "Report") -> bool:
    """Return whether a guarantee covers a reader of what the server published."""
    published = [
        guarantee for guarantee in report.guarantees if guarantee.view == "released_sequence"
    ]
    return any(guarantee.epsilon is not None for guarantee in published)


def write_model(path: Path, shared: Any) -> None:
    """Write the server's state, each leaf under its path."""
    import jax  # a comparison, which reads directories, needs none

    leaves, _ = jax.tree_util.tree_flatten_with_path(shared)
    arrays = {jax.tree_util.keystr(place): np.asarray(leaf) for place, leaf in leaves}
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=False, **arrays)
    store.write(path, stream.getvalue())


def write_public(
    path: Path,
    shared: Any,
    report: "Report",
    settings: Mapping[str, Any],
    rows: Iterable[Record],
) -> None:
    """Write the folder.

    Args:
      path: the folder, which is made.
      shared: the server's state.
      report: the guarantee of the run, which covers a reader of that state.
      settings: the content of its `config.toml`.
      rows: its evaluations.
    """
    store.make_folder(path)
    for name in _FILES:  # those of another run, or of an export that was interrupted
        store.remove(path / name)
    write_model(path / MODEL, shared)
    guarantee = report.to_json()
    guarantee.pop("draws", None)
    guarantee.get("example", {}).pop("clients", None)
    write_json(path / "guarantee.json", guarantee)
    store.write(path / "guarantee.txt", f"{report}\n".encode())
    write_tables(path / "settings.toml", _public_settings(settings))
    released = [
        {"round": row["round"]} | {k: v for k, v in row.items() if k.startswith("private_")}
        for row in rows
    ]
    released = [row for row in released if len(row) > 1]
    if released:
        store.write(path / "metrics.jsonl", lines(released))


def _public_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    secret = {name for name, setting in static_keys().items() if setting.is_secret}
    parts = [part_of(*part) for part in names_of(settings).items() if not is_user_code(part[1])]
    own = {name for part in parts for name in part.settings}
    stated = {*static_keys(), *own, "resolved", "versions"}
    published = {
        name: value
        for name, value in settings.items()
        if name not in secret and not isinstance(value, Mapping) and name != "stages"
        # Text for a user's own part may be a path, such as of the file that a reader reads.
        # What no part of the run reads takes a look at all parts, whose import costs 0.1 s.
        if name in stated or not isinstance(value, str) or name in readers()
    }
    spec = DataSpec(published["data"])
    if spec.file is not None:
        published["data"] = f"{spec.kind}:{spec.file.name}"
    resolved = settings["resolved"]
    values = {name: resolved[name] for name in _RESOLVED if name in resolved}
    published["resolved"] = {k: v for k, v in values.items() if not isinstance(v, list)}
    stages = settings.get("stages", [])
    if stages:
        published["stages"] = [{name: stage[name] for name in ("algorithm", "rounds")}
                               for stage in stages]  # fmt: skip
    return published | {"versions": settings["versions"]}
