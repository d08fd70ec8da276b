"""Load and save compressed Hugging Face models.

Compress a model with ``shared-embeddings compress --model DIR --method funnel --rank 64 --output SMALL``.
`load` returns a regular transformers model: `generate`, `Trainer` and `save_pretrained` work, and `load` also
reads the output of `save_pretrained`. `load` unpacks tensors that ``--store`` packed; `save_pretrained`
writes them in the dtype of the model.

    >>> from shared_embeddings import hf
    >>> model = hf.load("small")                          # doctest: +SKIP
    >>> model.generate(ids, max_new_tokens=20)            # doctest: +SKIP
    >>> model.save_pretrained("tuned")                    # doctest: +SKIP

``from_pretrained`` of transformers fails on such a folder with a shape mismatch at the word embeddings,
rather than initializing them randomly. The word embeddings cannot be resized. For training on several GPUs,
use ``torchrun`` instead of ``nn.DataParallel``.
"""

from shared_embeddings.hf.loading import load
from shared_embeddings.hf.saving import save

__all__ = ["load", "save"]
