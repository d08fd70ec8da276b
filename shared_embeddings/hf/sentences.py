"""The vector of a sentence, as sentence-transformers computes it after the model: read without running code.

``modules.json`` names the layers, each with a folder: pooling of the hidden states, then dense layers.
``config_sentence_transformers.json`` has prompts, which are put before texts.

Axes: ``T`` tokens, ``D`` model dimension, ``S`` width of a sentence vector.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.checkpoints import load_tensors
from shared_embeddings.utils.reading import read_json

# Names folders such as 1_Pooling.
SENTENCE_LAYERS = "modules.json"
_PROMPTS = "config_sentence_transformers.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# Those for what is searched, of which the first is used where no prompt is the default.
_OF_DOCUMENTS = ("document", "passage", "corpus")
# How a setting of older folders asks for a pooling, which has another name in newer ones.
_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def sentence_layers(folder: Path) -> list[tuple[str, Path]]:
    """Return the kind of each layer that ``modules.json`` names, and its folder; none without the file."""
    layers = read_json(folder / SENTENCE_LAYERS) if (folder / SENTENCE_LAYERS).is_file() else []
    kinds = [layer.get("type", "").rpartition(".")[2] for layer in layers]
    # No path leaves the folder.
    names = [os.path.basename(os.path.normpath(f"/{layer['path']}")) for layer in layers]
    return [(kind, folder / name) for kind, name in zip(kinds, names)]


def has_pooling(folder: Path) -> bool:
    """Return whether a model is an encoder of sentences, by the mean of hidden states for example."""
    return any(kind == "Pooling" for kind, _ in sentence_layers(folder))


def read_prompts(folder: Path) -> tuple[dict[str, str], str]:
    """Return the prompts of an encoder by their names, and the name of the one for texts, or an empty one."""
    content = read_json(folder / _PROMPTS) if (folder / _PROMPTS).is_file() else {}
    prompts: dict[str, str] = content.get("prompts") or {}
    names = (content.get("default_prompt_name"), *_OF_DOCUMENTS)
    return prompts, next((name for name in names if name in prompts), "")


class SentenceEncoder:
    """Turns the hidden states of a text into its vector.

    Attributes:
        prompt: what is put before every text, and its name; both may be empty.
        described: how vectors are computed, for a report.
    """

    def __init__(self, folder: Path) -> None:
        """Read the layers of a model that `has_pooling`, up to one of an unknown kind."""
        prompts, self.prompt_name = read_prompts(folder)
        self.prompt = prompts.get(self.prompt_name, "")
        self._modes, self._reads_prompt = ["mean"], True
        self._layers: list[Callable[[Tensor], Tensor]] = []
        names = []
        for kind, path in sentence_layers(folder):
            if kind == "Pooling":
                config = read_json(path / "config.json")
                modes = config.get("pooling_mode") or [
                    new for old, new in _POOLINGS.items() if config.get(old)
                ]
                self._modes = [modes] if isinstance(modes, str) else list(modes) or self._modes
                self._reads_prompt = bool(config.get("include_prompt", True))
            elif kind in ("Dense", "LayerNorm"):
                self._layers.append(_read_layer(kind, path))
                names.append(kind)
            elif kind == "Normalize":
                self._layers.append(lambda vector: F.normalize(vector, dim=-1))
            elif kind not in ("Transformer", "Dropout"):
                names.append(f"without {kind}")
                break
        self.described = ", ".join([f"pooling {' and '.join(self._modes)}", *names])

    def __call__(self, states: Tensor, prompt_tokens: int = 0) -> Tensor:
        """Return the vector ``(S,)`` of a text, from the last hidden states ``(T, D)`` of its tokens.

        The first `prompt_tokens` are those of the prompt, which may not count.
        """
        start = 0 if self._reads_prompt else prompt_tokens
        states = states[start:].float()
        places = torch.arange(start + 1.0, start + len(states) + 1.0)
        poolings = {
            "cls": lambda: states[0],
            "max": lambda: states.amax(dim=0),
            "mean": lambda: states.mean(dim=0),
            "mean_sqrt_len_tokens": lambda: states.sum(dim=0) / len(states) ** 0.5,
            "weightedmean": lambda: places @ states / places.sum(),
            "lasttoken": lambda: states[-1],
        }
        vector = torch.cat([poolings[mode]() for mode in self._modes])
        for layer in self._layers:
            vector = layer(vector)
        return vector


def _read_layer(kind: str, folder: Path) -> Callable[[Tensor], Tensor]:
    """Return a layer with weights; its activation is one of torch."""
    file = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), folder / _WEIGHTS[0])
    tensors = {name: tensor.float() for name, tensor in load_tensors(file, f"weights {file}").items()}
    if kind == "LayerNorm":
        weight, bias = tensors["norm.weight"], tensors["norm.bias"]
        return lambda vector: F.layer_norm(vector, weight.shape, weight, bias)
    config = read_json(folder / "config.json")
    name = config.get("activation_function", "")
    activation = getattr(nn, name.rpartition(".")[2] if name.startswith("torch.") else "Tanh")()
    weight, bias = tensors["linear.weight"], tensors.get("linear.bias")
    return lambda vector: activation(F.linear(vector, weight, bias))
