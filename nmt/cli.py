"""The commands of OpenNMT-py with shared embeddings.

See `shared_embeddings.utils.command_line.run` for their errors and exit statuses.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from shared_embeddings.utils import command_line
from shared_embeddings.utils.command_line import RESUME, Parser, error_line, run
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import bytes_on_disk, locked
from shared_embeddings.utils.paths import existing_file, new_path


def _command(
    main: Callable[[Sequence[str]], None], advice: str = "no partial files were left"
) -> Callable[[], int]:
    """Make a command of a function: it applies the patches, and returns the exit status."""

    def patched(arguments: Sequence[str]) -> None:
        from nmt.hooks import apply_patches

        apply_patches()
        main(arguments)

    @functools.wraps(main)
    def command() -> int:
        return run(f"onmt_{main.__name__}", patched, explain=_explain, advice=advice)

    return command


def _explain(error: BaseException) -> str | None:
    """Return the message of a user error, also of a spawned process or a data loader worker, or None."""
    messages = re.findall(r"^[\w.]*(?:User|Option|Storage|Diverged)Error: (.*)$", str(error), re.MULTILINE)
    if messages:
        return str(messages[-1])
    if isinstance(error, (AssertionError, ValueError)):  # what OpenNMT-py raises for options
        return error_line(error)
    return command_line.explain(error)


@functools.partial(_command, advice=RESUME)
def train(arguments: Sequence[str]) -> None:
    """``onmt_train``: train a translation model, or resume its training."""
    import onmt.bin.train
    from onmt.utils.logging import init_logger, logger

    from nmt.options import parse
    from nmt.train import ranks, runs

    opt = parse(onmt.bin.train._get_parser(), arguments)
    start = Path(opt.save_model)
    with locked(start.with_name(f".{start.name}.lock")) if runs.leads(opt) else nullcontext():
        record = runs.begin(opt)
        init_logger(opt.log_file)
        if record is None:
            logger.info(f"{opt.train_from} is the end of its run: nothing to do")
            return
        if opt.seed <= 0:
            opt.seed = random.SystemRandom().randrange(1, 2**31)
            logger.info(f"seed: {opt.seed}")
        ranks.train(opt, record)


@_command
def translate(arguments: Sequence[str]) -> None:
    """``onmt_translate``: translate a file."""
    import onmt.bin.translate

    from nmt.options import parse
    from nmt.translation import translate_file

    translate_file(parse(onmt.bin.translate._get_parser(), arguments))


@_command
def build_vocab(arguments: Sequence[str]) -> None:
    """``onmt_build_vocab``: count the tokens of the training data."""
    import onmt.bin.build_vocab
    import onmt.bin.train

    from nmt.corpora import build_vocabularies
    from nmt.options import option_names, parse

    known = option_names(onmt.bin.train._get_parser())
    opt = parse(onmt.bin.build_vocab._get_parser(), arguments, known)
    build_vocabularies(opt, onmt.bin.build_vocab.build_vocab_main)


@_command
def average_models(arguments: Sequence[str]) -> None:
    """``onmt_average_models``: average the weights of several checkpoints of one model."""
    from nmt.checkpoints import average_checkpoints, save_checkpoint

    parser = Parser("onmt_average_models", description="Average checkpoints of one model")
    add = parser.add_argument
    add("-models", "-m", "--models", nargs="+", type=existing_file, required=True, help="checkpoints")
    add("-output", "-o", "--output", type=new_path, required=True, help="checkpoint to write")
    add("-fp32", "-f", "--fp32", action="store_true", help="store in single precision")
    add("-force", "--force", action="store_true", help="overwrite an existing file")
    opt = parser.parse_args(arguments)
    save_checkpoint(average_checkpoints([*map(str, opt.models)], opt.fp32), opt.output)
    print(
        f"wrote {opt.output}: {bytes_on_disk(opt.output):,} bytes, the mean of {len(opt.models)} checkpoints"
    )


@_command
def release_model(arguments: Sequence[str]) -> None:
    """``onmt_release_model``: keep only what translation needs, or export to CTranslate2."""
    from nmt.checkpoints import save_checkpoint, strip_checkpoint
    from nmt.models import export_ctranslate2

    parser = Parser("onmt_release_model", description="Release a translation model")
    add = parser.add_argument
    add("--model", "-m", "-model", type=existing_file, required=True, help="checkpoint")
    to = "file, or directory for CTranslate2"
    add("--output", "-o", "-output", type=new_path, required=True, help=to)
    add("--format", "-format", choices=["pytorch", "ctranslate2"], default="pytorch")
    kinds = ["int8", "int16", "float16", "int8_float16"]
    add("--quantization", "-q", "-quantization", choices=kinds, help="for CTranslate2")
    add("-force", "--force", action="store_true", help="overwrite existing output")
    opt = parser.parse_args(arguments)
    if opt.format == "pytorch":
        if opt.quantization:
            raise UserError("quantization: needs --format ctranslate2; remove it")
        save_checkpoint(strip_checkpoint(str(opt.model)), opt.output)
    else:
        export_ctranslate2(str(opt.model), str(opt.output), opt.quantization)
    written, stored = bytes_on_disk(opt.output), bytes_on_disk(opt.model)
    ratio = written / stored
    print(f"wrote {opt.output}: {written:,} bytes, {ratio:.2f} times the checkpoint ({stored:,} bytes)")


@_command
def server(arguments: Sequence[str]) -> None:
    """``onmt_server``: serve translations over HTTP."""
    from nmt.server import main

    main(arguments)


# Split text into characters, or join them
characters = functools.partial(run, "onmt_characters", "nmt.headlines:characters_main")
# Build a vocabulary of subwords and characters
character_vocab = functools.partial(run, "onmt_character_vocab", "nmt.headlines:vocabulary_main")
# Keep the best hypothesis for each source
rerank = functools.partial(run, "onmt_rerank", "nmt.headlines:rerank_main")
# Compute ROUGE of headlines or summaries
rouge = functools.partial(run, "onmt_rouge", "nmt.rouge:main")
