"""The embeddings of the contract tests: the examples of every method, and its other modes.

A new method needs no row here: its `examples` are rows. Other modes are listed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import shared_embeddings as se

VOCABULARY = 37
DIMENSION = 24
PADDING = 3


@dataclass(frozen=True)
class Case:
    """One row: how to build an embedding, and its expected properties.

    ``score_dim`` is the width ``S`` of the hidden states that the output side takes; ``output`` is False
    if there is no such side. ``adaptive`` marks a hierarchical output distribution, whose probabilities are
    no softmax of its scores. ``bias`` names the parameter that is added to the
    scores; ``build`` draws it at random, because the zeros that it starts with would hide mistakes, and that
    of adaptive clusters, which `biases` names beside it, too.
    ``heavy`` marks a transformation worth looking for repeated tokens.
    """

    name: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    num_embeddings: int = VOCABULARY
    embedding_dim: int = DIMENSION
    padding_idx: int | None = PADDING
    score_dim: int = DIMENSION
    output: bool = True
    adaptive: bool = False
    bias: str | None = None
    heavy: bool = False

    def __str__(self) -> str:
        return self.name

    def build(self, seed: int | None = 0, **changes: Any) -> se.SharedEmbedding:
        """Build the embedding, its weights drawn from ``seed``; ``changes`` replace fields of the row."""
        row = replace(self, **changes)
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        emb = se.build(
            row.method,
            num_embeddings=row.num_embeddings,
            embedding_dim=row.embedding_dim,
            padding_idx=row.padding_idx,
            **row.options,
        )
        for name in row.biases:
            torch.nn.init.normal_(emb.get_parameter(name))
        return emb

    @property
    def biases(self) -> list[str]:
        """The names of all parameters of the bias."""
        if self.bias is None:
            return []
        return [self.bias, self.bias.replace("bias", "cluster_bias")] if self.adaptive else [self.bias]

    def hidden(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Random hidden states ``(*shape, S)`` that take a gradient."""
        return (torch.randn(*shape, self.score_dim) * scale).requires_grad_()


def _define(name: str, **options: Any) -> Case:
    """A row of DeFINE; ``output`` is the full table unless it says otherwise."""
    settings = {"map_dim": 16, "expand_dim": 48, "depth": 3, "output": "table"} | options
    if settings.get("transform") != "linear":
        settings.setdefault("max_groups", 4)
    if settings["output"] == "map" and not {"output_projection", "score_dim"} & settings.keys():
        score_dim = settings["map_dim"]
    else:
        score_dim = DIMENSION
    return Case(
        f"define-{name}",
        "define",
        settings,
        score_dim=score_dim,
        output=settings["output"] != "none",
        adaptive=settings.get("map") == "adaptive" and settings["output"] == "map",
        heavy=True,
    )


def _alone(name: str, **options: Any) -> Case:
    """A row of ALONE, small."""
    settings = {"base_dim": 18, "hidden_dim": 40, "codebooks": 3, "codebook_size": 5} | options
    return Case(f"alone-{name}", "alone", settings, heavy=True)


def _adaptive(name: str, **options: Any) -> Case:
    """A row of the adaptive method; the padding word is in the first band unless `cutoffs` say otherwise."""
    settings = {"cutoffs": [9, 20], "factor": 2} | options
    has_output = settings.get("output") != "none"
    width = settings.get("score_dim", DIMENSION)
    return Case(
        f"adaptive{name}",
        "adaptive",
        settings,
        score_dim=width,
        output=has_output,
        adaptive=has_output,
        heavy=settings.get("map") == "compositional_code",
    )


def _uncle(name: str, padding_idx: int | None = PADDING, **options: Any) -> Case:
    """A row of UnClE; classes are random unless set, because given ones fit one size only."""
    settings = {"unique_dim": 7, "random_classes": True} | options
    return Case(f"uncle-{name}", "uncle", settings, padding_idx=padding_idx)


# For up to 40 words.
TENSOR_TRAIN = {"vocab_shape": [2, 4, 5], "dim_shape": [3, 2, 4], "rank": 4}
TWO_CORES = {"vocab_shape": [8, 5], "dim_shape": [4, 6], "rank": [5]}
GROUPS = {"num_groups": 3, "min_rank": 6}
CODES = {"num_codebooks": 4, "codebook_size": 5}
ADAPTIVE_MAP = {"map": "adaptive", "cutoffs": [9, 20], "factor": 2}

# As in the rows of Transformer-XL: the bands of the output project hidden states of another width.
STATES_MAP = {**ADAPTIVE_MAP, "factor": 1, "tie": "tables", "score_dim": DIMENSION}
MAP_OF_A_MAP = {"cutoffs": [9, 20], "factor": 1, "map": "projective", "map_options": {"rank": 5}}


def example_cases() -> list[Case]:
    """A row for each example of each registered method, and for the first ones one with a bias."""
    cases = []
    for method in se.methods():
        examples = se.get_method_config(method).presets(VOCABULARY, DIMENSION).examples
        for number, (label, options) in enumerate(examples.items()):
            name = f"{method} example {label}".strip().replace(" ", "-")
            cases.append(_example(name, method, options))
            if number == 0:
                cases.append(_example(f"{name}-output-bias", method, {**options, "output_bias": True}))
    return cases


def _example(name: str, method: str, options: dict[str, Any]) -> Case:
    """A row whose expectations are read from the embedding."""
    emb = se.build(method, num_embeddings=VOCABULARY, embedding_dim=DIMENSION, **options)
    biases = (bias for bias in ("bias", "map.bias") if bias in dict(emb.named_parameters()))
    return Case(
        name,
        method,
        options,
        score_dim=emb.score_dim,
        output=emb.has_output,
        adaptive=emb.has_output and not emb.has_linear_scores,
        bias=next(biases, None),
        heavy=bool(emb.expensive_rows),
    )


PLAIN_CASES: list[Case] = [
    Case("standard", "standard"),
    Case("standard-no-padding", "standard", padding_idx=None),
    Case("projective", "projective", {"rank": 5}),
    Case("projective-full-rank", "projective", {"rank": DIMENSION}),
    Case("projective-rank-one", "projective", {"rank": 1}),
    Case("funnel", "funnel", {"rank": 7}),
    Case("funnel-gelu", "funnel", {"rank": 7, "activation": "gelu"}),
    Case("funnel-tanh", "funnel", {"rank": 7, "activation": "tanh"}, padding_idx=None),
    _adaptive(""),
    replace(_adaptive("-no-padding"), padding_idx=None),
    _adaptive("-padding-in-a-tail", cutoffs=[2, 20]),
    _adaptive("-one-tail", cutoffs=[30], factor=4),
    _adaptive("-tails-of-one-word", cutoffs=[1, 2, 3, 36]),
    _adaptive("-head-projection", head_projection="both"),
    _adaptive("-input-projection", head_projection="input"),
    _adaptive("-input-projection-tied-tables", head_projection="input", tie="tables"),
    _adaptive("-factor-one", factor=1),
    _adaptive("-narrow", factor=1, width=10),
    _adaptive("-narrow-bands", factor=3, width=18, cutoffs=[2, 20]),
    _adaptive("-narrow-untied", factor=1, width=10, tie="none"),
    _adaptive("-other-states", factor=1, tie="tables", score_dim=30),
    _adaptive("-other-states-untied", tie="none", score_dim=12, head_projection="both"),
    _adaptive("-map", factor=1, width=10, map="projective", map_options={"rank": 4}),
    _adaptive("-deep-map", factor=1, map="compositional_code", map_options=CODES),
    _adaptive("-map-other-states", factor=1, tie="tables", score_dim=30, map="standard"),
    _adaptive("-tied-tables", tie="tables"),
    _adaptive("-untied", tie="none", head_projection="both"),
    _adaptive("-input-only", output="none"),
    _uncle("classes", num_classes=5),
    _uncle("no-padding", padding_idx=None, num_classes=5, seed=4),
    _uncle("narrow", num_classes=9, unique_dim=1),
    _uncle("wide", num_classes=9, unique_dim=DIMENSION - 1),
    _uncle("one-class", num_classes=1),
    _uncle("sub-classes", num_classes=[4, 11, 37], class_dims=[8, 4, 5]),
    _uncle("stored", num_classes=[6, 12], random_classes=False, classes="stored"),
    Case("tensor-train", "tensor_train", TENSOR_TRAIN, heavy=True),
    Case("tensor-train-two-cores", "tensor_train", TWO_CORES, padding_idx=None, heavy=True),
    Case("structured", "structured", {"num_groups": 6, "num_clusters": 9}),
    Case("structured-one-group", "structured", {"num_groups": 1, "num_clusters": 30}, padding_idx=None),
    Case("compositional-code", "compositional_code", {"num_codebooks": 4, "codebook_size": 5}, heavy=True),
    # So many entries that the output side builds the table.
    Case(
        "compositional-code-table",
        "compositional_code",
        {"num_codebooks": 5, "codebook_size": 9},
        heavy=True,
    ),
    Case("group-reduce", "group_reduce", {"num_groups": 3, "min_rank": 5}),
    Case("group-reduce-one-group", "group_reduce", {"num_groups": 1, "min_rank": 5}, padding_idx=None),
    Case("group-reduce-max-rank", "group_reduce", {"num_groups": 4, "min_rank": 3, "max_rank": 8}),
    *(
        Case(f"group-funneling-{activation}", "group_reduce", {**GROUPS, "activation": activation})
        for activation in ("relu", "gelu", "tanh")
    ),
    _alone("real", filter="real"),
    _alone("real-fixed-base", filter="real", train_base=False),
    _alone("binary", filter="binary", zero_probability=0.4),
    _alone("binary-fixed-base", filter="binary", train_base=False),
    _alone("one-codebook", filter="real", codebooks=1, codebook_size=VOCABULARY),
    *(
        _define(f"{transform}-{connection}", transform=transform, connection=connection)
        for transform in ("hgt", "glt", "linear")
        for connection in ("mixer", "skip", "residual", "none")
    ),
    _define("shuffle", transform="glt", connection="none", shuffle=True),
    _define("shuffle-mixer", transform="glt", connection="mixer", shuffle=True),
    _define("no-reduce", transform="hgt", connection="mixer", expand_dim=DIMENSION, reduce=False),
    _define("shallow", transform="hgt", connection="mixer", depth=1),
    _define("deep", transform="hgt", connection="mixer", depth=6),
    _define("tied-to-map", output="map"),
    _define("tied-to-map-projected", output="map", output_projection=True),
    _define("input-only", output="none"),
    _define("delight", unit="delight", depth=5),
    _define("delight-tied-to-map", unit="delight", depth=2, output="map"),
    _define(
        "delight-adaptive-map-projected", unit="delight", **ADAPTIVE_MAP, output="map", output_projection=True
    ),
    _define("delight-input-only", unit="delight", output="none"),
    _define("projective-map", map="projective", rank=6),
    _define("projective-map-tied", map="projective", rank=6, output="map"),
    _define("projective-map-projected", map="projective", rank=6, output="map", output_projection=True),
    _define("adaptive-map", **ADAPTIVE_MAP),
    _define("adaptive-map-tied", **ADAPTIVE_MAP, output="map"),
    _define("adaptive-map-projected", **ADAPTIVE_MAP, output="map", output_projection=True),
    _define("adaptive-map-of-other-states", **STATES_MAP, output="map"),
    _define("adaptive-map-of-a-map", map="adaptive", output="map", map_options=MAP_OF_A_MAP),
    _define("adaptive-map-untied", **ADAPTIVE_MAP, tie="none", output="map"),
    _define("adaptive-map-input-only", **ADAPTIVE_MAP, output="none"),
    _define("uncle-map", map="uncle", unique_dim=3, num_classes=4, random_classes=True, output="map"),
]

# Also checked with a bias: each method, and the modes with their own output side.
BIASED = """
standard standard-no-padding projective funnel funnel-tanh adaptive adaptive-no-padding
adaptive-padding-in-a-tail adaptive-tails-of-one-word adaptive-untied adaptive-narrow
adaptive-narrow-bands adaptive-other-states adaptive-deep-map uncle-classes uncle-no-padding
uncle-sub-classes tensor-train structured compositional-code
compositional-code-table group-reduce group-reduce-one-group group-funneling-relu alone-real define-hgt-mixer
define-tied-to-map define-tied-to-map-projected define-projective-map define-projective-map-projected
define-adaptive-map-tied define-adaptive-map-of-other-states
""".split()


def _biased(case: Case) -> Case:
    """The same row with a bias."""
    options = case.options | {"output_bias": True}
    name = "map.bias" if options.get("output") == "map" else "bias"
    return replace(case, name=f"{case.name}-output-bias", options=options, bias=name)


CASES: list[Case] = [
    *PLAIN_CASES,
    *(_biased(case) for case in PLAIN_CASES if case.name in BIASED),
    *example_cases(),
]

OUTPUT_CASES = [case for case in CASES if case.output]
SOFTMAX_CASES = [case for case in OUTPUT_CASES if not case.adaptive]


def by_name(name: str) -> Case:
    """The row called ``name``."""
    return next(case for case in CASES if case.name == name)
