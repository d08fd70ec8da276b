"""Select words of the embeddings in the folder of a compressed model.

Axes: ``V`` vocabulary, ``n`` kept words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from shared_embeddings.checkpoints.storage import HEADER, pack, packing_of, unpack
from shared_embeddings.hf.entry import ENTRY, entry_of, find_entry, from_entry


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
        ValueError: the embeddings do not match the configuration.
    """

    def __init__(self, files: Sequence[Path], settings: Mapping[str, Any], rows: int) -> None:
        self.tensors = _read(files)
        self.entry: dict[str, Any] | None = find_entry(settings)
        self._packing = packing_of(self.tensors)
        if self.entry is None:
            return
        self._embeddings, self._placements = from_entry(self.entry)
        state = unpack(self.tensors)
        self._types = {name: tensor.dtype for name, tensor in state.items()}
        for table, embedding in self._embeddings.items():
            if embedding.num_embeddings != rows:
                raise ValueError(
                    f"table '{table}' has {embedding.num_embeddings} words, but the vocabulary has {rows}; "
                    "this model cannot be trimmed"
                )
            own = f"{ENTRY}.{table}."
            found = {name.removeprefix(own): part for name, part in state.items() if name.startswith(own)}
            try:
                embedding.load_state_dict(found)
            except RuntimeError as error:
                raise ValueError(
                    f"table '{table}' does not match config.json; copy the folder again"
                ) from error

    def select(self, kept: Tensor) -> None:
        """Drop all words except `kept` ``(n,)``.

        Raises:
            ValueError: the method of an embedding cannot drop words.
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


def _read(files: Sequence[Path]) -> dict[str, Tensor]:
    """The tensors of the embeddings, still packed."""
    found = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            found.update({name: opened.get_tensor(name) for name in opened.keys() if is_of_embeddings(name)})
    return found
