"""User errors that used to cause a traceback, an unclear message, or a wrong model."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from nmt import cli
from nmt.checkpoints import check_output, read_checkpoint
from tests.nmt.conftest import FUNNEL, ErrorLine, Host, Trained, run


def corpora(host: Host, **changed: Any) -> dict[str, Any]:
    """A training corpus with changed settings; ``None`` removes one."""
    corpus = {**host._corpus("train"), **changed}
    return {"corpus": {key: value for key, value in corpus.items() if value is not None}}


# Options of upstream's


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ({"generator_function": "sparsemax"}, "generator_function: sparsemax does not work"),
        ({"optim": "fusedadam"}, "fused_adam_cuda"),
        ({"quant_layers": ["w_1"], "quant_type": "bnb_8bit"}, "bitsandbytes"),
    ],
)
def test_unsupported_options(
    options: dict[str, Any], printed: str, host: Host, error_line: ErrorLine
) -> None:
    config = host.config("model", embedding=FUNNEL, **options)
    assert printed in error_line("onmt_train", "-config", str(config))


# Data


def test_a_language_model_has_no_targets(host: Host, error_line: ErrorLine) -> None:
    options = {"model_task": "lm", "encoder_type": "transformer_lm", "decoder_type": "transformer_lm"}
    config = host.config("model", embedding=FUNNEL, share_embeddings=None, **options)
    assert "data: corpus: has a path_tgt, which" in error_line("onmt_train", "-config", str(config))


@pytest.mark.parametrize(
    ("changed", "printed"),
    [
        ({"path_tgt": None}, "data: corpus: has no path_tgt; name the file of its targets"),
        ({"path_src": [1]}, "data: corpus: option 'path_src' is [1], but it must be text"),
        ({"weight": 0}, "data: there is no training corpus; add one with a weight of at least 1"),
        ({"weight": 1.5}, "data: corpus: option 'weight' is 1.5, but it must be a whole number"),
        ({"weight": "two"}, "data: corpus: option 'weight' is 'two', but it must be a whole number"),
        ({"weight": -1}, "data: corpus: option 'weight' is -1, but it must be at least 0"),
        ({"transforms": 5}, "data: corpus: option 'transforms' is 5, but it must be a list"),
        ({"transforms": ["none"]}, "data: corpus: transform 'none' is unknown"),
        ({"path_source": "x"}, "data: corpus: unknown option 'path_source'. Did you mean 'path_src'?"),
        ({"transforms": ["clean"], "src_tgt_ratio": 0.5}, "src_tgt_ratio: 0.5 is too small"),
    ],
)
def test_a_corpus_fails(changed: dict[str, Any], printed: str, host: Host, error_line: ErrorLine) -> None:
    config = host.config("model", embedding=FUNNEL, data=corpora(host, **changed))
    assert printed in error_line("onmt_train", "-config", str(config))


def test_data_without_a_training_corpus_fails(host: Host, error_line: ErrorLine) -> None:
    for data in ({}, {"valid": host._corpus("valid")}):
        config = host.config("model", embedding=FUNNEL, data=data)
        assert "there is no training corpus" in error_line("onmt_train", "-config", str(config))


@pytest.mark.slow_except("0")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_line_that_is_not_utf8_is_found(workers: int, host: Host, error_line: ErrorLine) -> None:
    """Also if a worker of the data loader finds it, whose error arrives as the text of a traceback."""
    path = host.folder / "train.tgt"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:4], b"\xff", *lines[5:]]))
    config = host.config("model", embedding=FUNNEL, num_workers=workers)
    line = error_line("onmt_train", "-config", str(config))
    assert line.endswith(f"data: corpus: {path}: line 5 is not UTF-8 (invalid start byte); convert it")


def test_errors_in_workers_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "Caught FileNotFoundError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "worker.py", line 1, in load\n'
        "FileNotFoundError: [Errno 2] No such file or directory: 'train.src'\n"
    )

    @cli._command
    def fail() -> None:
        raise FileNotFoundError(text)

    with pytest.raises(SystemExit) as stop:
        fail()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.endswith(": [Errno 2] No such file or directory: 'train.src'\n") and "Traceback" not in error


def test_feature_separator_is_text_without_features(host: Host) -> None:
    text = ["w1￨w2 w3"] * 90
    for name in ("train.src", "train.tgt", "test.src"):
        host.write(name, text)
    (host.folder / "vocab").unlink()
    config = host.config("model", embedding=FUNNEL, train_steps=2, save_checkpoint_steps=2)
    samples = str(host.folder / "samples")
    run("onmt_build_vocab", "-config", str(config), "-n_sample", "-1", "-save_data", samples)
    assert (host.folder / "vocab").read_text(encoding="utf-8").split() == ["w1￨w2", "180", "w3", "180"]
    run("onmt_train", "-config", str(config))
    assert len(host.translate(host.folder / "model_step_2.pt")) == 90


def test_byte_order_marks_are_not_text(trained: Trained) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    plain, marked = "w1 w2\n", "\ufeffw1 w2\n"
    for name, text in (("plain", plain), ("marked", marked)):
        (host.folder / name).write_text(text, encoding="utf-8")
    options = ("-min_length", "1")
    assert host.translate(checkpoint, *options, source="plain") == host.translate(
        checkpoint, *options, source="marked"
    )
    vocabulary = host.folder / "vocab"
    (host.folder / "marked_vocab").write_text("\ufeff" + vocabulary.read_text(), encoding="utf-8")
    fresh = host.train("fresh", embedding=FUNNEL, src_vocab=str(host.folder / "marked_vocab"))
    assert read_checkpoint(fresh)["vocab"]["src"] == read_checkpoint(checkpoint)["vocab"]["src"]


# Options of training


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ({"valid_steps": 0}, "valid_steps: 0 is too small; expected at least 1"),
        ({"report_every": 0}, "report_every: 0 is too small"),
        ({"bucket_size": 0}, "bucket_size: 0 is too small"),
        ({"batch_size": -3}, "batch_size: -3 is too small"),
        ({"accum_count": [0]}, "accum_count: 0 is too small"),
        ({"heads": 0}, "heads: 0 is too small"),
        ({"train_steps": -1}, "train_steps: -1 is too small; expected at least 0"),
        ({"decay_method": "noam", "warmup_steps": 0}, "warmup_steps: 0 is too small"),
        ({"world_size": 2}, "world_size: 2, but gpu_ranks is empty"),
        ({"embedding": {**FUNNEL, "embedding_dim": 8}}, "embedding_dim follows from word_vec_size; remove"),
        ({"embedding": dict([*FUNNEL.items(), (5, 3)])}, "the key '5' is not text"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_training_fails(options: dict[str, Any], printed: str, host: Host, error_line: ErrorLine) -> None:
    options = {"save_model": str(host.folder / "new" / "model"), **options}
    config = host.config("model", **{"embedding": FUNNEL, **options})
    assert printed in error_line("onmt_train", "-config", str(config))
    assert not list(host.folder.glob("*.pt"))


def test_more_processes_than_gpus_fail(
    host: Host, monkeypatch: pytest.MonkeyPatch, error_line: ErrorLine
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = host.config("model", embedding=FUNNEL, world_size=2, gpu_ranks=[0, 1])
    line = error_line("onmt_train", "-config", str(config))
    assert "gpu_ranks: [0, 1], but torch finds 1 CUDA devices" in line


def test_a_vocabulary_that_is_not_utf8_is_named(host: Host, error_line: ErrorLine) -> None:
    path = host.folder / "vocab"
    path.write_bytes(b"w1\t5\n\xff\t3\n")
    line = error_line("onmt_train", "-config", str(host.config("model", embedding=FUNNEL)))
    assert f"vocabulary {path}: is not UTF-8 at byte 5" in line


def test_resuming_with_another_vocabulary_fails(trained: Trained, host: Host, error_line: ErrorLine) -> None:
    _, checkpoint = trained(embedding=FUNNEL)
    words = (host.folder / "vocab").read_text().splitlines()
    other = host.write("other", [*words[1:], "x1\t2"])
    config = host.config("again", embedding=FUNNEL, src_vocab=str(other), train_steps=7)
    line = error_line("onmt_train", "-config", str(config), "-train_from", str(checkpoint))
    assert f"src_vocab: lacks 1 of the 84 words of the checkpoint {checkpoint}, such as 'w0'" in line
    more = host.write("more", [*words, "x1\t2"])
    config = host.config("again", embedding=FUNNEL, src_vocab=str(more), train_steps=7)
    run("onmt_train", "-config", str(config), "-train_from", str(checkpoint))
    assert (host.folder / "again_step_7.pt").is_file()


# Output paths


def test_unwritable_output_fails_before_any_work(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_line: ErrorLine
) -> None:
    import onmt.bin.translate

    host, checkpoint = trained(embedding=FUNNEL)
    monkeypatch.setattr(onmt.bin.translate, "translate", lambda opt: pytest.fail("it translates"))
    monkeypatch.setattr("onmt.train_single.build_model", lambda *args: pytest.fail("it trains"))
    monkeypatch.setattr("nmt.checkpoints.average_checkpoints", lambda *args: pytest.fail("it averages"))
    file = str(host.folder / "test.src")
    for path, printed in ((str(tmp_path), "is a folder; name a file"), (f"{file}/x", "cannot be written")):
        for command, *arguments in (
            ("onmt_translate", "-model", str(checkpoint), "-src", file),
            ("onmt_average_models", "-force", "-models", str(checkpoint)),
            ("onmt_release_model", "-force", "-model", str(checkpoint)),
        ):
            line = error_line(command, *arguments, "-output", path)
            assert "output: " in line and printed in line
    config = host.config("model", embedding=FUNNEL, save_model=f"{file}/model")
    assert "save_model: the folder" in error_line("onmt_train", "-config", str(config))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_fails(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(ValueError, match="cannot be written to; choose another one"):
        check_output("output", tmp_path / "file")


def test_ctranslate2_output_cannot_be_a_file(trained: Trained, error_line: ErrorLine) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    output = host.write("taken", ["kept"])
    arguments = ["-model", str(checkpoint), "-output", str(output), "-format", "ctranslate2"]
    line = error_line("onmt_release_model", *arguments, "-quantization", "int8", "-force")
    assert f"output: {output} is a file" in line
    assert output.read_text() == "kept\n"


def test_logs_never_overwrite_texts(host: Host, error_line: ErrorLine) -> None:
    """The options of a run are not written either."""
    config = host.config("model", embedding=FUNNEL)
    for option in ("-log_file", "-save_config"):
        before = (host.folder / "train.src").read_bytes()
        line = error_line("onmt_train", "-config", str(config), option, str(host.folder / "train.src"))
        assert "would replace the file of data: corpus: path_src" in line
        assert (host.folder / "train.src").read_bytes() == before


def test_a_log_that_cannot_be_written_ends_a_translation(trained: Trained, error_line: ErrorLine) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    log, output = host.folder / "log", host.folder / "not written"
    log.unlink(missing_ok=True)
    try:
        os.mknod(log, stat.S_IFCHR | 0o666, os.makedev(1, 7))
    except PermissionError:
        pytest.skip("devices cannot be made here")
    asked = ["-model", str(checkpoint), "-src", str(host.folder / "test.src"), "-output", str(output)]
    assert "No space left on device" in error_line("onmt_translate", *asked, "-log_file", str(log))
    assert not output.exists()


# Vocabularies


def test_vocabulary_file_name_may_have_brackets(host: Host) -> None:
    config = host.config("model", src_vocab=str(host.folder / "vocab[1]"))
    samples = str(host.folder / "samples")
    run("onmt_build_vocab", "-config", str(config), "-n_sample", "-1", "-save_data", samples)
    assert len((host.folder / "vocab[1]").read_text().splitlines()) == 80
    assert not list(host.folder.glob("*incomplete*"))


def test_one_file_for_two_vocabularies_fails(host: Host, error_line: ErrorLine) -> None:
    path = str(host.folder / "new")
    config = host.config("model", share_vocab=False, src_vocab=path, tgt_vocab=path)
    line = error_line("onmt_build_vocab", "-config", str(config), "-save_data", str(host.folder / "samples"))
    assert f"tgt_vocab: {path} is also src_vocab" in line and "share_vocab" in line


def test_an_empty_vocabulary_is_not_written(host: Host, error_line: ErrorLine) -> None:
    for side in ("src", "tgt"):
        host.write(f"train.{side}", [""] * 90)
    path = host.folder / "new"
    config = host.config("model", src_vocab=str(path))
    arguments = ["-config", str(config), "-n_sample", "-1", "-save_data", str(host.folder / "samples")]
    assert "src_vocab: would be empty; data has no pair" in error_line("onmt_build_vocab", *arguments)
    assert not path.exists() and not list(host.folder.glob("*incomplete*"))


# Options of translation, and several models


@pytest.mark.parametrize("option", ["beam_size", "n_best", "max_length", "batch_size"])
def test_an_empty_search_fails(option: str, trained: Trained, error_line: ErrorLine) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    arguments = ["-model", str(checkpoint), "-src", str(host.folder / "test.src"), f"-{option}", "0"]
    line = error_line("onmt_translate", *arguments, "-output", str(host.folder / "none"))
    assert f"{option}: 0 is too small; expected at least 1" in line


@pytest.mark.parametrize("name", ["onmt_train", "onmt_build_vocab", "onmt_translate"])
def test_missing_subword_models_are_named(name: str, trained: Trained, error_line: ErrorLine) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    arguments = ["-config", str(host.config("new", embedding=FUNNEL))]
    if name == "onmt_translate":
        arguments = ["-model", str(checkpoint), "-src", str(host.folder / "test.src")]
    elif name == "onmt_build_vocab":
        arguments += ["-save_data", str(host.folder / "samples")]
    options = ["-transforms", "sentencepiece", "-src_subword_model", "/nowhere.model"]
    assert "src_subword_model: no such file: /nowhere.model" in error_line(name, *arguments, *options)


def test_a_missing_gpu_fails(trained: Trained, error_line: ErrorLine) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    number = torch.cuda.device_count()
    arguments = ["-model", str(checkpoint), "-src", str(host.folder / "test.src"), "-gpu", str(number)]
    line = error_line("onmt_translate", *arguments, "-output", str(host.folder / "none"))
    assert f"gpu: {number}, but torch finds {number} CUDA devices" in line


def test_averaging_needs_equal_vocabularies(trained: Trained, tmp_path: Path, error_line: ErrorLine) -> None:
    _, checkpoint = trained(embedding=FUNNEL)
    saved = read_checkpoint(checkpoint)
    words = saved["vocab"]["src"]
    saved["vocab"] = {**saved["vocab"], "src": words[::-1], "tgt": words[::-1]}
    other, mean = tmp_path / "other.pt", tmp_path / "mean.pt"
    torch.save(saved, other)
    line = error_line("onmt_average_models", "-models", str(checkpoint), str(other), "-output", str(mean))
    assert f"{other}: its vocabulary differs from {checkpoint}" in line
    assert not mean.exists()


# The server


@pytest.mark.parametrize(
    ("content", "printed"),
    [
        ("[]", "[] is not a mapping"),
        ("{}", "'models' is missing"),
        ('{"models": "x"}', "'models' is 'x', but it must be a list"),
        ('{"models": []}', "has no list of models"),
        ("{a", "cannot be read as JSON"),
    ],
)
def test_invalid_server_configurations_fail(
    content: str, printed: str, tmp_path: Path, error_line: ErrorLine
) -> None:
    path = tmp_path / "server.json"
    path.write_text(content)
    line = error_line("onmt_server", "--model_config", str(path), "--port", "0")
    assert "model_config" in line and f"{path}: " in line and printed in line


def test_a_server_gpu_that_is_missing_fails(trained: Trained, tmp_path: Path, error_line: ErrorLine) -> None:
    _, checkpoint = trained(embedding=FUNNEL)
    shutil.copy(checkpoint, tmp_path / "model.pt")
    number = torch.cuda.device_count()
    model = {"id": 1, "model": "model.pt", "load": True, "opt": {"gpu": number}}
    path = tmp_path / "server.json"
    path.write_text(json.dumps({"models_root": str(tmp_path), "models": [model]}))
    assert f"gpu: {number}, but torch finds" in error_line("onmt_server", "--model_config", str(path))
