r"""Compare two formulas by their values: an identity test at probe points, relatively and at two precisions.

Constants are computed to 40 and 130 digits; what the two agree on is trusted. So 1/2004! differs from 1/2006!, and
$e^{\pi\sqrt{163}}$ from the integer that it misses by $10^{-12}$. Formulas with symbols are compared where the symbols
have fixed, seemingly random values: two that agree at several such points are the same, as with polynomials after
Schwartz and Zippel. No simplifier is involved, which might not end.

Numbers too large for that (power towers) are compared by bounds on their size, see `magnitude`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

from .errors import Refused
from .formula import Node, contains, symbols

_DIGITS, _MORE_DIGITS, _MOST_DIGITS = 40, 130, 500
_MAX_LOG2 = 2.0**40  # the exponent of a float of that size is a small integer
_MAX_ARGUMENT_LOG2 = 3000.0
_MAX_FACTORIAL = 1e12
_NUM_PROBES = 4
_MIN_AGREEING = 2


class TooLarge(Exception):
    """Raised where a value would not fit in a float of arbitrary precision."""


class Undefined(Exception):
    """Raised where a formula has no finite value."""


class _Value(NamedTuple):
    """A constant: its value, and how many digits of it are right; zero if `digits` is 0."""

    value: Any
    digits: float


def same_formula(left: Node, right: Node) -> bool:
    """Return whether two formulas are equal wherever both are defined and real.

    `log` without a base is the natural one, or the one that the other formula's logarithms name.

    Raises:
        Refused: If that cannot be told, as at too few probes both are defined.
        TooLarge: If a value doesn't fit in memory.
    """
    if left == right:
        return True
    infinite = _infinity(left), _infinity(right)
    if any(infinite):
        return infinite[0] == infinite[1]
    if _same_at_probes(left, right):
        return True
    bases = _log_bases(left), _log_bases(right)
    for one, other, base in ((left, right, bases[1]), (right, left, bases[0])):
        if contains(one, "call", "log") and None in _log_bases(one) and len(base) == 1 and None not in base:
            (known,) = base
            return known is not None and _same_at_probes(_with_base(one, known), other)
    return False


def _infinity(node: Node) -> int:
    """Sign of an infinity, 0 for anything else."""
    if node.kind == "constant" and node.name == "infinity":
        return 1
    return -_infinity(node.children[0]) if node.kind == "neg" else 0


def _log_bases(node: Node) -> set[Node | None]:
    found: set[Node | None] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        if node.kind == "call" and node.name in ("log", "lg"):
            found.add(node.children[1] if len(node.children) > 1 else _TEN if node.name == "lg" else None)
        stack.extend(node.children)
    return found


_TEN = Node("number", value=Fraction(10))


def _with_base(node: Node, base: Node) -> Node:
    children = tuple(_with_base(child, base) for child in node.children)
    if node.kind == "call" and node.name == "log" and len(children) == 1:
        children = (*children, base)
    return node._replace(children=children)


# -------------------------------------------------------------------------------------------------------------- probes


def _same_at_probes(left: Node, right: Node) -> bool:
    names = sorted(symbols(left) | symbols(right))
    if not names:
        return _same_constant(left, right)
    is_complex = contains(left, "constant", "i") or contains(right, "constant", "i")
    agreeing = 0
    # Whole numbers where (-1)^n has no real value between them, small ones for ln(1 - z), complex values at last.
    for kind, complex_too in (
        ("rational", is_complex),
        ("integer", is_complex),
        ("small", is_complex),
        ("small", True),
    ):
        for probe in range(_NUM_PROBES):
            point = {name: _probe(name, probe, kind) for name in names}
            same = _same_at(left, right, point, is_complex=complex_too)
            if same is False:
                return False
            agreeing += same is True
        if agreeing >= _MIN_AGREEING:
            return True
    raise Refused("defined at too few points")


def _probe(name: str, probe: int, kind: str) -> Fraction:
    """Value of a symbol at a probe: positive at the first two, negative at the third, of either sign at the last."""
    digest = int.from_bytes(hashlib.sha256(f"{name} {probe}".encode("utf-8", "replace")).digest()[:6], "big")
    if kind == "integer":
        return Fraction(1 + probe + digest % 7)
    if kind == "small":
        return Fraction(1 + digest % 97, 101)
    value = Fraction(1, 3) + Fraction(digest % 9973, 4999)
    return -value if probe == 2 or (probe == 3 and digest % 2) else value


def _same_at(left: Node, right: Node, point: Mapping[str, Fraction], *, is_complex: bool) -> bool | None:
    """Compare at a point; `None` where a side is undefined or leaves the real numbers."""
    exact = exact_value(left, point), exact_value(right, point)
    if exact[0] is not None and exact[1] is not None:
        return exact[0] == exact[1]
    try:
        one, other = (_constant(side, point, is_real=not is_complex) for side in (left, right))
    except (Undefined, Refused):
        return None
    return _equal(one, other)


def _same_constant(left: Node, right: Node) -> bool:
    exact = exact_value(left, {}), exact_value(right, {})
    if exact[0] is not None and exact[1] is not None:
        return exact[0] == exact[1]
    try:
        values = [_constant(left, {}), _constant(right, {})]
    except Undefined:
        return False  # 1/0 equals nothing
    return _equal(*values)


def _equal(one: _Value, other: _Value) -> bool:
    if not one.digits or not other.digits:
        return not one.digits and not other.digits
    gap = abs(one.value - other.value)
    return bool(gap <= _context().mpf(10) ** -(min(one.digits, other.digits) - 3) * abs(one.value))


def _constant(node: Node, point: Mapping[str, Fraction], *, is_real: bool = False) -> _Value:
    """Value of a formula at a point, to the digits that two precisions agree on."""
    context = _context()
    first, second = (_at(node, point, digits, is_real=is_real) for digits in (_DIGITS, _MORE_DIGITS))
    for digits, more in ((_DIGITS, _MORE_DIGITS), (_MORE_DIGITS, _MOST_DIGITS)):
        context.dps = more
        gap = abs(first - second)
        if not gap:
            return _Value(second, float(more)) if second else _Value(second, 0.0)
        agreed = -float(context.log10(gap / abs(second))) if second else 0.0
        if agreed > digits / 3:
            return _Value(second, more - max(digits - agreed, 0.0) - 3)
        if more < _MOST_DIGITS:
            first, second = second, _at(node, point, _MOST_DIGITS, is_real=is_real)
    if abs(second) < context.mpf(10) ** -(_MOST_DIGITS / 2):
        return _Value(second, 0.0)  # it shrinks with the precision: the rounding error of a zero
    raise Refused("its digits cannot be trusted")


def approximately(node: Node, value: Fraction, half_unit: Fraction) -> bool:
    """Return whether a constant formula lies within half a unit of a rounded value.

    Raises:
        Refused: If its value can't be computed.
    """
    if symbols(node) or _infinity(node):
        return False
    try:
        result = _constant(node, {})
    except Undefined:
        return False
    context = _context()
    return bool(abs(result.value - _rational(value)) <= _rational(half_unit) * (1 + context.mpf(10) ** -20))


def ratio(left: Node, right: Node) -> int:
    """Sign of the constant that two formulas differ by as a factor, 0 if there is none.

    Two equations f = 0 and g = 0 are the same if f / g is a constant; two inequalities, if it is positive.

    Raises:
        Refused: If it can't be told.
    """
    names = sorted(symbols(left) | symbols(right))
    quotients: list[Any] = []
    for probe in range(_NUM_PROBES + 2):
        point = {name: _probe(name, probe, "rational") for name in names}
        try:
            one, other = _constant(left, point), _constant(right, point)
        except (Undefined, Refused):
            continue
        if not one.digits or not other.digits:
            if one.digits or other.digits:
                return 0
            continue
        quotients.append(one.value / other.value)
    if len(quotients) < _MIN_AGREEING:
        raise Refused("defined at too few points")
    first, context = quotients[0], _context()
    if any(abs(quotient - first) > context.mpf(10) ** -25 * abs(first) for quotient in quotients):
        return 0
    return 1 if context.re(first) > 0 else -1


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
def _context() -> Any:
    """A context of our own: mpmath's global one belongs to the caller."""
    import mpmath

    return mpmath.MPContext()


def _rational(value: Fraction) -> Any:
    context = _context()
    return context.mpf(value.numerator) / value.denominator


def rough_value(node: Node) -> tuple[bool, float]:
    """Return whether a constant is a positive number, and the binary logarithm of its absolute value.

    Raises:
        TooLarge: If it doesn't fit in memory.
        Undefined: If it has no finite value, or has symbols.
    """
    if symbols(node):
        raise Undefined
    value = _at(node, {}, _DIGITS, is_real=False)
    context = _context()
    if not value:
        return False, -math.inf
    is_positive = not context.im(value) and context.re(value) > 0
    return bool(is_positive), float(context.log(abs(value)) / context.ln2)


def _at(node: Node, point: Mapping[str, Fraction], digits: int, *, is_real: bool) -> Any:
    context = _context()
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
            return _rational(node.value)
        case "symbol":
            return _rational(point.values[node.name])
        case "constant":
            return _constant_value(node.name)
        case "apply":
            return _unknown_function(node, point)
    value = _operate(node, [_evaluate(child, point) for child in node.children])
    if point.is_real and _context().im(value):
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
    context = _context()
    largest = max(_size(operand) for operand in operands)
    for child, operand in zip(node.children, operands, strict=True):
        number = child.children[0] if child.kind == "neg" else child
        if number.kind == "number" and operand and _size(operand) < largest - context.prec + 20:
            raise Refused("its digits cannot be trusted")
    return context.fsum(operands)


def _constant_value(name: str) -> Any:
    context = _context()
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
    context = _context()
    arguments = [context.nstr(context.mpc(_evaluate(child, point)), 20) for child in node.children]
    return _rational(_probe(f"{node.name}({', '.join(arguments)})", 0, "rational"))


def _size(value: Any) -> float:
    """Binary logarithm of the absolute value."""
    if not value:
        return -math.inf
    return float(_context().mag(value))


def _power(base: Any, exponent: Any) -> Any:
    context = _context()
    if not base:
        if context.re(exponent) > 0:
            return context.mpf(0)
        if not exponent:
            return context.mpf(1)
        raise Undefined
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
    context = _context()
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
    context = _context()
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
    context = _context()
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
    context = _context()
    if max(_size(upper), _size(lower)) > math.log2(_MAX_FACTORIAL):
        raise TooLarge
    return context.binomial(upper, lower)


def _integers(function: Callable[..., int], operands: list[Any]) -> Any:
    context = _context()
    if any(context.im(operand) or operand != context.nint(operand) or _size(operand) > 400 for operand in operands):
        raise Undefined
    return context.mpf(function(*(int(operand) for operand in operands)))
