"""Text generation with a language model.

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
    """Sampling options.

    Attributes:
        temperature: divides the log-probabilities; 0 for greedy decoding.
        top_k: sample from the `top_k` most probable words; None for all.
        forbidden: ids of words that are never generated.
    """

    temperature: float = 1.0
    top_k: int | None = None
    forbidden: tuple[int, ...] = ()

    def check(self) -> None:
        """Raise `UserError` for values that are out of range or have no effect."""
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}, but it must be a number of at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}, but it must be at least 1; raise it")
        if self.top_k is not None and self.temperature == 0:
            raise UserError("top_k has no effect with temperature 0; remove one of them")


def generate(
    model: LanguageModel, prompt: Sequence[int], length: int, sampling: Sampling, seed: int
) -> Iterator[int]:
    """Yield the ids of generated words.

    Args:
        model: the model, which is in evaluation mode during generation.
        prompt: word ids, at least one.
        length: number of words to generate.
        sampling: sampling options.
        seed: random seed.

    Raises:
        UserError: an option is out of range, or the scores of the model are not finite.
    """
    sampling.check()
    if length < 1:
        raise UserError(f"length is {length}, but it must be at least 1; raise it")
    return _words(model, prompt, length, sampling, torch.Generator().manual_seed(seed))


@torch.no_grad()
def _words(
    model: LanguageModel, prompt: Sequence[int], length: int, sampling: Sampling, generator: torch.Generator
) -> Iterator[int]:
    """See `generate`."""
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
        raise UserError("the model scores are not finite: training diverged; use another checkpoint")
    return log_probs, output.state


def choose(log_probs: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample a word from log-probabilities ``(V,)``.

    Raises:
        UserError: no word is allowed.
    """
    log_probs = log_probs.clone()
    log_probs[list(sampling.forbidden)] = -torch.inf
    if not log_probs.isfinite().any():
        raise UserError("no word can be generated: the vocabulary has only forbidden words")
    if sampling.temperature == 0:
        return int(log_probs.argmax())
    if sampling.top_k is not None and sampling.top_k < len(log_probs):
        best = log_probs.topk(sampling.top_k).indices
        log_probs = torch.full_like(log_probs, -torch.inf).index_copy_(0, best, log_probs[best])
    # Subtracting the maximum avoids overflow with small temperatures.
    temperature = max(sampling.temperature, torch.finfo(log_probs.dtype).tiny)
    weights = ((log_probs - log_probs.max()) / temperature).exp()
    return int(torch.multinomial(weights, 1, generator=generator))
