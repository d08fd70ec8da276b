"""Rank correlation, word similarity and correlation maps; reading, compressing and exporting word vectors."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import pickle
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from shared_embeddings.analysis import (
    WordPairs,
    read_pairs,
    spearman,
    word_similarity,
)
from shared_embeddings.cli.main import main
from shared_embeddings.compress.command import compress
from shared_embeddings.compress.options import CompressOptions
from shared_embeddings.embedding import WordEmbedding
from shared_embeddings.word_vectors.adapter import WordVectorsAdapter
from shared_embeddings.words.vectors import WordVectors, read_vectors, write_vectors
from tests.shared_embeddings.cases import Case, by_name
from tests.shared_embeddings.support import each_case

WORDS = ["cat", "dog", "car", "Paris", "zero"]
VECTORS = np.array([[1.0, 0.0], [2.0, 2.0], [0.0, 3.0], [1.0, 1.0], [0.0, 0.0]], dtype=np.float32)


def test_spearman_with_ties_by_hand() -> None:
    # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: covariance 4.5, variances 4.5 and 5.
    assert spearman([10, 20, 20, 30], [0.1, 0.2, 0.3, 0.4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman([1, 2, 3], [30, 20, 10]) == pytest.approx(-1.0)


def test_undefined_spearman() -> None:
    assert spearman([], []) is None and spearman([1.0], [2.0]) is None
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    with pytest.raises(ValueError, match="3 and 2 values"):
        spearman([1, 2, 3], [1, 2])


def test_spearman_equals_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(3)
    first, second = draw.integers(0, 9, 60), draw.integers(0, 9, 60)
    assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic)


def test_word_similarity_reports_coverage() -> None:
    pairs = [
        ("cat", "dog", 8.0),  # cosine 0.71
        ("cat", "car", 2.0),  # 0
        ("CAT", "Cat", 9.0),  # 1, in lower case
        ("dog", "Paris", 1.0),  # 1
        ("cat", "horse", 5.0),  # unknown
        ("cat", "paris", 5.0),  # known in upper case only
        ("cat", "zero", 5.0),  # without a direction
    ]
    result = word_similarity(WORDS, VECTORS, WordPairs("set", pairs))
    assert (result.known, result.pairs, result.lower_cased) == (4, 7, 1)
    assert result.coverage == pytest.approx(4 / 7)
    # Ranks 2, 1, 3.5, 3.5 against 3, 2, 4, 1: covariance 0, 1.5 and -0.5 twice.
    covariance = (-0.5 * 0.5) + (-1.5 * -0.5) + (1.0 * 1.5) + (1.0 * -1.5)
    assert result.rho == pytest.approx(covariance / math.sqrt(4.5 * 5.0))


def test_first_occurrence_of_a_repeated_word_counts() -> None:
    pairs = WordPairs("set", [("a", "b", 1.0), ("a", "c", 2.0)])
    vectors = np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [-1.0, 0.0]])
    assert word_similarity(["a", "c", "b", "c"], vectors, pairs).rho == pytest.approx(1.0)


def _embedding(case: Case) -> WordEmbedding:
    built = case.build().eval()
    return WordEmbedding("words", [str(n) for n in range(case.num_embeddings)], case.padding_idx, built)


@each_case
def test_layers_of_every_method(case: Case) -> None:
    embedding = _embedding(case)
    ids = torch.tensor([5, 1, 30, 5])
    layers = embedding.layers(ids)
    names = [layer.name for layer in layers]
    assert names[-1] == "output" and len(set(names)) == len(names)
    torch.testing.assert_close(layers[-1].values, embedding.module(ids))
    assert all(len(layer.values) <= 4 and layer.values.size(1) % layer.groups == 0 for layer in layers)


def test_layers_of_define_lead_to_its_output() -> None:
    embedding = _embedding(by_name("define-hgt-mixer"))
    layers = {layer.name: layer for layer in embedding.layers(torch.arange(7))}
    assert [(name, layer.groups) for name, layer in layers.items()] == [
        ("map", 1),
        ("entry", 1),
        ("layer 1", 4),
        ("layer 2", 2),
        ("layer 3", 1),
        ("output", 1),
    ]
    module = embedding.module
    with torch.no_grad():
        torch.testing.assert_close(module.entry(layers["map"].values), layers["entry"].values)
        read = torch.cat([layers["entry"].values, layers["layer 3"].values], dim=1)
        torch.testing.assert_close(module.reducer(module.scale * read), layers["output"].values)


@pytest.mark.parametrize("name", ["alone-real", "alone-binary"])
def test_hidden_units_of_alone_lead_to_its_output(name: str) -> None:
    embedding = _embedding(by_name(name))
    filtered, hidden, output = embedding.layers(torch.arange(9))
    module = embedding.module
    with torch.no_grad():
        torch.testing.assert_close(hidden.values @ module.second.t(), output.values)
        torch.testing.assert_close(torch.relu(filtered.values @ module.first.t()), hidden.values)
        if "binary" in name:
            masks = filtered.values / module.base
            assert set(masks.unique().tolist()) == {0.0, 1.0}


ROWS = {"the": [1.0, 2.5, -3.0], "é": [0.125, 0.0, 4.0], "a\u00a0b": [7.0, 8.0, 9.0]}
LINES = [" ".join([word, *map(str, numbers)]) for word, numbers in ROWS.items()]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def write_binary(path: Path, words: Iterable[str] = ROWS, end: bytes = b"\n", rest: bytes = b"") -> Path:
    """word2vec's format, byte by byte, with `end` after each vector."""
    rows = zip(words, ROWS.values())
    body = b"".join(word.encode() + b" " + struct.pack("<3f", *row) + end for word, row in rows)
    path.write_bytes(b"3 3\n" + body + rest)
    return path


@pytest.mark.parametrize("kind", ["lines", "header", "binary", "gzip"])
def test_formats(tmp_path: Path, kind: str) -> None:
    text = "\n".join(LINES) + "\n"
    path = write(tmp_path / "vectors", f"3 3\n{text}" if kind == "header" else text)
    if kind == "binary":
        write_binary(path)
    elif kind == "gzip":
        path = tmp_path / "vectors.gz"
        path.write_bytes(gzip.compress(text.encode()))
    table = read_vectors(path)
    assert table.words == list(ROWS)
    np.testing.assert_array_equal(table.vectors, np.array(list(ROWS.values()), dtype=np.float32))
    assert read_vectors(path, limit=2).words == list(ROWS)[:2]


def test_fasttext_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The words are read; that its subwords are lost is printed, reported and stored."""
    fasttext = pytest.importorskip("gensim.models.fasttext")
    sentences = [["sun", "moon"], ["sun", "star"]] * 5
    model = fasttext.FastText(sentences, vector_size=4, min_count=1, workers=1, seed=1, bucket=20)
    path, small, report = tmp_path / "model.bin", tmp_path / "small.safetensors", tmp_path / "report.json"
    fasttext.save_facebook_model(model, str(path))
    table = read_vectors(path)
    assert sorted(table.words) == ["moon", "star", "sun"]
    np.testing.assert_allclose(table.vectors[table.words.index("moon")], model.wv["moon"], rtol=1e-5)
    asked = ["--model", str(path), "--method", "standard", "--output", str(small), "--report", str(report)]
    assert main(["compress", *asked]) == 0
    assert "note: the subword vectors" in capsys.readouterr().out
    assert any("subword" in note for note in json.loads(report.read_text())["notes"])
    assert any("subword" in note for note in WordVectorsAdapter().read(small).notes)


@pytest.mark.parametrize("end", [b"\n", b""])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_binary_files(tmp_path: Path, end: bytes, suffix: str) -> None:
    path = write_binary(tmp_path / f"vectors{suffix}", end=end)
    if suffix:
        path.write_bytes(gzip.compress(path.read_bytes()))
    table = read_vectors(path)
    assert table.words == list(ROWS)
    np.testing.assert_array_equal(table.vectors, np.array(list(ROWS.values()), dtype=np.float32))


@pytest.mark.parametrize(
    ("words", "rest", "message"),
    [
        (["the", "cat", "New Yor"], b"", "5 bytes are left after word 3"),
        (["the", "New York", "cat"], b"", "word 2 .*spaces"),
        (["New York", "the", "cat"], b"", "word 2 .*spaces"),
        (list(ROWS), b"\0" * 15, "15 bytes are left after word 3"),
        (["the", "cat"], b"", "ends within word 3 of 3"),
        (["the", "cat", "the"], b"", "word 3 repeats 'the' of word 1"),
    ],
)
def test_broken_binary_files(tmp_path: Path, words: list[str], rest: bytes, message: str) -> None:
    path = write_binary(tmp_path / "vectors", words, rest=rest)
    with pytest.raises(ValueError, match=rf"{path}: .*{message}"):
        read_vectors(path)
    end = write_binary(path, words, b"", rest)
    with pytest.raises(ValueError, match=rf"{path}: .*word [23]"):
        read_vectors(end)
    if words[0] == "the":
        assert read_vectors(path, limit=1).words == ["the"]


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffthe 1 2 3\ncat 4 5 6\n",
        "\ufeff2 3\nthe 1 2 3\ncat 4 5 6\n",
        "at name@domain.com 1 2 3\n. . 4 5 6\nto 7 8 9\n",
        "3 3\nat name@domain.com 1 2 3\n. . 4 5 6\nto 7 8 9\n",
        "the 1 2 3\nat name@domain.com 4 5 6\n",
    ],
)
def test_byte_order_marks_and_words_with_spaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path, small = write(tmp_path / "vectors", text), tmp_path / "small.safetensors"
    lines = [line for line in text.removeprefix("\ufeff").splitlines() if line[1:] != " 3"]
    rows = [line.rsplit(" ", 3) for line in lines]
    table = read_vectors(path)
    assert table.words == [row[0] for row in rows]
    np.testing.assert_array_equal(table.vectors, np.array([row[1:] for row in rows], np.float32))
    assert main(["compress", "--model", str(path), "--method", "standard", "--output", str(small)]) == 0
    assert WordVectorsAdapter().read(small).words == table.words


@pytest.mark.parametrize("kind", ["lines", "header", "binary"])
def test_words_that_are_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """They are named, or left out if that is wanted, which a note says."""
    path, small = tmp_path / "vectors", tmp_path / "small.safetensors"
    content = write_binary(path).read_bytes() if kind == "binary" else "\n".join(LINES).encode()
    header = b"3 3\n" if kind == "header" else b""
    path.write_bytes(header + content.replace(b"the ", b"th\xe9 "))
    asked = ["compress", "--model", str(path), "--method", "standard", "--output", str(small)]
    assert main(asked) == 2
    place = {"lines": "line 1", "header": "line 2", "binary": "word 1"}[kind]
    assert f"{path}: {place} has the word b'th\\xe9'" in capsys.readouterr().err
    assert main([*asked, "--skip-undecodable"]) == 0
    assert "note: 1 words that are not UTF-8" in capsys.readouterr().out
    model = WordVectorsAdapter().read(small)
    assert model.words == list(ROWS)[1:]
    np.testing.assert_allclose(model.module.table().detach(), list(ROWS.values())[1:])


def test_only_white_space_of_ascii_separates(tmp_path: Path) -> None:
    """GloVe has words such as a no-break space."""
    path, numbers = tmp_path / "vectors", np.eye(3, dtype=np.float32)
    words = ["\u00a0", "a\u3000b", "\u0085"]
    write_vectors(path, WordVectors(words, numbers))
    assert read_vectors(path).words == words
    with pytest.raises(ValueError, match="'a b' is empty or contains white space"):
        write_vectors(path, WordVectors(["a b", "c", "d"], numbers))


def test_all_notations_of_numbers(tmp_path: Path) -> None:
    table = read_vectors(write(tmp_path / "v", "1_0 +1 -.5 2.\n\u0663 1e-3 4E+2 7e1\n"))
    assert table.words == ["1_0", "\u0663"]
    np.testing.assert_allclose(table.vectors, [[1, -0.5, 2], [0.001, 400, 70]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 1 2\nb 3\nc 5 6\n", "line 2 has 1 numbers after its word, expected 2"),
        ("3 2\na 1 2\nb 3 4\n", "announces 3 words, but there are 2; it is truncated"),
        ("a 1 2\n 3 4\n", "line 2 starts with a space"),
        ("a 1 2\nb 3 x\n", "line 2 has 'x', expected a number"),
        ("2 2\na 1 2\nb 3 \u0663\n", "line 3 has '\u0663', expected a number"),
        ("a 1 2\nb 3 4\na 5 6\n", "line 3 repeats 'a' of line 1"),
        ("a 1 2\nb nan 3\n", "'b' contains NaN or infinity"),
        ("", "is empty"),
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_malformed_vectors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = write(tmp_path / "vectors", text)
    pairs = write(tmp_path / "pairs", "a b 1\n")
    assert main(["similarity", "--vectors", str(path), "--pairs", str(pairs)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err and str(path) in err


def test_truncated_fasttext_models(tmp_path: Path) -> None:
    path = tmp_path / "vectors"
    path.write_bytes((793712314).to_bytes(4, "little") + b"\0" * 40)
    with pytest.raises(ValueError, match="a fastText model"):
        read_vectors(path)
    with pytest.raises(ValueError, match="limit is 0"):
        read_vectors(path, limit=0)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"version":"1"', b'"version":"9"', "version 9, but this program supports 1"),
        (b'"[3, 3]"', b'"[3, 4]"', "its tensors are not those of standard"),
    ],
)
def test_vectors_of_other_versions_and_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: bytes, new: bytes, reason: str
) -> None:
    path, small = write(tmp_path / "vectors", "\n".join(LINES)), tmp_path / "small.safetensors"
    assert main(["compress", "--model", str(path), "--method", "standard", "--output", str(small)]) == 0
    small.write_bytes(small.read_bytes().replace(old, new))
    assert main(["export", "--model", str(small), "--format", "vec", "--output", str(tmp_path / "v")]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "old\tnew\t1.58\nOld man\tbad\t2\n",
        "\ufeffWord 1,Word 2,Human (mean)\r\nold,new,1.58\r\n\r\nOld man,bad,2.0\r\n",
        "word1\tword2\tPOS\tSimLex999\tconc(w1)\nold\tnew\tA\t1.58\t2.72\nOld man\tbad\tA\t2\t3\n",
        '# comment\nold;new;1.58\n"Old man";bad;2\n',
        "old  new 1.58\n",
    ],
)
def test_pairs(tmp_path: Path, text: str) -> None:
    name, pairs = read_pairs(write(tmp_path / "set.csv", text))
    expected = [("old", "new", 1.58), ("Old man", "bad", 2.0)]
    assert name == "set" and pairs == expected[: 2 if "man" in text else 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\tb\t1\na\tb\n", "line 2"),
        ("one\ttwo\tscore\na\tb\tmany\n", "line 2"),
        ("one\ttwo\tscore\n", "no lines with two words and a score"),
    ],
)
def test_malformed_pairs(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_pairs(write(tmp_path / "set", text))


def test_similarity_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vectors = write(tmp_path / "v.txt", "a 1 0\nb 1 1\nc 0 1\n")
    first = write(tmp_path / "first.tsv", "a\tb\t3\na\tc\t1\nA\tA\t5\na\td\t4\n")
    second = write(tmp_path / "second.csv", "one,two,score\na,d,1\n")
    asked = ["similarity", "--vectors", str(vectors), "--pairs", str(first), str(second)]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert "v.txt: 3 words in 2 dimensions" in text and "1.0000" in text and "3 of 4 (75%)" in text
    assert "undefined" in text and "1 in lower case" in text
    assert main([*asked, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)["tables"]["v.txt"]
    assert (table["words"], table["dimensions"]) == (3, 2)
    assert [entry["coverage"] for entry in table["sets"]] == [0.75, 0.0]
    assert table["sets"][0]["rho"] == pytest.approx(1.0) and table["sets"][1]["rho"] is None
    assert main([*asked, "--limit", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"]["v.txt"]["words"] == 2
    assert main([*asked[:-2], str(second)]) == 2
    error = capsys.readouterr().err
    assert f"pairs {second}: no pair has vectors for both words in {vectors}" in error
    assert error.count("\n") == 1


NAMES, DIM = 200, 16


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Vectors near a subspace of four dimensions, as text."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((NAMES, 4)) @ rng.standard_normal((4, DIM))
    rows += 0.01 * rng.standard_normal((NAMES, DIM))
    path = tmp_path / "vectors.vec"
    write_vectors(path, WordVectors([f"w{word}" for word in range(NAMES)], rows.astype(np.float32)))
    return path


@pytest.mark.parametrize("method", ["quantized", "standard"])
def test_the_loader_agrees_with_the_library(text: Path, tmp_path: Path, method: str) -> None:
    """The file next to the vectors needs no other module of the project."""
    small = tmp_path / "small.safetensors"
    more = {"codec": "spectral"} if method == "quantized" else {}
    size = {"bits": 2.0} if method == "quantized" else {}
    options = CompressOptions(model=text, method=method, output=small, store="fp16", **size)
    report = compress(options, **more).report
    assert report.kept.share is not None and report.kept.share > 0.5
    loader = loader_of(tmp_path)
    loaded = loader.load(small)
    model = WordVectorsAdapter().read(small)
    np.testing.assert_allclose(loaded.vectors, model.module.table().detach().numpy(), atol=1e-4)
    original = read_vectors(text).vectors
    error = np.linalg.norm(loaded.vectors - original) / np.linalg.norm(original)
    assert error < (0.3 if method == "quantized" else 0.001)
    assert np.array_equal(loaded["w7"], loaded.vectors[7])
    small.write_bytes(small.read_bytes()[:-20])
    with pytest.raises(ValueError, match="damaged"):
        loader.load(small)


TAMPERINGS: dict[str, Callable[[dict[str, Any], dict[str, np.ndarray]], object]] = {
    "no format": lambda about, _: about.pop("format"),
    "no sizes": lambda about, _: about.pop("sizes"),
    "no options": lambda about, _: about.pop("embedding"),
    "version 99": lambda about, _: about.update(version="99"),
    "sizes as an object": lambda about, _: about.update(sizes="{}"),
    "options as a list": lambda about, _: about.update(embedding="[]"),
    "bits of the wrong type": lambda about, _: about.update(sizes='["60", 8]'),
    "more dimensions": lambda about, _: about.update(sizes="[60, 1000000000]"),
    "fewer words": lambda about, _: about.update(sizes="[59, 8]"),
    "another method": lambda about, _: about.update(embedding='{"method": "x"}'),
    "no words": lambda _, arrays: arrays.pop("words"),
    "no codes": lambda _, arrays: arrays.pop(next(name for name in arrays if name.startswith("streams"))),
    "no scales": lambda _, arrays: arrays.pop("row_scales"),
    "no signs": lambda _, arrays: arrays.update(signs=arrays["signs"][:3]),
    "scales of another type": lambda _, arrays: arrays.update(row_scales=arrays["row_scales"].view(np.int32)),
    "codes of another type": lambda _, arrays: arrays.update(
        {name: array.astype(np.float32) for name, array in arrays.items() if name.startswith("streams")}
    ),
    "scales of another shape": lambda _, arrays: arrays.update(
        row_scales=arrays["row_scales"].reshape(1, -1)
    ),
    "fewer scales": lambda _, arrays: arrays.update(row_scales=arrays["row_scales"][:-1]),
    "an infinite scale": lambda _, arrays: arrays.update(
        row_scales=np.full_like(arrays["row_scales"], np.inf)
    ),
    "widths that do not sum": lambda _, arrays: arrays.update(widths=np.full_like(arrays["widths"], 2)),
    "widths that no codec has": lambda _, arrays: arrays.update(widths=arrays["widths"] + 11),
}


def test_the_loader_fails_on_malformed_files(tmp_path: Path) -> None:
    """By ValueError, with the name of the file, for each of `TAMPERINGS` and wherever the file ends."""
    text, small = tmp_path / "vectors.vec", tmp_path / "small.safetensors"
    rows = np.random.default_rng(0).standard_normal((60, 8)).astype(np.float32)
    write_vectors(text, WordVectors([f"w{word}" for word in range(60)], rows))
    compress(CompressOptions(model=text, method="quantized", output=small, bits=2.5), codec="trellis")
    loader, content = loader_of(tmp_path), small.read_bytes()
    assert loader.load(small).vectors.shape == (60, 8)
    damaged = tmp_path / "damaged.safetensors"
    for size in (0, 5, 8, 100, len(content) // 2, len(content) - 1):
        damaged.write_bytes(content[:size])
        with pytest.raises(ValueError, match=f"{damaged}: "):
            loader.load(damaged)
    for name, tamper in TAMPERINGS.items():
        with safe_open(small, "np") as file:
            about, arrays = dict(file.metadata()), {key: file.get_tensor(key) for key in file.keys()}
        tamper(about, arrays)
        save_file({key: np.ascontiguousarray(array) for key, array in arrays.items()}, damaged, about)
        with pytest.raises(ValueError, match=f"{damaged}: "):
            loader.load(damaged)
            pytest.fail(f"{name} passed")


def loader_of(folder: Path) -> Any:
    """The module that `compress` wrote into a folder."""
    spec = importlib.util.spec_from_file_location("loader", folder / "load_vectors.py")
    assert spec is not None and spec.loader is not None
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    return loader


def test_bits_go_to_directions_with_large_variance(text: Path, tmp_path: Path) -> None:
    """Rotations that do not depend on the table need more bits for the same error."""
    errors = {}
    for codec in ("spectral", "trellis"):
        small = tmp_path / f"{codec}.safetensors"
        options = CompressOptions(model=text, method="quantized", output=small, bits=2.0)
        report = compress(options, codec=codec).report
        errors[codec] = report.tables[0].fit.relative_error
    assert errors["spectral"] < 0.5 * errors["trellis"]


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "vectors.kv"
    path.write_bytes(pickle.dumps({"class": "gensim.models.keyedvectors KeyedVectors"}))
    with pytest.raises(ValueError, match="save_word2vec_format"):
        read_vectors(path)
