"""Models of Hugging Face as a host of `shared_embeddings.checkpoints.adapter`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_embeddings.checkpoints.adapter import TiedTable, WordEmbedding
from shared_embeddings.checkpoints.agreement import Probe
from shared_embeddings.checkpoints.quality import Quality, Validation
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.hf.agreement import probe
from shared_embeddings.hf.entry import ENTRY, place
from shared_embeddings.hf.folder import model_class, read_config, read_model, reading
from shared_embeddings.hf.loading import load
from shared_embeddings.hf.quality import check_causal, perplexity
from shared_embeddings.hf.saving import check_output, copy_rest, replacing_folder, save_pretrained
from shared_embeddings.hf.tables import WordTable, check_scoring, find_tables
from shared_embeddings.hf.words import Vocabulary
from shared_embeddings.options import OptionError
from shared_embeddings.registry import build
from shared_embeddings.registry import options as options_class
from shared_embeddings.sizing.accounting import distinct_state

# How many of the tensors that are left out are named.
_NAMED = 3


class Host:
    """Folders with ``config.json`` and safetensors, as ``save_pretrained`` of transformers writes them."""

    def recognises(self, path: Path) -> bool:
        """Whether a path is a folder with a configuration of a model."""
        try:
            config = read_config(path)
        except ValueError:
            return False
        return "model_type" in config or "architectures" in config

    def read(self, path: Path) -> FolderModel:
        """Read a model.

        Raises:
            ValueError: it is incomplete, of no class of transformers, or its weights are not safetensors.
            ImportError: transformers is not installed.
        """
        with reading(path):
            return FolderModel(path)


class FolderModel:
    """A model that was read from a folder, on the CPU, in the type of its weights.

    Embeddings are fitted in 32 bits, and take the type of the model when they are placed.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        config = read_config(path)
        if config.get("quantization_config") is not None:
            raise ValueError(f"model {path}: is quantised; compress the model that it was made from")
        self.is_compressed = ENTRY in config
        self.module: Any
        self.module, self._left_out = (
            (load(path), []) if self.is_compressed else read_model(path, model_class(path, config))
        )
        self.vocabulary = Vocabulary(path)
        found = [] if self.is_compressed else find_tables(self.module.eval())
        self._tables: dict[str, WordTable] = {table.name: table for table in found}

    def embeddings(self) -> list[WordEmbedding]:
        """Its embeddings, whether they are plain tables or not."""
        modules: dict[str, Any] = {
            name: nn.Embedding.from_pretrained(table.weight.detach()) for name, table in self._tables.items()
        }
        if self.is_compressed:
            modules = dict(getattr(self.module, ENTRY).items())
        return [
            WordEmbedding(name, self.vocabulary.words(module.num_embeddings), module.padding_idx, module)
            for name, module in modules.items()
        ]

    def tables(self) -> list[TiedTable]:
        """Its tables: one where the input and the output are tied.

        Raises:
            ValueError: it has other embeddings already, or its output can have no others.
        """
        if self.is_compressed:
            raise ValueError(f"model {self.path}: is compressed already; compress the plain model instead")
        check_scoring(self.module)
        return [self._described(table) for table in self._tables.values()]

    def _described(self, table: WordTable) -> TiedTable:
        """A table with its words. No word is without a vector: what a padding word has, it keeps."""
        inputs, outputs = list(table.placement.inputs), list(table.placement.outputs)
        weight = table.weight.detach()
        return TiedTable(
            name=table.name,
            uses=(*inputs, *outputs),
            words=self.vocabulary.words(len(weight)),
            table=weight,
            padding_idx=None,
            is_scored=bool(outputs),
            sentence_marks=self.vocabulary.sentence_marks(),
            parameters=weight.numel(),
            stored_bits=8 * weight.nbytes,
        )

    def count_text(self, texts: Sequence[Path]) -> dict[str, int]:
        """How often each word is in texts, as the tokenizer divides them; ValueError where there is none."""
        return self.vocabulary.count(texts)

    def options_for(self, table: str, method: str, options: Mapping[str, object]) -> dict[str, object]:
        """The options of a method.

        Raises:
            ValueError: its scores are none that a model of transformers can use.
        """
        chosen, found = dict(options), self._tables[table]
        if not found.placement.outputs:
            return _for_input(method, chosen)
        words, width = found.weight.shape
        sizes: dict[str, Any] = {"num_embeddings": words, "embedding_dim": width, **chosen}
        with torch.device("meta"):
            new = build(method, words=self.vocabulary.words(words), **sizes)
        if not new.has_output or new.score_dim != width:
            takes = f"takes {new.score_dim} dimensions" if new.has_output else "has no output side"
            raise ValueError(
                f"this {method} embedding {takes}, but the model ends in {width}; set output: table or "
                "output_projection: true where the method has them, or take another method"
            )
        if not new.has_linear_scores:
            raise ValueError(
                f"the softmax of this {method} embedding takes several steps, but models of transformers end "
                "in one; take another method"
            )
        return chosen

    def quality(self, validation: Validation) -> Quality:
        """The perplexity of a text; ValueError where the model has none, or the text cannot be used."""
        check_causal(self.module)
        return perplexity(self.module, self.vocabulary, validation.one_text())

    def probe(self, texts: Sequence[Path] | None, seed: int) -> Probe:
        """What the model predicts; ValueError where it takes more than tokens."""
        return probe(self.module, self.vocabulary, texts, seed)

    def place(self, fitted: Mapping[str, SharedEmbedding]) -> list[str]:
        """Put the embeddings into the model, in its type."""
        for name, embedding in fitted.items():
            embedding.to(self._tables[name].weight.dtype)
        place(self.module, fitted, {name: table.placement for name, table in self._tables.items()})
        if not self._left_out:
            return []
        named = ", ".join([*self._left_out[:_NAMED], *["…"] * (len(self._left_out) > _NAMED)])
        kind = type(self.module).__name__
        return [f"tensors that a {kind} does not have are left out ({len(self._left_out)}: {named})"]

    def written(self) -> dict[str, Tensor]:
        """The tensors of the model, each once, but those that its class computes anew."""
        computed = self.module._keys_to_ignore_on_save or ()
        return {name: found for name, found in distinct_state(self.module).items() if name not in computed}

    def sources(self) -> list[Path]:
        """The folder that the model was read from."""
        return [self.path]

    def files(self, path: Path) -> list[Path]:
        """The one folder of a model that is called `path`; ValueError where something else would be lost."""
        check_output(path, force=True)
        return [path]

    def write(self, path: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the folder, with the tokenizer of the one that was read, completely or not at all."""
        check_output(path, force=True)
        # Of tensors with several names, transformers chooses the one to write.
        state = {**self.module.state_dict(), **weights}
        with replacing_folder(path) as temporary:
            save_pretrained(self.module, temporary, state_dict=state)
            copy_rest(self.path, temporary)


def _for_input(method: str, options: dict[str, object]) -> dict[str, object]:
    """The options of an embedding that is for the input only; OptionError where an output is asked for."""
    if "output" in {field.name for field in dataclasses.fields(options_class(method))}:
        if options.setdefault("output", "none") != "none":
            raise OptionError(
                f"{method}: option 'output' is {options['output']!r}, but this table has an input only; "
                "leave it out"
            )
    return options
