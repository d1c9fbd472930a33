"""Read units: "km/h", "kg m^2 s^{-2}", "square feet", "平方厘米", "°C", "dollars", and nouns that count things.

Pint supplies factors and dimensions of single units only, as exact fractions.
"""

import re
import threading
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, NamedTuple

from . import unit_names
from .errors import Refused

DEGREES, RADIANS, TEMPERATURE, COUNT = (((name, Fraction(1)),) for name in ("degree", "radian", "kelvin", "count"))
_TEMPERATURES = {
    "degree_Celsius": (Fraction(1), Fraction(27315, 100)),
    "degree_Fahrenheit": (Fraction(5, 9), Fraction(273) + Fraction(15, 100) - Fraction(160, 9)),
}


_MONEY = frozenset(name for name, _ in unit_names.CURRENCIES.values())


class Unit(NamedTuple):
    """A unit in base units: `value * factor + offset`."""

    factor: Fraction
    dimensions: tuple[tuple[str, Fraction], ...]
    offset: Fraction = Fraction(0)
    is_count: bool = False  # a noun, not a measure


_TOKEN = re.compile(
    r"\s*(?:(?P<micro>(?:\\mu|µ|μ)\s?)?(?P<name>[A-Za-zΩÅ]+|\\Omega|[$€£¥₹¢]|\\\$)(?P<digit>[23](?!\d))?"
    r"|(?P<degree>\^\\circ\s?(?:[CF](?![A-Za-z]))?)"
    r"|(?P<chinese>[\u3400-\u9fff]+)"
    r"|(?P<power>\^\{?(?P<exponent>-?\d)\}?)"
    r"|(?P<operator>/|\\cdot|\\times|\*|\(|\)|-(?=[A-Za-z])))"
)
_POWER_WORDS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3, "cu": 3}
_CHINESE_POWERS = (("平方", 2), ("立方", 3))


def read_unit(text: str) -> Unit | None:
    """Return a unit from its text, `None` if a part of it is not in the whitelist.

    Args:
        text: Such as "km/h", "kg m^2 s^{-2}", "square feet", "平方厘米", "°C", "dollars", or a plural noun ("students"),
            which is a dimension of its own.

    Raises:
        Refused: If pint is not installed.
    """
    text = text.strip(" .,")
    if not text or len(text) > 80:
        return None
    return _read_unit(text)


@lru_cache(maxsize=4096)  # model text comes here
def _read_unit(text: str) -> Unit | None:
    whole = text.casefold().replace("\\", "")
    if whole in unit_names.CURRENCIES:
        return currency_unit(*unit_names.CURRENCIES[whole])
    if re.fullmatch(r"(?:degrees?|deg)\s(?:celsius|fahrenheit|c|f)|celsius|fahrenheit|摄氏度|华氏度", whole):
        name = "degree_Fahrenheit" if re.search(r"fahr|华|\sf$", whole) else "degree_Celsius"
        return _temperature(name)
    if text in (r"^\circ C", r"^\circ F", "°C", "°F"):
        return _temperature("degree_Celsius" if text[-1] == "C" else "degree_Fahrenheit")
    return _product(text) or _count_noun(text) or _rate(text)


def currency_unit(name: str, value: str) -> Unit:
    """Return the unit of a currency, or of a part of it."""
    return Unit(Fraction(value), ((name, Fraction(1)),))


def _temperature(name: str) -> Unit:
    factor, offset = _TEMPERATURES[name]
    return Unit(factor, TEMPERATURE, offset)


_UNITS = re.compile(r"(?:(square|sq\.?|cubic|cu\.?)\s)?units?(?:\^\{?([23])\}?)?")


def _count_noun(text: str) -> Unit | None:
    word = text.casefold()
    units = _UNITS.fullmatch(word)
    if units:
        power = 3 if (units[1] or "").startswith("c") or units[2] == "3" else 2 if units[1] or units[2] else 1
        return Unit(Fraction(1), (("unit", Fraction(power)),), is_count=True)
    if word in unit_names.CHINESE_COUNTERS:
        return Unit(Fraction(1), COUNT, is_count=True)
    is_plural = re.fullmatch(r"[a-z]{3,}s", word) and not re.search(r"(?:ss|is|us)$", word)
    if text != word or word in unit_names.NO_COUNT_NOUNS or not (is_plural or word in unit_names.IRREGULAR_PLURALS):
        return None
    return Unit(Fraction(1), ((word, Fraction(1)),), is_count=True)


_PER = re.compile(r"(?P<above>[^/每]+?)\s?(?:/|\bper\b|每)\s?(?P<below>[^/每]+)", re.IGNORECASE)
_ONE_THING = re.compile(r"(?:(?:an?|one)\s)?([a-z]{3,})")


def _rate(text: str) -> Unit | None:
    """A price or a count per something: "元/千克", "dollars per hour", "words/min", "people per table"."""
    rate = _PER.fullmatch(text)
    above = _read_unit(rate["above"].strip()) if rate else None
    if rate is None or above is None or not (above.is_count or above.dimensions[0][0] in _MONEY):
        return None
    below = _read_unit(rate["below"].strip())
    if below is None:
        thing = _ONE_THING.fullmatch(rate["below"].strip())
        if thing is None or thing[1] in unit_names.NO_COUNT_NOUNS | {"cent"}:
            return None
        below = Unit(Fraction(1), ((f"{thing[1]}s", Fraction(1)),), is_count=True)
    powers = dict(above.dimensions)
    for name, power in below.dimensions:
        powers[name] = powers.get(name, Fraction(0)) - power
    kept = tuple(sorted((name, power) for name, power in powers.items() if power))
    # Other nouns may name the same things: per person, per student.
    is_count = above.is_count or below.is_count
    return Unit(above.factor / below.factor, kept, is_count=is_count) if kept and not below.offset else None


def _product(text: str) -> Unit | None:
    """Product of units with powers: after a solidus or "per" the next factor or bracket divides."""
    reader = _UnitReader()
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None or token.end() == position or not reader.take(token):
            return None
        position = token.end()
    return _combined(reader.factors) if reader.factors and reader.is_complete else None


class _UnitReader:
    """Collects the factors of a unit, token by token."""

    def __init__(self) -> None:
        self.factors: list[tuple[str, int]] = []
        self.sign, self.depth, self.pending = 1, 0, 1  # `pending` is the power that "square" gives to what follows

    @property
    def is_complete(self) -> bool:
        return self.depth == 0 and self.pending == 1

    def take(self, token: re.Match[str]) -> bool:
        """Take a token; false if it can't stand here."""
        name = (token["name"] or "").replace("\\Omega", "Ω")
        word = name.casefold()
        if token["operator"]:
            self.operator(token["operator"])
            return True
        if word == "per":
            self.sign = -1
            return True
        if word in ("square", "sq", "cubic", "cu"):
            self.pending = _POWER_WORDS[word]
            return True
        if token["power"] or word in _POWER_WORDS:
            return self.raise_last(int(token["exponent"] or _POWER_WORDS.get(word, 1)))
        new = _names(token, name)
        if new is None:
            return False
        power = self.sign * self.pending * int(token["digit"] or 1)
        self.factors += [(unit, exponent * power) for unit, exponent in new]
        self.pending = 1
        self.sign = self.sign if self.depth else 1
        return True

    def operator(self, sign: str) -> None:
        if sign == "/":
            self.sign = -1
        elif sign == "(":
            self.depth += 1
        elif sign == ")":
            self.depth, self.sign = self.depth - 1, 1

    def raise_last(self, exponent: int) -> bool:
        if not self.factors:
            return False
        name, power = self.factors[-1]
        self.factors[-1] = (name, power * exponent)
        return True


def _names(token: re.Match[str], name: str) -> list[tuple[str, int]] | None:
    if token["degree"]:
        letter = token["degree"].strip()[-1]
        return None if letter in "CF" else [("degree", 1)]
    if token["chinese"]:
        return _chinese_name(token["chinese"])
    symbol = ("µ" if token["micro"] else "") + name
    unit = unit_names.SYMBOLS.get(symbol) or (None if token["micro"] else unit_names.WORDS.get(name.casefold()))
    if unit is None:
        return None
    if "**" in unit:
        base, _, power = unit.partition("**")
        return [(base, int(power))]
    above, _, below = unit.partition("/")
    return [(above, 1), (below, -1)] if below else [(above, 1)]


def _chinese_name(text: str) -> list[tuple[str, int]] | None:
    for prefix, power in _CHINESE_POWERS:
        if text.startswith(prefix):
            inner = unit_names.CHINESE.get(text.removeprefix(prefix))
            return [(inner, power)] if inner else None
    if "每" in text:
        above, _, below = text.partition("每")
        pair = unit_names.CHINESE.get(above), unit_names.CHINESE.get(below)
        return [(pair[0], 1), (pair[1], -1)] if pair[0] and pair[1] else None
    unit = unit_names.CHINESE.get(text)
    return [(unit, 1)] if unit else None


def _combined(factors: list[tuple[str, int]]) -> Unit | None:
    factor = Fraction(1)
    dimensions: dict[str, Fraction] = {}
    for name, power in factors:
        if name in _TEMPERATURES and (len(factors) > 1 or power != 1):
            name = "kelvin"
        elif name in _TEMPERATURES:
            return _temperature(name)
        base_factor, base_dimensions = _base(name)
        factor *= base_factor**power
        for base, exponent in base_dimensions:
            dimensions[base] = dimensions.get(base, Fraction(0)) + exponent * power
    kept = tuple(sorted((base, exponent) for base, exponent in dimensions.items() if exponent))
    return Unit(factor, kept or (("one", Fraction(1)),))


_REGISTRY_LOCK = threading.Lock()


@cache
def _base(name: str) -> tuple[Fraction, tuple[tuple[str, Fraction], ...]]:
    """Factor and dimensions of one unit in base units, from pint; degrees stay, as pi is no fraction."""
    if name == "degree":
        return Fraction(1), DEGREES
    with _REGISTRY_LOCK:
        factor, unit = _registry().get_base_units(name)
    return Fraction(factor), tuple((base, Fraction(power)) for base, power in unit._units.items())


@cache
def _registry() -> Any:
    try:
        import pint
    except ImportError as error:
        raise Refused('needs pint: `pip install "trl-ulorl[math]"`') from error
    return pint.UnitRegistry(non_int_type=Fraction)
