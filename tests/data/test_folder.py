import dataclasses
import os
import pathlib
import resource

import jax
import numpy as np
import pytest

from fedjaxsim.data import Population, load, load_folder, save_folder, split
from fedjaxsim.data.synthetic import regression_stream


def a_population(names=None):
    rng = np.random.default_rng(0)
    fields = {
        "x": rng.normal(size=(30, 2, 3)),
        "y": np.arange(30) % 4,
        "a/b": rng.integers(0, 255, (30, 5)).astype(np.uint8),
    }
    divided = split(
        Population.from_flat(fields, [4, 17, 9], names), validation=0.2, test=0.3, seed=1
    )
    return dataclasses.replace(
        divided, public=("Who is who.",), categories={"y": ("é", "b", "c", "d")}
    )


def assert_same(one, other):
    assert list(one.fields) == list(other.fields)
    for name, values in one.fields.items():
        np.testing.assert_array_equal(values, other.fields[name], strict=True)
    for name, ranges in one.splits.items():
        np.testing.assert_array_equal(ranges.count, other.splits[name].count, strict=True)
        for k in np.flatnonzero(ranges.count):
            assert ranges.start[k] == other.splits[name].start[k]
    assert one.names.tolist() == other.names.tolist()
    assert (one.public, one.categories) == (other.public, other.categories)


@pytest.mark.parametrize("names", [None, ["ann", "bob", "cleo"], [7, 8, 9]])
def test_what_is_written_is_read(tmp_path, names):
    population = a_population(names)
    save_folder(tmp_path / "a", population)
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    found = load_folder(tmp_path / "a")
    assert_same(population, found)
    assert found.fingerprint == population.fingerprint


def test_a_cpu_device_shares_the_mapped_file(tmp_path):
    save_folder(tmp_path / "a", a_population())
    x = load(f"folder:{tmp_path}/a").fields["x"]
    assert not x.flags.writeable
    assert not x.flags.owndata
    with jax.enable_x64(True):
        assert jax.device_put(x).unsafe_buffer_pointer() == x.ctypes.data


def test_the_rows_of_a_folder_are_split_already(tmp_path):
    save_folder(tmp_path / "a", a_population())
    found = load(f"folder:{tmp_path}/a")
    assert_same(found, a_population())
    again = load(f"folder:{tmp_path}/a", test=0.5, seed=3)
    assert again.splits["test"].count.tolist() == [2, 9, 5]
    assert not again.splits["validation"].count.any()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "counts.npy").unlink(), "array 'counts.npy' is missing"),
        (lambda p: (p / "x.npy").write_bytes((p / "x.npy").read_bytes()[:-8]), "array x.npy"),
        (lambda p: (p / "x.npy").write_bytes((p / "x.npy").read_bytes() + b"1"), "1569 .*1568"),
        (lambda p: np.save(p / "x.npy", np.zeros((31, 2, 3))), "equally many"),
        (lambda p: (p / "counts.npy").write_bytes(b"\x93NUMPY"), "array counts.npy"),
        (lambda p: (p / "SHA256SUMS").unlink(), "it holds no SHA256SUMS"),
        (lambda p: (p / "SHA256SUMS").write_text("{"), "array '' is missing"),
        (lambda p: (p / "SHA256SUMS").write_bytes(b"\xff"), "utf-8"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, damage, message):
    save_folder(tmp_path / "a", a_population())
    damage(tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        load_folder(tmp_path / "a")


@pytest.mark.parametrize("place", ["Path.mkdir", "os.fsync", "Path.write_text"])
def test_what_is_interrupted_leaves_nothing(tmp_path, monkeypatch, place):
    done = getattr(pathlib.Path if place.startswith("Path") else os, place.split(".")[1])

    def interrupted(*args, **options):
        done(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(f"fedjaxsim.data.npz.{place}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_folder(tmp_path / "a", a_population())
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    population = a_population()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_folder(tmp_path / "a", population)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
    (tmp_path / "b").mkdir()
    with pytest.raises(FileExistsError, match="b exists"):
        save_folder(tmp_path / "b", population)
    with pytest.raises(ValueError, match="minibatches"):
        save_folder(tmp_path / "c", regression_stream(3))
    with pytest.raises(FileNotFoundError, match="folder"):
        load_folder(tmp_path / "c")
