"""``onmt_server``: every answer is JSON, clients can only translate, and user errors are one line."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from nmt.checkpoints import read_checkpoint
from nmt.hooks import apply_patches
from tests.nmt.conftest import ErrorLine, Host, Patch
from tests.nmt.test_transforms import Subwords

apply_patches()

from nmt.server import Limits, Server, bind, make_app, read_models  # noqa: E402

ROOT = "/translator"
SEARCH = {"beam_size": 2, "min_length": 1, "max_length": 9, "max_length_ratio": 0}


def configure(folder: Path, checkpoint: Path, **more: Any) -> Path:
    """Write the configuration of one model, number 7; returns its path."""
    shutil.copy(checkpoint, folder / "model.pt")
    model = {"id": 7, "model": "model.pt", "opt": dict(SEARCH), **more}
    path = folder / "server.json"
    path.write_text(json.dumps({"models_root": str(folder), "models": [model]}))
    return path


@pytest.fixture(scope="module")
def subwords(tmp_path_factory: pytest.TempPathFactory) -> Subwords:
    """A folder with codes and a vocabulary of subwords."""
    return Subwords(Host(tmp_path_factory.mktemp("host")))


@pytest.fixture(scope="module")
def checkpoint(subwords: Subwords) -> Path:
    """A model trained with BPE as a transform."""
    return subwords.train()


@pytest.fixture(scope="module")
def client(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlaskClient]:
    """A client of a server with that model and low limits."""
    config = configure(tmp_path_factory.mktemp("server"), checkpoint)
    app = make_app(
        read_models(str(config), False), ROOT, Limits(max_bytes=2000, max_texts=5, max_characters=300)
    )
    with app.test_client() as found:
        yield found


@pytest.fixture
def no_server(monkeypatch: Patch) -> None:
    """Make a starting server fail instead of waiting for requests."""

    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("a server started")

    monkeypatch.setattr("nmt.server.Server", fail)


def ask(client: FlaskClient, items: Any) -> Any:
    """The answer to a request that must succeed."""
    answer = client.post(f"{ROOT}/translate", json=items)
    assert answer.status_code == 200, answer.text
    return answer.json


def test_server_translates_like_the_command(
    subwords: Subwords, checkpoint: Path, client: FlaskClient
) -> None:
    """With the transforms of the checkpoint, in batches, with unusual spaces and empty texts."""
    lines = ["w1 w2 w3", "w5", "w7 w8 w9 w10"]
    subwords.host.write("some", lines)
    wanted = subwords.host.translate(checkpoint, "-min_length", "1", source="some")
    texts = [lines[0], "", f"  {lines[1]}", lines[2].replace(" ", " \u00a0 ")]
    (answer,) = ask(client, [{"id": 7, "src": text} for text in texts])
    assert [one["tgt"] for one in answer] == [wanted[0], "", f"  {wanted[1]}", wanted[2]]
    assert [one["src"] for one in answer] == texts
    assert all(one["n_best"] == 1 and one["pred_score"] <= 0 for one in answer)


def test_references_are_prefixes(subwords: Subwords, checkpoint: Path, tmp_path: Path) -> None:
    config = configure(tmp_path, checkpoint, opt={**SEARCH, "tgt_file_prefix": True, "n_best": 2})
    with make_app(read_models(str(config), False), ROOT).test_client() as client:
        answer = ask(client, [{"id": 7, "src": "w1", "ref": "v3 v1"}])
    assert [one["tgt"].split()[:2] for (one,) in answer] == [["v3", "v1"]] * 2


def test_a_configured_tokenizer_replaces_the_transforms(checkpoint: Path, tmp_path: Path) -> None:
    tokens = {"type": "pyonmttok", "mode": "space", "params": {"joiner_annotate": True}}
    config = configure(tmp_path, checkpoint, tokenizer=tokens)
    (model,) = read_models(str(config), False).values()
    assert model.pipe is None and model.maybe_tokenize("w1 w2") == "w1 w2"


GOOD = {"id": 7, "src": "w1"}
MALFORMED: list[tuple[Any, int]] = [
    *((body, 400) for body in (b"", b"{", b"null", b"{}", b"[]", b"[5]", b"\xff\xfe")),
    (b"[" * 900 + b"]" * 900, 400),
    (b'[{"id": 7, "src": "w1", "src": "w2"}]', 400),
    (b'[{"id": ' + b"9" * 1500 + b', "src": "w1"}]', 400),
    (b'[{"id": 7, "src": "w1 \\ud800"}]', 400),
    (b'[{"id": 7, "src": "w1", "ref": "\\udfff"}]', 400),
    *(([{"id": 7, "src": text}], 400) for text in (None, 5, ["w1"])),
    *(([{"id": number, "src": "w1"}], 400) for number in (8, "7", 7.0, True, None, [7])),
    ([{"src": "w1"}], 400),
    ([GOOD, {"id": 8, "src": "w1"}], 400),
    ([GOOD, {"id": 7}], 400),
    ([{**GOOD, "ref": 5}], 400),
    ([{**GOOD, "ref": "v1"}, GOOD], 400),
    ([{**GOOD, "opt": {"save_config": "x"}}], 400),
    ([GOOD] * 6, 413),
    ([{"id": 7, "src": "w" * 301}], 413),
    ([{**GOOD, "ref": "w" * 301}], 413),
    (b" " * 2001, 413),
]


@pytest.mark.parametrize(("body", "status"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_requests_are_answered_in_json(body: Any, status: int, client: FlaskClient) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body)
    answer = client.post(f"{ROOT}/translate", data=data, content_type="application/json")
    assert answer.status_code == status
    assert answer.json["status"] == "error" and "\n" not in answer.json["error"]
    assert ask(client, [GOOD])


@pytest.mark.parametrize("kind", ["multipart/form-data", "image/png", "text/html", "application/x-pickle"])
def test_content_types_other_than_json_fail(kind: str, client: FlaskClient) -> None:
    answer = client.post(f"{ROOT}/translate", data=json.dumps([GOOD]), content_type=kind)
    assert answer.status_code == 400 and kind in answer.json["error"]


@pytest.mark.parametrize(
    ("method", "address", "status"),
    [
        ("GET", "/translate", 405),
        ("GET", "/nowhere", 404),
        ("DELETE", "/models", 405),
        ("POST", "/clone_model/7", 403),
        ("GET", "/unload_model/7", 403),
        ("GET", "/to_cpu/7", 403),
        ("GET", "/to_gpu/7", 403),
        ("POST", "/clone_model/../../x", 403),
    ],
)
def test_clients_cannot_manage_models(
    method: str, address: str, status: int, client: FlaskClient, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    settings = {"opt": {"save_config": str(target), "log_file": str(target)}}
    answer = client.open(f"{ROOT}{address}", method=method, json=settings)
    assert answer.status_code == status and answer.json["status"] == "error"
    assert target.read_text() == "kept"
    (model,) = client.get(f"{ROOT}/models").json
    assert model["model_id"] == 7 and model["models"] == ["model.pt"]
    assert str(tmp_path.parent) not in client.get(f"{ROOT}/models").text  # no paths


def test_failures_are_json_without_earlier_answers(
    client: FlaskClient, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    from nmt.server import Model

    with monkeypatch.context() as patch:
        patch.setattr(Model, "run", lambda self, inputs: 1 // 0)
        answer = client.post(f"{ROOT}/translate", json=[GOOD])
    assert answer.status_code == 500 and answer.json["status"] == "error"
    assert ask(client, [GOOD])


def test_a_token_is_required(checkpoint: Path, tmp_path: Path) -> None:
    app = make_app(read_models(str(configure(tmp_path, checkpoint)), False), ROOT, token="se cret")
    with app.test_client() as client:
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic se cret"}):
            for address in ("models", "translate", "clone_model/7", "nowhere"):
                answer = client.post(f"{ROOT}/{address}", json=[GOOD], headers=given)
                assert answer.status_code == 401 and answer.json["status"] == "error"
        good = {"Authorization": "Bearer se cret"}
        assert client.post(f"{ROOT}/translate", json=[GOOD], headers=good).status_code == 200
        assert client.get(f"{ROOT}/health").json == {"status": "ok"}


@pytest.mark.parametrize(
    ("settings", "printed"),
    [
        ({"opt": {"beam_size": 0}}, "beam_size"),
        ({"opt": {"beam_size": "-save_config"}}, "beam_size"),
        ({"opt": {"beam_sise": 5}}, "beam_size"),
        ({"opt": {"save_config": "x"}}, "save_config"),
        ({"opt": {"log_file": "model.pt"}}, "log_file"),
        ({"opt": {"ban_unk_token": "yes"}}, "true or false"),
        ({"opt": {"ignore_when_blocking": ["-config", "x"]}}, "ignore_when_blocking"),
        ({"opt": {"transforms": ["bpf"]}}, "bpf"),
        ({"opt": []}, "opt"),
        ({"id": "7"}, "id"),
        ({"model": "none.pt"}, "none.pt"),
        ({"model": "server.json"}, "server.json"),
        ({"models": ["model.pt", 5]}, "5], but it must be a list whose items are each text"),
        ({"on_timeout": "explode"}, "explode"),
        ({"tokenizer": {}}, "type"),
        ({"tokenizer": {"type": "sentencepiece", "model": "model.pt"}}, "model"),
        ({"features": {"n_src_feats": "many"}}, "features"),
        ({"preprocess": ["json.loads"]}, "allow_functions"),
    ],
)
def test_invalid_configurations_are_one_line(
    settings: dict[str, Any],
    printed: str,
    checkpoint: Path,
    tmp_path: Path,
    error_line: ErrorLine,
    no_server: None,
) -> None:
    config = configure(tmp_path, checkpoint, **{"load": True, **settings})
    before = (tmp_path / "model.pt").read_bytes()
    line = error_line("onmt_server --port 0 --model_config", config)
    assert printed in line and f"model_config: {config}" in line
    assert (tmp_path / "model.pt").read_bytes() == before


def test_functions_are_imported_only_with_permission(checkpoint: Path, tmp_path: Path) -> None:
    config = configure(tmp_path, checkpoint, postprocess=["tests.nmt.test_server.uppercase"])
    with make_app(read_models(str(config), True), ROOT).test_client() as client:
        ((one,),) = ask(client, [GOOD])
    assert one["tgt"].endswith("!")


def uppercase(sequence: dict[str, Any], model: Any) -> str:
    """A function that a configuration names."""
    return f"{sequence['seg'][0]}!"


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ("--port 70000", "70000"),
        ("--port x", "--port"),
        ("--port 0 --ip 192.0.2.1", "192.0.2.1"),
        ("--port 0 --max_bytes 0", "max_bytes"),
        ("--port 0 --header_seconds nan", "header_seconds"),
        ("--port 0 --idle_seconds 0", "idle_seconds"),
        ("--port 0 --max_connections 1000000000000", "max_connections"),
        ("--port 0 --token caf\u00e9", "token"),
        ("--prot 0", "port"),
    ],
)
def test_invalid_command_lines_are_one_line(
    arguments: str, printed: str, checkpoint: Path, tmp_path: Path, error_line: ErrorLine, no_server: None
) -> None:
    config = configure(tmp_path, checkpoint)
    assert printed in error_line(f"onmt_server {arguments} --model_config", config)


def test_a_port_in_use_is_one_line(checkpoint: Path, tmp_path: Path, error_line: ErrorLine) -> None:
    config = configure(tmp_path, checkpoint, load=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = error_line("onmt_server --model_config", config, "--port", port)
    assert port in line and "in use" in line


@pytest.mark.slow
def test_a_served_model(checkpoint: Path, tmp_path: Path) -> None:
    """In a new process: it listens on localhost only, rejects large and late requests, exits on SIGTERM."""
    config = configure(tmp_path, checkpoint, load=True, timeout=1000)
    start = "import sys; sys.argv[0] = 'onmt_server'; from nmt import cli; cli.server()"
    limits = "--port 0 --max_bytes 1000 --header_seconds 0.5".split()
    arguments = ["--model_config", str(config), *limits]
    process = subprocess.Popen([sys.executable, "-c", start, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        address = next(line for line in lines if "http://127.0.0.1:" in line).split(" at ")[1].strip()
        rest: list[str] = []
        threading.Thread(target=lambda: rest.extend(lines), daemon=True).start()
        for size, status in ((1, 400), (1001, 413), (1 << 20, 413)):
            with pytest.raises(urllib.error.URLError) as answer:
                urllib.request.urlopen(f"{address}/translate", b"[" * size, timeout=60)
            if not isinstance(answer.value, urllib.error.HTTPError):
                # The server may close the connection while a large request is still being sent.
                assert size == 1 << 20 and isinstance(answer.value.reason, ConnectionError)
                continue
            assert answer.value.code == status
            assert json.load(answer.value)["status"] == "error"
        with urllib.request.urlopen(f"{address}/translate", json.dumps([GOOD]).encode(), timeout=60) as good:
            assert json.load(good)[0][0]["tgt"]
        port = int(address.removesuffix(ROOT).rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as slow:
            slow.sendall(b"GET")
            assert b" 408 " in slow.recv(1000)
        process.terminate()
        assert process.wait(timeout=60) == 143
    finally:
        process.kill()
        process.wait()


def test_missing_dependencies_of_a_checkpoint_fail_at_start(
    checkpoint: Path, subwords: Subwords, tmp_path: Path, error_line: ErrorLine
) -> None:
    import torch

    saved = read_checkpoint(checkpoint)
    del saved["subwords"]
    vars(saved["opt"])["src_subword_model"] = "/nowhere/codes"
    torch.save(saved, tmp_path / "bare.pt")
    config = configure(tmp_path, tmp_path / "bare.pt")
    line = error_line("onmt_server", "--port", "0", "--model_config", config)
    assert "src_subword_model: the file /nowhere/codes" in line


# Connections: slow, silent and greedy clients do not stop the server and are closed.

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
            own = Limits(**limits)  # type: ignore[arg-type]
            server = Server(application, listening, own, lambda path: path in ("/translate", "/large"))
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


@contextlib.contextmanager
def trickling(clients: list[socket.socket], part: bytes) -> Iterator[None]:
    """Send a part on every connection, several times a second."""
    stop = threading.Event()

    def send() -> None:
        while not stop.wait(0.2):
            for client in clients:
                with contextlib.suppress(OSError):
                    client.sendall(part)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


def test_slow_clients_do_not_stop_others(serve: Serve) -> None:
    """More slow clients than connections, from the address of the others: others are always answered."""
    address = serve(header_seconds=2, max_connections=20, max_connections_by_address=15)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(address, timeout=5)) for _ in range(40)]
        for client in slow:
            with contextlib.suppress(ConnectionError):
                client.sendall(HEALTH)
        with trickling(slow, b"X"):
            for _ in range(12):
                assert b"200 OK" in answer_to(address, CLOSING)
                time.sleep(0.3)
            closed = [rest_of(client) for client in slow]
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
    with socket.create_connection(address, timeout=5) as client:
        client.sendall(start)
        with trickling([client], part):
            rest_of(client)  # raises TimeoutError unless the server closes the connection
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
    address = serve(max_connections_by_address=2)
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
