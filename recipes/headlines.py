"""Headlines: AG News, or the user's copies of English Gigaword and DUC 2004; ROUGE at several lengths.

The source is split into subwords, the target into characters, with a joint vocabulary.
"""

from __future__ import annotations

import csv
import hashlib
import html
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from nmt.headlines import (
    convert_file,
    join_characters,
    rerank,
    split_text,
    stop_words,
    write_character_vocabulary,
)
from nmt.rouge import METRICS, PRESETS, Settings, score_texts
from recipes.common.recipe import Recipe, Row, parse_row, preprocess_options
from recipes.common.smoke import LINES, MERGES, TEST_LINES, generated_words, sentence
from recipes.common.table import controls_length
from recipes.common.tools import (
    check_pairs,
    checksums_of,
    locate,
    option_value,
    parse_settings,
    read_lines,
    run_step,
    with_overrides,
    write_json,
)
from recipes.translation import subwords
from recipes.translation.train import read_trained, translate, write_evaluation
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import replacing, write_lines

# Tolerated relative deviation from the desired length.
TOLERANCE = 0.1
USAGE = """usage: eval.sh ROW [--smoke] [option of onmt_translate ...]

Generates headlines of the test set with the averaged model of ROW, scores them with ROUGE and writes a line
to $RUNS/{recipe}/results.jsonl. Models with length control generate headlines of each length in rows.yaml.
Run train.sh ROW first; use --smoke for both or neither."""
SOURCE, TARGET = "source", "target"
SPLITS = ("train", "valid", "test")


def text_files(folder: Path) -> list[Path]:
    """Return the inputs of `encode`: both sides of training and validation, and the test source."""
    names = [f"{split}.{side}" for split in ("train", "valid") for side in (SOURCE, TARGET)]
    return [folder / "text" / name for name in (*names, f"test.{SOURCE}")]


def write_split(folder: Path, split: str, sources: Sequence[str], targets: Sequence[str]) -> None:
    """Write the text of one of `SPLITS`: texts as space-separated tokens, and headlines."""
    sides = {f"{split}.{SOURCE}": sources, f"{split}.{TARGET}": targets}
    check_pairs(sides)
    for name, lines in sides.items():
        write_lines(folder / "text" / name, lines)


def encode(folder: Path, operations: int, references: Sequence[Path], lengths: Sequence[int]) -> None:
    """Create subwords, characters and the vocabulary of the `text_files` in a folder, and ``data.json``.

    Args:
        folder: folder of the prepared data.
        operations: number of BPE merges, which are learned on the training source.
        references: headlines of the test set.
        lengths: desired lengths of headlines in characters.
    """
    step, texts = partial(run_step, folder / "steps"), text_files(folder)
    sources, targets = ([path for path in texts if path.suffix == f".{side}"] for side in (SOURCE, TARGET))
    subwords.run_bpe_steps(step, sources[:1], sources, folder / "bpe.codes", operations)

    def split_into_characters() -> None:
        for path in targets:
            convert_file(path, folder / path.name, split_text)

    outputs = [folder / path.name for path in targets]
    step("characters", targets, outputs, split_into_characters)
    pieces, vocabulary = [folder / f"train.{side}" for side in (SOURCE, TARGET)], folder / "vocabulary"

    def write_vocabulary() -> None:
        write_character_vocabulary(pieces[:1], pieces[1:], vocabulary)

    step("vocabulary", pieces, [vocabulary], write_vocabulary)
    files = [*(folder / path.name for path in texts), vocabulary, *references]
    description = {
        "source": SOURCE,
        "target": TARGET,
        "pairs": {split: len(read_lines(folder / f"{split}.{SOURCE}")) for split in SPLITS},
        "vocabulary": len(read_lines(vocabulary)),
        "references": [str(path.relative_to(folder)) for path in references],
        "lengths": list(lengths),
        **checksums_of({str(path.relative_to(folder)): path for path in files}),
    }
    write_json(folder / "data.json", description)


# AG News: cleaning, and a split that does not depend on the order of the file.
# The files have a space in place of "&": " #39;" is an apostrophe, " quot;" a quotation mark.
ENTITY = re.compile(r"(?:^| )(#\d{2,4}|amp|quot|lt|gt|nbsp|hellip|[mn]dash|[lr][sd]quo);")
TAG = re.compile(r"<[^<>]*>")
ADDRESS = re.compile(r"(?:https?://|www\.)\S+")
# "(CPB.N: Quote, Profile, Research)"
QUOTE = re.compile(r"\s*\([^()]*Quote, Profile, Research[^()]*\)")
# "(Reuters)" or "(SPACE.com)" at the end of a title whose description starts with "Reuters - "
AGENCY = re.compile(r"\s*\(([^()]+)\)$")
UPDATE = re.compile(r"\s*\(Update\d+\)$")
# "NEW YORK (Reuters) - ", "BAGHDAD, Iraq - ", "ATHENS -- "
DATELINE = re.compile(r"^[A-Z][A-Z .'/]+(?:, [^()-]{1,30}?)?(?:\s*\([^()]{1,40}\))? --? ")


@dataclass(frozen=True)
class NewsSettings:
    """The ``data`` of AG News in ``rows.yaml``, which explains each setting."""

    valid: int
    test: int
    source_words: int
    bpe_operations: int
    lengths: tuple[int, ...]
    file: str
    url: str
    sha256: str


class News(NamedTuple):
    """A description and its title."""

    description: str
    title: str


def read_news_settings(recipe: Recipe, path: Path | None = None) -> NewsSettings:
    """Read the settings of AG News, or those in a file."""
    where, content = recipe.data_settings(path)
    return parse_settings(where, NewsSettings, content)


def locate_news(settings: NewsSettings, downloads: Path) -> Path:
    """Find the table in ``$DATA_DIR/ag_news`` or download it, and verify its checksum."""
    return locate(settings.file, "ag_news", settings.url, downloads, settings.sha256)


def read_news(path: Path) -> list[News]:
    """Read a file of AG News, with the columns class, title and description."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; replace it") from error
    except (OSError, csv.Error) as error:
        raise UserError(f"{path}: {error}; replace it") from error
    for number, row in enumerate(rows, 1):
        if len(row) != 3:
            raise UserError(
                f"{path}: row {number} has {len(row)} columns; expected class, title, description"
            )
    return [News(description, title) for _, title, description in rows]


def hash_of(news: News) -> str:
    """Return a hash of a text and its title in hexadecimal, which determines the split of the pair."""
    return hashlib.sha256("\t".join(news).encode()).hexdigest()


def clean_text(text: str) -> str:
    """Remove backslashes, broken entities, tags, URLs and stock quotes."""
    text = re.sub(r"\\(?=[$\"])", "", text).replace("\\", " ")
    text = html.unescape(html.unescape(ENTITY.sub(r"&\1;", text)))
    return " ".join(QUOTE.sub("", ADDRESS.sub(" ", TAG.sub("", text))).split())


def clean_news(news: News) -> News:
    """Remove markup, agencies and datelines, and lowercase the text."""
    description, title = clean_text(news.description), UPDATE.sub("", clean_text(news.title))
    agency = AGENCY.search(title)
    # The space matters for empty descriptions.
    if agency and f"{description} ".startswith(f"{agency[1]} - "):
        title = title[: agency.start()]
        description = f"{description} ".removeprefix(f"{agency[1]} - ").strip()
    return News(DATELINE.sub("", description).lower(), title.lower())


def split_news(news: list[News], valid: int, test: int) -> dict[str, list[News]]:
    """Clean and split pairs, ordered by hash of the original pair.

    Of pairs with the same description, the one with the smallest hash is kept, so that splits are disjoint.
    Pairs without a description or title are removed.
    """
    kept: dict[str, News] = {}
    for pair in sorted(news, key=hash_of):
        cleaned = clean_news(pair)
        if all(cleaned):
            kept.setdefault(cleaned.description, cleaned)
    pairs = list(kept.values())
    if len(pairs) <= valid + test:
        raise UserError(f"{len(pairs)} pairs are too few for {valid} to validate on and {test} to test on")
    return {"test": pairs[:test], "valid": pairs[test : test + valid], "train": pairs[test + valid :]}


def prepare_news(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare AG News in $RUNS/agnews_headline/data, from $DATA_DIR/ag_news or the network."""
    options = preprocess_options(prepare_news.__doc__, arguments)
    settings = read_news_settings(recipe, options.settings)
    if options.smoke:
        recipe = recipe.smoke()
        small = {"valid": TEST_LINES, "test": TEST_LINES, "bpe_operations": MERGES, "lengths": (20,)}
        settings, table = replace(settings, **small), recipe.home / "raw" / settings.file  # type: ignore[arg-type]
        rows = [
            [number % 4 + 1, f"{sentence(words[:3])} (AP)", f"AP - {sentence(words)} #36;{number}"]
            for number, words in enumerate(generated_words(LINES, seed=0))
        ]
        with replacing(table) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    else:
        table = locate_news(settings, recipe.home / "raw")
    folder = recipe.data

    def write_texts() -> None:
        tokenizer = subwords.Tokenizer("en")
        for split, pairs in split_news(read_news(table), settings.valid, settings.test).items():
            texts = tqdm([pair.description for pair in pairs], split, unit=" lines")
            words = [tokenizer.tokenize(text).split()[: settings.source_words] for text in texts]
            write_split(folder, split, [" ".join(each) for each in words], [pair.title for pair in pairs])

    references = [folder / "text" / "test.target"]
    chosen = {name: getattr(settings, name) for name in ("valid", "test", "source_words")}
    outputs = [*text_files(folder), *references]
    run_step(folder / "steps", "texts", [table], outputs, write_texts, **chosen)
    encode(folder, settings.bpe_operations, references, settings.lengths)
    print(f"prepared {folder}")


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


def locate_licensed(folder: Path, references: int) -> tuple[dict[str, Path], list[Path]]:
    """Find all files of the user in ``$DATA_DIR/gigaword``.

    Returns:
        Both sides of training and validation and the test source, by name in the prepared data; as many
        references of the test set.
    """
    places = {
        **TRAIN,
        "test.source": tuple(f"{place}/input.txt" for place in TEST_FOLDERS),
        **{
            f"reference {number}": tuple(f"{place}/task1_ref{number}.txt" for place in TEST_FOLDERS)
            for number in range(references)
        },
    }
    found = {}
    for name, candidates in places.items():
        paths_of = (folder / f"{each}{end}" for each in candidates for end in ("", ".gz"))
        found[name] = next(filter(Path.is_file, paths_of), None)
    if missing := [name for name, path in found.items() if path is None]:
        listed = "; ".join(f"{name}: {' or '.join(places[name])}" for name in missing)
        raise UserError(
            f"{folder}: {len(missing)} of {len(places)} files are missing ({listed}; or with suffix .gz); "
            "the texts are licensed, see recipes/gigaword_headline/README.md"
        )
    paths = {name: path for name, path in found.items() if path is not None}
    numbered = [paths.pop(f"reference {number}") for number in range(references)]
    return paths, numbered


def check_lengths(lines: Mapping[Path, Sequence[str]], wanted: int | None = None) -> None:
    """Check that files have equal numbers of lines, or `wanted` lines; raises `UserError` otherwise."""
    counts = {path: len(each) for path, each in lines.items()}
    if len({*counts.values(), *([] if wanted is None else [wanted])}) > 1:
        listed = ", ".join(f"{path} has {number}" for path, number in counts.items())
        also = "equal numbers" if wanted is None else f"{wanted} in each"
        raise UserError(f"{listed} lines; expected {also}; create them again")


def write_smoke_gigaword(folder: Path, references: int) -> None:
    """Write generated texts in the layout of the archive of Rush et al."""
    for seed, split in enumerate(("train", "valid")):
        lines = list(generated_words(LINES if split == "train" else TEST_LINES, seed))
        write_lines(folder / TRAIN[f"{split}.source"][0], (" ".join(words) for words in lines))
        write_lines(folder / TRAIN[f"{split}.target"][0], (" ".join(words[:3]) for words in lines))
    tests = list(generated_words(TEST_LINES, seed=2))
    write_lines(folder / TEST_FOLDERS[0] / "input.txt", (" ".join(words) for words in tests))
    for number in range(references):
        path = folder / TEST_FOLDERS[0] / f"task1_ref{number}.txt"
        write_lines(path, (" ".join(words[number % 3 : 3]) for words in tests))


def prepare_gigaword(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare the texts of $DATA_DIR/gigaword in $RUNS/gigaword_headline/data."""
    options = preprocess_options(prepare_gigaword.__doc__, arguments)
    where, content = recipe.data_settings(options.settings)
    settings, data_dir = parse_settings(where, GigawordSettings, content), os.environ.get("DATA_DIR")
    if options.smoke:
        recipe = recipe.smoke()
        small = {"bpe_operations": MERGES, "lengths": (20,), "valid": TEST_LINES, "test": TEST_LINES}
        settings, raw = replace(settings, **small), recipe.home / "raw"  # type: ignore[arg-type]
        write_smoke_gigaword(raw, settings.references)
    elif data_dir:
        raw = Path(data_dir).absolute() / "gigaword"
    else:
        raise UserError("DATA_DIR is not set; set it to the folder with the licensed texts in gigaword")
    folder = recipe.data
    sides, references = locate_licensed(raw, settings.references)
    step, test_source = partial(run_step, folder / "steps"), folder / "text" / "test.source"
    copies = [folder / "text" / f"test.reference.{number}" for number in range(settings.references)]

    def write_test() -> None:
        contents = {path: read_lines(path) for path in tests}
        check_lengths(contents, settings.test)
        for path, lines in zip((test_source, *copies), contents.values(), strict=True):
            write_lines(path, lines)

    def write_training() -> None:
        for split, most in (("train", None), ("valid", settings.valid)):
            paths = [sides[f"{split}.{side}"] for side in (SOURCE, TARGET)]
            texts = {path: read_lines(path) for path in paths}
            check_lengths(texts)
            pairs = [pair for pair in zip(*texts.values(), strict=True) if all(pair)][:most]
            write_split(folder, split, [source for source, _ in pairs], [target for _, target in pairs])

    tests = [sides.pop("test.source"), *references]
    step("test", tests, [test_source, *copies], write_test, test=settings.test)
    outputs = [path for path in text_files(folder) if path != test_source]
    step("training", list(sides.values()), outputs, write_training, valid=settings.valid)
    encode(folder, settings.bpe_operations, copies, settings.lengths)
    print(f"prepared {folder}")


def eval_command(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Generate and score headlines of every length; without length control, they are generated once."""
    recipe, row, options = parse_row(recipe, USAGE, arguments)
    trained = read_trained(recipe, row)
    references = [read_lines(recipe.data / name) for name in trained.data["references"]]
    metrics: dict[str, Any] = {}
    speeds: list[float] = []
    controlled = controls_length(row)
    for length in trained.data["lengths"]:
        if controlled or not speeds:
            asked = with_overrides(["-desired_length", str(length)], options) if controlled else options
            name = f"test.{length}" if controlled else "test"
            headlines, speed = write_headlines(recipe, row, asked, name)
            speeds.append(speed)
        scores = metrics[f"length_{length}"] = score_headlines(headlines, references, length)
        parts = [
            f"{measure} " + "/".join(f"{scores[measure][name]['mean']:.1f}" for name in METRICS)
            for measure in ("recall", "f1")
        ]
        within = f"{scores['within']:.0f} % of the lengths within {TOLERANCE:.0%}"
        print(f"{row.name} at {length}: ROUGE-1/2/L {', '.join(parts)}; {within}", flush=True)
    metrics["tokens_per_second"] = sum(speeds) / len(speeds)
    write_evaluation(recipe, row, trained, metrics, options)


def write_headlines(recipe: Recipe, row: Row, options: list[str], name: str) -> tuple[list[str], float]:
    """Write one headline per test text to ``NAME.headlines``; return them and the tokens per second.

    Of ``n_best`` hypotheses, the one with the most content words of the source is selected.
    """
    run, texts = recipe.home / row.name, recipe.data / "text" / "test.source"
    speed = translate(recipe, row, recipe.data / "test.source", options, f"{name}.characters")
    lines = [join_characters(line) for line in read_lines(run / f"{name}.characters")]
    n_best = int(option_value(options, "n_best") or row.translate.get("n_best", 1))
    if n_best > 1:
        write_lines(run / f"{name}.n_best", lines)
        lines = list(rerank(texts, run / f"{name}.n_best", n_best, stop_words("en")))
    write_lines(run / f"{name}.headlines", lines)
    return lines, speed


def score_headlines(headlines: list[str], references: list[list[str]], length: int) -> dict[str, Any]:
    """Compute ROUGE and the deviation from the desired length.

    Returns:
        ``f1`` of whole headlines and ``recall`` of their first `length` bytes, as in DUC 2004, each with its
        ``signature`` and for each metric ``mean``, ``low`` and ``high`` (0 to 100); ``within``: percentage of
        headlines whose length deviates by at most `TOLERANCE`; ``difference``: mean deviation in characters.
    """

    def scores(settings: Settings) -> dict[str, Any]:
        found = score_texts(headlines, references, settings).as_json()
        means = {metric: measures[settings.measure] for metric, measures in found["scores"].items()}
        return {**means, "signature": found["signature"]}

    recall = replace(PRESETS["duc2004"], cut_bytes=length)
    off = [abs(len(headline) - length) for headline in headlines]
    return {
        "f1": scores(PRESETS["f1"]),
        "recall": scores(recall),
        "within": 100 * sum(each <= TOLERANCE * length for each in off) / len(off),
        "difference": sum(off) / len(off),
    }
