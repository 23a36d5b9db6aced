import dataclasses
import json
import resource

import jax
import numpy as np
import pytest

from fedjaxsim.data import Population, load, load_folder, save_folder, split
from fedjaxsim.data.synthetic import regression_stream
from fedjaxsim.runs.loop import fingerprint_of


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
    assert fingerprint_of(found) == fingerprint_of(population)


def test_rows_in_any_order_are_written_client_by_client(tmp_path):
    population = a_population()
    # The splits of a client need not lie side by side.
    counts = {name: ranges.count for name, ranges in population.splits.items()}
    starts = np.cumsum([0, *np.concatenate(list(counts.values()))[:-1]]).reshape(3, 3)
    scattered = dataclasses.replace(
        population,
        splits={
            name: dataclasses.replace(ranges, start=starts[s].astype(np.int32))
            for s, (name, ranges) in enumerate(population.splits.items())
        },
    )
    save_folder(tmp_path / "a", scattered)
    found = load_folder(tmp_path / "a")
    for k in range(3):
        for name in counts:
            for field, values in scattered.rows(k, name).items():
                np.testing.assert_array_equal(found.rows(k, name)[field], values)


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
        file = folder / "field-0.npy"
        file.write_bytes(file.read_bytes()[:-8])

    def swap(folder):
        (folder / "field-0.npy").rename(folder / "x")
        np.save(folder / "field-0.npy", np.zeros((30, 3, 2)))

    def about(folder, change):
        file = folder / "population.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return {
        "missing": lambda folder: (folder / "counts.npy").unlink(),
        "short": cut,
        "other": swap,
        "no about": lambda folder: (folder / "population.json").unlink(),
        "half": lambda folder: (folder / "population.json").write_text("{"),
        "version": lambda folder: about(folder, lambda a: a.update(version=2)),
        "no fields": lambda folder: about(folder, lambda a: a.pop("fields")),
        "clients": lambda folder: about(folder, lambda a: a.update(clients=2)),
    }[what]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", "a: the column counts.npy is missing"),
        ("short", "a: the column field-0.npy has 1560 bytes instead of 1568"),
        ("other", r"field-0.npy holds float64 \(30, 3, 2\) instead of float64 \(30, 2, 3\)"),
        ("no about", "no population: it holds no population.json"),
        ("half", "population.json is damaged"),
        ("version", "must be of version 1"),
        ("no fields", "population.json is damaged: KeyError"),
        ("clients", r"counts must be \(2, 3\), got \(3, 3\)"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, what, message):
    save_folder(tmp_path / "a", a_population())
    damage(what)(tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        load_folder(tmp_path / "a")


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
    with pytest.raises(FileExistsError, match="b exists already"):
        save_folder(tmp_path / "b", population)
    with pytest.raises(ValueError, match="generates its minibatches"):
        save_folder(tmp_path / "c", regression_stream(3))
    with pytest.raises(FileNotFoundError, match="no folder of a population"):
        load_folder(tmp_path / "c")
