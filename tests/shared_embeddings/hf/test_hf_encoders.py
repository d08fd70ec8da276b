"""Models that do not score words, such as sentence encoders, and the cards and folders of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers  # noqa: E402

from shared_embeddings import hf  # noqa: E402
from shared_embeddings.hf.sides import InputSide  # noqa: E402
from tests.shared_embeddings.hf.models import DIM, IDS, KINDS, compress  # noqa: E402
from tests.shared_embeddings.hf.test_hf_from_pretrained import hidden  # noqa: E402
from tests.shared_embeddings.hf.trimming import save, sentences, trim  # noqa: E402

BODIES = {
    "BertModel": "bert",
    "BertForSequenceClassification": "bert",
    "LlamaModel": "llama",
    "T5EncoderModel": "t5",
    "BartModel": "bart",
}
README = "---\nlicense: mit\n---\n\n# Sentences\n\nAn encoder.\n"


def sentence_encoder(folder: Path) -> Path:
    """A folder as sentence-transformers writes it."""
    save(folder, "bert")
    encoder = transformers.BertModel.from_pretrained(folder)
    encoder.save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 16}')
    (folder / "1_Pooling" / "own.py").write_text("raise SystemExit")
    (folder / "modules.json").write_text(
        json.dumps([{"idx": 0, "name": "0", "path": ""}, {"idx": 1, "name": "1", "path": "1_Pooling"}])
    )
    (folder / "README.md").write_text(README)
    return folder


@pytest.mark.parametrize("name", BODIES)
def test_the_input_alone(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = getattr(transformers, name)
    torch.manual_seed(3)
    model = chosen(chosen.config_class(**KINDS[BODIES[name]][1])).eval()
    model.save_pretrained(tmp_path / "model")
    assert compress(tmp_path / "model", "projective", tmp_path / "same", "--rank", DIM) == 0
    printed = capsys.readouterr().out
    assert "look-up on this CPU, one token at a time" in printed
    decoder = name == "BartModel"
    assert ("a BartModel cannot be probed" in printed) == decoder
    assert ("kept 100% of the predictions of the original (nearest neighbors of 250" in printed) != decoder
    for same in (hf.load(tmp_path / "same"), chosen.from_pretrained(tmp_path / "same")):
        assert type(same) is chosen and isinstance(same.get_input_embeddings(), InputSide)
        if "Classification" in name:
            assert torch.allclose(same(input_ids=IDS).logits, model(input_ids=IDS).logits, atol=1e-4)
        elif name == "T5EncoderModel":
            found = (one(input_ids=IDS).last_hidden_state for one in (same, model))
            torch.testing.assert_close(*found, atol=1e-4, rtol=0)
        else:
            torch.testing.assert_close(hidden(same), hidden(model), atol=1e-4, rtol=0)


def test_a_sentence_encoder(tmp_path: Path, text: Path) -> None:
    """Trimmed and compressed, with its other layers and its card; it can be replaced by ``--force``."""
    model, small, trimmed = sentence_encoder(tmp_path / "model"), tmp_path / "small", tmp_path / "trimmed"
    assert trim("--model", model, "--text", text, "--output", trimmed) == 0
    asked: list[Any] = ["--target-ratio", 4, "--text", text, "--force"]
    for _ in range(2):
        assert compress(trimmed, "projective", small, *asked) == 0
    for folder in (trimmed, small):
        assert [file.name for file in (folder / "1_Pooling").iterdir()] == ["config.json"]
        assert (folder / "modules.json").read_bytes() == (model / "modules.json").read_bytes()
    card = (small / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n") and card.endswith("# Sentences\n\nAn encoder.\n")
    for expected in (
        "import shared_embeddings.hf\nfrom transformers import BertModel\n",
        "| bytes of table words (embeddings.word_embeddings) | ",
        "table words: `{method: projective, rank: ",
        "numbers are stored as fp32",
        f"nearest neighbors of {len(sentences(30, 1))} lines of text",
    ):
        assert expected in card
    tokenizer = transformers.AutoTokenizer.from_pretrained(small)
    encoder = transformers.AutoModel.from_pretrained(small)
    given = tokenizer(sentences(3, 1), return_tensors="pt", padding=True)
    assert encoder(**given).last_hidden_state.isfinite().all()
