"""Compressing language models, also the map of a DeFINE unit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shared_embeddings as se
from lm import models
from lm.adapter import CheckpointModel
from lm.checkpoint import load_model, save_model
from lm.models import LanguageModel
from shared_embeddings.quant.packed_tensor import PackedTensor, unfreeze
from shared_embeddings.quant.storage import HEADER, STORES
from tests.helpers import alter, arguments, example
from tests.lm.runs import command, compress, settings, small_corpus, tool, write_corpus, write_model
from tests.lm.runs import run as train

pytestmark = pytest.mark.usefixtures("installed_host")

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
WORDS, DIMENSION = 400, 16


def scores(path: Path) -> torch.Tensor:
    """The log-probabilities of a generated text."""
    return scores_of(load_model(path).model)


def write_scores(output: str, *files: str) -> None:
    """Write the scores of models, by the names of their files."""
    torch.set_num_threads(1)
    torch.save({Path(file).name: scores(Path(file)) for file in files}, output)


def scores_of(model: LanguageModel) -> torch.Tensor:
    """Like `scores`, for a model in memory."""
    ids = torch.randint(model.embedding.num_embeddings, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.embedding.log_prob(model(ids, model.initial_state(2)).hidden)


@pytest.mark.slow_except("projective-arguments1-awd_lstm")
@pytest.mark.parametrize("kind", ["awd_lstm", "transformer_xl"])
@pytest.mark.parametrize(("method", "arguments"), [("standard", []), ("projective", ["--rank", 8])])
def test_full_size_keeps_the_scores(tmp_path: Path, kind: str, method: str, arguments: list[object]) -> None:
    model = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus"), kind)
    assert compress(model, method, tmp_path / "same.pt", *arguments).status == 0
    torch.testing.assert_close(scores(tmp_path / "same.pt"), scores(model), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_compressed_model_can_be_evaluated_and_trained(tmp_path: Path) -> None:
    data = small_corpus(tmp_path)
    plain = {"method": "standard", "output_bias": True}
    train(settings(data, tmp_path / "run", embedding=plain, steps=5))
    model, small, report = tmp_path / "run" / "last.pt", tmp_path / "small.pt", tmp_path / "report.json"
    assert compress(model, "standard", tmp_path / "same.pt").status == 0
    torch.testing.assert_close(scores(tmp_path / "same.pt"), scores(model), atol=1e-4, rtol=0)
    assert load_model(tmp_path / "same.pt").model.embedding.output_bias() is not None
    asked = ["--rank", 4, "--report", report, "--force", "--text", tmp_path / "train.txt"]
    assert compress(model, "funnel", small, "--fit-steps", 50, *asked).status == 0
    assert load_model(small).training is None
    found = json.loads(report.read_text())
    assert (
        not any("bias" in note for note in found["notes"]) and found["tables"][0]["fit"]["weighted_error"] > 0
    )
    kept, bias = (load_model(path).model.embedding.output_bias() for path in (small, model))
    assert bias is not None and bias.abs().max() > 0
    assert torch.equal(kept, bias)
    without = [*asked, "--fit-steps", 1, "--output-bias", "false"]
    assert compress(model, "funnel", tmp_path / "without.pt", *without).status == 0
    assert any("output bias is dropped" in note for note in json.loads(report.read_text())["notes"])
    assert command("lm_evaluate", "-model", small, "-data", data).status == 0
    own = load_model(small).config["embedding"]
    train(settings(data, tmp_path / "further", init_from=str(small), embedding=own, steps=2))
    assert load_model(tmp_path / "further" / "last.pt").config["embedding"]["rank"] == 4


def wide_model(path: Path, words: int = WORDS, dimension: int = DIMENSION, **settings: object) -> Path:
    """A checkpoint of an untrained model in which the table is most of the weights; gives its path."""
    torch.manual_seed(3)
    options = {"embedding_dim": dimension, "hidden_dim": 12, "num_layers": 2}
    config = {"model": "awd_lstm", "embedding": {"method": "standard", **settings}, **options}
    vocabulary = ["<eos>", "<unk>", *(f"w{number}" for number in range(words - 2))]
    model = models.build("awd_lstm", vocabulary, config["embedding"], options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    save_model(path, model, vocabulary, config, None)
    return path


@pytest.mark.slow
def test_a_new_process_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = wide_model(tmp_path / "model.pt"), tmp_path / "small"
    kept: dict[str, torch.Tensor] = {}
    write = CheckpointModel.write

    def recording(self: CheckpointModel, path: Path, weights: dict[str, torch.Tensor], *card: str) -> None:
        kept[path.name] = scores_of(self.module)
        write(self, path, weights, *card)

    monkeypatch.setattr(CheckpointModel, "write", recording)
    for method in se.methods():
        options = arguments(example(method, WORDS, DIMENSION))
        for store in STORES:
            output = folder / f"{method}_{store}.pt"
            assert compress(model, method, output, *options, "--fit-steps", 5, "--store", store).status == 0
    code = "import sys; from tests.lm.test_compression import write_scores; write_scores(*sys.argv[1:])"
    again = [sys.executable, "-c", code, tmp_path / "found", *sorted(folder.iterdir())]
    subprocess.run(again, cwd=ROOT, env=ENVIRONMENT, check=True)
    computed = torch.load(tmp_path / "found", weights_only=True)
    assert computed.keys() == kept.keys() and len(kept) == len(STORES) * len(se.methods())
    assert [name for name in kept if not torch.equal(kept[name], computed[name])] == []
    for method in se.methods():
        _check_ties(folder / f"{method}_int8.pt")


@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method in se.methods() if method != "standard"])
def test_every_method_reaches_a_target(tmp_path: Path, method: str) -> None:
    words = 1000  # the codebooks of ALONE are larger than a table of 500 words
    model, small = wide_model(tmp_path / "model.pt", words), tmp_path / "small.pt"
    assert compress(model, method, small, "--target-ratio", 1.5, "--fit-steps", 2).status == 0
    embedding = load_model(small).model.embedding
    assert embedding.method == method
    assert embedding.counts()["stored_bits"] <= 32 * words * DIMENSION / 1.5


def _check_ties(path: Path) -> None:
    """One copy of the embedding in the file, and gradients from the input and from the output."""
    embedding = load_model(path).model.embedding
    unfreeze(embedding)
    embedding.train()
    saved = torch.load(path, weights_only=True)["model"]
    names = [name for name in saved if name.startswith("embedding.") and not name.endswith(".scale")]
    assert len(names) == len(embedding.state_dict())
    kinds = {name: saved[name].dtype for name in names}
    assert torch.int8 in kinds.values() or kinds["embedding.row_scales"] == torch.uint8
    ids = torch.arange(WORDS)
    scored = embedding.log_prob(torch.ones(2, DIMENSION))
    sides = ((embedding(ids), embedding.input_parameters()), (scored, embedding.output_parameters()))
    assert embedding.counts()["shared"] > 0
    for values, parameters in sides:
        weights = torch.linspace(-1, 2, values.numel()).view(values.shape)
        gradients = torch.autograd.grad((values * weights).sum(), list(parameters))
        assert all(bool(gradient.any()) for gradient in gradients)


@pytest.mark.slow
def test_bytes_on_disk_match_the_report(tmp_path: Path) -> None:
    model = wide_model(tmp_path / "model.pt", words=8000, dimension=24)
    report = tmp_path / "report.json"
    table = 8000 * 16
    numbers = {"fp32": 4 * table, "fp16": 2 * table, "int8": table + 2 * 8000}
    for store in STORES:
        output = tmp_path / f"{store}.pt"
        asked = ["--rank", 16, "--store", store, "--report", report, "--force"]
        assert compress(model, "projective", output, *asked).status == 0
        written = json.loads(report.read_text())
        # Names, vocabulary, settings and container: the same checkpoint with all its tensors empty.
        saved = torch.load(output, weights_only=True)
        saved["model"] = {name: torch.empty(0, dtype=value.dtype) for name, value in saved["model"].items()}
        torch.save(saved, tmp_path / "empty.pt")
        rest = (tmp_path / "empty.pt").stat().st_size
        weights = written["bytes_of_weights"]["after"]
        assert abs(output.stat().st_size - rest - weights) < 0.02 * weights
        assert 0 < written["tables"][0]["stored_bytes"]["after"] - numbers[store] <= 4 * 16 * 24


@pytest.mark.parametrize("store", ["fp32", "fp16", "int8"])
def test_the_output_bias_is_copied_and_stored_in_fp16(tmp_path: Path, store: str) -> None:
    model = wide_model(tmp_path / "model.pt", words=400, output_bias=True)
    small, report = tmp_path / "small.pt", tmp_path / "report.json"
    assert compress(model, "quantized", small, "--bits", 4, "--store", store, "--report", report).status == 0
    bias = torch.load(model, weights_only=True)["model"]["embedding.bias"]
    kept = torch.load(small, weights_only=True)["model"]["embedding.bias"]
    assert torch.equal(kept, bias if store == "fp32" else bias.half())
    tensors = torch.load(small, weights_only=True)["model"]
    weights = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("embedding."))
    assert abs(json.loads(report.read_text())["tables"][0]["stored_bytes"]["after"] - weights) <= 64


def test_packed_models_are_evaluated_and_trained(tmp_path: Path) -> None:
    data = small_corpus(tmp_path)
    sizes = {"embedding_dim": 24, "steps": 2}
    train(settings(data, tmp_path / "run", embedding={"method": "standard"}, **sizes))
    small, report = tmp_path / "small.pt", tmp_path / "report.json"
    asked = ["--rank", 12, "--store", "int8", "--report", report, "--verbose"]
    ended = compress(tmp_path / "run" / "last.pt", "projective", small, *asked)
    assert ended.status == 0 and "relative error in int8" in ended.out
    content = json.loads(report.read_text())["bytes_of_weights"]
    smaller = content["before"] / content["after"]
    assert f"{small}: weights of {content['after'] / 1000:.1f} kB instead of " in ended.out
    assert f"({smaller:.1f}x smaller)" in ended.out
    assert HEADER in torch.load(small, weights_only=True)["model"]
    embedding = load_model(small).model.embedding
    assert {type(parameter) for parameter in embedding.parameters()} == {PackedTensor}
    assert 0 < json.loads(report.read_text())["tables"][0]["storage"]["added_error"] < 0.05
    assert command("lm_evaluate", "-model", small, "-data", data).status == 0
    assert command("lm_generate", "-model", small, "-length", 3).status == 0
    packed = {"method": "projective", "rank": 12}
    train(settings(data, tmp_path / "on", init_from=str(small), embedding=packed, **sizes))
    written = torch.load(tmp_path / "on" / "last.pt", weights_only=True)["model"]
    assert HEADER not in written and written["embedding.codes"].dtype == torch.float32
    assert compress(small, "standard", tmp_path / "again.pt").status == 0
    torch.testing.assert_close(scores(tmp_path / "again.pt"), scores(small), atol=1e-4, rtol=0)


def test_files_named_by_options_are_not_replaced(tmp_path: Path) -> None:
    pytest.importorskip("gensim")
    model = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus"))
    classes = tmp_path / "classes.npz"
    (tmp_path / "text").write_text("a b c d\nc d e f\n" * 9)
    (tmp_path / "words").write_text("a\nb\nc\nd\ne\nf\ng\n")
    asked = ["--text", tmp_path / "text", "--vocab", tmp_path / "words", "--num-classes", 2, "--dim", 4]
    assert tool("classes", *asked, "--output", classes).status == 0
    before = classes.read_bytes()
    options = ["--classes", classes, "--unique-dim", 2, "--force"]
    for further in ([classes], [tmp_path / "small.pt", "--report", classes]):
        assert compress(model, "uncle", *further, *options).says(
            f"{classes} would replace the file of --classes"
        )
    assert classes.read_bytes() == before


UNIT = ["--map-dim", 4, "--expand-dim", 8, "--depth", 2, "--max-groups", 2]
NUM_WORDS, DIM, MAP = 120, 12, 8
DEFINE = {"map_dim": MAP, "expand_dim": 24, "depth": 2, "max_groups": 2, "output_bias": True}


def define_model(path: Path) -> Path:
    """Like `wide_model`, but it ends in the width of the map of its unit."""
    return wide_model(path, NUM_WORDS, DIM, method="define", **DEFINE)


def test_only_the_map_is_replaced_by_codes(tmp_path: Path) -> None:
    model, small, report = define_model(tmp_path / "model.pt"), tmp_path / "small.pt", tmp_path / "report"
    codes = ["--num-codebooks", 4, "--codebook-size", 16, "--fit-steps", 20, "--seed", 5, "--store", "fp32"]
    assert compress(model, "compositional_code", small, *codes, "--report", report).status == 0
    old, new = load_model(model).model.embedding, load_model(small).model.embedding
    # The codes of the map equal those of a fit to its table, in both directions.
    options = {"num_codebooks": 4, "codebook_size": 16, "output_bias": True}
    wanted, _ = se.fit("compositional_code", old.inner_embedding().table(), seed=5, steps=20, **options)
    table = sum(wanted.codebooks[m][wanted.codes[:, m].long()] for m in range(4))
    torch.testing.assert_close(new.inner_embedding().table(), table)
    before, after = old.state_dict(), new.state_dict()
    rest = [name for name in before if not name.startswith("map.")]
    assert len(rest) >= 4 and all(torch.equal(after[name], before[name]) for name in rest)
    entry = new.entry(table)
    read = new.scale * torch.cat([entry, new.expansion(entry)], dim=1)
    torch.testing.assert_close(new.table(), new.reducer(read))
    bias = old.output_bias()
    assert bias is not None and torch.equal(new.output_bias(), bias)
    hidden = torch.randn(3, MAP, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(new.logits(hidden), hidden @ table.T + bias)
    # 4 codes of 4 bits for a word, and codebooks of 4 x 16 x 8 numbers; a bias for every word.
    (found,) = json.loads(report.read_text())["tables"]
    numbers = 4 * 16 * MAP + NUM_WORDS
    assert found["part"] == "map of define" and found["uses"] == ["input", "output"]
    assert found["parameters"] == {"before": NUM_WORDS * MAP + NUM_WORDS, "after": numbers}
    assert found["stored_bytes"]["after"] == 4 * numbers + NUM_WORDS * 4 * 4 // 8
    error = (old.inner_embedding().table() - table).norm() / old.inner_embedding().table().norm()
    assert found["fit"]["relative_error"] == pytest.approx(error.item(), rel=1e-4)


@pytest.mark.parametrize("store", ["fp32", "int8"])
def test_a_map_of_full_size_keeps_the_scores(tmp_path: Path, store: str) -> None:
    model, small = define_model(tmp_path / "model.pt"), tmp_path / "small.pt"
    assert compress(model, "projective", small, "--rank", MAP, "--store", store).status == 0
    tolerance = 1e-4 if store == "fp32" else 0.1
    torch.testing.assert_close(scores(small), scores(model), atol=tolerance, rtol=0)
    names = {name for name in torch.load(small, weights_only=True)["model"] if name.endswith(".scale")}
    # The layers after the map are not fitted, and stay in 32 bits.
    assert names == (set() if store == "fp32" else {"embedding.map.codes.scale"})


@pytest.mark.parametrize(
    ("kind", "method", "options", "printed"),
    [
        ("wide", "define", UNIT, "takes 4 dimensions, but the model ends in 16"),
        ("map", "define", UNIT, "option 'map' is 'define'"),
        ("large", "standard", ["--store", "fp16"], "but fp16 is limited to 65504"),
        ("newer", "standard", [], "packed in version 2, but this program supports 1"),
    ],
)
def test_user_errors_are_one_line(
    tmp_path: Path, kind: str, method: str, options: list[object], printed: str
) -> None:
    path, small = tmp_path / "model.pt", tmp_path / "small.pt"
    model = define_model(path) if kind == "map" else wide_model(path)
    if kind == "large":
        alter(model, lambda content: content["model"]["embedding.weight"].mul_(1e6))
    elif kind == "newer":
        header = torch.tensor(list(b'{"version":2,"tensors":{}}'), dtype=torch.uint8)
        alter(model, lambda content: content["model"].update({HEADER: header}))
    assert compress(model, method, small, *options).says(printed) and not small.exists()
