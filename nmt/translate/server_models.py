"""The models of ``onmt_server``: their configuration file, and the processing of text."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onmt.opts
from onmt.constants import CorpusName
from onmt.transforms import TransformPipe, get_transforms_cls, make_transforms
from onmt.translate.translation_server import ServerModel, ServerModelError
from onmt.utils.parse import ArgumentParser

from nmt.data.corpora import clean_line
from nmt.data.transforms import applied
from nmt.options import READ, check_files, check_translation, closest, fail
from shared_embeddings.utils.command_line import error_line
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import UNREADABLE, check_input, check_outputs
from shared_embeddings.utils.path_options import PathOption
from shared_embeddings.utils.reading import read_json

EXAMPLE = '{"models": [{"id": 1, "model": "model.pt"}]}'
FUNCTIONS = ("preprocess", "postprocess")
_TOP = {"models": list, "models_root": str}
_MODEL: dict[str, type | tuple[type, ...]] = {
    "id": int,
    "model": str,
    "models": list,
    "model_root": str,
    "opt": dict,
    "load": bool,
    "timeout": (int, float),
    "on_timeout": str,
    "preprocess": list,
    "postprocess": list,
    "tokenizer": dict,
    "features": dict,
    "custom_opt": object,
    "ct2_model": str,
    "ct2_translator_args": dict,
    "ct2_translate_batch_args": dict,
}
_FEATURES = {"n_src_feats": int, "src_feats_defaults": str, "reversible_tokenization": str}
# Arguments of OpenNMT-py's class by key.
_ARGUMENTS = {
    **{name: f"{name}_opt" for name in (*FUNCTIONS, "tokenizer")},
    **{name: name for name in ("timeout", "on_timeout", "custom_opt")},
    **{name: name for name in _MODEL if name.startswith("ct2_")},
}
# Options of onmt_translate that do not apply to a server.
_NOT_APPLICABLE = ("config", "save_config", "src", "tgt", "output", "models", "profile", "dump_beam")


@dataclass(frozen=True)
class Text:
    """A text of a request.

    Attributes:
        source: source text.
        reference: target prefix or target to score, if any.
    """

    source: str
    reference: str | None = None


class Model(ServerModel):  # type: ignore[misc]
    """A model that applies the transforms of its checkpoint, unless a tokenizer is configured.

    Args:
        settings: options of ``onmt_translate``, and ``models``.
        model_id: id of the model.
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
        """Return all options of a translation.

        Raises:
            UserError: an option is unknown or invalid.
        """
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

        Args:
            texts: texts, all with a reference or none.
            longest: maximum characters of a padded batch.
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
        shown = {
            name: value for name, value in self.user_opt.items() if isinstance(value, (bool, int, float))
        }
        names = [os.path.basename(name) for name in self.user_opt["models"]]
        return {
            "model_id": self.model_id,
            "opt": shown,
            "models": names,
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
    exact = {}
    for name, value in settings.items():
        action = actions.get(name)
        if name == "models" or value is None:
            continue
        if action is None or action.dest in _NOT_APPLICABLE:
            valid = set(actions) - set(_NOT_APPLICABLE)
            raise UserError(f"opt: unknown option {name!r}{closest(name, valid)}")
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
    """Return the models of a configuration by id.

    Args:
        path: JSON file.
        allow_functions: import the functions of ``preprocess`` and ``postprocess``.

    Raises:
        UserError: the file is invalid, or a model cannot be used.
    """
    where = f"model_config: {path}"
    content = read_json(Path(path), "model_config")
    if not isinstance(content, dict) or not (isinstance(content.get("models"), list) and content["models"]):
        raise UserError(f"{where}: has no list of models; write it like {EXAMPLE}")
    _check_keys(where, content, _TOP)
    models: dict[int, Model] = {}
    for number, settings in enumerate(content["models"]):
        if not isinstance(settings, dict):
            raise UserError(f"{where}: has no list of models; write it like {EXAMPLE}")
        chosen = settings.get("id", max(models, default=-1) + 1)
        what = f"{where}: model {chosen if 'id' in settings else f'number {number + 1}'!s}"
        _check_model(what, settings, allow_functions)
        if chosen in models:
            raise UserError(f"{what}: the id is not unique; choose another one")
        try:
            models[chosen] = _make(chosen, settings, content.get("models_root", "./available_models"))
        except (ServerModelError, *UNREADABLE) as error:
            raise UserError(f"{what}: {error_line(error)}") from error
    return models


def _make(number: int, settings: dict[str, Any], root: str) -> Model:
    named = {new: settings[old] for old, new in _ARGUMENTS.items() if settings.get(old) is not None}
    features = settings.get("features")
    if features is not None:
        defaults = {"n_src_feats": 0, "src_feats_defaults": None, "reversible_tokenization": "joiner"}
        named["features_opt"] = {**defaults, **features}
    options = {**settings.get("opt", {}), "models": settings.get("models") or [settings["model"]]}
    named["model_root"] = settings.get("model_root", root)
    return Model(options, number, load=settings.get("load", False), **named)


def _check_keys(what: str, content: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise `UserError` for an unknown key or a value of the wrong type."""
    for key, value in content.items():
        if key not in wanted:
            raise UserError(f"{what}: unknown key {key!r}{closest(key, wanted)}")
        kinds = wanted[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is int):
            kind = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
            raise UserError(f"{what}: {key} is {str(value)[:80]!r}; expected {kind}")


def _check_model(what: str, settings: dict[str, Any], allow_functions: bool) -> None:
    """Raise `UserError` for invalid settings of a model."""
    _check_keys(what, settings, _MODEL)
    _check_keys(f"{what}: features", settings.get("features", {}), _FEATURES)
    models = settings.get("models") or [settings.get("model")]
    if not all(isinstance(name, str) and name for name in models):
        raise UserError(f"{what}: has no model; write it like {EXAMPLE}")
    if settings.get("on_timeout", "unload") not in ("to_cpu", "unload"):
        raise UserError(f"{what}: on_timeout is {settings['on_timeout']!r}; expected to_cpu or unload")
    for key in FUNCTIONS:
        if settings.get(key) and not allow_functions:
            raise UserError(f"{what}: {key} names Python functions; add --allow_functions to import them")
