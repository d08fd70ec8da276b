"""Load compressed models with ``from_pretrained`` of transformers: a quantizer, registered on import.

``config.json`` names the quantizer in ``quantization_config``, whose other content is described in
`shared_embeddings.hf.word_layers`. The quantizer replaces the word embeddings of the empty model before
its weights are loaded. Afterwards, the model can be trained, cast and saved like a plain one. Only while it
has packed tensors (``--store``), which are frozen, does it keep the quantizer, which saves them as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from shared_embeddings.checkpoints import check_sizes, load_tensors
from shared_embeddings.hf.word_layers import (
    ENTRY,
    InputSide,
    OutputSide,
    Placeholder,
    from_entry,
    place,
    placements_in,
)
from shared_embeddings.large.mapped import advise_random
from shared_embeddings.quant.packed_tensor import PackedTensor, unfreeze
from shared_embeddings.quant.storage import HEADER, StorageError, hold, pack, packing_of
from shared_embeddings.utils.errors import UserError


@register_quantization_config(ENTRY)
class SharedEmbeddingsConfig(QuantizationConfigMixin):
    """The entry ``quantization_config`` of ``config.json``; its content is that of `entry_of`."""

    def __init__(self, **entry: Any) -> None:
        self.__dict__.update(entry)


@register_quantizer(ENTRY)
class EmbeddingsQuantizer(HfQuantizer):
    """Loads the model of a folder that `shared-embeddings compress` wrote; transformers calls its methods."""

    is_trainable = True

    def __init__(self, quantization_config: SharedEmbeddingsConfig, **settings: Any) -> None:
        super().__init__(quantization_config, **settings)
        self._conversions: list[WeightConverter] = []
        self._on_disk: tuple[str, ...] = ()

    def update_device_map(self, device_map: dict[str, Any] | None) -> dict[str, Any] | None:
        """Add the device of the first part for the embeddings, if the map was made for the original."""
        if not isinstance(device_map, dict) or "" in device_map:
            return device_map
        if device_map.get(ENTRY) == "disk":
            raise UserError(f"device_map: '{ENTRY}' cannot be on 'disk'; name a device for it")
        return {**device_map, ENTRY: device_map.get(ENTRY, next(iter(device_map.values())))}

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **settings: Any
    ) -> None:
        """Put the embeddings into a model on the meta device, which may be of another task."""
        entry, files = self.quantization_config.to_dict(), checkpoint_files or ()
        state = {key: value for file in files for key, value in load_tensors(file, f"weights {file}").items()}
        if files:
            check_sizes(f"weights {files[0]}", entry["tables"], state)
        embeddings, all_placements = from_entry(entry)
        placements = placements_in(model, all_placements)
        place(model, {name: embeddings[name] for name in placements}, placements)
        self.quantization_config = SharedEmbeddingsConfig(**model.config.quantization_config)
        # The mapped files stay open for tables that are only looked up: the system reads rows as needed.
        self._on_disk = tuple(
            f"{ENTRY}.{name}." for name, placement in placements.items() if not placement.outputs
        )
        unused = [rf"^{ENTRY}\.{re.escape(name)}\." for name in embeddings if name not in placements]
        # The placeholders of output layers that the model does not have.
        paths = [path for placement in all_placements.values() for path in placement.outputs]
        unused += [rf"^{re.escape(path)}\.weight$" for path in paths]
        model._keys_to_ignore_on_load_unexpected.update([*unused, f"^{HEADER}$"])
        packing, names = packing_of(state), model.state_dict().keys()
        missing = sorted(name for name in names if name.startswith(f"{ENTRY}.") and name not in state)
        if missing and files:  # transformers would make them up
            raise UserError(f"weights {files[0]}: have no {missing[0]}; copy or compress the model again")
        if packing is None:
            return
        packed = (HEADER, *packing.names)
        state = {
            name: part if name.startswith(self._on_disk) else part.clone()
            for name, part in state.items()
            if name.startswith(packed)
        }
        try:
            with torch.device("cpu"):  # transformers builds models on the meta device
                held = {name: tensor for name, tensor in hold(state).items() if name in names}
        except StorageError as error:
            raise UserError(f"weights {files[0]}: {error}") from error
        if held:
            patterns = [f"^{re.escape(name)}$" for name in state]
            self._conversions = [WeightConverter(patterns, list(held), [_Held(held)])]

    def get_weight_conversions(self) -> list[WeightConverter]:
        return self._conversions

    def _process_model_after_weight_loading(self, model: Any, **settings: Any) -> None:
        """Make the model one that can be cast and trained, except for packed tensors, which are frozen."""
        # Saving does not revert them.
        model._weight_conversions = [
            conversion for conversion in model._weight_conversions if conversion not in self._conversions
        ]
        model.is_quantized = False
        if hasattr(model.config, "auto_map"):  # names a file that save_pretrained does not write
            del model.config.auto_map
        for module in model.modules():
            # transformers has made plain, trainable parameters of the placeholders.
            if isinstance(module, (InputSide, OutputSide)):
                module.weight = Placeholder(module.weight.data)
        # Others in the mapped file would keep its other tensors in memory, too.
        for prefix, module in model.named_modules():
            for name, codes in module.named_buffers(recurse=False):
                if f"{prefix}.".startswith(self._on_disk):
                    advise_random(codes)
                elif f"{prefix}.".startswith(f"{ENTRY}."):
                    setattr(module, name, codes.clone())
        packed = [parameter for parameter in model.parameters() if isinstance(parameter, PackedTensor)]
        for parameter in packed:
            parameter.requires_grad_(False)
        if not packed:
            self.dequantize(model)  # word codes, which transformers cannot save

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        return pack(model.state_dict(), [ENTRY], "fp32"), {}

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Make packed tensors parameters, which can be trained, in the dtype of the model."""
        unfreeze(model)
        # A plain model for transformers; its configuration keeps the entry.
        del model.hf_quantizer, model.quantization_method
        return model if dtype is None else model.to(dtype)


class _Held(ConversionOps):
    """Puts tensors that have been read, by name, into a model."""

    supports_many_to_many = True
    # transformers then does not cast the tensors of the files.
    hf_quantizer = EmbeddingsQuantizer

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def convert(self, input_dict: dict[str, Any], *patterns: Any, **settings: Any) -> dict[str, Any]:
        """Return the tensors in the dtype of the model, on the device of those in the files."""
        device, get = next(iter(input_dict.values()))[0].device, settings["model"].get_parameter_or_buffer
        return {name: self.tensors.pop(name).to(device, get(name).dtype) for name in list(self.tensors)}
