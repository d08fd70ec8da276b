"""Counting parameters and bytes of a model; tied tensors count once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shared_embeddings.caching import CachingModule
from shared_embeddings.quant.packed_tensor import inner_tensors
from shared_embeddings.quant.storage import packed_bytes


def distinct_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model with each tied tensor once, under the first of its names."""
    first: dict[int, str] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(tensor), name) == name:
            state[name] = tensor.detach()
    return state


def count_parameters(module: nn.Module) -> int:
    """The number of parameters of `module`; a parameter used in several places counts once."""
    return sum(parameter.numel() for parameter in module.parameters())


def stored_bits(module: nn.Module, store: str = "fp32") -> int:
    """The size of a checkpoint of `module` in bits: its parameters and persistent buffers, each once.

    Args:
        store: how floating-point tensors are packed, see `shared_embeddings.quant.storage`.
    """
    parameters = sum(8 * packed_bytes(tensor, store, name) for name, tensor in module.named_parameters())
    return parameters + sum(
        8 * packed_bytes(buffer, store, name) if buffer.is_floating_point() else bits
        for name, buffer, bits in stored_buffers(module)
    )


def stored_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """The persistent buffers of `module`, each once: name, tensor, and size in bits.

    Embeddings may need fewer bits than a buffer has in memory, see `SharedEmbedding.buffer_bits`.
    """
    seen: set[int] = set()
    for path, part in module.named_modules():
        bits_of: Mapping[str, int] = getattr(part, "buffer_bits", {})
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                bits = len(buffer) * bits_of[name] if name in bits_of else 8 * buffer.nbytes
                yield f"{path}.{name}" if path else name, buffer, bits


def bytes_in_memory(module: nn.Module) -> int:
    """Return the bytes of parameters, buffers and cached tensors of `module`, each memory block once."""
    sizes: dict[int, int] = {}
    values: list[Any] = [tensor for part in module.modules() for tensor in (part._parameters, part._buffers)]
    values += [vars(part) for part in module.modules() if isinstance(part, CachingModule)]
    while values:
        value = values.pop()
        if isinstance(value, Tensor):
            for memory in (part.untyped_storage() for part in inner_tensors(value)):
                sizes[memory.data_ptr()] = memory.nbytes()
        elif isinstance(value, (tuple, list)):
            values.extend(value)
        elif isinstance(value, dict):
            values.extend(value.values())
        elif dataclasses.is_dataclass(value):
            values.append(vars(value))
    return sum(sizes.values())


def parameter_table(title: str, rows: Sequence[tuple[str, float]], counts: Mapping[str, float]) -> str:
    """The parameter counts that training prints first: a title, then names and numbers of parameters.

    The `counts` are ``compression`` and ``dense_embedding``, the size of a plain table.
    """
    lines = [title, "Parameters:", *(f"  {name:<28}{int(number):>14,}" for name, number in rows)]
    lines.append(
        f"  compression of the embedding: {counts['compression']:.2f} (a plain table: "
        f"{counts['dense_embedding']:,})"
    )
    return "\n".join(lines)
