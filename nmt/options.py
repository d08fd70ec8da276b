"""The options of shared embeddings in the commands of OpenNMT-py, which checks its own options."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import onmt.opts

from nmt import length_control
from nmt.fixes import wrap
from nmt.plan import OPTION_NAMES
from nmt.train.runs import CHOICES
from shared_embeddings.compress import distillation
from shared_embeddings.registry import EXAMPLE, parse_embedding
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import check_known
from shared_embeddings.utils.reading import parse_yaml


@wrap("model_opts", onmt.opts)
def add_model_options(original: Any, parser: Any) -> None:
    """Add the options of shared embeddings, distillation and length control to OpenNMT-py's parser."""
    original(parser)
    add = parser.add_argument_group("Shared embeddings").add_argument
    uses = {
        "embedding": "Embedding of source, target and (with share_decoder_embeddings) output, a mapping",
        "src_embedding": "Embedding of the source if different",
        "tgt_embedding": "Embedding of the target if different",
        "output_embedding": "Embedding of a separate output layer (without share_decoder_embeddings)",
    }
    for name, use in uses.items():
        text = f"{use}, such as '{EXAMPLE}'; `shared-embeddings methods` lists them all"
        add(f"--{name}", f"-{name}", default=None, metavar="MAPPING", help=text)
    name = distillation.OPTION
    text = f"Start from a trained model and fit the embedding to its table: '{distillation.EXAMPLE}'"
    add(f"--{name}", f"-{name}", default=None, metavar="MAPPING", help=text)
    name = length_control.OPTION
    text = (
        "Positional encodings of the decoder, which are summed: pe (sinusoids), ldpe (length difference), "
        "lrpe (length ratio); ldpe and lrpe require a desired length in translation"
    )
    add = parser.add_argument_group("Length control").add_argument
    add(f"--{name}", f"-{name}", nargs="+", choices=sorted(length_control.ANGLES), default=None, help=text)


@wrap("_add_train_general_opts", onmt.opts)
def add_training_options(original: Any, parser: Any) -> None:
    """Add the options of mixed precision, logging and existing runs to OpenNMT-py's parser."""
    original(parser)
    add = parser.add_argument_group("Training of shared embeddings").add_argument
    text = "Run matrix products in bfloat16; parameters, reductions and optimizer stay in float32"
    add("--autocast", "-autocast", choices=["none", "bf16"], default="none", help=text)
    text = "Project of Weights & Biases that gets what TensorBoard gets"
    add("--wandb", "-wandb", default=None, metavar="PROJECT", help=text)
    text = (
        "If save_model already has a run: auto resumes it if its settings are the same, never fails, "
        "overwrite deletes its checkpoints and starts over"
    )
    add("--resume", "-resume", choices=CHOICES, default="auto", help=text)


@wrap("_add_vocab_opts", onmt.opts)
def add_vocabulary_options(original: Any, parser: Any, build_vocab_only: bool = False) -> None:
    """Give vocabularies all words of their files unless limited; ``onmt_build_vocab`` limits the files."""
    original(parser, build_vocab_only)
    add = parser.add_argument_group("Limits of vocabularies").add_argument
    for side in ("src", "tgt") if build_vocab_only else ():
        add(f"--{side}_vocab_size", f"-{side}_vocab_size", type=int)
        text = f"Discard {side} words with lower frequency"
        add(f"--{side}_words_min_frequency", f"-{side}_words_min_frequency", type=int, default=0, help=text)
    if build_vocab_only:
        text = "Fill the vocabulary with unused words to a multiple of this size"
        add("--vocab_size_multiple", "-vocab_size_multiple", type=int, default=1, help=text)
    for action in parser._actions:
        if action.dest in ("src_vocab_size", "tgt_vocab_size"):
            action.default = 0
            action.help = "Maximum size of the vocabulary, including special tokens (0: all words)"


def option_names(parser: Any) -> set[str]:
    """Return the names of all options of a parser, without hyphens."""
    return {string.lstrip("-") for action in parser._actions for string in action.option_strings}


def parse(parser: Any, arguments: Sequence[str], known_elsewhere: Collection[str] = ()) -> Namespace:
    """Parse the command line and the configuration file of a command; options of embeddings become mappings.

    OpenNMT-py ignores unknown options, so that a misspelled ``embedding`` would train another model.
    `known_elsewhere` are options of other commands, which only a shared configuration file may contain.
    """

    def fail(message: str) -> NoReturn:
        raise UserError(message)

    parser.error = fail
    opt, rest = parser.parse_known_args(arguments)
    for word in rest:
        name = word.lstrip("-").partition("=")[0]
        if re.match(r"-+[a-zA-Z]", word) and (word in arguments or name not in known_elsewhere):
            check_known("option", name, option_names(parser))
    examples = {**dict.fromkeys(OPTION_NAMES, EXAMPLE), distillation.OPTION: distillation.EXAMPLE}
    for name, text in examples.items():
        if getattr(opt, name, None) is not None:
            settings = parse_mapping(name, getattr(opt, name), text)
            setattr(opt, name, settings)
            if name in OPTION_NAMES:
                parse_embedding(name, settings)
    return opt  # type: ignore[no-any-return]


def parse_mapping(name: str, value: Any, example: str) -> dict[str, Any] | None:
    """Parse an option that is a mapping or its text in YAML; None if it is not set."""
    if isinstance(value, str):
        try:
            value = parse_yaml(value, name)
        except UserError as error:
            raise UserError(f"{error}; write it like {example}") from error
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{name}: {value!r} is not a mapping; write it like {example}")
    return _with_numbers(value)  # type: ignore[no-any-return]


def _with_numbers(value: Any) -> Any:
    """Convert texts such as 1e-3 to numbers, which the YAML reader of configurations does not."""
    if isinstance(value, dict):
        return {key: _with_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+", value)
    return float(value) if is_number else value
