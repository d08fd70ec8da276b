"""Patches of command options and of model building: shared embeddings, length control, dropout."""

from __future__ import annotations

import copy
from argparse import Namespace
from typing import Any

from torch import Tensor, nn

from nmt.data.transforms import NEEDING_TARGETS, NONE
from nmt.model.embeddings import insert_embeddings, reset_embeddings
from nmt.model.plan import EXAMPLE, OPTION_NAMES, check_combinations, check_sizes, read_plan
from nmt.summarization import length_control
from nmt.train import distillation
from nmt.train.runs import CHOICES
from shared_embeddings.fitting import straight_through
from shared_embeddings.layers.dropout import Dropout
from shared_embeddings.quant.packed_tensor import unfreeze


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


def with_shared_embeddings(original: Any) -> Any:
    """Build the model with plain, untied tables, then replace them by the configured embeddings."""

    def build_base_model(model_opt: Namespace, vocabs: dict[str, Any]) -> nn.Module:
        plan = read_plan(model_opt)
        if plan is None:
            return original(model_opt, vocabs)  # type: ignore[no-any-return]
        check_combinations(plan, model_opt)
        check_sizes(plan, model_opt, vocabs)
        untied = copy.copy(model_opt)
        untied.share_embeddings = False
        untied.share_decoder_embeddings = model_opt.share_decoder_embeddings and plan.target is None
        model: nn.Module = original(untied, vocabs)
        insert_embeddings(model, plan, model_opt, vocabs)
        return model

    return build_base_model


def with_length_control(original: Any) -> Any:
    """Insert length-controlled positions into the decoder if the options ask for them."""

    def build_base_model(model_opt: Namespace, vocabs: dict[str, Any]) -> nn.Module:
        length_control.check_positions(model_opt)
        model: nn.Module = original(model_opt, vocabs)
        length_control.insert_positions(model, model_opt)
        return model

    return build_base_model


def with_fast_dropout(original: Any) -> Any:
    """Replace ``nn.Dropout``, whose masks take a sixth of the training time on CPUs."""

    def build_base_model(model_opt: Namespace, vocabs: dict[str, Any]) -> nn.Module:
        model: nn.Module = original(model_opt, vocabs)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Dropout:
                    setattr(module, name, Dropout(child.p))
        return model

    return build_base_model


def with_embedding_initialization(original: Any) -> Any:
    """Initialize the shared embeddings of a new model after OpenNMT-py has initialized everything.

    Those of a loaded model are made trainable.
    """

    def build_model(
        model_opt: Namespace, opt: Namespace, vocabs: Any, checkpoint: Any, device_id: int
    ) -> nn.Module:
        model: nn.Module = original(model_opt, opt, vocabs, checkpoint, device_id)
        if checkpoint is None:
            reset_embeddings(model)
        else:
            unfreeze(model)
        return model

    return build_model


def with_growing_table(original: Any) -> Any:
    """Extend the sinusoids when a sentence is longer than their table; OpenNMT-py fails."""

    def forward(self: Any, emb: Tensor, step: int | None = None) -> Tensor:
        needed = (step or 0) + emb.size(1)
        if needed > self.pe.size(0):
            kind = "SinusoidalConcat" if _is_concatenated(self.pe) else "SinusoidalInterleaved"
            longer = type(self)(self.dim, kind, max_len=2 * needed)
            self.pe = longer.pe.to(self.pe)
        return original(self, emb, step)  # type: ignore[no-any-return]

    return forward


def _is_concatenated(table: Tensor) -> bool:
    """Whether a table ``(T, 1, D)`` has all sines first; interleaved tables have cos(0) in column 1."""
    return table.size(-1) > 2 and float(table[0, 0, 1]) == 0.0
