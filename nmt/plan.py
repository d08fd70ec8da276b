"""The plan of a model's embeddings: which embedding the source, the target and the output use.

It is read from the options ``embedding``, ``src_embedding``, ``tgt_embedding`` and ``output_embedding`` and
from OpenNMT-py's ``share_embeddings`` and ``share_decoder_embeddings``. Unsupported combinations fail before
training.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch

import shared_embeddings as se
from shared_embeddings.registry import EXAMPLE, parse_embedding
from shared_embeddings.utils.command_line import EXPONENT
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.reading import DocumentError, parse_yaml

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
        """Return whether a checkpoint trained with the plan `other` matches this plan."""
        ties = (self.share_inputs, self.share_output) == (other.share_inputs, other.share_output)
        sides = ((self.source, other.source), (self.target, other.target), (self.output, other.output))
        return ties and all(_same(wanted, found) for wanted, found in sides)

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
        built = {}
        if self.target is not None:
            built["target"] = self.target
        if self.source is not None and not self.share_inputs:
            both = self.source == self.target and self.share_output
            built["source"] = for_input(self.source) if both else self.source
        if self.output is not None:
            built["output"] = self.output
        return built


def parse_text(name: str, value: Any, example: str) -> Any:
    """Parse the value of an option, which may be YAML text; messages have its name and an example."""
    if not isinstance(value, str):
        return _with_numbers(value)
    try:
        return _with_numbers(parse_yaml(value, name))
    except DocumentError as error:
        raise UserError(f"{error}; write it like {example}") from error


def _with_numbers(value: Any) -> Any:
    """Convert texts such as 1e-3 to numbers at any depth, which the YAML reader does not."""
    if isinstance(value, dict):
        return {key: _with_numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_numbers(one) for one in value]
    return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value


def parse_mapping(name: str, value: Any, example: str) -> dict[str, Any] | None:
    """Parse the value of an option that is a mapping, see `parse_text`; None if it is not set."""
    given = parse_text(name, value, example)
    if given is not None and not isinstance(given, dict):
        raise UserError(f"{name}: {value!r} is not a mapping; write it like {example}")
    return given


def for_input(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without options of the output."""
    kept = {name: value for name, value in settings.items() if name != "output_bias"}
    return {**kept, "output": "none"} if "output" in kept else kept


def parse_settings(name: str, value: Any) -> dict[str, Any] | None:
    """Parse one embedding option, a mapping or its text, to a mapping with at least the key ``method``."""
    settings = parse_text(name, value, EXAMPLE)
    if settings is None:
        return None
    parse_embedding(name, settings)
    return dict(settings)


def _same(wanted: dict[str, Any] | None, found: dict[str, Any] | None) -> bool:
    """Return whether settings match those of a checkpoint, which has contents in place of files."""
    if wanted is None or found is None or wanted == found or wanted["method"] not in se.methods():
        return wanted == found
    files = se.get_method_config(wanted["method"]).file_options
    # A number for the only level of classes is stored as a list.
    return any(name in found for name in files) and all(
        found.get(name) in (value, [value]) for name, value in wanted.items() if name not in files
    )


def read_plan(opt: Namespace) -> EmbeddingPlan | None:
    """Return the plan of the options, or ``None`` for a model with OpenNMT-py's tables only."""
    both, source, target, output = (parse_settings(name, getattr(opt, name, None)) for name in OPTION_NAMES)
    if both is None and source is None and target is None and output is None:
        return None
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


def check_combinations(plan: EmbeddingPlan, opt: Namespace) -> None:
    """Check that the options work with shared embeddings."""
    for name, remedy in UNSUPPORTED.items():
        if getattr(opt, name, None):
            raise UserError(f"{name}: cannot be combined with `embedding`: {remedy}")
    if getattr(opt, "parallel_mode", "data_parallel") == "tensor_parallel":
        raise UserError("parallel_mode: tensor_parallel does not work with `embedding`; use data_parallel")
    if getattr(opt, "optim", "") == "sparseadam":
        raise UserError("optim: sparseadam does not support the dense gradients of `embedding`; use adam")
    if plan.share_inputs and not getattr(opt, "share_vocab", True):
        raise UserError("share_embeddings: true needs one vocabulary for both sides; set share_vocab: true")


def words_of(vocabs: dict[str, Any], side: str) -> list[str]:
    """Return the words of one side, ordered by id."""
    return vocabs["src" if side == "source" else "tgt"].ids_to_tokens  # type: ignore[no-any-return]


def padding_of(vocabs: dict[str, Any], side: str) -> int | None:
    """Return the id of the padding word of one side; None for an output embedding."""
    return None if side == "output" else vocabs["src" if side == "source" else "tgt"][PADDING]


def check_sizes(plan: EmbeddingPlan, opt: Namespace, vocabs: dict[str, Any]) -> None:
    """Check the embeddings against vocabularies and widths."""
    hidden = int(opt.dec_hid_size)
    for side, settings in plan.sides().items():
        is_scored = plan.is_scored(side)
        with torch.device("meta"):
            words, width = words_of(vocabs, side), side_width(opt, side)
            embedding = build_embedding(side, settings, words, width, None, is_scored)
        if not is_scored:
            continue
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
        scoring = {id(parameter) for parameter in embedding.output_parameters()}
        unused = sum(tensor.numel() for tensor in embedding.parameters() if id(tensor) not in scoring)
        if side == "output" and unused:
            raise UserError(
                f"output_embedding: {settings} has {unused:,} parameters that an output layer does not use; "
                "set another `output` or method"
            )


def side_width(opt: Namespace, side: str) -> int:
    """Return the word vector size of one side; for the output, the decoder's width."""
    if side == "output":
        return int(opt.dec_hid_size)
    size = int(getattr(opt, "word_vec_size", -1))
    if size > 0:
        return size
    return int(opt.src_word_vec_size if side == "source" else opt.tgt_word_vec_size)


def build_embedding(
    side: str,
    settings: dict[str, Any],
    words: list[str],
    embedding_dim: int,
    padding_idx: int | None,
    with_output: bool,
) -> se.SharedEmbedding:
    """Build the embedding of one side for its words, ordered by id."""
    options = method_options(side, settings, with_output)
    try:
        embedding = se.build(
            settings["method"],
            num_embeddings=len(words),
            embedding_dim=embedding_dim,
            padding_idx=padding_idx,
            words=words,
            **options,
        )
    except TypeError as error:
        raise UserError(f"{side} embedding: {error}") from error
    if not with_output and embedding.output_bias() is not None:
        raise UserError(
            f"{side} embedding: output_bias has no effect because the output layer is not tied to it; "
            "set share_decoder_embeddings: true, or remove `output_bias`"
        )
    return embedding


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
