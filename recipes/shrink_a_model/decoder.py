"""What a user sees of a decoder: perplexity, and predictions compared with those of the original;
tables that other packages round.

Axes: ``N`` windows, ``T`` tokens, ``V`` words, ``D`` dimensions.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from recipes.common.tools import read_json, write_json
from recipes.shrink_a_model.encoder import read_tokenizer
from shared_embeddings.hf.word_layers import dense_model, find_entry
from shared_embeddings.quant.codecs.iq4_nl import Iq4NlCodec
from shared_embeddings.utils.errors import UserError, require
from shared_embeddings.utils.files import replacing

# Words that are scored at a time, so that the scores after all tokens of a window stay in the cache.
_WORDS = 2048
# Numbers that share a scale: the defaults of torchao and bitsandbytes.
_TORCHAO_GROUP, _BITSANDBYTES_BLOCK = 32, 64
# Of llama.cpp's IQ4_NL: numbers of a block, and the scales that it tries on each side;
# blocks that are rounded at a time, and what is added to nothing before a division.
_IQ4_NL_BLOCK = 32
_TRIED, _BLOCKS, _TINY = 7, 2**15, 1e-30


def read_decoder(folder: Path, dtype: str = "float32") -> Any:
    """Return the decoder in a folder, compressed or not; in float32, so that rounding changes no score."""
    kind = require("transformers").AutoModelForCausalLM
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, dtype=dtype).eval()


@dataclass(frozen=True)
class Decoder:
    """A decoder with dense tables."""

    model: Any
    table: Tensor  # (V, D), which scores words

    def states(self, ids: Tensor) -> Tensor:
        """Return the last hidden states ``(n, D)`` after ids ``(n,)``."""
        output = self.model.base_model(input_ids=ids[None], use_cache=False)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


def read_dense(folder: Path) -> Decoder:
    """Return the decoder in a folder, its tables decoded once."""
    model = read_decoder(folder)
    if find_entry(model.config.to_dict()) is not None:
        model = dense_model(model)
    return Decoder(model, model.get_output_embeddings().weight)


def cut_windows(tokenizer: Any, text: str, number: int, length: int) -> Tensor:
    """Return at most so many windows of a text ``(N, T)``, evenly spread over it, of `length` tokens with the
    beginning mark; UserError if the text is too short for one.
    """
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    size = length - 1
    windows = ids[: len(ids) // size * size].view(-1, size)
    if not len(windows):
        raise UserError(f"a text has {len(ids)} tokens, but a window takes {size}; give a longer text")
    places = torch.linspace(0, len(windows) - 1, min(number, len(windows))).round().long()
    return F.pad(windows[places], (1, 0), value=tokenizer.bos_token_id)


class Predictions:
    """What a decoder predicts in each window so far, in a file that every window is added to.

    Args:
        path: the file.
        checksums: of what is measured; a file of something else starts anew.

    Attributes:
        texts: by text, the negative log likelihood of each window, and the most probable words.
    """

    def __init__(self, path: Path, checksums: Mapping[str, str]) -> None:
        self.path, self.checksums = path, dict(checksums)
        stored = read_json(path) or {}
        same = stored.get("checksums") == self.checksums
        self.texts: dict[str, list[tuple[float, list[int]]]] = stored["texts"] if same else {}

    @torch.inference_mode()
    def add(self, folder: Path, texts: Mapping[str, Tensor]) -> None:
        """Add the windows ``(N, T)`` of texts that are not there yet, by the decoder in a folder."""
        if all(len(self.texts.get(text, ())) == len(windows) for text, windows in texts.items()):
            return
        print(f"measuring {folder}", flush=True)
        decoder = read_dense(folder)
        for text, windows in texts.items():
            known = self.texts.setdefault(text, [])
            for window in tqdm(windows[len(known) :], text, unit=" windows", mininterval=10.0):
                states = decoder.states(window[:-1])
                total, best = scan_words(states, decoder.table)
                likelihood = (states * decoder.table[window[1:]]).sum(dim=1) - total
                known.append((-float(likelihood.sum()), best.tolist()))
                write_json(self.path, {"checksums": self.checksums, "texts": self.texts})

    def compare(self, original: Predictions) -> dict[str, dict[str, float]]:
        """Return the measures of each text.

        Returns:
            ``perplexity`` and ``original_perplexity``, the exponentials of the negative log likelihood of all
            tokens but the first of each window; ``kept``, the share of positions at which the most probable
            word stays.
        """
        measured = {}
        for text, windows in self.texts.items():
            (ours, words), (theirs, before) = (zip(*part) for part in (windows, original.texts[text]))
            same = torch.tensor(words) == torch.tensor(before)
            measured[text] = {
                "perplexity": math.exp(min(sum(ours) / same.numel(), 700.0)),
                "original_perplexity": math.exp(sum(theirs) / same.numel()),
                "kept": float(same.double().mean()),
            }
        return measured


def scan_words(states: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Score all words after each of ``n`` tokens, some words at a time.

    Args:
        states: the hidden states ``(n, D)``.
        table: what scores words ``(V, D)``.

    Returns:
        For each token, the logarithm of the sum of all exponentials of scores, and the best word.
    """
    total, highest = torch.full((2, len(states)), -torch.inf, dtype=torch.float64)
    best = torch.zeros(len(states), dtype=torch.long)
    for first in range(0, len(table), _WORDS):
        scores = F.linear(states, table[first : first + _WORDS])
        value, place = scores.max(dim=1)
        best = torch.where(value > highest, first + place, best)
        highest = torch.maximum(highest, value)
        total = torch.logaddexp(total, scores.logsumexp(dim=1).double())
    return total, best


def rounded_table(table: Tensor, package: str, kind: str) -> tuple[Tensor, int]:
    """Return a table after a round trip through codes of another package, and the bytes of codes and scales.

    Args:
        table: ``(V, D)``.
        package: ``gguf``: a type of llama.cpp, by the quantizer of its Python package, or by ours where this
            has none; ``torchao``: ``int1`` to ``int8``, weights only, whose zero points are 0 and not
            counted; ``bitsandbytes``: ``nf4`` or ``fp4``; ``mlx``: ``4bit_64`` are 4 bits with a scale and an
            offset in bf16 for 64 numbers.
        kind: the type.
    """
    if package == "mlx":
        mx, (bits, group) = importlib.import_module("mlx.core"), kind.split("bit_")
        sizes, numbers = {"bits": int(bits), "group_size": int(group)}, mx.array(table.float().numpy())
        codes, *scales = mx.quantize(numbers.astype(mx.bfloat16), **sizes)
        decoded = mx.dequantize(codes, *(scale.astype(mx.float32) for scale in scales), **sizes)
        return torch.from_numpy(np.array(decoded)), codes.nbytes + sum(scale.nbytes for scale in scales)
    if package == "bitsandbytes":
        functions = importlib.import_module("bitsandbytes.functional")
        codes, state = functions.quantize_4bit(table, blocksize=_BITSANDBYTES_BLOCK, quant_type=kind)
        return functions.dequantize_4bit(codes, state), codes.nbytes + state.absmax.nbytes
    if package == "torchao":
        quantization = importlib.import_module("torchao.quantization")
        group = importlib.import_module("torchao.quantization.granularity").PerGroup(_TORCHAO_GROUP)
        settings = quantization.IntxWeightOnlyConfig(weight_dtype=getattr(torch, kind), granularity=group)
        holder = nn.Sequential(nn.Embedding.from_pretrained(table.clone()))
        quantization.quantize_(holder, settings, lambda module, _: isinstance(module, nn.Embedding))
        weight: Any = holder[0].weight
        return weight.dequantize(), table.numel() * int(kind[len("int") :]) // 8 + weight.scale.nbytes
    gguf = importlib.import_module("gguf")
    number = gguf.GGMLQuantizationType[kind]
    if kind == "IQ4_NL":
        blocks = table.float().view(-1, _IQ4_NL_BLOCK)
        codes = torch.cat([iq4_nl(part) for part in blocks.split(_BLOCKS)]).view(len(table), -1).numpy()
    else:
        codes = gguf.quants.quantize(table.float().numpy(), number)
    return torch.from_numpy(gguf.quants.dequantize(codes, number)), codes.nbytes


def iq4_nl(blocks: Tensor) -> Tensor:
    """Return blocks ``(n, 32)`` in IQ4_NL of llama.cpp, as bytes ``(n, 18)``: 16 levels times an fp16 scale.

    As in llama.cpp without an importance matrix, errors are weighted by the squares of the numbers, and the
    scale is the best one for the codes of any of 16 scales, at which the largest number is near a last level.
    """
    levels = torch.from_numpy(Iq4NlCodec.levels(4.0))
    middles, first = (levels[1:] + levels[:-1]) / 2, int(levels[0])

    def codes(inverse: Tensor) -> Tensor:
        return torch.bucketize(blocks * inverse, middles, right=True)

    largest = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    weights, gain, scale = blocks.square(), torch.zeros_like(largest), torch.zeros_like(largest)
    for level in (-first, *range(first - _TRIED, first + _TRIED + 1)):
        rounded = levels[codes(torch.where(largest == 0, 0.0, level / largest))]
        product = (weights * rounded * blocks).sum(dim=1, keepdim=True)
        square = (weights * rounded.square()).sum(dim=1, keepdim=True).clamp(min=_TINY)
        is_better = product.square() > gain * square
        scale = torch.where(is_better, product / square, scale)
        gain = torch.where(is_better, product.square() / square, gain)
    low, high = codes(torch.where(scale == 0, 0.0, 1 / scale)).byte().chunk(2, dim=1)
    return torch.cat([scale.half().view(torch.uint8), low | high << 4], dim=1)


def round_table(source: Path, folder: Path, package: str, kind: str) -> dict[str, Any]:
    """Write a decoder whose tied table went through the codes of another package, see `rounded_table`.

    Returns:
        The part of the report of ``compress`` about the table. The bytes are those of the codes and scales;
        the folder holds the decoded numbers.
    """
    model = read_decoder(source, "auto")
    table = model.get_input_embeddings().weight
    before, dense = table.detach().clone(), table.nbytes
    rounded, stored = rounded_table(before, package, kind)
    table.data = rounded = rounded.view_as(before)
    with replacing(folder) as temporary:
        model.save_pretrained(temporary)
        read_tokenizer(source).save_pretrained(temporary)
    error = float((rounded - before).float().norm() / before.float().norm())
    fit = {"method": f"{package} {kind}", "options": {}, "relative_error": error}
    return {"tables": [{"fit": fit, "stored_bytes": {"before": dense, "after": stored}}]}
