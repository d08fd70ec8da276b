"""OpenNMT-py's commands, with shared embeddings: the same names, options and files.

A mistake of the user gives one line on stderr and exit code 2; set ``NMT_TRACEBACK=1`` to see where it was
found.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import functools
import glob
import os
import random
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

import shared_embeddings as se
from nmt.errors import UserError
from shared_embeddings.command_line import USER_ERROR, complaint

# How words begin that are in no vocabulary file: transforms put them in, or they fill up the last multiple.
NOT_IN_FILES = ("｟", "averyunlikelytoken")
USER_ERRORS = (UserError, se.OptionError, OSError, AssertionError, ValueError, yaml.YAMLError)


def _command(function: Callable[[], None]) -> Callable[[], None]:
    """Make a command of a function: seams in place, mistakes of the user as one line and exit code 2."""

    @functools.wraps(function)
    def run() -> None:
        name = Path(sys.argv[0]).name
        try:
            from nmt import upstream

            upstream.install()
            function()
        except KeyboardInterrupt:
            print(f"{name}: interrupted", file=sys.stderr)
            sys.exit(130)
        except ImportError as error:
            _fail(name, UserError(f"{error}; install what an option needs, or leave that option out"))
        except Exception as error:
            told = _told_by_another_process(error)
            if told is None and not isinstance(error, USER_ERRORS):
                raise
            _fail(name, told or error)

    return run


def _told_by_another_process(error: Exception) -> UserError | None:
    """Return the mistake of the user that a spawned process, or a worker of a data loader, hands over as the
    text of a traceback, which ends with what was raised first. A worker's has the type of that.
    """
    text = str(error)
    found = re.findall(r"^(?:nmt\.errors\.UserError|[\w.]*OptionError): (.*)$", text, re.MULTILINE)
    if not found and isinstance(error, USER_ERRORS) and "Traceback (most recent call last)" in text:
        found = re.findall(r"^[\w.]+: (.*)$", text, re.MULTILINE)
    return UserError(found[-1]) if found else None


def _fail(name: str, error: BaseException) -> None:
    """Print one line and exit with code 2."""
    if os.environ.get("NMT_TRACEBACK"):
        raise error
    print(f"{name}: {complaint(error)}", file=sys.stderr)
    sys.exit(USER_ERROR)


def _parse(parser: Any, known_elsewhere: set[str] = frozenset()) -> Namespace:  # type: ignore[assignment]
    """Parse the command line and the configuration file; unknown options are refused by name.

    Args:
        parser: of OpenNMT.
        known_elsewhere: options of other commands, which one configuration file for all of them may hold.

    Raises:
        UserError: names the unknown options, and the known one that looks most alike.
    """

    def refuse(message: str) -> None:
        raise UserError(message)

    parser.error = refuse
    opt, rest = parser.parse_known_args()
    known = {string.lstrip("-") for action in parser._actions for string in action.option_strings}
    unknown = [
        text.lstrip("-").split("=")[0] for text in rest if text.startswith("-") and not _is_number(text)
    ]
    for name in unknown:
        if name not in known_elsewhere:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}?" if close else "; see --help"
            raise UserError(f"unknown option {name}{hint}")
    if rest and not unknown:
        raise UserError(f"unexpected argument {rest[0]!r}; see --help")
    return opt  # type: ignore[no-any-return]


def _is_number(text: str) -> bool:
    """Say whether a piece of a command line is a negative number."""
    return re.fullmatch(r"-\d+(\.\d+)?", text) is not None


def _check_data(opt: Namespace) -> dict[str, dict[str, Any]]:
    """Check the corpora that the option ``data`` names; returns them.

    Raises:
        UserError: see `nmt.data.check_corpora`.
    """
    from nmt.data import check_corpora
    from nmt.plan import parse_text

    corpora = parse_text("data", opt.data, "{corpus: {path_src: train.en, path_tgt: train.de}}")
    check_corpora(corpora)
    return corpora  # type: ignore[no-any-return]


def _check_training(opt: Namespace) -> None:
    """Check everything that can be known before training starts; embedding options become mappings.

    Raises:
        UserError: names the option, what is wrong with it, and what to do.
    """
    from onmt.utils.parse import ArgumentParser

    from nmt import checks, distillation
    from nmt.data import check_single_texts, check_targets
    from nmt.files import check_output, read_checkpoint
    from nmt.plan import OPTION_NAMES, check_combinations, check_sizes, parse_settings, read_plan
    from nmt.summarization.length_control import check_positions
    from nmt.vocabulary import read_vocabulary

    corpora = _check_data(opt)
    if opt.model_task == "seq2seq":
        check_targets(corpora)
    else:
        check_single_texts(corpora)
    check_positions(opt)
    checks.check_copying(opt)
    checks.check_generator(opt)
    checks.check_training_numbers(opt)
    checks.check_subword_files(opt)
    checks.check_processes(opt)
    check_output("save_model", f"{opt.save_model}_step_1.pt")
    for name in ["src_vocab"] if opt.share_vocab else ["src_vocab", "tgt_vocab"]:
        read_vocabulary(getattr(opt, name) or f"({name} is not set)", 1)
    if opt.train_from:
        checkpoint = read_checkpoint(opt.train_from)
        if not opt.update_vocab:
            _check_same_words(opt, checkpoint["vocab"])
    for name in OPTION_NAMES:
        setattr(opt, name, parse_settings(name, getattr(opt, name)))
    plan = read_plan(opt)
    if plan is not None:
        sizes = Namespace(**vars(opt))
        ArgumentParser.update_model_opts(sizes)
        check_combinations(plan, sizes)
        if not opt.train_from:  # else the checkpoint's own embedding is used
            check_sizes(plan, sizes, _new_vocabularies(opt))
    opt.embedding_distillation = distillation.parse_mapping(opt.embedding_distillation)
    asked = distillation.parse_distillation(opt.embedding_distillation)
    if asked is not None and not opt.train_from:
        distillation.check_new(asked, plan, _new_vocabularies(opt))


def _new_vocabularies(opt: Namespace) -> dict[str, Any]:
    """The vocabularies of a model that is trained from scratch, as upstream builds them a little later."""
    from onmt.inputters import build_vocab
    from onmt.transforms import get_specials, get_transforms_cls
    from onmt.utils.parse import ArgumentParser

    # Upstream's check writes what it has read into the options.
    prepared = copy.deepcopy(opt)
    ArgumentParser.validate_prepare_opts(prepared)
    specials = get_specials(prepared, get_transforms_cls(prepared._all_transform))
    return build_vocab(prepared, specials)  # type: ignore[no-any-return]


def _check_same_words(opt: Namespace, found: dict[str, Any]) -> None:
    """Refuse vocabulary files that lack words of the checkpoint that training goes on from.

    Upstream takes the checkpoint's own words, so that texts of another vocabulary would read ``<unk>`` only.
    The files may hold more words: those of a model that was trimmed, for instance.

    Raises:
        UserError: names a side, and a word of the checkpoint that the files lack.
    """
    vocabs = _new_vocabularies(opt)
    for side in ("src", "tgt"):
        words = [word for word in found.get(side) or () if not word.startswith(NOT_IN_FILES)]
        lacking = [word for word in words if word not in vocabs[side]]
        if lacking:
            raise UserError(
                f"{side}_vocab: lacks {len(lacking)} of the {len(words)} words of the checkpoint "
                f"{opt.train_from}, such as {lacking[0]!r}; give the vocabulary that it was trained with"
            )


@_command
def train() -> None:
    """``onmt_train``: train a translation model."""
    import onmt.bin.train
    from onmt.utils.logging import logger

    from nmt.files import clear_remains

    opt = _parse(onmt.bin.train._get_parser())
    _check_training(opt)
    clear_remains(opt.save_model)
    if opt.seed <= 0:
        opt.seed = random.SystemRandom().randrange(1, 2**31)
        logger.info(f"seed: {opt.seed}")
    onmt.bin.train.train(opt)


@_command
def translate() -> None:
    """``onmt_translate``: translate a file."""
    import onmt.bin.translate

    from nmt.checks import TRANSLATION, check_numbers, check_subword_files
    from nmt.translation import translate_file

    opt = _parse(onmt.bin.translate._get_parser())
    check_numbers(opt, TRANSLATION)
    check_subword_files(opt)
    translate_file(opt, onmt.bin.translate.translate)


@_command
def build_vocab() -> None:
    """``onmt_build_vocab``: count the tokens of the training data; the files appear when they are
    complete.
    """
    import onmt.bin.build_vocab
    import onmt.bin.train

    from nmt.checks import check_subword_files
    from nmt.files import check_output

    of_training = {
        string.lstrip("-")
        for action in onmt.bin.train._get_parser()._actions
        for string in action.option_strings
    }
    opt = _parse(onmt.bin.build_vocab._get_parser(), known_elsewhere=of_training)
    _check_data(opt)
    check_subword_files(opt)
    sides = ["src_vocab"] if opt.share_vocab else ["src_vocab", "tgt_vocab"]
    for side in sides:
        path = getattr(opt, side)
        if not path:
            raise UserError(f"{side}: is not set; name the file to write")
        check_output(side, path)
        if os.path.exists(path) and not opt.overwrite:
            raise UserError(f"{side}: {path} is there already; add -overwrite, or name another file")
    wanted = {side: getattr(opt, side) for side in sides}
    if len(set(wanted.values())) < len(sides):
        raise UserError(
            f"tgt_vocab: {opt.tgt_vocab} is the file of src_vocab, too; name another one, or set "
            "share_vocab: true"
        )
    fresh = {side: f"{path}.incomplete-{os.getpid()}" for side, path in wanted.items()}
    for side, path in fresh.items():
        setattr(opt, side, path)
    try:
        onmt.bin.build_vocab.build_vocab_main(opt)
        for side, path in fresh.items():
            if not os.path.getsize(path):
                raise UserError(f"{side}: would be empty; data has no pair with text on both sides")
        for side, path in fresh.items():
            for file in Path(path).parent.glob(glob.escape(Path(path).name) + "*"):
                file.replace(str(file).replace(path, wanted[side]))
    finally:
        for path in fresh.values():
            Path(path).unlink(missing_ok=True)


@_command
def average_models() -> None:
    """``onmt_average_models``: average the weights of several checkpoints of one model."""
    from nmt.checkpoint import average_checkpoints
    from nmt.files import check_output, save_checkpoint

    parser = argparse.ArgumentParser(description="Average the weights of several checkpoints of one model")
    parser.add_argument("-models", "-m", "--models", nargs="+", required=True, help="checkpoints")
    parser.add_argument("-output", "-o", "--output", required=True, help="checkpoint to write")
    parser.add_argument("-fp32", "-f", "--fp32", action="store_true", help="store in single precision")
    opt = _parse(parser)
    check_output("output", opt.output)
    save_checkpoint(average_checkpoints(opt.models, opt.fp32), opt.output)


@_command
def release_model() -> None:
    """``onmt_release_model``: keep what translation needs only, or export to CTranslate2."""
    from nmt.checkpoint import strip_checkpoint
    from nmt.export import export_ctranslate2
    from nmt.files import check_output, save_checkpoint

    parser = argparse.ArgumentParser(description="Release a translation model")
    parser.add_argument("--model", "-m", "-model", required=True, help="checkpoint")
    parser.add_argument("--output", "-o", "-output", required=True, help="file, or directory for CTranslate2")
    parser.add_argument("--format", "-format", choices=["pytorch", "ctranslate2"], default="pytorch")
    parser.add_argument(
        "--quantization",
        "-q",
        "-quantization",
        choices=["int8", "int16", "float16", "int8_float16"],
        help="for CTranslate2",
    )
    opt = _parse(parser)
    if opt.format == "pytorch":
        if opt.quantization:
            raise UserError("quantization: has an effect with --format ctranslate2 only; remove it")
        check_output("output", opt.output)
        save_checkpoint(strip_checkpoint(opt.model), opt.output)
    else:
        export_ctranslate2(opt.model, opt.output, opt.quantization)


@_command
def server() -> None:
    """``onmt_server``: serve translations over HTTP."""
    import onmt.bin.server

    from nmt.checks import check_server_config

    opt = _parse(onmt.bin.server._get_parser())
    check_server_config(opt.model_config)
    onmt.bin.server.start(opt.model_config, opt.url_root, opt.ip, opt.port, opt.debug)
