"""Writing text with a language model, one word at a time.

Axes: ``B`` = 1 text, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lm.evaluate.evaluation import evaluating
from shared_embeddings.errors import UserError

if TYPE_CHECKING:
    from lm.models.interface import LanguageModel, State


class Sampling(NamedTuple):
    """How a word is chosen.

    Attributes:
        temperature: log-probabilities are divided by it; at 0 the most probable word is taken.
        top_k: only so many of the most probable words may be chosen; None for all.
        forbidden: words that are never chosen.
    """

    temperature: float = 1.0
    top_k: int | None = None
    forbidden: tuple[int, ...] = ()

    def check(self) -> None:
        """Raise `UserError` for a value with which nothing can be chosen, or which has no effect."""
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}, but it must be a number of at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}, but it must be at least 1; raise it")
        if self.top_k is not None and self.temperature == 0:
            raise UserError("top_k has no effect with temperature 0; give one of them")


def generate(
    model: LanguageModel, prompt: Sequence[int], length: int, sampling: Sampling, seed: int
) -> Iterator[int]:
    """Give the words that the model puts after the prompt, each as soon as it is chosen.

    Args:
        model: is in ``eval()`` meanwhile.
        prompt: word ids, at least one.
        length: how many words to write.
        sampling: how they are chosen.
        seed: of the random numbers; the same seed gives the same words.

    Raises:
        UserError: a length or a way of choosing that is impossible, or scores that are no numbers.
    """
    sampling.check()
    if length < 1:
        raise UserError(f"length is {length}, but it must be at least 1; raise it")
    return _words(model, prompt, length, sampling, torch.Generator().manual_seed(seed))


@torch.no_grad()
def _words(
    model: LanguageModel, prompt: Sequence[int], length: int, sampling: Sampling, generator: torch.Generator
) -> Iterator[int]:
    """What `generate` gives, with random numbers of `generator`."""
    device = next(model.parameters()).device
    with evaluating(model):
        state = model.initial_state(1)
        ids = torch.tensor([list(prompt)], device=device)
        for _ in range(length):
            log_probs, state = _next_word(model, ids, state)
            word = choose(log_probs, sampling, generator)
            yield word
            ids = torch.tensor([[word]], device=device)


def _next_word(model: LanguageModel, ids: Tensor, state: State) -> tuple[Tensor, State]:
    """Log-probabilities ``(V,)`` of the word after `ids` ``(1, T)``, on the CPU, and the next state."""
    output = model(ids, state)
    log_probs = model.embedding.log_prob(output.hidden[0, -1]).float().cpu()
    if log_probs.isnan().any():
        raise UserError("the model's scores are no numbers (nan): its training diverged; take another one")
    return log_probs, output.state


def choose(log_probs: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """A word drawn from log-probabilities ``(V,)`` in the way that is asked for.

    Raises:
        UserError: all words are forbidden.
    """
    log_probs = log_probs.clone()
    log_probs[list(sampling.forbidden)] = -torch.inf
    if not log_probs.isfinite().any():
        raise UserError("no word is left to choose: the vocabulary has none that may be written")
    if sampling.temperature == 0:
        return int(log_probs.argmax())
    if sampling.top_k is not None and sampling.top_k < len(log_probs):
        best = log_probs.topk(sampling.top_k).indices
        log_probs = torch.full_like(log_probs, -torch.inf).index_copy_(0, best, log_probs[best])
    # The highest is subtracted first: a small temperature would take all of them out of range.
    temperature = max(sampling.temperature, torch.finfo(log_probs.dtype).tiny)
    weights = ((log_probs - log_probs.max()) / temperature).exp()
    return int(torch.multinomial(weights, 1, generator=generator))
