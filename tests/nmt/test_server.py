"""``onmt_server``: every answer of the application is JSON, and clients can only translate."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from nmt.hooks import apply_patches
from tests.nmt.conftest import SECONDS, ErrorLine, Host, Patch, free_port, run
from tests.nmt.test_transforms import Subwords

apply_patches()

from nmt.server import Models, make_app  # noqa: E402

ROOT = "/translator"
SEARCH = {"beam_size": 2, "min_length": 1, "max_length": 9, "max_length_ratio": 0}
GOOD = {"id": 7, "src": "w1"}
NGINX = Path(__file__).resolve().parents[2] / "docker" / "nginx.conf"


def configure(folder: Path, checkpoint: Path, **more: Any) -> Path:
    """Write the configuration of one model, number 7; returns its path."""
    shutil.copy(checkpoint, folder / "model.pt")
    model = {"id": 7, "model": "model.pt", "opt": dict(SEARCH), **more}
    path = folder / "server.json"
    path.write_text(json.dumps({"models_root": str(folder), "models": [model]}))
    return path


def client_of(config: Path, allow_functions: bool = False, **options: Any) -> FlaskClient:
    """A client of a server with low limits."""
    models = Models()
    models.allow_functions = allow_functions
    models.start(str(config))
    settings = {"url_root": ROOT, "max_characters": 300, "token": "", **options}
    return make_app(models.models, Namespace(**settings)).test_client()


@pytest.fixture(scope="module")
def subwords(tmp_path_factory: pytest.TempPathFactory) -> Subwords:
    """A folder with codes and a vocabulary of subwords."""
    return Subwords(Host(tmp_path_factory.mktemp("host")))


@pytest.fixture(scope="module")
def checkpoint(subwords: Subwords) -> Path:
    """A model trained with BPE as a transform."""
    return subwords.train()


@pytest.fixture(scope="module")
def client(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> FlaskClient:
    """A client of a server with that model."""
    return client_of(configure(tmp_path_factory.mktemp("server"), checkpoint))


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
    texts = [lines[0], "", f"  {lines[1]}", lines[2].replace(" ", " \u00a0 ")] * 10
    (answers,) = ask(client, [{"id": 7, "src": text} for text in texts])
    assert [answer["tgt"] for answer in answers] == [wanted[0], "", f"  {wanted[1]}", wanted[2]] * 10
    assert [answer["src"] for answer in answers] == texts
    assert all(answer["n_best"] == 1 and answer["pred_score"] <= 0 for answer in answers)


def test_references_are_prefixes(checkpoint: Path, tmp_path: Path) -> None:
    options = {**SEARCH, "tgt_file_prefix": True, "n_best": 2, "replace_unk": False}
    client = client_of(configure(tmp_path, checkpoint, opt=options))
    answers = ask(client, [{"id": 7, "src": "w1", "ref": "v3 v1"}])
    assert [answer["tgt"].split()[:2] for (answer,) in answers] == [["v3", "v1"]] * 2


def test_a_configured_tokenizer_replaces_the_transforms(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = {"type": "pyonmttok", "mode": "space", "params": {"joiner_annotate": True}}
    models = Models()
    models.start(str(configure(tmp_path, checkpoint, tokenizer=tokenizer, load=True)))
    assert models.models[7].pipe is None and models.models[7].maybe_tokenize("w1 w2") == "w1 w2"


MALFORMED: list[tuple[Any, int]] = [
    *((body, 400) for body in (b"{", b"null", b"[]", b"\xff\xfe")),
    (b"[" * 900 + b"]" * 900, 400),
    (b'[{"id": ' + b"9" * 1500 + b', "src": "w1"}]', 400),
    (b'[{"id": 7, "src": "w1 \\ud800"}]', 400),
    *(([{"id": 7, "src": text}], 400) for text in (None, ["w1"])),
    *(([{"id": number, "src": "w1"}], 400) for number in (8, "7", True)),
    ([GOOD, {"id": 8, "src": "w1"}], 400),
    ([{**GOOD, "ref": 5}], 400),
    ([{**GOOD, "ref": "v1"}, GOOD], 400),
    ([{**GOOD, "opt": {"save_config": "x"}}], 400),
    ([{"id": 7, "src": "w" * 301}], 413),
    ([{**GOOD, "ref": "w" * 301}], 413),
]


@pytest.mark.parametrize(("body", "status"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_requests_are_answered_in_json(body: Any, status: int, client: FlaskClient) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body)
    answer = client.post(f"{ROOT}/translate", data=data, content_type="application/json")
    assert answer.status_code == status
    assert answer.json["status"] == "error" and "\n" not in answer.json["error"]
    assert ask(client, [GOOD])


@pytest.mark.parametrize(
    ("method", "address", "status"),
    [
        ("GET", "/translate", 405),
        ("POST", "/clone_model/7", 404),
        ("POST", "/clone_model/../../x", 404),
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
    assert [model["model_id"] for model in client.get(f"{ROOT}/models").json] == [7]


def test_failures_are_json_without_earlier_answers(client: FlaskClient, monkeypatch: Patch) -> None:
    from nmt.server import Model

    with monkeypatch.context() as patch:
        patch.setattr(Model, "run", lambda self, inputs: 1 // 0)
        answer = client.post(f"{ROOT}/translate", json=[GOOD])
    assert answer.status_code == 500 and answer.json["status"] == "error"
    assert ask(client, [GOOD])


def test_a_token_is_required(checkpoint: Path, tmp_path: Path) -> None:
    client = client_of(configure(tmp_path, checkpoint), token="se cret")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic se cret"}):
        for address in ("models", "translate", "nowhere"):
            answer = client.post(f"{ROOT}/{address}", json=[GOOD], headers=headers)
            assert answer.status_code == 401 and answer.json["status"] == "error"
    right = {"Authorization": "Bearer se cret"}
    assert client.post(f"{ROOT}/translate", json=[GOOD], headers=right).status_code == 200
    assert client.get(f"{ROOT}/health").json == {"status": "ok"}


def test_functions_are_imported_only_with_permission(
    checkpoint: Path, tmp_path: Path, error_line: ErrorLine
) -> None:
    config = configure(tmp_path, checkpoint, postprocess=["tests.nmt.test_server.with_mark"])
    assert "--allow_functions" in error_line("onmt_server --port 0 --model_config", config)
    ((answer,),) = ask(client_of(config, allow_functions=True), [GOOD])
    assert answer["tgt"].endswith("!")


def with_mark(sequence: dict[str, Any], model: Any) -> str:
    """A function that a configuration names."""
    return f"{sequence['seg'][0]}!"


@pytest.mark.parametrize(
    ("arguments", "settings", "printed"),
    [
        ("--port 0", {"model": "none.pt"}, "none.pt"),
        ("--port 0", {"model": "server.json"}, "server.json"),
        ("--port 0 --model_config /nowhere.json", {}, "/nowhere.json"),
    ],
)
def test_user_errors_end_the_start(
    arguments: str,
    settings: dict[str, Any],
    printed: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = configure(tmp_path, checkpoint, load=True, **settings)
    words = arguments.split() if "/nowhere" in arguments else [*arguments.split(), "--model_config", config]
    with pytest.raises(SystemExit) as ended:
        run("onmt_server", *words)
    assert ended.value.code == 2 and printed in capsys.readouterr().err


def test_a_port_in_use_is_one_line(checkpoint: Path, tmp_path: Path, error_line: ErrorLine) -> None:
    config = configure(tmp_path, checkpoint, load=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = error_line("onmt_server --model_config", config, "--port", taken.getsockname()[1])
    assert "in use" in line


# Processes


@contextmanager
def served(config: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a new process, and its port."""
    start = "import sys; sys.argv[0] = 'onmt_server'; from nmt import cli; sys.exit(cli.server())"
    words = ["--model_config", str(config), "--port", "0", *arguments]
    process = subprocess.Popen([sys.executable, "-c", start, *words], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next(line for line in iter(process.stderr.readline, "") if "http://127.0.0.1:" in line)
        yield process, int(line.split("http://127.0.0.1:")[1].split("/")[0])
    finally:
        process.kill()
        process.wait()


def post(port: int, body: bytes) -> tuple[int, Any]:
    """The status and the answer to a request."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{ROOT}/translate", body, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.slow
def test_a_served_model(checkpoint: Path, tmp_path: Path) -> None:
    """It listens on localhost, refuses large requests, and ends at SIGTERM in spite of an unload timer."""
    config = configure(tmp_path, checkpoint, load=True, timeout=1000)
    with served(config, "--max_bytes", "1000") as (process, port):
        assert [post(port, b"[" * size)[0] for size in (1, 1001)] == [400, 413]
        status, answer = post(port, json.dumps([GOOD]).encode())
        assert status == 200 and answer[0][0]["tgt"]
        process.terminate()
        process.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx: apt-get install nginx-light")
def test_nginx_in_front(checkpoint: Path, tmp_path: Path) -> None:
    """nginx ends slow clients, which do not delay others, and refuses large requests itself."""
    with (
        served(configure(tmp_path, checkpoint, load=True), "--threads", "1") as (_, port),
        ExitStack() as stack,
    ):
        front = free_port()
        text = NGINX.read_text().replace("server:5000", f"127.0.0.1:{port}").replace("8080", str(front))
        text = text.replace("10s", "1s").replace("/tmp/", f"{tmp_path}/").replace("/dev/", f"{tmp_path}/")
        (tmp_path / "nginx.conf").write_text(text)
        command = ["nginx", "-c", str(tmp_path / "nginx.conf"), "-g", "daemon off;"]
        nginx = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        stack.callback(nginx.wait, SECONDS)
        stack.callback(nginx.terminate)
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", front)) == 0:
                    break
            time.sleep(0.1)
        head = f"POST {ROOT}/translate HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n".encode()
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", front), 20)) for _ in range(3)]
        for connection, part in zip(slow, (b"POST /tr", head, head + b"\r\n[")):
            connection.sendall(part)
        status, answer = post(front, json.dumps([GOOD]).encode())
        assert status == 200 and answer[0][0]["tgt"]
        status, answer = post(front, b" " * (2 << 20))
        assert status == 413 and json.loads(answer)["status"] == "error"
        for connection in slow:  # closed by nginx, with or without status 408
            assert connection.recv(1000)[:12] in (b"", b"HTTP/1.1 408")
