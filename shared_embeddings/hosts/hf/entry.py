"""The entry of ``config.json`` that describes the embeddings of a model, and the layers that use them.

An `InputSide` replaces the word table of a model and an `OutputSide` its output layer. Both refer to one
embedding, which is a submodule elsewhere, so that the state contains every tensor once.

Axes: ``B`` batch, ``T`` time, ``V`` vocabulary, ``D`` model dimension.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.quant.storage import HEADER, hold
from shared_embeddings.registry import build
from shared_embeddings.utils.errors import UserError

# What adapters do with the rows of a table.
_USES_OF_ROWS = {
    *("__getitem__", "add", "add_", "__iadd__", "index_copy", "index_copy_"),
    *("linalg_svd", "linalg_qr", "linalg_norm"),
}
_COPIES = (
    *(Tensor.data.__get__, Tensor.T.__get__),  # type: ignore[attr-defined]
    *(Tensor.clone, Tensor.detach, Tensor.to),
)


class Placeholder(nn.Parameter):
    """A frozen tensor ``(V, 0)`` in place of a table; an adapter that uses its rows gets an error.

    `trainable_token_indices`, DoRA and PiSSA of PEFT read rows; `merge_and_unload` adds to ``weight.data``.
    """

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> Placeholder:
        """A placeholder with the values of a tensor ``(V, 0)``."""
        return Tensor._make_subclass(cls, data.detach(), requires_grad)  # type: ignore[attr-defined, no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain parameter, which ``torch.load(weights_only=True)`` can read."""
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

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
            found = func(*args, **(kwargs or {}))
            return cls(found) if func in _COPIES else found


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
        """A tensor on the device of the embedding, which may be another one than that of this layer."""
        return tensor.to(next(self.embedding.parameters()).device)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Side:
        """A copy as a part of a copied model; RuntimeError for a copy of this layer alone."""
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
    """Replaces an ``nn.Embedding``: ids ``(B, T)`` to vectors ``(B, T, D)``.

    PEFT adapts instances of ``nn.Embedding``, whose attributes it reads.

    Args:
        embedding: looks up the vectors.
        scale: factor of the vectors, as in Gemma.
    """

    def __init__(self, embedding: SharedEmbedding, scale: float) -> None:
        super().__init__(embedding)
        self.embed_scale = scale
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False

    def forward(self, ids: Tensor) -> Tensor:
        """The vectors ``(..., D)`` of ids ``(...)``."""
        vectors = self.embedding(self._moved(ids))
        # Round to the dtype of the vectors first, as the models do.
        if self.embed_scale == 1.0:
            return vectors
        return vectors * torch.tensor(self.embed_scale, dtype=vectors.dtype)

    def extra_repr(self) -> str:
        """The arguments, for print(module)."""
        return f"{self.embedding.method}, scale={self.embed_scale:g}"


class OutputSide(_Side, nn.Linear):
    """Replaces an ``nn.Linear``: hidden states ``(B, T, D)`` to scores ``(B, T, V)``.

    PEFT adapts instances of ``nn.Linear``, whose attributes it reads.

    Args:
        embedding: computes the scores.
        bias: ``(V,)``, added to the scores, or None.
    """

    bias: nn.Parameter | None  # type: ignore[assignment]  # torch's stub leaves out None

    def __init__(self, embedding: SharedEmbedding, bias: nn.Parameter | None) -> None:
        super().__init__(embedding)
        self.register_parameter("bias", bias)
        self.in_features, self.out_features = embedding.score_dim, embedding.num_embeddings

    def forward(self, hidden: Tensor) -> Tensor:
        """The scores ``(..., V)`` of hidden states ``(..., D)``."""
        scores = self.embedding.logits(self._moved(hidden))
        return scores if self.bias is None else scores + self._moved(self.bias)

    def extra_repr(self) -> str:
        """The arguments, for print(module)."""
        return f"{self.embedding.method}, bias={self.bias is not None}"


# The name of the model's submodule that contains the embeddings, and of the quantizer that loads them.
ENTRY = "shared_embeddings"
VERSION = 1
# Where the entry is in config.json: transformers looks there for the name of a quantizer.
KEY = "quantization_config"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one embedding is used in a model.

    Attributes:
        inputs: paths of input layers -> the factor by which they multiply its vectors.
        outputs: paths of output layers.
    """

    inputs: dict[str, float]
    outputs: tuple[str, ...]


def entry_of(
    embeddings: Mapping[str, SharedEmbedding], placements: Mapping[str, Placement]
) -> dict[str, Any]:
    """The entry as plain values, from which `from_entry` rebuilds the embeddings without their weights."""
    tables = {}
    for name, embedding in embeddings.items():
        placement = placements[name]
        tables[name] = {
            "method": embedding.method,
            "num_embeddings": embedding.num_embeddings,
            "embedding_dim": embedding.embedding_dim,
            "options": embedding.stored_options(),
            "inputs": dict(placement.inputs),
            "outputs": list(placement.outputs),
        }
    return {"quant_method": ENTRY, "version": VERSION, "tables": tables}


def find_entry(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The entry in the content of ``config.json``; None for a plain model, or one of another quantizer."""
    entry = settings.get(KEY)
    return entry if isinstance(entry, dict) and entry.get("quant_method") == ENTRY else None


def from_entry(
    entry: Mapping[str, Any],
) -> tuple[dict[str, SharedEmbedding], dict[str, Placement]]:
    """Build embeddings without their weights, and their placements.

    Raises:
        UserError: the entry has another version, is incomplete, or its embeddings cannot be built.
    """
    if entry.get("version") != VERSION:
        raise UserError(
            f"entry '{KEY}' of config.json has version {entry.get('version')!r}, but this program supports "
            f"{VERSION}; use the program that wrote it"
        )
    embeddings, placements = {}, {}
    try:
        for name, table in entry["tables"].items():
            embeddings[name] = build(
                table["method"],
                num_embeddings=table["num_embeddings"],
                embedding_dim=table["embedding_dim"],
                **table["options"],
            )
            placements[name] = Placement(dict(table["inputs"]), tuple(table["outputs"]))
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(f"entry '{KEY}' of config.json is incomplete ({error!r}); copy it again") from error
    return embeddings, placements


def place(model: Any, embeddings: Mapping[str, SharedEmbedding], placements: Mapping[str, Placement]) -> None:
    """Insert embeddings into a transformers model and its configuration.

    Output layers keep their biases.
    """
    placeholders: set[str] = set()
    for name, embedding in embeddings.items():
        placement = placements[name]
        placeholders.update(f"{path}.weight" for path in (*placement.inputs, *placement.outputs))
        for path, scale in placement.inputs.items():
            _replace(model, path, InputSide(embedding, scale))
        for path in placement.outputs:
            bias = getattr(model.get_submodule(path), "bias", None)
            _replace(model, path, OutputSide(embedding, bias))
    # accelerate takes tied tensors without memory for any tensor that it has offloaded.
    model.all_tied_weights_keys = {
        name: tied for name, tied in model.all_tied_weights_keys.items() if name not in placeholders
    }
    setattr(model, ENTRY, nn.ModuleDict(embeddings))
    setattr(model.config, KEY, entry_of(embeddings, placements))
    model.resize_token_embeddings = _resizing_fails
    model.register_load_state_dict_pre_hook(_hold_packed)


def placements_in(model: Any, placements: Mapping[str, Placement]) -> dict[str, Placement]:
    """The placements in a model of the same architecture, but maybe for another task.

    A task changes the prefix of paths and the output layers. Embeddings that the model does not use are
    left out.

    Raises:
        UserError: the model has other word embeddings, or an output layer that was not compressed.
    """
    found = {}
    for name, placement in placements.items():
        inputs = {_path_in(model, path): scale for path, scale in placement.inputs.items()}
        outputs = {_path_in(model, path) for path in placement.outputs}
        here = Placement(
            {path: scale for path, scale in inputs.items() if path}, tuple(filter(None, outputs))
        )
        if here.inputs or here.outputs:
            found[name] = here
    replaced = {path for one in found.values() for path in (*one.inputs, *one.outputs)}
    modules = {id(model.get_submodule(path)) for path in replaced}
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if layer is not None and id(layer) not in modules:
            raise UserError(
                f"entry '{KEY}' of config.json does not describe the {type(layer).__name__} layer for words "
                f"of {type(model).__name__}; load the class of model that was compressed"
            )
    return found


def _path_in(model: Any, path: str) -> str | None:
    """The path of a module in a model whose paths may have a prefix more or less; None if it has none."""
    prefix = f"{model.base_model_prefix}."
    modules = dict(model.named_modules(remove_duplicate=False))
    return next((one for one in (path, path.removeprefix(prefix), prefix + path) if one in modules), None)


def _replace(model: nn.Module, path: str, new: nn.Module) -> None:
    """Replace the module at a path."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, new)


def _hold_packed(model: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Prepare the packed content of a file for ``load_state_dict``, as Trainer calls it to resume."""
    if not prefix and HEADER in state:
        held = hold(state)
        state.clear()
        state.update(held)


def _resizing_fails(*arguments: object, **named: object) -> NoReturn:
    """Replaces `resize_token_embeddings` of a model with shared embeddings."""
    raise UserError(
        "the vocabulary of a model with shared embeddings cannot be resized: resize the plain model, then "
        "compress it"
    )
