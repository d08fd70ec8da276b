"""Beam search and sampling, and other options of ``onmt_translate``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onmt.translate.beam_search import BeamSearch
from onmt.translate.penalties import PenaltyBuilder

from nmt.hooks import apply_patches
from tests.nmt.conftest import FUNNEL, Host, Trained

Learned = Callable[[str], tuple[Host, Path]]
RNN = {"encoder_type": "brnn", "decoder_type": "rnn", "position_encoding": False}
KINDS: dict[str, dict[str, Any]] = {"transformer": {}, "rnn": RNN}
# Sampling from the best word only; a beam of one is another search.
GREEDY = "-beam_size 1 -random_sampling_topk 1"
SEARCHES = [
    "-beam_size 3 -n_best 2",
    "-beam_size 1",
    "-beam_size 3 -replace_unk",
    "-beam_size 3 -block_ngram_repeat 2",
    "-beam_size 3 -block_ngram_repeat 1 -n_best 2",
    "-beam_size 1 -block_ngram_repeat 1",
    f"{GREEDY} -min_length 4",
    f"{GREEDY} -min_length 2 -block_ngram_repeat 1",
    f"{GREEDY} -block_ngram_repeat 2",
    "-beam_size 3 -ratio 1.2",
    "-beam_size 3 -coverage_penalty wu -beta 0.1",
    "-beam_size 3 -coverage_penalty wu -beta 0.1 -stepwise_penalty",
    "-beam_size 3 -coverage_penalty summary -beta 0.5",
    "-beam_size 3 -length_penalty wu -alpha 0.5",
    "-beam_size 3 -min_length 4",
]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """Models whose translations differ in length and words."""
    models: dict[str, tuple[Host, Path]] = {}

    def get(kind: str) -> tuple[Host, Path]:
        if kind not in models:
            host = Host(tmp_path_factory.mktemp("search"))
            own = host.language_model() if kind == "language model" else KINDS[kind]
            steps = {"train_steps": 60, "save_checkpoint_steps": 60}
            models[kind] = host, host.train("model", embedding=FUNNEL, **own, **steps)
        return models[kind]

    return get


@pytest.mark.slow_except(
    "rnn--beam_size 3 -length_penalty wu -alpha 0.5",
    "rnn--beam_size 3 -min_length 4",
    "rnn--beam_size 3 -replace_unk",
)
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_batched_search_equals_single_sentences(kind: str, search: str, learned: Learned) -> None:
    host, model = learned(kind)
    one_by_one = host.translate(model, *search.split(), "-batch_size", "1")
    together = host.translate(model, *search.split(), "-batch_size", "7")
    assert together == one_by_one
    assert len(set(one_by_one)) > 2


@pytest.mark.slow_except("-beam_size 1 -random_sampling_topk 1-1")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("search", ["-beam_size 3", GREEDY])
def test_block_ngram_repeat(search: str, size: int, learned: Learned) -> None:
    host, model = learned("transformer")
    asked = [*search.split(), "-min_length", "6", "-batch_size", "7"]
    free = host.translate(model, *asked)
    assert any(_repeats(line, size) for line in free)
    found = host.translate(model, *asked, "-block_ngram_repeat", size)
    assert not any(_repeats(line, size) for line in found)


def _repeats(line: str, size: int) -> bool:
    """Whether a line has the same `size` words in a row twice."""
    words = line.split()
    runs = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    return len(set(runs)) < len(runs)


def test_attention_has_the_length_of_the_source() -> None:
    """The second of two sentences with two hypotheses each; their sources have 3 and 9 words."""
    apply_patches()
    search = SimpleNamespace(
        beam_size=2,
        ratio=0.0,
        n_best=2,
        src_len=torch.tensor([3, 3, 9, 9]),
        is_finished_list=[[False, False], [False, True]],
        hypotheses=[[], []],
        _batch_offset=[0, 1],
    )
    scores, words, attention = [[0.0, 0.0]] * 2, torch.zeros(2, 2, 4), torch.zeros(2, 2, 3, 9)
    assert BeamSearch.beams_non_finished(search, 1, scores, words, attention, 3)
    ((_, _, kept),) = search.hypotheses[1]
    assert kept.shape == (3, 9)
    assert search.src_len.tolist() == [3, 3, 9, 9]


def test_padding_needs_no_coverage() -> None:
    apply_patches()
    penalty = PenaltyBuilder("wu", "none").coverage_penalty
    coverage = torch.tensor([[0.5, 0.25, 2.0, 0.0]])
    # -(log 0.5 + log 0.25 + log 1); a position without attention counts nothing.
    assert float(penalty(coverage, 0.5)) == pytest.approx(0.5 * torch.log(torch.tensor(8.0)).item())


def test_alignments(host: Host) -> None:
    model = host.train("model", embedding=FUNNEL, alignment_heads=1, alignment_layer=0)
    for line in host.translate(model, "-report_align"):
        words, _, pairs = line.partition(" ||| ")
        assert len(pairs.split()) == len(words.split()) and all("-" in pair for pair in pairs.split())


@pytest.mark.parametrize(
    ("kind", "asked", "words"),
    [
        ("transformer", ["-report_align"], ["report_align", "layer -3", "has 1"]),
        ("rnn", ["-report_align"], ["report_align", "Transformer"]),
        ("language model", ["-replace_unk"], ["replace_unk", "attention to a source"]),
        ("language model", ["-coverage_penalty", "wu", "-beta", "0.1"], ["coverage_penalty", "remove it"]),
        ("transformer", ["-align_debug"], ["align_debug", "report_align"]),
        ("transformer", ["-dump_beam", "beams.json"], ["dump_beam", "remove it"]),
    ],
)
def test_unsupported_reports_fail(
    kind: str, asked: list[str], words: list[str], learned: Learned, error_line: Any
) -> None:
    host, model = learned(kind)
    source, output = str(host.folder / "test.src"), str(host.folder / "output")
    message = error_line("onmt_translate -model", model, "-src", source, "-output", output, *asked)
    assert all(word in message for word in words), message


SAMPLED = ("-min_length", "4", "-random_sampling_topk", "-1")


def test_zero_temperature_is_greedy(trained: Trained) -> None:
    host, checkpoint = trained(train_steps=1)
    best = host.translate(checkpoint, "-min_length", "4", "-beam_size", "1")
    for seed in ("1", "2"):
        assert host.translate(checkpoint, *SAMPLED, "-random_sampling_temp", "0", "-seed", seed) == best


def test_a_seed_makes_sampling_repeatable(trained: Trained) -> None:
    host, checkpoint = trained(train_steps=1)

    def drawn(seed: str) -> list[str]:
        return host.translate(checkpoint, *SAMPLED, "-seed", seed)

    assert drawn("3") == drawn("3") != drawn("4")
    assert drawn("-1") != drawn("-1")
