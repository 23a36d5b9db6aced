"""Processes meet, and hear of those that are lost."""

import queue
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from problems import HANGS
from several import free_port

from fedjaxsim.engine import liveness
from fedjaxsim.engine.liveness import Peers, find, gather, greet, listen


@pytest.fixture
def meet():
    """Return what each process comes to: its links, or its error.

    The first argument is the number of processes of process 0, then follow number and number of
    processes of each other.
    """

    def come(port, number, count):
        link = find("127.0.0.1", port, HANGS)
        links.append(link)
        greet(link, number, count)
        return link

    links = []

    def meeting(count, *others) -> list[Any]:
        port, results = free_port(), []
        listener = listen(port)
        with ThreadPoolExecutor(8) as pool:
            all_: list[Any] = [pool.submit(gather, listener, count)]
            for each in others:
                all_.append(pool.submit(come, port, *each))
            for each in all_:
                error = each.exception(HANGS)
                results.append(str(error) if error else each.result())
        links.extend(results[0].values() if isinstance(results[0], dict) else ())
        with pytest.raises(OSError, match="refused"):  # the port is free for JAX
            socket.create_connection(("127.0.0.1", port), 1)
        return results

    yield meeting
    for each in links:
        each.close()


def test_processes_meet_in_any_order(meet):
    links, second, first = meet(3, (2, 3), (1, 3))
    for number, link in ((1, first), (2, second)):
        links[number].sendall(b"x")
        assert link.recv(1) == b"x"


def test_a_process_that_does_not_come_is_named_to_all(meet, monkeypatch):
    monkeypatch.setattr(liveness, "TOGETHER", 0.5)
    assert meet(3, (2, 3)) == ["process 1 of 3 did not come within 0.5 seconds"] * 2


def test_all_must_be_started_for_one_number_of_processes(meet):
    said = "process 1 was started with processes 3, process 0 with 2"
    assert meet(2, (1, 3)) == [said] * 2


def test_a_stranger_is_no_process_0_and_a_taken_port_is_named():
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        with ThreadPoolExecutor() as pool:
            accepted = pool.submit(stranger.accept)
            link = find("127.0.0.1", port, HANGS)
            with accepted.result()[0] as answer:
                answer.sendall(b"HTTP/1.1 400\n")
                with pytest.raises(ValueError, match=f":{port} is not process 0"):
                    greet(link, 1, 2)
        with pytest.raises(ValueError, match=f"port {port}"):
            listen(port)


@pytest.fixture
def peers():
    """Return the sockets of processes 1 and 2 at process 0, and a queue of its news."""
    pairs, news = {1: socket.socketpair(), 2: socket.socketpair()}, queue.Queue()
    watched = Peers({number: here for number, (here, _) in pairs.items()}, news.put)
    there = {number: far for number, (_, far) in pairs.items()}
    yield watched, there, news
    watched.leave()
    for here, far in pairs.values():
        far.close()
        here.close()


def heard(link, word):
    """Wait for a line that begins with a word."""
    link.settimeout(HANGS)
    return next(line for line in link.makefile() if line.startswith(word))


def test_the_end_of_a_process_is_told_to_all_others(peers):
    _, there, news = peers
    there[1].close()
    assert news.get(timeout=HANGS) == "process 1 has ended"
    assert heard(there[2], "lost") == "lost process 1 has ended\n"


def test_a_failure_waits_for_the_failures_of_others_and_a_goodbye_is_no_loss(peers):
    watched, there, news = peers
    there[2].sendall(b"bye\n")
    there[1].sendall(b"\nfailed process 1 has failed with exit code 2\n")
    there[1].close()
    assert watched.await_news(HANGS) == "process 1 has failed with exit code 2"
    assert news.empty()


def test_a_silent_process_is_lost(peers, monkeypatch):
    _, there, news = peers
    monkeypatch.setattr(liveness, "SILENCE", 1)
    there[1].sendall(b"bye\n")
    assert news.get(timeout=HANGS) == "process 2 has not answered for 1 seconds"
