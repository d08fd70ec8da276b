"""Hugging Face models with shared embeddings: `load` one that was compressed, `save` it again.

Models are compressed by ``shared-embeddings compress --model DIR --method funnel --rank 64 --output SMALL``.
What `load` gives is a model of the library transformers as any other: `generate`, `Trainer` and
`save_pretrained` work, and what `save_pretrained` writes is loaded by `load`, too. Numbers that ``--store``
has packed are unpacked by `load`, and written in the type of the model.

    >>> from shared_embeddings import hf
    >>> model = hf.load("small")                          # doctest: +SKIP
    >>> model.generate(ids, max_new_tokens=20)            # doctest: +SKIP
    >>> model.save_pretrained("tuned")                    # doctest: +SKIP

``from_pretrained`` of transformers refuses such a folder with "MISMATCH" at the word embeddings, rather than
give a model with random ones. The word embeddings cannot be resized, and one process drives one device:
training on several goes through ``torchrun``, not ``nn.DataParallel``.
"""

from shared_embeddings.hf.loading import load
from shared_embeddings.hf.saving import save

__all__ = ["load", "save"]
