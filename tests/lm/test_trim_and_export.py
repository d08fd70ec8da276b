"""Language models in `shared-embeddings trim`, `similarity`, `cosines`, `correlation` and `export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm import models
from lm.checkpoint import load_model, read_checkpoint, save_state
from lm.data.corpus import load_corpus
from shared_embeddings.accounting import distinct_state
from shared_embeddings.quant.storage import pack
from tests.helpers import content
from tests.lm.runs import command, compress, tool, write_corpus, write_model
from tests.lm.test_compression import wide_model

pytestmark = pytest.mark.usefixtures("installed_host")

WORDS = "a b c d e f g h i j"
LINES = "a c e\nc i\na a e\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of four of the words."""
    path = tmp_path / "text"
    path.write_text(LINES)
    return path


def log_probabilities(model: Path, lines: str) -> dict[str, torch.Tensor]:
    """The log-probabilities ``(T,)`` of each word of a model after each word of a text."""
    trained = load_model(model)
    index = {word: number for number, word in enumerate(trained.words)}
    ids = torch.tensor([[index[word] for word in lines.replace("\n", " <eos> ").split()]])
    with torch.no_grad():
        hidden = trained.model(ids, trained.model.initial_state(1)).hidden[0]
        found = trained.model.embedding.log_prob(hidden)
    return {word: found[:, number] for word, number in index.items()}


def test_trimmed_and_compressed_in_one_step(tmp_path: Path, text: Path) -> None:
    model = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus", WORDS), "awd_lstm")
    output = tmp_path / "out" / "small.pt"
    asked = [model, "projective", output, "--rank", 4, "--trim-to", text, "--verbose"]
    ended = compress(*asked)
    assert sorted(file.name for file in output.parent.iterdir()) == ["small.pt", "small.pt.ids.tsv"]
    assert set(load_model(output).words) == {"<unk>", "<eos>", "a", "c", "e", "i"}
    assert f"old and new ids: {output}.ids.tsv" in ended.out and " after trimming, " in ended.out
    output.unlink()
    assert compress(*asked).says("small.pt.ids.tsv already exists; add --force")
    assert compress(*asked, "--force").status == 0
    ended = tool("trim", "--model", output, "--text", text, "--held-out", text, "--dry-run")
    assert ended.status == 0 and "of 3 lines, 3 round-trip before, 3 after" in ended.out


def assert_kept(model: Path, output: Path) -> None:
    """The remaining words share the whole probability as before."""
    before, after = log_probabilities(model, LINES), log_probabilities(output, LINES)
    assert len(after) < len(before)
    total = torch.stack([before[word] for word in after]).logsumexp(dim=0)
    for word in after:
        torch.testing.assert_close(after[word], before[word] - total, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["awd_lstm", "transformer_xl"])
@pytest.mark.parametrize("method", ["plain", "compressed first", "compressed after"])
def test_kept_words_keep_their_probabilities(tmp_path: Path, text: Path, kind: str, method: str) -> None:
    model = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus", WORDS), kind)
    small, output = tmp_path / "small.pt", tmp_path / "out" / "trimmed.pt"
    if method == "compressed first":
        assert compress(model, "projective", small, "--rank", 4).status == 0
        model = small
    assert tool("trim", "--model", model, "--text", text, "--output", output).status == 0
    if method == "compressed after":
        assert compress(output, "projective", small, "--rank", 4).status == 0
        assert load_model(small).model.embedding.num_embeddings == 6
    assert set(load_model(output).words) == {"<unk>", "<eos>", "a", "c", "e", "i"}
    assert_kept(model, output)


@pytest.mark.parametrize("store", ["int8", "int4"])
def test_packed_models_stay_packed(store: str, tmp_path: Path, text: Path) -> None:
    words = " ".join(f"w{number}" for number in range(90)) + f" {WORDS}"
    model = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus", words))
    small, output, keep = tmp_path / "small.pt", tmp_path / "trimmed.pt", tmp_path / "keep"
    keep.write_text("\n".join(load_model(model).words[:80]))
    assert compress(model, "projective", small, "--rank", 4, "--store", store).status == 0
    ended = tool("trim", "--model", small, "--text", text, "--keep", keep, "--output", output)
    assert ended.status == 0 and "cannot be compared with it" in " ".join(ended.out.split())
    packings = [read_checkpoint(path)["packing"] for path in (model, small, output)]
    assert packings[0] is None and packings[1].store == packings[2].store == store
    assert packings[1].names == packings[2].names
    assert_kept(small, output)


def test_ids_report_and_evaluation(tmp_path: Path, text: Path) -> None:
    data = write_corpus(tmp_path / "corpus", WORDS)
    model, output = write_model(tmp_path / "model.pt", data), tmp_path / "trimmed.pt"
    before = model.read_bytes()
    keep = tmp_path / "keep"
    keep.write_text("j\n")
    asked = ["--min-count", 2, "--keep", keep, "--keep-first", 1]
    ended = tool("trim", "--model", model, "--text", text, "--output", output, *asked)
    assert ended.status == 0 and model.read_bytes() == before
    words = load_corpus(data).vocabulary.words
    kept = [word for word in words if word in ("<unk>", "<eos>", "a", "c", "e", "j", words[0])]
    assert load_model(output).words == kept
    pairs = [line.split("\t") for line in (tmp_path / "trimmed.pt.ids.tsv").read_text().splitlines()]
    assert [(words[int(old)], int(new)) for old, new in pairs] == [(word, i) for i, word in enumerate(kept)]
    # Of the 11 tokens including three line ends, "i" was removed.
    assert "90.91% of 11 tokens kept (0 of them unknown, as before); 2 lines kept whole" in ended.out
    # One of the 11 tokens.
    assert "<unk>: 1 tokens (9.09%)" in command("lm_evaluate", "-model", output, "-data", text).out


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--text", "none"], "no such file"),
        (["--text", "empty"], "has no word of the vocabulary"),
        (["--text", "binary"], "line 2 is not UTF-8"),
        ([], "give --text"),
        (["--source-text", "text"], "has no source side"),
        (["--text", "text", "--keep", "empty"], "word to keep 'zzz'"),
        (["--text", "text", "--min-count", 99], "is used 99 times; lower --min-count"),
        (["--text", "text", "--model", "text"], "truncated"),
        (["--text", "text", "--output", "taken.pt"], "already exists"),
        (["--text", "text", "--output", "listed.pt"], "already exists"),
        (["--text", "text", "--output", "model.pt"], "would replace the file of --model"),
    ],
)
def test_user_errors(
    arguments: list[object], printed: str, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(Path("model.pt"), write_corpus(tmp_path / "corpus", WORDS))
    Path("empty").write_text("\n\nzzz\n")
    Path("binary").write_bytes(b"a\n\xff\n")
    for taken in ("taken.pt", "listed.pt.ids.tsv"):
        Path(taken).write_text("mine")
    before = content(tmp_path)
    given = [] if "--model" in arguments else ["--model", "model.pt"]
    given += [] if "--output" in arguments else ["--output", "trimmed.pt"]
    assert tool("trim", *given, *arguments).says(printed)
    assert content(tmp_path) == before


def test_methods_without_rows_fail(tmp_path: Path, text: Path) -> None:
    model = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus", WORDS))
    small, output = tmp_path / "small.pt", tmp_path / "trimmed.pt"
    options = ["--vocab-shape", "3,4", "--dim-shape", "2,4", "--rank", "2", "--fit-steps", "2"]
    assert compress(model, "tensor_train", small, *options).status == 0
    ended = tool("trim", "--model", small, "--text", text, "--output", output)
    assert ended.says("trim the plain model first") and not output.exists()


def test_similarity_and_correlation(tmp_path: Path) -> None:
    pytest.importorskip("gensim")
    model = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus"), "awd_lstm")
    pairs, output = tmp_path / "pairs.tsv", tmp_path / "maps"
    pairs.write_text("a\tb\t1\na\tc\t2\nb\tc\t3\na\tunheard\t4\n")
    (found,) = json.loads(tool("similarity", "--model", model, "--pairs", pairs, "--json").out)[
        "tables"
    ].values()
    assert found["dimensions"] == 8 and found["sets"][0]["known"] == 3
    assert tool("correlation", "--model", model, "--output", output).status == 0
    record = json.loads((output / "correlation.json").read_text())
    assert [layer["layer"] for layer in record["layers"]] == ["output"]
    assert (output / record["layers"][0]["picture"]).read_bytes().startswith(b"\x89PNG")
    assert tool("correlation", "--model", model, "--output", pairs).says(str(pairs))
    assert tool("similarity", "--model", pairs, "--pairs", pairs).says(str(pairs))


def test_cosines_of_words(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus"))
    trained = load_model(model)
    words = trained.words[2:5]
    asked = ["cosines", "--model", model, "--words", *words]
    _, titles, *lines = tool(*asked).out.splitlines()
    assert titles.split() == ["output"] and len(lines) == 3
    (pairs,) = json.loads(tool(*asked, "--json").out)["embeddings"].values()
    rows = trained.model.embedding.table().detach()[2:5]
    expected = torch.nn.functional.cosine_similarity(rows[0], rows[1], dim=0)
    assert [pairs[0]["first"], pairs[0]["second"]] == words[:2]
    assert pairs[0]["cosines"]["output"] == pytest.approx(float(expected), abs=1e-5)
    assert lines[0].split()[-1] == f"{pairs[0]['cosines']['output']:.4f}"
    assert tool(*asked, "unheard").says("'unheard' is not in the vocabulary")


def test_export_of_a_compressed_model(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model, small, output = (tmp_path / name for name in ("model.pt", "small.pt", "words.onnx"))
    wide_model(model)
    sizes = ["--codec", "uniform", "--bits", 4, "--group_size", 16]
    assert compress(model, "quantized", small, *sizes).status == 0
    asked = ["export", "--model", small, "--output", output, "--format", "onnx-embeddings"]
    printed = tool(*asked).out
    assert "4-bit blocks of 16 numbers" in printed and "tokens per second" in printed
    assert output.stat().st_size < small.stat().st_size

    embedding = load_model(small).model.embedding.eval()
    session = onnxruntime.InferenceSession(str(output), providers=["CPUExecutionProvider"])
    hidden = torch.randn(2, embedding.score_dim)
    given = {"ids": np.array([1, 7, 7]), "hidden": hidden.numpy()}
    vectors, scores = map(torch.from_numpy, session.run(["vectors", "scores"], given))
    with torch.no_grad():
        torch.testing.assert_close(vectors, embedding(torch.tensor([1, 7, 7])))
        torch.testing.assert_close(scores, embedding.logits(hidden), rtol=1e-4, atol=1e-4)

    assert tool(*asked).says("words.onnx")
    assert tool(*asked, "--force").status == 0
    assert tool("export", "--model", small, "--output", small, "--force").says("--model")


MODELS: dict[str, dict[str, Any]] = {
    "awd_lstm": {"hidden_dim": 24, "num_layers": 2},
    "transformer_xl": {
        "num_layers": 2,
        "num_heads": 2,
        "head_dim": 8,
        "feed_forward_dim": 32,
        "memory_length": 7,
        "same_length": True,
    },
}


@pytest.mark.slow_except("embedding0-awd_lstm")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("embedding", [{"method": "standard"}, {"method": "adaptive", "cutoffs": [50, 150]}])
def test_whole_models(
    kind: str,
    embedding: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading a text in parts, with the state of the previous part, gives the scores of torch."""
    onnxruntime = pytest.importorskip("onnxruntime")
    monkeypatch.setattr("shared_embeddings.export.onnx._SECONDS", 0.0)
    path, output = tmp_path / "model.pt", tmp_path / "model.onnx"
    words = ["<unk>", "<eos>", *(f"w{number}" for number in range(298))]
    config = {"model": kind, "embedding_dim": 16, **MODELS[kind], "embedding": embedding}
    model = models.build(kind, words, embedding, {"embedding_dim": 16, **MODELS[kind]}).eval()
    state = pack(distinct_state(model), ["embedding"], "int8")
    save_state(path, state, words, config, None)
    assert "tokens per second" in tool("export", "--model", path, "--output", output).out

    model = load_model(path).model.eval()
    session = onnxruntime.InferenceSession(str(output), providers=["CPUExecutionProvider"])
    ids = torch.randint(len(words), (3, 15), generator=torch.Generator().manual_seed(4))
    ours, theirs = model.initial_state(3), [part.numpy() for part in model.initial_state(3)]
    for part in ids.split([1, 9, 5], dim=1):
        given = {f"state.{number}": values for number, values in enumerate(theirs)}
        logits, *theirs = session.run(None, {"ids": part.numpy(), **given})
        with torch.no_grad():
            hidden, ours, _ = model(part, ours)
            wanted = model.embedding.logits(hidden)
        torch.testing.assert_close(torch.from_numpy(logits), wanted, rtol=1e-3, atol=1e-4)
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(torch.from_numpy(one), other, rtol=1e-3, atol=1e-4)
