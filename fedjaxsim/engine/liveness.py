"""The meeting of several processes, and news of those that end.

JAX's service learns that a process has ended when a computation fails, or it ends all others with
stack traces. So every process keeps a TCP connection to process 0, over which both send a line each
second: an empty one, or how the sender ends. Process 0 passes bad news on.
"""

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

TOGETHER = 50.0
"""Seconds for which process 0 waits for the others, and they for process 0."""
SILENCE = 30
"""Seconds without a line after which a process counts as lost."""
_GRACE = 10
"""Seconds in which a process may fail by itself of what has made another one fail."""
_MOST = 4096
"""Most bytes of a line."""


def listen(port: int) -> socket.socket:
    """Return the listening socket of process 0.

    Raises:
      ValueError: if the port is taken.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ValueError(f"port {port} of the coordinator: {error.strerror}") from None
    return listener


def gather(listener: socket.socket, count: int) -> dict[int, socket.socket]:
    """Wait in process 0 for all others, close the listener, and let all begin.

    Args:
      listener: from `listen`.
      count: number of processes.

    Returns:
      The connections to the others, by their numbers.

    Raises:
      ValueError: in all processes, if one does not come or was started for another number.
    """
    links: dict[int, socket.socket] = {}
    end = time.monotonic() + TOGETHER
    try:
        with listener:
            while absent := sorted(set(range(1, count)) - set(links)):
                listener.settimeout(max(end - time.monotonic(), 0.01))
                try:
                    link, _ = listener.accept()
                except TimeoutError:
                    raise ValueError(
                        f"process {absent[0]} of {count} did not come within {TOGETHER:g} seconds"
                    ) from None
                hello = _receive(link, 5.0)
                number, wanted = hello.get("process"), hello.get("processes")
                if not isinstance(number, int):
                    link.close()
                elif number in links or (number not in absent and wanted == count):
                    _send(link, {"refused": f"there is a process {number} of this run already"})
                    link.close()
                else:
                    links[number] = link
                    if wanted != count:
                        raise ValueError(
                            f"process {number} was started with processes {wanted}, process 0 with "
                            f"{count}"
                        )
    except ValueError as error:
        for link in links.values():
            _send(link, {"refused": str(error)})
            link.close()
        raise
    for link in links.values():
        _send(link, {"begin": True})
    return links


def greet(link: socket.socket, process: int, count: int) -> None:
    """Announce another process to process 0, and wait until all are there.

    Raises:
      ValueError: if process 0 refuses, or something else answers.
    """
    _send(link, {"process": process, "processes": count})
    answer = _receive(link, TOGETHER + 5)
    if "begin" not in answer:
        address = "{}:{}".format(*link.getpeername()[:2])
        link.close()
        stranger = f"what answers at {address} is not process 0 of this run"
        raise ValueError(answer.get("refused", stranger))


def find(host: str, port: int, seconds: float) -> socket.socket:
    """Connect to a listener that may still have to start.

    Raises:
      ValueError: if there is none in time.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((host, port), seconds)
        except OSError as error:
            if isinstance(error, socket.gaierror) or time.monotonic() > end:
                why = error.strerror or error
                raise ValueError(f"no coordinator at {host}:{port}: {why}") from None
            time.sleep(0.1)


def bridge(host: str, port: int) -> int:
    """Return a local port whose connections lead to another one, and outlast it.

    JAX's client ends its process, in ten lines, when the connection to process 0 breaks. Behind the
    bridge it does not learn of that, and `Peers` names the process that has ended.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_lead, args=(listener, host, port), daemon=True).start()
    return listener.getsockname()[1]


def _lead(listener: socket.socket, host: str, port: int) -> None:
    with contextlib.suppress(ValueError):
        while True:
            near, _ = listener.accept()
            far = find(host, port, TOGETHER)
            far.settimeout(None)
            for ends in ((near, far), (far, near)):
                threading.Thread(target=_copy, args=ends, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until the source ends; the thread of the other direction keeps both sockets open."""
    with contextlib.suppress(OSError):
        while content := source.recv(1 << 16):
            target.sendall(content)


def _send(link: socket.socket, content: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        link.sendall(f"{json.dumps(content)}\n".encode())


def _receive(link: socket.socket, seconds: float) -> dict[str, Any]:
    """Receive a line of JSON; whatever else comes, or nothing in time, is an empty object."""
    link.settimeout(seconds)
    line = b""
    with contextlib.suppress(OSError, ValueError):
        while not line.endswith(b"\n") and len(line) < _MOST and (byte := link.recv(1)):
            line += byte
        content = json.loads(line)
        return content if isinstance(content, dict) else {}
    return {}


class Peers:
    """The connections to other processes, watched by a thread.

    Args:
      links: connected sockets, by the number of the process at their end.
      on_loss: called in the thread with a sentence on the first process that is lost.
    """

    def __init__(self, links: Mapping[int, socket.socket], on_loss: Callable[[str], None]):
        self._links, self._on_loss = dict(links), on_loss
        self._silent, self._read = dict.fromkeys(links, 0), dict.fromkeys(links, b"")
        self._news, self._left, self._heard, self._ends = "", 0, threading.Event(), False
        threading.Thread(target=self._watch, daemon=True).start()

    def await_news(self, seconds: float) -> str:
        """Wait for a sentence on a process that is lost, and return it; empty without one."""
        self._heard.wait(seconds)
        return self._news

    def leave(self, failure: str = "") -> None:
        """Tell the others that this process ends.

        Args:
          failure: sentence on how it fails; empty at the end of its work.
        """
        self._ends = True
        self._tell(f"failed {failure}" if failure else "bye")

    def _tell(self, line: str) -> None:
        for link in list(self._links.values()):
            with contextlib.suppress(OSError):
                link.sendall(f"{line}\n".encode())

    def _watch(self) -> None:
        """Read lines and count seconds. If this process itself was stopped, that counts as one."""
        with selectors.DefaultSelector() as selector:
            for number, link in self._links.items():
                link.settimeout(1.0)
                selector.register(link, selectors.EVENT_READ, number)
            last = time.monotonic()
            while self._links or self._left:
                for key, _ in selector.select(1.0):
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                        self._links.pop(key.data).close()
                if time.monotonic() - last >= 1.0:
                    last = time.monotonic()
                    self._count()

    def _count(self) -> None:
        """Count a second."""
        if not self._ends:
            self._tell("")
        for number in self._links:
            self._silent[number] += 1
            if self._silent[number] > SILENCE:
                self._lose(f"process {number} has not answered for {SILENCE} seconds")
        self._left = max(self._left - 1, 0)
        if self._news and not self._left:
            self._lose(self._news)

    def _hear(self, number: int) -> bool:
        """Read lines of a process; return whether it will send more."""
        content = b""
        with contextlib.suppress(OSError):
            content = self._links[number].recv(_MOST)
        *lines, self._read[number] = (self._read[number] + content).split(b"\n")
        self._silent[number] = 0
        for line in lines:
            word, _, rest = line.decode(errors="replace").partition(" ")
            if word == "bye":
                return False
            if word == "lost":
                self._lose(rest)
            if word == "failed" and not self._news:
                self._news, self._left = rest, _GRACE
                self._heard.set()
                if 0 not in self._links:  # process 0 is the only one that all others hear
                    self._tell(f"failed {rest}")
        if not content and not self._news:
            self._lose(f"process {number} has ended")
        return bool(content)

    def _lose(self, news: str) -> None:
        if self._ends:
            return
        self._news = news
        self._heard.set()
        self._tell(f"lost {news}")
        self._on_loss(news)
