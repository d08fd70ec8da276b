"""Language models by name: what a model must provide, and building one from its options.

The modules of this package register their models.

Axes: ``B`` batch, ``T`` time, ``V`` vocabulary, ``D`` width of the word vectors, ``S`` score_dim, ``L``
layers that share a tensor of the state.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

import shared_embeddings as se
from lm.models.ngrams import NGramOptions, NGramTable
from shared_embeddings.accounting import count_parameters, parameter_table, stored_bits
from shared_embeddings.registry import parse_embedding
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import check_known, parse_options

# The detached state that a model carries over to the next segment. All tensors have the shape (L, B, ...).
# With a table of n-grams, the last one has the ids of the last words.
State = tuple[Tensor, ...]


class Output(NamedTuple):
    """Output of a model for a segment."""

    hidden: Tensor  # (B, T, S), for the embedding's `logits` and `cross_entropy`
    state: State  # after the segment
    penalty: Tensor  # scalar to add to the mean loss per token in training; zero in evaluation


_REGISTERED: dict[str, type[LanguageModel]] = {}


class LanguageModel(nn.Module):
    """A language model whose input and output layers are a shared embedding; see `build`.

    Subclasses with an `options_class` are registered as `kind`.
    """

    kind: ClassVar[str]  # registered name
    options_class: ClassVar[type]  # frozen dataclass of options, including `embedding_dim`

    def __init__(self, embedding: se.SharedEmbedding, options: Any) -> None:
        super().__init__()
        self.embedding = embedding
        self.options = options
        self.ngrams: NGramTable | None = None  # adds vectors of n-grams to those of words

    def __init_subclass__(cls, kind: str = "", options_class: type | None = None) -> None:
        super().__init_subclass__()
        if options_class is not None:
            cls.kind, cls.options_class = kind, options_class
            _REGISTERED[kind] = cls

    def initial_state(self, batch_size: int) -> State:
        """The state at the beginning of `batch_size` (B) texts."""
        state = self.initial_layers(batch_size)
        return state if self.ngrams is None else (*state, self.ngrams.initial_context(batch_size))

    def forward(self, ids: Tensor, state: State) -> Output:
        """Read word ids ``(B, T)``, continuing from `state`; hidden state t predicts word t + 1."""
        if self.ngrams is None:
            return self.read(ids, None, state)
        added, context = self.ngrams(ids, state[-1])
        output = self.read(ids, added, state[:-1])
        return output._replace(state=(*output.state, context))

    def initial_layers(self, batch_size: int) -> State:
        """The state of the layers at the beginning of `batch_size` (B) texts."""
        raise NotImplementedError

    def read(self, ids: Tensor, added: Tensor | None, state: State) -> Output:
        """Read word ids ``(B, T)`` whose vectors get `added` ``(B, T, D)``, from a state of the layers."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialize all parameters, including those of the embedding."""
        raise NotImplementedError


@functools.cache
def kinds() -> list[str]:
    """Sorted names of all models."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(_REGISTERED)


def options_class(kind: str) -> type:
    """The options dataclass of a model.

    Raises:
        UserError: there is no such model.
    """
    check_known("model", kind, kinds())
    return _REGISTERED[kind].options_class


def build(
    kind: str,
    words: Sequence[str],
    embedding: Mapping[str, Any],
    options: Mapping[str, Any],
    ngrams: Mapping[str, Any] | None = None,
) -> LanguageModel:
    """Build and initialize a language model.

    Args:
        kind: one of `kinds()`.
        words: the V words in the order of their ids.
        embedding: `method` and options for ``shared_embeddings.build``.
        options: fields of `options_class(kind)`.
        ngrams: fields of `NGramOptions`.

    Raises:
        UserError: the model is unknown, or the embedding cannot be used by a language model.
        shared_embeddings.OptionError: the method or an option is unknown, or a value is invalid.
    """
    parsed: Any = parse_options(kind, options_class(kind), options)
    method, settings = parse_embedding("embedding", embedding)
    built = se.build(
        method, num_embeddings=len(words), embedding_dim=parsed.embedding_dim, words=words, **settings
    )
    if not built.has_output:
        raise UserError(
            f"embedding: this {method} embedding has no output side, which language models need; remove or "
            "change 'output'"
        )
    model = _REGISTERED[kind](built, parsed)
    model.reset_parameters()
    table = parse_options("ngrams", NGramOptions, ngrams or {})
    if table.ngram_rows:
        # Last, so that the other parameters are those of a model without n-grams.
        model.ngrams = NGramTable(table, parsed.embedding_dim)
        model.ngrams.reset_parameters()
    return model


def count_model(model: LanguageModel) -> dict[str, int | float]:
    """Count parameters by role; tied tensors count once.

    Returns:
        For the embedding: ``input`` and ``output`` (used on one side only), ``shared`` (used on both sides)
        and ``embedding`` (their sum). For a table of n-grams: ``ngrams``; the ``ngram_bits`` that storing it
        takes; ``dense_ngrams``, the numbers of a plain table. For the model: ``rest``, ``total`` and
        ``stored_bits``. For comparison: ``dense_embedding`` (a tied V x D table), ``dense_total`` and
        ``compression`` (dense_embedding over embedding).
    """
    embedding, total = model.embedding, count_parameters(model)
    counts = embedding.counts()
    rest = total - counts["total"]
    dense = se.num_parameters(
        "standard", num_embeddings=embedding.num_embeddings, embedding_dim=embedding.embedding_dim
    )
    ngrams = {}
    if model.ngrams is not None:
        of_table = model.ngrams.embedding.counts()
        ngrams = {
            "ngrams": of_table["total"],
            "ngram_bits": of_table["stored_bits"],
            "dense_ngrams": model.ngrams.embedding.num_embeddings * model.ngrams.embedding.embedding_dim,
        }
    return {
        **{role: counts[role] for role in ("input", "output", "shared")},
        "embedding": counts["total"],
        **ngrams,
        "rest": rest - ngrams.get("ngrams", 0),
        "total": total,
        "stored_bits": stored_bits(model),
        "dense_embedding": dense,
        "dense_total": dense + rest,
        "compression": dense / max(counts["total"], 1),
    }


def describe_parameters(model: LanguageModel) -> str:
    """The report of the embedding and the parameter counts that training prints first."""
    counts = count_model(model)
    embedding = model.embedding
    tied = "input = output" if counts["shared"] else "input and output not tied"
    names = {"input": "input only", "output": "output only", "shared": "input and output"}
    rows = [(f"embedding, {names[key]}", counts[key]) for key in names if counts[key]]
    rows += [(key, counts[key]) for key in ("ngrams", "rest", "total") if key in counts]
    rows.append(("with a plain table", counts["dense_total"]))
    return parameter_table(f"Embedding, {tied}: {embedding.method} {embedding.options}", rows, counts)
