"""Connections of ``onmt_server``: slow, silent and greedy clients do not stop it and are closed."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from nmt.translate.connections import ConnectionLimits, Server, bind

Address = tuple[str, int]
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n"
CLOSING = HEALTH + b"Connection: close\r\n\r\n"
POST = b"POST /translate HTTP/1.1\r\nHost: a\r\n"


class Application:
    """``/translate`` answers when `finish` is set; ``/large`` has a large answer; others answer at once."""

    def __init__(self) -> None:
        self.finish, self.released = threading.Event(), threading.Event()

    def __call__(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request with what it sent."""
        start("200 OK", [("Content-Type", "text/plain")])
        if environment["PATH_INFO"] == "/translate":
            self.finish.wait(60)
        if environment["PATH_INFO"] == "/large":
            return self.large()
        return [b"ok " + environment["wsgi.input"].read()]

    def large(self) -> Iterator[bytes]:
        """Yield 256 MB."""
        try:
            for _ in range(256):
                yield bytes(1 << 20)
        finally:
            self.released.set()


Serve = Callable[..., Address]


@pytest.fixture
def application() -> Application:
    """The application that is served."""
    return Application()


@pytest.fixture
def serve(application: Application) -> Iterator[Serve]:
    """Serve the application with limits; returns the address."""
    with contextlib.ExitStack() as stack:

        def started(**limits: float) -> Address:
            listening = stack.enter_context(bind("127.0.0.1", 0))
            server = Server(
                application,
                listening,
                ConnectionLimits(**limits),  # type: ignore[arg-type]
                lambda path: path in ("/translate", "/large"),
                1 << 20,
            )
            thread = threading.Thread(target=server.serve, daemon=True)
            thread.start()
            stack.callback(thread.join, 20)
            stack.callback(server.trigger.pull_trigger, lambda: server.asyncore.close_all(server._map))
            stack.callback(application.finish.set)
            return listening.getsockname()[:2]

        yield started


def answer_to(address: Address, request: bytes, seconds: float = 5) -> bytes:
    """Send a request on a new connection; returns what arrives until the server closes it."""
    with socket.create_connection(address, timeout=seconds) as client:
        client.sendall(request)
        return rest_of(client)


def rest_of(client: socket.socket) -> bytes:
    """Return what arrives until the server closes a connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := client.recv(1 << 16):
            received += part
    return received


def trickle(clients: list[socket.socket], part: bytes, stop: threading.Event) -> None:
    """Send a part on every connection, several times a second."""
    while not stop.wait(0.2):
        for client in clients:
            with contextlib.suppress(OSError):
                client.sendall(part)


def test_slow_clients_do_not_stop_others(serve: Serve) -> None:
    """More slow clients than connections, from the address of the others: others are always answered."""
    address = serve(header_seconds=2, connections=20, connections_by_address=15)
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(address, timeout=5)) for _ in range(40)]
        for client in slow:
            with contextlib.suppress(ConnectionError):
                client.sendall(HEALTH)
        trickler = threading.Thread(target=trickle, args=(slow, b"X", stop), daemon=True)
        trickler.start()
        try:
            for _ in range(12):
                assert b"200 OK" in answer_to(address, CLOSING)
                time.sleep(0.3)
            closed = [rest_of(client) for client in slow]
        finally:
            stop.set()
            trickler.join(10)
    assert len(closed) == 40 and any(b"408 Request Timeout" in answer for answer in closed)


@pytest.mark.parametrize(
    ("start", "part"),
    [
        pytest.param(b"", b"\r\n\r\n", id="blank lines"),
        pytest.param(b"", b"", id="silence"),
        pytest.param(HEALTH, b"X", id="header"),
        pytest.param(HEALTH + b"\r\n", b"", id="silence after an answer"),
        pytest.param(POST + b"Content-Length: 1000\r\n\r\n", b"[", id="body"),
        pytest.param(POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n[\r\n", id="chunks"),
        pytest.param(POST + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n", b"", id="continue"),
    ],
)
def test_time_is_limited_in_total(start: bytes, part: bytes, serve: Serve) -> None:
    """Bytes now and then do not extend the time of a client."""
    address = serve(header_seconds=0.5, body_seconds=0.5, idle_seconds=0.5)
    stop = threading.Event()
    with socket.create_connection(address, timeout=5) as client:
        client.sendall(start)
        trickler = threading.Thread(target=trickle, args=([client], part, stop), daemon=True)
        trickler.start()
        try:
            rest_of(client)  # raises TimeoutError unless the server closes the connection
        finally:
            stop.set()
            trickler.join(10)
    assert b"200 OK" in answer_to(address, CLOSING)


def test_clients_that_do_not_read_are_closed(serve: Serve, application: Application) -> None:
    """The thread of a large answer is released when its client does not read."""
    address = serve(answer_seconds=0.5)
    with socket.create_connection(address, timeout=5) as client:
        client.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        assert application.released.wait(10)
    assert b"200 OK" in answer_to(address, CLOSING)


def test_long_requests_do_not_delay_others(serve: Serve, application: Application) -> None:
    """Whether the server is alive is answered while all threads translate, and translations end well."""
    address = serve(answer_seconds=0.5, idle_seconds=0.5)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address, timeout=5)) for _ in range(12)]
        for client in clients:
            client.sendall(POST + b"Connection: close\r\nContent-Length: 2\r\n\r\n[]")
        for _ in range(4):
            assert b"200 OK" in answer_to(address, CLOSING)
            time.sleep(0.5)
        application.finish.set()
        assert all(rest_of(client).endswith(b"[]") for client in clients)


def test_refused_connections_are_told(serve: Serve, application: Application) -> None:
    """A connection is refused only if all others of its address are being answered."""
    address = serve(connections_by_address=2)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address, timeout=5)) for _ in range(2)]
        for client in clients:
            client.sendall(POST + b"Connection: close\r\n\r\n")
        time.sleep(0.5)
        with socket.create_connection(address, timeout=5) as refused:
            head, body = rest_of(refused).split(b"\r\n\r\n")
        assert b" 503 " in head and json.loads(body)["status"] == "error"
        application.finish.set()
        assert all(b"200 OK" in rest_of(client) for client in clients)


@pytest.mark.parametrize(
    ("request_", "answers"),
    [
        pytest.param(b"GET /health HTTP/1.0\r\n\r\n", [b"200 OK"], id="HTTP/1.0"),
        pytest.param((HEALTH + b"\r\n") * 2 + CLOSING, [b"200 OK"] * 3, id="pipelined"),
        pytest.param(
            b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            b"3\r\nabc\r\n0\r\n\r\n",
            [b"200 OK", b"ok abc"],
            id="chunked",
        ),
        pytest.param(HEALTH + b"X: " + b"x" * (1 << 17) + b"\r\n\r\n", [b"431 "], id="large header"),
        pytest.param(POST + b"Content-Length: 99999999\r\n\r\n", [b"413 "], id="large body"),
        pytest.param(POST + b"Content-Length: x\r\n\r\n", [b"400 "], id="length"),
        pytest.param(b"\x16\x03\x01\r\n\r\n", [b"400 "], id="TLS"),
    ],
)
def test_forms_of_requests(request_: bytes, answers: list[bytes], serve: Serve) -> None:
    """Valid ones are answered, others rejected with their status; the server goes on."""
    address = serve()
    found = answer_to(address, request_)
    for answer in set(answers):
        assert found.count(answer) == answers.count(answer)
    assert b"200 OK" in answer_to(address, CLOSING)
