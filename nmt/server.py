"""``onmt_server``: translations over HTTP; every response is JSON.

Clients can only translate: they cannot load, copy or unload models, or set options.
"""

from __future__ import annotations

import argparse
import hmac
import json
import math
import os
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import onmt.opts
from flask import Flask, Response, jsonify, request
from onmt.constants import CorpusName
from onmt.transforms import TransformPipe, get_transforms_cls, make_transforms
from onmt.translate.translation_server import ServerModel, ServerModelError
from onmt.utils.logging import logger
from onmt.utils.parse import ArgumentParser
from werkzeug.exceptions import HTTPException

from nmt.connections import ConnectionLimits, Server, allow_open_files, bind
from nmt.data.corpora import clean_line
from nmt.data.transforms import applied
from nmt.options import READ, check_files, check_translation, fail
from shared_embeddings.utils.command_line import error_line
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import UNREADABLE
from shared_embeddings.utils.options import check_known, parse_options, require
from shared_embeddings.utils.path_options import PathOption, check_input, check_outputs
from shared_embeddings.utils.reading import parse_json, read_json

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
    exact = {}
    for name, value in settings.items():
        if name == "models" or value is None:
            continue
        check_known("option", name, valid)
        action = actions[name]
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
