"""Bounds on the size of constants that are too large to compute: power towers, factorials of factorials.

A bound is an interval for the binary logarithm of the absolute value. `inf` is a logarithm beyond 10^308.
"""

import math

from .errors import Refused
from .formula import Node
from .values import TooLarge, Undefined, rough_value

Bounds = tuple[float, float]
_UNKNOWN: Bounds = (-math.inf, math.inf)
_HUGE = 1e300


def differ_in_size(left: Node, right: Node) -> bool:
    """Return whether the sizes of two formulas without symbols cannot be equal."""
    one, other = bounds(left), bounds(right)
    return one[0] > other[1] + 1 or other[0] > one[1] + 1


def bounds(node: Node) -> Bounds:
    """Return an interval that holds log2 |node|."""
    try:
        size = rough_value(node)[1]
    except (TooLarge, Refused):
        return _rule(node)
    except Undefined:
        return _UNKNOWN
    return size - 1e-6, size + 1e-6


def _rule(node: Node) -> Bounds:
    match node.kind:
        case "neg":
            return bounds(node.children[0])
        case "add":
            return _of_sum([bounds(child) for child in node.children])
        case "mul":
            left, right = (bounds(child) for child in node.children)
            return _plus(left[0], right[0], -math.inf), _plus(left[1], right[1], math.inf)
        case "div":
            left, right = (bounds(child) for child in node.children)
            return _plus(left[0], -right[1], -math.inf), _plus(left[1], -right[0], math.inf)
        case "pow":
            return _of_power(*node.children)
        case "factorial":
            return _of_factorial(bounds(node.children[0]))
        case "call":
            return _of_call(node)
    return _UNKNOWN


def _plus(one: float, other: float, unknown: float) -> float:
    total = one + other
    return unknown if math.isnan(total) else total


def _of_sum(terms: list[Bounds]) -> Bounds:
    """The largest term decides if it is out of the others' reach; else they may cancel."""
    largest = max(terms)
    upper = max(high for _, high in terms) + math.log2(len(terms))
    others = [term for term in terms if term is not largest]
    reach = max(high for _, high in others) + math.log2(len(terms)) + 1
    return (largest[0] - 1 if largest[0] > reach else -math.inf), upper


def _two_to(power: float) -> float:
    return 2.0**power if power < 1000 else math.inf


def _times(one: float, other: float) -> float:
    return 0.0 if not one or not other else one * other


def is_positive(node: Node) -> bool:
    """Return whether a formula is certainly a positive number."""
    try:
        return rough_value(node)[0]
    except Undefined:
        return False
    except (TooLarge, Refused):
        pass
    match node.kind:
        case "pow" | "mul" | "div" | "factorial":
            return all(is_positive(child) for child in node.children)
        case "add":
            return _is_positive_sum(node)
        case "call":
            is_log = node.name in ("ln", "log", "lg") and bounds(node.children[0])[0] > 0
            return node.name in ("exp", "cosh", "binom") or (is_log and is_positive(node.children[-1]))
    return False


def _is_positive_sum(node: Node) -> bool:
    if all(is_positive(child) for child in node.children):
        return True
    leading = max(node.children, key=lambda child: bounds(child)[0])
    rest = max((bounds(child)[1] for child in node.children if child is not leading), default=-math.inf)
    return is_positive(leading) and bounds(leading)[0] > rest + math.log2(len(node.children)) + 1


def _of_power(base: Node, exponent: Node) -> Bounds:
    low, high = bounds(base)
    if exponent.kind == "neg":
        inverse = _of_power(base, exponent.children[0])
        return -inverse[1], -inverse[0]
    if not is_positive(exponent):
        return _UNKNOWN
    times = tuple(_two_to(bound) for bound in bounds(exponent))
    ends = [_times(bound, time) for bound in (low, high) for time in times]
    return min(ends), max(ends)


def _of_factorial(argument: Bounds) -> Bounds:
    """N! lies between (n/e)^n and n^n for n of at least 1."""
    if argument[0] < 0:
        return _UNKNOWN
    low, high = argument
    return _times(_two_to(low), max(low - 1.45, 0.0)), _times(_two_to(high), high)


def _of_call(node: Node) -> Bounds:
    low, high = bounds(node.children[0]) if node.children else _UNKNOWN
    match node.name:
        case "sin" | "cos":
            return -math.inf, 0.0
        case "exp" | "sinh" | "cosh":
            if not is_positive(node.children[0]) or low < 2:
                return _UNKNOWN
            return _times(_two_to(low), 1.44) - 2, _times(_two_to(high), 1.45) + 2
        case "ln" | "log" | "lg":
            if low < 4 or (len(node.children) > 1 and bounds(node.children[1])[1] > 64):
                return _UNKNOWN
            return -8.0, (math.log2(high) if high < _HUGE else math.inf) + 8
        case "binom":
            return (-math.inf, _two_to(high))
        case "abs":
            return low, high
        case "floor" | "ceil" if low > 1:
            return low - 1, high + 1
    return _UNKNOWN
