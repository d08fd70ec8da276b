"""The interface that hosts use: input lookup, tied output scores, loss, parameter groups and counts.

A method defines `create_parameters`, `init_weights` and `rows`, usually `output_factors`, and declares the
rest in its options (`shared_embeddings.spec`); everything else here is derived from these.

Axes: ``B`` batch, ``T`` time, ``N`` = B*T tokens, ``V`` vocabulary, ``D`` model dimension, ``S`` width of the
hidden states that are scored, ``R`` rank or small dimension.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared_embeddings import accounting
from shared_embeddings.caching import CachingModule
from shared_embeddings.fitting.task import FitTask, reconstruct
from shared_embeddings.loss import (
    LinearScores,
    LossOptions,
    Reduction,
    ScoreTerms,
    blockwise_cross_entropy,
    product_dtype,
)
from shared_embeddings.nn.layers import EndingDropout
from shared_embeddings.nn.tracing import needs_fixed_shapes
from shared_embeddings.quant import kernels
from shared_embeddings.quant.formats import BitCodes
from shared_embeddings.quant.packed_tensor import PackedTensor, dense
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import plain_options

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11

Embedding = TypeVar("Embedding", bound="SharedEmbedding")

# Methods with `expensive_rows` compute tables in blocks of rows, which limits the memory of wide layers. A
# block takes a millisecond of an accelerator however small it is.
_CPU_TABLE_BLOCK, _ACCELERATOR_TABLE_BLOCK = 2048, 16_384
# Words whose rows are decoded together for scores.
SCORED_ROWS = 2048
# More tokens than this are scored faster by a product with decoded rows than by sums over word codes.
_FEW_TOKENS = 16
# Tokens in 16 bits are padded to a multiple of this number on a CPU.
_CPU_EVEN_TOKENS = 64


@dataclasses.dataclass
class RestrictedScores:
    """The only words that are scored, see `score_only`."""

    ids: Tensor  # ``(n,)`` of the words
    offsets: Tensor | None  # ``(n,)`` added to their scores; None for zeros
    rows: Tensor | None = None  # ``(n, D)``, once they have been looked up without gradients


class OutputFactors(NamedTuple):
    """The output table in factors: scores are ``(hidden @ basis.T) @ codes.T``, plus any bias."""

    codes: Tensor  # ``(V, R)``
    # ``(R, S)``, or None if R is S and hidden states are multiplied by the codes directly.
    basis: Tensor | None


class Layer(NamedTuple):
    """The activations of words at one layer of an embedding, for analysis."""

    name: str  # of the layer, unique within its embedding
    values: Tensor  # ``(n, width)``, one row for each word that passes through the layer
    groups: int = 1  # the number of independent groups of dimensions, all of the same width


class SharedEmbedding(CachingModule):
    """An embedding for the input and the tied output of a model; the base class of all methods.

    The row of `padding_idx` is zero on both sides and gets no gradient on either, whatever its parameters
    contain. In inference, tensors that are derived from the parameters are cached, see `CachingModule`.

    With the option `output_bias` every method has a parameter ``bias`` ``(V,)`` that is added to the scores.
    It starts at zero, and that of the padding word stays zero.

    Attributes:
        per_word: the parameters and buffers with one row per word, ``(V, ...)``; ``bias`` need not be listed.
            Empty if words have no separate rows.
        expensive_rows: whether a row takes more work than indexing and one small product. Then each distinct
            word of a batch is computed once (not in compiled graphs), and the table is cached for inference.
        scores_in_blocks: whether an embedding in few bits computes scores from blocks of `output_rows`; if
            not, because rows take too long, the output table is cached for inference.
        never_has_table: whether `_block_scores` computes all scores.
        num_embeddings: V.
        embedding_dim: D.
        padding_idx: the word without a vector, or None.
        has_sparse_gradients: whether look-ups in a plain table have sparse gradients, as with ``sparse=True``
            in ``nn.Embedding``: for large tables on the input side. Other methods ignore it.
        options: the method's frozen options.
        score_dim: S, the width of hidden states that `logits` and `cross_entropy` take.
        has_output: whether there is an output side.
        bias: ``(V,)`` added to the scores, with the option `output_bias`; else None.
        scored_words: the only words that are scored, see `score_only`; None for all.
        method: the registered name of the method.
        has_linear_scores: whether ``logits(h)`` is ``h @ output_table().T``, plus `output_bias()` if there is
            one; False for a softmax in two steps.
        buffer_bits: the bits of a row of buffers that need fewer in files than in memory, by name.
        width_advice: what to do about hidden states of another width than S.
    """

    per_word: ClassVar[tuple[str, ...]] = ()
    expensive_rows: bool = False
    scores_in_blocks: ClassVar[bool] = False
    never_has_table: ClassVar[bool] = False
    has_sparse_gradients: bool = False
    bias: nn.Parameter | None
    scored_words: RestrictedScores | None = None
    width_advice: str = "project them first"

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, options: Any
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.options = options
        self.method: str = options.method
        self.score_dim = embedding_dim
        self.has_output = True
        self.has_linear_scores = True
        self.buffer_bits: dict[str, int] = {}
        bias = nn.Parameter(torch.empty(num_embeddings)) if options.output_bias else None
        self.register_parameter("bias", bias)
        self.create_parameters()
        self.reset_parameters()

    @classmethod
    def fit(cls, task: FitTask) -> Any:
        """Return an embedding that reconstructs `task.teacher`; by default by gradient descent."""
        return reconstruct(task.build(), task)

    def stored_options(self) -> dict[str, object]:
        """Return plain options with which `build` makes a module that can load this one's state_dict.

        Hosts store them in checkpoints; loading needs no file that the original options may have named.
        """
        return plain_options(self.options)

    def reset_parameters(self) -> None:
        """Draw all parameters again (`init_weights`) and set the bias to zero."""
        if all(parameter.is_meta for parameter in self.parameters()):
            return  # there are no values, and drawing them takes most of the time of counting parameters
        self.init_weights()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    # The input side.

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors ``(..., D)`` of word ids ``(...)``.

        Raises:
            IndexError: an id is out of range (checked on a CPU).
        """
        flat = ids.reshape(-1)
        if not self.expensive_rows:
            vectors = without_padding(self.rows(flat), self.padding_idx, flat)
        elif self.cache_state() is not None and not self._is_packed:
            vectors = F.embedding(flat, self.table())
        elif needs_fixed_shapes(flat):
            # The number of distinct words is unknown, so repeated words are transformed repeatedly.
            vectors = self.token_rows(flat, torch.arange(flat.size(0), device=flat.device))
        else:
            words, inverse = torch.unique(flat, return_inverse=True)
            vectors = self.token_rows(words, inverse)
        return vectors.view(*ids.shape, self.embedding_dim)

    def table(self) -> Tensor:
        """Return the dense input table ``(V, D)``, in inference the cached one: do not modify it."""
        if not self.expensive_rows or self._is_packed:
            return without_padding(self._all_rows(), self.padding_idx)
        return self.cached("table", lambda: without_padding(self._all_rows(), self.padding_idx))

    # The output side.

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores ``(..., V)`` of all words for hidden states ``(..., S)``.

        Within `score_only` they are those of some words.

        Raises:
            ValueError: the last axis of `hidden` is not `score_dim`.
            RuntimeError: there is no output side.
        """
        self._check_hidden(hidden)
        words = self.scored_words
        if words is None:
            return self._scores(hidden)
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters()):
            rows: Tensor = self(words.ids)
        else:
            if words.rows is None:
                with torch.no_grad():
                    words.rows = self(words.ids)
            rows = words.rows
        bias = self.output_bias()
        scores = F.linear(hidden, rows.to(hidden), None if bias is None else bias[words.ids].to(hidden))
        return scores if words.offsets is None else scores + words.offsets.to(hidden)

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Return the log-probabilities ``(..., V)`` of all words for hidden states ``(..., S)``.

        Raises:
            ValueError, RuntimeError: as in `logits`.
        """
        scores = self.logits(hidden)
        return F.log_softmax(scores, dim=-1) if self.has_linear_scores else scores

    def cross_entropy(
        self,
        hidden: Tensor,
        targets: Tensor,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        block_size: int | None = None,
    ) -> Tensor:
        """Return ``F.cross_entropy(logits(hidden), targets)``, computed in blocks of tokens.

        The scores of at most one block of tokens exist at a time.

        Args:
            hidden: ``(..., S)``.
            targets: ``(...)`` word ids.
            ignore_index: the target of tokens that do not count.
            label_smoothing: the weight of the uniform distribution over all V words in the target.
            reduction: "mean" over the tokens that count, "sum", or "none" for a loss ``(...)`` per token.
            block_size: the number of tokens in a block; by default 256 on a CPU and 1,024 on other devices,
                more for small vocabularies (`shared_embeddings.loss.tokens_per_block`).

        Raises:
            ValueError: shapes do not match, or the reduction, label smoothing or block size is invalid.
            RuntimeError: there is no output side.
            IndexError: a target is out of range (checked on a CPU).
        """
        return self._loss(hidden, targets, ignore_index, label_smoothing, reduction, block_size)[0]

    def cross_entropy_and_predictions(
        self, hidden: Tensor, targets: Tensor, **options: Unpack[LossOptions]
    ) -> tuple[Tensor, Tensor]:
        """Return `cross_entropy`, and the word ``(...)`` with the highest score for every token."""
        loss, predictions = self._loss(hidden, targets, **options)
        return loss, predictions()

    def output_table(self) -> Tensor:
        """Return the dense output table ``(V, S)``: `logits` are ``h @ output_table().T``, plus any bias.

        Raises:
            RuntimeError: there is no output side.
        """
        self._check_output()
        codes, basis = self.cached("output", self.output_factors)
        return without_padding(dense(codes if basis is None else codes @ basis), self.padding_idx)

    def output_bias(self) -> Tensor | None:
        """Return the bias ``(V,)`` of the scores, zero for the padding word; None without a bias."""
        if self.bias is None or self.padding_idx is None:
            return self.bias
        words = torch.arange(self.num_embeddings, device=self.bias.device)
        return self.bias.masked_fill(words == self.padding_idx, 0.0)

    def set_output_bias(self, bias: Tensor) -> None:
        """Copy the bias ``(V,)`` of a linear output layer; a softmax in two steps approximates it.

        Raises:
            RuntimeError: this embedding has no bias, see the option `output_bias`; or its shape differs.
        """
        if self.bias is None:
            raise RuntimeError(f"this {self.method} embedding has no bias: build it with output_bias=True")
        with torch.no_grad():
            self.bias.copy_(bias.view_as(self.bias))

    # What a method defines: parameters, rows and output factors.

    def create_parameters(self) -> None:
        """Register all uninitialized parameters, buffers and layers but the bias."""
        raise NotImplementedError

    def init_weights(self) -> None:
        """Draw all parameters but the bias with torch's generator; table entries have a std near D**-0.5."""
        raise NotImplementedError

    def parameters_by_side(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters that the input and the output use; by default all, the input without bias."""
        used = list(self.parameters())
        return [parameter for parameter in used if parameter is not self.bias], used

    def state_for_ids(self, ids: Tensor) -> tuple[dict[str, object], dict[str, Tensor]]:
        """Return the options and the state of an embedding of the words `ids` ``(n,)`` only, ascending.

        Raises:
            UserError: words cannot be removed.
        """
        if not self.per_word:
            raise UserError(
                f"words cannot be removed from a {self.method} embedding, which has no rows for words: "
                "trim the plain model first, then compress it"
            )
        per_word = (*self.per_word, "bias")
        return self.stored_options(), {
            name: tensor.index_select(0, ids) if name in per_word else tensor
            for name, tensor in self.state_dict().items()
        }

    def rows(self, ids: Tensor) -> Tensor:
        """Return the input vectors ``(n, D)`` of word ids ``(n,)``; a method has this or `_row_function`.

        Raises:
            IndexError: an id is out of range (checked on a CPU).
        """
        return self._row_function()(ids)

    def _row_function(self) -> Callable[[Tensor], Tensor]:
        """Return a faster `rows` for many calls: work that is the same for all words is done once, here."""
        return self.rows

    def token_rows(self, words: Tensor, inverse: Tensor) -> Tensor:
        """Return the vectors ``(N, D)`` of tokens: distinct `words` ``(n,)`` and their `inverse` ``(N,)``.

        For methods with `expensive_rows`. By default, each word is transformed once; dropout inside is drawn
        for each token.
        """
        return F.embedding(inverse, without_padding(self.rows(words), self.padding_idx, words))

    def layers(self, ids: Tensor) -> list[Layer]:
        """Return the values of words ``(n,)`` at every layer; the last one is the "output", their `rows`."""
        return [Layer("output", self.rows(ids))]

    def output_factors(self) -> OutputFactors:
        """Return the output table in factors; by default the table itself."""
        return OutputFactors(self._all_rows(), None)

    # Sizes and selections of words.

    def counts(self) -> dict[str, int]:
        """Return the sizes of this embedding.

        Returns:
            Numbers of parameters: "input" (that only the input uses), "output", "shared" (both sides), and
            "total"; and "stored_bits", the bits that storing it takes.
        """
        inputs, outputs = self.parameters_by_side()
        by_input = {id(parameter): parameter.numel() for parameter in inputs}
        by_output = {id(parameter): parameter.numel() for parameter in outputs if self.has_output}
        return {
            "input": sum(size for key, size in by_input.items() if key not in by_output),
            "output": sum(size for key, size in by_output.items() if key not in by_input),
            "shared": sum(size for key, size in by_input.items() if key in by_output),
            "total": accounting.count_parameters(self),
            "stored_bits": accounting.stored_bits(self, self.options.default_store),
        }

    def select_rows(self: Embedding, ids: Tensor) -> Embedding:
        """Return a new embedding of the words `ids` ``(n,)``, in ascending order, with the same vectors.

        Scores stay the same, too; only `adaptive` redistributes the probability of a band among fewer words.

        Raises:
            UserError: the method cannot remove words.
            ValueError: the ids are not ascending, or out of range.
        """
        ids = ids.to("cpu", torch.long)
        if len(ids) == 0 or bool((ids.diff() <= 0).any()):
            raise ValueError("the ids of the words to keep must be an ascending list of at least one word")
        if int(ids[0]) < 0 or int(ids[-1]) >= self.num_embeddings:
            raise ValueError(
                f"cannot keep words {int(ids[0])} to {int(ids[-1])}: the embedding has words 0 to "
                f"{self.num_embeddings - 1}"
            )
        first = next(self.parameters())
        options, state = self.state_for_ids(ids.to(first.device))
        words, sizes = ids.tolist(), (len(ids), self.embedding_dim)
        padding_idx = words.index(self.padding_idx) if self.padding_idx in words else None
        selected = type(self)(*sizes, padding_idx, type(self.options).resolve(*sizes, options))
        selected.to(device=first.device, dtype=first.dtype).load_state_dict(state)
        return selected.train(self.training)

    def inner_embedding(self) -> SharedEmbedding:
        """Return the embedding that has the rows of the words: this one, or the map of a deeper one."""
        return self

    def with_inner_embedding(self, part: SharedEmbedding) -> SharedEmbedding:
        """Return this embedding with `part` of the same sizes as its `inner_embedding`; all else is shared.

        Raises:
            OptionError: this method cannot hold such a part.
        """
        return part

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}, {self.options}"

    # Between this class and the methods.

    @property
    def _is_packed(self) -> bool:
        """Whether numbers or word codes are in few bits, so that no decoded table is kept."""
        tensors = itertools.chain(self.parameters(), self.buffers())
        return any(isinstance(tensor, PackedTensor) for tensor in tensors)

    @property
    def _draws_per_token(self) -> bool:
        """Whether two tokens of one word currently have different vectors, because of dropout inside."""
        dropouts = [part for part in self.modules() if isinstance(part, EndingDropout)]
        return any(dropout.training and dropout.p > 0.0 for dropout in dropouts)

    def _all_rows(self) -> Tensor:
        """Return the rows ``(V, D)`` of all words; `expensive_rows` are computed in blocks."""
        ids = torch.arange(self.num_embeddings, device=next(self.parameters()).device)
        if not self.expensive_rows:
            return self.rows(ids)
        rows = self._row_function()
        if torch.is_grad_enabled():
            # Deterministic layers are checkpointed: recomputed in the backward pass instead of stored.
            rows = functools.partial(checkpoint, rows, use_reentrant=False, preserve_rng_state=False)
        size = _CPU_TABLE_BLOCK if ids.device.type == "cpu" else _ACCELERATOR_TABLE_BLOCK
        return torch.cat([rows(block) for block in ids.split(size)])

    def _scores(self, hidden: Tensor) -> Tensor:
        """Return `logits` of checked hidden states."""
        bias = self.output_bias()
        if self.never_has_table or self._scores_by_blocks():
            scores = self._block_scores(hidden.reshape(-1, self.score_dim))
            if bias is not None:
                scores += bias
            scores = scores.view(*hidden.shape[:-1], self.num_embeddings)
        else:
            codes, basis = self.cached("output", self.output_factors)
            scores = F.linear(hidden if basis is None else F.linear(hidden, basis), codes, bias)
        if self.padding_idx is not None:
            scores[..., self.padding_idx] = 0.0
        return scores

    def _scores_by_blocks(self) -> bool:
        """Whether scores are computed without an output table, which only gradients and compilers need."""
        needs_table = torch.is_grad_enabled() or torch.compiler.is_compiling()
        return self.scores_in_blocks and not needs_table and self._is_packed

    def _block_scores(self, hidden: Tensor) -> Tensor:
        """Return the scores ``(N, V)`` without bias for hidden states ``(N, S)``, from blocks of rows."""
        rows = self._row_function()
        blocks = torch.arange(self.num_embeddings, device=hidden.device).split(SCORED_ROWS)
        return torch.cat([F.linear(hidden, rows(ids)) for ids in blocks], dim=-1)

    def _loss(
        self,
        hidden: Tensor,
        targets: Tensor,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        block_size: int | None = None,
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return the loss, and a function for the predictions, which may be extra work."""
        self._check_hidden(hidden)
        if hidden.shape[:-1] != targets.shape:
            raise ValueError(
                f"hidden states {tuple(hidden.shape)} and targets {tuple(targets.shape)} do not match: "
                "all axes but the last of the hidden states must be those of the targets"
            )
        count, shape = targets.numel(), targets.shape
        hidden, targets = hidden.reshape(-1, self.score_dim), targets.reshape(-1)
        if targets.device.type == "cpu" and product_dtype(hidden).itemsize < 4:
            # 16-bit products are compiled for every new shape, which takes longer than the product.
            missing = -count % _CPU_EVEN_TOKENS
            hidden = F.pad(hidden, (0, 0, 0, missing))
            targets = F.pad(targets, (0, missing), value=ignore_index)
        loss, predict = self._token_loss(
            hidden, targets, ignore_index, label_smoothing, reduction, block_size
        )
        if reduction == "none":
            loss = loss[:count].view(shape)
        return loss, lambda: predict()[:count].view(shape)

    def _token_loss(
        self, hidden: Tensor, targets: Tensor, ignore_index: int, *settings: Any
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return `_loss` for hidden states ``(N, S)`` and targets ``(N,)``."""
        if self._scores_by_blocks():
            terms = ScoreTerms(self.logits, (hidden,), targets, ignore_index, num_words=self.num_embeddings)
        else:
            codes, basis = self.cached("output", self.output_factors)
            projected = hidden if basis is None else F.linear(hidden, basis)
            bias, padding = self.output_bias(), self.padding_idx
            terms = ScoreTerms(LinearScores, (projected, codes), targets, ignore_index, bias, padding)
        loss, best = blockwise_cross_entropy(terms, *settings)
        return loss, lambda: best

    def _check_output(self) -> None:
        if not self.has_output:
            raise RuntimeError(f"this {self.method} embedding has no output side: it is for the input only")

    def _check_hidden(self, hidden: Tensor) -> None:
        """Raise RuntimeError without an output side, ValueError unless hidden states are ``(..., S)``."""
        self._check_output()
        width = hidden.size(-1) if hidden.dim() else 0
        if width != self.score_dim:
            raise ValueError(
                f"hidden states have {width} dimensions, but this {self.method} embedding scores "
                f"{self.score_dim}: {self.width_advice}"
            )


@contextlib.contextmanager
def score_only(embedding: SharedEmbedding, ids: Tensor, offsets: Tensor | None = None) -> Iterator[None]:
    """Within this context, scores and log-probabilities ``(..., n)`` are those of words `ids` ``(n,)`` only.

    With gradients, scores need rows of these words only; rows without gradients are looked up once, so
    parameters may change between two contexts only.

    Args:
        embedding: with linear scores of its input table.
        ids: of the words.
        offsets: ``(n,)`` added to their scores; None for zeros.
    """
    before = embedding.scored_words
    embedding.scored_words = RestrictedScores(ids, offsets)
    try:
        yield
    finally:
        embedding.scored_words = before


def without_padding(rows: Tensor, padding_idx: int | None, ids: Tensor | None = None) -> Tensor:
    """Return `rows` ``(n, D)`` with a constant zero wherever `ids` ``(n,)`` is the padding word.

    By default they are the rows of all words.
    """
    if padding_idx is None:
        return rows
    ids = torch.arange(len(rows), device=rows.device) if ids is None else ids
    return rows.masked_fill((ids == padding_idx).unsqueeze(-1), 0.0)


def scores_of_codes(hidden: Tensor, codes: Tensor, entry_scores: Callable[[], Tensor]) -> Tensor | None:
    """Return the scores ``(N, V)`` of words whose rows are sums of one entry for each of C packed codes.

    Args:
        hidden: ``(N, S)``.
        codes: ``(V, C)``.
        entry_scores: computes ``(N, C, K)``, what each of K values of each code adds to a score.

    Returns:
        None if decoding rows is faster, or the codes are not packed.
    """
    if len(hidden) > _FEW_TOKENS or not isinstance(codes, PackedTensor):
        return None
    form, tables = codes.form, entry_scores()
    if not isinstance(form, BitCodes) or not kernels.usable(codes.codes, tables):
        return None
    return kernels.field_scores(codes.codes, form.widths, form.rows, tables)


@dataclasses.dataclass(frozen=True)
class WordEmbedding:
    """One input embedding of a trained model."""

    name: str  # the host's name for it
    words: Sequence[str]  # in the order of their ids
    padding_idx: int | None  # the word without a vector, or None
    module: SharedEmbedding | nn.Embedding

    def table(self) -> Tensor:
        """Return the input vectors ``(V, D)`` of all words."""
        with torch.no_grad():
            module = self.module
            table = module.weight if isinstance(module, nn.Embedding) else module.table()
            return table.detach().float()

    def layers(self, ids: Tensor) -> list[Layer]:
        """Return the activations of words with ids ``(n,)`` in every layer, the output last."""
        with torch.no_grad():
            if isinstance(self.module, nn.Embedding):
                return [Layer("output", self.module(ids))]
            return self.module.layers(ids)
