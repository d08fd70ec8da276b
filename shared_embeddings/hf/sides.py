"""The modules that replace a model's word table and output layer.

Both refer to one embedding, which is a submodule elsewhere, so that the state contains every tensor once.

Axes: ``B`` batch, ``T`` time, ``V`` vocabulary, ``D`` model dimension.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shared_embeddings.embedding import SharedEmbedding

# What adapters do with the rows of a table.
_USES_OF_ROWS = {"__getitem__", "add", "add_", "__iadd__", "index_copy", "index_copy_"}
_COPIES = (Tensor.data.__get__, Tensor.clone)  # type: ignore[attr-defined]


class Placeholder(nn.Parameter):
    """A frozen tensor ``(V, 0)`` in place of a table; an adapter that uses its rows gets an error.

    `trainable_token_indices` of PEFT reads rows, and `merge_and_unload` adds to ``weight.data``.
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
                "compressed embeddings have no rows that an adapter can read or change: keep a LoRA adapter "
                "beside the model instead of merging it, and use LoRA on the input layer instead of "
                "trainable_token_indices"
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


class OutputSide(_Side):
    """Replaces an ``nn.Linear``: hidden states ``(B, T, D)`` to scores ``(B, T, V)``.

    Args:
        embedding: computes the scores.
        bias: ``(V,)``, added to the scores, or None.
    """

    bias: nn.Parameter | None

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
