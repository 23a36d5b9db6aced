"""Damaged and hostile files are refused in one line, within the memory that they hold."""

import json
import shutil
import zipfile

import damaged
import numpy as np
import pytest

from fedjaxsim.data import files, load, save_folder
from fedjaxsim.runs.sweep_runs import read_sweep

FORMATS = damaged.formats()


@pytest.mark.parametrize("name", FORMATS)
def test_a_mutated_file_is_read_or_refused(name):
    assert list(damaged.problems(FORMATS[name], range(80))) == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", FORMATS)
def test_a_thousand_mutated_files_are_read_or_refused(name):
    assert list(damaged.problems(FORMATS[name], range(80, 1000))) == []


@pytest.mark.parametrize(
    ("name", "seed"),
    [("leaf.zip", 6995), ("leaf.zip", 7295), ("checkpoint.inside", 1020)],
    ids=["a member without a name", "an absolute one", "a type that is no type"],
)
def test_what_ten_thousand_mutations_found_is_mended(name, seed):
    assert list(damaged.problems(FORMATS[name], range(seed, seed + 1))) == []


@pytest.mark.parametrize("descr", ["<f4", "|O", "|V0"])
def test_an_array_that_declares_more_than_follows_is_not_allocated(tmp_path, descr):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, archive.open("x.npy", "w") as file:
        header = {"descr": descr, "fortran_order": False, "shape": (10**12,)}
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(ValueError, match=r"a\.npz: .*(does not fit its size|declares)"):
        load(f"npz:{tmp_path}/a.npz")


def test_sizes_that_cannot_be_are_damage_and_others_must_fit():
    files.check_inflated(1000 * 100, 100, "it")
    with pytest.raises(ValueError, match="it is damaged"):
        files.check_inflated(10**9, 100, "it")
    with pytest.raises(ValueError, match="it takes"):
        files.check_inflated(10**18, 10**16, "it")


def test_one_long_text_does_not_pad_all_others(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "_PADDED", 1000)
    lines = ["who,a,y", f"{'x' * 9000},1,0", *(f"c{k},{k},{k % 2}" for k in range(300))]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"the names of clients have 34 characters .* 9000"):
        load(f"csv:{tmp_path}/a.csv", client="who", target="y")
    text = {"x": ["x" * 9000, *["ab"] * 300], "y": ["a"] * 301}
    content = {"users": ["u"], "num_samples": [301], "user_data": {"u": text}}
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="must be numbers in rows of equal length, or text"):
        load(f"leaf:{tmp_path}/a.json")


def test_an_image_starts_no_program_and_is_no_bomb(monkeypatch, tmp_path):
    from PIL import Image

    (tmp_path / "c" / "cat").mkdir(parents=True)
    (tmp_path / "c" / "dog").mkdir()
    Image.new("L", (9, 9)).save(tmp_path / "c" / "cat" / "1.png")
    shutil.copy(tmp_path / "c" / "cat" / "1.png", tmp_path / "c" / "dog" / "1.png")
    assert load(f"images:{tmp_path}", test=0.0).num_rows == 2
    with monkeypatch.context() as patch:
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 80)
        with pytest.raises(ValueError, match="decompression bomb"):
            load(f"images:{tmp_path}")
    Image.new("L", (9, 9)).save(tmp_path / "c" / "dog" / "1.png", "EPS")
    with pytest.raises(ValueError, match=r"dog/1\.png is not a readable image"):
        load(f"images:{tmp_path}")


def test_a_population_reads_no_file_outside_its_folder(tmp_path):
    save_folder(tmp_path / "p", damaged.population())
    shutil.copy(tmp_path / "p" / "counts.npy", tmp_path / "counts.npy")
    about = (tmp_path / "p" / "population.json").read_text()
    (tmp_path / "p" / "population.json").write_text(about.replace("counts.npy", "../counts.npy"))
    with pytest.raises(ValueError, match=r"the column counts\.npy is missing"):
        load(f"folder:{tmp_path}/p")


def test_files_of_settings_are_small_and_sweeps_have_an_end(monkeypatch, tmp_path):
    rounds = ", ".join(map(str, range(1, 400)))
    (tmp_path / "a.toml").write_text(f"[sweep]\nrounds = [{rounds}]\nseed = [{rounds}]\n")
    with pytest.raises(ValueError, match=r"at most 100,000 runs.*159,201"):
        read_sweep(tmp_path / "a.toml")
    monkeypatch.setattr(files, "_MOST_SETTINGS", 100)
    with pytest.raises(ValueError, match=r"a\.toml.* more than 100 bytes"):
        read_sweep(tmp_path / "a.toml")
