"""Compressing a model of Hugging Face says how much of its predictions it kept."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers  # noqa: E402

from shared_embeddings import hf  # noqa: E402
from shared_embeddings.hf.adapter import FolderModel  # noqa: E402
from shared_embeddings.hf.agreement import probe  # noqa: E402
from tests.shared_embeddings.hf.models import KINDS, WORDS, compress, write  # noqa: E402
from tests.shared_embeddings.hf.test_hf_quality import add_tokenizer  # noqa: E402

SAID = {
    "gpt2": ("that it generated", "50 tokens of text"),
    "bert": ("drawn at random", "50 tokens of text"),
    "t5": ("of its outputs for random tokens", "of its outputs of text"),
    "marian": ("of its outputs for random tokens", "of its outputs of text"),
}


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """Five lines of ten words."""
    draw = random.Random(1)
    lines = [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(10)) for _ in range(5)]
    (tmp_path / "text").write_text("\n".join(lines) + "\n")
    return tmp_path / "text"


def kept(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, dict[str, Any]]:
    """The last line, and what the report has about it."""
    report = folder / "report.json"
    capsys.readouterr()
    asked = [*arguments, "--report", report, "--force"]
    assert compress(folder / "model", "projective", folder / "small", *asked) == 0
    return capsys.readouterr().out.splitlines()[-1], json.loads(report.read_text())["kept"]


@pytest.mark.slow_except("gpt2")
@pytest.mark.parametrize("kind", SAID)
def test_damaged_models_are_reported(
    tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    write(kind, tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    for source, said in zip(([], ["--text", words]), SAID[kind]):
        line, found = kept(tmp_path, capsys, "--rank", 16, *source)
        assert line.startswith(("kept 100%", "kept 99%")) and said in line and not found["needs_training"]
        line, found = kept(tmp_path, capsys, "--rank", 1, *source)
        assert line.startswith("warning: kept ") and found["share"] < 0.7
        assert line.endswith("): train this model before using it")


@pytest.mark.slow_except("bert")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_asked_the_same_twice(tmp_path: Path, kind: str) -> None:
    write(kind, tmp_path / "model")
    model = FolderModel(tmp_path / "model")
    first, again = model.probe(None, 1), model.probe(None, 1)
    assert first.how == again.how
    found = [one.predict() for one in (first, first, again)]
    assert all(torch.equal(one.words, found[0].words) for one in found) and len(found[0].words) >= 900


@torch.no_grad()
def test_share_is_that_of_the_next_tokens(
    tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one line of 20 tokens."""
    before = write("gpt2", tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    ids = random.Random(4).choices(range(WORDS), k=20)
    words.write_text(" ".join(f"w{number}" for number in ids))
    _, found = kept(tmp_path, capsys, "--rank", 6, "--text", words)
    first, second = (
        model(input_ids=torch.tensor([ids])).logits[0].softmax(dim=-1).max(dim=-1)
        for model in (before, hf.load(tmp_path / "small"))
    )
    wanted = first.values[first.indices == second.indices].sum() / first.values.sum()
    assert 0 < found["share"] < 1 and found["share"] == pytest.approx(float(wanted), abs=1e-5)


def test_answers_are_greedy_and_end_with_their_mark(tmp_path: Path, words: Path) -> None:
    """What a translator predicts after every word of its answer is that answer."""
    model = write("marian", tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    words.write_text("w5 w9 w2\n")
    found = FolderModel(tmp_path / "model").probe([words], 1).predict().words.tolist()
    ids = torch.tensor([[5, 9, 2]])
    said = model.generate(ids, do_sample=False, num_beams=1, max_new_tokens=9)[0].tolist()[1:]
    end = said.index(1) + 1 if 1 in said else len(said)
    # The last token is not free where it is forced to be the mark of the end.
    assert found[: end - 1] == said[: end - 1] and len(found) == end


def test_masked_words_are_predicted_where_there_is_a_mask(tmp_path: Path, words: Path) -> None:
    model = write("bert", tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    vocabulary = FolderModel(tmp_path / "model").vocabulary
    vocabulary._tokenizer.mask_token = "w7"
    asked = probe(model, vocabulary, [words], 1)
    number = int(asked.how.split()[0])
    assert 1 <= number < 30 and asked.how == f"{number} tokens masked of text"
    assert len(asked.predict().words) == number


def test_a_model_that_takes_more_than_tokens_was_not_shown_to_work(tmp_path: Path) -> None:
    class Strange(transformers.GPT2LMHeadModel):  # type: ignore[misc]
        def forward(self, input_ids: torch.Tensor, picture: torch.Tensor) -> None:
            raise AssertionError("it has no picture")

    folder = FolderModel((write("gpt2", tmp_path / "model"), tmp_path / "model")[1])
    folder.module.__class__ = Strange
    with pytest.raises(ValueError, match="a Strange cannot be probed: "):
        folder.probe(None, 1).predict()
