"""``onmt_server``: translations over HTTP; every response is JSON.

Clients can only translate: they cannot load, copy or unload models, or set options.
"""

from __future__ import annotations

import argparse
import hmac
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from flask import Flask, Response, jsonify, request
from onmt.utils.logging import logger
from werkzeug.exceptions import HTTPException

from nmt.translate.connections import ConnectionLimits, Server, allow_open_files, bind
from nmt.translate.server_models import Model, Text, read_models
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.reading import parse_json

TOKEN_VARIABLE = "ONMT_SERVER_TOKEN"
CLOSED = ("clone_model", "unload_model", "to_cpu", "to_gpu")
KEYS = ("id", "ref", "src")
# Content types that are accepted as JSON, including defaults of clients.
TYPES = ("", "application/json", "application/x-www-form-urlencoded", "text/plain")
EXAMPLE = '[{"id": 1, "src": "a text"}]'


class RequestError(UserError):
    """An invalid request; the client gets the message and a status code."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """Limits of a request: bytes of its body, texts, and characters per text."""

    size: int = 1 << 20
    texts: int = 256
    characters: int = 5000


def make_app(
    models: Mapping[int, Model], root: str = "/translator", limits: Limits = Limits(), token: str = ""
) -> Flask:
    """Create the application; all requests except health checks need the token, if there is one."""
    app = Flask(__name__)

    @app.before_request
    def check_token() -> None:
        if token and request.path != f"{root}/health":
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                raise RequestError("the header 'Authorization: Bearer TOKEN' is missing or wrong", 401)

    @app.get(f"{root}/health")
    def health() -> Response:
        return jsonify(status="ok")

    @app.get(f"{root}/models")
    def list_models() -> Response:
        return jsonify([model.to_dict() for model in models.values()])

    @app.post(f"{root}/translate")
    def translate() -> Response:
        model, texts = read_request(_body(limits.size), models, limits)
        return jsonify(model.translate(texts, limits.characters))

    def refuse(rest: str) -> Response:
        raise RequestError("clients cannot manage models", 403)

    for name in CLOSED:
        app.add_url_rule(f"{root}/{name}/<path:rest>", name, refuse, methods=["GET", "POST"])

    @app.errorhandler(Exception)
    def answer_to(error: Exception) -> tuple[Response, int, dict[str, str]]:
        if isinstance(error, RequestError):
            status, message = error.status, str(error)
        elif isinstance(error, HTTPException) and error.code is not None:
            status, message = error.code, error.description or error.name
        else:
            logger.error("a request failed", exc_info=error)
            status, message = 500, "the translation failed; see the log of the server"
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        return jsonify(status="error", error=message), status, headers

    return app


def _body(size: int) -> str:
    if (request.content_length or 0) > size:
        raise RequestError(f"the body has {request.content_length} bytes; the limit is {size}", 413)
    if request.mimetype not in TYPES and not request.mimetype.endswith("+json"):
        raise RequestError(f"the body is {request.mimetype!r}; expected application/json")
    body = request.stream.read(size + 1)
    if len(body) > size:
        raise RequestError(f"the body has more than {size} bytes", 413)
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise RequestError("the body is not UTF-8") from None


def read_request(body: str, models: Mapping[int, Model], limits: Limits) -> tuple[Model, list[Text]]:
    """Return the model and the texts of a request in JSON, or raise `RequestError`."""
    try:
        items = parse_json(body, "the body")
    except UserError as error:
        raise RequestError(str(error)) from None
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise RequestError(f"the body is not a list of texts; write it like {EXAMPLE}")
    if len(items) > limits.texts:
        raise RequestError(f"there are {len(items)} texts; the limit is {limits.texts}", 413)
    texts = []
    for number, item in enumerate(items):
        unknown = sorted(set(item) - set(KEYS))
        if unknown:
            raise RequestError(f"text {number}: unknown key {unknown[0][:80]!r}; expected {', '.join(KEYS)}")
        for name in ("src", "ref"):
            given = item.get(name)
            if given is None and name == "ref":
                continue
            if not isinstance(given, str):
                raise RequestError(f"text {number}: its {name} is not a text; write it like {EXAMPLE}")
            if any("\ud800" <= letter <= "\udfff" for letter in given):
                raise RequestError(f"text {number}: {name} has an unpaired surrogate")
            if len(given) > (most := limits.characters):
                raise RequestError(
                    f"text {number}: {name} has {len(given)} characters; the limit is {most}", 413
                )
        texts.append(Text(item["src"], item.get("ref")))
    if len({text.reference is None for text in texts}) > 1:
        raise RequestError("ref: some texts have one and others do not; send separate requests")
    chosen = items[0].get("id", 0)
    if any(item.get("id", chosen) != chosen for item in items):
        raise RequestError("id: the texts have different models; send separate requests")
    if type(chosen) is not int or chosen not in models:
        raise RequestError(f"id: no model {str(chosen)[:80]!r}; available: {sorted(models)}")
    return models[chosen], texts


# Options that limit requests and connections, and their defaults.
_LIMITS: dict[str, tuple[float, str]] = {
    "max_bytes": (Limits.size, "size of a request"),
    "max_texts": (Limits.texts, "texts per request"),
    "max_characters": (Limits.characters, "characters per text"),
}
_CONNECTION_LIMITS: dict[str, tuple[float, str]] = {
    "header_seconds": (ConnectionLimits.header_seconds, "time for the header of a request"),
    "body_seconds": (ConnectionLimits.body_seconds, "time for a whole request"),
    "answer_seconds": (ConnectionLimits.answer_seconds, "time for a client to read an answer"),
    "idle_seconds": (ConnectionLimits.idle_seconds, "time that a connection stays open without a request"),
    "max_connections": (ConnectionLimits.connections, "open connections"),
    "max_connections_by_address": (
        ConnectionLimits.connections_by_address,
        "open connections of one address; raise it to max_connections behind a proxy",
    ),
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Serve translations over HTTP", allow_abbrev=False)
    add = parser.add_argument
    add("--ip", "-ip", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all addresses")
    add("--port", "-port", type=int, default=5000, help="port; 0 for any free one")
    add("--url_root", "-url_root", default="/translator", help="prefix of URLs")
    add("--debug", "-d", "-debug", action="store_true", help="log every request")
    add("--model_config", "-m", "-model_config", default="./available_models/conf.json", help="JSON file")
    given = os.environ.get(TOKEN_VARIABLE, "")
    text = f"token that clients send as 'Authorization: Bearer TOKEN' (default: ${TOKEN_VARIABLE})"
    add("--token", "-token", default=given, metavar="TOKEN", help=text)
    for name, (default, text) in {**_LIMITS, **_CONNECTION_LIMITS}.items():
        text += " (default: %(default)s)"
        add(f"--{name}", f"-{name}", type=type(default), default=default, help=text)
    text = "import the Python functions of preprocess and postprocess in the configuration"
    add("--allow_functions", "-allow_functions", action="store_true", help=text)
    return parser


def serve(options: argparse.Namespace) -> None:
    """Serve until a signal arrives; `options` are those of the command line."""
    for name, (default, _) in {**_LIMITS, **_CONNECTION_LIMITS}.items():
        value = getattr(options, name)
        if isinstance(default, float) and not 0 < value < math.inf:
            raise UserError(f"{name}: {value} is not a time; expected a number of seconds above 0")
        if isinstance(default, int) and value < 1:
            raise UserError(f"{name}: {value} is too small; expected at least 1")
    allow_open_files(options.max_connections)
    if options.token and not (options.token.isascii() and options.token.isprintable()):
        raise UserError("token: contains characters that are not printable ASCII; choose another token")
    root = "/" + options.url_root.strip("./")
    # Bind first, because loading models takes time.
    with bind(options.ip, options.port) as listening:
        models = read_models(options.model_config, options.allow_functions)
        limits = Limits(*(getattr(options, name) for name in _LIMITS))
        app = make_app(models, root.rstrip("/"), limits, options.token)
        if options.debug:

            @app.after_request
            def log(response: Response) -> Response:
                logger.info(f"{request.remote_addr} {request.method} {request.path} {response.status}")
                return response

        of_connections = ConnectionLimits(*(getattr(options, name) for name in _CONNECTION_LIMITS))
        path = f"{root.rstrip('/')}/translate"
        # Slightly oversized bodies reach the application, whose response states the limit.
        server = Server(app, listening, of_connections, lambda given: given == path, 4 * limits.size)
        host, port = listening.getsockname()[:2]
        is_open = not options.token and options.ip not in ("127.0.0.1", "::1", "localhost")
        warning = f"; anyone with access can translate unless {TOKEN_VARIABLE} is set" if is_open else ""
        print(f"onmt_server: {len(models)} models at http://{host}:{port}{root}{warning}", file=sys.stderr)
        server.serve()
