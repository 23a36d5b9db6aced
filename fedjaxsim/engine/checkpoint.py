"""Checkpoints: the whole state of a run, or of many, with its records, each in one file.

A folder holds the last few checkpoints, named by the rounds done. Each file is a line of JSON (the
leaves' names, types and shapes, the accounts of the ledger, a note, fingerprints of the run), the
bytes of the leaves in that order, random keys as their words, and the SHA-256 of all before: all of
it is whole together or not at all.
"""

import collections
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import store
from fedjaxsim.engine.processes import is_first, pieces_of, placed
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.entries import Entry, SamplingScheme
from fedjaxsim.privacy.events import PrivacyLimit, PrivacySpend, event_from

Tree = TypeVar("Tree")

KEPT = 3
"""Checkpoints that a folder keeps, the last ones."""

_ENDING = ".state"
_BLOCK = 1 << 20
"""Bytes that are read at once."""


class Checkpoint(NamedTuple):
    """One whole checkpoint after `round` rounds, whose state has not been read yet.

    `leaves` are the type and shape of each named leaf of the state, in their order in the file from
    position `begin` on; `ledger` has the static parts of its ledger, if it has one. `about` and
    `note` are as in `CheckpointFolder`, `x64` is JAX's setting (None of an older file), and
    `skipped` says why later checkpoints cannot be read.
    """

    file: Path
    begin: int
    round: int
    about: Mapping[str, str]
    note: dict[str, Any]
    leaves: Mapping[str, tuple[str, list[int]]]
    ledger: dict[str, Any] | None
    x64: bool | None = None
    skipped: tuple[str, ...] = ()

    def state(self, like: Tree) -> Tree:
        """Return the state with the structure, types and shardings of `like`, from `init`.

        Its ledger may differ; ValueError if other leaves do.
        """
        try:
            like = _with_ledger(like, self.ledger)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{self.file} is damaged: its ledger cannot be read") from error
        wanted = dict(_leaves(like))
        if wanted.keys() != self.leaves.keys():
            differing = ", ".join(sorted(wanted.keys() ^ self.leaves.keys()))
            raise ValueError(f"{self.file} holds another kind of state: {differing} differ")
        arrays = {}
        with self.file.open("rb") as stream:
            stream.seek(self.begin)
            for name, (dtype, shape) in self.leaves.items():
                raw = _words(wanted[name])
                if (str(raw.dtype), list(raw.shape)) != (dtype, shape):
                    expected = f"{raw.dtype}{list(raw.shape)}"
                    raise ValueError(f"{self.file}: {name} must be {expected}, got {dtype}{shape}")
                array = np.empty(raw.shape, raw.dtype)
                if stream.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
                    raise ValueError(f"{self.file} is damaged: {name} is cut")
                arrays[name] = _placed(array, wanted[name])
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])


def _ledger_of(state: Any) -> dict[str, Any] | None:
    """Return the static parts of a state's ledger as JSON: accounts, number of keys, and so on."""
    if not isinstance(state, SimulationState):
        return None
    privacy, limit = state.privacy, state.privacy.limit
    if limit is not None:
        limit = limit._replace(planned=[(*_kind_of(e), e.entries) for e in limit.planned])
    return {
        "accounts": [(*_kind_of(charge), len(charge.rounds)) for charge in privacy.charges],
        "keys": len(privacy.draws),
        "public": privacy.public,
        "limit": limit,
    }


def _with_ledger(like: Any, saved: dict[str, Any] | None) -> Any:
    """Return a state whose ledger has the saved static parts."""
    if saved is None:
        return like
    kinds = [(*_kind_from(scheme, event), n) for scheme, event, n in saved["accounts"]]
    privacy, limit = like.privacy, saved["limit"]
    if kinds != [(charge.scheme, charge.event, len(charge.rounds)) for charge in privacy.charges]:
        charges = tuple(ledger.no_charges(*kind) for kind in kinds)
        privacy = dataclasses.replace(privacy, charges=charges)
    if limit is not None:
        epsilon, delta, planned = limit
        spends = (
            PrivacySpend(*_kind_from(scheme, event), tuple(Entry(*entry) for entry in entries))
            for scheme, event, entries in planned
        )
        limit = PrivacyLimit(epsilon, delta, tuple(spends))
    draws, public = privacy.draws[:1] * saved["keys"], tuple(saved["public"])
    privacy = dataclasses.replace(privacy, draws=draws, public=public, limit=limit)
    return dataclasses.replace(like, privacy=privacy)


def _kind_of(account: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return dataclasses.asdict(account.scheme), account.event.to_dict()


def _kind_from(scheme: dict[str, Any], event: dict[str, Any]) -> tuple[Any, Any]:
    return SamplingScheme(**scheme), event_from(event)


@dataclasses.dataclass(frozen=True)
class CheckpointFolder:
    """A folder of checkpoints, which need not exist.

    Attributes:
      about: a dict of fingerprints of a run's inputs. A checkpoint with others is refused.
      check: called with the note of a checkpoint; raises ValueError if another file that belongs to
        it is damaged.
    """

    path: Path
    about: Mapping[str, str] = dataclasses.field(default_factory=dict)
    check: Callable[[Mapping[str, Any]], None] | None = None

    def save(self, round_: int, state: Any, note: Mapping[str, Any]) -> None:
        """Write a checkpoint, piece by piece of the state; remove old ones and later ones.

        All of several processes must call it together; the first one writes. `note` holds values of
        JSON, infinity and NaN included. If it cannot be written, StorageError is raised and earlier
        checkpoints stay.
        """
        arrays = {name: _words(leaf) for name, leaf in _leaves(state)}
        content = {
            "round": round_,
            "about": dict(self.about),
            "note": note,
            "leaves": {name: (str(a.dtype), np.shape(a)) for name, a in arrays.items()},
            "ledger": _ledger_of(state),
            "x64": has_x64(),
        }
        header = f"{json.dumps(content)}\n".encode()

        def parts() -> Iterator[Any]:
            digest = hashlib.sha256(header)
            yield header
            for piece in (piece for leaf in arrays.values() for piece in pieces_of(leaf)):
                digest.update(piece.data)
                yield piece
            yield digest.digest()

        if not is_first():
            collections.deque(parts(), 0)
            return
        store.make_folder(self.path)
        store.write(self._file(round_), parts)
        newest = [other for other in self.rounds() if other <= round_][-KEPT:]
        for other in self.rounds():
            if other not in newest:
                store.remove(self._file(other))

    def rounds(self) -> list[int]:
        """Return the rounds of all checkpoints, whole or not, in order."""
        files = self.path.glob(f"*{_ENDING}")
        return sorted(int(file.stem) for file in files if file.stem.isdecimal())

    def last(self) -> Checkpoint | None:
        """Return the last whole checkpoint of this run, or None without any file.

        ValueError if there are checkpoints, and each is damaged or of another run.
        """
        skipped = []
        for round_ in reversed(self.rounds()):
            try:
                return self._read(round_)._replace(skipped=tuple(skipped))
            except FileNotFoundError:  # the run that writes has removed an old one meanwhile
                return self.last()
            except (ValueError, OSError) as error:
                skipped.append(str(error))
        if skipped:
            raise ValueError(f"{skipped[0]}; what begins anew needs another directory")
        return None

    def clear(self) -> None:
        """Remove all checkpoints."""
        store.remove(self.path)

    def _file(self, round_: int) -> Path:
        return self.path / f"{round_}{_ENDING}"

    def _read(self, round_: int) -> Checkpoint:
        file = self._file(round_)
        header, is_complete = _header(file)
        try:
            checkpoint = (
                Checkpoint(file, len(header), **json.loads(header)) if is_complete else None
            )
        except TypeError as error:
            raise ValueError(f"{file} was written by another version of fedjaxsim") from error
        if checkpoint is None or checkpoint.round != round_:
            raise ValueError(f"{file} is damaged")
        require_x64(checkpoint.x64, file)
        if self.check is not None:
            self.check(checkpoint.note)
        other = [name for name, value in self.about.items() if checkpoint.about.get(name) != value]
        if other:
            raise ValueError(f"{file} was made with other {' and '.join(other)} than these here")
        return checkpoint


def has_x64() -> bool:
    """Return whether JAX computes in 64 bits, as with JAX_ENABLE_X64=1."""
    return bool(jax.config.values["jax_enable_x64"])


def require_x64(x64: bool | None, path: Path) -> None:
    """Check that JAX has the setting that the files at a path were made with; None is unknown."""
    if x64 not in (None, has_x64()):
        raise ValueError(
            f"{path} was made with JAX_ENABLE_X64={x64:d}, and JAX has {has_x64():d} here: set the "
            f"environment variable JAX_ENABLE_X64={x64:d} to go on"
        )


def _header(file: Path) -> tuple[bytes, bool]:
    """Return the first line of a file, and whether the digest at its end fits."""
    with file.open("rb") as stream:
        header = block = stream.readline()
        digest = hashlib.sha256()
        end = os.fstat(stream.fileno()).st_size - digest.digest_size
        while block:
            digest.update(block)
            block = stream.read(min(_BLOCK, max(0, end - stream.tell())))
        return header, stream.read() == digest.digest()


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path).lstrip("."), leaf) for path, leaf in leaves]


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _words(leaf: Any) -> Any:
    """Return a leaf, or the words of a typed random key."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _placed(saved: np.ndarray, like: Any) -> jax.Array | np.ndarray:
    if isinstance(like, np.ndarray):
        return saved  # the states of a streamed simulation
    committed = getattr(like, "committed", False)
    leaf = placed(saved, _words(like).sharding) if committed else jnp.asarray(saved)
    return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like)) if _is_key(like) else leaf
