"""The interface that hosts use: input lookup, tied output scores, loss, parameter groups and counts.

A method defines `init_weights` and `rows`, usually `output_factors`, and declares the rest in its options
(`shared_embeddings.spec`); everything else here is derived from these.

Axes: ``B`` batch, ``T`` time, ``N`` = B*T tokens, ``V`` vocabulary, ``D`` model dimension, ``S`` width of the
hidden states that are scored, ``R`` rank or small dimension.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared_embeddings import accounting
from shared_embeddings.fitting.task import FitTask, reconstruct
from shared_embeddings.loss import (
    LossOptions,
    Reduction,
    linear_cross_entropy,
    pad_to_multiple,
    scored_cross_entropy,
)
from shared_embeddings.quant.packed_tensor import PackedTensor, dense, inner_tensors, warn_of_frozen
from shared_embeddings.spec import EmbeddingOptions
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import plain_options
from shared_embeddings.utils.tracing import autocast_dtype, has_values, needs_fixed_shapes

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11

Embedding = TypeVar("Embedding", bound="SharedEmbedding")
CachingSelf = TypeVar("CachingSelf", bound="CachingModule")

# Methods with `expensive_rows` compute tables in blocks of rows, which limits the memory of wide layers. A
# block takes a millisecond of an accelerator however small it is.
_CPU_TABLE_BLOCK, _ACCELERATOR_TABLE_BLOCK = 2048, 16_384
# Words whose rows are decoded together for scores.
_SCORED_ROWS = 2048
# More tokens than this are scored faster by a product with decoded rows than by sums over word codes.
_FEW_TOKENS = 16


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


class _Derived(NamedTuple):
    """Tensors derived from the parameters, and the state of the parameters that they were derived from."""

    state: tuple[object, ...]
    # The parameters: otherwise a new tensor at the same address would look like an old one.
    sources: tuple[Tensor, ...]
    tensors: dict[str, Any]


class CachingModule(nn.Module):
    """A module that can cache tensors derived from its parameters, in ``eval()`` without gradients.

    The cache is cleared when a parameter or buffer is replaced or modified, on ``train()``, on
    ``load_state_dict``, and on a move to another device or dtype. torch does not count changes through an
    alias such as ``parameter.data.add_(1)``: call `clear_cache` after those.
    """

    def __init__(self) -> None:
        super().__init__()
        self._derived: _Derived | None = None

    def clear_cache(self) -> None:
        self._derived = None

    def cached(self, name: str, make: Callable[[], Any]) -> Any:
        """`make()`, or its cached result for the same state of the parameters."""
        state = self.cache_state()
        if state is None:
            return make()
        if self._derived is None or self._derived.state != state:
            self._derived = _Derived(state, tuple(source.detach() for source in self._sources()), {})
        tensors = self._derived.tensors
        if name not in tensors:
            tensors[name] = make()
        return tensors[name]

    def bytes_in_memory(self) -> int:
        """The bytes of parameters, buffers and cached tensors, each memory block once."""
        found: dict[int, int] = {}
        for module in self.modules():
            derived = module._derived if isinstance(module, CachingModule) else None
            values = (*vars(module).values(), *(() if derived is None else derived.tensors.values()))
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False), *_tensors(values))
            for memory in (part.untyped_storage() for held in own for part in inner_tensors(held)):
                found[memory.data_ptr()] = memory.nbytes()
        return sum(found.values())

    def cache_state(self) -> tuple[object, ...] | None:
        """A value that changes with parameters, buffers and autocast; None if nothing may be cached."""
        # `torch.export` needs the computation itself.
        is_exporting = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
        if self.training or torch.is_grad_enabled() or is_exporting:
            return None
        sources = tuple(self._sources())
        # torch does not count changes of tensors made in inference mode.
        if any(source.is_inference() for source in sources) or not has_values(*sources):
            return None
        return (
            autocast_dtype(sources[0].device),
            *((source.data_ptr(), source._version, source.dtype) for source in sources),
        )

    def _sources(self) -> Iterator[Tensor]:
        for tensor in (*self.parameters(), *self.buffers()):
            yield from inner_tensors(tensor)

    def train(self: CachingSelf, mode: bool = True) -> CachingSelf:
        self.clear_cache()
        return super().train(mode)

    def _apply(self: CachingSelf, fn: Any, recurse: bool = True) -> CachingSelf:
        self.clear_cache()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.clear_cache()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles start without a cache.
        return {**self.__dict__, "_derived": None}


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif dataclasses.is_dataclass(value):
            yield from _tensors(vars(value).values())


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
        num_embeddings: V.
        embedding_dim: D.
        padding_idx: the word without a vector, or None.
        options: the method's frozen options.
        score_dim: S, the width of hidden states that `logits` and `cross_entropy` take.
        has_output: whether there is an output side.
        bias: ``(V,)`` added to the scores, with the option `output_bias`; else None.
        scored_words: the only words ``(n,)`` that are scored, see `scoring_only`; None for all.
    """

    per_word: ClassVar[tuple[str, ...]] = ()
    expensive_rows: ClassVar[bool] = False
    scores_in_blocks: ClassVar[bool] = False
    bias: nn.Parameter | None
    scored_words: Tensor | None = None

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
    def method(self) -> str:
        """The registered name of the method."""
        spec: type[EmbeddingOptions[Any]] = type(self.options)
        return spec.method

    @classmethod
    def fit(cls, task: FitTask) -> Any:
        """An embedding that reconstructs `task.teacher`; by default by gradient descent."""
        return reconstruct(task.build(), task)

    def stored_options(self) -> dict[str, object]:
        """Plain options with which `build` makes a module that can load this one's state_dict.

        Hosts store them in checkpoints; loading needs no file that the original options may have named.
        """
        return plain_options(self.options)

    @property
    def has_linear_scores(self) -> bool:
        """Whether ``logits(h)`` is ``h @ output_table().T``, plus `output_bias()` if there is one.

        False for a softmax in two steps.
        """
        return self.has_output

    @property
    def is_packed(self) -> bool:
        """Whether numbers or word codes are in few bits, so that no decoded table is kept."""
        tensors = itertools.chain(self.parameters(), self.buffers())
        return any(isinstance(tensor, PackedTensor) for tensor in tensors)

    def train(self: Embedding, mode: bool = True) -> Embedding:
        """Warn once if there are packed tensors, which are not trained."""
        if mode and any(isinstance(parameter, PackedTensor) for parameter in self.parameters()):
            warn_of_frozen()
        return super().train(mode)

    def reset_parameters(self) -> None:
        """Draw all parameters again (`init_weights`) and set the bias to zero."""
        if all(parameter.is_meta for parameter in self.parameters()):
            return  # there are no values, and drawing them takes most of the time of counting parameters
        self.init_weights()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    # The input side.

    def forward(self, ids: Tensor) -> Tensor:
        """The vectors ``(..., D)`` of word ids ``(...)``.

        Raises:
            TypeError: the ids are neither int64 nor int32.
            IndexError: an id is out of range (checked on a CPU).
        """
        _check_type("ids", ids)
        flat = ids.reshape(-1)
        if not self.expensive_rows:
            vectors = self.without_padding(self.rows(flat), flat)
        elif self.cache_state() is not None and not self.is_packed:
            vectors = F.embedding(flat, self.table())
        elif needs_fixed_shapes(flat):
            # The number of distinct words is unknown, so repeated words are transformed repeatedly.
            vectors = self.token_rows(flat, torch.arange(flat.size(0), device=flat.device))
        else:
            words, inverse = torch.unique(flat, return_inverse=True)
            vectors = self.token_rows(words, inverse)
        return vectors.view(*ids.shape, self.embedding_dim)

    def table(self) -> Tensor:
        """The dense input table ``(V, D)``. In inference it may be the cached one: do not modify it."""

        def rows() -> Tensor:
            found = self.all_rows()
            return self.without_padding(found, self.all_ids(found.device))

        return self.cached("table", rows) if self.expensive_rows and not self.is_packed else rows()

    # The output side.

    def logits(self, hidden: Tensor) -> Tensor:
        """The scores ``(..., V)`` of all words for hidden states ``(..., S)``.

        Raises:
            ValueError: the last axis of `hidden` is not `score_dim`.
            RuntimeError: there is no output side.
        """
        self.check_output()
        self.check_hidden(hidden)
        if self.scores_by_blocks():
            return self.completed(self.block_scores(hidden.reshape(-1, self.score_dim)), hidden.shape[:-1])
        codes, basis = self._factors()
        projected = hidden if basis is None else F.linear(hidden, basis)
        scores = F.linear(projected, codes, self.output_bias())
        if self.padding_idx is not None:
            scores[..., self.padding_idx] = 0.0
        return scores

    def completed(self, scores: Tensor, shape: torch.Size) -> Tensor:
        """Scores ``(N, V)``, which may be overwritten, with the bias as ``(*shape, V)``; padding has zero."""
        if (bias := self.output_bias()) is not None:
            scores += bias
        if self.padding_idx is not None:
            scores[:, self.padding_idx] = 0.0
        return scores.view(*shape, self.num_embeddings)

    @contextlib.contextmanager
    def scoring_only(self, ids: Tensor, offsets: Tensor | None = None) -> Iterator[None]:
        """Within this context, scores and log-probabilities ``(..., n)`` are those of words ``(n,)`` only.

        For linear scores of the input table. With gradients, it needs rows of these words only; rows without
        gradients are looked up once, so that parameters may change between two contexts only.

        Args:
            ids: of the words.
            offsets: ``(n,)`` added to their scores; None for zeros.
        """
        kept: list[Tensor] = []

        def rows() -> Tensor:
            if torch.is_grad_enabled() and any(one.requires_grad for one in self.parameters()):
                found: Tensor = self(ids)
                return found
            if not kept:
                with torch.no_grad():
                    kept.append(self(ids))
            return kept[0]

        def logits(hidden: Tensor) -> Tensor:
            bias = self.output_bias()
            scores = F.linear(hidden, rows().to(hidden), None if bias is None else bias[ids].to(hidden))
            return scores if offsets is None else scores + offsets.to(hidden)

        before = {name: one for name, one in vars(self).items() if name in ("logits", "scored_words")}
        vars(self).update(logits=logits, scored_words=ids)
        try:
            yield
        finally:
            for name in ("logits", "scored_words"):
                del vars(self)[name]
            vars(self).update(before)

    def scores_by_blocks(self) -> bool:
        """Whether scores are computed without an output table, which only gradients and compilers need."""
        needs_table = torch.is_grad_enabled() or torch.compiler.is_compiling()
        return self.scores_in_blocks and not needs_table and self.is_packed

    def block_scores(self, hidden: Tensor) -> Tensor:
        """The scores ``(N, V)`` without bias for hidden states ``(N, S)``, from blocks of rows."""
        if len(hidden) <= _FEW_TOKENS and isinstance(codes := getattr(self, "codes", None), PackedTensor):
            tables = self.code_scores(hidden)
            scores = None if tables is None else codes.table_scores(tables)
            if scores is not None:
                return scores
        basis, rows = self.output_basis(), self.output_rows()
        projected = hidden if basis is None else F.linear(hidden, basis)
        blocks = self.all_ids(hidden.device).split(_SCORED_ROWS)
        return torch.cat([F.linear(projected, rows(ids)) for ids in blocks], dim=-1)

    def log_prob(self, hidden: Tensor) -> Tensor:
        """The log-probabilities ``(..., V)`` of all words for hidden states ``(..., S)``.

        Raises:
            ValueError, RuntimeError: as in `logits`.
        """
        return F.log_softmax(self.logits(hidden), dim=-1)

    def cross_entropy(
        self,
        hidden: Tensor,
        targets: Tensor,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        block_size: int | None = None,
    ) -> Tensor:
        """``F.cross_entropy(logits(hidden), targets)``, computed in blocks of tokens.

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
            TypeError: the targets are neither int64 nor int32.
            IndexError: a target is out of range (checked on a CPU).
        """
        loss = self.flat_loss(
            *self._flat(hidden, targets, ignore_index),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
            block_size=block_size,
        )
        return loss[: targets.numel()].view(targets.shape) if reduction == "none" else loss

    def cross_entropy_and_predictions(
        self, hidden: Tensor, targets: Tensor, **options: Unpack[LossOptions]
    ) -> tuple[Tensor, Tensor]:
        """`cross_entropy`, and the word ``(...)`` with the highest score for every token."""
        tokens = self._flat(hidden, targets, options.setdefault("ignore_index", -100))
        options.setdefault("label_smoothing", 0.0)
        is_reduced = options.setdefault("reduction", "mean") != "none"
        loss, predictions = self.flat_loss_and_predictions(*tokens, **options)
        count, shape = targets.numel(), targets.shape
        return loss if is_reduced else loss[:count].view(shape), predictions[:count].view(shape)

    def flat_loss(self, hidden: Tensor, targets: Tensor, **options: Unpack[LossOptions]) -> Tensor:
        """`flat_loss_and_predictions` without predictions."""
        return self.flat_loss_and_predictions(hidden, targets, **options)[0]

    def flat_loss_and_predictions(
        self, hidden: Tensor, targets: Tensor, **options: Unpack[LossOptions]
    ) -> tuple[Tensor, Tensor]:
        """`cross_entropy_and_predictions` of checked hidden states ``(N, S)`` and targets ``(N,)``.

        Args:
            options: the other arguments of `cross_entropy`.
        """
        if self.scores_by_blocks():
            return scored_cross_entropy(self.logits, self.num_embeddings, hidden, targets, **options)
        codes, basis = self._factors()
        projected = hidden if basis is None else F.linear(hidden, basis)
        bias, padding = self.output_bias(), self.padding_idx
        return linear_cross_entropy(
            (projected,), (codes,), targets, bias=bias, masked_word=padding, **options
        )

    def output_table(self) -> Tensor:
        """The dense output table ``(V, S)``: `logits` are ``h @ output_table().T`` plus any `output_bias`.

        Raises:
            RuntimeError: there is no output side.
        """
        codes, basis = self._factors()
        table = codes if basis is None else codes @ basis
        return self.without_padding(dense(table), self.all_ids(table.device))

    def output_bias(self) -> Tensor | None:
        """The bias ``(V,)`` of the scores, zero for the padding word; None without a bias."""
        if self.bias is None or self.padding_idx is None:
            return self.bias
        return self.bias.masked_fill(self.all_ids(self.bias.device) == self.padding_idx, 0.0)

    def set_output_bias(self, bias: Tensor) -> None:
        """Copy the bias ``(V,)`` of a linear output layer; a softmax in two steps approximates it.

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

    def check_hidden(self, hidden: Tensor) -> None:
        """Raise ValueError unless the hidden states are ``(..., S)``."""
        width = hidden.size(-1) if hidden.dim() else 0
        if width != self.score_dim:
            raise ValueError(
                f"hidden states have {width} dimensions, but this {self.method} embedding scores "
                f"{self.score_dim}: {self.width_advice()}"
            )

    def width_advice(self) -> str:
        """What to do about hidden states of another width than S, for the message of `check_hidden`."""
        return "project them first"

    def check_output(self) -> None:
        """Raise RuntimeError unless there is an output side."""
        if not self.has_output:
            raise RuntimeError(f"this {self.method} embedding has no output side: it is for the input only")

    # What a method defines: parameters, rows and output factors.

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
            # Inner layers, of which none is random, are recomputed in the backward pass instead of stored.
            rows = functools.partial(checkpoint, rows, use_reentrant=False, preserve_rng_state=False)
        size = _CPU_TABLE_BLOCK if ids.device.type == "cpu" else _ACCELERATOR_TABLE_BLOCK
        return torch.cat([rows(block) for block in ids.split(size)])

    def without_padding(self, rows: Tensor, ids: Tensor) -> Tensor:
        """`rows` ``(n, D)`` with a constant zero wherever `ids` ``(n,)`` is the padding word."""
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((ids == self.padding_idx).unsqueeze(-1), 0.0)

    # Sizes and selections of words.

    def counts(self) -> dict[str, int]:
        """The sizes of this embedding.

        Returns:
            Numbers of parameters: "input" (that only the input uses), "output", "shared" (both sides), and
            "total"; and "stored_bits", the bits that storing it takes.
        """
        by_input = {id(p): p.numel() for p in self.input_parameters()}
        by_output = {id(p): p.numel() for p in self.output_parameters()} if self.has_output else {}
        return {
            "input": sum(size for key, size in by_input.items() if key not in by_output),
            "output": sum(size for key, size in by_output.items() if key not in by_input),
            "shared": sum(size for key, size in by_input.items() if key in by_output),
            "total": accounting.count_parameters(self),
            "stored_bits": accounting.stored_bits(self, self.options.default_store),
        }

    def select_rows(self: Embedding, ids: Tensor) -> Embedding:
        """A new embedding of the words `ids` ``(n,)``, in ascending order, with the same vectors.

        Scores stay the same, too; only `adaptive` redistributes the probability of a band among fewer words.

        Raises:
            UserError: the method cannot remove words.
            ValueError: the ids are not ascending, or out of range.
        """
        ids = ids.to("cpu", torch.long)
        if ids.dim() != 1 or len(ids) == 0 or bool((ids.diff() <= 0).any()):
            raise ValueError("the ids of the words to keep must be an ascending list of at least one word")
        for word in (int(ids[0]), int(ids[-1])):
            if not 0 <= word < self.num_embeddings:
                raise ValueError(
                    f"cannot keep word {word}: the embedding has words 0 to {self.num_embeddings - 1}"
                )
        first = next(self.parameters())
        options, state = self.state_for_ids(ids.to(first.device))
        kept, sizes = ids.tolist(), (len(ids), self.embedding_dim)
        padding_idx = kept.index(self.padding_idx) if self.padding_idx in kept else None
        selected = type(self)(*sizes, padding_idx, type(self.options).resolve(*sizes, options))
        selected.to(device=first.device, dtype=first.dtype).load_state_dict(state)
        return selected.train(self.training)

    def inner_embedding(self) -> SharedEmbedding:
        """The embedding that has the rows of the words: this one, or the map of a deeper one."""
        return self

    def with_inner_embedding(self, part: SharedEmbedding) -> SharedEmbedding:
        """This embedding with `part` of the same sizes as its `inner_embedding`; all else is shared.

        Raises:
            OptionError: this method cannot hold such a part.
        """
        return part

    def extra_repr(self) -> str:
        """The sizes and the options, for print(module)."""
        return f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}, {self.options}"

    def _factors(self) -> OutputFactors:
        """The output factors, cached in inference."""
        self.check_output()
        return self.cached("output", self.output_factors)

    def _flat(self, hidden: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        """Checked hidden states ``(N, S)`` and targets ``(N,)``, padded with ignored ones if faster."""
        self.check_output()
        _check_type("targets", targets)
        self.check_hidden(hidden)
        if hidden.shape[:-1] != targets.shape:
            raise ValueError(
                f"hidden states {tuple(hidden.shape)} and targets {tuple(targets.shape)} do not match: "
                "all axes but the last of the hidden states must be those of the targets"
            )
        return pad_to_multiple(hidden.reshape(-1, self.score_dim), targets.reshape(-1), ignore_index)


def _check_type(name: str, ids: Tensor) -> None:
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} are of type {ids.dtype}, but word ids must be int64 or int32: use .long()")


@dataclasses.dataclass(frozen=True)
class WordEmbedding:
    """One input embedding of a trained model."""

    name: str  # the host's name for it
    words: Sequence[str]  # in the order of their ids
    padding_idx: int | None  # the word without a vector, or None
    module: SharedEmbedding | nn.Embedding

    def table(self) -> Tensor:
        """The input vectors ``(V, D)`` of all words."""
        with torch.no_grad():
            module = self.module
            table = module.weight if isinstance(module, nn.Embedding) else module.table()
            return table.detach().float()

    def layers(self, ids: Tensor) -> list[Layer]:
        """The activations of words with ids ``(n,)`` in every layer of the embedding, the output last."""
        with torch.no_grad():
            if isinstance(self.module, nn.Embedding):
                return [Layer("output", self.module(ids))]
            return self.module.layers(ids)
