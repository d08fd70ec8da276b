"""The health check of the server image, against servers that answer well, badly and not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.docker.image import DOCKER


@contextmanager
def server(answer: bytes) -> Iterator[str]:
    """A server that gives one answer at the address of onmt_server's health, and 404 elsewhere."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/translator/health" else 404)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    running = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/translator"
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


def check(address: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(DOCKER / "health.py")]
    environment = {**os.environ, "SERVER_URL": address, "no_proxy": "127.0.0.1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_server_that_is_well() -> None:
    with server(b'{"status": "ok"}') as address:
        result = check(address)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b'{"status": "error"}', "status error"),
        (b"{}", "not an answer of onmt_server"),
        (b"<html>", "Expecting value"),
    ],
)
def test_a_server_that_answers_something_else(answer: bytes, words: str) -> None:
    with server(answer) as address:
        result = check(address)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(address) and words in line


def test_no_server() -> None:
    with server(b"") as address:
        pass
    result = check(address)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(address)
