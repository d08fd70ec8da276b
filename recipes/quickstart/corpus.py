"""A synthetic parallel corpus: dates, numbers, names and measures in running sentences.

Sentences come from templates where both languages have them (``templates.yaml``); other pairs of languages
get lists of facts. The same seed gives the same files. No source and no target sentence occurs twice, so that
the parts are disjoint.

    python -m recipes.quickstart.corpus --source en --target de --output DIR
"""

from __future__ import annotations

import datetime
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from recipes.common.tools import run_main, write_lines
from recipes.quickstart.languages import SECONDS, RelativeUnit, Speech
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.path_options import PathOption, check_paths
from shared_embeddings.utils.reading import read_yaml

Value = tuple[int | str, ...]

NAME_KINDS = {
    "territory": "territories",
    "language": "languages",
    "currency": "currencies",
    "script": "scripts",
}
UNITS = {
    "length": "kilometer meter centimeter millimeter mile foot inch yard",
    "mass": "kilogram gram milligram tonne ounce pound",
    "speed": "kilometer-per-hour meter-per-second mile-per-hour knot",
    "volume": "liter deciliter centiliter milliliter cubic-meter gallon pint",
    "power": "watt kilowatt megawatt milliwatt horsepower",
    "temperature": "celsius fahrenheit kelvin",
    "area": "square-kilometer square-meter hectare acre square-mile square-foot",
    "data": "byte kilobyte megabyte gigabyte terabyte bit megabit",
    "duration": "year month week day hour minute second decade century",
}

# Numbers ending in 1 depend on the gender of the noun in many languages. Few numbers, so that each is
# frequent:
# a compound number is one word in German.
COUNTS = tuple(number for number in range(2, 200) if number % 10 != 1)
ROUND_COUNTS = (*range(200, 1000, 50), *range(1000, 10000, 500))


@dataclass(frozen=True)
class Inventory:
    """Facts that both languages can express.

    Attributes:
        names: kind of name -> codes with names in both languages, most frequent first.
        units: kind of measure -> CLDR units of both languages.
        ordinals: whether both languages have ordinal numbers.
    """

    names: dict[str, tuple[str, ...]]
    units: dict[str, tuple[str, ...]]
    ordinals: bool


def shared_inventory(source: Speech, target: Speech, seed: int) -> Inventory:
    """Return the inventory of a pair of languages; the seed determines the order of names."""
    names = {}
    for kind, plural in NAME_KINDS.items():
        codes = sorted(source.names(plural).keys() & target.names(plural).keys())
        random.Random(f"{seed} {kind}").shuffle(codes)
        names[kind] = tuple(codes)
    units = {}
    for kind, listed in UNITS.items():
        group = "digital" if kind == "data" else kind
        both = (f"{group}-{unit}" for unit in listed.split())
        units[kind] = tuple(unit for unit in both if source.has_unit(unit) and target.has_unit(unit))
    return Inventory(names, units, source.has_ordinals and target.has_ordinals)


class Facts:
    """Samples facts.

    Names follow a flattened Zipf's law with weights ``1 / (rank + shift)``.
    """

    def __init__(self, inventory: Inventory, rng: random.Random, shift: int = 15) -> None:
        self.rng = rng
        self.inventory = inventory
        self._weights = {
            kind: [1 / (rank + shift) for rank in range(len(codes))]
            for kind, codes in inventory.names.items()
        }

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds that both languages can express."""
        missing = {kind for kind, units in self.inventory.units.items() if not units}
        missing |= {kind for kind, codes in self.inventory.names.items() if not codes}
        if not self.inventory.ordinals:
            missing.add("ordinal")
        return tuple(kind for kind in KINDS if kind not in missing)

    def draw(self, kind: str) -> Value:
        """Sample a fact of a kind: a tuple of numbers and codes."""
        return KINDS[kind].draw(self)

    def name(self, kind: str) -> str:
        """Sample the code of a name."""
        return self.rng.choices(self.inventory.names[kind], self._weights[kind])[0]

    def unit(self, kind: str) -> str:
        """Sample a unit of a kind of measure."""
        return self.rng.choice(self.inventory.units[kind])

    def count(self) -> int:
        """Sample a number that can precede a noun."""
        return self.rng.choice(COUNTS)

    def amount(self) -> int:
        """Sample a small or round number."""
        return self.rng.choice(COUNTS if self.rng.random() < 0.6 else ROUND_COUNTS)

    def day(self) -> tuple[int, int, int]:
        """Sample a date from 1990 to 2029 as year, month and day."""
        day = datetime.date(1990, 1, 1) + datetime.timedelta(days=self.rng.randrange(40 * 365))
        return day.year, day.month, day.day


@dataclass(frozen=True)
class Kind:
    """Functions that sample and express a kind of fact."""

    draw: Callable[[Facts], Value]
    say: Callable[[Speech, Value], str]


def say(speech: Speech, kind: str, value: Value) -> str:
    """Express a fact of ``kind`` in a language."""
    return KINDS[kind].say(speech, value)


def _name_kind(kind: str) -> Kind:
    plural = NAME_KINDS[kind]
    return Kind(lambda facts: (facts.name(kind),), lambda speech, value: speech.names(plural)[str(value[0])])


def _measure_kind(kind: str) -> Kind:
    return Kind(
        lambda facts: (facts.amount(), facts.unit(kind)),
        lambda speech, value: speech.measure(int(value[0]), str(value[1])),
    )


def _relative_kind(past: bool) -> Kind:
    return Kind(
        lambda facts: (facts.rng.randrange(2, 21), facts.rng.choice(tuple(SECONDS))),
        lambda speech, value: speech.relative(int(value[0]), cast(RelativeUnit, value[1]), past=past),
    )


def _date_kind(style: str) -> Kind:
    return Kind(
        lambda facts: facts.day(),
        lambda speech, value: speech.date(datetime.date(*(int(part) for part in value)), style),
    )


def _draw_territories(facts: Facts) -> Value:
    wanted = facts.rng.choice((2, 3))
    drawn: list[str] = []
    while len(drawn) < wanted:
        code = facts.name("territory")
        if code not in drawn:
            drawn.append(code)
    return tuple(drawn)


def _draw_sum(facts: Facts) -> Value:
    return facts.rng.randrange(2, 100), facts.rng.randrange(2, 100)


def _draw_time(facts: Facts) -> Value:
    # Not 1 o'clock: "a la 1:00" and "a las 2:00" differ in Spanish.
    return facts.rng.randrange(2, 24), facts.rng.randrange(0, 60, 5)


KINDS: dict[str, Kind] = {
    **{kind: _name_kind(kind) for kind in NAME_KINDS},
    **{kind: _measure_kind(kind) for kind in UNITS},
    "ago": _relative_kind(past=True),
    "ahead": _relative_kind(past=False),
    "full_date": _date_kind("full"),
    "long_date": _date_kind("long"),
    "day_of_year": _date_kind("MMMMd"),
    "territories": Kind(
        _draw_territories,
        lambda speech, value: speech.listing([speech.names("territories")[str(code)] for code in value]),
    ),
    "weekday": Kind(
        lambda facts: (facts.rng.randrange(7),), lambda speech, value: speech.weekday(int(value[0]))
    ),
    "month": Kind(
        lambda facts: (facts.rng.randrange(1, 13),), lambda speech, value: speech.month(int(value[0]))
    ),
    "time": Kind(_draw_time, lambda speech, value: speech.time(int(value[0]), int(value[1]))),
    "number": Kind(lambda facts: (facts.count(),), lambda speech, value: speech.number(int(value[0]))),
    "ordinal": Kind(
        lambda facts: (facts.rng.randrange(2, 61),), lambda speech, value: speech.ordinal(int(value[0]))
    ),
    "sum": Kind(
        _draw_sum,
        lambda speech, value: (
            f"{speech.number(int(value[0]))} + {speech.number(int(value[1]))}"
            f" = {speech.number(int(value[0]) + int(value[1]))}"
        ),
    ),
    "money": Kind(
        lambda facts: (facts.amount(), facts.name("currency")),
        lambda speech, value: speech.money(int(value[0]), str(value[1])),
    ),
    "money_in_words": Kind(
        lambda facts: (facts.count(), facts.name("currency")),
        lambda speech, value: speech.money_in_words(int(value[0]), str(value[1])),
    ),
}


Pair = tuple[str, str]
SIZES = {"train": 20000, "valid": 500, "test": 500}
TEMPLATES = Path(__file__).with_name("templates.yaml")
# Repeated sentences in a row after which there are considered to be no new ones.
MAXIMUM_REPEATS = 2000


class CorpusError(UserError):
    """A corpus that cannot be generated."""


@dataclass(frozen=True)
class Template:
    """A sentence with slots in several languages.

    Attributes:
        slots: name of the slot -> kind of fact.
        texts: language -> sentence with ``{slot}`` for each slot.
    """

    slots: dict[str, str]
    texts: dict[str, str]


def read_templates(path: Path = TEMPLATES) -> list[Template]:
    """Read the templates; raises `CorpusError` for wrong slots or kinds."""
    templates = []
    for entry in read_yaml(path, "templates"):
        template = Template(entry.pop("slots"), entry)
        unknown = set(template.slots.values()) - KINDS.keys()
        if unknown:
            raise CorpusError(f"{path.name}: unknown kinds {sorted(unknown)} in {template.slots}")
        for language, text in template.texts.items():
            if any(text.count("{" + slot + "}") != 1 for slot in template.slots):
                raise CorpusError(
                    f"{path.name}: the {language} sentence {text!r} must contain each slot once"
                )
        templates.append(template)
    return templates


def generate(source: str, target: str, seed: int) -> Iterator[Pair]:
    """Yield an infinite stream of sentence pairs, with repetitions.

    Raises:
        LanguageError: Babel or num2words does not support a language.
        CorpusError: the two languages are the same.
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
    """Return a list of two to four facts.

    Amounts in words are excluded because numerals agree with nouns in many languages.
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
    """Return the splits of a corpus as lists of (source, target) sentences.

    Args:
        source: source language.
        target: target language.
        sizes: split -> number of pairs.
        seed: random seed.

    Raises:
        LanguageError, CorpusError: see `generate`, or there are too few distinct sentences.
    """
    if any(size < 1 for size in sizes.values()):
        raise CorpusError(f"sizes {sizes}: every split needs at least one sentence pair")
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
    # Templates with few sentences are rare among the last pairs.
    random.Random(seed).shuffle(pairs)
    parts, start = {}, 0
    for part, size in sizes.items():
        parts[part] = pairs[start : start + size]
        start += size
    return parts


def write_corpus(parts: dict[str, list[Pair]], folder: Path, source: str, target: str) -> None:
    """Write ``SPLIT.LANGUAGE`` for every split and both languages to a folder."""
    for part, pairs in parts.items():
        for index, language in enumerate((source, target)):
            write_lines(folder / f"{part}.{language}", [pair[index] for pair in pairs])


def checksum(parts: dict[str, list[Pair]]) -> str:
    """Return the SHA-256 of all sentences in order."""
    digest = hashlib.sha256()
    for part, pairs in parts.items():
        digest.update(f"{part}\n".encode())
        for source, target in pairs:
            digest.update(f"{source}\t{target}\n".encode())
    return digest.hexdigest()


def main(arguments: Sequence[str]) -> None:
    """Generate a parallel corpus without downloads."""
    parser = Parser("python -m recipes.quickstart.corpus", description=main.__doc__)
    parser.add_argument(
        "--source", default="en", help="CLDR name of the source language (default: %(default)s)"
    )
    parser.add_argument(
        "--target", default="de", help="CLDR name of the target language (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="random seed (default: %(default)s)")
    for part, size in SIZES.items():
        parser.add_argument(
            f"--{part}", type=int, default=size, help=f"pairs in {part} (default: %(default)s)"
        )
    parser.add_argument("--output", type=PathOption.FOLDER, required=True, help="output folder")
    parser.add_argument("--force", action="store_true", help="overwrite existing files")
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
