"""The models of ``onmt_server``: their configuration file, and the processing of text."""

from __future__ import annotations

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
from onmt.constants import CorpusName
from onmt.transforms import TransformPipe, get_transforms_cls, make_transforms
from onmt.translate.translation_server import ServerModel, ServerModelError
from onmt.utils.parse import ArgumentParser

from nmt.data.corpora import clean_line
from nmt.data.transforms import applied
from nmt.options import READ, check_files, check_translation, fail
from shared_embeddings.utils.command_line import error_line
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import UNREADABLE
from shared_embeddings.utils.options import check_known, parse_options, require
from shared_embeddings.utils.path_options import PathOption, check_input, check_outputs
from shared_embeddings.utils.reading import read_json

EXAMPLE = '{"models": [{"id": 1, "model": "model.pt"}]}'


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
        require(all(self.models or [self.model]), f"has no model; write it like {EXAMPLE}")


@dataclass(frozen=True)
class Configuration:
    """The configuration file of a server."""

    models: tuple[ModelSettings, ...]
    models_root: str = "./available_models"

    def __post_init__(self) -> None:
        require(len(self.models) > 0, f"has no list of models; write it like {EXAMPLE}")


# Options of onmt_translate that do not apply to a server.
_NOT_APPLICABLE = ("config", "save_config", "src", "tgt", "output", "models", "profile", "dump_beam")


@dataclass(frozen=True)
class Text:
    """A text of a request, and its target prefix or target to score, if any."""

    source: str
    reference: str | None = None


class Model(ServerModel):  # type: ignore[misc]
    """A model that applies the transforms of its checkpoint, unless a tokenizer is configured.

    Args:
        settings: options of ``onmt_translate``, and ``models``.
        model_id: the id.
        load: load immediately instead of at the first request.
        more: arguments of OpenNMT-py's class.
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
            raise UserError(f"{what}: preprocess and postprocess name functions; add --allow_functions")
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
