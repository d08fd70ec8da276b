"""What `benchmarks.gpu` measures in its own process: layers and training steps, their time and memory.

The same code measures tiny sizes on a CPU, without the memory.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shared_embeddings as se
from benchmarks.layers import FUSED, PLAIN, SIDES, Row, Setting, rows, words
from benchmarks.measuring import Step, median_times

Cases = Iterator[tuple[str, Callable[[], dict[str, float]]]]
WARM_UP, RUNS = 5, 10
LARGE = 262_144
# The published Transformer-XL for WikiText-103, and its vocabulary.
XL_VOCABULARY = 267_735
XL_EMBEDDING = {"method": "adaptive", "cutoffs": [20_000, 40_000, 200_000]}
XL_TINY = {"embedding_dim": 32, "num_layers": 2, "num_heads": 2, "head_dim": 16, "feed_forward_dim": 64}
# Options of OpenNMT-py for the base model of Vaswani et al. (2017).
TRANSFORMER = {"layers": 6, "hidden_size": 512, "word_vec_size": 512, "heads": 8, "transformer_ff": 2048}
TRANSFORMER_TINY = {"layers": 1, "hidden_size": 32, "word_vec_size": 32, "heads": 2, "transformer_ff": 64}
TRANSFORMER_TABLES: dict[str, dict[str, Any] | None] = {
    "OpenNMT-py's own": None,
    "standard": {"method": "standard"},
    "projective": {"method": "projective", "rank": 32},
}


def device_of(tiny: bool) -> str:
    """Where to measure."""
    return "cpu" if tiny else "cuda"


def compiled_for(device: str, module: nn.Module) -> nn.Module:
    """A compiled module; on a CPU, it is traced only, because generating code takes a minute."""
    compiled = torch.compile(module, backend="inductor" if device == "cuda" else "eager")
    return cast("nn.Module", compiled)


def timed(step: Step, device: str, runs: int = RUNS) -> dict[str, float]:
    """Median milliseconds of a step, and on a GPU the peak of the memory that it adds, in MiB."""
    is_cuda = device == "cuda"
    for _ in range(WARM_UP if is_cuda else 1):
        step()
    if not is_cuda:
        return {"ms": 1000 * median_times([step], 2)[0]}
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    taken = [start.elapsed_time(end) for start, end in zip(events, events[1:])]
    return {
        "ms": statistics.median(taken),
        "mib": (torch.cuda.max_memory_allocated() - before) / 2**20,
    }


def layer_cases(side: str, vocabulary: int, tiny: bool) -> Cases:
    """The layers of one side, plain ones first, in bfloat16."""
    setting = Setting("tiny", 3000, 512, 64) if tiny else Setting("gpu", vocabulary, 512, 4096)
    methods = se.methods() if vocabulary < LARGE or not tiny else ("standard",)

    def has(package: str) -> bool:  # kernels for GPUs do not run on a CPU
        return package == "torch" or (not tiny and importlib.util.find_spec(package) is not None)

    def measure(row: Row) -> dict[str, float]:
        return timed(SIDES[side](row, setting, device_of(tiny), torch.bfloat16), device_of(tiny))

    fused = [Row(name, name, {}) for name, package in FUSED.items() if has(package)]
    for row in [PLAIN, *(fused if side == "output" else ()), *rows(setting, methods)]:
        yield row.name, functools.partial(measure, row)


class TranslationLoss(nn.Module):
    """The label-smoothed loss of a translator of OpenNMT-py, summed over the tokens that are not padding."""

    def __init__(self, model: Any, padding: int) -> None:
        super().__init__()
        self.model, self.padding = model, padding

    def forward(self, source: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
        """The loss of sentences ``(B, S, 1)`` and their translations ``(B, T, 1)``."""
        hidden, _ = self.model(source, target, lengths)
        hidden = hidden[:, : target.size(1) - 1].flatten(0, 1)
        targets = target[:, 1:, 0].flatten()
        options: dict[str, Any] = {"ignore_index": self.padding, "label_smoothing": 0.1, "reduction": "sum"}
        generator = self.model.generator
        if hasattr(generator, "loss_and_predictions"):
            loss: Tensor = generator.loss_and_predictions(hidden, targets, **options)[0]
            return loss
        return F.cross_entropy(generator(hidden).float(), targets, **options)


def build_translator(embedding: dict[str, Any] | None, tiny: bool) -> TranslationLoss:
    """The Transformer base of OpenNMT-py with one vocabulary of 37,000 words for both languages."""
    import onmt.bin.train
    import onmt.model_builder
    from onmt.inputters.inputter import dict_to_vocabs
    from onmt.utils.parse import ArgumentParser

    from nmt.hooks import apply_patches

    apply_patches()
    names = ["<unk>", "<blank>", "<s>", "</s>", *map(str, range(996 if tiny else 36_996))]
    options = onmt.bin.train._get_parser().parse_args(
        ["-data", "{}", "-src_vocab", "none", "-encoder_type", "transformer", "-decoder_type", "transformer"]
    )
    vars(options).update(
        **(TRANSFORMER_TINY if tiny else TRANSFORMER),
        position_encoding=True,
        share_vocab=True,
        share_embeddings=True,
        share_decoder_embeddings=True,
        self_attn_type="scaled-dot-flash",
        dropout=[0.1],
        attention_dropout=[0.0],
        embedding=embedding,
    )
    ArgumentParser.update_model_opts(options)
    vocabs = dict_to_vocabs({"data_task": "seq2seq", "src": names, "tgt": names})
    torch.manual_seed(0)
    model = onmt.model_builder.build_base_model(options, vocabs)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() > 1 and "embedding" not in name:
            nn.init.xavier_uniform_(parameter)
    return TranslationLoss(model, names.index("<blank>"))


def _measure_translator(embedding: dict[str, Any] | None, compiles: bool, tiny: bool) -> dict[str, float]:
    """Speed and memory of training the Transformer base, with 25,600 target tokens in a batch."""
    device, (sentences, length) = device_of(tiny), (2, 8) if tiny else (400, 64)
    loss = build_translator(embedding, tiny).to(device).train()
    setting = Setting("words", 1000 if tiny else 37_000, 0, 2 * sentences * (length + 1))
    # The first four are special words.
    source, target = words(setting).clamp(min=4).view(2, sentences, length + 1, 1).to(device)
    inputs = (source, target, torch.full((sentences,), length + 1, device=device))
    compiled = compiled_for(device, loss) if compiles else loss
    step = training_step(lambda: compiled(*inputs) / (sentences * length), loss, device)
    return with_speed(timed(step, device), sentences * length)


def translator_cases(tiny: bool) -> Cases:
    """Training steps of the Transformer base, with and without torch.compile."""
    for compiles in (False, True):
        for name, embedding in TRANSFORMER_TABLES.items():
            title = f"{name}, compiled" if compiles else name
            yield title, functools.partial(_measure_translator, embedding, compiles, tiny)


def xl_cases(tiny: bool) -> Cases:
    """Training steps of Transformer-XL with either attention, with and without torch.compile."""
    for compiles in (False, True):
        for attention in ("sdpa", "flex"):
            title = f"{attention}, compiled" if compiles else attention
            yield title, functools.partial(_measure_xl, attention, compiles, tiny)


def _measure_xl(attention: str, compiles: bool, tiny: bool) -> dict[str, float]:
    """Speed and memory of training Transformer-XL with a full memory, 60 x 150 tokens."""
    from lm import models
    from lm.train.loop import SegmentLoss

    device, (batch, length) = device_of(tiny), (2, 8) if tiny else (60, 150)
    vocabulary = 1000 if tiny else XL_VOCABULARY
    embedding = {**XL_EMBEDDING, "cutoffs": [100, 400]} if tiny else XL_EMBEDDING
    options = {**(XL_TINY if tiny else {}), "attention": attention, "memory_length": length}
    torch.manual_seed(0)
    model = models.build("transformer_xl", [str(word) for word in range(vocabulary)], embedding, options)
    loss: nn.Module = SegmentLoss(model.to(device).train(), None)
    compiled = compiled_for(device, loss) if compiles else loss
    ids = words(Setting("words", vocabulary, 0, batch * (length + 1))).view(batch, length + 1).to(device)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    state = model.initial_state(batch)

    def segment_loss() -> Tensor:
        nonlocal state
        total, _, state = compiled(inputs, targets, *state)
        return total

    return with_speed(timed(training_step(segment_loss, loss, device), device), batch * length)


def training_step(loss: Callable[[], Tensor], module: nn.Module, device: str) -> Step:
    """A forward and backward pass in bfloat16 and an update by Adam."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=device == "cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            value = loss()
        value.backward()
        optimizer.step()

    return step


def with_speed(measured: dict[str, float], tokens: int) -> dict[str, float]:
    """Measured numbers and the tokens per second."""
    return {**measured, "tokens_per_second": 1000 * tokens / measured["ms"]}
