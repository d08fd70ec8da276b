"""All hosts: adapters that pass the same checks, and runs in Weights & Biases."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared_embeddings.cli.main import main
from shared_embeddings.compress import host as adapters
from shared_embeddings.compress.calibration import calibrate
from shared_embeddings.utils.results import WandbWriter
from shared_embeddings.words.vectors import WordVectors, write_vectors
from tests.helpers import HOSTS, flip, offsets
from tests.lm.runs import run as train_lm
from tests.lm.runs import settings, small_corpus, write_corpus, write_model
from tests.nmt.conftest import Host
from tests.nmt.conftest import run as run_nmt

LARGEST_READ = 100_000  # bytes that sniffing one of these models may read


class Trained(NamedTuple):
    """A tiny model of a host."""

    host: str  # its name
    model: Path  # a file or folder
    text: Path  # that its commands can read


def _lm(folder: Path) -> tuple[Path, Path]:
    data = write_corpus(folder / "corpus")
    return write_model(folder / "model.pt", data), folder / "corpus" / "valid.txt"


def _nmt(folder: Path) -> tuple[Path, Path]:
    host = Host(folder)
    return host.train("model", train_steps=1, save_checkpoint_steps=1), folder / "test.src"


def _hf(folder: Path) -> tuple[Path, Path]:
    from tests.shared_embeddings.hf.models import save, sentences

    (folder / "text").write_text("\n".join(sentences(30, 1)) + "\n", encoding="utf-8")
    return save(folder / "model", "gpt2"), folder / "text"


def _vectors(folder: Path) -> tuple[Path, Path]:
    words = [f"w{number}" for number in range(60)]
    rows = np.random.default_rng(1).standard_normal((60, 12)).astype(np.float32)
    write_vectors(folder / "model.vec", WordVectors(words, rows))
    (folder / "text").write_text("\n".join(map(" ".join, zip(words, words[1:]))) + "\n", encoding="utf-8")
    return folder / "model.vec", folder / "text"


Maker = Callable[[Path], tuple[Path, Path]]
MAKERS: dict[str, Maker] = {"hf": _hf, "lm": _lm, "nmt": _nmt, "vectors": _vectors}


@pytest.fixture(scope="module", params=sorted(MAKERS))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A model of every host in turn."""
    return Trained(request.param, *MAKERS[request.param](tmp_path_factory.mktemp(request.param)))


def opened(host: str) -> adapters.Adapter:
    """The adapter of a host."""
    found: adapters.Adapter = EntryPoint(host, f"{HOSTS[host]}:Adapter", adapters.GROUP).load()()
    return found


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """The exit status of a command, and what it prints."""
    status = main([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


def test_every_host_has_an_example_and_an_entry_point() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    points = {name: f"{module}:Adapter" for name, module in HOSTS.items()}
    assert project["entry-points"][adapters.GROUP] == points and HOSTS.keys() == MAKERS.keys()


def test_each_model_is_recognized_only_by_its_adapter(trained: Trained) -> None:
    assert [host for host in HOSTS if opened(host).sniff(trained.model)] == [trained.host]
    assert adapters.find_host(trained.model)[0] == trained.host


def test_sniffing_loads_nothing(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """No unpickling and no tensors, of files of any size."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was loaded")

    for owner, name in ((torch, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(owner, name, fail)
    read: list[int] = []
    original = zipfile.ZipExtFile.read

    def counted(self: zipfile.ZipExtFile, size: int | None = -1) -> bytes:
        found = original(self, size)
        read.append(len(found))
        return found

    monkeypatch.setattr(zipfile.ZipExtFile, "read", counted)
    for host in HOSTS:
        opened(host).sniff(trained.model)
    assert sum(read) < LARGEST_READ


def test_other_files_are_not_recognized(trained: Trained, tmp_path: Path) -> None:
    adapter = opened(trained.host)
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("opt vocab shared-embeddings-lm config.json")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "plain.pt")
    torch.save([0], tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    zipfile.ZipFile(tmp_path / "other.zip", "w").writestr("data.txt", "opt vocab")
    (tmp_path / "folder").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text("[]")
    for path in [*tmp_path.iterdir(), tmp_path / "missing"]:
        assert not adapter.sniff(path), path


def test_truncated_models_are_reported(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / trained.model.name
    if trained.model.is_dir():
        shutil.copytree(trained.model, model)
        (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-9])
    else:
        model.write_bytes(trained.model.read_bytes()[:-9])
    for command in ("compress", "trim"):
        method = ["--method", "standard"] if command == "compress" else ["--text", trained.text]
        asked = ["--model", model, *method, "--output", tmp_path / "out.pt"]
        status, _, error = run(capsys, command, *asked)
        assert status == 2 and error.count("\n") == 1 and str(model) in error, error
        assert not (tmp_path / "out.pt").exists()


def test_a_model_with_plain_tables_in_it_is_calibrated_alike(trained: Trained) -> None:
    """As models with more than 32,768 words are, of which some words are scored then."""
    model = opened(trained.host).read(trained.model)
    tables = model.tables()
    before = calibrate(model, tables, [trained.text], 0, progress=False)
    adapters.place_plain(model, tables)
    after = calibrate(model, tables, [trained.text], 0, progress=False)
    assert before.keys() == after.keys()
    for name, (metric, _) in before.items():
        if (
            trained.host == "nmt"
        ):  # upstream's table scores padding, too, which changes the words that are drawn
            assert metric.shape == after[name].metric.shape and float(after[name].metric.norm()) > 0
        else:
            torch.testing.assert_close(after[name].metric, metric)


def test_calibration_of_every_host(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each table has a metric; a file with them gives the same model, and is of no use for another one."""
    model = opened(trained.host).read(trained.model)
    found = calibrate(model, model.tables(), [trained.text], 1, progress=False)
    sizes = {table.name: table.table.size(1) for table in model.tables()}
    assert found.keys() == (set() if trained.host == "vectors" else sizes.keys())
    for name, (metric, shares) in found.items():
        assert metric.shape == (sizes[name], sizes[name])
        assert 0 <= float(shares.min()) and float(shares.sum()) < 1 + 1e-4
        values = torch.linalg.eigvalsh(metric.double())
        assert values[-1] > 0 and values[0] > -1e-4 * values[-1]
    output, file, made = tmp_path / "small.pt", tmp_path / "calibration.safetensors", []
    codes = ["--method", "quantized", "--bits", 3]
    asked = ["compress", "--model", trained.model, *codes, "--text", trained.text]
    if trained.host == "vectors":
        for more in (["--calibrate", "both"], ["--calibration", file]):
            status, _, error = run(capsys, *asked, *more, "--output", output)
            assert status == 2 and f"{more[0]}: " in error and "predicts nothing" in error
        assert not file.exists()
        return
    for more in (["--calibration", file], ["--calibration", file], ["--calibrate", "none"]):
        status, _, error = run(capsys, *asked, *more, "--output", output, "--force")
        assert status == 0, error
        made.append(read_rows(output))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    # On what the model generates.
    own = [*asked[:-2], "--calibrate", "output", "--output", output, "--force"]
    status, _, error = run(capsys, *own)
    assert status == 0, error
    assert not torch.equal(read_rows(output), made[2])
    for more, reason in (
        (["--calibration", tmp_path / "none"], "none: no such file"),
        (["--calibration", file, "--calibrate", "none"], "has no effect with --calibrate none"),
        (["--calibration", file, "--calibrate", "output"], "was not measured with --calibrate output"),
        (["--calibrate", "both", "--no-check"], "remove --no-check"),
    ):
        status, _, error = run(capsys, *asked[:-2], *more, "--output", output, "--force")
        assert status == 2 and reason in error.splitlines()[-1]
    for more in (["--calibrate", "both"], ["--calibration", file]):
        other = ["compress", "--model", trained.model, "--method", "standard", *more]
        status, _, error = run(capsys, *other, "--output", output, "--force")
        assert status == 2 and "no effect with --method standard" in error
    content = load_file(file)
    content["model"][0] ^= 1
    save_file(content, file)
    status, _, error = run(capsys, *asked, "--calibration", file, "--output", output, "--force")
    assert status == 2 and "is of another model" in error.splitlines()[-1] and "Traceback" not in error


def read_rows(model: Path) -> torch.Tensor:
    """The first eight rows of every embedding of a model."""
    found = adapters.find_host(model)[1].read(model).embeddings()
    return torch.stack([one.module(torch.arange(8)) for one in found])


@pytest.mark.slow_except("lm-fp32", "lm-int8")
@pytest.mark.parametrize("store", ["fp32", "int8"])
def test_compress_writes_a_model_of_the_same_host(
    trained: Trained, store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, report = tmp_path / "small.pt", tmp_path / "report.json"
    asked = ["--method", "projective", "--rank", 2, "--store", store, "--report", report]
    status, printed, error = run(capsys, "compress", "--model", trained.model, *asked, "--output", small)
    assert status == 0, error
    name, adapter = adapters.find_host(small)
    assert name == trained.host
    content = json.loads(report.read_text())
    assert content["host"] == name and content["store"] == store
    assert content["parameters"]["after"] < content["parameters"]["before"]
    before, after = (opened(name).read(path).embeddings() for path in (trained.model, small))
    assert [list(one.words) for one in after] == [list(one.words) for one in before]
    assert all(one.table().shape == old.table().shape for one, old in zip(after, before, strict=True))
    assert printed.startswith(f"{small}: weights of ") and "{method: projective, " in printed
    status, _, error = run(capsys, "compress", "--model", trained.model, *asked, "--output", small)
    assert status == 2 and "--force" in error


def test_trim_keeps_the_words_of_a_text(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, small = tmp_path / "text", tmp_path / "small.pt"
    text.write_text(trained.text.read_text(encoding="utf-8").splitlines()[0] + "\n", encoding="utf-8")
    status, printed, error = run(capsys, "trim", "--model", trained.model, "--text", text, "--output", small)
    assert status == 0, error
    assert adapters.find_host(small)[0] == trained.host
    (before,) = opened(trained.host).read_trimmable(trained.model).vocabularies()
    (after,) = opened(trained.host).read_trimmable(small).vocabularies()
    maps = small / "ids.tsv" if small.is_dir() else tmp_path / "small.pt.ids.tsv"
    assert str(maps) in printed
    pairs = [tuple(map(int, line.split("\t"))) for line in maps.read_text().splitlines()]
    assert [new for _, new in pairs] == list(range(len(after.words))) and len(pairs) < len(before.words)
    assert [before.words[old] for old, _ in pairs] == list(after.words)
    assert {before.words[special] for special in before.specials} <= set(after.words)


@pytest.mark.slow_except("*-fp32")
@pytest.mark.parametrize("store", ["fp32", "fp16", "int8"])
def test_flipped_bits_of_a_compressed_model_are_an_error_or_change_nothing(
    trained: Trained, store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bits of the tensors and of the file's own structure, such as the header of safetensors."""
    small = tmp_path / "small.pt"
    asked = ["--method", "projective", "--rank", 8, "--store", store, "--output", small]
    assert run(capsys, "compress", "--model", trained.model, *asked)[0] == 0
    before = content_of(trained.host, small)
    (file,) = small.glob("*.safetensors") if small.is_dir() else [small]
    size, errors = file.stat().st_size, 0
    inside = offsets(file)[:12]
    picked = [place * size // 40 for place in range(40)] + list(range(8, 600, 20)) + inside
    for offset in picked:
        flip(file, offset)
        try:
            if adapters.find_host(small)[0] == trained.host:
                now = content_of(trained.host, small)
                assert now.keys() == before.keys(), offset
                assert all(torch.equal(now[name], before[name]) for name in before), offset
        except ValueError as error:
            errors += "does not match its checksum" in str(error)
        flip(file, offset)
    assert errors >= len(inside)


def content_of(host: str, path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model, and the tables and words of its embeddings."""
    model = opened(host).read(path)
    content = dict(model.tensors())
    for number, embedding in enumerate(model.embeddings()):
        text = "\n".join(embedding.words).encode("utf-8", "surrogateescape")
        content[f"words of {number}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        content[f"table of {number}"] = embedding.module.table()
    return content


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What replaces wandb."""
    module = Mock()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def values_sent(wandb: Mock, tag: str) -> dict[int, float]:
    """The values of a tag by step, of the one run, which has ended."""
    wandb.init.assert_called_once()
    wandb.init.return_value.finish.assert_called_once()
    calls = wandb.init.return_value.log.call_args_list
    return {call.kwargs["step"]: call.args[0][tag] for call in calls if tag in call.args[0]}


def test_without_wandb_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'shared-embeddings\[wandb\]'"):
        WandbWriter("project", tmp_path, {})
    values = settings(small_corpus(tmp_path), tmp_path / "run", steps=2, wandb="project")
    with pytest.raises(ModuleNotFoundError, match="wandb"):
        train_lm(values)
    assert not (tmp_path / "run" / "train.log").exists()


def test_a_language_model_sends_training_and_validation(tmp_path: Path, wandb: Mock) -> None:
    train_lm(settings(small_corpus(tmp_path), tmp_path / "run", steps=10, wandb="project"))
    assert values_sent(wandb, "train/loss").keys() == {2, 4, 6, 8, 10}
    assert values_sent(wandb, "valid/perplexity").keys() == {5, 10}
    options = wandb.init.call_args.kwargs
    assert (options["project"], options["group"]) == ("project", "run")
    assert options["config"]["steps"] == 10
    train_lm(settings(tmp_path / "data", tmp_path / "run", steps=12))
    wandb.init.assert_called_once()  # a run may be resumed without it


@pytest.mark.slow
def test_a_translator_sends_the_values_of_tensorboard(tmp_path: Path, wandb: Mock) -> None:
    config = Host(tmp_path).config("model", valid_steps=6)
    run_nmt("onmt_train", "-config", str(config), "-wandb", "project")
    assert values_sent(wandb, "progress/ppl").keys() == {2, 4, 6}
    assert values_sent(wandb, "valid/ppl").keys() == {6}
    assert wandb.init.call_args.kwargs["config"]["train_steps"] == 6
