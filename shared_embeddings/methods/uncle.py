"""UnClE: a word's vector is a narrow part of its own beside a part that it shares with its class."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.embedding import Layer, SharedEmbedding, entry_std, zero_padding_row
from shared_embeddings.layers.class_levels import Classes, class_levels, levels_for_vocabulary, plain_classes
from shared_embeddings.losses.class_factored import ClassIndex, class_cross_entropy, class_index
from shared_embeddings.options import (
    STORED,
    EmbeddingOptions,
    parse_options,
    plain_options,
    require,
    require_at_least,
)
from shared_embeddings.registry import register


@dataclasses.dataclass(frozen=True)
class UncleOptions(EmbeddingOptions):
    """Options of `uncle`. Several classes per word (Eq. 2) are several levels; each has a width of its own.

    Attributes:
        unique_dim: U_d, the width of the part of its own that every word has; less than D.
        num_classes: C_s, the number of classes; a list with one number for each level. A class file knows
            it; of given classes it is one more than the largest when left out.
        classes: which class each word has: a file made by ``shared-embeddings classes``, or the V class
            indices themselves; for sub-classes a list with one of these for each level. "stored" means that
            the assignment will be loaded with the state dict.
        random_classes: draw every word's class evenly instead (section 4.6.1).
        seed: what random classes are drawn from.
        class_dims: C_d of each level, D - unique_dim in all; an even split when left out.
    """

    unique_dim: int
    num_classes: int | tuple[int, ...] | None = None
    classes: Classes = dataclasses.field(default=None, repr=False)
    random_classes: bool = False
    seed: int = 0
    class_dims: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require_at_least("unique_dim", self.unique_dim, 1)
        require_at_least("seed", self.seed, 0)
        self._check_source()
        for name in ("num_classes", "class_dims"):
            values = getattr(self, name)
            for value in values if isinstance(values, tuple) else (values,):
                require_at_least(name, value, 1)
            require(values != (), f"option '{name}' is an empty list; give one number for each level")
        levels = self.levels()
        for name in ("num_classes", "class_dims"):
            values = getattr(self, name)
            given = len(values) if isinstance(values, tuple) else 1
            require(
                values is None or given == levels,
                f"option '{name}' has {given} numbers for {levels} levels of classes; give one for each",
            )

    def _check_source(self) -> None:
        """Raise `OptionError` unless the options say in exactly one way where classes come from."""
        require(
            self.classes is not None or self.random_classes,
            "option 'classes' is missing; give a class file, or set random_classes: true. Without class "
            f"embeddings the paper's ablation is method 'projective' with rank {self.unique_dim}",
        )
        require(
            self.classes is None or not self.random_classes,
            "option 'random_classes' contradicts 'classes'; leave one of the two out",
        )
        require(
            self.random_classes or self.seed == 0,
            "option 'seed' has no effect without 'random_classes'; leave it out",
        )
        known = "'random_classes'" if self.random_classes else "classes 'stored'"
        require(
            self.num_classes is not None or not (self.random_classes or self.classes == STORED),
            f"option 'num_classes' is missing; {known} needs it",
        )
        require(
            self.classes not in ((), ""),
            f"option 'classes' is {self.classes!r}; give a class file or one class for each word",
        )

    def levels(self) -> int:
        """L, how many classes each word has."""
        if self.classes is None or self.classes == STORED:
            return len(self.num_classes) if isinstance(self.num_classes, tuple) else 1
        return len(self.sources())

    def sources(self) -> tuple[str | tuple[int, ...], ...]:
        """The class file or the class indices of each level, where they are given."""
        assert self.classes is not None
        if isinstance(self.classes, str) or isinstance(self.classes[0], int):
            return (self.classes,)  # type: ignore[return-value]
        return self.classes  # type: ignore[return-value]

    def widths(self, embedding_dim: int) -> tuple[int, ...]:
        """The width of every level's class vectors."""
        if self.class_dims is not None:
            return self.class_dims
        rest, levels = embedding_dim - self.unique_dim, self.levels()
        return tuple(rest // levels + (level < rest % levels) for level in range(levels))


@register("uncle", UncleOptions)
class UncleEmbedding(SharedEmbedding):
    """Row i of the table is ``concatenate(U_i, C_j)`` (Eq. 1), with sub-classes ``(U_i, C_j, C_j1)`` (Eq. 2).

    Scores are tied: those of a word's unique part plus those of its classes, computed once for each class.
    Nothing requires that sub-classes lie within classes.

    Parameters: `unique` U ``(V, U_d)``; `class_tables` C ``(C_s, C_d)`` for every level.
    Buffer: `classes` ``(V, L)``, saved with the parameters; what is loaded wins over the options.
    """

    options: UncleOptions
    paper = "UnClE, Eq. 1 and 2"
    idea = "V x U_d beside one vector for each class of words"
    file_options = ("classes",)
    per_word = ("unique", "classes")
    classes: Tensor

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, options: UncleOptions
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, options)
        levels = class_levels(num_embeddings, options)
        # Kept beside the buffer, so that parameters can be reset when the class file is gone.
        self._assignment = np.stack([level.assignment for level in levels], axis=1)
        self.num_classes = tuple(level.num_classes for level in levels)
        self.widths = (options.unique_dim, *options.widths(embedding_dim))
        self.unique = nn.Parameter(torch.empty(num_embeddings, options.unique_dim))
        self.class_tables = nn.ParameterList(
            torch.empty(count, width) for count, width in zip(self.num_classes, self.widths[1:])
        )
        dtype = _index_dtype(max(self.num_classes))
        self.register_buffer("classes", torch.empty(self._assignment.shape, dtype=dtype))
        self.reset_parameters()

    def draw_parameters(self) -> None:
        """Normal entries of std D**-0.5; the classes that the options say, or that were loaded."""
        self.classes.copy_(torch.tensor(self._assignment, device="cpu"))
        for parameter in (self.unique, *self.class_tables):
            nn.init.normal_(parameter, std=entry_std(self.embedding_dim))
        zero_padding_row(self.unique, self.padding_idx)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``(n, D)`` for ids ``(n,)``."""
        classes = self.classes.index_select(0, ids).long().unbind(dim=1)
        shared = (F.embedding(level, table) for level, table in zip(classes, self.class_tables))
        return torch.cat((F.embedding(ids, self.unique), *shared), dim=1)

    def layers(self, ids: Tensor) -> list[Layer]:
        """The part of their own, the class vector of each level, and the output."""
        rows = self.rows(ids)
        names = ["unique", *(f"classes {level}" for level in range(1, len(self.widths)))]
        parts = zip(names, rows.split(self.widths, dim=1))
        return [*(Layer(name, part) for name, part in parts), Layer("output", rows)]

    def logits(self, hidden: Tensor) -> Tensor:
        """The scores ``(..., V)`` of all words for hidden states ``(..., D)``: unique plus class scores.

        Raises:
            ValueError: the last axis of `hidden` is not D.
        """
        self.check_hidden(hidden)
        first, *parts = hidden.split(self.widths, dim=-1)
        scores = F.linear(first, self.unique, self.output_bias())
        for part, table, classes in zip(parts, self.class_tables, self.classes.long().unbind(dim=1)):
            scores += F.linear(part, table).index_select(-1, classes)
        if self.padding_idx is not None:
            scores[..., self.padding_idx] = 0.0
        return scores

    def flat_cross_entropy(self, hidden: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """As in `SharedEmbedding`, with the scores of a class computed once for all of its words."""
        index = self.cached("index", self._index)
        tables = tuple(self.class_tables)
        bias, padding = self.output_bias(), self.padding_idx
        return class_cross_entropy(
            hidden, self.unique, tables, index, targets, bias=bias, masked_word=padding, **options
        )

    def _index(self) -> ClassIndex:
        """Words by class and classes by word."""
        return class_index(self.classes, self.num_classes)

    def stored_options(self) -> dict[str, object]:
        """Plain options that build such a module without any file; this one's state dict then fills it."""
        resolved = dataclasses.replace(
            self.options,
            num_classes=self.num_classes,
            class_dims=self.widths[1:],
            classes=STORED,
            random_classes=False,
            seed=0,
        )
        return plain_options(resolved)

    def selected(self, ids: Tensor) -> tuple[dict[str, object], dict[str, Tensor]]:
        """As in the base class; classes without a word go."""
        options, state = super().selected(ids)
        used = [level.unique(return_inverse=True) for level in state["classes"].long().unbind(dim=1)]
        tables = {
            f"class_tables.{level}": self.class_tables[level][kept] for level, (kept, _) in enumerate(used)
        }
        state |= {"classes": torch.stack([renumbered for _, renumbered in used], dim=1), **tables}
        return {**options, "num_classes": [len(kept) for kept, _ in used]}, state

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if not self.classes.is_meta:
            # Otherwise resetting a module built with classes "stored" would undo what was loaded.
            self._assignment = self.classes.to("cpu", copy=True).numpy()

    def buffer_bits(self, name: str, buffer: Tensor) -> int:
        """log2(C_s) bits, rounded up, for every class of a word."""
        return buffer.size(0) * sum(math.ceil(math.log2(count)) for count in self.num_classes)

    @classmethod
    def gather_options(cls, given: dict[str, object]) -> dict[str, object]:
        """Class files and indices as plain text and numbers, whatever held them."""
        if "classes" not in given:
            return given
        return {**given, "classes": plain_classes(given["classes"])}

    @classmethod
    def options_for_vocabulary(cls, given: dict[str, object], words: Sequence[str]) -> dict[str, object]:
        """The options for a model whose words are known: class files give each word its class by name.

        Words that a class file does not cover, such as a host's markers, are treated as ones that never
        occurred (`WordClasses.for_vocabulary`).

        Raises:
            OptionError: options that cannot be, or a class file that hardly knows the words.
        """
        options = cls._parsed(given)
        if options.classes in (None, STORED):
            return given
        levels = levels_for_vocabulary(words, options)
        return {
            **given,
            "classes": [level.assignment.tolist() for level in levels],
            "num_classes": [level.num_classes for level in levels],
        }

    @classmethod
    def _parsed(cls, given: dict[str, object]) -> UncleOptions:
        """The options as a dataclass."""
        return parse_options(cls.method, UncleOptions, cls.gather_options(given))

    @classmethod
    def check_sizes(cls, num_embeddings: int, embedding_dim: int, options: UncleOptions) -> None:
        """Both parts must have a width, and every word a class."""
        require(
            options.unique_dim < embedding_dim,
            f"option 'unique_dim' is {options.unique_dim}, which leaves no dimension of {embedding_dim} for "
            "class embeddings; lower it, or use method 'standard'",
        )
        widths, rest = options.widths(embedding_dim), embedding_dim - options.unique_dim
        require(
            sum(widths) == rest and min(widths) > 0,
            f"option 'class_dims' is {list(widths)}, but the widths must be at least 1 and add up to the "
            f"{rest} dimensions that 'unique_dim' leaves; change one of the two",
        )
        for level in class_levels(num_embeddings, options):
            require(
                level.num_classes <= num_embeddings,
                f"option 'num_classes' is {level.num_classes}, more than {num_embeddings} words; lower it",
            )

    @classmethod
    def closed_form(cls, num_embeddings: int, embedding_dim: int, options: UncleOptions) -> int:
        """V_s U_d + C_s C_d (Eq. 3), the last summed over the levels."""
        levels = zip(class_levels(num_embeddings, options), options.widths(embedding_dim))
        return num_embeddings * options.unique_dim + sum(level.num_classes * width for level, width in levels)


def _index_dtype(num_classes: int) -> torch.dtype:
    """The smallest integer type that holds so many classes and that NCCL can send, which int16 is not."""
    return torch.uint8 if num_classes <= 2**8 else torch.int32
