"""The perplexity of a causal Hugging Face language model, in overlapping windows.

Axes: ``T`` tokens of a window, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from shared_embeddings.checkpoints.quality import Quality
from shared_embeddings.hf.positions import first_position
from shared_embeddings.hf.words import Vocabulary
from shared_embeddings.utils.extras import require

# The longest window, limited by the memory for the scores of all words.
_LONGEST = 1024


def perplexity(model: Any, vocabulary: Vocabulary, path: Path) -> Quality:
    """The perplexity of a text, over every token; except the first, if the tokenizer has no beginning mark.

    Each window has half a window of context followed by half a window of new tokens, which are scored. Every
    window starts with the tokenizer's beginning mark, if any.

    Args:
        model: a transformers model that passes `check_causal`.
        vocabulary: the vocabulary with its tokenizer.
        path: a UTF-8 text.

    Raises:
        ValueError: there is no tokenizer, or the text is too short or does not match the model.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text (byte {error.start}); convert it") from error
    begin, ids = vocabulary.encode(text)
    if len(begin) + len(ids) < 2:
        raise ValueError(f"{path}: has {len(ids)} tokens, too few to predict one; give a longer text")
    rows = model.get_input_embeddings().num_embeddings
    if max(*begin, *ids) >= rows:
        raise ValueError(
            f"{path}: has a token with the id {max(*begin, *ids)}, but the model has {rows} rows; use the "
            "model's own tokenizer"
        )
    longest = getattr(model.config, "max_position_embeddings", None) or _LONGEST
    window = min(_LONGEST, int(longest) - first_position(model)) - len(begin)
    nats, targets = _nats(model.eval(), begin, ids, window)
    how = f"{path}: {targets:,} tokens, in windows of {window + len(begin):,}, at least half of it context"
    return Quality("perplexity", math.exp(min(nats / targets, 700.0)), how)


def check_causal(model: Any) -> None:
    """Raise ValueError unless the model predicts each token from those before it."""
    names = require("transformers").models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kind = type(model).__name__
    if model.config.is_encoder_decoder or kind not in set(names.values()):
        raise ValueError(
            f"{kind} does not predict the next word from the previous ones, so it has no perplexity; omit "
            "--validation"
        )


@torch.no_grad()
def _nats(model: Any, begin: list[int], ids: list[int], window: int) -> tuple[float, int]:
    """The summed negative log-probability of all targets, and their number."""
    stride = max(window // 2, 1)
    nats, targets, done = 0.0, 0, 0 if begin else 1
    while done < len(ids):
        # The first window is all new; later ones have context.
        end = min(len(ids), window if targets == 0 else done + stride)
        read = begin + ids[max(0, end - window) : end]
        scores = model(input_ids=torch.tensor([read]), use_cache=False).logits[0]  # (T, V)
        new = end - done
        wanted = torch.tensor(ids[done:end])
        nats += float(F.cross_entropy(scores[-new - 1 : -1].float(), wanted, reduction="sum").double())
        targets += new
        done = end
    return nats, targets
