"""What `benchmarks.gpu` measures: layers and training steps, the tests of GPUs, and two processes on one GPU.

Layers and steps are measured in this process, their time and memory; the same code measures tiny sizes on a
CPU, without the memory. Tests and the two processes are other processes.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shared_embeddings as se
from benchmarks.layers import FUSED, PLAIN, LayerRow, Setting, layer_step, rows, words
from benchmarks.measuring import Step, median_times
from recipes.common.recipe import find_recipe, run_step
from recipes.common.results import REPOSITORY

Measured = dict[str, Any]
Cases = Iterator[tuple[str, Callable[[], Measured]]]
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


def timed(step: Step, device: str, runs: int = RUNS) -> Measured:
    """Return median milliseconds of a step, and on a GPU the peak of the memory that it adds, in MiB."""
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


def layer_cases(side: str, vocabulary: int, folder: Path, tiny: bool) -> Cases:
    """Yield the layers of one side, plain ones first, in bfloat16."""
    device = "cpu" if tiny else "cuda"
    setting = Setting("tiny", 3000, 512, 64) if tiny else Setting("gpu", vocabulary, 512, 4096)
    methods = se.methods() if vocabulary < LARGE or not tiny else ("standard",)
    layers = [PLAIN]
    for name, package in FUSED.items() if side == "output" else ():
        # Kernels for GPUs do not run on a CPU.
        if package == "torch" or (not tiny and importlib.util.find_spec(package)):
            layers.append(LayerRow(name, name, {}))

    def measure(row: LayerRow) -> Measured:
        return timed(layer_step(side, row, setting, device, torch.bfloat16), device)

    for row in [*layers, *rows(setting, methods)]:
        yield row.name, functools.partial(measure, row)


class TranslationLoss(nn.Module):
    """The label-smoothed loss of a translator of OpenNMT-py, summed over the tokens that are not padding."""

    def __init__(self, model: Any, padding: int) -> None:
        super().__init__()
        self.model, self.padding = model, padding

    def forward(self, source: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
        """Return the loss of sentences ``(B, S, 1)`` and their translations ``(B, T, 1)``."""
        hidden, _ = self.model(source, target, lengths)
        hidden = hidden[:, : target.size(1) - 1].flatten(0, 1)
        targets = target[:, 1:, 0].flatten()
        options: dict[str, Any] = {"ignore_index": self.padding, "label_smoothing": 0.1, "reduction": "sum"}
        generator = self.model.generator
        if hasattr(generator, "embedding"):
            embedding = generator.embedding
            loss: Tensor = embedding.cross_entropy_and_predictions(hidden, targets, **options)[0]
            return loss
        return F.cross_entropy(generator(hidden).float(), targets, **options)


def build_translator(embedding: dict[str, Any] | None, tiny: bool) -> TranslationLoss:
    """Return the Transformer base of OpenNMT-py with one vocabulary of 37,000 words for both languages."""
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


def translator_cases(folder: Path, tiny: bool) -> Cases:
    """Yield training steps of the Transformer base, with and without torch.compile.

    Batches have 25,600 target tokens.
    """
    device, (sentences, length) = "cpu" if tiny else "cuda", (2, 8) if tiny else (400, 64)

    def measure(name: str, compiles: bool) -> Measured:
        loss = build_translator(TRANSFORMER_TABLES[name], tiny).to(device).train()
        setting = Setting("words", 1000 if tiny else 37_000, 0, 2 * sentences * (length + 1))
        # The first four are special words.
        source, target = words(setting).clamp(min=4).view(2, sentences, length + 1, 1).to(device)
        inputs = (source, target, torch.full((sentences,), length + 1, device=device))
        tokens = sentences * length
        return measure_training(loss, lambda run: run(*inputs) / tokens, device, tokens, compiles)

    return named_cases(TRANSFORMER_TABLES, measure)


def xl_cases(folder: Path, tiny: bool) -> Cases:
    """Yield training steps of Transformer-XL with either attention, with and without torch.compile.

    The memory is full, and a batch has 60 x 150 tokens.
    """
    from lm import models
    from lm.train.loop import SegmentLoss

    device, (batch, length) = "cpu" if tiny else "cuda", (2, 8) if tiny else (60, 150)
    vocabulary = 1000 if tiny else XL_VOCABULARY
    embedding = {**XL_EMBEDDING, "cutoffs": [100, 400]} if tiny else XL_EMBEDDING

    def measure(attention: str, compiles: bool) -> Measured:
        options = {**(XL_TINY if tiny else {}), "attention": attention, "memory_length": length}
        torch.manual_seed(0)
        model = models.build("transformer_xl", list(map(str, range(vocabulary))), embedding, options)
        setting = Setting("words", vocabulary, 0, batch * (length + 1))
        ids = words(setting).view(batch, length + 1).to(device)
        inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        loss = SegmentLoss(model.to(device).train(), None)
        state = model.initial_state(batch)

        def segment_loss(run: Callable[..., Any]) -> Tensor:
            nonlocal state
            total, _, state = run(inputs, targets, *state)
            return total

        return measure_training(loss, segment_loss, device, batch * length, compiles)

    return named_cases(("sdpa", "flex"), measure)


def named_cases(names: Iterable[str], measure: Callable[[str, bool], Measured]) -> Cases:
    """Yield a case for each name, first without, then with torch.compile."""
    for compiles in (False, True):
        for name in names:
            title = f"{name}, compiled" if compiles else name
            yield title, functools.partial(measure, name, compiles)


def measure_training(
    module: nn.Module, loss: Callable[[Callable[..., Any]], Tensor], device: str, tokens: int, compiles: bool
) -> Measured:
    """Return time, memory and speed of a forward and backward pass in bfloat16 and an update by Adam.

    `loss` calls the module that it is given. On a CPU, a compiled module is traced only, because generating
    code takes a minute.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=device == "cuda")
    run: Callable[..., Any] = module
    if compiles:
        run = torch.compile(module, backend="inductor" if device == "cuda" else "eager")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            value = loss(run)
        value.backward()
        optimizer.step()

    measured = timed(step, device)
    return {**measured, "tokens_per_second": 1000 * tokens / measured["ms"]}


# Other processes.


def run_tests(folder: Path) -> Measured:
    """Run the tests that need a GPU, which are skipped without one."""
    tests = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    tests = [path for path in tests if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]
    report = folder / "tests.xml"
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([sys.executable, "-m", "pytest", *options, *map(str, tests)], cwd=REPOSITORY, check=False)
    suite = ElementTree.parse(report).getroot()[0]
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    failed = [case.attrib["name"] for case in suite if case.find("failure") is not None]
    return {"passed": passed, **counts, "names_of_failures": failed, "seconds": float(suite.attrib["time"])}


def train_shared(folder: Path, tiny: bool) -> Measured:
    """Train a language model in two processes that share a device, and in one with the batch of both."""
    recipe = find_recipe("ptb_awd_lstm").smoke()
    run_step(recipe, "preprocess", ["--smoke"])
    dropped = [f"{part}_dropout" for part in ("embedding", "input", "hidden", "output")]
    settings = {
        **{"data": recipe.data, "model": "awd_lstm", "device": "cpu" if tiny else "cuda"},
        **{"embedding": '{"method": "standard"}', **dict.fromkeys([*dropped, "weight_drop"], 0.0)},
        **{"embedding_dim": 64, "hidden_dim": 128, "num_layers": 2},
        **{"sequence_length": 20, "learning_rate": 1.0, "epochs": 2, "seed": 1, "log_every": 1000},
    }
    losses = {}
    for processes in (1, 2):
        output = folder / f"{processes}_processes"
        numbers = {"output_dir": output, "batch_size": 8 // processes}
        options = [text for key, value in {**settings, **numbers}.items() for text in (f"-{key}", str(value))]
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *launch, "-m", "benchmarks.gpu_cases", *options]
        start = time.monotonic()
        subprocess.run(command, check=True, cwd=REPOSITORY)
        log = (output / "train.log").read_text("utf-8")
        losses[processes] = float(re.findall(r"valid loss ([\d.]+)", log)[-1])
        seconds = time.monotonic() - start
    difference = abs(losses[2] - losses[1]) / losses[1]
    return {"loss_of_one": losses[1], "loss_of_two": losses[2], "difference": difference, "seconds": seconds}


@contextmanager
def _joined_on_one_device(device: str) -> Iterator[Any]:
    """Join the group of torchrun with the first device for all; NCCL rejects that, gloo does not."""
    from lm.train.loop import Group

    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    torch.distributed.init_process_group("gloo")
    try:
        yield Group(place, torch.distributed.get_rank(), torch.distributed.get_world_size())
    finally:
        torch.distributed.destroy_process_group()
        gc.collect()  # ends the threads of gloo


if __name__ == "__main__":  # lm_train, as one of several processes that share a device
    from lm.train import command

    command.joined = _joined_on_one_device
    command.main(sys.argv[1:])
