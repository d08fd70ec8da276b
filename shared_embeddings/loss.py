"""Cross entropy with the scores of only one block of tokens in memory.

The scores of a block are in one buffer that every block reuses. Since the softmax of a block is known when
its loss is computed, its gradients are accumulated right away, in the forward pass, so that the extra memory
is a block of scores and the gradients themselves.

How scores are computed from factors, and gradients of the factors from errors of the scores, is defined by
the classes in `SCORES`: `LinearScores` here, those of words with shared parts in
`shared_embeddings.modules.uncle`.

This loss is always used, on all devices: ``torch.nn.functional.linear_cross_entropy`` sums 16-bit losses and
gradients in 16 bits, has no masked word, and took 2.5 times as long on a CPU (V 37,000, D 512).

Axes: ``N`` tokens, n of them in a block, ``V`` vocabulary, ``R`` width of the hidden states and of the codes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.nn.tracing import autocast_dtype, has_values, without_autocast
from shared_embeddings.quant.packed_tensor import column_sums

Reduction = Literal["mean", "sum", "none"]
Gradients = list[Tensor | None]

# The index of a maximum is searched in chunks of this many scores.
_CHUNK = 64
# The smallest block of tokens, and the number of scores up to which blocks are larger for small vocabularies.
# Measured on 2 CPU cores: larger blocks are not faster.
_CPU_BLOCK = (256, 2**20)
_ACCELERATOR_BLOCK = (1024, 2**25)


class LossOptions(TypedDict, total=False):
    """The keyword arguments of all losses; see `blockwise_cross_entropy`."""

    ignore_index: int
    label_smoothing: float
    reduction: Reduction
    block_size: int | None


class LossSettings(NamedTuple):
    """The arguments of one loss, in plain types that a compiled graph can hold."""

    has_bias: bool  # whether the last factor is a bias ``(V,)`` of the scores
    product_dtype: torch.dtype  # the type that matrix products run in
    masked_word: int | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "mean"
    block_size: int | None = None


class ScoreTerms(NamedTuple):
    """What the scores of all words are computed from, and the targets of the tokens."""

    # One of `SCORES`; or a function of the only factor, for scores without gradients.
    scores: type[Any] | Callable[[Tensor], Tensor]
    factors: Sequence[Tensor]  # hidden states ``(N, R)`` first
    targets: Tensor  # ``(N,)`` word ids
    ignore_index: int  # the target of tokens that do not count
    bias: Tensor | None = None  # ``(V,)`` added to the scores
    # A word whose score is fixed at zero, without gradients for its parameters and its bias.
    masked_word: int | None = None
    integers: Sequence[Tensor] = ()  # tensors that the scores depend on, which have no gradients
    num_words: int = 1  # V, which only a function does not know


def blockwise_cross_entropy(
    terms: ScoreTerms,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    block_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of scores, and the best word of every token.

    Equals ``F.cross_entropy`` on those scores in value and in gradients. Products run in the type of
    autocast; softmax, loss and gradients are summed in at least 32 bits, which is the type of the loss.

    Args:
        terms: what the scores are computed from.
        label_smoothing, reduction, block_size: as in `SharedEmbedding.cross_entropy`.

    Returns:
        The loss, a scalar or ``(N,)`` for reduction "none"; and ``(N,)`` the word with the highest score.

    Raises:
        IndexError: a target is out of range (checked on a CPU).
        ValueError: the reduction is unknown, the label smoothing is not in 0 to 1, or the block size below 1.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}, but it must be 'mean', 'sum' or 'none'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}, but it must be from 0 to 1")
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size is {block_size}, but a block must have at least 1 token")
    hidden, targets, bias = terms.factors[0], terms.targets, terms.bias
    settings = LossSettings(
        bias is not None,
        product_dtype(hidden),
        terms.masked_word,
        terms.ignore_index,
        label_smoothing,
        reduction,
        block_size,
    )
    if isinstance(terms.scores, type):
        factors = terms.factors if bias is None else (*terms.factors, bias)
        kind: str = terms.scores.kind  # type: ignore[attr-defined]
        forms_gradients = torch.is_grad_enabled() and reduction != "none"
        loss, best = _Loss.apply(
            kind, settings, forms_gradients, len(factors), targets, *factors, *terms.integers
        )
        return loss, best
    losses, predictions = [], []
    size = tokens_per_block(len(targets), terms.num_words, block_size, hidden.device)
    for states, words in zip(hidden.split(size), targets.split(size)):
        scores = terms.scores(states).to(sum_dtype(hidden))
        smoothed = {"ignore_index": terms.ignore_index, "label_smoothing": label_smoothing}
        losses.append(F.cross_entropy(scores, words.long(), reduction="none", **smoothed))  # type: ignore[arg-type]
        predictions.append(scores.argmax(dim=-1))
    return _reduce(torch.cat(losses), targets, settings), torch.cat(predictions)


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


def _reduce(losses: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:
    """The losses ``(N,)``, or their sum or mean; the mean of no tokens is nan, as in ``F.cross_entropy``."""
    if settings.reduction == "none":
        return losses
    total = losses.sum()
    return total / (targets != settings.ignore_index).sum() if settings.reduction == "mean" else total


class _Loss(torch.autograd.Function):
    """The loss as a function of all factors; see `blockwise_cross_entropy`.

    A reduced loss computes its gradients in the forward pass.
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
        counted = (targets != settings.ignore_index).to(sum_dtype(tensors[0]))
        walk = _operator if torch.compiler.is_compiling() else _walk
        losses, predictions, gradients = walk(
            kind, [*tensors[:number]], [*tensors[number:]], targets, counted, wants, *settings
        )
        ctx.kind, ctx.settings, ctx.number = kind, settings, number
        ctx.gradients = gradients if any(wants) else None
        ctx.save_for_backward(targets, *tensors)
        ctx.mark_non_differentiable(predictions)
        return _reduce(losses, targets, settings), predictions

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
            walk = _operator if torch.compiler.is_compiling() else _walk
            gradients = walk(ctx.kind, factors, index, targets, weights, wants, *ctx.settings)[2]
        else:
            for gradient in gradients:
                gradient.mul_(grad_loss)
        of_factors = (
            gradient.to(tensor.dtype) if wanted else None
            for gradient, tensor, wanted in zip(gradients, factors, wants)
        )
        return None, None, None, None, None, *of_factors, *(None for _ in index)


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

    Returns the losses ``(N,)``, zero for ignored tokens, the predictions ``(N,)``, and the gradients of
    ``(weights * losses).sum()`` by the factors, empty where `wants` does not have them.
    """
    settings = LossSettings(*arguments)
    with without_autocast(targets.device):
        dtype = sum_dtype(factors[0])
        weights = weights.unsqueeze(1)
        product = settings.product_dtype
        # float16 would lose small probabilities, because it has too few exponents.
        error_dtype = torch.bfloat16 if product == torch.bfloat16 else dtype
        rest = slice(-1) if settings.has_bias else slice(None)
        source = SCORES[kind](factors[rest], index, settings, weights, wants[rest], error_dtype)
        axis, words = source.word_axis, source.words
        if targets.device.type == "cpu" and targets.numel() and has_values(targets):  # without waiting
            counted = targets[targets != settings.ignore_index]
            wrong = counted[(counted < 0) | (counted >= words)]
            if wrong.numel():
                word = int(wrong.min()) if int(wrong.min()) < 0 else int(wrong.max())
                raise IndexError(f"Target {word} is out of bounds: the vocabulary has {words} words")
        masked = (axis, settings.masked_word or 0, int(settings.masked_word is not None))
        smoothing = settings.label_smoothing / words
        bias = factors[-1].to(dtype).unsqueeze(1 - axis) if settings.has_bias else None
        bias_sum = 0.0 if bias is None else bias.sum() - bias.narrow(*masked).sum()
        size = tokens_per_block(targets.size(0), words, settings.block_size, targets.device)
        buffer = factors[0].new_empty(size * words, dtype=dtype)
        low_buffer = None if product == dtype else torch.empty_like(buffer, dtype=product)
        of_bias = torch.zeros_like(bias) if bias is not None and wants[-1] else None
        losses = torch.empty_like(weights[:, 0])
        predictions = torch.empty_like(targets, dtype=torch.long)
        # An ignored target may be out of range; any word will do, because its weight is zero.
        counted_targets = targets.masked_fill(targets == settings.ignore_index, 0).unsqueeze(axis)
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
            wanted = counted_targets.narrow(1 - axis, start, tokens)
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
    gradients += [None] * (len(wants) - len(gradients))
    # The results of an operator share no memory.
    results = [factors[0].new_empty(0) if gradient is None else gradient for gradient in gradients]
    return losses, predictions, results


_operator = torch.library.custom_op(
    "shared_embeddings::blockwise_cross_entropy",
    _walk,
    mutates_args=(),
    schema="""(str kind, Tensor[] factors, Tensor[] index, Tensor targets, Tensor weights, bool[] wants,
        bool has_bias, ScalarType product_dtype, int? masked_word, int ignore_index, float label_smoothing,
        str reduction, int? block_size) -> (Tensor, Tensor, Tensor[])""",
)


@_operator.register_fake
def _(
    kind: str, factors: list[Tensor], index: Any, targets: Tensor, weights: Tensor, wants: list[bool], *_: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The shapes of the results."""
    shapes = [factor.shape if wanted else (0,) for factor, wanted in zip(factors, wants)]
    gradients = [weights.new_empty(shape) for shape in shapes]
    return torch.empty_like(weights), torch.empty_like(targets, dtype=torch.long), gradients


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


class LinearScores:
    """Scores ``torch.cat([h @ c.T for h, c in zip(hiddens, codes)], 1)``, and the gradients of the factors.

    A vocabulary may consist of segments with codes of different widths. The factors are hidden states
    ``(N, R_g)`` for each segment, then codes ``(V_g, R_g)`` for each; a word's number is its position in the
    concatenated segments. Gradients are in at least 32 bits, factors in the type of the products. The sums of
    codes, for label smoothing, are without the masked word.

    A class of `SCORES` has these methods and arguments.

    Args:
        factors: hidden states first, without a bias.
        index: integer tensors that the scores depend on.
        settings: the arguments of the loss.
        weights: ``(N, 1)`` of the tokens' losses in the gradients.
        wants: for each factor whether its gradient is needed.
        error_dtype: the type of the errors in products.

    Attributes:
        kind: the name by which compiled graphs find the class.
        word_axis: the axis of the words in a block: 1 for ``(n, V)``, 0 for ``(V, n)``.
        words: V.
    """

    kind = "linear"
    word_axis = 1

    def __init__(
        self,
        factors: Sequence[Tensor],
        index: Sequence[Tensor],
        settings: LossSettings,
        weights: Tensor,
        wants: Sequence[bool],
        error_dtype: torch.dtype,
    ) -> None:
        number = len(factors) // 2
        self.dtype, self.weights = sum_dtype(factors[0]), weights
        self.hiddens, self.codes = (
            [factor.to(settings.product_dtype) for factor in part]
            for part in (factors[:number], factors[number:])
        )
        ends = [0, *itertools.accumulate(len(codes) for codes in self.codes)]
        self.words, self.columns = ends[-1], list(map(slice, ends, ends[1:]))
        masked = settings.masked_word
        self.masked = [
            masked - part.start if masked is not None and part.start <= masked < part.stop else None
            for part in self.columns
        ]
        self.code_sums: list[Tensor] = []
        for codes, row in zip(factors[number:], self.masked):
            if settings.label_smoothing != 0.0:
                total = column_sums(codes, self.dtype)
                self.code_sums.append(total if row is None else total - codes[row])
        self.gradients = [
            torch.empty_like(factor, dtype=self.dtype) if wanted else None
            for factor, wanted in zip((*self.hiddens, *self.codes), wants)
        ]
        if any(wants):
            self.error_codes = [codes.to(error_dtype) for codes in self.codes]
        self.low_sums = [
            None if error_dtype == self.dtype or grad is None else torch.empty_like(grad, dtype=error_dtype)
            for grad in self.gradients[number:]
        ]
        self.is_first = True

    def fill(self, rows: slice, scores: Tensor, low: Tensor | None) -> None:
        """Write the scores of the tokens `rows` without bias into `scores`, a block in at least 32 bits.

        Args:
            low: a block in the type of the products, to be used as memory, if that is another type.
        """
        products = scores if low is None else low
        for hidden, codes, columns in zip(self.hiddens, self.codes, self.columns):
            torch.mm(hidden[rows], codes.t(), out=products[:, columns])
        if low is not None:
            scores.copy_(low)

    def summed(self, rows: slice) -> Tensor:
        """Return the sum ``(n,)`` of the scores of all words but the masked one, for label smoothing."""
        first, *others = (
            hidden[rows].to(self.dtype) @ total for hidden, total in zip(self.hiddens, self.code_sums)
        )
        return sum(others, first)

    def add_gradients(self, rows: slice, errors: Tensor, low: Tensor | None) -> None:
        """Add the gradients of the tokens `rows`.

        Args:
            errors: the gradients of their unweighted scores, a block in at least 32 bits.
            low: a block in the type of the errors in products, to be used as memory, if that is another type.
        """
        errors = errors if low is None else low.copy_(errors)
        number, weights = len(self.codes), self.weights[rows]
        for place, columns in enumerate(self.columns):
            part, codes = errors[:, columns], self.error_codes[place]
            if (of_hidden := self.gradients[place]) is not None:
                if low is None:
                    torch.mm(part, codes, out=of_hidden[rows])
                else:
                    of_hidden[rows].copy_(torch.mm(part, codes))
                of_hidden[rows].mul_(weights)
            if (of_codes := self.gradients[number + place]) is not None:
                hidden = (self.hiddens[place][rows] * weights).to(codes.dtype)
                low_sum = self.low_sums[place]
                if low_sum is None:
                    # With beta 0 the content of new memory is ignored.
                    of_codes.addmm_(part.t(), hidden, beta=0.0 if self.is_first else 1.0)
                else:
                    torch.mm(part.t(), hidden, out=low_sum)
                    if self.is_first:
                        of_codes.copy_(low_sum)
                    else:
                        of_codes.add_(low_sum)
        self.is_first = False

    def finish_gradients(self, smoothing: float) -> Gradients:
        """Return the gradient of every factor, None where it is not needed.

        Args:
            smoothing: the share of each word in smoothed targets, which the errors do not include.
        """
        number = len(self.codes)
        for place, (of_hidden, of_codes) in enumerate(zip(self.gradients[:number], self.gradients[number:])):
            if of_codes is not None and self.is_first:
                of_codes.zero_()
            if not self.code_sums:
                continue
            if of_hidden is not None:
                of_hidden.sub_(self.weights * self.code_sums[place], alpha=smoothing)
            if of_codes is not None:
                total = (self.hiddens[place].to(self.dtype) * self.weights).sum(dim=0)
                of_codes.sub_(total, alpha=smoothing)
                if self.masked[place] is not None:
                    of_codes[self.masked[place]] = 0.0
        return self.gradients


# The classes of scores by their `kind`.
SCORES: dict[str, type[Any]] = {LinearScores.kind: LinearScores}
