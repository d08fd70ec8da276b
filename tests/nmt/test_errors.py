"""User errors of all commands are one line with the value and the remedy, and leave no files."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nmt import cli
from nmt.checkpoints import check_output, read_checkpoint
from tests.nmt.conftest import FUNNEL, Capture, ErrorLine, Host, Patch, Trained, run
from tests.nmt.test_training import DEFINE_MAP, METHODS

UNTIED = {"share_embeddings": False, "share_decoder_embeddings": False}
WHOLE_DEFINE = {**DEFINE_MAP, "output_projection": False}


def shown(value: object) -> str:
    return str(value)[:60]


# Options of a training, with a shared embedding unless they say otherwise, and a part of the error.
TRAINING: list[tuple[dict[str, Any], str]] = [
    # Of OpenNMT-py
    ({"generator_function": "sparsemax"}, "generator_function: sparsemax does not work"),
    ({"optim": "fusedadam"}, "fused_adam_cuda"),
    ({"quant_layers": ["w_1"], "quant_type": "bnb_8bit"}, "bitsandbytes"),
    ({"valid_steps": 0}, "valid_steps: 0 is too small; expected at least 1"),
    ({"train_steps": -1}, "train_steps: -1 is too small; expected at least 0"),
    ({"layers": 0}, "layers: 0 is too small; expected at least 1, or -1"),
    ({"decay_method": "noam", "warmup_steps": 0}, "warmup_steps: 0 is too small"),
    ({"accum_steps": [5]}, "accum_steps: [5] is not an increasing list of steps"),
    ({"accum_count": [1, 2], "accum_steps": [0, 0]}, "accum_steps: [0, 0] is not an increasing"),
    ({"label_smoothing": ".nan"}, "'.nan' is not a finite number"),
    ({"encoder_type": "transformr"}, "encoder_type: 'transformr' is unknown; use brnn or"),
    ({"batch_size": [3]}, "batch_size can't be set to a list"),
    ({"batch_size": {"a": 1}}, "is not a whole number"),
    ({"bridge_extra_node": "maybe"}, "'maybe' is neither true nor false"),
    ({"world_size": 2}, "world_size: 2, but gpu_ranks is empty"),
    ({"gpu_ranks": [0], "world_size": 1}, "gpu_ranks: [0], but torch finds no CUDA device"),
    ({"copy_attn": True, "model_task": "lm"}, "model_task: lm lacks"),
    ({"decoder_type": "cnn"}, "encoder_type: transformer does not work with decoder_type: cnn"),
    ({"encoder_type": "mean", "decoder_type": "cnn"}, "mean does not work with decoder_type: cnn"),
    ({"decoder_type": "rnn"}, "encoder_type: transformer does not work with decoder_type: rnn"),
    (
        {"optim": "sparseadam", "embedding": None, "share_decoder_embeddings": False},
        "max_grad_norm: 5 does not work with optim: sparseadam",
    ),
    # Files and data
    ({"src_vocab": "/nowhere/vocab"}, "/nowhere/vocab: no such file; create it with onmt_build_vocab"),
    ({"train_from": "/nowhere/model.pt"}, "/nowhere/model.pt"),
    ({"src_embeddings": "/nowhere"}, "src_embeddings: no such file: /nowhere"),
    ({"transforms": 5}, "invalid choice: '5'"),
    # Embeddings
    ({"embedding": {"method": "funel", "rank": 4}}, "funnel"),
    ({"embedding": {"method": "funnel", "rnk": 4}}, "unknown option 'rnk'. Did you mean 'rank'?"),
    ({"embedding": {"method": "funnel", "rank": 17}}, "17"),
    ({"embedding": {**DEFINE_MAP, "depth": 0}}, "'depth' is 0"),
    (
        {"embedding": {**FUNNEL, "embedding_dim": 8}},
        "'embedding_dim' follows from the vocabulary",
    ),
    ({"embedding": dict([*FUNNEL.items(), (5, 3)])}, "the key '5' is not text"),
    ({"embedding": "funnel"}, "embedding: 'funnel' does not name a method"),
    ({"embedding": "{[1]: 2}"}, "YAML"),
    ({"embeding": FUNNEL}, "Did you mean"),
    ({"embedding": WHOLE_DEFINE}, "output_projection"),
    ({"embedding": {**WHOLE_DEFINE, "output": "table"}, **UNTIED}, "output: table has no effect"),
    ({"embedding": {"method": "standard", "output_bias": True}, **UNTIED}, "output_bias has no effect"),
    (
        {"share_embeddings": False, "src_embedding": FUNNEL, "tgt_embedding": FUNNEL},
        "embedding: has no effect",
    ),
    ({"src_embedding": {"method": "standard"}}, "share_embeddings: true needs one embedding"),
    ({"output_embedding": FUNNEL}, "output_embedding: has no effect with share_decoder_embeddings"),
    ({"output_embedding": DEFINE_MAP, **UNTIED}, "output layer does not use; set another `output`"),
    (
        {"output_embedding": {**METHODS["define"], "output": "none"}, **UNTIED},
        "output_embedding needs an output",
    ),
    ({"output_embedding": {"method": "funnel"}, **UNTIED}, "'rank' is missing"),
    ({"freeze_word_vecs_enc": True}, "freeze_word_vecs_enc: cannot be combined with `embedding`"),
    ({"parallel_mode": "tensor_parallel"}, "tensor_parallel does not work with `embedding`"),
    ({"optim": "sparseadam"}, "optim: sparseadam"),
    ({"lora_embedding": True}, "lora_embedding"),
]


@pytest.mark.parametrize(("options", "printed"), TRAINING, ids=shown)
def test_training_fails(options: dict[str, Any], printed: str, host: Host, error_line: ErrorLine) -> None:
    if "gpu_ranks" in options and torch.cuda.is_available():
        pytest.skip("a GPU is there")
    folder = host.folder / "new"
    config = host.config("model", **{"embedding": FUNNEL, "save_model": str(folder / "run"), **options})
    config.write_text(config.read_text().replace("'.nan'", ".nan"))
    assert printed in error_line("onmt_train -config", config)
    assert not folder.exists()


@pytest.mark.parametrize("option", ["-freeze_word_vecs_enc", "-lora_embedding"])
def test_options_that_do_not_work_with_the_embedding_of_a_checkpoint_fail(
    option: str, host: Host, error_line: ErrorLine
) -> None:
    start = host.train("start", embedding=FUNNEL, train_steps=1)
    config = host.config("next")
    line = error_line("onmt_train -config", config, "-train_from", start, option)
    assert f"{option[1:]}: cannot be combined with `embedding`" in line


def test_transforms_may_drop_the_examples_of_some_buckets_but_not_all(
    host: Host, error_line: ErrorLine
) -> None:
    filters = {"transforms": ["filtertoolong"], "tgt_seq_length": 7, "bucket_size": 1}
    host.train("some", embedding=FUNNEL, src_seq_length=3, valid_steps=3, **filters)
    host.write("train.src", ["w1 w2"] * 90)
    config = host.config("none", embedding=FUNNEL, src_seq_length=1, **filters)
    assert "data: the transforms drop all training examples" in error_line("onmt_train -config", config)


def test_more_processes_than_gpus_fail(host: Host, monkeypatch: Patch, error_line: ErrorLine) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = host.config("model", embedding=FUNNEL, world_size=2, gpu_ranks=[0, 1])
    assert "gpu_ranks: [0, 1], but torch finds 1 CUDA devices" in error_line("onmt_train -config", config)


def test_files_that_do_not_fit_are_named(host: Host, error_line: ErrorLine) -> None:
    config, vocabulary = host.config("model", embedding=FUNNEL), host.folder / "vocab"
    vocabulary.write_bytes(b"w1\t5\n\xff\t3\n")
    assert f"vocabulary {vocabulary}: is not UTF-8 at byte 5" in error_line("onmt_train -config", config)
    vocabulary.write_bytes(b"w1\t5\n\t3\n")
    assert "line 2" in error_line("onmt_train -config", config)
    assert "/nowhere.yaml" in error_line("onmt_train -config /nowhere.yaml")


def test_repeated_options_fail(host: Host, error_line: ErrorLine) -> None:
    config = host.config("model")
    line = error_line("onmt_train -batch_size 3 -batch_size 4 -config", config)
    assert "option -batch_size is given twice" in line
    line = error_line("onmt_train -max_grad_norm 3 -max_grad=4 -config", config)
    assert "option -max_grad is given twice" in line
    text = config.read_text()
    config.write_text(f"{text}batch_size: 3\n")
    assert "the key 'batch_size' is given twice" in error_line("onmt_train -config", config)
    config.write_text(f"{text}--batch_size: 3\n")
    assert "the option batch_size is given twice" in error_line("onmt_train -config", config)


@pytest.mark.slow_except("0")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_line_that_is_not_utf8_is_found(workers: int, host: Host, error_line: ErrorLine) -> None:
    """Also if a worker of the data loader finds it, whose error arrives as the text of a traceback."""
    path = host.folder / "train.tgt"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:4], b"\xff", *lines[5:]]))
    line = error_line("onmt_train -config", host.config("model", embedding=FUNNEL, num_workers=workers))
    assert "data: corpus: " in line and str(path) in line and "not UTF-8" in line


def test_errors_in_workers_are_one_line(capsys: Capture) -> None:
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


def test_resuming_with_other_words_or_embeddings_fails(
    trained: Trained, host: Host, error_line: ErrorLine
) -> None:
    _, checkpoint = trained(embedding=FUNNEL)
    resumed = ("-train_from", checkpoint)
    words = (host.folder / "vocab").read_text().splitlines()
    other = host.write("other", [*words[1:], "x1\t2"])
    config = host.config("again", embedding=FUNNEL, src_vocab=str(other), train_steps=7)
    line = error_line("onmt_train -config", config, *resumed)
    assert f"src_vocab: lacks 1 of the 84 words of the checkpoint {checkpoint}, such as 'w0'" in line
    more = host.write("more", [*words, "x1\t2"])
    host.train("again", *resumed, embedding=FUNNEL, src_vocab=str(more), train_steps=7)
    line = error_line("onmt_train -config", host.config("new", embedding={"method": "standard"}), *resumed)
    assert "embedding: {'method': 'standard'} has no effect with train_from" in line
    config = host.config("new", embedding=FUNNEL, update_vocab=True, reset_optim="all")
    assert "update_vocab" in error_line("onmt_train -config", config, *resumed)


# Checkpoints


def broken(kind: str, checkpoint: Path, folder: Path) -> Path:
    """A damaged checkpoint, or another file."""
    path = folder / f"{kind}.pt"
    content = {
        "truncated": checkpoint.read_bytes()[: checkpoint.stat().st_size // 2],
        "empty": b"",
        "text": b"not a model",
        "cut number": pickle.dumps({"step": 1.5}, protocol=2)[:-8],
    }
    if kind in content:
        path.write_bytes(content[kind])
    elif kind != "missing":
        torch.save({"foreign": {"state_dict": {}}, "code": {"opt": os.system}}[kind], path)
    return path


@pytest.mark.parametrize("kind", ["truncated", "empty", "text", "cut number", "foreign", "code", "missing"])
@pytest.mark.parametrize(
    "name", ["onmt_translate", "onmt_train", "onmt_release_model", "onmt_average_models"]
)
def test_broken_checkpoints(
    kind: str, name: str, trained: Trained, tmp_path: Path, error_line: ErrorLine
) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    path, output = broken(kind, checkpoint, tmp_path), tmp_path / "kept"
    output.write_text("kept")
    arguments: dict[str, list[object]] = {
        "onmt_translate": ["-model", path, "-src", host.folder / "test.src", "-output", output],
        "onmt_train": ["-config", host.config("again", embedding=FUNNEL), "-train_from", path],
        "onmt_release_model": ["-model", path, "-output", output, "-force"],
        "onmt_average_models": ["-models", checkpoint, path, "-output", output, "-force"],
    }
    assert str(path) in error_line(name, *arguments[name])
    assert output.read_text() == "kept"


def test_checkpoint_that_does_not_fit_its_vocabulary(
    trained: Trained, tmp_path: Path, error_line: ErrorLine
) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    saved, path = read_checkpoint(checkpoint), tmp_path / "shrunk.pt"
    saved["vocab"]["src"] = saved["vocab"]["tgt"] = saved["vocab"]["src"][:-8]
    torch.save(saved, path)
    source, output = host.folder / "test.src", tmp_path / "out"
    line = error_line("onmt_translate -model", path, "-src", source, "-output", output)
    assert "vocabulary" in line and "(88, 4)" in line and "(80, 4)" in line


def test_averaging_needs_one_model(trained: Trained, tmp_path: Path, error_line: ErrorLine) -> None:
    _, checkpoint = trained(embedding=FUNNEL)
    _, standard = trained(embedding={"method": "standard"})
    saved, reordered, mean = read_checkpoint(checkpoint), tmp_path / "other.pt", tmp_path / "mean.pt"
    words = saved["vocab"]["src"][::-1]
    torch.save({**saved, "vocab": {**saved["vocab"], "src": words, "tgt": words}}, reordered)
    for other in (reordered, standard):
        assert str(other) in error_line("onmt_average_models -models", checkpoint, other, "-output", mean)
    assert not mean.exists()


# Outputs


def test_unwritable_output_fails_before_any_work(
    trained: Trained, tmp_path: Path, monkeypatch: Patch, error_line: ErrorLine
) -> None:
    import onmt.bin.translate

    host, checkpoint = trained(embedding=FUNNEL)
    monkeypatch.setattr(onmt.bin.translate, "translate", lambda opt: pytest.fail("it translates"))
    monkeypatch.setattr("onmt.train_single.build_model", lambda *args: pytest.fail("it trains"))
    monkeypatch.setattr("nmt.checkpoints.average_checkpoints", lambda *args: pytest.fail("it averages"))
    file = host.folder / "test.src"
    for path, printed in ((tmp_path, "is a folder; name a file"), (file / "x", "cannot be written")):
        for command, *arguments in (
            ("onmt_translate -model", checkpoint, "-src", file),
            ("onmt_average_models -force -models", checkpoint),
            ("onmt_release_model -force -model", checkpoint),
        ):
            line = error_line(command, *arguments, "-output", path)
            assert "output: " in line and printed in line
    config = host.config("model", embedding=FUNNEL, save_model=f"{file}/model")
    assert "save_model: the folder" in error_line("onmt_train -config", config)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_fails(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(ValueError, match="cannot be written to; choose another one"):
        check_output("output", tmp_path / "file")


def test_outputs_that_exist_are_kept(host: Host, error_line: ErrorLine) -> None:
    config, vocabulary = host.config("model"), (host.folder / "vocab").read_text()
    line = error_line("onmt_build_vocab -config", config, "-save_data", host.folder / "s")
    assert "-overwrite" in line
    assert (host.folder / "vocab").read_text() == vocabulary
    text = host.folder / "train.src"
    before = text.read_bytes()
    for option in ("-log_file", "-save_config"):
        line = error_line("onmt_train -config", config, option, text)
        assert "would replace the file of data: corpus: path_src" in line
        assert text.read_bytes() == before


# Vocabularies


def test_vocabulary_file_name_may_have_brackets(host: Host) -> None:
    config = host.config("model", src_vocab=str(host.folder / "vocab[1]"))
    run("onmt_build_vocab -n_sample -1 -config", config, "-save_data", host.folder / "samples")
    assert len((host.folder / "vocab[1]").read_text().splitlines()) == 80
    assert not list(host.folder.glob("*incomplete*"))


# Translation and its server

NO_GPU = torch.cuda.device_count()


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ("-beam_size 0", "beam_size: 0 is too small; expected at least 1"),
        ("-max_length 0", "max_length: 0 is too small; expected at least 1"),
        ("-n_best 3 -beam_size 2", "n_best: 3 is more than beam_size 2"),
        ("-min_length 9 -max_length 8", "min_length: 9 is more than max_length 8"),
        ("-phrase_table /nowhere -replace_unk", "phrase_table: no such file: /nowhere"),
        (f"-phrase_table {__file__}", "phrase_table: has no effect without replace_unk"),
        ("-phrase_table gap.tgt -replace_unk", "line 2 of gap.tgt is not like 'source|||target'"),
        ("-beam_size 100000", "beam_size: 100000 is too large; expected at most 1,000"),
        ("-beam_size 999", "beam_size: 999 is more than the 88 words of the vocabulary"),
        ("-random_sampling_topk 99", "random_sampling_topk: 99 is more than the 88 words"),
        ("-random_sampling_topp 1.5", "random_sampling_topp: 1.5 is too large; expected at most 1"),
        ("-data_type audio", "data_type: 'audio' is unknown; use text"),
        ("-precision int8", "precision: 'int8' is unknown; use fp32 or fp16"),
        ("-fp32", "deprecated"),
        (f"-gpu {NO_GPU}", f"gpu: {NO_GPU}, but torch finds {NO_GPU} CUDA devices"),
        ("-world_size 2", "world_size: 2, but a translation runs in one process"),
        ("-tgt_file_prefix", "tgt_file_prefix: needs a file of target prefixes"),
        ("-tgt gap.tgt -tgt_file_prefix", "line 3 is empty"),
        (f"-seed {2**63}", "seed"),
    ],
)
def test_translation_fails(
    arguments: str, printed: str, trained: Trained, error_line: ErrorLine, monkeypatch: Patch
) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    monkeypatch.chdir(host.folder)
    host.write("gap.tgt", ["v1|||v1", "v2", "", "v4", "v5", "v6", "v7"])
    asked = ("-src", "test.src", "-output", "nothing", *arguments.split())
    assert printed in error_line("onmt_translate -model", checkpoint, *asked)
    assert not Path("nothing").exists()


def test_models_that_do_not_fit_into_an_ensemble_are_named(
    trained: Trained, host: Host, error_line: ErrorLine
) -> None:
    words = host.write("other", [*(host.folder / "vocab").read_text().splitlines(), "x1\t2"])
    _, one = trained(embedding=FUNNEL)
    other = host.train("other", src_vocab=str(words), embedding=FUNNEL, train_steps=1)
    files = ("-src", host.folder / "test.src", "-output", host.folder / "nothing")
    line = error_line("onmt_translate -model", one, other, *files)
    assert str(other) in line and "vocabulary" in line


@pytest.mark.parametrize("name", ["onmt_train", "onmt_build_vocab", "onmt_translate"])
def test_missing_subword_models_are_named(name: str, trained: Trained, error_line: ErrorLine) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    arguments: list[object] = ["-config", host.config("new", embedding=FUNNEL)]
    if name == "onmt_translate":
        arguments = ["-model", checkpoint, "-src", host.folder / "test.src"]
    elif name == "onmt_build_vocab":
        arguments += ["-save_data", host.folder / "samples"]
    line = error_line(f"{name} -transforms sentencepiece -src_subword_model /nowhere.model", *arguments)
    assert "src_subword_model: no such file: /nowhere.model" in line


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
    line = error_line("onmt_server --port 0 --model_config", path)
    assert "model_config" in line and f"{path}: " in line and printed in line
    assert "/nowhere.json" in error_line("onmt_server --model_config /nowhere.json")


def test_a_server_gpu_that_is_missing_fails(trained: Trained, tmp_path: Path, error_line: ErrorLine) -> None:
    _, checkpoint = trained(embedding=FUNNEL)
    shutil.copy(checkpoint, tmp_path / "model.pt")
    model = {"id": 1, "model": "model.pt", "load": True, "opt": {"gpu": NO_GPU}}
    path = tmp_path / "server.json"
    path.write_text(json.dumps({"models_root": str(tmp_path), "models": [model]}))
    assert f"gpu: {NO_GPU}, but torch finds" in error_line("onmt_server --model_config", path)
