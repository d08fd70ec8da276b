"""Trimming the words of embeddings, models and tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors
from torch import Tensor

import shared_embeddings as se
from shared_embeddings.compress import trim as trimming
from shared_embeddings.compress.host import HostVocabulary, TrimmableModel
from shared_embeddings.compress.options import TrimOptions
from shared_embeddings.compress.report import Sizes
from shared_embeddings.hf.tokenizer import TokenizerFile
from shared_embeddings.hf.trim import named_ids, with_new_ids
from shared_embeddings.utils.errors import UserError
from tests.shared_embeddings.cases import CASES, PADDING, Case, by_name
from tests.shared_embeddings.support import each_of


class Letters(TrimmableModel):
    """A model of the letters a to e, which tokenizes "bb" differently once it is trimmed."""

    def __init__(self, spells: bool = False) -> None:
        self.kept: list[int] = []
        self.spells = spells

    def vocabularies(self) -> list[HostVocabulary]:
        return [HostVocabulary("letters", "abcde", frozenset({0}), None)]

    def encode(self, vocabulary: str, lines: Sequence[str], trimmed: bool = False) -> list[list[int]]:
        if not trimmed:
            return [["abcde".index(letter) for letter in line] for line in lines]
        cut = self.encode(vocabulary, [line.replace("bb", "b") for line in lines])
        return [[self.kept.index(letter) for letter in line if letter in self.kept] for line in cut]

    def trim(self, token_ids: Mapping[str, Tensor]) -> list[str]:
        self.kept = token_ids["letters"].tolist()
        return []

    def characters(self, vocabulary: str) -> set[int]:
        return {4} if self.spells else set()

    def restored(
        self, vocabulary: str, lines: Sequence[str], ids: Sequence[Sequence[int]], trimmed: bool = False
    ) -> int:
        return sum(not trimmed or len(line) == len(tokens) for line, tokens in zip(lines, ids, strict=True))

    def weight_bytes(self) -> int:
        return 8

    def files(self, path: Path) -> list[Path]:
        return [path]

    def write_trimmed(self, output: Path, card: str) -> None:
        output.write_text("model")


def open_letters(monkeypatch: pytest.MonkeyPatch, spells: bool = False) -> None:
    """Let every path be a model of letters."""
    adapter = SimpleNamespace(read_trimmable=lambda path: Letters(spells))
    monkeypatch.setattr(trimming, "find_host", lambda *_: ("letters", adapter))


@pytest.mark.parametrize(("text", "works"), [("ab\ncb\n", True), ("ab\ncbb\n", False)])
def test_covered_lines_with_other_tokens_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, works: bool
) -> None:
    open_letters(monkeypatch)
    path, output, keep = tmp_path / "text", tmp_path / "out", tmp_path / "keep"
    path.write_text(text)
    keep.write_text("e\n")
    options = TrimOptions(model=path, text=(path,), keep=(keep,), output=output)
    if works:
        report = trimming.trim(options)
        assert report.vocabularies[0].rows == Sizes(5, 4)
        assert (tmp_path / "out.ids.tsv").read_text() == "0\t0\n1\t1\n2\t2\n4\t3\n"
        return
    with pytest.raises(ValueError, match="would tokenize line 2 differently"):
        trimming.trim(options)
    assert not output.exists() and not (tmp_path / "out.ids.tsv").exists()


@pytest.mark.parametrize(
    ("limit", "letters"),
    [
        ({}, "abcde"),
        ({"top_k": 1}, "abe"),
        # Of 20 letters, 10 are a, which is special; 6 are b, 3 are c, and 1 is d. The letter e spells others.
        ({"coverage": "50%"}, "ae"),
        ({"coverage": "80%"}, "abe"),
        ({"coverage": "0.81"}, "abce"),
        ({"min_count": 3}, "abce"),
    ],
)
def test_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: dict[str, Any], letters: str
) -> None:
    open_letters(monkeypatch, spells=True)
    text, other = tmp_path / "text", tmp_path / "other"
    text.write_text("abababababab\naaaacccd\n")
    other.write_text("a\nae\ne\n")
    report = trimming.trim(TrimOptions(model=text, text=(text,), held_out=(other,), dry_run=True, **limit))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other", "text"]
    (vocabulary,) = report.vocabularies
    assert vocabulary.rows == Sizes(5, len(letters)) and sum(vocabulary.reasons.values()) == len(letters)
    assert vocabulary.texts[1].round_trips == Sizes(3, 3)
    assert "nothing written" in report.described() and "of 3 lines, 3 round-trip before, " in report.card()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"coverage": "much"}, "coverage is 'much'"),
        ({"top_k": 3, "coverage": "50%"}, "top_k and coverage each limit"),
        ({"dry_run": False}, "either output or dry_run"),
    ],
)
def test_invalid_options(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrimOptions(**{"model": Path("model"), "dry_run": True, **wrong})


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
    ids = torch.tensor([*range(9), 12, 15, 20, 31, 36])
    hidden = torch.randn(6, old.score_dim)
    with torch.no_grad():
        new, before = old.select_rows(ids), old.log_prob(hidden)
        assert new.options.cutoffs == (9, 11)
        expected = before[:, ids].clone()
        for band, words in ((slice(9, 11), slice(9, 20)), (slice(11, 14), slice(20, 37))):
            all_of_it = before[:, words].logsumexp(dim=1, keepdim=True)
            of_kept = expected[:, band].logsumexp(dim=1, keepdim=True)
            expected[:, band] += all_of_it - of_kept
        torch.testing.assert_close(new.log_prob(hidden), expected, rtol=0, atol=1e-5)


def test_dtype_and_mode_are_kept_and_removed_padding_is_unset() -> None:
    old = by_name("funnel").build().to(torch.bfloat16)
    new = old.select_rows(torch.tensor([0, 1, 7]))
    assert new.training and new.codes.dtype == torch.bfloat16 and new.padding_idx is None


@pytest.mark.parametrize("ids", [[], [3, 3], [0, 37]], ids=str)
def test_invalid_selections(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="must be an ascending list|the embedding has words 0 to 36"):
        by_name("standard").build().select_rows(torch.tensor(ids))


def test_methods_without_rows_advise() -> None:
    with pytest.raises(UserError, match="trim the plain model first, then compress it"):
        by_name("tensor-train").build().select_rows(KEPT)


def test_a_band_needs_a_word() -> None:
    with pytest.raises(ValueError, match="no word of band 1 of this adaptive embedding"):
        by_name("adaptive").build().select_rows(torch.tensor([0, 3, 25]))


def test_unused_centroids_and_classes_are_removed() -> None:
    few = torch.tensor([2, 3, 11])
    structured = by_name("structured").build().select_rows(few)
    assert structured.options.num_clusters <= 3
    uncle = by_name("uncle-sub-classes").build().select_rows(few)
    assert max(uncle.num_classes) <= 3


WORDS = "low lower lowest newer newest wide widest slow slower"


def file_of(model: Any, **parts: Any) -> TokenizerFile:
    """The file of a tokenizer with white space between words."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return TokenizerFile(json.loads(tokenizer.to_str()))


def opened(content: dict[str, Any]) -> Any:
    """The tokenizer of a file."""
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def trained(**marks: str) -> TokenizerFile:
    """A BPE tokenizer with markers inside or at the end of words."""
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<unk>"], show_progress=False, vocab_size=60, **marks
    )
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", **marks))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    return TokenizerFile(json.loads(tokenizer.to_str()))


@pytest.mark.parametrize(
    "marks", [{}, {"end_of_word_suffix": "</w>"}, {"continuing_subword_prefix": "##"}], ids=str
)
@pytest.mark.parametrize("text", ["lowest", "newer slow", "wide lower low", WORDS])
def test_intermediate_merges_are_kept(marks: dict[str, str], text: str) -> None:
    file = trained(**marks)
    old = opened(dict(file.content))
    ids = sorted(file.closed({*old.encode(text).ids, *file.specials()}))
    new = opened(file.trimmed(ids))
    assert new.get_vocab_size() == len(ids)
    assert new.encode(text).tokens == old.encode(text).tokens
    assert new.encode(text).ids == [ids.index(number) for number in old.encode(text).ids]
    if text == "lowest":
        assert len(ids) < old.get_vocab_size()


def test_path_of_a_merge_by_hand() -> None:
    vocab = {
        token: number
        for number, token in enumerate(["l", "o", "w", "e", "r", "lo", "er", "low", "wer", "lower"])
    }
    merges = [("l", "o"), ("e", "r"), ("w", "er"), ("lo", "w"), ("low", "er"), ("lo", "wer")]
    file = file_of(models.BPE(vocab, merges))
    # "w" and "er" merge before "lo" and "w", so "low" is not an intermediate piece.
    assert {file.tokens[number] for number in file.closed({vocab["lower"]})} == set(vocab) - {"low"}
    left = file.trimmed(sorted(file.closed({vocab["lower"]})))["model"]["merges"]
    assert [tuple(merge) for merge in left] == [("l", "o"), ("e", "r"), ("w", "er"), ("lo", "wer")]


def test_unigram_keeps_its_worst_piece() -> None:
    pieces = [("<unk>", 0.0), ("a", -1.0), ("ab", -1.5), ("b", -9.0), ("c", -2.0)]
    file = file_of(models.Unigram(pieces, unk_id=0))
    assert file.closed({0, 2}) == {0, 2, 3}
    assert file.trimmed([0, 2, 3])["model"]["vocab"] == [["<unk>", 0.0], ["ab", -1.5], ["b", -9.0]]
    assert file.trimmed([0, 2, 3])["model"]["unk_id"] == 0


def test_wordpiece_keeps_unknown_words() -> None:
    vocab = {token: number for number, token in enumerate(["[UNK]", "un", "u", "##n", "##able", "able"])}
    file = file_of(models.WordPiece(vocab, unk_token="[UNK]"))
    old = opened(dict(file.content))
    assert old.encode("unx").tokens == ["[UNK]"]
    assert [file.tokens[number] for number in file.beginning_of("unx")] == ["un"]
    assert [file.tokens[number] for number in file.beginning_of("unable")] == ["un", "##able"]


def test_ids_around_texts_are_renumbered() -> None:
    vocab = {token: number for number, token in enumerate(["a", "b", "<s>", "c", "</s>", "<unk>"])}
    template = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 4)])
    for processor in (template, processors.RobertaProcessing(("</s>", 4), ("<s>", 2))):
        file = file_of(
            models.WordLevel(vocab, unk_token="<unk>"),
            post_processor=processors.Sequence([processors.ByteLevel(), processor]),
        )
        assert file.specials() == {2, 4, 5}
        assert opened(file.trimmed([2, 3, 4, 5])).encode("c a").ids == [0, 1, 3, 2]


def test_other_kinds_fail() -> None:
    with pytest.raises(ValueError, match="kind Magic cannot be trimmed"):
        TokenizerFile({"model": {"type": "Magic", "vocab": {}}, "added_tokens": []})


def test_ids_in_settings() -> None:
    """Lists lose removed ids, and empty lists, which transformers rejects, are None."""
    settings = {
        "pad_token_id": 4,
        "bos_token_id": None,
        "eos_token_id": [2, 7, 400],
        "text_config": {"bos_token_id": 9, "image_token_index": 5, "unk_token_id": -1},
        "suppress_tokens": [1, 2],
        "begin_suppress_tokens": [400],
        "bad_words_ids": [[2, 4], [1, 2]],
        "force_words_ids": [[400]],
        "sequence_bias": [[[2, 4], -5.0], [[400], 3.0]],
        "forced_decoder_ids": [[1, 7], [2, 400]],
        "added_tokens_decoder": {"2": {"content": "x"}},
        "pad_index": 7,
        "hidden_size": 4,
        "temperature": 7,
        "tie": True,
    }
    assert set(named_ids(settings)) == {4, 2, 7, 9, 5, 400}
    assert with_new_ids(settings, {2: 0, 4: 1, 5: 2, 7: 3}) == {
        "pad_token_id": 1,
        "bos_token_id": None,
        "eos_token_id": [0, 3],
        "text_config": {"bos_token_id": None, "image_token_index": 2, "unk_token_id": -1},
        "suppress_tokens": [0],
        "begin_suppress_tokens": None,
        "bad_words_ids": [[0, 1]],
        "force_words_ids": None,
        "sequence_bias": [[[0, 1], -5.0]],
        "forced_decoder_ids": [[1, 3], [2, None]],
        "added_tokens_decoder": {"0": {"content": "x"}},
        "pad_index": 3,
        "hidden_size": 4,
        "temperature": 7,
        "tie": True,
    }
    assert with_new_ids({"sequence_bias": [[[400], 3.0]]}, {2: 0}) == {"sequence_bias": None}
