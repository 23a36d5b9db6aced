import dataclasses
import hashlib
import json
import os
import pathlib
import resource

import jax
import numpy as np
import pytest

from fedjaxsim.data import Population, check_folder, load, load_folder, save_folder, split
from fedjaxsim.data.synthetic import regression_stream
from fedjaxsim.runs.fingerprints import fingerprint_of


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
def test_what_is_written_is_read(tmp_path, names, monkeypatch):
    monkeypatch.setattr("fedjaxsim.data.arrays._BLOCK", 100)  # several rows, several blocks
    population = a_population(names)
    save_folder(tmp_path / "a", population)
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    found = load_folder(tmp_path / "a")
    assert_same(population, found)
    held_out = dataclasses.replace(a_population(["x", "y", "z"]), public=())
    save_folder(tmp_path / "b", dataclasses.replace(population, held_out=held_out))
    again = load(f"folder:{tmp_path / 'b'}")  # which has test rows, as those held out have
    assert_same(population, again)
    assert again.held_out is not None
    assert_same(held_out, again.held_out)
    assert check_folder(tmp_path / "b") > 2 * check_folder(tmp_path / "a") - 500
    assert fingerprint_of(found) == fingerprint_of(population)


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


def damage(what):
    def cut(folder):
        file = folder / "array-1.npy"
        file.write_bytes(file.read_bytes()[:-8])

    def swap(folder):
        (folder / "array-1.npy").rename(folder / "x")
        np.save(folder / "array-1.npy", np.zeros((30, 3, 2)))

    def head(folder):
        file = folder / "array-0.npy"
        file.write_bytes(file.read_bytes().replace(b"shape", b"shade"))

    def about(folder, change):
        file = folder / "population.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return {
        "missing": lambda folder: (folder / "array-0.npy").unlink(),
        "short": cut,
        "other": swap,
        "head": head,
        "no about": lambda folder: (folder / "population.json").unlink(),
        "half": lambda folder: (folder / "population.json").write_text("{"),
        "version": lambda folder: about(folder, lambda a: a.update(version=1)),
        "no fields": lambda folder: about(folder, lambda a: a.pop("arrays")),
        "file": lambda folder: about(folder, lambda a: a["arrays"]["x"].pop("file")),
    }[what]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", "array counts .*array-0.npy"),
        ("short", "array x .*1560.*1568"),
        ("other", "array x "),
        ("head", "array counts"),
        ("no about", "population.json"),
        ("half", "population.json"),
        ("version", "version"),
        ("no fields", "population.json"),
        ("file", "population.json"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, what, message):
    save_folder(tmp_path / "a", a_population())
    damage(what)(tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        load_folder(tmp_path / "a")


def test_digests_are_those_of_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr("fedjaxsim.data.folder._AT_ONCE", 1000)
    save_folder(tmp_path / "a", a_population(["ann", "bob", "cleo"]))
    about = json.loads((tmp_path / "a" / "population.json").read_text())
    sizes = 0
    for array in about["arrays"].values():
        content = (tmp_path / "a" / array["file"]).read_bytes()
        assert array["sha256"] == hashlib.sha256(content).hexdigest()
        sizes += len(content)
    seen = []
    assert check_folder(tmp_path / "a", lambda done, size: seen.append((done, size))) == sizes
    assert seen[-1] == (sizes, sizes)
    assert max(np.diff([done for done, _ in seen])) <= 1000


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["array-0.npy"], r"a: .*: counts \(array-0.npy\)$"),
        (["array-3.npy"], r"a: .*: a/b \(array-3.npy\)$"),
        (["array-4.npy", "array-1.npy"], r": x \(array-1.npy\), names \(array-4.npy\)$"),
        (["population.json"], "population.json"),
    ],
)
def test_a_byte_that_changed_is_found_by_its_column(tmp_path, files, message):
    save_folder(tmp_path / "a", a_population(["ann", "bob", "cleo"]))
    for name in files:
        file = tmp_path / "a" / name
        content = bytearray(file.read_bytes())
        place = content.rindex(b"c") if name == "population.json" else -1
        content[place] ^= 1
        file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        check_folder(tmp_path / "a")


def test_sizes_are_compared_before_all_is_read(tmp_path):
    save_folder(tmp_path / "a", a_population())
    damage("short")(tmp_path / "a")
    with pytest.raises(ValueError, match=r"1560.*1568"):
        check_folder(tmp_path / "a", lambda *_: pytest.fail("was read"))
    with pytest.raises(FileNotFoundError, match="folder"):
        check_folder(tmp_path / "b")


def test_a_damaged_header_counts_as_content(tmp_path):
    save_folder(tmp_path / "a", a_population())
    damage("head")(tmp_path / "a")
    with pytest.raises(ValueError, match=r": counts \(array-0.npy\)$"):
        check_folder(tmp_path / "a")


@pytest.mark.parametrize("place", ["Path.mkdir", "os.fsync", "Path.write_text"])
def test_what_is_interrupted_leaves_nothing(tmp_path, monkeypatch, place):
    done = getattr(pathlib.Path if place.startswith("Path") else os, place.split(".")[1])

    def interrupted(*args, **options):
        done(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(f"fedjaxsim.data.folder.{place}", interrupted)
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
