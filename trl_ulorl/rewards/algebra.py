"""Integrals, sums, products, limits and derivatives, by math-verify's parser and SymPy.

Runs in a worker with a hard limit only: nothing here is sure to end.
"""

import logging
import re
from dataclasses import replace
from typing import Any

from .errors import Refused

_DECIMAL = re.compile(r"(\d*)\.(\d+)", re.ASCII)
_MAX_CHARACTERS = 600
_PROBES = (("3/7", "11/13"), ("23/9", "29/31"), ("-5/3", "17/19"))
_MIN_AGREEING = 2
_DIGITS = 25


def same_by_algebra(prediction: str, reference: str) -> bool:
    """Return whether two normalised formulas are equal once all sums and integrals in them are carried out.

    Raises:
        Refused: If math-verify is missing, can't read the reference, or leaves something that can't be computed.
    """
    left_name, prediction = _definition(prediction)
    right_name, reference = _definition(reference)
    if left_name and right_name and left_name != right_name:
        return False
    expected = parse(reference)
    if expected is None:
        raise Refused("the reference is no formula that math-verify can read")
    answer = parse(prediction)
    return answer is not None and _same(answer, expected)


def _definition(text: str) -> tuple[str, str]:
    match = re.match(r"([A-Za-z](?:_\w|_\{[^{}]*\})?(?:\(\w\))?)=(?!=)", text)
    return (match[1], text[match.end() :]) if match else ("", text)


def parse(latex: str) -> Any:
    """SymPy object of a formula, not evaluated; `None` if it cannot be read."""
    if len(latex) > _MAX_CHARACTERS:
        raise Refused(f"longer than {_MAX_CHARACTERS} characters")
    try:
        import math_verify
    except ImportError as error:
        raise Refused('needs math-verify: `pip install "trl-ulorl[math]"`') from error

    # It warns of its switched-off time-out, which is deliberate: SIGALRM is no bound, a killed process is.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # As fractions decimals stay exact, else 1.41421356 would equal a square root by rounding.
    latex = _DECIMAL.sub(lambda match: rf"\frac{{{match[1]}{match[2]}}}{{1{'0' * len(match[2])}}}", latex)
    target = math_verify.LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    target = replace(target, normalization_config=replace(target.normalization_config, units=False, boxed="last"))
    parsed = math_verify.parse(
        rf"\boxed{{{latex}}}",
        # LaTeX only: the parser for plain text evaluates its input as Python.
        extraction_config=[target],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
        raise_on_error=True,
    )
    return parsed[0] if parsed else None


def _same(answer: Any, expected: Any) -> bool:
    import sympy

    if not all(isinstance(side, sympy.Expr) and not side.is_Matrix for side in (answer, expected)):
        import math_verify

        return bool(math_verify.verify(expected, answer, timeout_seconds=None, raise_on_error=True))
    answer, expected = (_with_long_totals(side).doit() for side in (answer, expected))
    if answer == expected:
        return True
    # By name, as the parser may give one letter different assumptions on the two sides.
    names = sorted({symbol.name for symbol in answer.free_symbols | expected.free_symbols})
    agreeing = 0
    for start, step in _PROBES:
        values = {name: sympy.Rational(start) + k * sympy.Rational(step) for k, name in enumerate(names)}
        sides = [side.xreplace({s: values[s.name] for s in side.free_symbols}) for side in (answer, expected)]
        same = _same_number(*(side.doit().evalf(_DIGITS) for side in sides))
        if same is False or (same and not names):
            return same
        agreeing += same is True
    if agreeing < _MIN_AGREEING:
        raise Refused("it has no value that SymPy can compute")
    return True


_MOST_TERMS = 1000


def _with_long_totals(expression: Any) -> Any:
    """Put values in the place of long sums and products, which SymPy would carry out term by term."""
    import sympy

    values = {}
    for node in expression.atoms(sympy.Sum, sympy.Product):
        if len(node.limits) != 1 or node.free_symbols:
            continue
        _, low, high = node.limits[0]
        if low.is_Integer and high.doit().is_Integer and high.doit() - low > _MOST_TERMS:
            is_sum = isinstance(node, sympy.Sum)
            term = node.function if is_sum else sympy.log(node.function)
            total = _long_sum(sympy.Sum(term, (node.limits[0][0], low, high.doit())))
            values[node] = total if is_sum else sympy.exp(total)
    return expression.xreplace(values)


def _long_sum(total: Any) -> Any:
    """Euler-Maclaurin, which states its error."""
    value, error = (part.evalf(_DIGITS + 10) for part in total.euler_maclaurin(m=20, n=20, eval_integral=True))
    if not (value.is_Float and error.is_number) or not abs(error) <= 1e-22 * max(abs(value), 1):
        raise Refused("its sum cannot be computed")
    return value


def _same_number(left: Any, right: Any) -> bool | None:
    """Compare relatively; `None` where a side has no finite value."""
    if not (left.is_number and right.is_number):
        return None
    gap, *sizes = (abs(value).evalf(_DIGITS) for value in (left - right, left, right))
    if not all(value.is_Float or value.is_zero for value in (gap, *sizes)):
        return None
    return bool(gap <= 1e-18 * max(sizes))
