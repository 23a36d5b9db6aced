import json
import zipfile

import numpy as np
import pytest

from fedjaxsim.data import load_leaf


def document(users):
    """LEAF JSON for {user: (x, y)}."""
    return {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }


def write(path, users):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(users)))
    return path


ANN = ([[0.5, 1.0], [2.0, 3.0]], [[-1], [1]])
BOB = ([[4, 5]], [[1]])


def check_ann_and_bob(population):
    assert population.names.tolist() == ["bob", "ann"]
    assert population.fields["x"].dtype == np.float32
    assert population.fields["y"].dtype == np.int32
    np.testing.assert_array_equal(population.rows(0)["x"], [[4, 5]])
    np.testing.assert_array_equal(population.rows(1)["x"], [[0.5, 1], [2, 3]])
    assert population.fields["y"].tolist() == [1, -1, 1]


def test_a_file_keeps_the_order_of_its_users_and_flattens_labels(tmp_path):
    check_ann_and_bob(load_leaf(write(tmp_path / "data.json", {"bob": BOB, "ann": ANN})))


def test_a_folder_merges_its_files_in_the_order_of_their_names(tmp_path):
    write(tmp_path / "part_1.json", {"ann": ANN})
    write(tmp_path / "part_0.json", {"bob": BOB})
    (tmp_path / "._part_0.json").write_bytes(b"\x00\x05litter")
    (tmp_path / "README").write_text("not data")
    check_ann_and_bob(load_leaf(tmp_path))


@pytest.mark.parametrize("inside", ["", "outer/inner/"])
def test_a_zip_is_read_past_its_litter(tmp_path, inside):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr(f"{inside}all.json", json.dumps(document({"bob": BOB, "ann": ANN})))
        archive.writestr(f"__MACOSX/{inside}._all.json", b"\x00\x05litter")
        archive.writestr(f"{inside}.DS_Store", b"litter")
        archive.writestr(f"{inside}._all.json", b"litter")
    check_ann_and_bob(load_leaf(tmp_path / "data.zip"))


@pytest.mark.parametrize("packed", [False, True])
def test_train_and_test_folders_become_splits(tmp_path, packed):
    write(tmp_path / "data/train/a.json", {"ann": ANN, "bob": BOB})
    write(tmp_path / "data/test/b.json", {"ann": ([], []), "bob": ([[6, 7], [8, 9]], [0, 2])})
    write(tmp_path / "data/all_data/c.json", {"dan": BOB})
    path = tmp_path / "data"
    if packed:
        path = tmp_path / "data.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for file in (tmp_path / "data").rglob("*.json"):
                archive.write(file, file.relative_to(tmp_path).as_posix())
    population = load_leaf(path)
    assert population.names.tolist() == ["ann", "bob"]
    assert population.splits["train"].count.tolist() == [2, 1]
    assert population.splits["test"].count.tolist() == [0, 2]
    np.testing.assert_array_equal(population.rows(1, "train")["x"], [[4, 5]])
    np.testing.assert_array_equal(population.rows(1, "test")["x"], [[6, 7], [8, 9]])
    np.testing.assert_array_equal(population.rows(1, "test")["y"], [0, 2])


def test_a_user_called_like_a_field_is_a_user(tmp_path):
    population = load_leaf(write(tmp_path / "data.json", {"x": ANN, "y": BOB}))
    assert population.names.tolist() == ["x", "y"]


def test_a_user_in_two_files_is_refused(tmp_path):
    write(tmp_path / "a.json", {"ann": ANN})
    write(tmp_path / "b.json", {"ann": BOB})
    with pytest.raises(ValueError, match=r"'ann'.*a\.json.*b\.json"):
        load_leaf(tmp_path)


def test_a_user_to_test_but_not_to_train_is_named_and_left_out(tmp_path):
    write(tmp_path / "train/a.json", {"ann": ANN})
    write(tmp_path / "test/a.json", {"bob": BOB, "ann": ANN})
    with pytest.warns(UserWarning, match=r"1 of 2 clients, such as 'bob', .* left out"):
        population = load_leaf(tmp_path)
    assert (population.names.tolist(), population.counts.tolist()) == (["ann"], [[2, 0, 2]])


@pytest.mark.parametrize("rows", [[[0.5], [1]], ["ab", "cd"], [1, 2]])
def test_a_user_without_rows_is_named_and_left_out(tmp_path, rows):
    write(tmp_path / "a.json", {"ann": (rows, [0, 1]), "bob": ([], [])})
    with pytest.warns(UserWarning, match="1 of 2 clients, such as 'bob', have no training rows"):
        assert load_leaf(tmp_path / "a.json").names.tolist() == ["ann"]


@pytest.mark.parametrize("spelling", ["val", "Valid", "validation"])
def test_a_folder_of_validation_rows_is_a_split(tmp_path, spelling):
    for name in ("Train", spelling, "test"):
        write(tmp_path / name / "a.json", {"ann": ANN})
    assert load_leaf(tmp_path).counts.tolist() == [[2, 2, 2]]


def test_sequences_of_different_lengths_are_refused(tmp_path):
    write(tmp_path / "a.json", {"ann": ([[5, 1, 2], [3]], [0, 1])})
    with pytest.raises(ValueError, match=r"user 'ann': .* must be numbers in rows of equal length"):
        load_leaf(tmp_path / "a.json")


def test_splits_with_different_features_are_refused(tmp_path):
    write(tmp_path / "train/a.json", {"ann": ANN})
    write(tmp_path / "test/a.json", {"ann": ([[1]], [1])})
    with pytest.raises(ValueError, match="client 'ann', field 'x'"):
        load_leaf(tmp_path)


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        load_leaf(tmp_path / "absent.json")


def test_a_folder_without_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\*\.json"):
        load_leaf(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 40, -1])
def test_a_truncated_file_is_named(tmp_path, length):
    text = json.dumps(document({"ann": ANN}))
    (tmp_path / "cut.json").write_text(text[:length])
    with pytest.raises(ValueError, match=r"cut\.json"):
        load_leaf(tmp_path)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9])
def test_a_truncated_zip_is_named(tmp_path, fraction):
    with zipfile.ZipFile(tmp_path / "whole.zip", "w") as archive:
        archive.writestr("a.json", json.dumps(document({"ann": ANN})))
    content = (tmp_path / "whole.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(content[: int(fraction * len(content))])
    with pytest.raises(ValueError, match=r"cut\.zip"):
        load_leaf(tmp_path / "cut.zip")


def test_a_damaged_zip_member_is_named(tmp_path):
    path = tmp_path / "bad.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.json", json.dumps(document({"ann": ANN})))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"0.5", b"0.6"))  # the checksum no longer fits
    with pytest.raises(ValueError, match=r"a\.json: .*CRC"):
        load_leaf(path)


def changed(**changes):
    return {**document({"ann": ANN, "bob": BOB}), **changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "'user_data'"),
        ({"users": []}, "'user_data'"),
        ({"user_data": {}, "users": 3}, "no user has rows"),
        (changed(users=["ann"]), "'user_data'"),
        (changed(users=["ann", "bob", "bob"]), "'user_data'"),
        (document({"ann": (ANN[0], [1])}), "'ann' has 2 x but 1 y"),
        (document({"ann": (["text"], [0]), "bob": BOB}), "'x'"),
        (document({"ann": ([[1, 2]], [None])}), "'ann': 'y'"),
        (changed(user_data={"ann": {"x": [[1]]}, "bob": []}), "'ann'"),
        (document({"ann": ([[1, float("nan")]], [0])}), "client 'ann', field 'x'.*nan"),
        (document({"ann": ([[1e300, 1]], [0])}), "client 'ann', field 'x'.*inf"),
        (document({"ann": ([], [])}), "no user has rows"),
        (document({}), "no user has rows"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, content, message):
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"odd\.json.*({message})"):
        load_leaf(path)


@pytest.mark.thorough
def test_femnist(real_file):
    population = load_leaf(real_file("femnist/mytest.json.zip"))
    assert population.num_clients == 206
    assert population.fields["x"].shape == (6237, 784)
    assert population.fields["x"].dtype == np.float32
    assert population.fields["x"].min() >= 0
    assert population.fields["x"].max() <= 1
    assert set(population.fields["y"]) == set(range(62))
    assert population.splits["train"].count.min() == 5
    assert population.splits["train"].count.max() == 69


@pytest.mark.thorough
def test_vehicle(real_file):
    population = load_leaf(real_file("vehicle/mytrain.json"))
    assert population.num_clients == 23
    assert population.fields["x"].shape == (1860, 100)
    assert population.fields["y"].shape == (1860,)
    assert set(population.fields["y"]) == {-1, 1}
    assert population.splits["train"].count.min() == 7
    assert population.splits["train"].count.max() == 534
