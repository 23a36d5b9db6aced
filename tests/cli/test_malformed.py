"""Whatever is wrong with a command, a configuration or a file: one line, exit code 2, no file."""

import signal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedjaxsim.cli import main
from fedjaxsim.runs import command

_SECONDS = 20
"""Ends a hang; nothing here takes a tenth of it."""
_SMALL = "--clients 6 --rounds 1 --local-steps 1"


class _AcceptedError(Exception):
    """A run would start now."""


@pytest.fixture
def answer(tmp_path, monkeypatch, capsys):
    """`(arguments) -> exit code`, 0 where a run would start; checks what every answer must be."""

    def accepted(*arguments, **options):
        raise _AcceptedError

    def late(*_):
        raise AssertionError(f"no answer within {_SECONDS} seconds")

    monkeypatch.setattr(command, "execute", accepted)
    monkeypatch.chdir(tmp_path)

    def ask(arguments):
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        handler = signal.signal(signal.SIGALRM, late)
        signal.alarm(_SECONDS)
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
        "run --algorithm ppsgd --local-steps 5 --out r",
        "run --batch-size 1000000000000 --out r",
        "run --noise-multiplier 1e30 --out r",
        "run --noise-multiplier 1e-160 --out r",
        "run --epsilon 1e9 --out r",
        "run --learning-rate 1e300",
        "run --clip -1 --out r",
        "run --data digits: --out r",
        "run --hidden , --model mlp --out r",
        "run --test-fraction 0 --out r",
        "run --loss squared --out r",
        "run --algorithm fedavg --lam 5 --out r",
        "run --algorithm local --epsilon 1 --out r",
        "run --algorithm ppsgd --server-optimizer adam --out r",
        "run --mu 1 --out r",
        "run --hidden 4 --out r",
        "run --passes 2 --out r",
        "run --data synthetic --alpha 1 --loss squared --out r",
        "run --partition iid --alpha 1 --out r",
        "run --bogus 3",
        "run --rounds",
        "run --rounds abc",
        "run --seed 99999999999999999999",
        "run --out /dev/null/x",
        "privacy noise --epsilon 1e-12 --sampling-rate 0.02 --rounds 100 --delta 1e-5",
        "privacy epsilon",
        "privacy",
        "bench --workloads nothing --out b",
        "compare absent",
        "tune --out t",
        "tune --wrt lam --algorithm fedavg --out t",
        "sweep absent.toml --out s",
        "bogus",
    ],
)
def test_what_cannot_be_is_refused_in_one_line(answer, command):
    assert answer(command.split()) == 2


def test_labels_that_number_no_classes_are_refused(answer, tmp_path):
    labels = np.array([0, 1000, 2000] * 4)
    np.savez(tmp_path / "a.npz", x=np.ones((12, 2)), y=labels, client=np.arange(12) // 6)
    assert answer(["run", "--data", "npz:a.npz", "--out", "r"]) == 2


@pytest.mark.parametrize(
    ("labels", "warns"), [([0, 1, 2], True), ([1, 2, 3], False), ([0, 1], False)]
)
def test_labels_that_look_like_classes_are_worth_a_warning_where_they_are_numbers(
    tmp_path, monkeypatch, capsys, labels, warns
):
    monkeypatch.setattr(command, "_run", lambda *_, **options: 0)
    path = tmp_path / "a.npz"
    np.savez(path, x=np.ones((12, 2)), y=np.resize(labels, 12), client=np.arange(12) // 6)
    assert main(["run", "--data", f"npz:{path}", "--loss", "squared"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == warns
    assert all(
        "the labels are 0 to 2, which loss squared takes for numbers" in one for one in lines
    )


def test_a_file_may_say_more_than_a_system_reads(answer, tmp_path):
    (tmp_path / "a.toml").write_text("algorithm = 'fedavg'\nlam = 5\nclients = 6\n")
    assert answer(["run", "a.toml"]) == 0


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
    """A test over so many cases, the same ones every time."""
    slow = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=cases, deadline=None, derandomize=True, database=None,
        suppress_health_check=slow,
    )  # fmt: skip


@pytest.mark.thorough
@generated(150)
@given(flag=_FLAG, value=_VALUE)
def test_any_flag_with_any_value(answer, flag, value):
    answer(["run", *_SMALL.split(), f"--{flag}", value])


@pytest.mark.thorough
@generated(100)
@given(text=_TOML, command=st.sampled_from(["run", "tune", "sweep"]))
def test_any_configuration(answer, tmp_path, text, command):
    (tmp_path / "a.toml").write_text(text, encoding="utf-8", errors="replace")
    # What is no malformed file would start here: a seed that is refused stops it before.
    stopped = [] if command == "sweep" else ["--seed", "-1"]
    if command == "sweep":
        (tmp_path / "a.toml").write_text("seed = -1\n" + text, encoding="utf-8", errors="replace")
    assert answer([command, "a.toml", *stopped, "--out", "r"]) == 2


@pytest.mark.thorough
@generated(100)
@given(content=st.binary(max_size=60), kind=st.sampled_from(["npz", "mat", "leaf"]))
def test_any_data_file(answer, tmp_path, content, kind):
    (tmp_path / "a").write_bytes(content)
    assert answer(["run", "--data", f"{kind}:a", "--out", "r"]) == 2
