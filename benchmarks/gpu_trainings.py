"""What `benchmarks.gpu` measures in other processes: the tests of GPUs, and trainings of recipes.

A training that runs out of time saves its state, so that the next call resumes it.
"""

from __future__ import annotations

import functools
import gc
import json
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from xml.etree import ElementTree

import torch

import shared_embeddings as se
from benchmarks.gpu_steps import device_of
from recipes.common.recipe import Recipe, Row, find_recipe, smoke_row
from recipes.common.results import REPOSITORY, find_result
from shared_embeddings.compress.sizing import suggest

Measured = dict[str, Any]
PTB_ROWS = ("table1c_standard", "table4_unique200", "table1c_define")
RATIOS, WIDTHS = (4, 8), (256, 512)
# Seconds that are kept for the evaluation of a model.
_EVALUATION = 40.0
# Of `quantized`, bits per weight that leave room for scales at each ratio.
_BITS = {4: 7.8, 8: 3.8}


class OutOfTime(KeyboardInterrupt):
    """The time of a slice is over; handled like an interrupt of the user, so that trainings are saved."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in this thread after so many seconds."""

    def stop(_: int, __: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_tests(folder: Path, _tiny: bool) -> Measured:
    """Run the tests that need a GPU, which are skipped without one."""
    tests = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    tests = [path for path in tests if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]
    report = folder / "tests.xml"
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([sys.executable, "-m", "pytest", *options, *map(str, tests)], cwd=REPOSITORY, check=False)
    suite = ElementTree.parse(report).getroot()[0]
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = [case.attrib["name"] for case in suite if case.find("failure") is not None]
    return {
        "passed": counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"],
        **counts,
        "names_of_failures": failed,
        "seconds": float(suite.attrib["time"]),
    }


def prepared(name: str, tiny: bool) -> Recipe:
    """A recipe with its data, from ``$DATA_DIR`` or generated; preparing them has no limit of time."""
    from recipes.common.recipe import run_step

    recipe = find_recipe(name)
    run_step(recipe, "preprocess", ["--smoke"] if tiny else [])
    return recipe.smoke() if tiny else recipe


# AWD-LSTM on the Penn Treebank.


def train_ptb(name: str, tiny: bool, seconds: float) -> Measured:
    """Train a row of `ptb_awd_lstm` for some time; returns how far it came, and its perplexities."""
    from recipes.language_model import BEST, data_folder, train

    deadline = time.monotonic() + seconds
    recipe = prepared("ptb_awd_lstm", tiny)
    run, row = recipe.home / name, recipe.row(name)
    is_finished = True
    try:
        with time_limit(deadline - time.monotonic() - _EVALUATION):
            train(recipe, row, [])
    except OutOfTime:
        is_finished = False
    log = run / "train.log"
    measured = {"finished": is_finished, **(progress_of(log.read_text("utf-8")) if log.exists() else {})}
    if (run / BEST).exists():
        output, data = run / "slice.json", data_folder(recipe, row)
        options = ["-model", run / BEST, "-data", data, "-split", "test", "-output", output, "-force"]
        subprocess.run([sys.executable, "-m", "lm.evaluate.command", *map(str, options)], check=True)
        measured["perplexity"] = float(json.loads(output.read_text("utf-8"))["metrics"]["perplexity"])
    return measured


def progress_of(log: str) -> Measured:
    """Epochs, best validation perplexity and median speed of a ``train.log`` of ``lm_train``."""
    epochs = re.findall(r" epoch ([\d.]+) ", log)
    valid = [float(number) for number in re.findall(r"valid loss [\d.]+ ppl ([\d.]+)", log)]
    speeds = sorted(int(number.replace(",", "")) for number in re.findall(r"\| ([\d,]+) tokens/s", log))
    return {
        "epochs": float(epochs[-1]) if epochs else 0.0,
        "valid_perplexity": min(valid) if valid else None,
        "tokens_per_second": speeds[len(speeds) // 2] if speeds else None,
    }


# Translation, Multi30k.


def translator_names() -> list[str]:
    """The plain table, and every method at every ratio."""
    methods = [method for method in se.methods() if method != "standard"]
    return ["standard", *(f"{method}_{ratio}x" for ratio in RATIOS for method in methods)]


def train_translator(name: str, width: int, tiny: bool, seconds: float) -> Measured:
    """Train, or fit, a row of `multi30k_ende` with wider layers, and score it.

    ``quantized`` is fitted to the trained plain table, the others are trained from scratch.
    """
    from recipes.translation.train import AVERAGED, evaluate, fit_row, prepared_data, train_row

    deadline = time.monotonic() + seconds
    recipe = prepared("multi30k_ende", tiny)
    with time_limit(deadline - time.monotonic()):
        row = wide_row(recipe, name, width)
        data, run = prepared_data(recipe, row), recipe.home / row.name
        if row.fit is not None:
            teacher = recipe.home / str(row.teacher) / AVERAGED
            fit_row(row, run, data, teacher, recipe.data / "vocabulary", [])
        else:
            on_gpu = [] if tiny else ["-world_size", "1", "-gpu_ranks", "0"]
            train_row(row, run, data, on_gpu, row.average)
        evaluate(recipe, row, [] if tiny else ["-gpu", "0"])
    result = find_result(recipe.home, row.name)
    assert result is not None
    numbers = {key: result["metrics"][key] for key in ("bleu", "chrf", "training_seconds")}
    return {**numbers, "embedding": row.embedding, "parameters": result["counts"]["total"]}


def wide_row(recipe: Recipe, name: str, width: int) -> Row:
    """The row `standard_short` with wider layers and the embedding of a name of `translator_names`."""
    base = find_recipe(recipe.name).row("standard_short")
    sizes = {"hidden_size": width, "word_vec_size": width, "transformer_ff": 4 * width}
    row = replace(base, name=f"{name}_{width}", train={**base.train, **sizes})
    method, _, ratio = name.rpartition("_")
    if method == "quantized":
        embedding: dict[str, Any] = {"method": method, "bits": _BITS[int(ratio[:-1])]}
        row = replace(row, embedding=embedding, fit={"teacher": f"standard_{width}"})
    elif method:
        words = len((recipe.data / "vocabulary").read_text("utf-8").splitlines())
        budget = words * width // int(ratio[:-1])
        found = next(each for each in suggest(words, width, budget) if each.method == method)
        if found.options is None:
            raise ValueError(f"impossible at this size: {found.remark}")
        row = replace(row, embedding={"method": method, **found.options})
    return smoke_row(row) if recipe.is_smoke else row


# Two processes.


def train_shared(folder: Path, tiny: bool) -> Measured:
    """Train a language model in two processes that share a device, and in one with the batch of both."""
    recipe = prepared("ptb_awd_lstm", tiny=True)
    dropped = [f"{part}_dropout" for part in ("embedding", "input", "hidden", "output")]
    settings = {
        **{"data": recipe.data, "model": "awd_lstm", "device": device_of(tiny)},
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
        command = [sys.executable, *launch, "-m", "benchmarks.gpu_trainings", *options]
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
    from lm.train.distributed import Group

    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    torch.distributed.init_process_group("gloo")
    try:
        yield Group(place, torch.distributed.get_rank(), torch.distributed.get_world_size())
    finally:
        torch.distributed.destroy_process_group()
        gc.collect()  # ends the threads of gloo


def training_cases(slice_name: str, options: Namespace) -> Iterator[tuple[str, Callable[[float], Measured]]]:
    """The cases of a slice of trainings."""
    if slice_name == "ptb":
        for name in PTB_ROWS:
            yield name, functools.partial(train_ptb, name, options.tiny)
        return
    width = int(slice_name.rpartition("_")[2])
    tiny = ["standard", "quantized_8x", "funnel_4x"] if width == min(WIDTHS) else ["standard"]
    for name in tiny if options.tiny else translator_names():
        yield name, functools.partial(train_translator, name, width, options.tiny)


if __name__ == "__main__":  # lm_train, as one of several processes that share a device
    from lm.train import command

    command.joined = _joined_on_one_device
    command.main(sys.argv[1:])
