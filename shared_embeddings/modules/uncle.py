"""UnClE: the vector of a word is a narrow unique part and the vector of its class."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.embedding import Layer, SharedEmbedding
from shared_embeddings.fitting.codes import class_centers, product_quantization
from shared_embeddings.fitting.task import FitTask
from shared_embeddings.loss import (
    SCORES,
    Gradients,
    LossSettings,
    ScoreTerms,
    blockwise_cross_entropy,
    sum_dtype,
)
from shared_embeddings.nn.layers import code_bits, entry_std, zero_padding_row
from shared_embeddings.quant.packed_tensor import column_sums
from shared_embeddings.registry import register
from shared_embeddings.spec import EmbeddingOptions, Options, Presets, SearchGrid
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import (
    STORED,
    OptionError,
    option,
    parse_options,
    plain_options,
    require,
    require_effect,
)
from shared_embeddings.words.classes import WordClasses

Source = str | tuple[int, ...]


def load_level(
    source: Source, num_classes: int | None, num_embeddings: int, words: Sequence[str] | None = None
) -> tuple[int, np.ndarray]:
    """Return the number of classes at a level, and the class ``(V,)`` of every word.

    Args:
        source: a class file, or one index for each word.
        num_classes: how many classes there must be, if given.
        num_embeddings: V.
        words: the V words, by which those of a class file are looked up; by default it has the same ones.

    Raises:
        OptionError: the class file cannot be read or is of other words, or a class is out of range.
    """
    if isinstance(source, str):
        named = f"the class file {source}"
        try:
            loaded = WordClasses.load(source)
            loaded = loaded if words is None else loaded.for_vocabulary(words)
        except UserError as error:
            reason = str(error) if source in str(error) else f"{source}: {error}"
            raise OptionError(f"option 'classes': {reason}") from None
        require(
            num_classes in (None, loaded.num_classes),
            f"option 'num_classes' is {num_classes}, but {source} has {loaded.num_classes} classes; "
            "remove it",
        )
        assignment, known = loaded.classes, loaded.num_classes
    else:
        named = "option 'classes'"
        assignment, known = np.asarray(source), num_classes or max(source) + 1
    require(
        len(assignment) == num_embeddings,
        f"{named} has {len(assignment)} words, but the vocabulary has {num_embeddings}; make the classes of "
        "this vocabulary",
    )
    wrong = assignment[(assignment < 0) | (assignment >= known)]
    require(
        wrong.size == 0,
        f"{named} has a class {wrong[0] if wrong.size else ''}, but classes are from 0 to {known - 1}; "
        "change it or 'num_classes'",
    )
    return known, assignment


def plain_classes(value: Any) -> object:
    """The option `classes` in plain types: paths as strings, arrays and tensors as lists."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (np.ndarray, np.generic, Tensor)):
        return value.tolist()
    return [plain_classes(item) for item in value] if isinstance(value, (list, tuple)) else value


# Words whose scores are added at a time if there are several levels of classes.
_PIECE = 2048


def class_index(classes: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The words of the classes in one stack of all K classes, from `classes` ``(V, L)`` in levels of `sizes`.

    Returns the position ``(L, V)`` of a word's class in the stack, for every level; the words ``(L * V,)`` of
    the first class, then of the second, and so on; and where those of each class begin, and the end
    ``(K + 1,)``.
    """
    firsts = [sum(sizes[:level]) for level in range(len(sizes))]
    stacked = torch.stack([classes[:, level].long() + first for level, first in enumerate(firsts)])
    ordered, places = torch.sort(stacked.flatten(), stable=True)
    starts = torch.searchsorted(ordered, torch.arange(sum(sizes) + 1, device=classes.device))
    return stacked, places % classes.size(0), starts


class _ClassScores:
    """Scores of words with shared parts; see `LinearScores` for the methods.

    The factors are hidden states ``(N, D)``, unique parts ``(V, U)`` for the first U dimensions, and class
    tables ``(C, width)`` for those that follow; the index is that of `class_index`.
    """

    kind = "classes"
    word_axis = 0

    def __init__(
        self,
        factors: Sequence[Tensor],
        index: Sequence[Tensor],
        settings: LossSettings,
        weights: Tensor,
        wants: Sequence[bool],
        error_dtype: torch.dtype,
    ) -> None:
        hidden, *tables = factors
        self.weights, self.error_dtype = weights, error_dtype
        self.classes, self.members, self.starts = index
        self.masked_word = settings.masked_word
        self.words = tables[0].size(0)
        self.dtype = sum_dtype(hidden)
        self.tables = [table.to(settings.product_dtype) for table in tables]
        self.widths = [table.size(1) for table in tables]
        self.hidden = hidden.to(settings.product_dtype)
        self.parts = self.hidden.split(self.widths, dim=1)
        # ``(K,)`` the number of words of each class, without the masked one.
        self.class_sizes = self.starts.diff().to(self.dtype)
        if self.masked_word is not None:
            self.class_sizes[self.classes[:, self.masked_word]] -= 1.0
        # ``(D,)`` the sum of the rows of all words but the masked one.
        self.table_sum: Tensor | None = None
        if settings.label_smoothing:
            unique, *levels = tables
            total = column_sums(unique, self.dtype)
            if self.masked_word is not None:
                total = total - unique[self.masked_word].to(self.dtype)
            sizes = self.class_sizes.split([level.size(0) for level in levels])
            shared = (size @ level.to(self.dtype) for size, level in zip(sizes, levels))
            self.table_sum = torch.cat((total, *shared))

        wants_hidden, *wants_tables = wants
        self.of_hidden = self.hidden.new_empty(self.hidden.shape, dtype=self.dtype) if wants_hidden else None
        self.of_tables = [
            torch.zeros_like(table, dtype=self.dtype) if wanted else None
            for table, wanted in zip(self.tables, wants_tables)
        ]
        if any(wants):
            self.error_tables = [table.to(error_dtype) for table in self.tables]

    def fill(self, rows: slice, scores: Tensor, low: Tensor | None) -> None:
        unique, *levels = self.tables
        of_unique, *of_levels = (part[rows].t() for part in self.parts)
        by_class = torch.cat([level @ part for level, part in zip(levels, of_levels)]).to(self.dtype)
        first, *others = self.classes
        torch.index_select(by_class, 0, first, out=scores)
        for classes in others:
            # In pieces, so that no second block of scores is needed.
            for piece, block in zip(scores.split(_PIECE), classes.split(_PIECE)):
                piece.add_(by_class.index_select(0, block))
        if low is None:
            scores.addmm_(unique, of_unique)
        else:
            scores.add_(torch.mm(unique, of_unique, out=low))

    def summed(self, rows: slice) -> Tensor:
        assert self.table_sum is not None
        return self.hidden[rows].to(self.dtype) @ self.table_sum

    def add_gradients(self, rows: slice, errors: Tensor, low: Tensor | None) -> None:
        by_class = F.embedding_bag(self.members, errors, self.starts, mode="sum", include_last_offset=True)
        by_level = by_class.to(self.error_dtype).split([table.size(0) for table in self.tables[1:]])
        errors = errors if low is None else low.copy_(errors)
        weights, columns = self.weights[rows], 0
        for number, part_errors in enumerate((errors, *by_level)):
            if self.of_hidden is not None:
                part = self.of_hidden[rows, columns : columns + self.widths[number]]
                part.copy_(torch.mm(part_errors.t(), self.error_tables[number])).mul_(weights)
            columns += self.widths[number]
            gradient = self.of_tables[number]
            if gradient is not None:
                hidden = (self.parts[number][rows] * weights).to(self.error_dtype)
                if gradient.dtype == part_errors.dtype:
                    gradient.addmm_(part_errors, hidden)
                else:
                    gradient.add_(torch.mm(part_errors, hidden))

    def finish_gradients(self, smoothing: float) -> Gradients:
        if self.table_sum is None:
            return [self.of_hidden, *self.of_tables]
        if self.of_hidden is not None:
            self.of_hidden.sub_(self.weights * self.table_sum, alpha=smoothing)
        total = (self.hidden.to(self.dtype) * self.weights).sum(dim=0)
        of_unique, *of_levels = total.split(self.widths)
        unique, *levels = self.of_tables
        if unique is not None:
            unique.sub_(of_unique, alpha=smoothing)
            if self.masked_word is not None:
                unique[self.masked_word] = 0.0
        sizes = self.class_sizes.split([table.size(0) for table in self.tables[1:]])
        for level, size, of_level in zip(levels, sizes, of_levels):
            if level is not None:
                level.addr_(size, of_level, alpha=-smoothing)
        return [self.of_hidden, *self.of_tables]


SCORES[_ClassScores.kind] = _ClassScores


@dataclasses.dataclass(frozen=True)
class UncleOptions(EmbeddingOptions["UncleEmbedding"]):
    """Options of `uncle`. With several classes per word (Eq. 2), there are levels with their own widths."""

    paper = "UnClE, Eq. 1 and 2"
    summary = "V x U_d, and one vector for each class of words"
    grid_choice = "V / 11 classes, the largest unique part; replace random classes by your class file"
    fit_bound = 0.55
    file_options = ("classes",)

    unique_dim: int = option("U_d, the width of the unique part of every word, less than D.", minimum=1)
    num_classes: int | tuple[int, ...] | None = option(
        "C_s, the number of classes, or a list with one number for each level; by default that of the class "
        "file, or one more than the largest given class.",
        None,
        minimum=1,
    )
    classes: Source | tuple[Source, ...] | None = option(
        "The class of each word: a file made by 'shared-embeddings classes', or the V class indices; a list "
        'with one of these for each level; or "stored" for an assignment that the state dict contains.',
        None,
        repr=False,
    )
    random_classes: bool = option("Assigns random classes instead (section 4.6.1).", False)
    seed: int = option("The seed of random classes.", 0, minimum=0)
    class_dims: tuple[int, ...] | None = option(
        "C_d of each level, D - unique_dim in total; an even split by default.", None, minimum=1
    )

    def __post_init__(self) -> None:
        require(
            self.classes is not None or self.random_classes,
            "option 'classes' is missing; give a class file, or set random_classes: true. Without class "
            f"embeddings the paper's ablation is method 'projective' with rank {self.unique_dim}",
        )
        require(
            self.classes is None or not self.random_classes,
            "option 'random_classes' contradicts 'classes'; remove one of them",
        )
        if not self.random_classes:
            require_effect(self, ("seed",), "without 'random_classes'")
        known = "'random_classes'" if self.random_classes else "classes 'stored'"
        require(
            self.num_classes is not None or not (self.random_classes or self.classes == STORED),
            f"option 'num_classes' is missing; {known} needs it",
        )
        require(
            self.classes not in ((), ""),
            f"option 'classes' is {self.classes!r}; give a class file or one class for each word",
        )
        for name in ("num_classes", "class_dims"):
            values = getattr(self, name)
            count = len(values) if isinstance(values, tuple) else 1
            require(
                values is None or 0 < count == len(self.levels()),
                f"option '{name}' has {count} numbers; give one for each level of classes",
            )

    def levels(self) -> list[tuple[Any, Any]]:
        """Return the class file or the class indices of each level, and its number of classes, if given."""
        numbers = self.num_classes if isinstance(self.num_classes, tuple) else None
        sources: Sequence[Any]
        if self.classes is None or self.classes == STORED:
            sources = [None] * (1 if numbers is None else len(numbers))
        elif isinstance(self.classes, str) or isinstance(self.classes[0], int):
            sources = [self.classes]
        else:
            sources = self.classes
        if numbers is None:
            return [(source, self.num_classes) for source in sources]
        return [(source, dict(enumerate(numbers)).get(level)) for level, source in enumerate(sources)]

    def assignments(self, num_embeddings: int) -> list[tuple[int, np.ndarray]]:
        """Return the number of classes at every level, and the class ``(V,)`` of every word."""
        random, levels = np.random.default_rng(self.seed), []
        for source, count in self.levels():
            if source is not None:
                levels.append(load_level(source, count, num_embeddings))
            elif self.random_classes:
                levels.append((count, random.integers(count, size=num_embeddings)))
            else:  # a placeholder until the stored assignment is loaded
                levels.append((count, np.arange(num_embeddings) % count))
        return levels

    def widths(self, embedding_dim: int) -> tuple[int, ...]:
        if self.class_dims is not None:
            return self.class_dims
        rest, levels = embedding_dim - self.unique_dim, len(self.levels())
        return tuple(rest // levels + (level < rest % levels) for level in range(levels))

    @classmethod
    def normalize(cls, values: dict[str, object], words: Sequence[str] | None = None) -> dict[str, object]:
        if "classes" in values:
            values = {**values, "classes": plain_classes(values["classes"])}
        if words is None:
            return values
        # Words that a file lacks, such as a host's markers, are like words that never occurred.
        options = parse_options(cls.method, UncleOptions, values)
        if options.classes in (None, STORED):
            return values
        try:
            levels = [load_level(*level, len(words), words) for level in options.levels()]
        except OptionError as error:
            raise OptionError(f"{cls.method}: {error}") from None
        return {
            **values,
            "classes": [assignment.tolist() for _, assignment in levels],
            "num_classes": [count for count, _ in levels],
        }

    def check_sizes(self, num_embeddings: int, embedding_dim: int) -> None:
        require(
            self.unique_dim < embedding_dim,
            f"option 'unique_dim' is {self.unique_dim}, which leaves no dimension of {embedding_dim} for "
            "class embeddings; lower it, or use method 'standard'",
        )
        widths, rest = self.widths(embedding_dim), embedding_dim - self.unique_dim
        require(
            sum(widths) == rest and min(widths) > 0,
            f"option 'class_dims' is {list(widths)}, but the widths must be at least 1 and add up to the "
            f"{rest} dimensions that 'unique_dim' leaves; change one of the two",
        )
        for count, _ in self.assignments(num_embeddings):
            require(
                count <= num_embeddings,
                f"option 'num_classes' is {count}, more than {num_embeddings} words; lower it",
            )

    def count_parameters(self, num_embeddings: int, embedding_dim: int) -> int:
        """V_s U_d + C_s C_d (Eq. 3), the last summed over the levels."""
        levels = zip(self.assignments(num_embeddings), self.widths(embedding_dim))
        return num_embeddings * self.unique_dim + sum(count * width for (count, _), width in levels)

    @classmethod
    def presets(cls, num_embeddings: int, embedding_dim: int) -> Presets:
        """V / 11 classes (appendix A.4), and all widths of the unique part."""
        classes = max(num_embeddings // 11, 1)
        grid = SearchGrid(
            embedding_dim - 1,
            lambda step: {"unique_dim": step + 1, "num_classes": classes, "random_classes": True},
        )
        example: Options = {"unique_dim": embedding_dim // 8, "num_classes": min(classes, 1000)}
        return Presets({"": {**example, "random_classes": True}}, [grid] if embedding_dim > 1 else [])


@register("uncle", UncleOptions)
class UncleEmbedding(SharedEmbedding):
    """Row i of the table is ``concatenate(U_i, C_j)`` (Eq. 1), with sub-classes ``(U_i, C_j, C_j1)`` (Eq. 2).

    Scores are tied: the score of a word's unique part plus those of its classes, each computed once.
    Sub-classes need not be subsets of classes.

    Parameters: `unique` U ``(V, U_d)``; `class_tables` C ``(C_s, C_d)`` for every level.
    Buffer: `classes` ``(V, L)``, saved with the parameters; loaded classes replace those of the options.
    """

    options: UncleOptions
    per_word = ("unique", "classes")
    scores_in_blocks = True
    classes: Tensor

    def create_parameters(self) -> None:
        levels = self.options.assignments(self.num_embeddings)
        self.num_classes = tuple(count for count, _ in levels)
        # The smallest type that NCCL supports, which excludes int16.
        dtype = torch.uint8 if max(self.num_classes) <= 2**8 else torch.int32
        # Kept until classes are loaded, so that parameters can be reset without the class file.
        assignment = np.stack([assignment for _, assignment in levels], axis=1)
        self._assignment: Tensor | None = torch.tensor(assignment, dtype=dtype, device="cpu")
        self.widths = (self.options.unique_dim, *self.options.widths(self.embedding_dim))
        self.unique = nn.Parameter(torch.empty(self.num_embeddings, self.options.unique_dim))
        self.class_tables = nn.ParameterList(
            torch.empty(count, width) for count, width in zip(self.num_classes, self.widths[1:])
        )
        self.register_buffer("classes", torch.empty(assignment.shape, dtype=dtype))
        self.buffer_bits["classes"] = sum(map(code_bits, self.num_classes))

    def init_weights(self) -> None:
        """Normal entries of std D**-0.5; the classes of the options, or those that were loaded."""
        if self._assignment is not None:
            self.classes.copy_(self._assignment)
        for parameter in (self.unique, *self.class_tables):
            nn.init.normal_(parameter, std=entry_std(self.embedding_dim))
        zero_padding_row(self.unique, self.padding_idx)

    def rows(self, ids: Tensor) -> Tensor:
        classes = self.classes.index_select(0, ids).long().unbind(dim=1)
        shared = (F.embedding(level, table) for level, table in zip(classes, self.class_tables))
        return torch.cat((F.embedding(ids, self.unique), *shared), dim=1)

    def layers(self, ids: Tensor) -> list[Layer]:
        rows = self.rows(ids)
        names = ["unique", *(f"classes {level}" for level in range(1, len(self.widths)))]
        parts = zip(names, rows.split(self.widths, dim=1))
        return [*(Layer(name, part) for name, part in parts), Layer("output", rows)]

    def _scores(self, hidden: Tensor) -> Tensor:
        first, *parts = hidden.split(self.widths, dim=-1)
        scores = F.linear(first, self.unique, self.output_bias())
        for part, table, classes in zip(parts, self.class_tables, self.classes.long().unbind(dim=1)):
            scores += F.linear(part, table).index_select(-1, classes)
        if self.padding_idx is not None:
            scores[..., self.padding_idx] = 0.0
        return scores

    def _token_loss(
        self, hidden: Tensor, targets: Tensor, ignore_index: int, *settings: Any
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        """Computes the scores of a class once for all of its words."""
        if self._scores_by_blocks():
            return super()._token_loss(hidden, targets, ignore_index, *settings)
        index = self.cached("index", lambda: class_index(self.classes, self.num_classes))
        bias, padding = self.output_bias(), self.padding_idx
        factors = (hidden, self.unique, *self.class_tables)
        terms = ScoreTerms(_ClassScores, factors, targets, ignore_index, bias, padding, index)
        loss, best = blockwise_cross_entropy(terms, *settings)
        return loss, lambda: best

    def stored_options(self) -> dict[str, object]:
        resolved = dataclasses.replace(
            self.options,
            num_classes=self.num_classes,
            class_dims=self.widths[1:],
            classes=STORED,
            random_classes=False,
            seed=0,
        )
        return plain_options(resolved)

    def state_for_ids(self, ids: Tensor) -> tuple[dict[str, object], dict[str, Tensor]]:
        options, state = super().state_for_ids(ids)
        used = [level.unique(return_inverse=True) for level in state["classes"].long().unbind(dim=1)]
        for level, (classes, _) in enumerate(used):
            state[f"class_tables.{level}"] = self.class_tables[level][classes]
        state["classes"] = torch.stack([renumbered for _, renumbered in used], dim=1)
        return {**options, "num_classes": [len(classes) for classes, _ in used]}, state

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if not self.classes.is_meta:
            # Otherwise resetting a module built with classes "stored" would discard the loaded classes.
            self._assignment = None

    @classmethod
    def fit(cls, task: FitTask) -> UncleEmbedding:
        """Unique parts copied from the teacher, and class vectors with the least mean distance.

        Without classes in the options, the rest of the rows is clustered by k-means.
        """
        options = dict(task.options)
        if not options.get("classes") and not options.get("random_classes"):
            count, dim = task.teacher.shape
            known = UncleOptions.resolve(count, dim, {**options, "classes": STORED})
            if not isinstance(known.num_classes, int):
                raise OptionError(
                    f"uncle: option 'num_classes' is {known.num_classes}, but a fit has one level of "
                    "classes; give one number, or 'classes'"
                )
            rest = task.teacher[:, known.unique_dim :]
            codes, _ = product_quantization(rest, 1, known.num_classes, task.seed, task.progress)
            options["classes"] = codes.flatten().tolist()
        embedding: UncleEmbedding = task.build(options)
        unique = task.teacher[:, : embedding.widths[0]]
        parts = task.teacher[:, embedding.widths[0] :].split(list(embedding.widths[1:]), dim=1)
        words = task.words()
        with torch.no_grad():
            embedding.unique.copy_(unique)
            tables = class_centers(parts, embedding.classes, words, embedding.num_classes)
            for table, centers in zip(embedding.class_tables, tables, strict=True):
                table.copy_(centers)
        return embedding
