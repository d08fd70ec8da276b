"""The model card of a written folder: the Hub's schema, what the original's card lends, how it is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from shared_embeddings import hf
from shared_embeddings.hf.card import write_card
from tests.shared_embeddings.hf.models import KINDS, compress, save, shrink, trim, write
from tests.shared_embeddings.hf.test_hf_from_pretrained import run_without_the_library

# Keys of the Hub's schema that are written, and its relations of a model to another.
KEYS = """
base_model base_model_relation datasets language library_name license license_link license_name pipeline_tag
tags
""".split()
RELATIONS = ("adapter", "finetune", "merge", "quantized")
ORIGINAL = """---
language: [en, 'no', pt-BR, English, eng_Latn, code, no]
license: Apache 2.0
tags: [text-generation-inference, 1.5, quantized]
datasets: some/texts
pipeline_tag: text2text-generation
base_model: other/model
metrics: [perplexity]
model-index: [{name: original, results: []}]
extra_gated_prompt: Agree
7: seven
---

# Original
"""


def metadata(folder: Path) -> dict[str, Any]:
    """What the Hub reads, which must be in its schema."""
    data: dict[str, Any] = ModelCard.load(folder / "README.md").data.to_dict()
    assert set(data) <= set(KEYS) and data["base_model_relation"] in RELATIONS
    assert ("license_name" in data) >= (data.get("license") == "other")
    return data


def card(
    folder: Path, original: str | None, kind: str = "gpt2", settings: dict[str, Any] | None = None
) -> Path:
    """A compressed folder whose original has a card and settings."""
    source = folder / "model"
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(settings or {}))
    if original is not None:
        (source / "README.md").write_text(original, newline="")
    shrink(kind, folder / "small")
    write_card(source, folder / "small", "Word embeddings compressed", "| | before |\n")
    return folder / "small"


def test_what_a_model_of_the_hub_lends_its_card(tmp_path: Path) -> None:
    source = tmp_path / "hub" / "models--some--model" / "snapshots" / "1f"
    write("gpt2", source)
    (source / "README.md").write_text(ORIGINAL)
    assert compress(source, "quantized", tmp_path / "small", "--bits", 4, "--no-check") == 0
    assert metadata(tmp_path / "small") == {
        "base_model": "some/model",
        "base_model_relation": "quantized",
        "datasets": ["some/texts"],
        "language": ["en", "no", "pt", "eng", "code"],
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": [
            "text-generation-inference",
            "1.5",
            "quantized",
            "shared-embeddings",
            "compressed-embeddings",
        ],
    }
    text = (tmp_path / "small" / "README.md").read_text()
    assert "The original is [some/model](https://huggingface.co/some/model)." in text
    assert text.endswith("not those of this model.*\n\n# Original\n")
    assert "- not measured" in text and "tokens/s" not in text


@pytest.mark.parametrize(
    ("header", "settings", "expected"),
    [
        ("base_model: [bert-base-uncased, a/b]", {}, ["bert-base-uncased", "a/b"]),
        ("base_model: /home/me/model", {"_name_or_path": "a/b"}, None),
        ("base_model: out/checkpoint-500", {}, None),
        ("license: mit", {"_name_or_path": "a/b"}, "a/b"),
        ("license: mit", {"_name_or_path": "model"}, None),
    ],
)
def test_only_ids_of_the_hub_are_base_models(
    tmp_path: Path, header: str, settings: dict[str, Any], expected: object
) -> None:
    assert metadata(card(tmp_path, f"---\n{header}\n---\n", settings=settings)).get("base_model") == expected


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("license: [mit, BSD]", {"license": ["mit", "bsd"]}),
        (
            "license: gemma\nlicense_link: https://a.b/c",
            {"license": "gemma", "license_link": "https://a.b/c"},
        ),
        ("license: My License!", {"license": "other", "license_name": "my-license"}),
        (
            "license: other\nlicense_name: Own Terms\nlicense_link: LICENSE",
            {"license": "other", "license_name": "own-terms", "license_link": "LICENSE"},
        ),
        ("license: null", {}),
    ],
)
def test_licenses_are_those_of_the_hub(tmp_path: Path, header: str, expected: dict[str, Any]) -> None:
    data = metadata(card(tmp_path, f"---\r\n{header}\r\n---\r\n"))
    assert {key: value for key, value in data.items() if key.startswith("license")} == expected


@pytest.mark.parametrize(
    "broken",
    [
        None,
        "",
        "# Original\n",
        "---\nlicense: [mit\n---\n# Original\n",
        "---\n- a list\n---\n# Original\n",
        "---\nlicense: {mit: 1}\ntags: [[a]]\npipeline_tag: [x]\nbase_model: a/\n---\n# Original\n",
        '---\ntags: ["\\uD800", "\\UFFFFFFFF"]\n---\n# Original\n',
        "---\n---\n# Original\n",
        "\ufeff---\n? [a]\n: {b: c}\n---\n\n# Original",
    ],
)
def test_a_broken_card_of_the_original(tmp_path: Path, broken: str | None) -> None:
    small = card(tmp_path, broken)
    assert metadata(small) == {
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["shared-embeddings", "compressed-embeddings", "quantized"],
    }
    text = (small / "README.md").read_text()
    assert text.endswith("# Original\n") == bool(broken) and text.count("\n---\n") == 1


def test_both_ways_to_load_it_work(tmp_path: Path) -> None:
    tasks = {"bert": "fill-mask", "marian": "text-generation", "llama": "text-generation"}
    without = []
    for kind, task in tasks.items():
        small = card(tmp_path / kind, None, kind)
        assert metadata(small)["pipeline_tag"] == task
        blocks = re.findall(r"```python\n(.*?)```", (small / "README.md").read_text(), flags=re.DOTALL)
        with_library, other = (block.replace('"DIR"', repr(str(small))) for block in blocks)
        values: dict[str, Any] = {}
        exec(with_library, values)
        assert type(values["model"]) is type(hf.load(small)) and values["model"].shared_embeddings
        without.append(f"{other}print(type(model).__name__, hasattr(model, 'shared_embeddings'))\n")
    printed = run_without_the_library(tmp_path, "".join(without))
    assert printed.split("\n")[:3] == [f"{KINDS[kind][0]} False" for kind in tasks]


def test_the_same_command_writes_the_same_card(tmp_path: Path, text: Path) -> None:
    """Although it takes another time, and the folders are elsewhere."""
    cards = []
    for place in ("a", "b"):
        model, small = save(tmp_path / place / "model", "gpt2"), tmp_path / place / "small"
        other = tmp_path / place / "other.txt"
        other.write_bytes(text.read_bytes())
        asked = ["--bits", 4, "--text", text, "--validation", other, "--recover", "2steps"]
        assert compress(model, "quantized", small, *asked) == 0
        cards.append((small / "README.md").read_text())
    assert cards[0] == cards[1] and str(tmp_path) not in cards[0]
    assert "recovery: 2 steps on" in cards[0] and "| perplexity |" in cards[0]


def test_without_code_in_the_folder(tmp_path: Path, text: Path) -> None:
    """Methods that the code does not decode, and a trimmed model, which needs none."""
    model = save(tmp_path / "model", "gpt2")
    assert compress(model, "funnel", tmp_path / "small", "--rank", 4, "--fit-steps", 5, "--no-check") == 0
    lines = (tmp_path / "small" / "README.md").read_text()
    assert "trust_remote_code" not in lines and "export --model DIR --format dense --output DENSE" in lines
    assert trim("--model", model, "--text", text, "--output", tmp_path / "trimmed") == 0
    assert metadata(tmp_path / "trimmed")["base_model_relation"] == "finetune"
    lines = (tmp_path / "trimmed" / "README.md").read_text()
    assert "import shared_embeddings" not in lines and "rows of tokens" in lines
