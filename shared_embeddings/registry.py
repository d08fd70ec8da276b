"""The methods by name, and building an embedding by the name of its method.

Every module in `shared_embeddings.methods` registers its method when the package is imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, TypeVar

from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.options import OptionError, did_you_mean

EmbeddingClass = TypeVar("EmbeddingClass", bound="type[SharedEmbedding]")

# More words or dimensions are a mistake: 32 bits cannot number them.
_LARGEST_SIZE = 2**31 - 1

_registered: dict[str, type[SharedEmbedding]] = {}


def register(method: str, options_class: type) -> Callable[[EmbeddingClass], EmbeddingClass]:
    """Class decorator: register an embedding class as `method`, with `options_class` as its options."""

    def add(embedding_class: EmbeddingClass) -> EmbeddingClass:
        if method in _registered:
            raise ValueError(f"two embedding classes are registered as '{method}': rename one")
        embedding_class.method = method
        embedding_class.options_class = options_class
        _registered[method] = embedding_class
        return embedding_class

    return add


def methods() -> list[str]:
    """The names of all registered methods, sorted."""
    return sorted(_registered)


def method_class(method: str) -> type[SharedEmbedding]:
    """The class registered as `method`.

    Raises:
        OptionError: there is no such method.
    """
    names = methods()
    # Configurations may contain other types, such as a list.
    if method not in names:
        hint = did_you_mean(method, names)
        raise OptionError(f"unknown embedding method {method!r}.{hint} Methods: {', '.join(names)}")
    return _registered[method]


def options(method: str) -> type:
    """The options dataclass of `method`: its fields are the options, their defaults and types.

    Raises:
        OptionError: there is no such method.
    """
    return method_class(method).options_class


def has_option(method: str, name: str) -> bool:
    """Whether `method` has an option called `name`.

    Raises:
        OptionError: there is no such method.
    """
    return any(field.name == name for field in dataclasses.fields(options(method)))


def file_options(method: str) -> tuple[str, ...]:
    """The options of `method` that name files; checkpoints contain the content of these files.

    Raises:
        OptionError: there is no such method.
    """
    return method_class(method).file_options


def build(
    method: str,
    *,
    num_embeddings: int,
    embedding_dim: int,
    padding_idx: int | None = None,
    words: Sequence[str] | None = None,
    **options: object,
) -> SharedEmbedding:
    """Build an embedding of `num_embeddings` (V) words in `embedding_dim` (D) dimensions.

    Args:
        method: one of `methods()`.
        padding_idx: the word whose row is always zero and never trained, from 0 to V - 1.
        words: the V words in the order of their ids, for methods whose options name files about words; such
            a file may have them in another order.
        options: the method's own options, as in `options(method)`.

    Raises:
        OptionError: the method or an option is unknown, has the wrong type, or is impossible.
    """
    embedding_class = method_class(method)
    sizes = _checked_sizes(method, num_embeddings, embedding_dim)
    if padding_idx is not None:
        padding_idx = _checked_padding(method, padding_idx, sizes[0])
    if words is not None:
        options = options_for_words(embedding_class, options, words, sizes[0])
    return embedding_class(*sizes, padding_idx, embedding_class.resolve(*sizes, options))


def num_parameters(method: str, *, num_embeddings: int, embedding_dim: int, **options: object) -> int:
    """The number of trainable parameters by the formula of the method's paper, without building anything.

    The papers do not count a bias of the scores; with the option `output_bias` it is added.

    Raises:
        OptionError: as in `build`.
    """
    embedding_class = method_class(method)
    sizes = _checked_sizes(method, num_embeddings, embedding_dim)
    resolved = embedding_class.resolve(*sizes, options)
    return embedding_class.num_parameters(*sizes, resolved) + embedding_class.count_bias(sizes[0], resolved)


def search_size(method: str, *, num_embeddings: int, embedding_dim: int, **options: object) -> int:
    """The size that `suggest` compares with a number of parameters, see `Method.search_size`.

    Raises:
        OptionError: as in `build`.
    """
    embedding_class = method_class(method)
    sizes = _checked_sizes(method, num_embeddings, embedding_dim)
    return embedding_class.search_size(*sizes, embedding_class.resolve(*sizes, options))


def options_for_words(
    embedding_class: type[SharedEmbedding], given: dict[str, Any], words: Sequence[str], num_embeddings: int
) -> dict[str, Any]:
    """The options with files about words replaced by their content for `words`.

    Raises:
        OptionError: there are not V words, or a file does not contain them.
    """
    method = embedding_class.method
    if len(words) != num_embeddings:
        raise OptionError(
            f"{method}: 'words' has {len(words)} words, but 'num_embeddings' is {num_embeddings}; give the "
            "words of this vocabulary"
        )
    try:
        return embedding_class.options_for_vocabulary(dict(given), words)
    except OptionError as error:
        raise OptionError(f"{method}: {error}") from None


def _checked_sizes(method: str, num_embeddings: int, embedding_dim: int) -> tuple[int, int]:
    """(V, D) as plain ints, or `OptionError`."""
    for name, value in (("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)):
        is_number = isinstance(value, Integral) and not isinstance(value, bool)
        if not is_number or not 1 <= value <= _LARGEST_SIZE:
            raise OptionError(
                f"{method}: '{name}' is {value!r}, but it must be a whole number from 1 to {_LARGEST_SIZE}"
            )
    return int(num_embeddings), int(embedding_dim)


def _checked_padding(method: str, padding_idx: int, num_embeddings: int) -> int:
    """`padding_idx` as a plain int, or `OptionError` if it is out of range."""
    is_number = isinstance(padding_idx, Integral) and not isinstance(padding_idx, bool)
    if not is_number or not 0 <= padding_idx < num_embeddings:
        raise OptionError(
            f"{method}: 'padding_idx' is {padding_idx!r}, but it must be a word id from 0 to "
            f"{num_embeddings - 1}, or None"
        )
    return int(padding_idx)
