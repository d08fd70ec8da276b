"""The continuous cache pointer (Grave et al., 2017): words that came lately are likely to come again.

The cache holds, for the last `window` positions i of the text, the hidden state h_i that the softmax scored
and the word w_{i+1} that came after it. With h_t the hidden state of now,

    p_cache(w) = sum_i exp(theta h_t . h_i) [w_{i+1} = w] / sum_i exp(theta h_t . h_i)     (eq. 2)
    p(w) = (1 - lambda) p_model(w) + lambda p_cache(w)                                    (eq. 3)

Only the probability of the word that did come is needed, so no vector over the vocabulary is ever made. The
fourth setting of AWD-LSTM's pointer, how many tokens the model reads at a time, is `Reading.target_length`.

Axes: ``B`` texts side by side, ``T`` tokens of a segment, ``S`` width of the hidden states.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lm.evaluate.evaluation import Reading, Score, evaluating, read, target_losses
from shared_embeddings.errors import UserError

if TYPE_CHECKING:
    from lm.models.interface import LanguageModel

# How many products of hidden states are held at a time, and for how many positions at most.
_SCORES = 2**22
_QUERIES = 256


@dataclasses.dataclass(frozen=True)
class PointerOptions:
    """The settings of the pointer.

    Attributes:
        window: how many positions the cache holds.
        theta: how much more a similar hidden state counts than another; at 0 all count alike.
        weight: lambda, the share of the cache in the mixture.
    """

    window: int
    theta: float
    weight: float

    def __post_init__(self) -> None:
        """Raise `UserError` for a value with which there is no pointer."""
        if self.window < 1:
            raise UserError(f"pointer: window is {self.window}, but it must be at least 1; raise it")
        if not 0.0 <= self.theta < math.inf:
            raise UserError(f"pointer: theta is {self.theta}, but it must be a number of at least 0")
        if not 0.0 < self.weight < 1.0:
            raise UserError(f"pointer: lambda is {self.weight}, but it must be above 0 and below 1")

    @classmethod
    def parse(cls, given: Any) -> PointerOptions:
        """The settings from a mapping with the keys window, theta and lambda, all of them.

        Raises:
            UserError: a key is unknown or missing, or a value is no number.
        """
        names = {"window": int, "theta": float, "lambda": float}
        if not isinstance(given, Mapping):
            raise UserError(f"pointer is {given!r}; write '{{window: 500, theta: 1.0, lambda: 0.1}}'")
        for name in given:
            if name not in names:
                raise UserError(f"pointer: unknown key '{name}'; it has window, theta and lambda")
        for name, kind in names.items():
            value = given.get(name)
            is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
            if not is_number:
                wanted = "a whole number" if kind is int else "a number"
                raise UserError(f"pointer: {name} is {value!r}, but it must be {wanted}; give it a value")
        return cls(given["window"], float(given["theta"]), float(given["lambda"]))

    def plain(self) -> dict[str, int | float]:
        """The mapping that `parse` takes."""
        return {"window": self.window, "theta": self.theta, "lambda": self.weight}


class CachePointer:
    """The cache of B texts that are read side by side, one segment after the other."""

    def __init__(self, options: PointerOptions) -> None:
        self.options = options
        self._hidden: Tensor | None = None
        self._words: Tensor | None = None

    def log_probabilities(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What the cache gives the next words of a segment, which is remembered for the next one.

        Args:
            hidden: ``(B, T, S)``.
            targets: ``(B, T)`` the words that came.

        Returns:
            ``(B, T)`` float64 log-probabilities, minus infinity for words that are not in the cache; and
            ``(T,)`` whether there was any position in the cache.
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
        # Copies, so that no more than the window stays alive.
        self._hidden, self._words = keys[:, -window:].clone(), words[:, -window:].clone()
        has_cache = torch.arange(known, keys.size(1), device=hidden.device) > 0
        return torch.cat(blocks, dim=1), has_cache

    def _block(self, keys: Tensor, words: Tensor, begin: int, end: int) -> Tensor:
        """Log-probabilities ``(B, n)`` of the words of the positions from `begin` to `end`.

        Args:
            keys: ``(B, P, S)`` hidden states of all positions.
            words: ``(B, P)`` the words that came after them.
        """
        first = max(0, begin - self.options.window)
        scores = self.options.theta * (keys[:, begin:end] @ keys[:, first:end].transpose(1, 2)).double()
        queries = torch.arange(begin, end, device=keys.device).unsqueeze(1)
        places = torch.arange(first, end, device=keys.device)
        outside = (places >= queries) | (places < queries - self.options.window)
        scores = scores.masked_fill(outside, -math.inf)
        is_same = words[:, first:end].unsqueeze(1) == words[:, begin:end].unsqueeze(2)
        of_word = scores.masked_fill(~is_same, -math.inf).logsumexp(dim=-1)
        # Without any position in the cache both sums are empty: the word is not in it.
        total = scores.logsumexp(dim=-1)
        return torch.where(total > -math.inf, of_word - total, -math.inf)

    def mixed_losses(self, losses: Tensor, log_cache: Tensor, has_cache: Tensor) -> Tensor:
        """Losses ``(n,)`` of the mixture from those of the model and the logarithms of the cache's share.

        Where the cache is empty the model is on its own.
        """
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
    """Score every token of a text but the first, without and with the pointer.

    Every chunk begins with an empty cache, which its context fills like the rest.

    Args:
        model: is in ``eval()`` meanwhile.
        tokens: ``(n,)`` word ids.
        options: settings of the pointer.
        reading: how the text is read.
        progress: whether to show how far it is.

    Raises:
        UserError: a text of fewer than two tokens, or an impossible length.
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
