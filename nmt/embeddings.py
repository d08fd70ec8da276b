"""Shared embeddings in models of OpenNMT-py, and parameter counts."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

import shared_embeddings as se
from nmt import plan as plans
from shared_embeddings.accounting import parameter_table
from shared_embeddings.quant.packed_tensor import install
from shared_embeddings.utils.errors import UserError

# Sides with their own option; `embedding` describes the target and possibly others.
_SIDES = {"src_embedding": "source", "output_embedding": "output"}


class SharedGenerator(nn.Module):
    """Output layer that computes scores with an embedding; in a copy generator, its linear layer.

    Its only parameters are those of the embedding, which may be the decoder's input embedding.
    """

    def __init__(self, embedding: se.SharedEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the scores ``(..., V)`` of decoder states ``(..., D)``."""
        return self.embedding.logits(hidden)


def place_embeddings(model: Any, plan: plans.EmbeddingPlan, built: dict[str, se.SharedEmbedding]) -> None:
    """Insert the embeddings of `EmbeddingPlan.sides` into a model; tables of word features are kept."""
    if "target" in built:
        model.decoder.embeddings.emb_luts[0] = built["target"]
    if plan.source is not None:
        model.encoder.embeddings.emb_luts[0] = built.get("source", built.get("target"))
    if plan.share_output or plan.output is not None:
        layer = SharedGenerator(built["target" if plan.share_output else "output"])
        if hasattr(model.generator, "linear"):
            model.generator.linear = layer
        else:
            model.generator = layer


def scoring_layer(model: Any) -> nn.Module:
    """Return the output layer, or the linear layer of a copy generator."""
    generator: nn.Module = model.generator
    return getattr(generator, "linear", generator)


def words_module(model: Any, side: str) -> nn.Module | None:
    """Return the input embedding of ``source`` or ``target``, or the ``output`` layer; None if absent."""
    if side == "output":
        scoring = scoring_layer(model)
        return scoring.embedding if isinstance(scoring, SharedGenerator) else scoring
    stack = getattr(model, "encoder" if side == "source" else "decoder", None)
    return stack.embeddings.emb_luts[0] if stack is not None and hasattr(stack, "embeddings") else None


def output_bias(model: Any) -> Tensor | None:
    """Return the output bias ``(V,)`` of a model, or ``None``."""
    scoring = words_module(model, "output")
    if isinstance(scoring, se.SharedEmbedding):
        return scoring.output_bias()
    assert isinstance(scoring, nn.Linear)  # upstream has no other
    return scoring.bias


def shared_embeddings_of(model: nn.Module) -> list[se.SharedEmbedding]:
    """Return the distinct shared embeddings of a model, except those inside another one (DeFINE's map)."""
    embeddings = [module for module in model.modules() if isinstance(module, se.SharedEmbedding)]
    inner = {id(part) for module in embeddings for part in module.modules() if part is not module}
    return [module for module in embeddings if id(module) not in inner]


def options_without_files(opt: Namespace, model: Any) -> Namespace:
    """Return options that rebuild a model from its checkpoint without other files."""
    stored = copy.copy(opt)
    for name in plans.OPTION_NAMES:
        settings = getattr(opt, name, None)
        module = words_module(model, _SIDES.get(name, "target"))
        if settings is not None and isinstance(module, se.SharedEmbedding):
            if any(name in settings for name in se.get_method_config(module.method).file_options):
                settings = stored_settings(module)
            setattr(stored, name, settings)
    return stored


def without_positions(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an OpenNMT model except its tables of sinusoids, which are computed."""
    return {name: tensor for name, tensor in state.items() if not name.endswith("make_embedding.pe.pe")}


def stored_settings(embedding: se.SharedEmbedding) -> dict[str, Any]:
    """Return the option that rebuilds an embedding without other files."""
    return {"method": embedding.method, **embedding.stored_options()}


def fill_aliases(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with all names of each tied tensor, given its first name."""
    first: dict[int, str] = {}
    complete = dict(weights)
    for name, tensor in model.state_dict(keep_vars=True).items():
        source = first.setdefault(id(tensor), name)
        if name not in complete and source in complete:
            complete[name] = complete[source]
    return complete


def load_unique_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load the state with each tied tensor once into a model with the same options."""
    complete = fill_aliases(model, without_positions(state))
    tensors = without_positions(model.state_dict(keep_vars=True))
    stored, wanted = ({name: tuple(t.shape) for name, t in part.items()} for part in (complete, tensors))
    differing = sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name))
    if differing:
        name = differing[0]
        raise UserError(
            f"the checkpoint does not match its options and vocabulary: {name} is {stored.get(name)}, that "
            f"of the model {wanted.get(name)} ({len(differing)} differ); use those of the training"
        )
    nn.Module.load_state_dict(model, install(model, complete), strict=False)


def count_model(model: Any) -> dict[str, int | float]:
    """Count parameters by role, each tensor once.

    Returns:
        ``embedding`` (input embeddings, including tied parameters), ``output`` (other parameters of the
        output layer), ``encoder``, ``decoder``, ``rest`` (both), ``total``, ``stored_bits``; with plain
        tables and the same tying: ``dense_embedding``, ``dense_total``; and the ratio ``compression``.
    """
    seen: set[int] = set()

    def count(module: nn.Module) -> int:
        new = {id(p): p.numel() for p in module.parameters() if id(p) not in seen}
        seen.update(new)
        return sum(new.values())

    lookups: Any = [words_module(model, side) for side in ("source", "target")]
    # Lookups that are tied share their parameters.
    distinct = list({id(next(part.parameters())): part for part in lookups if part is not None}.values())
    embedding = sum(map(count, distinct))
    scoring: Any = words_module(model, "output")
    scores, copying = count(scoring), count(model.generator)
    encoder, decoder = count(model.encoder) if hasattr(model, "encoder") else 0, count(model.decoder)
    dense = sum(lookup.num_embeddings * lookup.embedding_dim for lookup in distinct)
    dense_scores, score_bits = scores, 32 * scores
    if scores and isinstance(scoring, se.SharedEmbedding):
        bias = scoring.output_bias()
        dense_scores = scoring.num_embeddings * scoring.score_dim + (0 if bias is None else bias.numel())
        score_bits = scoring.counts()["stored_bits"]
    bits = sum(
        lookup.counts()["stored_bits"]
        if isinstance(lookup, se.SharedEmbedding)
        else 32 * sum(p.numel() for p in lookup.parameters())
        for lookup in distinct
    )
    return {
        "embedding": embedding,
        "output": scores + copying,
        "encoder": encoder,
        "decoder": decoder,
        "rest": encoder + decoder,
        "total": embedding + scores + copying + encoder + decoder,
        "stored_bits": int(bits + score_bits + 32 * (encoder + decoder + copying)),
        "dense_embedding": dense,
        "dense_total": dense + dense_scores + copying + encoder + decoder,
        "compression": dense / embedding if embedding else 1.0,
    }


def describe_parameters(model: Any) -> str:
    """Describe which sides are tied, and the parameter counts."""
    uses: dict[int, list[str]] = {}
    names: dict[int, str] = {}
    for side in ("source", "target", "output"):
        layer: Any = words_module(model, side)
        if layer is not None:
            plain = (
                "plain table" if side != "output" else f"a separate layer ({type(model.generator).__name__})"
            )
            name = f"{layer.method} {layer.options}" if isinstance(layer, se.SharedEmbedding) else plain
            key = id(next(layer.parameters()))  # tied sides share it
            uses.setdefault(key, []).append(side)
            names.setdefault(key, name)
    phrases = [f"{' = '.join(sides)}: {names[key]}" for key, sides in uses.items()]
    counts = count_model(model)
    rows = [(name, counts[name]) for name in ("embedding", "output", "encoder", "decoder", "total")]
    rows.append(("with plain tables", counts["dense_total"]))
    return parameter_table("Embeddings: " + "; ".join(phrases), rows, counts)
