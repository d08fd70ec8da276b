"""Headlines: Debian's packages, or the user's copies of Gigaword and DUC 2004; ROUGE at several lengths.

The source is split into subwords, the target into characters, with a joint vocabulary.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from nmt.headlines import (
    convert_file,
    join_characters,
    rerank,
    split_text,
    stop_words,
    write_character_vocabulary,
)
from nmt.rouge import METRICS, PRESETS, RougeSettings, score_texts
from recipes.common.recipe import Recipe, parse_row, preprocess_parser
from recipes.common.table import controls_length
from recipes.common.tools import (
    CLASSES,
    LINES,
    MERGES,
    TEST_LINES,
    check_pairs,
    checksums_of,
    data_dir,
    generated_words,
    locate,
    option_value,
    read_lines,
    run_step,
    sentence,
    with_overrides,
    write_json,
)
from recipes.translation import subwords
from recipes.translation.train import read_trained, translate, write_evaluation
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_lines, write_text
from shared_embeddings.utils.options import parse_options
from shared_embeddings.words.classes import make_classes

# Tolerated relative deviation from the desired length.
TOLERANCE = 0.1
USAGE = """usage: eval.sh ROW [--smoke] [option of onmt_translate ...]

Generates headlines of the test set with the averaged model of ROW, scores them with ROUGE and writes a line
to $RUNS/{recipe}/results.jsonl. Models with length control generate headlines of each length in rows.yaml.
Run train.sh ROW first; use --smoke for both or neither."""
SOURCE, TARGET = "source", "target"
SPLITS = ("train", "valid", "test")
# Settings for --smoke.
SMOKE_SETTINGS: Any = {
    **{"valid": TEST_LINES, "test": TEST_LINES},
    **{"bpe_operations": MERGES, "lengths": (20,)},
}


def text_files(folder: Path) -> list[Path]:
    """Return the inputs of `encode`: both sides of training and validation, and the test source."""
    names = [f"{split}.{side}" for split in ("train", "valid") for side in (SOURCE, TARGET)]
    return [folder / "text" / name for name in (*names, f"test.{SOURCE}")]


def encode(folder: Path, operations: int, references: Sequence[Path], lengths: Sequence[int]) -> None:
    """Create subwords, characters and the vocabulary of the `text_files` in a folder, and ``data.json``.

    BPE merges are learned on the training source; desired lengths of headlines are in characters.
    """
    step, texts = partial(run_step, folder / "steps"), text_files(folder)
    sources, targets = ([path for path in texts if path.suffix == f".{side}"] for side in (SOURCE, TARGET))
    subwords.run_bpe_steps(step, sources[:1], sources, folder / "bpe.codes", operations)
    for path in targets:
        output = folder / path.name
        step(f"characters-{path.stem}", [path], [output], convert_file, path, output, split_text)
    pieces, vocabulary = [folder / f"train.{side}" for side in (SOURCE, TARGET)], folder / "vocabulary"
    parts = (pieces[:1], pieces[1:], vocabulary)
    step("vocabulary", pieces, [vocabulary], write_character_vocabulary, *parts)
    files = [*(folder / path.name for path in texts), vocabulary, *references]
    description = {
        "source": SOURCE,
        "target": TARGET,
        "pairs": {path.stem: len(read_lines(folder / path.name)) for path in sources},
        "vocabulary": len(read_lines(vocabulary)),
        "references": [str(path.relative_to(folder)) for path in references],
        "lengths": list(lengths),
        **checksums_of(folder, files),
    }
    write_json(folder / "data.json", description)
    print(f"prepared {folder}")


# Debian's package descriptions, of two indexes of its archive: texts of packages, and their sources.
INDEXES = {"Translation-en": "i18n", "Packages": "binary-amd64"}  # with their folders
FIELD = re.compile(r"^([\w-]+): ?(.*(?:\n[ \t].*)*)", re.MULTILINE)

WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class DebianSettings:
    """The ``data`` of Debian in ``rows.yaml``, which explains each setting."""

    valid: int
    test: int
    source_words: int
    bpe_operations: int
    lengths: tuple[int, ...]
    url: str
    sha256: dict[str, str]
    num_classes: int


class Description(NamedTuple):
    """What a package is in many words and in a few."""

    package: str
    synopsis: str
    text: str


def read_stanzas(path: Path) -> Iterator[dict[str, str]]:
    """Yield the fields of each stanza of an index of the archive."""
    opened = lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb")
    with io.TextIOWrapper(opened, encoding="utf-8", newline="\n") as file:
        for _, lines in groupby(file, key=lambda line: line != "\n"):
            if fields := dict(FIELD.findall("".join(lines))):
                yield fields


def read_index(path: Path) -> list[Description]:
    """Read a ``Translation-en``: for each package a synopsis and indented lines, where "." is empty."""
    descriptions = []
    for fields in read_stanzas(path):
        synopsis, *lines = fields["Description-en"].splitlines()
        text = " ".join(word for line in lines if line != " ." for word in line.split())
        descriptions.append(Description(fields["Package"], " ".join(synopsis.split()), text))
    return descriptions


def read_table(path: Path) -> list[Description]:
    """Read the user's own descriptions: package, synopsis and text, separated by tabs."""
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        return [Description(*line.rstrip("\n").split("\t")) for line in file]


def read_sources(path: Path) -> dict[str, str]:
    """Return the source of each package of a ``Packages``; python3.11 and python3.12 are both "python"."""
    return {
        fields["Package"]: re.sub(r"[\d.]", "", fields.get("Source", fields["Package"]).split()[0])
        for fields in read_stanzas(path)
    }


def split_descriptions(
    descriptions: Iterable[Description], sources: Mapping[str, str], valid: int, test: int
) -> dict[str, list[Description]]:
    """Split descriptions of packages by hash of their source: the first ones are for testing.

    The test and the validation set have one package of each of their sources, the training set has all
    packages of all others. Of packages with the same text, the first one is used. Packages without a
    source, a synopsis or a text are left out.
    """

    def order(description: Description) -> tuple[str, str, str]:
        names = sources[description.package], description.package
        source, package = (hashlib.sha256(name.encode()).hexdigest() for name in names)
        return source, package, description.text

    complete = [item for item in descriptions if item.package in sources and item.synopsis and item.text]
    unique = {item.text.lower(): item for item in sorted(complete, key=order, reverse=True)}
    by_source = groupby(sorted(unique.values(), key=order), key=lambda item: sources[item.package])
    groups = [list(group) for _, group in by_source]
    if len(groups) <= valid + test:
        raise UserError(f"{len(groups)} sources are too few for {valid} to validate on and {test} to test on")
    held_out = [group[0] for group in groups[: test + valid]]
    train = [item for group in groups[test + valid :] for item in group]
    return {"test": held_out[:test], "valid": held_out[test:], "train": train}


def write_smoke_indexes(folder: Path) -> list[Path]:
    """Write the descriptions of generated packages, and their sources, as apt does; return the files."""
    index, packages, paths = [], [], [folder / name for name in INDEXES]
    for number, words in enumerate(generated_words(LINES, seed=0)):
        text = f"{sentence(words[:3])}\n {sentence(words)} {number}"
        index.append(f"Package: p{number}\nDescription-en: {text}\n")
        packages.append(f"Package: p{number}\nSource: {words[0]}-{chr(97 + number % 26)} (1.0)\n")
    for path, stanzas in zip(paths, (index, packages), strict=True):
        write_text(path, "\n".join(stanzas))
    return paths


def prepare_debian(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare Debian's descriptions in $RUNS/debian_headline/data, from $DATA_DIR/debian or the network."""
    options = preprocess_parser(prepare_debian.__doc__).parse_args(arguments)
    where, content = recipe.data_settings(options.settings)
    settings, home = parse_options(where, DebianSettings, content), data_dir()
    recipe = recipe.smoke() if options.smoke else recipe
    raw, text = recipe.home / "raw", recipe.data / "text"
    # Indexes of apt, or the user's own split.
    tables = [f"descriptions.{split}.tsv.gz" for split in SPLITS]
    own = [[home / "debian" / name for name in names] for names in (INDEXES, tables)] if home else []
    existing = [paths for paths in own if all(path.is_file() for path in paths)]
    if options.smoke:
        settings = replace(settings, **SMOKE_SETTINGS, num_classes=CLASSES)
        inputs = write_smoke_indexes(raw)
    elif existing:
        inputs = existing[0]
    else:
        inputs = [
            locate(f"{name}.xz", "debian", f"{settings.url}/{folder}", raw, settings.sha256[name])
            for name, folder in INDEXES.items()
        ]

    def write_texts() -> None:
        if len(inputs) == len(SPLITS):
            splits = {split: read_table(path) for split, path in zip(SPLITS, inputs, strict=True)}
        else:
            descriptions, sources = read_index(inputs[0]), read_sources(inputs[1])
            splits = split_descriptions(descriptions, sources, settings.valid, settings.test)
        for split, descriptions in splits.items():
            words = (WORD.findall(item.text.lower())[: settings.source_words] for item in descriptions)
            write_lines(text / f"{split}.{SOURCE}", map(" ".join, words))
            write_lines(text / f"{split}.{TARGET}", (item.synopsis.lower() for item in descriptions))

    references, step = [text / f"test.{TARGET}"], partial(run_step, recipe.data / "steps")
    chosen = {name: getattr(settings, name) for name in ("valid", "test", "source_words")}
    step("texts", inputs, [*text_files(recipe.data), *references], write_texts, **chosen)
    encode(recipe.data, settings.bpe_operations, references, settings.lengths)
    # Semantic classes for UnClE.
    pieces = [recipe.data / f"train.{side}" for side in (SOURCE, TARGET)]
    vocabulary, classes = recipe.data / "vocabulary", recipe.data / "classes.npz"
    make = partial(make_classes, pieces, vocabulary, settings.num_classes, classes, force=True)
    step("classes", [*pieces, vocabulary], [classes], make, num_classes=settings.num_classes)


# Gigaword: the files are those that the scripts of Rush et al. (2015,
# https://github.com/facebookarchive/NAMAS) create from Annotated English Gigaword (LDC2012T21) and DUC 2004
# (NIST): one tokenized, lowercased text per line.
# Candidates in $DATA_DIR/gigaword, optionally with suffix .gz; the first existing one is used. They follow
# the layout of the archive "sumdata" and of the working folder of the scripts.
TRAIN = {
    "train.source": ("train/train.article.txt", "train.article.txt"),
    "train.target": ("train/train.title.txt", "train.title.txt"),
    "valid.source": ("train/valid.article.filter.txt", "valid.article.filter.txt", "valid.article.txt"),
    "valid.target": ("train/valid.title.filter.txt", "valid.title.filter.txt", "valid.title.txt"),
}
TEST_FOLDERS = ("DUC2004", "duc2004", "DUC/2004")


@dataclass(frozen=True)
class GigawordSettings:
    """The ``data`` of Gigaword in ``rows.yaml``, which explains each setting."""

    bpe_operations: int
    lengths: tuple[int, ...]
    valid: int
    test: int
    references: int


def prepare_gigaword(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare the texts of $DATA_DIR/gigaword in $RUNS/gigaword_headline/data."""
    options = preprocess_parser(prepare_gigaword.__doc__).parse_args(arguments)
    where, content = recipe.data_settings(options.settings)
    settings, home = parse_options(where, GigawordSettings, content), data_dir()
    if options.smoke:
        recipe = recipe.smoke()
        settings, raw = replace(settings, **SMOKE_SETTINGS), recipe.home / "raw"
        # Generated texts in the layout of the archive of Rush et al.
        for seed, split in enumerate(("train", "valid")):
            lines = list(generated_words(LINES if split == "train" else TEST_LINES, seed))
            write_lines(raw / TRAIN[f"{split}.source"][0], map(" ".join, lines))
            write_lines(raw / TRAIN[f"{split}.target"][0], (" ".join(words[:3]) for words in lines))
        duc, lines = raw / TEST_FOLDERS[0], list(generated_words(TEST_LINES, seed=2))
        write_lines(duc / "input.txt", map(" ".join, lines))
        for number in range(settings.references):
            titles = (" ".join(words[number % 3 : 3]) for words in lines)
            write_lines(duc / f"task1_ref{number}.txt", titles)
    elif home is not None:
        raw = home / "gigaword"
    else:
        raise UserError("DATA_DIR is not set; set it to the folder with the licensed texts in gigaword")
    test_names = ["input.txt", *(f"task1_ref{number}.txt" for number in range(settings.references))]
    places = {**TRAIN, **{name: tuple(f"{place}/{name}" for place in TEST_FOLDERS) for name in test_names}}
    paths: dict[str, Path] = {}
    for name, candidates in places.items():
        files = [raw / f"{candidate}{end}" for candidate in candidates for end in ("", ".gz")]
        if existing := [path for path in files if path.is_file()]:
            paths[name] = existing[0]
    if missing := [name for name in places if name not in paths]:
        listed = "; ".join(f"{name}: {' or '.join(places[name])}" for name in missing)
        raise UserError(
            f"{raw}: {len(missing)} of {len(places)} files are missing ({listed}; or with suffix .gz); "
            "the texts are licensed, see recipes/gigaword_headline/README.md"
        )
    tests, sides = [paths[name] for name in test_names], [paths[name] for name in TRAIN]
    step, text = partial(run_step, recipe.data / "steps"), recipe.data / "text"
    references = [text / f"test.reference.{number}" for number in range(settings.references)]
    test_files = [text / f"test.{SOURCE}", *references]

    def write_test() -> None:
        contents = {str(path): read_lines(path) for path in tests}
        check_pairs(contents, settings.test)
        for path, lines in zip(test_files, contents.values(), strict=True):
            write_lines(path, lines)

    def write_training() -> None:
        for split, most in (("train", None), ("valid", settings.valid)):
            contents = {str(path): read_lines(path) for name, path in paths.items() if split in name}
            check_pairs(contents)
            pairs = [pair for pair in zip(*contents.values(), strict=True) if all(pair)][:most]
            for at, side in enumerate((SOURCE, TARGET)):
                write_lines(text / f"{split}.{side}", (pair[at] for pair in pairs))

    step("test", tests, test_files, write_test, test=settings.test)
    training_files = [path for path in text_files(recipe.data) if path not in test_files]
    step("training", sides, training_files, write_training, valid=settings.valid)
    encode(recipe.data, settings.bpe_operations, references, settings.lengths)


def eval_command(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Generate and score headlines of every length; without length control, they are generated once."""
    recipe, row, options = parse_row(recipe, USAGE, arguments)
    run, (data, training) = recipe.home / row.name, read_trained(recipe, row)
    references = [read_lines(recipe.data / name) for name in data["references"]]
    metrics: dict[str, Any] = {}
    speeds: list[float] = []
    controlled = controls_length(row)
    for length in data["lengths"]:
        if controlled or not speeds:
            asked = with_overrides(["-desired_length", str(length)], options) if controlled else options
            name = f"test.{length}" if controlled else "test"
            speeds.append(translate(recipe, row, recipe.data / "test.source", asked, f"{name}.characters"))
            headlines = [join_characters(line) for line in read_lines(run / f"{name}.characters")]
            n_best = int(option_value(options, "n_best") or row.translate.get("n_best", 1))
            if n_best > 1:  # the one with the most content words of the source
                write_lines(run / f"{name}.n_best", headlines)
                source = recipe.data / "text" / "test.source"
                headlines = list(rerank(source, run / f"{name}.n_best", n_best, stop_words("en")))
            write_lines(run / f"{name}.headlines", headlines)
        scores = metrics[f"length_{length}"] = score_headlines(headlines, references, length)
        parts = [
            f"{measure} " + "/".join(f"{scores[measure][name]['mean']:.1f}" for name in METRICS)
            for measure in ("recall", "f1")
        ]
        within = f"{scores['within']:.0f} % of the lengths within {TOLERANCE:.0%}"
        print(f"{row.name} at {length}: ROUGE-1/2/L {', '.join(parts)}; {within}", flush=True)
    metrics["tokens_per_second"] = sum(speeds) / len(speeds)
    write_evaluation(recipe, row, data, training, metrics, options)


def score_headlines(headlines: list[str], references: list[list[str]], length: int) -> dict[str, Any]:
    """Compute ROUGE and the deviation from the desired length.

    Returns:
        ``f1`` of whole headlines and ``recall`` of their first `length` bytes, as in DUC 2004, each with its
        ``signature`` and for each metric ``mean``, ``low`` and ``high`` (0 to 100); ``within``: percentage of
        headlines whose length deviates by at most `TOLERANCE`; ``difference``: mean deviation in characters.
    """

    def scores(settings: RougeSettings) -> dict[str, Any]:
        result = score_texts(headlines, references, settings).as_json()
        means = {metric: measures[settings.measure] for metric, measures in result["scores"].items()}
        return {**means, "signature": result["signature"]}

    recall = replace(PRESETS["duc2004"], cut_bytes=length)
    off = [abs(len(headline) - length) for headline in headlines]
    return {
        "f1": scores(PRESETS["f1"]),
        "recall": scores(recall),
        "within": 100 * sum(distance <= TOLERANCE * length for distance in off) / len(off),
        "difference": sum(off) / len(off),
    }
