"""Checkpoints: the whole state of a run, or of many, with its records, each in one file.

A folder holds the last few checkpoints, named by the rounds done. Each file is a line of JSON (the
leaves' names, types and shapes, the accounts of the ledger, a note, fingerprints of the run), the
bytes of the leaves in that order, random keys as their words, and the SHA-256 of all before. So
state, ledger, note and fingerprints are whole together or not at all, and anybody may read the file
while the run writes the next one.
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
from fedjaxsim.engine.processes import is_first, pieces_of, placed, to_host
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.entries import Entry, SamplingScheme
from fedjaxsim.privacy.events import PrivacyEvent, PrivacyLimit, PrivacySpend, event_from

Tree = TypeVar("Tree")

KEPT = 3
"""Checkpoints that a folder keeps, the last ones."""

_ENDING = ".state"
_DIGEST = hashlib.sha256
_DIGEST_BYTES = 32
_DAMAGE = ValueError, KeyError, AttributeError, OSError, RecursionError, SyntaxError
"""Errors of a header that is no header; numpy parses the names of types."""
_BLOCK = 1 << 20
"""Bytes that are read, or written and hashed, at once."""


class Checkpoint(NamedTuple):
    """One whole checkpoint, whose state has not been read yet.

    Attributes:
      begin: position of the first leaf in the file.
      round: rounds done.
      about, note: as in `CheckpointFolder` and its `save`.
      leaves: type and shape of the state's leaves, by name, in their order in the file.
      accounts: sampler, mechanism and number of entries of each account of the state's ledger.
      keys: number of keys that the state has drawn from; the ledger has a record of each.
      public, limit: of the state's ledger.
      skipped: the reasons why later checkpoints in its folder cannot be read.
    """

    file: Path
    begin: int
    round: int
    about: Mapping[str, str]
    note: dict[str, Any]
    leaves: Mapping[str, tuple[str, list[int]]]
    accounts: list[tuple[dict[str, Any], dict[str, Any], int]]
    keys: int
    public: list[str]
    limit: list[Any] | None = None
    skipped: tuple[str, ...] = ()

    @property
    def kinds(self) -> list[tuple[SamplingScheme, PrivacyEvent, int]]:
        """Sampler, mechanism and number of entries of each account."""
        return [(*_kind_from(scheme, event), n) for scheme, event, n in self.accounts]

    def state(self, like: Tree) -> Tree:
        """Return the state with the structure, types and shardings of `like`, from `init`.

        Its ledger may differ; ValueError if other leaves do.
        """
        like = self._with_accounts(like)
        wanted = dict(_leaves(like))
        if wanted.keys() != self.leaves.keys():
            differing = ", ".join(sorted(wanted.keys() ^ self.leaves.keys()))
            raise ValueError(f"{self.file} holds another kind of state: {differing} differ")
        found = {}
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
                found[name] = _placed(array, wanted[name])
        return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in wanted])

    def _with_accounts(self, like: Any) -> Any:
        """Add the saved accounts and key records to a state."""
        if not isinstance(like, SimulationState):
            return like
        kinds = self.kinds
        known = [(each.scheme, each.event, len(each.rounds)) for each in like.privacy.charges]
        privacy = like.privacy
        if known != kinds:
            charges = tuple(ledger.no_charges(*kind) for kind in kinds)
            privacy = dataclasses.replace(privacy, charges=charges)
        limit = None if self.limit is None else _limit_from(*self.limit)
        draws, public = privacy.draws[:1] * self.keys, tuple(self.public)
        privacy = dataclasses.replace(privacy, draws=draws, public=public, limit=limit)
        return dataclasses.replace(like, privacy=privacy)


def _kind_of(account: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return dataclasses.asdict(account.scheme), account.event.to_dict()


def _kind_from(scheme: dict[str, Any], event: dict[str, Any]) -> tuple[Any, Any]:
    return SamplingScheme(**scheme), event_from(event)


def _limit_from(epsilon: float, delta: float, planned: list[Any]) -> PrivacyLimit:
    spends = (
        PrivacySpend(*_kind_from(scheme, event), tuple(Entry(*each) for each in entries))
        for scheme, event, entries in planned
    )
    return PrivacyLimit(epsilon, delta, tuple(spends))


@dataclasses.dataclass(frozen=True)
class CheckpointFolder:
    """A folder of checkpoints, which need not exist.

    Attributes:
      about: fingerprints of a run's inputs, by name. A checkpoint with others is refused.
      check: called with the note of a checkpoint; raises ValueError if another file that belongs to
        it is damaged.
    """

    path: Path
    about: Mapping[str, str] = dataclasses.field(default_factory=dict)
    check: Callable[[Mapping[str, Any]], None] | None = None

    def save(self, round_: int, state: Any, note: Mapping[str, Any]) -> None:
        """Write a checkpoint, and remove old ones and those of later rounds; see `prepared`.

        If it cannot be written, StorageError is raised and earlier checkpoints stay.
        """
        self.prepared(round_, state, note)()

    def prepared(
        self, round_: int, state: Any, note: Mapping[str, Any], *, copied: bool = False
    ) -> Callable[[], None]:
        """Return the function that writes a checkpoint, piece by piece of the state.

        All of several processes must call it together; the first one writes. If `copied`, the
        buffers of `state` may change before it is called, by one process. `note` holds values of
        JSON, infinity and NaN included.
        """
        arrays = {name: _words(leaf) for name, leaf in _leaves(state)}
        if copied:
            arrays = {name: np.array(to_host(array)) for name, array in arrays.items()}
        privacy = state.privacy if isinstance(state, SimulationState) else ledger.Ledger(())
        limit = privacy.limit
        if limit is not None:
            limit = limit._replace(planned=[(*_kind_of(e), e.entries) for e in limit.planned])
        content = {
            "round": round_,
            "about": dict(self.about),
            "note": note,
            "leaves": {name: (str(a.dtype), np.shape(a)) for name, a in arrays.items()},
            "accounts": [(*_kind_of(each), len(each.rounds)) for each in privacy.charges],
            "keys": len(privacy.draws),
            "public": privacy.public,
            "limit": limit,
        }
        header = f"{json.dumps(content)}\n".encode()

        def parts() -> Iterator[Any]:
            digest, block = _DIGEST(header), bytearray(header)
            for piece in (piece for leaf in arrays.values() for piece in pieces_of(leaf)):
                for begin in range(0, len(piece), _BLOCK):
                    part = piece[begin : begin + _BLOCK].data
                    digest.update(part)
                    block += part
                    if len(block) >= _BLOCK:
                        yield block
                        block = bytearray()
            yield block + digest.digest()

        def write() -> None:
            if not is_first():
                if not copied:
                    collections.deque(parts(), 0)
                return
            store.make_folder(self.path)
            store.write(self._file(round_), parts)
            kept = [other for other in self.rounds() if other <= round_][-KEPT:]
            for other in self.rounds():
                if other not in kept:
                    store.remove(self._file(other))

        return write

    def rounds(self) -> list[int]:
        """Return the rounds of all checkpoints, whole or not, in order."""
        files = self.path.glob(f"*{_ENDING}")
        return sorted(int(file.stem) for file in files if file.stem.isdecimal())

    def last(self) -> Checkpoint | None:
        """Return the last whole checkpoint of this run, or None without any file.

        ValueError if there are checkpoints, and each is damaged or of another run.
        """
        while True:
            skipped = []
            try:
                for round_ in reversed(self.rounds()):
                    try:
                        return self._read(round_)._replace(skipped=tuple(skipped))
                    except ValueError as error:
                        skipped.append(str(error))
            except FileNotFoundError:
                continue  # the run that writes has removed an old one meanwhile
            if skipped:
                raise ValueError(f"{skipped[0]}; to begin anew, delete {self.path}")
            return None

    def clear(self) -> None:
        """Remove all checkpoints."""
        store.remove(self.path)

    def _file(self, round_: int) -> Path:
        return self.path / f"{round_}{_ENDING}"

    def _read(self, round_: int) -> Checkpoint:
        file = self._file(round_)
        try:
            header, end = _header(file)
            found = Checkpoint(file, len(header), **json.loads(header))
            sizes = [_nbytes(*each) for each in found.leaves.values()]
            if found.round != round_ or len(header) + sum(sizes) != end:
                raise ValueError("another file has its name")
            if sum(n for _, _, n in found.kinds) + found.keys > end:
                raise ValueError("it is too short for its accounts")
            if self.check is not None:
                self.check(found.note)
        except FileNotFoundError:
            raise
        except TypeError as error:  # the digest fits, so it is whole, with other fields
            raise ValueError(f"{file} was written by another version of fedjaxsim") from error
        except _DAMAGE as error:
            raise ValueError(f"{file} is damaged ({error})") from error
        other = [name for name, value in self.about.items() if found.about.get(name) != value]
        if other:
            raise ValueError(f"{file} was made with other {' and '.join(other)} than these here")
        return found


def _header(file: Path) -> tuple[bytes, int]:
    """Return the first line and the position of the digest of a file, once the digest fits."""
    with file.open("rb") as stream:
        end = os.fstat(stream.fileno()).st_size - _DIGEST_BYTES
        header, digest = stream.readline(max(end, 0)), _DIGEST()
        block = header
        while block:
            digest.update(block)
            block = stream.read(min(_BLOCK, end - stream.tell()))
        if stream.read() != digest.digest():
            raise ValueError("its digest does not fit")
        return header, end


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path).lstrip("."), leaf) for path, leaf in leaves]


def _nbytes(dtype: str, shape: list[int]) -> int:
    return int(np.prod(shape, dtype=object)) * jnp.dtype(dtype).itemsize


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
