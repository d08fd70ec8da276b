"""Languages that Unicode CLDR (Babel) and num2words cover: facts as text, and a tokenizer."""

from __future__ import annotations

import datetime
import functools
import re
import unicodedata
from typing import Literal

import num2words
from babel import Locale, UnknownLocaleError, dates, lists, localedata, numbers, units
from sacremoses import MosesTokenizer

from shared_embeddings.errors import UserError

# num2words names these languages by codes that Unicode does not use.
NUM2WORDS_NAMES = {"kk": "kz", "nb": "no"}
# A language counts as covered from these many names on; a handful of thin locales has nearly none.
MINIMUM_NAMES = {"territories": 150, "languages": 100, "currencies": 60}
# Codes that stand for "none", "unknown", tests or display tricks rather than for a thing with a name.
NOT_A_THING = {"XXX", "XTS", "ZZ", "XA", "XB", "und", "zxx", "mis", "mul", "Zxxx", "Zyyy", "Zzzz", "Zinh"}

RelativeUnit = Literal["minute", "hour", "day", "week", "month", "year"]
SECONDS: dict[RelativeUnit, int] = {
    "minute": 60,
    "hour": 3600,
    "day": 86400,
    "week": 7 * 86400,
    "month": 30 * 86400,
    "year": 365 * 86400,
}

_SPACES = re.compile(r"\s+")
_DIRECTION_MARKS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


class LanguageError(UserError):
    """A language that the two libraries do not cover together."""


def clean(text: str) -> str:
    """``text`` with single plain spaces, straight apostrophes, no direction marks, in normal form C.

    CLDR writes no-break and narrow spaces and invisible direction marks, which a word-level model would take
    for parts of words.
    """
    text = _DIRECTION_MARKS.sub("", unicodedata.normalize("NFC", text)).replace("\u2019", "'")
    return _SPACES.sub(" ", text).strip()


class Speech:
    """How one language expresses the facts that the corpus is made of.

    Every method takes plain values and returns cleaned text. ``language`` is a CLDR name: ``de``, ``pt-BR``.

    Raises:
        LanguageError: when Babel or num2words does not cover the language.
    """

    def __init__(self, language: str) -> None:
        self.language = language.replace("-", "_")
        self.locale = _locale(language)
        words = _num2words_name(self.language)
        if words is None:
            raise LanguageError(
                f"language {language!r}: num2words has no numbers in words for it; {_covered_hint()}"
            )
        self._words = words
        self._names: dict[str, dict[str, str]] = {}
        thin = _thin_names(self.locale)
        if thin:
            raise LanguageError(
                f"language {language!r}: Unicode CLDR has too few names ({thin}); {_covered_hint()}"
            )

    @functools.cached_property
    def has_ordinals(self) -> bool:
        """Whether num2words knows the ordinals of this language, up to 60."""
        try:
            return all(self.ordinal(number) for number in range(2, 61))
        except (NotImplementedError, KeyError, IndexError, ValueError):
            return False

    def has_unit(self, unit: str) -> bool:
        """Whether the language has a name for a CLDR unit; without one, Babel gives the code of the unit."""
        return unit not in self.measure(2, unit)

    def names(self, kind: str) -> dict[str, str]:
        """The names of all ``territories``, ``languages``, ``currencies`` or ``scripts``, by their codes."""
        if kind not in self._names:
            things = getattr(self.locale, kind).items()
            self._names[kind] = {
                code: clean(name) for code, name in things if name and code not in NOT_A_THING
            }
        return self._names[kind]

    def number(self, value: int) -> str:
        """A whole number in words."""
        return _in_words(self._words, "cardinal", value)

    def ordinal(self, value: int) -> str:
        """An ordinal number in words."""
        return _in_words(self._words, "ordinal", value)

    def digits(self, value: int) -> str:
        """A whole number in digits."""
        return clean(numbers.format_decimal(value, locale=self.locale))

    def money(self, value: int, currency: str) -> str:
        """An amount in digits with the name of the currency in the right number."""
        return clean(
            numbers.format_currency(
                value, currency, locale=self.locale, format="#,##0", format_type="name", currency_digits=False
            )
        )

    def money_in_words(self, value: int, currency: str) -> str:
        """An amount in words with the name of the currency in the right number."""
        name = numbers.get_currency_name(currency, count=value, locale=self.locale)
        return clean(f"{self.number(value)} {name}")

    def measure(self, value: int, unit: str) -> str:
        """A value with a CLDR unit such as ``length-kilometer``, spelt out."""
        return clean(units.format_unit(value, unit, length="long", locale=self.locale))

    def relative(self, value: int, unit: RelativeUnit, *, past: bool) -> str:
        """A time from now, ``in 3 weeks`` or ``3 weeks ago``; ``unit`` is one of `SECONDS`."""
        delta = datetime.timedelta(seconds=value * SECONDS[unit])
        return clean(
            dates.format_timedelta(
                -delta if past else delta,
                granularity=unit,
                threshold=1000,
                add_direction=True,
                locale=self.locale,
            )
        )

    def date(self, value: datetime.date, style: str = "long") -> str:
        """A date.

        Args:
            value: the day.
            style: one of CLDR's lengths (``full`` has the day of the week) or a skeleton like ``MMMMd``.
        """
        if style in ("full", "long", "medium", "short"):
            return clean(dates.format_date(value, format=style, locale=self.locale))
        return clean(dates.format_skeleton(style, value, locale=self.locale))

    def weekday(self, value: int) -> str:
        """The name of a day of the week, 0 is Monday."""
        return clean(dates.get_day_names("wide", locale=self.locale)[value])

    def month(self, value: int) -> str:
        """The name of a month, 1 to 12, as it stands in running text."""
        return clean(dates.get_month_names("wide", locale=self.locale)[value])

    def time(self, hour: int, minute: int) -> str:
        """A time of day."""
        return clean(dates.format_time(datetime.time(hour, minute), format="short", locale=self.locale))

    def listing(self, parts: list[str]) -> str:
        """``parts`` joined as the language joins a list: ``A, B and C``."""
        return clean(lists.format_list(parts, locale=self.locale))


@functools.cache
def _in_words(language: str, to: str, value: int) -> str:
    return clean(num2words.num2words(value, lang=language, to=to))


def _locale(language: str) -> Locale:
    try:
        return Locale.parse(language.replace("-", "_"))
    except (UnknownLocaleError, ValueError, TypeError):
        raise LanguageError(
            f"language {language!r}: Unicode CLDR (Babel) does not know it; {_covered_hint()}"
        ) from None


def _num2words_name(language: str) -> str | None:
    """The name by which num2words knows a language: the most specific that it has."""
    short = language.split("_")[0]
    for name in (language, NUM2WORDS_NAMES.get(short, short)):
        if name in num2words.CONVERTER_CLASSES:
            return name
    return None


def _thin_names(locale: Locale) -> str:
    """The kinds of names of which a locale has too few, as text; empty when it has enough of all."""
    counts = {kind: len(getattr(locale, kind)) for kind in MINIMUM_NAMES}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count < MINIMUM_NAMES[kind])


@functools.cache
def covered_languages() -> tuple[str, ...]:
    """The languages that both libraries cover, sorted."""
    unicode_names = {name: short for short, name in NUM2WORDS_NAMES.items()}
    candidates = {unicode_names.get(name, name) for name in num2words.CONVERTER_CLASSES}
    return tuple(
        name for name in sorted(candidates) if localedata.exists(name) and not _thin_names(Locale.parse(name))
    )


def _covered_hint() -> str:
    return "covered by both: " + ", ".join(covered_languages())


# In front of a word that follows the previous one without a space, as pyonmttok writes it.
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
    """Splits sentences of one language into words, and joins words: ``join(split(text)) == text``, if clean.

    sacremoses decides where to split. Where it parts what the text does not, the second word begins with
    `JOINER`, so that no rules have to guess the spaces back.
    """

    def __init__(self, language: str) -> None:
        self._moses = MosesTokenizer(lang=language.replace("-", "_").split("_")[0])

    def split(self, text: str) -> list[str]:
        """The words of a sentence with single spaces; none is empty or contains white space."""
        words: list[str] = []
        position = 0
        for word in self._pieces(text):
            spaced = text.startswith(" ", position)
            position += spaced
            if not text.startswith(word, position):
                # sacremoses rewrites a few sequences; such a sentence is split at its spaces alone.
                return text.split()
            words.append(word if spaced or position == 0 else JOINER + word)
            position += len(word)
        return words

    def _pieces(self, text: str) -> list[str]:
        moses = self._moses.tokenize(text, escape=False)
        return [piece for word in moses for piece in _CHARACTER.split(word) if piece]

    @staticmethod
    def join(words: list[str]) -> str:
        """The sentence that the words make."""
        return " ".join(words).replace(f" {JOINER}", "").removeprefix(JOINER)
