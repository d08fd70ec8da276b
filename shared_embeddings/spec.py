"""What a method declares: options, parameter formula, search grid, examples, candidates for `compress`.

The options dataclass of a method is this declaration; its embedding class (`shared_embeddings.embedding`) is
what runs. docs/adding_a_method.md has an example.

Axes: ``V`` vocabulary, ``D`` model dimension.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from shared_embeddings.utils.options import OptionError, option, parse_options, require_at_least

Options = dict[str, Any]
Spec = TypeVar("Spec", bound="EmbeddingOptions[Any]")
# The embedding class that has these options.
EmbeddingClass = TypeVar("EmbeddingClass", covariant=True)


class Candidate(NamedTuple):
    """Options that `compress` tries when no method is given; a search grid sets the others."""

    options: Options  # some options of the method
    store: str  # the storage dtype, see `shared_embeddings.quant.storage`


class SearchGrid(NamedTuple):
    """Options of a method from small to large: no step has fewer parameters than the one before."""

    steps: int  # the number of steps, at least one
    options_at: Callable[[int], Options]  # the options at a step, counted from 0


class Presets(NamedTuple):
    """Options of a method for V words in D dimensions.

    Attributes:
        examples: typical options, about as in the papers, for tests and benchmarks, by a label, which is ""
            for a single example. V is at least 32 and D at least 16.
        grids: the options that `suggest` and `compress --size` search, in order of preference; none if the
            method is impossible for these sizes.
    """

    examples: dict[str, Options]
    grids: Sequence[SearchGrid]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingOptions(Generic[EmbeddingClass]):
    """The base class of the options of every method, with everything that a method declares.

    A method must define `paper`, `summary`, `grid_choice`, `fit_bound`, `count_parameters` and `presets`.
    """

    method: ClassVar[str]  # the registered name
    embedding_class: ClassVar[type[Any]]  # the class that is registered with these options
    paper: ClassVar[str]  # the paper that the method is from
    summary: ClassVar[str]  # what replaces the V x D table, in a few words
    grid_choice: ClassVar[str]  # how the grids of `presets` choose options, in a few words
    # The relative error that fitting the first of the `examples` must not exceed in the tests.
    fit_bound: ClassVar[float]
    # The options that name files about words; see `normalize`.
    file_options: ClassVar[tuple[str, ...]] = ()
    default_store: ClassVar[str] = "fp32"  # the storage dtype unless `compress --store` names another one
    takes_metric: ClassVar[bool] = False  # whether its fit uses what errors count, see `FitTask.metric`
    # The largest number of a table that it is fitted to: by default, sums of squares are finite in 32 bits.
    largest: ClassVar[float] = 1e15
    # Whether a fit reads blocks of rows, so that a table in 16 bits or in a mapped file is not copied.
    reads_blocks: ClassVar[bool] = False
    # Why ``torch.compile(fullgraph=True)`` cannot train with this method; None if it can.
    fullgraph_limit: ClassVar[str | None] = None

    # Whether a trained bias is added to the score of every word.
    output_bias: bool = option("Adds a trained bias to the score of every token.", False)

    @classmethod
    def normalize(cls, values: dict[str, object], words: Sequence[str] | None = None) -> dict[str, object]:
        """Return the given options, converted to the names and types of the fields.

        With `words`, each file about words is replaced by its content for these words, in their order.

        Raises:
            OptionError: a file cannot be read or does not contain the words.
        """
        return values

    @classmethod
    def resolve(
        cls: type[Spec], num_embeddings: int, embedding_dim: int, values: Mapping[str, object]
    ) -> Spec:
        """The checked options for an embedding of V words in D dimensions.

        Raises:
            OptionError: an option is unknown, missing, of the wrong type, or impossible for these sizes.
        """
        options = parse_options(cls.method, cls, cls.normalize(dict(values)))
        try:
            # 32 bits number all words and dimensions.
            require_at_least("num_embeddings", num_embeddings, 1)
            require_at_least("embedding_dim", embedding_dim, 1)
            options.check_sizes(num_embeddings, embedding_dim)
        except OptionError as error:
            raise OptionError(f"{cls.method}: {error}") from None
        return options

    def check_sizes(self, num_embeddings: int, embedding_dim: int) -> None:
        """Raise `OptionError` if these options are impossible for V words in D dimensions."""

    def count_parameters(self, num_embeddings: int, embedding_dim: int) -> int:
        """Return the number of trainable parameters by the paper's formula, without the bias ``(V,)``."""
        raise NotImplementedError

    def search_size(self, num_embeddings: int, embedding_dim: int) -> int:
        """What `suggest` compares with a number of parameters; by default the formula."""
        return self.count_parameters(num_embeddings, embedding_dim)

    @classmethod
    def candidates(cls) -> Sequence[Candidate]:
        """The options that `compress` tries when no method is given.

        None, the default, if the method loses more quality than others at all sizes, or is slow to fit.
        """
        return ()

    @classmethod
    def presets(cls, num_embeddings: int, embedding_dim: int) -> Presets:
        """Return typical options for V words in D dimensions, and those that a search tries."""
        raise NotImplementedError
