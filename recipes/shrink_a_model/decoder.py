"""What a user sees of a decoder: perplexity, predictions compared with those of the original, and speed;
tables that other packages round.

Axes: ``N`` windows, ``T`` tokens, ``V`` words, ``D`` dimensions.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.shrink_a_model.encoder import read_tokenizer
from shared_embeddings.hosts.hf.folder import replacing_folder
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import require

# Positions whose predictions are in memory at a time.
_BLOCK = 64
# Runs of which the fastest counts, and tokens that are generated in each.
_ROUNDS, _GENERATED = 5, 8
# Numbers that share a scale: the defaults of torchao and bitsandbytes.
_TORCHAO_GROUP, _BITSANDBYTES_BLOCK = 32, 64


def read_decoder(folder: Path, dtype: str = "float32") -> Any:
    """The decoder in a folder, compressed or not; in float32, so that rounding of scores changes nothing."""
    kind = require("transformers").AutoModelForCausalLM
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, dtype=dtype).eval()


def cut_windows(tokenizer: Any, text: str, number: int, length: int) -> Tensor:
    """At most so many windows of a text ``(N, T)``, evenly spread over it, of `length` tokens with the
    beginning mark; UserError if the text is too short for one, or the tokenizer has no such mark.
    """
    if tokenizer.bos_token_id is None:
        raise UserError("the tokenizer of the decoder has no beginning mark; choose a decoder with one")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    size = length - 1
    found = ids[: len(ids) // size * size].view(-1, size)
    if not len(found):
        raise UserError(f"a text has {len(ids)} tokens, but a window takes {size}; give a longer text")
    places = torch.linspace(0, len(found) - 1, min(number, len(found))).round().long()
    return F.pad(found[places], (1, 0), value=tokenizer.bos_token_id)


@torch.inference_mode()
def log_probabilities(model: Any, window: Tensor) -> Iterator[Tensor]:
    """Yield those of all words after each token of a window ``(T,)`` but the last, in blocks ``(n, V)``."""
    state = None
    for ids in window[None, :-1].split(_BLOCK, dim=1):
        output = model(input_ids=ids, past_key_values=state, use_cache=True)
        state = output.past_key_values
        yield F.log_softmax(output.logits[0].float(), dim=-1)


def perplexity(model: Any, windows: Iterable[Tensor], predicted: int) -> float:
    """The perplexity in windows of ids, per token of a text of `predicted` tokens."""
    nats = 0.0
    for window in windows:
        for found, wanted in zip(log_probabilities(model, window), window[1:].split(_BLOCK), strict=True):
            nats += float(F.nll_loss(found, wanted, reduction="sum"))
    return math.exp(min(nats / predicted, 700.0))


def compare_predictions(original: Any, model: Any, windows: Tensor) -> dict[str, float]:
    """Compare two decoders with the same words, one window of ids ``(N, T)`` at a time.

    Returns:
        ``perplexity`` of the model and ``original_perplexity``, the exponentials of the mean negative log
        likelihood of all tokens but the first of each window; ``kl``, the mean Kullback-Leibler divergence of
        the predictions of the model from those of the original, in nats; ``kept``, the fraction of positions
        at which the most probable word stays.
    """
    sums = torch.zeros(4, dtype=torch.float64)
    for window in windows:
        blocks = (log_probabilities(original, window), log_probabilities(model, window))
        for before, after, wanted in zip(*blocks, window[1:].split(_BLOCK), strict=True):
            sums[0] += F.nll_loss(after, wanted, reduction="sum")
            sums[1] += F.nll_loss(before, wanted, reduction="sum")
            sums[2] += F.kl_div(after, before, reduction="none", log_target=True).sum(dim=1).double().sum()
            sums[3] += (after.argmax(dim=1) == before.argmax(dim=1)).sum()
    own, other, divergence, kept = (sums / windows[:, 1:].numel()).tolist()
    return {
        "perplexity": math.exp(min(own, 700.0)),
        "original_perplexity": math.exp(other),
        "kl": divergence,
        "kept": kept,
    }


def generating_speeds(folder: Path, original: Path, prompt: str) -> tuple[float, float]:
    """The tokens per second of the original and of the decoder in a folder.

    The two take turns to continue the prompt, so that other work on the machine slows both.
    """
    models = [read_decoder(place, "auto") for place in (original, folder)]
    prompts = [read_tokenizer(place)(prompt, return_tensors="pt") for place in (original, folder)]
    seconds = [float("inf"), float("inf")]
    for _ in range(_ROUNDS):
        for place, (model, inputs) in enumerate(zip(models, prompts)):
            started = time.perf_counter()
            model.generate(**inputs, do_sample=False, min_new_tokens=_GENERATED, max_new_tokens=_GENERATED)
            seconds[place] = min(seconds[place], time.perf_counter() - started)
    return _GENERATED / seconds[0], _GENERATED / seconds[1]


# A table after a round trip through the codes of another package, and the bytes of codes and scales.
Rounded = tuple[Tensor, int]


def _gguf(table: Tensor, kind: str) -> Rounded:
    """A type of llama.cpp, by the quantizer of its Python package."""
    gguf = importlib.import_module("gguf")
    number = gguf.GGMLQuantizationType[kind]
    codes = gguf.quants.quantize(table.float().numpy(), number)
    return torch.from_numpy(gguf.quants.dequantize(codes, number)), codes.nbytes


def _torchao(table: Tensor, kind: str) -> Rounded:
    """``int1`` to ``int8``, weights only; its zero points are 0 and not counted."""
    quantization = importlib.import_module("torchao.quantization")
    group = importlib.import_module("torchao.quantization.granularity").PerGroup(_TORCHAO_GROUP)
    settings = quantization.IntxWeightOnlyConfig(weight_dtype=getattr(torch, kind), granularity=group)
    holder = nn.Sequential(nn.Embedding.from_pretrained(table.clone()))
    quantization.quantize_(holder, settings, lambda module, _: isinstance(module, nn.Embedding))
    weight: Any = holder[0].weight
    return weight.dequantize(), table.numel() * int(kind[len("int") :]) // 8 + weight.scale.nbytes


def _bitsandbytes(table: Tensor, kind: str) -> Rounded:
    """``nf4`` or ``fp4``."""
    functions = importlib.import_module("bitsandbytes.functional")
    codes, state = functions.quantize_4bit(table, blocksize=_BITSANDBYTES_BLOCK, quant_type=kind)
    return functions.dequantize_4bit(codes, state), codes.nbytes + state.absmax.nbytes


PEERS: dict[str, Callable[[Tensor, str], Rounded]] = {
    "gguf": _gguf,
    "torchao": _torchao,
    "bitsandbytes": _bitsandbytes,
}


def round_table(source: Path, folder: Path, package: str, kind: str) -> dict[str, Any]:
    """Write a decoder whose tied table went through the codes of one of the `PEERS`, which is installed.

    Returns:
        The part of the report of ``compress`` about the table. The bytes are those of the codes and scales;
        the folder holds the decoded numbers.
    """
    model = read_decoder(source, "auto")
    table = model.get_input_embeddings().weight
    before, dense = table.detach().clone(), table.nbytes
    rounded, stored = PEERS[package](before, kind)
    table.data = rounded.view_as(before)
    with replacing_folder(folder) as temporary:
        model.save_pretrained(temporary)
        read_tokenizer(source).save_pretrained(temporary)
    error = float((rounded - before).float().norm() / before.float().norm())
    fit = {"method": f"{package} {kind}", "options": {}, "relative_error": error}
    return {"tables": [{"fit": fit, "stored_bytes": {"before": dense, "after": stored}}]}
