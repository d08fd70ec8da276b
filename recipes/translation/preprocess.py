"""Prepare published text: subwords and vocabularies, shard by shard with constant memory.

Every step writes a stamp; a run that was stopped, even by ``kill -9``, resumes after its last complete shard.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipes.common.corpus import stream_lines, write_lines
from recipes.common.recipe import Recipe
from recipes.common.smoke import (
    CLASSES,
    LINES,
    MERGES,
    SMOKE,
    SMOKE_HELP,
    TEST_LINES,
    classes_file,
    generated_pairs,
)
from recipes.common.tools import print_result, run_step
from recipes.translation import subwords
from recipes.translation.sources import (
    Located,
    Pair,
    Pieces,
    Settings,
    Texts,
    locate,
    plain_files,
    read_pairs,
    read_settings,
)
from shared_embeddings.classes import make_classes, regroup
from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.files import locked, replacing, sha256, write_text
from shared_embeddings.utils.interrupts import leave_to_parent
from shared_embeddings.utils.path_options import PathOption
from shared_embeddings.utils.reading import read_json

TRAIN = "train"
TEXT, TOKENS = "text", "tokens"
# Sizes for --smoke: BPE merges, and SentencePiece vocabulary.
_SMOKE_SIZES = {"bpe": MERGES, "sentencepiece": 240}


class Preparation:
    """The preparation of a recipe's data.

    Args:
        settings: content of ``data.yaml``.
        folder: output folder for ``text/``, ``tokens/`` and a folder for each of ``settings.pieces``.
        processes: how many shards are worked on at the same time.
    """

    def __init__(self, settings: Settings, folder: Path, processes: int) -> None:
        self.settings, self.folder, self.processes = settings, folder, processes
        self.stamps = folder / "steps"

    def split_text(self, corpora: Sequence[Located], tests: Sequence[Located]) -> None:
        """Write the cleaned training text in shards, and copy the test sets."""
        for located in tests:
            outputs = [
                self.folder / TEXT / f"{located.texts.name}.{side}" for side in self.settings.languages
            ]
            run_step(
                f"text-{located.texts.name}",
                self.stamps,
                partial(write_pairs, read_pairs(located), outputs),
                inputs=located.files,
                outputs=outputs,
                settings={"member": [located.texts.source, located.texts.target]},
            )
        settings = {"corpora": [located.texts.name for located in corpora], "clean": self._cleaning()}
        run_step(
            "text",
            self.stamps,
            partial(self._write_shards, corpora),
            inputs=[path for located in corpora for path in located.files],
            outputs=[self.folder / TEXT / "shards.json"],
            settings=settings,
        )

    def _cleaning(self) -> list[float]:
        """Return the settings that determine the shards."""
        return [self.settings.shard, self.settings.max_words, self.settings.max_ratio]

    def _write_shards(self, corpora: Sequence[Located]) -> None:
        """Write missing shards and their number."""
        key = {"files": [sha256(path) for located in corpora for path in located.files]}
        pairs = clean(chain.from_iterable(map(read_pairs, corpora)), self.settings)
        bar = tqdm(desc="pairs", unit=" pairs", unit_scale=True, mininterval=0.5)
        counts = []
        for number, shard in enumerate(shards(pairs, self.settings.shard)):
            outputs = self.shard_files(TEXT, number)
            settings = {**key, "clean": self._cleaning(), "pairs": len(shard)}
            write = partial(write_pairs, shard, outputs)
            run_step(f"text-{number:05}", self.stamps, write, inputs=[], outputs=outputs, settings=settings)
            counts.append(len(shard))
            bar.update(len(shard))
        bar.close()
        if not counts:
            raise UserError(
                f"no pairs are left in {', '.join(each.texts.name for each in corpora)}; see data.yaml"
            )
        write_text(self.folder / TEXT / "shards.json", json.dumps({"pairs": counts}) + "\n")

    def shard_files(self, folder: str | Path, number: int) -> list[Path]:
        """Return both sides of a shard in a folder."""
        return [self.folder / folder / f"{TRAIN}-{number:05}.{side}" for side in self.settings.languages]

    def training_files(self, folder: str | Path) -> list[Path]:
        """Return both sides of all shards."""
        number = len(read_json(self.folder / TEXT / "shards.json")["pairs"])
        return [path for index in range(number) for path in self.shard_files(folder, index)]

    def test_files(self, folder: str | Path) -> list[Path]:
        """Return both sides of all test sets."""
        names = [texts.name for texts in self.settings.tests]
        return [self.folder / folder / f"{name}.{side}" for name in names for side in self.settings.languages]

    def tokenize(self) -> None:
        """Tokenize all texts."""
        for_each(self.processes, self._tokenize, [*self.test_files(TEXT), *self.training_files(TEXT)], TOKENS)

    def _tokenize(self, text: Path) -> None:
        """Tokenize one file."""
        target = self.folder / TOKENS / text.name
        language = text.name.rsplit(".", 1)[1]
        run_step(
            f"tokens-{text.name}",
            self.stamps,
            partial(subwords.tokenize, text, target, language),
            inputs=[text],
            outputs=[target],
            settings={"language": language},
        )

    def make_pieces(self, name: str) -> None:
        """Learn subwords, apply them to all texts, and write vocabularies, classes and ``data.json``."""
        pieces, home = self.settings.pieces[name], self.folder / name
        origin = TOKENS if pieces.kind == "bpe" else TEXT
        texts, model = self.training_files(origin), home / f"{pieces.kind}.model"
        learn: Callable[[], None] = partial(subwords.learn_bpe, texts, model, pieces.size)
        if pieces.kind == "sentencepiece":
            learn = partial(subwords.learn_sentencepiece, texts, model, pieces, self.settings.sentences)
        settings = {"kind": pieces.kind, "size": pieces.size, "model": pieces.model}
        settings["sentences"] = str(self.settings.sentences)
        learn = partial(in_own_process, learn)
        run_step(f"{name}-learn", self.stamps, learn, inputs=texts, outputs=[model], settings=settings)
        split = partial(self._split_into_pieces, name, model)
        for_each(self.processes, split, [*self.test_files(origin), *texts], name)
        for language in self.settings.languages:
            shards = [
                path for path in self.training_files(f"{name}/shards") if path.name.endswith(f".{language}")
            ]
            joined = home / f"{TRAIN}.{language}"
            join = partial(concatenate, shards, joined)
            run_step(f"{name}-{joined.name}", self.stamps, join, inputs=shards, outputs=[joined], settings={})
        self._write_vocabularies(name, pieces, model)
        self._make_classes(name, pieces)
        description = self._describe(name, pieces)
        write_text(home / "data.json", json.dumps(description, indent=2) + "\n")

    def _split_into_pieces(self, name: str, model: Path, text: Path) -> None:
        """Split one file into subwords."""
        folder = self.folder / name / "shards" if text.name.startswith(f"{TRAIN}-") else self.folder / name
        target = folder / text.name
        apply = partial(subwords.apply_sentencepiece, model, text, target)
        if self.settings.pieces[name].kind == "bpe":
            apply = partial(subwords.apply_bpe, model, [text], folder)
        run_step(
            f"{name}-{text.name}", self.stamps, apply, inputs=[model, text], outputs=[target], settings={}
        )

    def _write_vocabularies(self, name: str, pieces: Pieces, model: Path) -> None:
        """Write the joint vocabulary, or one per language."""
        home = self.folder / name
        sides = [home / f"{TRAIN}.{language}" for language in self.settings.languages]
        parts = {"vocabulary": sides}
        if not pieces.shared_vocabulary:
            parts = {f"vocabulary.{side.suffix[1:]}": [side] for side in sides}
        for part, texts in parts.items():
            write = partial(subwords.write_vocabulary, texts, home / part)
            if pieces.kind == "sentencepiece":
                write = partial(subwords.write_sentencepiece_vocabulary, model, texts, home / part)
            inputs, outputs = [model, *texts], [home / part]
            run_step(f"{name}-{part}", self.stamps, write, inputs=inputs, outputs=outputs, settings={})

    def _make_classes(self, name: str, pieces: Pieces) -> None:
        """Write the files of semantic classes, all from the same word vectors."""
        home = self.folder / name
        texts = [home / f"{TRAIN}.{language}" for language in self.settings.languages]
        vocabulary = home / "vocabulary"
        files = [home / classes_file(number) for number in pieces.classes]
        for number, output in zip(pieces.classes, files, strict=True):
            first = output == files[0]
            make = partial(make_classes, texts, vocabulary, number, output, force=True)
            regrouped = partial(regroup, files[0], number, output, force=True)
            run_step(
                f"{name}-{output.stem}",
                self.stamps,
                partial(print_result, make if first else regrouped),
                inputs=[*texts, vocabulary] if first else [files[0]],
                outputs=[output],
                settings={"classes": number},
            )

    def _describe(self, name: str, pieces: Pieces) -> dict[str, Any]:
        """Describe sizes and checksums; ``checksum`` is the SHA-256 of the checksums of all files."""
        home = self.folder / name
        files = sorted(path for path in home.iterdir() if path.is_file() and path.name != "data.json")
        checksums = {path.name: sha256(path) for path in files}
        vocabularies = {path.name: count_lines(path) for path in files if path.name.startswith("vocabulary")}
        pairs = sum(read_json(self.folder / TEXT / "shards.json")["pairs"])
        return {
            "source": self.settings.source,
            "target": self.settings.target,
            "pieces": name,
            "kind": pieces.kind,
            "pairs": {TRAIN: pairs},
            "vocabulary": vocabularies,
            "checksum": hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest(),
            "files": checksums,
        }


def for_each(processes: int, work: Callable[[Path], None], texts: Sequence[Path], what: str) -> None:
    """Call `work` on each text in several processes, with a progress bar."""
    if processes == 1:
        for text in tqdm(texts, desc=what, unit=" files"):
            work(text)
        return
    with ProcessPoolExecutor(processes, initializer=end_with_parent) as pool:
        try:
            for _ in tqdm(pool.map(work, texts), desc=what, unit=" files", total=len(texts)):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def in_own_process(work: Callable[[], None]) -> None:
    """Call `work` in a separate process, to free its memory."""
    with ProcessPoolExecutor(1, initializer=end_with_parent) as pool:
        pool.submit(work).result()


def end_with_parent() -> None:
    """End this process with its parent, even after ``kill -9``.

    Otherwise it would wait for work and hold the lock forever.
    """
    leave_to_parent()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def clean(pairs: Iterable[Pair], settings: Settings) -> Iterator[Pair]:
    """Yield the pairs with nonempty sides that satisfy ``max_words`` and ``max_ratio``."""
    for source, target in pairs:
        lengths = sorted((source.count(" ") + 1, target.count(" ") + 1))
        fits = lengths[1] <= settings.max_words and lengths[1] <= settings.max_ratio * lengths[0]
        if source and target and fits:
            yield source, target


def shards(pairs: Iterable[Pair], size: int) -> Iterator[list[Pair]]:
    """Yield lists of `size` pairs; the last one may be shorter."""
    rest = iter(pairs)
    while shard := list(islice(rest, size)):
        yield shard


def write_pairs(pairs: Iterable[Pair], files: Sequence[Path]) -> None:
    """Write sources to the first file, and targets to the second."""
    kept = list(pairs)
    for side, path in enumerate(files):
        write_lines(path, (pair[side] for pair in kept))


def concatenate(parts: Sequence[Path], whole: Path) -> None:
    """Concatenate files."""
    with replacing(whole) as temporary, temporary.open("wb") as file:
        for part in parts:
            with part.open("rb") as opened:
                shutil.copyfileobj(opened, file, 1 << 20)


def remove_unfinished(folder: Path) -> None:
    """Remove temporary files of a killed run, which would count as data."""
    for path in folder.rglob(".*.tmp"):
        path.unlink()


def count_lines(path: Path) -> int:
    """Count the lines of a text."""
    return sum(1 for _ in stream_lines(path))


def find_texts(settings: Settings, folders: list[Path]) -> tuple[list[Located], list[Located]]:
    """Locate or download the training and test texts.

    The plain files ``train.LANGUAGE``, if they exist, replace all corpora.
    """
    tests = [locate(texts, settings.languages, folders) for texts in settings.tests]
    for folder in folders:
        ready = plain_files(folder, TRAIN, settings.languages)
        if ready:
            return [Located(Texts(TRAIN, "", "", "", ""), ready)], tests
    return [locate(texts, settings.languages, folders) for texts in settings.corpora], tests


def smoke_settings(settings: Settings) -> Settings:
    """Return settings for a generated text of a few hundred pairs."""
    small = {
        name: replace(pieces, size=_SMOKE_SIZES[pieces.kind], classes=(CLASSES,) if pieces.classes else ())
        for name, pieces in settings.pieces.items()
    }
    return replace(settings, shard=100, sentences=500, pieces=small)


def write_smoke_texts(folder: Path, settings: Settings) -> None:
    """Write plain files for the training text and every test set of `settings`."""
    sizes = {TRAIN: LINES, **{texts.name: TEST_LINES for texts in settings.tests}}
    for seed, (name, lines) in enumerate(sizes.items()):
        pairs = list(generated_pairs(lines, seed))
        write_pairs(pairs, [folder / f"{name}.{language}" for language in settings.languages])


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare the data below $RUNS/RECIPE/data, from $DATA_DIR/RECIPE or from the network."""
    parser = Parser("preprocess.sh", description=main.__doc__)
    parser.add_argument("pieces", nargs="*", help="which of the pieces in data.yaml to make (default: all)")
    parser.add_argument("--processes", type=int, default=1, help="shards at a time (default: %(default)s)")
    parser.add_argument("--settings", type=PathOption.FILE, help="another file than the recipe's data.yaml")
    parser.add_argument(SMOKE, action="store_true", help=SMOKE_HELP)
    options = parser.parse_args(arguments)
    settings = read_settings(options.settings or recipe.folder / "data.yaml")
    data_dir = os.environ.get("DATA_DIR")
    folders = [Path(data_dir).absolute() / recipe.name] if data_dir else []
    if options.smoke:
        settings, recipe = smoke_settings(settings), recipe.smoke()
        folders = [recipe.home / "raw"]
        write_smoke_texts(folders[0], settings)
    unknown = [name for name in options.pieces if name not in settings.pieces]
    if unknown:
        raise UserError(f"no pieces {unknown[0]!r} in data.yaml; there are: {', '.join(settings.pieces)}")
    if options.processes < 1:
        raise UserError(f"--processes is {options.processes}; it must be at least 1")
    prepare(recipe, settings, folders, options.pieces or list(settings.pieces), options.processes)


def prepare(
    recipe: Recipe, settings: Settings, folders: list[Path], names: Sequence[str], processes: int
) -> None:
    """Run all steps for the segmentations `names`.

    Raises:
        UserError: a text cannot be read, or another process uses the folder.
    """
    with locked(recipe.data / "lock"):
        remove_unfinished(recipe.data)
        corpora, tests = find_texts(settings, [*folders, recipe.home / "raw"])
        preparation = Preparation(settings, recipe.data, processes)
        preparation.split_text(corpora, tests)
        if any(settings.pieces[name].kind == "bpe" for name in names):
            preparation.tokenize()
        for name in names:
            preparation.make_pieces(name)
            print(f"prepared {recipe.data / name}", flush=True)
