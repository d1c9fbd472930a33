"""Values of formulas: exact fractions where they are rational all through, else to any number of digits.

What would not fit in memory raises `TooLarge` before it is computed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

from .errors import Refused
from .formula import Node, symbols

_DIGITS = 40
_MAX_LOG2 = 2.0**40  # the exponent of a float of that size is a small integer
_MAX_ARGUMENT_LOG2 = 3000.0
_MAX_FACTORIAL = 1e12


class TooLarge(Exception):
    """Raised where a value would not fit in a float of arbitrary precision."""


class Undefined(Exception):
    """Raised where a formula has no finite value."""


def probe_value(name: str, probe: int, kind: str) -> Fraction:
    """Value of a symbol at a probe: positive at the first two, negative at the third, of either sign at the last."""
    digest = int.from_bytes(hashlib.sha256(f"{name} {probe}".encode("utf-8", "replace")).digest()[:6], "big")
    if kind == "integer":
        return Fraction(1 + probe + digest % 7)
    if kind == "small":
        return Fraction(1 + digest % 97, 101)
    value = Fraction(1, 3) + Fraction(digest % 9973, 4999)
    return -value if probe == 2 or (probe == 3 and digest % 2) else value


# ------------------------------------------------------------------------------------------------ exact, if rational

_MAX_EXACT_BITS = 400_000
_MAX_EXACT_FACTORIAL = 20_000


def exact_value(node: Node, point: Mapping[str, Fraction]) -> Fraction | None:
    """Return the value of a formula if it is rational all through and not too long, else `None`."""
    match node.kind:
        case "number":
            return node.value
        case "symbol":
            return point.get(node.name)
        case "constant" | "call" | "apply":
            return None
    operands: list[Fraction] = []
    for child in node.children:
        value = exact_value(child, point)
        if value is None or _bits(value) > _MAX_EXACT_BITS:
            return None
        operands.append(value)
    return _exact_operation(node.kind, operands)


def _exact_operation(kind: str, operands: list[Fraction]) -> Fraction | None:
    match kind:
        case "add":
            return sum(operands, Fraction(0))
        case "neg":
            return -operands[0]
        case "mul":
            return operands[0] * operands[1]
        case "div":
            return operands[0] / operands[1] if operands[1] else None
        case "pow":
            return _exact_power(*operands)
    (argument,) = operands
    is_small = argument.denominator == 1 and 0 <= argument <= _MAX_EXACT_FACTORIAL
    return Fraction(math.factorial(int(argument))) if is_small else None


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1 or abs(exponent) * _bits(base) > _MAX_EXACT_BITS or (not base and exponent <= 0):
        return None
    return base ** int(exponent)


# ---------------------------------------------------------------------------------------------------------- evaluation


@cache
def mp() -> Any:
    """A context of our own: mpmath's global one belongs to the caller."""
    import mpmath

    return mpmath.MPContext()


def to_float(value: Fraction) -> Any:
    """Return a fraction as a float of the present precision."""
    context = mp()
    return context.mpf(value.numerator) / value.denominator


def rough_value(node: Node) -> tuple[bool, float]:
    """Return whether a constant is a positive number, and the binary logarithm of its absolute value.

    Raises:
        TooLarge: If it doesn't fit in memory.
        Undefined: If it has no finite value, or has symbols.
    """
    if symbols(node):
        raise Undefined
    value = value_at(node, {}, _DIGITS, is_real=False)
    context = mp()
    if not value:
        return False, -math.inf
    is_positive = not context.im(value) and context.re(value) > 0
    return bool(is_positive), float(context.log(abs(value)) / context.ln2)


def value_at(node: Node, point: Mapping[str, Fraction], digits: int, *, is_real: bool) -> Any:
    """Return the value of a formula at a point to a number of digits, some of which may be rounding errors.

    Args:
        node: The formula.
        point: Values of its symbols.
        digits: Decimal digits to compute with, which stay set.
        is_real: Whether to stay within the real numbers.

    Raises:
        TooLarge: If it doesn't fit in memory.
        Undefined: If it has no finite value there, or no real one.
    """
    context = mp()
    context.dps = digits
    try:
        value = _evaluate(node, _Point(point, is_real))
        if not context.isfinite(value):
            raise Undefined
    except (ZeroDivisionError, ValueError, OverflowError) as error:
        raise Undefined from error
    return value


class _Point(NamedTuple):
    """Where to evaluate: the values of symbols, and whether to stay within the real numbers."""

    values: Mapping[str, Fraction]
    is_real: bool


def _evaluate(node: Node, point: _Point) -> Any:
    match node.kind:
        case "number":
            return to_float(node.value)
        case "symbol":
            return to_float(point.values[node.name])
        case "constant":
            return _constant_value(node.name)
        case "apply":
            return _unknown_function(node, point)
    value = _operate(node, [_evaluate(child, point) for child in node.children])
    if point.is_real and mp().im(value):
        raise Undefined
    return value


def _operate(node: Node, operands: list[Any]) -> Any:
    match node.kind:
        case "add":
            return _total(node, operands)
        case "neg":
            return -operands[0]
        case "mul":
            return operands[0] * operands[1]
        case "div":
            return operands[0] / operands[1]
        case "pow":
            return _power(*operands)
        case "factorial":
            return _factorial(operands[0])
    return _call(node.name, operands)


def _total(node: Node, operands: list[Any]) -> Any:
    """Sum, if no number in it vanishes beside a much larger term."""
    context = mp()
    largest = max(_size(operand) for operand in operands)
    for child, operand in zip(node.children, operands, strict=True):
        number = child.children[0] if child.kind == "neg" else child
        if number.kind == "number" and operand and _size(operand) < largest - context.prec + 20:
            raise Refused("its digits cannot be trusted")
    return context.fsum(operands)


def _constant_value(name: str) -> Any:
    context = mp()
    match name:
        case "pi":
            return +context.pi
        case "e":
            return +context.e
        case "i":
            return context.mpc(0, 1)
    raise Undefined  # infinity


def _unknown_function(node: Node, point: _Point) -> Any:
    """A fixed value for f(x), by name and the first digits of its arguments."""
    context = mp()
    arguments = [context.nstr(context.mpc(_evaluate(child, point)), 20) for child in node.children]
    return to_float(probe_value(f"{node.name}({', '.join(arguments)})", 0, "rational"))


def _size(value: Any) -> float:
    """Binary logarithm of the absolute value."""
    if not value:
        return -math.inf
    return float(mp().mag(value))


def _power(base: Any, exponent: Any) -> Any:
    context = mp()
    if not base:
        if context.re(exponent) > 0:
            return context.mpf(0)
        raise Undefined  # 0^0 too, which may be what is asked
    if _size(exponent) > 60:
        raise TooLarge
    if abs(_size(base)) > 2 or _size(exponent) > 30:
        log2 = abs(context.log(base)) / context.ln2
        if log2 * abs(exponent) > _MAX_LOG2:
            raise TooLarge
    if not context.im(exponent) and not context.im(base) and context.re(base) < 0:
        return _real_root(base, exponent)
    return base**exponent


def _real_root(base: Any, exponent: Any) -> Any:
    """Power of a negative number: the real one for odd roots, as school has it."""
    context = mp()
    whole = context.nint(exponent)
    if abs(exponent - whole) < context.mpf(10) ** -(context.dps - 5):
        return base ** int(whole)
    for odd in (3, 5, 7, 9):
        multiple = exponent * odd
        whole = context.nint(multiple)
        if abs(multiple - whole) < context.mpf(10) ** -(context.dps - 5):
            magnitude = (-base) ** exponent
            return -magnitude if int(whole) % 2 else magnitude
    return base**exponent


def _factorial(value: Any) -> Any:
    context = mp()
    if _size(value) > math.log2(_MAX_FACTORIAL):
        raise TooLarge
    return context.gamma(value + 1)


_TRIGONOMETRIC = frozenset("sin cos tan cot sec csc floor ceil".split())
_EXPONENTIAL = frozenset("exp sinh cosh tanh coth".split())
_FUNCTION_NAMES = {
    "arcsin": "asin",
    "arccos": "acos",
    "arctan": "atan",
    "arccot": "acot",
    "arcsec": "asec",
    "arccsc": "acsc",
    "arsinh": "asinh",
    "arcosh": "acosh",
    "artanh": "atanh",
    "abs": "fabs",
    "ln": "ln",
    "double factorial": "fac2",
    "Re": "re",
    "Im": "im",
    "sgn": "sign",
}


def _call(name: str, operands: list[Any]) -> Any:
    context = mp()
    first = operands[0]
    if name in _TRIGONOMETRIC and _size(first) > _MAX_ARGUMENT_LOG2:
        raise Refused("evaluating it might not end")
    if name in _EXPONENTIAL and _size(first) > math.log2(_MAX_LOG2):
        raise TooLarge
    if name == "double factorial" and _size(first) > 20:
        raise TooLarge
    match name:
        case "log":
            return context.log(first) / context.log(operands[1]) if len(operands) > 1 else context.log(first)
        case "lg":
            return context.log10(first)
        case "binom":
            return _binomial(first, operands[1])
        case "max" | "min":
            if any(context.im(operand) for operand in operands):
                raise Undefined
            return max(operands) if name == "max" else min(operands)
        case "gcd" | "lcm":
            return _integers(math.gcd if name == "gcd" else math.lcm, operands)
    return getattr(context, _FUNCTION_NAMES.get(name, name))(first)


def _binomial(upper: Any, lower: Any) -> Any:
    context = mp()
    if max(_size(upper), _size(lower)) > math.log2(_MAX_FACTORIAL):
        raise TooLarge
    return context.binomial(upper, lower)


def _integers(function: Callable[..., int], operands: list[Any]) -> Any:
    context = mp()
    if any(context.im(operand) or operand != context.nint(operand) or _size(operand) > 400 for operand in operands):
        raise Undefined
    return context.mpf(function(*(int(operand) for operand in operands)))
