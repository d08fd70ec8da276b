"""How each method is fitted to a trained table; see `shared_embeddings.fitting.fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared_embeddings.embedding import CODE_SCALE, SharedEmbedding, zero_padding_row
from shared_embeddings.fitting import codes as word_codes
from shared_embeddings.fitting import groups, nonnegative, svd, tensor_train
from shared_embeddings.fitting.fit import FitTask, reconstruct
from shared_embeddings.options import OptionError, parse_options
from shared_embeddings.registry import method_class

# Factors are as good as the best when their distance from the table is larger by no more than this share,
# or than what 32 bits lose of the length of the rows.
_NOTHING_LOST = 1e-3
_ROUNDING = 1e-5
# Activations with f(a x) = a f(x) for all a > 0; None is no activation.
_HOMOGENEOUS = (None, "relu")

Fitter = Callable[[FitTask], SharedEmbedding]
_fitters: dict[str, Fitter] = {}


def find(method: str) -> Fitter:
    """The way to fit `method`: its own, or gradient descent."""
    return _fitters.get(method, _by_gradient)


def fits(method: str) -> Callable[[Fitter], Fitter]:
    """Decorator: make a function known as the way to fit `method`."""

    def add(fitter: Fitter) -> Fitter:
        _fitters[method] = fitter
        return fitter

    return add


@torch.no_grad()
def _with_small_codes(codes: Tensor, basis: Tensor) -> None:
    """Scale codes ``(V, R)`` down and the basis ``(R, D)`` up, so that their product stays as it is.

    The codes become as small beside the table as those of a new embedding, so that training goes on as
    quickly as it does from there, see `interface.CODE_SCALE`. Not for codes that a ReLU takes: what lifted
    them makes them larger than what tells them apart.
    """
    size = codes.square().mean().sqrt()
    if size > 0:
        factor = CODE_SCALE * (codes @ basis).square().mean().sqrt() / size
        codes.mul_(factor)
        basis.div_(factor)


@torch.no_grad()
def _to_scale(scale: float, activation: str | None, codes: Tensor, basis: Tensor) -> None:
    """Take factors ``(V, R)`` and ``(R, D)`` of a table divided by `scale` to the table's own scale.

    The codes bear it where the activation lets a factor through: Adam moves all entries alike, so that with
    lifted codes of unit scale every step of the basis would move the table by a multiple of itself. A small
    AWD-LSTM with GroupReduce ended an epoch at a validation perplexity of 131.7 with such codes, at 118.9
    without; the fit was at 120.9.
    """
    (codes if activation in _HOMOGENEOUS else basis).mul_(scale)


@fits("standard")
def _copied(task: FitTask) -> SharedEmbedding:
    """The teacher's table itself."""
    embedding = task.build()
    with torch.no_grad():
        embedding.weight.copy_(task.teacher)
    return embedding


@fits("projective")
def _decomposed(task: FitTask) -> SharedEmbedding:
    """The truncated SVD (Distilled Embedding, Eq. 2): no table of this rank has a smaller squared error."""
    embedding = task.build()
    codes, basis = svd.truncated_svd(task.teacher, embedding.options.rank)
    with torch.no_grad():
        embedding.codes.copy_(codes)
        embedding.basis.copy_(basis)
    _with_small_codes(embedding.codes, embedding.basis)
    return embedding


@fits("adaptive")
def _decomposed_bands(task: FitTask) -> SharedEmbedding:
    """Every band by its own truncated SVD, or as it is; clusters by the mean of their words."""
    embedding = task.build()
    if embedding.map is not None:
        return reconstruct(embedding, task)
    options, dim = embedding.options, embedding.embedding_dim
    blocks = task.teacher.split(list(options.sizes(embedding.num_embeddings)))
    with torch.no_grad():
        for band, (block, width) in enumerate(zip(blocks, options.widths(dim), strict=True)):
            is_projected = width < dim or (band == 0 and options.head_projection == "both")
            codes, basis = _factors_of_band(block, width, is_projected)
            for tables in (embedding.tables, embedding.output_tables):
                if tables is not None:
                    tables[str(band)].copy_(codes)
            for projections in (embedding.projections, embedding.output_projections):
                projection = projections.get(str(band)) if projections is not None else None
                # Of hidden states with a width of their own the table says nothing.
                if projection is not None and projection.shape == basis.shape:
                    projection.copy_(basis)
            if band == 0:
                head = basis
            elif embedding.clusters is not None:
                # The nearest to the mean of all that the head can project: its rows are orthonormal.
                embedding.clusters[band - 1] = head @ block.mean(dim=0)
    return embedding


def _factors_of_band(block: Tensor, width: int, is_projected: bool) -> tuple[Tensor, Tensor]:
    """The codes ``(n, width)`` and the projection ``(width, D)`` of the words of a band ``(n, D)``."""
    if is_projected:
        return svd.truncated_svd(block, width)
    return block, torch.eye(width, dtype=block.dtype, device=block.device)


@fits("funnel")
def _funnelled(task: FitTask) -> SharedEmbedding:
    """The factors with the least mean distance; gradient descent where a ReLU does not let them through."""
    scaled, scale = task.at_unit_scale()
    embedding = scaled.build()
    is_best = embedding.options.activation == "relu" and _start_of_funnel(embedding, scaled)
    if not is_best:
        reconstruct(embedding, scaled)
    _to_scale(scale, embedding.options.activation, embedding.codes, embedding.basis)
    return embedding


def _start_of_funnel(embedding: Any, task: FitTask) -> bool:
    """Fill in factors without negative codes; whether they are as good as the best of this rank."""
    table = task.teacher[task.words()]
    codes, basis = nonnegative.least_mean_distance(table, embedding.options.rank)
    best = nonnegative.mean_distance(table, codes, basis)
    codes, basis = nonnegative.without_negatives(codes, basis)
    with torch.no_grad():
        embedding.codes[task.words()] = codes
        embedding.basis.copy_(basis)
        zero_padding_row(embedding.codes, task.padding_idx)
    allowed = best * (1.0 + _NOTHING_LOST) + _ROUNDING * float(table.norm(dim=1).mean())
    return nonnegative.mean_distance(table, codes, basis) <= allowed


@fits("group_reduce")
def _reduced_groups(task: FitTask) -> SharedEmbedding:
    """Weighted SVDs of frequency groups, refined; with an activation, gradient descent from there.

    Without counts, words are taken to be sorted by frequency and to follow Zipf's law.
    """
    options = task.build().options
    if options.num_groups is None:
        raise OptionError(
            "group_reduce: fitting finds 'group_sizes' and 'ranks' itself; give 'num_groups' and 'min_rank'"
        )
    counts = task.token_counts
    if counts is None:
        counts = 1.0 / torch.arange(1, len(task.teacher) + 1, dtype=torch.float64)
    asked = (options.num_groups, options.min_rank, options.max_rank)
    scaled, scale = task.at_unit_scale()
    found = groups.group_reduce(scaled.teacher, counts, *asked)
    layout = {
        "group_sizes": [len(codes) for codes in found.codes],
        "ranks": [len(basis) for basis in found.bases],
    }
    kept = {name: task.options[name] for name in task.options if name in ("activation", "output_bias")}
    embedding = task.build_with({**layout, **kept})
    with torch.no_grad():
        embedding.groups.copy_(found.groups)
        for group, (codes, basis) in enumerate(zip(found.codes, found.bases, strict=True)):
            if options.activation == "relu":
                codes, basis = nonnegative.without_negatives(codes, basis)
            embedding.codes[group].copy_(codes)
            embedding.bases[group].copy_(basis)
    if options.activation is not None:
        reconstruct(embedding, scaled)
    for codes, basis in zip(embedding.codes, embedding.bases, strict=True):
        _to_scale(scale, options.activation, codes, basis)
        if options.activation is None:
            _with_small_codes(codes, basis)
    return embedding


@fits("tensor_train")
def _train_of_cores(task: FitTask) -> SharedEmbedding:
    """TT-SVD."""
    embedding = task.build()
    options = embedding.options
    cores = tensor_train.tt_svd(task.teacher, options.vocab_shape, options.dim_shape, options.rank)
    with torch.no_grad():
        for parameter, core in zip(embedding.cores, cores, strict=True):
            parameter.copy_(core)
    return embedding


@fits("structured")
def _quantised(task: FitTask) -> SharedEmbedding:
    """Product quantisation by k-means."""
    embedding = task.build()
    sizes = (embedding.options.num_groups, embedding.options.num_clusters)
    codes, centroids = word_codes.product_quantisation(task.teacher, *sizes, task.seed, task.progress)
    with torch.no_grad():
        embedding.codes.copy_(codes)
        embedding.centroids.copy_(centroids)
    return embedding


@fits("compositional_code")
def _coded(task: FitTask) -> SharedEmbedding:
    """Codes learnt with the Gumbel-softmax (Shu & Nakayama), codebooks by least squares."""
    embedding = task.build()
    sizes = (embedding.options.num_codebooks, embedding.options.codebook_size)
    steps = {} if task.steps is None else {"steps": task.steps}
    codes, codebooks = word_codes.learn_codes(
        task.teacher, *sizes, seed=task.seed, progress=task.progress, **steps
    )
    with torch.no_grad():
        embedding.codes.copy_(codes)
        embedding.codebooks.copy_(codebooks)
    return embedding


@fits("uncle")
def _shared_parts(task: FitTask) -> SharedEmbedding:
    """Own parts from the teacher and class vectors as means, then gradient descent.

    Without classes in the options, the parts that classes share are clustered by k-means.
    """
    options = dict(task.options)
    if not options.get("classes") and not options.get("random_classes"):
        options["classes"] = _classes_of_parts(task).tolist()
    embedding = task.build_with(options)
    unique, *shared = task.teacher.split(list(embedding.widths), dim=1)
    words = task.words()
    with torch.no_grad():
        embedding.unique.copy_(unique)
        for level, (table, part) in enumerate(zip(embedding.class_tables, shared, strict=True)):
            classes = embedding.classes[words, level].long()
            sums = torch.zeros_like(table).index_add_(0, classes, part[words])
            sizes = classes.bincount(minlength=len(table)).clamp(min=1)
            table.copy_(sums / sizes.unsqueeze(1))
    return reconstruct(embedding, task)


def _classes_of_parts(task: FitTask) -> Tensor:
    """The class ``(V,)`` of every word, by k-means over what is left of the teacher's rows beside U_d."""
    options_class = method_class(task.method).options_class
    options: Any = parse_options(task.method, options_class, {**task.options, "classes": "stored"})
    if not isinstance(options.num_classes, int):
        raise OptionError(
            f"uncle: option 'num_classes' is {options.num_classes}, but fitting makes one level of classes; "
            "give one number, or 'classes'"
        )
    part = task.teacher[:, options.unique_dim :]
    if part.size(1) == 0:
        raise OptionError(
            f"uncle: option 'unique_dim' is {options.unique_dim}, which leaves nothing to share; lower it"
        )
    codes, _ = word_codes.product_quantisation(part, 1, options.num_classes, task.seed, task.progress)
    return codes.flatten()


def _by_gradient(task: FitTask) -> SharedEmbedding:
    """Gradient descent from the method's own start, for methods without an algorithm of their own."""
    return reconstruct(task.build(), task)
