"""What people do to the commands: odd text, wrong options, broken files, several processes, a server."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nmt.checkpoint.build import build_from_checkpoint, describe_checkpoint
from nmt.checkpoint.checkpoint import read_weights
from nmt.checkpoint.export import dense_checkpoint
from nmt.checkpoint.files import read_checkpoint, write_atomically
from nmt.model.embeddings import shared_embeddings_of
from shared_embeddings.classes import WordClasses
from tests.nmt.conftest import WORDS, Host, run

FUNNEL = {"method": "funnel", "rank": 4}
SECONDS = 600
Trained = Callable[..., tuple[Host, Path]]
Refusal = Callable[..., str]


def command(name: str, *arguments: str) -> list[str]:
    """The words that start a command in a process of its own."""
    return [sys.executable, "-c", f"from nmt import cli; cli.{name}()", *arguments]


# Odd text


MESSY = [
    "w1  w2",
    "",
    "w3\u00a0w4",
    "\u2003w5\u3000w6\t",
    "   ",
    "w7 w8\r",
    "w9 unknown-word",
    " ".join(["w1"] * 6000),
]


def test_messy_text_is_translated_line_by_line(trained: Trained) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    (host.folder / "messy").write_bytes("\n".join(MESSY).encode())  # no line end at the end
    lines = host.translate(checkpoint, "-min_length", "1", source="messy")
    assert len(lines) == len(MESSY)
    assert lines[1] == lines[4] == ""
    assert all(lines[number] for number in (0, 2, 3, 5, 6))
    host.write("clean", ["w1 w2", "w3 w4", "w5 w6", "w7 w8"])
    clean = host.translate(checkpoint, "-min_length", "1", source="clean")
    assert clean == [lines[0], lines[2], lines[3], lines[5]]


def test_messy_text_n_best_with_scores(trained: Trained) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    host.write("messy", ["w1  w2", "", "w3"])
    lines = host.translate(checkpoint, "-n_best", "2", "-with_score", source="messy")
    assert len(lines) == 6
    assert lines[2:4] == ["\t0.0", "\t0.0"]


def test_empty_file_gives_an_empty_file(trained: Trained) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    host.write("empty", [])
    assert host.translate(checkpoint, source="empty") == []


def test_messy_text_trains(host: Host) -> None:
    """Double and no-break spaces, empty lines, very long lines and Windows line ends, from vocabulary to
    model.
    """
    source, target = MESSY * 4, MESSY * 4
    target[9] = "w1"
    for split in ("train", "valid"):
        (host.folder / f"{split}.src").write_bytes("".join(f"{line}\r\n" for line in source).encode())
        (host.folder / f"{split}.tgt").write_bytes("".join(f"{line}\r\n" for line in target).encode())
    (host.folder / "vocab").unlink()
    config = host.config("model", embedding=FUNNEL, batch_size=4, train_steps=2, save_checkpoint_steps=2)
    run(
        "onmt_build_vocab",
        "-config",
        str(config),
        "-n_sample",
        "-1",
        "-save_data",
        str(host.folder / "samples"),
    )
    entries = (host.folder / "vocab").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"\S+\t\d+", entry) for entry in entries)
    run("onmt_train", "-config", str(config))
    assert (host.folder / "model_step_2.pt").is_file()


# Refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"embedding": {"method": "funel", "rank": 4}}, ["funel", "funnel"]),
        ({"embedding": {"method": "funnel", "rnk": 4}}, ["rnk", "rank"]),
        ({"embedding": {"method": "funnel", "rank": 17}}, ["rank", "17", "16"]),
        ({"embedding": {"method": "define", "depth": 0, "map_dim": 8, "expand_dim": 32}}, ["depth", "0"]),
        ({"embedding": "funnel"}, ["embedding", "method"]),
        ({"embedding": "{[1]: 2}"}, ["embedding", "YAML"]),
        ({"embeding": FUNNEL}, ["embeding", "did you mean"]),
        ({"share_embeddings": False, "src_embedding": FUNNEL, "tgt_embedding": FUNNEL}, ["no effect"]),
        ({"src_embedding": {"method": "standard"}}, ["share_embeddings"]),
        ({"freeze_word_vecs_enc": True}, ["freeze_word_vecs_enc"]),
        ({"parallel_mode": "tensor_parallel"}, ["tensor_parallel"]),
        ({"optim": "sparseadam"}, ["sparseadam", "adam"]),
        ({"lora_embedding": True}, ["lora_embedding"]),
        (
            {"embedding": {"method": "define", "map_dim": 8, "expand_dim": 32, "depth": 2, "max_groups": 2}},
            ["8", "16", "output_projection"],
        ),
        (
            {
                "share_decoder_embeddings": False,
                "embedding": {
                    "method": "define",
                    "map_dim": 8,
                    "expand_dim": 32,
                    "depth": 2,
                    "max_groups": 2,
                    "output": "table",
                },
            },
            ["output", "no effect"],
        ),
        ({"src_vocab": "/nowhere/vocab"}, ["/nowhere/vocab", "onmt_build_vocab"]),
        ({"gpu_ranks": [0], "world_size": 1}, ["gpu_ranks", "CUDA"]),
        ({"train_from": "/nowhere/model.pt"}, ["/nowhere/model.pt"]),
        ({"data": {"corpus": {"path_src": "/nowhere/a", "path_tgt": "/nowhere/b"}}}, ["/nowhere/a"]),
    ],
    ids=lambda value: "-".join(map(str, value))[:40] if isinstance(value, (dict, list)) else str(value),
)
def test_training_is_refused(options: dict[str, Any], words: list[str], host: Host, refusal: Refusal) -> None:
    if "gpu_ranks" in options and torch.cuda.is_available():
        pytest.skip("a GPU is there")
    config = host.config("model", **{"embedding": FUNNEL, **options})
    line = refusal("onmt_train", "-config", str(config))
    assert all(word in line for word in words), line
    assert not list(host.folder.glob("*.pt"))


def test_update_vocab_is_refused(trained: Trained, refusal: Refusal) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    config = host.config(
        "updated", embedding=FUNNEL, update_vocab=True, reset_optim="all", train_from=str(checkpoint)
    )
    assert "update_vocab" in refusal("onmt_train", "-config", str(config))


def test_sides_of_unequal_length(host: Host, refusal: Refusal) -> None:
    host.write("train.tgt", ["v1"] * 89)
    line = refusal("onmt_train", "-config", str(host.config("model", embedding=FUNNEL)))
    assert "90" in line and "89" in line


def test_resuming_with_another_embedding(trained: Trained, refusal: Refusal) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    config = host.config("other", embedding={"method": "standard"})
    line = refusal("onmt_train", "-config", str(config), "-train_from", str(checkpoint))
    assert "embedding" in line and "checkpoint" in line


def test_vocabulary_lines(host: Host, refusal: Refusal) -> None:
    host.write("vocab", ["w1\t5", "\t3"])
    line = refusal("onmt_train", "-config", str(host.config("model", embedding=FUNNEL)))
    assert "line 2" in line


def test_missing_config(refusal: Refusal) -> None:
    assert "/nowhere.yaml" in refusal("onmt_train", "-config", "/nowhere.yaml")


def broken(kind: str, checkpoint: Path, folder: Path) -> Path:
    """A file that is no checkpoint any more, or never was."""
    path = folder / f"{kind}.pt"
    content = checkpoint.read_bytes()
    if kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("not a model")
    elif kind == "cut number":
        path.write_bytes(pickle.dumps({"step": 1.5}, protocol=2)[:-8])
    elif kind == "foreign":
        torch.save({"state_dict": {}}, path)
    elif kind == "code":
        torch.save({"opt": os.system}, path)
    return path


@pytest.mark.parametrize("kind", ["truncated", "empty", "text", "cut number", "foreign", "code", "missing"])
@pytest.mark.parametrize(
    "name", ["onmt_translate", "onmt_train", "onmt_release_model", "onmt_average_models"]
)
def test_broken_checkpoints(kind: str, name: str, trained: Trained, tmp_path: Path, refusal: Refusal) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    path = str(broken(kind, checkpoint, tmp_path))
    output = tmp_path / "kept"
    output.write_text("kept")
    arguments = {
        "onmt_translate": ["-model", path, "-src", str(host.folder / "test.src"), "-output", str(output)],
        "onmt_train": ["-config", str(host.config("again", embedding=FUNNEL)), "-train_from", path],
        "onmt_release_model": ["-model", path, "-output", str(output), "-force"],
        "onmt_average_models": ["-models", str(checkpoint), path, "-output", str(output), "-force"],
    }[name]
    assert path in refusal(name, *arguments)
    assert output.read_text() == "kept"


def test_checkpoint_that_does_not_fit_its_vocabulary(
    trained: Trained, tmp_path: Path, refusal: Refusal
) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    saved = read_checkpoint(checkpoint)
    saved["vocab"]["src"] = saved["vocab"]["tgt"] = saved["vocab"]["src"][:-8]
    path = tmp_path / "shrunk.pt"
    torch.save(saved, path)
    source = str(host.folder / "test.src")
    line = refusal("onmt_translate", "-model", str(path), "-src", source, "-output", str(tmp_path / "out"))
    assert "vocabulary" in line and "(88, 4)" in line and "(80, 4)" in line


def test_averaging_different_models(trained: Trained, tmp_path: Path, refusal: Refusal) -> None:
    _, one = trained(embedding=FUNNEL)
    _, other = trained(embedding={"method": "standard"})
    refusal("onmt_average_models", "-models", str(one), str(other), "-output", str(tmp_path / "mean.pt"))
    assert not (tmp_path / "mean.pt").exists()


def test_vocabulary_is_not_overwritten(host: Host, refusal: Refusal) -> None:
    before = (host.folder / "vocab").read_text()
    line = refusal(
        "onmt_build_vocab", "-config", str(host.config("model")), "-save_data", str(host.folder / "s")
    )
    assert "-overwrite" in line
    assert (host.folder / "vocab").read_text() == before


# Killed halfway


@pytest.mark.slow
def test_kill_and_resume(host: Host) -> None:
    """Killed while it trains and saves at every step, training goes on from the last checkpoint."""
    config = host.config("model", embedding=FUNNEL, save_checkpoint_steps=1, train_steps=100_000)
    with subprocess.Popen(command("train", "-config", str(config)), stderr=subprocess.DEVNULL) as process:
        deadline = time.time() + 60
        while len(list(host.folder.glob("model_step_*.pt"))) < 12 and time.time() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    steps = sorted(int(path.stem.rsplit("_", 1)[1]) for path in host.folder.glob("model_step_*.pt"))
    assert len(steps) >= 12
    for step in steps[-2:]:
        assert read_checkpoint(host.folder / f"model_step_{step}.pt")["optim"]["training_step"] == step + 1
    last = host.folder / f"model_step_{steps[-1]}.pt"
    final = host.config("model", embedding=FUNNEL, save_checkpoint_steps=1, train_steps=steps[-1] + 2)
    run("onmt_train", "-config", str(final), "-train_from", str(last))
    assert (host.folder / f"model_step_{steps[-1] + 2}.pt").is_file()


def test_remains_of_a_killed_save_go(host: Host) -> None:
    """Those of this run's checkpoints, at its next start; those of another run stay."""
    for name in ("model", "other"):
        path = str(host.folder / f"{name}_step_3.pt")
        process = os.fork()
        if process == 0:
            write_atomically(path, lambda temporary: (open(temporary, "w"), os._exit(9)))
        os.waitpid(process, 0)
        assert len(list(host.folder.glob(f".{name}_step_3.pt.*"))) == 1
    host.train("model", embedding=FUNNEL)
    assert [path.name for path in host.folder.glob(".model*")] == [".model.lock"]
    assert len(list(host.folder.glob(".other*"))) == 1


def test_interrupting_translation_keeps_the_old_file(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onmt.bin.translate

    def interrupted(opt: Any) -> None:
        Path(opt.output).write_text("half")
        raise KeyboardInterrupt

    host, checkpoint = trained(embedding=FUNNEL)
    monkeypatch.setattr(onmt.bin.translate, "translate", interrupted)
    output = tmp_path / "out"
    output.write_text("before")
    with pytest.raises(SystemExit) as stop:
        source = str(host.folder / "test.src")
        run("onmt_translate", "-model", str(checkpoint), "-src", source, "-output", str(output))
    assert stop.value.code == 130
    assert output.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# Several processes


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def train_two(host: Host, folder: Path, **options: Any) -> list[torch.Tensor]:
    """Train in two processes over gloo, from different seeds; gives the parameters of each."""
    script = folder / "worker.py"
    script.write_text(
        "import sys, torch\n"
        "from nmt.patches.table import apply_patches\n"
        "from nmt.train import training\n"
        "from onmt.utils.parse import ArgumentParser\n"
        "import onmt.bin.train, onmt.utils.distributed as distributed\n"
        "rank = int(sys.argv.pop(1))\n"
        "apply_patches()\n"
        "opt = onmt.bin.train._get_parser().parse_args()\n"
        "ArgumentParser.validate_train_opts(opt); ArgumentParser.update_model_opts(opt)\n"
        "opt.seed += rank\n"
        "kept = []\n"
        "import onmt.train_single as single\n"
        "build = single.build_model\n"
        "single.build_model = lambda *a: kept.append(build(*a)) or kept[0]\n"
        "distributed.multi_init(opt, rank)\n"
        "training.run_process(opt, rank)\n"
        "assert not torch.distributed.is_initialized()\n"
        "parts = [p.detach().flatten() for p in kept[0].parameters()]\n"
        f"torch.save(torch.cat(parts), r'{folder}/rank%d' % rank)\n"
    )
    several = {"world_size": 2, "gpu_ranks": [0, 1], "gpu_backend": "gloo", "master_port": free_port()}
    config = host.config("model", embedding=FUNNEL, **several, **options)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "-config", str(config)],
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=SECONDS) for process in processes] == [0, 0]
    return [torch.load(folder / f"rank{rank}", weights_only=True) for rank in range(2)]


@pytest.mark.slow
def test_two_processes_stay_equal(host: Host, tmp_path: Path) -> None:
    one, other = train_two(host, tmp_path, train_steps=3)
    assert torch.equal(one, other)
    states = read_checkpoint(host.folder / "model_step_3.pt")["resume"]
    assert len(states) == 2


@pytest.mark.slow
def test_two_processes_learn_what_one_learns_from_all_their_examples(host: Host, tmp_path: Path) -> None:
    """A step of gradient descent on a whole corpus of 88 examples, no two of them the same."""
    names = sorted(WORDS)
    lines = [[names[place % 20], names[place // 20], names[place % 7]] for place in range(88)]
    host.write("train.src", [" ".join(line) for line in lines])
    host.write("train.tgt", [" ".join(WORDS[word] for word in line) for line in lines])
    descent = {"optim": "sgd", "learning_rate": 0.5, "decay_method": "none", "max_grad_norm": 0}
    options = {**descent, "dropout": [0.0], "attention_dropout": [0.0], "train_steps": 1}

    def whole(examples: int) -> dict[str, Any]:
        return {**options, "batch_type": "sents", "batch_size": 100, "bucket_size": examples}

    one, other = train_two(host, tmp_path, **whole(44))
    alone = host.train("alone", embedding=FUNNEL, **whole(88))
    parameters = build_from_checkpoint(alone)[0].parameters()
    expected = torch.cat([parameter.detach().flatten() for parameter in parameters])
    assert torch.equal(one, other)
    torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_two_processes_stop_early_together(host: Host, tmp_path: Path) -> None:
    """Nothing is learned, so that the second validation ends it."""
    unchanged = {"learning_rate": 1e-30, "decay_method": "none", "warmup_steps": 0}
    one, other = train_two(
        host, tmp_path, **unchanged, early_stopping=1, valid_steps=2, train_steps=50, save_checkpoint_steps=50
    )
    assert torch.equal(one, other)
    assert [path.name for path in host.folder.glob("model_step_*.pt")] == ["model_step_4.pt"]


@pytest.mark.slow
def test_spawned_processes_have_the_seams(host: Host) -> None:
    """The command itself, with two processes: the embedding is there, and resumption finds both positions."""
    options = {
        "embedding": FUNNEL,
        "world_size": 2,
        "gpu_ranks": [0, 1],
        "gpu_backend": "gloo",
        "master_port": free_port(),
    }
    first = host.config("model", **options, train_steps=3)
    subprocess.run(command("train", "-config", str(first)), check=True, timeout=SECONDS)
    again = host.config("model", **{**options, "master_port": free_port()}, train_steps=4)
    checkpoint = str(host.folder / "model_step_3.pt")
    done = subprocess.run(
        command("train", "-config", str(again), "-train_from", checkpoint),
        check=True,
        timeout=SECONDS,
        capture_output=True,
        text=True,
    )
    assert "the data over" not in done.stderr
    _, body, _ = read_weights(str(host.folder / "model_step_4.pt"))
    assert any("emb_luts.0" in name and tensor.shape == (88, 4) for name, tensor in body.items())


# Export, upstream's own models, and the server


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [True, False], ids=["three-way", "inputs apart"])
def test_ctranslate2_translates_the_same(sharing: bool, host: Host) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    checkpoint = host.train("model", embedding=FUNNEL, share_embeddings=sharing, train_steps=60)
    exported = host.folder / "exported"
    for _ in range(2):  # the second replaces the first, of which it knows every file
        run(
            "onmt_release_model",
            "-model",
            str(checkpoint),
            "-output",
            str(exported),
            "-format",
            "ctranslate2",
            "-force",
        )
    ours = host.translate(checkpoint, "-beam_size", "1", "-min_length", "3")
    sources = (host.folder / "test.src").read_text().splitlines()
    results = ctranslate2.Translator(str(exported)).translate_batch(
        [line.split() for line in sources], beam_size=1, max_decoding_length=9, min_decoding_length=3
    )
    assert [" ".join(result.hypotheses[0]) for result in results] == ours
    assert all(ours)


def test_export_keeps_the_bias_of_the_output(host: Host) -> None:
    settings = {"method": "standard", "output_bias": True}
    checkpoint = host.train("model", embedding=settings, train_steps=20)
    model, *_ = build_from_checkpoint(str(checkpoint))
    bias = model.generator.embedding.bias
    head = dense_checkpoint(str(checkpoint))["generator"]
    hidden = torch.randn(3, head["weight"].size(1))
    assert bias.abs().max() > 0
    torch.testing.assert_close(F.linear(hidden, **head), model.generator(hidden))


def test_a_bias_without_an_output_is_refused(host: Host, refusal: Refusal) -> None:
    settings = {"method": "standard", "output_bias": True}
    config = host.config("model", embedding=settings, share_decoder_embeddings=False)
    assert "output_bias" in refusal("onmt_train", "-config", str(config))


def test_ctranslate2_refuses_a_softmax_in_two_steps(host: Host, refusal: Refusal) -> None:
    checkpoint = host.train("model", embedding={"method": "adaptive", "cutoffs": [20], "factor": 2})
    output = host.folder / "exported"
    message = refusal(
        "onmt_release_model", "-model", str(checkpoint), "-output", str(output), "-format", "ctranslate2"
    )
    assert "adaptive" in message and "onmt_translate" in message
    assert not output.exists()


def test_classes_are_part_of_the_checkpoint(host: Host, refusal: Refusal) -> None:
    """A class file is read word by word when training starts, and never needed again."""
    words = [*(f"w{number}" for number in range(40)), *(f"v{number}" for number in range(40))]
    generator = np.random.default_rng(0)
    file = host.folder / "classes.npz"
    WordClasses(
        tuple(words),
        np.arange(80) % 9,
        generator.normal(size=(9, 3)).astype(np.float32),
        generator.normal(size=(80, 3)).astype(np.float32),
    ).save(file)
    embedding = {"method": "uncle", "unique_dim": 6, "classes": str(file)}
    checkpoint = host.train("model", embedding=embedding, train_steps=3)
    config = host.config("model", embedding=embedding)
    model, vocabs, *_ = build_from_checkpoint(str(checkpoint))
    (found,) = shared_embeddings_of(model)
    assert int(found.classes[vocabs["src"]["v5"]]) == 45 % 9
    file.unlink()
    assert len(host.translate(checkpoint)) == 7
    run("onmt_train", "-config", str(config), "-train_from", str(checkpoint))
    assert describe_checkpoint(host.folder / "model_step_6.pt")["config"]["embedding"]["classes"] == "stored"
    message = refusal("onmt_train", "-config", str(host.config("other", embedding=embedding)))
    assert "classes.npz" in message and "no such file" in message


def test_ctranslate2_refuses_other_models(host: Host, refusal: Refusal) -> None:
    checkpoint = host.train(
        "model",
        embedding=FUNNEL,
        encoder_type="rnn",
        decoder_type="rnn",
        position_encoding=False,
        train_steps=1,
    )
    output = host.folder / "exported"
    line = refusal(
        "onmt_release_model", "-model", str(checkpoint), "-output", str(output), "-format", "ctranslate2"
    )
    assert "transformer" in line
    assert not output.exists()


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
    run("onmt_average_models", "-models", str(checkpoint), "-output", str(host.folder / "mean.pt"))
    assert host.translate(host.folder / "mean.pt") == host.translate(checkpoint)
    run("onmt_train", "-config", str(host.config("plain", train_steps=4)), "-train_from", str(checkpoint))
    model, *_ = build_from_checkpoint(str(host.folder / "plain_step_4.pt"))
    assert model.generator.weight is model.decoder.embeddings.word_lut.weight


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"copy_attn": True}], ids=["", "copying"])
def test_server(options: dict[str, Any], trained: Trained, tmp_path: Path) -> None:
    host, checkpoint = trained(embedding=FUNNEL, **options)
    shutil.copy(checkpoint, tmp_path / "model.pt")
    settings = {
        "models_root": str(tmp_path),
        "models": [
            {
                "id": 100,
                "model": "model.pt",
                "load": True,
                "opt": {"gpu": -1, "beam_size": 1, "min_length": 1},
            }
        ],
    }
    (tmp_path / "server.json").write_text(json.dumps(settings))
    port = free_port()
    arguments = ("--model_config", str(tmp_path / "server.json"), "--port", str(port), "--ip", "127.0.0.1")
    with subprocess.Popen(command("server", *arguments), stderr=subprocess.PIPE, text=True) as process:
        drain = threading.Thread(target=lambda: process.stderr and process.stderr.read(), daemon=True)
        drain.start()
        try:
            answer = ask(port, [{"id": 100, "src": "w1  w2"}])
        finally:
            process.terminate()
    assert answer[0][0]["tgt"]


def test_server_without_its_configuration(refusal: Refusal) -> None:
    assert "/nowhere.json" in refusal("onmt_server", "--model_config", "/nowhere.json")
    assert "--port" in refusal("onmt_server", "--port", "x")


def ask(port: int, request: list[dict[str, Any]]) -> Any:
    """Send a request as soon as the server answers."""
    address = f"http://127.0.0.1:{port}/translator/translate"
    deadline = time.time() + 60
    while True:
        try:
            with urllib.request.urlopen(address, json.dumps(request).encode(), timeout=30) as response:
                return json.load(response)
        except OSError:
            if time.time() > deadline:
                raise
            time.sleep(0.2)


UPSTREAM_TESTS = [
    "test_attention.py",
    "test_beam_search.py",
    "test_copy_generator.py",
    "test_embeddings.py",
    "test_greedy_search.py",
    "test_models.py",
    "test_structured_attention.py",
    "test_text_utils.py",
    "test_translator.py",
]

# Wants for sentence b the length of the source of hypothesis b.
WRONG = "not test_beam_returns_attn_with_correct_length"


@pytest.mark.slow
def test_upstream_tests_pass_with_the_seams(tmp_path: Path) -> None:
    """OpenNMT's own tests (those that need no data of its repository), with every seam in place."""
    import onmt

    (tmp_path / "conftest.py").write_text("from nmt.patches.table import apply_patches\napply_patches()\n")
    folder = Path(onmt.__file__).parent / "tests"
    for name in [*UPSTREAM_TESTS, "utils_for_tests.py"]:
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


# Packages that some Pythons have no wheels of


def test_vocabulary_without_pyonmttok() -> None:
    """The stand-in gives the same vocabularies as the package."""
    pyonmttok = pytest.importorskip("pyonmttok")
    from nmt.data import vocabulary

    tokens = ["b", "a", "c", "d"]
    for options in ({}, {"maximum_size": 3}, {"special_tokens": ["<unk>", "<blank>"], "maximum_size": 3}):
        ours = vocabulary.build_vocab_from_tokens(tokens, **options)
        theirs = pyonmttok.build_vocab_from_tokens(tokens, **options)
        for vocab in (ours, theirs):
            vocab.add_token("new")
        assert ours.ids_to_tokens == theirs.ids_to_tokens
        assert ours(["a", "?", "new"]) == theirs(["a", "?", "new"])
        assert ours.default_id == theirs.default_id
        assert ours.lookup_index(0) == theirs.lookup_index(0)
        assert ("a" in ours, "?" in ours, len(ours)) == ("a" in theirs, "?" in theirs, len(theirs))


@pytest.mark.slow
def test_missing_packages_are_replaced(tmp_path: Path) -> None:
    """Without pyonmttok and fasttext the commands import, and what needs them says so."""
    script = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "hidden = ('pyonmttok', 'fasttext')\n"
        "importlib.util.find_spec = lambda name, *rest: None if name in hidden else find(name, *rest)\n"
        "from nmt.patches.table import apply_patches\n"
        "apply_patches()\n"
        "import pyonmttok, onmt.transforms.clean as clean\n"
        "assert 'spacy.language' not in sys.modules\n"
        "print(pyonmttok.build_vocab_from_tokens(['a'])(['a']))\n"
        "for call in (pyonmttok.Tokenizer, clean.fasttext.load_model):\n"
        "    try:\n"
        "        call('x')\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "[0]", done.stderr
    assert "pyonmttok" in lines[1] and "fasttext" in lines[2]
