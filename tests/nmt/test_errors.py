"""User errors of all commands are one line with the value and the remedy, and leave no files."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from nmt.checkpoints import read_checkpoint
from tests.nmt.conftest import FUNNEL, ErrorLine, Host, Patch, Trained, run
from tests.nmt.test_training import DEFINE_MAP, METHODS

UNTIED = {"share_embeddings": False, "share_decoder_embeddings": False}
WHOLE_DEFINE = {**DEFINE_MAP, "output_projection": False}


def shown(value: object) -> str:
    return str(value)[:60]


# Options of a training, with a shared embedding unless they say otherwise, and a part of the error.
TRAINING: list[tuple[dict[str, Any], str]] = [
    # Of OpenNMT-py, by its own errors
    ({"transforms": 5}, "invalid choice: '5'"),
    # Files and data
    ({"src_vocab": "/nowhere/vocab"}, "src vocab"),
    ({"train_from": "/nowhere/model.pt"}, "/nowhere/model.pt"),
    ({"data": {"corpus": {"path_src": "/nowhere/a", "path_tgt": "/nowhere/b"}}}, "corpus/path_src"),
    # Embeddings
    ({"embedding": {"method": "funel", "rank": 4}}, "funnel"),
    (
        {"embedding": {**FUNNEL, "embedding_dim": 8}},
        "'embedding_dim' follows from the vocabulary",
    ),
    ({"embedding": "funnel"}, "embedding: 'funnel' is not a mapping"),
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
    ({"freeze_word_vecs_enc": True}, "freeze_word_vecs_enc: cannot be combined with `embedding`"),
    ({"parallel_mode": "tensor_parallel"}, "tensor_parallel does not work with `embedding`"),
    ({"lora_embedding": True}, "lora_embedding"),
]


@pytest.mark.parametrize(("options", "printed"), TRAINING, ids=shown)
def test_training_fails(options: dict[str, Any], printed: str, host: Host, error_line: ErrorLine) -> None:
    folder = host.folder / "new"
    config = host.config("model", **{"embedding": FUNNEL, "save_model": str(folder / "run"), **options})
    assert printed in error_line("onmt_train -config", config)
    assert not list(folder.glob("*.pt"))


def test_transforms_may_drop_the_examples_of_some_buckets_but_not_all(
    host: Host, error_line: ErrorLine
) -> None:
    filters = {"transforms": ["filtertoolong"], "tgt_seq_length": 7, "bucket_size": 1}
    host.train("some", embedding=FUNNEL, src_seq_length=3, valid_steps=3, **filters)
    host.write("train.src", ["w1 w2"] * 90)
    config = host.config("none", embedding=FUNNEL, src_seq_length=1, **filters)
    assert "data: the transforms drop all training examples" in error_line("onmt_train -config", config)


def test_files_that_do_not_fit_are_named(host: Host, error_line: ErrorLine) -> None:
    config, vocabulary = host.config("model", embedding=FUNNEL), host.folder / "vocab"
    vocabulary.write_bytes(b"w1\t5\n\xff\t3\n")
    assert f"{vocabulary}: line 2 is not UTF-8" in error_line("onmt_train -config", config)
    vocabulary.write_bytes(b"w1\t5\n\t3\n")
    assert "line 2" in error_line("onmt_train -config", config)


def test_data_that_cannot_be_trained_on(host: Host, error_line: ErrorLine) -> None:
    config, path = host.config("model"), host.folder / "train.tgt"
    text = path.read_bytes()
    lines = text.split(b"\n")
    path.write_bytes(b"\n".join([*lines[:4], b"\xff", *lines[5:]]))
    assert f"{path}: line 5 is not UTF-8" in error_line("onmt_train -config", config)
    path.write_bytes(b"\n".join(lines[1:]))
    line = error_line("onmt_train -config", config)
    assert "train.src has 90 lines" in line and "train.tgt has 89 lines" in line
    data = {"corpus": {**host.corpus("train"), "path_tgt": f"{path}.gz"}}
    Path(f"{path}.gz").write_bytes(gzip.compress(text)[:-20])
    assert f"{path}.gz: cannot be decompressed" in error_line(
        "onmt_train -config", host.config("z", data=data)
    )


@pytest.mark.slow
def test_errors_of_workers_are_lines(host: Host, error_line: ErrorLine) -> None:
    """The error of a worker of the data loader arrives as the text of a traceback."""
    filters = {"transforms": ["filtertoolong"], "src_seq_length": 0}
    line = error_line("onmt_train -config", host.config("model", num_workers=1, **filters))
    assert "data: the transforms drop all training examples" in line


def test_resuming_with_other_embeddings_fails(trained: Trained, host: Host, error_line: ErrorLine) -> None:
    _, checkpoint = trained(embedding=FUNNEL)
    resumed = ("-train_from", checkpoint)
    line = error_line("onmt_train -config", host.config("new", embedding={"method": "standard"}), *resumed)
    assert "embedding: {'method': 'standard'} has no effect with train_from" in line
    config = host.config("new", embedding=FUNNEL, update_vocab=True, reset_optim="all")
    assert "update_vocab" in error_line("onmt_train -config", config, *resumed)


# Checkpoints


@pytest.mark.parametrize("kind", ["truncated", "text", "cut number", "foreign", "missing"])
def test_broken_checkpoints(kind: str, trained: Trained, tmp_path: Path, error_line: ErrorLine) -> None:
    """Those that a training starts from; ``test_drills.py`` has those of the other commands."""
    host, checkpoint = trained(embedding=FUNNEL)
    path = tmp_path / f"{kind}.pt"
    content = {
        "truncated": checkpoint.read_bytes()[: checkpoint.stat().st_size // 2],
        "text": b"not a model",
        "cut number": pickle.dumps({"step": 1.5}, protocol=2)[:-8],
    }
    if kind in content:
        path.write_bytes(content[kind])
    elif kind == "foreign":
        torch.save({"state_dict": {}}, path)
    config = host.config("again", embedding=FUNNEL)
    assert str(path) in error_line("onmt_train -config", config, "-train_from", path)


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


def test_a_vocabulary_is_replaced_only_with_overwrite(host: Host, error_line: ErrorLine) -> None:
    config, vocabulary = host.config("model"), (host.folder / "vocab").read_text()
    line = error_line("onmt_build_vocab -config", config, "-save_data", host.folder / "s")
    assert "-overwrite" in line and (host.folder / "vocab").read_text() == vocabulary


# Vocabularies


def test_vocabulary_file_name_may_have_brackets(host: Host) -> None:
    config = host.config("model", src_vocab=str(host.folder / "vocab[1]"))
    run("onmt_build_vocab -n_sample -1 -config", config, "-save_data", host.folder / "samples")
    assert len((host.folder / "vocab[1]").read_text().splitlines()) == 80
    assert not list(host.folder.glob("*incomplete*"))


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ("-beem_size 2", "Did you mean 'beam_size'"),
        ("-tgt gap.tgt -tgt_file_prefix", "translations, not 1 each"),
        ("-tgt train.tgt", "train.tgt has 90 lines, but src has 7"),
    ],
)
def test_translation_fails(
    arguments: str, printed: str, trained: Trained, error_line: ErrorLine, monkeypatch: Patch
) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    monkeypatch.chdir(host.folder)
    host.write("gap.tgt", ["v1", "v2", "", "v4", "v5", "v6", "v7"])
    files = ("-src", "test.src", "-output", "nothing", *arguments.split())
    assert printed in error_line("onmt_translate -model", checkpoint, *files)
    assert not Path("nothing").exists()


def test_models_of_an_ensemble_have_the_same_words(
    trained: Trained, host: Host, error_line: ErrorLine
) -> None:
    words = host.write("other", [*(host.folder / "vocab").read_text().splitlines(), "x1\t2"])
    options = {"share_vocab": False, "share_embeddings": False, "embedding": FUNNEL, "train_steps": 1}
    first, second = (
        host.train(name, **options, tgt_vocab=str(vocabulary))
        for name, vocabulary in (("first", host.folder / "vocab"), ("second", words))
    )
    files = ("-src", host.folder / "test.src", "-output", host.folder / "nothing")
    for pair in ((first, second), (second, first)):
        assert "has another vocabulary than" in error_line("onmt_translate -model", *pair, *files)
