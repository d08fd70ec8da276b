"""Static models: read from all layouts, compressed, trimmed, exported, and read again by numpy."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from shared_embeddings.cli.main import main
from shared_embeddings.compress.calibration import calibrate
from shared_embeddings.compress.host import find_host
from shared_embeddings.static import table as static
from shared_embeddings.static.adapter import StaticModel
from shared_embeddings.static.module import CompressedStaticEmbedding
from tests.shared_embeddings.static.models import (
    DIM,
    UNKNOWN,
    WORDS,
    make_tokenizer,
    means,
    rows,
    write_json,
    write_model2vec,
    write_static_embedding,
    write_text,
    write_wordllama,
)

TEXTS = ["w1 w2 w3", "w5 w5 other w59", "", "other", "w7"]
IDS = [[1, 2, 3], [5, 5, UNKNOWN, 59], [], [UNKNOWN], [7]]
KNOWN = [[token for token in ids if token != UNKNOWN] for ids in IDS]
WEIGHTS = np.linspace(0.1, 2, WORDS, dtype=np.float32)
MAPPING = np.random.default_rng(3).integers(0, 9, WORDS)
INT8 = np.random.default_rng(4).integers(-127, 128, (WORDS, DIM)).astype(np.int8)

# The folder or file of each layout, and what its vectors of tokens are.
LAYOUTS: dict[str, tuple[Callable[[Path], Path], np.ndarray]] = {
    "model2vec": (lambda path: write_model2vec(path), rows()),
    "float16": (lambda path: write_model2vec(path, rows().astype(np.float16)), rows()),
    "int8": (lambda path: write_model2vec(path, INT8), INT8.astype(np.float32)),
    "weights": (lambda path: write_model2vec(path, weights=WEIGHTS), rows() * WEIGHTS[:, None]),
    "mapping": (
        lambda path: write_model2vec(path, rows(9), WEIGHTS, MAPPING),
        rows(9)[MAPPING] * WEIGHTS[:, None],
    ),
    "static": (lambda path: write_static_embedding(path, rows()), rows()),
    "nested": (lambda path: write_static_embedding(path, rows(), is_nested=True), rows()),
    "wordllama": (lambda path: write_wordllama(path, rows()), rows()),
}


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command that must succeed prints."""
    status = main([str(argument) for argument in arguments])
    printed, error = capsys.readouterr()
    assert status == 0, error
    return printed


def vectors_of(model: Path, texts: list[str] = TEXTS) -> np.ndarray:
    table = static.read(model)
    with torch.no_grad():
        return table.vectors(*static.flat(table.tokenize(texts))).numpy()


def load_with_numpy(folder: Path) -> Any:
    """What the module in a folder reads from its file."""
    spec = importlib.util.spec_from_file_location("load_vectors", folder / "load_vectors.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load(folder / "model.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sentence_vectors_of_every_layout(layout: str, tmp_path: Path) -> None:
    """As written, at full rank, and in numpy alone: the means of the vectors of tokens."""
    write, vectors = LAYOUTS[layout]
    model = write(tmp_path / "model")
    assert find_host(model)[0] == "static"
    of_model2vec = (
        json.loads((model / "config.json").read_text()) if (model / "config.json").is_file() else {}
    )
    expected = means(KNOWN if of_model2vec else IDS, vectors)
    assert np.allclose(vectors_of(model), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compressed_models_are_read_as_written(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write, vectors = LAYOUTS[layout]
    model, small, report = write(tmp_path / "model"), tmp_path / "small", tmp_path / "report.json"
    text = write_text(tmp_path / "text")
    asked = ["compress", "--model", model, "--text", text, "--output", small, "--report", report]
    printed = run(capsys, *asked, "--method", "quantized", "--bits", 8, "--codec", "spectral")
    assert "of the nearest neighbors of the original (the nearest of " in printed
    content = json.loads(report.read_text())
    assert content["host"] == "static" and content["kept"]["share"] > 0.97
    assert find_host(small)[0] == "static"
    names = [
        path.name for path in sorted(small.iterdir()) if path.name != "config_sentence_transformers.json"
    ]
    assert names == [
        *("README.md", "config.json", "load_vectors.py", "model.safetensors", "modules.json"),
        "tokenizer.json",
    ]
    of_tokens = vectors_of(small, [f"w{number}" for number in range(1, WORDS)])
    loaded = load_with_numpy(small)
    assert loaded.words == ["[UNK]", *(f"w{number}" for number in range(1, WORDS))]
    assert np.allclose(of_tokens, loaded.vectors[1:], atol=1e-5 * np.abs(vectors).max())
    error = np.linalg.norm(of_tokens - vectors[1:]) / np.linalg.norm(vectors[1:])
    assert error < 0.03
    first, *others = json.loads((small / "modules.json").read_text())
    assert first["type"] == static.CLASS and first["path"] == ""
    assert [module["type"].rpartition(".")[2] for module in others] == (
        ["Normalize"] if layout in ("model2vec", "float16", "int8", "weights", "mapping") else []
    )
    card = (small / "README.md").read_text()
    assert "library_name: sentence-transformers" in card and "trust_remote_code=True" in card
    assert "sentence-similarity" in card


def test_shared_rows_stay_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error of a row counts by all tokens that have it, and by the squares of their factors."""
    model = StaticModel(write_model2vec(tmp_path / "model", rows(9), WEIGHTS, MAPPING))
    (tmp_path / "text").write_text("w1 w1 w2\nw3 other\n")
    expected = np.zeros(9)
    for token, count in ((1, 2), (2, 1), (3, 1)):  # unknown words are left out
        expected[MAPPING[token]] += count * (WEIGHTS[token] / WEIGHTS.max()) ** 2
    words = model.tables()[0].words
    assert len(words) == 9 and words[MAPPING[0]] == "[UNK]"
    counts = model.count_text([tmp_path / "text"])
    measured = np.array([counts.get(word, 0) for word in words])
    assert np.allclose(measured, 1000 * expected, atol=1)
    assert counts.keys() == {words[row] for row in expected.nonzero()[0]}
    small = tmp_path / "small"
    asked = ["compress", "--model", model.path, "--output", small, "--force"]
    # Without a text, rows are compared: tokens with the same row are equally near.
    assert "kept 100% of the nearest neighbors of the original (the nearest of 9 " in run(
        capsys, *asked, "--method", "quantized", "--bits", 8
    )
    run(capsys, *asked, "--method", "standard")
    stored = load_file(small / "model.safetensors")
    assert stored["weight"].shape == (9, DIM) and np.array_equal(stored["word_rows"], MAPPING)


def test_the_metric_is_that_of_neighbors_of_lines(tmp_path: Path) -> None:
    """The mean of g gᵀ, for the gradients g of the log-probability of a neighbor that is drawn."""
    model = StaticModel(write_model2vec(tmp_path / "model"))
    text = write_text(tmp_path / "text", 3)
    measured = calibrate(model, model.tables(), [text], 0, 1000, progress=False)["words"].metric
    table = model.module.table().double().requires_grad_()
    lines = [model.table.tokenize([line])[0] for line in text.read_text().splitlines()]
    expected, known = torch.zeros(DIM, DIM, dtype=torch.float64), False
    # Two others are neighbors of each line, so that eight draws are all that can be.
    for draws in np.ndindex(2, 2, 2):
        vectors = torch.stack([table[ids].mean(0) for ids in lines])
        unit = vectors / vectors.norm(dim=1, keepdim=True)
        chances = (20 * unit @ unit.T).fill_diagonal_(-torch.inf).log_softmax(1)
        drawn = [(line + 1 + draw) % 3 for line, draw in enumerate(draws)]
        (slopes,) = torch.autograd.grad(-sum(chances[line, other] for line, other in enumerate(drawn)), table)
        expected = slopes.T @ slopes / 3
        known |= torch.allclose(measured.double(), expected, rtol=1e-3, atol=1e-6)
    assert known


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32"])
@pytest.mark.parametrize("layout", ["model2vec", "mapping", "static"])
def test_export_for_model2vec(
    layout: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The vectors are those of the compressed model; int8 has a scale for each row in the factors."""
    write, vectors = LAYOUTS[layout]
    model, small, plain = write(tmp_path / "model"), tmp_path / "small", tmp_path / "plain"
    run(capsys, "compress", "--model", model, "--method", "quantized", "--bits", 8, "--output", small)
    asked = ["export", "--model", small, "--format", "model2vec", "--dtype", dtype, "--output", plain]
    assert f" in {dtype}, " in run(capsys, *asked)
    tensors = load_file(plain / "model.safetensors")
    assert tensors["embeddings"].dtype == dtype
    folded = tensors["embeddings"].astype(np.float32)
    folded = folded[tensors["mapping"]] if "mapping" in tensors else folded
    folded = folded * tensors["weights"][:, None] if "weights" in tensors else folded
    wanted = load_with_numpy(small).vectors
    assert np.linalg.norm(folded - wanted) / np.linalg.norm(wanted) < (6e-3 if dtype == "int8" else 5e-4)
    config = json.loads((plain / "config.json").read_text())
    assert config["model_type"] == "model2vec" and config["embedding_dtype"] == dtype
    assert config.get("vocabulary_quantization") == (9 if layout == "mapping" else None)
    assert np.allclose(vectors_of(plain), vectors_of(small), atol=2e-2)


@pytest.mark.parametrize("layout", ["weights", "mapping", "int8", "nested", "wordllama"])
def test_trimmed_models_are_plain(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the data type of the original, with the vectors of the tokens that stay."""
    write, vectors = LAYOUTS[layout]
    model, small = write(tmp_path / "model"), tmp_path / "small"
    (tmp_path / "text").write_text("w1 w9 w59 w9\n")
    run(capsys, "trim", "--model", model, "--text", tmp_path / "text", "--output", small)
    assert find_host(small)[0] == "static"
    table = static.read(small)
    assert table.tokens == ["[UNK]", "w1", "w9", "w59"]
    kind = {"int8": np.int8, "wordllama": np.float16}.get(layout, np.float32)
    assert load_file(small / "model.safetensors")["embeddings"].dtype == kind
    expected = means([[1], [9, 9], [59, 1]], vectors)
    assert np.allclose(vectors_of(small, ["w1", "w9 w9", "w59 w1"]), expected, rtol=2e-3, atol=2e-3)


def test_texts_are_cut_like_those_of_model2vec(tmp_path: Path) -> None:
    """After `max_length` tokens, and before that after as many letters as those have in the median."""
    table = static.read(write_model2vec(tmp_path / "model", max_length=4))
    assert table.tokenize(["w1 w2 w3 w4 w5"]) == [[1, 2, 3, 4]]
    cut = table.tokenize(["w11 " * 9, "w1" + " " * 8 + "w2", "w1" + " " * 9 + "w2"])
    assert cut == [[11, 11, 11], [1, 2], [1]]
    table = static.read(write_static_embedding(tmp_path / "plain", rows()))
    assert len(table.tokenize(["w1 " * 999])[0]) == 999


def test_models_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error_of(model: Path) -> str:
        asked = ["compress", "--model", model, "--method", "standard", "--output", tmp_path / "small"]
        assert main([str(argument) for argument in asked]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(model) in line and not (tmp_path / "small").exists()
        return line

    short = write_model2vec(tmp_path / "short", rows(9))
    assert "the tokenizer has 60 tokens, but the table only 9" in error_of(short)
    wrong = write_model2vec(tmp_path / "wrong", rows(9), mapping=np.full(WORDS, 9))
    assert "mapping names other rows than the 9" in error_of(wrong)
    alone = write_wordllama(tmp_path / "alone", rows())
    (tmp_path / "alone/tokenizers/tiny_tokenizer_config.json").unlink()
    assert "has no tokenizer beside it" in error_of(alone)
    odd = write_model2vec(tmp_path / "odd")
    (odd / "tokenizer.json").write_text("{}")
    assert "cannot be read" in error_of(odd)
    empty = write_model2vec(tmp_path / "empty")
    save_file({"other": rows()}, empty / "model.safetensors")
    assert "cannot be read" in error_of(empty)
    small = write_model2vec(tmp_path / "model")
    run(capsys, "compress", "--model", small, "--method", "standard", "--output", tmp_path / "small")
    asked = [
        "compress",
        "--model",
        tmp_path / "small",
        "--method",
        "standard",
        "--output",
        tmp_path / "again",
    ]
    assert main([str(argument) for argument in asked]) == 2
    assert "is already compressed" in capsys.readouterr().err


def test_modules_name_no_folder_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only folders in the model are read and copied."""
    model = write_model2vec(tmp_path / "model")
    write_json(tmp_path / "outside" / "secret.json", {})
    modules = json.loads((model / "modules.json").read_text())
    modules.append(
        {"idx": 2, "name": "2", "path": "../outside", "type": "sentence_transformers.models.Dense"}
    )
    write_json(model / "modules.json", modules)
    run(capsys, "compress", "--model", model, "--method", "standard", "--output", tmp_path / "small")
    assert not [*(tmp_path / "small").rglob("secret.json")]


def test_pieces_are_trimmed_with_those_that_spell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer of pieces reads texts of any language, unlike one of whole words."""
    model = write_model2vec(tmp_path / "model", tokenizer=make_tokenizer("WordPiece"))
    assert StaticModel(model).reads_raw_text
    assert not StaticModel(write_model2vec(tmp_path / "words")).reads_raw_text
    (tmp_path / "text").write_text("w48 w97 v1\n")
    before = static.read(model).tokenize(["w48 w97 v1", "w31"])
    run(capsys, "trim", "--model", model, "--text", tmp_path / "text", "--output", tmp_path / "small")
    table, old = static.read(tmp_path / "small"), static.read(model)
    after = table.tokenize(["w48 w97 v1", "w31"])
    pieces = [
        [[read.tokens[token] for token in line] for line in lines]
        for read, lines in ((old, before), (table, after))
    ]
    assert pieces == [[["w48", "w9", "##7"], ["w31"]], [["w48", "w9", "##7"], ["w", "##3", "##1"]]]


@pytest.mark.parametrize("layout", ["model2vec", "mapping"])
def test_the_module_of_sentence_transformers(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its table stays in few bits, and it saves what it loaded."""
    model, small, saved = LAYOUTS[layout][0](tmp_path / "model"), tmp_path / "small", tmp_path / "saved"
    asked = ["--method", "quantized", "--bits", 2, "--codec", "spectral", "--output", small]
    run(capsys, "compress", "--model", model, *asked)
    module = CompressedStaticEmbedding.load(str(small), local_files_only=True)
    features = module.preprocess(TEXTS)
    assert features["offsets"].tolist() == [0, 3, 6, 6, 6]
    expected = means(KNOWN, load_with_numpy(small).vectors)
    trained = module(dict(features))["sentence_embedding"]
    with torch.inference_mode():
        vectors = module(dict(features))["sentence_embedding"]
    assert trained.requires_grad and np.allclose(trained.detach(), expected, atol=1e-5)
    assert np.allclose(vectors, expected, atol=1e-5)
    assert module.get_embedding_dimension() == DIM and module.max_seq_length == 512
    saved.mkdir()
    module.save(str(saved))
    names = ("config.json", "load_vectors.py", "model.safetensors", "tokenizer.json")
    for name in names:
        assert (saved / name).read_bytes() == (small / name).read_bytes(), name
    assert [path.name for path in sorted(saved.iterdir())] == [*names]
    prompted = module.preprocess(["w2"], prompt="w1 ")
    assert prompted["input_ids"].tolist() == [1, 2]


def test_sentence_transformers_and_model2vec_load_what_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformer = pytest.importorskip("sentence_transformers").SentenceTransformer
    kind = pytest.importorskip("model2vec").StaticModel
    for layout in ("model2vec", "mapping", "weights"):
        model, folder = LAYOUTS[layout][0](tmp_path / layout), tmp_path / f"{layout}.small"
        run(capsys, "compress", "--model", model, "--method", "quantized", "--bits", 8, "--output", folder)
        expected = kind.from_pretrained(model).encode(TEXTS)
        vectors = transformer(str(folder), trust_remote_code=True, device="cpu").encode(TEXTS)
        assert np.allclose(vectors, expected, atol=0.03)
        for dtype in ("int8", "float16"):
            plain = tmp_path / f"{layout}.{dtype}"
            asked = ["--format", "model2vec", "--dtype", dtype, "--output", plain]
            run(capsys, "export", "--model", folder, *asked)
            assert np.allclose(kind.from_pretrained(plain).encode(TEXTS), vectors, atol=0.02)
