"""The name of data, KIND or KIND:PATH, which one class reads."""

from pathlib import Path

import pytest

from fedjaxsim.data.readers import DataSpec
from fedjaxsim.runs.parts import absolute


@pytest.mark.parametrize(
    ("text", "kind", "path", "known"),
    [
        ("digits", "digits", "", True),
        ("digits:", "digits", "", False),
        ("csv:a/b.csv", "csv", "a/b.csv", True),
        ("csv:C:/b.csv", "csv", "C:/b.csv", True),
        ("csv:", "csv", "", False),
        ("csv", "csv", "", False),
        ("cvs:a.csv", "cvs", "a.csv", False),
        ("cvs:a", "cvs:a", "", True),
        ("folder/mine.py:rows", "folder/mine.py:rows", "", True),
    ],
)
def test_a_name_of_data_has_a_kind_and_a_path(text, kind, path, known):
    spec = DataSpec(text)
    assert (spec.kind, spec.path, spec.is_known) == (kind, path, known)


def test_a_name_on_the_hub_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert DataSpec("hf:org/name").file is None
    assert absolute("hf:org/name") == "hf:org/name"
    Path("org/name").mkdir(parents=True)
    assert absolute("hf:org/name") == f"hf:{tmp_path}/org/name"
    assert absolute("csv:x.csv") == f"csv:{tmp_path}/x.csv"
    assert DataSpec("csv:a/patients.csv").short_name == "patients"
    assert DataSpec("own:reader").short_name == "reader"
    assert DataSpec("digits").short_name == "digits"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cvs:a.csv", "data must be digits, .*did you mean 'csv:a.csv'"),
        ("a.parquet", "data must be digits, .*did you mean 'parquet:a.parquet'"),
        ("digit", "data must be digits, .*did you mean 'digits'"),
        ("csv", "data must be csv:PATH, got 'csv'"),
        ("digits:a", "data must be digits, got 'digits:a'"),
    ],
)
def test_another_name_is_refused_with_the_nearest_one(text, message):
    with pytest.raises(ValueError, match=message):
        DataSpec(text).require_known()
