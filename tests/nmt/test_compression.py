"""Compressing translation models: what is written goes through the commands, and computes what it should."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

import shared_embeddings as se
from nmt.checkpoint import build_from_checkpoint
from nmt.files import read_checkpoint
from nmt.model import shared_embeddings_of, word_lookup
from shared_embeddings import compression_hosts
from shared_embeddings.cli import main
from tests.nmt.conftest import Host, run
from tests.nmt.test_training import METHODS

Trained = Callable[..., tuple[Host, Path]]
STANDARD = {"method": "standard"}
UNTIED = {"share_embeddings": False, "share_decoder_embeddings": False}


@pytest.fixture(autouse=True)
def installed_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of this source tree, whichever one is installed."""
    point = EntryPoint("nmt", "nmt.compression:Host", "shared_embeddings.hosts")
    monkeypatch.setattr(compression_hosts, "entry_points", lambda group: [point])


def compress(model: Path, method: str, output: Path, *arguments: object) -> None:
    """Run the command, which has to work."""
    asked = ["compress", "--model", model, "--method", method, "--output", output, *arguments]
    assert main([str(argument) for argument in asked]) == 0


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that the command prints on stderr for a mistake."""
    capsys.readouterr()
    assert main(["compress", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "Traceback" not in err
    return err


def scores(path: Path) -> torch.Tensor:
    """The log-probabilities ``(B, T, V - 1)`` of all words but the padding, for made-up sentences."""
    model: Any
    model, vocabs, _, _ = build_from_checkpoint(str(path))
    draw = torch.Generator().manual_seed(1)
    source = torch.randint(5, len(vocabs["src"]), (3, 6, 1), generator=draw)
    target = torch.randint(5, len(vocabs["tgt"]), (3, 5, 1), generator=draw)
    with torch.no_grad():
        hidden, _ = model(source, target, torch.full((3,), 6))
        padding = vocabs["tgt"]["<blank>"]
        found = model.generator(hidden)
    words = [word for word in range(found.size(-1)) if word != padding]
    return found[..., words].log_softmax(dim=-1)


@pytest.mark.parametrize(
    ("method", "arguments"), [("standard", []), ("projective", ["--rank", 16])], ids=["standard", "full rank"]
)
@pytest.mark.parametrize("save_format", ["pytorch", "safetensors"])
def test_full_size_keeps_the_scores(
    trained: Trained, tmp_path: Path, method: str, arguments: list[object], save_format: str
) -> None:
    _, model = trained(embedding=STANDARD, save_format=save_format)
    output = tmp_path / "same.pt"
    compress(model, method, output, *arguments)
    torch.testing.assert_close(scores(output), scores(model), atol=1e-4, rtol=0)
    assert output.with_suffix(".safetensors").exists() == (save_format == "safetensors")


def test_result_translates_trains_on_and_stays_tied(trained: Trained, tmp_path: Path) -> None:
    host, model = trained(embedding=STANDARD)
    output, report = tmp_path / "small.pt", tmp_path / "report.json"
    before = model.read_bytes()
    counts = host.folder / "vocab"
    asked = ["--rank", 4, "--fit-steps", 50, "--token-counts", counts, "--report", report]
    compress(model, "funnel", output, *asked)
    assert model.read_bytes() == before
    found, *_ = build_from_checkpoint(str(output))
    (embedding,) = shared_embeddings_of(found)
    assert embedding.method == "funnel"
    assert word_lookup(found, "source") is word_lookup(found, "target") is found.generator.embedding
    assert len(host.translate(output)) == 7
    further = ["-train_from", str(output), "-train_steps", "2", "-save_checkpoint_steps", "2"]
    run("onmt_train", "-config", str(host.config("further", embedding=None)), *further)
    assert read_checkpoint(host.folder / "further_step_2.pt")["opt"].embedding["method"] == "funnel"
    run("onmt_release_model", "-model", str(output), "-output", str(tmp_path / "released.pt"))
    written = json.loads(report.read_text())
    words, dim = embedding.num_embeddings, embedding.embedding_dim
    assert written["tables"][0]["parameters"] == {"before": words * dim, "after": 4 * (words + dim)}
    assert written["tables"][0]["uses"] == ["source", "target", "output"]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "standard"])
def test_every_method_is_loaded_as_it_was_fitted(method: str, trained: Trained, tmp_path: Path) -> None:
    _, model = trained(embedding=STANDARD)
    output = tmp_path / "small.pt"
    options = {name: value for name, value in METHODS[method].items() if name != "method"}
    spelled = {name.replace("output", "embedding-output"): value for name, value in options.items()}
    arguments = [text for name, value in spelled.items() for text in (f"--{name}", _spelled(value))]
    compress(model, method, output, *arguments, "--fit-steps", 30, "--seed", 3)
    before, vocabs, *_ = build_from_checkpoint(str(model))
    asked = {"words": vocabs["src"].ids_to_tokens, "padding_idx": vocabs["src"]["<blank>"]}
    fitted, _ = se.fit(method, word_lookup(before, "source").table(), seed=3, steps=30, **asked, **options)
    after, *_ = build_from_checkpoint(str(output))
    (embedding,) = shared_embeddings_of(after)
    assert after.generator.embedding is embedding
    hidden = torch.randn(5, embedding.score_dim, generator=torch.Generator().manual_seed(2))
    assert torch.equal(embedding.table(), fitted.table())
    assert torch.equal(embedding.log_prob(hidden), fitted.eval().log_prob(hidden))


def _spelled(value: object) -> str:
    """A value as it stands on a command line."""
    return value if isinstance(value, str) else json.dumps(value)


def test_plain_upstream_model(trained: Trained, tmp_path: Path) -> None:
    host, model = trained()
    output = tmp_path / "small.pt"
    compress(model, "standard", output)
    torch.testing.assert_close(scores(output), scores(model), atol=1e-4, rtol=0)
    compress(model, "projective", output, "--rank", 4, "--force")
    assert len(host.translate(output)) == 7


def test_untied_tables_each_get_an_embedding(trained: Trained, tmp_path: Path) -> None:
    host, model = trained(**UNTIED)
    output = tmp_path / "small.pt"
    compress(model, "projective", output, "--target-ratio", 3)
    found, *_ = build_from_checkpoint(str(output))
    assert len(shared_embeddings_of(found)) == 2
    for embedding in shared_embeddings_of(found):
        plain = 32 * embedding.num_embeddings * embedding.embedding_dim
        assert 2 * plain / 8 < embedding.counts()["stored_bits"] <= plain / 3
    assert len(host.translate(output)) == 7


def test_bytes_on_disk_are_those_of_the_account(host: Host, tmp_path: Path) -> None:
    host.write("vocab", [f"w{number}\t9" for number in range(9000)])
    model = host.train("wide", word_vec_size=32, hidden_size=32, train_steps=1, save_checkpoint_steps=1)
    output, report = tmp_path / "small.pt", tmp_path / "report.json"
    compress(model, "projective", output, "--rank", 24, "--report", report)
    written = json.loads(report.read_text())
    words = tmp_path / "words"
    torch.save(read_checkpoint(output)["vocab"], words)
    vocabulary = words.stat().st_size
    weights = written["bytes_of_weights"]["after"]
    assert written["bytes_on_disk"]["after"] == output.stat().st_size
    assert abs(output.stat().st_size - vocabulary - weights) < 0.02 * weights
    # Adam keeps two numbers for every weight.
    assert written["bytes_on_disk"]["before"] > 3 * written["bytes_of_weights"]["before"]


def test_refusals(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, model = trained(embedding=STANDARD)
    output = tmp_path / "small.pt"
    asked = ["--method", "projective", "--output", output]
    rank = ["--rank", 4]
    assert "no such file" in refused(capsys, "--model", tmp_path / "none.pt", *asked, *rank)
    damaged = {"cut": model.read_bytes()[:-500], "text": b"no model", "empty": b""}
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        assert "cut short" in refused(capsys, "--model", tmp_path / name, *asked, *rank)
    pickled = tmp_path / "pickled.pt"
    torch.save({"opt": Path("x"), "vocab": {}}, pickled)
    assert "could run code" in refused(capsys, "--model", pickled, *asked, *rank)
    found = ["--model", model, *asked]
    assert "--embedding-output" in refused(capsys, *found, "--output", "table")
    assert "unknown option 'rang'" in refused(capsys, *found, "--rang", 4)
    assert "unknown embedding method" in refused(
        capsys, "--model", model, "--output", output, "--method", "x"
    )
    assert "'words' follows from" in refused(capsys, *found, "--words", "a,b")
    assert "beside a target" in refused(capsys, *found, *rank, "--target-ratio", 4)
    assert "exactly one" in refused(capsys, *found, "--target-bytes", 4, "--target-ratio", 4)
    assert "needs at least" in refused(capsys, *found, "--target-bytes", 4)
    assert "above 1" in refused(capsys, *found, "--target-ratio", 0.5)
    empty = ["--token-counts", tmp_path / "empty"]
    assert "is empty" in refused(capsys, *found, *rank, *empty)
    assert "line 1" in refused(capsys, *found, *rank, "--token-counts", tmp_path / "text")
    assert "none of the" in refused(capsys, *found, *rank, "--text", tmp_path / "text")
    assert not output.exists()
    into = ["--model", model, "--method", "projective", *rank, "--output"]
    assert "model that is read" in refused(capsys, *into, model, "--force")
    output.write_text("mine")
    assert "add --force" in refused(capsys, *into, output)
    assert output.read_text() == "mine"


def test_a_full_disk_leaves_nothing(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, model = trained(embedding=STANDARD)
    before = model.read_bytes()

    def fail(content: object, file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    asked = ["--method", "projective", "--rank", 4, "--output", tmp_path / "small.pt"]
    assert "No space left" in refused(capsys, "--model", model, *asked)
    assert list(tmp_path.iterdir()) == [] and model.read_bytes() == before
