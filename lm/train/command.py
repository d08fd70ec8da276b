"""The command ``lm_train``: trains a language model, or resumes its training."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml

from lm import models
from lm.checkpoint import load_state, peek, read_checkpoint, save_model
from lm.data.corpus import load_corpus
from lm.models.awd_lstm import cpu_has_bf16
from lm.models.interface import describe_parameters
from lm.train.config import Configuration, TrainingOptions, from_arguments, help_text, parse
from lm.train.distillation import prepare_student
from lm.train.distributed import Group, joined, local_rank
from lm.train.loop import Trainer
from lm.train.progress import NoReport, Report
from lm.train.train_state import restore_run, save_run
from shared_embeddings.compress.straight_through import quantize_in_training
from shared_embeddings.utils.command_line import USER_ERROR
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import locked, refuse_link, remove_leftovers, write_text
from shared_embeddings.utils.interrupts import RESUME, Interrupted
from shared_embeddings.utils.options import OptionError
from shared_embeddings.utils.results import WandbWriter

LAST, BEST, CONFIG = "last.pt", "best.pt", "config.yaml"


def main(arguments: Sequence[str]) -> None:
    """Run the command.

    Raises:
        UserError: the settings or the data are invalid, or training diverged.
        Interrupted: a signal stopped training; the same command resumes it.
    """
    if {"-h", "-help", "--help"} & set(arguments):
        print(help_text())
        return
    try:
        config = parse(from_arguments(arguments))
        with joined(config.training.device) as group:
            train(config, group)
    except (UserError, OptionError):
        # All processes have the same error: one of them reports it.
        if local_rank():
            sys.exit(USER_ERROR)
        raise
    except Interrupted as error:
        if local_rank():
            sys.exit(error.status)
        raise


def train(config: Configuration, group: Group) -> None:
    """Train in this process, from scratch or from last.pt in the output folder.

    Raises:
        UserError, Interrupted: see `main`.
        BlockingIOError: another process trains in this folder.
    """
    folder = Path(config.training.output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir {folder}: is a file; choose another path")
    with _working_in(folder) if group.is_first else nullcontext():
        _train(config, group)


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a run, and remove leftovers of killed processes before and after."""
    files = [folder / name for name in (LAST, BEST, CONFIG)]
    with locked(folder / ".lock"):
        remove_leftovers(*files)
        try:
            yield
        finally:
            remove_leftovers(*files)


def _train(config: Configuration, group: Group) -> None:
    """Build the model or restore the run, then train; see `train`."""
    options, settings = config.training, config.flat()
    if options.wandb is not None:
        require("wandb")  # before the long work
    corpus = load_corpus(Path(options.data))
    words, checksum = corpus.vocabulary.words, corpus.description["checksum"]
    last = Path(options.output_dir) / LAST
    refuse_link(last)  # the model of another run would become this one
    embedding = options.embedding
    if options.embedding_distillation is not None and last.exists():
        embedding = peek(last)["config"]["embedding"]  # including options chosen by the fit
    torch.manual_seed(options.seed)
    model = models.build(options.model, words, embedding, config.model_options()).to(group.device)
    teacher_losses, lines = prepare_student(model, options, corpus.vocabulary, group, not last.exists())
    if options.init_from is not None and not last.exists():
        _init_from(Path(options.init_from), model, words)
    torch.manual_seed(options.seed + group.rank)  # dropout differs between processes
    trainer = Trainer(config, model.train(), corpus.train, corpus.valid, group, *teacher_losses)
    if options.embedding_quantization is not None:
        counts = torch.tensor(corpus.vocabulary.counts, device=group.device)
        quantize_in_training(
            model.embedding, options.embedding_quantization, counts, lambda: trainer.step, options.seed
        )
    if last.exists():
        restore_run(last, trainer, settings, checksum)
        _check_best(last.with_name(BEST), trainer.scores)
    lines = [*lines, *_notes(options, group), describe_parameters(model), _start_line(trainer, len(words))]
    _run(trainer, lines, words, settings, checksum)


def _notes(options: TrainingOptions, group: Group) -> Iterator[str]:
    """Notes about settings that do not suit this machine."""
    if options.precision == "bf16" and group.device.type == "cpu" and not cpu_has_bf16():
        yield (
            "note: this CPU has no bfloat16 instructions: training is about ten times slower than in fp32; "
            "set precision: fp32"
        )


def _run(
    trainer: Trainer, lines: Sequence[str], words: list[str], settings: dict[str, Any], checksum: str
) -> None:
    """Run the training loop and write checkpoints and logs.

    Raises:
        UserError, Interrupted: see `main`.
    """
    folder, is_first = Path(trainer.options.output_dir), trainer.group.is_first
    last, best = folder / LAST, folder / BEST
    if is_first:
        write_text(folder / CONFIG, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    report = _build_report(folder, trainer, settings) if is_first else NoReport()
    for line in lines:
        report.line(line)

    def save() -> None:
        save_run(last, trainer, words, settings, checksum)

    def save_best() -> None:
        if is_first:
            save_model(best, trainer.model, words, settings, None)

    try:
        trainer.run(report, save, save_best)
        report.line(f"finished after step {trainer.step}; the best model is {best}")
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(
            f"output_dir {folder}: cannot be written ({error.strerror or error}); earlier checkpoints are "
            f"unchanged; make room on the disk and {RESUME}"
        ) from error
    finally:
        report.close()


def _check_best(path: Path, scores: Sequence[float]) -> None:
    """Check the best model of a resumed run with these validation losses.

    Raises:
        UserError: the run has saved it, and it is missing or damaged.
    """
    if min(scores, default=math.inf) == math.inf:
        return
    try:
        read_checkpoint(path)
    except UserError as error:
        raise UserError(
            f"{error}; the best model of this run is lost: restore the file, or train again with another "
            "output_dir"
        ) from error


def _build_report(folder: Path, trainer: Trainer, settings: dict[str, Any]) -> Report:
    """The report of the first process."""
    project = trainer.options.wandb
    writers = [] if project is None else [WandbWriter(project, folder, settings)]
    return Report(folder, trainer.step, trainer.total_tokens, trainer.tokens, writers)


def _init_from(path: Path, model: models.LanguageModel, words: Sequence[str]) -> None:
    """Initialize a model with the parameters of a checkpoint.

    Raises:
        UserError: the checkpoint cannot be read, or has other words or another model.
    """
    content = read_checkpoint(path)
    if content["words"] != list(words):
        raise UserError(
            f"init_from: the vocabulary of {path} ({len(content['words'])} words) is not that of the data "
            f"({len(words)} words); use the data that it was trained with"
        )
    load_state(model, content["model"], path)


def _start_line(trainer: Trainer, words: int) -> str:
    """One line about the start of training."""
    tokens = (trainer.text_columns.length - 1) * trainer.options.batch_size * trainer.group.world_size
    where = f"resumes after step {trainer.step}" if trainer.step else "starts"
    place = f"processes: {trainer.group.world_size}, on {trainer.group.device.type}"
    return f"Training {where}: {tokens:,} tokens per epoch, {words:,} words, {place}"


if __name__ == "__main__":
    from lm.cli import train as command

    command()
