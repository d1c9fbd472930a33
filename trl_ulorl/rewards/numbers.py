r"""Exact numbers: decimals, fractions, mixed numbers, powers of ten, percentages, and numerals in words.

Values are `Fraction`s, never floats: 0.1 equals 1/10 and nothing beside it.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from .normalize import Answer
from .numerals import read_chinese, read_english

# Under the length at which Python refuses to turn text into integers (4,300 digits by default).
_MAX_CHARACTERS = 4000
_MAX_EXPONENT = 5000


class Number(NamedTuple):
    """A number as an answer states it.

    Attributes:
        value: Without the percent sign.
        percent: Whether it is a percentage.
        half_unit: Half a unit of the last digit if the answer says that it is rounded, else 0.
    """

    value: Fraction
    percent: bool = False
    half_unit: Fraction = Fraction(0)

    def __str__(self) -> str:
        about = "≈" if self.half_unit else ""
        return f"{about}{self.value}{'%' if self.percent else ''}"


_DECIMAL = r"(?:\d{1,3}(?:[, ]\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)(?:(?P<whole>\d+)?\s?\\frac\{{(?P<numerator>-?(?:{_DECIMAL}))\}}\{{(?P<denominator>-?(?:{_DECIMAL}))\}}"
    rf"|(?P<mixed>\d+)\s(?P<over>\d+)/(?P<under>\d+)"
    rf"|(?P<integer>\d*)\.(?P<fixed>\d*)(?:\\overline\{{(?P<repeated>\d{{1,20}})\}}|\((?P<bracketed>\d{{1,20}})\))"
    rf"|(?P<value>{_DECIMAL})(?P<ellipsis>\\ldots)?"
    rf"(?:/(?P<divisor>{_DECIMAL})|(?:e|(?:\\times|\\cdot|\*)\s?10\^)\{{?(?P<exponent>[+-]?\d{{1,5}})\}}?)?"
    rf"|10\^\{{?(?P<power>[+-]?\d{{1,5}})\}}?)"
    r"\s?(?P<percent>%|\bpercent\b|\bper cent\b|\bpct\b|\\permil|‰)?",
    re.ASCII | re.IGNORECASE,
)
_ABOUT = re.compile(
    r"^(?:(?:[A-Za-z](?:_\w)?)?(?:\\approx|\\simeq|~|\\sim)|(?:approximately|about|roughly|around|approx\.?)\s|约为?|大约)\s?"
    r"|[\s(,]{0,5}(?:\(?(?:rounded|approximately|approx\.?)[^)]{0,40}\)?)$",
    re.IGNORECASE,
)
_DECIMAL_COMMA = re.compile(r"([+-]?\d+),(\d{1,2}|\d{4,})")
_PERCENT_WORDS = re.compile(r"[\s-](?:percent|per cent)$|^百分之", re.IGNORECASE)


def read_number(answer: Answer) -> Number | None:
    r"""Return the number that an answer consists of, `None` if it is anything else.

    Args:
        answer: The answer. Over 4,000 characters it is not read.

    Example:
        >>> from .normalize import to_answer
        >>> [str(read_number(to_answer(text))) for text in (r"2\frac{1}{2}", "12.5\\%", "two thirds", r"\approx 3.14")]
        ['5/2', '25/2%', '2/3', '≈157/50']
    """
    form = answer.form
    if not form or len(form) > _MAX_CHARACTERS:
        return None
    bare = _ABOUT.sub("", form).strip()
    number = read_plain(bare)
    if number is None:
        return None
    return number._replace(half_unit=half_unit(bare)) if bare != form else number


def read_plain(text: str) -> Number | None:
    """Return the number of a normalised text without "about" before it."""
    match = _NUMBER.fullmatch(text)
    if match:
        value = _value(match)
        if value is None:
            return None
        if match["percent"] in ("‰", r"\permil"):
            return Number(value / 10, percent=True)
        return Number(value, percent=bool(match["percent"]))
    return _in_words(text)


_SPAN = re.compile(
    rf"({_DECIMAL})(%?)-({_DECIMAL})(%?)|({_DECIMAL}|\d+/\d+)(%?) to ({_DECIMAL}|\d+/\d+)(%?)", re.ASCII
)


def read_span(text: str) -> tuple[Fraction, Fraction, str] | None:
    """Return the ends of a range and its sign: "5-6%" goes from 5 to 6 with a percent sign. 6-5 is a difference.

    Example:
        >>> read_span("5-6%")
        (Fraction(5, 1), Fraction(6, 1), '%')
    """
    match = _SPAN.fullmatch(text) if len(text) <= _MAX_CHARACTERS else None
    if match is None:
        return None
    low, low_sign, high, high_sign = (group for group in match.groups() if group is not None)
    ends = [Fraction(end.replace(",", "").replace(" ", "")) for end in (low, high) if not end.endswith("/0")]
    return (ends[0], ends[1], high_sign) if len(ends) == 2 and ends[0] < ends[1] and low_sign <= high_sign else None


def decimal_comma(answer: Answer) -> Fraction | None:
    """Value of "3,14" where a comma marks decimals; `None` for what could be thousands or, as "3, 14" and "2,0", a list."""
    match = _DECIMAL_COMMA.fullmatch(answer.form) if len(answer.form) < _MAX_CHARACTERS else None
    if match is None or re.search(r",\s", answer.raw):
        return None
    value = Fraction(f"{match[1]}.{match[2]}")
    return value if value.denominator > 1 else None


def _in_words(text: str) -> Number | None:
    percent = _PERCENT_WORDS.search(text)
    if percent and percent.end() == len(text):
        value = read_english(text[: percent.start()]) or read_chinese(text[: percent.start()])
        return None if value is None else Number(value, percent=True)
    value = read_english(text)
    if value is None:
        value = read_chinese(text)
        if value is not None and percent:
            return Number(100 * value, percent=True)
    return None if value is None else Number(value)


def _value(number: re.Match[str]) -> Fraction | None:
    """Exact value without the percent sign; `None` for a zero denominator."""
    if number["power"]:
        value: Fraction | None = _ten_to(number["power"])
    elif number["mixed"]:
        part = _quotient(number["over"], number["under"])
        value = None if part is None else int(number["mixed"]) + part
    elif number["numerator"]:
        value = _quotient(number["numerator"], number["denominator"])
        if value is not None and number["whole"]:
            # 2\frac{1}{2} is a mixed number, 2\frac{3}{2} and 2\frac{-1}{2} are products
            whole = int(number["whole"])
            value = whole + value if 0 < value < 1 and value.denominator != 1 else whole * value
    elif repeated := number["repeated"] or number["bracketed"]:
        fixed = number["fixed"]
        value = Fraction(f"{number['integer'] or 0}.{fixed}0")
        value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(fixed))
    else:
        value = _decimal_value(number)
    return -value if value is not None and number["sign"] == "-" else value


def _decimal_value(number: re.Match[str]) -> Fraction | None:
    if number["ellipsis"]:
        return _repeating(number["value"])
    if number["divisor"]:
        return _quotient(number["value"], number["divisor"])
    power = _ten_to(number["exponent"] or "0")
    return None if power is None else _fraction(number["value"]) * power


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", ""))


def _quotient(numerator: str, denominator: str) -> Fraction | None:
    below = _fraction(denominator)
    return _fraction(numerator) / below if below else None


def _ten_to(exponent: str) -> Fraction | None:
    return Fraction(10) ** int(exponent) if abs(int(exponent)) <= _MAX_EXPONENT else None


def _repeating(text: str) -> Fraction | None:
    """0.333... and 0.1666... show their period; other digits before dots do not say how they go on."""
    match = re.fullmatch(r"(\d*)\.(\d*?)(\d)\3{2,}", text)
    if match is None:
        return None
    return Fraction(f"{match[1] or 0}.{match[2]}0") + Fraction(int(match[3]), 9 * 10 ** len(match[2]))


def half_unit(text: str) -> Fraction:
    """Return half a unit of the last decimal written, 0 for what is no decimal."""
    decimals = re.fullmatch(r"[+-]?[\d, ]*\.?(\d*)\s?%?", text)
    return Fraction(1, 2 * 10 ** len(decimals[1])) if decimals else Fraction(0)


def same_value(prediction: Number, reference: Number) -> bool:
    """Compare exactly; to the digits that the reference gives where it says that it is rounded.

    A percent sign on one side only may be read either way: 28 % equals 28 and 0.28.
    """
    allowed = reference.half_unit
    readings = [prediction.value]
    if prediction.percent != reference.percent:
        readings.append(100 * prediction.value if reference.percent else prediction.value / 100)
    return any(abs(reading - reference.value) <= allowed for reading in readings)
