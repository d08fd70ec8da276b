"""Training compressed Hugging Face models until they predict as the original."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shared_embeddings import hf
from shared_embeddings.compress import session
from tests.helpers import CODES, every_word
from tests.shared_embeddings.hf.models import add_tokenizer, build, compress, write

pytestmark = pytest.mark.usefixtures("short_recovery")


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """Lines of ten words, more than are compared."""
    draw = torch.randint(280, (500, 10), generator=torch.Generator().manual_seed(1))
    path = tmp_path / "text"
    path.write_text("".join(" ".join(f"w{word}" for word in line) + "\n" for line in draw.tolist()))
    return path


def recovered(
    folder: Path, words: Path, *arguments: object, method: tuple[Any, ...] = CODES
) -> dict[str, Any]:
    """The report of the command."""
    name, *options = method
    asked = [*options, "--text", words, "--report", folder / "report.json", "--force", *arguments]
    assert compress(folder / "model", name, folder / "small", *asked) == 0
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


@pytest.mark.slow_except("gpt2", "t5")
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "t5", "marian", "encoder"])
def test_the_divergence_falls_for_every_kind(tmp_path: Path, words: Path, kind: str) -> None:
    write(kind, tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    found = recovered(tmp_path, words, "--recover", "8steps")
    trained = found["recovery"]
    assert trained["kl_after"] < trained["kl_before"]
    assert trained["kl_after"] == pytest.approx(found["kept"]["kl"], rel=1e-3)
    assert not any("too few lines" in note for note in found["notes"])


@pytest.mark.slow_except("bf16-codes", "fp16-rank")
@pytest.mark.parametrize(
    "method", [CODES, ("projective", "--rank", 4, "--store", "fp16")], ids=["codes", "rank"]
)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_models_in_16_bits(tmp_path: Path, words: Path, method: tuple[Any, ...], kind: torch.dtype) -> None:
    """What is measured is what the file has: in 16 bits, and with codes as before."""
    build("llama").to(kind).save_pretrained(tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    plain = recovered(tmp_path, words, method=method)
    before = load_file(tmp_path / "small" / "model.safetensors")
    trained = recovered(tmp_path, words, "--recover", "8steps", method=method)
    after = load_file(tmp_path / "small" / "model.safetensors")
    assert {name: (one.dtype, one.shape) for name, one in before.items()} == {
        name: (one.dtype, one.shape) for name, one in after.items()
    }
    changed = {name for name, one in before.items() if not torch.equal(one, after[name])}
    assert changed and any("shared_embeddings" in name for name in changed) == (method is not CODES)
    assert trained["recovery"]["kl_after"] == pytest.approx(trained["kept"]["kl"], rel=1e-3)
    assert trained["kept"]["kl"] < plain["kept"]["kl"]
    assert hf.load(tmp_path / "small").dtype == kind


@pytest.mark.slow_except("bert")
@pytest.mark.parametrize("kind", ["gpt2", "bert"])  # whose output layer has a bias
def test_a_large_vocabulary_is_trained_alike_by_few_words(
    tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Where the few words are all words."""
    write(kind, tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    full = recovered(tmp_path, words, "--recover", "4steps")["recovery"]
    monkeypatch.setattr(session.Session, "words_of", lambda self, *_: every_word(self))
    monkeypatch.setattr(session.Session, "scored_words", None)
    few = recovered(tmp_path, words, "--recover", "4steps")["recovery"]
    assert few["kl_before"] == pytest.approx(full["kl_before"], rel=1e-3)
    assert few["kl_after"] == pytest.approx(full["kl_after"], rel=1e-2)
    assert few["kl_after"] < few["kl_before"]


def test_few_words_of_a_large_vocabulary(
    tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SAMPLED_WORDS", 60)
    monkeypatch.setattr(session, "_FREQUENT", 30)
    write("gpt2", tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    trained = recovered(tmp_path, words, "--recover", "8steps")["recovery"]
    assert trained["kl_after"] < trained["kl_before"]
