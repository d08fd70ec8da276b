"""``onmt_server``: translations over HTTP; every response is JSON.

Clients can only translate: they cannot load, copy or unload models, or set options. waitress closes
connections that send nothing for a while, and stops accepting when there are too many; one byte now and then
defeats both. Here each part of a request has a total time, and a new connection replaces the one that has
waited longest for its client.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import json
import logging
import math
import os
import resource
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import onmt.opts
from flask import Flask, Response, jsonify, request
from onmt.constants import CorpusName
from onmt.transforms import TransformPipe, get_transforms_cls, make_transforms
from onmt.translate.translation_server import ServerModel, ServerModelError
from onmt.utils.logging import logger
from onmt.utils.parse import ArgumentParser
from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.server import TcpWSGIServer
from waitress.task import ErrorTask, ThreadedTaskDispatcher
from werkzeug.exceptions import HTTPException

from nmt.corpora import clean_line
from nmt.options import READ, check_files, check_translation, fail
from nmt.transforms import applied
from shared_embeddings.utils.command_line import error_line
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import UNREADABLE, first_line
from shared_embeddings.utils.options import check_known, parse_options, require
from shared_embeddings.utils.path_options import PathOption, check_input, check_outputs
from shared_embeddings.utils.reading import parse_json, read_json


def _limit(default: float, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Limits:
    """Limits of requests and connections, which are options of the command."""

    max_bytes: int = _limit(1 << 20, "size of a request")
    max_texts: int = _limit(256, "texts per request")
    max_characters: int = _limit(5000, "characters per text")
    header_seconds: float = _limit(10.0, "time for the header of a request")  # from its first byte
    body_seconds: float = _limit(60.0, "time for a whole request")  # from its first byte
    answer_seconds: float = _limit(60.0, "time for a client to read an answer")
    idle_seconds: float = _limit(30.0, "time that a connection stays open without a request")
    max_connections: int = _limit(512, "open connections")
    max_connections_by_address: int = _limit(
        256, "open connections of one address; raise it to max_connections behind a proxy"
    )

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name.endswith("_seconds") and not 0 < value < math.inf:
                raise UserError(f"{name}: {value} is not a time; expected a number of seconds above 0")
            if value < 1 and not name.endswith("_seconds"):
                raise UserError(f"{name}: {value} is too small; expected at least 1")


# Models

MODELS_EXAMPLE = '{"models": [{"id": 1, "model": "model.pt"}]}'


@dataclass(frozen=True)
class Features:
    """The setting ``features`` of a model."""

    n_src_feats: int = 0
    src_feats_defaults: str | None = None
    reversible_tokenization: str = "joiner"


@dataclass(frozen=True)
class ModelSettings:
    """The settings of a model in a configuration file."""

    id: int | None = None
    model: str = ""
    models: tuple[str, ...] = ()
    model_root: str | None = None
    opt: Mapping[str, Any] = field(default_factory=dict)
    load: bool = False
    timeout: int | float = -1
    on_timeout: Literal["to_cpu", "unload"] = "to_cpu"
    preprocess: tuple[str, ...] | None = None
    postprocess: tuple[str, ...] | None = None
    tokenizer: Mapping[str, Any] | None = None
    features: Features | None = None
    custom_opt: Any = None
    ct2_model: str | None = None
    ct2_translator_args: Mapping[str, Any] | None = None
    ct2_translate_batch_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        require(all(self.models or [self.model]), f"has no model; write it like {MODELS_EXAMPLE}")


@dataclass(frozen=True)
class Configuration:
    """The configuration file of a server."""

    models: tuple[ModelSettings, ...]
    models_root: str = "./available_models"

    def __post_init__(self) -> None:
        require(len(self.models) > 0, f"has no list of models; write it like {MODELS_EXAMPLE}")


# Options of onmt_translate that do not apply to a server.
_NOT_APPLICABLE = ("config", "save_config", "src", "tgt", "output", "models", "profile", "dump_beam")


@dataclass(frozen=True)
class Text:
    """A text of a request, and its target prefix or target to score, if any."""

    source: str
    reference: str | None = None


class Model(ServerModel):  # type: ignore[misc]
    """A model that applies the transforms of its checkpoint, unless a tokenizer is configured.

    `settings` are options of ``onmt_translate`` and ``models``; `more` are arguments of OpenNMT-py's class.
    """

    def __init__(self, settings: dict[str, Any], model_id: int, load: bool = False, **more: Any) -> None:
        super().__init__(settings, model_id, load=False, **more)
        self.pipe = _pipe(self.opt) if self.tokenizers_opt is None else None
        if load:
            self.load(preload=True)
            self.stop_unload_timer()

    def parse_opt(self, opt: dict[str, Any]) -> Namespace:
        """Return all options of a translation."""
        paths = [os.path.join(self.model_root, name) for name in opt["models"]]
        for path in paths:
            check_input("model", path)
        parser = ArgumentParser()
        onmt.opts.translate_opts(parser)
        parsed = _parse(parser, ["-model", *paths, "-src", os.devnull], opt)
        ArgumentParser.validate_translate_opts(parsed)
        check_translation(parsed)
        check_files(parsed, {**READ, "phrase_table": PathOption.FILE})
        if parsed.log_file:
            log = os.path.join(self.model_root, parsed.log_file)
            check_outputs({"log_file": log}, {"model": paths[0]}, force=True)
        parsed.cuda = parsed.gpu > -1
        return parsed

    def load(self, preload: bool = False) -> None:
        """Load the model; after a failure, the next request tries again."""
        try:
            super().load(preload)
        finally:
            self.loading_lock.set()

    def reset_unload_timer(self) -> None:
        """Restart the timer that unloads the model; it does not keep the process alive."""
        if self.timeout >= 0:
            self.stop_unload_timer()
            self.unload_timer = threading.Timer(self.timeout, self.do_timeout)
            self.unload_timer.daemon = True
            self.unload_timer.start()

    def translate(self, texts: Sequence[Text], longest: int) -> list[list[dict[str, Any]]]:
        """Return the translations: for each rank of the n-best list, one per text.

        All texts have a reference or none; a padded batch has at most `longest` characters.
        """
        ranks: list[list[dict[str, Any]]] = []
        for batch in _batches(texts, self.opt.batch_size, longest):
            references = ({} if text.reference is None else {"ref": text.reference} for text in batch)
            inputs = [{"src": text.source, **reference} for text, reference in zip(batch, references)]
            translations, scores, n_best, _, aligns, align_scores = self.run(inputs)
            ranks = ranks or [[] for _ in range(n_best)]
            for place, translation in enumerate(translations):
                answer = {
                    "src": batch[place // n_best].source,
                    "tgt": translation,
                    "n_best": n_best,
                    "pred_score": scores[place] if math.isfinite(scores[place]) else None,
                }
                if aligns[place] and aligns[place][0] is not None:
                    answer |= {"align": aligns[place], "align_score": align_scores[place]}
                ranks[place % n_best].append(answer)
        return ranks

    def maybe_preprocess(self, sequence: dict[str, Any]) -> Any:
        """Convert a text to OpenNMT-py's form; a common target prefix replaces a missing reference."""
        prepared = super().maybe_preprocess(sequence)
        if self.pipe is not None and self.opt.tgt_file_prefix and prepared["ref"] == [None]:
            prepared["ref"] = [""]
        return prepared

    def maybe_tokenize(self, sequence: str, side: str = "src") -> str:
        """Return the tokens of a text."""
        line = clean_line(sequence)
        if self.pipe is None:
            return str(super().maybe_tokenize(line, side))
        example = {"src": line.split(" "), "tgt": None}
        if side == "tgt":
            example = {"src": [""], "tgt": line.split(" ") if line else None}
        changed = self.pipe.apply(example, corpus_name=CorpusName.INFER)
        return " ".join(changed[side] or ()).strip()

    def maybe_detokenize(self, sequence: str, side: str = "tgt") -> str:
        """Return the text of tokens."""
        if self.pipe is None:
            return str(super().maybe_detokenize(sequence, side))
        return str(self.pipe.apply_reverse(sequence))

    def to_dict(self) -> dict[str, Any]:
        """Return a description for clients, without paths."""
        own = self.user_opt
        return {
            "model_id": self.model_id,
            "opt": {name: value for name, value in own.items() if isinstance(value, (bool, int, float))},
            "models": [os.path.basename(name) for name in own["models"]],
            "loaded": self.loaded,
            "timeout": self.timeout,
        }


def _batches(texts: Sequence[Text], number: int, longest: int) -> Iterator[list[Text]]:
    """Yield batches of at most `number` texts and `longest` characters including padding."""
    batch: list[Text] = []
    width = 0
    for text in texts:
        wider = max(width, len(text.source))
        if batch and (len(batch) == number or (len(batch) + 1) * wider > longest):
            yield batch
            batch, wider = [], len(text.source)
        batch.append(text)
        width = wider
    if batch:
        yield batch


def _pipe(opt: Namespace) -> TransformPipe | None:
    """Return the transforms of a model, or None; prints them to stderr."""
    with applied(opt) as description:
        if description:
            print(description, file=sys.stderr)
        if not opt.transforms:
            return None
        ArgumentParser._get_all_transform_translate(opt)
        ArgumentParser._validate_transforms_opts(opt)
        ArgumentParser.validate_translate_opts_dynamic(opt)
        made = make_transforms(opt, get_transforms_cls(opt.transforms), None)
        return TransformPipe.build_from(list(made.values()))


def _parse(parser: ArgumentParser, words: list[str], settings: dict[str, Any]) -> Namespace:
    parser.error = fail
    actions = {string.lstrip("-"): action for action in parser._actions for string in action.option_strings}
    valid = [name for name, action in actions.items() if action.dest not in _NOT_APPLICABLE]
    exact, given = {}, set()
    for name, value in settings.items():
        if name == "models" or value is None:
            continue
        check_known("option", name, valid)
        action = actions[name]
        given.add(action.dest)
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise UserError(f"opt: {name} is {value!r}; expected true or false")
            words += [action.option_strings[0]] if value else []
        elif action.nargs in ("+", "*"):
            several = [str(one) for one in (value if isinstance(value, list) else [value])]
            if any(one.startswith("-") for one in several):
                raise UserError(f"opt: {name} is {value!r}; values must not start with a hyphen")
            words += [action.option_strings[0], *several]
        elif isinstance(value, bool):
            exact[action.dest] = value
        else:
            text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
            words.append(f"{action.option_strings[0]}={text}")
    parsed: Namespace = parser.parse_args(words)
    vars(parsed).update(exact)
    parsed.given = frozenset(given)
    return parsed


def read_models(path: str, allow_functions: bool) -> dict[int, Model]:
    """Return the models of a JSON file by id; they may import Python functions if `allow_functions`."""
    where = f"model_config: {path}"
    content = parse_options(where, Configuration, read_json(Path(path), "model_config"))
    models: dict[int, Model] = {}
    for number, settings in enumerate(content.models, start=1):
        what = f"{where}: models {number}"
        if (settings.preprocess or settings.postprocess) and not allow_functions:
            raise UserError(
                f"{what}: preprocess and postprocess name Python functions; add --allow_functions to import "
                "them"
            )
        chosen = max(models, default=-1) + 1 if settings.id is None else settings.id
        if chosen in models:
            raise UserError(f"{what}: the id {chosen} is not unique; choose another one")
        try:
            models[chosen] = Model(
                {**settings.opt, "models": list(settings.models) or [settings.model]},
                chosen,
                load=settings.load,
                model_root=settings.model_root or content.models_root,
                preprocess_opt=settings.preprocess,
                tokenizer_opt=settings.tokenizer,
                postprocess_opt=settings.postprocess,
                features_opt=settings.features and asdict(settings.features),
                custom_opt=settings.custom_opt,
                timeout=settings.timeout,
                on_timeout=settings.on_timeout,
                ct2_model=settings.ct2_model,
                ct2_translator_args=settings.ct2_translator_args,
                ct2_translate_batch_args=settings.ct2_translate_batch_args,
            )
        except (ServerModelError, *UNREADABLE) as error:
            raise UserError(f"{what}: {error_line(error)}") from error
    return models


# Requests

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
        model, texts = read_request(_body(limits.max_bytes), models, limits)
        return jsonify(model.translate(texts, limits.max_characters))

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
    if len(items) > limits.max_texts:
        raise RequestError(f"there are {len(items)} texts; the limit is {limits.max_texts}", 413)
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
            if len(given) > (most := limits.max_characters):
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


# Connections

# Files that a connection may have open: its socket, and temporary files of a large request and answer.
FILES_OF_CONNECTION = 3
FILES_OF_PROCESS = 128
LARGEST_HEADER = 1 << 16


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

    def allowed_seconds(self, limits: Limits) -> float:
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
        limits: Limits,
        is_long: Callable[[str], bool],
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
            # Slightly oversized bodies reach the application, whose response states the limit.
            max_request_body_size=4 * limits.max_bytes,
            # Above what `accept` allows, so that the server never stops accepting.
            connection_limit=2 * limits.max_connections + FILES_OF_PROCESS,
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
        for sender, most in (
            (address[0], limits.max_connections_by_address),
            (None, limits.max_connections),
        ):
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


# The command


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
    for limit in fields(Limits):
        text = f"{limit.metadata['help']} (default: %(default)s)"
        add(f"--{limit.name}", f"-{limit.name}", type=type(limit.default), default=limit.default, help=text)
    text = "import the Python functions of preprocess and postprocess in the configuration"
    add("--allow_functions", "-allow_functions", action="store_true", help=text)
    return parser


def serve(options: argparse.Namespace) -> None:
    """Serve until a signal arrives; `options` are those of the command line."""
    limits = Limits(**{limit.name: getattr(options, limit.name) for limit in fields(Limits)})
    allow_open_files(limits.max_connections)
    if options.token and not (options.token.isascii() and options.token.isprintable()):
        raise UserError("token: contains characters that are not printable ASCII; choose another token")
    root = "/" + options.url_root.strip("./")
    # Bind first, because loading models takes time.
    with bind(options.ip, options.port) as listening:
        models = read_models(options.model_config, options.allow_functions)
        app = make_app(models, root.rstrip("/"), limits, options.token)
        if options.debug:

            @app.after_request
            def log(response: Response) -> Response:
                logger.info(f"{request.remote_addr} {request.method} {request.path} {response.status}")
                return response

        path = f"{root.rstrip('/')}/translate"
        server = Server(app, listening, limits, lambda given: given == path)
        host, port = listening.getsockname()[:2]
        is_open = not options.token and options.ip not in ("127.0.0.1", "::1", "localhost")
        warning = f"; anyone with access can translate unless {TOKEN_VARIABLE} is set" if is_open else ""
        print(f"onmt_server: {len(models)} models at http://{host}:{port}{root}{warning}", file=sys.stderr)
        server.serve()
