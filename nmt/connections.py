"""The connections of ``onmt_server``: how long a client may take, and how many connections there may be.

waitress closes connections that send nothing for a while, and stops accepting when there are too many; one
byte now and then defeats both. Here each part of a request has a total time, and a new connection replaces
the one that has waited longest for its client.
"""

from __future__ import annotations

import contextlib
import logging
import math
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.server import TcpWSGIServer
from waitress.task import ErrorTask, ThreadedTaskDispatcher

from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import first_line

# Files that a connection may have open: its socket, and temporary files of a large request and answer.
FILES_OF_CONNECTION = 3
FILES_OF_PROCESS = 128
LARGEST_HEADER = 1 << 16


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections."""

    header_seconds: float = 10.0  # for the header of a request, from its first byte
    body_seconds: float = 60.0  # for a whole request, from its first byte
    answer_seconds: float = 60.0  # for a client to read an answer
    idle_seconds: float = 30.0  # without a request, after connecting or after the last answer
    connections: int = 512
    connections_by_address: int = 256


class _JsonErrorTask(ErrorTask):  # type: ignore[misc]
    """Response to malformed or oversized HTTP requests."""

    def execute(self) -> None:
        error = self.request.error
        body = f'{{"error": "{error.reason}", "status": "error"}}\n'.encode()
        self.status = f"{error.code} {error.reason}"
        self.response_headers.append(("Content-Type", "application/json"))
        self.set_close_on_finish()
        self.content_length = len(body)
        self.write(body)


class _Channel(HTTPChannel):  # type: ignore[misc]
    """A connection to a client."""

    error_task_class = _JsonErrorTask

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # When the client connected or sent the first byte of a request, or when the application last wrote.
        self.since = time.monotonic()
        super().__init__(*arguments, **options)

    def received(self, data: bytes) -> bool:
        """Take bytes of a request."""
        was_idle = self.request is None
        received = bool(super().received(data))
        if was_idle and self.request is not None:  # not an empty line, nor a whole request
            self.since = time.monotonic()
        return received

    def write_soon(self, data: Any) -> int:
        """Send a part of an answer, or keep it until the client reads."""
        self.since = time.monotonic()
        return int(super().write_soon(data))

    def waiting_since(self) -> float | None:
        """Return since when the client has to send or read something; None while it is being answered."""
        return None if self.requests and not self.total_outbufs_len else self.since

    def allowed_seconds(self, limits: ConnectionLimits) -> float:
        """Return how long the client may take for what it has to do."""
        if self.total_outbufs_len:
            return limits.answer_seconds
        if self.request is None:
            return limits.idle_seconds
        return limits.body_seconds if self.request.headers_finished else limits.header_seconds

    def close_waiting(self) -> None:
        """Close the connection; a client that is sending a request is told why."""
        if self.request is not None and not self.total_outbufs_len:
            _send_error(self.socket, 408, "Request Timeout")
        self.handle_close()


class Server(TcpWSGIServer):  # type: ignore[misc]
    """A server of a WSGI application on a socket of `bind`, with limits of connections.

    Requests of paths that `is_long` accepts have threads of their own, so that others are answered meanwhile.
    """

    channel_class = _Channel
    # waitress closes late connections between collecting sockets and polling them, where a new connection
    # with the file descriptor of a closed one would be taken for it.
    next_channel_cleanup = math.inf

    def __init__(
        self,
        application: Any,
        listening: socket.socket,
        limits: ConnectionLimits,
        is_long: Callable[[str], bool],
        largest_body: int,
    ) -> None:
        self.limits = limits
        self.is_long = is_long
        # One warning per queued request would fill the log.
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)
        self.short_tasks = ThreadedTaskDispatcher()
        self.short_tasks.set_thread_count(1)
        adjustments = Adjustments(
            sockets=[listening],
            max_request_header_size=LARGEST_HEADER,
            max_request_body_size=largest_body,
            # Above what `accept` allows, so that the server never stops accepting.
            connection_limit=2 * limits.connections + FILES_OF_PROCESS,
            # Clients that disconnect are no errors of the server.
            log_socket_errors=False,
        )
        address = (listening.family, listening.type, listening.proto, listening.getsockname())
        super().__init__(
            application, {}, True, listening, adj=adjustments, sockinfo=address, bind_socket=False
        )

    def serve(self) -> None:
        """Answer requests until an exception, such as that of a signal, or until all sockets are closed."""
        checked = time.monotonic()
        try:
            while self._map:
                # Not run(), which would hide the signal.
                self.asyncore.loop(timeout=1, map=self._map, use_poll=True, count=1)
                if time.monotonic() > checked + 1:
                    checked = time.monotonic()
                    self.close_late(checked)
        finally:
            self.short_tasks.shutdown()
            self.task_dispatcher.shutdown()

    def close_late(self, now: float) -> None:
        """Close the connections whose clients took too long."""
        for channel in list(self.active_channels.values()):
            since = channel.waiting_since()
            if since is not None and now - since > channel.allowed_seconds(self.limits):
                channel.close_waiting()

    def accept(self) -> tuple[socket.socket, Any] | None:
        """Accept a connection; if there are too many, close the one that waited longest, or refuse it."""
        accepted = super().accept()
        if accepted is None:
            return None
        connection, address = accepted
        limits = self.limits
        for sender, most in ((address[0], limits.connections_by_address), (None, limits.connections)):
            rivals = [one for one in self.active_channels.values() if sender in (None, one.addr[0])]
            if len(rivals) < most:
                continue
            waiting = [(since, one) for one in rivals if (since := one.waiting_since()) is not None]
            if not waiting:
                _send_error(connection, 503, "Too Many Connections")
                connection.close()
                return None
            min(waiting, key=lambda pair: pair[0])[1].close_waiting()
        return connection, address

    def add_task(self, task: _Channel) -> None:
        """Queue the next request of a connection."""
        request = task.requests[0]
        is_long = request.error is None and self.is_long(request.path)
        (self.task_dispatcher if is_long else self.short_tasks).add_task(task)


def _send_error(connection: socket.socket, status: int, reason: str) -> None:
    """Send an error to a client, if it accepts the bytes at once."""
    body = f'{{"error": "{reason}", "status": "error"}}\n'
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(f"{head}Connection: close\r\n\r\n{body}".encode())


def allow_open_files(connections: int) -> None:
    """Raise the limit of open files of this process to what a number of connections needs."""
    needed = FILES_OF_CONNECTION * connections + FILES_OF_PROCESS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        except (ValueError, OSError) as error:
            raise UserError(
                f"max_connections: {connections} need {needed} open files, but the limit is {hard}; lower "
                "it, or raise the limit (ulimit -n)"
            ) from error


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address."""
    if not 0 <= port < 2**16:
        raise UserError(f"port: {port} is out of range; expected 1 to {2**16 - 1}, or 0 for any free port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError:
            listening.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise UserError(f"ip, port: {host}:{port} is not available ({reason}); choose others") from error
    return listening
