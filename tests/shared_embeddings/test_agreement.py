"""Agreement of predictions, and checksums of checkpoints."""

from __future__ import annotations

import hashlib
import math
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_embeddings.checkpoints.agreement import (
    USABLE_SHARE,
    Comparison,
    Kept,
    Predictions,
    Probe,
    agreement,
    kept_quality,
    sampled_lines,
)
from shared_embeddings.checkpoints.checksums import (
    load_safetensors,
    recorded_checksum,
    save_safetensors,
    stamp_safetensors,
    state_digest,
    verified,
    with_checksum,
)
from shared_embeddings.checkpoints.quality import Quality, QualityReport, Validation
from shared_embeddings.errors import UserError

TEXT = Validation(text=Path("text"))


def predictions(words: list[int], probabilities: list[float]) -> Predictions:
    return Predictions(torch.tensor(words), torch.tensor(probabilities))


class Model:
    """Has a quality and predictions that are to be changed."""

    def __init__(
        self, measure: str = "BLEU", value: float = 0.0, words: Sequence[int] = (1, 2, 3, 4)
    ) -> None:
        self.measured = Quality(measure, value, "of a text")
        self.words = list(words)
        self.asked: list[tuple[Sequence[Path] | None, int]] = []

    def quality(self, validation: Validation) -> Quality:
        assert validation is TEXT
        return self.measured

    def probe(self, texts: Sequence[Path] | None, seed: int) -> Probe:
        self.asked.append((texts, seed))
        return Probe("4 tokens", lambda: predictions(self.words, [0.5, 0.25, 0.125, 0.125]))


def test_what_the_original_was_sure_of_counts_more() -> None:
    before = predictions([1, 2, 3, 4], [0.4, 0.2, 0.1, 0.1])
    # (0.4 + 0.1) / 0.8; what the other model is sure of does not matter.
    assert agreement(before, predictions([1, 0, 3, 0], [0.9, 0.9, 0.1, 0.9])) == pytest.approx(0.625)
    assert agreement(before, before) == 1.0
    assert agreement(before, predictions([2, 1, 1, 1], [1.0] * 4)) == 0.0


def test_predictions_of_many_states() -> None:
    hidden = torch.randn(150, 3, generator=torch.Generator().manual_seed(1))
    table = torch.randn(7, 3, generator=torch.Generator().manual_seed(2))
    found = Predictions.of(hidden, lambda rows: rows @ table.T)
    exponentials = (hidden @ table.T).exp()
    wanted = exponentials / exponentials.sum(dim=1, keepdim=True)
    assert found.words.tolist() == wanted.argmax(dim=1).tolist()
    torch.testing.assert_close(found.probabilities, wanted.amax(dim=1))
    with pytest.raises(ValueError, match="are NaN"):
        Predictions.of(hidden, lambda rows: rows @ table.T * math.nan)


@pytest.mark.parametrize(
    ("share", "line"),
    [
        (0.0399, "warning: kept 3% of the BLEU of the original (how): train this model before using it"),
        (
            math.nan,
            "warning: kept 0% of the BLEU of the original (how): train this model before using it",
        ),
        (USABLE_SHARE - 1e-6, "warning: kept 84%"),
        (USABLE_SHARE, "kept 85% of the BLEU of the original (how)"),
        (1.02, "kept 102% of the BLEU of the original (how)"),
    ],
)
def test_the_line(share: float, line: str) -> None:
    kept = Kept.measured(share, "BLEU", "how")
    assert kept.described().startswith(line) and "\n" not in kept.described()
    assert kept.needs_training == line.startswith("warning")


@pytest.mark.parametrize(
    ("measure", "before", "after", "share"),
    [
        ("perplexity", 100.0, 125.0, 0.8),
        ("perplexity", 100.0, 80.0, 1.25),
        ("perplexity", 100.0, math.inf, 0.0),
        ("BLEU", 20.0, 18.0, 0.9),
        ("BLEU", 20.0, 0.0, 0.0),
    ],
)
def test_share_of_a_quality(measure: str, before: float, after: float, share: float) -> None:
    kept = kept_quality(QualityReport(measure, "how", before, after))
    assert kept.share == pytest.approx(share) and kept.needs_training == (share < 0.85)


def test_the_quality_goes_before_the_predictions() -> None:
    model = Model("BLEU", 20.0)
    comparison = Comparison(model, TEXT, None, 5)
    model.measured, model.words = Quality("BLEU", 5.0, "of a text"), [0, 0, 0, 0]
    quality, kept = comparison.result()
    assert quality == QualityReport("BLEU", "of a text", 20.0, 5.0)
    assert (kept.share, kept.of, kept.how, model.asked) == (0.25, "BLEU", "of a text", [])


@pytest.mark.parametrize("validation", [None, TEXT])
def test_predictions_where_there_is_no_quality_that_could_get_worse(validation: Validation | None) -> None:
    model, texts = Model(), [Path("a")]
    comparison = Comparison(model, validation, texts, 5)
    model.words = [1, 0, 3, 0]
    quality, kept = comparison.result()
    assert model.asked == [(texts, 5)] and (quality is None) == (validation is None)
    assert kept == Kept(0.625, "predictions", "4 tokens", needs_training=True)


def test_what_cannot_be_asked_was_not_shown_to_work() -> None:
    class Graphs(Model):
        def probe(self, texts: Sequence[Path] | None, seed: int) -> Probe:
            raise ValueError("reads graphs")

    quality, kept = Comparison(Graphs(), None, None, 1).result()
    assert quality is None and kept.share is None and kept.needs_training
    assert kept.described() == (
        "warning: could not verify that this model still works (reads graphs); evaluate it on a text"
    )


def test_sampled_lines(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("a\n\n \nb\n")
    second.write_text("c\nd")
    assert sorted(sampled_lines([first, second], 1)) == ["a", "b", "c", "d"]
    assert sampled_lines([first, second], 1) == sampled_lines([first, second], 1)
    drawn = [sampled_lines([first, second], seed, number=2) for seed in range(400)]
    assert all(len(set(lines)) == 2 for lines in drawn)
    for line in "abcd":  # 200 of 400 are expected, with a standard deviation of 10
        assert 160 < sum(line in lines for lines in drawn) < 240


def content() -> dict[str, Any]:
    """What checkpoints hold, and more."""
    return {
        "model": {
            "a.weight": torch.arange(12.0).reshape(3, 4),
            "ids": torch.tensor([3, 1], dtype=torch.int16),
        },
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
        "single": torch.tensor(0.25, dtype=torch.float64),
        "opt": Namespace(rate=0.1, names=["x", "ü"], kinds={"q", "r"}, size=None),
        "words": ["<unk>", "word", "\u1c89"],
        "numbers": {1: (1, 2.5, float("nan")), "1": True},
        "raw": b"\x00\xff",
    }


def test_the_digest_survives_storage(tmp_path: Path) -> None:
    torch.serialization.add_safe_globals([Namespace])
    torch.save(content(), tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", weights_only=True)
    mapped = torch.load(tmp_path / "file.pt", weights_only=True, mmap=True)
    assert state_digest(content()) == state_digest(loaded) == state_digest(mapped)


def test_the_digest_is_of_the_content_not_of_its_layout() -> None:
    table = torch.arange(12.0).reshape(3, 4)
    same = [
        {"a": table, "b": torch.zeros(2)},
        {"b": torch.zeros(2), "a": table},
        OrderedDict(a=table.T.contiguous().T, b=torch.zeros(4)[::2]),
        {"a": torch.nn.Parameter(table), "b": torch.zeros(1).expand(2)},
    ]
    assert len({state_digest(state) for state in same}) == 1


CHANGES = {
    "name": lambda c: c["model"].update(b=c["model"].pop("ids")),
    "bytes": lambda c: c["model"]["a.weight"].view(torch.uint8)[2].__setitem__(5, 7),
    "negative zero": lambda c: c["model"]["a.weight"].__setitem__((0, 0), -0.0),
    "shape": lambda c: c["model"].update({"a.weight": c["model"]["a.weight"].reshape(4, 3)}),
    "type": lambda c: c["model"].update(ids=c["model"]["ids"].view(torch.bfloat16)),
    "empty shape": lambda c: c.update(none=torch.empty(3, 0)),
    "word": lambda c: c["words"].__setitem__(1, "ward"),
    "option": lambda c: setattr(c["opt"], "rate", 0.2),
    "set": lambda c: c["opt"].kinds.add("s"),
    "number": lambda c: c["numbers"].update({1: (1, 2.25, float("nan"))}),
    "kind of number": lambda c: c["numbers"].update({"1": 1}),
    "border": lambda c: c.update(words=["<unk>wo", "rd", "\u1c89"]),
    "nesting": lambda c: c.update(words=[["<unk>", "word"], "\u1c89"]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_shows(change: Any) -> None:
    stored = with_checksum(content())
    change(stored)
    with pytest.raises(UserError, match=r"^file x: does not match its checksum.*SHARED_EMBEDDINGS_VERIFY=0"):
        verified(stored, "file x")


def test_what_has_no_bytes_has_a_digest() -> None:
    odd = {"a": torch.eye(3).to_sparse(), "b": torch.empty(2, device="meta"), "c": Path("x")}
    assert len(state_digest(odd)) == 64


def test_verification_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {**with_checksum(content()), "words": []}
    monkeypatch.setenv("SHARED_EMBEDDINGS_VERIFY", "0")
    assert verified(stored, "x")["words"] == []


def test_a_checkpoint_without_a_checksum_passes() -> None:
    assert verified({"a": 1}, "x") == {"a": 1}


def test_safetensors_carry_their_checksum(tmp_path: Path) -> None:
    path, plain = tmp_path / "own.safetensors", tmp_path / "other.safetensors"
    tensors = {"a": torch.arange(9.0), "b": torch.tensor([1, 2], dtype=torch.uint8)}
    assert save_safetensors(tensors, path) == recorded_checksum(path) == state_digest(tensors)
    from safetensors import safe_open
    from safetensors.torch import save_file

    save_file(tensors, plain, {"format": "pt", "maker": "another program"})
    assert recorded_checksum(plain) is None
    assert load_safetensors(plain, "x")["a"].tolist() == list(range(9))
    stamp_safetensors(plain)
    assert recorded_checksum(plain) == recorded_checksum(path)
    with safe_open(plain, "pt") as opened:
        assert opened.metadata()["maker"] == "another program" and opened.metadata()["format"] == "pt"
    assert sorted(file.name for file in tmp_path.iterdir()) == [plain.name, path.name]


def test_every_flipped_byte_of_safetensors_shows(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_safetensors({"a": torch.arange(9.0), "b": torch.tensor([1, 2], dtype=torch.uint8)}, path)
    good = path.read_bytes()
    begin = 8 + int.from_bytes(good[:8], "little")
    for offset in range(begin, len(good)):
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
        with pytest.raises(UserError, match="^weights"):
            load_safetensors(path, "weights")


def test_the_digest_of_one_tensor_follows_its_definition() -> None:
    tensor = torch.tensor([[1.0, 2.0]])
    own = hashlib.sha256(b"torch.float32 (1, 2) torch.strided" + tensor.numpy().tobytes()).digest()
    parts = [b"mapping of 1", b"str a", own]
    whole = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts))
    assert state_digest({"a": tensor}) == whole.hexdigest()
