"""A synthetic parallel corpus: dates, numbers, names and measures in running sentences.

Facts are said in any language that Unicode CLDR (Babel) and num2words cover. Sentences come from templates
where both languages have them (``templates.yaml``); other pairs of languages get lists of facts. The same
seed gives the same files. No source and no target sentence occurs twice, so that the parts are disjoint.

    python -m recipes.quickstart.corpus --source en --target de --output DIR
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import random
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import num2words
from babel import Locale, UnknownLocaleError, dates, lists, localedata, numbers, units
from sacremoses import MosesTokenizer

from recipes.common.tools import run_main
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_lines
from shared_embeddings.utils.path_options import PathOption, check_paths
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


class LanguageError(UserError):
    """A language that Babel or num2words does not support."""


def clean(text: str) -> str:
    """Normalize spaces, apostrophes and Unicode (NFC), and remove direction marks.

    CLDR contains no-break and narrow spaces and invisible marks, which would become parts of words.
    """
    text = _DIRECTION_MARKS.sub("", unicodedata.normalize("NFC", text)).replace("\u2019", "'")
    return _SPACES.sub(" ", text).strip()


class Speech:
    """Expresses facts in one language, with a CLDR name such as ``de`` or ``pt-BR``, as cleaned text."""

    def __init__(self, language: str) -> None:
        def error(reason: str) -> LanguageError:
            covered = ", ".join(covered_languages())
            return LanguageError(f"language {language!r}: {reason}; supported languages: {covered}")

        self.language = language.replace("-", "_")
        try:
            self.locale = Locale.parse(self.language)
        except (UnknownLocaleError, ValueError, TypeError):
            raise error("Unicode CLDR (Babel) does not support it") from None
        # num2words' most specific code of the language.
        short = self.language.split("_")[0]
        codes = (self.language, NUM2WORDS_NAMES.get(short, short))
        words = next((code for code in codes if code in num2words.CONVERTER_CLASSES), None)
        if words is None:
            raise error("num2words does not support it")
        self._words: str = words
        self._names: dict[str, dict[str, str]] = {}
        if thin := _thin_names(self.locale):
            raise error(f"Unicode CLDR has too few names ({thin})")

    @functools.cached_property
    def has_ordinals(self) -> bool:
        """Whether num2words has the ordinals of this language up to 60."""
        try:
            return all(self.ordinal(number) for number in range(2, 61))
        except (NotImplementedError, KeyError, IndexError, ValueError):
            return False

    def has_unit(self, unit: str) -> bool:
        """Return whether the language has a name for a CLDR unit; otherwise Babel returns its code."""
        return unit not in self.measure(2, unit)

    def names(self, kind: str) -> dict[str, str]:
        """Return the names of all ``territories``, ``languages``, ``currencies`` or ``scripts`` by code."""
        if kind not in self._names:
            things = getattr(self.locale, kind).items()
            self._names[kind] = {
                code: clean(name) for code, name in things if name and code not in SPECIAL_CODES
            }
        return self._names[kind]

    def number(self, value: int) -> str:
        return _in_words(self._words, "cardinal", value)

    def ordinal(self, value: int) -> str:
        return _in_words(self._words, "ordinal", value)

    def money(self, value: int, currency: str) -> str:
        return clean(
            numbers.format_currency(
                value, currency, locale=self.locale, format="#,##0", format_type="name", currency_digits=False
            )
        )

    def money_in_words(self, value: int, currency: str) -> str:
        name = numbers.get_currency_name(currency, count=value, locale=self.locale)
        return clean(f"{self.number(value)} {name}")

    def measure(self, value: int, unit: str) -> str:
        """Return a value with the name of a CLDR unit such as ``length-kilometer``."""
        return clean(units.format_unit(value, unit, length="long", locale=self.locale))

    def relative(self, value: int, unit: RelativeUnit, *, past: bool) -> str:
        """Return a relative time, ``in 3 weeks`` or ``3 weeks ago``; ``unit`` is one of `SECONDS`."""
        delta = datetime.timedelta(seconds=(-value if past else value) * SECONDS[unit])
        how: Any = {"granularity": unit, "threshold": 1000, "add_direction": True}
        return clean(dates.format_timedelta(delta, **how, locale=self.locale))

    def date(self, value: datetime.date, style: str = "long") -> str:
        """Return a date in one of CLDR's lengths (``full`` has the weekday) or a skeleton (``MMMMd``)."""
        if style in ("full", "long", "medium", "short"):
            return clean(dates.format_date(value, format=style, locale=self.locale))
        return clean(dates.format_skeleton(style, value, locale=self.locale))

    def weekday(self, value: int) -> str:
        """Return the name of a day of the week; 0 is Monday."""
        return clean(dates.get_day_names("wide", locale=self.locale)[value])

    def month(self, value: int) -> str:
        return clean(dates.get_month_names("wide", locale=self.locale)[value])

    def time(self, hour: int, minute: int) -> str:
        return clean(dates.format_time(datetime.time(hour, minute), format="short", locale=self.locale))

    def listing(self, parts: list[str]) -> str:
        return clean(lists.format_list(parts, locale=self.locale))


@functools.cache
def _in_words(language: str, to: str, value: int) -> str:
    return clean(num2words.num2words(value, lang=language, to=to))


def _thin_names(locale: Locale) -> str:
    """Describe kinds of names of which a locale has too few; empty if there are none."""
    counts = {kind: len(getattr(locale, kind)) for kind in MINIMUM_NAMES}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count < MINIMUM_NAMES[kind])


@functools.cache
def covered_languages() -> tuple[str, ...]:
    """Return the languages that both libraries support, sorted."""
    unicode_names = {name: short for short, name in NUM2WORDS_NAMES.items()}
    candidates = {unicode_names.get(name, name) for name in num2words.CONVERTER_CLASSES}
    return tuple(
        name for name in sorted(candidates) if localedata.exists(name) and not _thin_names(Locale.parse(name))
    )


# Prefix of words without a space before them, as in pyonmttok.
JOINER = "\uffed"
# Scripts without spaces between words: Thai, Lao, Myanmar, Khmer, kana, bopomofo and Chinese characters;
# combining signs stay with their base character.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u312f\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff"
)
_SIGNS = (
    "\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ecd\u102b-\u103e\u17b4-\u17d3\u3099\u309a"
)
_CHARACTER = re.compile(f"([{_UNSPACED}][{_SIGNS}]*)")


class Tokenizer:
    """Tokenizer of one language with ``join(split(text)) == text`` for cleaned text.

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

    @staticmethod
    def join(words: list[str]) -> str:
        return " ".join(words).replace(f" {JOINER}", "").removeprefix(JOINER)


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


class Facts:
    """Samples facts that both languages can express; the seed determines the order of names.

    Names follow a flattened Zipf's law with weights ``1 / (rank + 15)``.
    """

    def __init__(self, source: Speech, target: Speech, seed: int, rng: random.Random) -> None:
        self.rng = rng
        self._names, self._units, self._weights = {}, {}, {}
        for kind, plural in NAME_KINDS.items():
            codes = sorted(source.names(plural).keys() & target.names(plural).keys())
            random.Random(f"{seed} {kind}").shuffle(codes)
            self._names[kind] = codes
            self._weights[kind] = [1 / (rank + 15) for rank in range(len(codes))]
        for kind, listed in UNITS.items():
            names = (f"{'digital' if kind == 'data' else kind}-{unit}" for unit in listed.split())
            self._units[kind] = [unit for unit in names if source.has_unit(unit) and target.has_unit(unit)]
        missing = {kind for kind, found in (self._units | self._names).items() if not found}
        if not (source.has_ordinals and target.has_ordinals):
            missing.add("ordinal")
        self.kinds = tuple(kind for kind in KINDS if kind not in missing)

    def draw(self, kind: str) -> Value:
        return KINDS[kind].draw(self)

    def name(self, kind: str) -> str:
        return self.rng.choices(self._names[kind], self._weights[kind])[0]

    def unit(self, kind: str) -> str:
        return self.rng.choice(self._units[kind])

    def count(self) -> int:
        """Sample a number that can precede a noun."""
        return self.rng.choice(COUNTS)

    def amount(self) -> int:
        return self.rng.choice(COUNTS if self.rng.random() < 0.6 else ROUND_COUNTS)

    def day(self) -> tuple[int, int, int]:
        """Sample a date from 1990 to 2029 as year, month and day."""
        day = datetime.date(1990, 1, 1) + datetime.timedelta(days=self.rng.randrange(40 * 365))
        return day.year, day.month, day.day

    def territories(self) -> Value:
        wanted = self.rng.choice((2, 3))
        drawn: dict[str, None] = {}
        while len(drawn) < wanted:
            drawn[self.name("territory")] = None
        return tuple(drawn)


class Kind(NamedTuple):
    """How a kind of fact is sampled, and said."""

    draw: Callable[[Facts], Value]
    say: Callable[[Speech, Value], str]


def say(speech: Speech, kind: str, value: Value) -> str:
    """Express a fact of a `kind` in a language."""
    return KINDS[kind].say(speech, value)


def _name_kind(kind: str) -> Kind:
    plural = NAME_KINDS[kind]
    return Kind(lambda facts: (facts.name(kind),), lambda speech, value: speech.names(plural)[value[0]])


def _measure_kind(kind: str) -> Kind:
    return Kind(
        lambda facts: (facts.amount(), facts.unit(kind)), lambda speech, value: speech.measure(*value)
    )


def _relative_kind(past: bool) -> Kind:
    return Kind(
        lambda facts: (facts.rng.randrange(2, 21), facts.rng.choice(tuple(SECONDS))),
        lambda speech, value: speech.relative(*value, past=past),
    )


def _date_kind(style: str) -> Kind:
    return Kind(Facts.day, lambda speech, value: speech.date(datetime.date(*value), style))


KINDS: dict[str, Kind] = {
    **{kind: _name_kind(kind) for kind in NAME_KINDS},
    **{kind: _measure_kind(kind) for kind in UNITS},
    "ago": _relative_kind(past=True),
    "ahead": _relative_kind(past=False),
    "full_date": _date_kind("full"),
    "long_date": _date_kind("long"),
    "day_of_year": _date_kind("MMMMd"),
    "territories": Kind(
        Facts.territories,
        lambda speech, value: speech.listing([speech.names("territories")[code] for code in value]),
    ),
    "weekday": Kind(lambda facts: (facts.rng.randrange(7),), lambda speech, value: speech.weekday(*value)),
    "month": Kind(lambda facts: (facts.rng.randrange(1, 13),), lambda speech, value: speech.month(*value)),
    # Not 1 o'clock: "a la 1:00" and "a las 2:00" differ in Spanish.
    "time": Kind(
        lambda facts: (facts.rng.randrange(2, 24), facts.rng.randrange(0, 60, 5)),
        lambda speech, value: speech.time(*value),
    ),
    "number": Kind(lambda facts: (facts.count(),), lambda speech, value: speech.number(*value)),
    "ordinal": Kind(
        lambda facts: (facts.rng.randrange(2, 61),), lambda speech, value: speech.ordinal(*value)
    ),
    "sum": Kind(
        lambda facts: (facts.rng.randrange(2, 100), facts.rng.randrange(2, 100)),
        lambda speech, value: " = ".join([" + ".join(map(speech.number, value)), speech.number(sum(value))]),
    ),
    "money": Kind(
        lambda facts: (facts.amount(), facts.name("currency")), lambda speech, value: speech.money(*value)
    ),
    "money_in_words": Kind(
        lambda facts: (facts.count(), facts.name("currency")),
        lambda speech, value: speech.money_in_words(*value),
    ),
}


Pair = tuple[str, str]
SIZES = {"train": 20000, "valid": 500, "test": 500}
TEMPLATES = Path(__file__).with_name("templates.yaml")
# Repeated sentences in a row after which there are considered to be no new ones.
MAXIMUM_REPEATS = 2000


class CorpusError(UserError):
    """A corpus that cannot be generated."""


class Template(NamedTuple):
    """A sentence: the kind of fact of each slot, and a text with every ``{slot}`` by language."""

    slots: dict[str, str]
    texts: dict[str, str]


def read_templates(path: Path = TEMPLATES) -> list[Template]:
    """Read the templates."""
    templates = []
    for entry in read_yaml(path, "templates"):
        template = Template(entry.pop("slots"), entry)
        if unknown := set(template.slots.values()) - KINDS.keys():
            raise CorpusError(f"{path.name}: unknown kinds {sorted(unknown)} in {template.slots}")
        for language, text in template.texts.items():
            if any(text.count("{" + slot + "}") != 1 for slot in template.slots):
                raise CorpusError(
                    f"{path.name}: the {language} sentence {text!r} must contain each slot once"
                )
        templates.append(template)
    return templates


def generate(source: str, target: str, seed: int) -> Iterator[Pair]:
    """Yield an infinite stream of sentence pairs, with repetitions."""
    if source == target:
        raise CorpusError(f"source and target are both {source!r}: choose two languages")
    speakers = Speech(source), Speech(target)
    facts = Facts(*speakers, seed, random.Random(f"{seed} {source} {target}"))
    short = [speaker.language.split("_")[0] for speaker in speakers]
    templates = [
        template
        for template in read_templates()
        if set(short) <= template.texts.keys() and set(facts.kinds).issuperset(template.slots.values())
    ]
    # Numerals agree with nouns in many languages, so that lists have no amounts in words.
    kinds = [kind for kind in facts.kinds if kind != "money_in_words"]
    while True:
        if templates:
            template = facts.rng.choice(templates)
            drawn = {slot: (kind, facts.draw(kind)) for slot, kind in template.slots.items()}
            first, second = (
                template.texts[name].format_map({slot: say(speech, *fact) for slot, fact in drawn.items()})
                for speech, name in zip(speakers, short, strict=True)
            )
        else:
            listed = [(kind, facts.draw(kind)) for kind in facts.rng.sample(kinds, facts.rng.randrange(2, 5))]
            first, second = (speech.listing([say(speech, *fact) for fact in listed]) for speech in speakers)
        yield first, second


def make_corpus(source: str, target: str, sizes: dict[str, int], seed: int = 1) -> dict[str, list[Pair]]:
    """Return the splits of a corpus as lists of as many (source, target) sentences as `sizes` says."""
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
