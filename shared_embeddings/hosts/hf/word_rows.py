"""Find and trim the tensors of a Hugging Face model that have a row for every word.

Axes: ``V`` rows of the word embeddings, ``n`` kept rows.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from shared_embeddings.checkpoints.checksums import save_safetensors
from shared_embeddings.hosts.hf.entry import ENTRY, entry_of, find_entry, from_entry
from shared_embeddings.hosts.hf.folder import INDEX, WEIGHTS, check_weights, read_json, weight_files
from shared_embeddings.quant.storage import HEADER, pack, packing_of, unpack
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.reading import parse_json

# Vocabulary sizes of models with one for each side.
SIDES = ("decoder_vocab_size",)
# Settings with similar names that do not count words.
_OTHER_SIZES = ("type_vocab_size", "type_vocab_sizes", "task_type_vocab_size", "entity_vocab_size")


def word_axes(model: Any) -> dict[str, int | None]:
    """The word axis of every tensor of a model, by name; None for a tensor without one.

    It is the axis that grows if the configuration has one more word. No weights are allocated.

    Args:
        model: a transformers model, possibly `without_weights`.

    Raises:
        UserError: a tensor has two word axes, or the model has a second vocabulary.
    """
    kind, config = type(model), model.config
    text = config.get_text_config()
    own = ("vocab_size", text.attribute_map.get("vocab_size"), *SIDES)
    before = _shapes(model)
    for name, size in text.to_dict().items():
        is_other = "vocab_size" in name and type(size) is int and name not in (*own, *_OTHER_SIZES)
        if is_other and _shapes(without_weights(kind, _wider(config, [name]))) != before:
            raise UserError(
                f"{kind.__name__}: has a second vocabulary ({name}: {size}), which is not trimmed with the "
                "first; this model cannot be trimmed"
            )
    after = _shapes(without_weights(kind, _wider(config, ["vocab_size", *SIDES])))
    axes: dict[str, int | None] = {}
    for name, shape in before.items():
        longer = [axis for axis, size in enumerate(shape) if after[name][axis] != size]
        if len(longer) > 1:
            raise UserError(f"tensor {name} has two word axes; this model cannot be trimmed")
        axes[name] = longer[0] if longer else None
    return axes


def _wider(config: Any, names: Sequence[str]) -> Any:
    """A copy of a configuration with the named sizes, where present, increased by one."""
    wider = copy.deepcopy(config)
    text = wider.get_text_config()
    for name in names:
        if getattr(text, name, None) is not None:
            setattr(text, name, getattr(text, name) + 1)
    return wider


def _shapes(model: Any) -> dict[str, torch.Size]:
    """The shape of every tensor of a model."""
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def without_weights(model_class: Any, config: Any) -> Any:
    """A transformers model on the meta device, with an attention whose masks do not depend on values."""
    with torch.device("meta"):
        return model_class._from_config(copy.deepcopy(config), attn_implementation="eager")


class Weights:
    """The weight files of a model.

    Args:
        folder: the folder of the model.
        axes: the output of `word_axes`.
        rows: V.
        settings: the content of ``config.json``, which describes the embeddings of a compressed model.

    Attributes:
        tables: the embeddings of a compressed model.

    Raises:
        UserError: a file is missing or damaged, or a tensor may have an unknown word axis.
    """

    def __init__(
        self, folder: Path, axes: Mapping[str, int | None], rows: int, settings: Mapping[str, Any]
    ) -> None:
        self.folder = folder
        self.files = weight_files(folder)
        self.rows = rows
        headers = {name: entry for file in self.files for name, entry in _header(file).items()}
        check_weights(self.files)
        self.tables = CompressedTables(self.files, settings, rows)
        self._entries = {name: entry for name, entry in headers.items() if not is_of_embeddings(name)}
        self._axes = {
            name: _axis_of(name, entry["shape"], axes, rows) for name, entry in self._entries.items()
        }

    def bytes(self, rows: int) -> int:
        """The size of all tensors with `rows` words, plus the current size of compressed embeddings."""
        total = self.tables.bytes()
        for name, entry in self._entries.items():
            begin, end = entry["data_offsets"]
            has_words = self._axes[name] is not None
            total += (end - begin) // self.rows * rows if has_words else end - begin
        return total

    def write(self, folder: Path, kept: Tensor) -> None:
        """Write the weights with only the rows `kept` ``(n,)`` to a folder, one file at a time.

        The embeddings of a compressed model, already trimmed, are written to the last file.
        """
        where: dict[str, str] = {}
        for file in self.files:
            with safe_open(file, "pt") as opened:
                tensors = {
                    name: self._selected(name, opened.get_tensor(name), kept)
                    for name in opened.keys()
                    if not is_of_embeddings(name)
                }
                metadata = opened.metadata()
            if file == self.files[-1]:
                tensors.update(self.tables.tensors)
            save_safetensors(tensors, folder / file.name, metadata)
            where.update(dict.fromkeys(tensors, file.name))
        if [file.name for file in self.files] != [WEIGHTS]:
            index = read_json(self.folder / INDEX)
            index["metadata"] = {**index.get("metadata", {}), "total_size": self.bytes(len(kept))}
            index["weight_map"] = where
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _selected(self, name: str, tensor: Tensor, kept: Tensor) -> Tensor:
        """A tensor with the kept rows; unchanged if it has no word axis."""
        axis = self._axes[name]
        return tensor if axis is None else tensor.index_select(axis, kept)


def _axis_of(name: str, shape: list[int], axes: Mapping[str, int | None], rows: int) -> int | None:
    """The word axis of a tensor in a file, whose name may have another prefix than in the model.

    Raises:
        UserError: the tensor is not in the model but has V rows, or has another number of rows.
    """
    alike = (own for own in axes if own.endswith(f".{name}") or name.endswith(f".{own}"))
    own = name if name in axes else next(alike, None)
    if own is None and rows in shape:
        raise UserError(
            f"tensor {name} {tuple(shape)} may have a row for every word, but is not in the model"
        )
    axis = None if own is None else axes[own]
    if axis is not None and shape[axis] != rows:
        raise UserError(
            f"tensor {name} {tuple(shape)} does not have one row for each of the {rows} words; this model "
            "cannot be trimmed"
        )
    return axis


def _header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: tensor name -> shape and offsets.

    Raises:
        UserError: the file is truncated or damaged.
    """
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = parse_json(opened.read(min(size, file.stat().st_size)).decode("utf-8"), str(file))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"weights {file}: cannot be read; the file is damaged, copy it again") from error
    if 8 + size + end != file.stat().st_size:
        raise UserError(f"weights {file}: the file is truncated, copy it again")
    return entries


def is_of_embeddings(name: str) -> bool:
    """Whether a tensor of a file belongs to the embeddings or is their packing header."""
    return name == HEADER or name.startswith(f"{ENTRY}.")


class CompressedTables:
    """The embeddings in the folder of a compressed model; none for a plain model.

    Args:
        files: the weight files.
        settings: the content of ``config.json``.
        rows: V.

    Raises:
        UserError: the embeddings do not match the configuration.
    """

    def __init__(self, files: Sequence[Path], settings: Mapping[str, Any], rows: int) -> None:
        self.tensors = _read_embeddings(files)
        self.entry: dict[str, Any] | None = find_entry(settings)
        self._packing = packing_of(self.tensors)
        if self.entry is None:
            return
        self._embeddings, self._placements = from_entry(self.entry)
        state = unpack(self.tensors)
        self._types = {name: tensor.dtype for name, tensor in state.items()}
        for table, embedding in self._embeddings.items():
            if embedding.num_embeddings != rows:
                raise UserError(
                    f"table '{table}' has {embedding.num_embeddings} words, but the vocabulary has {rows}; "
                    "this model cannot be trimmed"
                )
            own = f"{ENTRY}.{table}."
            found = {name.removeprefix(own): part for name, part in state.items() if name.startswith(own)}
            try:
                embedding.load_state_dict(found)
            except RuntimeError as error:
                raise UserError(
                    f"table '{table}' does not match config.json; copy the folder again"
                ) from error

    def select(self, kept: Tensor) -> None:
        """Drop all words except `kept` ``(n,)``.

        Raises:
            UserError: the method of an embedding cannot drop words.
        """
        if self.entry is None:
            return
        embeddings = {name: embedding.select_rows(kept) for name, embedding in self._embeddings.items()}
        self.entry = entry_of(embeddings, self._placements)
        state = {
            f"{ENTRY}.{table}.{name}": tensor.detach().contiguous()
            for table, embedding in embeddings.items()
            for name, tensor in embedding.state_dict().items()
        }
        # Tensors that are not packed keep the dtype of the model.
        state = {name: tensor.to(self._types.get(name, tensor.dtype)) for name, tensor in state.items()}
        self.tensors = state if self._packing is None else pack(state, state, self._packing.store)

    def bytes(self) -> int:
        """The size of the tensors as written."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def _read_embeddings(files: Sequence[Path]) -> dict[str, Tensor]:
    """The tensors of the embeddings, still packed."""
    found = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            found.update({name: opened.get_tensor(name) for name in opened.keys() if is_of_embeddings(name)})
    return found
