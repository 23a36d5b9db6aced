"""`fedjaxsim data show`."""

import json
import subprocess
import warnings

import numpy as np
import pytest

from fedjaxsim.cli import main


def test_what_a_run_would_have_is_shown(tmp_path, capsys):
    rows = "".join(f"{'ab'[k % 2]},{k},{k % 4}\n" for k in range(20))
    (tmp_path / "a.csv").write_text("who,age,y\n" + rows)
    flags = f"--data csv:{tmp_path}/a.csv --client who --target y --test-fraction 0.2"
    assert main(["data", "show", *flags.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["column", "role", "type", "values", "distinct", "missing"]
    begin = lines.index("clients: 2")
    assert lines[begin + 1] == "rows: 20 (train 16, validation 0, test 4)"
    assert "labels: 4 different: 0, 1, 2, 3" in lines


def test_columns_of_text_are_shown_with_their_flags(tmp_path, capsys):
    rows = "".join(f"{'ab'[k % 2]},{'xyz'[k % 3]},{'uv'[k % 2]},{k % 4}\n" for k in range(20))
    (tmp_path / "a.csv").write_text("who,ward,sex,y\n" + rows)
    command = f"data show --data csv:{tmp_path}/a.csv --client who --target y".split()
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "flags: --one-hot ward,sex" in lines
    assert "(one-hot)" in lines[-1]
    assert main([*command, "--one-hot", "ward,sex"]) == 0
    assert "rows: 20" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--range age=1:0", "range must have its smallest value first"),
        ("--range aeg=0:1", "there is no column 'aeg' to scale, only 'age', 'y' (did you mean 'a"),
    ],
)
def test_ranges_that_fit_no_column_are_refused(tmp_path, capsys, flags, message):
    (tmp_path / "a.csv").write_text("who,age,y\na,1,0\nb,2,1\n")
    command = f"data show --data csv:{tmp_path}/a.csv --client who --target y {flags}"
    assert main(command.split()) == 2
    assert message in capsys.readouterr().err


def test_partitions_and_held_out_clients_count(ask_json):
    flags = "--clients 10 --partition quantity --held-out-clients 0.3 --seed 3"
    found = ask_json(f"data show {flags}")
    assert found["clients"] == 7
    assert found["labels"] == [*range(10)]


def test_clients_with_test_rows_alone_are_named_and_left_out(tmp_path, capsys):
    rows = {"x": np.ones((6, 1)), "y": np.arange(6) % 2, "client": np.arange(6) // 2}
    np.savez(tmp_path / "a.npz", **rows, split=np.array([0, 2, 0, 2, 2, 2]))
    with warnings.catch_warnings(action="always"):
        assert main(["data", "show", "--data", f"npz:{tmp_path / 'a.npz'}", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["clients"] == 2
    line = "fedjaxsim: warning: 1 of 3 clients, such as '2', have no training rows"
    assert printed.err.startswith(line)


def test_data_without_labels_are_shown(capsys):
    assert main(["data", "show", "--data", "synthetic-stream", "--clients", "5"]) == 0
    assert "theta: float32, 100 per row" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--data csv:absent --client who --target y", "absent"),
        ("--rounds 3", "rounds"),
        ("--out a.gif", "a.gif"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(refused, flags, words):
    assert words in refused(f"data show {flags}")


def test_a_converted_population_is_the_same(tmp_path, capsys, refused):
    flags = ["--clients", "10", "--partition", "iid", "--validation-fraction", "0.1", "--json"]
    assert main(["data", "convert", *flags, "--out", str(tmp_path / "digits")]) == 0
    converted = capsys.readouterr().out
    assert main(["data", "show", "--data", f"folder:{tmp_path}/digits", "--json"]) == 0
    assert capsys.readouterr().out == converted
    for out in ([], ["--out", "digits"]):
        assert "out" in refused(" ".join(["data", "convert", *flags, *out]))


def test_digests_of_a_folder_are_those_of_its_files(tmp_path, capsys):
    folder = tmp_path / "digits"
    flags = ["--clients", "5", "--partition", "iid"]
    assert main(["data", "convert", *flags, "--out", str(folder)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"written to {folder}, for --data folder:{folder}"
    check = ["sha256sum", "--strict", "--check", "SHA256SUMS"]
    done = subprocess.run(check, cwd=folder, capture_output=True, text=True, check=True)
    files = {file.name for file in folder.glob("*.npy")}
    assert {*done.stdout.splitlines()} == {f"{name}: OK" for name in files} > {"x.npy: OK"}


@pytest.mark.parametrize(
    "flags", ["--client nobody --target y", "--client who --target z", "--target y --drop z"]
)
def test_a_column_that_is_not_there_is_refused_before_anything_is_shown(tmp_path, capsys, flags):
    (tmp_path / "a.csv").write_text("who,age,y\n" + "a,30,1\nb,40,0\n" * 9)
    assert main(["data", "show", "--data", f"csv:{tmp_path}/a.csv", *flags.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "there is no column" in shown.err
