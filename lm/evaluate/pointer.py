"""The continuous cache pointer (Grave et al., 2017): recent words are likely to be repeated.

For the last `window` positions i of the text, the cache holds the hidden state h_i and the next word w_{i+1}.
With the current hidden state h_t,

    p_cache(w) = sum_i exp(theta h_t . h_i) [w_{i+1} = w] / sum_i exp(theta h_t . h_i)     (eq. 2)
    p(w) = (1 - lambda) p_model(w) + lambda p_cache(w)                                    (eq. 3)

Only the probability of the actual next word is computed, not the distribution over the vocabulary. The fourth
setting of AWD-LSTM's pointer, the number of tokens per segment, is `Reading.target_length`.

Axes: ``B`` parallel texts, ``T`` tokens of a segment, ``S`` width of the hidden states.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lm.evaluate.evaluation import Reading, Score, evaluating, read, target_losses
from lm.models import LanguageModel
from shared_embeddings.utils.errors import UserError

# Maximum number of dot products, and of query positions, computed at a time.
_SCORES = 2**22
_QUERIES = 256


@dataclasses.dataclass(frozen=True)
class PointerOptions:
    """Settings of the pointer."""

    window: int  # number of positions in the cache
    theta: float  # inverse temperature of the similarities; 0 weighs all positions equally
    weight: float  # lambda, the weight of the cache in the mixture

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UserError(f"pointer: window is {self.window}, but it must be at least 1; raise it")
        if not 0.0 <= self.theta < math.inf:
            raise UserError(f"pointer: theta is {self.theta}, but it must be a number of at least 0")
        if not 0.0 < self.weight < 1.0:
            raise UserError(f"pointer: lambda is {self.weight}, but it must be above 0 and below 1")

    @classmethod
    def parse(cls, given: Any) -> PointerOptions:
        """Parse a mapping with the keys window, theta and lambda.

        Raises:
            UserError: a key is unknown or missing, or a value is not a number or out of range.
        """
        kinds = {"window": (int,), "theta": (int, float), "lambda": (int, float)}
        if not isinstance(given, Mapping) or given.keys() != kinds.keys():
            raise UserError(f"pointer is {given!r}; write '{{window: 500, theta: 1.0, lambda: 0.1}}'")
        for name, kind in kinds.items():
            if type(given[name]) not in kind:
                wanted = "an integer" if kind == (int,) else "a number"
                raise UserError(f"pointer: {name} is {given[name]!r}, but it must be {wanted}; set it")
        return cls(given["window"], float(given["theta"]), float(given["lambda"]))

    def plain(self) -> dict[str, int | float]:
        """The settings as a mapping for `parse`."""
        return {"window": self.window, "theta": self.theta, "lambda": self.weight}


class CachePointer:
    """The cache of B parallel texts, which are read segment by segment."""

    def __init__(self, options: PointerOptions) -> None:
        self.options = options
        self._hidden: Tensor | None = None
        self._words: Tensor | None = None

    def log_probabilities(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the next words of a segment under the cache; adds the segment to the cache.

        Args:
            hidden: ``(B, T, S)``.
            targets: ``(B, T)`` next words.

        Returns:
            ``(B, T)`` float64 log-probabilities, minus infinity for words that are not in the cache; and
            ``(T,)``, False where the cache is empty.
        """
        keys = hidden if self._hidden is None else torch.cat([self._hidden, hidden], dim=1)
        words = targets if self._words is None else torch.cat([self._words, targets], dim=1)
        known = keys.size(1) - hidden.size(1)
        window = self.options.window
        queries = max(1, min(_QUERIES, _SCORES // (len(hidden) * (window + _QUERIES))))
        blocks = [
            self._block(keys, words, known + start, min(known + start + queries, keys.size(1)))
            for start in range(0, hidden.size(1), queries)
        ]
        # Copies release the memory outside the window.
        self._hidden, self._words = keys[:, -window:].clone(), words[:, -window:].clone()
        has_cache = torch.arange(known, keys.size(1), device=hidden.device) > 0
        return torch.cat(blocks, dim=1), has_cache

    def _block(self, keys: Tensor, words: Tensor, begin: int, end: int) -> Tensor:
        """Log-probabilities ``(B, n)`` of the next words at positions `begin` to `end`.

        `keys` are the hidden states of all positions ``(B, P, S)``, `words` their next words ``(B, P)``.
        """
        first = max(0, begin - self.options.window)
        scores = self.options.theta * (keys[:, begin:end] @ keys[:, first:end].transpose(1, 2)).double()
        queries = torch.arange(begin, end, device=keys.device).unsqueeze(1)
        places = torch.arange(first, end, device=keys.device)
        outside = (places >= queries) | (places < queries - self.options.window)
        scores = scores.masked_fill(outside, -math.inf)
        is_same = words[:, first:end].unsqueeze(1) == words[:, begin:end].unsqueeze(2)
        of_word = scores.masked_fill(~is_same, -math.inf).logsumexp(dim=-1)
        # With an empty cache, both sums are empty.
        total = scores.logsumexp(dim=-1)
        return torch.where(total > -math.inf, of_word - total, -math.inf)

    def mixed_losses(self, losses: Tensor, log_cache: Tensor, has_cache: Tensor) -> Tensor:
        """Losses ``(n,)`` of the mixture of model and cache; those of the model where the cache is empty."""
        weight = self.options.weight
        mixed = torch.logaddexp(math.log1p(-weight) - losses, math.log(weight) + log_cache)
        return torch.where(has_cache, -mixed, losses)


@torch.no_grad()
def evaluate_with_pointer(
    model: LanguageModel,
    tokens: np.ndarray,
    options: PointerOptions,
    reading: Reading = Reading(),  # noqa: B008 (a tuple of numbers)
    progress: bool = True,
) -> tuple[Score, Score]:
    """Score all tokens of a text but the first, without and with the pointer.

    Each chunk starts with an empty cache. The arguments are those of `lm.evaluate.evaluation.evaluate`.
    """
    plain = mixed = 0.0
    pointer = CachePointer(options)
    with evaluating(model):
        for segment in read(model, tokens, reading, progress):
            if segment.is_first:
                pointer = CachePointer(options)
            log_cache, has_cache = pointer.log_probabilities(segment.hidden, segment.targets)
            losses = target_losses(model, segment)
            counting = segment.is_scored
            has_cache = has_cache.expand_as(counting)[counting]
            plain += float(losses.sum())
            mixed += float(pointer.mixed_losses(losses, log_cache[counting], has_cache).sum())
    return Score(plain, len(tokens) - 1), Score(mixed, len(tokens) - 1)
