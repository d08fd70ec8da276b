"""Options that `nmt.patches.table` adds to those of OpenNMT."""

from __future__ import annotations

from typing import Any

from nmt.data.transforms import NEEDING_TARGETS, NONE
from nmt.model.plan import EXAMPLE, OPTION_NAMES
from nmt.summarization import length_control
from nmt.train import distillation
from nmt.train.runs import CHOICES


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


def with_training_options(original: Any) -> Any:
    """Add the options for mixed precision, and for a run that is there, to those of training."""

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
        group = parser.add_argument_group("Resuming")
        group.add_argument(
            "--resume",
            "-resume",
            choices=CHOICES,
            default="auto",
            help="What happens to a run that save_model holds already: auto resumes it when its settings are "
            "the same, never fails, overwrite removes its checkpoints and begins",
        )

    return add_train_general_opts


def with_length_options(original: Any) -> Any:
    """Add the desired lengths to the options of translation."""

    def translate_opts(parser: Any) -> None:
        original(parser)
        length_control.add_translation_options(parser)

    return translate_opts


def with_transforms_of_checkpoint(original: Any) -> Any:
    """Let ``-transforms`` of a translation be left to the checkpoint, or be none."""

    def translate_opts(parser: Any) -> None:
        original(parser)
        (action,) = (action for action in parser._actions if action.dest == "transforms")
        action.choices = [name for name in action.choices if name not in NEEDING_TARGETS] + [NONE]
        action.help = (
            "Transforms of the source, undone on the output; by default those of the model's training. "
            f"{NONE}: the text is in tokens."
        )

    return translate_opts
