"""``onmt_server``: translations over HTTP.

Clients can only translate: they cannot load, copy or unload models, or set options. For the open internet,
run nginx in front (``docker/nginx.conf``), since waitress does not limit the total time of a request.
"""

from __future__ import annotations

import hmac
import math
import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic
import waitress
from flask import Flask, Response, jsonify, request
from onmt.constants import CorpusName
from onmt.transforms import TransformPipe, get_transforms_cls, make_transforms
from onmt.translate.translation_server import ServerModel, TranslationServer
from onmt.utils.logging import logger
from pydantic.dataclasses import dataclass
from werkzeug.exceptions import BadRequest, HTTPException, RequestEntityTooLarge, Unauthorized

from nmt.corpora import clean_line
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError


@dataclass(frozen=True, config=pydantic.ConfigDict(extra="forbid", strict=True))
class SourceText:
    """A text of a request; `ref` is its target prefix, or the target to score."""

    src: str
    ref: str | None = None
    id: int = 0  # of the model


class Model(ServerModel):  # type: ignore[misc]
    """A model that applies the transforms of its checkpoint, unless a tokenizer is configured."""

    pipe: TransformPipe | None = None

    def parse_opt(self, opt: dict[str, Any]) -> Any:
        """Return all options of a translation; OpenNMT-py takes false for true."""
        return super().parse_opt({name: value for name, value in opt.items() if value is not False})

    def load(self, preload: bool = False) -> None:
        """Load the model and its transforms; after a failure, the next request tries again."""
        try:
            super().load(preload)
            if self.tokenizers_opt is None and self.opt.transforms:
                transforms = make_transforms(self.opt, get_transforms_cls(self.opt.transforms), None)
                self.pipe = TransformPipe.build_from(list(transforms.values()))
        finally:
            self.loading_lock.set()

    def translate(self, texts: Sequence[SourceText]) -> list[list[dict[str, Any]]]:
        """Return the translations: for each rank of the n-best list, one per text.

        All texts have a reference or none.
        """
        answers = []
        for first in range(0, len(texts), self.opt.batch_size):
            batch = texts[first : first + self.opt.batch_size]
            inputs = [{"src": text.src, "ref": text.ref} for text in batch]
            translations, scores, n_best, _, aligns, align_scores = self.run(inputs)
            for place, translation in enumerate(translations):
                score = scores[place] if math.isfinite(scores[place]) else None
                source = batch[place // n_best].src
                answer = {"src": source, "tgt": translation, "n_best": n_best, "pred_score": score}
                if aligns[place] and aligns[place][0] is not None:
                    answer |= {"align": aligns[place], "align_score": align_scores[place]}
                answers.append(answer)
        return [answers[rank :: self.opt.n_best] for rank in range(self.opt.n_best)]

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
        tokens = line.split(" ")
        example = (
            {"src": tokens, "tgt": None} if side == "src" else {"src": [""], "tgt": tokens if line else None}
        )
        changed = self.pipe.apply(example, corpus_name=CorpusName.INFER)
        return " ".join(changed[side] or ()).strip()

    def maybe_detokenize(self, sequence: str, side: str = "tgt") -> str:
        """Return the text of tokens."""
        if self.pipe is None:
            return str(super().maybe_detokenize(sequence, side))
        return str(self.pipe.apply_reverse(sequence))


class Models(TranslationServer):  # type: ignore[misc]
    """The models of a configuration; they may import Python functions if `allow_functions` is set."""

    allow_functions = False

    def preload_model(self, opt: dict[str, Any], model_id: int | None = None, **settings: Any) -> int:
        """Add a model, and load it if its settings say so."""
        if not self.allow_functions and settings.keys() & {"preprocess_opt", "postprocess_opt"}:
            raise UserError("preprocess and postprocess import Python functions; add --allow_functions")
        number = max(self.models, default=-1) + 1 if model_id is None else model_id
        self.models[number] = Model(opt, number, **settings)
        return number


def make_app(models: Mapping[int, Model], options: Namespace) -> Flask:
    """Create the application; all requests except health checks need the token, if there is one."""
    app = Flask(__name__)

    @app.before_request
    def check_token() -> None:
        sent = request.headers.get("Authorization", "")
        is_right = hmac.compare_digest(sent.encode(), f"Bearer {options.token}".encode())
        if options.token and not is_right and request.path != f"{options.url_root}/health":
            raise Unauthorized("the header 'Authorization: Bearer TOKEN' is missing or wrong")

    @app.get(f"{options.url_root}/health")
    def health() -> Response:
        return jsonify(status="ok")

    @app.get(f"{options.url_root}/models")
    def list_models() -> Response:
        return jsonify([{"model_id": number, "loaded": model.loaded} for number, model in models.items()])

    @app.post(f"{options.url_root}/translate")
    def translate() -> Response:
        try:
            texts = pydantic.TypeAdapter(list[SourceText]).validate_json(request.get_data())
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            raise BadRequest(f"{' '.join(map(str, first['loc']))}: {first['msg']}") from None
        numbers = {text.id for text in texts}
        if len(numbers) != 1 or not numbers <= models.keys():
            raise BadRequest(f"id: {sorted(numbers)} is not one of the models {sorted(models)}")
        if len({text.ref is None for text in texts}) > 1:
            raise BadRequest("ref: some texts have one and others do not; send separate requests")
        if any(len(part or "") > options.max_characters for text in texts for part in (text.src, text.ref)):
            raise RequestEntityTooLarge(f"a text has more than {options.max_characters} characters")
        return jsonify(models[numbers.pop()].translate(texts))

    @app.errorhandler(Exception)
    def answer_to(error: Exception) -> tuple[Response, int]:
        if isinstance(error, HTTPException):
            return jsonify(status="error", error=error.description), error.code or 500
        logger.error("a request failed", exc_info=error)
        return jsonify(status="error", error="the translation failed; see the log of the server"), 500

    return app


def main(arguments: Sequence[str]) -> None:
    """Run ``onmt_server``."""
    parser = Parser("onmt_server", description="Serve translations over HTTP")
    add = parser.add_argument
    add("--ip", "-ip", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all addresses")
    add("--port", "-port", type=int, default=5000, help="port; 0 for any free one")
    add("--url_root", "-url_root", default="/translator", help="prefix of URLs")
    add("--model_config", "-m", "-model_config", default="./available_models/conf.json", help="JSON file")
    text = "token that clients send as 'Authorization: Bearer TOKEN' (default: $ONMT_SERVER_TOKEN)"
    add("--token", "-token", default=os.environ.get("ONMT_SERVER_TOKEN", ""), metavar="TOKEN", help=text)
    add("--max_bytes", "-max_bytes", type=int, default=1 << 20, help="size of a request")
    add("--max_characters", "-max_characters", type=int, default=5000, help="characters per text")
    add("--threads", "-threads", type=int, default=8, help="requests that are answered at the same time")
    text = "import the Python functions of preprocess and postprocess in the configuration"
    add("--allow_functions", "-allow_functions", action="store_true", help=text)
    options = parser.parse_args(arguments)
    models = Models()
    models.allow_functions = options.allow_functions
    server = waitress.create_server(  # binds the port before models are loaded
        make_app(models.models, options),
        host=options.ip,
        port=options.port,
        threads=options.threads,
        connection_limit=512,
        channel_timeout=30,
        max_request_body_size=options.max_bytes,
    )
    models.start(options.model_config)
    address = f"http://{server.effective_host}:{server.effective_port}{options.url_root}"
    print(f"onmt_server: {len(models.models)} models at {address}", file=sys.stderr)
    server.run()
    for model in models.models.values():
        model.stop_unload_timer()
