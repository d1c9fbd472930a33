r"""Compare two formulas by their values: an identity test at probe points, relatively and at two precisions.

Constants are computed to 40 and 130 digits; what the two agree on is trusted. So 1/2004! differs from 1/2006!, and
$e^{\pi\sqrt{163}}$ from the integer that it misses by $10^{-12}$. Formulas with symbols are compared where the symbols
have fixed, seemingly random values: two that agree at several such points are the same, as with polynomials after
Schwartz and Zippel. No simplifier is involved, which might not end.

Numbers too large for that (power towers) are compared by bounds on their size, see `magnitude`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from .errors import Refused
from .formula import Node, contains, symbols
from .values import TooLarge, Undefined, exact_value, mp, probe_value, to_float, value_at

_DIGITS, _MORE_DIGITS, _MOST_DIGITS = 40, 130, 500
_NUM_PROBES = 4
_MIN_AGREEING = 2
_FAR = 10**7


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
            point = {name: probe_value(name, probe, kind) for name in names}
            same = _same_at(left, right, point, is_complex=complex_too)
            if same is False:
                return False
            agreeing += same is True
        if agreeing >= _MIN_AGREEING:
            return not (_is_piecewise(left) or _is_piecewise(right)) or not _differs_far_out(left, right, names)
    raise Refused("defined at too few points")


_PIECEWISE = frozenset("abs max min floor ceil sgn".split())


def _is_piecewise(node: Node) -> bool:
    """Whether a formula may follow another rule elsewhere: |x - 1000| is 1000 - x at all small x only."""
    stack = [node]
    while stack:
        node = stack.pop()
        is_root = node.kind == "pow" and node.children[1].kind == "div" and bool(symbols(node.children[0]))
        if is_root or (node.kind == "call" and node.name in _PIECEWISE):
            return True
        stack.extend(node.children)
    return False


def _differs_far_out(left: Node, right: Node, names: list[str]) -> bool:
    """Whether values differ at large numbers of either sign, as far as they can be told."""
    for probe in range(_NUM_PROBES):
        point = {name: probe_value(name, probe, "rational") * _FAR for name in names}
        try:
            if _same_at(left, right, point, is_complex=False) is False:
                return True
        except TooLarge:
            continue
    return False


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
    return bool(gap <= mp().mpf(10) ** -(min(one.digits, other.digits) - 3) * abs(one.value))


def _constant(node: Node, point: Mapping[str, Fraction], *, is_real: bool = False) -> _Value:
    """Value of a formula at a point, to the digits that two precisions agree on."""
    context = mp()
    first, second = (value_at(node, point, digits, is_real=is_real) for digits in (_DIGITS, _MORE_DIGITS))
    for digits, more in ((_DIGITS, _MORE_DIGITS), (_MORE_DIGITS, _MOST_DIGITS)):
        context.dps = more
        gap = abs(first - second)
        if not gap:
            return _Value(second, float(more)) if second else _Value(second, 0.0)
        agreed = -float(context.log10(gap / abs(second))) if second else 0.0
        if agreed > digits / 3:
            return _Value(second, more - max(digits - agreed, 0.0) - 3)
        if more < _MOST_DIGITS:
            first, second = second, value_at(node, point, _MOST_DIGITS, is_real=is_real)
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
    context = mp()
    return bool(abs(result.value - to_float(value)) <= to_float(half_unit) * (1 + context.mpf(10) ** -20))


def ratio(left: Node, right: Node) -> int:
    """Sign of the constant that two formulas differ by as a factor, 0 if there is none.

    Two equations f = 0 and g = 0 are the same if f / g is a constant; two inequalities, if it is positive.

    Raises:
        Refused: If it can't be told.
    """
    names = sorted(symbols(left) | symbols(right))
    quotients: list[Any] = []
    for probe in range(_NUM_PROBES + 2):
        point = {name: probe_value(name, probe, "rational") for name in names}
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
    first, context = quotients[0], mp()
    if any(abs(quotient - first) > context.mpf(10) ** -25 * abs(first) for quotient in quotients):
        return 0
    return 1 if context.re(first) > 0 else -1
