"""Prepare text for translation: subwords and vocabularies.

Published text is prepared shard by shard with constant memory. Every step writes a stamp; a run that was
stopped, even by ``kill -9``, resumes after its last complete shard.
"""

from __future__ import annotations

import gzip
import html
import json
import multiprocessing
import os
import re
import shutil
import signal
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

from tqdm import tqdm

from lm.data.datasets import download, verify
from recipes.common import tools
from recipes.common.recipe import Recipe, preprocess_parser
from recipes.common.tools import (
    CLASSES,
    LINES,
    MERGES,
    TEST_LINES,
    check_pairs,
    checksums_of,
    classes_file,
    generated_pairs,
    read_lines,
    run_step,
    stream_lines,
    write_json,
)
from recipes.translation import subwords
from shared_embeddings.utils.command_line import positive
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import locked, remove, replacing, sha256, write_lines, write_text
from shared_embeddings.utils.options import parse_options
from shared_embeddings.utils.reading import read_json
from shared_embeddings.words.classes import make_classes, regroup

TRAIN, TEXT, TOKENS = "train", "text", "tokens"
_SEGMENT = re.compile(r"<seg[^>]*>(.*?)</seg>")
# Sizes for --smoke: BPE merges, and SentencePiece vocabulary.
_SMOKE_SIZES = {"bpe": MERGES, "sentencepiece": 240}
Pair = tuple[str, str]


@dataclass(frozen=True)
class Texts:
    """Both sides of one published text."""

    name: str  # of plain files ``NAME.LANGUAGE`` that replace the archive
    # Name of the archive (tar, optionally compressed) with the members `source` and `target`, which may be
    # gzipped (``.gz``).
    archive: str = ""
    url: str = ""
    source: str = ""
    target: str = ""
    # ``lines`` (one sentence each), ``tags`` (lines that start with ``<`` are skipped) or ``segments``
    # (sentences in ``<seg>`` elements, as in SGML and XML test sets).
    format: Literal["lines", "tags", "segments"] = "lines"
    sha256: str | None = None


@dataclass(frozen=True)
class Pieces:
    """Subword segmentation and vocabulary: a folder of prepared data."""

    # ``bpe`` (subword-nmt, on Moses tokens) or ``sentencepiece`` (on plain text).
    kind: Literal["bpe", "sentencepiece"]
    size: int  # merges for ``bpe``; size of the vocabulary including special tokens for ``sentencepiece``
    model: Literal["bpe", "unigram"] = "unigram"  # kind of ``sentencepiece`` model
    shared_vocabulary: bool = True
    classes: tuple[int, ...] = ()  # numbers of semantic classes, for UnClE


@dataclass(frozen=True)
class Settings:
    """The ``data`` in ``rows.yaml``: texts, their cleaning and their segmentations by name."""

    source: str
    target: str
    shard: int  # pairs per shard; an interrupted run resumes after the last complete shard
    max_words: int  # longest sentence of the training text, in words
    max_ratio: float  # maximum length ratio of the sides
    sentences: int  # evenly spaced training sentences for SentencePiece
    corpora: tuple[Texts, ...]
    tests: tuple[Texts, ...]
    pieces: dict[str, Pieces]

    @property
    def languages(self) -> Pair:
        return self.source, self.target


def read_settings(recipe: Recipe, path: Path | None = None) -> Settings:
    """Read the settings of a recipe, or those in a file."""
    where, content = recipe.data_settings(path)
    return parse_options(where, Settings, content)


class Located(NamedTuple):
    """A text, and its files: source and target, or one archive."""

    texts: Texts
    files: tuple[Path, ...]


def locate(texts: Texts, languages: Pair, folders: list[Path]) -> Located:
    """Find a text in `folders`, or download its archive to the last one."""
    for folder in folders:
        if plain := plain_files(folder, texts.name, languages):
            return Located(texts, plain)
        archive = folder / texts.archive
        if archive.is_file():
            verify(archive, texts.sha256)
            return Located(texts, (archive,))
    archive = folders[-1] / texts.archive
    names = " and ".join(f"{texts.name}.{language}" for language in languages)
    advice = f"put {texts.archive}, or {names}, into {folders[0]} and run again"
    download(texts.url, archive, texts.sha256, advice)
    return Located(texts, (archive,))


def plain_files(folder: Path, name: str, languages: Pair) -> tuple[Path, ...]:
    """Return the files ``NAME.LANGUAGE[.gz]`` of both languages; empty unless both exist."""
    files = []
    for language in languages:
        places = (folder / f"{name}.{language}", folder / f"{name}.{language}.gz")
        files += [place for place in places if place.is_file()][:1]
    return tuple(files) if len(files) == len(languages) else ()


def read_pairs(located: Located) -> Iterator[Pair]:
    """Yield the sentence pairs of a text, including empty sides."""
    texts = located.texts
    with ExitStack() as stack:
        if len(located.files) == 1:
            members = (texts.source, texts.target)
            sides = [_member_lines(stack, located.files[0], member, texts.format) for member in members]
        else:
            sides = [stream_lines(path) for path in located.files]
        for number, pair in enumerate(zip_longest(*sides), start=1):
            if None in pair:
                short = "source" if pair[0] is None else "target"
                raise UserError(
                    f"{texts.name}: the {short} side ends before line {number}; replace its files"
                )
            yield cast(Pair, pair)


def _member_lines(stack: ExitStack, archive: Path, member: str, format: str) -> Iterator[str]:
    """Yield the sentences of one member of an archive, which `stack` closes."""
    try:
        opened = stack.enter_context(tarfile.open(archive, "r:*"))
        entries = (entry for entry in opened if entry.name.removeprefix("./") == member and entry.isfile())
        if (entry := next(entries, None)) is None:
            raise UserError(f"{archive}: has no member {member}; if the archive changed, update rows.yaml")
        file = cast(IO[bytes], opened.extractfile(entry))
        file = cast(IO[bytes], gzip.GzipFile(fileobj=file)) if member.endswith(".gz") else file
        for line in stream_lines(archive, file):
            if format == "segments":
                yield from (" ".join(html.unescape(text).split()) for text in _SEGMENT.findall(line))
            elif format == "lines" or not line.startswith("<"):
                yield line
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise UserError(f"{archive}: truncated or not an archive ({error}); replace it") from error


class Preparation:
    """The preparation of a recipe's data in a folder, in as many `processes`.

    The folder gets ``text/``, ``tokens/`` and a folder for each of ``settings.pieces``.
    """

    def __init__(self, settings: Settings, folder: Path, processes: int) -> None:
        self.settings, self.folder, self.processes = settings, folder, processes
        self._step = partial(run_step, folder / "steps")

    def split_text(self, corpora: Sequence[Located], tests: Sequence[Located]) -> None:
        """Write the cleaned training text in shards, and copy the test sets."""
        for located in tests:
            name = located.texts.name
            outputs = [self.folder / TEXT / f"{name}.{side}" for side in self.settings.languages]
            member = [located.texts.source, located.texts.target]
            write = partial(write_pairs, read_pairs(located), outputs)
            self._step(f"text-{name}", located.files, outputs, write, member=member)
        cleaning = [self.settings.shard, self.settings.max_words, self.settings.max_ratio]
        names = [located.texts.name for located in corpora]
        inputs = [path for located in corpora for path in located.files]
        listing = self.folder / TEXT / "shards.json"

        def write_shards() -> None:
            key = {"files": [sha256(path) for path in inputs]}
            pairs = clean(chain.from_iterable(map(read_pairs, corpora)), self.settings)
            counts: list[int] = []
            with tqdm(desc="pairs", unit=" pairs", unit_scale=True, mininterval=0.5) as bar:
                while shard := list(islice(pairs, self.settings.shard)):
                    number, outputs = len(counts), self.shard_files(TEXT, len(counts))
                    settings = {**key, "clean": cleaning, "pairs": len(shard)}
                    self._step(f"text-{number:05}", [], outputs, write_pairs, shard, outputs, **settings)
                    counts.append(len(shard))
                    bar.update(len(shard))
            if not counts:
                raise UserError(f"no pairs are left in {', '.join(names)}; see the data in rows.yaml")
            write_text(listing, json.dumps({"pairs": counts}) + "\n")

        self._step("text", inputs, [listing], write_shards, corpora=names, clean=cleaning)

    def shard_files(self, folder: str, number: int) -> list[Path]:
        return [self.folder / folder / f"{TRAIN}-{number:05}.{side}" for side in self.settings.languages]

    def all_files(self, folder: str) -> tuple[list[Path], list[Path]]:
        """Return the files of the training and of the test text in a folder."""
        shards = range(len(read_json(self.folder / TEXT / "shards.json")["pairs"]))
        training = [path for index in shards for path in self.shard_files(folder, index)]
        names = [texts.name for texts in self.settings.tests]
        sides = self.settings.languages
        return training, [self.folder / folder / f"{name}.{side}" for name in names for side in sides]

    def tokenize(self) -> None:
        """Write the Moses tokens of all texts."""
        training, tests = self.all_files(TEXT)
        # A new folder appears with its first file in one rename, which only one worker can do.
        (self.folder / TOKENS).mkdir(exist_ok=True)
        for_each(self.processes, self._tokenize, [*tests, *training], TOKENS)

    def _tokenize(self, text: Path) -> None:
        target, language = self.folder / TOKENS / text.name, text.suffix[1:]

        def write() -> None:
            tokenizer = subwords.Tokenizer(language)
            write_lines(target, map(tokenizer.tokenize, stream_lines(text)))

        self._step(f"tokens-{text.name}", [text], [target], write, language=language)

    def make_pieces(self, name: str) -> None:
        """Learn subwords, apply them to all texts, and write vocabularies, classes and ``data.json``."""
        pieces, home = self.settings.pieces[name], self.folder / name
        training, tests = self.all_files(TOKENS if pieces.kind == "bpe" else TEXT)
        model = home / f"{pieces.kind}.model"
        learn: Callable[[], None] = partial(subwords.learn_bpe, training, model, pieces.size)
        if pieces.kind == "sentencepiece":
            sizes = (pieces.size, pieces.model, self.settings.sentences)
            learn = partial(subwords.learn_sentencepiece, training, model, *sizes)
        settings: dict[str, Any] = {"kind": pieces.kind, "size": pieces.size, "model": pieces.model}
        settings["sentences"] = str(self.settings.sentences)
        self._step(f"{name}-learn", training, [model], learn, **settings)
        (home / "shards").mkdir(exist_ok=True)
        for_each(self.processes, partial(self._split, name, model), [*tests, *training], name)
        sides = [home / f"{TRAIN}.{language}" for language in self.settings.languages]
        for side in sides:
            parts = [path for path in self.all_files(f"{name}/shards")[0] if path.suffix == side.suffix]
            self._step(f"{name}-{side.name}", parts, [side], concatenate, parts, side)
        vocabularies = {"vocabulary": sides}
        if not pieces.shared_vocabulary:
            vocabularies = {f"vocabulary.{side.suffix[1:]}": [side] for side in sides}
        for part, files in vocabularies.items():
            of_model = model if pieces.kind == "sentencepiece" else None
            asked = (subwords.write_vocabulary, files, home / part, of_model)
            self._step(f"{name}-{part}", [model, *files], [home / part], *asked)
        # All classes come from the same word vectors.
        outputs = [home / classes_file(number) for number in pieces.classes]
        for number, output in zip(pieces.classes, outputs, strict=True):
            make = partial(make_classes, sides, home / "vocabulary", number, output, force=True)
            inputs = [*sides, home / "vocabulary"]
            if output != outputs[0]:
                make, inputs = partial(regroup, outputs[0], number, output, force=True), outputs[:1]
            self._step(f"{name}-{output.stem}", inputs, [output], make, classes=number)
        files = sorted(path for path in home.iterdir() if path.is_file() and path.name != "data.json")
        description = {
            "source": self.settings.source,
            "target": self.settings.target,
            "pieces": name,
            "kind": pieces.kind,
            "pairs": {TRAIN: sum(read_json(self.folder / TEXT / "shards.json")["pairs"])},
            "vocabulary": {part: sum(1 for _ in stream_lines(home / part)) for part in sorted(vocabularies)},
            **checksums_of(home, files),
        }
        write_json(home / "data.json", description)
        print(f"prepared {home}", flush=True)

    def _split(self, name: str, model: Path, text: Path) -> None:
        """Split a text into pieces; those of the training text are shards."""
        folder = self.folder / name / "shards" if text.name.startswith(f"{TRAIN}-") else self.folder / name
        apply = partial(subwords.apply_sentencepiece, model, text, folder / text.name)
        if self.settings.pieces[name].kind == "bpe":
            apply = partial(subwords.apply_bpe, model, [text], folder)
        self._step(f"{name}-{text.name}", [model, text], [folder / text.name], apply)


def for_each(processes: int, work: Callable[[Path], None], texts: Sequence[Path], title: str) -> None:
    """Call `work` on each text in several processes, with a progress bar."""
    with ProcessPoolExecutor(processes, initializer=_end_with_parent) as pool:
        try:
            for _ in tqdm(pool.map(work, texts), desc=title, unit=" files", total=len(texts)):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _end_with_parent() -> None:
    """End this process with its parent, even after ``kill -9``, or it would wait forever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def clean(pairs: Iterable[Pair], settings: Settings) -> Iterator[Pair]:
    """Yield the pairs with nonempty sides that satisfy ``max_words`` and ``max_ratio``."""
    for source, target in pairs:
        short, long = sorted((source.count(" ") + 1, target.count(" ") + 1))
        fits = long <= settings.max_words and long <= settings.max_ratio * short
        if source and target and fits:
            yield source, target


def write_pairs(pairs: Iterable[Pair], files: Sequence[Path]) -> None:
    """Write sources to the first file, and targets to the second."""
    listed = list(pairs)
    for side, path in enumerate(files):
        write_lines(path, (pair[side] for pair in listed))


def concatenate(parts: Sequence[Path], whole: Path) -> None:
    """Concatenate files."""
    with replacing(whole) as temporary, temporary.open("wb") as file:
        for part in parts:
            with part.open("rb") as opened:
                shutil.copyfileobj(opened, file, 1 << 20)


def smoke_pieces(pieces: Mapping[str, Pieces]) -> dict[str, Pieces]:
    """Return pieces for a generated text of a few hundred pairs."""
    return {
        name: replace(part, size=_SMOKE_SIZES[part.kind], classes=(CLASSES,) if part.classes else ())
        for name, part in pieces.items()
    }


def write_smoke_texts(folder: Path, settings: Settings) -> None:
    """Write plain files for the training text and every test set of `settings`."""
    sizes = {TRAIN: LINES, **{texts.name: TEST_LINES for texts in settings.tests}}
    for seed, (name, lines) in enumerate(sizes.items()):
        pairs = generated_pairs(lines, seed)
        write_pairs(pairs, [folder / f"{name}.{language}" for language in settings.languages])


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare the data below $RUNS/RECIPE/data, from $DATA_DIR/RECIPE or from the network."""
    parser = preprocess_parser(main.__doc__)
    parser.add_argument("pieces", nargs="*", help="which of the pieces in rows.yaml to make (default: all)")
    parser.add_argument(
        "--processes", type=positive, default=1, help="shards at a time (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    settings, home = read_settings(recipe, options.settings), tools.data_dir()
    folders = [home / recipe.name] if home else []
    if options.smoke:
        settings = replace(settings, shard=100, sentences=500, pieces=smoke_pieces(settings.pieces))
        recipe = recipe.smoke()
        folders = [recipe.home / "raw"]
        write_smoke_texts(folders[0], settings)
    folders.append(recipe.home / "raw")
    if unknown := [name for name in options.pieces if name not in settings.pieces]:
        raise UserError(f"no pieces {unknown[0]!r} in rows.yaml; there are: {', '.join(settings.pieces)}")
    names = options.pieces or list(settings.pieces)
    with locked(recipe.data / "lock"):
        for path in list(recipe.data.rglob(".*.tmp")):  # of a killed run, which would count as data
            remove(path)
        tests = [locate(texts, settings.languages, folders) for texts in settings.tests]
        # The plain files ``train.LANGUAGE``, if they exist, replace all corpora.
        plain = [files for folder in folders if (files := plain_files(folder, TRAIN, settings.languages))]
        corpora = [Located(Texts(TRAIN), files) for files in plain[:1]]
        corpora = corpora or [locate(texts, settings.languages, folders) for texts in settings.corpora]
        preparation = Preparation(settings, recipe.data, options.processes)
        preparation.split_text(corpora, tests)
        if any(settings.pieces[name].kind == "bpe" for name in names):
            preparation.tokenize()
        for name in names:
            preparation.make_pieces(name)


@dataclass(frozen=True)
class Multi30k:
    """The ``data`` of Multi30k in ``rows.yaml``, which explains each setting."""

    source: str
    target: str
    splits: dict[str, str]
    bpe_operations: int
    num_classes: int
    split_dashes: bool
    url: str
    sha256: dict[str, str]
    pieces: dict[str, Pieces] = field(default_factory=dict)  # other subwords of the same text

    @property
    def languages(self) -> Pair:
        return self.source, self.target

    def raw_name(self, split: str, language: str) -> str:
        return f"{self.splits[split]}.{language}.gz"


def locate_multi30k(settings: Multi30k, downloads: Path) -> dict[str, Path]:
    """Find each raw file in $DATA_DIR/multi30k or download it; return verified paths by name."""
    names = [settings.raw_name(split, side) for split in settings.splits for side in settings.languages]
    find = partial(tools.locate, folder="multi30k", url=settings.url, downloads=downloads)
    return {name: find(name, sha256=settings.sha256.get(name)) for name in names}


def write_smoke_multi30k(settings: Multi30k, folder: Path) -> dict[str, Path]:
    """Write generated pairs as raw files of all splits; return them by name."""
    paths = {}
    for seed, split in enumerate(settings.splits):
        pairs = list(generated_pairs(LINES if split == TRAIN else TEST_LINES, seed))
        for side, language in enumerate(settings.languages):
            text = "".join(f"{pair[side]}\n" for pair in pairs)
            name = settings.raw_name(split, language)
            paths[name] = folder / name
            with replacing(paths[name]) as temporary:
                temporary.write_bytes(gzip.compress(text.encode(), mtime=0))
    return paths


def prepare_multi30k(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare Multi30k in $RUNS/multi30k_ende/data, from $DATA_DIR/multi30k or the network."""
    options = preprocess_parser(prepare_multi30k.__doc__).parse_args(arguments)
    where, content = recipe.data_settings(options.settings)
    settings = parse_options(where, Multi30k, content)
    if options.smoke:
        recipe = recipe.smoke()
        small: dict[str, Any] = {"bpe_operations": MERGES, "num_classes": CLASSES}
        settings = replace(settings, **small, pieces=smoke_pieces(settings.pieces))
        raw = write_smoke_multi30k(settings, recipe.home / "raw")
    else:
        raw = locate_multi30k(settings, recipe.home / "raw")
    folder, languages = recipe.data, settings.languages
    step = partial(run_step, folder / "steps")

    def tokenize(split: str) -> None:
        names = [settings.raw_name(split, language) for language in languages]
        sides = {name: read_lines(raw[name]) for name in names}
        check_pairs(sides)
        for language, lines in zip(languages, sides.values(), strict=True):
            tokenizer = subwords.Tokenizer(language, settings.split_dashes)
            shown = tqdm(lines, f"{split}.{language}", unit=" lines", unit_scale=True, mininterval=0.5)
            write_lines(folder / TOKENS / f"{split}.{language}", map(tokenizer.tokenize, shown))
        if split == "test":
            write_lines(folder / "test.reference", sides[names[1]])

    for split in settings.splits:
        inputs = [raw[settings.raw_name(split, language)] for language in languages]
        outputs = [folder / TOKENS / f"{split}.{language}" for language in languages]
        outputs += [folder / "test.reference"] if split == "test" else []
        how: dict[str, Any] = {"languages": languages, "split_dashes": settings.split_dashes}
        step(f"tokenize-{split}", inputs, outputs, tokenize, split, **how)
    names = [f"{split}.{language}" for split in settings.splits for language in languages]
    tokens, codes = [folder / TOKENS / name for name in names], folder / "bpe.codes"
    subwords.run_bpe_steps(step, tokens[:2], tokens, codes, settings.bpe_operations)
    texts, vocabulary = [folder / name for name in names[:2]], folder / "vocabulary"
    step("vocabulary", texts, [vocabulary], subwords.write_vocabulary, texts, vocabulary)
    classes, number = folder / "classes.npz", settings.num_classes
    make = partial(make_classes, texts, vocabulary, number, classes, force=True)
    step("classes", [*texts, vocabulary], [classes], make, num_classes=number)
    names += ["test.reference", "vocabulary"]
    sizes = {name: len(read_lines(folder / name)) for name in names}
    description = {
        "source": settings.source,
        "target": settings.target,
        "pairs": {split: sizes[f"{split}.{settings.source}"] for split in settings.splits},
        "vocabulary": sizes["vocabulary"],
        "bpe_operations": settings.bpe_operations,
        **checksums_of(folder, [folder / name for name in names]),
    }
    write_json(folder / "data.json", description)
    print(f"prepared {folder}")
    if settings.pieces:
        _prepare_pieces(settings, folder, raw)


def _prepare_pieces(settings: Multi30k, folder: Path, raw: Mapping[str, Path]) -> None:
    """Prepare other pieces of the same text: all pairs in one shard; none are left out."""
    train, *tests = (
        Located(Texts(split), tuple(raw[settings.raw_name(split, side)] for side in settings.languages))
        for split in (TRAIN, "valid", "test")
    )
    whole = Settings(
        *settings.languages,
        shard=10**6,
        max_words=10**6,
        max_ratio=10**6,
        sentences=10**6,
        corpora=(),
        tests=tuple(test.texts for test in tests),
        pieces=settings.pieces,
    )
    preparation = Preparation(whole, folder, processes=1)
    preparation.split_text([train], tests)
    for name in settings.pieces:
        preparation.make_pieces(name)
