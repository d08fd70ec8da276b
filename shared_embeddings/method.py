"""What a method has to provide: options, rows, output factors, a parameter formula, a search grid and a fit.

`SharedEmbedding` derives everything that hosts call from these. docs/adding_a_method.md has an example.

Axes: ``V`` vocabulary, ``D`` model dimension, ``S`` width of the hidden states that are scored, ``R`` rank or
small dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared_embeddings.fitting.task import FitTask, reconstruct
from shared_embeddings.layers.caching import CachingModule
from shared_embeddings.options import OptionError, parse_options, plain_options
from shared_embeddings.utils.tracing import needs_fixed_shapes

Options = dict[str, object]

# Methods with `expensive_rows` compute tables in blocks of this many rows, which limits the memory of wide
# layers.
_TABLE_BLOCK = 2048


class OutputFactors(NamedTuple):
    """The output table in factors: scores are ``(hidden @ basis.T) @ codes.T``, plus any bias.

    Attributes:
        codes: ``(V, R)``.
        basis: ``(R, S)``, or None if R is S and hidden states are multiplied by the codes directly.
    """

    codes: Tensor
    basis: Tensor | None


class Layer(NamedTuple):
    """The activations of words at one layer of an embedding, for analysis.

    Attributes:
        name: of the layer, unique within its embedding.
        values: ``(n, width)``, one row for each word that passes through the layer.
        groups: the number of independent groups of dimensions, all of the same width.
    """

    name: str
    values: Tensor
    groups: int = 1


class Candidate(NamedTuple):
    """Options that `compress` tries when no method is given; a search grid sets the others.

    Attributes:
        options: some options of the method.
        store: the storage dtype, see `shared_embeddings.quant.storage`.
    """

    options: Options
    store: str


class SearchGrid(NamedTuple):
    """Options of a method from small to large: no step has fewer parameters than the one before.

    Attributes:
        steps: the number of steps, at least one.
        options_at: the options at a step, counted from 0.
    """

    steps: int
    options_at: Callable[[int], Options]


class Method(CachingModule):
    """The base class of `SharedEmbedding`, with everything that a method defines or overrides.

    A method must define `paper`, `summary`, `fit_bound`, `grid_choice`, `rows`, `init_weights`,
    `num_parameters`, `search_grids` and `examples`. The padding row that `rows` and `output_factors` return
    is ignored.

    Attributes:
        method: the registered name.
        options_class: the dataclass of the method's options, see `shared_embeddings.options.option`.
        paper: the paper that the method is from.
        summary: what replaces the V x D table, in a few words.
        file_options: the options that name files about words; see `options_for_vocabulary`.
        per_word: the parameters and buffers with one row per word, ``(V, ...)``; ``bias`` need not be listed.
            Empty if words have no separate rows.
        expensive_rows: whether a row takes more work than indexing and one small product. Then each distinct
            word of a batch is computed once (not in compiled graphs), and the table is cached for inference.
        scores_in_blocks: whether an embedding in few bits computes scores from blocks of `output_rows`; if
            not, because rows take too long, the output table is cached for inference.
        grid_choice: how `search_grids` chooses options, in a few words.
        fit_bound: the relative error that fitting the first of the `examples` must not exceed in the tests.
        default_store: the storage dtype unless `compress --store` names another one.
        candidates: options that `compress` tries when no method is given; empty if the method loses more
            quality than others at all sizes, or is slow to fit.
        fullgraph_limit: why ``torch.compile(fullgraph=True)`` cannot train with this method; None if it can.
        num_embeddings: V.
        embedding_dim: D.
        padding_idx: the word without a vector, or None.
        options: the method's frozen options.
        score_dim: S, the width of hidden states that `logits` and `cross_entropy` take.
        has_output: whether there is an output side.
        bias: ``(V,)`` added to the scores, with the option `output_bias`; else None.
    """

    method: ClassVar[str]
    options_class: ClassVar[type]
    paper: ClassVar[str]
    summary: ClassVar[str]
    grid_choice: ClassVar[str]
    fit_bound: ClassVar[float]
    file_options: ClassVar[tuple[str, ...]] = ()
    per_word: ClassVar[tuple[str, ...]] = ()
    expensive_rows: ClassVar[bool] = False
    scores_in_blocks: ClassVar[bool] = False
    default_store: ClassVar[str] = "fp32"
    candidates: ClassVar[tuple[Candidate, ...]] = ()
    fullgraph_limit: ClassVar[str | None] = None
    bias: nn.Parameter | None

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, options: Any
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.options = options
        self.score_dim = embedding_dim
        self.has_output = True
        bias = nn.Parameter(torch.empty(num_embeddings)) if options.output_bias else None
        self.register_parameter("bias", bias)

    # Options and sizes.

    @classmethod
    def normalize_options(cls, given: dict[str, object]) -> dict[str, object]:
        """The given options, converted to the names and types of the options class."""
        return given

    @classmethod
    def options_for_vocabulary(cls, given: dict[str, object], words: Sequence[str]) -> dict[str, object]:
        """The given options, with each file about words replaced by its content for `words`, in their order.

        Raises:
            OptionError: a file cannot be read or does not contain the words.
        """
        return given

    @classmethod
    def check_sizes(cls, num_embeddings: int, embedding_dim: int, options: Any) -> None:
        """Raise `OptionError` if these options are impossible for V words in D dimensions."""

    @classmethod
    def resolve(cls, num_embeddings: int, embedding_dim: int, given: Mapping[str, object]) -> Any:
        """The checked options dataclass for an embedding of V words in D dimensions.

        Raises:
            OptionError: an option is unknown, missing, of the wrong type, or impossible for these sizes.
        """
        options: Any = parse_options(cls.method, cls.options_class, cls.normalize_options(dict(given)))
        try:
            cls.check_sizes(num_embeddings, embedding_dim, options)
        except OptionError as error:
            raise OptionError(f"{cls.method}: {error}") from None
        return options

    def stored_options(self) -> dict[str, object]:
        """Plain options with which `build` makes a module that can load this one's state_dict.

        Hosts store them in checkpoints; loading needs no file that the original options may have named.
        """
        return plain_options(self.options)

    @classmethod
    def num_parameters(cls, num_embeddings: int, embedding_dim: int, options: Any) -> int:
        """The number of trainable parameters by the paper's formula, without any bias of the scores."""
        raise NotImplementedError

    @classmethod
    def count_bias(cls, num_embeddings: int, options: Any) -> int:
        """The parameters of the bias: V with the option `output_bias`."""
        return num_embeddings if options.output_bias else 0

    @classmethod
    def search_size(cls, num_embeddings: int, embedding_dim: int, options: Any) -> int:
        """What `suggest` compares with a number of parameters; by default the formula."""
        return cls.num_parameters(num_embeddings, embedding_dim, options)

    @classmethod
    def search_grids(cls, num_embeddings: int, embedding_dim: int) -> Iterator[SearchGrid]:
        """The options that `suggest` and `compress --target-ratio` search, in order of preference.

        Yields nothing if the method is impossible for V words in D dimensions.
        """
        raise NotImplementedError

    @classmethod
    def examples(cls, num_embeddings: int, embedding_dim: int) -> dict[str, Options]:
        """Typical options for V words in D dimensions, about as in the papers, for tests and benchmarks.

        Returns:
            Options by a label, which is "" for a single example. V is at least 32 and D at least 16.
        """
        raise NotImplementedError

    @classmethod
    def fit(cls, task: FitTask) -> Any:
        """An embedding that reconstructs `task.teacher`; by default by gradient descent."""
        return reconstruct(task.build(), task)

    # Parameters.

    def init_weights(self) -> None:
        """Draw all parameters but the bias with torch's generator; table entries have a std near D**-0.5.

        A method's constructor ends with `reset_parameters`, which calls this.
        """
        raise NotImplementedError

    def output_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that the output side uses."""
        return self.parameters()

    def input_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that the input side uses; by default all but the bias of the scores."""
        return (parameter for parameter in self.parameters() if parameter is not self.bias)

    def buffer_bits(self, name: str, buffer: Tensor) -> int:
        """The number of bits that storing the buffer `name` takes."""
        return buffer.numel() * buffer.element_size() * 8

    def state_for_ids(self, ids: Tensor) -> tuple[dict[str, object], dict[str, Tensor]]:
        """The options and the state of an embedding of the words `ids` ``(n,)`` only, in ascending order.

        Raises:
            ValueError: words cannot be removed.
        """
        if not self.per_word:
            raise ValueError(
                f"words cannot be removed from a {self.method} embedding, which has no rows for words: "
                "trim the plain model first, then compress it"
            )
        per_word = (*self.per_word, "bias")
        return self.stored_options(), {
            name: tensor.index_select(0, ids) if name in per_word else tensor
            for name, tensor in self.state_dict().items()
        }

    # Rows.

    def rows(self, ids: Tensor) -> Tensor:
        """The input vectors ``(n, D)`` of word ids ``(n,)``.

        Raises:
            IndexError: an id is out of range (checked on a CPU).
        """
        raise NotImplementedError

    def row_function(self) -> Callable[[Tensor], Tensor]:
        """A faster `rows` for many calls: work that does not depend on the words is done once, here."""
        return self.rows

    def token_rows(self, words: Tensor, inverse: Tensor) -> Tensor:
        """The vectors ``(N, D)`` of tokens, given the distinct `words` ``(n,)`` and their `inverse` ``(N,)``.

        For methods with `expensive_rows`. By default, each word is transformed once; dropout inside is drawn
        for each token.
        """
        return F.embedding(inverse, self.without_padding(self.rows(words), words))

    @property
    def draws_per_token(self) -> bool:
        """Whether two tokens of one word currently have different vectors, because of dropout inside."""
        return False

    def layers(self, ids: Tensor) -> list[Layer]:
        """The values of words ``(n,)`` at every layer; the last one is the "output", their `rows`."""
        return [Layer("output", self.rows(ids))]

    def output_factors(self) -> OutputFactors:
        """The output table in factors; by default the table itself."""
        return OutputFactors(self.all_rows(), None)

    def output_rows(self) -> Callable[[Tensor], Tensor]:
        """A function: word ids ``(n,)`` -> their rows ``(n, R)`` of the codes in `output_factors`."""
        return self.row_function()

    def code_scores(self, hidden: Tensor) -> Tensor | None:
        """The products ``(N, C, K)`` of hidden states with what each of K values of each of C `codes` adds.

        A row of `output_rows` is the sum of these. None, the default, if words have no such codes.
        """
        return None

    def output_basis(self) -> Tensor | None:
        """The basis of `output_factors` for methods with `scores_in_blocks`."""
        return None

    def check_ids(self, ids: Tensor) -> None:
        """Raise IndexError for an id out of range, unless checking would synchronize with a device."""
        if ids.device.type != "cpu" or ids.numel() == 0 or needs_fixed_shapes(ids):
            return
        for word in (int(ids.min()), int(ids.max())):
            if not 0 <= word < self.num_embeddings:
                raise IndexError(f"index {word} is out of range: there are {self.num_embeddings} words")

    def all_ids(self, device: torch.device) -> Tensor:
        """The ids ``(V,)`` of all words."""
        return torch.arange(self.num_embeddings, device=device)

    def all_rows(self) -> Tensor:
        """The rows ``(V, D)`` of all words; `expensive_rows` are computed in blocks."""
        ids = self.all_ids(next(self.parameters()).device)
        if not self.expensive_rows:
            return self.rows(ids)
        rows = self.row_function()
        if torch.is_grad_enabled():
            # Inner layers are recomputed in the backward pass instead of stored for all V words.
            rows = functools.partial(checkpoint, rows, use_reentrant=False)
        return torch.cat([rows(block) for block in ids.split(_TABLE_BLOCK)])

    def without_padding(self, rows: Tensor, ids: Tensor) -> Tensor:
        """`rows` ``(n, D)`` with a constant zero wherever `ids` ``(n,)`` is the padding word."""
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((ids == self.padding_idx).unsqueeze(-1), 0.0)
