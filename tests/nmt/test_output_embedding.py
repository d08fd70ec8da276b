"""An output layer with its own embedding: training, compression, trimming, distillation and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shared_embeddings as se
from nmt.checkpoints import read_checkpoint, read_weights
from nmt.embeddings import shared_embeddings_of, words_module
from nmt.models import describe_checkpoint
from shared_embeddings.quant.storage import STORES
from tests.nmt.conftest import FUNNEL, Capture, Host, Trained, built, nearest, run
from tests.nmt.test_compression import UNTIED, as_arguments, compress, scores
from tests.nmt.test_training import METHODS
from tests.nmt.test_trim_and_export import SOURCE, TARGET, assert_same_scores, trim

pytestmark = pytest.mark.usefixtures("installed_host")


@pytest.mark.slow_except("uncle")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_scores_words_of_a_plain_model(method: str, host: Host) -> None:
    options = {"embedding": None, "output_embedding": METHODS[method], **UNTIED}
    first = host.train("model", **options, train_steps=1, save_checkpoint_steps=1)
    further = ["-train_from", str(first), "-train_steps", "2"]
    run("onmt_train -config", host.config("model", **options), *further)
    last = host.folder / "model_step_2.pt"
    model = built(last)
    (embedding,) = shared_embeddings_of(model)
    assert embedding is model.generator.embedding and embedding.padding_idx is None
    before = dict(built(first).generator.named_parameters())
    changed = [name for name, now in model.generator.named_parameters() if not torch.equal(now, before[name])]
    assert changed == list(before)
    sizes = {name: value for name, value in METHODS[method].items() if name != "method"}
    counts = describe_checkpoint(last)
    assert counts["output"] == se.num_parameters(method, num_embeddings=88, embedding_dim=16, **sizes)
    assert counts["embedding"] == counts["dense_embedding"] == 2 * 88 * 16
    assert counts["dense_total"] == 3 * 88 * 16 + counts["rest"]
    assert counts["total"] == sum(parameter.numel() for parameter in model.parameters())
    _, body, head = read_weights(str(last))
    assert sum(tensor.numel() for tensor in head.values()) >= counts["output"]
    assert not [name for name in body if name.startswith("generator")]
    assert len(host.translate(last)) == 7


def test_each_side_has_its_own_embedding(host: Host, capfd: Capture) -> None:
    own = {"src_embedding": METHODS["projective"], "output_embedding": METHODS["structured"]}
    model = built(host.train("model", tgt_embedding=FUNNEL, **own, **UNTIED))
    methods = [embedding.method for embedding in shared_embeddings_of(model)]
    assert methods == ["projective", "funnel", "structured"]
    assert "output: structured StructuredOptions" in capfd.readouterr().err


@pytest.mark.slow_except("pytorch")
@pytest.mark.parametrize("save_format", ["pytorch", "safetensors"])
def test_upstream_model_keeps_its_scores(trained: Trained, tmp_path: Path, save_format: str) -> None:
    """Its output layer with its bias becomes an embedding, like its two tables."""
    host, model = trained(save_format=save_format, **UNTIED)
    same, small = tmp_path / "same.pt", tmp_path / "small.pt"
    compress(model, "standard", same)
    torch.testing.assert_close(scores(same), scores(model), atol=1e-5, rtol=0)
    compress(same, "projective", small, "--rank", 16)
    torch.testing.assert_close(scores(small), scores(model), atol=1e-4, rtol=0)
    assert [embedding.method for embedding in shared_embeddings_of(built(small))] == ["projective"] * 3
    assert len(host.translate(small)) == 7


@pytest.mark.slow_except("standard")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_loaded_as_fitted(method: str, trained: Trained, tmp_path: Path) -> None:
    host, model = trained(**UNTIED)
    layer = built(model).generator
    options = {name: value for name, value in METHODS[method].items() if name != "method"}
    fitting = {"seed": 3, "steps": 20, "output_bias": True}
    words = read_checkpoint(model)["vocab"]["tgt"]
    fitted, _ = se.fit(method, layer.weight.detach(), words=words, **fitting, **options)
    fitted.set_output_bias(layer.bias.detach())
    output = {store: tmp_path / f"{store}.pt" for store in STORES}
    for store, path in output.items():
        compress(
            model, method, path, *as_arguments(options), "--fit-steps", 20, "--seed", 3, "--store", store
        )
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    found = built(output["fp32"]).generator.embedding
    assert torch.equal(found.log_prob(hidden), fitted.eval().log_prob(hidden))
    stored = read_weights(str(output["int8"]))[2]
    assert stored.keys() == {f"embedding.{name}" for name in found.state_dict()}
    assert all(len(host.translate(output[store])) == 7 for store in ("int8", "int4"))


@pytest.mark.slow_except("adaptive")
@pytest.mark.parametrize("method", ["projective", "adaptive"])
def test_trimmed_output_keeps_its_scores(
    method: str, trained: Trained, tmp_path: Path, capsys: Capture
) -> None:
    host, model = trained(output_embedding=METHODS[method], **UNTIED)
    texts = tmp_path / "text.src", tmp_path / "text.tgt"
    for path, content in zip(texts, (SOURCE, f"{TARGET}v20 w30\n")):  # a word of every band
        path.write_text(content)
    output = tmp_path / "trimmed.pt"
    capsys.readouterr()
    assert trim("--model", model, "--text", *texts, "--output", output) == 0
    assert ("bands" in capsys.readouterr().out) == (method == "adaptive")
    assert len(read_checkpoint(output)["vocab"]["tgt"]) == built(output).generator.embedding.num_embeddings
    if method == "projective":
        assert_same_scores(output, model)
    host.write("covered", SOURCE.splitlines())
    assert len(host.translate(output, source="covered")) == 3


@pytest.mark.slow_except("untied teacher")
@pytest.mark.parametrize(
    ("is_tied", "copying"),
    [(False, {}), (True, {}), (False, {"copy_attn": True})],
    ids=["untied teacher", "tied teacher", "copying"],
)
def test_distilled_from_the_output_layer_of_the_teacher(
    is_tied: bool, copying: dict[str, Any], trained: Trained, host: Host
) -> None:
    _, teacher = trained(share_embeddings=False, share_decoder_embeddings=is_tied, **copying)
    full = built(teacher)
    settings: dict[str, Any] = {"embedding_distillation": {"teacher": str(teacher), "alpha": 0.5}, **copying}
    settings["output_embedding"] = {"method": "projective", "rank": 4}
    student = host.train("student", **UNTIED, **settings, train_steps=1, learning_rate=0.0)
    model, layer = built(student), full.generator.linear if copying else full.generator
    (embedding,) = shared_embeddings_of(model)
    torch.testing.assert_close(embedding.table(), nearest(layer.weight), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(embedding.output_bias(), layer.bias, rtol=0, atol=1e-6)
    for side in ("source", "target"):
        tables = [words_module(one, side).weight for one in (model, full)]  # type: ignore[union-attr]
        assert torch.equal(*tables)
    if copying:
        assert torch.equal(model.generator.linear_copy.weight, full.generator.linear_copy.weight)
    assert read_checkpoint(student)["opt"].output_embedding["method"] == "projective"
    again = host.config("further", **copying)
    run("onmt_train -train_steps 2 -config", again, "-train_from", student)
