"""What only translation models have: two sides, BLEU, output layers of their own, and their exports.

The checks that all hosts pass are in tests/test_hosts.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import shared_embeddings as se
from nmt.checkpoints import WEIGHTS, read_checkpoint, read_weights
from nmt.compression import CheckpointModel
from nmt.embeddings import shared_embeddings_of, words_module
from nmt.models import build_from_checkpoint, dense_checkpoint, describe_checkpoint
from shared_embeddings.cli.main import main
from shared_embeddings.quant.packed_tensor import PackedTensor
from shared_embeddings.quant.storage import HEADER
from shared_embeddings.words.classes import WordClasses
from tests.helpers import alter, as_method, best_words
from tests.nmt.conftest import FUNNEL, SECONDS, Capture, ErrorLine, Host, Trained, built, nearest, run
from tests.nmt.test_training import DEFINE_MAP, METHODS

pytestmark = pytest.mark.usefixtures("installed_host")

STANDARD = {"method": "standard"}
UNTIED = {"share_embeddings": False, "share_decoder_embeddings": False}
APART = {"share_vocab": False, **UNTIED}
LONG = {"train_steps": 60, "save_checkpoint_steps": 60}
SPECIALS = ["<unk>", "<blank>", "<s>", "</s>"]
SOURCE, TARGET = "w1 w2 w39\nw2 w5\nw7 w1\n", "v1 v2 v39\nv2 v5\nv7 v1\n"


def compress(model: Path, method: str, output: Path, *arguments: object) -> None:
    """Run the command, which must succeed."""
    asked = ["compress", "--model", model, "--method", method, "--output", output, *arguments]
    assert main([str(argument) for argument in asked]) == 0


def scores(path: Path) -> torch.Tensor:
    """The log-probabilities ``(B, T, V - 1)`` of all words but the padding, for generated sentences."""
    model: Any
    model, vocabs, _, _ = build_from_checkpoint(str(path))
    draw = torch.Generator().manual_seed(1)
    source = torch.randint(5, len(vocabs["src"]), (3, 6, 1), generator=draw)
    target = torch.randint(5, len(vocabs["tgt"]), (3, 5, 1), generator=draw)
    with torch.no_grad():
        hidden, _ = model(source, target, torch.full((3,), 6))
        padding = vocabs["tgt"]["<blank>"]
        outputs = model.generator(hidden)
    words = [word for word in range(outputs.size(-1)) if word != padding]
    return outputs[..., words].log_softmax(dim=-1)


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    """Five words of each side."""
    for name, content in (("text.src", SOURCE), ("text.tgt", TARGET)):
        (tmp_path / name).write_text(content)
    return tmp_path / "text.src", tmp_path / "text.tgt"


def trim(*arguments: object) -> int:
    """The exit status of the command."""
    return main(["trim", *map(str, arguments)])


def scores_of_words(path: Path) -> dict[str, torch.Tensor]:
    """The scores ``(3, T)`` of each target word but the padding in sentences of kept words."""
    model: Any
    model, vocabs, _, _ = build_from_checkpoint(str(path))
    sides = {"src": SOURCE.replace("\n", " ").split(), "tgt": TARGET.replace("\n", " ").split()}
    ids = {side: torch.tensor(vocabs[side](words)).view(1, -1, 1) for side, words in sides.items()}
    with torch.no_grad():
        hidden, _ = model(ids["src"], ids["tgt"], torch.tensor([7]))
        outputs = model.generator(hidden)[0]
    words = vocabs["tgt"].ids_to_tokens
    return {word: outputs[:, number] for number, word in enumerate(words) if word != "<blank>"}


def assert_same_scores(trimmed: Path, model: Path) -> None:
    """Kept words have the same scores, so probabilities normalized over them are also the same."""
    before, after = scores_of_words(model), scores_of_words(trimmed)
    assert set(after) < set(before)
    total = torch.stack([before[word] for word in after]).logsumexp(dim=0)
    total_after = torch.stack(list(after.values())).logsumexp(dim=0)
    for word in after:
        torch.testing.assert_close(after[word] - total_after, before[word] - total, rtol=0, atol=1e-5)


@pytest.mark.slow_except("safetensors")
@pytest.mark.parametrize("save_format", ["pytorch", "safetensors"])
def test_full_size_keeps_the_scores(trained: Trained, tmp_path: Path, save_format: str) -> None:
    _, model = trained(embedding=STANDARD, save_format=save_format)
    output = tmp_path / "same.pt"
    compress(model, "projective", output, "--rank", 16)
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


@pytest.mark.slow_except("states")
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


def test_untied_tables_each_get_an_embedding(trained: Trained, tmp_path: Path) -> None:
    host, model = trained(**UNTIED)
    output = tmp_path / "small.pt"
    compress(model, "projective", output, "--size", "3x")
    compressed, *_ = build_from_checkpoint(str(output))
    assert len(shared_embeddings_of(compressed)) == 3
    for embedding in shared_embeddings_of(compressed):
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
    compress(model, as_method("compositional_code", codes), output, *fitting)
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


def test_packed_models_work_in_every_command(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
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
    assert f"mean.pt: {(tmp_path / 'mean.pt').stat().st_size:,} bytes" in capsys.readouterr().out
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
    embeddings = {"src_embedding": METHODS["projective"], "output_embedding": METHODS["structured"]}
    model = built(host.train("model", tgt_embedding=FUNNEL, **embeddings, **UNTIED))
    methods = [embedding.method for embedding in shared_embeddings_of(model)]
    assert methods == ["projective", "funnel", "structured"]
    assert "output: structured StructuredOptions" in capfd.readouterr().err


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
        tables = [words_module(network, side).weight for network in (model, full)]  # type: ignore[union-attr]
        assert torch.equal(*tables)
    if copying:
        assert torch.equal(model.generator.linear_copy.weight, full.generator.linear_copy.weight)
    assert read_checkpoint(student)["opt"].output_embedding["method"] == "projective"
    again = host.config("further", **copying)
    run("onmt_train -train_steps 2 -config", again, "-train_from", student)


@pytest.mark.slow
def test_bleu_equals_that_of_the_commands(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    host, model = trained(embedding=STANDARD, train_steps=60, save_checkpoint_steps=60)
    # With an empty line, which the model does not get.
    source = host.write("some.src", [*host.folder.joinpath("valid.src").read_text().splitlines(), ""])
    usual = ["-beam_size", "5", "-max_length", "250", "-max_length_ratio", "1.25"]
    lines = [f"{line} v1 v2." for line in host.translate(model, *usual, source="some.src")]
    target, small, report = host.write("some.tgt", lines), tmp_path / "small.pt", tmp_path / "report.json"
    sides = ["--validation-source", source, "--validation-target", target]
    asked = ["--rank", 14, "--store", "int8", "--report", report]
    compress(model, "projective", small, *asked, *sides)
    quality = json.loads(report.read_text())["quality"]
    wanted = []
    for path in (model, small):
        translations = host.translate(path, *usual, source="some.src")
        wanted.append(sacrebleu.corpus_bleu(translations, [lines], tokenize="none", force=True).score)
    assert (quality["before"], quality["after"]) == pytest.approx(wanted)
    assert wanted[0] > 0 and wanted[0] != wanted[1]
    assert quality["measure"] == "BLEU" and "tok:none" in quality["how"] and "beam 5" in quality["how"]
    shown = capsys.readouterr().out
    before, after = wanted
    assert f"BLEU {after:.2f}, {before:.2f} before (" in shown


def test_user_errors_are_one_line_before_the_fit(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    host, model = trained(embedding=STANDARD)
    output = tmp_path / "small.pt"
    source, target, empty = host.folder / "valid.src", host.folder / "valid.tgt", tmp_path / "empty"
    empty.write_text("")
    asked = ["--model", model, "--method", "projective", "--rank", 4, "--output", output]
    source_option, target_option = "--validation-source", "--validation-target"
    for arguments, message in [
        ([source_option, source, target_option, empty], "has 0 lines"),
        ([source_option, source, target_option, host.folder / "test.tgt"], "has 10 lines"),
        ([target_option, target], "give both"),
        (["--validation", source], "is a translation model"),
    ]:
        capsys.readouterr()
        assert main(["compress", *map(str, [*asked, *arguments])]) == 2
        # After earlier translations in this process, OpenNMT's log also goes to stderr.
        (line,) = (text for text in capsys.readouterr().err.splitlines() if "Loading checkpoint" not in text)
        assert message in line
    assert not output.exists()


KINDS: dict[str, dict[str, Any]] = {
    "features": {
        "n_src_feats": 1,
        "feat_merge": "sum",
        "transforms": ["inferfeats"],
        "share_embeddings": False,
    },
    "recurrent": {"encoder_type": "brnn", "decoder_type": "rnn", "position_encoding": False},
    "copying": {"copy_attn": True, "reuse_copy_attn": False},
    "untied": {"share_embeddings": False, "share_decoder_embeddings": False},
}


def kept(model: Path, folder: Path, capsys: Capture, *arguments: object) -> tuple[str, dict[str, Any]]:
    """The last line, and its part of the report."""
    report = folder / "report.json"
    capsys.readouterr()
    method, *options = arguments
    compress(model, str(method), folder / "small.pt", *options, "--report", report, "--force")
    return capsys.readouterr().out.splitlines()[-1], json.loads(report.read_text())["kept"]


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_other_kinds_are_compared(host: Host, tmp_path: Path, capsys: Capture, kind: str) -> None:
    if kind == "features":  # those that are not in a text are unknown
        for split in ("train", "valid"):
            lines = (host.folder / f"{split}.src").read_text().splitlines()
            host.write(f"{split}.src", [" ".join(f"{word}￨A" for word in line.split()) for line in lines])
        host.write("vocab_feat0", ["A\t9"])
    model = host.train("model", embedding=STANDARD, **KINDS[kind])
    text = ("--text", host.folder / "test.src") if kind == "features" else ()
    line, agreement = kept(model, tmp_path, capsys, "standard", *text)
    assert line.startswith("kept 100% of the predictions") and agreement["share"] == pytest.approx(1)


def test_predictions_follow_the_greedy_translation(trained: Trained) -> None:
    """Its predictions are that translation."""
    host, model = trained(embedding=STANDARD, **LONG)
    sentence = host.write("one.src", ["w3 w7 w1 w20 w4"])
    greedy = ["-beam_size", "1", "-max_length", "12"]
    (wanted,) = host.translate(model, *greedy, source="one.src")
    read = CheckpointModel(model)
    predicted = best_words(read.samples([sentence], 1, 1000))
    words = [read.vocabs["tgt"].ids_to_tokens[word] for word in predicted.tolist()]
    assert words[: len(wanted.split())] == wanted.split()
    assert torch.equal(predicted, best_words(read.samples([sentence], 1, 1000)))
    first, other = (best_words(read.samples(None, seed, 1000)) for seed in (1, 2))
    assert len(first) != len(other) or not torch.equal(first, other)


def test_lines_of_another_language_are_skipped(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    host, model = trained(embedding=STANDARD)
    known, unknown = host.write("known", ["w3 w7 x"]), host.write("unknown", ["x y w3", "x y z"] * 30)
    read = CheckpointModel(model)
    both, alone = (best_words(read.samples(texts, 1, 1000)) for texts in ([known, unknown], [known]))
    assert len(both) == len(alone)
    line, agreement = kept(model, tmp_path, capsys, "standard", "--text", unknown)
    assert agreement["share"] is None and agreement["needs_training"]
    assert line.startswith("warning: could not verify that this model still works (the vocabulary has less")


def test_the_text_in_the_source_language_is_translated(trained: Trained) -> None:
    """All words of both texts are in the vocabulary, and the model writes those of the target."""
    host, model = trained(embedding=STANDARD, **LONG)
    source, target = host.folder / "valid.src", host.folder / "valid.tgt"
    unknown = host.write("u", ["x y z"])
    read = CheckpointModel(model)
    wanted = read.samples([source], 1, 1000)
    for texts in ([source, target], [target, unknown, source]):
        samples = read.samples(texts, 1, 1000)
        assert samples.how == wanted.how and samples.how.endswith("tokens of its translations of valid.src")
        assert torch.equal(best_words(samples), best_words(wanted))


def test_language_models_score_or_generate(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    host, _ = trained(embedding=STANDARD)
    _, model = trained(embedding=STANDARD, **host.language_model(), share_decoder_embeddings=True)
    for source, printed in (([], "that it generated"), (["--text", host.folder / "test.src"], "of test.src")):
        line, _ = kept(model, tmp_path, capsys, "projective", "--rank", 16, *source)
        assert line.startswith("kept 100% of the predictions") and printed in line
        line, agreement = kept(model, tmp_path, capsys, "projective", "--rank", 1, *source)
        assert line.startswith("warning: kept") == agreement["needs_training"] and agreement["share"] < 1


@pytest.mark.slow
def test_both_sides_of_a_plain_model(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    _, model = trained(share_embeddings=False, share_decoder_embeddings=False)
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("w1\tw2\t1\nw1\tw3\t2\nv1\tnowhere\t3\n")
    capsys.readouterr()
    assert main(["similarity", "--model", str(model), "--pairs", str(pairs)]) == 0
    text = capsys.readouterr().out
    assert "source: 88 words in 16 dimensions" in text and "target: 88 words" in text
    assert "2 of 3 (67%)" in text


@pytest.mark.parametrize(
    "options",
    [{"embedding": STANDARD, "save_format": "safetensors"}, {}],
    ids=["shared embedding", "upstream's own"],
)
def test_one_vocabulary(
    trained: Trained, texts: tuple[Path, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    host, model = trained(**options)
    output = tmp_path / "trimmed.pt"
    before = model.read_bytes()
    asked = ["--model", model, "--output", output]
    assert trim(*asked, "--source-text", texts[0]) == 2  # and no words of the target
    assert trim(*asked, "--source-text", texts[0], "--target-text", texts[1]) == 0
    assert model.read_bytes() == before
    words = read_checkpoint(model)["vocab"]["src"]
    vocab = read_checkpoint(output)["vocab"]
    used = {*SPECIALS, *SOURCE.split(), *TARGET.split()}
    assert vocab["src"] == vocab["tgt"] == [word for word in words if word in used]
    pairs = [
        map(int, line.split("\t")) for line in (tmp_path / "trimmed.pt.ids.tsv").read_text().splitlines()
    ]
    assert [(words[old], vocab["src"][new]) for old, new in pairs] == [(word, word) for word in vocab["src"]]
    assert_same_scores(output, model)
    assert output.with_suffix(".safetensors").exists() == bool(options)
    host.write("covered", SOURCE.splitlines())
    lines = host.translate(output, source="covered")
    assert len(lines) == 3 and {word for line in lines for word in line.split()} <= used


def test_result_can_be_trained_released_and_compressed(
    trained: Trained, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    host, model = trained()
    output, small = tmp_path / "trimmed.pt", tmp_path / "small.pt"
    assert trim("--model", model, "--text", *texts, "--output", output) == 0
    further = ["-train_from", str(output), "-train_steps", "2", "-save_checkpoint_steps", "2"]
    run("onmt_train -config", host.config("further"), *further)
    words = read_checkpoint(output)["vocab"]["tgt"]
    assert read_checkpoint(host.folder / "further_step_2.pt")["vocab"]["tgt"] == words
    run("onmt_release_model -model", output, "-output", tmp_path / "released.pt")
    squeeze = ["compress", "--model", output, "--method", "projective", "--rank", 4, "--output", small]
    assert main([str(argument) for argument in squeeze]) == 0
    again = tmp_path / "again.pt"
    assert trim("--model", small, "--text", texts[1], "--output", again) == 0
    assert len(read_checkpoint(again)["vocab"]["tgt"]) == len(SPECIALS) + 5
    host.write("covered", TARGET.splitlines())
    assert len(host.translate(again, source="covered")) == 3


def test_two_vocabularies(
    trained: Trained,
    texts: tuple[Path, Path],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: Capture,
) -> None:
    """Of a plain upstream model with three tables."""
    vocabulary = tmp_path_factory.getbasetemp() / "vocab.tgt"
    vocabulary.write_text("".join(f"v{number}\t9\n" for number in range(40)))
    host, model = trained(tgt_vocab=str(vocabulary), **APART)
    output, keep = tmp_path / "trimmed.pt", tmp_path / "keep"
    keep.write_text("w30\nv31\n")
    asked = ["--model", model, "--output", output]
    for arguments, wanted in (
        (["--text", *texts], "give source_text and target_text"),
        (["--source-text", texts[0]], "give target_text"),
    ):
        assert trim(*asked, *arguments) == 2
        lines = capsys.readouterr().err.splitlines()
        assert [wanted in line for line in lines if line.startswith("shared-embeddings")] == [True]
    assert trim(*asked, "--source-text", texts[0], "--target-text", texts[1], "--keep", keep) == 0
    vocab = read_checkpoint(output)["vocab"]
    # The source vocabulary has words of both sides.
    assert set(vocab["src"]) == {*SPECIALS, *SOURCE.split(), "w30", "v31"}
    assert set(vocab["tgt"]) == {*SPECIALS, *TARGET.split(), "v31"}
    for side, words in (("source", vocab["src"]), ("target", vocab["tgt"])):
        assert len((tmp_path / f"trimmed.pt.{side}.ids.tsv").read_text().splitlines()) == len(words)
    assert_same_scores(output, model)
    host.write("covered", SOURCE.splitlines())
    assert len(host.translate(output, source="covered")) == 3


def ctranslate2_lines(ctranslate2: Any, model: Path, host: Host) -> list[str]:
    """The greedy translations of the test set by an exported model.

    It computes in float32: products in int8 also round the hidden states, by rules of the processor.
    """
    sources = [line.split() for line in (host.folder / "test.src").read_text().splitlines()]
    search = {"beam_size": 1, "max_decoding_length": 9, "min_decoding_length": 3}
    translator = ctranslate2.Translator(str(model), compute_type="float32")
    results = translator.translate_batch(sources, **search)
    return [" ".join(result.hypotheses[0]) for result in results]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"share_embeddings": False},
        {"position_encoding": False, "max_relative_positions": 4},
        {"position_encoding_type": "SinusoidalConcat", "multiquery": True, "pos_ffn_activation_fn": "gelu"},
    ],
    ids=["three-way", "inputs apart", "relative", "concat"],
)
def test_ctranslate2_translates_the_same(options: dict[str, Any], host: Host, capsys: Capture) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    checkpoint = host.train("model", embedding=FUNNEL, train_steps=60, **options)
    exported = host.folder / "exported"
    for _ in range(2):  # the second replaces the first, including all its files
        run("onmt_release_model -format ctranslate2 -force -model", checkpoint, "-output", exported)
    assert f"times the checkpoint ({checkpoint.stat().st_size:,} bytes)" in capsys.readouterr().out
    ours = host.translate(checkpoint, "-beam_size", "1", "-min_length", "3")
    assert ctranslate2_lines(ctranslate2, exported, host) == ours and all(ours)


ROTARY = {"position_encoding": False, "max_relative_positions": -1, "layer_norm": "rms"}


@pytest.mark.parametrize(
    "options", [{}, {**ROTARY, "pos_ffn_activation_fn": "silu"}], ids=["plain", "rotary"]
)
def test_ctranslate2_scores_language_models_the_same(options: dict[str, Any], host: Host) -> None:
    """Unlike translators, also those with rotary positions, RMS norm and gated layers."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    checkpoint = host.train("model", embedding=FUNNEL, **{**host.language_model(), **options})
    run("onmt_release_model -format ctranslate2 -model", checkpoint, "-output", host.folder / "exported")
    model, vocabs, *_ = build_from_checkpoint(str(checkpoint))
    ids = [vocabs["tgt"](["<s>", "w1", "w2", "w3", "w9"])]
    generator = ctranslate2.Generator(str(host.folder / "exported"), compute_type="float32")
    theirs = torch.tensor(np.array(generator.forward_batch(ids, return_log_probs=True)))
    with torch.no_grad():
        states = model(torch.tensor(ids)[..., None], None, torch.tensor([5]))[0]
        torch.testing.assert_close(theirs, model.generator(states).log_softmax(dim=-1))


@pytest.mark.slow
def test_ctranslate2_keeps_the_codes_of_a_table_in_int8(host: Host) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    checkpoint = host.train("model", embedding={"method": "standard"}, train_steps=20)
    small, exported = host.folder / "small.pt", host.folder / "exported"
    files = ["--model", str(checkpoint), "--output", str(small)]
    assert main(["compress", "--method", "standard", "--store", "int8", *files]) == 0
    run("onmt_release_model -format ctranslate2 -quantization int8 -model", small, "-output", exported)
    (embedding,) = shared_embeddings_of(build_from_checkpoint(str(small))[0])
    (table,) = [part for part in embedding.parameters() if isinstance(part, PackedTensor)]
    assert (exported / "model.bin").read_bytes().count(table.packed.codes.numpy().tobytes()) == 1
    theirs = ctranslate2_lines(ctranslate2, exported, host)
    ours = host.translate(small, "-beam_size", "1", "-min_length", "3")
    assert theirs == ours


@pytest.mark.slow_except("output")
@pytest.mark.parametrize("kind", ["tied", "output"])
def test_export_keeps_the_bias_of_the_output(kind: str, host: Host) -> None:
    settings = {"method": "standard", "output_bias": True}
    tied, untied = {"embedding": settings}, {"output_embedding": settings, **APART, "share_vocab": True}
    checkpoint = host.train("model", **(tied if kind == "tied" else untied), train_steps=20)
    model, plain = build_from_checkpoint(str(checkpoint))[0], dense_checkpoint(str(checkpoint))
    assert plain["opt"].embedding is None and plain["opt"].output_embedding is None
    head = plain["generator"]
    hidden = torch.randn(3, head["weight"].size(1))
    assert model.generator.embedding.bias.abs().max() > 0
    torch.testing.assert_close(F.linear(hidden, **head), model.generator(hidden))


@pytest.mark.parametrize("options", [{}, {"num_classes": 9, "class_dims": [10]}], ids=["file", "sizes"])
def test_classes_are_part_of_the_checkpoint(
    options: dict[str, Any], host: Host, error_line: ErrorLine
) -> None:
    """A class file is read when training starts, and not needed afterwards."""
    words = [*(f"w{number}" for number in range(40)), *(f"v{number}" for number in range(40))]
    generator = np.random.default_rng(0)
    file = host.folder / "classes.npz"
    WordClasses(
        tuple(words),
        np.arange(80) % 9,
        generator.normal(size=(9, 3)).astype(np.float32),
        generator.normal(size=(80, 3)).astype(np.float32),
    ).save(file)
    embedding = {"method": "uncle", "unique_dim": 6, "classes": str(file), **options}
    checkpoint = host.train("model", embedding=embedding, train_steps=3)
    config = host.config("model", embedding=embedding)
    model, vocabs, *_ = build_from_checkpoint(str(checkpoint))
    (layer,) = shared_embeddings_of(model)
    assert int(layer.classes[vocabs["src"]["v5"]]) == 45 % 9
    file.unlink()
    assert len(host.translate(checkpoint)) == 7
    run("onmt_train -config", config, "-train_from", checkpoint)
    assert describe_checkpoint(host.folder / "model_step_6.pt")["config"]["embedding"]["classes"] == "stored"
    message = error_line("onmt_train -config", host.config("other", embedding=embedding))
    assert "classes.npz" in message


RECURRENT = {"encoder_type": "rnn", "decoder_type": "rnn", "position_encoding": False, "train_steps": 1}
ADAPTIVE = {"embedding": {"method": "adaptive", "cutoffs": [20], "factor": 2}}


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (RECURRENT, "transformer"),
        (ADAPTIVE, "adaptive"),
        ({"copy_attn": True}, "copy_attn: True"),
        ({"decoder_positions": ["ldpe"]}, "decoder_positions: ['ldpe']"),
        ({"position_encoding": False, "max_relative_positions": -1}, "max_relative_positions: -1"),
        ({"norm_eps": 0.1}, "norm_eps: 0.1"),
    ],
    ids=str,
)
def test_ctranslate2_rejects_unsupported_models(
    options: dict[str, Any], printed: str, host: Host, error_line: ErrorLine
) -> None:
    checkpoint = host.train("model", **{"embedding": FUNNEL, "train_steps": 1, **options})
    output = host.folder / "exported"
    line = error_line("onmt_release_model -format ctranslate2 -model", checkpoint, "-output", output)
    assert printed in line and not output.exists()


@pytest.mark.slow
def test_checkpoint_of_plain_upstream(host: Host) -> None:
    """A model that OpenNMT-py alone trained and saved loads, translates, averages and resumes."""
    import pyonmttok

    if pyonmttok.__spec__.origin is None:
        pytest.skip("upstream alone needs pyonmttok")
    config = host.config("plain", train_steps=3)
    upstream = [sys.executable, "-m", "onmt.bin.train", "-config", str(config)]
    subprocess.run(upstream, check=True, capture_output=True, timeout=SECONDS)
    checkpoint = host.folder / "plain_step_3.pt"
    assert "resume" not in read_checkpoint(checkpoint)
    assert len(host.translate(checkpoint)) == 7
    run("onmt_average_models -models", checkpoint, "-output", host.folder / "mean.pt")
    assert host.translate(host.folder / "mean.pt") == host.translate(checkpoint)
    run("onmt_train -config", host.config("plain", train_steps=4), "-train_from", checkpoint)
    model, *_ = build_from_checkpoint(str(host.folder / "plain_step_4.pt"))
    assert model.generator.weight is model.decoder.embeddings.word_lut.weight


UPSTREAM_TESTS = (
    "attention beam_search copy_generator embeddings greedy_search models structured_attention text_utils "
    "translator"
).split()

# Uses the source length of hypothesis b for sentence b.
WRONG = "not test_beam_returns_attn_with_correct_length"


@pytest.mark.slow
def test_upstream_tests_pass_with_the_patches(tmp_path: Path) -> None:
    """OpenNMT's own tests (those that need no data of its repository), with all patches applied."""
    import onmt

    (tmp_path / "conftest.py").write_text("from nmt.hooks import apply_patches\napply_patches()\n")
    folder = Path(onmt.__file__).parent / "tests"
    for name in [*(f"test_{name}.py" for name in UPSTREAM_TESTS), "utils_for_tests.py"]:
        shutil.copy(folder / name, tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", WRONG, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:]
