"""The model card of a Hugging Face folder: metadata for the Hub, what was done, and the original's card."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from shared_embeddings.hf.folder import CONFIG, REMOTE_CODE, auto_classes
from shared_embeddings.hf.sentences import SENTENCE_LAYERS
from shared_embeddings.hf.word_layers import find_entry
from shared_embeddings.runtimes.base import FolderRuntime
from shared_embeddings.utils.errors import require
from shared_embeddings.utils.reading import read_json

_CARD = "README.md"
# Stands between what is written here and the card of the original.
_ORIGINAL = "*What follows is the card of the original model. Its figures are not those of this model.*"
# As huggingface.co/docs/hub/repositories-licenses lists them.
_LICENSES = """
afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5
cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0
etalab-2.0 eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0
grok2-community h-research intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2
llama3.3 llama4 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0 openmdw-1.1 openrail
openrail++ osl-3.0 other pddl postgresql unknown unlicense wtfpl zlib
""".split()
# Classes that load a model, the first one that does, and the Hub's task of it.
_TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSeq2SeqLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModel": "feature-extraction",
}
# The Hub's further tasks of models that read or write text.
_OTHER_TASKS = """
any-to-any audio-text-to-text automatic-speech-recognition document-question-answering image-to-text
sentence-similarity summarization table-question-answering text-ranking translation video-text-to-text
visual-document-retrieval visual-question-answering zero-shot-classification
""".split()


def write_card(
    source: Path,
    target: Path,
    done: str,
    summary: str,
    runtime: FolderRuntime | None = None,
    loading: str = "",
    is_compressed: bool | None = None,
) -> None:
    """Write the model card of a folder, above that of the original.

    Args:
        source: the folder of the original, whose card may be missing or damaged.
        target: the written folder.
        done: the title, such as "Vocabulary trimmed".
        summary: how, sizes and quality, in Markdown.
        runtime: what loads the folder, if not this library.
        loading: how a model that is not of transformers is loaded, in Markdown.
        is_compressed: whether it has compressed embeddings; None if its configuration says so.
    """
    if is_compressed is None:
        is_compressed = runtime is not None or find_entry(read_json(target / CONFIG)) is not None
    original = source / _CARD
    text = original.read_text(encoding="utf-8-sig", errors="replace") if original.is_file() else ""
    parts = re.fullmatch(r"(?:\s*---\n(.*?\n)?---[ \t]*(?:\n|\Z))?(.*)", text, flags=re.DOTALL)
    header, body = parts.groups(default="") if parts else ("", text)
    metadata = _metadata(source, target, _read(header), is_compressed)
    if runtime is not None:
        metadata["library_name"] = runtime.library
    header = require("huggingface_hub").ModelCardData(**metadata).to_yaml()
    links = [f"[{name}](https://huggingface.co/{name})" for name in _strings(metadata.get("base_model"))]
    about = [
        f"# {done} with shared-embeddings",
        *([f"The original is {' and '.join(links)}."] if links else []),
        summary.strip(),
        loading or _loading(target, runtime),
        _below(body.strip()),
    ]
    content = f"---\n{header}\n---\n\n" + "\n\n".join(filter(None, about)) + "\n"
    (target / _CARD).write_text(content, encoding="utf-8")


# Metadata.


def _read(header: str) -> Mapping[str, Any]:
    """Return the metadata of a card, all of it strings: else the language `no` would be False."""
    try:
        metadata = yaml.load(header, yaml.BaseLoader)
    except Exception:  # anyone may have written it
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _metadata(source: Path, target: Path, original: Mapping[str, Any], is_compressed: bool) -> dict[str, Any]:
    """Return metadata in the Hub's schema; results of the original, such as its model-index, are left out."""
    config = read_json(target / CONFIG)
    is_sentences = (target / SENTENCE_LAYERS).is_file()
    tasks = [
        name for name in _strings(original.get("pipeline_tag")) if name in (*_TASKS.values(), *_OTHER_TASKS)
    ]
    tasks += ["sentence-similarity"] if is_sentences else [_TASKS.get(_class_of(config), "")]
    # The Hub takes codes of ISO 639 only, without regions and scripts.
    languages = [re.split("[-_]", name.lower())[0] for name in _strings(original.get("language"))]
    languages = [name for name in languages if re.fullmatch("[a-z]{2,3}|code|multilingual", name)]
    tags = ["shared-embeddings", "compressed-embeddings", "quantized"]
    tags = [*_strings(original.get("tags")), *(tags if is_compressed else [tags[0], "trimmed-vocabulary"])]
    metadata = {
        "base_model": _single(_base_models(source, original)),
        # Of the Hub's four relations, "finetune" is that of models with fewer words, too: neither in fewer
        # bits, nor an adapter, nor a merge.
        "base_model_relation": "quantized" if is_compressed else "finetune",
        "datasets": list(dict.fromkeys(_strings(original.get("datasets")))) or None,
        "language": list(dict.fromkeys(languages)) or None,
        "library_name": "sentence-transformers" if is_sentences else "transformers",
        "pipeline_tag": tasks[0] or None,
        "tags": list(dict.fromkeys(tags)),
    }
    return {**metadata, **_license(original)}


def _license(original: Mapping[str, Any]) -> dict[str, Any]:
    """Return the license of the original; one that the Hub does not know becomes the name of another one."""
    names = [_identifier(name) for name in _strings(original.get("license"))]
    if not names:
        return {}
    details = {key: original[key] for key in ("license_name", "license_link") if _strings(original.get(key))}
    if set(names) <= set(_LICENSES) - {"other"}:
        return {"license": _single(names), **details}
    name = _identifier(details.get("license_name", "-".join(names)))
    return {"license": "other", **details, "license_name": name}


def _base_models(source: Path, original: Mapping[str, Any]) -> list[str]:
    """Return the Hub's id of the original, else what its card, or its configuration, names as its base."""
    folder = source.resolve()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return [folder.parent.parent.name.removeprefix("models--").replace("--", "/")]
    config = read_json(source / CONFIG) if (source / CONFIG).is_file() else {}
    names = _strings(original.get("base_model"))
    names = names or [name for name in _strings(config.get("_name_or_path")) if "/" in name]
    # Others are, or may be, folders.
    return [
        name
        for name in names
        if re.fullmatch(r"(\w[\w.-]{,95}/)?\w[\w.-]{,95}", name, flags=re.ASCII)
        and "checkpoint" not in name
        and not Path(name).exists()
    ]


def _identifier(name: str) -> str:
    return re.sub(r"[^a-z0-9.+]+", "-", name.lower()).strip("-")


def _strings(value: object) -> list[str]:
    """Return the strings in a value of the metadata, which may be one or several."""
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str) and text not in ("", "null", "~")]


def _single(names: list[str]) -> str | list[str] | None:
    return names[0] if len(names) == 1 else names or None


# Text.


def _class_of(config: Mapping[str, Any]) -> str:
    """Return the class that loads a model of any folder, if there is one, else that of the model."""
    kind: str = config["architectures"][0]
    classes = auto_classes(config["model_type"])
    return next((name for name in (*_TASKS, *classes) if classes.get(name) == kind), kind)


def _loading(target: Path, runtime: FolderRuntime | None) -> str:
    """Return how the folder is loaded, with this library and without."""
    config = read_json(target / CONFIG)
    name, library = _class_of(config), "transformers"
    load = f'{name}.from_pretrained("DIR"{{}})'
    if (target / SENTENCE_LAYERS).is_file():
        name, library, load = "SentenceTransformer", "sentence_transformers", 'SentenceTransformer("DIR"{})'
    code = f"from {library} import {name}\n\nmodel = {load}\n```"
    parts = ["## How to load it", "`DIR` is this folder, or its name on the Hub."]
    if runtime is not None:
        return "\n\n".join([*parts, f"```python\n{runtime.loading}\n```"])
    if find_entry(config) is None:
        return "\n\n".join([*parts, "```python\n" + code.format("")])
    parts += [
        "With the Python package `shared-embeddings`, its embeddings stay compressed in memory:",
        "```python\nimport shared_embeddings.hf\n" + code.format(""),
    ]
    if (target / REMOTE_CODE).is_file():
        parts += [
            f"Without it, the code in `{REMOTE_CODE}` decodes them while loading:",
            "```python\n" + code.format(", trust_remote_code=True"),
        ]
    else:
        parts += [
            "Without it, only a copy with ordinary tables can be loaded, which the package writes:",
            "```bash\nshared-embeddings export --model DIR --format dense --output DENSE\n```",
        ]
    return "\n\n".join(parts)


def _below(body: str) -> str:
    """Return the card of the original, where what was written here becomes an earlier step."""
    earlier, separator, original = body.partition(_ORIGINAL)
    if not re.match("# .* with shared-embeddings\n", body):
        return f"{_ORIGINAL}\n\n{body}" if body else ""
    repeated = r"^The original is \[.*?\n\n|^## How to load it\n.*?(?=^## Earlier|\Z)"
    earlier = re.sub(repeated, "", earlier, flags=re.DOTALL | re.MULTILINE)
    earlier = re.sub(r"^## (?!Earlier)", "### ", earlier, flags=re.MULTILINE)
    return f"## Earlier step: {earlier[2:].strip()}\n\n{separator}{original}".strip()
