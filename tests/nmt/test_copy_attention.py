"""Copy attention beside a shared embedding: its words come from the embedding, the others from the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shared_embeddings as se
from nmt.checkpoint.build import describe_checkpoint
from nmt.checkpoint.checkpoint import read_weights
from nmt.checkpoint.files import read_checkpoint
from nmt.model.embeddings import shared_embeddings_of, words_module
from tests.nmt.conftest import FUNNEL, Host, Trained, run
from tests.nmt.test_compression import UNTIED, compress
from tests.nmt.test_output_embedding import built
from tests.nmt.test_training import METHODS
from tests.nmt.test_trim import SOURCE, TARGET, trim

pytestmark = pytest.mark.usefixtures("installed_host")

PADDING = 1


def by_hand(generator: Any, hidden: Tensor, attention: Tensor, source: Tensor) -> Tensor:
    """Pointer-generator networks, Eq. 9: ``p(w) = p_copy sum attention + (1 - p_copy) p_vocabulary``.

    Args:
        hidden: ``(N, D)`` of one sentence.
        attention: ``(N, S)``.
        source: ``(S, W)`` one-hot, which of its own words each place of the sentence has.
    """
    embedding = generator.linear.embedding
    log_probs = embedding.log_prob(hidden)
    words = torch.arange(embedding.num_embeddings) != PADDING
    vocabulary = torch.zeros_like(log_probs)
    vocabulary[:, words] = log_probs[:, words].softmax(dim=1)
    copying = torch.sigmoid(hidden @ generator.linear_copy.weight.T + generator.linear_copy.bias)
    return torch.cat([(1 - copying) * vocabulary, copying * (attention @ source)], dim=1)


@pytest.mark.slow_except("standard")
@pytest.mark.parametrize("method", METHODS)
def test_words_are_mixed_as_the_equation_says(method: str, trained: Trained) -> None:
    host, path = trained(embedding=METHODS[method], copy_attn=True)
    model = built(path)
    generator, embedding = model.generator, model.decoder.embeddings.emb_luts[0]
    assert generator.linear.embedding is embedding and shared_embeddings_of(model) == [embedding]
    hidden = torch.randn(5, 16)
    attention, source = torch.rand(5, 4).softmax(dim=1), torch.eye(3)[[0, 1, 2, 1]]
    found = generator(hidden, attention, source.unsqueeze(0))
    torch.testing.assert_close(found, by_hand(generator, hidden, attention, source))
    torch.testing.assert_close(found.sum(dim=1), torch.ones(5))

    gradients = []
    for probabilities in (found, by_hand(generator, hidden, attention, source)):
        model.zero_grad()
        probabilities[:, [5, 30, 70, -1]].log().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in generator.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    assert len(host.translate(path)) == 7


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_tensors_and_counts(is_tied: bool, trained: Trained) -> None:
    tying = {"embedding": FUNNEL} if is_tied else {"output_embedding": FUNNEL, **UNTIED}
    _, path = trained(copy_attn=True, **tying)
    _, body, head = read_weights(str(path))
    own = {"linear_copy.weight", "linear_copy.bias"}
    funnel = {f"linear.embedding.{name}" for name in built(path).generator.linear.embedding.state_dict()}
    assert head.keys() == (own if is_tied else own | funnel)
    counts = describe_checkpoint(path)
    size = se.num_parameters("funnel", num_embeddings=88, embedding_dim=16, rank=4)
    gate = 16 + 1
    assert counts["output"] == gate + (0 if is_tied else size)
    assert counts["total"] == sum(parameter.numel() for parameter in built(path).parameters())
    assert counts["stored_bits"] == 32 * counts["total"]
    tables = 1 if is_tied else 3
    assert counts["dense_total"] == tables * 88 * 16 + gate + counts["rest"]


def test_training_goes_on_from_a_checkpoint(host: Host) -> None:
    options = {"embedding": FUNNEL, "copy_attn": True}
    whole = read_weights(str(host.train("whole", **options)))[1:]
    half = host.folder / "whole_step_3.pt"
    host.train("half", "-train_from", str(half), **options)
    again = read_weights(str(host.folder / "half_step_6.pt"))[1:]
    for part, resumed in zip(whole, again, strict=True):
        assert part.keys() == resumed.keys() and all(torch.equal(part[name], resumed[name]) for name in part)


def test_half_precision_trains(host: Host) -> None:
    path = host.train("model", embedding=FUNNEL, copy_attn=True, autocast="bf16", train_steps=2)
    assert all(
        torch.isfinite(tensor).all() for tensor in read_weights(str(host.folder / path.name))[1].values()
    )


@pytest.mark.slow_except("pytorch-tied")
@pytest.mark.parametrize("options", [{}, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("save_format", ["pytorch", "safetensors"])
def test_upstreams_own_model_is_compressed(
    options: dict[str, Any], save_format: str, trained: Trained, tmp_path: Path
) -> None:
    host, path = trained(copy_attn=True, save_format=save_format, **options)
    assert len(host.translate(path)) == 7
    same, small = tmp_path / "same.pt", tmp_path / "small.pt"
    compress(path, "standard", same)
    compress(path, "projective", small, "--rank", 4)
    before, after = built(path).generator, built(same).generator
    asked = torch.randn(5, 16), torch.rand(5, 4).softmax(dim=1), torch.eye(3)[[0, 1, 2, 1]].unsqueeze(0)
    torch.testing.assert_close(after(*asked), before(*asked))
    methods = [embedding.method for embedding in shared_embeddings_of(built(small))]
    assert methods == ["projective"] * (3 if options else 1)
    assert torch.equal(built(small).generator.linear_copy.weight, before.linear_copy.weight)
    assert len(host.translate(small)) == 7
    further = ["-train_from", str(small), "-train_steps", "2"]
    run("onmt_train", "-config", str(host.config("further", copy_attn=True, **options)), *further)


@pytest.mark.parametrize("options", [{}, {"embedding": FUNNEL}], ids=["upstream's own", "shared embedding"])
def test_trimmed_model_copies(options: dict[str, Any], trained: Trained, tmp_path: Path) -> None:
    host, path = trained(copy_attn=True, **options)
    texts = tmp_path / "text.src", tmp_path / "text.tgt"
    for text, content in zip(texts, (SOURCE, TARGET)):
        text.write_text(content)
    output = tmp_path / "trimmed.pt"
    assert trim("--model", path, "--text", *texts, "--output", output) == 0
    words = read_checkpoint(path)["vocab"]["tgt"]
    kept = [words.index(word) for word in read_checkpoint(output)["vocab"]["tgt"]]
    before, after = built(path), built(output)
    tables = [_table(words_module(model, "output")) for model in (before, after)]
    torch.testing.assert_close(tables[1], tables[0][kept])
    host.write("covered", SOURCE.splitlines())
    assert len(host.translate(output, source="covered")) == 3


def _table(module: Any) -> Tensor:
    """The table of an output layer of either kind."""
    return module.table() if isinstance(module, se.SharedEmbedding) else module.weight.detach()


@pytest.mark.slow_except("tied")
@pytest.mark.parametrize("options", [{}, UNTIED], ids=["tied", "untied"])
def test_distilled_from_a_copying_teacher(options: dict[str, Any], trained: Trained, host: Host) -> None:
    _, teacher = trained(copy_attn=True, **options)
    full = built(teacher).generator
    asked = {"embedding_distillation": {"teacher": str(teacher), "alpha": 0.5}, "copy_attn": True}
    embedding = "output_embedding" if options else "embedding"
    still = {"train_steps": 1, "learning_rate": 0.0}
    student = built(
        host.train("student", **{embedding: {"method": "projective", "rank": 4}}, **asked, **still, **options)
    )
    assert torch.equal(student.generator.linear_copy.weight, full.linear_copy.weight)
    fitted = student.generator.linear.embedding
    torch.testing.assert_close(fitted.output_bias(), full.linear.bias, rtol=0, atol=1e-6)
    table = full.linear.weight.detach().double()
    if not options:
        table[PADDING] = 0  # of no account to a look-up
    left, values, right = torch.linalg.svd(table, full_matrices=False)
    nearest = ((left[:, :4] * values[:4]) @ right[:4]).float()
    torch.testing.assert_close(fitted.table(), nearest, rtol=1e-4, atol=1e-5)


def test_ctranslate2_is_refused(trained: Trained, tmp_path: Path, refusal: Any) -> None:
    _, path = trained(embedding=FUNNEL, copy_attn=True)
    output = str(tmp_path / "model")
    message = refusal("onmt_release_model", "-model", str(path), "-output", output, "-format", "ctranslate2")
    assert "copy_attn: true" in message and "format: pytorch" in message
