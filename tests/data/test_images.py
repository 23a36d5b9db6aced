"""Images in folders, tables and sequences, as Pillow reads them."""

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from PIL import Image

from fedjaxsim.data import dirichlet, from_sequence, load
from fedjaxsim.data.tables.images import read_new_images, stack_images


def write(folder, *names, size=(6, 4)):
    """Write an image of its own grey level to each file; return these levels by name."""
    levels = {name: 3 * k for k, name in enumerate(names, 1)}
    for name, level in levels.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((size[1], size[0], 3), level, np.uint8)).save(folder / name)
    return levels


def levels_of(population):
    """The grey level of each row, from its first pixel."""
    return np.rint(population.fields["x"][:, 0, 0, 0] * 255).astype(int).tolist()


def test_folders_of_clients_and_classes_are_read(tmp_path):
    names = [f"{who}/{label}/{k}.png" for who in "ab" for label in ("cat", "dog") for k in "01"]
    levels = write(tmp_path, *names)
    (tmp_path / "a" / "notes.txt").write_text("no image")
    population = load(f"images:{tmp_path}", test=0.0)
    assert population.names.tolist() == ["a", "b"]
    assert population.fields["x"].shape == (8, 4, 6, 3)
    assert population.categories["y"] == ("cat", "dog")
    for client, name in enumerate("ab"):
        rows = population.rows(client)
        want = {level: n.split("/")[1] for n, level in levels.items() if n.startswith(name)}
        pixels = np.rint(rows["x"][:, 0, 0, 0] * 255).astype(int)
        found = {p: population.categories["y"][y] for p, y in zip(pixels, rows["y"], strict=True)}
        assert found == want


def test_folders_named_as_splits_are_splits(tmp_path):
    names = [f"{s}/{label}/{k}.png" for s in ("train", "test") for label in "uv" for k in range(20)]
    levels = write(tmp_path / "one", *names)
    with pytest.raises(ValueError, match=r"holds no client of its rows.*--partition"):
        load(f"images:{tmp_path / 'one'}")
    dealt = load(f"images:{tmp_path / 'one'}", partition="iid", num_clients=2)
    found = levels_of(dealt)
    for split in ("train", "test"):
        wanted = [level for name, level in levels.items() if name.startswith(split)]
        held = [found[row] for row in dealt.splits[split].all_rows()]
        assert sorted(held) == sorted(wanted)
    three = [f"{s}/{who}/u/{k}.png" for s in ("train", "val") for who in "ab" for k in range(2)]
    write(tmp_path / "two", *three, "train/a/v/9.png")
    assert_array_equal(load(f"images:{tmp_path / 'two'}", test=0.0).counts, [[3, 2, 0], [2, 2, 0]])


def test_a_table_lists_files_classes_clients_and_splits(tmp_path):
    write(tmp_path, "one.png", "two.png", "three.png")
    lines = ["path,who,what,split", "one.png,7,x,train", "two.png,7,y,test", "three.png,9,y,train"]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    arguments: dict[str, Any] = {"client": "who", "target": "what", "x": "path"}
    population = load(f"images:{tmp_path / 't.csv'}", **arguments)
    assert_array_equal(population.counts, [[1, 0, 1], [1, 0, 0]])
    assert levels_of(population) == [3, 6, 9]
    assert [population.categories["y"][k] for k in population.fields["y"]] == ["x", "y", "y"]
    (tmp_path / "t.csv").write_text("path,who,what\n../one.png,7,x")
    with pytest.raises(ValueError, match="leads out of the folder"):
        load(f"images:{tmp_path / 't.csv'}", **arguments)
    (tmp_path / "t.csv").write_text("path,who,what\none.png,7,x\ntwo.png,7,")
    with pytest.raises(ValueError, match="column 'what' has 1 missing values"):
        load(f"images:{tmp_path / 't.csv'}", **arguments)


def test_images_to_predict_need_no_classes(tmp_path):
    write(tmp_path, "1.png", "2.png")
    assert read_new_images(tmp_path).client is None
    assert {*read_new_images(tmp_path).fields} == {"x"}
    (tmp_path / "t.csv").write_text("file_name,who\n2.png,b\n1.png,a")
    listed = read_new_images(tmp_path / "t.csv", client="who")
    assert listed.client is not None
    assert listed.names is not None
    assert [listed.names[k] for k in listed.client] == ["b", "a"]
    write(tmp_path / "new", "a/1.png", "b/1.png")
    of_clients = read_new_images(tmp_path / "new", ["a", "b", "c"])
    assert of_clients.population().names.tolist() == ["a", "b"]
    assert read_new_images(tmp_path / "new", ["c"]).client is None  # folders of classes


def test_images_are_resized_by_the_shorter_side_and_cropped_at_the_centre():
    pixels = np.random.default_rng(0).integers(0, 256, (9, 13, 3), np.uint8)
    image = Image.fromarray(pixels)
    [cropped] = stack_images([image], ["a"], center_crop=5)
    np.testing.assert_allclose(cropped, pixels[2:7, 4:9] / 255, rtol=1e-6)
    [resized] = stack_images([image], ["a"], resize=18)
    want = image.resize((26, 18), Image.Resampling.BILINEAR)
    np.testing.assert_allclose(resized, np.asarray(want) / 255, rtol=1e-6)
    with pytest.raises(ValueError, match=r"b: .* shape is .4, 4, 3., and a has .9, 13, 3."):
        stack_images([image, image.resize((4, 4))], ["a", "b"])
    assert stack_images([image, image.resize((4, 4))], "ab", resize=4, center_crop=4).shape[0] == 2
    with pytest.raises(ValueError, match="13 × 9 is too small to crop to 10"):
        stack_images([image], ["a"], center_crop=10)


class Pairs:
    """A data set as torch has them: a length and items, whose iteration never ends by itself."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index % len(self.items)]


def test_sequences_of_triples_and_pairs_are_read():
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (6, 4, 5, 1), np.uint8)
    triples = [(x, "vu"[k % 2], k // 3) for k, x in enumerate(pictures)]
    population = from_sequence(Pairs(triples), split=["train", "test", "train"] * 2)
    assert_array_equal(population.counts, [[2, 0, 1]] * 2)
    order = [0, 2, 1, 3, 5, 4]
    np.testing.assert_allclose(population.fields["x"], pictures[order] / 255, rtol=1e-6)
    labels = [population.categories["y"][k] for k in population.fields["y"]]
    assert labels == [triples[k][1] for k in order]
    fields = from_sequence([(x.astype(np.float32), k % 2) for k, x in enumerate(pictures)])
    assert_array_equal(fields["x"], pictures)  # floats stay as they are
    assert dirichlet(fields, 2).num_rows == 6
    with pytest.raises(ValueError, match="1 parts in item 1"):
        from_sequence([(1.0, 2), (1.0,)])
