"""Small files of every format that is read, and mutations of them.

`python tests/support/damaged.py 10000` reads as many mutated files of each format, in a process for
each.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from fedjaxsim.cli.messages import REFUSED, one_line
from fedjaxsim.data import Population, load, save_folder, save_npz
from fedjaxsim.data.tables import matlab_cells

SECONDS = 20
"""Ends a hang; nothing here takes a tenth of it."""
MOST_BYTES = 100_000_000
"""Most memory that small files may take, above the formats' libraries."""
_TOKENS = (
    b"[", b"]", b"{", b"}", b'"', b",", b"\n", b"=", b"1e999", b"-1", b"NaN", b"null", b"\xff\xfe",
    b"\0", b"9" * 5000, b"[" * 3000, b"99999999999", b"a.", b"/../", b"\x7f\xff\xff\xff", b"\x80",
)  # fmt: skip


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Flip, overwrite, cut, insert, repeat or truncate in one to four places."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, length = rng.randrange(len(found) + 1), rng.choice((1, 1, 2, 4, 8, 64))
        end = min(at + length, len(found))
        match rng.randrange(7):
            case 0 if at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                found[at:end] = bytes([rng.choice((0, 0x7F, 0x80, 0xFF))]) * (end - at)
            case 2:
                found[at:end] = rng.randbytes(end - at)
            case 3:
                del found[at:end]
            case 4:
                found[at:at] = rng.choice(_TOKENS)
            case 5:
                found[at:at] = found[at : at + 16 * length]
            case _ if rng.random() < 0.3:
                del found[at:]
    return bytes(found)


class Format(NamedTuple):
    """Files of one format.

    Attributes:
      files: contents by path in a folder.
      read: reads the folder.
      pack: packs the mutated content of a file, with the checksums of the format.
      quick, thorough: numbers of files of a quick and of a thorough test; fewer where each is read
        in a process of its own.
    """

    files: dict[str, bytes]
    read: Callable[[Path], Any]
    pack: Callable[[bytes], bytes] = bytes
    quick: int = 80
    thorough: int = 250


def population() -> Population:
    rng = np.random.default_rng(0)
    fields = {"x": rng.normal(size=(12, 3)).astype(np.float32), "y": np.arange(12) % 3}
    return Population.from_flat(fields, [4, 5, 3], ["ann", "bob", "zoe"])


def _loaded(spec: str, **settings: Any) -> Callable[[Path], Any]:
    return lambda folder: load(spec.format(folder), **settings)


def _table() -> bytes:
    lines = [f"{k % 3},{k / 7:.3f},{k % 2},{'ab'[k % 2]}" for k in range(12)]
    return "\n".join(["who,a,b,label", *lines, ""]).encode()


def _leaf() -> bytes:
    data = {f"u{k}": {"x": [[k, 0.5], [1, 2]], "y": [0, 1]} for k in range(3)}
    return json.dumps({"users": [*data], "num_samples": [2] * 3, "user_data": data}).encode()


def _text() -> bytes:
    data = {f"u{k}": {"x": ["to be", "or not"], "y": ["a", "b"]} for k in range(3)}
    return json.dumps({"users": [*data], "num_samples": [2] * 3, "user_data": data}).encode()


def _zipped(files: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return target.getvalue()


def _mat(*, compressed: bool) -> bytes:
    from scipy.io import savemat

    target = io.BytesIO()
    cells = {name: np.empty((1, 3), object) for name in ("X", "Y")}
    for k in range(3):
        cells["X"][0, k], cells["Y"][0, k] = np.ones((4, 2)) * k, np.arange(4.0)[:, None]
    savemat(target, cells, do_compression=compressed)
    return target.getvalue()


def _parquet() -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    target = io.BytesIO()
    columns = {"who": ["a", "b", "c"] * 4, "a": [k / 7 for k in range(12)], "label": [0, 1] * 6}
    parquet.write_table(pa.table(columns), target)
    return target.getvalue()


def _folder() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        save_folder(Path(place) / "p", population())
        return {f"p/{file.name}": file.read_bytes() for file in (Path(place) / "p").iterdir()}


def _npz() -> bytes:
    with tempfile.TemporaryDirectory() as place:
        save_npz(Path(place) / "a.npz", population())
        return (Path(place) / "a.npz").read_bytes()


def _npy(values: np.ndarray) -> bytes:
    target = io.BytesIO()
    np.save(target, values)
    return target.getvalue()


def _npz_of(x: bytes) -> bytes:
    client = _npy(np.repeat(np.arange(3), 4))
    return _zipped({"x.npy": x, "y.npy": _npy(np.arange(12) % 3), "client.npy": client})


def _cut(mat: bytes) -> tuple[bytes, bytes]:
    """Return the first array of a MATLAB file, and the others."""
    end = 136 + struct.unpack_from("<I", mat, 132)[0]
    return mat[128:end], mat[end:]


def _mat_of(first: bytes) -> bytes:
    plain, packed = _mat(compressed=False), zlib.compress(first)
    return plain[:128] + struct.pack("<II", 15, len(packed)) + packed + _cut(plain)[1]


_RUN = b"""algorithm = "pmtl"
data = "synthetic"
rounds = 3
lam = 0.5
model = "mlp"
hidden = [4, 5]
sampling-rate = 0.5
loss = "squared"
"""
_GRID = b'[[sweep]]\nlam = [0.1, 0.2]\n[[sweep]]\nalgorithm = ["ditto"]\n'


def _settings(folder: Path) -> Any:
    from fedjaxsim.runs.settings_files import read_toml

    return read_toml(folder / "a.toml")


def _sweep(folder: Path) -> Any:
    from fedjaxsim.runs.sweep_runs import read_sweep

    return read_sweep(folder / "a.toml")


def _state() -> Any:
    import jax
    import jax.numpy as jnp

    from fedjaxsim.engine.state import SimulationState
    from fedjaxsim.privacy.entries import SamplingScheme
    from fedjaxsim.privacy.events import Gaussian
    from fedjaxsim.privacy.ledger import Draws, Ledger, no_charges

    zero = jnp.zeros((), jnp.int32)
    account = no_charges(SamplingScheme("full", 3, 3), Gaussian(), 2)
    draws = (Draws(jnp.zeros(4, jnp.uint32), zero, zero > 0),)
    weights = np.ones((3, 2), np.float32)
    return SimulationState(zero, weights, weights, (), Ledger((account,), draws), jax.random.key(0))


def _checkpoint() -> bytes:
    from fedjaxsim.engine.checkpoint import CheckpointFolder

    with tempfile.TemporaryDirectory() as place:
        CheckpointFolder(Path(place)).save(7, _state(), {"memory": {}})
        return (Path(place) / "7.state").read_bytes()


def _restored(folder: Path) -> Any:
    from fedjaxsim.engine.checkpoint import CheckpointFolder

    last = CheckpointFolder(folder).last()
    return last and last.state(_state())


def formats() -> dict[str, Format]:
    """Return all formats by name."""
    table = {"client": "who", "target": "label"}
    return {
        "csv": Format({"a.csv": _table()}, _loaded("csv:{}/a.csv", **table)),
        "csv.gz": Format(
            {"a.csv.gz": gzip.compress(_table())}, _loaded("csv:{}/a.csv.gz", **table)
        ),
        "parquet": Format({"a.parquet": _parquet()}, _loaded("parquet:{}/a.parquet", **table)),
        "npz": Format({"a.npz": _npz()}, _loaded("npz:{}/a.npz")),
        "npz.inside": Format(
            {"a.npz": _npy(population().fields["x"])}, _loaded("npz:{}/a.npz"), _npz_of
        ),
        "mat.inside": Format(
            {"a.mat": _cut(_mat(compressed=False))[0]}, _loaded("mat:{}/a.mat"), _mat_of, 2, 20
        ),
        "mat": Format(
            {"a.mat": _mat(compressed=False)}, _loaded("mat:{}/a.mat"), quick=2, thorough=20
        ),
        "mat.z": Format(
            {"a.mat": _mat(compressed=True)}, _loaded("mat:{}/a.mat"), quick=2, thorough=20
        ),
        "leaf": Format({"a.json": _leaf()}, _loaded("leaf:{}/a.json")),
        "leaf.text": Format({"a.json": _text()}, _loaded("leaf:{}/a.json")),
        "leaf.zip": Format(
            {"a.zip": _zipped({"d/train/a.json": _leaf(), "d/test/a.json": _leaf()})},
            _loaded("leaf:{}/a.zip"),
        ),
        "folder": Format(_folder(), _loaded("folder:{}/p")),
        "checkpoint": Format({"7.state": _checkpoint()}, _restored),
        "checkpoint.inside": Format(
            {"7.state": _checkpoint()[:-32]}, _restored, lambda c: c + hashlib.sha256(c).digest()
        ),
        "toml": Format({"a.toml": _RUN}, _settings),
        "sweep": Format({"a.toml": _RUN + _GRID}, _sweep),
    }


_FORKS = """
import os, runpy, sys
import scipy.io
for line in sys.stdin:
    path, output, errors = line.split("\\t")
    if not (child := os.fork()):
        for number, file in ((1, output), (2, errors.strip())):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = [sys.argv[1], path]
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Reads each file of the standard input in a process of its own, which has imported scipy."""


@contextlib.contextmanager
def _forked_readers() -> Iterator[None]:
    """Fork the processes that read MATLAB files: each would take 0.3 s to import scipy."""
    command, reader = [sys.executable, "-P", "-c", _FORKS, matlab_cells.__file__], None

    def run(reading: list[str], **_: Any) -> SimpleNamespace:
        nonlocal reader
        if reader is None:
            pipe = subprocess.PIPE
            reader = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert reader.stdin is not None
        assert reader.stdout is not None
        path = reading[-1]
        places = Path(f"{path}.output"), Path(f"{path}.errors")
        print(path, *places, sep="\t", file=reader.stdin, flush=True)
        code = int(reader.stdout.readline())
        output, errors = (place.read_bytes() for place in places)
        return SimpleNamespace(returncode=code, stdout=output, stderr=errors)

    with mock.patch.object(matlab_cells, "subprocess", SimpleNamespace(run=run)):
        yield
    if reader is not None:
        reader.communicate()


def problems(made: Format, seeds: range) -> Iterator[str]:
    """Read a mutated file of a format for each seed; yield each answer that must not be."""

    def late(*_: object) -> None:
        raise AssertionError(f"no answer within {SECONDS} seconds")

    handler = signal.signal(signal.SIGALRM, late)
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        for name, content in made.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(made.pack(content))
        made.read(folder)  # the libraries are in memory
        stack.enter_context(_forked_readers())
        before = _peak()
        for seed in seeds:
            rng = random.Random(seed)
            name = rng.choice(sorted(made.files))
            (folder / name).write_bytes(made.pack(mutated(made.files[name], rng)))
            signal.alarm(SECONDS)
            try:
                made.read(folder)
            except REFUSED as error:
                if len(one_line(error).replace(place, "")) > 1000:
                    yield f"seed {seed}: {len(str(error))} characters: {one_line(error)[:500]}"
            except BaseException as error:
                yield f"seed {seed}: {type(error).__name__}: {one_line(error)[:500]}"
            finally:
                signal.alarm(0)
            if (grown := _peak() - before) > MOST_BYTES:
                yield f"seed {seed}: memory grew by {grown:,} bytes"
                before = _peak()
            (folder / name).write_bytes(made.pack(made.files[name]))
    signal.signal(signal.SIGALRM, handler)


def _peak() -> int:
    """Return the peak of resident memory since the last call, in bytes (Linux; 0 elsewhere)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return int(peak.split()[1]) * 1024


def main(count: str, *names: str) -> None:
    """Mutate each format `count` times, in a process of its own that may die."""
    if "-" in count:  # the child
        begin, end = map(int, count.split("-"))
        warnings.simplefilter("error")
        made = formats()[names[0]]
        for line in problems(made, range(begin, end)):
            print(line, flush=True)
        return
    for name in names or formats():
        start = time.monotonic()
        command = [sys.executable, __file__, f"0-{count}", name]
        done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
        lines = done.stdout.splitlines()
        seconds = time.monotonic() - start
        print(f"{name}: exit code {done.returncode}, {len(lines)} problems, {seconds:.0f} s")
        print(*lines[:20], done.stderr[-2000:], sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
