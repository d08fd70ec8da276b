"""The command ``lm_train``: trains a language model, or resumes its training."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml

from lm import models
from lm.checkpoint import load_state, peek, read_checkpoint, save_model
from lm.data.corpus import load_corpus
from lm.models.awd_lstm import cpu_has_bf16
from lm.train.config import Configuration, from_arguments, help_text, parse
from lm.train.distillation import prepare_student
from lm.train.distributed import Group, joined, local_rank
from lm.train.loop import Report, Trainer
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
    files = [folder / name for name in (LAST, BEST, CONFIG)] if group.is_first else []
    with locked(folder / ".lock") if group.is_first else nullcontext():
        remove_leftovers(*files)  # of killed processes
        try:
            _train(config, group)
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
    is_new = not last.exists()
    embedding = options.embedding
    if options.embedding_distillation is not None and not is_new:
        embedding = peek(last)["config"]["embedding"]  # including options chosen by the fit
    torch.manual_seed(options.seed)
    model = models.build(options.model, words, embedding, config.model_options()).to(group.device)
    teacher_losses, lines = prepare_student(model, options, corpus.vocabulary, group, is_new)
    if options.init_from is not None and is_new:
        start = read_checkpoint(Path(options.init_from))
        if start["words"] != words:
            raise UserError(
                f"init_from: the vocabulary of {options.init_from} ({len(start['words'])} words) is not that "
                f"of the data ({len(words)} words); use the data that it was trained with"
            )
        load_state(model, start["model"], Path(options.init_from))
    torch.manual_seed(options.seed + group.rank)  # dropout differs between processes
    trainer = Trainer(config, model.train(), corpus.train, corpus.valid, group, *teacher_losses)
    if options.embedding_quantization is not None:
        counts = torch.tensor(corpus.vocabulary.counts, device=group.device)
        quantize_in_training(
            model.embedding, options.embedding_quantization, counts, lambda: trainer.step, options.seed
        )
    if not is_new:
        restore_run(last, trainer, settings, checksum)
        _check_best(last.with_name(BEST), trainer.scores)
    if options.precision == "bf16" and group.device.type == "cpu" and not cpu_has_bf16():
        lines.append(
            "note: this CPU has no bfloat16 instructions: training is about ten times slower than in fp32; "
            "set precision: fp32"
        )
    _run(trainer, [*lines, models.describe_parameters(model)], words, settings, checksum)


def _check_best(path: Path, scores: Sequence[float]) -> None:
    """Check the best model of a resumed run with these validation losses."""
    if min(scores, default=math.inf) == math.inf:
        return
    try:
        read_checkpoint(path)
    except UserError as error:
        raise UserError(
            f"{error}; the best model of this run is lost: restore the file, or train again with another "
            "output_dir"
        ) from error


def _run(
    trainer: Trainer, lines: Sequence[str], words: list[str], settings: dict[str, Any], checksum: str
) -> None:
    """Run the training loop and write checkpoints and logs, whose first lines are given."""
    group, options = trainer.group, trainer.options
    folder = Path(options.output_dir)
    last, best = folder / LAST, folder / BEST
    report = Report()
    if group.is_first:
        write_text(folder / CONFIG, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
        writers = [] if options.wandb is None else [WandbWriter(options.wandb, folder, settings)]
        report = Report(folder, trainer.step, trainer.total_tokens, trainer.tokens, writers)
    tokens = (trainer.text_columns.length - 1) * options.batch_size * group.world_size
    where = f"resumes after step {trainer.step}" if trainer.step else "starts"
    place = f"processes: {group.world_size}, on {group.device.type}"
    start = f"Training {where}: {tokens:,} tokens per epoch, {len(words):,} words, {place}"
    for line in (*lines, start):
        report.line(line)

    def save() -> None:
        save_run(last, trainer, words, settings, checksum)

    def save_best() -> None:
        if group.is_first:
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


if __name__ == "__main__":
    from lm.cli import train as command

    command()
