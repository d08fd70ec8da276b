"""The command ``lm_train``: trains a language model, also from a teacher, or resumes its training.

The complete state of a training includes all random number generators.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

import shared_embeddings as se
from lm import models
from lm.checkpoint import Trained, load_model, load_state, read_checkpoint, save_model
from lm.data.corpus import Vocabulary, load_corpus
from lm.models import LanguageModel
from lm.models.awd_lstm import cpu_has_bf16
from lm.train.config import FREE_TO_CHANGE, Configuration, TrainingOptions, from_arguments, help_text, parse
from lm.train.loop import Group, Report, Trainer, joined
from lm.train.optim import Averages
from shared_embeddings.compress.distillation import (
    OPTION,
    TeacherLosses,
    copy_network,
    fit_line,
    parse_distillation,
    prepare_student,
)
from shared_embeddings.compress.host import copy_output_bias
from shared_embeddings.utils.command_line import USER_ERROR
from shared_embeddings.utils.errors import UserError, require
from shared_embeddings.utils.files import locked, write_text
from shared_embeddings.utils.results import WandbWriter

LAST, BEST, CONFIG = "last.pt", "best.pt", "config.yaml"


def main(arguments: Sequence[str]) -> None:
    """Run the command; `KeyboardInterrupt` if a signal stopped training, which the same command resumes."""
    if not arguments or {"-h", "-help", "--help"} & set(arguments):
        print(help_text())
        return
    try:
        config = parse(from_arguments(arguments))
        with joined(config.training.device) as group:
            train(config, group)
    except (UserError, KeyboardInterrupt) as error:
        # All processes have the same error: one of them reports it.
        if int(os.environ.get("LOCAL_RANK", 0)):
            sys.exit(130 if isinstance(error, KeyboardInterrupt) else USER_ERROR)
        raise


def train(config: Configuration, group: Group) -> None:
    """Train in this process, the only one in its output folder, from scratch or from last.pt there."""
    folder = Path(config.training.output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir {folder}: is a file; choose another path")
    with locked(folder / ".lock") if group.is_first else nullcontext():
        _train(config, group)


def _train(config: Configuration, group: Group) -> None:
    """Build the model or restore the run, then train."""
    options, settings = config.training, config.flat()
    if options.wandb is not None:
        require("wandb")  # before the long work
    corpus = load_corpus(Path(options.data))
    words, checksum = corpus.vocabulary.words, corpus.description["checksum"]
    last = Path(options.output_dir) / LAST
    is_new = not last.exists()
    embedding = options.embedding
    if options.embedding_distillation is not None and not is_new:
        embedding = read_checkpoint(last)["config"]["embedding"]  # including options chosen by the fit
    torch.manual_seed(options.seed)
    model = models.build(options.model, words, embedding, vars(config.model), vars(config.ngrams))
    model.to(group.device)
    teacher_losses, lines = TeacherLosses(), list[str]()
    if options.embedding_distillation is not None:
        student = LanguageModelStudent(model, options, corpus.vocabulary, group.is_first, lines)
        distillation = parse_distillation(options.embedding_distillation)
        teacher_losses = prepare_student(student, distillation, is_new)
    if options.init_from is not None and is_new:
        try:
            start = read_checkpoint(Path(options.init_from))
        except UserError as error:
            raise UserError(f"init_from: {error}") from error
        if start["words"] != words:
            raise UserError(
                f"init_from: the vocabulary of {options.init_from} ({len(start['words'])} words) is not that "
                f"of the data ({len(words)} words); use the data that it was trained with"
            )
        load_state(model, start["model"], Path(options.init_from))
    torch.manual_seed(options.seed + group.rank)  # dropout differs between processes
    trainer = Trainer(config, model.train(), corpus.train, corpus.valid, group, *teacher_losses)
    if not is_new:
        restore_run(last, trainer, settings, checksum)
    if options.precision == "bf16" and group.device.type == "cpu" and not cpu_has_bf16():
        lines.append(
            "note: this CPU has no bfloat16 instructions: training is about ten times slower than in fp32; "
            "set precision: fp32"
        )
    with _naming_logs(Path(options.output_dir)):
        _run(trainer, [*lines, models.describe_parameters(model)], words, settings, checksum)


@contextlib.contextmanager
def _naming_logs(folder: Path) -> Iterator[None]:
    """Name the folder in errors of logs, such as of a full disk.

    TensorBoard's thread keeps an error for its next call; it prints no traceback.
    """
    previous = threading.excepthook
    threading.excepthook = lambda failed: None if issubclass(failed.exc_type, OSError) else previous(failed)
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(folder)
        raise
    finally:
        threading.excepthook = previous


def _run(
    trainer: Trainer, lines: Sequence[str], words: list[str], settings: dict[str, Any], checksum: str
) -> None:
    """Run the training loop and write checkpoints and logs, whose first lines are given."""
    group, options = trainer.group, trainer.options
    folder = Path(options.output_dir)
    best = folder / BEST
    report = Report()
    epoch_tokens = (trainer.text_columns.length - 1) * options.batch_size * group.world_size
    if group.is_first:
        write_text(folder / CONFIG, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
        writers = [] if options.wandb is None else [WandbWriter(options.wandb, folder, settings)]
        total = (options.epochs or 0) * epoch_tokens
        if options.steps is not None:
            total = options.steps * options.sequence_length * options.batch_size * group.world_size
        report = Report(folder, trainer.step, total, trainer.tokens, writers)
    where = f"resumes after step {trainer.step}" if trainer.step else "starts"
    place = f"processes: {group.world_size}, on {group.device.type}"
    start = f"Training {where}: {epoch_tokens:,} tokens per epoch, {len(words):,} words, {place}"
    for line in (*lines, start):
        report.line(line)

    try:
        save_best = partial(save_model, best, trainer.model, words, settings, None)
        save = partial(save_run, folder / LAST, trainer, words, settings, checksum)
        trainer.run(report, save, save_best)
        report.line(f"finished after step {trainer.step}; the best model is {best}")
    finally:
        report.close()


@dataclasses.dataclass
class LanguageModelStudent:
    """A model that learns from a teacher, see `shared_embeddings.compress.distillation.prepare_student`."""

    model: LanguageModel  # on its device; its embedding may be replaced by a fitted one
    options: TrainingOptions
    vocabulary: Vocabulary  # words of the model and the teacher, and their counts
    is_first: bool  # among all processes, to show progress
    lines: list[str] = dataclasses.field(default_factory=list)  # for the log

    def embeddings(self) -> list[nn.Module]:
        return [self.model.embedding]

    def read_teacher(self, path: str) -> Trained:
        words = self.vocabulary.words
        try:
            teacher = load_model(Path(path))
        except UserError as error:
            raise UserError(f"{OPTION}: teacher: {error}") from error
        if teacher.words != words:
            raise UserError(
                f"{OPTION}: the vocabulary of the teacher {path} ({len(teacher.words)} words) is not that of "
                f"this model ({len(words)} words); use the data that the teacher was trained with"
            )
        width = teacher.model.embedding.embedding_dim
        if width != self.model.embedding.embedding_dim:
            raise UserError(
                f"{OPTION}: the vectors of the teacher have {width} dimensions; set embedding_dim: {width}"
            )
        return teacher

    def copy_network(self, teacher: Trained) -> None:
        ours, theirs = self.model, teacher.model
        if theirs.kind != ours.kind:
            raise UserError(
                f"{OPTION}: the teacher is a {theirs.kind}, this model a {ours.kind}; set model: "
                f"{theirs.kind}, or network_start: random"
            )
        remedy = "set the options of the model to the teacher's, or network_start: random"
        if theirs.embedding.score_dim != ours.embedding.score_dim:
            remedy = (
                f"the teacher's embedding has score_dim {theirs.embedding.score_dim}, this "
                f"{ours.embedding.method} embedding {ours.embedding.score_dim}, so the last layers differ; "
                f"choose options with score_dim {theirs.embedding.score_dim}, or network_start: random"
            )
        states = []
        for model in (ours, theirs):
            inner = {id(tensor) for tensor in model.embedding.state_dict(keep_vars=True).values()}
            state = model.state_dict(keep_vars=True)
            states.append(
                {name: tensor.detach() for name, tensor in state.items() if id(tensor) not in inner}
            )
        copy_network(states[0], states[1], remedy)

    def fit(self, teacher: Trained, steps: int | None) -> None:
        settings: dict[str, Any] = dict(self.options.embedding)
        old = teacher.model.embedding
        bias = old.output_bias() if old.has_linear_scores else None
        if bias is not None:
            settings.setdefault("output_bias", True)
        self.model.embedding, report = se.fit(
            settings.pop("method"),
            self.pairs(teacher)[0][1],
            words=self.vocabulary.words,
            token_counts=torch.tensor(self.vocabulary.counts).clamp(min=1),
            seed=self.options.seed,
            steps=steps,
            progress=self.is_first,
            **settings,
        )
        self.lines.append(fit_line("embedding", report))
        if bias is not None:
            self.lines += copy_output_bias(self.model.embedding, bias)
        elif old.output_bias() is not None:
            self.lines.append("The teacher's output bias is not used: it belongs to a two-step softmax")

    @torch.no_grad()
    def pairs(self, teacher: Trained) -> list[tuple[se.SharedEmbedding, Tensor]]:
        table: Tensor = teacher.model.embedding.table().detach().clone()
        return [(self.model.embedding, table.to(next(self.model.parameters()).device))]


def save_run(
    path: Path, trainer: Trainer, words: list[str], settings: Mapping[str, Any], corpus_checksum: str
) -> None:
    """Write last.pt: the model with the parameters for evaluation, and the state that `restore_run` needs.

    Every process calls this; the first one writes.
    """
    name, keys, *position = np.random.get_state(legacy=True)
    process = {
        "random": {
            "python": random.getstate(),
            "numpy": [name, torch.from_numpy(np.array(keys).astype(np.int64)), *position],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        },
        # On the CPU, so that no process puts tensors on the device of another.
        "states": [tuple(tensor.cpu() for tensor in state) for state in trainer.states],
        "window": trainer.window.cpu(),
    }
    processes = trainer.group.gather(process)
    if not trainer.group.is_first:
        return
    averages = None
    if trainer.averages is not None:
        averages = {"steps": trainer.averages.steps, "parameters": trainer.averages.current()}
    training = {
        "settings": dict(settings),
        "corpus": corpus_checksum,
        "step": trainer.step,
        "epoch": trainer.epoch,
        "position": trainer.position,
        "scores": trainer.scores,
        "optimizer": trainer.optimizer.state_dict(),
        "averages": averages,
        "lengths": trainer.lengths.getstate(),
        "processes": processes,
    }
    with trainer.averages.in_place() if trainer.averages else nullcontext():
        save_model(path, trainer.model, words, settings, training)


def restore_run(path: Path, trainer: Trainer, settings: Mapping[str, Any], corpus_checksum: str) -> None:
    """Restore the state saved by `save_run`, for the same settings, data and processes."""
    content = read_checkpoint(path)
    training = content["training"]
    if training is None:
        raise UserError(f"checkpoint {path}: has a model only; choose another output_dir")
    before, now = dict(training["settings"]), dict(settings)
    for options in (before, now):
        if options.get("embedding_distillation"):  # the file of the teacher may have moved
            options["embedding_distillation"] = {**options["embedding_distillation"], "teacher": None}
    changed = [
        f"{key} was {before.get(key)!r} and is now {now.get(key)!r}"
        for key in sorted({*before, *now} - FREE_TO_CHANGE)
        if before.get(key) != now.get(key)
    ]
    if training["corpus"] != corpus_checksum:
        changed.append("the corpus in 'data' has changed")
    processes, group = training["processes"], trainer.group
    if len(processes) != group.world_size:
        changed.append(f"it had {len(processes)} processes and now has {group.world_size}")
    if changed:
        raise UserError(
            f"{path} belongs to a run with other settings ({'; '.join(changed[:8])}); change them back "
            "to resume, or choose another output_dir"
        )
    load_state(trainer.model, content["model"], path)
    if training["averages"] is not None:  # the model has the means
        trainer.averages = averages = Averages(trainer.parameters)
        averages.steps = training["averages"]["steps"]
        averages.write(training["averages"]["parameters"])
    trainer.optimizer.load_state_dict(training["optimizer"])
    trainer.step, trainer.epoch, trainer.position = (training[key] for key in ("step", "epoch", "position"))
    trainer.scores = list(training["scores"])
    process = processes[group.rank]
    trainer.states = [tuple(part.to(group.device) for part in state) for state in process["states"]]
    trainer.window = process["window"].to(group.device)
    generators = process["random"]
    for generator, state in ((trainer.lengths, training["lengths"]), (random, generators["python"])):
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))
    name, keys, *position = generators["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *position))
    torch.set_rng_state(generators["torch"])
    if generators["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(generators["cuda"])


if __name__ == "__main__":
    from lm.cli import train as command

    sys.exit(command())
