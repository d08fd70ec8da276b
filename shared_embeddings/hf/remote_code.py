"""Loads a model with compressed word embeddings as a plain model of transformers.

shared-embeddings wrote this file into the folder of the model, for ``from_pretrained`` with
``trust_remote_code=True`` where the library is not installed. Embeddings are decoded into tables in the dtype
of the model; with ``import shared_embeddings.hf`` instead, they stay compressed in memory.

Needs torch, numpy and transformers only. Axes: ``V`` vocabulary, ``D`` model dimension, ``n`` rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from shared_embeddings.quant.decoder import HEADER, decoded_table, unpacked

ENTRY = "shared_embeddings"


# Which class is loaded.


@functools.cache
def _model_class(name: str) -> type:
    """Return the class of transformers with a name, which saving does not mark as code of the folder."""
    changed = {
        "__module__": __name__,
        "from_pretrained": classmethod(_from_pretrained),
        # transformers does not rename the tensors of other code.
        "is_custom_code": classmethod(lambda cls: False),
        "register_for_auto_class": classmethod(lambda cls, auto_class=None: None),
    }
    return type(name, (getattr(transformers, name),), changed)


def _from_pretrained(cls: Any, *arguments: Any, output_loading_info: bool = False, **settings: Any) -> Any:
    """Load a model; raise ValueError where transformers fills missing tensors at random.

    A model for another task than that in the folder may have new layers, but no new words.
    """
    load = vars(PreTrainedModel)["from_pretrained"].__func__
    model, info = load(cls, *arguments, output_loading_info=True, **settings)
    is_whole = cls.__name__ in (model.config.architectures or ())
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    words = {id(layer.weight) for layer in layers if layer is not None}
    missing = sorted(
        name for name in info["missing_keys"] if is_whole or id(model.get_parameter_or_buffer(name)) in words
    )
    if missing:
        raise ValueError(
            f"{cls.__name__}: the folder has no {missing[0]}; copy it again, or install shared-embeddings"
        )
    return (model, info) if output_loading_info else model


def __getattr__(name: str) -> type:
    if name.startswith("_") or not hasattr(transformers, name):
        raise AttributeError(name)
    return _model_class(name)


# Loading.


class EmbeddingsConfig(QuantizationConfigMixin):
    """The entry ``quantization_config`` of ``config.json``."""

    def __init__(self, **entry: Any) -> None:
        self.__dict__.update(entry)


class TableQuantizer(HfQuantizer):
    """Decodes the embeddings while the weights are loaded; the model is plain afterwards."""

    is_trainable = True

    def __init__(self, quantization_config: EmbeddingsConfig, **settings: Any) -> None:
        super().__init__(quantization_config, **settings)
        self._conversions: list[WeightConverter] = []

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **settings: Any
    ) -> None:
        entry = self.quantization_config.to_dict()
        with torch.device("cpu"):  # transformers builds models on the meta device
            tables = embedding_tables(entry, checkpoint_files or ())
        # transformers writes the placeholder of a table in shards where it does so for the table.
        self._conversions = [
            WeightConverter(
                [f"^{name}$", f"^{name.removesuffix('.weight')}.shard_*.weight$"], [name], [_Table(table)]
            )
            for name, table in tables.items()
        ]
        ignored = {rf"^{ENTRY}\.", f"^{HEADER}$", *(f"^{name}$" for name in tables)}
        model._keys_to_ignore_on_load_unexpected.update(ignored)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        return [*self._conversions, *weight_conversions]

    def _process_model_after_weight_loading(self, model: Any, **settings: Any) -> None:
        model._weight_conversions = [
            conversion for conversion in model._weight_conversions if conversion not in self._conversions
        ]
        model.is_quantized = False
        for name in ("quantization_config", "auto_map"):
            if hasattr(model.config, name):
                delattr(model.config, name)
        del model.hf_quantizer, model.quantization_method


class _Table(ConversionOps):
    """Puts a table where the files have a placeholder."""

    hf_quantizer = TableQuantizer  # transformers then does not cast the tensors of the files

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def convert(self, input_dict: dict[str, Any], *patterns: Any, **settings: Any) -> dict[str, Any]:
        """Return the table in the dtype of the model."""
        ((_, (placeholder, *_)),) = input_dict.items()
        name: str = settings["full_layer_name"]
        dtype = settings["model"].get_parameter_or_buffer(name).dtype
        return {name: self.table.to(placeholder.device, dtype)}


def embedding_tables(entry: Mapping[str, Any], files: Sequence[Any]) -> dict[str, Tensor]:
    """Return the table ``(V, D)`` of each placeholder, from the tensors in some files."""
    arrays: dict[str, Any] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():
                if name == HEADER or name.startswith(f"{ENTRY}."):
                    tensor = opened.get_tensor(name)
                    # numpy has no bfloat16
                    arrays[name] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    arrays, tables = unpacked(arrays), {}
    for name, settings in entry["tables"].items():
        start = f"{ENTRY}.{name}."
        parts = {key.removeprefix(start): array for key, array in arrays.items() if key.startswith(start)}
        sizes = settings["num_embeddings"], settings["embedding_dim"]
        table = torch.from_numpy(decoded_table(settings["method"], *sizes, settings["options"], parts))
        tables.update({f"{path}.weight": table for path in (*settings["inputs"], *settings["outputs"])})
    return tables


# The library, where it was imported, keeps its own quantizer.
if ENTRY not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config(ENTRY)(EmbeddingsConfig)
    register_quantizer(ENTRY)(TableQuantizer)
