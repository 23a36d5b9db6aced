import contextlib
import os
import re
import sys
import threading
import types
from typing import Any

import pytest

from fedjaxsim.callbacks import Progress
from fedjaxsim.cli.printing import print_table
from fedjaxsim.metrics import METRICS
from fedjaxsim.privacy.entries import epsilon_text
from fedjaxsim.report import progress
from fedjaxsim.report.progress import (
    Bar,
    bytes_text,
    doing,
    in_words,
)

RECORD = {"round": 5, "train_loss": 0.51234, "test_accuracy": 0.75, "epsilon": 1.2341}


def test_an_evaluation_in_words():
    assert in_words(RECORD, 12.5) == "loss 0.5123  accuracy 0.75  ε ≤ 1.2341  12.5 rounds/s"
    record = {"round": 0, "train_loss": None, "test_nmse": 1.25, "epsilon": None}
    assert in_words(record, None) == "loss –  nMSE 1.25  ε ∞"


@pytest.mark.parametrize(
    ("epsilon", "text"), [(0.0, "0"), (1.00001, "1.0001"), (0.99949, "0.99949"), (None, "∞")]
)
def test_epsilon_is_never_rounded_down(epsilon, text):
    assert epsilon_text(epsilon) == text


def test_bytes_have_a_unit_that_shows_something():
    counts = (None, 0, 999, 1000, 25_264_000, 10**9, 258_904 * 10**9, 10**15)
    texts = ["–", "0 B", "999 B", "1 kB", "25.26 MB", "1 GB", "258.9 TB", "1 PB"]
    assert [bytes_text(count) for count in counts] == texts


@contextlib.contextmanager
def watching():
    """Yield what shows an evaluation of a run of ten rounds."""
    with contextlib.ExitStack() as closing:
        progress: Any = Progress("pmtl")
        progress.run = types.SimpleNamespace(rounds=10, size=None, metrics=METRICS, closing=closing)
        progress.start(types.SimpleNamespace(round=0))
        yield lambda record, speed: progress.show([record], speed)


def test_the_first_line_whose_epsilon_is_no_tight_value_says_so(capsys):
    with watching() as show:
        for record in (
            {"round": 0, "epsilon": 0.0, "epsilon_tight": False},
            {"round": 1, "epsilon": 1.5, "epsilon_tight": False},
            {"round": 2, "epsilon": 1.7, "epsilon_tight": False},
            {"round": 10, "epsilon": 1.6, "epsilon_tight": True},
        ):
            show(record, None)
    assert [line.partition("ε ")[2] for line in capsys.readouterr().err.splitlines()[1:]] == [
        "≤ 0", "≤ 1.5 (quick bound; tight at the end)", "≤ 1.7", "≤ 1.6",
    ]  # fmt: skip


def test_without_a_terminal_there_is_one_plain_line_per_evaluation(capsys):
    with watching() as show:
        show(RECORD, None)
        show(RECORD | {"round": 10}, 3.0)
    output = capsys.readouterr()
    assert output.err.splitlines() == [
        "pmtl  compiling …",
        "pmtl  5/10  loss 0.5123  accuracy 0.75  ε ≤ 1.2341",
        "pmtl  10/10  loss 0.5123  accuracy 0.75  ε ≤ 1.2341  3 rounds/s",
    ]
    assert output.out == ""


def test_what_is_slow_is_said_without_a_terminal_too(capsys, monkeypatch):
    with doing("writing"):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress, "SLOW", 0.0)
    for quiet, said in ((False, "writing [a] …\n"), (True, "")):
        with doing("writing [a]", quiet=quiet):
            for timer in {*threading.enumerate()} - {threading.current_thread()}:
                if isinstance(timer, threading.Timer):
                    timer.join()
        assert capsys.readouterr() == ("", said)
    with doing("checking") as say_how_far:
        say_how_far("1 of 3")
    assert "checking: 1 of 3 …\n" in capsys.readouterr().err


def test_the_table_has_the_columns_of_what_was_measured(capsys):
    common = {
        "epsilon": None, "epsilon_replace": None, "delta": 1e-3, "rounds": 3,
        "rounds_planned": 3, "interrupted": False, "rounds_per_second": 2.0,
    }  # fmt: skip
    print_table(
        [
            {"run": "a", "test_accuracy": 0.5, "test_accuracy_p10": 0.25, **common},
            {"run": "b", "test_nmse": 2.0, **common, "interrupted": True, "rounds_planned": 9},
        ]
    )
    above, header, _, first, second = (
        line.split() for line in capsys.readouterr().out.splitlines()
    )
    assert above == ["accuracy", "nMSE", "ε", "ε", "rounds"]
    quality = ["client", "mean", "p10", "p90", "pooled", "p10", "p90"]
    assert header == ["run", *quality, "zero-out", "replace", "δ", "rounds", "per", "s"]
    assert first == ["a", "0.500", "0.250", "–", "–", "–", "–", "∞", "∞", "0.001", "3", "2"]
    assert second[4] == "2.000"
    assert second[-4:] == ["3", "of", "9", "2"]


def test_the_table_has_the_epsilon_of_examples_where_some_run_protects_them(capsys):
    row = {
        "epsilon": None, "epsilon_replace": None, "delta": 1e-3, "rounds": 3,
        "rounds_per_second": 2.0, "test_accuracy": 0.94,
    }  # fmt: skip
    protected = {
        "example_epsilon": 1.0, "example_epsilon_replace": 2.5, "example_delta": 0.100001,
    }  # fmt: skip
    print_table([{"run": "a", **row}, {"run": "b", **row, **protected}])
    above, header, _, first, second, remark = capsys.readouterr().out.splitlines()
    assert above.split()[:7] == ["accuracy", "ε", "ε", "example", "ε", "example", "ε"]
    assert header.split()[5:11] == ["zero-out", "replace", "δ", "zero-out", "replace", "δ"]
    # The δ of clients is not that of examples, which is rounded up.
    assert first.split()[4:10] == ["∞", "∞", "0.001", "–", "–", "–"]
    assert second.split()[4:10] == ["∞", "∞", "0.001", "1", "2.5", "0.10001"]
    assert remark.startswith("– among example ε: no single example is protected")
    print_table([{"run": "b", **row, **protected, "example_epsilon": None}])
    *_, alone = capsys.readouterr().out.splitlines()
    assert alone.split()[4:9] == ["∞", "∞", "0.001", "∞", "2.5"]  # protected, and no ε is known


def test_below_the_table_is_who_has_no_value(capsys):
    row = {
        "epsilon": 0, "epsilon_replace": 0, "delta": 1e-3, "rounds": 3, "rounds_planned": 3,
        "interrupted": False, "rounds_per_second": 2.0, "test_accuracy": 0.94, "test_auc": 0.7,
    }  # fmt: skip
    row |= {"test_auc_undefined": 19}
    print_table([{"run": "a", **row}, {"run": "b", **row}])
    *_, above, header, _, _, _, last = capsys.readouterr().out.splitlines()
    assert above.split()[:2] == ["accuracy", "aAUC"]
    assert header.split()[:7] == ["run", "client", "mean", "p10", "p90", "client", "mean"]
    assert last == "clients left out of aAUC: 19"
    other = row | {"test_auc_undefined": 5, "test_accuracy": None, "test_failed": 2}
    print_table([{"run": "a", **row}, {"run": "b", **other}])
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "clients whose model predicts NaN, which leaves a run without a value: 2 (b)",
        "clients left out of aAUC: 19 (a), 5 (b)",
    ]
    print_table(
        [{"run": "a", "data": "csv:x/patients.csv", "clients": 3, **row}, {"run": "b", **row}]
    )
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("a "))
    assert line.split()[:4] == ["a", "patients,", "3", "clients"]


def on_a_terminal(show, monkeypatch):
    """What is on a terminal of 120 columns after some work, without colours."""
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as stderr, monkeypatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "120")
        patch.setattr(sys, "stderr", stderr)
        show()
    shown = b""
    with contextlib.suppress(OSError):  # at its end, as nobody has the terminal any more
        while part := os.read(reader, 2**16):
            shown += part
    os.close(reader)
    return re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", shown.decode())


def test_on_a_terminal_a_bar_is_drawn_over_itself(monkeypatch):
    def show():
        with Bar("pmtl", 10) as bar:
            bar.show(10, "loss 0.5  ε ≤ 2")

    shown = on_a_terminal(show, monkeypatch)
    first, *_, last = shown.rstrip().split("\r")
    assert re.fullmatch(r"pmtl \S+ 0/10 \S+ compiling …", first)
    assert re.fullmatch(r"pmtl \S+ 10/10 \S+ loss 0.5  ε ≤ 2", last)
    assert shown.count("\n") == 1


def test_on_a_terminal_what_takes_long_is_said_at_once(monkeypatch):
    def show():
        with doing("reading"):
            pass

    assert "reading …" in on_a_terminal(show, monkeypatch)


def test_a_quiet_bar_prints_nothing(capsys):
    for quiet, printed in ((True, ""), (False, "run  compiling …\nrun  1/3  loss 2\n")):
        with Bar("run", 3, quiet=quiet) as bar:
            bar.show(1, "loss 2")
        assert capsys.readouterr() == ("", printed)


def test_a_run_among_many_prints_its_last_line_alone(capsys):
    with Bar("runs 1–4", 3, only_last=True) as bar:
        for done in range(4):
            bar.show(done, "9 rounds/s")
    assert capsys.readouterr().err == "runs 1–4  3/3  9 rounds/s\n"
