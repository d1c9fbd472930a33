r"""Quantities: a value and its unit, with conversion.

27 cm equals 0.27 m and not 27 m; 15 cm is no area; 0 °C is 32 °F; `\$18.90` is 18.90 dollars and not euros. Units come
from the whitelist in `unit_names`; pint supplies conversion factors and dimensions only, as exact fractions.
"""

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, NamedTuple

from . import unit_names
from .errors import Refused
from .normalize import Answer
from .numbers import Number, read_number, read_plain, same_value

_MAX_CHARACTERS = 200
_MAX_PARTS = 8
_DEGREES, _RADIANS, _TEMPERATURE, _COUNT = (((name, Fraction(1)),) for name in ("degree", "radian", "kelvin", "count"))
_TEMPERATURES = {
    "degree_Celsius": (Fraction(1), Fraction(27315, 100)),
    "degree_Fahrenheit": (Fraction(5, 9), Fraction(273) + Fraction(15, 100) - Fraction(160, 9)),
}

Dimensions = Mapping[str, Fraction]


class Unit(NamedTuple):
    """A unit in base units: `value * factor + offset`."""

    factor: Fraction
    dimensions: tuple[tuple[str, Fraction], ...]
    offset: Fraction = Fraction(0)
    is_count: bool = False  # a noun, not a measure


@dataclass(frozen=True)
class Quantity:
    """An answer with a unit.

    Attributes:
        parts: Values as written and their units, of one dimension: "2 hours 24 minutes" has two.
        is_certain: Whether the letters can only be a unit: "5 m" in LaTeX may be a product.
    """

    parts: tuple[tuple[str, Unit], ...]
    is_certain: bool

    @property
    def dimensions(self) -> tuple[tuple[str, Fraction], ...]:
        """Exponents of the base units, sorted by name."""
        return self.parts[0][1].dimensions

    def number(self) -> Number | None:
        """Value in base units; `None` if it is a formula."""
        total, half_unit = Fraction(0), Fraction(0)
        for text, unit in self.parts:
            number = _read(text)
            if number is None or number.percent:
                return None
            total += number.value * unit.factor + unit.offset
            half_unit = number.half_unit * unit.factor
        return Number(total, half_unit=half_unit)

    def bare_numbers(self) -> list[Number]:
        """The value without the unit, in each of the units it is stated in."""
        number = self.number()
        if number is None:
            return []
        return [
            Number((number.value - unit.offset) / unit.factor, half_unit=number.half_unit / unit.factor)
            for _, unit in self.parts
        ]

    def __str__(self) -> str:
        number = self.number()
        value = " + ".join(text for text, _ in self.parts) if number is None else str(number)
        if len(self.parts) == 1 and number is None and self.parts[0][1].factor != 1:
            value = rf"({value})*{self.parts[0][1].factor}"
        return f"{value} {'*'.join(f'{name}^{power}' if power != 1 else name for name, power in self.dimensions)}"


class Formulas(NamedTuple):
    """Two values in one unit that only algebra can compare."""

    prediction: str
    reference: str


def same_quantity(prediction: Answer, reference: Answer) -> tuple[bool, str, str] | Formulas | None:
    """Compare two answers of which at least one has a unit.

    A unit on one side only is not asked for: the values decide. Of two units the dimensions must agree, and the values
    after conversion.

    Returns:
        The verdict and the two normal forms, two formulas that remain to be compared, or `None` without units.

    Raises:
        Refused: If there are units but pint is not installed.
    """
    if len(prediction.marked) > _MAX_CHARACTERS or len(reference.marked) > _MAX_CHARACTERS:
        return None
    left, right = read_quantity(prediction), read_quantity(reference)
    if left is not None and right is not None:
        return _compare(left, right)
    quantity = left or right
    if quantity is None or not quantity.is_certain:
        return None
    return _against_bare(quantity, reference if left else prediction, is_prediction=left is not None)


def _compare(left: Quantity, right: Quantity) -> tuple[bool, str, str] | Formulas | None:
    forms = str(left), str(right)
    one, other = left.number(), right.number()
    if not (left.is_certain or right.is_certain):
        # Two letters may be symbols, "2m" and "2g"; that symbols agree by a conversion factor is no chance.
        equal = left.dimensions == right.dimensions and one is not None and one == other
        return (True, *forms) if equal and left.parts[0][1] != right.parts[0][1] else None
    if left.dimensions != right.dimensions:
        return _across_dimensions(left, right)
    if one is not None and other is not None:
        return same_value(one, other), *forms
    if len(left.parts) == len(right.parts) == 1 and not (left.parts[0][1].offset or right.parts[0][1].offset):
        return Formulas(*(_scaled(text, unit) for (text, unit) in (left.parts[0], right.parts[0])))
    return None


def _across_dimensions(left: Quantity, right: Quantity) -> tuple[bool, str, str] | Formulas | None:
    """Different dimensions are different answers, but for what is loosely named."""
    forms = str(left), str(right)
    kinds = {left.dimensions, right.dimensions}
    (text, unit), (other_text, other_unit) = left.parts[0], right.parts[0]
    if kinds == {_DEGREES, _RADIANS}:
        return Formulas(_scaled(text, unit), _scaled(other_text, other_unit))
    if kinds == {_DEGREES, _TEMPERATURE}:
        return text == other_text, *forms  # 25° for 25 °C
    if unit.is_count and other_unit.is_count and left.number() == right.number():
        return (True, *forms) if _COUNT in kinds else None  # other nouns may name the same things
    return False, *forms


def _against_bare(quantity: Quantity, bare: Answer, *, is_prediction: bool) -> tuple[bool, str, str] | Formulas | None:
    number = read_number(bare)
    if number is not None and number.percent:
        return False, *((str(quantity), str(number)) if is_prediction else (str(number), str(quantity)))
    if number is not None:
        values = quantity.bare_numbers()
        pairs = [(value, number) if is_prediction else (number, value) for value in values]
        if pairs:
            forms = (str(quantity), str(number)) if is_prediction else (str(number), str(quantity))
            return any(same_value(*pair) for pair in pairs), *forms
    if len(quantity.parts) > 1 or not _is_formula(bare) or quantity.dimensions == _DEGREES:
        return None  # 90° against pi/2 is for the algebra, which knows degrees
    value = quantity.parts[0][0]
    return Formulas(value, bare.form) if is_prediction else Formulas(bare.form, value)


def _is_formula(answer: Answer) -> bool:
    return "\\text" not in answer.marked and not re.search(r"(?<![\\A-Za-z])[A-Za-z]{3,}|[\u3400-\u9fff]", answer.form)


def _scaled(text: str, unit: Unit) -> str:
    if unit.factor == 1:
        return rf"({text})\cdot\pi/180" if unit.dimensions == _DEGREES else text
    return rf"({text})\cdot({unit.factor.numerator}/{unit.factor.denominator})"


# ------------------------------------------------------------------------------------------------------------- reading

_PREFIX_CURRENCY = re.compile(r"([+-]?)(\\\$|US\\\$|[€£¥₹]|(?:USD|EUR|GBP|RMB|CNY|Rs\.?)\s?(?=\d))\s?(.+)", re.DOTALL)
# Where a unit may begin: after what can end a value.
_START = re.compile(
    r"(?<=[\d)}.])(?=[^\d)}.,+\-*=<>!{(\[])|(?<=\w) (?=[A-Za-z])|(?<=[\da-z\u3400-\u9fff])(?=[\u3400-\u9fff])|(?=\\text\{)"
)
_FLAT = re.compile(r"\\text\{((?:[^{}]|\{[^{}]*\})*)\}")
_PART = re.compile(
    r"(?P<value>[+-]?\d[\d,]*(?:\.\d+)?(?:/\d+)?|\\frac\{\d+\}\{\d+\})\s?(?P<unit>[A-Za-z]+|[\u3400-\u9fff]+)"
)
_PART_JOINT = re.compile(r"\s?(?:,|and|\+|和|零)?\s?", re.IGNORECASE)
_VALUE_LETTERS = re.compile(r"\\[A-Za-z]+|[A-Za-z]+")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}|[\u3400-\u9fff]")
_NUMERIC_COMMANDS = frozenset((r"\frac", r"\sqrt", r"\pi", r"\times", r"\cdot", r"\div", r"\surd", r"\overline"))


def read_quantity(answer: Answer) -> Quantity | None:
    r"""Return the quantity that an answer states, `None` if it has no unit of the whitelist.

    Example:
        >>> from .normalize import to_answer
        >>> print(read_quantity(to_answer(r"27\text{ cm}")))
        27/100 meter
    """
    marked = answer.marked
    if marked.startswith("\\text{") and _FLAT.fullmatch(marked):
        quantity = read_quantity(Answer(answer.raw, _flat(marked), answer.form))
        return None if quantity is None else Quantity(quantity.parts, is_certain=True)
    price = _PREFIX_CURRENCY.fullmatch(marked)
    if price:
        sign = price[2].replace("\\", "").replace("US", "").lower().strip(" .")
        currency = unit_names.CURRENCIES.get(sign) or unit_names.CURRENCIES["₹" if sign == "rs" else "$"]
        value = price[1] + _flat(price[3])
        tail = re.fullmatch(r"(.*\d)\s?(?:USD|EUR|GBP|dollars|euros)", value)
        return Quantity(((tail[1] if tail else value, _currency(*currency)),), is_certain=True)
    flat = _flat(marked)
    return _simple_quantity(marked, answer.raw) or _sum_of_parts(flat) or _simple_quantity(flat, answer.raw)


def _flat(text: str) -> str:
    return re.sub(r"\s+", " ", _FLAT.sub(r" \1 ", text)).strip()


def _simple_quantity(marked: str, raw: str) -> Quantity | None:
    """Shortest value whose rest is a unit as a whole."""
    for start in _START.finditer(marked):
        value, rest = marked[: start.start()].strip(), marked[start.start() :].strip()
        if not value or not rest:
            continue
        unit = read_unit(_flat(rest))
        if unit is None:
            continue
        if "\\text" in value and _read(_flat(value)) is None:
            continue
        value = _flat(value)
        if value in ("a", "an"):
            value = "1"
        is_number = _read(value) is not None
        letters = [name for name in _VALUE_LETTERS.findall(value) if name not in _NUMERIC_COMMANDS]
        is_marked = rest.startswith("\\text")
        if not is_number and (_WORDS.search(value) or (letters and not is_marked)):
            return None
        return Quantity(((value, unit),), is_certain=is_marked or _is_certain(rest, raw, value))
    return None


def _is_certain(rest: str, raw: str, value: str) -> bool:
    """Whether an unmarked unit can't be a product of letters."""
    names = re.findall(r"[A-Za-z]+", rest.replace("\\mu", "").replace("\\circ", ""))
    if "\\circ" in rest or not names or any(len(name) > 1 for name in names):
        return True
    return bool(re.search(r"\d\s+[A-Za-z]", raw)) and "\\" not in raw


def _sum_of_parts(text: str) -> Quantity | None:
    parts: list[tuple[str, Unit]] = []
    position = 0
    while position < len(text):
        part = _PART.match(text, position)
        unit = read_unit(part["unit"]) if part else None
        if part is None or unit is None or (parts and unit.dimensions != parts[0][1].dimensions) or unit.offset:
            return None
        if parts and unit.factor >= parts[-1][1].factor:
            return None
        parts.append((part["value"], unit))
        joint = _PART_JOINT.match(text, part.end())
        position = joint.end() if joint else part.end()
        if len(parts) > _MAX_PARTS:
            return None
    return Quantity(tuple(parts), is_certain=True) if len(parts) > 1 else None


def _read(text: str) -> Number | None:
    return read_number(Answer(text, text, text)) or read_plain(text)


# --------------------------------------------------------------------------------------------------------------- units

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
        return _currency(*unit_names.CURRENCIES[whole])
    if re.fullmatch(r"(?:degrees?|deg)\s(?:celsius|fahrenheit|c|f)|celsius|fahrenheit|摄氏度|华氏度", whole):
        name = "degree_Fahrenheit" if re.search(r"fahr|华|\sf$", whole) else "degree_Celsius"
        return _temperature(name)
    if text in (r"^\circ C", r"^\circ F", "°C", "°F"):
        return _temperature("degree_Celsius" if text[-1] == "C" else "degree_Fahrenheit")
    return _product(text) or _count_noun(text)


def _currency(name: str, value: str) -> Unit:
    return Unit(Fraction(value), ((name, Fraction(1)),))


def _temperature(name: str) -> Unit:
    factor, offset = _TEMPERATURES[name]
    return Unit(factor, _TEMPERATURE, offset)


_UNITS = re.compile(r"(?:(square|sq\.?|cubic|cu\.?)\s)?units?(?:\^\{?([23])\}?)?")


def _count_noun(text: str) -> Unit | None:
    word = text.casefold()
    units = _UNITS.fullmatch(word)
    if units:
        power = 3 if (units[1] or "").startswith("c") or units[2] == "3" else 2 if units[1] or units[2] else 1
        return Unit(Fraction(1), (("unit", Fraction(power)),), is_count=True)
    if word in unit_names.CHINESE_COUNTERS:
        return Unit(Fraction(1), _COUNT, is_count=True)
    is_plural = re.fullmatch(r"[a-z]{3,}s", word) and not re.search(r"(?:ss|is|us)$", word)
    if text != word or word in unit_names.NO_COUNT_NOUNS or not (is_plural or word in unit_names.IRREGULAR_PLURALS):
        return None
    return Unit(Fraction(1), ((word, Fraction(1)),), is_count=True)


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
        return Fraction(1), _DEGREES
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
