"""How `shared-embeddings` opens Hugging Face models, see `compress.host`, and traces them for ONNX.

Axes: ``B`` batch, ``T`` time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from shared_embeddings.accounting import distinct_state
from shared_embeddings.checkpoints import load_tensors
from shared_embeddings.compress import host
from shared_embeddings.compress.measure import Quality, Samples, Validation
from shared_embeddings.embedding import SharedEmbedding, WordEmbedding
from shared_embeddings.export.onnx import Example, OnnxBody, StandIn, export_model, quiet, rename_values
from shared_embeddings.hf import folder
from shared_embeddings.hf.card import write_card
from shared_embeddings.hf.coded_tables import coded_table, is_in
from shared_embeddings.hf.quality import (
    LONGEST_WINDOW,
    computing,
    count_lookups,
    most_tokens,
    negative_log_likelihoods,
    samples,
)
from shared_embeddings.hf.sentences import SentenceEncoder, has_pooling
from shared_embeddings.hf.tokenizer import TokenVocabulary, check_tokens
from shared_embeddings.hf.trim import TrimmableFolder
from shared_embeddings.hf.word_layers import (
    ENTRY,
    KEY,
    InputSide,
    OutputSide,
    WordTable,
    check_scoring,
    check_single_table,
    dense_model,
    find_entry,
    find_tables,
    from_entry,
    has_words,
    place,
    without_weights,
)
from shared_embeddings.quant.codec import check_decoder
from shared_embeddings.registry import build, get_method_config
from shared_embeddings.runtimes.base import CodedTable, FolderRuntime, Runtime
from shared_embeddings.runtimes.llama_cpp import INPUT, OUTPUT, write_gguf
from shared_embeddings.utils.errors import UserError, first_line, require
from shared_embeddings.utils.files import replacing
from shared_embeddings.utils.options import OptionError
from shared_embeddings.utils.reading import read_json, read_text


class FolderAdapter(host.HostAdapter):
    """Opens folders with ``config.json`` and safetensors, as ``save_pretrained`` of transformers writes."""

    def sniff(self, path: Path) -> bool:
        with contextlib.suppress(ValueError, OSError, AttributeError):
            config = read_json(path / folder.CONFIG)
            is_table = config.get("model_type") == "model2vec"
            return not is_table and ("model_type" in config or "architectures" in config)
        return False

    def read(self, path: Path, runs: bool = True) -> FolderModel:
        """Read a model; one that is not run tensor by tensor, where its files have the names of its class."""
        with folder.reading(path):
            if runs:
                return FolderModel(path)
            try:
                return UnbuiltModel(path)
            except RuntimeError:  # NotImplementedError, or what torch raises for tensors without values
                return FolderModel(path)

    def read_trimmable(self, path: Path) -> TrimmableFolder:
        with folder.reading(path):
            return TrimmableFolder(path)


class FolderModel(host.TrainedModel):
    """A model read from a folder, on the CPU, in the dtype of its weights.

    Embeddings are fitted in fp32 and cast to the dtype of the model when they are placed.
    """

    module: Any = None

    def __init__(self, path: Path) -> None:
        self.path = path
        if not sys.stderr.isatty():  # in a log, each step of a bar is a line
            require("transformers").utils.logging.disable_progress_bar()
        config = folder.read_config(path)
        self.is_compressed = find_entry(config) is not None
        # The names of tensors that the model does not use.
        self._dropped: list[str] = []
        self._tables: dict[str, WordTable] = {}
        self._read(config)
        self.encoder = SentenceEncoder(path) if has_pooling(path) else None
        self.vocabulary = TokenVocabulary(path)
        self.reads_raw_text = self.vocabulary.tokenizer is not None

    def _read(self, config: dict[str, Any]) -> None:
        if self.is_compressed:
            self.module = folder.load(self.path)
            return
        self.module, self._dropped = folder.read_model(self.path, folder.model_class(self.path, config))
        self._tables = {table.name: table for table in find_tables(self.module.eval())}

    def embeddings(self) -> list[WordEmbedding]:
        modules: dict[str, Any] = {
            name: nn.Embedding.from_pretrained(table.weight.detach()) for name, table in self._tables.items()
        }
        if self.is_compressed:
            modules = dict(getattr(self.module, ENTRY).items())
        return [
            WordEmbedding(name, self.vocabulary.words(module.num_embeddings), module.padding_idx, module)
            for name, module in modules.items()
            if has_words(name)
        ]

    def tables(self) -> list[host.EmbeddingTable]:
        if self.is_compressed:
            raise UserError(f"model {self.path}: is already compressed; compress the original model instead")
        if self.vocabulary.tokenizer is not None:
            rows = max(len(table.weight) for table in self._tables.values() if has_words(table.name))
            with folder.reading(self.path):
                check_tokens(self.vocabulary.tokenizer.get_vocab(), rows)
        with computing(self.module):
            check_scoring(self.module)
        return [
            host.EmbeddingTable(
                name=table.name,
                uses=(*table.placement.inputs, *table.placement.outputs),
                words=self.vocabulary.words(len(table.weight)) if has_words(table.name) else (),
                table=table.weight.detach(),
                padding_idx=None,  # a padding word is like any other
                is_scored=bool(table.placement.outputs),
                sentence_marks=self.vocabulary.sentence_marks(self.encoder.prompt if self.encoder else ""),
                parameters=table.weight.numel(),
                stored_bits=8 * table.weight.nbytes,
            )
            for table in self._tables.values()
        ]

    def count_text(self, texts: Sequence[Path]) -> dict[str, int]:
        return self.vocabulary.count(texts)

    def options_for(self, table: str, method: str, options: Mapping[str, object]) -> dict[str, object]:
        check_decoder(method, options)
        completed = dict(options)
        if not self._tables[table].placement.outputs:
            has_output = "output" in {field.name for field in dataclasses.fields(get_method_config(method))}
            if has_output and completed.setdefault("output", "none") != "none":
                raise OptionError(
                    f"{method}: option 'output' is {completed['output']!r}, but this table is used for input "
                    "only; remove it"
                )
            return completed
        words, width = self._tables[table].weight.shape
        sizes: dict[str, Any] = {"num_embeddings": words, "embedding_dim": width, **completed}
        # Listing the tokens takes a part of a second.
        names = self.vocabulary.words(words) if get_method_config(method).file_options else None
        with torch.device("meta"):
            embedding = build(method, words=names, **sizes)
        host.check_scores(embedding, width)
        if not embedding.has_linear_scores:
            raise UserError(
                f"the softmax of this {method} embedding has several steps, but models of transformers have "
                "one; choose another method"
            )
        return completed

    def quality(self, validation: Validation) -> Quality:
        """The perplexity of a text, over every token; except the first, if there is no beginning mark.

        Each window has half a window of context followed by half a window of new tokens, which are scored.
        Every window starts with the tokenizer's beginning mark, if any.
        """
        names = require("transformers").models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        kind = type(self.module).__name__
        if self.module.config.is_encoder_decoder or kind not in set(names.values()):
            raise UserError(
                f"{kind} does not predict the next token from the previous ones, so it has no perplexity; "
                "omit validation"
            )
        path = validation.one_text()
        begin, ids = self.vocabulary.encode(read_text(path))
        if len(begin) + len(ids) < 2:
            raise UserError(f"{path}: has {len(ids)} tokens, too few to predict one; give a longer text")
        window = most_tokens(self.module, LONGEST_WINDOW)
        with computing(self.module):
            nats = negative_log_likelihoods(self.module.eval(), begin, ids, window - len(begin))
        how = f"{path.name}: {len(nats):,} tokens, in windows of {window:,}, at least half of it context"
        return Quality("perplexity", math.exp(min(float(nats.mean()), 700.0)), how)

    def samples(self, texts: Sequence[Path] | None, seed: int, tokens: int) -> Samples:
        predictions = samples(self.module, self.vocabulary, texts, seed, tokens, self.encoder)
        lookups = {
            name: {self.module.get_submodule(path): scale for path, scale in table.placement.inputs.items()}
            for name, table in self._tables.items()
        }
        return dataclasses.replace(predictions, lookups=lookups)

    def count_rows(self, texts: Sequence[Path] | None, seed: int) -> dict[str, Tensor]:
        layers = {
            name: self.module.get_submodule(path)
            for name, table in self._tables.items()
            for path in (() if has_words(name) else table.placement.inputs)
        }
        return count_lookups(self.module, self.vocabulary, layers, texts, seed)

    def place(self, fitted: Mapping[str, SharedEmbedding]) -> list[str]:
        for name, embedding in fitted.items():
            embedding.to(self._tables[name].weight.dtype)
        place(self.module, fitted, {name: table.placement for name, table in self._tables.items()})
        vars(self.module.config).pop(folder.CODE, None)
        kind = type(self.module).__name__
        notes = folder.notes_on_code(self.path, kind)
        if self._dropped:
            names = f"{len(self._dropped)}, such as {self._dropped[0]}"
            notes.append(f"tensors that {kind} does not use are dropped ({names})")
        return notes

    def tensors(self) -> dict[str, Tensor]:
        computed = self.module._keys_to_ignore_on_save or ()
        return {name: tensor for name, tensor in distinct_state(self.module).items() if name not in computed}

    @torch.no_grad()
    def onnx_body(self) -> OnnxBody:
        if not hasattr(self.module, ENTRY):  # plain tables become `standard`
            plain: dict[str, Any] = {}
            for name, table in self._tables.items():
                words, width = table.weight.shape
                plain[name] = build("standard", num_embeddings=words, embedding_dim=width)
                plain[name].weight.copy_(table.weight)
            self.place(plain)
        return trace(self.module, sum(file.stat().st_size for file in folder.weight_files(self.path)))

    def files(self, path: Path) -> list[Path]:
        if path != self.path and not path.is_file():
            folder.check_output(path, force=True)
        return [path]

    def write(self, output: Path, tensors: Mapping[str, Tensor], card: str) -> None:
        # transformers chooses which of several names of a tensor to write.
        state = {**self.module.state_dict(), **tensors}
        state = {name: tensor for name, tensor in state.items() if not tensor.is_meta}
        with replacing(output) as temporary:
            folder.save_pretrained(self.module, temporary, state_dict=state)
            folder.copy_files(folder.other_files(self.path), temporary)
            write_card(self.path, temporary, "Word embeddings compressed", card)

    def write_dense(self, output: Path, force: bool) -> int:
        """Write a folder that any program reads that reads the original; return the bytes of its weights."""
        folder.check_output(output, force)
        if not self.is_compressed:
            raise UserError(f"model {self.path}: is not compressed, so its tables are dense already; use it")
        plain = dense_model(self.module)
        with replacing(output) as temporary:
            folder.save_pretrained(plain, temporary)
            folder.copy_files(folder.other_files(self.path), temporary)
            return sum(file.stat().st_size for file in temporary.glob("*.safetensors"))

    def find_grid(self, runtime: Runtime, bits: float | None, name: str | None) -> tuple[str, bool]:
        """Return the grid of a runtime for this compressed model, and whether its codes are in it.

        Without bits and a name, it is that of the codes. UserError if there is none.
        """
        if not self.is_compressed:
            raise UserError(f"model {self.path}: is not compressed; use compress for {runtime.name}")
        embeddings = list(getattr(self.module, ENTRY).values())
        if bits is None and name is None:
            names = [
                key for key, grid in runtime.grids.items() if all(is_in(part, grid) for part in embeddings)
            ]
            if not names:
                raise UserError(
                    f"model {self.path}: its codes are not among those of {runtime.name} "
                    f"({', '.join(runtime.grids)}); give bits or a grid to round them again"
                )
            return names[0], True
        name, grid = runtime.find_grid(bits, name, [part.embedding_dim for part in embeddings])
        return name, all(is_in(part, grid) for part in embeddings)

    def write_for(self, runtime: Runtime, grid_name: str, output: Path, gguf: Path | None, card: str) -> None:
        """Write what a runtime loads without this library, with tables in one of its grids.

        Args:
            grid_name: see `Runtime.grids`. Codes of another grid are rounded again.
            gguf: a file of the original, for a runtime that takes one.
            card: as in `write`, for runtimes that read folders.
        """
        if not isinstance(runtime, FolderRuntime) and not runtime.takes_gguf:
            export_model(self.onnx_body(), output)
            return
        placements = from_entry(self.module.config.to_dict()[KEY])[1]
        grid, embeddings = runtime.grids[grid_name], dict(getattr(self.module, ENTRY).items())
        coded = {
            name: coded_table(embedding, grid, is_output=not placements[name].inputs)
            for name, embedding in embeddings.items()
        }
        if gguf is not None:
            tables: dict[str, CodedTable] = {}
            for name, table in coded.items():
                with torch.no_grad():  # `dense_model` does so below
                    check_single_table(name, embeddings[name], placements[name])
                sides = {INPUT: placements[name].inputs, OUTPUT: placements[name].outputs}
                for tensor in (tensor for tensor, uses in sides.items() if uses):
                    if tables.setdefault(tensor, table) is not table:
                        raise UserError(
                            f"model {self.path}: has two tables for {tensor} of GGUF files; use "
                            "another runtime"
                        )
            write_gguf(tables, grid_name, gguf, output)
            return
        assert isinstance(runtime, FolderRuntime)
        layers: dict[str, Tensor] = {}
        for name, table in coded.items():
            inputs, outputs = placements[name].inputs, placements[name].outputs
            outputs = () if inputs and runtime.ties_layers else outputs
            for path in (*inputs, *outputs):
                arrays = runtime.layer_tensors(path, path in outputs, table, grid)
                layers |= {key: torch.tensor(array) for key, array in arrays.items()}
        if not runtime.scales_in_float32:
            kind = self.module.dtype
            layers = {
                key: part.to(kind) if part.is_floating_point() else part for key, part in layers.items()
            }
        paths = [path for name in coded for path in (*placements[name].inputs, *placements[name].outputs)]
        weights, settings = [f"{path}.weight" for path in paths], runtime.settings(paths, grid)
        plain = dense_model(self.module)
        if settings.get("tie_word_embeddings") is False:  # which unties other tensors, too
            tied = [name for name in plain.all_tied_weights_keys if name not in weights]
            layers |= {name: plain.get_parameter(name).detach() for name in tied}
        with replacing(output) as temporary:
            folder.save_pretrained(plain, temporary)
            folder.replace_tensors(temporary, weights, layers, settings)
            folder.copy_files(folder.other_files(self.path), temporary)
            write_card(self.path, temporary, "Word embeddings compressed", card, runtime)


class UnbuiltModel(FolderModel):
    """A model that is compressed without being built: its tensors stay in the files until they are used.

    NotImplementedError if it cannot be understood without its weights.
    """

    def _read(self, config: dict[str, Any]) -> None:
        if self.is_compressed:
            raise NotImplementedError
        architecture = folder.model_class(self.path, config)
        with folder.quiet():
            settings = architecture.config_class.from_pretrained(self.path, local_files_only=True)
        self.module = without_weights(architecture, settings).eval()
        files = folder.weight_files(self.path)
        state, prefix = self.module.state_dict(keep_vars=True), f"{self.module.base_model_prefix}."
        # The name of a tensor in the model, a base class maybe without the prefix -> its file and name there.
        self._files = {
            name if name in state else name.removeprefix(prefix): (file, name)
            for file in files
            for name in load_tensors(file, f"weights {file}")
        }
        # Every name of a tensor in the model -> the name of its values in `_files`.
        self._stored: dict[str, str] = {}
        names: dict[int, list[str]] = {}
        for name, tensor in state.items():
            names.setdefault(id(tensor), []).append(name)
        computed = self.module._keys_to_ignore_on_save or ()
        for same in names.values():
            stored = [name for name in same if name in self._files]
            if not stored and all(name in computed for name in same):
                continue
            # Several names may be for values that are not tied, whatever the configuration says.
            if len(stored) != 1 or self._value(stored[0]).shape != state[stored[0]].shape:
                raise NotImplementedError(f"the files have {len(stored)} tensors for {', '.join(same)}")
            self._stored.update(dict.fromkeys(same, stored[0]))
        self._dropped = sorted(self._files.keys() - self._stored.keys())
        tables = find_tables(self.module)
        if not check_scoring(self.module):
            raise NotImplementedError
        self._tables = {
            table.name: dataclasses.replace(
                table, weight=self._value(self._stored[table.placement.weights[0]])
            )
            for table in tables
        }

    def _value(self, name: str) -> Tensor:
        """A tensor of a file, mapped into memory for as long as it is used."""
        file, stored = self._files[name]
        with safe_open(file, "pt") as opened:
            value: Tensor = opened.get_tensor(stored)
        return value

    def tensors(self) -> dict[str, Tensor]:
        tensors = super().tensors()
        new = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
        stored = [self._stored[name] for name, tensor in tensors.items() if tensor.is_meta]
        return {**{name: self._value(name) for name in stored}, **new}


# Sizes of the batch and of the texts with which a model is traced; no two axes have the same size.
_BATCH, _PAST, _NEW = 2, 5, 3
# Words of an example.
_EXAMPLE = 12


@torch.no_grad()
def trace(model: Any, checkpoint_bytes: int) -> OnnxBody:
    """The graph of a compressed model on the CPU, which becomes float32 and cannot be used afterwards.

    Encoders take ``input_ids`` and ``attention_mask``; decoders also the keys and values of earlier tokens,
    and return those of all tokens, under the names that Optimum gives them; encoder-decoders take
    ``decoder_input_ids`` and have no cache. UserError if the model cannot be traced.
    """
    require("onnxscript")
    exporters = require("transformers.exporters.exporter_onnx")
    model.float().eval()
    embeddings = dict(getattr(model, ENTRY).items())
    has_cache = model.can_generate() and not model.config.is_encoder_decoder
    heads = _heads(model) if has_cache else None
    examples = _examples(model, heads)
    ids = torch.arange(_BATCH * (_PAST + _NEW)).view(_BATCH, -1) % model.config.vocab_size
    sample = _inputs(model, ids)
    if heads is not None:
        # Keeps every token of every layer; models with sliding windows mask those outside.
        past = require("transformers").DynamicCache()
        for layer, (keys, values) in enumerate(heads):
            shape = _BATCH, keys.size(1), _PAST
            past.update(torch.zeros(*shape, keys.size(3)), torch.zeros(*shape, values.size(3)), layer)
        sample = {**_inputs(model, ids[:, _PAST:], _PAST), "past_key_values": past, "use_cache": True}
    stand_ins = {id(embedding): StandIn(name, embedding) for name, embedding in embeddings.items()}
    for side in model.modules():
        if isinstance(side, (InputSide, OutputSide)):
            object.__setattr__(side, "embedding", stand_ins[id(side.embedding)])
    try:
        with quiet():
            settings = exporters.OnnxConfig(dynamic=True)
            exported = exporters.OnnxExporter().export(model, sample, config=settings)
    except Exception as error:  # each operator fails in its own way
        raise UserError(
            f"{type(model).__name__}: cannot be traced ({first_line(error)}); use --format onnx-embeddings"
        ) from error
    program = require("onnx_ir").to_proto(exported.program)
    _rename(program.graph, examples[-1])
    return OnnxBody(program, embeddings, examples, checkpoint_bytes)


def _inputs(model: Any, ids: Tensor, past: int = 0) -> dict[str, Any]:
    """The inputs of a model for ids ``(B, T)`` after earlier ones."""
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": ids.new_ones(len(ids), past + ids.size(1))}
    if getattr(model.config, "type_vocab_size", 1) > 1:
        inputs["token_type_ids"] = torch.zeros_like(ids)
    if model.config.is_encoder_decoder:
        inputs.update(decoder_input_ids=ids[:, :-1], use_cache=False)
    return inputs


def _heads(model: Any) -> list[tuple[Tensor, Tensor]]:
    """The keys and values ``(1, heads, 1, D)`` of each layer for one token."""
    cache = model(torch.zeros(1, 1, dtype=torch.long), use_cache=True).past_key_values
    layers = getattr(cache, "layers", [None])
    if any(getattr(layer, "keys", None) is None for layer in layers):
        raise UserError(
            f"{type(model).__name__}: ONNX has keys and values of earlier tokens only, but this model has "
            "another state; use --format onnx-embeddings"
        )
    return [(layer.keys, layer.values) for layer in layers]


def _examples(model: Any, heads: Sequence[tuple[Tensor, Tensor]] | None) -> list[Example]:
    """What a model computes in float32 for texts, then for one text; with a cache, for its last token."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(model.config.vocab_size, (3, _EXAMPLE), generator=generator)
    examples = []
    for ids in (texts, texts[:1]):
        inputs = _inputs(model, ids)
        if heads is None:
            result = model(**inputs)
            names = ("logits", "last_hidden_state", "pooler_output")
            outputs = {name: result[name] for name in names if result.get(name) is not None}
        else:
            empty = require("transformers").DynamicCache()
            result = model(**inputs, past_key_values=empty, use_cache=True)
            outputs = {"logits": result.logits}
            for number, (old, layer) in enumerate(zip(heads, result.past_key_values.layers)):
                for name, one_token, tensor in zip(("key", "value"), old, (layer.keys, layer.values)):
                    shape = len(ids), one_token.size(1), 0, one_token.size(3)
                    inputs[f"past_key_values.{number}.{name}"] = torch.zeros(shape)
                    outputs[f"present.{number}.{name}"] = tensor
        arrays = [
            {name: tensor.numpy() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
            for tensors in (inputs, outputs)
        ]
        examples.append(Example(*arrays))
    if heads is None:
        return examples
    several, single = examples
    last = dict(single.inputs)
    for name in single.inputs:
        if name in ("input_ids", "token_type_ids"):
            last[name] = single.inputs[name][:, -1:]
        elif name.startswith("past_key_values"):
            last[name] = single.outputs[name.replace("past_key_values", "present")][:, :, :-1]
    return [several, Example(last, {**single.outputs, "logits": single.outputs["logits"][:, -1:]})]


def _rename(graph: Any, example: Example) -> None:
    """Give the inputs, the outputs and their axes the names that Optimum gives them, or their sizes."""
    new = {}
    for prefix, values in (("past_key_values", graph.input), ("present", graph.output)):
        for value in values:
            match = re.fullmatch(r"(?:\w+\.)?past_key_values\.layers\.(\d+)\.(key|value)s", value.name)
            if match:
                new[value.name] = f"{prefix}.{match[1]}.{match[2]}"
                value.name = new[value.name]
    rename_values(graph, new)
    names = {"input_ids": "sequence", "token_type_ids": "sequence", "decoder_input_ids": "decoder_sequence"}
    names["attention_mask"] = "total" if new else "sequence"
    for value in graph.input:
        first, second, *sizes = value.type.tensor_type.shape.dim
        first.dim_param = "batch"
        if value.name in names:
            second.dim_param = names[value.name]
            continue
        _, heads, _, width = example.inputs[value.name].shape
        second.dim_value, sizes[0].dim_param, sizes[1].dim_value = heads, "past", width
    # Their axes follow from those of the inputs.
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
