"""The command ``lm_train``: train a language model, or go on where its run stopped."""

from __future__ import annotations

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
from lm.models.parameters import describe_parameters
from lm.train.config import Configuration, parse
from lm.train.config_help import help_text
from lm.train.distillation import prepare_student
from lm.train.distributed import Group, joined, local_rank
from lm.train.loop import Trainer
from lm.train.progress import Report, Silence
from lm.train.resuming import restore_run, save_run
from lm.yaml_input import from_arguments
from shared_embeddings.errors import UserError
from shared_embeddings.options import OptionError
from shared_embeddings.utils.command_line import USER_ERROR
from shared_embeddings.utils.files import locked, remove, remove_leftovers, write_text
from shared_embeddings.utils.interrupts import RESUME, Interrupted

LAST, BEST, CONFIG = "last.pt", "best.pt", "config.yaml"


def main(arguments: Sequence[str]) -> None:
    """Run the command.

    Raises:
        UserError: a mistake in the settings or the data, or training that diverged.
        Interrupted: training was asked to stop; the same command resumes.
    """
    if {"-h", "-help", "--help"} & set(arguments):
        print(help_text())
        return
    try:
        config = parse(from_arguments(arguments))
        with joined(config.training.device) as group:
            train(config, group)
    except (UserError, OptionError):
        # The processes of a machine make the same mistake: one of them says so.
        if local_rank():
            sys.exit(USER_ERROR)
        raise
    except Interrupted as error:
        if local_rank():
            sys.exit(error.status)
        raise


def train(config: Configuration, group: Group) -> None:
    """Train in this process, from the beginning or from last.pt in the folder of the run.

    Raises:
        UserError, Interrupted: see `main`.
        BlockingIOError: another training writes into that folder.
    """
    folder = Path(config.training.output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir {folder}: is a file, but it must be a folder; give another path")
    with _working_in(folder) if group.is_first else nullcontext():
        _train(config, group)


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a run, and clear away at both ends what killed processes have left.

    A folder that was made for the lock goes again when nothing else comes into it.
    """
    files, lock = [folder / name for name in (LAST, BEST, CONFIG)], folder / ".lock"
    is_new = not folder.exists()
    with locked(lock):
        remove_leftovers(*files)
        try:
            yield
        finally:
            remove_leftovers(*files)
            if is_new and list(folder.iterdir()) == [lock]:
                remove(folder)


def _train(config: Configuration, group: Group) -> None:
    """Build the model or restore the run, and train it; see `train`."""
    options, settings = config.training, config.flat()
    corpus = load_corpus(Path(options.data))
    words, checksum = corpus.vocabulary.words, corpus.description["checksum"]
    last = Path(options.output_dir) / LAST
    embedding = options.embedding
    if options.embedding_distillation is not None and last.exists():
        embedding = peek(last)["config"]["embedding"]  # with the options that the fit has chosen
    torch.manual_seed(options.seed)
    model = models.build(options.model, words, embedding, config.model_options()).to(group.device)
    reconstruction, lines = prepare_student(model, options, corpus.vocabulary, group, not last.exists())
    if options.init_from is not None and not last.exists():
        _start_from(Path(options.init_from), model, words)
    torch.manual_seed(options.seed + group.rank)  # dropout differs between processes
    trainer = Trainer(config, model.train(), corpus.train, corpus.valid, group, reconstruction)
    if last.exists():
        restore_run(last, trainer, settings, checksum)
    lines = [*lines, describe_parameters(model), _beginning(trainer, len(words))]
    _run(trainer, lines, words, settings, checksum)


def _run(
    trainer: Trainer, lines: Sequence[str], words: list[str], settings: dict[str, Any], checksum: str
) -> None:
    """Train to the end, and write what comes of it into the folder of the run.

    Raises:
        UserError, Interrupted: see `main`.
    """
    folder, is_first = Path(trainer.options.output_dir), trainer.group.is_first
    last, best = folder / LAST, folder / BEST
    if is_first:
        write_text(folder / CONFIG, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    report = Report(folder, trainer.step, trainer.total_tokens, trainer.tokens) if is_first else Silence()
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
            f"output_dir {folder}: cannot be written ({error.strerror or error}); what was saved before is "
            f"unchanged; make room on the disk and {RESUME}"
        ) from error
    finally:
        report.close()


def _start_from(path: Path, model: models.LanguageModel, words: Sequence[str]) -> None:
    """Give a new model the parameters of a checkpoint.

    Raises:
        UserError: it cannot be read, has other words, or is of another model.
    """
    content = read_checkpoint(path)
    if content["words"] != list(words):
        raise UserError(
            f"init_from: the vocabulary of {path} ({len(content['words'])} words) is not that of the data "
            f"({len(words)} words); use the data that it was trained with"
        )
    load_state(model, content["model"], path)


def _beginning(trainer: Trainer, words: int) -> str:
    """One line about where training begins."""
    tokens = (trainer.stream.length - 1) * trainer.options.batch_size * trainer.group.world_size
    where = f"goes on after step {trainer.step}" if trainer.step else "begins"
    place = f"processes: {trainer.group.world_size}, on {trainer.group.device.type}"
    return f"Training {where}: {tokens:,} tokens per epoch, {words:,} words, {place}"


if __name__ == "__main__":
    from lm.cli import train as command

    command()
