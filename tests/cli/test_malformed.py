"""Whatever is wrong with a command, a configuration or a file: one line, exit code 2, no file."""

import os
import shlex
import shutil
import signal
import sys
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.malformed_commands import commands, make_files
from support.problems import HANGS

from fedjaxsim.cli import main, running

_SMALL = "--clients 6 --rounds 1 --local-steps 1"


class _AcceptedError(Exception):
    """A run would start now."""


def _start(*arguments, **options):
    raise _AcceptedError


@pytest.fixture
def answer(tmp_path, monkeypatch, capsys):
    """`(arguments) -> exit code`, 0 where a run would start; checks what every answer must be."""

    def late(*_):
        raise AssertionError(f"no answer within {HANGS} seconds")

    monkeypatch.setattr(running, "execute", _start)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of modules in the folder
    monkeypatch.chdir(tmp_path)

    def ask(arguments):
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        handler = signal.signal(signal.SIGALRM, late)
        signal.alarm(HANGS)
        try:
            code = main(arguments)
        except _AcceptedError:
            return 0
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, handler)
        error = capsys.readouterr().err
        assert code in (0, 2)
        if code == 2:
            assert error.startswith("fedjaxsim: error: ")
            assert error.count("\n") == 1
            assert error.endswith("\n")
            assert sorted(tmp_path.rglob("*")) == before
        return code

    return ask


@pytest.mark.parametrize(
    "command",
    [
        "bogus",
        "tune --out t",
        "tune --wrt lam --algorithm fedavg --out t",
        "sweep absent.toml --out s",
        "sweep . --out s",
        "resume .",
        "run --name= --out r",
    ],
)
def test_what_cannot_be_is_refused_in_one_line(answer, command):
    assert answer(command.split()) == 2


@pytest.mark.parametrize("count", [36, pytest.param(240, marks=pytest.mark.thorough)])
def test_malformed_commands_are_refused_in_one_line(answer, tmp_path, monkeypatch, count):
    make_files(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for _, words in commands(count):
        monkeypatch.delitem(sys.modules, "malformed", raising=False)
        assert answer(shlex.split(words)) == 2, words


@pytest.mark.parametrize(
    ("labels", "warns"), [([0, 1, 2], True), ([1, 2, 3], False), ([0, 1], False)]
)
def test_labels_that_look_like_classes_are_worth_a_warning_where_they_are_numbers(
    tmp_path, monkeypatch, capsys, labels, warns
):
    monkeypatch.setattr(running, "_run", lambda *_, **options: 0)
    path = tmp_path / "a.npz"
    np.savez(path, x=np.ones((12, 2)), y=np.resize(labels, 12), client=np.arange(12) // 6)
    assert main(["run", "--data", f"npz:{path}", "--loss", "squared"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == warns
    assert all("labels" in line for line in lines)


def test_a_file_may_say_more_than_a_system_reads(answer, tmp_path):
    (tmp_path / "a.toml").write_text("algorithm = 'fedavg'\nlam = 5\nclients = 6\n")
    assert answer(["run", "a.toml"]) == 0
    assert answer(["run", "a.toml", "b.toml"]) == 2  # one file alone


_VALUE_WORDS = (
    "0 -1 1 3 nan inf -inf 1e-320 1e-160 1e-6 0.5 1e6 1e12 1e30 1e300 4294967296 "
    "99999999999999999999 true '' ü 1,2 [] -- "
)
_FLAG_WORDS = (
    "clients alpha test-fraction validation-fraction held-out-clients classes offset-scale "
    "lam mu personalization hidden rounds sampling-rate local-steps passes local-epochs "
    "batch-size learning-rate server-learning-rate clip noise-multiplier delta eval-every "
    "seed chunk-size epsilon data partition preprocess model loss algorithm bogus "
)
_SUMMARY = """{{"rounds": {}, "rounds_planned": 3, "interrupted": {}, "epsilon": {}, "delta": 1e-5,
"epsilon_replace": null, "rounds_per_second": 1.5, "test_accuracy": {}, "round": {}}}"""
_TOKEN = st.sampled_from(["1", "null", '"a"', "[]", "{}", "true", "NaN", "1e999"])
_JSON = st.one_of(
    st.text(max_size=20, alphabet=st.characters(exclude_categories=["Cs"])),
    st.sampled_from(["null", "1", "[]", "{}", "[[]]", '{"a": 1}', '[{"a": 1}]', "{}\n{}"]),
    st.tuples(*5 * [_TOKEN]).map(lambda tokens: _SUMMARY.replace("\n", " ").format(*tokens)),
)
_FLAG = st.sampled_from(_FLAG_WORDS.split())
_VALUE = st.sampled_from(_VALUE_WORDS.split())
_TOML = st.one_of(
    st.text(max_size=30),
    st.builds("{} = {}".format, _FLAG, _VALUE),
    st.builds("[{}]\n{} = {}".format, _FLAG, _FLAG, _VALUE),
    st.builds("[sweep]\n{} = [{}, {}]".format, _FLAG, _VALUE, _VALUE),
    st.just("a = " + "[" * 5000),
)


def generated(cases):
    """Return a decorator for `cases` cases, the same ones every time."""
    slow = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=cases, deadline=None, derandomize=True, database=None,
        suppress_health_check=slow,
    )  # fmt: skip


@pytest.mark.thorough
@generated(40)
@given(flag=_FLAG, value=_VALUE)
def test_any_flag_with_any_value(answer, flag, value):
    answer(["run", *_SMALL.split(), f"--{flag}", value])


@pytest.mark.thorough
@generated(100)
@given(text=_TOML, command=st.sampled_from(["run", "tune", "sweep"]))
def test_any_configuration(answer, tmp_path, text, command):
    (tmp_path / "a.toml").write_text(text, encoding="utf-8", errors="replace")
    # A file that is not malformed would start a run; the refused seed stops it before.
    stopped = [] if command == "sweep" else ["--seed", "-1"]
    if command == "sweep":
        (tmp_path / "a.toml").write_text("seed = -1\n" + text, encoding="utf-8", errors="replace")
    assert answer([command, "a.toml", *stopped, "--out", "r"]) == 2


@pytest.mark.thorough
@generated(12)
@given(content=st.binary(max_size=60), kind=st.sampled_from(["npz", "mat", "leaf"]))
def test_any_data_file(answer, tmp_path, content, kind):
    (tmp_path / "a").write_bytes(content)
    assert answer(["run", "--data", f"{kind}:a", "--out", "r"]) == 2


_ARRAYS = {
    "a matrix": np.ones((6, 2)),
    "numbers": np.arange(6),
    "labels": np.arange(6) % 2,
    "negative": -np.arange(6),
    "huge": np.full(6, 2**62),
    "bytes": np.full(6, 255, np.uint8),
    "not a number": np.full((6, 2), np.nan),
    "infinite": np.full(6, np.inf),
    "complex": np.full((6, 2), 1j),
    "strings": np.array(list("abcdef")),
    "letters": np.array([b"a"] * 6),
    "dates": np.zeros(6, "M8[D]"),
    "booleans": np.zeros(6, bool),
    "records": np.zeros(6, [("a", float)]),
    "halves": np.ones((6, 2), np.float16),
    "quads": np.ones((6, 2), np.longdouble),
    "one": np.ones((1, 2)),
    "none": np.ones((0, 2)),
    "no columns": np.ones((6, 0)),
    "a number": np.float64(1),
    "a picture": np.ones((6, 2, 2)),
}
_ARRAY = st.sampled_from(sorted(_ARRAYS))


@pytest.mark.thorough
@generated(100)
@given(
    arrays=st.dictionaries(
        st.sampled_from(["x", "y", "client", "counts", "names", "split", "public", "z", "file"]),
        _ARRAY,
        max_size=5,
    ),
    loss=st.sampled_from(["softmax", "one-vs-all", "logistic", "squared"]),
    more=st.sampled_from([[], ["--partition", "iid"], ["--partition", "column:z"]]),
)
@example(arrays={"x": "a matrix", "y": "labels", "client": "numbers"}, loss="softmax", more=[])
def test_any_arrays(answer, tmp_path, arrays, loss, more):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name, kind in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.save(file, _ARRAYS[kind])
    few = ["--local-steps", "1", "--rounds", "1"]
    answer(["run", "--data", "npz:a.npz", "--loss", loss, *few, *more])


_NAMES = st.one_of(st.text(max_size=12), st.sampled_from(["a" * 300, "ü", "a/b", "..", ".", " "]))


@pytest.mark.thorough
@generated(60)
@given(name=_NAMES, kind=st.sampled_from(["file", "folder", "nothing"]))
def test_any_place_for_results(answer, tmp_path, name, kind):
    """Only accepted settings may make the directory."""
    place = tmp_path / "r"
    if kind == "file":
        place.touch()
    elif kind == "folder":
        place.mkdir(exist_ok=True)
        (place / "notes").touch()
    try:
        answer(["run", *_SMALL.split(), "--seed", "-1", "--out", f"r/{name}"])
    finally:
        shutil.rmtree(place, ignore_errors=True)
        place.unlink(missing_ok=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("kind", ["npz", "leaf", "mat"])
def test_a_file_without_permission_is_refused(answer, tmp_path, kind):
    (tmp_path / "a").touch(mode=0)
    assert answer(["run", "--data", f"{kind}:a", "--out", "r"]) == 2


_PRIVACY = st.sampled_from(["epsilon", "noise", "rounds", "rate"])
_PRIVACY_WORDS = (
    "noise-multiplier rounds delta sampling-rate clients capacity epsilon sampling adjacency out "
)
_PRIVACY_FLAGS = st.sampled_from(_PRIVACY_WORDS.split())


@pytest.mark.thorough
@generated(50)
@given(question=_PRIVACY, changes=st.dictionaries(_PRIVACY_FLAGS, _VALUE, min_size=1, max_size=2))
@example(question="rounds", changes={"noise-multiplier": "1e6"})
@example(question="rounds", changes={"epsilon": "1e6"})
@example(question="rounds", changes={"noise-multiplier": "1e6", "epsilon": "1e-6"})
@example(question="epsilon", changes={"noise-multiplier": "1e3", "rounds": "2147483647"})
def test_any_privacy_question(answer, question, changes):
    plan = {"sampling-rate": "0.1", "delta": "1e-5", "rounds": "5"}
    if question in ("noise", "rounds", "rate"):
        plan["epsilon"] = "1"
    if question != "noise":
        plan["noise-multiplier"] = "2"
    if question == "rounds":
        del plan["rounds"]
    if question == "rate":
        del plan["sampling-rate"]
    plan |= changes
    answer(["privacy", *(word for k, v in plan.items() for word in (f"--{k}", v))])


@pytest.mark.thorough
@generated(30)
@given(flag=st.sampled_from(["runs", "canaries", "delta", "seed"]), value=_VALUE)
def test_any_audit(answer, monkeypatch, flag, value):
    # Settings that pass all checks would start their runs now.
    monkeypatch.setattr("fedjaxsim.audit.canaries._watched", _start)
    answer(["audit", *_SMALL.split(), "--noise-multiplier", "1", f"--{flag}", value])


@pytest.mark.thorough
@generated(40)
@given(content=_JSON, file=st.sampled_from(["summary.json", "metrics.jsonl"]))
def test_any_results(answer, tmp_path, content, file):
    folder = tmp_path / "r"
    folder.mkdir(exist_ok=True)
    fine = _SUMMARY.replace("\n", " ").format(1, "true", 1, 1, 1)
    for name in ("summary.json", "metrics.jsonl"):
        (folder / name).write_text(fine)
    (folder / file).write_text(content, encoding="utf-8")
    answer(["compare", "r"])
    answer(["compare", "r", "--out", "c.png"])
    (tmp_path / "c.png").unlink(missing_ok=True)
