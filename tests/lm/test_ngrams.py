"""Tables of hashed n-grams in language models: rows, states, gradients, checkpoints, compression."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lm import models
from lm.adapter import NGRAMS, TrainedLanguageModel
from lm.checkpoint import load_model
from lm.models.ngrams import NGramOptions, NGramTable
from tests.lm.runs import SMALL, command, compress, log_lines, run, settings, small_corpus, tool

ROWS, PRIME, BASE = 1009, 2**31 - 1, 48271
NGRAMS_OF = {"ngram_rows": ROWS, "ngram_dim": 6, "ngram_dropout": 0.1}


def table(**options: Any) -> NGramTable:
    """A table of random vectors for words in 8 dimensions."""
    built = NGramTable(NGramOptions(ngram_rows=ROWS, ngram_dim=6, **options), 8)
    built.reset_parameters()
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter)
    return built


def row_of(*words: int) -> int:
    """The row of an n-gram whose last word comes first."""
    return sum((word + 1) * BASE ** (place + 1) for place, word in enumerate(words)) % PRIME % ROWS


def test_rows_by_hand() -> None:
    ids, context = table().ids(torch.tensor([[5, 0, 7], [2, 9, 4]]), torch.tensor([[[-1, -1], [3, 1]]]))
    assert ids.tolist() == [
        [[row_of(5), row_of(5)], [row_of(0, 5), row_of(0, 5)], [row_of(7, 0), row_of(7, 0, 5)]],
        [[row_of(2, 1), row_of(2, 1, 3)], [row_of(9, 2), row_of(9, 2, 1)], [row_of(4, 9), row_of(4, 9, 2)]],
    ]
    assert context.tolist() == [[[0, 7], [9, 4]]]
    assert row_of(5) == 6 * 48271 % 1009 and len({row_of(0, 5), row_of(5, 0), row_of(0), row_of(5)}) == 4


@pytest.mark.parametrize("orders", [(2,), (2, 3), (1, 4)])
def test_segments_of_any_length_read_the_same_rows(orders: tuple[int, ...]) -> None:
    built, tokens = table(ngram_orders=orders), torch.randint(50, (3, 11))
    start = built.initial_context(3)
    whole, end = built(tokens, start)
    for length in (1, 2, 5):
        context, parts = start, []
        for part in tokens.split(length, dim=1):
            vectors, context = built(part, context)
            parts.append(vectors)
        assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-6) and torch.equal(context, end)
    # Nothing that follows changes what was read. Both have one shape: others may round differently.
    changed = torch.cat([tokens[:, :4], torch.ones_like(tokens[:, 4:])], dim=1)
    assert torch.equal(whole[:, :4], built(changed, start)[0][:, :4])


@pytest.mark.parametrize("kind", ["awd_lstm", "transformer_xl"])
def test_models_carry_the_last_words_over(kind: str) -> None:
    model = models.build(kind, [*"abcdefghij"], {"method": "standard"}, SMALL[kind], NGRAMS_OF).eval()
    plain = models.build(kind, [*"abcdefghij"], {"method": "standard"}, SMALL[kind]).eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "ngrams" not in k})
    ids = torch.randint(10, (2, 6))
    # New rows add nothing.
    before = plain(ids, plain.initial_state(2)).hidden
    assert torch.equal(model(ids, model.initial_state(2)).hidden, before)
    assert model.ngrams is not None
    torch.nn.init.normal_(model.ngrams.sparse_parameters()[0])
    whole = model(ids, model.initial_state(2))
    first = model(ids[:, :4], model.initial_state(2))
    second = model(ids[:, 4:], first.state)
    assert torch.allclose(torch.cat([first.hidden, second.hidden], dim=1), whole.hidden, atol=1e-5)
    assert torch.equal(second.state[-1], whole.state[-1]) and not torch.allclose(whole.hidden, before)


def test_only_rows_that_were_read_have_gradients() -> None:
    built, tokens = table(), torch.randint(50, (2, 7))
    [rows] = built.sparse_parameters()
    read = built.ids(tokens, built.initial_context(2))[0].unique()
    built(tokens, built.initial_context(2))[0].square().sum().backward()
    assert rows.grad is not None and rows.grad.is_sparse
    gradient = rows.grad.coalesce()
    assert torch.equal(gradient.indices()[0], read)


def trained(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """A corpus, and the folder of a small model trained on it."""
    data, save = small_corpus(folder), folder / "run"
    run(settings(data, save, **{**NGRAMS_OF, **changes}))
    return data, save


def test_training_resumes_exactly(tmp_path: Path) -> None:
    data, save = trained(tmp_path)
    part = tmp_path / "part"
    for steps in (8, 20):
        run(settings(data, part, **NGRAMS_OF, steps=steps))
    assert log_lines(part)[-3:] == log_lines(save)[-3:]
    ours, theirs = (load_model(folder / "last.pt").model.state_dict() for folder in (part, save))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    is_changed = (ours["ngrams.embedding.weight"] != 0).any(dim=1)
    assert 50 < is_changed.sum() < ROWS


def test_checkpoints_are_evaluated_continued_and_described(tmp_path: Path) -> None:
    data, save = trained(tmp_path, embedding={"method": "standard"})
    best, output = save / "best.pt", tmp_path / "record.json"
    assert load_model(best).config["ngram_rows"] == ROWS
    assert command("lm_evaluate", "-model", best, "-data", data, "-output", output).status == 0
    counts = json.loads(output.read_text())["counts"]
    assert counts["ngrams"] == ROWS * 6 and counts["ngram_bits"] == 32 * ROWS * 6
    assert command("lm_generate", "-model", best, "-length", 5, "-prompt", "a b").out.startswith("a b")
    said = command("lm_train", "-help").out
    assert all(field.name in said for field in dataclasses.fields(NGramOptions))
    trim = tool(
        "trim", "--model", best, "--top-k", 5, "--output", tmp_path / "x.pt", "--text", tmp_path / "test.txt"
    )
    assert trim.says("n-grams", "compress")  # fmt: skip


@pytest.mark.parametrize("method", ["standard", "adaptive"])
def test_tables_are_compressed_by_how_often_rows_are_read(tmp_path: Path, method: str) -> None:
    """With an adaptive softmax, the words stay as they are."""
    options = {"method": method} if method == "standard" else {"method": method, "cutoffs": [8, 14]}
    data, save = trained(tmp_path, embedding=options, embedding_dim=16, ngram_dim=16)
    best, small, report = save / "best.pt", tmp_path / "small.pt", tmp_path / "report.json"
    text = tmp_path / "train.txt"
    asked = ["--bits", 2, "--text", text, "--validation", tmp_path / "valid.txt", "--report", report]
    assert compress(best, "quantized", small, *asked).status == 0
    written = json.loads(report.read_text())
    names = [part["name"] for part in written["tables"]]
    assert names == [NGRAMS] if method == "adaptive" else ["words", NGRAMS]
    assert written["tables"][-1]["uses"] == ["input"] and written["calibration"].startswith("calibrated on")
    compressed = load_model(small)
    assert compressed.config["ngram_embedding"]["method"] == "quantized"
    assert command("lm_evaluate", "-model", small, "-data", data).status == 0
    opened = TrainedLanguageModel(best)
    counts = opened.count_rows([text], 0)[NGRAMS]
    words = [opened.words.index(word) for word in text.read_text().replace("\n", " <eos> ").split()]
    pairs = [row_of(words[0]), *(row_of(*pair) for pair in zip(words[1:], words))]
    triples = [*pairs[:2], *(row_of(*triple) for triple in zip(words[2:], words[1:], words))]
    assert torch.equal(counts, torch.bincount(torch.tensor(pairs + triples), minlength=ROWS))
    # Rows that are never read have no bits, and those that are read most have most.
    widths = compressed.model.ngrams.embedding.widths  # type: ignore[union-attr]
    assert widths[counts == 0].float().mean() < widths[counts >= 5].float().mean() - 1
