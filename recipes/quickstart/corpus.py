"""A synthetic parallel corpus: dates, numbers, names and measures in running sentences.

Facts are said in any language that Unicode CLDR (Babel) and num2words cover. Sentences come from templates
where both languages have them (``templates.yaml``); other pairs of languages get lists of facts. The same
seed gives the same files. No source and no target sentence occurs twice, so that the parts are disjoint.

    python -m recipes.quickstart.corpus --source en --target de --output DIR
"""

from __future__ import annotations

import datetime
import functools
import random
import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import num2words
from babel import Locale, UnknownLocaleError, dates, lists, localedata, numbers, units
from sacremoses import MosesTokenizer

from recipes.common.tools import run_main
from recipes.translation.subwords import JOINER
from shared_embeddings.utils.command_line import Parser, positive
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_lines
from shared_embeddings.utils.paths import check_outputs, output_path
from shared_embeddings.utils.reading import read_yaml

# num2words uses other codes for these languages than Unicode.
NUM2WORDS_NAMES = {"kk": "kz", "nb": "no"}
# Minimum numbers of names of a supported language.
MINIMUM_NAMES = {"territories": 150, "languages": 100, "currencies": 60}
# Codes for "none", "unknown", tests and the like.
SPECIAL_CODES = {"XXX", "XTS", "ZZ", "XA", "XB", "und", "zxx", "mis", "mul", "Zxxx", "Zyyy", "Zzzz", "Zinh"}

RelativeUnit = Literal["minute", "hour", "day", "week", "month", "year"]
SECONDS: dict[RelativeUnit, int] = {
    **{"minute": 60, "hour": 3600, "day": 86400},
    **{"week": 7 * 86400, "month": 30 * 86400, "year": 365 * 86400},
}

_SPACES = re.compile(r"\s+")
_DIRECTION_MARKS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


def clean(text: str) -> str:
    """Normalize spaces, apostrophes and Unicode (NFC), and remove direction marks.

    CLDR contains no-break and narrow spaces and invisible marks, which would become parts of words.
    """
    text = _DIRECTION_MARKS.sub("", unicodedata.normalize("NFC", text)).replace("\u2019", "'")
    return _SPACES.sub(" ", text).strip()


class Speech:
    """Expresses facts in one language, with a CLDR name such as ``de`` or ``pt-BR``."""

    def __init__(self, language: str) -> None:
        self.language = language.replace("-", "_")
        self.short = self.language.split("_")[0]
        # num2words' most specific code of the language.
        codes = (self.language, NUM2WORDS_NAMES.get(self.short, self.short))
        try:
            self.locale = Locale.parse(self.language)
            self.num2words = next(code for code in codes if code in num2words.CONVERTER_CLASSES)
            is_covered = not has_few_names(self.locale)
        except (UnknownLocaleError, ValueError, TypeError, StopIteration):
            is_covered = False
        if not is_covered:
            raise UserError(
                f"language {language!r}: Unicode CLDR (Babel) or num2words does not support it; supported "
                f"languages: {', '.join(covered_languages())}"
            )

    def listing(self, parts: list[str]) -> str:
        """Return a list as a text, as in "Ireland, Norway, and Turkmenistan"."""
        return clean(lists.format_list(parts, locale=self.locale))


@functools.cache
def names_of(speech: Speech, kind: str) -> dict[str, str]:
    """Return the names of all ``territories``, ``languages``, ``currencies`` or ``scripts`` by code."""
    things = getattr(speech.locale, kind).items()
    return {code: clean(name) for code, name in things if name and code not in SPECIAL_CODES}


@functools.cache
def in_words(speech: Speech, value: int, to: str = "cardinal") -> str:
    """Return a number in words."""
    return clean(num2words.num2words(value, lang=speech.num2words, to=to))


def has_few_names(locale: Locale) -> bool:
    """Return whether a locale has too few names of some kind."""
    return any(len(getattr(locale, kind)) < least for kind, least in MINIMUM_NAMES.items())


@functools.cache
def covered_languages() -> tuple[str, ...]:
    """Return the languages that both libraries support, sorted."""
    unicode_names = {name: short for short, name in NUM2WORDS_NAMES.items()}
    candidates = {unicode_names.get(name, name) for name in num2words.CONVERTER_CLASSES}
    return tuple(
        name
        for name in sorted(candidates)
        if localedata.exists(name) and not has_few_names(Locale.parse(name))
    )


# Scripts without spaces between words: Thai, Lao, Myanmar, Khmer, kana, bopomofo and Chinese characters;
# combining signs stay with their base character.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u312f\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff"
)
_SIGNS = (
    "\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ecd\u102b-\u103e\u17b4-\u17d3\u3099\u309a"
)
_CHARACTER = re.compile(f"([{_UNSPACED}][{_SIGNS}]*)")


class WordTokenizer:
    """Tokenizer of one language; `joiner` restores cleaned text from the words that it splits.

    It splits as sacremoses does. Words without a space before them start with `JOINER`.
    """

    def __init__(self, language: str) -> None:
        self._moses = MosesTokenizer(lang=language.replace("-", "_").split("_")[0])

    def split(self, text: str) -> list[str]:
        """Split a sentence with single spaces into words without whitespace."""
        words: list[str] = []
        position = 0
        tokens = self._moses.tokenize(text, escape=False)
        for word in (piece for token in tokens for piece in _CHARACTER.split(token) if piece):
            spaced = text.startswith(" ", position)
            position += spaced
            if not text.startswith(word, position):
                # sacremoses has rewritten a sequence: split at spaces only.
                return text.split()
            words.append(word if spaced or position == 0 else JOINER + word)
            position += len(word)
        return words


# Numbers and codes.
Value = tuple[Any, ...]

NAME_KINDS = {
    **{"territory": "territories", "language": "languages"},
    **{"currency": "currencies", "script": "scripts"},
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
# frequent: a compound number is one word in German.
COUNTS = tuple(number for number in range(2, 200) if number % 10 != 1)
ROUND_COUNTS = (*range(200, 1000, 50), *range(1000, 10000, 500))


# CLDR's length of dates (``full`` has the weekday) or a skeleton.
DATES = {"full_date": "full", "long_date": "long", "day_of_year": "MMMMd"}
KINDS = (
    *(*NAME_KINDS, *UNITS, "ago", "ahead", *DATES, "territories", "weekday", "month", "time"),
    *("number", "ordinal", "sum", "money", "money_in_words"),
)


class Facts:
    """Samples facts that both languages can express; the seed determines the order of names.

    Names follow a flattened Zipf's law with weights ``1 / (rank + 15)``.
    """

    def __init__(self, source: Speech, target: Speech, seed: int, rng: random.Random) -> None:
        self.rng = rng
        self._names: dict[str, list[str]] = {}
        self._units: dict[str, list[str]] = {}
        for kind, plural in NAME_KINDS.items():
            codes = sorted(names_of(source, plural).keys() & names_of(target, plural).keys())
            random.Random(f"{seed} {kind}").shuffle(codes)
            self._names[kind] = codes
        for kind, listed in UNITS.items():
            names = [f"{'digital' if kind == 'data' else kind}-{unit}" for unit in listed.split()]
            # Babel returns the code of a unit without a name.
            self._units[kind] = [
                unit
                for unit in names
                if all(unit not in say(speech, kind, (2, unit)) for speech in (source, target))
            ]
        missing = {kind for kind, values in (self._units | self._names).items() if not values}
        try:
            for number in range(2, 61):
                in_words(source, number, "ordinal")
                in_words(target, number, "ordinal")
        except (NotImplementedError, KeyError, IndexError, ValueError):  # not in num2words
            missing.add("ordinal")
        self.kinds = tuple(kind for kind in KINDS if kind not in missing)

    def draw(self, kind: str) -> Value:
        """Sample a fact of a `kind`."""
        rng = self.rng
        if kind in NAME_KINDS:
            weights = [1 / (rank + 15) for rank in range(len(self._names[kind]))]
            return (rng.choices(self._names[kind], weights)[0],)
        if kind in UNITS or kind == "money":
            amount = rng.choice(COUNTS if rng.random() < 0.6 else ROUND_COUNTS)
            return (amount, *(self.draw("currency") if kind == "money" else [rng.choice(self._units[kind])]))
        if kind == "money_in_words":
            return (rng.choice(COUNTS), *self.draw("currency"))
        if kind in ("ago", "ahead"):
            return rng.randrange(2, 21), rng.choice(tuple(SECONDS))
        if kind in DATES:
            day = datetime.date(1990, 1, 1) + datetime.timedelta(days=rng.randrange(40 * 365))
            return day.year, day.month, day.day
        if kind == "territories":
            wanted = rng.choice((2, 3))
            codes: dict[str, None] = {}
            while len(codes) < wanted:
                codes[self.draw("territory")[0]] = None
            return tuple(codes)
        if kind == "time":
            # Not 1 o'clock: "a la 1:00" and "a las 2:00" differ in Spanish.
            return rng.randrange(2, 24), rng.randrange(0, 60, 5)
        if kind == "sum":
            return rng.randrange(2, 100), rng.randrange(2, 100)
        ranges = {"weekday": range(7), "month": range(1, 13), "ordinal": range(2, 61), "number": COUNTS}
        return (rng.choice(ranges[kind]),)


def say(speech: Speech, kind: str, value: Value) -> str:
    """Express a fact of a `kind` in a language, as cleaned text."""
    locale: Any = {"locale": speech.locale}
    first, *rest = value
    if kind in NAME_KINDS:
        text = names_of(speech, NAME_KINDS[kind])[first]
    elif kind in UNITS:
        text = units.format_unit(first, rest[0], length="long", **locale)
    elif kind in ("ago", "ahead"):  # "3 weeks ago" or "in 3 weeks"
        delta = datetime.timedelta(seconds=(-first if kind == "ago" else first) * SECONDS[rest[0]])
        how: Any = {"granularity": rest[0], "threshold": 1000, "add_direction": True}
        text = dates.format_timedelta(delta, **how, **locale)
    elif kind == "day_of_year":
        text = dates.format_skeleton(DATES[kind], datetime.date(*value), **locale)
    elif kind in DATES:
        text = dates.format_date(datetime.date(*value), DATES[kind], **locale)
    elif kind == "territories":
        text = speech.listing([names_of(speech, "territories")[code] for code in value])
    elif kind == "weekday":
        text = dates.get_day_names("wide", **locale)[first]
    elif kind == "month":
        text = dates.get_month_names("wide", **locale)[first]
    elif kind == "time":
        text = dates.format_time(datetime.time(*value), format="short", **locale)
    elif kind == "sum":
        summands = " + ".join(in_words(speech, number) for number in value)
        text = f"{summands} = {in_words(speech, sum(value))}"
    elif kind == "money":
        form: Any = {"format": "#,##0", "format_type": "name", "currency_digits": False}
        text = numbers.format_currency(first, rest[0], **form, **locale)
    elif kind == "money_in_words":
        currency = numbers.get_currency_name(rest[0], count=first, **locale)
        text = f"{in_words(speech, first)} {currency}"
    else:
        text = in_words(speech, first, "ordinal" if kind == "ordinal" else "cardinal")
    return clean(text)


Pair = tuple[str, str]
SIZES = {"train": 20000, "valid": 500, "test": 500}
TEMPLATES = Path(__file__).with_name("templates.yaml")


class Template(NamedTuple):
    """A sentence: the kind of fact of each slot, and a text with every ``{slot}`` by language."""

    slots: dict[str, str]
    texts: dict[str, str]


def read_templates(path: Path = TEMPLATES) -> list[Template]:
    """Read the templates."""
    return [Template(entry.pop("slots"), entry) for entry in read_yaml(path)]


def generate(source: str, target: str, seed: int) -> Iterator[Pair]:
    """Yield an infinite stream of sentence pairs, with repetitions."""
    if source == target:
        raise UserError(f"source and target are both {source!r}: choose two languages")
    speakers = Speech(source), Speech(target)
    facts = Facts(*speakers, seed, random.Random(f"{seed} {source} {target}"))
    templates = [
        template
        for template in read_templates()
        if {speech.short for speech in speakers} <= template.texts.keys()
        and set(facts.kinds).issuperset(template.slots.values())
    ]
    # Numerals agree with nouns in many languages, so that lists have no amounts in words.
    kinds = [kind for kind in facts.kinds if kind != "money_in_words"]
    while True:
        if templates:
            template = facts.rng.choice(templates)
            drawn = {slot: (kind, facts.draw(kind)) for slot, kind in template.slots.items()}
            first, second = (
                template.texts[speech.short].format_map(
                    {slot: say(speech, *fact) for slot, fact in drawn.items()}
                )
                for speech in speakers
            )
        else:
            chosen = facts.rng.sample(kinds, facts.rng.randrange(2, 5))
            listed = [(kind, facts.draw(kind)) for kind in chosen]
            first, second = (speech.listing([say(speech, *fact) for fact in listed]) for speech in speakers)
        yield first, second


def make_corpus(source: str, target: str, sizes: dict[str, int], seed: int = 1) -> dict[str, list[Pair]]:
    """Return the splits of a corpus as lists of as many (source, target) sentences as `sizes` says."""
    wanted, repeats = sum(sizes.values()), 0
    pairs: list[Pair] = []
    sources, targets = set[str](), set[str]()
    for pair in generate(source, target, seed):
        if pair[0] in sources or pair[1] in targets:
            repeats += 1
            if repeats > 2000:  # there are probably no new ones
                raise UserError(f"{wanted:,} sentence pairs are too many: no new one after {len(pairs):,}")
            continue
        repeats = 0
        pairs.append(pair)
        sources.add(pair[0])
        targets.add(pair[1])
        if len(pairs) == wanted:
            break
    # Templates with few sentences are rare among the last pairs.
    random.Random(seed).shuffle(pairs)
    rest = iter(pairs)
    return {part: list(islice(rest, size)) for part, size in sizes.items()}


def write_corpus(parts: dict[str, list[Pair]], folder: Path, source: str, target: str) -> None:
    """Write ``SPLIT.LANGUAGE`` for every split and both languages to a folder."""
    for part, pairs in parts.items():
        for index, language in enumerate((source, target)):
            write_lines(folder / f"{part}.{language}", [pair[index] for pair in pairs])


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
            f"--{part}", type=positive, default=size, help=f"pairs in {part} (default: %(default)s)"
        )
    parser.add_argument("--output", type=output_path, required=True, help="output folder")
    parser.add_argument("--force", action="store_true", help="overwrite existing files")
    options = parser.parse_args(arguments)
    languages = sorted({options.source, options.target})
    files = [options.output / f"{part}.{language}" for part in SIZES for language in languages]
    check_outputs(files, [], options.force)
    sizes = {part: getattr(options, part) for part in SIZES}
    parts = make_corpus(options.source, options.target, sizes, options.seed)
    write_corpus(parts, options.output, options.source, options.target)
    print(f"{sum(sizes.values()):,} sentence pairs in {options.output}")


if __name__ == "__main__":
    raise SystemExit(run_main("corpus", main))
