"""The methods by name, and building an embedding from a name or from options.

Every module in `shared_embeddings.modules` registers its method; all are imported when names are asked for.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.spec import EmbeddingOptions
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import OptionError, check_known, quote, require

E = TypeVar("E")
EmbeddingClass = TypeVar("EmbeddingClass", bound="type[SharedEmbedding]")

# The setting of hosts for an embedding, and arguments of `build` that hosts give.
EXAMPLE = "{method: funnel, rank: 64}"
_NO_OPTIONS = ("num_embeddings", "embedding_dim", "padding_idx", "words")

_registered: dict[str, type[EmbeddingOptions[Any]]] = {}


def register(
    method: str, options_class: type[EmbeddingOptions[Any]]
) -> Callable[[EmbeddingClass], EmbeddingClass]:
    """Class decorator: register an embedding class as `method`, with `options_class` as its options."""

    def add(embedding_class: EmbeddingClass) -> EmbeddingClass:
        if method in _registered:
            raise ValueError(f"two embedding classes are registered as '{method}': rename one")
        options_class.method = method
        options_class.embedding_class = embedding_class
        _registered[method] = options_class
        return embedding_class

    return add


def methods() -> list[str]:
    """The names of all registered methods, sorted."""
    importlib.import_module("shared_embeddings.modules")
    return sorted(_registered)


def get_method_config(method: str) -> type[EmbeddingOptions[Any]]:
    """The options dataclass of `method`, with all that it declares; OptionError if there is none."""
    check_known("embedding method", method, methods())
    return _registered[method]


def parse_embedding(where: str, settings: object) -> tuple[str, dict[str, Any]]:
    """The method and the options in a configuration such as ``{method: funnel, rank: 64}``.

    The host adds the words and the sizes; `where` is the prefix of messages.

    Raises:
        OptionError: it names no method, or sets an argument of `build` that is no option.
    """
    options = dict(settings) if isinstance(settings, Mapping) else {}
    method = options.pop("method", None)
    if not isinstance(method, str):
        raise OptionError(f"{where}: {quote(settings)} does not name a method; write it like {EXAMPLE}")
    for name in options:
        if not isinstance(name, str) or name in _NO_OPTIONS:
            raise OptionError(f"{where}: {name!r} follows from the vocabulary and the model; remove it")
    return method, options


@overload
def build(
    method: EmbeddingOptions[E],
    *,
    num_embeddings: int,
    embedding_dim: int,
    padding_idx: int | None = None,
    words: Sequence[str] | None = None,
) -> E: ...


@overload
def build(
    method: str,
    *,
    num_embeddings: int,
    embedding_dim: int,
    padding_idx: int | None = None,
    words: Sequence[str] | None = None,
    **options: object,
) -> SharedEmbedding: ...


def build(
    method: str | EmbeddingOptions[Any],
    *,
    num_embeddings: int,
    embedding_dim: int,
    padding_idx: int | None = None,
    words: Sequence[str] | None = None,
    **options: object,
) -> Any:
    """Build an embedding of `num_embeddings` (V) words in `embedding_dim` (D) dimensions.

    Args:
        method: one of `methods()`, or the options of a method, such as ``FunnelOptions(rank=64)``.
        num_embeddings: V, the number of words.
        embedding_dim: D.
        padding_idx: the word whose row is always zero and never trained, from 0 to V - 1.
        words: the V words in the order of their ids, for methods whose options name files about words; such
            a file may have them in another order.
        options: the method's own options by name, if `method` is a name.

    Returns:
        A `SharedEmbedding` with new parameters on the default device.

    Raises:
        OptionError: the method or an option is unknown, has the wrong type, or is impossible.
    """
    spec, values = spec_of(method, options, num_embeddings, words)
    options_of_method = spec.resolve(num_embeddings, embedding_dim, values)
    require(
        padding_idx is None or 0 <= padding_idx < num_embeddings,
        f"{spec.method}: 'padding_idx' is {padding_idx}, but it must be from 0 to {num_embeddings - 1}",
    )
    return spec.embedding_class(num_embeddings, embedding_dim, padding_idx, options_of_method)


def check_stored(state: Mapping[str, Tensor], method: str, **arguments: Any) -> None:
    """Raise UserError unless an embedding, see `build`, has the tensors of a file; it is not allocated."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in build(method, **arguments).state_dict().items()}
    if shapes != {name: tensor.shape for name, tensor in state.items()}:
        raise UserError(f"its tensors are not those of {method} with the sizes in its settings")


def num_parameters(
    method: str | EmbeddingOptions[Any], *, num_embeddings: int, embedding_dim: int, **options: object
) -> int:
    """The number of trainable parameters by the formula of the method's paper, without building anything.

    The papers do not count a bias of the scores; with the option `output_bias` it is added.

    Args:
        method, num_embeddings, embedding_dim, options: as in `build`.

    Raises:
        OptionError: as in `build`.
    """
    spec, values = spec_of(method, options, num_embeddings)
    resolved = spec.resolve(num_embeddings, embedding_dim, values)
    count = resolved.count_parameters(num_embeddings, embedding_dim)
    return count + (num_embeddings if resolved.output_bias else 0)


def spec_of(
    method: str | EmbeddingOptions[Any],
    values: dict[str, object],
    num_embeddings: int,
    words: Sequence[str] | None = None,
) -> tuple[type[EmbeddingOptions[Any]], dict[str, object]]:
    """Return the options class of a method, and the options that were given by name or as an object.

    With `words`, files about words are replaced by their content for the V words.

    Raises:
        OptionError: there is no such method, both kinds of options are given, there are not V words, or a
            file does not contain them.
    """
    if isinstance(method, EmbeddingOptions):
        spec = type(method)
        if values:
            name = next(iter(values))
            raise OptionError(f"{spec.method}: '{name}' is beside the options; give it in them")
        values = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    else:
        spec = get_method_config(method)
    if words is None:
        return spec, values
    if len(words) != num_embeddings:
        raise OptionError(
            f"{spec.method}: 'words' has {len(words)} words, but 'num_embeddings' is {num_embeddings}; give "
            "the words of this vocabulary"
        )
    return spec, spec.normalize(dict(values), words)
