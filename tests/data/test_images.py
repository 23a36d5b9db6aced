"""Folders of images, made here."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedjaxsim.data import load
from fedjaxsim.data.images import arrays_of_folder
from fedjaxsim.data.npz import assemble


def load_images(path):
    return assemble(arrays_of_folder(path, has_clients=True), path)


def drawn(path, pixels, mode="L"):
    """A file whose image has these pixels, (height, width, ...)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).convert(mode).save(path)


@pytest.fixture
def folder(tmp_path):
    """Clients 9 and 10; 9 has two cats and a dog, 10 a dog. Image k is 10 k in every pixel."""
    for k, name in enumerate(("9/cat/a.png", "9/cat/b.bmp", "9/dog/c.png", "10/dog/d.png")):
        drawn(tmp_path / "all" / name, np.full((2, 3), 10 * k))
    (tmp_path / "all/9/cat/.hidden.png").write_text("litter")
    (tmp_path / "all/9/notes.txt").write_text("litter")
    return tmp_path / "all"


def test_a_folder_is_a_client_and_one_in_it_a_class(folder):
    population = load_images(folder)
    assert population.names.tolist() == ["9", "10"]
    assert population.categories == {"y": ("cat", "dog")}
    assert population.fields["x"].shape == (4, 2, 3, 1)
    assert population.fields["x"].dtype == np.float32
    np.testing.assert_allclose(population.fields["x"][:, 1, 2, 0], np.arange(4) * 10 / 255)
    assert population.fields["y"].tolist() == [0, 0, 1, 1]
    assert load(f"images:{folder}", test=0.5).splits["test"].count.tolist() == [2, 0]


def test_folders_of_splits_become_splits(folder, tmp_path):
    folder.rename(tmp_path / "train")
    drawn(tmp_path / "test/10/cat/e.png", np.full((2, 3), 40))
    population = load_images(tmp_path)
    assert population.splits["train"].count.tolist() == [3, 1]
    assert population.splits["test"].count.tolist() == [0, 1]
    assert population.rows(1)["y"].tolist() == [1, 0]


def test_classes_without_clients_are_dealt(folder):
    population = load(f"images:{folder}/9", partition="iid", num_clients=3, test=0.0)
    assert population.num_clients == 3
    assert sorted(population.fields["y"]) == [0, 0, 1]
    assert population.categories == {"y": ("cat", "dog")}


def test_colours_are_three_channels(tmp_path):
    red = np.zeros((2, 2, 3))
    red[..., 0] = 255
    for k, (mode, ending) in enumerate([("RGB", "png"), ("RGBA", "png"), ("RGB", "bmp")]):
        drawn(tmp_path / f"a/{'uv'[k % 2]}/{k}.{ending}", red, mode)
    x = load_images(tmp_path).fields["x"]
    np.testing.assert_array_equal(x, np.broadcast_to([1, 0, 0], (3, 2, 2, 3)))


@pytest.mark.parametrize(
    ("file", "make", "message"),
    [
        (
            "9/dog/e.png",
            lambda p: drawn(p, np.zeros((3, 3))),
            r"\(2, 3, 1\).*e\.png is \(3, 3, 1\)",
        ),
        ("9/dog/e.png", lambda p: drawn(p, np.zeros((2, 3)), "RGB"), r"e\.png is \(2, 3, 3\)"),
        (
            "9/dog/e.png",
            lambda p: Image.fromarray(np.zeros((2, 3), np.uint16)).save(p),
            r"e\.png.*8 bits",
        ),
        ("9/dog/e.png", lambda p: p.write_text("text"), r"e\.png"),
        ("9/dog/c.png", lambda p: p.write_bytes(p.read_bytes()[:45]), r"c\.png"),
        ("8/cat", lambda p: p.mkdir(parents=True), "8 holds"),
    ],
)
def test_what_is_wrong_in_a_folder_is_named(folder, file, make, message):
    make(folder / file)
    with pytest.raises(ValueError, match=rf"all: .*{message}"):
        load_images(folder)


def test_folders_of_another_layout_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="partition"):
        load_images(folder / "9")
    with pytest.raises(ValueError, match=r"all .*PATH/class/image\.png$"):
        load(f"images:{folder}", partition="iid")
    drawn(tmp_path / "one/10/dog/a.png", np.zeros((2, 3)))
    with pytest.raises(ValueError, match="dog"):
        load_images(tmp_path / "one")
    folder.rename(tmp_path / "train")
    (tmp_path / "one").rename(tmp_path / "test")
    with pytest.raises(ValueError, match="splits"):
        load(f"images:{tmp_path}", partition="iid")
    with pytest.raises(FileNotFoundError, match="absent"):
        load_images(tmp_path / "absent")


@pytest.mark.parametrize("second", ["val", "valid", "Validation", "Test", "test"])
def test_classes_below_splits_are_no_clients(tmp_path, second):
    # The layout of ImageNet: train/CLASS beside val/CLASS.
    for split in ("train", second):
        for k, name in enumerate(("cat", "dog")):
            drawn(tmp_path / split / name / "a.png", np.full((2, 2), k))
    with pytest.raises(ValueError, match=r"cat holds no folders of images: .*needs a partition"):
        load_images(tmp_path)
    with pytest.raises(ValueError, match=r"one folder without splits, such as PATH/train"):
        load(f"images:{tmp_path}", partition="iid", num_clients=2)
    assert load(f"images:{tmp_path}/train", partition="iid", num_clients=2).num_rows == 2


@settings(deadline=None, max_examples=30)
@given(
    files=st.sets(
        st.tuples(
            st.sampled_from(["train", "Val", "TEST"]), st.sampled_from(["2", "10", "x"]),
            st.sampled_from(["cat", "dog"]), st.sampled_from(["a.png", "b.bmp", "c.PNG", "d.tif"]),
        ),
        min_size=1,
    ),
    splits=st.booleans(),
)  # fmt: skip
def test_random_folders_are_read_as_walking_them_does(tmp_path_factory, files, splits):
    top = tmp_path_factory.mktemp("random")
    for k, (split, *rest) in enumerate(sorted(files)):
        drawn(top.joinpath(*([split] if splits else []), *rest), np.full((1, 1), k))
    expected, skipped = {}, 0
    for file in (each for each in top.rglob("*") if each.is_file()):
        *head, client, name, _ = file.relative_to(top).parts
        cell = [{"train": 0, "Val": 1, "TEST": 2}[head[0]] if head else 0, client, name]
        if file.suffix == ".tif":
            skipped += 1
        else:
            expected.setdefault(client, []).append((*cell, np.asarray(Image.open(file)).item()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            population = load_images(top)
        except ValueError:  # each folder of a client must hold images
            pictures = {file.parent.parent for file in top.rglob("*") if file.suffix != ".tif"}
            clients = {file.parent.parent for file in top.rglob("*") if file.is_file()}
            classes = {row[2] for rows in expected.values() for row in rows}
            trained = any(row[0] == 0 for rows in expected.values() for row in rows)
            assert clients - pictures or len(classes) < 2 or not trained
            return
    said = " ".join(str(each.message) for each in caught)
    assert (f"{skipped} files were skipped" in said) == (skipped > 0)
    names = population.categories["y"]
    for clients in (population, *([population.held_out] if population.held_out else [])):
        for k, client in enumerate(clients.names.tolist()):
            rows = expected.pop(client)
            for place, split in enumerate(("train", "validation", "test")):
                found = clients.rows(k, split)
                pixels = np.rint(found["x"].ravel() * 255).astype(int).tolist()
                labels = [names[y] for y in found["y"]]
                of_split = [row for row in rows if clients is not population or row[0] == place]
                if clients is population or place == 0:
                    assert sorted(zip(labels, pixels, strict=True)) == sorted(
                        (name, value) for _, _, name, value in of_split
                    )
    assert not expected
