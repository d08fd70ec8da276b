"""Patches that add options to the commands of OpenNMT-py."""

from __future__ import annotations

from typing import Any

from nmt.data.transforms import NEEDING_TARGETS, NONE
from nmt.model.plan import EXAMPLE, OPTION_NAMES
from nmt.summarization import length_control
from nmt.train import distillation
from nmt.train.runs import CHOICES
from shared_embeddings.fitting import straight_through


def with_embedding_options(original: Any) -> Any:
    """Add the model options of shared embeddings, distillation and length control."""

    def model_opts(parser: Any) -> None:
        original(parser)
        group = parser.add_argument_group("Shared embeddings")
        help_texts = {
            "embedding": "Embedding of source, target and (with share_decoder_embeddings) output, a mapping",
            "src_embedding": "Embedding of the source if different",
            "tgt_embedding": "Embedding of the target if different",
            "output_embedding": "Embedding of a separate output layer (without share_decoder_embeddings)",
        }
        for name in OPTION_NAMES:
            text = f"{help_texts[name]}, such as '{EXAMPLE}'; `shared-embeddings methods` lists them all"
            group.add_argument(f"--{name}", f"-{name}", default=None, metavar="MAPPING", help=text)
        group.add_argument(
            f"--{distillation.OPTION}",
            f"-{distillation.OPTION}",
            default=None,
            metavar="MAPPING",
            help=f"Start from a trained model and fit the embedding to its table: '{distillation.EXAMPLE}'",
        )
        length_control.add_model_options(parser)

    return model_opts


def with_training_options(original: Any) -> Any:
    """Add the training options for mixed precision, logging and existing runs."""

    def add_train_general_opts(parser: Any) -> None:
        original(parser)
        group = parser.add_argument_group("Mixed precision")
        group.add_argument(
            "--autocast",
            "-autocast",
            choices=["none", "bf16"],
            default="none",
            help="Run matrix products in bfloat16; parameters, reductions and optimizer stay in float32",
        )
        group = parser.add_argument_group("Quantization")
        group.add_argument(
            f"--{straight_through.OPTION}",
            f"-{straight_through.OPTION}",
            default=None,
            metavar="MAPPING",
            help="Round the tables of method standard in training, with gradients straight to them: "
            f"'{straight_through.EXAMPLE}'; `shared-embeddings compress` stores them with these options",
        )
        parser.add_argument_group("Logging of shared embeddings").add_argument(
            "--wandb",
            "-wandb",
            default=None,
            metavar="PROJECT",
            help="Project of Weights & Biases that gets what TensorBoard gets",
        )
        group = parser.add_argument_group("Resuming")
        group.add_argument(
            "--resume",
            "-resume",
            choices=CHOICES,
            default="auto",
            help="If save_model already has a run: auto resumes it if its settings are the same, never "
            "fails, overwrite deletes its checkpoints and starts over",
        )

    return add_train_general_opts


def with_length_options(original: Any) -> Any:
    """Add the translation options for desired lengths."""

    def translate_opts(parser: Any) -> None:
        original(parser)
        length_control.add_translation_options(parser)

    return translate_opts


def with_transforms_of_checkpoint(original: Any) -> Any:
    """Make the transforms of a translation default to the checkpoint's, and add ``none``."""

    def translate_opts(parser: Any) -> None:
        original(parser)
        (action,) = (action for action in parser._actions if action.dest == "transforms")
        action.choices = [name for name in action.choices if name not in NEEDING_TARGETS] + [NONE]
        action.help = (
            "Transforms of the source, undone on the output (default: those of the training). "
            f"{NONE}: the text is tokenized."
        )

    return translate_opts
