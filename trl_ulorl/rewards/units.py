r"""Quantities: a value and its unit, with conversion.

27 cm equals 0.27 m and not 27 m; 15 cm is no area; 0 °C is 32 °F; `\$18.90` is 18.90 dollars and not euros. Units come
from the whitelist in `unit_names`; pint supplies conversion factors and dimensions only, as exact fractions.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from . import unit_names
from .normalize import Answer, to_answer
from .numbers import Number, read_number, read_plain, read_span, same_value
from .unit_reader import COUNT, DEGREES, RADIANS, TEMPERATURE, Unit, currency_unit, read_unit

_MAX_CHARACTERS = 200
_MAX_PARTS = 8


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
    if kinds == {DEGREES, RADIANS}:
        return Formulas(_scaled(text, unit), _scaled(other_text, other_unit))
    if kinds == {DEGREES, TEMPERATURE}:
        return text == other_text, *forms  # 25° for 25 °C
    if unit.is_count and other_unit.is_count and left.number() == right.number():
        return (True, *forms) if COUNT in kinds else None  # other nouns may name the same things
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
    if len(quantity.parts) > 1 or not _is_formula(bare) or quantity.dimensions == DEGREES:
        return None  # 90° against pi/2 is for the algebra, which knows degrees
    value = quantity.parts[0][0]
    return Formulas(value, bare.form) if is_prediction else Formulas(bare.form, value)


def _is_formula(answer: Answer) -> bool:
    return "\\text" not in answer.marked and not re.search(r"(?<![\\A-Za-z])[A-Za-z]{3,}|[\u3400-\u9fff]", answer.form)


def _scaled(text: str, unit: Unit) -> str:
    span = read_span(text)
    if span is not None:
        return f"{span[0] * unit.factor} to {span[1] * unit.factor}{span[2]}"
    if unit.factor == 1:
        return rf"({text})\cdot\pi/180" if unit.dimensions == DEGREES else text
    return rf"({text})\cdot({unit.factor.numerator}/{unit.factor.denominator})"


# ------------------------------------------------------------------------------------------------------------- reading

_PREFIX_CURRENCY = re.compile(r"([+-]?)(\\\$|US\\\$|[€£¥₹]|(?:USD|EUR|GBP|RMB|CNY|Rs\.?)\s?(?=\d))\s?(.+)", re.DOTALL)
_RATE_TAIL = re.compile(r"([+-]?[\d.,]{1,40})\s?((?:/|per\b|每).+)", re.IGNORECASE | re.DOTALL)
_CHINESE_RATE = re.compile(
    r"(?:每(?P<below>[\u3400-\u9fff]{1,3})|时速为?)(?P<value>\d[\d.,]{0,40})(?P<above>[A-Za-z\u3400-\u9fff]{1,10})"
)
# Where a unit may begin: after what can end a value.
_START = re.compile(
    r"(?<=[\d)}.!])(?=[^\d)}.!,+\-*=<>!{(\[])|(?<=\w) (?=[A-Za-z])|(?<=[\da-z\u3400-\u9fff])(?=[\u3400-\u9fff])|(?=\\text\{)"
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
        rate = _RATE_TAIL.fullmatch(value)
        unit = read_unit(f"{sign or '$'}{rate[2]}") if rate else None
        if rate and unit:
            return Quantity(((rate[1], unit),), is_certain=True)
        tail = re.fullmatch(r"(.*\d)\s?(?:USD|EUR|GBP|dollars|euros)", value)
        return Quantity(((tail[1] if tail else value, currency_unit(*currency)),), is_certain=True)
    rate = _CHINESE_RATE.fullmatch(marked)
    if rate:  # 每小时60千米
        return read_quantity(
            to_answer(f"{rate['value']}{rate['above']}/{rate['below'] or '时'}")._replace(raw=answer.raw)
        )
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
