"""Options that `nmt.upstream` adds to those of OpenNMT."""

from __future__ import annotations

from typing import Any

from nmt import distillation
from nmt.plan import EXAMPLE, OPTION_NAMES
from nmt.summarization import length_control


def with_embedding_options(original: Any) -> Any:
    """Add the options of shared embeddings, their distillation and length control to those of a model."""

    def model_opts(parser: Any) -> None:
        original(parser)
        group = parser.add_argument_group("Shared embeddings")
        help_texts = {
            "embedding": "Embedding of source, target and (with share_decoder_embeddings) output, as "
            "a mapping",
            "src_embedding": "Embedding of the source, where it differs",
            "tgt_embedding": "Embedding of the target, where it differs",
            "output_embedding": "Embedding of an output layer of its own (without share_decoder_embeddings)",
        }
        for name in OPTION_NAMES:
            text = f"{help_texts[name]}, such as '{EXAMPLE}'; `shared-embeddings methods` lists them all"
            group.add_argument(f"--{name}", f"-{name}", default=None, metavar="MAPPING", help=text)
        group.add_argument(
            f"--{distillation.OPTION}",
            f"-{distillation.OPTION}",
            default=None,
            metavar="MAPPING",
            help=f"Start from a trained model and fit the embedding to its table, such as "
            f"'{distillation.EXAMPLE}'",
        )
        length_control.add_model_options(parser)

    return model_opts


def with_autocast_option(original: Any) -> Any:
    """Add the option for mixed precision to the options of training."""

    def add_train_general_opts(parser: Any) -> None:
        original(parser)
        group = parser.add_argument_group("Mixed precision")
        group.add_argument(
            "--autocast",
            "-autocast",
            choices=["none", "bf16"],
            default="none",
            help="Run matrix products in bfloat16, on a GPU or CPU that is quick at it; parameters, sums and "
            "optimiser stay in 32 bits",
        )

    return add_train_general_opts


def with_length_options(original: Any) -> Any:
    """Add the desired lengths to the options of translation."""

    def translate_opts(parser: Any) -> None:
        original(parser)
        length_control.add_translation_options(parser)

    return translate_opts
