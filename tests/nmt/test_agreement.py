"""Compressing a model of OpenNMT-py says how much of its predictions it kept: last line, and report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nmt.compression import CheckpointModel
from tests.nmt.conftest import Host
from tests.nmt.test_compression import STANDARD, Trained, compress

pytestmark = pytest.mark.usefixtures("installed_host")

LONG = {"train_steps": 60, "save_checkpoint_steps": 60}
KINDS: dict[str, dict[str, Any]] = {
    "recurrent": {"encoder_type": "brnn", "decoder_type": "rnn", "position_encoding": False},
    "copying": {"copy_attn": True, "reuse_copy_attn": False},
    "untied": {"share_embeddings": False, "share_decoder_embeddings": False},
}


def kept(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[str, dict[str, Any]]:
    """The last line, and what the report has about it."""
    report = folder / "report.json"
    capsys.readouterr()
    method, *options = arguments
    compress(model, str(method), folder / "small.pt", *options, "--report", report, "--force")
    return capsys.readouterr().out.splitlines()[-1], json.loads(report.read_text())["kept"]


@pytest.mark.slow
def test_ruin_is_told_from_health(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_validation_is_measured_instead(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host, model = trained(embedding=STANDARD, **LONG)
    lines = host.translate(model, "-beam_size", "5", "-max_length", "250", "-max_length_ratio", "1.25")
    sides = ["--validation-source", host.folder / "test.src"]
    sides += ["--validation-target", host.write("test.wanted", lines)]
    line, found = kept(model, tmp_path, capsys, "projective", "--rank", 1, *sides)
    quality = json.loads((tmp_path / "report.json").read_text())["quality"]
    assert quality["before"] == pytest.approx(100) and found["share"] == pytest.approx(quality["after"] / 100)
    assert line.startswith(f"warning: kept {int(quality['after'])}% of the BLEU of the original")


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_other_kinds_are_asked(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    _, model = trained(embedding=STANDARD, **KINDS[kind])
    line, found = kept(model, tmp_path, capsys, "standard")
    assert line.startswith("kept 100% of the predictions") and found["share"] == pytest.approx(1)


def test_models_with_features_of_words_are_asked(
    host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Features that are not in a text are unknown."""
    plain = host.folder / "plain.src"
    plain.write_text((host.folder / "valid.src").read_text())
    for split in ("train", "valid"):
        words = (host.folder / f"{split}.src").read_text().split("\n")[:-1]
        host.write(f"{split}.src", [" ".join(f"{word}￨A" for word in line.split()) for line in words])
    host.write("vocab_feat0", ["A\t9"])
    options = {"n_src_feats": 1, "feat_merge": "sum", "transforms": ["inferfeats"], "share_embeddings": False}
    model = host.train("model", embedding=STANDARD, **options)
    line, found = kept(model, tmp_path, capsys, "standard", "--text", plain)
    assert line.startswith("kept 100% of the predictions") and found["share"] == pytest.approx(1)


def test_it_is_asked_after_every_word_of_its_own_greedy_translation(trained: Trained) -> None:
    """What it predicts then is that translation."""
    host, model = trained(embedding=STANDARD, **LONG)
    sentence = host.write("one.src", ["w3 w7 w1 w20 w4"])
    greedy = ["-beam_size", "1", "-max_length", "12"]
    (wanted,) = host.translate(model, *greedy, source="one.src")
    read = CheckpointModel(model)
    found = read.probe([sentence], 1).predict()
    words = [read.vocabs["tgt"].ids_to_tokens[word] for word in found.words.tolist()]
    assert words[: len(wanted.split())] == wanted.split()
    again = read.probe([sentence], 1).predict()
    assert torch.equal(found.words, again.words) and torch.equal(found.probabilities, again.probabilities)
    first, other = (read.probe(None, seed).predict() for seed in (1, 2))
    assert len(first.words) != len(other.words) or not torch.equal(first.words, other.words)


def test_lines_of_another_language_are_left_out(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host, model = trained(embedding=STANDARD)
    known, unknown = host.write("known", ["w3 w7 x"]), host.write("unknown", ["x y w3", "x y z"] * 30)
    read = CheckpointModel(model)
    assert len(read.probe([known, unknown], 1).predict().words) == len(read.probe([known], 1).predict().words)
    line, found = kept(model, tmp_path, capsys, "standard", "--text", unknown)
    assert found["share"] is None and found["needs_training"]
    assert line.startswith("warning: could not verify that this model still works (the vocabulary has less")


def test_language_models_read_or_write(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"model_task": "lm", "encoder_type": "transformer_lm", "decoder_type": "transformer_lm"}
    folder = trained(embedding=STANDARD)[0].folder
    data = {
        split: {"path_src": str(folder / f"{name}.src")}
        for split, name in (("c", "train"), ("valid", "valid"))
    }
    shared = {"share_embeddings": False, "share_decoder_embeddings": True}
    _, model = trained(embedding=STANDARD, data=data, **options, **shared)
    for source, said in (([], "that it generated"), (["--text", folder / "test.src"], "of test.src")):
        line, _ = kept(model, tmp_path, capsys, "projective", "--rank", 16, *source)
        assert line.startswith("kept 100% of the predictions") and said in line
        line, found = kept(model, tmp_path, capsys, "projective", "--rank", 1, *source)
        assert line.startswith("warning: kept") == found["needs_training"] and found["share"] < 1
