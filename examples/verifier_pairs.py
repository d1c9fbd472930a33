"""Pairs of short answers for `train_verifier.py`: two spellings of one value, or of two values that differ by little.

Values are of eight kinds, among them such as the verifier's rules leave open: numbers in German and Spanish words,
ordinals, times of day, dates, other words for the same. What is held out is never trained on: whole values where these
are composed of parts that others share (the number 42 in every spelling, but neither 40 nor 32), else pairs.
"""

import hashlib
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

HELD_OUT_ONE_IN = 8
CONTROLS_ONE_IN = 12  # of the different pairs: one answer is a long number, as the judge's control answers are

Value = tuple[Any, ...]
"""The parts that a value is made of; one that is near shares all but one of them."""

ENGLISH = (
    (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
        "eighteen nineteen"
    ),
    "twenty thirty forty fifty sixty seventy eighty ninety",
)
ORDINALS = (
    (
        "zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
        "fifteenth sixteenth seventeenth eighteenth nineteenth"
    ),
    "twentieth thirtieth fortieth fiftieth sixtieth seventieth eightieth ninetieth",
)
GERMAN = (
    (
        "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn "
        "achtzehn neunzehn"
    ),
    "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
)
SPANISH = (
    (
        "cero uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince dieciséis diecisiete "
        "dieciocho diecinueve veinte veintiuno veintidós veintitrés veinticuatro veinticinco veintiséis veintisiete "
        "veintiocho veintinueve"
    ),
    "treinta cuarenta cincuenta sesenta setenta ochenta noventa",
)
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
SUBJECTS = ("price", "pressure", "volume", "temperature", "current", "speed", "cost", "demand")
CHANGES = (
    ("rises", "increases", "goes up", "grows"),
    ("falls", "decreases", "goes down", "drops"),
    ("oscillates", "fluctuates", "goes up and down", "swings back and forth"),
)
PACES = (("slowly", "gradually"), ("quickly", "rapidly"), ("at once", "immediately"))
UNITS = {"length": (("mm", 1), ("cm", 10), ("m", 1000)), "mass": (("g", 1), ("kg", 1000))}  # in the smallest one


def in_words(number: int, ones: str, tens: str, joint: str = "-") -> str:
    """Spell a number below a hundred by the words for small numbers and those for the tens after them."""
    small, large = ones.split(), tens.split()
    if number < len(small):
        return small[number]
    ten = large[(number - len(small)) // 10]
    if number % 10 == 0:
        return ten
    if joint == "und":
        return f"{'ein' if number % 10 == 1 else small[number % 10]}und{ten}"
    return f"{ten}{joint}{small[number % 10]}"


def ordinal_in_words(number: int) -> str:
    if number < 20 or number % 10 == 0:
        return in_words(number, *ORDINALS)
    return f"{in_words(number // 10 * 10, *ENGLISH)}-{in_words(number % 10, *ORDINALS)}"


def nth(number: int) -> str:
    ending = "th" if number // 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def decimal(value: Fraction) -> str:
    """Write a value whose decimals end."""
    return f"{float(value):.6f}".rstrip("0").rstrip(".")


def spell_count(tens: int, ones: int) -> list[str]:
    number = 10 * tens + ones
    words = [in_words(number, *ENGLISH), in_words(number, *GERMAN, "und"), in_words(number, *SPANISH, " y ")]
    return [str(number), *words]


def spell_ordinal(tens: int, ones: int) -> list[str]:
    number = 10 * tens + ones
    return [nth(number), ordinal_in_words(number)] if number else []


def spell_number(*digits: int) -> list[str]:
    number = int("".join(map(str, digits)))
    return [str(number), f"{number:,}"]


def spell_quantity(kind: str, tens: int, ones: int, zeros: int) -> list[str]:
    amount = Fraction((10 * tens + ones) * 10**zeros * (10 if kind == "length" else 1))
    return [f"{decimal(amount / size)} {unit}" for unit, size in UNITS[kind]] if amount else []


def spell_terms(letter: str, form: str, first: int, second: int) -> list[str]:
    if form == "^":
        return [f"{letter}^{first}+{second}", f"{second}+{letter}^{first}"]
    return [f"{first}{letter}{form}{second}", f"{form.strip('+')}{second}+{first}{letter}"]


def spell_clock(hour: int, minute: int) -> list[str]:
    digits, this, following = f"{hour}:{minute:02}", in_words(hour, *ENGLISH), in_words(hour % 12 + 1, *ENGLISH)
    if minute in (0, 30):
        return [digits, f"half past {this}" if minute else f"{this} o'clock"]
    distance = min(minute, 60 - minute)
    name = "quarter" if distance == 15 else in_words(distance, *ENGLISH)
    return [digits, f"{name} past {this}" if minute < 30 else f"{name} to {following}"]


def spell_date(month: str, tens: int, ones: int) -> list[str]:
    day = 10 * tens + ones
    if not 1 <= day <= 28:
        return []
    return [f"{month} {day}", f"{day} {month}", f"{month} {nth(day)}", f"the {ordinal_in_words(day)} of {month}"]


def spell_trend(subject: str, change: int, pace: int) -> list[str]:
    return [f"the {subject} {verb} {adverb}" for verb in CHANGES[change] for adverb in PACES[pace]]


class Family(NamedTuple):
    """A kind of values.

    Attributes:
        draw: Draws a value's parts.
        spell: All spellings of a value from its parts; empty if the parts make up none.
        is_composed: Whether a value that was never seen can be read all the same, since others share its parts.
    """

    draw: Callable[[random.Random], Value]
    spell: Callable[..., list[str]]
    is_composed: Callable[[Value], bool]


def digits(rng: random.Random, count: int) -> Value:
    return tuple(rng.randint(0, 9) for _ in range(count))


FAMILIES = {
    "count": Family(lambda rng: digits(rng, 2), spell_count, lambda value: value[0] > 2 and value[1] > 0),
    "ordinal": Family(lambda rng: digits(rng, 2), spell_ordinal, lambda value: value[0] > 1 and value[1] > 0),
    "number": Family(lambda rng: (rng.randint(1, 9), *digits(rng, 3)), spell_number, lambda value: True),
    "quantity": Family(
        lambda rng: (rng.choice(list(UNITS)), *digits(rng, 2), rng.choice((0, 0, 1, 2))),
        spell_quantity,
        lambda value: True,
    ),
    "terms": Family(
        lambda rng: (rng.choice("xyn"), rng.choice("+-^"), rng.randint(2, 9), rng.randint(2, 9)),
        spell_terms,
        lambda value: True,
    ),
    "clock": Family(lambda rng: (rng.randint(1, 12), 5 * rng.randint(0, 11)), spell_clock, lambda value: True),
    "date": Family(
        lambda rng: (rng.choice(MONTHS), rng.randint(0, 2), rng.randint(0, 9)), spell_date, lambda value: True
    ),
    "trend": Family(
        lambda rng: (rng.choice(SUBJECTS), rng.randint(0, 2), rng.randint(0, 2)), spell_trend, lambda value: False
    ),
}


class Example(NamedTuple):
    """Two answers, whether they are the same, their family, and all spellings of the first one's value."""

    first: str
    second: str
    equal: bool
    family: str
    spellings: tuple[str, ...]


def unlike(family: Family, value: Value, rng: random.Random) -> Value:
    """Draw another value: two in three differ from the given one in one part only, or in the order of two digits."""
    other = family.draw(rng)
    kind = rng.random()
    if kind < 0.3:
        return other
    one, two = rng.sample(range(len(value)), 2)
    if kind < 0.4 and isinstance(value[one], int) and isinstance(value[two], int):
        swapped = list(value)
        swapped[one], swapped[two] = swapped[two], swapped[one]
        if max(swapped[one], swapped[two]) < 10 and swapped[0]:
            return tuple(swapped)
    return *value[:one], other[one], *value[one + 1 :]


def draw_example(name: str, equal: bool, rng: random.Random, *, held_out: bool) -> Example | None:
    """Draw a pair of a family; `None` if it is no pair, or belongs to the other side of the split."""
    family = FAMILIES[name]
    value = family.draw(rng)
    other = value if equal else unlike(family, value, rng)
    spellings, others = family.spell(*value), family.spell(*other)
    if len(spellings) < 2 or not others or (not equal and {*spellings} & {*others}):
        return None
    first, second = rng.sample(spellings, 2) if equal else (rng.choice(spellings), rng.choice(others))
    keys = [(name, each) for each in {value, other} if family.is_composed(each)] or [sorted((first, second))]
    if any(hashlib.sha256(repr(key).encode()).digest()[0] % HELD_OUT_ONE_IN == 0 for key in keys) != held_out:
        return None
    if not equal and not held_out and rng.randrange(CONTROLS_ONE_IN) == 0:
        second = str(rng.randrange(10**11, 10**12))
        if rng.random() < 0.5:
            first, second, spellings = second, first, [second]
    return Example(first, second, equal, name, tuple(spellings))


def draw_examples(count: int, *, seed: int, held_out: bool) -> list[Example]:
    """Draw pairs of one side of the split, as many equal as different ones; the held-out ones are distinct."""
    rng = random.Random(seed)
    examples: dict[object, Example] = {}
    while len(examples) < count:
        example = draw_example(rng.choice(list(FAMILIES)), len(examples) % 2 == 0, rng, held_out=held_out)
        if example is not None:
            examples[frozenset(example[:2]) if held_out else len(examples)] = example
    return list(examples.values())
