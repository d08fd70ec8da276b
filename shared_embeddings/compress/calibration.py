"""What an error of a word's vector costs the predictions of a model: a metric for each of its tables.

To second order, an error δ of the vector of a word raises the Kullback-Leibler divergence of the predictions
by about ``δ M δᵀ / 2`` times the importance of the word: how often it is read, and the mean of p (1 - p) over
its shares p of predictions, which words that no text contains have, too. M = H + F: the output side has H,
the mean of ``(1 - sum p²) h hᵀ`` over the hidden states h that are scored with the shares p; the input side
has F, the mean of ``g gᵀ`` over the gradients g, with respect to the vector that was looked up, of the
log-probability of a word that the model itself draws (the Fisher information). Where rows are not those of
words, but of hashed n-grams, the importance of a row is how often it is read.
`shared_embeddings.quant.metric` rounds with it.

Axes: ``n`` predictions, ``S`` width of the hidden states, ``D`` model dimension, ``V`` vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shared_embeddings.checkpoints import load_tensors, save_safetensors, state_digest
from shared_embeddings.compress.host import EmbeddingTable, TrainedModel
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import replacing
from shared_embeddings.utils.progress import progress_bar

# The suffix of names of shares in files.
_SHARES = ".shares"
# Words that are scored at a time.
_ROWS = 2**14
# Predictions that are read, and those whose shares of all words are added up if others score some words only.
TOKENS, _SHARED = 12_000, 2_048


class Calibration(NamedTuple):
    """What errors of a table count."""

    metric: Tensor  # ``(D, D)``, of rows
    # ``(V,)``, of words, by their shares of predictions; of look-ups for rows that are not those of words;
    # zeros for other tables that do not score.
    shares: Tensor


def calibrate(
    model: TrainedModel,
    tables: Sequence[EmbeddingTable],
    texts: Sequence[Path] | None,
    seed: int,
    tokens: int = TOKENS,
    progress: bool = True,
) -> dict[str, Calibration]:
    """Return what errors of a model's own tables count, by name, from one pass over texts.

    Args:
        texts: what the model reads; None for what it generates.
        seed: of the sample of lines, and of the words that are drawn.
        tokens: about how many predictions.
    """
    sums = {table.name: torch.zeros(2, *[table.table.size(1)] * 2) for table in tables}
    of_words = {table.name: torch.zeros(len(table.table)) for table in tables}
    draw, read = torch.Generator().manual_seed(seed), 0
    samples = model.samples(texts, seed, tokens)
    lookups = {name: samples.lookups[name] for name in sums if samples.lookups.get(name)}
    bar = progress_bar(len(samples.parts), "calibration", " batches", disable=not progress)
    with contextlib.closing(bar), _watched(lookups) as vectors, torch.set_grad_enabled(bool(lookups)):
        for scores, hidden, _ in samples.batches():
            shares = scores.detach().float().softmax(dim=-1)
            # The sum over words of p (1 - p): certain predictions do not change.
            doubts = (1.0 - shares.square().sum(dim=1, keepdim=True)).clamp(min=0.0)
            for table in tables:
                if table.is_scored and hidden is not None:
                    states = hidden.detach().float()
                    _add(sums[table.name][0], states * doubts.sqrt())
                    if shares.size(1) == len(table.table):
                        of_words[table.name] += (shares * (1.0 - shares)).sum(dim=0)
                    elif read < _SHARED and states.size(1) == table.table.size(1):
                        of_words[table.name] += _doubts(states, table.table)
            if lookups:
                drawn = torch.multinomial(shares, 1, generator=draw)
                slopes = shares.scatter_add_(1, drawn, torch.full_like(doubts, -1.0))
                leaves = [leaf for _, _, leaf in vectors]
                gradients = torch.autograd.grad(scores, leaves, slopes.to(scores), allow_unused=True)
                for (name, scale, _), gradient in zip(vectors, gradients):
                    if gradient is not None:
                        _add(sums[name][1], gradient * scale)
            vectors.clear()
            read += len(scores)
            bar.update()
    shares_of = {name: sums_of_words / max(read, 1) for name, sums_of_words in of_words.items()}
    if not all(table.words for table in tables):
        counted = model.count_rows(texts, seed)
        shares_of |= {name: normalized(counts).float() for name, counts in counted.items()}
    measured = {
        name: Calibration(parts.sum(dim=0) / max(read, 1), shares_of[name]) for name, parts in sums.items()
    }
    return {name: calibration for name, calibration in measured.items() if bool(calibration.metric.any())}


@contextlib.contextmanager
def _watched(
    lookups: Mapping[str, Mapping[nn.Module, float]],
) -> Iterator[list[tuple[str, float, Tensor]]]:
    """Collect the vectors that layers look up: the table's name, the scale of its gradients, and a leaf."""
    vectors: list[tuple[str, float, Tensor]] = []

    def watch(name: str, scale: float) -> Callable[..., Tensor]:
        def collect(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            leaf = output.detach().requires_grad_()
            vectors.append((name, scale, leaf))
            return leaf.clone()  # BLT changes it in place

        return collect

    with contextlib.ExitStack() as hooks:
        for name, modules in lookups.items():
            for module, scale in modules.items():
                hooks.callback(module.register_forward_hook(watch(name, scale)).remove)
        yield vectors


def normalized(shares: Tensor) -> Tensor:
    """Return shares ``(V,)`` as parts of their sum, in double precision; zeros if all are."""
    return shares.double() / shares.double().sum().clamp(min=torch.finfo(torch.float64).tiny)


def merged(measured: Sequence[Mapping[str, Calibration]]) -> dict[str, Calibration]:
    """Return one calibration for each table from those on several kinds of texts, which count alike.

    Gradients on unusual texts are several times as large as on others, so that metrics are scaled first.
    """
    tables: dict[str, Calibration] = {}
    for name in measured[0]:
        several = [of_tables[name] for of_tables in measured if name in of_tables]
        size = several[0].metric.trace()
        metric = torch.stack([part.metric * (size / part.metric.trace()) for part in several]).mean(dim=0)
        shares = torch.stack([normalized(part.shares) for part in several]).mean(dim=0)
        tables[name] = Calibration(metric, shares.float())
    return tables


def _doubts(states: Tensor, table: Tensor) -> Tensor:
    """The sums ``(V,)`` of p (1 - p) over predictions ``(n, D)``, with little memory besides ``(n, V)``."""
    shares = states.new_empty(len(states), len(table))
    for part, rows in zip(shares.split(_ROWS, dim=1), table.split(_ROWS)):
        part.copy_(states @ rows.t().float())
    shares.sub_(shares.logsumexp(dim=1, keepdim=True)).exp_()
    sums = shares.sum(dim=0)
    return sums.sub_(shares.square_().sum(dim=0))


def _add(total: Tensor, vectors: Tensor) -> None:
    """Add the products of vectors ``(..., D)`` to their sum, unless their width is not that of the table."""
    flat = vectors.reshape(-1, vectors.size(-1)).float()
    if flat.size(1) == total.size(0):
        total.addmm_(flat.t(), flat)


def read_calibration(path: Path, tables: Sequence[EmbeddingTable]) -> dict[str, Calibration]:
    """Return what `write_calibration` wrote for the same tables; UserError for others."""
    tensors = load_tensors(path, f"calibration {path}")
    if tensors.pop("model", torch.empty(0)).tolist() != list(_digest_of(tables)):
        raise UserError(f"calibration {path}: is of another model; remove it or name another file")
    sizes = {table.name: table.table.shape for table in tables if table.name in tensors}
    names, expected = list(sizes), {name + _SHARES: [size[0]] for name, size in sizes.items()}
    expected |= {name: [size[1], size[1]] for name, size in sizes.items()}
    usable = {
        name: list(tensor.shape)
        for name, tensor in tensors.items()
        if tensor.dtype == torch.float32 and bool(tensor.isfinite().all())
    }
    if not names or usable != expected or usable.keys() != tensors.keys():
        raise UserError(
            f"calibration {path}: has other tensors than are measured for this model; remove it to measure "
            "again"
        )
    return {name: Calibration(tensors[name], tensors[name + _SHARES]) for name in names}


def write_calibration(
    path: Path, tables: Sequence[EmbeddingTable], calibrations: Mapping[str, Calibration]
) -> None:
    """Write calibrations to a safetensors file, with a checksum of the tables."""
    metrics = {name: calibration.metric for name, calibration in calibrations.items()}
    shares = {name + _SHARES: calibration.shares for name, calibration in calibrations.items()}
    with replacing(path) as temporary:
        mark = torch.frombuffer(_digest_of(tables), dtype=torch.uint8)
        save_safetensors({**metrics, **shares, "model": mark}, temporary)


def _digest_of(tables: Sequence[EmbeddingTable]) -> bytearray:
    """Return the SHA-256 of all tables, by which a file is recognized as of the same model."""
    return bytearray.fromhex(state_digest({table.name: table.table for table in tables}))
