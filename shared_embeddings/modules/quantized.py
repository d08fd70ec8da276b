"""The plain table in few bits for each number: rounded or trellis coded."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shared_embeddings.quant.codecs  # noqa: F401  # registers them
from shared_embeddings.embedding import OutputFactors, SharedEmbedding
from shared_embeddings.fitting.task import FitTask
from shared_embeddings.nn.layers import code_dtype, entry_std
from shared_embeddings.nn.tracing import cache_tensor, has_values, needs_fixed_shapes
from shared_embeddings.quant import kernels
from shared_embeddings.quant.codec import BLOCK, RATES, Books, Codec, Encoded, codecs
from shared_embeddings.quant.decoder import factors_of, orthogonal
from shared_embeddings.quant.metric import Metric
from shared_embeddings.quant.packed_tensor import dense
from shared_embeddings.quant.storage import ROW_SCALES, packed_bytes
from shared_embeddings.registry import build, register
from shared_embeddings.spec import Candidate, EmbeddingOptions, Presets, SearchGrid
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import option, parse_options, require
from shared_embeddings.utils.progress import progress_bar

DEFAULT_CODEC, DEFAULT_GROUP = "trellis", 32
# Rows that codebooks are trained on: among all, and among those of each rate, since few words may have one.
_SAMPLE, _SAMPLE_OF_RATE = 2**15, 2**12


class _Shared(NamedTuple):
    """What does not depend on the words of a look-up."""

    books: Books  # codebooks, and what the codec derives from them
    # For every word ``(V,)`` its row among the codes of all rates, one rate after the other; None with one.
    slots: Tensor | None = None
    words: Tensor | None = None  # the inverse of `slots`


@dataclasses.dataclass(frozen=True)
class QuantizedOptions(EmbeddingOptions["QuantizedEmbedding"]):
    """Options of `quantized`."""

    paper = "QTIP (Tseng et al., 2024); reverse water-filling; rounding"
    summary = "every number of the table in few bits"
    grid_choice = f"codec {DEFAULT_CODEC}, the most bits; 32 bits of codes count as a parameter"
    fit_bound = 0.3
    default_store = "fp16"
    takes_metric = True
    largest = 1e30
    reads_blocks = True

    bits: float = option(
        "The mean bits of the code of a number, from 0.25 to 8; tokens may get none. Scales take 8 bits more "
        "for each row, or 16 for each group of numbers.",
        minimum=0.25,
    )
    # Evaluated in every check, which includes codecs that are registered later.
    codec: Literal[tuple(codecs())] = option(  # type: ignore[valid-type]
        lambda: " ".join(f"{name}: {codec.about}." for name, codec in codecs().items()), DEFAULT_CODEC
    )
    group_size: int = option(
        "The numbers that share a scale, for codecs with groups.", DEFAULT_GROUP, minimum=1
    )
    count_exponent: float = option(
        "Tokens get bits by their count to this power when token counts are known; 0 ignores the counts.",
        0.6,
        minimum=0,
    )
    seed: int = option("The seed of the rotation, and of codes that are not fitted to a table.", 0, minimum=0)
    words_per_width: tuple[int, ...] = option(
        "The number of tokens with 0, 1, ... 8, 1/2 and 1/4 bits; set when the embedding is fitted.",
        (),
        minimum=0,
    )
    directions: tuple[int, ...] = option(
        lambda: (
            "Set when the embedding is fitted. "
            + " ".join(f"{name}: {text}." for name, codec in codecs().items() if (text := codec.about_layout))
        ),
        (),
    )

    def __post_init__(self) -> None:
        most = max(codecs()[self.codec].rates)
        require(
            self.bits <= most,
            f"option 'bits' is {self.bits:g}, but codec {self.codec} has {most:g} at most; choose fewer",
        )
        require(
            codecs()[self.codec].has_groups or self.group_size == DEFAULT_GROUP,
            f"option 'group_size' has no effect with codec {self.codec}; remove it or choose codec "
            + " or ".join(name for name, codec in codecs().items() if codec.has_groups),
        )
        require(
            self.count_exponent <= 1.0,
            f"option 'count_exponent' is {self.count_exponent:g}, but it must be from 0 to 1",
        )

    def layout(self, num_embeddings: int, embedding_dim: int) -> tuple[Codec, dict[float, int]]:
        """Return the codec, and the number of words of every rate, without rates that have none.

        Before a fit, words have the nearest whole bits that the codec has.
        """
        codec = codecs()[self.codec](embedding_dim, self.group_size, self.directions)
        if self.words_per_width:
            return codec, {rate: count for rate, count in zip(RATES, self.words_per_width) if count}
        whole = [rate for rate in codec.rates if rate == int(rate)]
        low = max(rate for rate in whole if rate <= self.bits)
        high = min(rate for rate in whole if rate >= self.bits)
        count = round((self.bits - low) / max(high - low, 1) * num_embeddings)
        return codec, {rate: n for rate, n in ((low, num_embeddings - count), (high, count)) if n}

    def check_sizes(self, num_embeddings: int, embedding_dim: int) -> None:
        counts = self.words_per_width
        require(
            not counts or (len(counts) == len(RATES) and sum(counts) == num_embeddings),
            f"option 'words_per_width' is {list(counts)}, but it must be {len(RATES)} numbers that add up to "
            f"{num_embeddings}; remove it",
        )

    def count_parameters(self, num_embeddings: int, embedding_dim: int) -> int:
        """The trained numbers: the scales, and the codebooks of the codec."""
        codec, counts = self.layout(num_embeddings, embedding_dim)
        return num_embeddings * codec.num_scales + sum(map(math.prod, codec.book_shapes.values()))

    def search_size(self, num_embeddings: int, embedding_dim: int) -> int:
        """Parameters, and 32 bits of the codes for one more."""
        codec, counts = self.layout(num_embeddings, embedding_dim)
        codes = sum(codec.row_bytes(rate) * count for rate, count in counts.items() if rate)
        return self.count_parameters(num_embeddings, embedding_dim) + -(-codes // 4)

    @classmethod
    def candidates(cls) -> list[Candidate]:
        named = [name for name, codec in codecs().items() if codec.is_candidate and name != DEFAULT_CODEC]
        others = [Candidate({"codec": name}, "fp16") for name in named]
        return [Candidate({}, "fp16"), *others]

    @classmethod
    def presets(cls, num_embeddings: int, embedding_dim: int) -> Presets:
        """All codecs; the grid has the default one with 0.25 to 8 bits."""
        others = {name: codec for name, codec in codecs().items() if name != DEFAULT_CODEC}
        named = {name: {"bits": codec.example_bits, "codec": name} for name, codec in others.items()}
        grid = SearchGrid(249, lambda step: {"bits": 0.25 + step / 32})
        return Presets({"": {"bits": 4.0}, "mixed": {"bits": 2.5}, **named}, [grid])


@register("quantized", QuantizedOptions)
class QuantizedEmbedding(SharedEmbedding):
    """Row w of the table is its decoded code, times its scales, rotated back.

    Buffers: `codes<i>`, or `streams<i>` of some codecs, ``(V_i, bytes)`` for the words whose rate is number i
    of `RATES`, in the order of the vocabulary; `widths` ``(V,)``, the numbers i of all words, if they differ;
    `signs` ``(D,)`` of the rotation, for codecs that rotate. Parameters: `row_scales` ``(V, 1)``, or `scales`
    ``(V, S)`` of groups, and the codebooks of the codec. Training keeps the codes.

    Rows are decoded when they are looked up. Without gradients, scores are computed for one block of decoded
    rows after the other, so that there is never a V x D table in memory; with gradients there is.
    """

    options: QuantizedOptions
    scores_in_blocks = True
    _is_packed = True
    widths: Tensor
    signs: Tensor | None

    def create_parameters(self) -> None:
        self.codec, self.word_counts = self.options.layout(self.num_embeddings, self.embedding_dim)
        self.scales_name = "scales" if self.codec.has_groups else ROW_SCALES
        scales = torch.empty(self.num_embeddings, self.codec.num_scales)
        self.register_parameter(self.scales_name, nn.Parameter(scales))
        for name, shape in self.codec.book_shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.code_names = {rate: f"{self.codec.codes_name}{RATES.index(rate)}" for rate in self.word_counts}
        for rate, count in self.word_counts.items():
            if rate:
                codes = torch.empty(count, self.codec.row_bytes(rate), dtype=torch.uint8)
                self.register_buffer(self.code_names[rate], codes)
        self.buffer_bits.update(widths=4, signs=1)
        self._is_mixed = len(self.word_counts) > 1
        if self._is_mixed:
            self.register_buffer("widths", torch.empty(self.num_embeddings, dtype=torch.uint8))
        signs = torch.empty(self.embedding_dim, dtype=torch.uint8) if self.codec.rotates else None
        self.register_buffer("signs", signs)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Random codes, and random scales that give the table a std near D**-0.5."""
        generator = torch.Generator(device="cpu").manual_seed(self.options.seed)
        for name, buffer in self.named_buffers():
            if name != "widths" and not buffer.is_meta:
                most = 2 if name == "signs" else 256
                # `randint` would take eight bytes for each code, more than the table.
                codes = torch.empty(buffer.shape, dtype=torch.uint8, device="cpu")
                buffer.copy_(codes.random_(most, generator=generator))
        if self._is_mixed:
            # Frequent words often come first.
            rates = sorted(self.word_counts, reverse=True)
            parts = [torch.full((self.word_counts[rate],), RATES.index(rate)) for rate in rates]
            self.widths.copy_(torch.cat(parts))
        for name, values in self.codec.initial_books().items():
            self.get_parameter(name).copy_(values)
        nn.init.uniform_(
            self.word_scales, 0.5 * entry_std(self.embedding_dim), 1.5 * entry_std(self.embedding_dim)
        )
        for rate in filter(None, self.word_counts):
            codes = self.codes(rate)[:BLOCK]
            ones = self.word_scales.new_ones(len(codes), self.codec.num_scales)
            values = self.codec.decode(codes, ones, rate, self._shared().books).float()
            size = values.square().mean().sqrt().clamp(min=1e-30).to(self.word_scales)
            if self._is_mixed:
                size = torch.where((self.widths == RATES.index(rate)).unsqueeze(1), size, 1.0)
            self.word_scales.div_(size)

    @property
    def word_scales(self) -> Tensor:
        """The scales ``(V, S)``."""
        # Not `get_parameter`: in place of parameters there may be tensors, as in ``torch.func``.
        scales: Tensor = getattr(self, self.scales_name)
        return scales

    def _shared(self) -> _Shared:
        """What all look-ups and scores need; all but the codebooks is computed once in inference."""
        names = self.codec.book_shapes
        if not self._is_mixed and not names:
            return _Shared({})  # looking into the cache takes a part of the time of a look-up
        # Packed ones are decoded each time, since dense ones would take more memory than in the file.
        codebooks = {name: dense(getattr(self, name)) for name in names}

        def make() -> _Shared:
            derived = self.codec.derived(codebooks, list(self.word_counts))
            if not self._is_mixed:
                return _Shared(derived)
            slots, start = torch.zeros_like(self.widths, dtype=torch.int32), 0
            for rate, number in self.word_counts.items():
                is_this = self.widths == RATES.index(rate)
                is_known = has_values(self.widths) and not torch.compiler.is_compiling()
                if is_known and int(is_this.sum()) != number:
                    raise UserError(
                        f"the tensor widths has {rate:g} bits for {int(is_this.sum())} words, but "
                        f"words_per_width says {number}; the file is damaged"
                    )
                slots = torch.where(is_this, (is_this.cumsum(0) - 1 + start).int(), slots)
                start += number
            every = torch.arange(self.num_embeddings, device=slots.device)
            words = torch.empty_like(every).scatter_(0, slots.long(), every)
            dtype = code_dtype(self.num_embeddings)
            return _Shared(derived, slots.to(dtype), words.to(dtype))

        shared: _Shared = self.cached("shared", make)
        return shared._replace(books=codebooks | shared.books)

    def codes(self, rate: float) -> Tensor:
        """The codes ``(V_i, bytes)`` of the words with a rate; without bytes for 0."""
        if not rate:
            return self.word_scales.new_empty(self.word_counts[rate], 0, dtype=torch.uint8)
        return dense(self.get_buffer(self.code_names[rate]))

    def rows(self, ids: Tensor) -> Tensor:
        [rate, *others] = self.word_counts
        if others or not rate:
            return self.restore(self.coded_rows(ids))
        return self.decode(self.codes(rate), F.embedding(ids, self.word_scales), ids)

    def decode(self, codes: Tensor, scales: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the vectors ``(n, D)`` of rows that `encode` coded, with their scales ``(n, S)``.

        The codes are those of these rows, or with `ids` ``(n,)`` the rows of all codes to read.
        """
        [rate], books = self.word_counts, self._shared().books
        decoding = None
        if kernels.usable(scales, *books.values(), *([] if ids is None else [ids])):
            decoding = self.codec.decoding(rate, books)
        if decoding is None:
            codes = codes if ids is None else codes.index_select(0, ids)
            return self.restore(self.codec.decode(codes, scales, rate, books))
        # Between decoding and rotating, products with other matrices take longer than a second call.
        is_simple = type(self.codec).project is Codec.project
        rotation = _rotation(self.signs) if is_simple and self.signs is not None else None
        rows = kernels.decode_rows(codes, scales, *decoding, ids=ids, rotation=rotation)
        return self.restore(rows) if rotation is None else rows

    def restore(self, rows: Tensor) -> Tensor:
        """Return the vectors ``(n, D)`` of rows as the codec stores them, by a linear map."""
        return rotate(
            self.codec.project(rows, self._shared().books, is_inverted=True), self.signs, is_inverted=True
        )

    def coded_rows(self, ids: Tensor) -> Tensor:
        """Return the rows of words ``(n,)`` as the codec stores them, before `restore`."""
        shared, scales = self._shared(), F.embedding(ids, self.word_scales)
        books, slots = shared.books, shared.slots
        if slots is None:
            rate = next(iter(self.word_counts))
            return self._decoded(self.codes(rate).index_select(0, ids), scales, rate, books)
        places, ends = slots.index_select(0, ids).int(), [*itertools.accumulate(self.word_counts.values())]
        if needs_fixed_shapes(ids):
            # Sizes must not depend on data in compiled graphs, so each rate decodes all words.
            rows = scales.new_zeros(scales.size(0), self.embedding_dim)
            for (rate, count), end in zip(self.word_counts.items(), ends):
                every = (places - end + count).clamp(0, count - 1)
                decoded = self._decoded(self.codes(rate).index_select(0, every), scales, rate, books)
                has_rate = (places >= end - count) & (places < end)
                rows = torch.where(has_rate.unsqueeze(1), decoded, rows)
            return rows
        # In the order of slots, words of a rate are consecutive.
        places, order = places.sort()
        bounds = [0, *torch.searchsorted(places, places.new_tensor(ends)).tolist()]
        scales, parts = scales[order], []
        for (rate, count), end, first, last in zip(self.word_counts.items(), ends, bounds, bounds[1:]):
            if first < last or not len(ids):  # gradients of no rows, too
                codes = self.codes(rate).index_select(0, places[first:last] - (end - count))
                parts.append(self._decoded(codes, scales[first:last], rate, books))
        rows = torch.cat(parts)
        return torch.empty_like(rows).index_copy(0, order, rows)

    def _all_rows(self) -> Tensor:
        return torch.cat([self.restore(rows) for rows in self._decoded_rows().split(BLOCK)])

    def output_factors(self) -> OutputFactors:
        """The decoded rows ``(V, D)``, and the map ``(D, D)`` that restores them and rotates them back."""
        rows = self._decoded_rows()
        if self.signs is None and type(self.codec).project is Codec.project:
            return OutputFactors(rows, None)
        eye = self.codec.project(torch.eye(rows.size(1)).to(rows), self._shared().books, is_inverted=True)
        return OutputFactors(rows, rotate(eye, self.signs, is_inverted=True))

    def _decoded(self, codes: Tensor, scales: Tensor, rate: float, books: Books) -> Tensor:
        return self.codec.decode(codes, scales, rate, books) if rate else self.codec.uncoded(scales, books)

    def _decoded_rows(self) -> Tensor:
        """The rows ``(V, D)`` of all words as the codec stores them."""
        shared, blocks = self._shared(), []
        books, slots = shared.books, shared.slots
        for rate, scales in self._parts(shared.words):
            for codes, factors in zip(self.codes(rate).split(BLOCK), scales.split(BLOCK)):
                blocks.append(self._decoded(codes, factors, rate, books))
        rows = torch.cat(blocks)
        return rows if slots is None else rows.index_select(0, slots.int())

    def _block_scores(self, hidden: Tensor) -> Tensor:
        codec, shared, parts = self.codec, self._shared(), []
        books, slots = shared.books, shared.slots
        states = codec.project(rotate(hidden, self.signs), books)
        for rate, scales in self._parts(shared.words):
            if rate:
                parts.append(codec.scores(states, self.codes(rate), scales, rate, books))
            else:
                row = codec.uncoded(scales.new_ones(1, scales.size(1)), books)
                parts.append(states @ row.t() * scales[:, :1].t())
        return parts[0] if slots is None else torch.cat(parts, dim=-1).index_select(-1, slots.int())

    def _parts(self, words: Tensor | None) -> Iterator[tuple[float, Tensor]]:
        """Each rate and the scales ``(V_i, S)`` of its words, in the order of the vocabulary."""
        if words is None:
            yield next(iter(self.word_counts)), dense(self.word_scales)
            return
        scales = self.word_scales.index_select(0, words.int())
        yield from zip(self.word_counts, scales.split(list(self.word_counts.values())))

    def state_for_ids(self, ids: Tensor) -> tuple[dict[str, object], dict[str, Tensor]]:
        state = self.state_dict()
        for name in (self.scales_name, "bias", "widths"):
            if name in state:
                state[name] = state[name].index_select(0, ids)
        counts = dict.fromkeys(RATES, 0)
        is_kept = torch.zeros(self.num_embeddings, dtype=torch.bool, device=ids.device)
        is_kept[ids] = True
        for rate in self.word_counts:
            words = self.widths == RATES.index(rate) if self._is_mixed else torch.ones_like(is_kept)
            counts[rate] = int((is_kept & words).sum())
            if rate:
                codes = state.pop(self.code_names[rate])[is_kept[words]]
                state.update({self.code_names[rate]: codes} if len(codes) else {})
        rates = [rate for rate, count in counts.items() if count]
        if len(rates) == 1:
            state.pop("widths", None)
        return {**self.stored_options(), "words_per_width": list(counts.values())}, state

    @staticmethod
    @torch.no_grad()
    def learn(sample: Tensor, options: Mapping[str, Any]) -> QuantizedEmbedding:
        """Return what rows like those of a sample ``(n, D)`` share, without codes of any row.

        All rows have the same bits.

        Args:
            options: of `quantized`.

        Raises:
            OptionError: an option is unknown or impossible, or the codec has no such bits.
        """
        asked = parse_options("quantized", QuantizedOptions, options)
        rate, rates = asked.bits, asked.layout(*sample.shape)[0].rates
        require(
            rate in rates,
            f"option 'bits' is {rate:g}, but all rows of a large table have the same bits, and codec "
            f"{asked.codec} has {', '.join(f'{bits:g}' for bits in rates if bits)}; choose one of these",
        )
        counts = [len(sample) * (other == rate) for other in RATES]
        sizes: dict[str, Any] = {"num_embeddings": len(sample), "embedding_dim": sample.size(1)}
        draft: Any = build("quantized", **sizes, **{**options, "words_per_width": counts})
        limit = _code_bytes(draft.codec, draft.word_counts)
        codec, _ = draft.codec.fit(
            sample, rate, None, None, lambda codec, counts: _code_bytes(codec, counts) <= limit
        )
        layout = {"directions": list(codec.layout)} if codec.layout else {}
        made: Any = build("quantized", **sizes, **{**options, **layout, "words_per_width": counts})
        made._learn_books(sample.split(BLOCK), torch.full((len(sample),), rate))
        return made  # type: ignore[no-any-return]

    def _learn_books(self, blocks: Iterable[Tensor], rates: Tensor) -> None:
        """Set the codebooks by a sample of rows in blocks, and the rates ``(n,)`` of all."""
        # In blocks: rotating takes several copies.
        sample = torch.cat([rotate(rows.float(), self.signs) for rows in blocks])
        for name, values in self.codec.learn(sample, rates).items():
            self.get_parameter(name).copy_(values)

    def encode(self, rows: Tensor) -> Encoded:
        """Return codes and scales of rows ``(n, D)`` in float32, where all rows have the same bits."""
        [rate] = self.word_counts
        return self.codec.encode(rotate(rows, self.signs), rate, self._shared().books)

    @classmethod
    @torch.no_grad()
    def fit(cls, task: FitTask) -> QuantizedEmbedding:
        """Bits for words by counts and norms, codebooks from the rows, then the nearest codes.

        The bits are those that fit into the bytes of an embedding with these options that is not fitted.
        """
        draft: QuantizedEmbedding = task.build()
        options, table, weights = draft.options, task.teacher, None
        # The squares of very large or small tables are infinite or zero in 32 bits.
        largest = float(torch.stack(torch.aminmax(table)).abs().max())
        exponent = max(math.frexp(largest)[1], -100)
        unit = 1.0 if abs(exponent) < 32 else 2.0**exponent
        if unit != 1.0:
            table = table.float() / unit
        limit = _code_bytes(draft.codec, draft.word_counts)
        if options.count_exponent > 0 and task.token_counts is not None:
            weights = (task.token_counts + 1) ** options.count_exponent
        codec, rates = draft.codec.fit(
            table,
            options.bits,
            weights,
            task.metric,
            lambda codec, counts: _code_bytes(codec, counts) <= limit,
        )
        counts = [int((rates == rate).sum()) for rate in RATES]
        layout = {"directions": list(codec.layout)} if codec.layout else {}
        made: QuantizedEmbedding = task.build({**task.options, "words_per_width": counts, **layout})
        if made._is_mixed:
            made.widths.copy_(torch.tensor([RATES.index(rate) for rate in rates.tolist()]))
        is_sampled = torch.zeros(len(table), dtype=torch.bool)
        is_sampled[:: max(1, len(table) // _SAMPLE)] = True
        for rate in made.word_counts:
            words = (rates == rate).nonzero().flatten()
            is_sampled[words[:: max(1, len(words) // _SAMPLE_OF_RATE)]] = True
        ids = is_sampled.nonzero().flatten().to(table.device)
        made._learn_books((table[block] for block in ids.split(BLOCK)), rates.to(table.device)[ids])
        books, metric = made._shared().books, None
        if task.metric is not None:
            rotated = Metric(task.metric).seen_by(lambda states: rotate(states, made.signs))
            metric = rotated.seen_by(lambda states: codec.project(states, books))
        is_encoded = torch.ones(len(table), dtype=torch.bool)
        if task.only is not None:
            is_encoded = torch.zeros_like(is_encoded).index_fill_(0, task.only, True)
        bar = progress_bar(int(is_encoded.sum()), "codes", " words", disable=not task.progress)
        for rate in made.word_counts:
            words = (rates == rate).nonzero().flatten()
            for places in is_encoded[words].nonzero().flatten().split(codec.rows_at_once):
                ids = words[places].to(table.device)
                rows = rotate(table[ids].float(), made.signs)
                if rate:
                    codes, scales = codec.encode(rows, rate, books, metric)
                    made.codes(rate)[places.to(table.device)] = codes
                else:
                    scales = codec.uncoded_scales(rows, books, metric)
                made.word_scales[ids] = scales.to(made.word_scales) * unit
                bar.update(len(ids))
        bar.close()
        return made


def _code_bytes(codec: Codec, counts: Mapping[float, int]) -> int:
    """The bytes of the codes, rates and codebooks for numbers of words by rate."""
    used = {rate: count for rate, count in counts.items() if count}
    rates = [rate for rate in used if rate]
    shapes = codec.book_shapes.items() if rates else ()
    store = QuantizedOptions.default_store
    books = sum(packed_bytes(torch.empty(shape, device="meta"), store, name) for name, shape in shapes)
    codes = sum(codec.row_bytes(rate) * used[rate] for rate in rates)
    return codes + books + (sum(used.values()) // 2 if len(used) > 1 else 0)


def rotate(values: Tensor, signs: Tensor | None, is_inverted: bool = False) -> Tensor:
    """Return rotated vectors ``(n, D)``: signs, then small orthogonal matrices along the factors of D.

    Without signs, vectors stay as they are.

    After it, the entries of any row are close to normal with one variance, so that one codebook fits all
    tables. Dimensions with a 1 in the signs ``(D,)``, which are 0 or 1, are negated first. The product of the
    matrices is their Kronecker product. The inverse has their transposes, and the signs last.
    """
    if signs is None:
        return values
    if is_inverted and values.dtype != torch.float64 and kernels.usable(values, signs):
        if (rotation := _rotation(signs)) is not None:
            return kernels.rotate_back(values, rotation)
    factors = 1 - 2 * signs.to(values.dtype)
    mixed, done = values if is_inverted else values * factors, 1
    for sizes in _groups(values.size(1)):
        matrix = _orthogonal(sizes, values.dtype, values.device)
        matrix = matrix.t() if is_inverted else matrix
        # The axis of these factors has `done` entries of earlier factors before it.
        done *= len(matrix)
        parts = mixed.reshape(-1, len(matrix), values.size(1) // done)
        # Many products of a small matrix with one column would take long.
        mixed = parts.squeeze(2) @ matrix.t() if parts.size(2) == 1 else torch.matmul(matrix, parts)
    rotated = mixed.reshape(values.shape)
    return rotated * factors if is_inverted else rotated


def _rotation(signs: Tensor) -> tuple[Tensor, Any] | None:
    """What loops need to rotate back, as `rotate` does; None if a product with a large matrix is faster."""
    odd = len(signs) // (len(signs) & -len(signs))
    return (dense(signs), _odd_matrix(odd)) if odd < 64 else None


@functools.cache
def _odd_matrix(size: int) -> Any:
    """The matrix along an odd factor of D, in numpy."""
    return orthogonal(size).astype("float32")


@functools.cache
def _groups(dim: int) -> list[tuple[int, ...]]:
    """The factors of D in groups of similar products of at most 64 or so: few and small ones are fast."""
    count = next(count for count in itertools.count(1) if 64**count >= dim)
    groups: list[tuple[int, ...]] = [()]
    for size in factors_of(dim):
        # Hadamard matrices are products of those of two dimensions.
        for part in [size] if size & (size - 1) else [2] * (size.bit_length() - 1):
            if groups[-1] and math.prod(groups[-1]) * part > 2**0.5 * dim ** (1 / count):
                groups.append(())
            groups[-1] += (part,)
    return groups


@cache_tensor
def _orthogonal(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The Kronecker product of Hadamard matrices for powers of two, cosine transforms (DCT-II) for others."""
    # As `orthogonal` of `shared_embeddings.quant.decoder`, with torch: arrays would end a captured graph.
    product = torch.ones(1, 1, dtype=torch.float64, device=device)
    for size in sizes:
        if size & (size - 1) == 0:
            matrix = torch.ones(1, 1, dtype=torch.float64, device=device)
            for _ in range(size.bit_length() - 1):
                matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
            matrix = matrix / math.sqrt(size)
        else:
            places = torch.arange(size, dtype=torch.float64, device=device)
            matrix = torch.cos(math.pi / size * (places + 0.5) * places.unsqueeze(1)) * math.sqrt(2 / size)
            matrix[0] /= math.sqrt(2)
        product = torch.kron(product, matrix)
    return product.to(dtype)
