"""Training, saving, loading and translating, for every method and kind of tying."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import yaml

import shared_embeddings as se
from nmt.checkpoints import read_checkpoint, read_weights
from nmt.embeddings import SharedGenerator, shared_embeddings_of
from nmt.models import describe_checkpoint
from shared_embeddings.modules.alone import AloneEmbedding
from shared_embeddings.nn.layers import Dropout
from tests.helpers import example
from tests.nmt.conftest import FUNNEL, Capture, Host, Patch, Trained, built, run, weights

# Every method with its example for a vocabulary of about this size.
METHODS: dict[str, dict[str, Any]] = {
    name: {"method": name, **example(name, 88, 16)} for name in se.methods()
}
DEFINE_MAP = {"method": "define", "map_dim": 8, "expand_dim": 32, "depth": 2, "max_groups": 2}
DEFINE_MAP["output_projection"] = True
RNN = {"encoder_type": "rnn", "decoder_type": "rnn", "position_encoding": False}
KINDS = {"funnel": {"embedding": FUNNEL}, "plain": {}, "copying": {"embedding": FUNNEL, "copy_attn": True}}
MODES = METHODS | {"define_delight": {**METHODS["define"], "unit": "delight"}}


@pytest.mark.slow_except("standard")
@pytest.mark.parametrize("method", MODES)
def test_train_save_load_translate(method: str, trained: Trained) -> None:
    host, checkpoint = trained(embedding=MODES[method])
    model = built(checkpoint)
    assert isinstance(model.generator, SharedGenerator)
    (embedding,) = shared_embeddings_of(model)
    assert model.encoder.embeddings.emb_luts[0] is embedding
    assert model.decoder.embeddings.emb_luts[0] is embedding
    assert model.generator.embedding is embedding
    counts = describe_checkpoint(checkpoint)
    expected = se.num_parameters(num_embeddings=88, embedding_dim=16, **MODES[method])
    assert counts["embedding"] == expected == sum(p.numel() for p in embedding.parameters())
    assert counts["total"] == sum(parameter.numel() for parameter in model.parameters())
    assert counts["step"] == 6
    lines = host.translate(checkpoint)
    assert len(lines) == 7


@pytest.mark.slow_except("factor: 1, width: 6, output_bias: true")
@pytest.mark.parametrize(
    "options", ["factor: 1, width: 6, output_bias: true", "factor: 2, head_projection: input"]
)
def test_adaptive_bands_on_the_command_line(options: str, host: Host) -> None:
    text = f"{{method: adaptive, cutoffs: [20, 50], {options}}}"
    checkpoint = host.train("model", "-embedding", text, train_steps=1)
    stored = describe_checkpoint(checkpoint)
    settings = yaml.safe_load(text)
    assert stored["config"]["embedding"] == settings
    assert stored["embedding"] == se.num_parameters(
        settings.pop("method"), num_embeddings=88, embedding_dim=16, **settings
    )
    assert len(host.translate(checkpoint)) == 7


def test_checkpoint_has_each_tensor_once(trained: Trained, capsys: Capture) -> None:
    _, checkpoint = trained(embedding=FUNNEL)
    saved, body, head = read_weights(str(checkpoint))
    assert head == {}
    pointers = [tensor.data_ptr() for tensor in body.values()]
    assert len(pointers) == len(set(pointers))
    assert sum(tensor.numel() for tensor in body.values()) == describe_checkpoint(checkpoint)["total"]
    released = checkpoint.parent / "released.pt"
    run("onmt_release_model -model", checkpoint, "-output", released)
    size = 4 * describe_checkpoint(released)["total"]
    assert size < released.stat().st_size < size + 25_000  # names, options and vocabulary
    assert f"released.pt: {released.stat().st_size:,} bytes" in capsys.readouterr().out


@pytest.mark.slow_except("options5-2-True")
@pytest.mark.parametrize(
    ("options", "distinct", "tied"),
    [
        ({"share_embeddings": False}, 2, True),
        ({"share_decoder_embeddings": False}, 1, False),
        ({"share_embeddings": False, "share_decoder_embeddings": False}, 2, False),
        ({"embedding": None, "src_embedding": FUNNEL, "share_embeddings": False}, 1, False),
        ({"embedding": None, "tgt_embedding": DEFINE_MAP, "share_embeddings": False}, 1, True),
        ({"src_embedding": METHODS["projective"], "share_embeddings": False}, 2, True),
    ],
)
def test_kinds_of_tying(options: dict[str, Any], distinct: int, tied: bool, host: Host) -> None:
    checkpoint = host.train("model", **{"embedding": FUNNEL, **options})
    model = built(checkpoint)
    assert len(shared_embeddings_of(model)) == distinct
    assert isinstance(model.generator, SharedGenerator) == tied
    assert len(host.translate(checkpoint)) == 7


def test_define_on_both_inputs_with_plain_output(host: Host) -> None:
    """DeFINE's translation experiment: its `output` becomes none if nothing is tied to it."""
    settings = {key: value for key, value in METHODS["define"].items() if key != "output"}
    checkpoint = host.train("model", embedding=settings, share_decoder_embeddings=False)
    model = built(checkpoint)
    assert not shared_embeddings_of(model)[0].has_output


@pytest.mark.slow_except("rnn")
@pytest.mark.parametrize(
    "options",
    [
        {**RNN, "encoder_type": "brnn", "global_attention": "mlp"},
        {**RNN, "input_feed": 0},
        {"share_decoder_embeddings": False, "copy_attn": True, "share_embeddings": False},
        {"lambda_align": 0.0, "generator_function": "softmax", "label_smoothing": 0.1, "accum_count": [2]},
        {"position_encoding": False, "max_relative_positions": -1, "average_decay": 0.1},
    ],
    ids=["brnn", "rnn", "copy", "accumulation", "rotary"],
)
def test_other_models(options: dict[str, Any], host: Host) -> None:
    checkpoint = host.train("model", **{"embedding": FUNNEL, **options})
    assert len(host.translate(checkpoint)) == 7


def test_word_features_work_with_a_shared_source(host: Host) -> None:
    for split in ("train", "valid", "test"):
        path = host.folder / f"{split}.src"
        lines = path.read_text(encoding="utf-8").splitlines()
        host.write(path.name, [" ".join(f"{word}￨A" for word in line.split()) for line in lines])
    host.write("vocab_feat0", ["A\t9"])
    asked = {"n_src_feats": 1, "feat_merge": "sum", "transforms": ["inferfeats"]}
    checkpoint = host.train("model", embedding=FUNNEL, share_embeddings=False, **asked)
    features = ("-n_src_feats", "1", "-transforms", "inferfeats")
    assert len(host.translate(checkpoint, *features)) == 7


def test_loss_equals_the_dense_one(trained: Trained) -> None:
    from onmt.utils.loss import LossCompute

    _, checkpoint = trained(embedding=FUNNEL)
    model = built(checkpoint)
    criterion = torch.nn.CrossEntropyLoss(ignore_index=1, reduction="sum", label_smoothing=0.1)
    compute = LossCompute(criterion, model.generator)
    target = torch.tensor([[2, 5, 6, 3], [2, 7, 3, 1]])[:, :, None]
    batch = {"tgt": target, "srclen": torch.tensor([3, 2])}
    hidden = torch.randn(2, 3, 16)
    # Codes after a ReLU are nonnegative: here all words score below the padding word, which has score zero.
    hidden[1, 2] = -torch.linalg.pinv(model.generator.embedding.basis.detach()).sum(dim=1)
    hidden.requires_grad_()
    loss, statistics = compute(batch, hidden, None)
    (gradient,) = torch.autograd.grad(loss, hidden)
    scores = model.generator(hidden.reshape(-1, 16))
    dense = criterion(scores, target[:, 1:, 0].reshape(-1))
    (expected,) = torch.autograd.grad(dense, hidden)
    torch.testing.assert_close(loss, dense)
    torch.testing.assert_close(gradient, expected)
    assert statistics.n_words == 5
    is_right = scores.argmax(1) == target[:, 1:, 0].reshape(-1)
    assert is_right[5], "padding is predicted where the target is padding"
    assert statistics.n_correct == int(is_right[:5].sum())


def test_embedding_initialization_survives_param_init(host: Host) -> None:
    checkpoint = host.train("model", embedding=FUNNEL, param_init=0.9, train_steps=1, learning_rate=0.0)
    model = built(checkpoint)
    spread = float(shared_embeddings_of(model)[0].table()[4:].detach().std())
    assert 0.5 < spread * math.sqrt(16) < 2
    assert float(model.decoder.transformer_layers[0].feed_forward.w_1.weight.abs().max()) > 0.5


@pytest.mark.parametrize("options", [{}, RNN])
def test_all_layers_use_fast_dropout_masks(options: dict[str, Any], host: Host) -> None:
    checkpoint = host.train("model", embedding=FUNNEL, train_steps=1, dropout=[0.3], **options)
    model = built(checkpoint)
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert layers and all(type(layer) is Dropout for layer in layers)
    model.update_dropout(0.4, 0.0)
    assert 0.4 in {layer.p for layer in layers}


@pytest.mark.slow_except("funnel-pytorch")
@pytest.mark.parametrize("save_format", ["pytorch", "safetensors"])
@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact(save_format: str, kind: str, host: Host) -> None:
    """Six steps equal three, a stop, and three more: same data, dropout, optimizer and patience."""
    options = {**KINDS[kind], "save_format": save_format, "early_stopping": 9, "valid_steps": 2}
    options |= {"dropout": [0.1, 0.3], "attention_dropout": [0.0, 0.2], "dropout_steps": [0, 2]}
    whole = host.train("whole", **options)
    first = host.train("part", **options, train_steps=3)
    config = host.config("part", **options)
    run("onmt_train -config", config, "-train_from", first)
    resumed = host.folder / "part_step_6.pt"
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[name], tensor, rtol=0, atol=0)
    states = [read_checkpoint(path)["resume"][0] for path in (whole, resumed)]
    assert states[0]["data"] == states[1]["data"]
    assert states[0]["early_stopping"] == states[1]["early_stopping"]
    assert states[0]["early_stopping"]["best_step"] > 0
    assert len(host.translate(resumed)) == 7


@pytest.mark.slow_except("safetensors-2-3")
@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.parametrize(("save_format", "every"), [("pytorch", 1), ("safetensors", 2)])
def test_resume_with_averages_is_exact(save_format: str, every: int, stop: int, host: Host) -> None:
    """The parameters are saved beside their averages."""
    options = {"embedding": FUNNEL, "average_decay": 0.1, "average_every": every, "save_format": save_format}
    whole = host.train("whole", **options)
    host.train("part", **options, train_steps=stop)
    resumed = host.train("part", **options)
    plain = host.train("plain", embedding=FUNNEL)
    different = []
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[name], tensor, rtol=0, atol=0)
        different.append(not torch.equal(weights(plain)[name], tensor))
    assert any(different)


@pytest.mark.slow
def test_dropout_in_an_embedding_ends_after_its_updates(host: Host, monkeypatch: Patch) -> None:
    """Accumulated batches count once, and a resumed run continues the count."""
    seen: list[bool] = []
    token_rows = AloneEmbedding.token_rows

    def noted(self: AloneEmbedding, *tensors: torch.Tensor) -> torch.Tensor:
        if self.training:
            seen.append(self.relu_dropout.p > 0)
        return token_rows(self, *tensors)

    monkeypatch.setattr(AloneEmbedding, "token_rows", noted)
    alone = {"method": "alone", "hidden_dim": 24, "relu_dropout": 0.5, "relu_dropout_steps": 4}
    options = {"embedding": alone, "accum_count": [2], "batch_size": 8}
    whole = weights(host.train("whole", **options))
    looked_up = 4  # the source and the target of two batches
    assert seen == [True] * (4 * looked_up) + [False] * (2 * looked_up)
    for stop in (3, 5):
        seen.clear()
        first = host.train(f"part{stop}", **options, train_steps=stop)
        run("onmt_train -config", host.config(f"part{stop}", **options), "-train_from", first)
        assert seen == [True] * (4 * looked_up) + [False] * (2 * looked_up)
        for name, tensor in weights(host.folder / f"part{stop}_step_6.pt").items():
            assert torch.equal(tensor, whole[name]), (stop, name)


@pytest.mark.slow_except("plain")
@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind: str, host: Host) -> None:
    """Products in bfloat16 change results slightly; weights stay in 32 bits, and resuming is exact."""
    options = {**KINDS[kind], "valid_steps": 2}
    exact = weights(host.train("exact", **options))
    mixed = weights(host.train("mixed", **options, autocast="bf16"))
    assert any(not torch.equal(mixed[name], tensor) for name, tensor in exact.items())
    assert all(tensor.dtype == torch.float32 for tensor in mixed.values())
    vectors = [torch.cat([tensor.flatten() for tensor in part.values()]) for part in (exact, mixed)]
    assert (vectors[1] - vectors[0]).norm() < 0.1 * vectors[0].norm()
    first = host.train("part", **options, autocast="bf16", train_steps=3)
    config = host.config("part", **options, autocast="bf16")
    run("onmt_train -config", config, "-train_from", first)
    resumed = host.folder / "part_step_6.pt"
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, mixed[name])
    assert len(host.translate(resumed)) == 7


@pytest.mark.slow
def test_resume_with_loader_workers(host: Host) -> None:
    """With two workers, the next one in turn continues."""
    options = {"embedding": FUNNEL, "num_workers": 2, "batch_size": 8, "dropout": [0.0]}
    with (host.folder / "train.src").open("a", encoding="utf-8") as source:
        source.write("w1￨x w2\n")  # a separator of features, which workers read without an error, too
    with (host.folder / "train.tgt").open("a", encoding="utf-8") as target:
        target.write("v1 v2\n")
    whole = host.train("whole", **options)
    first = host.train("part", **options, train_steps=3)
    run("onmt_train -config", host.config("part", **options), "-train_from", first)
    states = [read_checkpoint(path)["resume"][0]["data"] for path in (whole, host.folder / "part_step_6.pt")]
    used = [
        {worker: (place["index"], place["used"]) for worker, place in s["workers"].items()} for s in states
    ]
    assert used[0] == used[1]
    assert states[0]["last_worker"] == states[1]["last_worker"]


@pytest.mark.slow
def test_average(host: Host) -> None:
    last = host.train("model", embedding=METHODS["alone"])
    first = host.folder / "model_step_3.pt"
    output = host.folder / "average.pt"
    run("onmt_average_models -models", first, last, "-output", output)
    for name, tensor in weights(output).items():
        both = weights(first)[name], weights(last)[name]
        expected = both[0] if not tensor.is_floating_point() else (both[0] + both[1]) / 2
        torch.testing.assert_close(tensor, expected)
    assert len(host.translate(output)) == 7


def test_ensemble_of_different_methods(trained: Trained) -> None:
    host, model = trained(embedding=FUNNEL)
    _, other = trained(embedding=METHODS["standard"])
    assert len(host.translate([model, other])) == 7


def test_language_model(host: Host) -> None:
    """Upstream's decoder-only model, whose target embedding is also the output."""
    checkpoint = host.train("model", embedding=FUNNEL, **host.language_model())
    model = built(checkpoint)
    assert model.generator.embedding is model.decoder.embeddings.emb_luts[0]
    assert len(host.translate(checkpoint)) == 7
