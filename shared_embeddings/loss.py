"""Cross entropy with the scores of only one block of tokens in memory.

The scores of a block are in one buffer that every block reuses. Since the softmax of a block is known when
its loss is computed, its gradients are accumulated right away, in the forward pass, so that the extra memory
is a block of scores and the gradients themselves.

How scores are computed from factors, and gradients of the factors from errors of the scores, is defined by
`Scores`: `LinearScores` here, those of words with shared parts in `shared_embeddings.methods.uncle`.

This loss is always used, on all devices: ``torch.nn.functional.linear_cross_entropy`` sums 16-bit losses and
gradients in 16 bits, has no masked word, and took 2.5 times as long on a CPU (V 37,000, D 512).

Axes: ``N`` tokens, n of them in a block, ``V`` vocabulary, ``R`` width of the hidden states and of the codes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.quant.packed_tensor import column_sums
from shared_embeddings.utils.tracing import autocast_dtype, has_values, without_autocast

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11

Reduction = Literal["mean", "sum", "none"]
Gradients = list[Tensor | None]

# On a CPU, 16-bit products are compiled for every new shape, which takes longer than the product.
_CPU_EVEN_TOKENS = 64
# The index of a maximum is searched in chunks of this many scores.
_CHUNK = 64
# The smallest block of tokens, and the number of scores up to which blocks are larger for small vocabularies.
# Measured on 2 CPU cores: larger blocks are not faster.
_CPU_BLOCK = (256, 2**20)
_ACCELERATOR_BLOCK = (1024, 2**25)


class LossOptions(TypedDict, total=False):
    """The keyword arguments of all losses.

    Attributes:
        ignore_index, label_smoothing, reduction: as in ``F.cross_entropy``.
        block_size: the number of tokens in a block; by default 256 on a CPU and 1,024 on other devices, more
            for small vocabularies (`tokens_per_block`).
    """

    ignore_index: int
    label_smoothing: float
    reduction: Reduction
    block_size: int | None


class ScoreOptions(LossOptions, total=False):
    """The keyword arguments of losses of the scores of all words.

    Attributes:
        bias: ``(V,)`` added to the scores, or None.
        masked_word: a word whose score is fixed at zero, without gradients for its parameters and its bias.
    """

    bias: Tensor | None
    masked_word: int | None


class LossSettings(NamedTuple):
    """The arguments of one loss.

    Attributes:
        has_bias: whether the last factor is a bias ``(V,)`` of the scores.
        masked_word, ignore_index, label_smoothing, reduction, block_size: see `ScoreOptions`.
        product_dtype: the type that matrix products run in.
    """

    has_bias: bool
    masked_word: int | None
    ignore_index: int
    label_smoothing: float
    reduction: str
    block_size: int | None
    product_dtype: torch.dtype


class Scores(ABC):
    """Computes the scores of a block from factors, and adds up the gradients of the factors.

    Args:
        factors: hidden states first, without a bias.
        index: integer tensors that the scores depend on.
        settings: the arguments of the loss.

    Attributes:
        kind: the name by which compiled graphs find the class.
        word_axis: the axis of the words in a block: 1 for ``(n, V)``, 0 for ``(V, n)``.
        words: V.
    """

    kind: ClassVar[str]
    word_axis: ClassVar[int]
    words: int

    @abstractmethod
    def __init__(
        self, factors: Sequence[Tensor], index: Sequence[Tensor], settings: LossSettings
    ) -> None: ...

    def __init_subclass__(cls) -> None:
        _kinds[cls.kind] = cls

    @abstractmethod
    def fill(self, rows: slice, scores: Tensor, low: Tensor | None) -> None:
        """Write the scores of the tokens `rows` without bias into `scores`, a block in at least 32 bits.

        Args:
            low: a block in the type of the products, to be used as memory, if that is another type.
        """

    @abstractmethod
    def summed(self, rows: slice) -> Tensor:
        """The sum ``(n,)`` of the scores of all words but the masked one, for label smoothing."""

    @abstractmethod
    def start_gradients(self, weights: Tensor, wants: Sequence[bool], dtype: torch.dtype) -> None:
        """Prepare for `add_gradients`.

        Args:
            weights: ``(N, 1)`` of the tokens' losses.
            wants: for each factor whether its gradient is needed.
            dtype: the type of the errors in products.
        """

    @abstractmethod
    def add_gradients(self, rows: slice, errors: Tensor, low: Tensor | None) -> None:
        """Add the gradients of the tokens `rows`.

        Args:
            errors: the gradients of their unweighted scores, a block in at least 32 bits.
            low: a block in the type of the errors in products, to be used as memory, if that is another type.
        """

    @abstractmethod
    def finish_gradients(self, smoothing: float) -> Gradients:
        """The gradient of every factor, None where it is not needed.

        Args:
            smoothing: the share of each word in smoothed targets, which the errors do not include.
        """


_kinds: dict[str, type[Scores]] = {}


def linear_cross_entropy(
    hiddens: Sequence[Tensor], codes: Sequence[Tensor], targets: Tensor, **options: Unpack[ScoreOptions]
) -> tuple[Tensor, Tensor]:
    """Cross entropy of the scores ``torch.cat([h @ c.T for h, c in zip(hiddens, codes)], 1) + bias``.

    A vocabulary may consist of segments, each with codes of another width. See `blockwise_cross_entropy`.

    Args:
        hiddens: for each segment ``(N, R_g)``, all of one type.
        codes: for each segment ``(V_g, R_g)``; V is the sum of all V_g, and a word's number is its position
            in the concatenated segments.
        targets: ``(N,)`` word ids.
        options: see `ScoreOptions`; the bias covers all segments.
    """
    return blockwise_cross_entropy(LinearScores, (*hiddens, *codes), (), targets, **options)


def blockwise_cross_entropy(
    scores: type[Scores],
    factors: Sequence[Tensor],
    index: Sequence[Tensor],
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    masked_word: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    block_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of the scores of `factors`, and the best word of every token.

    Equals ``F.cross_entropy`` on those scores in value and in gradients. Products run in the type of
    autocast; softmax, loss and gradients are summed in at least 32 bits, which is the type of the loss.

    Args:
        factors: hidden states ``(N, R)`` first.
        index: integer tensors that the scores depend on.
        targets: ``(N,)`` word ids.
        bias, masked_word, ignore_index, label_smoothing, reduction, block_size: see `ScoreOptions`.

    Returns:
        The loss, a scalar or ``(N,)`` for reduction "none"; and ``(N,)`` the word with the highest score.

    Raises:
        IndexError: a target is out of range (checked on a CPU).
        ValueError: the reduction is unknown, the label smoothing is not in 0 to 1, or the block size below 1.
    """
    check_arguments(reduction, label_smoothing, block_size)
    given = [*factors] if bias is None else [*factors, bias]
    settings = LossSettings(
        bias is not None,
        masked_word,
        ignore_index,
        label_smoothing,
        reduction,
        block_size,
        product_dtype(factors[0]),
    )
    forms_gradients = torch.is_grad_enabled() and reduction != "none"
    loss, best = _Loss.apply(scores.kind, settings, forms_gradients, len(given), targets, *given, *index)
    return loss, best


def scored_cross_entropy(
    scores_of: Callable[[Tensor], Tensor],
    num_words: int,
    hidden: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    block_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``F.cross_entropy(scores_of(hidden), targets)`` in blocks of tokens, and the best word of every token.

    Args:
        scores_of: computes scores ``(n, V)`` for hidden states ``(n, S)``.
        num_words: V.
        hidden: ``(N, S)``.
        targets: ``(N,)`` word ids.
        ignore_index, label_smoothing, reduction, block_size: see `LossOptions`.

    Raises:
        IndexError, ValueError: as in `blockwise_cross_entropy`.
    """
    check_arguments(reduction, label_smoothing, block_size)
    size = tokens_per_block(len(targets), num_words, block_size, hidden.device)
    losses, predictions = [], []
    for states, words in zip(hidden.split(size), targets.split(size)):
        scores = scores_of(states).to(sum_dtype(hidden))
        losses.append(
            F.cross_entropy(
                scores,
                words.long(),
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                reduction="none",
            )
        )
        predictions.append(scores.argmax(dim=-1))
    return _reduce(torch.cat(losses), targets, reduction, ignore_index), torch.cat(predictions)


def check_arguments(reduction: str, label_smoothing: float, block_size: int | None) -> None:
    """Raise ValueError if the reduction, the label smoothing or the block size of a loss is invalid."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}, but it must be 'mean', 'sum' or 'none'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}, but it must be from 0 to 1")
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size is {block_size}, but a block must have at least 1 token")


def pad_to_multiple(hidden: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Hidden states ``(N, S)`` and targets ``(N,)``, padded with ignored ones if fewer shapes are faster.

    That is the case for 16-bit products on a CPU.
    """
    if targets.device.type != "cpu" or product_dtype(hidden).itemsize >= 4:
        return hidden, targets
    missing = -targets.size(0) % _CPU_EVEN_TOKENS
    return F.pad(hidden, (0, 0, 0, missing)), F.pad(targets, (0, missing), value=ignore_index)


def product_dtype(hidden: Tensor) -> torch.dtype:
    """The type of matrix products with `hidden`: that of autocast if it is on."""
    autocast = autocast_dtype(hidden.device)
    return hidden.dtype if autocast is None or hidden.dtype == torch.float64 else autocast


def sum_dtype(hidden: Tensor) -> torch.dtype:
    """The type of sums: 32 bits, or 64 for hidden states of 64 bits."""
    return torch.promote_types(hidden.dtype, torch.float32)


def tokens_per_block(tokens: int, words: int, block_size: int | None, device: torch.device) -> int:
    """The number of tokens in a block, if `block_size` does not set it.

    By default 256 on a CPU and 1,024 on other devices; more if the vocabulary is so small that the block
    still has no more than 2**20 (2**25) scores.
    """
    smallest, scores = _CPU_BLOCK if device.type == "cpu" else _ACCELERATOR_BLOCK
    size = max(smallest, scores // words) if block_size is None else block_size
    return max(1, min(size, tokens))


def _reduce(losses: Tensor, targets: Tensor, reduction: str, ignore_index: int) -> Tensor:
    """The losses ``(N,)``, or their sum or mean; the mean of no tokens is nan, as in ``F.cross_entropy``."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (targets != ignore_index).sum() if reduction == "mean" else total


class _Loss(torch.autograd.Function):
    """The loss as a function of all factors; see `blockwise_cross_entropy`.

    A reduced loss computes its gradients in the forward pass. ``torch.compile`` sees `_walk` as one operator.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        settings: LossSettings,
        forms_gradients: bool,
        number: int,
        targets: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The loss and the predictions; `tensors` are as many factors as `number`, then the index."""
        wants = [forms_gradients and needed for needed in ctx.needs_input_grad[5 : 5 + number]]
        kept = (targets != settings.ignore_index).to(sum_dtype(tensors[0]))
        losses, predictions, gradients = _walk_in_graph(
            kind, tensors[:number], tensors[number:], targets, kept, wants, settings
        )
        ctx.kind, ctx.settings, ctx.number = kind, settings, number
        ctx.gradients = gradients if any(wants) else None
        ctx.save_for_backward(targets, *tensors)
        ctx.mark_non_differentiable(predictions)
        return _reduce(losses, targets, settings.reduction, settings.ignore_index), predictions

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the forward pass; computed here if there are none, or they were used."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "cross_entropy cannot be differentiated twice (create_graph=True); use "
                "F.cross_entropy(embedding.logits(hidden), targets)"
            )
        targets, *tensors = ctx.saved_tensors
        factors, index = tensors[: ctx.number], tensors[ctx.number :]
        wants = list(ctx.needs_input_grad[5 : 5 + ctx.number])
        counted = targets != ctx.settings.ignore_index
        if ctx.settings.reduction == "mean":
            grad_loss = grad_loss / counted.sum().clamp(min=1)  # finite without tokens
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            weights = counted.to(sum_dtype(factors[0])) * grad_loss
            gradients = _walk_in_graph(ctx.kind, factors, index, targets, weights, wants, ctx.settings)[2]
        else:
            for gradient in gradients:
                gradient.mul_(grad_loss)
        found = (
            gradient.to(tensor.dtype) if wanted else None
            for gradient, tensor, wanted in zip(gradients, factors, wants)
        )
        return None, None, None, None, None, *found, *(None for _ in index)


def _walk_in_graph(
    kind: str,
    factors: Sequence[Tensor],
    index: Sequence[Tensor],
    targets: Tensor,
    weights: Tensor,
    wants: Sequence[bool],
    settings: LossSettings,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`_walk`, as one operator while a graph is captured."""
    walk = _operator if torch.compiler.is_compiling() else _walk
    found: tuple[Tensor, Tensor, list[Tensor]] = walk(
        kind, [*factors], [*index], targets, weights, [*wants], *settings
    )
    return found


def _walk(
    kind: str,
    factors: list[Tensor],
    index: list[Tensor],
    targets: Tensor,
    weights: Tensor,
    wants: list[bool],
    *arguments: Any,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """One pass over all blocks.

    With p the softmax and q the smoothed target, the gradient by a token's scores is p - q. The weight of a
    token is applied to the narrow sides of products, never to the block; the constant part of q is the same
    for all words, so it is added once at the end.

    Args:
        weights: ``(N,)`` the weight of each token's loss in the gradients; zero for ignored ones.
        wants: whether the gradient of each of the factors is needed.
        arguments: the fields of `LossSettings`.

    Returns:
        ``(N,)`` losses (zero for ignored tokens), ``(N,)`` predictions, and the gradients of
        ``(weights * losses).sum()`` by the factors, empty where not needed.
    """
    settings = LossSettings(*arguments)
    with without_autocast(targets.device):
        dtype = sum_dtype(factors[0])
        source = _kinds[kind](factors[:-1] if settings.has_bias else factors, index, settings)
        axis, words = source.word_axis, source.words
        _check_targets(targets, words, settings.ignore_index)
        masked = (axis, settings.masked_word or 0, int(settings.masked_word is not None))
        smoothing = settings.label_smoothing / words
        bias = factors[-1].to(dtype).unsqueeze(1 - axis) if settings.has_bias else None
        bias_sum = 0.0 if bias is None else bias.sum() - bias.narrow(*masked).sum()
        size = tokens_per_block(targets.size(0), words, settings.block_size, targets.device)
        buffer = factors[0].new_empty(size * words, dtype=dtype)
        product = settings.product_dtype
        low_buffer = None if product == dtype else torch.empty_like(buffer, dtype=product)
        # float16 would lose small probabilities, because it has too few exponents.
        error_dtype = torch.bfloat16 if product == torch.bfloat16 else dtype
        weights = weights.unsqueeze(1)
        of_bias = torch.zeros_like(bias) if bias is not None and wants[-1] else None
        if any(wants):
            source.start_gradients(weights, wants[:-1] if settings.has_bias else wants, error_dtype)
        losses = torch.empty_like(weights[:, 0])
        predictions = torch.empty_like(targets, dtype=torch.long)
        # An ignored target may be out of range; any word will do, because its weight is zero.
        kept_targets = targets.masked_fill(targets == settings.ignore_index, 0).unsqueeze(axis)
        for start in range(0, targets.size(0), size):
            rows = slice(start, min(start + size, targets.size(0)))
            tokens = rows.stop - start
            shape = (tokens, words) if axis == 1 else (words, tokens)
            scores = buffer[: tokens * words].view(shape)
            low = None if low_buffer is None else low_buffer[: tokens * words].view(shape)
            source.fill(rows, scores, low)
            if bias is not None:
                scores.add_(bias)
            scores.narrow(*masked).zero_()
            wanted = kept_targets.narrow(1 - axis, start, tokens)
            of_target = scores.gather(axis, wanted)
            highest, best = _maxima(scores, axis)
            errors = torch.softmax(scores, dim=axis, out=scores)
            # The best word's probability is 1 / sum(exp(score - highest)).
            log_sums = highest - errors.gather(axis, best).log_()
            loss = log_sums.sub_(of_target, alpha=1.0 - settings.label_smoothing).squeeze(axis)
            if settings.label_smoothing > 0.0:
                loss.sub_(source.summed(rows) + bias_sum, alpha=smoothing)
            losses[rows], predictions[rows] = loss, best.squeeze(axis)
            if not any(wants):
                continue
            errors.scatter_add_(axis, wanted, errors.new_full(wanted.shape, settings.label_smoothing - 1.0))
            errors.narrow(*masked).zero_()
            if of_bias is not None and axis == 1:
                of_bias.addmm_(weights[rows].t(), errors)
            elif of_bias is not None:
                of_bias.addmm_(errors, weights[rows])
            source.add_gradients(rows, errors, None if error_dtype == dtype else low)
        losses.masked_fill_(targets == settings.ignore_index, 0.0)
        gradients: Gradients = source.finish_gradients(smoothing) if any(wants) else [None] * len(wants)
        if of_bias is not None:
            of_bias.sub_(smoothing * weights.sum())
            of_bias.narrow(*masked).zero_()
            gradients.append(of_bias.flatten())
    found = [factors[0].new_empty(0) if gradient is None else gradient for gradient in gradients]
    return losses, predictions, found + [factors[0].new_empty(0)] * (len(wants) - len(found))


_operator = torch.library.custom_op(
    "shared_embeddings::blockwise_cross_entropy",
    _walk,
    mutates_args=(),
    schema="""(str kind, Tensor[] factors, Tensor[] index, Tensor targets, Tensor weights, bool[] wants,
        bool has_bias, int? masked_word, int ignore_index, float label_smoothing, str reduction,
        int? block_size, ScalarType product_dtype) -> (Tensor, Tensor, Tensor[])""",
)


@_operator.register_fake
def _(
    kind: str,
    factors: list[Tensor],
    index: list[Tensor],
    targets: Tensor,
    weights: Tensor,
    wants: list[bool],
    *arguments: Any,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The shapes of the results."""
    shapes = [factor.shape if wanted else (0,) for factor, wanted in zip(factors, wants)]
    gradients = [weights.new_empty(shape) for shape in shapes]
    return torch.empty_like(weights), torch.empty_like(targets, dtype=torch.long), gradients


def _check_targets(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise IndexError for a target out of range, unless checking would synchronize with a device."""
    if targets.device.type != "cpu" or targets.numel() == 0 or not has_values(targets):
        return
    words = targets[targets != ignore_index]
    if words.numel() and (int(words.min()) < 0 or int(words.max()) >= vocabulary):
        wrong = int(words.min()) if int(words.min()) < 0 else int(words.max())
        raise IndexError(f"Target {wrong} is out of bounds: the vocabulary has {vocabulary} words")


def _maxima(scores: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The highest score of every token, and its word; both keep the `axis` of the words.

    Finding an index takes ten times as long as finding a value, so the index is searched only in the chunk of
    words that has the highest value.
    """
    words = scores.size(axis)
    whole = words - words % _CHUNK
    maxima = scores.narrow(axis, 0, whole).unflatten(axis, (-1, _CHUNK)).amax(dim=axis + 1)
    if whole < words:
        rest = scores.narrow(axis, whole, words - whole).amax(dim=axis, keepdim=True)
        maxima = torch.cat((maxima, rest), dim=axis)
    highest, chunk = maxima.max(dim=axis, keepdim=True)
    steps = torch.arange(_CHUNK, device=scores.device).unsqueeze(1 - axis)
    candidates = (chunk * _CHUNK + steps).clamp_(max=words - 1)
    best = scores.gather(axis, candidates).argmax(dim=axis, keepdim=True)
    return highest, candidates.gather(axis, best)


class LinearScores(Scores):
    """Linear scores of segments. The factors are hidden states, and as many codes."""

    kind = "linear"
    word_axis = 1

    def __init__(self, factors: Sequence[Tensor], index: Sequence[Tensor], settings: LossSettings) -> None:
        number = len(factors) // 2
        self.segments: list[_Segment] = []
        self.words = 0
        for hidden, codes in zip(factors[:number], factors[number:]):
            self.segments.append(_Segment(hidden, codes, self.words, settings))
            self.words += codes.size(0)

    def fill(self, rows: slice, scores: Tensor, low: Tensor | None) -> None:
        """A product for each segment."""
        products = scores if low is None else low
        for segment in self.segments:
            torch.mm(segment.hidden[rows], segment.codes.t(), out=products[:, segment.columns])
        if low is not None:
            scores.copy_(low)

    def summed(self, rows: slice) -> Tensor:
        """The hidden states times the sums of the codes."""
        first, *others = (segment.summed(rows) for segment in self.segments)
        return sum(others, first)

    def start_gradients(self, weights: Tensor, wants: Sequence[bool], dtype: torch.dtype) -> None:
        number = len(self.segments)
        for segment, *wanted in zip(self.segments, wants[:number], wants[number:]):
            segment.start_gradients(weights, dtype, *wanted)

    def add_gradients(self, rows: slice, errors: Tensor, low: Tensor | None) -> None:
        if low is not None:
            errors = low.copy_(errors)
        for segment in self.segments:
            segment.add_gradients(rows, errors[:, segment.columns])

    def finish_gradients(self, smoothing: float) -> Gradients:
        for segment in self.segments:
            segment.finish_gradients(smoothing)
        of_hidden = [segment.of_hidden for segment in self.segments]
        return [*of_hidden, *(segment.of_codes for segment in self.segments)]


class _Segment:
    """The part of the vocabulary that has codes of one width, with its gradients.

    Attributes:
        hidden, codes: ``(N, R_g)`` and ``(V_g, R_g)`` in the type of the products.
        columns: the segment's position among all words.
        masked: the masked word's position in the segment, None if it is in another.
        code_sum: ``(R_g,)`` the sum of all codes but the masked one, for label smoothing; else None.
        of_hidden, of_codes: the gradients where needed, once they have been started.
    """

    of_hidden: Tensor | None
    of_codes: Tensor | None

    def __init__(self, hidden: Tensor, codes: Tensor, start: int, settings: LossSettings) -> None:
        self.hidden = hidden.to(settings.product_dtype)
        self.codes = codes.to(settings.product_dtype)
        self.columns = slice(start, start + codes.size(0))
        self.dtype = sum_dtype(hidden)
        self.masked = None if settings.masked_word is None else settings.masked_word - start
        if self.masked is not None and not 0 <= self.masked < codes.size(0):
            self.masked = None
        self.code_sum: Tensor | None = None
        if settings.label_smoothing != 0.0:
            self.code_sum = column_sums(codes, self.dtype)
            if self.masked is not None:
                self.code_sum = self.code_sum - codes[self.masked]

    def summed(self, rows: slice) -> Tensor:
        """The sum ``(n,)`` of the scores of all words of the segment but the masked one."""
        assert self.code_sum is not None
        return self.hidden[rows].to(self.dtype) @ self.code_sum

    def start_gradients(
        self, weights: Tensor, dtype: torch.dtype, wants_hidden: bool, wants_codes: bool
    ) -> None:
        """Allocate the gradients that are needed."""
        self.weights, self.error_dtype = weights, dtype
        self.error_codes = self.codes.to(dtype)
        hidden, codes = self.hidden, self.codes
        self.of_hidden = hidden.new_empty(hidden.shape, dtype=self.dtype) if wants_hidden else None
        self.of_codes = codes.new_empty(codes.shape, dtype=self.dtype) if wants_codes else None
        is_low = dtype != self.dtype
        self.low_sum = torch.empty_like(codes, dtype=dtype) if is_low and wants_codes else None
        self.is_first = True

    def add_gradients(self, rows: slice, errors: Tensor) -> None:
        """Add the block `rows` with `errors` ``(n, V_g)``, the gradient by its scores."""
        if self.of_hidden is not None:
            self._add_hidden(rows, errors, self.of_hidden[rows])
        if self.of_codes is not None:
            self._add_codes(rows, errors, self.of_codes)
        self.is_first = False

    def finish_gradients(self, smoothing: float) -> None:
        """Add the constant part of the smoothed targets."""
        if self.of_codes is not None:
            if self.is_first:
                self.of_codes.zero_()
            if self.code_sum is not None:
                total = (self.hidden.to(self.dtype) * self.weights).sum(dim=0)
                self.of_codes.sub_(total, alpha=smoothing)
                if self.masked is not None:
                    self.of_codes[self.masked] = 0.0
        if self.of_hidden is not None and self.code_sum is not None:
            self.of_hidden.sub_(self.weights * self.code_sum, alpha=smoothing)

    def _add_hidden(self, rows: slice, errors: Tensor, gradient: Tensor) -> None:
        """The gradient ``(n, R_g)`` of the hidden states `rows`."""
        if self.error_dtype == gradient.dtype:
            torch.mm(errors, self.error_codes, out=gradient)
        else:
            gradient.copy_(torch.mm(errors, self.error_codes))
        gradient.mul_(self.weights[rows])

    def _add_codes(self, rows: slice, errors: Tensor, total: Tensor) -> None:
        """The share of the tokens `rows` in the gradient of the codes."""
        hidden = (self.hidden[rows] * self.weights[rows]).to(self.error_dtype)
        if self.low_sum is None:
            # With beta 0 the content of new memory is ignored.
            total.addmm_(errors.t(), hidden, beta=0.0 if self.is_first else 1.0)
            return
        torch.mm(errors.t(), hidden, out=self.low_sum)
        if self.is_first:
            total.copy_(self.low_sum)
        else:
            total.add_(self.low_sum)
