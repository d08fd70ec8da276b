"""Facts that do not depend on a language, and how a language expresses each kind of them."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from recipes.quickstart.languages import SECONDS, RelativeUnit, Speech

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

# Numbers end in no 1, the form of which depends on the gender of the noun in many languages, and stay few
# enough that each is seen often: a compound number is one word in German.
COUNTS = tuple(number for number in range(2, 200) if number % 10 != 1)
ROUND_COUNTS = (*range(200, 1000, 50), *range(1000, 10000, 500))


@dataclass(frozen=True)
class Inventory:
    """What two languages can both talk about.

    Attributes:
        names: kind of name -> codes that both languages have a name for, commonest first.
        units: kind of measure -> CLDR units that both have.
        ordinals: whether both have ordinal numbers.
    """

    names: dict[str, tuple[str, ...]]
    units: dict[str, tuple[str, ...]]
    ordinals: bool


def shared_inventory(source: Speech, target: Speech, seed: int) -> Inventory:
    """The inventory of a pair of languages; the seed decides about the order of the names."""
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
    """Draws facts at random.

    Names follow a flattened Zipf law, the one at rank r with a weight of ``1 / (r + shift)``: some are
    common, most are rare, as in real text.
    """

    def __init__(self, inventory: Inventory, rng: random.Random, shift: int = 15) -> None:
        self.rng = rng
        self.inventory = inventory
        self._weights = {
            kind: [1 / (rank + shift) for rank in range(len(codes))]
            for kind, codes in inventory.names.items()
        }

    def kinds(self) -> tuple[str, ...]:
        """The kinds that both languages of the inventory can express."""
        missing = {kind for kind, units in self.inventory.units.items() if not units}
        missing |= {kind for kind, codes in self.inventory.names.items() if not codes}
        if not self.inventory.ordinals:
            missing.add("ordinal")
        return tuple(kind for kind in KINDS if kind not in missing)

    def draw(self, kind: str) -> Value:
        """One fact of a kind: a tuple of numbers and codes."""
        return KINDS[kind].draw(self)

    def name(self, kind: str) -> str:
        """The code of one name."""
        return self.rng.choices(self.inventory.names[kind], self._weights[kind])[0]

    def unit(self, kind: str) -> str:
        """One unit of a kind of measure."""
        return self.rng.choice(self.inventory.units[kind])

    def count(self) -> int:
        """A number that a noun can follow."""
        return self.rng.choice(COUNTS)

    def amount(self) -> int:
        """A number to be written in digits: small or round."""
        return self.rng.choice(COUNTS if self.rng.random() < 0.6 else ROUND_COUNTS)

    def day(self) -> tuple[int, int, int]:
        """A date of 1990 to 2029, as year, month and day."""
        day = datetime.date(1990, 1, 1) + datetime.timedelta(days=self.rng.randrange(40 * 365))
        return day.year, day.month, day.day


@dataclass(frozen=True)
class Kind:
    """How to draw a kind of fact, and how to say it."""

    draw: Callable[[Facts], Value]
    say: Callable[[Speech, Value], str]


def say(speech: Speech, kind: str, value: Value) -> str:
    """``value``, a fact of ``kind``, in a language."""
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
    # From 2 o'clock on: "a la 1:00" and "a las 2:00" differ in Spanish.
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
