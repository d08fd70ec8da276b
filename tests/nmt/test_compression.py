"""Compressing translation models, and output layers with their own embedding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import shared_embeddings as se
from nmt.checkpoints import WEIGHTS, read_checkpoint, read_weights
from nmt.compression import CheckpointModel
from nmt.embeddings import shared_embeddings_of, words_module
from nmt.models import build_from_checkpoint, describe_checkpoint
from shared_embeddings.cli.main import main
from shared_embeddings.quant.packed_tensor import PackedTensor, unfreeze
from shared_embeddings.quant.storage import HEADER, STORES
from tests.helpers import alter
from tests.nmt.conftest import FUNNEL, Capture, Host, Patch, Trained, built, nearest, run
from tests.nmt.test_training import DEFINE_MAP, METHODS
from tests.nmt.test_trim_and_export import SOURCE, TARGET, assert_same_scores, trim

pytestmark = pytest.mark.usefixtures("installed_host")

STANDARD = {"method": "standard"}
UNTIED = {"share_embeddings": False, "share_decoder_embeddings": False}


def compress(model: Path, method: str, output: Path, *arguments: object) -> None:
    """Run the command, which must succeed."""
    asked = ["compress", "--model", model, "--method", method, "--output", output, *arguments]
    assert main([str(argument) for argument in asked]) == 0


def error_of(capsys: Capture, *arguments: object) -> str:
    """The one line that the command prints on stderr for a user error."""
    capsys.readouterr()
    assert main(["compress", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "Traceback" not in err
    return err


def scores(path: Path) -> torch.Tensor:
    """The log-probabilities ``(B, T, V - 1)`` of all words but the padding, for generated sentences."""
    model, vocabs, _, _ = build_from_checkpoint(str(path))
    return scores_of(model, vocabs)


def scores_of(model: Any, vocabs: Any) -> torch.Tensor:
    """Like `scores`, for a model in memory."""
    draw = torch.Generator().manual_seed(1)
    source = torch.randint(5, len(vocabs["src"]), (3, 6, 1), generator=draw)
    target = torch.randint(5, len(vocabs["tgt"]), (3, 5, 1), generator=draw)
    with torch.no_grad():
        hidden, _ = model(source, target, torch.full((3,), 6))
        padding = vocabs["tgt"]["<blank>"]
        found = model.generator(hidden)
    words = [word for word in range(found.size(-1)) if word != padding]
    return found[..., words].log_softmax(dim=-1)


@pytest.mark.slow_except("safetensors-full rank")
@pytest.mark.parametrize(
    ("method", "arguments"), [("standard", []), ("projective", ["--rank", 16])], ids=["standard", "full rank"]
)
@pytest.mark.parametrize("save_format", ["pytorch", "safetensors"])
def test_full_size_keeps_the_scores(
    trained: Trained, tmp_path: Path, method: str, arguments: list[object], save_format: str
) -> None:
    _, model = trained(embedding=STANDARD, save_format=save_format)
    output = tmp_path / "same.pt"
    compress(model, method, output, *arguments)
    torch.testing.assert_close(scores(output), scores(model), atol=1e-4, rtol=0)
    weights = output.with_suffix(".safetensors")
    assert weights.exists() == (save_format == "safetensors")
    # safetensors itself makes files readable by the owner only.
    assert not weights.exists() or weights.stat().st_mode == output.stat().st_mode


def test_output_next_to_the_input_is_a_separate_model(trained: Trained, tmp_path: Path) -> None:
    """`model.small.safetensors` is not part of `model.pt`, although it is named like a shard of it."""
    _, model = trained(embedding=STANDARD, save_format="safetensors")
    for file in (model, model.with_suffix(".safetensors")):
        shutil.copy(file, tmp_path / f"model{file.suffix}")
    before = scores(model)
    for number, how in enumerate((["standard", "--store", "int8"], ["projective", "--rank", 4])):
        method, *arguments = how
        compress(tmp_path / "model.pt", str(method), tmp_path / f"model.small{number}.pt", *arguments)
        assert torch.equal(scores(tmp_path / "model.pt"), before)
    shards = load_file(tmp_path / "model.safetensors")
    names = sorted(shards)
    save_file({name: shards[name] for name in names[:3]}, tmp_path / "model.00.safetensors")
    save_file({name: shards[name] for name in names[3:]}, tmp_path / "model.01.safetensors")
    (tmp_path / "model.safetensors").unlink()
    alter(tmp_path / "model.pt", lambda content: content.pop(WEIGHTS))  # like converted models
    assert torch.equal(scores(tmp_path / "model.pt"), before)


@pytest.mark.parametrize("reset", ["none", "states"])
def test_result_resumes_with_the_options_of_the_run(
    reset: str, trained: Trained, host: Host, tmp_path: Path
) -> None:
    """It has no optimizer state, whose learning rate would be that of the original model."""
    _, model = trained(embedding=STANDARD)
    small = tmp_path / "small.pt"
    compress(model, "projective", small, "--rank", 4)
    options = {"learning_rate": 0.0, "train_steps": 2, "save_checkpoint_steps": 2, "reset_optim": reset}
    after = host.train("next", "-train_from", small, **options)
    assert torch.equal(scores(after), scores(small))


def test_result_translates_trains_and_stays_tied(trained: Trained, tmp_path: Path) -> None:
    host, model = trained(embedding=STANDARD)
    output, report = tmp_path / "small.pt", tmp_path / "report.json"
    before = model.read_bytes()
    counts = host.folder / "vocab"
    asked = ["--rank", 4, "--fit-steps", 50, "--token-counts", counts, "--report", report]
    compress(model, "funnel", output, *asked)
    assert model.read_bytes() == before
    found, *_ = build_from_checkpoint(str(output))
    (embedding,) = shared_embeddings_of(found)
    assert embedding.method == "funnel"
    assert words_module(found, "source") is words_module(found, "target") is found.generator.embedding
    assert len(host.translate(output)) == 7
    further = ["-train_from", str(output), "-train_steps", "2", "-save_checkpoint_steps", "2"]
    run("onmt_train -config", host.config("further", embedding=None), *further)
    assert read_checkpoint(host.folder / "further_step_2.pt")["opt"].embedding["method"] == "funnel"
    run("onmt_release_model -model", output, "-output", tmp_path / "released.pt")
    written = json.loads(report.read_text())
    words, dim = embedding.num_embeddings, embedding.embedding_dim
    assert written["tables"][0]["parameters"] == {"before": words * dim, "after": 4 * (words + dim)}
    assert written["tables"][0]["uses"] == ["source", "target", "output"]


@pytest.mark.slow_except("quantized")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_loaded_as_fitted(
    method: str, trained: Trained, tmp_path: Path, monkeypatch: Patch
) -> None:
    """In every storage format, what is loaded computes what was in memory."""
    _, model = trained(embedding=STANDARD)
    kept: dict[str, torch.Tensor] = {}
    write = CheckpointModel.write

    def recording(self: CheckpointModel, path: Path, weights: dict[str, torch.Tensor], *card: str) -> None:
        kept[path.name] = scores_of(self.module, self.vocabs)
        write(self, path, weights, *card)

    monkeypatch.setattr(CheckpointModel, "write", recording)
    options = {name: value for name, value in METHODS[method].items() if name != "method"}
    for store in STORES:
        fitting = ("--fit-steps", 30, "--seed", 3, "--store", store)
        compress(model, method, tmp_path / f"{store}.pt", *as_arguments(options), *fitting)
        assert torch.equal(scores(tmp_path / f"{store}.pt"), kept[f"{store}.pt"])
    before, vocabs, *_ = build_from_checkpoint(str(model))
    asked = {"words": vocabs["src"].ids_to_tokens, "padding_idx": vocabs["src"]["<blank>"]}
    fitted, _ = se.fit(method, words_module(before, "source").table(), seed=3, steps=30, **asked, **options)
    (embedding,) = shared_embeddings_of(built(tmp_path / "fp32.pt"))
    hidden = torch.randn(5, embedding.score_dim, generator=torch.Generator().manual_seed(2))
    assert torch.equal(embedding.table(), fitted.table())
    assert torch.equal(embedding.log_prob(hidden), fitted.eval().log_prob(hidden))
    _check_ties(tmp_path / "int8.pt")


def as_arguments(settings: dict[str, Any]) -> list[str]:
    """The options of a method as command line arguments."""
    found: list[str] = []
    for name, value in settings.items():
        if name != "method":
            text = value if isinstance(value, str) else json.dumps(value)
            found += [f"--{name.replace('output', 'embedding-output')}", text]
    return found


def test_plain_upstream_model(trained: Trained, tmp_path: Path) -> None:
    host, model = trained()
    output = tmp_path / "small.pt"
    compress(model, "standard", output)
    torch.testing.assert_close(scores(output), scores(model), atol=1e-4, rtol=0)
    compress(model, "projective", output, "--rank", 4, "--force")
    assert len(host.translate(output)) == 7


def test_untied_tables_each_get_an_embedding(trained: Trained, tmp_path: Path) -> None:
    host, model = trained(**UNTIED)
    output = tmp_path / "small.pt"
    compress(model, "projective", output, "--target-ratio", 3)
    found, *_ = build_from_checkpoint(str(output))
    assert len(shared_embeddings_of(found)) == 3
    for embedding in shared_embeddings_of(found):
        plain = 32 * embedding.num_embeddings * embedding.embedding_dim
        assert 2 * plain / 8 < embedding.counts()["stored_bits"] <= plain / 3
    assert len(host.translate(output)) == 7


@pytest.mark.slow
def test_the_map_of_define_becomes_codes_and_the_rest_stays(trained: Trained, tmp_path: Path) -> None:
    """DeFINE's Table 5: if the output is tied to the map, the layers of the unit are unchanged."""
    host, model = trained(embedding=None, tgt_embedding=DEFINE_MAP, share_embeddings=False)
    output, report = tmp_path / "small.pt", tmp_path / "report.json"
    codes = {"num_codebooks": 2, "codebook_size": 8}
    fitting = ("--fit-steps", 20, "--seed", 5, "--report", report)
    compress(model, "compositional_code", output, *as_arguments(codes), *fitting)
    before, after = (build_from_checkpoint(str(file))[0] for file in (model, output))
    old, new = words_module(before, "target"), words_module(after, "target")
    wanted, _ = se.fit(
        "compositional_code", old.inner_embedding().table(), seed=5, steps=20, padding_idx=1, **codes
    )
    table = wanted.codebooks[0][wanted.codes[:, 0].long()] + wanted.codebooks[1][wanted.codes[:, 1].long()]
    table[old.padding_idx] = 0
    torch.testing.assert_close(new.inner_embedding().table(), table)
    assert after.generator.embedding is new
    states = old.state_dict(), new.state_dict()
    rest = [name for name in states[0] if not name.startswith("map.")]
    assert len(rest) == 5 and all(torch.equal(states[1][name], states[0][name]) for name in rest)
    source, target = json.loads(report.read_text())["tables"]
    assert (source.get("part"), target["part"]) == (None, "map of define")
    assert target["uses"] == ["target", "output"]
    words, dim = old.num_embeddings, DEFINE_MAP["map_dim"]
    assert target["parameters"] == {"before": words * dim, "after": 2 * 8 * dim}
    assert len(host.translate(output)) == 7
    compress(output, "standard", tmp_path / "same.pt")
    torch.testing.assert_close(scores(tmp_path / "same.pt"), scores(output), atol=1e-4, rtol=0)


def without_weights(path: Path) -> int:
    """The bytes of a checkpoint with all its tensors empty: names, vocabulary, options and container."""
    saved = torch.load(path, weights_only=True)
    saved["model"] = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in saved["model"].items()}
    torch.save(saved, path.with_suffix(".empty"))
    return path.with_suffix(".empty").stat().st_size


@pytest.mark.slow
def test_bytes_on_disk_match_the_report(host: Host, tmp_path: Path) -> None:
    host.write("vocab", [f"w{number}\t9" for number in range(9000)])
    model = host.train("wide", word_vec_size=32, hidden_size=32, train_steps=1, save_checkpoint_steps=1)
    table = 9000 * 24
    numbers = {"fp32": 4 * table, "fp16": 2 * table, "int8": table + 2 * 9000}
    report = tmp_path / "report.json"
    for store in STORES:
        output = tmp_path / f"{store}.pt"
        compress(model, "projective", output, "--rank", 24, "--store", store, "--report", report, "--force")
        written = json.loads(report.read_text())
        weights = written["bytes_of_weights"]["after"]
        disk = output.stat().st_size
        assert written["bytes_on_disk"]["after"] == disk
        assert abs(disk - without_weights(output) - weights) < 0.02 * weights
        # The bias, in fp16 unless all is in fp32, the basis, and eight special words.
        others = written["tables"][0]["stored_bytes"]["after"] - numbers[store]
        each = 4 if store == "fp32" else 2
        assert each * 9000 < others <= each * 9008 + 4 * 24 * (32 + 8)
        # Adam stores two numbers per weight.
        assert written["bytes_on_disk"]["before"] > 3 * written["bytes_of_weights"]["before"]


def _check_ties(path: Path) -> None:
    """One module on all sides, one copy of it in the file, and gradients from the input and the output."""
    model: Any = build_from_checkpoint(str(path))[0]
    (embedding,) = shared_embeddings_of(model)
    assert words_module(model, "source") is words_module(model, "target") is model.generator.embedding
    saved = torch.load(path, weights_only=True)
    names = [name for name in saved["model"] if "emb_luts" in name and not name.endswith(".scale")]
    assert saved["generator"] == {} and len(names) == len(embedding.state_dict())
    unfreeze(embedding)
    embedding.train()
    scored = embedding.log_prob(torch.ones(2, embedding.score_dim))
    looked_up = embedding(torch.arange(88))
    sides = ((looked_up, embedding.input_parameters()), (scored, embedding.output_parameters()))
    assert embedding.counts()["shared"] > 0
    for values, parameters in sides:
        weights = torch.linspace(-1, 2, values.numel()).view(values.shape)
        gradients = torch.autograd.grad((values * weights).sum(), list(parameters))
        assert all(bool(gradient.any()) for gradient in gradients)


def test_packed_models_work_in_every_command(trained: Trained, tmp_path: Path) -> None:
    host, model = trained(embedding=STANDARD, save_format="safetensors")
    small, report = tmp_path / "small.pt", tmp_path / "report.json"
    compress(model, "projective", small, "--rank", 8, "--store", "int8", "--report", report)
    storage = json.loads(report.read_text())["tables"][0]["storage"]
    assert 0 < storage["added_error"] < 0.05
    assert storage["stored_bytes"]["after"] < 0.5 * storage["stored_bytes"]["before"]
    assert HEADER in load_file(small.with_suffix(".safetensors"))
    assert len(host.translate(small)) == 7
    run("onmt_release_model -model", small, "-output", tmp_path / "released.pt")
    run("onmt_average_models -models", small, small, "-output", tmp_path / "mean.pt")
    for output in ("released.pt", "mean.pt"):
        is_packed = HEADER in torch.load(tmp_path / output, weights_only=True)["model"]
        assert is_packed == (output == "released.pt")  # an average has its own values
        torch.testing.assert_close(scores(tmp_path / output), scores(small), rtol=1e-5, atol=1e-5)
    (embedding,) = shared_embeddings_of(build_from_checkpoint(str(small))[0])
    assert PackedTensor in {type(parameter) for parameter in embedding.parameters()}
    compress(small, "standard", tmp_path / "again.pt")
    torch.testing.assert_close(scores(tmp_path / "again.pt"), scores(small), atol=1e-4, rtol=0)
    packed = tmp_path / "packed.pt"
    compress(small, "standard", packed, "--store", "fp16", "--force")
    further = ["-train_from", str(packed), "-train_steps", "2", "-save_checkpoint_steps", "2"]
    run("onmt_train -config", host.config("packed", embedding=None), *further)
    written = torch.load(host.folder / "packed_step_2.pt", weights_only=True)["model"]
    assert all(tensor.dtype == torch.float32 for name, tensor in written.items() if "emb_luts" in name)


def test_user_errors(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    _, model = trained(embedding=STANDARD)
    output, text = tmp_path / "small.pt", tmp_path / "text"
    asked = ["--output", output, "--method", "projective", "--rank", 4]
    assert "no such file" in error_of(capsys, "--model", tmp_path / "none.pt", *asked)
    for name, content in {"cut": model.read_bytes()[:-500], "empty": b"", "text": b"no model"}.items():
        (tmp_path / name).write_bytes(content)
        assert "truncated" in error_of(capsys, "--model", tmp_path / name, *asked)
    found = ["--model", model, "--output", output]
    assert "unknown embedding method" in error_of(capsys, *found, "--method", "x")
    projective = [*found, "--method", "projective"]
    assert "unknown option 'rang'" in error_of(capsys, *projective, "--rang", 4)
    assert "'words' is set by" in error_of(capsys, *projective, "--words", "a,b")
    assert "line 1" in error_of(capsys, *projective, "--rank", 4, "--token-counts", text)
    assert "none of the" in error_of(capsys, *projective, "--rank", 4, "--text", text)
    assert not output.exists()


# Output layers with their own embedding


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
def test_every_method_of_an_output_layer(method: str, trained: Trained, tmp_path: Path) -> None:
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
    assert len(host.translate(output["int8"])) == 7


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
