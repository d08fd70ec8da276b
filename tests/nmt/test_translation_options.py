"""Options of ``onmt_translate`` about processes, targets, and what is drawn at random."""

from __future__ import annotations

import pytest

from tests.nmt.conftest import Refusal, Trained

SAMPLED = ("-min_length", "4", "-random_sampling_topk", "-1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-world_size", "2"), "world_size: 2, but a translation runs in one process"),
        (("-tgt_file_prefix",), "tgt_file_prefix: needs a file of target prefixes"),
        (("-tgt", "gap.tgt", "-tgt_file_prefix"), "line 3 is empty"),
        (("-seed", str(2**63)), "seed"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: tuple[str, ...], said: str, trained: Trained, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, checkpoint = trained(train_steps=1)
    monkeypatch.chdir(host.folder)
    host.write("gap.tgt", ["v1", "v2", "", "v4", "v5", "v6", "v7"])
    output = host.folder / "nothing"
    line = refusal(
        "onmt_translate", "-model", str(checkpoint), "-src", "test.src", "-output", str(output), *arguments
    )
    assert said in line
    assert not output.exists()


def test_without_temperature_the_best_word_is_taken(trained: Trained) -> None:
    host, checkpoint = trained(train_steps=1)
    best = host.translate(checkpoint, "-min_length", "4", "-beam_size", "1")
    for seed in ("1", "2"):
        assert host.translate(checkpoint, *SAMPLED, "-random_sampling_temp", "0", "-seed", seed) == best


def test_a_seed_repeats_and_none_does_not(trained: Trained) -> None:
    host, checkpoint = trained(train_steps=1)

    def drawn(seed: str) -> list[str]:
        return host.translate(checkpoint, *SAMPLED, "-seed", seed)

    assert drawn("3") == drawn("3") != drawn("4")
    assert drawn("-1") != drawn("-1")
