"""Signals stop commands after the rounds in flight, or at once."""

import ctypes
import functools
import itertools
import operator
import os
import queue
import signal
import subprocess
import sys
import threading

import pytest
from support.problems import HANGS

from fedjaxsim import signals
from fedjaxsim.signals import NAMES, end_on_signal, stop_on_signal, stopped


@pytest.fixture(autouse=True)
def answers_to_hangups():
    """Undo what nohup has done."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", NAMES)
def test_a_signal_sets_the_event_and_the_old_handler_comes_back(capfd, number):
    before = signal.getsignal(number)
    threads = threading.active_count()
    with stop_on_signal() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.wait(HANGS)
    assert signal.getsignal(number) is before
    assert threading.active_count() == threads
    assert f"{NAMES[number]} again ends at once" in capfd.readouterr().err
    assert stopped([0, stop.number]) == (NAMES[number], 128 + number)


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_on_signal() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert not stop.is_set()
    signal.signal(signal.SIGHUP, before)


def test_before_the_work_a_signal_ends_in_one_line_and_a_second_one_at_once(monkeypatch, capfd):
    codes = queue.Queue()
    monkeypatch.setattr(signals.os, "_exit", codes.put)
    with end_on_signal():
        os.kill(os.getpid(), signal.SIGTERM)
        assert codes.get(timeout=HANGS) == 143
    assert capfd.readouterr().err == "fedjaxsim: ended by SIGTERM\n"
    with stop_on_signal(lambda: "round 3 is kept") as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.wait(HANGS)
        os.kill(os.getpid(), signal.SIGINT)
        assert codes.get(timeout=HANGS) == 130
    assert capfd.readouterr().err.endswith("fedjaxsim: ended by Ctrl-C; round 3 is kept\n")
    assert not any(isinstance(each, threading.Timer) for each in threading.enumerate())


def test_a_round_that_does_not_return_ends_the_command(monkeypatch, capfd):
    codes = queue.Queue()
    monkeypatch.setattr(signals.os, "_exit", codes.put)
    monkeypatch.setattr(signals, "PATIENCE", 0.01)
    with stop_on_signal(lambda: str(1 / 0)) as stop:  # whatever fails, the process ends
        os.kill(os.getpid(), signal.SIGTERM)
        assert codes.get(timeout=HANGS) == 143
    assert (
        "ended by SIGTERM: the rounds in flight or the compilation did not"
        in capfd.readouterr().err
    )
    monkeypatch.setattr(signals, "PATIENCE", HANGS)
    with stop_on_signal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(HANGS)
        assert stop.deadline is not None
        assert not stop.deadline.finished.is_set()
        assert stop.is_set()  # read after a round, so that the command ends by itself
        assert stop.deadline.finished.is_set()
    assert codes.empty()


def test_ctrl_c_is_answered_while_the_main_thread_is_busy_in_compiled_code():
    # All of it happens inside one call of `next`, without a bytecode between two steps: no signal
    # handler of Python's can run. The main thread reads until the observer writes.
    libc, (reader, writer), byte = ctypes.CDLL(None), os.pipe(), ctypes.create_string_buffer(1)
    interrupt = functools.partial(libc.kill, os.getpid(), int(signal.SIGINT))
    read = functools.partial(libc.read, reader, byte, ctypes.c_size_t(1))
    calls = itertools.chain([interrupt], itertools.repeat(read))
    noticed = []
    with stop_on_signal() as stop:

        def observe():
            noticed.append(stop.wait(HANGS))
            os.write(writer, b"x")

        observer = threading.Thread(target=observe)
        observer.start()
        next(filter((1).__eq__, map(operator.call, calls)))
        observer.join()
    os.close(reader)
    os.close(writer)
    assert noticed == [True]


def test_a_second_signal_ends_a_round_that_never_returns():
    endless = """if True:
        import jax
        from fedjaxsim.signals import stop_on_signal
        round_ = jax.jit(lambda x: jax.lax.while_loop(lambda x: x > 0, lambda x: x * 3 % 7 + 1, x))
        with stop_on_signal():
            print("started", flush=True)
            round_(1).block_until_ready()
    """
    command = [sys.executable, "-c", endless]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        limit = threading.Timer(HANGS, child.kill)
        limit.start()
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == "started\n"
        child.terminate()
        assert any("again ends at once" in line for line in child.stderr)
        child.terminate()
        assert child.wait() == 143
        limit.cancel()
