"""The plan of a model's embeddings: which embedding the source, the target and the output use.

It follows from the options ``embedding``, ``src_embedding``, ``tgt_embedding`` and ``output_embedding``,
which `nmt.options.parse` makes mappings, and from OpenNMT-py's ``share_embeddings`` and
``share_decoder_embeddings``.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import shared_embeddings as se
from shared_embeddings.utils.errors import UserError

OPTION_NAMES = ("embedding", "src_embedding", "tgt_embedding", "output_embedding")
PADDING = "<blank>"

# Options of OpenNMT-py that need a plain table, and what to do instead.
UNSUPPORTED = {
    **dict.fromkeys(
        ("freeze_word_vecs_enc", "freeze_word_vecs_dec"),
        "it would freeze an untrained embedding; remove it",
    ),
    **dict.fromkeys(
        ("both_embeddings", "src_embeddings", "tgt_embeddings"),
        "pretrained tables cannot be loaded into a compressed embedding; remove it",
    ),
    "update_vocab": "the parameters of a compressed embedding belong to one vocabulary; train a new model",
    "lora_layers": "LoRA checkpoints hold a part of the model only; fine-tune with -train_from instead",
    "lora_embedding": "LoRA wraps a plain table; fine-tune with -train_from instead",
}


@dataclass(frozen=True)
class EmbeddingPlan:
    """Settings of each side (``None``: OpenNMT-py's table), and which sides are tied."""

    source: dict[str, Any] | None
    target: dict[str, Any] | None
    share_inputs: bool  # source and target have one embedding
    share_output: bool  # target and output have one embedding
    output: dict[str, Any] | None = None  # of an untied output layer

    def fits(self, other: EmbeddingPlan) -> bool:
        """Return whether a checkpoint trained with the plan `other` matches this plan.

        Checkpoints have the contents of files in place of their names, and a list of levels in place of one.
        """
        if (self.share_inputs, self.share_output) != (other.share_inputs, other.share_output):
            return False
        pairs = ((self.source, other.source), (self.target, other.target), (self.output, other.output))
        for wanted, trained in pairs:
            if wanted == trained:
                continue
            if wanted is None or trained is None:
                return False
            files = se.get_method_config(wanted["method"]).file_options
            rest = {name: value for name, value in wanted.items() if name not in files}
            if not any(name in trained for name in files):
                return False
            if any(trained.get(name) not in (value, [value]) for name, value in rest.items()):
                return False
        return True

    def options(self) -> dict[str, dict[str, Any] | None]:
        """Return the options that describe the plan."""
        if self.share_inputs:
            return {"embedding": self.target, "output_embedding": self.output}
        sides = {"src_embedding": self.source, "tgt_embedding": self.target}
        return {**sides, "output_embedding": self.output}

    def is_scored(self, side: str) -> bool:
        """Return whether the embedding of a side computes the scores."""
        return side == "output" or (side == "target" and self.share_output)

    def sides(self) -> dict[str, dict[str, Any]]:
        """Return the settings of each distinct embedding: ``target``, ``source`` and ``output`` if untied.

        If one option describes both sides, its `output` and `output_bias` apply to the target only.
        """
        settings = {}
        if self.target is not None:
            settings["target"] = self.target
        if self.source is not None and not self.share_inputs:
            describes_both = self.source == self.target and self.share_output
            settings["source"] = for_input(self.source) if describes_both else self.source
        if self.output is not None:
            settings["output"] = self.output
        return settings


def for_input(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without options of the output."""
    of_input = {name: value for name, value in settings.items() if name != "output_bias"}
    return {**of_input, "output": "none"} if "output" in of_input else of_input


def read_plan(opt: Namespace) -> EmbeddingPlan | None:
    """Return the plan of a model's options, or ``None`` for a model with OpenNMT-py's tables only."""
    both, source, target, output = (getattr(opt, name, None) for name in OPTION_NAMES)
    if both is None and source is None and target is None and output is None:
        return None
    for name, remedy in UNSUPPORTED.items():
        if getattr(opt, name, None):
            raise UserError(f"{name}: cannot be combined with `embedding`: {remedy}")
    if getattr(opt, "parallel_mode", "") == "tensor_parallel":
        raise UserError("parallel_mode: tensor_parallel does not work with `embedding`; use data_parallel")
    if both is not None:
        if source is not None and target is not None:
            raise UserError("embedding: has no effect with src_embedding and tgt_embedding; remove one")
        source, target = source or both, target or both
    share_inputs = bool(getattr(opt, "share_embeddings", False))
    share_output = bool(getattr(opt, "share_decoder_embeddings", False))
    if share_output and output is not None:
        raise UserError("output_embedding: has no effect with share_decoder_embeddings: true; remove one")
    if getattr(opt, "model_task", "seq2seq") == "lm":
        source, share_inputs = None, False
    if share_inputs and source != target:
        raise UserError(
            f"share_embeddings: true needs one embedding for both sides, but the source has {source} and the "
            f"target {target}; set `embedding` alone, or share_embeddings: false"
        )
    return EmbeddingPlan(source, target, share_inputs, share_output and target is not None, output)


def words_of(vocabs: dict[str, Any], side: str) -> list[str]:
    """Return the words of one side, ordered by id."""
    return vocabs["src" if side == "source" else "tgt"].ids_to_tokens  # type: ignore[no-any-return]


def padding_of(vocabs: dict[str, Any], side: str) -> int | None:
    """Return the id of the padding word of one side; None for an output embedding."""
    return None if side == "output" else vocabs["src" if side == "source" else "tgt"][PADDING]


def build_embeddings(
    plan: EmbeddingPlan, opt: Namespace, vocabs: dict[str, Any]
) -> dict[str, se.SharedEmbedding]:
    """Build the embedding of each side for the words and the widths of a model."""
    if plan.share_inputs and vocabs["src"].ids_to_tokens != vocabs["tgt"].ids_to_tokens:
        raise UserError(
            f"share_embeddings: true needs one vocabulary, but source ({len(vocabs['src'])} words) and "
            f"target ({len(vocabs['tgt'])}) differ; set share_vocab: true, or share_embeddings: false"
        )
    hidden, width = int(opt.dec_hid_size), int(getattr(opt, "word_vec_size", -1))
    widths = {
        "source": width if width > 0 else int(opt.src_word_vec_size),
        "target": width if width > 0 else int(opt.tgt_word_vec_size),
        "output": hidden,
    }
    built = {}
    for side, settings in plan.sides().items():
        is_scored = plan.is_scored(side)
        try:
            embedding = se.build(
                settings["method"],
                num_embeddings=len(words_of(vocabs, side)),
                embedding_dim=widths[side],
                padding_idx=padding_of(vocabs, side),
                words=words_of(vocabs, side),
                **method_options(side, settings, is_scored),
            )
        except TypeError as error:
            raise UserError(f"{side} embedding: {error}") from error
        if is_scored:
            _check_output(side, settings, embedding, hidden)
        elif embedding.output_bias() is not None:
            raise UserError(
                f"{side} embedding: output_bias has no effect because the output layer is not tied to it; "
                "set share_decoder_embeddings: true, or remove `output_bias`"
            )
        built[side] = embedding
    return built


def _check_output(side: str, settings: dict[str, Any], embedding: se.SharedEmbedding, hidden: int) -> None:
    """Check that an embedding scores words for the decoder's states of width `hidden`."""
    if not embedding.has_output:
        asked, other = "output_embedding", "another `output`"
        if side == "target":
            asked = "share_decoder_embeddings: true"
            other = "share_decoder_embeddings: false, or another `output`"
        raise UserError(f"{asked} needs an output side, but {settings} has none; set {other}")
    if embedding.score_dim != hidden:
        raise UserError(
            f"the output side of {settings} needs {embedding.score_dim} dimensions, but the decoder has "
            f"{hidden} (hidden_size); set output: table or output_projection: true if the method has "
            "them, or word_vec_size equal to hidden_size"
        )
    scoring = {id(parameter) for parameter in embedding.parameters_by_side()[1]}
    unused = sum(tensor.numel() for tensor in embedding.parameters() if id(tensor) not in scoring)
    if side == "output" and unused:
        raise UserError(
            f"output_embedding: {settings} has {unused:,} parameters that an output layer does not use; "
            "set another `output` or method"
        )


def method_options(side: str, settings: dict[str, Any], with_output: bool) -> dict[str, Any]:
    """Return the options of a method for one side; without a tied output layer, it has no ``output``."""
    options = {key: value for key, value in settings.items() if key != "method"}
    method = settings["method"]
    if with_output or method not in se.methods():
        return options
    if "output" in {field.name for field in dataclasses.fields(se.get_method_config(method))}:
        if options.setdefault("output", "none") != "none":
            raise UserError(
                f"{side} embedding: output: {options['output']} has no effect because the output "
                "layer is not tied to it; set share_decoder_embeddings: true, or remove `output`"
            )
    return options
