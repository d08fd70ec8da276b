"""Tokenizers with fewer tokens: which stay, and that covered texts are cut into the same ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared_embeddings.hf.token_ids import check_ids, named_ids, with_new_ids
from shared_embeddings.hf.tokenizer_file import TokenizerFile

tokenizers = pytest.importorskip("tokenizers")

from tokenizers import models, pre_tokenizers, processors  # noqa: E402

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
    """A BPE tokenizer whose parts are marked inside or at the end of a word."""
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
def test_merges_on_the_way_stay(marks: dict[str, str], text: str) -> None:
    file = trained(**marks)
    old = opened(dict(file.content))
    kept = sorted(file.closed({*old.encode(text).ids, *file.specials()}))
    new = opened(file.trimmed(kept))
    assert new.get_vocab_size() == len(kept)
    assert new.encode(text).tokens == old.encode(text).tokens
    assert new.encode(text).ids == [kept.index(number) for number in old.encode(text).ids]
    if text == "lowest":
        assert len(kept) < old.get_vocab_size()


def test_path_of_a_merge_by_hand() -> None:
    vocab = {
        token: number
        for number, token in enumerate(["l", "o", "w", "e", "r", "lo", "er", "low", "wer", "lower"])
    }
    merges = [("l", "o"), ("e", "r"), ("w", "er"), ("lo", "w"), ("low", "er"), ("lo", "wer")]
    file = file_of(models.BPE(vocab, merges))
    # "w" and "er" are joined before "lo" and "w" can be, so that "low" is not on the way.
    assert {file.tokens[number] for number in file.closed({vocab["lower"]})} == set(vocab) - {"low"}
    left = file.trimmed(sorted(file.closed({vocab["lower"]})))["model"]["merges"]
    assert [tuple(merge) for merge in left] == [("l", "o"), ("e", "r"), ("w", "er"), ("lo", "wer")]


def test_unigram_keeps_its_worst_piece() -> None:
    pieces = [("<unk>", 0.0), ("a", -1.0), ("ab", -1.5), ("b", -9.0), ("c", -2.0)]
    file = file_of(models.Unigram(pieces, unk_id=0))
    assert file.closed({0, 2}) == {0, 2, 3}
    assert file.trimmed([0, 2, 3])["model"]["vocab"] == [["<unk>", 0.0], ["ab", -1.5], ["b", -9.0]]
    assert file.trimmed([0, 2, 3])["model"]["unk_id"] == 0


def test_wordpiece_stays_lost_where_it_was() -> None:
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


def test_other_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="kind Magic cannot be trimmed"):
        TokenizerFile({"model": {"type": "Magic", "vocab": {}}, "added_tokens": []})


def test_ids_in_settings() -> None:
    settings = {
        "pad_token_id": 4,
        "bos_token_id": None,
        "eos_token_id": [2, 7],
        "text_config": {"bos_token_id": 9, "image_token_index": 5, "unk_token_id": -1},
        "suppress_tokens": [1, 2],
        "bad_words_ids": [[2, 4], [1, 2]],
        "forced_decoder_ids": [[1, 7]],
        "added_tokens_decoder": {"2": {"content": "x"}},
        "hidden_size": 4,
        "tie": True,
    }
    assert set(named_ids(settings)) == {4, 2, 7, 9, 5}
    assert with_new_ids(settings, {2: 0, 4: 1, 5: 2, 7: 3}) == {
        "pad_token_id": 1,
        "bos_token_id": None,
        "eos_token_id": [0, 3],
        "text_config": {"bos_token_id": None, "image_token_index": 2, "unk_token_id": -1},
        "suppress_tokens": [0],
        "bad_words_ids": [[0, 1]],
        "forced_decoder_ids": [[1, 3]],
        "added_tokens_decoder": {"0": {"content": "x"}},
        "hidden_size": 4,
        "tie": True,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words_ids", [5]),
        ("force_words_ids", 5),
        ("bad_words_ids", [["five"]]),
        ("forced_decoder_ids", [5]),
        ("forced_decoder_ids", [[1, 2, 3]]),
    ],
)
def test_lists_of_another_shape_are_refused(name: str, value: Any) -> None:
    check_ids("generation_config.json", {"forced_decoder_ids": [[1, None]], "bad_words_ids": None})
    with pytest.raises(ValueError, match=f"^generation_config.json: {name} is .*, expected"):
        check_ids("generation_config.json", {"text_config": {name: value}})
