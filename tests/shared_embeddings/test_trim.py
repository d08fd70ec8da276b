"""Selecting words of embeddings and models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shared_embeddings as se
from shared_embeddings.checkpoints import trim as trimming
from shared_embeddings.checkpoints.adapter import Vocabulary
from shared_embeddings.checkpoints.report import Sizes
from shared_embeddings.checkpoints.selection import Keep, Texts
from shared_embeddings.checkpoints.token_counts import text_lines
from tests.shared_embeddings.cases import CASES, PADDING, Case, by_name
from tests.shared_embeddings.contract.checks import each_of


class Letters:
    """A model of the letters a to e, which cuts "bb" otherwise once it is trimmed."""

    def __init__(self, spells: bool = False) -> None:
        self.kept: list[int] = []
        self.spells = spells

    def vocabularies(self) -> list[Vocabulary]:
        return [Vocabulary("letters", "abcde", frozenset({0}), None)]

    def encode(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        return [["abcde".index(letter) for letter in line] for line in lines]

    def used(self, vocabulary: str, lines: Sequence[str]) -> list[Counter[int]]:
        return [Counter("abcde".index(letter) for line in lines for letter in line)]

    def closed(self, vocabulary: str, ids: set[int]) -> set[int]:
        return ids

    def trim(self, kept: Mapping[str, Tensor]) -> list[str]:
        self.kept = kept["letters"].tolist()
        return []

    def encode_trimmed(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        cut = self.encode(vocabulary, [line.replace("bb", "b") for line in lines])
        return [[self.kept.index(letter) for letter in line if letter in self.kept] for line in cut]

    def characters(self, vocabulary: str) -> set[int]:
        return {4} if self.spells else set()

    def restored(self, vocabulary: str, lines: Sequence[str], ids: Sequence[Sequence[int]]) -> int:
        return len(lines)

    def restored_trimmed(self, vocabulary: str, lines: Sequence[str], ids: Sequence[Sequence[int]]) -> int:
        return sum(len(line) == len(found) for line, found in zip(lines, ids, strict=True))

    def weight_bytes(self) -> int:
        return 8

    def sources(self) -> list[Path]:
        return []

    def files(self, output: Path) -> list[Path]:
        return [output]

    def write_trimmed(self, output: Path, card: str) -> None:
        output.write_text("model")


class LettersAdapter:
    """Its adapter."""

    def __init__(self, spells: bool = False) -> None:
        self.spells = spells

    def read_trimmable(self, path: Path) -> Letters:
        return Letters(self.spells)


@pytest.mark.parametrize(("text", "works"), [("ab\ncb\n", True), ("ab\ncbb\n", False)])
def test_a_covered_line_that_is_cut_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, works: bool
) -> None:
    monkeypatch.setattr(trimming, "find_host", lambda model: ("letters", LettersAdapter()))
    path, output = tmp_path / "text", tmp_path / "out"
    path.write_text(text)
    texts = Texts([path])
    if works:
        report = trimming.trim(tmp_path, texts, output, Keep(words=["e"]))
        assert report.vocabularies[0].rows == Sizes(5, 4)
        assert (tmp_path / "out.ids.tsv").read_text() == "0\t0\n1\t1\n2\t2\n4\t3\n"
        return
    with pytest.raises(ValueError, match="would tokenize line 2 differently"):
        trimming.trim(tmp_path, texts, output)
    assert not output.exists() and not (tmp_path / "out.ids.tsv").exists()


@pytest.mark.parametrize(
    ("keep", "letters"),
    [
        (Keep(), "abcde"),
        (Keep(characters=False), "abcd"),
        (Keep(top=1), "abe"),
        (Keep(top=1, characters=False), "ab"),
        # Of 20 letters, 10 are a, which is special; 6 are b, 3 are c, and 1 is d.
        (Keep(coverage=0.5, characters=False), "a"),
        (Keep(coverage=0.8, characters=False), "ab"),
        (Keep(coverage=0.81, characters=False), "abc"),
        (Keep(coverage=0.951, characters=False), "abcd"),
        (Keep(coverage=1.0, characters=False), "abcd"),
        (Keep(min_count=3, characters=False), "abc"),
        (Keep(top=2, first=4, characters=False), "abcd"),
    ],
)
def test_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: Keep, letters: str) -> None:
    monkeypatch.setattr(trimming, "find_host", lambda model: ("letters", LettersAdapter(spells=True)))
    (tmp_path / "text").write_text("abababababab\naaaacccd\n")
    (tmp_path / "other").write_text("a\nae\ne\n")
    report = trimming.trim(tmp_path, Texts([tmp_path / "text"], held_out=[tmp_path / "other"]), None, keep)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other", "text"]
    (found,) = report.vocabularies
    assert found.rows == Sizes(5, len(letters)) and sum(found.reasons.values()) == len(letters)
    assert found.texts[0].kept >= 20 * (keep.coverage or 0)
    assert found.texts[1].round_trips == Sizes(3, 3 if "e" in letters else 1)
    assert "nothing written" in report.described() and "of 3 lines, 3 round-trip before, " in report.card()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"top": 0}, "--top-k is 0"),
        ({"coverage": 0.0}, "--coverage is 0.0%"),
        ({"top": 3, "coverage": 0.5}, "--top-k and --coverage each limit"),
        ({"top": 3, "min_count": 2}, "--min-count and --top-k each limit"),
    ],
)
def test_limits_that_make_no_sense(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Keep(**wrong)


def test_held_out_texts_need_one_vocabulary() -> None:
    sides = [Vocabulary(side, "ab", frozenset(), None, (side,)) for side in ("source", "target")]
    with pytest.raises(ValueError, match="--held-out other: the model has a vocabulary for the source and"):
        Texts(source=[Path("a")], target=[Path("b")], held_out=[Path("other")]).of(sides)


def test_the_mark_before_a_text_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("\ufeffone\r\ntwo \ufeff\n".encode())
    assert list(text_lines(tmp_path / "text")) == ["one", "two \ufeff"]


# Of 37 words: the padding word, and some of every band, group and class.
KEPT = torch.tensor([0, PADDING, 4, 8, 9, 10, 19, 20, 21, 29, 30, 35, 36])
SELECTABLE = [case for case in CASES if case.method != "tensor_train"]
BANDS = tuple(
    case.name
    for case in CASES
    if case.name.startswith(("adaptive-padding-in-a-tail", "adaptive-tails-of-one-word"))
)


@each_of([case for case in SELECTABLE if case.name not in BANDS])
def test_kept_words_keep_their_vectors_and_scores(case: Case) -> None:
    old = case.build().eval()
    before = {name: tensor.clone() for name, tensor in old.state_dict().items()}
    with torch.no_grad():
        new = old.select_rows(KEPT)
        assert new.num_embeddings == len(KEPT) and not new.training
        assert new.padding_idx == (None if case.padding_idx is None else 1)
        torch.testing.assert_close(new.table(), old.table()[KEPT], rtol=0, atol=1e-6)
        if case.output and not case.adaptive:
            hidden = case.hidden(5).detach()
            torch.testing.assert_close(new.logits(hidden), old.logits(hidden)[:, KEPT], rtol=0, atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in old.state_dict().items())
    again = se.build(
        new.method,
        num_embeddings=len(KEPT),
        embedding_dim=case.embedding_dim,
        padding_idx=new.padding_idx,
        **new.stored_options(),
    )
    again.load_state_dict(new.state_dict())
    assert torch.equal(again.eval().table(), new.table())
    assert sum(p.numel() for p in new.parameters()) <= sum(p.numel() for p in old.parameters())


@pytest.mark.parametrize("bias", [False, True])
def test_a_band_keeps_its_share_of_the_probability(bias: bool) -> None:
    case = by_name("adaptive-no-padding")
    old = case.build(options={**case.options, "output_bias": bias}, bias="bias" if bias else None).eval()
    kept = torch.tensor([*range(9), 12, 15, 20, 31, 36])
    hidden = torch.randn(6, old.score_dim)
    with torch.no_grad():
        new, before = old.select_rows(kept), old.log_prob(hidden)
        assert new.options.cutoffs == (9, 11)
        expected = before[:, kept].clone()
        for band, words in ((slice(9, 11), slice(9, 20)), (slice(11, 14), slice(20, 37))):
            all_of_it = before[:, words].logsumexp(dim=1, keepdim=True)
            of_kept = expected[:, band].logsumexp(dim=1, keepdim=True)
            expected[:, band] += all_of_it - of_kept
        torch.testing.assert_close(new.log_prob(hidden), expected, rtol=0, atol=1e-5)


def test_padding_that_is_left_out_is_gone() -> None:
    assert by_name("projective").build().select_rows(torch.tensor([0, 1, 7])).padding_idx is None


def test_type_and_mode_stay() -> None:
    old = by_name("funnel").build().to(torch.bfloat16)
    new = old.select_rows(KEPT)
    assert new.training and new.codes.dtype == torch.bfloat16


@pytest.mark.parametrize("ids", [[], [3, 3], [5, 2], [-1, 4], [0, 37]], ids=str)
def test_ids_that_are_no_choice_of_words(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="must be an ascending list|the embedding has words 0 to 36"):
        by_name("standard").build().select_rows(torch.tensor(ids))


@pytest.mark.parametrize("name", ["tensor-train", "tensor-train-two-cores"])
def test_methods_without_rows_say_what_to_do(name: str) -> None:
    with pytest.raises(ValueError, match="trim the plain model first, then compress it"):
        by_name(name).build().select_rows(KEPT)


def test_a_band_needs_a_word() -> None:
    with pytest.raises(ValueError, match="no word of band 1 of this adaptive embedding"):
        by_name("adaptive").build().select_rows(torch.tensor([0, 3, 25]))


def test_centroids_and_classes_without_words_go() -> None:
    few = torch.tensor([2, 3, 11])
    structured = by_name("structured").build().select_rows(few)
    assert structured.options.num_clusters <= 3
    uncle = by_name("uncle-sub-classes").build().select_rows(few)
    assert max(uncle.num_classes) <= 3
