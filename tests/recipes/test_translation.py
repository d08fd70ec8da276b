"""Published translation rows, killed preprocessing that resumes, and training, also on two machines."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nmt.checkpoints import read_checkpoint, read_weights
from recipes.common import tools
from recipes.common.recipe import Row, find_recipe
from recipes.translation import train
from recipes.translation.preprocess import (
    Texts,
    clean,
    locate,
    read_pairs,
    read_settings,
    write_smoke_texts,
)
from recipes.translation.preprocess import main as preprocess
from recipes.translation.subwords import count_words
from recipes.translation.train import Machines, batch_size, complete_checkpoints, read_machines
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import locked
from tests.nmt.conftest import Host, run


def save(folder: Path, step: int, when: float | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"model_step_{step}.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", "x" * 1000)
    if when is not None:
        os.utime(path, (when, when))
    return path


def test_checkpoints_sort_by_step_without_partial_ones(tmp_path: Path) -> None:
    for step in (1000, 250, 9):
        save(tmp_path, step)
    newest = save(tmp_path, 1250)
    newest.write_bytes(newest.read_bytes()[:500])
    (tmp_path / "model_step_best.pt").touch()
    assert list(complete_checkpoints(tmp_path)) == [9, 250, 1000]
    assert complete_checkpoints(tmp_path / "absent") == {}


class Tools:
    """Replaces the commands: "trains" by writing checkpoints, "averages" by writing a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
        self.calls: list[list[str]] = []
        self.fails = False
        self.run = run
        monkeypatch.setattr(train, "run_command", self)

    def __call__(self, name: str, arguments: list[Any], log: Path | None = None) -> None:
        self.calls.append([name, *map(str, arguments)])
        if name == "onmt_average_models":
            Path(arguments[-1]).write_text("averaged")
            return
        for step in (4, 6, 8):
            save(self.run / "checkpoints", step)
        if self.fails:
            raise UserError("failed")


DATA: dict[str, Any] = {"data": {}}
ROW = Row(name="row", embedding={"method": "standard"}, train={"train_steps": 8}, average=2)


def test_training_averages_and_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Tools(monkeypatch, tmp_path)
    train.train_row(ROW, tmp_path, DATA, "checksum", [])
    assert "-train_from" not in tools.calls[0]
    assert tools.calls[1][2:4] == [str(tmp_path / f"checkpoints/model_step_{n}.pt") for n in (6, 8)]
    assert json.loads((tmp_path / "training.json").read_text())["seconds"] >= 0
    train.train_row(ROW, tmp_path, DATA, "checksum", [])
    assert [call[0] for call in tools.calls].count("onmt_train") == 1
    train.train_row(ROW, tmp_path, DATA, "checksum", ["-train_steps", "12"])
    assert tools.calls[-2][-4:-2] == ["-train_steps", "12"]
    assert tools.calls[-2][-1].endswith("model_step_8.pt")


def test_failed_training_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Tools(monkeypatch, tmp_path)
    tools.fails = True
    with pytest.raises(UserError):
        train.train_row(ROW, tmp_path, DATA, "checksum", [])
    assert json.loads((tmp_path / "training.json").read_text())["finished"] is None
    assert not (tmp_path / train.AVERAGED).exists()
    tools.fails = False
    train.train_row(ROW, tmp_path, DATA, "checksum", [])
    assert tools.calls[1][-1].endswith("model_step_8.pt")
    assert (tmp_path / train.AVERAGED).read_text() == "averaged"
    with (
        locked(tmp_path / "lock"),
        pytest.raises(BlockingIOError, match="another process is running here"),
    ):
        train.train_row(ROW, tmp_path, DATA, "checksum", [])


def test_changed_settings_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tools(monkeypatch, tmp_path)
    train.train_row(ROW, tmp_path, DATA, "checksum", [])
    other = Row(name="row", embedding={"method": "funnel"}, train={"train_steps": 9}, average=2)
    with pytest.raises(UserError, match="started with a different embedding;"):
        train.train_row(other, tmp_path, DATA, "checksum", [])
    with pytest.raises(UserError, match="started with a different data;"):
        train.train_row(ROW, tmp_path, DATA, "other", [])
    train.train_row(ROW, tmp_path, {"data": {"train": {}}}, "checksum", [])


BATCH = {"tokens": 8, "per_gpu": 4}
STEPS = 3
# Without randomness, and with a bucket as a batch, both see the same sentences in every step.
SETTINGS: dict[str, Any] = {
    "embedding": {"method": "funnel", "rank": 4},
    "dropout": [0.0],
    "bucket_size": 4,
    "optim": "sgd",
    "learning_rate": 0.02,
    "max_grad_norm": 0,
    "train_steps": STEPS,
    "save_checkpoint_steps": STEPS,
    "report_every": 1,
}

SECONDS = 500


def run_together(commands: Sequence[Sequence[str]], logs: Path) -> list[int]:
    """Run commands at the same time; they and their children end in any case."""
    processes = []
    for number, command in enumerate(commands):
        with (logs / f"{number}.log").open("w") as log:
            streams: Any = {"stdout": log, "stderr": subprocess.STDOUT}
            processes.append(subprocess.Popen(command, **streams, start_new_session=True))
    try:
        return [process.wait(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
            process.wait()


def reports(log: str) -> list[tuple[str, ...]]:
    """Step, perplexity and number of sentences of each line that ``onmt_train`` has logged."""
    return re.findall(r"Step +(\d+)/ *\d+;.* ppl: +([\d.]+);.* sents: +(\d+);", log)


@pytest.mark.slow
def test_two_machines_equal_one_process_with_all_batches(tmp_path: Path) -> None:
    """Neither reads the other's part, and both have the same parameters at every step."""
    host = Host(tmp_path)
    configs = [host.config(f"machine{number}", **SETTINGS, gpu_backend="gloo") for number in range(2)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    onmt_train = str(Path(sys.executable).with_name("onmt_train"))
    commands = [
        [onmt_train, "-config", str(config), *Machines(1, 2, number, "127.0.0.1", port).options(BATCH)]
        for number, config in enumerate(configs)
    ]
    states = run_together(commands, tmp_path)
    logs = [(tmp_path / f"{number}.log").read_text() for number in range(2)]
    assert states == [0, 0], logs
    assert not list(tmp_path.glob("machine1_step_*"))

    alone = host.config("alone", **SETTINGS, log_file=str(tmp_path / "alone.log"))
    run("onmt_train", "-config", str(alone), *Machines(0).options(BATCH))
    wanted, measured = reports((tmp_path / "alone.log").read_text()), reports(logs[0])
    assert [(*mine[::2],) for mine in wanted] == [
        (str(1 + step), str(BATCH["tokens"])) for step in range(STEPS)
    ]
    for mine, other in zip(wanted, measured, strict=True):
        assert mine[::2] == other[::2] and float(other[1]) == pytest.approx(float(mine[1]), rel=1e-3)
    assert reports(logs[1]) == []

    _, single, _ = read_weights(str(tmp_path / f"alone_step_{STEPS}.pt"))
    saved = tmp_path / f"machine0_step_{STEPS}.pt"
    _, double, _ = read_weights(str(saved))
    assert single.keys() == double.keys()
    for name, tensor in single.items():
        torch.testing.assert_close(double[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    # Before the last bucket, of four.
    drawn = [state["data"]["workers"][0]["drawn"] for state in read_checkpoint(saved)["resume"]]
    assert drawn == [{"corpus": 4 * (STEPS - 1)}] * 2


@pytest.mark.parametrize("there", [False, True], ids=["cpu", "gpu"])
def test_a_gpu_trains_and_translates_if_there_is_one(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNS", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    recipe = find_recipe("multi30k_ende")
    recipe.data.mkdir(parents=True)
    content = {"source": "en", "target": "de", "vocabulary": "vocabulary", "checksum": "sum"}
    (recipe.data / "data.json").write_text(json.dumps(content))
    run = recipe.home / "standard"
    Tools(monkeypatch, run)
    train.train_command(recipe, ["standard"])
    settings = yaml.safe_load((run / "train.yaml").read_text())
    assert settings.get("gpu_ranks") == ([0] if there else None)
    assert json.loads((run / "training.json").read_text())["options"] == []
    monkeypatch.setattr(train, "run_command", lambda *_: None)
    with pytest.raises(FileNotFoundError):  # nothing was translated
        train.translate(recipe, recipe.row("standard"), tmp_path / "source", [], "output")
    assert yaml.safe_load((run / "translate.yaml").read_text())["gpu"] == (0 if there else -1)


@pytest.mark.parametrize("finished", [None, 2, 4])
def test_another_machine_joins_an_unfinished_run(
    finished: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []
    monkeypatch.setenv("RUNS", str(tmp_path))
    monkeypatch.setattr(train, "run_command", lambda name, arguments: called.append([name, *arguments]))
    recipe = find_recipe("iwslt_pten")
    row = replace(recipe.row("distilled_table3_standard"), train={"train_steps": 4})
    run = recipe.home / row.name
    (run / "checkpoints").mkdir(parents=True)
    newest = run / "checkpoints" / "model_step_2.pt"
    zipfile.ZipFile(newest, "w").close()
    (run / "training.json").write_text(json.dumps({"finished": finished}))
    train.join_training(run, row, {"src_vocab": "v"}, 1, ["-world_size", "2"])
    if finished == 4:
        assert called == []
        return
    config = run / "machine_1.yaml"
    assert called == [["onmt_train", "-config", str(config), "-world_size", "2", "-train_from", str(newest)]]
    assert yaml.safe_load(config.read_text())["save_model"] == str(run / "checkpoints" / "model")
    assert json.loads((run / "training.json").read_text()) == {"finished": finished}


# Published rows and their data

RECIPES = ("iwslt_pten", "wmt14_ende", "wmt14_enfr")
IWSLT = find_recipe("iwslt_pten")


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_row_can_be_read_and_has_its_data(recipe: str) -> None:
    settings = read_settings(find_recipe(recipe))
    names = [texts.name for texts in settings.tests]
    for row in find_recipe(recipe).rows.values():
        assert row.data and row.batch is not None
        pieces = settings.pieces[row.data["pieces"]]
        assert {row.data["valid"], *row.data["tests"]} <= set(names)
        if "classes" in row.embedding:
            assert row.embedding["num_classes"] in pieces.classes


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_train_as_their_papers_print(recipe: str) -> None:
    """DeFINE takes OpenNMT-py's recommended settings, ALONE those of its authors' README, the others those of
    Vaswani et al. (2017).

    There, the learning rate is D**-0.5 * min(step**-0.5, step * 4000**-1.5) without a factor, and dropout is
    on sub-layers and on the sums with the positions, not on the attention.
    """
    names = ("learning_rate", "warmup_steps", "adam_beta2", "attention_dropout", "dropout", "label_smoothing")
    for name, row in find_recipe(recipe).rows.items():
        train = row.train
        wanted = [1.0, 4000, 0.98, [0.0], [0.1], 0.1]
        if name.startswith("define_"):
            wanted = [2.0, 8000, 0.998, [0.1], [0.1], 0.1]
            assert (row.translate["beam_size"], row.translate["length_penalty"]) == (5, "none")
        elif name.startswith("uncle_table12_"):
            wanted[-1] = 0.0  # fairseq's loss of adaptive softmaxes does not smooth labels
        elif name.startswith("alone_") and name != "alone_table2_standard":
            wanted = [2.1466, 4000, 0.98, [0.0], [0.2], 0.1]
        assert [train[option] for option in names] == wanted, name
        assert train["decay_method"] == "noam"


def test_rows_of_alone_train_as_in_the_readme_of_its_authors() -> None:
    """3,584 tokens, 32 batches on each of 4 GPUs, at most 1.5e-3; ReLU dropout ends after 4,500 updates."""
    dropped = set()
    for name, row in find_recipe("wmt14_ende").rows.items():
        if not name.startswith("alone_table2_") or name.endswith("standard"):
            continue
        assert row.batch is not None and batch_size(row.batch, 4) == (3584, 32)
        assert row.train["learning_rate"] * (512 * 4000) ** -0.5 == pytest.approx(1.5e-3, rel=1e-4)
        assert row.train["max_grad_norm"] == 1.0 and row.train["train_steps"] == 100_000
        assert row.average == 10 and row.train["keep_checkpoint"] >= 10
        if row.embedding["method"] == "alone":
            assert row.embedding["relu_dropout_steps"] == 4500
            dropped.add((row.embedding["filter"], row.embedding["relu_dropout"]))
    assert dropped == {("binary", 0.15), ("real", 0.2)}


def test_a_step_has_as_many_tokens_on_any_number_of_gpus_and_machines() -> None:
    for processes in (1, 2, 3, 8, 16):
        size, accumulated = batch_size({"tokens": 48000, "per_gpu": 6000}, processes)
        assert size <= 6000
        assert abs(size * accumulated * processes - 48000) <= accumulated * processes / 2
    options = Machines(2, 2, 1, "first", 12345).options({"tokens": 4096, "per_gpu": 1024})
    assert options[options.index("-gpu_ranks") + 1 :][:2] == ["2", "3"]
    assert options[options.index("-world_size") + 1] == "4"
    assert int(options[options.index("-timeout") + 1]) > 60
    assert "-timeout" not in Machines(2).options({"tokens": 4096, "per_gpu": 1024})
    assert read_machines(["--machine", "1", "-seed", "2"], gpus=3) == (Machines(3, 1, 1), ["-seed", "2"])


def test_archive_formats_are_read(tmp_path: Path) -> None:
    members = {
        "a/x.pt": "<url>u</url>\num\ndois\n",
        "a/x.en": "<url>u</url>\none\ntwo\n",
        "a/t.en.sgm": '<doc>\n<seg id="1">A &amp; B</seg>\n</doc>\n',
        "a/t.pt.sgm": '<doc>\n<seg id="1"> C </seg>\n</doc>\n',
    }
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as archive:
        for name, text in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    tags = Texts("x", "x.tgz", "", "a/x.pt", "a/x.en", "tags")
    segments = Texts("t", "x.tgz", "", "a/t.pt.sgm", "a/t.en.sgm", "segments")
    corpus = locate(tags, ("pt", "en"), [tmp_path])
    assert list(read_pairs(corpus)) == [("um", "one"), ("dois", "two")]
    assert list(read_pairs(locate(segments, ("pt", "en"), [tmp_path]))) == [("C", "A & B")]
    (tmp_path / "x.pt").write_text("um\n")
    (tmp_path / "x.en").write_text("one\ntwo\n")
    with pytest.raises(UserError, match="the source side ends before line 2"):
        list(read_pairs(locate(tags, ("pt", "en"), [tmp_path])))


def test_pairs_are_cleaned() -> None:
    settings = read_settings(IWSLT)
    pairs = [("a", "b"), ("", "b"), ("a", "b " * 9 + "b"), ("a " * 250 + "a", "b " * 200 + "b"), ("c", "d e")]
    cleaned = list(clean(pairs, settings))
    assert cleaned == [("a", "b"), ("c", "d e")]


def test_counting_drops_the_rarest_words(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("a a a\nb b\nc\nd\n")
    assert count_words([text], 3) == {"a": 3}
    assert len(count_words([text], 3)) <= 3
    assert count_words([text], 9) == {"a": 3, "b": 2, "c": 1, "d": 1}


PIECES = {"bpe": {"kind": "bpe", "size": 150}, "plain": {"kind": "sentencepiece", "size": 240}}


@pytest.mark.slow
def test_stopped_preprocessing_resumes_from_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The data are the same after three interruptions in different steps, of which some are in a worker."""
    recipe, settings = find_recipe("wmt14_ende"), tmp_path / "data.yaml"
    write_smoke_texts(tmp_path / "raw" / recipe.name, read_settings(recipe))
    content = {**recipe.data_settings()[1], "shard": 50, "sentences": 500, "pieces": PIECES}
    settings.write_text(yaml.safe_dump(content))
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "raw"))

    def prepare(name: str, last: str) -> list[str]:
        """Prepare below the folder `name` until a step begins; returns what was printed."""

        def print_and_stop(line: str, **how: Any) -> None:
            print(line, **how)
            if line == f"{last}: running":
                raise KeyboardInterrupt

        monkeypatch.setenv("RUNS", str(tmp_path / name))
        monkeypatch.setattr(tools, "print", print_and_stop, raising=False)
        with contextlib.suppress(KeyboardInterrupt):
            preprocess(recipe, ["--settings", str(settings)])
        return capfd.readouterr().out.splitlines()

    def files(name: str) -> dict[str, bytes]:
        home = tmp_path / name / recipe.name / "data"
        return {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*") if path.is_file()}

    prepare("whole", "")
    for last in ("text-00002", "bpe-learn", "plain-train-00003.de"):
        printed = prepare("stopped", last)
        assert f"{last}: running" in printed and "plain-vocabulary: running" not in printed
    printed = prepare("stopped", "")
    assert "bpe-learn: up to date" in printed and "plain-vocabulary: running" in printed
    assert files("stopped") == files("whole") and len(files("whole")) > 60
