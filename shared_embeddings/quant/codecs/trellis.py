"""Trellis-coded quantization with a computed codebook (after QTIP, Tseng et al., 2024).

A row is a stream of bits, a few for each number. A number is the codebook's entry for a state: the last 11
bits of the stream up to its own. Neighboring numbers share most bits of their states, so a stream is a path
through a trellis, and the Viterbi algorithm finds the nearest one. With less than one bit for each number,
two or four numbers share a state; each of them has its own codebook.

The entry of a state needs no memory: the state times an odd number, modulo 2048, is a hash. Coarse entries
are the sum of two small tables at the halves of the hash's upper eight bits. Numbers with many bits have fine
entries: 16 lines on each side of zero go through the quantiles of the normal distribution, and the hash is a
place on them. Vector instructions read tables of 16 numbers from a register. The products spread the states
after a state evenly over all entries, which leaves smaller errors than entries in random order, with half as
many states.

Axes: ``n`` rows, ``D`` dimensions, ``T`` states of a row.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.nn.tracing import cache_tensor, has_values
from shared_embeddings.quant import kernels
from shared_embeddings.quant.bits import bits_of, pack_bits, read_windows
from shared_embeddings.quant.codec import RATES, Books, Codec, Encoded, fitted_scales, register, row_sizes
from shared_embeddings.quant.decoder import windows
from shared_embeddings.quant.metric import Metric

STATE_BITS = 11
_STATES = 2**STATE_BITS
# The free bits of a row's first state; the bits before them are zero.
START_BITS = 8
# Fractions of a bit are worth their table look-ups in rows of at least so many numbers.
_LEAST_DIM = 32
# Rows whose path costs are updated together; their costs fit into the cache of a core.
_ROWS = 32
# Numbers whose errors are made up for together, and the states after them that are searched with them, since
# the best path to here may leave only bad ones.
TOGETHER, _AHEAD = 32, 8
# How much finer than the whole numbers of `path_parameters` words are, by rate: most for small errors, least
# where several numbers share a state. With more bits, errors would be too small for words.
_WORD_UNITS = {0.25: 30, 0.5: 52, 1.0: 88, 2.0: 88, 3.0: 88, 4.0: 110}
# The mean squared errors of normal numbers by rate, as measured in 128 dimensions.
ERRORS = {
    0.0: 1.0,
    0.25: 0.694,
    0.5: 0.505,
    1.0: 0.266,
    2.0: 0.0693,
    3.0: 0.0182,
    4.0: 0.0050,
    5.0: 0.00149,
    6.0: 0.00036,
    7.0: 0.00009,
    8.0: 0.000026,
}


class Step(NamedTuple):
    """A state of a path."""

    bits: int  # between the state before and this one
    numbers: int  # that it gives
    book: int  # the entries of `path_books` of the first number; those after it have the next ones


Steps = tuple[Step, ...]
# Runs of numbers: the bits for each number, and how many numbers.
Runs = tuple[tuple[float, int], ...]


@functools.cache
def steps_for(runs: Runs) -> Steps:
    """The steps for runs of numbers."""
    steps: list[Step] = []
    for rate, count in runs:
        length = max(1, round(1 / rate))
        whole, rest = divmod(count, length)
        steps += [Step(max(1, int(rate)), length, path_book(rate))] * whole
        steps += [Step(1, rest, path_book(rate))] * (rest > 0)
    return tuple(steps)


@cache_tensor
def gains_for(runs: Runs, device: torch.device) -> Tensor:
    """The factors of the entries of all numbers."""
    return torch.tensor([path_gain(rate) for rate, count in runs for _ in range(count)], device=device)


# Stand-alone decoding.


def path_gain(rate: float) -> float:
    """The factor of entries with the least error: few bits want less variance than numbers have, many bits
    more room for large numbers; fine entries are larger. A power of 2**(1/16), as the scales of rows are.
    """
    steps = {0.25: -14, 0.5: -8, 1.0: -2, 2.0: 1, 3.0: 2, 4.0: 4, 5.0: 7, 6.0: -31, 7.0: -30, 8.0: -29}
    return float(2.0 ** (steps[rate] / 16))


def path_book(rate: float) -> int:
    """Which of `path_books` the first number of a state has: numbers with many bits have fine entries."""
    return 4 if rate >= 6 else 0


def path_parameters() -> tuple[list[int], Any, Any, float]:
    """What entries are computed with.

    Returns:
        What states are multiplied with, for the first to fourth number that shares them and for fine entries;
        found by search. The whole numbers ``(2, 16)`` that add up to coarse entries, near quantiles of the
        normal distribution. The starts, divided by 64, and the slopes ``(2, 16)`` of the lines of fine
        entries, from zero on, with 64 places each, in eighths of the unit. The unit, with which sums of those
        whole numbers have a variance of one.
    """
    halves = [4, 11, 19, 27, 37, 47, 62, 88], [2, 5, 9, 12, 16, 21, 28, 39]
    levels = np.array([[-level for level in half[::-1]] + half for half in halves], np.int8)
    slopes = np.array([2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 4, 4, 5, 7, 10, 39])
    lines = np.stack([slopes.cumsum() - slopes, slopes])
    return [875, 847, 793, 941, 1213], levels, lines, 1 / 49.56


@functools.cache
def path_books() -> Any:
    """The entries ``(5, 2048)`` of all states: coarse ones of the first to fourth number that shares a state;
    fine ones.
    """
    factors, (upper, lower), (starts, slopes), unit = path_parameters()
    hashed = np.outer(factors, np.arange(2048)) % 2048
    sums = upper[hashed[:4] >> 7] + lower[hashed[:4] >> 3 & 15]
    signed = hashed[4:] - 1024
    sign = signed >> 31
    place = signed ^ sign
    quantiles = (64 * starts[place >> 6] + slopes[place >> 6] * (place & 63) >> 3) ^ sign
    return np.concatenate([sums, quantiles]).astype(np.float32) * np.float32(unit)


def path_entries(codes: Any, rates: list[float]) -> Any:
    """Entries of states, each of which gives one number, or two or four with less than one bit for each."""
    ends: list[int] = []
    books: list[int] = []
    left = 0
    for place, rate in enumerate(rates):
        is_new = left == 0 or rate != rates[place - 1]
        left = max(1, round(1 / rate)) if is_new else left
        ends.append(ends[-1] + is_new * max(1, int(rate)) if ends else 8)
        books.append(path_book(rate) if is_new else books[-1] + 1)
        left -= 1
    return path_books()[books, windows(codes, np.array(ends), 11)]


def decode_trellis(codes: Any, rate: float, dim: int, parts: Mapping[str, Any]) -> Any:
    """Entries of the states along a path (after QTIP, Tseng et al., 2024)."""
    return path_entries(codes, [rate] * dim)


@register("trellis")
class TrellisCodec(Codec):
    """See the module."""

    about = "paths through a trellis"
    few_states = 32
    codes_name = "streams"  # "paths" had no fine entries
    errors = ERRORS
    standalone: ClassVar[Sequence[Callable[..., Any]]] = (
        path_book,
        path_parameters,
        path_books,
        path_entries,
        decode_trellis,
    )

    def __init__(self, dim: int, group_size: int = 32, layout: Sequence[int] = ()) -> None:
        super().__init__(dim, group_size, layout)
        self.rates = tuple(sorted(RATES)) if dim >= _LEAST_DIM else RATES[:9]
        self.steps = {rate: steps_for(((rate, dim),)) for rate in RATES if rate}

    def row_bytes(self, rate: float) -> int:
        return stream_bytes(self.steps[rate])

    def encode(self, rows: Tensor, rate: float, books: Books, metric: Metric | None = None) -> Encoded:
        """The path with the least error for rows at the size of entries."""
        steps, targets, gain = self.steps[rate], rows / row_sizes(rows), path_gain(rate)
        codes = nearest_codes(targets / gain, rate, steps) if metric is None else None
        if codes is None:
            codes = packed_states(find_path(targets, steps, rows.new_full((self.dim,), gain), metric), steps)
        values = self.decode(codes, rows.new_ones(len(rows), 1), rate, books)
        return Encoded(codes, fitted_scales(rows, values, metric))

    def decode(self, codes: Tensor, scales: Tensor, rate: float, books: Books) -> Tensor:
        if kernels.usable(codes, scales):
            return kernels.decode_rows(codes, scales, *self.decoding(rate, books))
        if rate < 1:
            return read_entries(codes, self.steps[rate]).to(scales.dtype) * scales
        width = int(rate)
        if torch.compiler.is_compiling():  # a graph would build a larger table in every call
            entries = codebook(codes.device)[path_book(width)].unsqueeze(1)
        else:
            entries = successive_entries(width, codes.device)
        bits, together = entries.size(0).bit_length() - 1, entries.size(1)
        start = START_BITS - STATE_BITS
        streams = read_windows(codes, -(-self.dim // together), bits, width * together, start)
        return F.embedding(streams, entries).flatten(1)[:, : self.dim].to(scales.dtype) * scales

    def decoding(self, rate: float, books: Books) -> tuple[kernels.EntryPlan, Any, Any]:
        return entry_plan(((rate, self.dim),)), *kernels.plain(self.dim)

    def direct_scores(
        self, hidden: Tensor, codes: Tensor, scales: Tensor, rate: float, books: Books
    ) -> Tensor | None:
        return path_scores(hidden, codes, self.steps[rate], scales)


def stream_bytes(steps: Steps) -> int:
    """The bytes of the stream of a row."""
    return -(-(START_BITS + sum(step.bits for step in steps[1:])) // 8)


def nearest_codes(rows: Tensor, rate: float, steps: Steps) -> Tensor | None:
    """The codes of the paths with the least squared errors from rows ``(n, D)`` at the size of entries.

    A compiled loop finds them with whole numbers. None if there is none for the rate or the processor.
    """
    lanes = importlib.import_module("shared_embeddings.quant.lanes") if kernels.usable(rows) else None
    if lanes is None or lanes.INSTRUCTIONS is None or rate not in _WORD_UNITS:
        return None
    book, count = steps[0].book, steps[0].numbers
    books, unit = codebook(rows.device)[book : book + count], _WORD_UNITS[rate]
    factor = unit / path_parameters()[-1]
    # Errors of numbers that share a state add up to a word with a sign, and so does each error before it is
    # squared.
    largest = int(2**15 / count**0.5 - factor * float(books.abs().max())) - 1
    return kernels.nearest_codes(rows, steps[-1].bits, books, factor, largest, stream_bytes(steps))


def find_path(rows: Tensor, steps: Steps, sizes: Tensor, metric: Metric | None) -> Tensor:
    """The states ``(n, T)`` of a path with a small error in a metric, or else the least squared error.

    The rows are ``(n, D)``, the sizes ``(D',)`` those of the entries of numbers with codes; others are zero.
    """
    count = len(sizes)
    if metric is None:
        return nearest_states(rows[:, :count] / sizes, steps, sizes.square())
    # The numbers without codes come first: those with codes make up for their absence.
    paths: list[Tensor] = []
    zeros, turned = rows.size(1) - count, metric.rotated(count)
    # What squared errors count once the numbers that follow made up for them.
    weights = turned.upper.diagonal()[zeros:] ** -2 * sizes.square()
    # Runs of steps whose numbers are rounded together, each with its first number and the one after it.
    runs, first, column = [], 0, 0
    while first < len(steps):
        last, end = first, column
        while last < len(steps) and end - column < TOGETHER:
            end += steps[last].numbers
            last += 1
        runs.append((slice(first, last), column, end))
        first, column = last, end

    def quantize(left: Tensor, number: int) -> Tensor:
        if number < (zeros > 0):
            return torch.zeros_like(left[:, :zeros])
        run, start, end = runs[number - (zeros > 0)]
        seen = steps[run.start : run.stop + _AHEAD]
        columns = slice(start, start + sum(step.numbers for step in seen))
        targets = left[:, : columns.stop - start] / sizes[columns]
        before = paths[-1][:, -1] if paths else None
        paths.append(nearest_states(targets, seen, weights[columns], before)[:, : run.stop - run.start])
        return entries_of(paths[-1], steps[run]) * sizes[start:end]

    ends = [zeros] * (zeros > 0) + [zeros + end for _, _, end in runs]
    turned.round(rows.roll(-count, 1), ends, quantize)
    return torch.cat(paths, dim=1)


def nearest_states(rows: Tensor, steps: Steps, weights: Tensor, before: Tensor | None = None) -> Tensor:
    """The states ``(n, T)`` of the path with the least weighted squared error from each row ``(n, D)``.

    Args:
        rows: rows of numbers at the size of entries.
        steps: of all states.
        weights: ``(D,)`` of the squared errors.
        before: the states ``(n,)`` before the first ones; None where rows start.
    """
    if before is None:
        starts, choices = torch.zeros(len(rows), dtype=torch.long, device=rows.device), 1 << START_BITS
    else:
        starts, choices = before << steps[0].bits & _STATES - 1, 1 << steps[0].bits
    if kernels.usable(rows):
        return kernels.nearest_paths(rows, steps, weights, starts, choices, codebook(rows.device))
    # All blocks use the same memory: page faults would take longer than the search.
    count = min(_ROWS, len(rows))
    lowest = rows.new_empty((len(steps), _STATES >> min(step.bits for step in steps), count))
    blocks = F.pad(rows, (0, 0, 0, -len(rows) % count)).split(count)
    begins = F.pad(starts, (0, -len(rows) % count)).split(count)
    paths = [nearest_paths(*block, choices, steps, weights, lowest) for block in zip(blocks, begins)]
    return torch.cat(paths)[: len(rows)]


_CODEBOOK = torch.from_numpy(path_books())


def codebook(device: torch.device) -> Tensor:
    """The entries ``(5, 2048)`` of `path_books`."""
    # Graphs without values take no tensors from outside.
    return (_CODEBOOK if has_values() else torch.tensor(path_books(), device="cpu")).to(device)


@cache_tensor
def successive_entries(width: int, device: torch.device) -> Tensor:
    """The entries ``(2**bits, m)`` of m successive states, for all streams of their `bits` bits, 16 at most.

    One look-up then gives m numbers.
    """
    count = {1: 4, 2: 2, 3: 2, 4: 2}.get(width, 1)
    streams = torch.arange(2 ** (STATE_BITS + width * (count - 1)), device=device).unsqueeze(1)
    shifts = torch.arange(count - 1, -1, -1, device=device) * width
    return codebook(device)[path_book(width)][streams >> shifts & _STATES - 1]


@torch.no_grad()
def nearest_paths(
    rows: Tensor, starts: Tensor, choices: int, steps: Steps, weights: Tensor, lowest: Tensor
) -> Tensor:
    """`nearest_states` of a block of rows, whose paths begin in one of `choices` states from `starts` on.

    `lowest` ``(T, 2048 / 2**bits, n)`` for the fewest bits is overwritten with the lowest cost of a path to a
    state that the states with the same leading bits can follow.
    """
    count, book = len(rows), codebook(rows.device)
    every = torch.arange(_STATES, device=rows.device).unsqueeze(1)
    # The rows are the last axis, which makes all operations long loops over contiguous memory.
    columns = rows.t().contiguous()
    # (x - c)^2 = (c^2, -2 c, 1) (1, x, x^2); without x^2, sums for long rows would be too large to be exact.
    entries = torch.stack([book.square(), -2 * book, torch.ones_like(book)], dim=-1)
    costs, errors = (rows.new_empty((_STATES, count)) for _ in range(2))
    ends = itertools.accumulate(step.numbers for step in steps)
    columns_of = [slice(end - step.numbers, end) for end, step in zip(ends, steps)]
    for place, (step, numbers) in enumerate(zip(steps, columns_of)):
        factors = torch.stack(
            [torch.ones_like(columns[numbers]), columns[numbers], columns[numbers].square()], dim=1
        )
        factors = (factors * weights[numbers, None, None]).flatten(0, 1)
        powers = entries[step.book :][: step.numbers].transpose(0, 1).flatten(1)
        torch.mm(powers, factors, out=costs if place == 0 else errors)
        if place == 0:
            costs.masked_fill_((every < starts) | (every >= starts + choices), torch.inf)
        else:
            heads = _STATES >> step.bits  # the states without their last bits
            least = costs.view(-1, heads, count)  # the minimum over the first axis, in halves
            while (half := least.size(0) // 2) > 1:
                least = torch.minimum(least[:half], least[half:])
            torch.minimum(least[0], least[1], out=lowest[place, :heads])
            by_head = costs.view(heads, -1, count)
            torch.add(errors.view(heads, -1, count), lowest[place, :heads].unsqueeze(1), out=by_head)
    # From the last state to the first. The costs of the states before a state are computed again: the choices
    # of all states would take more time to find than those on the paths.
    states, everyone = [costs.argmin(dim=0)], torch.arange(count, device=rows.device)
    for place in range(len(steps) - 2, -1, -1):
        bits, numbers = steps[place + 1].bits, columns_of[place]
        before = torch.arange(0, _STATES, _STATES >> bits, device=rows.device).unsqueeze(1)
        candidates = before + (states[-1] >> bits)
        squares, slopes = entries[steps[place].book :][: steps[place].numbers, candidates, :2].unbind(-1)
        costs = ((squares + slopes * columns[numbers].unsqueeze(1)) * weights[numbers, None, None]).sum(dim=0)
        if place == 0:
            is_outside = (candidates < starts) | (candidates >= starts + choices)
            costs = costs.masked_fill(is_outside, torch.inf)
        else:
            costs += lowest[place, candidates >> steps[place].bits, everyone]
        states.append(candidates.gather(0, costs.argmin(dim=0, keepdim=True)).squeeze(0))
    return torch.stack(states[::-1], dim=1)


def entries_of(states: Tensor, steps: Steps) -> Tensor:
    """The entries ``(n, D)`` of states ``(n, T)``."""
    numbers, places = _places_of(steps, states.device)[:2]
    return codebook(states.device)[numbers, states[:, places]]


@cache_tensor
def _places_of(steps: Steps, device: torch.device) -> Tensor:
    """The codebook of every number, the place of its state, and the last bit of that: ``(3, D)``."""
    ends = itertools.accumulate(step.bits for step in steps[1:])
    places = [
        (step.book + number, place, end)
        for place, (step, end) in enumerate(zip(steps, [START_BITS, *(START_BITS + end for end in ends)]))
        for number in range(step.numbers)
    ]
    return torch.tensor(places, device=device).t().contiguous()


def packed_states(states: Tensor, steps: Steps) -> Tensor:
    """The stream of each row: the first state's low bits, then those of every other state."""
    bits, done = [bits_of(states[:, :1] & (1 << START_BITS) - 1, START_BITS)], 1
    for width, run in itertools.groupby(step.bits for step in steps[1:]):
        count = len(list(run))
        bits.append(bits_of(states[:, done : done + count] & (1 << width) - 1, width))
        done += count
    return pack_bits(torch.cat(bits, dim=1), 1)


@functools.cache
def lane_plan(steps: Steps) -> kernels.LanePlan:
    """How `kernels.lane_scores` reads what `packed_states` wrote."""
    books, _, ends = _places_of(steps, torch.device("cpu")).tolist()
    fine, (multipliers, levels, lines, unit) = path_book(max(RATES)), path_parameters()
    # Two numbers whose states a window of 16 bits has, or one: the bits between the two, their books, the end
    # of the window, and their columns, -1 for no second one.
    pairs, column = [], 0
    while column < len(ends):
        last = min(column + 1, len(ends) - 1)
        is_near = ends[last] - ends[column] <= 16 - STATE_BITS
        last = last if is_near and (books[last] == fine) == (books[column] == fine) else column
        columns = column, last if last > column else -1
        pairs.append((ends[last] - ends[column], (books[column], books[last]), ends[last], columns))
        column = last + 1
    pairs.sort(key=lambda pair: pair[:2])
    factors, bounds = [], []
    for (bits, pair_books), run in itertools.groupby(enumerate(pairs), lambda numbered: numbered[1][:2]):
        first, second = (multipliers[book] << 16 - STATE_BITS & 0xFFFF for book in pair_books)
        # Sums of more products may not fit into 32 bits.
        for number, _ in itertools.islice(run, 0, None, kernels.LANE_PAIRS[fine in pair_books]):
            bounds.append(number)
            factors.append([first, second, bits, fine in pair_books])
    window_ends = np.array([end for _, _, end, _ in pairs])
    return kernels.LanePlan(
        places=window_ends // 16,
        shifts=(window_ends % 16).astype(np.uint16),
        bounds=np.array([*bounds, len(pairs)]),
        factors=np.array(factors, np.uint16),
        tables=np.concatenate([levels, lines]).astype(np.uint8),
        columns=np.array([columns for *_, columns in pairs]),
        unit=unit,
    )


def read_entries(codes: Tensor, steps: Steps) -> Tensor:
    """The entries ``(n, D)`` of the states that `packed_states` wrote."""
    book = codebook(codes.device)
    numbers, _, ends = _places_of(steps, codes.device)
    places = (ends - 1) // 8
    padded = F.pad(codes, (2, 0)).int()
    high, middle, low = (padded.index_select(1, places + number) for number in range(3))
    windows = (high << 16 | middle << 8 | low) >> (8 * (places + 1) - ends).int() & _STATES - 1
    return F.embedding(windows + numbers.int() * _STATES, book.view(-1, 1)).squeeze(-1)


def path_scores(hidden: Tensor, codes: Tensor, steps: Steps, scales: Tensor) -> Tensor | None:
    """The products ``(N, n)`` of hidden states with rows as of `read_entries`, by a compiled loop.

    None if the processor has no vector instructions for it.
    """
    lanes = importlib.import_module("shared_embeddings.quant.lanes")  # slow to import
    if lanes.INSTRUCTIONS is None:
        return None
    return kernels.lane_scores(hidden, codes, scales, lane_plan(steps))


@functools.cache
def entry_plan(runs: Runs) -> kernels.EntryPlan:
    """How `kernels.decode_rows` reads what `packed_states` wrote for the steps of runs."""
    planned, column, end = [], 0, START_BITS
    for step, group in itertools.groupby(steps_for(runs)):
        count = len(list(group))
        end += step.bits if column else 0
        planned += [
            (column + number, step.numbers, count, end, step.bits, (step.book + number) * _STATES)
            for number in range(step.numbers)
        ]
        column += step.numbers * count
        end += step.bits * (count - 1)
    return kernels.EntryPlan.of(planned, STATE_BITS, path_books().ravel())
