"""What every embedding offers: input lookup, tied output scores, loss, and an account of its size.

A method gives rows for word ids and, for the output side, codes ``(V, R)`` with an optional basis ``(R, S)``;
all that hosts call is built here from these.

Axes: ``B`` batch, ``T`` time, ``N`` = B*T tokens, ``V`` vocabulary, ``D`` model dimension, ``S`` width of the
hidden states that are scored, ``R`` rank or small dimension.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared_embeddings.layers.caching import CachingModule
from shared_embeddings.losses.blockwise import Reduction, with_even_tokens
from shared_embeddings.losses.chunked import linear_cross_entropy
from shared_embeddings.options import plain_options
from shared_embeddings.selection import select_rows
from shared_embeddings.sizing import accounting

# Rows that a deep method computes at a time when it builds its table, so that its wide layers stay small.
_TABLE_BLOCK = 2048


class OutputFactors(NamedTuple):
    """The output table in factors: scores are ``(hidden @ basis.T) @ codes.T``, plus any bias.

    Attributes:
        codes: ``(V, R)``.
        basis: ``(R, S)``, or None when R is S and hidden states meet the codes directly.
    """

    codes: Tensor
    basis: Tensor | None


class Layer(NamedTuple):
    """What words are on their way to their vectors, for analysis.

    Attributes:
        name: of the layer, unique within its embedding.
        values: ``(n, width)``, one row for each word that goes through it.
        groups: into how many independent groups of dimensions, alike in width, the layer falls.
    """

    name: str
    values: Tensor
    groups: int = 1


class SharedEmbedding(CachingModule):
    """An embedding for the input and the tied output of a model.

    The row of `padding_idx` is zero on both sides and gets no gradient on either, whatever its parameters
    hold. In inference what is derived from the parameters is cached, see `CachingModule`.

    With the option `output_bias` every method has a parameter ``bias`` ``(V,)`` that the scores get; it is
    zero at first, and so is that of the padding word always.

    Attributes:
        method: the registered name.
        paper: where the method is from.
        idea: what becomes of the V x D table, in a few words.
        file_options: the options that name files about words; see `options_for_vocabulary`.
        per_word: the parameters and buffers with a row for every word, ``(V, ...)``; a ``bias`` need not be
            named. Empty where the words have no rows of their own.
        num_embeddings: V.
        embedding_dim: D.
        padding_idx: the word without a vector, or None.
        options: the method's frozen options.
        score_dim: S, the width of hidden states that `logits` and `cross_entropy` take.
        has_output: whether there is an output side at all.
        is_deep: whether a row takes more work than an index and one small product, so that each distinct
            word of a batch is computed once and the whole table is cached for inference.
    """

    method: ClassVar[str]
    options_class: ClassVar[type]
    paper: ClassVar[str]
    idea: ClassVar[str]
    file_options: ClassVar[tuple[str, ...]] = ()
    per_word: ClassVar[tuple[str, ...]] = ()
    is_deep: ClassVar[bool] = False
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

    @property
    def has_linear_scores(self) -> bool:
        """Whether ``logits(h)`` is ``h @ output_table().T``, plus `output_bias()` where there is one.

        Not so where the softmax takes two steps.
        """
        return self.has_output

    # What a method gives.

    def rows(self, ids: Tensor) -> Tensor:
        """The input vectors ``(n, D)`` of word ids ``(n,)``; the padding row is of no account.

        Raises:
            IndexError: an id is no word (on a CPU).
        """
        raise NotImplementedError

    def token_rows(self, words: Tensor, inverse: Tensor) -> Tensor:
        """The vectors ``(N, D)`` of tokens that are the distinct `words` ``(n,)`` at `inverse` ``(N,)``.

        For deep methods. By default each word is transformed once; dropout inside is drawn for each token.
        """
        return F.embedding(inverse, self._without_padding(self.rows(words), words))

    @property
    def draws_per_token(self) -> bool:
        """Whether two tokens of one word have different vectors now, because dropout acts inside."""
        return False

    def layers(self, ids: Tensor) -> list[Layer]:
        """What words with ids ``(n,)`` are in every layer; the last one is the "output", their `rows`."""
        return [Layer("output", self.rows(ids))]

    def row_function(self) -> Callable[[Tensor], Tensor]:
        """`rows`, after the part of its work that is the same for all words, done once for many calls."""
        return self.rows

    def output_factors(self) -> OutputFactors:
        """The output table in factors; by default the table itself. The padding row is of no account."""
        return OutputFactors(self._all_rows(), None)

    def draw_parameters(self) -> None:
        """Draw all parameters but the bias from torch's random numbers; table entries have std about D**-0.5.

        A method's constructor ends with `reset_parameters`, which calls this.
        """
        raise NotImplementedError

    @classmethod
    def closed_form(cls, num_embeddings: int, embedding_dim: int, options: Any) -> int:
        """The number of trainable parameters by the paper's formula, without any bias of the scores."""
        raise NotImplementedError

    @classmethod
    def count_bias(cls, num_embeddings: int, options: Any) -> int:
        """The parameters of the bias: V with the option `output_bias`."""
        return num_embeddings if options.output_bias else 0

    @classmethod
    def gather_options(cls, given: dict[str, object]) -> dict[str, object]:
        """The options as given, sorted into the fields of the options class."""
        return given

    @classmethod
    def options_for_vocabulary(cls, given: dict[str, object], words: Sequence[str]) -> dict[str, object]:
        """The options as given, every file about words replaced by what it says of `words`, in their order.

        Raises:
            OptionError: a file cannot be read or does not know the words.
        """
        return given

    @classmethod
    def check_sizes(cls, num_embeddings: int, embedding_dim: int, options: Any) -> None:
        """Raise `OptionError` when no embedding of V words in D dimensions can have these options."""

    def selected(self, ids: Tensor) -> tuple[dict[str, object], dict[str, Tensor]]:
        """The options and the state of an embedding of the words `ids` ``(n,)`` alone, which ascend.

        Raises:
            ValueError: words cannot be left out.
        """
        if not self.per_word:
            raise ValueError(
                f"a {self.method} embedding has no rows of its own for each word, so that none can be left "
                "out: trim the plain model first, then compress it"
            )
        per_word = (*self.per_word, "bias")
        return self.stored_options(), {
            name: tensor.index_select(0, ids) if name in per_word else tensor
            for name, tensor in self.state_dict().items()
        }

    def output_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that the output side uses."""
        return self.parameters()

    def input_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that the input side uses; by default all but the bias of the scores."""
        return (parameter for parameter in self.parameters() if parameter is not self.bias)

    def buffer_bits(self, name: str, buffer: Tensor) -> int:
        """The bits that it takes to store the buffer `name`."""
        return buffer.numel() * buffer.element_size() * 8

    # What hosts call.

    def reset_parameters(self) -> None:
        """Begin anew: parameters as `draw_parameters` gives them, and no bias."""
        self.draw_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, ids: Tensor) -> Tensor:
        """The vectors ``(..., D)`` of word ids ``(...)``.

        Raises:
            TypeError: the ids are of another type than int64 or int32.
            IndexError: an id is no word (on a CPU).
        """
        _check_type("ids", ids)
        flat = ids.reshape(-1)
        if not self.is_deep:
            vectors = self._without_padding(self.rows(flat), flat)
        elif self.cache_state() is not None:
            vectors = F.embedding(flat, self.table())
        else:
            words, inverse = torch.unique(flat, return_inverse=True)
            vectors = self.token_rows(words, inverse)
        return vectors.view(*ids.shape, self.embedding_dim)

    def logits(self, hidden: Tensor) -> Tensor:
        """The scores ``(..., V)`` of all words for hidden states ``(..., S)``.

        Raises:
            ValueError: the last axis of `hidden` is not `score_dim`.
        """
        codes, basis = self._factors()
        self.check_hidden(hidden)
        projected = hidden if basis is None else F.linear(hidden, basis)
        scores = F.linear(projected, codes, self.output_bias())
        if self.padding_idx is not None:
            scores[..., self.padding_idx] = 0.0
        return scores

    def log_prob(self, hidden: Tensor) -> Tensor:
        """The log-probabilities ``(..., V)`` of all words for hidden states ``(..., S)``."""
        return F.log_softmax(self.logits(hidden), dim=-1)

    def cross_entropy(
        self,
        hidden: Tensor,
        targets: Tensor,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """``F.cross_entropy(logits(hidden), targets)`` without ever holding the N x V scores.

        Args:
            hidden: ``(..., S)``.
            targets: ``(...)`` word ids.
            ignore_index: the target of tokens that do not count.
            label_smoothing: the weight of the uniform distribution over all V words in the target.
            reduction: "mean" over the tokens that count, "sum", or "none" for a loss ``(...)`` per token.

        Raises:
            ValueError: shapes that do not fit, an unknown reduction, or a label smoothing outside 0 to 1.
            TypeError: the targets are of another type than int64 or int32.
            IndexError: a target is no word (on a CPU).
        """
        asked = (targets, ignore_index, label_smoothing, reduction)
        return self.cross_entropy_and_predictions(hidden, *asked)[0]

    def cross_entropy_and_predictions(
        self,
        hidden: Tensor,
        targets: Tensor,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
    ) -> tuple[Tensor, Tensor]:
        """As `cross_entropy`, and with the loss the word ``(...)`` with the highest score of every token."""
        self.check_output()
        self.check_shapes(hidden, targets)
        flat_hidden, flat_targets = hidden.reshape(-1, self.score_dim), targets.reshape(-1)
        loss, predictions = self.flat_cross_entropy(
            *with_even_tokens(flat_hidden, flat_targets, ignore_index),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
        predictions = predictions[: targets.numel()].view(targets.shape)
        return (loss[: targets.numel()].view(targets.shape) if reduction == "none" else loss), predictions

    def flat_cross_entropy(self, hidden: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """`cross_entropy_and_predictions` of hidden ``(N, S)`` and targets ``(N,)``, which fit each other.

        Args:
            options: `ignore_index`, `label_smoothing` and `reduction`.
        """
        codes, basis = self._factors()
        projected = hidden if basis is None else F.linear(hidden, basis)
        bias, padding = self.output_bias(), self.padding_idx
        return linear_cross_entropy(projected, codes, targets, bias=bias, masked_word=padding, **options)

    def table(self) -> Tensor:
        """The dense input table ``(V, D)``. In inference it may be the cached one: do not write to it."""
        if self.is_deep:
            return self.cached("table", self._all_rows_without_padding)
        return self._all_rows_without_padding()

    def output_table(self) -> Tensor:
        """The dense output table ``(V, S)``: `logits` are ``h @ output_table().T`` plus any `output_bias`."""
        codes, basis = self._factors()
        table = codes if basis is None else codes @ basis
        return self._without_padding(table, self._all_ids(table.device))

    def output_bias(self) -> Tensor | None:
        """What the scores of all words get added ``(V,)``, zero for the padding word; None for nothing."""
        if self.bias is None or self.padding_idx is None:
            return self.bias
        return self.bias.masked_fill(self._all_ids(self.bias.device) == self.padding_idx, 0.0)

    def set_output_bias(self, bias: Tensor) -> None:
        """Take over the bias ``(V,)`` of a linear output layer; two-step softmaxes come as near as they can.

        Raises:
            RuntimeError: this embedding has no bias, see the option `output_bias`.
            ValueError: the bias has another shape.
        """
        if self.bias is None:
            raise RuntimeError(f"this {self.method} embedding has no bias: build it with output_bias=True")
        if bias.shape != self.bias.shape:
            raise ValueError(
                f"the bias has shape {tuple(bias.shape)}, but there are {self.num_embeddings} words: give "
                "one number for each"
            )
        with torch.no_grad():
            self.bias.copy_(bias)

    def counts(self) -> dict[str, int]:
        """Parameters used by the input only, by the output only, by both; their total; the bits stored."""
        by_input = {id(p): p.numel() for p in self.input_parameters()}
        by_output = {id(p): p.numel() for p in self.output_parameters()} if self.has_output else {}
        return {
            "input": sum(size for key, size in by_input.items() if key not in by_output),
            "output": sum(size for key, size in by_output.items() if key not in by_input),
            "shared": sum(size for key, size in by_input.items() if key in by_output),
            "total": accounting.count_parameters(self),
            "stored_bits": accounting.stored_bits(self),
        }

    def select_rows(self, ids: Tensor) -> SharedEmbedding:
        """A new embedding of the words `ids` ``(n,)``, which ascend, with the vectors that they have here.

        Their scores stay, too; only `adaptive` divides what a band had among fewer words.

        Raises:
            ValueError: the ids do not ascend or are no words, or the method cannot leave words out.
        """
        return select_rows(self, ids)

    def word_part(self) -> SharedEmbedding:
        """The part that has the words, and scores them: this embedding, or the map of a deeper one."""
        return self

    def with_word_part(self, part: SharedEmbedding) -> SharedEmbedding:
        """An embedding with another `word_part`, of the same sizes; it shares all else with this one.

        Raises:
            OptionError: it cannot have such a part.
        """
        return part

    def stored_options(self) -> dict[str, object]:
        """The options, as plain values, with which `build` makes a module that this one's state_dict fits.

        Hosts keep these in a checkpoint: no file that the options may have named is needed to load it.
        """
        return plain_options(self.options)

    def extra_repr(self) -> str:
        """The sizes and the options, for print(module)."""
        return f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}, {self.options}"

    # Rows and padding.

    def _all_ids(self, device: torch.device) -> Tensor:
        """The ids ``(V,)`` of all words."""
        return torch.arange(self.num_embeddings, device=device)

    def _all_rows(self) -> Tensor:
        """The rows ``(V, D)`` of all words, a block at a time for deep methods."""
        ids = self._all_ids(next(self.parameters()).device)
        if not self.is_deep:
            return self.rows(ids)
        rows = self.row_function()
        if torch.is_grad_enabled():
            # Inner layers are computed again in the backward pass rather than kept for all of V.
            rows = functools.partial(checkpoint, rows, use_reentrant=False)
        return torch.cat([rows(block) for block in ids.split(_TABLE_BLOCK)])

    def _all_rows_without_padding(self) -> Tensor:
        """The rows ``(V, D)`` of all words, the padding row zero."""
        rows = self._all_rows()
        return self._without_padding(rows, self._all_ids(rows.device))

    def _without_padding(self, rows: Tensor, ids: Tensor) -> Tensor:
        """`rows` ``(n, D)`` with a constant zero wherever `ids` ``(n,)`` is the padding word."""
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((ids == self.padding_idx).unsqueeze(-1), 0.0)

    def check_hidden(self, hidden: Tensor) -> None:
        """Raise ValueError unless the hidden states are ``(..., S)``."""
        width = hidden.size(-1) if hidden.dim() else 0
        if width != self.score_dim:
            raise ValueError(
                f"hidden states have {width} dimensions, but this {self.method} embedding scores "
                f"{self.score_dim}: project them first"
            )

    def check_shapes(self, hidden: Tensor, targets: Tensor) -> None:
        """Raise ValueError unless hidden states are ``(..., S)`` and targets ``(...)``, TypeError for other
        targets than ids.
        """
        _check_type("targets", targets)
        self.check_hidden(hidden)
        if hidden.shape[:-1] != targets.shape:
            raise ValueError(
                f"hidden states {tuple(hidden.shape)} and targets {tuple(targets.shape)} do not fit: "
                "all axes but the last of the hidden states must be those of the targets"
            )

    def check_output(self) -> None:
        """Raise RuntimeError unless there is an output side."""
        if not self.has_output:
            raise RuntimeError(f"this {self.method} embedding has no output side: it is for the input only")

    def _factors(self) -> OutputFactors:
        """The output factors, cached in inference."""
        self.check_output()
        return self.cached("output", self.output_factors)


def _check_type(name: str, ids: Tensor) -> None:
    """Raise TypeError for ids of words that are no integers of 64 or 32 bits."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} are of type {ids.dtype}, but words are told by int64 or int32: use .long()")


def zero_padding_row(table: Tensor, padding_idx: int | None) -> None:
    """Set the padding row of a parameter ``(V, ...)`` to zero, so that stored tables look as they act."""
    if padding_idx is not None:
        with torch.no_grad():
            table[padding_idx].zero_()


def entry_std(embedding_dim: int) -> float:
    """The std that table entries start with, D**-0.5: a host's factor sqrt(D) makes it one."""
    return math.sqrt(1.0 / embedding_dim)


# Codes start this much smaller than the entries of a table, and their basis larger. Adam moves all entries
# alike, so that the rows then move further in a step. A small translation model with a rank of a quarter of D
# was at a perplexity of 218 after 500 steps without this factor, at 149 with 1/2, at 100 with 1/5, and at 154
# with a full table.
CODE_SCALE = 1 / 3


def code_std(embedding_dim: int) -> float:
    """The std that the codes ``(V, R)`` of a narrow table start with, before a basis widens them to D."""
    return CODE_SCALE * entry_std(embedding_dim)
