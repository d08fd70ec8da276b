"""All hosts: adapters that pass the same checks, and runs in Weights & Biases."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import signal
import sys
import time
import zipfile
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import shared_embeddings as se
from shared_embeddings.cli.main import main
from shared_embeddings.compress import host as adapters
from shared_embeddings.compress import recovery as recovery_module
from shared_embeddings.compress.calibration import calibrate
from shared_embeddings.compress.recovery import Student
from shared_embeddings.utils.command_line import RESUME
from shared_embeddings.utils.files import bytes_on_disk
from shared_embeddings.utils.results import WandbWriter
from shared_embeddings.words.vectors import WordVectors, write_vectors
from tests.helpers import HOSTS, as_method, content, example, flip, offsets
from tests.lm.runs import run as train_lm
from tests.lm.runs import settings, small_corpus, write_corpus, write_model
from tests.nmt.conftest import Host
from tests.nmt.conftest import run as run_nmt

LARGEST_READ = 100_000  # bytes that sniffing one of these models may read


class TrainedHost(NamedTuple):
    """A tiny model of a host."""

    host: str  # its name
    model: Path  # a file or folder
    text: Path  # that its commands can read


def _lm(folder: Path) -> tuple[Path, Path]:
    data = write_corpus(folder / "corpus", " ".join(f"w{number}" for number in range(60)))
    return write_model(folder / "model.pt", data), folder / "corpus" / "train.txt"


def _nmt(folder: Path) -> tuple[Path, Path]:
    host = Host(folder)
    return host.train("model", train_steps=1, save_checkpoint_steps=1), folder / "train.src"


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


def _static(folder: Path) -> tuple[Path, Path]:
    from tests.shared_embeddings.static.models import write_model2vec, write_text

    return write_model2vec(folder / "model"), write_text(folder / "text")


Maker = Callable[[Path], tuple[Path, Path]]
# The widths of their tables.
WIDTHS = {"hf": 16, "lm": 8, "nmt": 16, "static": 12, "vectors": 12}
MAKERS: dict[str, Maker] = {"hf": _hf, "lm": _lm, "nmt": _nmt, "static": _static, "vectors": _vectors}


@pytest.fixture(scope="module", params=sorted(MAKERS))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainedHost:
    """A model of every host in turn."""
    return TrainedHost(request.param, *MAKERS[request.param](tmp_path_factory.mktemp(request.param)))


def opened(host: str) -> adapters.HostAdapter:
    """The adapter of a host."""
    adapter: adapters.HostAdapter = EntryPoint(host, HOSTS[host], adapters.GROUP).load()()
    return adapter


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """The exit status of a command, and what it prints."""
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = int(str(end.code))
    return status, *capsys.readouterr()


def test_every_host_has_an_example_and_an_entry_point() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][adapters.GROUP] == HOSTS and HOSTS.keys() == MAKERS.keys()


def test_each_model_is_recognized_only_by_its_adapter(trained: TrainedHost) -> None:
    assert [host for host in HOSTS if opened(host).sniff(trained.model)] == [trained.host]
    assert adapters.find_host(trained.model)[0] == trained.host


def test_sniffing_loads_nothing(trained: TrainedHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """No unpickling and no tensors, of files of any size."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was loaded")

    for owner, name in ((torch, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(owner, name, fail)
    read: list[int] = []
    original = zipfile.ZipExtFile.read

    def counted(self: zipfile.ZipExtFile, size: int | None = -1) -> bytes:
        content = original(self, size)
        read.append(len(content))
        return content

    monkeypatch.setattr(zipfile.ZipExtFile, "read", counted)
    for host in HOSTS:
        opened(host).sniff(trained.model)
    assert sum(read) < LARGEST_READ


def test_other_files_are_not_recognized(trained: TrainedHost, tmp_path: Path) -> None:
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
    trained: TrainedHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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


def test_a_model_with_plain_tables_in_it_is_calibrated_alike(trained: TrainedHost) -> None:
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


@pytest.mark.slow_except("lm")
def test_calibration_of_every_host(
    trained: TrainedHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each table has a metric; a file with them gives the same model, and is of no use for another one."""
    model = opened(trained.host).read(trained.model)
    calibrated = calibrate(model, model.tables(), [trained.text], 1, progress=False)
    sizes = {table.name: table.table.size(1) for table in model.tables()}
    assert calibrated.keys() == (set() if trained.host == "vectors" else sizes.keys())
    for name, (metric, shares) in calibrated.items():
        assert metric.shape == (sizes[name], sizes[name])
        assert 0 <= float(shares.min()) and float(shares.sum()) < 1 + 1e-4
        values = torch.linalg.eigvalsh(metric.double())
        assert values[-1] > 0 and values[0] > -1e-4 * values[-1]
    output, file, made = tmp_path / "small.pt", tmp_path / "calibration.safetensors", []
    codes = ["--method", "quantized", "--bits", 3]
    asked = ["compress", "--model", trained.model, *codes, "--text", trained.text]
    if trained.host == "vectors":
        status, _, error = run(capsys, *asked, "--calibration", file, "--output", output)
        assert status == 2 and "calibration: " in error and "predicts nothing" in error
        assert not file.exists()
        return
    report, measured_on = tmp_path / "report.json", f"calibrated on {trained.text.name}"
    if trained.host == "hf":
        measured_on += " and words of 2 languages and code"
    for more, calibration in (
        (["--calibration", file], measured_on),
        (["--calibration", file], f"calibrated on what {file.name} was measured on"),
        (["--calibration", "none"], "not calibrated"),
        (["--no-check"], measured_on),
        (["--only-text"], f"calibrated on {trained.text.name}"),
    ):
        status, printed, error = run(capsys, *asked, *more, "--output", output, "--report", report, "--force")
        assert status == 0, error
        made.append(read_rows(output))
        assert f"; codes are {calibration})" in printed
        assert json.loads(report.read_text())["calibration"] == calibration
        if trained.host == "hf":
            assert f"- codes are {calibration}\n" in (output / "README.md").read_text()
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[3])
    assert not torch.equal(made[0], made[2])
    assert trained.host != "hf" or not torch.equal(made[0], made[4])
    # Without a text, only models that read any text are calibrated.
    status, printed, error = run(capsys, *asked[:-2], "--output", output, "--force")
    assert status == 0, error
    is_general = trained.host == "hf"
    assert f"codes are {'calibrated on words of 2 languages' if is_general else 'not calibrated'}" in printed
    other = ["compress", "--model", trained.model, "--method", "standard", "--calibration", file]
    for command, reason in (
        (other, "no effect with method standard"),
        ([*asked[:-2], "--only-text"], "only_text needs a text"),
    ):
        status, _, error = run(capsys, *command, "--output", output, "--force")
        assert status == 2 and reason in error.splitlines()[-1]
    content, name = load_file(file), next(iter(sizes))
    metric, shares = content[name], content[f"{name}.shares"]
    for changes, reason in (
        ({"model": content["model"] ^ 1}, "is of another model"),
        ({"model": torch.ones(2, 2)}, "is of another model"),
        ({"more": metric.clone()}, "has other tensors"),
        ({name: metric[1:]}, "has other tensors"),
        ({name: metric.double()}, "has other tensors"),
        ({f"{name}.shares": shares / 0}, "has other tensors"),
    ):
        save_file({**content, **changes}, file)
        status, _, error = run(capsys, *asked, "--calibration", file, "--output", output, "--force")
        assert status == 2 and reason in error.splitlines()[-1] and "Traceback" not in error


def change_settings(
    host: str, model: Path, layers: int | None, width: int | None, directions: object
) -> None:
    """Change sizes in a compressed model without its tensors."""
    if host == "hf":
        config = json.loads((model / "config.json").read_text())
        table = next(iter(config["quantization_config"]["tables"].values()))
        config["n_layer"] = layers or config["n_layer"]
        table["embedding_dim"] = width or table["embedding_dim"]
        table["options"]["directions"] = directions or table["options"]["directions"]
        (model / "config.json").write_text(json.dumps(config))
    elif host in ("vectors", "static"):
        model = model / "model.safetensors" if host == "static" else model
        with safe_open(model, "pt") as file:
            metadata = file.metadata()
        options, (count, old) = json.loads(metadata["embedding"]), json.loads(metadata["sizes"])
        options["directions"] = directions or options["directions"]
        metadata |= {"embedding": json.dumps(options), "sizes": json.dumps([count, width or old])}
        save_file(load_file(model), model, metadata)
    else:
        content = torch.load(model, weights_only=True)
        settings = content["config"] if host == "lm" else vars(content["opt"])
        if directions:
            quantized = [
                part for part in settings.values() if isinstance(part, dict) and "directions" in part
            ]
            quantized[0]["directions"] = directions
        names = {"lm": ("num_layers", "hidden_dim"), "nmt": ("enc_layers", "transformer_ff")}[host]
        settings.update({name: size for name, size in zip(names, (layers, width)) if size})
        torch.save(content, model)


@pytest.mark.parametrize(
    ("layers", "width", "directions"),
    [(10**6, None, None), (None, 10**9, None), (None, None, [0] + [10**9] * 110)],
    ids=["layers", "width", "option"],
)
def test_sizes_without_tensors(
    trained: TrainedHost,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    layers: int | None,
    width: int | None,
    directions: object,
) -> None:
    """A few bytes of settings take no memory: they are compared with the tensors before anything is built."""
    if trained.host in ("static", "vectors") and layers:
        return
    small = tmp_path / "small.pt"
    asked = ["--method", "quantized", "--bits", 4, "--codec", "spectral", "--output", small]
    status, _, error = run(capsys, "compress", "--model", trained.model, *asked)
    assert status == 0, error
    change_settings(trained.host, small, layers, width, directions)
    for command in (
        ["export", "--format", "onnx-embeddings", "--model", small],
        ["trim", "--text", trained.text, "--model", small],
    ):
        began = time.monotonic()
        status, _, error = run(capsys, *command, "--output", tmp_path / "output")
        line = error.splitlines()[-1]
        assert status == 2 and "too large for" in line and str(small) in line, error
        assert time.monotonic() - began < 20 and "Traceback" not in error


def read_rows(model: Path) -> torch.Tensor:
    """The first eight rows of every embedding of a model."""
    embeddings = adapters.find_host(model)[1].read(model).embeddings()
    return torch.stack([embedding.module(torch.arange(8)) for embedding in embeddings])


def compressed(
    capsys: pytest.CaptureFixture[str], trained: TrainedHost, output: Path, *arguments: object
) -> tuple[dict[str, Any], str]:
    """The report of a compression that must succeed, and what it prints."""
    report = output.parent / "report.json"
    asked = ["--model", trained.model, "--output", output, "--report", report, "--force", *arguments]
    status, printed, error = run(capsys, "compress", *asked)
    assert status == 0, error
    return json.loads(report.read_text()), printed


@pytest.mark.slow_except("lm-int8")
@pytest.mark.parametrize("store", ["fp32", "fp16", "int8"])
def test_compress_writes_a_model_of_the_same_host(
    trained: TrainedHost, store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights take as many bytes as the report says, besides names, words and settings."""
    small = tmp_path / "small.pt"
    asked = ["--method", "projective", "--rank", 2, "--store", store]
    content, printed = compressed(capsys, trained, small, *asked, "--verbose")
    name, adapter = adapters.find_host(small)
    assert name == trained.host == content["host"] and content["store"] == store
    assert content["parameters"]["after"] < content["parameters"]["before"]
    model = adapter.read(small)
    before, after = (loaded.embeddings() for loaded in (opened(name).read(trained.model), model))
    assert [list(layer.words) for layer in after] == [list(layer.words) for layer in before]
    assert all(new.table().shape == old.table().shape for new, old in zip(after, before, strict=True))
    assert f"{small}: weights of " in printed and "{method: projective, " in printed
    assert ("relative error in" in printed) == (store != "fp32")
    disk = sum(map(bytes_on_disk, model.files(small)))
    assert content["bytes_on_disk"]["after"] == disk >= content["bytes_of_weights"]["after"]
    again = tmp_path / "again" / small.name
    again.parent.mkdir()
    compressed(capsys, trained, again, *asked)
    weights = [file for file in again.parent.rglob("*.*") if file.is_file()]
    weights = [file for file in weights if file.suffix in (".pt", ".safetensors")]
    assert weights
    for file in weights:
        assert file.read_bytes() == (tmp_path / file.relative_to(again.parent)).read_bytes()
    status, _, error = run(capsys, "compress", "--model", trained.model, *asked, "--output", small)
    assert status == 2 and "--force" in error
    status, _, error = run(
        capsys, "compress", "--model", small, "--method", "standard", "--output", small, "--force"
    )
    assert status == 2 and str(small) in error


@pytest.mark.slow_except("lm-*", "vectors-*", "hf-text", "nmt-text")
@pytest.mark.parametrize("source", ["generated", "text"])
def test_damaged_models_are_reported(
    trained: TrainedHost, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At full size nothing changes; with a single dimension, predictions do."""
    text = ["--text", trained.text] if source == "text" else []
    for method in ("standard", "projective"):
        whole = ["--rank", WIDTHS[trained.host]] if method == "projective" else []
        content, printed = compressed(capsys, trained, tmp_path / "a.pt", "--method", method, *whole, *text)
        assert content["kept"]["share"] == pytest.approx(1) and not content["kept"]["needs_training"]
        assert printed.splitlines()[-1].startswith("kept ")
    content, printed = compressed(
        capsys, trained, tmp_path / "a.pt", "--method", "projective", "--rank", 1, *text
    )
    line = printed.splitlines()[-1]
    assert content["kept"]["share"] < 0.85 and content["kept"]["needs_training"]
    assert line.startswith(f"warning: kept {int(100 * content['kept']['share'])}% of the ")


@torch.no_grad()
def predictions(model: Any, text: Path) -> torch.Tensor:
    """The scores ``(n, V)`` of some predictions."""
    return torch.cat([batch.scores for batch in model.samples([text], 1, 100).batches()])


@pytest.mark.slow_except("lm-quantized", "lm-funnel")
@pytest.mark.parametrize("method", se.methods())
def test_every_method_is_loaded_as_written(
    trained: TrainedHost, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """What is loaded is what was in memory, in every storage format.

    Scores may differ in the last bit: products depend on the alignment of their factors.
    """
    kind = type(opened(trained.host).read(trained.model))
    write, computed = kind.write, []

    def recording(self: Any, *content: Any) -> None:
        computed.append(predictions(self, trained.text))
        write(self, *content)

    monkeypatch.setattr(kind, "write", recording)
    tables = [embedding.table() for embedding in opened(trained.host).read(trained.model).embeddings()]
    words, width = tables[0].shape
    for store in ("fp32", "fp16", "int8"):
        options = as_method(method, example(method, max(words, 32), max(width, 16)))
        asked = ["--method", options, "--fit-steps", 2, "--store", store, "--output", tmp_path / store]
        status, _, error = run(capsys, "compress", "--model", trained.model, *asked)
        if status == 2:  # methods without output side, with several softmax steps, or too large for a table
            assert error.count("\n") == 1
            return
        loaded = predictions(opened(trained.host).read(tmp_path / store), trained.text)
        torch.testing.assert_close(loaded, computed[-1], rtol=1e-6, atol=1e-6)


@pytest.mark.slow_except("lm", "vectors")
def test_the_best_candidate_is_written(
    trained: TrainedHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small.pt"
    content, printed = compressed(capsys, trained, small, "--size", "3x", "--text", trained.text)
    rows = re.findall(r"^\{method: (\w+).*?([\d.]+)%$", printed, flags=re.MULTILINE)
    assert len(rows) >= 2 and rows[0][0] == content["method"]
    assert content["tables"][0]["stored_bytes"]["after"] <= content["tables"][0]["stored_bytes"]["before"] / 3
    assert "at other sizes" not in printed
    before = sorted(tmp_path.iterdir())
    status, printed, error = run(
        capsys, "compress", "--model", trained.model, "--compare", "--size", "3x", "--text", trained.text
    )
    assert status == 0 and "{method: quantized" in printed, error
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give exactly one of size, bits and max_loss"),
        ("--bits 2 --compare", "give either output or compare"),
        ("--bits 2 --rank 4", "rank is an option of a method"),
        ("--bits 64", "below 32"),
        ("--bits 2 --store int8", "store has no effect"),
        ("--bits 2 --seed -1", "'seed' is -1"),
        ("--bits 2 --no-check", "check=False needs a method"),
        ("--size 1000000x", "no method is possible at this size"),
        ("--max-loss 120%", "write 1% or 0.01"),
        ("--method quantized --max-loss 1%", "remove method"),
        ("--method projective --rank 2 --bits 3", "'rank' is chosen by the target"),
        ("--method projective --rank 2 --words a,b", "'words' is set by"),
        ("--method projective --rank 2 --recover 20", "write 20min or 1500steps"),
        ("--method projective --rank 2 --recover 1min --no-check", "recover has no effect with check=False"),
        ("--method projective --rank 2 --validation-source FILE", "give both"),
        ("--method projective --rank 2 --text none", "no such file"),
        ("--method projective --rank 2 --text FILE --token-counts FILE", "remove one of them"),
        ("--method projective --rank 2 --token-counts FILE", "line 1"),
    ],
)
def test_options_that_contradict_each_other(
    trained: TrainedHost, tmp_path: Path, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, before anything is fitted or written."""
    asked = [str(trained.text) if word == "FILE" else word for word in arguments.split()]
    files = ["--model", trained.model, "--output", tmp_path / "small"]
    status, out, error = run(capsys, "compress", *files, *asked)
    assert status == 2 and message in error.splitlines()[-1] and "Traceback" not in error and not out
    assert list(tmp_path.iterdir()) == []


def test_quality_replaces_predictions(
    trained: TrainedHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = ["--validation-source", trained.text, "--validation-target", trained.text]
    asked = {"nmt": sides, "lm": ["--validation", trained.text], "hf": ["--validation", trained.text]}
    one_text = ["--validation", trained.text]
    wrong = {"nmt": one_text, "vectors": one_text, "static": one_text, "lm": sides}
    method = ["--method", "projective", "--rank", 1]
    if trained.host in wrong:
        files = ["--model", trained.model, "--output", tmp_path / "small", *method]
        status, _, error = run(capsys, "compress", *files, *wrong[trained.host])
        assert status == 2 and "validation" in error.splitlines()[-1]
    if trained.host in asked:
        content, printed = compressed(capsys, trained, tmp_path / "small", *method, *asked[trained.host])
        quality, share = content["quality"], content["kept"]["share"]
        assert quality["measure"] == ("BLEU" if trained.host == "nmt" else "perplexity")
        assert f"{quality['measure']} {quality['after']:.2f}, {quality['before']:.2f} before" in printed
        if trained.host != "nmt":  # an untrained translator has no BLEU
            assert share == pytest.approx(quality["before"] / quality["after"])


CODES = ["--method", "quantized", "--bits", 2]
LAYERS = {"codes": CODES, "rank": ["--method", "projective", "--rank", 2, "--store", "int8"]}


@pytest.mark.usefixtures("short_recovery")
@pytest.mark.slow_except("lm-codes")
@pytest.mark.parametrize("method", LAYERS)
def test_recovery(
    trained: TrainedHost, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """The divergence falls at equal bytes; an interrupted training resumes to the same model."""
    asked = [*LAYERS[method], "--text", trained.text]
    training = [*asked, "--recover", "12steps"]
    if trained.host in ("static", "vectors"):
        status, _, error = run(
            capsys, "compress", "--model", trained.model, *training, "--output", tmp_path / "small"
        )
        assert status == 2 and "recover trains layers" in error.splitlines()[-1] or method == "rank"
        return
    plain, _ = compressed(capsys, trained, tmp_path / "plain", *asked)
    content, printed = compressed(capsys, trained, tmp_path / "small", *training)
    recovery = content["recovery"]
    assert recovery["steps"] == 12 and "recovery: 12 steps on" in printed
    assert plain["bytes_of_weights"] == content["bytes_of_weights"]
    assert recovery["kl_after"] < 0.995 * recovery["kl_before"]
    assert recovery["kl_before"] == pytest.approx(plain["kept"]["kl"], rel=1e-2)
    assert recovery["kl_after"] == pytest.approx(content["kept"]["kl"], rel=1e-2)
    step = Student.step

    def stopped(self: Student, batches: Any, rate: float) -> float:
        if self.steps == 8:
            signal.raise_signal(signal.SIGINT)
        return step(self, batches, rate)

    monkeypatch.setattr(Student, "step", stopped)
    files = ["compress", "--model", trained.model, "--output", tmp_path / "again"]
    status, _, error = run(capsys, *files, *training)
    waiting = tmp_path / "again.recovery"
    assert status == 130 and RESUME in error and not (tmp_path / "again").exists() and waiting.exists()
    monkeypatch.setattr(Student, "step", step)
    status, _, error = run(capsys, *files, *training, "--seed", 1)
    assert status == 2 and str(waiting) in error.splitlines()[-1]
    assert run(capsys, *files, *training)[0] == 0 and not waiting.exists()
    first, second = (content_of(trained.host, tmp_path / name) for name in ("small", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    monkeypatch.setattr(recovery_module, "RATE", 1e12)
    _, printed = compressed(capsys, trained, tmp_path / "small", *training)
    assert "the model is as before it" in printed
    first, second = (content_of(trained.host, tmp_path / name) for name in ("small", "plain"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_trim_keeps_the_words_of_a_text(
    trained: TrainedHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone, of a compressed model, and in one command with compressing."""
    text, small = tmp_path / "text", tmp_path / "small.pt"
    text.write_text(trained.text.read_text(encoding="utf-8").splitlines()[0] + "\n", encoding="utf-8")
    packed, after_trim = tmp_path / "packed", tmp_path / "trimmed_packed"
    method = ["--method", "projective", "--rank", 2, "--store", "int8"]
    compressed(capsys, trained, packed, *method)
    for model, output in ((trained.model, small), (packed, after_trim)):
        status, printed, error = run(capsys, "trim", "--model", model, "--text", text, "--output", output)
        assert status == 0, error
        assert adapters.find_host(output)[0] == trained.host
        (before,) = opened(trained.host).read_trimmable(model).vocabularies()
        (after,) = opened(trained.host).read_trimmable(output).vocabularies()
        maps = output / "ids.tsv" if output.is_dir() else output.with_name(f"{output.name}.ids.tsv")
        assert str(maps) in printed
        pairs = [tuple(map(int, line.split("\t"))) for line in maps.read_text().splitlines()]
        assert [new for _, new in pairs] == list(range(len(after.words))) and len(pairs) < len(before.words)
        assert [before.words[old] for old, _ in pairs] == list(after.words)
        assert {before.words[special] for special in before.specials} <= set(after.words)
    both = tmp_path / "both.pt"
    content, printed = compressed(capsys, trained, both, *method, "--trim-to", text)
    maps = both / "ids.tsv" if both.is_dir() else tmp_path / "both.pt.ids.tsv"
    assert maps.exists() and " after trimming, " in printed
    assert content["trimmed"]["vocabularies"][0]["map_file"] == str(maps)
    assert content["trimmed"]["vocabularies"][0]["rows"]["after"] == len(after.words)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--text none", "no such file"),
        ("--text odd", "has no "),
        ("--text binary", "not UTF-8"),
        ("", "no text selects the tokens"),
        ("--text text --keep odd", "token to keep"),
        ("--text text --min-count 9999", "lower min_count"),
        ("--text text --top-k 0", "'top_k' is 0"),
        ("--text text --dry-run", "give either output or dry_run"),
        ("--text text --output taken", "--force"),
    ],
)
def test_user_errors_of_trim(
    trained: TrainedHost,
    arguments: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(trained.text, "text")
    Path("odd").write_text("\n\n\u2603zzz\n", encoding="utf-8")
    Path("binary").write_bytes(b"a\n\xff\n")
    Path("taken").write_text("mine")
    before = content(tmp_path)
    output = [] if "--output" in arguments else ["--output", "trimmed"]
    status, _, error = run(capsys, "trim", "--model", trained.model, *output, *arguments.split())
    if trained.host == "hf" and arguments == "--text odd":  # a tokenizer of characters or bytes reads it
        return
    assert status == 2 and message in error.splitlines()[-1]
    assert content(tmp_path) == before


def test_verify_finds_flipped_bits(
    trained: TrainedHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every tensor that compress writes."""
    small = tmp_path / "small.pt"
    asked = ["--method", "projective", "--rank", 2, "--store", "int8", "--output", small]
    assert run(capsys, "compress", "--model", trained.model, *asked)[0] == 0
    (file,) = small.glob("*.safetensors") if small.is_dir() else [small]
    status, printed, _ = run(capsys, "verify", small)
    assert status == 0 and printed == f"{file}: matches its checksum\n"
    for offset in offsets(file)[:12]:
        flip(file, offset)
        status, _, error = run(capsys, "verify", small)
        assert status == 2 and str(file) in error and error.count("\n") == 1
        flip(file, offset)
    status, _, error = run(capsys, "verify", trained.text)
    assert status == 2 and str(trained.text) in error


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
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[wandb\]'"):
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
