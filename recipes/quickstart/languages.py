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

from shared_embeddings.utils.errors import UserError

# num2words uses other codes for these languages than Unicode.
NUM2WORDS_NAMES = {"kk": "kz", "nb": "no"}
# Minimum numbers of names of a supported language.
MINIMUM_NAMES = {"territories": 150, "languages": 100, "currencies": 60}
# Codes for "none", "unknown", tests and the like.
SPECIAL_CODES = {"XXX", "XTS", "ZZ", "XA", "XB", "und", "zxx", "mis", "mul", "Zxxx", "Zyyy", "Zzzz", "Zinh"}

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
    """A language that Babel or num2words does not support."""


def clean(text: str) -> str:
    """Normalize spaces, apostrophes and Unicode (NFC), and remove direction marks.

    CLDR contains no-break and narrow spaces and invisible marks, which would become parts of words.
    """
    text = _DIRECTION_MARKS.sub("", unicodedata.normalize("NFC", text)).replace("\u2019", "'")
    return _SPACES.sub(" ", text).strip()


class Speech:
    """Expresses facts in one language. Methods return cleaned text.

    Args:
        language: CLDR name such as ``de`` or ``pt-BR``.

    Raises:
        LanguageError: Babel or num2words does not support the language.
    """

    def __init__(self, language: str) -> None:
        self.language = language.replace("-", "_")
        self.locale = _locale(language)
        words = _num2words_name(self.language)
        if words is None:
            raise LanguageError(f"language {language!r}: num2words does not support it; {_covered_hint()}")
        self._words = words
        self._names: dict[str, dict[str, str]] = {}
        thin = _thin_names(self.locale)
        if thin:
            raise LanguageError(
                f"language {language!r}: Unicode CLDR has too few names ({thin}); {_covered_hint()}"
            )

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
        """Return an integer in words."""
        return _in_words(self._words, "cardinal", value)

    def ordinal(self, value: int) -> str:
        """Return an ordinal number in words."""
        return _in_words(self._words, "ordinal", value)

    def digits(self, value: int) -> str:
        """Return an integer in digits."""
        return clean(numbers.format_decimal(value, locale=self.locale))

    def money(self, value: int, currency: str) -> str:
        """Return an amount in digits with the inflected name of the currency."""
        return clean(
            numbers.format_currency(
                value, currency, locale=self.locale, format="#,##0", format_type="name", currency_digits=False
            )
        )

    def money_in_words(self, value: int, currency: str) -> str:
        """Return an amount in words with the inflected name of the currency."""
        name = numbers.get_currency_name(currency, count=value, locale=self.locale)
        return clean(f"{self.number(value)} {name}")

    def measure(self, value: int, unit: str) -> str:
        """Return a value with the name of a CLDR unit such as ``length-kilometer``."""
        return clean(units.format_unit(value, unit, length="long", locale=self.locale))

    def relative(self, value: int, unit: RelativeUnit, *, past: bool) -> str:
        """Return a relative time, ``in 3 weeks`` or ``3 weeks ago``; ``unit`` is one of `SECONDS`."""
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
        """Return a date.

        Args:
            value: the day.
            style: one of CLDR's lengths (``full`` includes the day of the week) or a skeleton such as
                ``MMMMd``.
        """
        if style in ("full", "long", "medium", "short"):
            return clean(dates.format_date(value, format=style, locale=self.locale))
        return clean(dates.format_skeleton(style, value, locale=self.locale))

    def weekday(self, value: int) -> str:
        """Return the name of a day of the week; 0 is Monday."""
        return clean(dates.get_day_names("wide", locale=self.locale)[value])

    def month(self, value: int) -> str:
        """Return the name of a month, 1 to 12, as in running text."""
        return clean(dates.get_month_names("wide", locale=self.locale)[value])

    def time(self, hour: int, minute: int) -> str:
        """Return a time of day."""
        return clean(dates.format_time(datetime.time(hour, minute), format="short", locale=self.locale))

    def listing(self, parts: list[str]) -> str:
        """Join parts to a list such as ``A, B and C``."""
        return clean(lists.format_list(parts, locale=self.locale))


@functools.cache
def _in_words(language: str, to: str, value: int) -> str:
    return clean(num2words.num2words(value, lang=language, to=to))


def _locale(language: str) -> Locale:
    try:
        return Locale.parse(language.replace("-", "_"))
    except (UnknownLocaleError, ValueError, TypeError):
        raise LanguageError(
            f"language {language!r}: Unicode CLDR (Babel) does not support it; {_covered_hint()}"
        ) from None


def _num2words_name(language: str) -> str | None:
    """Return num2words' most specific code of a language."""
    short = language.split("_")[0]
    for name in (language, NUM2WORDS_NAMES.get(short, short)):
        if name in num2words.CONVERTER_CLASSES:
            return name
    return None


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


def _covered_hint() -> str:
    return "supported languages: " + ", ".join(covered_languages())


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
        for word in self._pieces(text):
            spaced = text.startswith(" ", position)
            position += spaced
            if not text.startswith(word, position):
                # sacremoses has rewritten a sequence: split at spaces only.
                return text.split()
            words.append(word if spaced or position == 0 else JOINER + word)
            position += len(word)
        return words

    def _pieces(self, text: str) -> list[str]:
        moses = self._moses.tokenize(text, escape=False)
        return [piece for word in moses for piece in _CHARACTER.split(word) if piece]

    @staticmethod
    def join(words: list[str]) -> str:
        """Join words to a sentence."""
        return " ".join(words).replace(f" {JOINER}", "").removeprefix(JOINER)
