"""Load and save compressed Hugging Face models.

Compress a model with ``shared-embeddings compress --model DIR --method funnel --rank 64 --output SMALL``.
Importing this package registers it with transformers, whose ``from_pretrained`` then loads such folders:

    >>> import shared_embeddings.hf
    >>> from transformers import AutoModelForCausalLM             # doctest: +SKIP
    >>> model = AutoModelForCausalLM.from_pretrained("small")     # doctest: +SKIP
    >>> model.generate(ids, max_new_tokens=20)                    # doctest: +SKIP
    >>> model.save_pretrained("tuned")                            # doctest: +SKIP

`load` does the same for the class that the folder names, and checks the folder more strictly. Tensors that
``--store`` packed stay packed and frozen, and `save_pretrained` writes them as they are;
``model.dequantize()`` makes them parameters.

Where this package is not imported, ``from_pretrained`` warns of an unknown quantization type and fails with a
shape mismatch at the word embeddings.
"""

from importlib.util import find_spec

from shared_embeddings.hf.folder import load, save

__all__ = ["load", "save"]

if find_spec("transformers") is not None:
    import shared_embeddings.hf.quantizer  # noqa: F401
