"""Copy attention (See et al., 2017), each sentence with the words of its own source.

Everything else in OpenNMT-py 3 has the sentences of a batch first; its copy attention still counts steps
first in some places, which gives sentences the attention and the words of others as soon as there are two.
The functions here take all rows sentence by sentence.

Axes: ``B`` sentences (in a search, hypotheses), ``T`` target words, ``S`` source words, ``C`` different words
of a source, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# What a place of the extended vocabulary is left with when its probability has gone to the vocabulary.
_NOTHING = 1e-10


def mixed_probabilities(generator: Any, hidden: Tensor, attention: Tensor, source: Tensor) -> Tensor:
    """Return ``p_gen P_vocab(w) + (1 - p_gen) sum of attention`` (See et al., Eq. 9).

    Args:
        generator: OpenNMT's `CopyGenerator`; its ``linear_copy`` gives 1 - p_gen.
        hidden: ``(B * T, D)``, the words of a sentence one after the other.
        attention: ``(B * T, S)``, likewise.
        source: ``(B, S, C)`` ones where a place of the source has a word.

    Returns:
        ``(B * T, V + C)``; the padding has no probability.
    """
    scores = generator.linear(hidden)
    scores[:, generator.pad_idx] = -float("inf")
    copying = torch.sigmoid(generator.linear_copy(hidden))
    of_vocabulary = torch.softmax(scores, dim=1) * (1 - copying)
    weights = (attention * copying).view(len(source), -1, attention.size(1))  # (B, T, S)
    of_source = torch.bmm(weights, source)  # (B, T, C)
    return torch.cat([of_vocabulary, of_source.flatten(0, 1)], dim=1)


# Of one source: the places of its words in the extended vocabulary and their ids in the vocabulary, ``(n,)``.
Copies = tuple[Tensor, Tensor]


def copies_of(source_words: Any, vocabulary: Any, device: torch.device) -> Copies:
    """Return the words of a source that the vocabulary has."""
    ids = [vocabulary[word] for word in source_words.ids_to_tokens]
    # The first is the unknown word, which is no word of the source.
    found = [place for place, word in enumerate(ids) if place > 0 and word != vocabulary.default_id]
    places = torch.tensor(found, dtype=torch.long, device=device)
    return places + len(vocabulary), torch.tensor(ids, dtype=torch.long, device=device)[places]


def collapsed(probabilities: Tensor, copies: Sequence[Copies]) -> Tensor:
    """Give the words of a vocabulary the probabilities with which they are copied as well, in place.

    Args:
        probabilities: ``(B, T, V + C)``.
        copies: of the source of every sentence.
    """
    for sentence, (places, ids) in enumerate(copies):
        rows = probabilities[sentence]
        rows.index_add_(1, ids, rows.index_select(1, places))
        rows.index_fill_(1, places, _NOTHING)
    return probabilities


def over_words(attention: Tensor, lengths: Tensor) -> Tensor:
    """Return attention ``(B, T, S)`` without the padding of sources of `lengths` ``(B,)``, summing to one.

    What is left of a softmax when places are taken out is the softmax of the other places.
    """
    is_word = torch.arange(attention.size(2), device=lengths.device) < lengths.unsqueeze(1)  # (B, S)
    kept = attention * is_word.unsqueeze(1)
    return kept / kept.sum(dim=2, keepdim=True)


def coverage_loss(attention: Tensor, coverage: Tensor, is_word: Tensor) -> Tensor:
    """Return the sum over all words of ``sum_i min(a_i, c_i)`` (See et al., Eq. 12).

    Args:
        attention: ``(B, T, S)``.
        coverage: ``(B, T, S)`` the sum of the attention up to each word, its own included.
        is_word: ``(B, T)`` which places of the target are no padding.
    """
    before = torch.cat([torch.zeros_like(coverage[:, :1]), coverage[:, :-1]], dim=1)
    return torch.min(attention, before).sum(dim=-1)[is_word].sum()


def sentences_of(strategy: Any) -> list[int]:
    """Return which sentence of its batch every hypothesis of a search belongs to."""
    if hasattr(strategy, "original_batch_idx"):
        return strategy.original_batch_idx.tolist()  # type: ignore[no-any-return]
    return strategy.batch_offset.repeat_interleave(strategy.beam_size).tolist()  # type: ignore[no-any-return]
