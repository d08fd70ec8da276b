"""How `shared-embeddings` opens Hugging Face models: see `shared_embeddings.compress.host`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_embeddings.accounting import distinct_state
from shared_embeddings.checkpoints.tensors import check_finite
from shared_embeddings.compress.host import EmbeddingTable, check_scores
from shared_embeddings.compress.measure import Probe, Quality, Validation
from shared_embeddings.embedding import SharedEmbedding, WordEmbedding
from shared_embeddings.export.graph import OnnxBody
from shared_embeddings.hosts.hf.agreement import check_causal, perplexity, probe
from shared_embeddings.hosts.hf.dense import dense_model
from shared_embeddings.hosts.hf.entry import ENTRY, KEY, find_entry, place
from shared_embeddings.hosts.hf.folder import (
    CONFIG,
    check_sizes,
    load,
    model_class,
    quiet,
    read_config,
    read_json,
    read_model,
    read_tensor,
    reading,
    stored_names,
    tensor_files,
    weight_files,
)
from shared_embeddings.hosts.hf.saving import (
    CODE,
    check_output,
    copy_rest,
    notes_on_code,
    replacing_folder,
    save_pretrained,
    write_card,
)
from shared_embeddings.hosts.hf.tables import WordTable, check_scoring, find_tables
from shared_embeddings.hosts.hf.tracing import traced
from shared_embeddings.hosts.hf.trim import TrimmableFolder
from shared_embeddings.hosts.hf.word_rows import without_weights
from shared_embeddings.hosts.hf.words import Vocabulary
from shared_embeddings.quant.standalone import check_decoder
from shared_embeddings.registry import build
from shared_embeddings.registry import options as find_spec
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import OptionError

# How many of the tensors that are dropped are named.
_NAMED = 3
# The longest config.json that `Adapter.sniff` reads, in bytes.
_LONGEST_CONFIG = 2**24


class Adapter:
    """Opens folders with ``config.json`` and safetensors, as ``save_pretrained`` of transformers writes."""

    def sniff(self, path: Path) -> bool:
        """Whether a path is a folder with the configuration of a model."""
        file = path / CONFIG
        try:
            if not file.is_file() or file.stat().st_size > _LONGEST_CONFIG:
                return False
            config = read_json(file)
        except (ValueError, OSError):
            return False
        return "model_type" in config or "architectures" in config

    def read(self, path: Path) -> FolderModel:
        """Read a model.

        Raises:
            UserError: it is incomplete, its class is not in transformers, or its weights are not
            safetensors. ImportError: transformers is not installed.
        """
        with reading(path):
            return FolderModel(path)

    def read_tables(self, path: Path) -> FolderModel:
        """Read a model that is not run, tensor by tensor where its files have the names of its class.

        Raises:
            ValueError, ImportError: as in `read`.
        """
        with reading(path):
            try:
                return UnbuiltModel(path)
            except RuntimeError:  # NotImplementedError, or what torch raises for tensors without values
                return FolderModel(path)

    def read_trimmable(self, path: Path) -> TrimmableFolder:
        """Read the configuration and the tokenizer of a model, but no weights.

        Raises:
            UserError: it is damaged or inconsistent, or its vocabulary cannot be trimmed.
            ImportError: transformers is not installed.
        """
        with reading(path):
            return TrimmableFolder(path)


class FolderModel:
    """A model read from a folder, on the CPU, in the dtype of its weights.

    Embeddings are fitted in fp32 and cast to the dtype of the model when they are placed.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        config = read_config(path)
        self.is_compressed = find_entry(config) is not None
        if config.get(KEY) is not None and not self.is_compressed:
            raise UserError(f"model {path}: is quantized; compress the original model")
        self.module: Any
        self.module, self._dropped = self._read(config)
        self.vocabulary = Vocabulary(path)
        found = [] if self.is_compressed else self._find_tables()
        self._tables: dict[str, WordTable] = {table.name: table for table in found}

    def _read(self, config: dict[str, Any]) -> tuple[Any, list[str]]:
        """The model, and the names of tensors that it does not use."""
        if self.is_compressed:
            return load(self.path), []
        return read_model(self.path, model_class(self.path, config))

    def _find_tables(self) -> list[WordTable]:
        """The tables of the model."""
        return find_tables(self.module.eval())

    def embeddings(self) -> list[WordEmbedding]:
        """Its input embeddings, plain tables or not."""
        modules: dict[str, Any] = {
            name: nn.Embedding.from_pretrained(table.weight.detach()) for name, table in self._tables.items()
        }
        if self.is_compressed:
            modules = dict(getattr(self.module, ENTRY).items())
        return [
            WordEmbedding(name, self.vocabulary.words(module.num_embeddings), module.padding_idx, module)
            for name, module in modules.items()
        ]

    def tables(self) -> list[EmbeddingTable]:
        """Its tables: only one where the input and the output are tied.

        Raises:
            UserError: it is already compressed, or its output layer cannot be replaced.
        """
        if self.is_compressed:
            raise UserError(f"model {self.path}: is already compressed; compress the original model instead")
        with reading(self.path):
            self.vocabulary.check(max(len(table.weight) for table in self._tables.values()))
        check_scoring(self.module)
        return [self._described(table) for table in self._tables.values()]

    def _described(self, table: WordTable) -> EmbeddingTable:
        """A table with its words; a padding word keeps its vector like any other."""
        inputs, outputs = list(table.placement.inputs), list(table.placement.outputs)
        weight = table.weight.detach()
        return EmbeddingTable(
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
        """How often each token occurs in texts.

        Raises:
            UserError: the model has no tokenizer.
        """
        return self.vocabulary.count(texts)

    def options_for(self, table: str, method: str, options: Mapping[str, object]) -> dict[str, object]:
        """The options of a method.

        Raises:
            UserError: a model of transformers cannot use its scores, or the file for ``trust_remote_code``
                could not decode its codec.
        """
        check_decoder(method, options)
        chosen, found = dict(options), self._tables[table]
        if not found.placement.outputs:
            return _for_input(method, chosen)
        words, width = found.weight.shape
        sizes: dict[str, Any] = {"num_embeddings": words, "embedding_dim": width, **chosen}
        with torch.device("meta"):
            new = build(method, words=self.vocabulary.words(words), **sizes)
        check_scores(new, width)
        if not new.has_linear_scores:
            raise UserError(
                f"the softmax of this {method} embedding has several steps, but models of transformers have "
                "one; choose another method"
            )
        return chosen

    def quality(self, validation: Validation) -> Quality:
        """The perplexity of a text.

        Raises:
            UserError: the model is not causal, or the text cannot be used.
        """
        check_causal(self.module)
        return perplexity(self.module, self.vocabulary, validation.one_text())

    def probe(self, texts: Sequence[Path] | None, seed: int) -> Probe:
        """The model's predictions in texts, or in text that it generates.

        Raises:
            UserError: the model needs more input than tokens.
        """
        return probe(self.module, self.vocabulary, texts, seed)

    def place(self, fitted: Mapping[str, SharedEmbedding]) -> list[str]:
        """Put the embeddings into the model, in its dtype; returns notes about other changes."""
        for name, embedding in fitted.items():
            embedding.to(self._tables[name].weight.dtype)
        place(self.module, fitted, {name: table.placement for name, table in self._tables.items()})
        vars(self.module.config).pop(CODE, None)
        kind = type(self.module).__name__
        notes = notes_on_code(self.path, kind)
        if self._dropped:
            named = ", ".join([*self._dropped[:_NAMED], *["…"] * (len(self._dropped) > _NAMED)])
            notes.append(f"tensors that {kind} does not use are dropped ({len(self._dropped)}: {named})")
        return notes

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the model, each once, except those that its class recomputes."""
        computed = self.module._keys_to_ignore_on_save or ()
        return {name: found for name, found in distinct_state(self.module).items() if name not in computed}

    def onnx_body(self) -> OnnxBody:
        """The graph of the model, which cannot be used afterwards; plain tables become `standard`.

        Raises:
            UserError: it cannot be traced.
            ImportError: a package for it is not installed.
        """
        if not self.is_compressed:
            self.place({name: _plain(table.weight) for name, table in self._tables.items()})
        return traced(self.module, sum(file.stat().st_size for file in weight_files(self.path)))

    def sources(self) -> list[Path]:
        """The folder that the model was read from."""
        return [self.path]

    def files(self, output: Path) -> list[Path]:
        """The one folder of a model named `output`.

        Raises:
            UserError: it exists and holds other files that would be lost.
        """
        check_output(output, force=True)
        return [output]

    def write(self, output: Path, tensors: Mapping[str, Tensor], card: str) -> None:
        """Write the folder, with the tokenizer of the original and a model card, all or nothing."""
        check_output(output, force=True)
        # transformers chooses which of several names of a tensor to write.
        state = {**self.module.state_dict(), **tensors}
        state = {name: tensor for name, tensor in state.items() if not tensor.is_meta}
        with replacing_folder(output) as temporary:
            save_pretrained(self.module, temporary, state_dict=state)
            copy_rest(self.path, temporary)
            write_card(self.path, temporary, "Word embeddings compressed", type(self.module).__name__, card)

    def write_dense(self, output: Path, force: bool) -> int:
        """Write a folder that any program reads that reads the original; returns the bytes of its weights.

        Args:
            output: the folder.
            force: replace an existing folder of a model.

        Raises:
            UserError: the model is not compressed, its tied sides differ, or the folder cannot be replaced.
            OSError: it cannot be written.
        """
        check_output(output, force)
        if not self.is_compressed:
            raise UserError(f"model {self.path}: is not compressed, so its tables are dense already; use it")
        plain = dense_model(self.module)
        with replacing_folder(output) as temporary:
            save_pretrained(plain, temporary)
            copy_rest(self.path, temporary)
            return sum(file.stat().st_size for file in temporary.glob("*.safetensors"))


class UnbuiltModel(FolderModel):
    """A model that is compressed without being built: its tensors are read from the files when needed.

    Args:
        path: the folder.

    Raises:
        NotImplementedError: it cannot be understood without its weights.
    """

    def _read(self, config: dict[str, Any]) -> tuple[Any, list[str]]:
        """The model on the meta device, and the names of tensors that it does not use."""
        if self.is_compressed:
            raise NotImplementedError
        chosen, self._files = model_class(self.path, config), tensor_files(self.path)
        check_sizes(self.path, chosen)
        with quiet():
            settings = chosen.config_class.from_pretrained(self.path, local_files_only=True)
        model = without_weights(chosen, settings)
        self._stored = stored_names(model, self._files)
        for name, file in self._files.items():
            check_finite({name: read_tensor(file, name)}, f"model {self.path}")
        return model, sorted(self._files.keys() - self._stored.keys())

    def _find_tables(self) -> list[WordTable]:
        """The tables, with the values in the files."""
        found = find_tables(self.module.eval())
        if not check_scoring(self.module):
            raise NotImplementedError
        return [dataclasses.replace(table, weight=self._value(table.path)) for table in found]

    def _value(self, name: str) -> Tensor:
        """The tensor of a file for a name in the model."""
        stored = self._stored[name]
        return read_tensor(self._files[stored], stored)

    def tensors(self) -> dict[str, Tensor]:
        """As in the base class; mapped from the files, under their names there, unless they are new."""
        return {
            self._stored[name] if tensor.is_meta else name: self._value(name) if tensor.is_meta else tensor
            for name, tensor in super().tensors().items()
        }


@torch.no_grad()
def _plain(weight: Tensor) -> SharedEmbedding:
    """An embedding with a table ``(V, D)``."""
    words, width = weight.shape
    embedding: Any = build("standard", num_embeddings=words, embedding_dim=width)
    embedding.weight.copy_(weight)
    return embedding  # type: ignore[no-any-return]


def _for_input(method: str, options: dict[str, object]) -> dict[str, object]:
    """The options of an input-only embedding.

    Raises:
        OptionError: they ask for an output.
    """
    if "output" in {field.name for field in dataclasses.fields(find_spec(method))}:
        if options.setdefault("output", "none") != "none":
            raise OptionError(
                f"{method}: option 'output' is {options['output']!r}, but this table is used for input only; "
                "remove it"
            )
    return options
