"""The options of shared embeddings in the commands of OpenNMT-py, which checks its own options."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Collection
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
    length_control.add_model_options(parser)


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


def option_names(parser: Any) -> set[str]:
    """Return the names of all options of a parser, without hyphens."""
    return {string.lstrip("-") for action in parser._actions for string in action.option_strings}


def parse(parser: Any, known_elsewhere: Collection[str] = ()) -> Namespace:
    """Parse the command line and the configuration file of a command; options of embeddings become mappings.

    OpenNMT-py ignores unknown options, so that a misspelled ``embedding`` would train another model.
    `known_elsewhere` are options of other commands, which a shared configuration file may contain.
    """

    def fail(message: str) -> NoReturn:
        raise UserError(message)

    parser.error = fail
    opt, rest = parser.parse_known_args()
    for word in rest:
        name = word.lstrip("-").partition("=")[0]
        if re.match(r"-+[a-zA-Z]", word) and name not in known_elsewhere:
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
