"""Data sets of Hugging Face: made in memory, and folders of the hub's layouts."""

import json
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from PIL import Image

from fedjaxsim.data import dirichlet, from_hf, load
from fedjaxsim.data.text import CHARACTERS

datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")

LABEL = datasets.ClassLabel(names=["no", "yes", "perhaps"])
NAMES: dict[str, Any] = {"client": "who", "target": "y"}


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
    with pytest.raises(ValueError, match="'extra'"):
        from_hf(datasets.DatasetDict(train=TABLE, extra=TABLE), **NAMES)


def test_lists_of_tokens_stay_integers():
    tokens = made({"who": ["a", "b"], "y": ["u", "v"], "tokens": [[1, 2, 3], [4, 5, 6]]})
    population = from_hf(tokens, **NAMES)
    assert_array_equal(
        population.fields["x"], np.array([[1, 2, 3], [4, 5, 6]], np.int32), strict=True
    )
    ragged = made({"who": ["a", "b"], "y": ["u", "v"], "tokens": [[1, 2, 3], [4, 5]]})
    with pytest.raises(ValueError, match=r"'tokens' must hold lists of one length, .* in row 2"):
        from_hf(ragged, **NAMES)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (datasets.Array2D((2, 3), "float32"), (2, 3)),
        (datasets.Array3D((1, 2, 2), "uint8"), (1, 2, 2)),
        (datasets.Sequence(datasets.Value("float32"), length=2), (2,)),
    ],
)
def test_arrays_keep_their_shapes(kind, shape):
    values = np.arange(2 * np.prod(shape)).reshape(2, *shape)
    rows = {"who": ["a", "b"], "y": ["u", "v"], "x": values.tolist()}
    population = from_hf(made(rows, x=kind), **NAMES)
    assert_array_equal(population.fields["x"], values)


def test_a_missing_image_and_one_of_16_bits_are_named():
    image, deep = Image.new("L", (4, 4)), Image.fromarray(np.zeros((4, 4), np.uint16))
    rows = {"who": list("abb"), "y": list("uvv"), "img": [image, None, image]}
    with pytest.raises(ValueError, match="column 'img', row 2: there is no image"):
        from_hf(made(rows, img=datasets.Image()), x="img", **NAMES)
    rows["img"] = [image, image, deep]
    with pytest.raises(ValueError, match=r"column 'img', row 3.* 8 bits a channel, got 16"):
        from_hf(made(rows, img=datasets.Image()), x="img", **NAMES)


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
        (made({"who": [1], "y": [-1], "a": [1]}, y=LABEL), {}, ValueError, "without a class"),
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
        (TABLE, {"x": "b", "drop": ["a"]}, ValueError, "drop"),
        (datasets.DatasetDict(train=TABLE), {"client": None}, ValueError, "split"),
        (TABLE.to_iterable_dataset(), {}, TypeError, "streamed"),
        ([1], {}, TypeError, "datasets.Dataset"),
    ],
)
def test_what_is_wrong_in_a_data_set_is_named(data, arguments: Any, error, message):
    with pytest.raises(error, match=message):
        from_hf(data, **{**NAMES, **arguments})


def test_rows_without_clients_are_fields_to_partition():
    fields = from_hf(TABLE, target="y", drop=["who"])
    assert_array_equal(fields["x"], [[1.5, 1], [2.5, 2], [3.5, 3]])
    assert sorted(fields) == ["x", "y"]
    assert dirichlet(fields, 2, alpha=1.0, seed=0).num_rows == 3


def test_text_becomes_its_characters():
    rows = {"who": [1, 2], "y": [0, 1], "review": ["so it is", "no"]}
    population = from_hf(made(rows, y=LABEL), **NAMES, x="review")
    symbols = population.categories["x"]
    assert ["".join(symbols[k] for k in row) for row in population.fields["x"]] == rows["review"]
    assert symbols == (*CHARACTERS, "")  # LEAF's characters are public, others are the data's
    [sentence] = population.public
    assert sentence.startswith("The length of the longest text")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Folders with the layouts of femnist, mnist and shakespeare on the hub, and of images."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    images = [Image.fromarray(np.full((2, 2), k, np.uint8)) for k in range(8)]
    labels = {"image": images, "label": [k % 2 for k in range(8)]}
    kind = datasets.ClassLabel(names=["0", "1"])
    mnist = made(labels, label=kind)
    writers = {"writer_id": [f"f{k // 4}" for k in range(8)], "hsf_id": [0] * 8}
    femnist = made({**labels, **writers}, label=kind).rename_column("label", "character")
    for name, split, rows in (
        ("mnist", "train", mnist), ("mnist", "test", mnist), ("femnist", "train", femnist)
    ):  # fmt: skip
        (tmp_path / name / "data").mkdir(parents=True, exist_ok=True)
        rows.to_parquet(tmp_path / name / "data" / f"{split}-00000-of-00001.parquet")
    (tmp_path / "photos" / "a").mkdir(parents=True)
    for k, image in enumerate(images):
        image.save(tmp_path / "photos" / "a" / f"{k}.png")
    named = [
        {"file_name": f"a/{k}.png", "who": f"w{k % 2}", "letter": "uv"[k // 4]} for k in range(8)
    ]
    (tmp_path / "photos" / "metadata.jsonl").write_text("\n".join(map(json.dumps, named)))
    (tmp_path / "shakespeare").mkdir()
    lines = ["character_id,x,y", "ROMEO,to be,!", "ROMEO,or no,t", "JULIET,be or,?"]
    (tmp_path / "shakespeare" / "shakespeare.csv").write_text("\n".join(lines))
    return tmp_path


def test_data_sets_are_read_by_name(hub):
    mnist = load(f"hf:{hub}/mnist", target="label", partition="iid", num_clients=2, test=0.0)
    assert mnist.fields["x"].shape == (8, 2, 2, 1)  # of train alone
    assert mnist.categories["y"] == ("0", "1")
    both = load(
        f"hf:{hub}/mnist", target="label", partition="iid", split="train+test[:4]", num_clients=2
    )
    assert both.num_rows == 12
    femnist = load(f"hf:{hub}/femnist", client="writer_id", target="character", x="image", test=0.0)
    assert femnist.names.tolist() == ["f0", "f1"]
    assert_array_equal(femnist.fields["x"][:, 0, 0, 0] * 255, range(8))
    photos = load(f"hf:{hub}/photos", client="who", target="letter", x="image", test=0.0)
    assert photos.names.tolist() == ["w0", "w1"]
    assert_array_equal(photos.fields["x"][:, 0, 0, 0] * 255, [0, 2, 4, 6, 1, 3, 5, 7])
    assert photos.categories["y"] == ("u", "v")
    names: Any = {"client": "character_id", "target": "y", "x": "x"}
    shakespeare = load(f"hf:{hub}/shakespeare", **names, test=0.0)
    assert shakespeare.names.tolist() == ["JULIET", "ROMEO"]
    symbols = shakespeare.categories["x"]
    assert ["".join(symbols[k] for k in row) for row in shakespeare.fields["x"]] == [
        "be or", "to be", "or no"
    ]  # fmt: skip
    assert shakespeare.categories["y"] == ("!", "?", "t")


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("mnist", {}, "--target"),
        ("mnist", {"target": "label", "split": "dev"}, "mnist: not a readable .*dev"),
        ("mnist", {"target": "label", "x": "img"}, "mnist: .*'img'"),
        ("mnist", {"target": "lable"}, "mnist: .*'lable'"),
        ("mnist", {"target": "label", "client": "image", "subset": "b"}, "mnist: .*'b'"),
        ("nowhere", {"target": "label"}, "nowhere: not a readable Hugging Face data set"),
    ],
)
def test_what_cannot_be_read_by_name_is_one_sentence(hub, name, given, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(f"hf:{hub}/{name}", partition=None if "client" in given else "iid", **given)
    assert "\n" not in str(caught.value)


def test_a_folder_of_images_has_the_splits_of_its_table(tmp_path):
    rng, lines = np.random.default_rng(0), list[str]()
    for k, split in enumerate(["train", "test", "train", "train"]):
        pixels = rng.integers(0, 255, (4, 4, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{k}.png")
        named = {"file_name": f"{k}.png", "who": "ab"[k // 2], "y": "uv"[k % 2], "split": split}
        lines.append(json.dumps(named))
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    found = load(f"hf:{tmp_path}", x="image", client="who", target="y")
    assert_array_equal(found.counts, [[1, 0, 1], [2, 0, 0]])


def test_folders_of_clients_and_classes_are_for_another_reader(tmp_path):
    for place in ("ann/u", "ann/v", "bob/u", "bob/v"):
        (tmp_path / place).mkdir(parents=True)
        Image.fromarray(np.zeros((2, 2), np.uint8)).save(tmp_path / place / "0.png")
    with pytest.raises(ValueError, match=f"'client'.* as images:{tmp_path}"):
        load(f"hf:{tmp_path}", x="image", client="client", target="label")
    assert load(f"images:{tmp_path}", test=0.0).num_clients == 2


def test_images_of_another_size_are_named():
    sizes = [Image.new("RGB", (4, 5)), Image.new("RGB", (4, 5)), Image.new("L", (6, 5))]
    pictures = made({"who": [1, 1, 2], "y": [0, 1, 1], "image": sizes}, image=datasets.Image())
    with pytest.raises(
        ValueError, match=r"row 3: all must have one size and colour, but its shape is \(5, 6, 1\)"
    ):
        from_hf(pictures, **NAMES)
