"""Damaged and hostile files are refused in one line, within the memory that they hold."""

import shutil
import zipfile

import numpy as np
import pytest
from support import damaged

from fedjaxsim.data import load, save_folder
from fedjaxsim.runs.sweep_runs import read_sweep

FORMATS = damaged.formats()


@pytest.mark.parametrize(
    "name",
    [
        # Each mutation of a MATLAB file starts a process.
        pytest.param(name, marks=pytest.mark.thorough if name in ("mat.z", "mat.inside") else ())
        for name in FORMATS
    ],
)
def test_a_mutated_file_is_read_or_refused(name):
    assert list(damaged.problems(FORMATS[name], range(FORMATS[name].quick))) == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", FORMATS)
def test_many_mutated_files_are_read_or_refused(name):
    """`python tests/support/damaged.py 10000` has more."""
    assert list(damaged.problems(FORMATS[name], range(80, 80 + FORMATS[name].thorough))) == []


@pytest.mark.parametrize(
    ("name", "seed"),
    [("leaf.zip", 6995), ("leaf.zip", 7295), ("checkpoint.inside", 1020)],
    ids=["a member without a name", "an absolute one", "a type that is no type"],
)
def test_what_ten_thousand_mutations_found_is_mended(name, seed):
    assert list(damaged.problems(FORMATS[name], range(seed, seed + 1))) == []


@pytest.mark.parametrize("descr", ["<f4", "|O"])
def test_an_array_that_declares_more_than_follows_is_refused(tmp_path, descr):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, archive.open("x.npy", "w") as file:
        header = {"descr": descr, "fortran_order": False, "shape": (10**12,)}
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(ValueError, match=r"a\.npz: "):
        load(f"npz:{tmp_path}/a.npz")


def test_a_population_reads_no_file_outside_its_folder(tmp_path):
    save_folder(tmp_path / "p", damaged.population())
    shutil.copy(tmp_path / "p" / "counts.npy", tmp_path / "counts.npy")
    sums = (tmp_path / "p" / "SHA256SUMS").read_text()
    (tmp_path / "p" / "SHA256SUMS").write_text(sums.replace("counts.npy", "../counts.npy"))
    with pytest.raises(ValueError, match=r"counts\.npy' is missing"):
        load(f"folder:{tmp_path}/p")


def test_sweeps_have_an_end(tmp_path):
    rounds = ", ".join(map(str, range(1, 400)))
    (tmp_path / "a.toml").write_text(f"[sweep]\nrounds = [{rounds}]\nseed = [{rounds}]\n")
    with pytest.raises(ValueError, match=r"at most 100,000 runs.*159,201"):
        read_sweep(tmp_path / "a.toml")
