"""The quality of compressed translation models: BLEU, agreement of predictions, and word similarity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch

from nmt.compression import CheckpointModel
from nmt.translation import joined
from shared_embeddings.cli.main import main
from tests.helpers import best_words
from tests.nmt.conftest import Capture, Host, Patch, Trained
from tests.nmt.test_compression import STANDARD, compress
from tests.nmt.test_training import DEFINE_MAP

pytestmark = pytest.mark.usefixtures("installed_host")


def test_subwords_are_joined() -> None:
    assert joined("An@@ trie@@ b und Str@@", "bpe") == "Antrieb und Str"
    assert joined("▁An trieb ▁und ▁S tr", "sentencepiece") == "Antrieb und Str"
    assert joined("An@@ trieb ▁und", "none") == "An@@ trieb ▁und"


@pytest.mark.slow_except("none-none")
@pytest.mark.parametrize(("subwords", "tokenize"), [("none", "none"), ("bpe", "13a")])
def test_bleu_equals_that_of_the_commands(
    trained: Trained, tmp_path: Path, capsys: Capture, subwords: str, tokenize: str
) -> None:
    host, model = trained(embedding=STANDARD, train_steps=60, save_checkpoint_steps=60)
    # With an empty line, which the model does not get.
    source = host.write("some.src", [*host.folder.joinpath("valid.src").read_text().splitlines(), ""])
    usual = ["-beam_size", "5", "-max_length", "250", "-max_length_ratio", "1.25"]
    lines = [f"{line} v1 v2." for line in host.translate(model, *usual, source="some.src")]
    target, small, report = host.write("some.tgt", lines), tmp_path / "small.pt", tmp_path / "report.json"
    sides = ["--validation-source", source, "--validation-target", target, "--validation-subwords", subwords]
    asked = ["--rank", 14, "--store", "int8", "--report", report]
    compress(model, "projective", small, *asked, *sides)
    found = json.loads(report.read_text())["quality"]
    wanted = []
    for path in (model, small):
        translations = host.translate(path, *usual, source="some.src")
        wanted.append(sacrebleu.corpus_bleu(translations, [lines], tokenize=tokenize, force=True).score)
    assert (found["before"], found["after"]) == pytest.approx(wanted)
    assert wanted[0] > 0 and wanted[0] != wanted[1]
    assert found["measure"] == "BLEU" and f"tok:{tokenize}" in found["how"] and "beam 5" in found["how"]
    shown = capsys.readouterr().out
    before, after = wanted
    assert f"BLEU {after:.2f}, {before:.2f} before (" in shown


def test_user_errors_are_one_line_before_the_fit(
    trained: Trained, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    host, model = trained(embedding=STANDARD)
    output = tmp_path / "small.pt"
    source, target, empty = host.folder / "valid.src", host.folder / "valid.tgt", tmp_path / "empty"
    empty.write_text("")
    pieces = tmp_path / "pieces"
    pieces.write_text("v1 v@@ 2\n" * 10)

    def fit(*arguments: object, **options: object) -> None:
        raise AssertionError("a fit began")

    monkeypatch.setattr("shared_embeddings.compress.session.fit", fit)
    asked = ["--model", model, "--method", "projective", "--rank", 4, "--output", output]
    given, wanted = "--validation-source", "--validation-target"
    for arguments, message in [
        ([given, tmp_path / "none", wanted, target], "no such file"),
        ([given, source, wanted, empty], "empty: is empty"),
        ([given, source, wanted, host.folder / "test.tgt"], "has 10 lines"),
        ([wanted, target], "without --validation-source"),
        ([given, source], "without --validation-target"),
        (["--validation", source], "is a translation model"),
    ]:
        capsys.readouterr()
        assert main(["compress", *map(str, [*asked, *arguments])]) == 2
        # After earlier translations in this process, OpenNMT's log also goes to stderr.
        (line,) = (text for text in capsys.readouterr().err.splitlines() if "Loading checkpoint" not in text)
        assert message in line
    assert not output.exists()


LONG = {"train_steps": 60, "save_checkpoint_steps": 60}
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


@pytest.mark.slow
def test_damaged_models_are_reported(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    host, model = trained(embedding=STANDARD, **LONG)
    for source in ([], ["--text", host.folder / "valid.src"]):
        line, found = kept(model, tmp_path, capsys, "projective", "--rank", 16, *source)
        assert (
            line.startswith("kept 100% of the predictions of the original (") and not found["needs_training"]
        )
        line, found = kept(model, tmp_path, capsys, "projective", "--rank", 1, *source)
        assert line.startswith("warning: kept ") and found["share"] < 0.6 and found["needs_training"]
        assert line.endswith("): train this model before using it")
        assert ("translations of valid.src" if source else "translations of random words") in line


def test_validation_replaces_agreement(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    host, model = trained(embedding=STANDARD, **LONG)
    lines = host.translate(model, "-beam_size", "5", "-max_length", "250", "-max_length_ratio", "1.25")
    sides = ["--validation-source", host.folder / "test.src"]
    sides += ["--validation-target", host.write("test.wanted", lines)]
    line, found = kept(model, tmp_path, capsys, "projective", "--rank", 1, *sides)
    quality = json.loads((tmp_path / "report.json").read_text())["quality"]
    assert quality["before"] == pytest.approx(100) and found["share"] == pytest.approx(quality["after"] / 100)
    assert line.startswith(f"warning: kept {int(quality['after'])}% of the BLEU of the original")


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_other_kinds_are_compared(host: Host, tmp_path: Path, capsys: Capture, kind: str) -> None:
    if kind == "features":  # those that are not in a text are unknown
        for split in ("train", "valid"):
            lines = (host.folder / f"{split}.src").read_text().splitlines()
            host.write(f"{split}.src", [" ".join(f"{word}￨A" for word in line.split()) for line in lines])
        host.write("vocab_feat0", ["A\t9"])
    model = host.train("model", embedding=STANDARD, **KINDS[kind])
    text = ("--text", host.folder / "test.src") if kind == "features" else ()
    line, found = kept(model, tmp_path, capsys, "standard", *text)
    assert line.startswith("kept 100% of the predictions") and found["share"] == pytest.approx(1)


def test_predictions_follow_the_greedy_translation(trained: Trained) -> None:
    """Its predictions are that translation."""
    host, model = trained(embedding=STANDARD, **LONG)
    sentence = host.write("one.src", ["w3 w7 w1 w20 w4"])
    greedy = ["-beam_size", "1", "-max_length", "12"]
    (wanted,) = host.translate(model, *greedy, source="one.src")
    read = CheckpointModel(model)
    found = best_words(read.samples([sentence], 1, 1000))
    words = [read.vocabs["tgt"].ids_to_tokens[word] for word in found.tolist()]
    assert words[: len(wanted.split())] == wanted.split()
    assert torch.equal(found, best_words(read.samples([sentence], 1, 1000)))
    first, other = (best_words(read.samples(None, seed, 1000)) for seed in (1, 2))
    assert len(first) != len(other) or not torch.equal(first, other)


def test_lines_of_another_language_are_skipped(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    host, model = trained(embedding=STANDARD)
    known, unknown = host.write("known", ["w3 w7 x"]), host.write("unknown", ["x y w3", "x y z"] * 30)
    read = CheckpointModel(model)
    both, one = (best_words(read.samples(texts, 1, 1000)) for texts in ([known, unknown], [known]))
    assert len(both) == len(one)
    line, found = kept(model, tmp_path, capsys, "standard", "--text", unknown)
    assert found["share"] is None and found["needs_training"]
    assert line.startswith("warning: could not verify that this model still works (the vocabulary has less")


def test_the_text_in_the_source_language_is_translated(trained: Trained) -> None:
    """All words of both texts are in the vocabulary, and the model writes those of the target."""
    host, model = trained(embedding=STANDARD, **LONG)
    source, target = host.folder / "valid.src", host.folder / "valid.tgt"
    unknown = host.write("u", ["x y z"])
    read = CheckpointModel(model)
    wanted = read.samples([source], 1, 1000)
    for texts in ([source, target], [target, unknown, source]):
        found = read.samples(texts, 1, 1000)
        assert found.how == wanted.how and found.how.endswith("tokens of its translations of valid.src")
        assert torch.equal(best_words(found), best_words(wanted))


def test_language_models_score_or_generate(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    host, _ = trained(embedding=STANDARD)
    _, model = trained(embedding=STANDARD, **host.language_model(), share_decoder_embeddings=True)
    for source, printed in (([], "that it generated"), (["--text", host.folder / "test.src"], "of test.src")):
        line, _ = kept(model, tmp_path, capsys, "projective", "--rank", 16, *source)
        assert line.startswith("kept 100% of the predictions") and printed in line
        line, found = kept(model, tmp_path, capsys, "projective", "--rank", 1, *source)
        assert line.startswith("warning: kept") == found["needs_training"] and found["share"] < 1


def correlations(model: Path, output: Path) -> dict[str, dict[str, Any]]:
    """The output of the command for each layer, by name."""
    assert main(["correlation", "--model", str(model), "--output", str(output)]) == 0
    layers = json.loads((output / "correlation.json").read_text())["layers"]
    assert all((output / layer["picture"]).exists() for layer in layers)
    return {f"{layer['embedding']}: {layer['layer']}": layer for layer in layers}


@pytest.mark.slow
def test_define_layer_by_layer(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    _, model = trained(embedding={**DEFINE_MAP, "output": "table", "output_projection": False})
    found = correlations(model, tmp_path)
    layers = ("map", "entry", "layer 1", "layer 1, group 1", "layer 1, group 2", "layer 2", "output")
    assert list(found) == [f"target: {layer}" for layer in layers]
    first, group = found["target: layer 1"], found["target: layer 1, group 2"]
    assert first["groups"] == 2 and first["between_groups"] > 0 and group["width"] * 2 == first["width"]
    # The padding word has no vector.
    assert {layer["words"] for layer in found.values()} == {88 - 1}
    assert f"{first['mean_correlation']:.4f}" in capsys.readouterr().out


@pytest.mark.slow
def test_both_sides_of_a_plain_model(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    _, model = trained(share_embeddings=False, share_decoder_embeddings=False)
    assert list(correlations(model, tmp_path / "maps")) == ["source: output", "target: output"]
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("w1\tw2\t1\nw1\tw3\t2\nv1\tnowhere\t3\n")
    capsys.readouterr()
    assert main(["similarity", "--model", str(model), "--pairs", str(pairs)]) == 0
    text = capsys.readouterr().out
    assert "source: 88 words in 16 dimensions" in text and "target: 88 words" in text
    assert "2 of 3 (67%)" in text
