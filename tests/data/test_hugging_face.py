"""Data sets of Hugging Face, made in memory."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from PIL import Image

from fedjaxsim.data import from_hf

datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")

LABEL = datasets.ClassLabel(names=["no", "yes", "perhaps"])
NAMES = {"client": "who", "target": "y"}


def made(rows, **kinds):
    """A data set of columns, of which some have kinds other than what their values say."""
    plain = datasets.Dataset.from_dict(rows)
    for name, kind in kinds.items():
        plain = plain.cast_column(name, kind)
    return plain


TABLE = made({"who": [2, 1, 2], "a": [1.5, 2.5, 3.5], "b": [1, 2, 3], "y": [1, 0, 1]}, y=LABEL)


def test_a_table_is_a_population_whose_classes_keep_their_names():
    population = from_hf(TABLE, **NAMES)
    assert population.names.tolist() == ["1", "2"]
    assert_array_equal(population.fields["x"], [[2.5, 2], [1.5, 1], [3.5, 3]])
    assert_array_equal(population.fields["y"], [0, 1, 1])
    assert population.categories == {"y": ("no", "yes", "perhaps")}
    assert population.public == ()  # the data set says its classes
    assert_array_equal(from_hf(TABLE, **NAMES, x="b").fields["x"], [[2], [1], [3]])
    assert_array_equal(from_hf(TABLE, **NAMES, drop=["a"]).fields["x"], [[2], [1], [3]])
    chosen = from_hf(TABLE.select([2, 1]), **NAMES)
    assert_array_equal(chosen.fields["x"], [[2.5, 2], [3.5, 3]])


def test_a_dictionary_of_data_sets_holds_the_splits():
    parts = datasets.DatasetDict(test=TABLE.select([0]), train=TABLE.select([1, 2]))
    population = from_hf(parts, **NAMES)
    assert population.splits["train"].count.tolist() == [1, 1]
    assert population.splits["test"].count.tolist() == [0, 1]
    assert_array_equal(population.rows(1, "test")["x"], [[1.5, 1]])
    with pytest.raises(ValueError, match="'dev'"):
        from_hf(datasets.DatasetDict(train=TABLE, dev=TABLE), **NAMES)


def test_lists_of_tokens_stay_integers():
    tokens = made({"who": ["a", "b"], "y": ["u", "v"], "tokens": [[1, 2, 3], [4, 5, 6]]})
    population = from_hf(tokens, **NAMES)
    assert_array_equal(
        population.fields["x"], np.array([[1, 2, 3], [4, 5, 6]], np.int32), strict=True
    )
    ragged = made({"who": ["a", "b"], "y": ["u", "v"], "tokens": [[1, 2, 3], [4, 5]]})
    with pytest.raises(ValueError, match="'tokens'"):
        from_hf(ragged, **NAMES)


def test_images_are_pixels():
    images = [Image.fromarray(np.full((2, 4), 51 * k, np.uint8)) for k in range(3)]
    rows = {"who": [0, 1, 0], "y": [2, 1, 0], "hand": [5, 6, 7], "image": images}
    whole = made(rows, y=LABEL, who=datasets.ClassLabel(names=["ann", "bob"]))
    population = from_hf(whole, **NAMES, x="image")
    assert population.names.tolist() == ["ann", "bob"]
    assert population.fields["x"].shape == (3, 2, 4, 1)
    np.testing.assert_allclose(population.fields["x"][:, 0, 0, 0], [0, 0.4, 0.2])
    assert_array_equal(population.fields["y"], [2, 0, 1])
    assert_array_equal(from_hf(whole, **NAMES, drop=["hand"]).fields["x"], population.fields["x"])
    assert_array_equal(from_hf(whole, **NAMES, drop=["image"]).fields["x"], [[5], [7], [6]])
    with pytest.raises(ValueError, match="'image'"):
        from_hf(whole, **NAMES)


@pytest.mark.parametrize(
    ("data", "arguments", "error", "message"),
    [
        (TABLE, {"client": "whom"}, ValueError, "'whom'"),
        (TABLE, {"x": "c"}, ValueError, "'c'"),
        (made({"who": [1], "y": [-1], "a": [1]}, y=LABEL), {}, ValueError, "predict"),
        (
            made({"who": [1, 1], "y": [-1, 1], "a": [1, 2]}, y=LABEL),
            {},
            ValueError,
            "'y'",
        ),
        (
            made(
                {"who": [1, 2], "y": [1, 2], "a": [0, 1]}, a=datasets.ClassLabel(names=["u", "v"])
            ),
            {},
            ValueError,
            "'a'.*'u' in row 1",
        ),
        (
            made({"who": [0, -1], "y": [1, 2], "a": [0, 1]}, who=datasets.ClassLabel(names=["u"])),
            {},
            ValueError,
            "'who'",
        ),
        (TABLE.to_iterable_dataset(), {}, TypeError, "streamed"),
        ([1], {}, TypeError, "datasets.Dataset"),
    ],
)
def test_what_is_wrong_in_a_data_set_is_named(data, arguments, error, message):
    with pytest.raises(error, match=message):
        from_hf(data, **{**NAMES, **arguments})
