"""Trimming the vocabulary of a Hugging Face model: its tokenizer, its settings and its weights.

Axes: ``V`` rows of the word embeddings, ``n`` kept rows.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from shared_embeddings.checkpoints import load_tensors, save_safetensors
from shared_embeddings.compress.host import HostVocabulary, TrimmableModel
from shared_embeddings.hf import folder
from shared_embeddings.hf.card import write_card
from shared_embeddings.hf.sentences import read_prompts
from shared_embeddings.hf.tokenizer import TOKENIZER, TokenizerFile, check_tokens, load_tokenizer
from shared_embeddings.hf.word_layers import (
    ENTRY,
    KEY,
    check_text_only,
    entry_of,
    find_entry,
    first_position,
    from_entry,
    further_layers,
    has_words,
    without_weights,
)
from shared_embeddings.quant.storage import HEADER, pack, packing_of, unpack
from shared_embeddings.utils.errors import UserError, require
from shared_embeddings.utils.files import replacing, write_json
from shared_embeddings.utils.reading import read_json

NAME = "tokens"
# The part of the configuration of a model of text and pictures that is about text.
_TEXT = "text_config"
# Sizes of vocabularies that are trimmed with the first: of the other side, of Gemma's tables for layers.
_TRIMMED_WITH = ("decoder_vocab_size", "vocab_size_per_layer_input")
# Settings with similar names that do not count words.
_OTHER_SIZES = ("type_vocab_size", "type_vocab_sizes", "task_type_vocab_size", "entity_vocab_size")
# Files in which settings name tokens by their ids.
_SETTINGS = (folder.CONFIG, "generation_config.json", "tokenizer_config.json")
# What else is copied; vocabularies of slow tokenizers would still have all tokens.
_COPIED = (".json", ".jinja", ".md", "LICENSE")
_LEFT_OUT = ("vocab.json", "added_tokens.json", "tekken.json", folder.INDEX)
# Settings with one id or a list of them (XLM's names end in "_index"), and with lists of other forms.
_NAMES = ("_token_id", "_token_index", "bos_index", "eos_index", "pad_index", "unk_index", "mask_index")
_LISTS = (
    *("suppress_tokens", "bad_words_ids", "force_words_ids"),  # also "begin_suppress_tokens"
    *("sequence_bias", "forced_decoder_ids"),
)


class TrimmableFolder(TrimmableModel):
    """A model with a fast tokenizer: what has tokens that are left out is cut into smaller ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config = folder.read_config(path)
        if config.get("share_encoder_decoder_embeddings") is False:
            raise UserError(
                f"model {path}: has a vocabulary for each side, but one tokenizer; only models whose sides "
                "share their embeddings can be trimmed"
            )
        architecture = folder.named_class(path, config)
        self.config = require("transformers").AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        text = self.config.get_text_config()
        if text is not self.config and _TEXT not in config:
            raise UserError(
                f"model {path}: is made of several models ({config['model_type']}), each with its own "
                "settings; it cannot be trimmed"
            )
        self.rows = int(text.vocab_size)
        self.tokenizer = _load_fast_tokenizer(path)
        is_stored = (path / TOKENIZER).is_file()
        self.file = TokenizerFile(
            read_json(path / TOKENIZER) if is_stored else json.loads(self.tokenizer.to_str())
        )
        check_tokens(self.file.ids, self.rows)
        self.kind = architecture.__name__
        model = without_weights(architecture, self.config)
        self.first_position = first_position(model)
        try:
            self.weights = Weights(path, word_axes(model), self.rows, config)
        except UserError:
            check_text_only(self.kind, self.config)  # their tensors may have other names than in the model
            raise
        self.settings = {name: read_json(path / name) for name in _SETTINGS if (path / name).is_file()}
        self.named = {token for settings in self.settings.values() for token in named_ids(settings)}
        unknown = self.file.model.get("unk_token")
        # The id of what cannot be cut, where the tokenizer has one for that.
        self.unknown = self.file.model.get("unk_id") if unknown is None else self.file.ids.get(unknown)
        self.beginnings: set[int] = set()
        self.kept: list[int] = []
        self.trimmed: Any = None

    def vocabularies(self) -> list[HostVocabulary]:
        words = [self.file.tokens.get(number, "") for number in range(self.rows)]
        specials = self.file.specials() | (self.named & self.file.tokens.keys())
        for prompt in read_prompts(self.path)[0].values():
            specials.update(*self.encode(NAME, [prompt, prompt.strip()]))
        return [HostVocabulary(NAME, words, frozenset(specials), self.unknown)]

    def encode(self, vocabulary: str, lines: Sequence[str], trimmed: bool = False) -> list[list[int]]:
        tokenizer = self.trimmed if trimmed else self.tokenizer
        return [encoding.ids for encoding in tokenizer.encode_batch(list(lines))]

    def used(self, vocabulary: str, lines: Sequence[str]) -> list[Counter[int]]:
        """Count the tokens of the lines: one by one, and as one text with its line ends."""
        alone = self.encode(vocabulary, lines)
        for line, ids in zip(lines, alone, strict=True):
            if self.unknown in ids:
                self.beginnings |= self.file.beginnings_in(line, self.tokenizer)
        (together,) = self.encode(vocabulary, ["".join(f"{line}\n" for line in lines)])
        return [Counter(word for line in alone for word in line), Counter(together)]

    def closed(self, vocabulary: str, ids: set[int]) -> set[int]:
        """Return the ids that are tokens, and those that the tokenizer needs to cut covered texts as before.

        The id from which positions are counted stays what it is, by what stands before it.
        """
        before = self.file.tokens.keys() & set(range(self.first_position))
        return self.file.closed(ids | self.beginnings | before)

    def characters(self, vocabulary: str) -> set[int]:
        return self.file.characters()

    def trim(self, token_ids: Mapping[str, Tensor]) -> list[str]:
        first, self.kept = self.first_position, token_ids[NAME].tolist()
        if self.kept[:first] != list(range(first)):
            raise UserError(
                f"model {self.path}: counts positions from the id of padding, {first - 1}, and has rows "
                "without a token before it; it cannot be trimmed"
            )
        self.weights.select(token_ids[NAME])
        with tempfile.TemporaryDirectory() as temporary:
            self._write_settings(Path(temporary))
            self.trimmed = _load_fast_tokenizer(Path(temporary))
        for new, old in enumerate(self.kept):
            token = self.file.tokens[old]
            if (number := self.trimmed.token_to_id(token)) != new:
                raise UserError(
                    f"token {token!r}: the trimmed tokenizer has it as {number}, not as {new}; this kind "
                    "of tokenizer cannot be trimmed"
                )
        notes = []
        if empty := self.rows - len(self.file.tokens):
            notes.append(f"{empty:,} rows had no token, and go as well")
        if gone := sorted(self.named - self.file.tokens.keys()):
            notes.append(f"ids that were no tokens are null in the settings now: {', '.join(map(str, gone))}")
        notes += folder.notes_on_code(self.path, self.kind)
        written = {self.path / name for name in (TOKENIZER, folder.INDEX, *self.settings)}
        written.update(self._copied(), self.weights.files)
        left_out = [file.name for file in sorted(self.path.iterdir()) if file not in written]
        return [*notes, f"left out: {', '.join(left_out)}"] if left_out else notes

    def restored(
        self, vocabulary: str, lines: Sequence[str], ids: Sequence[Sequence[int]], trimmed: bool = False
    ) -> int:
        return self.file.restored(self.trimmed if trimmed else self.tokenizer, lines, ids)

    def weight_bytes(self) -> int:
        return self.weights.bytes(len(self.kept) or self.rows)

    def files(self, path: Path) -> list[Path]:
        if path != self.path:
            folder.check_output(path, force=True)
        return [path]

    def write_trimmed(self, output: Path, card: str) -> None:
        with replacing(output) as target:
            target.mkdir()
            self._write_settings(target)
            folder.copy_files(self._copied(), target)
            self.weights.write(target, torch.tensor(self.kept))
            folder.add_remote_code(target)
            write_card(self.path, target, "Vocabulary trimmed", card)

    def _copied(self) -> list[Path]:
        """The files and folders that no id is in."""
        others = (*_LEFT_OUT, TOKENIZER, *self.settings)
        files = [*folder.other_files(self.path), *self.path.glob("*.md")]
        files = [file for file in files if file.is_dir() or file.name.endswith(_COPIED)]
        return [file for file in files if file.name not in others]

    def _write_settings(self, target: Path) -> None:
        """Write the tokenizer and the settings with ids, or the number of words, in them."""
        new_ids = {old: new for new, old in enumerate(self.kept)}
        written = {TOKENIZER: self.file.trimmed(self.kept)}
        for name, settings in self.settings.items():
            written[name] = with_new_ids(settings, new_ids)
            written[name].pop(folder.CODE, None)
        text = self.config.get_text_config()
        part = written[folder.CONFIG] if text is self.config else written[folder.CONFIG][_TEXT]
        part[text.attribute_map.get("vocab_size", "vocab_size")] = len(self.kept)
        part.update({name: len(self.kept) for name in _TRIMMED_WITH if part.get(name) is not None})
        if self.weights.entry is not None:
            written[folder.CONFIG][KEY] = self.weights.entry
        for name, content in written.items():
            write_json(target / name, content)


def _load_fast_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a folder as the library tokenizers has it, without truncation and padding."""
    loaded = load_tokenizer(path)
    if not loaded.is_fast:
        raise UserError(
            f"model {path}: {type(loaded).__name__} is a slow tokenizer, whose rules are code; only fast "
            "tokenizers can be trimmed"
        )
    tokenizer = loaded.backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


# Weights.


def word_axes(model: Any) -> dict[str, int | None]:
    """Return the word axis of every tensor of a model, by name; None for a tensor without one.

    It is the axis that grows if the configuration has one more word. No weights are allocated.
    """
    kind, config = type(model), model.config

    def shapes(*sizes: str) -> dict[str, torch.Size]:
        """Return the shapes of all tensors where the named sizes, where present, are larger by one."""
        wider = copy.deepcopy(config)
        text = wider.get_text_config()
        for name in sizes:
            if getattr(text, name, None) is not None:
                setattr(text, name, getattr(text, name) + 1)
        return {name: tensor.shape for name, tensor in without_weights(kind, wider).state_dict().items()}

    if hashed := [name for name in further_layers(model) if not has_words(name)]:
        raise UserError(
            f"{kind.__name__}: looks up {' and '.join(hashed)} by hashes of the ids of tokens, which "
            "trimming would change; this model cannot be trimmed, only compressed"
        )
    text, before = config.get_text_config(), shapes()
    not_others = ["vocab_size", text.attribute_map.get("vocab_size"), "decoder_vocab_size", *_OTHER_SIZES]
    not_others += [name for name in _TRIMMED_WITH if getattr(text, name, None) == text.vocab_size]
    for name, size in text.to_dict().items():
        is_other = "vocab_size" in name and type(size) is int and name not in not_others
        if is_other and shapes(name) != before:
            raise UserError(
                f"{kind.__name__}: has a second vocabulary ({name}: {size}), which is not trimmed with the "
                "first; this model cannot be trimmed"
            )
    after = shapes("vocab_size", *_TRIMMED_WITH)
    axes: dict[str, int | None] = {}
    for name, shape in before.items():
        longer = [axis for axis, size in enumerate(shape) if after[name][axis] != size]
        if len(longer) > 1:
            raise UserError(f"tensor {name} has two word axes; this model cannot be trimmed")
        axes[name] = longer[0] if longer else None
    return axes


class Weights:
    """The tensors in the files of a model, some of which have a row for each of V words.

    Args:
        axes: the output of `word_axes`.
        config: the content of ``config.json``, whose `entry` describes the embeddings of a compressed model.

    Raises:
        UserError: a tensor may have an unknown word axis, or the embeddings do not match the configuration.
    """

    def __init__(
        self, path: Path, axes: Mapping[str, int | None], rows: int, config: Mapping[str, Any]
    ) -> None:
        self.path, self.files, self.rows = path, folder.weight_files(path), rows
        self._sizes: dict[str, int] = {}  # bytes of tensors that do not belong to embeddings
        self._axes: dict[str, int | None] = {}
        self._embedded: dict[str, Tensor] = {}  # those that do, as in the files
        for file in self.files:
            for name, tensor in load_tensors(file, f"weights {file}").items():
                if name == HEADER or name.startswith(f"{ENTRY}."):
                    self._embedded[name] = tensor
                else:
                    self._sizes[name], shape = tensor.nbytes, tuple(tensor.shape)
                    # In a file, the name may have another prefix than in the model.
                    similar = (key for key in axes if key.endswith(f".{name}") or name.endswith(f".{key}"))
                    in_model = name if name in axes else next(similar, None)
                    if in_model is None and rows in shape:
                        raise UserError(
                            f"tensor {name} {shape} may have a row for every word, but is not in the model"
                        )
                    self._axes[name] = axis = None if in_model is None else axes[in_model]
                    if axis is not None and shape[axis] != rows:
                        raise UserError(
                            f"tensor {name} {shape} does not have one row for each of the {rows} words; this "
                            "model cannot be trimmed"
                        )
        self.entry = find_entry(config)
        state = unpack(self._embedded)
        self._embeddings, self._placements = from_entry(self.entry, state) if self.entry else ({}, {})
        for table, embedding in self._embeddings.items():
            if embedding.num_embeddings != rows:
                raise UserError(
                    f"table '{table}' has {embedding.num_embeddings} words, but the vocabulary has {rows}; "
                    "this model cannot be trimmed"
                )
            start = f"{ENTRY}.{table}."
            embedding.load_state_dict(
                {name.removeprefix(start): t for name, t in state.items() if name.startswith(start)}
            )

    def select(self, ids: Tensor) -> None:
        """Drop all words of embeddings except `ids` ``(n,)``; UserError if a method cannot do that."""
        if self.entry is None:
            return
        packing, before = packing_of(self._embedded), unpack(self._embedded)
        embeddings = {name: embedding.select_rows(ids) for name, embedding in self._embeddings.items()}
        self.entry = entry_of(embeddings, self._placements)
        state = {
            f"{ENTRY}.{table}.{name}": tensor.detach().contiguous()
            for table, embedding in embeddings.items()
            for name, tensor in embedding.state_dict().items()
        }
        # Tensors that are not packed keep the dtype of the model.
        state = {name: t.to(before[name].dtype) if name in before else t for name, t in state.items()}
        self._embedded = state if packing is None else pack(state, state, packing.store)

    def bytes(self, rows: int) -> int:
        """Return the size of all tensors with `rows` words, and of compressed embeddings as they are."""
        total = sum(tensor.nbytes for tensor in self._embedded.values())
        for name, size in self._sizes.items():
            total += size if self._axes[name] is None else size // self.rows * rows
        return total

    def write(self, target: Path, ids: Tensor) -> None:
        """Write the weights with only the rows `ids` ``(n,)`` to a folder, one file at a time.

        The embeddings of a compressed model, already trimmed, are written to the last file.
        """
        where: dict[str, str] = {}
        for file in self.files:
            tensors = load_tensors(file, f"weights {file}")
            selected = {name: tensor for name, tensor in tensors.items() if name in self._axes}
            for name, tensor in selected.items():
                if (axis := self._axes[name]) is not None:
                    selected[name] = tensor.index_select(axis, ids)
            if file == self.files[-1]:
                selected.update(self._embedded)
            with safe_open(file, "pt") as opened:
                metadata = opened.metadata()
            save_safetensors(selected, target / file.name, metadata)
            where.update(dict.fromkeys(selected, file.name))
        if [file.name for file in self.files] != [folder.WEIGHTS]:
            index = read_json(self.path / folder.INDEX)
            index["metadata"] = {**index.get("metadata", {}), "total_size": self.bytes(len(ids))}
            write_json(target / folder.INDEX, {**index, "weight_map": where})


# Token ids in settings.


def named_ids(settings: Mapping[str, Any]) -> Iterator[int]:
    """Yield the ids in settings such as ``pad_token_id``, at any depth; -1 means none."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from named_ids(value)
        elif name.endswith(_NAMES) or name == "forced_decoder_ids":
            values = value if isinstance(value, list) else [value]
            ids = [item[1] if isinstance(item, list) else item for item in values]
            yield from (item for item in ids if isinstance(item, int) and item >= 0)


def with_new_ids(settings: Mapping[str, Any], new_ids: Mapping[int, int]) -> dict[str, Any]:
    """Return settings with new token ids; None for ids of removed tokens, and for lists without others."""
    renumbered: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "added_tokens_decoder":
            value = {str(new_ids[int(old)]): token for old, token in value.items()}
        elif isinstance(value, dict):
            value = with_new_ids(value, new_ids)
        elif not (value or value == 0) or not name.endswith((*_NAMES, *_LISTS)):
            pass
        elif not isinstance(value, list):
            value = new_ids.get(value) if value >= 0 else value
        # transformers rejects empty lists.
        elif name == "forced_decoder_ids":  # pairs of a position and a token
            value = [[place, new_ids.get(token)] for place, token in value] or None
        elif name == "sequence_bias":  # pairs of tokens and a number
            whole = [(ids, bias) for ids, bias in value if new_ids.keys() >= set(ids)]
            value = [[[new_ids[token] for token in ids], bias] for ids, bias in whole] or None
        elif name in ("bad_words_ids", "force_words_ids"):
            value = [[new_ids[token] for token in ids] for ids in value if new_ids.keys() >= set(ids)] or None
        else:
            value = [new_ids[token] for token in value if token in new_ids] or None
        renumbered[name] = value
    return renumbered
