"""Losses in blocks of tokens: scores, losses, predictions and gradients.

The scores of a block are in one buffer that every block reuses. Since the softmax of a block is known when
its loss is computed, its gradients are accumulated right away, so that the extra memory is a block of scores
and the gradients themselves.

How scores are computed from factors, and gradients of the factors from errors of the scores, is defined by a
`ScoreSource`: `chunked.py` has that of linear scores, `class_factored.py` that of words with shared parts.

Axes: ``N`` tokens, n of them in a block, ``V`` vocabulary.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from shared_embeddings.layers.tracing import has_values, without_autocast

Gradients = list[Tensor | None]

# The index of a maximum is searched in chunks of this many scores.
_CHUNK = 64
# The smallest block of tokens, and the number of scores up to which blocks are larger for small vocabularies.
# Measured on 2 CPU cores: larger blocks are not faster.
_CPU_BLOCK = (256, 2**20)
_ACCELERATOR_BLOCK = (1024, 2**25)


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """The arguments of one loss.

    Attributes:
        has_bias: whether the last factor is a bias ``(V,)`` of the scores.
        masked_word: a word whose score is fixed at zero and that gets no gradient, or None.
        ignore_index, label_smoothing, reduction: as in ``F.cross_entropy``.
        block_size: the number of tokens in a block, or None for the default, see `tokens_per_block`.
        product_dtype: the type that matrix products run in.
    """

    has_bias: bool
    masked_word: int | None
    ignore_index: int
    label_smoothing: float
    reduction: str
    block_size: int | None
    product_dtype: torch.dtype


class ScoreSource(ABC):
    """Computes the scores of a block from factors, and adds up the gradients of the factors.

    A subclass is registered by its `kind`.

    Args:
        factors: hidden states first, without a bias.
        index: integer tensors that the scores depend on.
        settings: the arguments of the loss.

    Attributes:
        kind: the name of the source.
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
        sources[cls.kind] = cls

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


sources: dict[str, type[ScoreSource]] = {}


def tokens_per_block(tokens: int, words: int, block_size: int | None, device: torch.device) -> int:
    """The number of tokens in a block, if `block_size` does not set it.

    By default 256 on a CPU and 1,024 on other devices; more if the vocabulary is so small that the block
    still has no more than 2**20 (2**25) scores.
    """
    smallest, scores = _CPU_BLOCK if device.type == "cpu" else _ACCELERATOR_BLOCK
    size = max(smallest, scores // words) if block_size is None else block_size
    return max(1, min(size, tokens))


def sum_dtype(hidden: Tensor) -> torch.dtype:
    """The type of sums: 32 bits, or 64 for hidden states of 64 bits."""
    return torch.promote_types(hidden.dtype, torch.float32)


def walk_over(
    source: type[ScoreSource],
    factors: Sequence[Tensor],
    index: Sequence[Tensor],
    targets: Tensor,
    weights: Tensor,
    settings: LossSettings,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Gradients | None]:
    """One pass over all blocks.

    Args:
        weights: ``(N,)`` the weight of each token's loss in the gradients; zero for ignored ones.
        wants: whether the gradient of each of the factors is needed.

    Returns:
        ``(N,)`` losses (zero for ignored tokens), ``(N,)`` predictions, and the gradients of
        ``(weights * losses).sum()`` by the factors, or None if none is needed.
    """
    with without_autocast(targets.device):
        walk = _Walk(source, factors, index, targets, settings)
        losses = torch.empty_like(weights)
        predictions = torch.empty_like(targets, dtype=torch.long)
        if any(wants):
            walk.start_gradients(weights, wants)
        for start in range(0, targets.size(0), walk.size):
            rows = slice(start, min(start + walk.size, targets.size(0)))
            probabilities = walk.score(rows, losses, predictions)
            if any(wants):
                walk.add_gradients(rows, probabilities)
        gradients = walk.finish_gradients() if any(wants) else None
        return losses.masked_fill_(targets == settings.ignore_index, 0.0), predictions, gradients


class _Walk:
    """Scores, losses, predictions and gradients block by block, in buffers that all blocks share.

    With p the softmax and q the smoothed target, the gradient by a token's scores is p - q. The weight of a
    token is applied to the narrow sides of products, never to the block; the constant part of q is the same
    for all words, so it is added once at the end.
    """

    def __init__(
        self,
        source: type[ScoreSource],
        factors: Sequence[Tensor],
        index: Sequence[Tensor],
        targets: Tensor,
        settings: LossSettings,
    ) -> None:
        self.settings = settings
        self.dtype = sum_dtype(factors[0])
        self.source = source(factors[:-1] if settings.has_bias else factors, index, settings)
        self.axis, words = self.source.word_axis, self.source.words
        _check_targets(targets, words, settings.ignore_index)
        self.bias = factors[-1].to(self.dtype).unsqueeze(1 - self.axis) if settings.has_bias else None
        # An ignored target may be out of range; any word will do, because its weight is zero.
        self.targets = targets.masked_fill(targets == settings.ignore_index, 0).unsqueeze(self.axis)
        self.smoothing = settings.label_smoothing / words
        self.bias_sum = 0.0 if self.bias is None else self.bias.sum() - self._masked(self.bias).sum()
        self.size = tokens_per_block(targets.size(0), words, settings.block_size, targets.device)
        self.buffer = factors[0].new_empty(self.size * words, dtype=self.dtype)
        is_low = settings.product_dtype != self.dtype
        self.low = torch.empty_like(self.buffer, dtype=settings.product_dtype) if is_low else None

    def score(self, rows: slice, losses: Tensor, predictions: Tensor) -> Tensor:
        """Fill in the `losses` and `predictions` of the tokens `rows` (n of them).

        Returns:
            The probabilities of all words, a block that is valid until the next call.
        """
        scores = self._block(self.buffer, rows)
        self.source.fill(rows, scores, None if self.low is None else self._block(self.low, rows))
        if self.bias is not None:
            scores.add_(self.bias)
        self._masked(scores).zero_()
        highest, predictions[rows] = _maxima(scores, self.axis)
        of_target = scores.gather(self.axis, self._targets(rows))
        probabilities = torch.softmax(scores, dim=self.axis, out=scores)
        # The best word's probability is 1 / sum(exp(score - highest)).
        best = predictions[rows].unsqueeze(self.axis)
        log_sums = highest - probabilities.gather(self.axis, best).log_()
        loss = log_sums.sub_(of_target, alpha=1.0 - self.settings.label_smoothing).squeeze(self.axis)
        if self.settings.label_smoothing > 0.0:
            loss.sub_(self.source.summed(rows) + self.bias_sum, alpha=self.smoothing)
        losses[rows] = loss
        return probabilities

    def start_gradients(self, weights: Tensor, wants: Sequence[bool]) -> None:
        """Prepare the sums of the gradients that `wants` asks for."""
        self.weights = weights.unsqueeze(1)
        # float16 would lose small probabilities, because it has too few exponents.
        is_bfloat16 = self.settings.product_dtype == torch.bfloat16
        self.error_dtype = torch.bfloat16 if is_bfloat16 else self.dtype
        self.of_bias = None
        if self.bias is not None:
            *wants, wants_bias = wants
            self.of_bias = torch.zeros_like(self.bias) if wants_bias else None
        self.source.start_gradients(self.weights, wants, self.error_dtype)

    def add_gradients(self, rows: slice, probabilities: Tensor) -> None:
        """Add the block `rows`; `probabilities` is overwritten."""
        errors, targets = probabilities, self._targets(rows)
        ones = errors.new_full(targets.shape, self.settings.label_smoothing - 1.0)
        errors.scatter_add_(self.axis, targets, ones)
        self._masked(errors).zero_()
        if self.of_bias is not None:
            if self.axis == 1:
                self.of_bias.addmm_(self.weights[rows].t(), errors)
            else:
                self.of_bias.addmm_(errors, self.weights[rows])
        low = None
        if self.low is not None and self.error_dtype != errors.dtype:
            low = self._block(self.low, rows)
        self.source.add_gradients(rows, errors, low)

    def finish_gradients(self) -> Gradients:
        """The gradients by the factors, in their order and shapes, where needed."""
        found = self.source.finish_gradients(self.smoothing)
        if self.of_bias is not None:
            self.of_bias.sub_(self.smoothing * self.weights.sum())
            self._masked(self.of_bias).zero_()
        if self.bias is not None:
            found.append(None if self.of_bias is None else self.of_bias.flatten())
        return found

    def _block(self, buffer: Tensor, rows: slice) -> Tensor:
        """The part of a buffer for the tokens `rows`, as ``(n, V)`` or ``(V, n)``."""
        tokens, words = rows.stop - rows.start, self.source.words
        shape = (tokens, words) if self.axis == 1 else (words, tokens)
        return buffer[: tokens * words].view(shape)

    def _targets(self, rows: slice) -> Tensor:
        """The targets of the tokens `rows`, ``(n, 1)`` or ``(1, n)``."""
        return self.targets.narrow(1 - self.axis, rows.start, rows.stop - rows.start)

    def _masked(self, block: Tensor) -> Tensor:
        """The part of a block for the masked word; empty without one."""
        word = self.settings.masked_word
        return block.narrow(self.axis, 0 if word is None else word, int(word is not None))


def _check_targets(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise IndexError for a target out of range, unless checking would synchronize with a device."""
    if targets.device.type != "cpu" or targets.numel() == 0 or not has_values(targets):
        return
    words = targets[targets != ignore_index]
    if words.numel() and (int(words.min()) < 0 or int(words.max()) >= vocabulary):
        wrong = int(words.min()) if int(words.min()) < 0 else int(words.max())
        raise IndexError(f"Target {wrong} is out of bounds: the vocabulary has {vocabulary} words")


def _maxima(scores: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The highest score of every token, and its word ``(n,)``; the score keeps the `axis` of the words.

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
    return highest, candidates.gather(axis, best).squeeze(axis)
