"""The columns of a table, as pandas sees them, and the flags that make features of them."""

import json
import re
import shlex
import warnings

import numpy as np
import pandas as pd
import pytest

from fedjaxsim.cli import main


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng, n = np.random.default_rng(0), 60
    frame = pd.DataFrame(
        {
            "who": [f"p{k % 6}" for k in range(n)],
            "age": rng.integers(18, 70, n),
            "part": rng.random(n).round(3),
            "job": rng.choice(["baker", "smith"], n),
            "note": [f"note {k}" for k in range(n)],
            "gap": np.where(np.arange(n) == 7, np.nan, 0.5 + np.arange(n) / 100),
            "pay": rng.normal(30, 5, n).round(2),
        }
    )
    frame.to_csv("pay.csv", index=False)
    return frame


SHOW = "data show --data csv:pay.csv --client who --target pay"


def test_what_stops_a_table_is_shown_with_flags_that_mend_it(table, capsys):
    assert main(SHOW.split()) == 0
    shown = capsys.readouterr()
    assert not shown.err
    assert "must be public knowledge" in shown.out
    assert "clients, rows and labels are shown with such flags; without: " in shown.out
    flags = re.search("(?m)^flags: (.*)$", shown.out)
    assert flags is not None
    ranges = " ".join(f"--range {name}=LOW:HIGH" for name in ("age", "part", "pay"))
    assert flags[1] == f"--one-hot job --drop note,gap {ranges}"
    pasted = flags[1].replace("LOW:HIGH", "0:100")
    assert main([*SHOW.split(), *pasted.split()]) == 0
    assert "flags:" not in capsys.readouterr().out
    everything = f"{SHOW} --one-hot job --drop note,gap --loss squared --scale all"
    assert main(everything.split()) == 2  # a loss is none of the data
    assert main(everything.replace("--loss squared ", "").split()) == 0
    assert "flags:" not in capsys.readouterr().out


def test_flags_are_quoted_for_a_shell_and_spaces_of_names_are_seen(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    years, school = np.arange(20.0, 32.0), np.tile([3.0, 5.0], 6)
    who = np.repeat(["A", " A", "A "], 4)
    named = {"who": who, "age (years)": years, "Father's edu": school, "pay": years * 99.5}
    pd.DataFrame(named).to_csv("pay.csv", index=False)
    show = ["data", "show", "--data", "csv:pay.csv", "--client", "who", "--target", "pay"]
    assert main(show) == 0
    printed = capsys.readouterr().out
    assert "' A', A, 'A '" in printed
    flags = re.search("(?m)^flags: (.*)$", printed)
    assert flags is not None
    words = shlex.split(flags[1].replace("LOW:HIGH", "0:9999"))
    assert words[1::2] == ["age (years)=0:9999", "Father's edu=0:9999", "pay=0:9999"]
    assert main([*show, *words]) == 0
    assert "flags:" not in capsys.readouterr().out


def test_facts_of_columns_are_those_of_pandas(table, capsys):
    assert main([*f"{SHOW} --one-hot job --drop note,gap --json".split()]) == 0
    columns = json.loads(capsys.readouterr().out)["columns"]
    assert [each["name"] for each in columns] == list(table.columns)
    assert {each["name"]: each["role"] for each in columns} == {
        "who": "client", "age": "feature", "part": "feature", "job": "one-hot",
        "note": "dropped", "gap": "dropped", "pay": "target",
    }  # fmt: skip
    for each in columns:
        column = table[each["name"]]
        assert each["distinct"] == column.nunique()
        assert each["missing"] == column.isna().sum()
        if each["type"] != "string":
            np.testing.assert_allclose(each["values"], [column.min(), column.max()])


def test_cells_that_stand_for_missing_numbers_get_their_flags(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [f"{k % 3};{k % 7}{',5' if k % 2 else ''};{k % 2}" for k in range(30)]
    lines[4] = "1;.;0"
    (tmp_path / "a.csv").write_text("\n".join(["who;age;y", *lines]))
    table = "data show --data csv:a.csv --client who --target y --decimal ,"
    show = [*table.split(), "--sep", ";"]
    assert main(show) == 0
    printed = capsys.readouterr().out
    assert "flags: --missing . --drop-missing" in printed
    with warnings.catch_warnings(action="always"):
        assert main([*show, "--missing", ".", "--drop-missing", "--range", "age=0:9"]) == 0
    printed = capsys.readouterr()
    assert "rows: 29" in printed.out
    assert "1 of 30 rows have missing values and are left out: 'age' 1" in printed.err


def test_columns_that_name_rows_are_left_out_and_levels_with_digits_encoded(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    levels = ["0", "1", "3+"]
    lines = [
        f"{k + 1 + k // 9},{k % 3},{levels[k * k % 3 if k % 4 else 2]},{10**8 + k},{k % 5}"
        for k in range(40)
    ]
    (tmp_path / "a.csv").write_text("\n".join(["rownames,who,children,child,y", *lines]))
    show = ["data", "show", "--data", "csv:a.csv", "--client", "who", "--target", "y"]
    assert main(show) == 0
    printed = capsys.readouterr().out
    assert "flags: --one-hot children --drop rownames,child\n" in printed
    assert main([*show, "--one-hot", "children", "--drop", "rownames,child"]) == 0
    printed = capsys.readouterr().out
    frame = pd.read_csv("a.csv")
    assert f"x: float32, {pd.get_dummies(frame.children).shape[1]} per row" in printed
