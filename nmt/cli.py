"""The commands of OpenNMT-py with shared embeddings.

See `shared_embeddings.utils.command_line.run` for their errors and exit statuses.
"""

from __future__ import annotations

import copy
import functools
import random
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shared_embeddings.utils import command_line
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import bytes_on_disk
from shared_embeddings.utils.interrupts import RESUME
from shared_embeddings.utils.path_options import PathOption

# Prefixes of words that are not in vocabulary files: placeholders of transforms, and vocabulary padding.
NOT_IN_FILES = ("｟", "averyunlikelytoken")
HELPS = Path(__file__).with_name("help")  # written by ``make readme``


def _command(function: Callable[[], None], advice: str = command_line.NO_PARTIAL_FILES) -> Callable[[], None]:
    """Make a command of a function: it applies the patches and reports user errors in one line."""

    def main(arguments: Sequence[str]) -> None:
        from nmt.hooks import apply_patches

        apply_patches()
        function()

    @functools.wraps(function)
    def command() -> None:
        name = f"onmt_{function.__name__}"
        command_line.exit_with(command_line.run(name, main, None, _explain, advice, HELPS))

    return command


def _explain(error: BaseException) -> str | None:
    """Return the message of a user error, also of a spawned process or a data loader worker, or None."""
    text = str(error)
    of_options = isinstance(error, (AssertionError, ValueError))  # what OpenNMT-py raises for options
    found = re.findall(r"^[\w.]*(?:User|Option|Document|Storage)Error: (.*)$", text, re.MULTILINE)
    is_told = of_options or isinstance(error, OSError)
    if not found and is_told and "Traceback (most recent call last)" in text:
        found = re.findall(r"^[\w.]+: (.*)$", text, re.MULTILINE)
    if found:
        return command_line.error_line(UserError(found[-1]))
    return command_line.error_line(error) if of_options else command_line.explain(error)


def _check_training(opt: Namespace) -> dict[str, dict[str, Any]]:
    """Validate the options of a training, and return its corpora; embedding options become mappings."""
    from onmt.utils.parse import ArgumentParser

    from nmt import plan as plans
    from nmt.checkpoints import check_output, checkpoint_errors, peek
    from nmt.corpora import check_targets, read_corpora
    from nmt.length_control import check_positions
    from nmt.options import (
        check_memory,
        check_model_sizes,
        check_optimizer,
        check_training,
        check_transforms,
    )
    from nmt.train.embeddings import (
        check_new_student,
        parse_distillation,
        requested_options,
    )
    from nmt.vocabulary import read_vocabulary

    check_training(opt)
    corpora = read_corpora(opt)
    check_targets(corpora, opt.model_task)
    check_positions(opt)
    check_transforms(opt, corpora)
    check_output("save_model", f"{opt.save_model}_step_1.pt")
    for name in ["src_vocab"] if opt.share_vocab else ["src_vocab", "tgt_vocab"]:
        read_vocabulary(getattr(opt, name) or f"({name} is not set)", 1)
    trained = None
    if opt.train_from:
        checkpoint = peek(opt.train_from)
        with checkpoint_errors(opt.train_from):
            trained = plans.read_plan(requested_options(checkpoint["opt"]))
        if not opt.update_vocab:
            _check_same_words(opt, checkpoint["vocab"])
    for name in plans.OPTION_NAMES:
        setattr(opt, name, plans.parse_settings(name, getattr(opt, name)))
    plan = plans.read_plan(opt)
    sizes = Namespace(**vars(opt))
    ArgumentParser.validate_train_opts(sizes)
    ArgumentParser.update_model_opts(sizes)
    if plan is not None:
        plans.check_combinations(plan, sizes)
    elif trained is not None:
        plans.check_combinations(trained, Namespace(**{**vars(sizes), "share_vocab": True}))
    check_optimizer(opt)
    if not opt.train_from:  # otherwise the checkpoint determines sizes and embedding
        ArgumentParser.validate_model_opts(sizes)
        check_model_sizes(sizes)
        vocabs = _new_vocabularies(opt)
        if plan is not None:
            plans.check_sizes(plan, sizes, vocabs)
        check_memory(sizes, vocabs)
    distillation = parse_distillation(opt.embedding_distillation)
    opt.embedding_distillation = plans.parse_mapping("embedding_distillation", opt.embedding_distillation, "")
    if distillation is not None and not opt.train_from:
        check_new_student(distillation, plan, _new_vocabularies(opt))
    return corpora


def _new_vocabularies(opt: Namespace) -> dict[str, Any]:
    from onmt.inputters import build_vocab
    from onmt.transforms import get_specials, get_transforms_cls
    from onmt.utils.parse import ArgumentParser

    # This check modifies the options.
    prepared = copy.deepcopy(opt)
    ArgumentParser.validate_prepare_opts(prepared)
    specials = get_specials(prepared, get_transforms_cls(prepared._all_transform))
    return build_vocab(prepared, specials)  # type: ignore[no-any-return]


def _check_same_words(opt: Namespace, found: dict[str, Any]) -> None:
    """Check that the vocabulary files have all words of the checkpoint to train from.

    OpenNMT-py uses the checkpoint's vocabulary, so that other words would become ``<unk>``. The files may
    have more words, for example if the model was trimmed.
    """
    vocabs = _new_vocabularies(opt)
    for side in ("src", "tgt"):
        words = [word for word in found.get(side) or () if not word.startswith(NOT_IN_FILES)]
        lacking = [word for word in words if word not in vocabs[side]]
        if lacking:
            raise UserError(
                f"{side}_vocab: lacks {len(lacking)} of the {len(words)} words of the checkpoint "
                f"{opt.train_from}, such as {lacking[0]!r}; use the vocabulary that it was trained with"
            )


@functools.partial(_command, advice=RESUME)
def train() -> None:
    """``onmt_train``: train a translation model, or resume its training."""
    import onmt.bin.train
    from onmt.utils.logging import init_logger, logger

    from nmt.options import TRAIN, parse
    from nmt.train import ranks, runs

    opt = parse(onmt.bin.train._get_parser(), "-config train.yaml", TRAIN)
    corpora = _check_training(opt)
    with runs.locked_run(opt) as lock:
        settings = runs.settings_of(opt, corpora)
        resumes = runs.begin(opt, settings)
        init_logger(opt.log_file)
        if resumes and runs.is_finished(opt):
            logger.info(f"{opt.train_from} is the end of its run: nothing to do")
            return
        if resumes:
            logger.info(f"Resuming the run that saved {opt.train_from}")
        if opt.seed <= 0:
            opt.seed = random.SystemRandom().randrange(1, 2**31)
            logger.info(f"seed: {opt.seed}")
        ranks.train(opt, {"settings": settings}, lock, _explain)


@_command
def translate() -> None:
    """``onmt_translate``: translate a file."""
    import onmt.bin.translate

    from nmt.options import TRANSLATE, check_prefix, check_translation, given_options, parse
    from nmt.transforms import applied
    from nmt.translation import translate_file

    example = "-model model_step_1000.pt -src test.txt -output out.txt"
    opt = parse(onmt.bin.translate._get_parser(), example, TRANSLATE)
    opt.given = given_options(onmt.bin.translate._get_parser())
    check_translation(opt)
    with applied(opt) as description:
        check_prefix(opt)
        if description:
            print(description, file=sys.stderr)
        translate_file(opt, onmt.bin.translate.translate)


@_command
def build_vocab() -> None:
    """``onmt_build_vocab``: count the tokens of the training data."""
    import onmt.bin.build_vocab
    import onmt.bin.train

    from nmt.corpora import build_vocabularies, read_corpora
    from nmt.options import check_counting, check_transforms, parse

    of_training = {
        string.lstrip("-")
        for action in onmt.bin.train._get_parser()._actions
        for string in action.option_strings
    }
    parser, example = onmt.bin.build_vocab._get_parser(), "-config train.yaml -n_sample -1"
    opt = parse(parser, example, known_elsewhere=of_training)
    check_counting(opt)
    corpora = read_corpora(opt)
    check_transforms(opt, corpora)
    build_vocabularies(opt, onmt.bin.build_vocab.build_vocab_main, corpora)


@_command
def average_models() -> None:
    """``onmt_average_models``: average the weights of several checkpoints of one model."""
    from nmt.checkpoints import average_checkpoints, save_checkpoint
    from nmt.options import check_new_model, parse

    parser = command_line.Parser("onmt_average_models", description="Average checkpoints of one model")
    add = parser.add_argument
    add("-models", "-m", "--models", nargs="+", type=PathOption.FILE, required=True, help="checkpoints")
    add("-output", "-o", "--output", type=PathOption.NEW_FILE, required=True, help="checkpoint to write")
    add("-fp32", "-f", "--fp32", action="store_true", help="store in single precision")
    add("-force", "--force", action="store_true", help="overwrite an existing file")
    opt = parse(parser, "-models model_step_900.pt model_step_1000.pt -output averaged.pt")
    models = list(map(str, opt.models))
    check_new_model(models, opt.output, PathOption.NEW_FILE, opt.force)
    save_checkpoint(average_checkpoints(models, opt.fp32), opt.output)


@_command
def release_model() -> None:
    """``onmt_release_model``: keep only what translation needs, or export to CTranslate2."""
    from nmt.checkpoints import save_checkpoint, strip_checkpoint
    from nmt.models import export_ctranslate2
    from nmt.options import check_new_model, parse

    parser = command_line.Parser("onmt_release_model", description="Release a translation model")
    add = parser.add_argument
    add("--model", "-m", "-model", type=PathOption.FILE, required=True, help="checkpoint")
    to = "file, or directory for CTranslate2"
    add("--output", "-o", "-output", type=PathOption.NEW, required=True, help=to)
    add("--format", "-format", choices=["pytorch", "ctranslate2"], default="pytorch")
    kinds = ["int8", "int16", "float16", "int8_float16"]
    add("--quantization", "-q", "-quantization", choices=kinds, help="for CTranslate2")
    add("-force", "--force", action="store_true", help="overwrite existing output")
    opt = parse(parser, "--model model_step_1000.pt --output released.pt")
    model, output = str(opt.model), str(opt.output)
    if opt.format == "pytorch":
        if opt.quantization:
            raise UserError("quantization: needs --format ctranslate2; remove it")
        check_new_model([model], output, PathOption.NEW_FILE, opt.force)
        save_checkpoint(strip_checkpoint(model), output)
        return
    check_new_model([model], output, PathOption.NEW, opt.force)
    export_ctranslate2(model, output, opt.quantization)
    written, stored = bytes_on_disk(Path(output)), bytes_on_disk(Path(model))
    print(
        f"wrote {output}: {written:,} bytes, {written / stored:.2f} times the checkpoint ({stored:,} bytes)"
    )


@_command
def server() -> None:
    """``onmt_server``: serve translations over HTTP."""
    from nmt.options import parse
    from nmt.server import make_parser, serve

    serve(parse(make_parser(), "--model_config available_models/conf.json"))


def characters() -> None:
    """``onmt_characters``: split text into characters, or join them."""
    command_line.run_module("onmt_characters", "nmt.headlines:characters_main", HELPS)


def character_vocab() -> None:
    """``onmt_character_vocab``: build a vocabulary of subwords and characters."""
    command_line.run_module("onmt_character_vocab", "nmt.headlines:vocabulary_main", HELPS)


def rerank() -> None:
    """``onmt_rerank``: keep the best hypothesis for each source."""
    command_line.run_module("onmt_rerank", "nmt.headlines:rerank_main", HELPS)


def rouge() -> None:
    """``onmt_rouge``: compute ROUGE of headlines or summaries."""
    command_line.run_module("onmt_rouge", "nmt.rouge:main", HELPS)
