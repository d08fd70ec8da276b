"""Invalid options fail, and the message names the option."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import shared_embeddings as se

SIZES: dict[str, Any] = {"num_embeddings": 37, "embedding_dim": 24, "padding_idx": 3}
DEFINE: dict[str, Any] = {"map_dim": 16, "expand_dim": 48, "depth": 3, "max_groups": 4, "output": "table"}
DELIGHT: dict[str, Any] = {"unit": "delight"}
ALONE: dict[str, Any] = {"base_dim": 18, "hidden_dim": 40}
ADAPTIVE: dict[str, Any] = {"map": "adaptive", "cutoffs": [9, 20], "factor": 2}


def without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """The options without some."""
    return {name: value for name, value in options.items() if name not in names}


def message(method: str, **options: Any) -> str:
    """The message of the error that building raises: one line."""
    with pytest.raises(ValueError) as error:
        se.build(method, **(SIZES | options))
    text = str(error.value)
    assert isinstance(error.value, se.OptionError) and "\n" not in text and len(text) < 400
    return text


def test_unknown_method_is_named_with_the_known_ones() -> None:
    text = message("word2vec")
    assert all(method in text for method in ["word2vec", *se.methods()])
    with pytest.raises(se.OptionError, match="word2vec"):
        se.get_method_config("word2vec")


def test_numpy_numbers_are_converted() -> None:
    emb = se.build("alone", **SIZES, hidden_dim=np.int64(8), relu_dropout=np.float32(0.25))
    stored = emb.stored_options()
    assert stored == {"hidden_dim": 8, "relu_dropout": 0.25}
    assert {type(value) for value in stored.values()} == {int, float}
    assert json.loads(json.dumps(stored)) == stored


BANDS: dict[str, Any] = {"cutoffs": [9, 20], "factor": 1}
UNCLE: dict[str, Any] = {"unique_dim": 2, "random_classes": True, "num_classes": 3}
GROUPS: dict[str, Any] = {"group_sizes": [7, 30], "ranks": [3, 5]}
TRAIN: dict[str, Any] = {"vocab_shape": [2, 4, 5], "dim_shape": [3, 2, 4], "rank": 4}
PIECES: dict[str, Any] = {"num_groups": 6, "num_clusters": 9}

INVALID = [
    # Unknown.
    ("standard", {"rank": 4}, "rank"),
    ("define", DEFINE | {"dept": 3}, "dept"),
    # Missing.
    ("projective", {}, "rank"),
    ("define", without(DEFINE, "map_dim"), "map_dim"),
    ("define", DEFINE | {"map": "projective"}, "rank"),
    ("define", DEFINE | {"map": "adaptive"}, "cutoffs"),
    # Of the wrong type.
    ("projective", {"rank": "4"}, "rank"),
    ("define", DEFINE | {"reduce": "yes"}, "reduce"),
    ("define", DEFINE | ADAPTIVE | {"cutoffs": ["9"]}, "cutoffs"),
    ("alone", ALONE | {"relu_dropout": float("nan")}, "relu_dropout"),
    # A value that is not one of the choices.
    ("funnel", {"rank": 4, "activation": "rleu"}, "'activation' is 'rleu'"),
    ("define", DEFINE | {"map": "table"}, "'map' is 'table'"),
    # Impossible.
    ("standard", {"num_embeddings": 0}, "num_embeddings"),
    ("standard", {"embedding_dim": 0}, "embedding_dim"),
    ("standard", {"num_embeddings": 2**31}, "num_embeddings"),
    ("standard", {"padding_idx": 37}, "padding_idx"),
    ("projective", {"rank": 0}, "rank"),
    ("projective", {"rank": 25}, "rank"),
    ("funnel", {"rank": 25}, "rank"),
    ("define", DEFINE | {"map_dim": 18}, "map_dim"),
    ("define", DEFINE | {"max_groups": 3}, "max_groups"),
    ("define", DEFINE | {"max_groups": 64}, "max_groups"),
    ("define", DEFINE | {"reduce": False}, "reduce"),
    ("define", DEFINE | {"map": "projective", "rank": 0}, "rank"),
    ("define", DEFINE | {"map": "projective", "rank": 17}, "rank"),
    ("define", DEFINE | ADAPTIVE | {"cutoffs": [9, 37]}, "cutoffs"),
    ("define", DEFINE | {"unit": "iclr"}, "unit"),
    ("define", DEFINE | DELIGHT | {"depth": 1}, "depth"),
    ("define", DEFINE | DELIGHT | {"max_groups": 3}, "power of 2"),
    ("define", DEFINE | DELIGHT | {"max_groups": 8, "depth": 4}, "max_groups"),
    ("define", DEFINE | DELIGHT | {"map_dim": 8, "expand_dim": 10}, "expand_dim"),
    ("alone", ALONE | {"filter": "binary", "zero_probability": 1.5}, "zero_probability"),
    ("alone", ALONE | {"relu_dropout": 1.0}, "relu_dropout"),
    ("alone", ALONE | {"relu_dropout": 0.1, "relu_dropout_steps": 0}, "relu_dropout_steps"),
    ("alone", ALONE | {"seed": 2**64}, "seed"),
    # Without effect.
    ("define", DEFINE | {"rank": 4}, "rank"),
    ("define", DEFINE | {"cutoffs": [9]}, "cutoffs"),
    ("define", DEFINE | {"map": "projective", "rank": 4, "cutoffs": [9]}, "cutoffs"),
    ("define", DEFINE | {"map": "projective", "rank": 4, "factor": 2}, "factor"),
    ("define", DEFINE | ADAPTIVE | {"rank": 4}, "rank"),
    ("define", DEFINE | {"output_projection": True}, "output_projection"),
    ("define", DEFINE | {"output": "none", "output_projection": True}, "output_projection"),
    ("define", DEFINE | {"output": "none", "output_bias": True}, "output_bias"),
    ("define", DEFINE | ADAPTIVE | {"output": "none", "output_bias": True}, "output_bias"),
    ("adaptive", {"cutoffs": [9, 20], "factor": 2, "output": "none", "output_bias": True}, "output_bias"),
    ("define", DEFINE | {"map": "projective", "rank": 4, "map_options": {"rank": 5}}, "rank"),
    ("define", DEFINE | ADAPTIVE | {"tie": "none"}, "tie"),
    ("define", DEFINE | {"transform": "linear"}, "max_groups"),
    ("define", without(DEFINE, "max_groups") | {"transform": "linear", "shuffle": True}, "shuffle"),
    ("define", DEFINE | DELIGHT | {"transform": "glt"}, "transform"),
    ("define", DEFINE | DELIGHT | {"shuffle": True}, "shuffle"),
    ("define", DEFINE | DELIGHT | {"connection": "skip"}, "connection"),
    ("define", DEFINE | DELIGHT | {"reduce": False}, "reduce"),
    ("alone", ALONE | {"filter": "real", "zero_probability": 0.3}, "zero_probability"),
    ("alone", ALONE | {"relu_dropout_steps": 5}, "relu_dropout_steps"),
    # For each method one row for each cause; options of another type are in test_fitting.py for all methods.
    ("adaptive", {}, "'cutoffs' is missing"),
    ("adaptive", {"cutoffs": []}, "'cutoffs' is empty"),
    ("adaptive", {"cutoffs": [9, 9]}, "[9, 9]"),
    ("adaptive", {"cutoffs": [9, 37]}, "ends with 37"),
    ("adaptive", {"cutoffs": [9, 20], "factor": 5}, "'factor' is 5"),
    ("adaptive", {"cutoffs": [9], "width": 3}, "band has 3"),
    ("adaptive", {**BANDS, "head_projection": "yes"}, "'none' | 'input' | 'both'"),
    ("adaptive", {**BANDS, "width": 12, "head_projection": "input"}, "'head_projection' is 'input'"),
    ("adaptive", {**BANDS, "width": 24}, "'width' is 24"),
    ("adaptive", {**BANDS, "score_dim": 24, "tie": "tables"}, "'score_dim' is 24"),
    ("adaptive", {**BANDS, "score_dim": 30}, "'tables'"),
    ("adaptive", {**BANDS, "score_dim": 30, "output": "none"}, "'score_dim' is 30"),
    ("adaptive", {**BANDS, "output": "none", "tie": "none"}, "'tie' is 'none'"),
    ("adaptive", {"cutoffs": [9], "map": "standard"}, "'factor'"),
    ("adaptive", {**BANDS, "tie": "none", "map": "standard"}, "'tie'"),
    ("adaptive", {**BANDS, "map": "define"}, "'map' is 'define'"),
    ("adaptive", {**BANDS, "map_options": {"rank": 2}}, "'map_options'"),
    ("adaptive", {**BANDS, "map": "nothing"}, "'nothing'"),
    ("adaptive", {**BANDS, "map": "projective"}, "'rank' is missing"),
    *(
        ("adaptive", {**BANDS, "map": "standard", "map_options": {name: 3}}, repr(name))
        for name in ("padding_idx", "output_bias", 7)
    ),
    ("uncle", {"unique_dim": 2}, "'projective' with rank 2"),
    ("uncle", {**UNCLE, "unique_dim": 24}, "standard"),
    ("uncle", {**UNCLE, "num_classes": [2, 38]}, "'num_classes' is 38"),
    ("uncle", {**UNCLE, "num_classes": []}, "num_classes"),
    ("uncle", {**UNCLE, "num_classes": [1] * 23}, "class_dims"),
    ("uncle", {**UNCLE, "class_dims": [21]}, "class_dims"),
    ("uncle", {**UNCLE, "class_dims": [11, 11]}, "class_dims"),
    ("uncle", {**UNCLE, "num_classes": [2, 3], "class_dims": [22, 0]}, "class_dims"),
    ("uncle", {**UNCLE, "classes": [0] * 37}, "random_classes"),
    ("uncle", {"unique_dim": 2, "random_classes": True}, "num_classes"),
    ("uncle", {"unique_dim": 2, "classes": "stored"}, "num_classes"),
    ("uncle", {"unique_dim": 2, "classes": [0] * 37, "seed": 3}, "seed"),
    ("uncle", {"unique_dim": 2, "classes": [0] * 5}, "5 words"),
    ("uncle", {"unique_dim": 2, "classes": []}, "classes"),
    ("uncle", {"unique_dim": 2, "classes": [*range(36), -1]}, "class -1"),
    ("uncle", {"unique_dim": 2, "classes": [3] * 37, "num_classes": 3}, "class 3"),
    ("uncle", {"unique_dim": 2, "classes": [[0] * 37, [1] * 37], "num_classes": 3}, "num_classes"),
    *(("uncle", {"unique_dim": 2, "classes": value}, "classes") for value in (3, np.zeros(37), [[0, [1]]])),
    ("uncle", {"unique_dim": 2, "classes": ["no/such/file.npz"]}, "no/such/file.npz"),
    ("group_reduce", {}, "num_groups"),
    ("group_reduce", {"num_groups": 3}, "min_rank"),
    ("group_reduce", {"num_groups": 38, "min_rank": 3}, "'num_groups' is 38"),
    ("group_reduce", {"num_groups": 3, "min_rank": 25}, "'min_rank' has rank 25"),
    ("group_reduce", {"num_groups": 3, "min_rank": 5, "max_rank": 4}, "'max_rank' is 4"),
    ("group_reduce", {"num_groups": 3, "min_rank": 5, "num_parameters": 400}, "num_parameters"),
    ("group_reduce", {"group_sizes": [7, 30]}, "'ranks' is missing"),
    ("group_reduce", {"ranks": [3, 5]}, "'group_sizes' is missing"),
    ("group_reduce", {"group_sizes": [7, 30], "ranks": [3]}, "'group_sizes' has 2"),
    ("group_reduce", {"group_sizes": [7, 31], "ranks": [3, 5]}, "adds up to 38"),
    ("group_reduce", {"group_sizes": [7, 30], "ranks": [0, 5]}, "ranks"),
    ("group_reduce", {"group_sizes": [7, 30], "ranks": [3, 25]}, "'ranks' has rank 25"),
    *(("group_reduce", {**GROUPS, name: 2}, name) for name in ("num_groups", "min_rank", "num_parameters")),
    ("structured", {"num_clusters": 9}, "num_groups"),
    ("structured", {**PIECES, "num_groups": 5}, "'num_groups' is 5"),
    ("structured", {**PIECES, "num_clusters": 38}, "'num_clusters' is 38"),
    ("structured", {**PIECES, "clusters": 9}, "num_clusters"),
    ("tensor_train", without(TRAIN, "rank"), "rank"),
    ("tensor_train", {**TRAIN, "vocab_shape": [2, 4, 4]}, "32 words"),
    ("tensor_train", {**TRAIN, "dim_shape": [3, 2, 5]}, "product 30"),
    ("tensor_train", {**TRAIN, "dim_shape": [6, 4]}, "'dim_shape' has 2"),
    ("tensor_train", {**TRAIN, "vocab_shape": [40], "dim_shape": [24]}, "vocab_shape"),
    ("tensor_train", {**TRAIN, "vocab_shape": [0, 4, 5]}, "vocab_shape"),
    ("tensor_train", {**TRAIN, "rank": [4, 0]}, "rank"),
    ("tensor_train", {**TRAIN, "rank": [4, 4, 4]}, "'rank' has 3"),
]


@pytest.mark.parametrize(
    ("method", "options", "named"), [pytest.param(*row, id=f"{row[0]}-{row[2]}") for row in INVALID]
)
def test_the_message_names_the_option(method: str, options: dict[str, Any], named: str) -> None:
    """Building and counting reject the same options."""
    assert named in message(method, **options)
    if named != "padding_idx":
        with pytest.raises(se.OptionError) as error:
            se.num_parameters(method, **without(SIZES | options, "padding_idx"))
        assert named in str(error.value)


@pytest.mark.parametrize("name", ["method", "num_embeddings", "embedding_dim", "output"])
def test_invalid_options_of_the_map(name: str) -> None:
    text = message("define", **DEFINE, map_options={name: 3})
    assert name in text and "map_options" in text
