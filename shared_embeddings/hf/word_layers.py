"""The layers of a transformers model that look up and score words, and the embeddings in their place.

An `InputSide` replaces the word table of a model and an `OutputSide` its output layer. Both refer to one
embedding, which is a submodule elsewhere, so that the state contains every tensor once. An entry of
``config.json`` describes the embeddings and their places.

Axes: ``B`` batch, ``T`` time, ``V`` vocabulary, ``D`` model dimension.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.quant.storage import HEADER, hold
from shared_embeddings.registry import build, check_stored
from shared_embeddings.utils.errors import UserError

# The name of the model's submodule that contains the embeddings, and of the quantizer that loads them.
ENTRY = "shared_embeddings"
VERSION = 1
# Where the entry is in config.json: transformers looks there for the name of a quantizer.
KEY = "quantization_config"
# The number of words with which layers are tested.
_TESTED_WORDS = 8
# The largest relative difference of two equal tables in float32.
_ROUNDING = 1e-5
# Input layers beside the first one, by the ends of their paths, and names for their tables. Rows of the last
# two are not those of tokens: several tokens are hashed to the number of a row.
_FURTHER_LAYERS = {
    "embed_tokens_per_layer": "per_layer_words",  # Gemma 3n and 4
    "value_embeddings": "value_words",  # NeoMME
    "ngram_embedding": "ngrams",  # Qwen4-Exp
    "encoder_hash_tok_embedding": "ngrams",  # BLT
}
# What adapters do with the rows of a table.
_USES_OF_ROWS = {
    *("__getitem__", "add", "add_", "__iadd__", "index_copy", "index_copy_"),
    *("linalg_svd", "linalg_qr", "linalg_norm"),
}
_COPIES = (
    *(Tensor.data.__get__, Tensor.T.__get__),  # type: ignore[attr-defined]
    *(Tensor.clone, Tensor.detach, Tensor.to),
)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one embedding is used in a model."""

    inputs: dict[str, float]  # paths of input layers -> the factor by which they multiply its vectors
    outputs: tuple[str, ...]  # paths of output layers

    @property
    def weights(self) -> list[str]:
        return [f"{path}.weight" for path in (*self.inputs, *self.outputs)]


@dataclasses.dataclass(frozen=True)
class WordTable:
    """One table of a model."""

    # "words" for a single table, else "input_words", "decoder_words" or "output_words", by its layer; others
    # as in `further_layers`. Layers of models have no such names, by which PEFT chooses those that it adapts.
    name: str
    weight: Tensor  # ``(V, D)``, its values
    placement: Placement  # the modules that use it


# Finding the layers of a plain model.


def find_tables(model: Any) -> list[WordTable]:
    """Return the embedding tables of a model: one if input and output are tied or nothing scores words, else
    one for each; and those of its `further_layers`.
    """
    kind = type(model).__name__
    weights: dict[int, tuple[str, nn.Parameter]] = {}
    sides = [(f"{side}_words", layer) for side, layer in _word_layers(model)]
    further = further_layers(model)
    for name, layer in [*sides, *further.items()]:
        weight = getattr(layer, "weight", None)
        if not isinstance(layer, (nn.Embedding, nn.Linear)) or not isinstance(weight, nn.Parameter):
            raise UserError(
                f"{kind}: its layer for {name} is a {type(layer).__name__}, which cannot be replaced; use a "
                "model with nn.Embedding and nn.Linear"
            )
        weights.setdefault(id(weight), (name, weight))
    is_single = len(weights) - len(further) == 1
    tables = []
    for name, weight in weights.values():
        inputs: dict[str, float] = {}
        outputs = []
        # Every module that has the parameter, by every path.
        for path, module in model.named_modules(remove_duplicate=False):
            if not any(parameter is weight for parameter in module.parameters(recurse=False)):
                continue
            if isinstance(module, nn.Embedding):
                inputs[path] = _find_scale(model, path, module)
            elif type(module) is nn.Linear:
                outputs.append(path)
            else:
                raise UserError(
                    f"{kind}: {path} is a {type(module).__name__} with the embedding table, which cannot be "
                    "replaced"
                )
        of_side = "words" if is_single and name == "input_words" else name
        tables.append(WordTable(of_side, weight, Placement(inputs, tuple(outputs))))
    return tables


def has_words(table: str) -> bool:
    """Return whether the rows of a table with a name are those of tokens."""
    return not table.startswith("ngrams")


def further_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the input layers of a model beside the first one, by the names of their tables.

    These have the number of a layer of the model, such as "ngrams_1".
    """
    layers = {}
    for path, layer in model.named_modules():
        if name := _FURTHER_LAYERS.get(path.rpartition(".")[2]):
            layers["_".join([name, *re.findall(r"\d+", path)])] = layer
    return layers


def _word_layers(model: Any) -> list[tuple[str, Any]]:
    """Return the input and output layers of a model, by name; encoders and classifiers have no output."""
    kind = type(model).__name__
    check_text_only(kind, model.config)
    try:
        layers = [("input", model.get_input_embeddings())]
        if model.config.is_encoder_decoder:
            layers.append(("decoder", model.get_decoder().get_input_embeddings()))
        if (output := model.get_output_embeddings()) is not None:
            layers.append(("output", output))
    except (NotImplementedError, AttributeError) as error:
        raise UserError(
            f"{kind}: does not define where its embedding table is; it is not supported"
        ) from error
    return layers


def check_text_only(kind: str, config: Any) -> None:
    """Raise UserError if a model of a class also takes pictures or sounds."""
    for name in ("vision_config", "audio_config"):
        if getattr(config, name, None) is not None:
            raise UserError(f"{kind}: takes more than text ({name}); use a text-only model")


@torch.no_grad()
def _find_scale(model: Any, path: str, layer: nn.Embedding) -> float:
    """Return the factor by which an input layer multiplies rows; UserError if it does anything else."""
    words = min(_TESTED_WORDS, layer.num_embeddings)
    if layer.weight.is_meta:  # a copy with few rows, which the model initializes
        layer = copy.deepcopy(layer)
        layer.num_embeddings, layer.padding_idx = words, None
        layer.weight = nn.Parameter(layer.weight[:words])
        layer.to_empty(device="cpu")
        model._init_weights(layer)
    # A tensor has been rounded to the dtype of the model.
    scale = float(getattr(layer, "scalar_embed_scale", getattr(layer, "embed_scale", 1.0)))
    ids = torch.arange(words)
    if layer.max_norm is not None or not torch.allclose(layer(ids), layer.weight[ids] * scale, rtol=1e-2):
        raise UserError(
            f"{path}: this {type(layer).__name__} does more than look up rows, so that it cannot be replaced"
        )
    return scale


@torch.no_grad()
def check_scoring(model: Any) -> bool:
    """Check that the model computes its scores by calling its output layer.

    MobileBERT and newer DeBERTa multiply by its table directly, which compression removes: a `UserError`.
    Returns whether this could be tested.
    """
    layers = _word_layers(model)
    kind, (name, output) = type(model).__name__, layers[-1]
    if name != "output":
        return True
    calls: list[None] = []
    hook = output.register_forward_hook(lambda *_: calls.append(None))
    words = min(_TESTED_WORDS, *(len(layer.weight) for _, layer in layers))
    ids = torch.arange(words, device=output.weight.device)[None]
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if len(layers) == 3 else {})}
    try:
        scores = model(**inputs).logits
    except Exception:  # models that take more than ids cannot be tested
        return False
    finally:
        hook.remove()
    if not calls or scores.shape[-1] != len(output.weight):
        raise UserError(
            f"{kind}: computes its scores without calling its output layer ({type(output).__name__} "
            f"{tuple(output.weight.shape)}), so that it cannot be replaced; it is not supported"
        )
    return True


def first_position(model: nn.Module) -> int:
    """Return the position of the first token: the padding id + 1 in models that count from it, else 0.

    Such models recognize padding by its id, so trimming the vocabulary must not change that id.
    """
    first = 0
    for path, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if padding is not None and "position" in f"{path.rpartition('.')[2]} {type(module).__name__}".lower():
            first = max(first, int(padding) + 1)
    return first


def without_weights(model_class: Any, config: Any) -> Any:
    """Return a model on the meta device, with an attention whose masks do not depend on values."""
    with torch.device("meta"):
        return model_class._from_config(copy.deepcopy(config), attn_implementation="eager")


# The layers that replace them.


class Placeholder(nn.Parameter):
    """A frozen tensor ``(V, 0)`` in place of a table; an adapter that uses its rows gets an error.

    `trainable_token_indices`, DoRA and PiSSA of PEFT read rows; `merge_and_unload` adds to ``weight.data``.
    """

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> Placeholder:
        return Tensor._make_subclass(cls, data.detach(), requires_grad)  # type: ignore[attr-defined, no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain parameter, which ``torch.load(weights_only=True)`` can read."""
        return nn.Parameter(self.as_subclass(Tensor), self.requires_grad).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation as on a plain tensor, unless it uses rows; copies are placeholders, too."""
        if func.__name__ in _USES_OF_ROWS:
            raise RuntimeError(
                "compressed embeddings have no rows that an adapter can read or change: use LoRA as it is by "
                "default on their layers, instead of trainable_token_indices, DoRA or PiSSA, and keep the "
                "adapter beside the model instead of merging it"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return cls(result) if func in _COPIES else result


class _Side(nn.Module):
    """A layer that uses an embedding without owning it.

    Attributes:
        embedding: the embedding, not registered as a submodule.
        weight: ``(V, 0)``, a placeholder with the name of the replaced table. Loading the folder as a plain
            model then fails with a shape mismatch; transformers would fill a missing table with random
            numbers. Code can read the table's length, dtype and device from it.
    """

    embedding: SharedEmbedding
    weight: Tensor

    def __init__(self, embedding: SharedEmbedding) -> None:
        # Not the initialization of layers that this may be a subclass of, which have their own weights.
        nn.Module.__init__(self)
        # Models of transformers draw the weights of such layers, some of them by their shapes.
        self._is_hf_initialized = True
        # Bypasses nn.Module, which would register it.
        object.__setattr__(self, "embedding", embedding)
        like = next(embedding.parameters())
        # Not `new_empty`, which would decode a packed tensor.
        empty = torch.empty(embedding.num_embeddings, 0, dtype=like.dtype, device=like.device)
        self.weight = Placeholder(empty)

    def _moved(self, tensor: Tensor) -> Tensor:
        """Move a tensor to the device of the embedding, which may be another one than that of this layer."""
        return tensor.to(next(self.embedding.parameters()).device)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Side:
        """Copy this layer as a part of its model; RuntimeError for a copy of this layer alone."""
        if not memo:
            raise RuntimeError(
                f"{type(self).__name__} cannot be copied without its model, as modules_to_save of PEFT does: "
                "adapt the input layer with LoRA (target_modules), or train the model without PEFT"
            )
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise RuntimeError(
            "nn.DataParallel cannot copy a model with shared embeddings: start with torchrun, which uses "
            "DistributedDataParallel, or let it see one device (CUDA_VISIBLE_DEVICES=0)"
        )


class InputSide(_Side, nn.Embedding):
    """Replaces an ``nn.Embedding``: ids ``(B, T)`` to vectors ``(B, T, D)`` times a scale, as in Gemma.

    PEFT adapts instances of ``nn.Embedding``, whose attributes it reads.
    """

    def __init__(self, embedding: SharedEmbedding, scale: float) -> None:
        super().__init__(embedding)
        self.embed_scale = scale
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False

    def forward(self, ids: Tensor) -> Tensor:
        vectors = self.embedding(self._moved(ids))
        # Round to the dtype of the vectors first, as the models do.
        if self.embed_scale == 1.0:
            return vectors
        return vectors * torch.tensor(self.embed_scale, dtype=vectors.dtype)


class OutputSide(_Side, nn.Linear):
    """Replaces an ``nn.Linear``: hidden states ``(B, T, D)`` to scores ``(B, T, V)``, plus a bias ``(V,)``.

    PEFT adapts instances of ``nn.Linear``, whose attributes it reads.
    """

    bias: nn.Parameter | None  # type: ignore[assignment]  # torch's stub leaves out None

    def __init__(self, embedding: SharedEmbedding, bias: nn.Parameter | None) -> None:
        super().__init__(embedding)
        self.register_parameter("bias", bias)
        self.in_features, self.out_features = embedding.score_dim, embedding.num_embeddings

    def forward(self, hidden: Tensor) -> Tensor:
        scores, words = self.embedding.logits(self._moved(hidden)), self.embedding.scored_words
        if self.bias is None:
            return scores
        return scores + self._moved(self.bias if words is None else self.bias[words.ids])


def place(model: Any, embeddings: Mapping[str, SharedEmbedding], placements: Mapping[str, Placement]) -> None:
    """Insert embeddings into a transformers model and its configuration; output layers keep their biases."""
    layers: dict[str, nn.Module] = {}
    for name, embedding in embeddings.items():
        for path, scale in placements[name].inputs.items():
            layers[path] = InputSide(embedding, scale)
        for path in placements[name].outputs:
            layers[path] = OutputSide(embedding, getattr(model.get_submodule(path), "bias", None))
    for path, layer in layers.items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer)
    # accelerate takes tied tensors without memory for any tensor that it has offloaded.
    placeholders = {weight for name in embeddings for weight in placements[name].weights}
    model.all_tied_weights_keys = {
        name: tied for name, tied in model.all_tied_weights_keys.items() if name not in placeholders
    }
    setattr(model, ENTRY, nn.ModuleDict(embeddings))
    setattr(model.config, KEY, entry_of(embeddings, placements))
    model.resize_token_embeddings = _fail_to_resize
    model.register_load_state_dict_pre_hook(_hold_packed)


def _hold_packed(model: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Prepare the packed content of a file for ``load_state_dict``, as Trainer calls it to resume."""
    if not prefix and HEADER in state:
        held = hold(state)
        state.clear()
        state.update(held)


def _fail_to_resize(*arguments: object, **named: object) -> NoReturn:
    raise UserError(
        "the vocabulary of a model with shared embeddings cannot be resized: resize the plain model, then "
        "compress it"
    )


@torch.no_grad()
def dense_model(model: Any) -> Any:
    """Return a plain model with dense tables, which computes the same; the inverse of `place`.

    UserError if the sides of an embedding have different tables.
    """
    config = copy.deepcopy(model.config)
    placements = from_entry(config.to_dict()[KEY])[1]
    delattr(config, KEY)
    plain = type(model)._from_config(config, dtype=model.dtype).eval()
    state = {name: value for name, value in model.state_dict().items() if not name.startswith(f"{ENTRY}.")}
    tables = {}
    for name, embedding in getattr(model, ENTRY).items():
        check_single_table(name, embedding, placements[name])
        table = embedding.table() if placements[name].inputs else embedding.output_table()
        tables.update(dict.fromkeys(placements[name].weights, nn.Parameter(table.to(model.dtype))))
    plain.load_state_dict({**state, **tables})
    # A new model may tie tables that this one does not.
    for name, weight in tables.items():
        plain.get_submodule(name.removesuffix(".weight")).weight = weight
    return plain


def check_single_table(name: str, embedding: SharedEmbedding, placement: Placement) -> None:
    """Raise UserError if the input and output tables of an embedding differ."""
    if not placement.outputs:
        return
    # In 16 bits, both sides round too much to compare.
    exact = copy.deepcopy(embedding).float()
    error = (exact.output_table() - exact.table()).norm() if placement.inputs else torch.zeros(())
    if embedding.output_bias() is not None or error > _ROUNDING * exact.table().norm():
        raise UserError(
            f"table '{name}': input and output tables of its {embedding.method} embedding differ, so no "
            "single dense table replaces it; use format onnx"
        )


# The entry of config.json.


def entry_of(
    embeddings: Mapping[str, SharedEmbedding], placements: Mapping[str, Placement]
) -> dict[str, Any]:
    """Return the entry of config.json, from which `from_entry` rebuilds embeddings without their weights."""
    tables = {
        name: {
            "method": embedding.method,
            "num_embeddings": embedding.num_embeddings,
            "embedding_dim": embedding.embedding_dim,
            "options": embedding.stored_options(),
            "inputs": dict(placements[name].inputs),
            "outputs": list(placements[name].outputs),
        }
        for name, embedding in embeddings.items()
    }
    return {"quant_method": ENTRY, "version": VERSION, "tables": tables}


def find_entry(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the entry in the content of ``config.json``; None for other models."""
    entry = settings.get(KEY)
    return entry if isinstance(entry, dict) and entry.get("quant_method") == ENTRY else None


def from_entry(
    entry: Mapping[str, Any], state: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, SharedEmbedding], dict[str, Placement]]:
    """Build embeddings without their weights, and their placements.

    UserError unless a model's state, if given, has tensors of their sizes.
    """
    embeddings, placements = {}, {}
    for name, table in entry["tables"].items():
        sizes = {size: table[size] for size in ("num_embeddings", "embedding_dim")}
        if state is not None:
            start = f"{ENTRY}.{name}."
            part = {key.removeprefix(start): t for key, t in state.items() if key.startswith(start)}
            check_stored(part, table["method"], **sizes, **table["options"])
        embeddings[name] = build(table["method"], **sizes, **table["options"])
        placements[name] = Placement(dict(table["inputs"]), tuple(table["outputs"]))
    return embeddings, placements


def placements_in(model: Any, placements: Mapping[str, Placement]) -> dict[str, Placement]:
    """Return the placements in a model of the same architecture, but maybe for another task.

    A task changes the prefix of paths and the output layers. Embeddings that the model does not use are
    left out. UserError if it has other word embeddings, or an output layer that was not compressed.
    """
    prefix = f"{model.base_model_prefix}."
    modules = dict(model.named_modules(remove_duplicate=False))

    here: dict[str, str] = {}
    for placement in placements.values():
        for path in (*placement.inputs, *placement.outputs):
            for name in (path, path.removeprefix(prefix), prefix + path):
                if name in modules:
                    here.setdefault(path, name)
    placements_here = {}
    replaced: set[int] = set()
    for name, placement in placements.items():
        inputs = {here[path]: scale for path, scale in placement.inputs.items() if path in here}
        outputs = tuple({here[path] for path in placement.outputs if path in here})
        if inputs or outputs:
            placements_here[name] = Placement(inputs, outputs)
        replaced.update(id(modules[path]) for path in (*inputs, *outputs))
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if layer is not None and id(layer) not in replaced:
            raise UserError(
                f"entry '{KEY}' of config.json does not describe the {type(layer).__name__} layer for words "
                f"of {type(model).__name__}; load the class of model that was compressed"
            )
    return placements_here
