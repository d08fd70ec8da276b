"""Trimming the vocabulary of a Hugging Face model: the model behind `shared_embeddings.hosts.hf.adapter`."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shared_embeddings.compress.host import Vocabulary
from shared_embeddings.hosts.hf.entry import KEY, find_entry
from shared_embeddings.hosts.hf.folder import (
    CONFIG,
    GENERATION,
    INDEX,
    check_sizes,
    model_class,
    read_config,
    read_json,
)
from shared_embeddings.hosts.hf.saving import (
    CODE,
    add_remote_code,
    check_output,
    copy_folders,
    copy_settings,
    folders_of,
    notes_on_code,
    replacing_folder,
    write_card,
)
from shared_embeddings.hosts.hf.tokenizer_file import TOKENIZER, TokenizerFile, load_tokenizer
from shared_embeddings.hosts.hf.word_rows import SIDES, Weights, without_weights, word_axes
from shared_embeddings.hosts.hf.words import check_ids, check_tokens, first_position, named_ids, with_new_ids
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import first_line

NAME = "tokens"
# The part of the configuration of a model of text and pictures that is about text.
TEXT = "text_config"
# What else is copied; vocabularies of slow tokenizers would still have all tokens.
COPIED = (".json", ".jinja", ".md", "LICENSE")
LEFT_OUT = ("vocab.json", "added_tokens.json", "tekken.json", INDEX)


class TrimmableFolder:
    """A model with a fast tokenizer whose tokens can be left out; what has them is cut into smaller ones.

    Args:
        path: the folder.

    Raises:
        UserError: a part is missing, needs custom code, or is of a kind that cannot be trimmed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = read_config(path)
        _check_folder(path, self.settings)
        chosen = model_class(path, self.settings)
        check_sizes(path, chosen)
        self.config = require("transformers").AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        text = self.config.get_text_config()
        if text is not self.config and TEXT not in self.settings:
            raise UserError(
                f"model {path}: is made of several models ({self.settings['model_type']}), each with its "
                "own settings; it cannot be trimmed"
            )
        self.rows = int(text.vocab_size)
        # Loading it first gives a better error for damaged ones.
        self.tokenizer = _load_tokenizer(path)
        has_file = (path / TOKENIZER).is_file()
        self.file = TokenizerFile(
            read_json(path / TOKENIZER) if has_file else json.loads(self.tokenizer.to_str())
        )
        _check_tokens(self.file, self.tokenizer, self.rows)
        self.kind = chosen.__name__
        model = without_weights(chosen, self.config)
        self.weights = Weights(path, word_axes(model), self.rows, self.settings)
        self.first_position = first_position(model)
        self.named: set[int] = set()
        for name in _settings_files(path):
            settings = read_json(path / name)
            check_ids(f"model {path}: {name}", settings)
            self.named.update(named_ids(settings))
        self.beginnings: set[int] = set()
        self.kept: Tensor | None = None
        self.trimmed: Any = None

    def vocabularies(self) -> list[Vocabulary]:
        """The one vocabulary; a row without a token is an empty word."""
        words = [self.file.tokens.get(number, "") for number in range(self.rows)]
        specials = frozenset(self.file.specials() | (self.named & self.file.tokens.keys()))
        return [Vocabulary(NAME, words, specials, self._unknown())]

    def _unknown(self) -> int | None:
        """The id of what cannot be cut, where the tokenizer has one for that."""
        unknown = self.file.model.get("unk_token")
        return self.file.ids.get(unknown) if unknown is not None else self.file.model.get("unk_id")

    def encode(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        """The ids of each line, with the special tokens around it."""
        del vocabulary  # there is one only
        return _encoded(self.tokenizer, lines)

    def used(self, vocabulary: str, lines: Sequence[str]) -> list[Counter[int]]:
        """How often the lines use each token: one by one, and as one text with its line ends."""
        alone = self.encode(vocabulary, lines)
        if self.file.kind == "WordPiece":
            unknown = self._unknown()
            self._note_beginnings(line for line, ids in zip(lines, alone, strict=True) if unknown in ids)
        together = _encoded(self.tokenizer, ["".join(f"{line}\n" for line in lines)])
        return [Counter(word for line in alone for word in line), Counter(together[0])]

    def _note_beginnings(self, lines: Iterator[str]) -> None:
        """Remember how far WordPiece gets in words that it cannot finish."""
        normalizer, splitter = self.tokenizer.normalizer, self.tokenizer.pre_tokenizer
        for line in lines:
            text = normalizer.normalize_str(line) if normalizer is not None else line
            for word, _ in splitter.pre_tokenize_str(text) if splitter is not None else [(text, None)]:
                self.beginnings.update(self.file.beginning_of(word))

    def closed(self, vocabulary: str, ids: set[int]) -> set[int]:
        """The ids that are tokens, and those that the tokenizer needs to cut covered texts as before.

        The id from which positions are counted stays what it is, by what stands before it.
        """
        del vocabulary
        before = {one for one in range(self.first_position) if one in self.file.tokens}
        return self.file.closed(ids | self.beginnings | before)

    def characters(self, vocabulary: str) -> set[int]:
        """The ids of single characters, unless the tokenizer falls back to bytes."""
        del vocabulary
        return self.file.characters()

    def trim(self, kept: Mapping[str, Tensor]) -> list[str]:
        """Leave out all tokens but those ``(n,)``, and rows that have no token.

        Raises:
            UserError: the tokenizer, or an embedding, cannot do without the others.
        """
        self.kept = kept[NAME]
        first = self.first_position
        if self.kept[:first].tolist() != list(range(first)):
            raise UserError(
                f"model {self.path}: counts positions from the id of padding, {first - 1}, and has rows "
                "without a token before it; it cannot be trimmed"
            )
        self.weights.tables.select(self.kept)
        with tempfile.TemporaryDirectory() as folder:
            self._write_settings(Path(folder))
            self.trimmed = _load_tokenizer(Path(folder))
        for new, old in enumerate(self.kept.tolist()):
            token = self.file.tokens[old]
            if (found := self.trimmed.token_to_id(token)) != new:
                raise UserError(
                    f"token {token!r}: the trimmed tokenizer has it as {found}, not as {new}; this kind "
                    "of tokenizer cannot be trimmed"
                )
        notes = []
        if empty := self.rows - len(self.file.tokens):
            notes.append(f"{empty:,} rows had no token, and go as well")
        gone = sorted(self.named - self.file.tokens.keys())
        if gone:
            notes.append(f"ids that were no tokens are null in the settings now: {', '.join(map(str, gone))}")
        notes += notes_on_code(self.path, self.kind)
        left = sorted(file.name for file in self.path.iterdir() if not self._is_written(file))
        return [*notes, f"left out: {', '.join(left)}"] if left else notes

    def encode_trimmed(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        """Like `encode`, by the trimmed tokenizer."""
        del vocabulary
        return _encoded(self.trimmed, lines)

    def restored(self, vocabulary: str, lines: Sequence[str], ids: Sequence[Sequence[int]]) -> int:
        """How many lines the tokenizer decodes from their ids, up to spaces and normalization."""
        del vocabulary
        return _restored(self.tokenizer, lines, ids, self.file.marks)

    def restored_trimmed(self, vocabulary: str, lines: Sequence[str], ids: Sequence[Sequence[int]]) -> int:
        """Like `restored`, by the trimmed tokenizer."""
        del vocabulary
        return _restored(self.trimmed, lines, ids, self.file.marks)

    def weight_bytes(self) -> int:
        """The bytes of all tensors."""
        return self.weights.bytes(self.rows if self.kept is None else len(self.kept))

    def sources(self) -> list[Path]:
        """The folder that the model was read from."""
        return [self.path]

    def files(self, output: Path) -> list[Path]:
        """The folder of a model that is called `output`.

        Raises:
            UserError: it exists and holds other files that would be lost.
        """
        check_output(output, force=True)
        return [output]

    def write_trimmed(self, output: Path, card: str) -> None:
        """Write the folder with a model card, all or nothing."""
        assert self.kept is not None
        with replacing_folder(output) as folder:
            self._write_settings(folder)
            for file in self.path.iterdir():
                if self._is_copied(file):
                    copy_settings(file, folder / file.name)
            copy_folders(self.path, folder)
            self.weights.write(folder, self.kept)
            add_remote_code(folder)
            write_card(self.path, folder, "Vocabulary trimmed", self.kind, card)

    def _write_settings(self, folder: Path) -> None:
        """Write the tokenizer and the settings with ids in them."""
        assert self.kept is not None
        ids = self.kept.tolist()
        new_ids = {old: new for new, old in enumerate(ids)}
        _write_json(folder / TOKENIZER, self.file.trimmed(ids))
        for name in _settings_files(self.path):
            settings = with_new_ids(read_json(self.path / name), new_ids)
            settings.pop(CODE, None)
            _write_json(folder / name, self._with_size(settings, len(ids)) if name == CONFIG else settings)

    def _with_size(self, settings: dict[str, Any], size: int) -> dict[str, Any]:
        """The configuration with the number of words, wherever it keeps it."""
        text = self.config.get_text_config()
        part = settings if text is self.config else settings[TEXT]
        part[text.attribute_map.get("vocab_size", "vocab_size")] = size
        part.update({name: size for name in SIDES if part.get(name) is not None})
        tables = self.weights.tables.entry
        return settings if tables is None else {**settings, KEY: tables}

    def _is_copied(self, file: Path) -> bool:
        """Whether a file goes into the new folder as it is."""
        is_other = file.name in (*LEFT_OUT, TOKENIZER) or file.name in _settings_files(self.path)
        return file.is_file() and not is_other and file.name.endswith(COPIED)

    def _is_written(self, file: Path) -> bool:
        """Whether there is such a file in the new folder."""
        return (
            self._is_copied(file)
            or file.name in (TOKENIZER, INDEX, *_settings_files(self.path))
            or file in folders_of(self.path)
            or file in self.weights.files
        )


def _encoded(tokenizer: Any, lines: Sequence[str]) -> list[list[int]]:
    """The ids of each line."""
    return [encoding.ids for encoding in tokenizer.encode_batch(list(lines))]


def _restored(
    tokenizer: Any, lines: Sequence[str], ids: Sequence[Sequence[int]], marks: Sequence[str]
) -> int:
    """How many lines a tokenizer decodes from their ids.

    Normalization may change case or accents; decoders may add or drop spaces, or leave the `marks` of pieces.
    """
    normalizer = tokenizer.normalizer

    def letters(text: str) -> str:
        found = text if normalizer is None else normalizer.normalize_str(text)
        for mark in marks:
            found = found.replace(mark, "")
        return "".join(found.split())

    decoded = tokenizer.decode_batch([list(line) for line in ids], skip_special_tokens=True)
    return sum(letters(line) == letters(text) for line, text in zip(lines, decoded, strict=True))


def _settings_files(folder: Path) -> list[str]:
    """The names of the files in which settings name tokens by their ids."""
    names = (CONFIG, GENERATION, "tokenizer_config.json")
    return [name for name in names if (folder / name).is_file()]


def _check_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise UserError for a model that needs custom code, is quantized, or has two vocabularies."""
    if settings.get(KEY) is not None and find_entry(settings) is None:
        raise UserError(f"model {folder}: is quantized; trim the original model")
    if CODE in settings and find_entry(settings) is None:
        raise UserError(
            f"model {folder}: needs code that comes with it, which is not run; it cannot be trimmed"
        )
    if settings.get("share_encoder_decoder_embeddings") is False:
        raise UserError(
            f"model {folder}: has a vocabulary for each side, but one tokenizer; only models whose sides "
            "share their embeddings can be trimmed"
        )


def _load_tokenizer(folder: Path) -> Any:
    """The fast tokenizer of a folder as the library tokenizers has it, without truncation and padding.

    Raises:
        UserError: it cannot be loaded, or is a slow one.
    """
    try:
        loaded = load_tokenizer(folder)
    except Exception as error:  # the library tokenizers raises plain ones
        missing = "" if (folder / TOKENIZER).is_file() else f"there is no {TOKENIZER}; "
        reason = f"{missing}{first_line(error)}"
        raise UserError(
            f"model {folder}: its tokenizer cannot be loaded ({reason}); copy it again"
        ) from error
    if not loaded.is_fast:
        raise UserError(
            f"model {folder}: {type(loaded).__name__} is a slow tokenizer, whose rules are code; only fast "
            "tokenizers can be trimmed"
        )
    tokenizer = loaded.backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_tokens(file: TokenizerFile, tokenizer: Any, rows: int) -> None:
    """Raise UserError unless the tokenizer matches its file and the model has a row for every token."""
    check_tokens(file.ids, rows)
    if tokenizer.get_vocab(with_added_tokens=True) != file.ids:
        odd = sorted(tokenizer.get_vocab(with_added_tokens=True).items() ^ file.ids.items())[0]
        raise UserError(
            f"token {odd[0]!r}: is not the same in {TOKENIZER} and in the tokenizer that transformers loads; "
            "write both again with save_pretrained"
        )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
