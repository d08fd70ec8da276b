"""The plain table in few bits for each number: rounded, vector quantized or trellis coded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from shared_embeddings.embedding import OutputFactors, SharedEmbedding
from shared_embeddings.fitting.task import BAR_DELAY, FitTask
from shared_embeddings.layers.initialization import code_dtype, entry_std
from shared_embeddings.options import option, require, require_at_least, require_seed
from shared_embeddings.quant.allocation import even_counts, widths_within
from shared_embeddings.quant.codec import RATES, Codebooks, Codec
from shared_embeddings.quant.codecs.lloyd_max import LloydMaxCodec
from shared_embeddings.quant.codecs.principal import PrincipalCodec
from shared_embeddings.quant.codecs.residual import ResidualCodec
from shared_embeddings.quant.codecs.spectral import SpectralCodec
from shared_embeddings.quant.codecs.trellis import TrellisCodec
from shared_embeddings.quant.codecs.uniform import UniformCodec
from shared_embeddings.quant.packed_tensor import dense
from shared_embeddings.quant.rotation import rotate, rotate_back
from shared_embeddings.quant.storage import ROW_SCALES, packed_bytes
from shared_embeddings.registry import register
from shared_embeddings.spec import Candidate, EmbeddingOptions, Options, SearchGrid

# Rows that are encoded together.
_BLOCK = 512
# Rows that codebooks are trained on.
_SAMPLE = 2**15


@dataclasses.dataclass(frozen=True)
class QuantizedOptions(EmbeddingOptions["QuantizedEmbedding"]):
    """Options of `quantized`."""

    paper = "QTIP (Tseng et al., 2024); Lloyd-Max; residual vector quantization"
    summary = "every number of the table in few bits"
    grid_choice = "trellis codes, the most bits; 32 bits of codes count as a parameter"
    fit_bound = 0.3
    default_store = "fp16"
    candidates = (
        Candidate({}, "fp16"),
        *(
            Candidate({"codec": codec}, "fp16")
            for codec in ("spectral", "principal", "residual", "lloyd_max", "uniform")
        ),
    )

    bits: float = option(
        "The mean bits of the code of a number, from 0.25 to 8; words that get none are zero. Scales take 8 "
        "bits more for each row, or 16 for each group with codec uniform; codec principal has none."
    )
    codec: Literal["uniform", "lloyd_max", "residual", "trellis", "principal", "spectral"] = option(
        "uniform: evenly spaced levels, a scale for each group, as in ONNX Runtime. principal: more bits for "
        "principal directions with more variance, for word vectors. The others rotate the rows first. "
        "lloyd_max: the best levels for normal numbers. residual: sums of codebook entries for "
        "pieces of eight dimensions. trellis: paths through a trellis, the most exact of these. spectral: "
        "trellis, with more bits for principal directions.",
        "trellis",
    )
    group_size: int = option("The numbers that share a scale, for codec uniform only.", 32)
    count_exponent: float = option(
        "Words get bits by their count to this power when token counts are known; 0 ignores the counts.", 0.5
    )
    seed: int = option("The seed of the rotation, and of codes that are not fitted to a table.", 0)
    words_per_width: tuple[int, ...] = option(
        "The number of words with 0, 1, ... 8, 1/2 and 1/4 bits; set when the embedding is fitted.", ()
    )
    directions: tuple[int, ...] = option(
        "For codec principal: for words of 1, 2, ... 8 bits, the number of directions with 0, 1, ... 8 bits. "
        "For spectral: the number of reflections, then the same with 1/2 and 1/4 bits after 8. Set when the "
        "embedding is fitted.",
        (),
    )

    def __post_init__(self) -> None:
        require(
            0.25 <= self.bits <= 8.0,
            f"option 'bits' is {self.bits:g}, but it must be from 0.25 to 8; choose a value between them",
        )
        require_at_least("group_size", self.group_size, 1)
        require(
            self.codec == "uniform" or self.group_size == 32,
            f"option 'group_size' has no effect with codec {self.codec}; remove it or choose uniform",
        )
        require(
            0.0 <= self.count_exponent <= 1.0,
            f"option 'count_exponent' is {self.count_exponent:g}, but it must be from 0 to 1",
        )
        require_seed(self.seed)

    def codec_for(self, embedding_dim: int) -> Codec:
        """The codec for rows of D numbers."""
        if self.codec == "uniform":
            return UniformCodec(embedding_dim, self.group_size)
        for adaptive in (PrincipalCodec, SpectralCodec):
            if self.codec == adaptive.name:
                return adaptive(embedding_dim, self.directions)
        if self.codec == "residual":
            return ResidualCodec(embedding_dim)
        return LloydMaxCodec(embedding_dim) if self.codec == "lloyd_max" else TrellisCodec(embedding_dim)

    def word_counts(self, num_embeddings: int) -> dict[int, int]:
        """The number of words of every width, see `codecs.codec`; widths without words are left out."""
        if not self.words_per_width:
            return even_counts(num_embeddings, self.bits)
        return {width: count for width, count in enumerate(self.words_per_width) if count}

    def check_sizes(self, num_embeddings: int, embedding_dim: int) -> None:
        """The words of all widths must be V."""
        counts = self.words_per_width
        require(
            not counts or (len(counts) == len(RATES) and sum(counts) == num_embeddings and min(counts) >= 0),
            f"option 'words_per_width' is {list(counts)}, but it must be {len(RATES)} numbers that add up to "
            f"{num_embeddings}; remove it, or compress the model again if another version wrote it",
        )

    def count_parameters(self, num_embeddings: int, embedding_dim: int) -> int:
        """The trained numbers: the scales, and the codebooks of the codec."""
        codec = self.codec_for(embedding_dim)
        shapes = codec.codebook_shapes(list(self.word_counts(num_embeddings))).values()
        return num_embeddings * codec.num_scales + sum(map(math.prod, shapes))

    def search_size(self, num_embeddings: int, embedding_dim: int) -> int:
        """Parameters, and 32 bits of the codes for one more."""
        codec = self.codec_for(embedding_dim)
        counts = self.word_counts(num_embeddings).items()
        codes = sum(codec.row_bytes(width) * count for width, count in counts if width)
        return self.count_parameters(num_embeddings, embedding_dim) + -(-codes // 4)

    @classmethod
    def search_grids(cls, num_embeddings: int, embedding_dim: int) -> Iterator[SearchGrid]:
        """Trellis codes of 0.25 to 8 bits."""
        yield SearchGrid(249, lambda step: {"bits": 0.25 + step / 32})

    @classmethod
    def examples(cls, num_embeddings: int, embedding_dim: int) -> dict[str, Options]:
        """Every codec, and bits that differ between words."""
        return {
            "": {"bits": 4.0},
            "mixed": {"bits": 2.5},
            "uniform": {"bits": 4.0, "codec": "uniform"},
            "lloyd_max": {"bits": 3.0, "codec": "lloyd_max"},
            "residual": {"bits": 2.0, "codec": "residual"},
            "principal": {"bits": 3.0, "codec": "principal"},
            "spectral": {"bits": 2.5, "codec": "spectral"},
        }


@register("quantized", QuantizedOptions)
class QuantizedEmbedding(SharedEmbedding):
    """Row w of the table is its decoded code, times its scales, rotated back.

    Buffers: `codes<b>` ``(V_b, bytes)`` for the words of width b, in the order of the vocabulary; `widths`
    ``(V,)`` of all words, if they differ; `signs` ``(D,)`` of the rotation, for codecs that rotate.
    Parameters: `row_scales` ``(V, 1)``, or `scales` ``(V, S)`` of groups, and the codebooks of the codec.
    Training keeps the codes.

    Rows are decoded when they are looked up. Without gradients, scores are computed for one block of decoded
    rows after the other, so that there is never a V x D table in memory; with gradients there is.
    """

    options: QuantizedOptions
    scores_in_blocks = True
    is_packed = True
    widths: Tensor
    signs: Tensor

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, options: QuantizedOptions
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, options)
        self.codec = options.codec_for(embedding_dim)
        self.word_counts = options.word_counts(num_embeddings)
        scales = torch.empty(num_embeddings, self.codec.num_scales)
        self.scales_name = ROW_SCALES if self.codec.row_scales else "scales"
        if self.codec.num_scales:
            self.register_parameter(self.scales_name, nn.Parameter(scales))
        else:
            self.register_buffer(self.scales_name, scales, persistent=False)
        for name, shape in self.codec.codebook_shapes(list(self.word_counts)).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        for width, count in self.word_counts.items():
            if width:
                codes = torch.empty(count, self.codec.row_bytes(width), dtype=torch.uint8)
                self.register_buffer(f"codes{width}", codes)
        if self._is_mixed:
            self.register_buffer("widths", torch.empty(num_embeddings, dtype=torch.uint8))
        if self.codec.rotates:
            self.register_buffer("signs", torch.empty(embedding_dim, dtype=torch.uint8))
        self.reset_parameters()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Random codes, and random scales that give the table a std near D**-0.5."""
        generator = torch.Generator(device="cpu").manual_seed(self.options.seed)
        for name, buffer in self.named_buffers():
            if name not in ("widths", self.scales_name) and not buffer.is_meta:
                most = 2 if name == "signs" else 256
                # `randint` would take eight bytes for each code, more than the table.
                codes = torch.empty(buffer.shape, dtype=torch.uint8, device="cpu")
                buffer.copy_(codes.random_(most, generator=generator))
        if self._is_mixed:
            # Frequent words often come first.
            widths = sorted(self.word_counts, key=lambda width: RATES[width], reverse=True)
            self.widths.copy_(torch.cat([torch.full((self.word_counts[width],), width) for width in widths]))
        for name, values in self.codec.initial_codebooks(list(self.word_counts)).items():
            self.get_parameter(name).copy_(values)
        nn.init.uniform_(
            self.word_scales, 0.5 * entry_std(self.embedding_dim), 1.5 * entry_std(self.embedding_dim)
        )
        for width in filter(None, self.word_counts):
            values = self.codec.decode(self._codes(width)[:_BLOCK], width, self.codebooks()).float()
            size = values.square().mean().sqrt().clamp(min=1e-30).to(self.word_scales)
            if self._is_mixed:
                size = torch.where((self.widths == width).unsqueeze(1), size, 1.0)
            self.word_scales.div_(size)

    @property
    def word_scales(self) -> Tensor:
        """The scales ``(V, S)``."""
        return getattr(self, self.scales_name)  # type: ignore[no-any-return]

    @property
    def _is_mixed(self) -> bool:
        """Whether words have different widths."""
        return len(self.word_counts) > 1

    def codebooks(self) -> Codebooks:
        """The codebooks of the codec."""
        names = self.codec.codebook_shapes(list(self.word_counts))
        return {name: dense(self.get_parameter(name)) for name in names}

    # Rows.

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``(n, D)`` for ids ``(n,)``."""
        return self._restored(self._coded_rows(ids))

    def all_rows(self) -> Tensor:
        """The rows ``(V, D)``."""
        return self._restored(self._all_coded_rows())

    def output_factors(self) -> OutputFactors:
        """The decoded rows ``(V, D)`` before they are rotated back, and the rotation ``(D, D)``."""
        rows = self._all_coded_rows()
        if not self.codec.rotates:
            return OutputFactors(rows, None)
        return OutputFactors(rows, rotate_back(torch.eye(self.embedding_dim).to(rows), self.signs))

    # The output side.

    def block_scores(self, hidden: Tensor) -> Tensor:
        """As in the base class."""
        coded = self.codec.scored_states(self._prepared(hidden), self.codebooks())
        scores = torch.cat([self._scores_of(coded, *part) for part in self._parts()], dim=-1)
        return scores.index_select(-1, self._slots().int()) if self._is_mixed else scores

    def _parts(self) -> Iterator[tuple[int, Tensor]]:
        """Each width and the scales ``(V_b, S)`` of its words, in the order of the vocabulary."""
        if not self._is_mixed:
            yield next(iter(self.word_counts)), dense(self.word_scales)
            return
        slots = self._slots().long()
        words = torch.empty_like(slots).scatter_(0, slots, self.all_ids(slots.device))
        for width, ids in zip(self.word_counts, words.split(list(self.word_counts.values()))):
            yield width, self.word_scales.index_select(0, ids)

    def _scores_of(self, coded: Tensor, width: int, scales: Tensor) -> Tensor:
        """The scores ``(N, V_b)`` of the words with `width` bits for prepared hidden states ``(N, D)``."""
        if not width:
            row = self.codec.uncoded(self.codebooks(), scales[:1])
            return F.linear(coded, row).expand(-1, len(scales))
        return self.codec.scores(coded, self._codes(width), width, self.codebooks(), scales)

    def _all_coded_rows(self) -> Tensor:
        """The scaled rows ``(V, D)`` of all words, rotated if the codec rotates."""
        rows = torch.cat([self._decoded(width, scales) for width, scales in self._parts()])
        return rows.index_select(0, self._slots().int()) if self._is_mixed else rows

    def _decoded(self, width: int, scales: Tensor) -> Tensor:
        """The scaled rows ``(V_b, D)`` of the words with `width` bits."""
        if not width:
            return self.codec.uncoded(self.codebooks(), scales)
        return self.codec.rows(self._codes(width), width, self.codebooks(), scales)

    def _coded_rows(self, ids: Tensor) -> Tensor:
        """Scaled rows ``(n, D)`` of ids ``(n,)``, rotated if the codec rotates."""
        if not self.codec.num_scales:  # torch does not check ids of empty rows
            self.check_ids(ids)
        codebooks, scales = self.codebooks(), F.embedding(ids, self.word_scales)
        if not self._is_mixed:
            (width,) = self.word_counts
            if width == 0:
                return self.codec.uncoded(codebooks, scales)
            values = self.codec.decode(self._codes(width).index_select(0, ids), width, codebooks)
            return self.codec.scaled(values, scales)
        # Sizes must not depend on data in compiled graphs, so each width decodes all words.
        widths = self.widths.index_select(0, ids).unsqueeze(1)
        places, start = self._slots().index_select(0, ids).int(), 0
        rows = self.codec.uncoded(codebooks, scales)
        for width, count in self.word_counts.items():
            if width:
                codes = self._codes(width).index_select(0, (places - start).clamp(0, count - 1))
                values = self.codec.scaled(self.codec.decode(codes, width, codebooks), scales)
                rows = torch.where(widths == width, values, rows)
            start += count
        return rows

    def _codes(self, width: int) -> Tensor:
        """The codes ``(V_b, bytes)`` of the words with `width` bits."""
        return dense(self.get_buffer(f"codes{width}"))

    def _slots(self) -> Tensor:
        """For every word ``(V,)`` its row among the codes of all widths, one width after the other."""
        return self.cached("slots", self._count_slots)

    def _count_slots(self) -> Tensor:
        slots, start = torch.zeros_like(self.widths, dtype=torch.int32), 0
        for width, count in self.word_counts.items():
            is_this = self.widths == width
            slots = torch.where(is_this, (is_this.cumsum(0) - 1 + start).int(), slots)
            start += count
        return slots.to(code_dtype(self.num_embeddings))

    # Sizes and selections of words.

    def buffer_bits(self, name: str, buffer: Tensor) -> int:
        """Whole bytes for codes, 4 bits for a width, 1 for a sign."""
        return buffer.numel() * {"widths": 4, "signs": 1}.get(name, 8)

    def state_for_ids(self, ids: Tensor) -> tuple[dict[str, object], dict[str, Tensor]]:
        """As in the base class."""
        state = self.state_dict()
        for name in (self.scales_name, "bias", "widths"):
            if name in state:
                state[name] = state[name].index_select(0, ids)
        counts = [0] * len(RATES)
        is_kept = torch.zeros(self.num_embeddings, dtype=torch.bool, device=ids.device)
        is_kept[ids] = True
        for width in self.word_counts:
            words = self.widths == width if self._is_mixed else torch.ones_like(is_kept)
            counts[width] = int((is_kept & words).sum())
            if width:
                state[f"codes{width}"] = state[f"codes{width}"][is_kept[words]]
            if not counts[width]:
                state.pop(f"codes{width}", None)
        kept = [width for width, count in enumerate(counts) if count]
        if len(kept) == 1:
            state.pop("widths", None)
        shapes = self.codec.codebook_shapes(kept)
        for name in self.codebooks():
            values = state.pop(name)
            if name in shapes:
                state[name] = values[tuple(slice(size) for size in shapes[name])]
        return {**self.stored_options(), "words_per_width": counts}, state

    # Fitting.

    @classmethod
    def fit(cls, task: FitTask) -> QuantizedEmbedding:
        """Bits for words by counts and norms, codebooks from the rows, then the nearest codes.

        The bits are those that fit into the bytes of an embedding with these options that is not fitted.
        """
        draft: QuantizedEmbedding = task.build()
        limit = draft._size_of(draft.word_counts)
        draft.codec = draft.codec.adapted(task.teacher, draft.options.bits)
        widths = draft._widths_for(task, limit)
        codec = draft.codec.laid_out(task.teacher, widths)
        counts = torch.bincount(widths.long(), minlength=len(RATES)).tolist()
        options = {**task.options, "words_per_width": counts, **codec.options()}
        embedding: QuantizedEmbedding = task.build_with(options)
        with torch.no_grad():
            embedding._encode(task, widths, codec)
        return embedding

    def _widths_for(self, task: FitTask, limit: int) -> Tensor:
        """The bits ``(V,)`` of every word that take `limit` bytes together."""
        options, num_words = self.options, self.num_embeddings
        has_weights = task.token_counts is not None and options.count_exponent > 0
        if options.bits == int(options.bits) and not has_weights and not self.codec.adapts:
            return torch.full((num_words,), int(options.bits), dtype=torch.uint8)
        importance = self.codec.energy(task.teacher)
        if task.token_counts is not None:
            importance = importance * (task.token_counts + 1) ** options.count_exponent
        sizes = [self.codec.row_bytes(width) if width else 0 for width in self.codec.widths]
        shares = self.codec.error_shares()
        return widths_within(importance.cpu(), limit, self._size_of, self.codec.widths, sizes, shares)

    def _size_of(self, word_counts: Mapping[int, int]) -> int:
        """The bytes of the codes, widths and codebooks for numbers of words by width."""
        widths = [width for width, count in word_counts.items() if width and count]
        shapes = self.codec.codebook_shapes(widths).items() if widths else ()
        codes = sum(self.codec.row_bytes(width) * word_counts[width] for width in widths)
        is_mixed = sum(count > 0 for count in word_counts.values()) > 1
        books = sum(
            packed_bytes(torch.empty(shape, device="meta"), self.options.default_store, name)
            for name, shape in shapes
        )
        return codes + books + (self.num_embeddings // 2 if is_mixed else 0)

    def _encode(self, task: FitTask, widths: Tensor, source: Codec) -> None:
        """Fill the codebooks, learned by `source`, the codes and scales for the rows of the teacher."""
        if self._is_mixed:
            self.widths.copy_(widths)
        codec, used = self.codec, list(self.word_counts)
        every = max(1, self.num_embeddings // _SAMPLE)
        # In blocks: rotating takes several copies.
        sample = torch.cat([self._prepared(rows) for rows in task.teacher[::every].split(_BLOCK)])
        learned = source.learn(sample, used, task.seed)
        del sample
        for name, values in learned.items():
            self.get_parameter(name).copy_(values)
        codebooks = {name: values.detach() for name, values in self.codebooks().items()}
        hidden = not task.progress
        bar = tqdm(total=self.num_embeddings, desc="codes", unit=" words", delay=BAR_DELAY, disable=hidden)
        for width in filter(None, used):
            words = (widths == width).nonzero().flatten().to(task.teacher.device)
            done = 0
            for ids in words.split(_BLOCK):
                found = codec.encode(self._prepared(task.teacher[ids]), width, codebooks)
                self._codes(width)[done : done + len(ids)] = found.codes
                self.word_scales[ids] = found.scales.to(self.word_scales)
                done += len(ids)
                bar.update(len(ids))
        bar.close()

    def _prepared(self, rows: Tensor) -> Tensor:
        """Rows ``(n, D)`` as the codec takes them."""
        return rotate(rows, self.signs) if self.codec.rotates else rows

    def _restored(self, rows: Tensor) -> Tensor:
        """The inverse of `_prepared`."""
        return rotate_back(rows, self.signs) if self.codec.rotates else rows
