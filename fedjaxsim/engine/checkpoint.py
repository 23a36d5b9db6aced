"""Checkpoints on Orbax: the whole state of a run, or of many, with its records.

A folder holds a folder for each of the last few checkpoints, named by the rounds done. It contains
the leaves of the state by their paths, random keys as their words, and a note: the leaves' types
and shapes, the accounts of the ledger, the records, and checksums of all files. The note is written
last, so a checkpoint is whole or none at all.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.engine.devices import placed
from fedjaxsim.engine.processes import is_first, to_host
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.events import PrivacyEvent, SamplingScheme

Tree = TypeVar("Tree")

KEPT = 3
"""Checkpoints that a folder keeps, the last ones."""

_STATE, _NOTE = "state", "note.json"


class Checkpoint(NamedTuple):
    """One checkpoint, whose state has not been read yet.

    Attributes:
      folder: its folder.
      about: fingerprints of the run, as in `CheckpointFolder`.
      note: records that were saved with it.
      leaves: type and shape of the state's leaves, by name.
      accounts: sampler, mechanism and number of entries of each account of the state's ledger.
      keys: number of keys that the state has drawn from; the ledger has a record of each.
    """

    folder: Path
    about: Mapping[str, str]
    note: dict[str, Any]
    leaves: Mapping[str, tuple[str, list[int]]]
    accounts: list[tuple[dict[str, Any], dict[str, Any], int]]
    keys: int

    @property
    def round(self) -> int:
        """Rounds done."""
        return int(self.folder.name)

    def state(self, like: Tree) -> Tree:
        """Return the state with the structure, types and shardings of `like`.

        Args:
          like: a state of the same simulation, from its `init`; its ledger may differ.

        Raises:
          ValueError: if the leaves differ from those of `like`.
        """
        import orbax.checkpoint as ocp

        like = self._with_accounts(like)
        wanted = dict(_leaves(like))
        if wanted.keys() != self.leaves.keys():
            differing = ", ".join(sorted(wanted.keys() ^ self.leaves.keys()))
            raise ValueError(f"{self.folder} holds another kind of state: {differing} differ")
        found = {}
        for name, leaf in wanted.items():
            raw, (dtype, shape) = _words(leaf), self.leaves[name]
            if (str(raw.dtype), list(raw.shape)) != (dtype, shape):
                expected = f"{raw.dtype}{list(raw.shape)}"
                raise ValueError(f"{self.folder}: {name} must be {expected}, got {dtype}{shape}")
            found[name] = np.empty(raw.shape, raw.dtype)
        args = ocp.args.Composite(**{_STATE: ocp.args.StandardRestore(_filled(found))})
        with _manager(self.folder.parent) as manager:
            found |= manager.restore(self.round, args=args)[_STATE]
        placed = [_placed(found[name], leaf) for name, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(like), placed)

    def _with_accounts(self, like: Any) -> Any:
        """Add the saved accounts and key records to a state."""
        if not isinstance(like, SimulationState):
            return like
        kinds = [
            (SamplingScheme(**scheme), PrivacyEvent(**event), n)
            for scheme, event, n in self.accounts
        ]
        known = [(each.scheme, each.event, len(each.rounds)) for each in like.privacy.charges]
        privacy = like.privacy
        if known != kinds:
            charges = tuple(ledger.no_charges(*kind) for kind in kinds)
            privacy = dataclasses.replace(privacy, charges=charges)
        privacy = dataclasses.replace(privacy, draws=privacy.draws[:1] * self.keys)
        return dataclasses.replace(like, privacy=privacy)


@dataclasses.dataclass(frozen=True)
class CheckpointFolder:
    """A folder of checkpoints.

    Attributes:
      path: the folder, which need not exist.
      about: fingerprints of the inputs of a run (settings, data), by name. A checkpoint with others
        is refused.
    """

    path: Path
    about: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def save(self, round_: int, state: Any, note: Mapping[str, Any]) -> None:
        """Add a checkpoint unless this round has one, and remove old ones.

        Several processes each contribute their part of the state, and the first one writes.

        Args:
          round_: number of rounds done.
          state: any pytree of arrays.
          note: values of JSON; numbers may be infinite or not a number.
        """
        import orbax.checkpoint as ocp

        arrays = {name: _raw(leaf) for name, leaf in _leaves(state)}
        folder = self.path / str(round_)
        if (folder / _NOTE).exists() or not is_first():
            return
        for other in self.path.glob("*"):
            if other.name.isdigit() and not (other / _NOTE).exists():
                shutil.rmtree(other)  # left by a killed process
        privacy = state.privacy if isinstance(state, SimulationState) else ledger.Ledger(())
        with _manager(self.path) as manager:
            args = {_STATE: ocp.args.StandardSave(_filled(arrays))}
            manager.save(round_, args=ocp.args.Composite(**args))
        content = {
            "about": dict(self.about),
            "note": note,
            "leaves": {name: (str(a.dtype), a.shape) for name, a in arrays.items()},
            "accounts": [
                (dataclasses.asdict(a.scheme), dataclasses.asdict(a.event), len(a.rounds))
                for a in privacy.charges
            ],
            "keys": len(privacy.draws),
        }
        text = json.dumps(content)
        files = [path for path in (folder / _STATE).rglob("*") if path.is_file()]
        seal = {
            "content": text,
            "checksum": zlib.crc32(text.encode()),
            "files": {str(path.relative_to(folder)): _checksum(path) for path in files},
        }
        # A checkpoint that has its note is whole.
        unfinished = folder / f".{_NOTE}"
        unfinished.write_text(json.dumps(seal), encoding="utf-8")
        os.replace(unfinished, folder / _NOTE)

    def last(self) -> Checkpoint | None:
        """Return the last checkpoint, fully checked, or None.

        Raises:
          ValueError: if it is damaged, or of another run.
        """
        notes = [path for path in self.path.glob(f"*/{_NOTE}") if path.parent.name.isdigit()]
        if not notes:
            return None
        folder = max((path.parent for path in notes), key=lambda path: int(path.name))
        try:
            seal = json.loads((folder / _NOTE).read_text(encoding="utf-8"))
            if zlib.crc32(seal["content"].encode()) != seal["checksum"]:
                raise ValueError(f"{_NOTE} is not what was written")
            for name, checksum in seal["files"].items():
                if _checksum(folder / name) != checksum:
                    raise ValueError(f"{name} is not what was written")
            found = Checkpoint(folder, **json.loads(seal["content"]))
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise ValueError(
                f"{folder} is damaged ({error}): delete it, to go on from what came before it"
            ) from error
        other = [name for name, value in self.about.items() if found.about.get(name) != value]
        if other:
            raise ValueError(f"{folder} was made with other {' and '.join(other)} than these here")
        return found

    def clear(self) -> None:
        """Remove all checkpoints and unfinished writes."""
        if self.path.is_dir():
            shutil.rmtree(self.path)


@contextlib.contextmanager
def _manager(path: Path) -> Iterator[Any]:
    """Open Orbax's manager of a folder; Orbax starts slowly, so it is imported late."""
    import orbax.checkpoint as ocp

    # Each process reads for itself, and only the first writes: none waits for others.
    here = jax.process_index()
    path.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=KEPT,
        enable_async_checkpointing=False,
        cleanup_tmp_directories=is_first(),
        create=False,
        multiprocessing_options=ocp.options.MultiprocessingOptions(
            primary_host=here, active_processes={here}, barrier_sync_key_prefix=str(here)
        ),
    )
    manager = ocp.CheckpointManager(path.absolute(), options=options)
    try:
        yield manager
    finally:
        manager.close()


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path).lstrip("."), leaf) for path, leaf in leaves]


def _filled(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Drop empty subtrees, which Orbax refuses."""
    return {name: array for name, array in arrays.items() if array.size}


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _raw(leaf: Any) -> np.ndarray:
    """Return a leaf's words on the host."""
    return to_host(_words(leaf))


def _words(leaf: Any) -> Any:
    """Return a leaf, or the words of a typed random key."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _placed(saved: np.ndarray, like: Any) -> jax.Array | np.ndarray:
    if isinstance(like, np.ndarray):
        return saved  # the states of a streamed simulation
    committed = getattr(like, "committed", False)
    leaf = placed(saved, _words(like).sharding) if committed else jnp.asarray(saved)
    return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like)) if _is_key(like) else leaf


def _checksum(path: Path) -> int:
    return zlib.crc32(path.read_bytes())
