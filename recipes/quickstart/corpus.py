"""A parallel corpus that needs no download: dates, numbers, names and measures in running sentences.

Sentences come from hand-written templates where both languages have them (``templates.yaml``); any other pair
gets lists of facts, joined as each language joins a list. The same seed gives the same files, byte for byte,
and no source sentence and no target sentence occurs twice, so that the parts are disjoint on either side.

    python -m recipes.quickstart.corpus --source en --target de --output DIR
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.common.corpus import write_lines
from recipes.common.errors import UserError, run_main
from recipes.quickstart.facts import KINDS, Facts, Value, say, shared_inventory
from recipes.quickstart.languages import Speech
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.path_options import PathOption, check_paths
from shared_embeddings.utils.reading import read_yaml

Pair = tuple[str, str]
SIZES = {"train": 20000, "valid": 500, "test": 500}
TEMPLATES = Path(__file__).with_name("templates.yaml")
# A draw that repeats a known sentence is thrown away; with so many in a row there is nothing new left to say.
MAXIMUM_REPEATS = 2000


class CorpusError(UserError):
    """A corpus that cannot be made as asked for."""


@dataclass(frozen=True)
class Template:
    """A sentence with gaps, in some languages.

    Attributes:
        slots: name of the gap -> kind of fact that fills it.
        texts: language -> sentence with ``{gap}`` for each gap.
    """

    slots: dict[str, str]
    texts: dict[str, str]


def read_templates(path: Path = TEMPLATES) -> list[Template]:
    """The hand-written sentences; raises CorpusError for a template with wrong gaps or kinds."""
    templates = []
    for entry in read_yaml(path, "templates"):
        template = Template(entry.pop("slots"), entry)
        unknown = set(template.slots.values()) - KINDS.keys()
        if unknown:
            raise CorpusError(f"{path.name}: unknown kinds {sorted(unknown)} in {template.slots}")
        for language, text in template.texts.items():
            if any(text.count("{" + slot + "}") != 1 for slot in template.slots):
                raise CorpusError(f"{path.name}: the {language} sentence {text!r} must name each gap once")
        templates.append(template)
    return templates


def generate(source: str, target: str, seed: int) -> Iterator[Pair]:
    """An endless stream of sentence pairs, repetitions included.

    Raises:
        LanguageError: when Babel or num2words does not cover a language.
        CorpusError: when the two languages are the same.
    """
    if source == target:
        raise CorpusError(f"source and target are both {source!r}: choose two languages")
    speakers = Speech(source), Speech(target)
    facts = Facts(shared_inventory(*speakers, seed), random.Random(f"{seed} {source} {target}"))
    short = [speaker.language.split("_")[0] for speaker in speakers]
    usable = set(facts.kinds())
    templates = [
        template
        for template in read_templates()
        if set(short) <= template.texts.keys() and usable.issuperset(template.slots.values())
    ]
    while True:
        if templates:
            yield _from_template(facts.rng.choice(templates), facts, speakers, short)
        else:
            yield _from_list(facts, speakers)


def _from_template(
    template: Template, facts: Facts, speakers: tuple[Speech, Speech], short: list[str]
) -> Pair:
    values = {slot: facts.draw(kind) for slot, kind in template.slots.items()}
    source, target = (
        template.texts[language].format_map(
            {slot: say(speech, template.slots[slot], values[slot]) for slot in values}
        )
        for speech, language in zip(speakers, short, strict=True)
    )
    return source, target


def _from_list(facts: Facts, speakers: tuple[Speech, Speech]) -> Pair:
    """Two to four facts as a list.

    Amounts in words are left out: in many languages, numerals agree with their noun.
    """
    kinds = [kind for kind in facts.kinds() if kind != "money_in_words"]
    drawn: list[tuple[str, Value]] = [
        (kind, facts.draw(kind)) for kind in facts.rng.sample(kinds, facts.rng.randrange(2, 5))
    ]
    source, target = (
        speech.listing([say(speech, kind, value) for kind, value in drawn]) for speech in speakers
    )
    return source, target


def make_corpus(source: str, target: str, sizes: dict[str, int], seed: int = 1) -> dict[str, list[Pair]]:
    """The parts of a corpus, each a list of (source, target) sentences.

    Args:
        sizes: part -> number of pairs.

    Raises:
        LanguageError, CorpusError: as `generate`, and when there are not so many different sentences.
    """
    if any(size < 1 for size in sizes.values()):
        raise CorpusError(f"sizes {sizes}: every part needs at least one sentence pair")
    wanted, repeats = sum(sizes.values()), 0
    pairs: list[Pair] = []
    seen: tuple[set[str], set[str]] = set(), set()
    for pair in generate(source, target, seed):
        if any(text in known for text, known in zip(pair, seen, strict=True)):
            repeats += 1
            if repeats > MAXIMUM_REPEATS:
                raise CorpusError(f"{wanted:,} sentence pairs are too many: no new one after {len(pairs):,}")
            continue
        repeats = 0
        pairs.append(pair)
        for text, known in zip(pair, seen, strict=True):
            known.add(text)
        if len(pairs) == wanted:
            break
    # The pairs drawn last are poorer in the sentences of which few exist: shuffled, the parts are alike.
    random.Random(seed).shuffle(pairs)
    parts, start = {}, 0
    for part, size in sizes.items():
        parts[part] = pairs[start : start + size]
        start += size
    return parts


def write_corpus(parts: dict[str, list[Pair]], folder: Path, source: str, target: str) -> None:
    """Writes ``PART.LANGUAGE`` for every part and both languages into a folder."""
    for part, pairs in parts.items():
        for index, language in enumerate((source, target)):
            write_lines(folder / f"{part}.{language}", [pair[index] for pair in pairs])


def checksum(parts: dict[str, list[Pair]]) -> str:
    """SHA-256 of all sentences, in order."""
    digest = hashlib.sha256()
    for part, pairs in parts.items():
        digest.update(f"{part}\n".encode())
        for source, target in pairs:
            digest.update(f"{source}\t{target}\n".encode())
    return digest.hexdigest()


def main(arguments: Sequence[str]) -> None:
    """Make a parallel corpus without a download."""
    parser = Parser("python -m recipes.quickstart.corpus", description=main.__doc__)
    parser.add_argument(
        "--source", default="en", help="CLDR name of the source language (default: %(default)s)"
    )
    parser.add_argument(
        "--target", default="de", help="CLDR name of the target language (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="same seed, same corpus (default: %(default)s)")
    for part, size in SIZES.items():
        parser.add_argument(
            f"--{part}", type=int, default=size, help=f"pairs in {part} (default: %(default)s)"
        )
    parser.add_argument("--output", type=PathOption.FOLDER, required=True, help="folder for the files")
    parser.add_argument("--force", action="store_true", help="replace files that are there already")
    options = parser.parse_args(arguments)
    languages = sorted({options.source, options.target})
    files = [options.output / f"{part}.{language}" for part in SIZES for language in languages]
    check_paths({"--output": (PathOption.NEW_FILE, files)}, options.force)
    sizes = {part: getattr(options, part) for part in SIZES}
    parts = make_corpus(options.source, options.target, sizes, options.seed)
    try:
        write_corpus(parts, options.output, options.source, options.target)
    except OSError as error:
        raise UserError(f"{options.output}: {error.strerror}; choose another folder with --output") from error
    print(f"{sum(sizes.values()):,} sentence pairs in {options.output}; SHA-256 {checksum(parts)}")


if __name__ == "__main__":
    raise SystemExit(run_main("corpus", main))
