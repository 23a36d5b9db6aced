"""Text becomes integers: Shakespeare of LEAF, names of classes."""

import json

import numpy as np
import pytest

from fedjaxsim.data import load_leaf, load_npz, save_npz
from fedjaxsim.data.text import CHARACTERS


def written(path, users):
    """LEAF JSON of {user: (x, y)}, read."""
    document = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    path.write_text(json.dumps(document))
    return load_leaf(path)


def read(population, field):
    """The text that a field stands for."""
    names = population.categories[field]
    return [
        "".join(names[k] for k in np.atleast_1d(row) if k >= 0) for row in population.fields[field]
    ]


def test_the_next_character_of_shakespeare(tmp_path):
    speeches = {"LEAR": (["No, no,", "o, no, "], [" ", "n"]), "FOOL": (["Canst t"], ["h"])}
    population = written(tmp_path / "a.json", speeches)
    assert population.names.tolist() == ["LEAR", "FOOL"]
    assert population.fields["x"].dtype == np.uint8
    assert population.fields["x"].shape == (3, 7)
    assert population.fields["y"].shape == (3,)
    assert read(population, "x") == ["No, no,", "o, no, ", "Canst t"]
    assert read(population, "y") == [" ", "n", "h"]
    # The numbers are those of LEAF, of which nothing is learnt from the data.
    assert CHARACTERS[:3] == "\n !"
    assert population.fields["x"][0, 3] == CHARACTERS.index(" ") == 1
    assert len(population.categories["y"]) == 80
    [length] = population.public
    assert length.startswith("The length of the longest text")


def test_other_characters_make_an_alphabet_of_their_own(tmp_path):
    population = written(
        tmp_path / "a.json", {"a": (["αβ", "β"], ["β", "γ"]), "b": (["αα"], ["α"])}
    )
    assert population.categories == {"x": ("α", "β", "γ", ""), "y": ("α", "β", "γ")}
    np.testing.assert_array_equal(population.fields["x"], [[0, 1], [1, 3], [0, 0]])
    np.testing.assert_array_equal(population.fields["y"], [1, 2, 0])
    assert population.public == (
        "Which characters there are is read from all clients' rows and taken as public.",
        "The length of the longest text is read from all clients' rows and taken as public.",
    )
    save_npz(tmp_path / "a.npz", population)
    assert load_npz(tmp_path / "a.npz").categories == population.categories


def test_labels_as_long_as_their_texts_are_one_character_per_place(tmp_path):
    population = written(
        tmp_path / "a.json", {"a": (["abc", "b"], ["bca", "c"]), "b": (["a"], ["c"])}
    )
    np.testing.assert_array_equal(population.fields["y"][0], population.fields["x"][0] + [1, 1, -2])
    np.testing.assert_array_equal(population.fields["y"][1:, 1:], -1)
    assert population.fields["y"].dtype == np.int32
    assert read(population, "y") == ["bca", "c", "c"]
    assert set(population.fields["x"][1:, 1:].ravel()) == {80}


def test_train_and_test_characters_are_of_one_alphabet(tmp_path):
    for name, text in (("train", "βα"), ("test", "γ")):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "a.json", {"a": ([text], [0])})
    population = load_leaf(tmp_path)
    assert population.categories == {"x": ("α", "β", "γ", "")}
    np.testing.assert_array_equal(population.rows(0, "train")["x"], [[1, 0]])
    np.testing.assert_array_equal(population.rows(0, "test")["x"], [[2, 3]])


@pytest.mark.parametrize("x", [["abc", "b"], [[0.5], [1.0]]])
def test_other_text_names_classes(tmp_path, x):
    population = written(tmp_path / "a.json", {"a": (x, ["good", "bad"]), "b": (x, ["bad", "bad"])})
    assert population.categories["y"] == ("bad", "good")
    np.testing.assert_array_equal(population.fields["y"], [1, 0, 0, 0])
    assert any("Which classes there are is" in sentence for sentence in population.public)


def test_whole_numbers_are_tokens_already(tmp_path):
    population = written(tmp_path / "a.json", {"a": ([[5, 6]], [1]), "b": ([[7, 8]], [0])})
    np.testing.assert_array_equal(
        population.fields["x"], np.array([[5, 6], [7, 8]], np.int32), strict=True
    )


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ({"a": (["abc"], [0]), "b": ([[1.0]], [0])}, "'x'"),
        ({"a": (["abc"], [0]), "b": ([["w"]], [0])}, "'x'"),
        ({"a": (["abc"], ["u"]), "b": (["abc"], [0])}, "'y'"),
        ({"a": ([["to", "be"], ["or", "not"]], [0, 1])}, "'x'"),
        ({"a": ([["a", 1]], [0])}, "'x'"),
        ({"a": (["a", 1], [0, 1])}, "'x'"),
        ({"a": (["a"], [{"target_tokens": [["a"]]}])}, "'y'"),
    ],
)
def test_text_that_is_none_is_refused(tmp_path, users, message):
    with pytest.raises(ValueError, match=rf"a\.json: .*{message}"):
        written(tmp_path / "a.json", users)
