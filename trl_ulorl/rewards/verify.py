r"""Decide whether a model's answer equals the reference, in stages from the cheapest to the dearest.

A stage is a pure function of two normalised answers that says yes, no or nothing; the first to speak decides. What no
stage can decide stays `None`, which is the seam for a dearer verifier behind this one.
"""

import logging
import math
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from .extraction import extract_answer, extract_reference, normalize_answer

logger = logging.getLogger(__name__)

Stage = Callable[[str, str], bool | None]


@dataclass(frozen=True)
class Verdict:
    """Outcome of one comparison.

    Attributes:
        equivalent: Whether the answers are equal; `None` if that could not be decided.
        stage: What decided, one of `STAGE_NAMES`.
        prediction: The normalised answer of the model; empty if it gave none.
        reference: The normalised reference.
        detail: Why nothing was decided; empty otherwise.
    """

    equivalent: bool | None
    stage: str
    prediction: str
    reference: str
    detail: str = ""


class Refused(Exception):
    """Raised by a stage that knows that neither it nor a later one can decide the pair."""


def verify_answer(prediction: str, reference: str) -> Verdict:
    r"""Compare the final answer of a model's output with the reference.

    Never raises on text, runs in any thread and starts no timer or process. Instead, formulas that look as if their
    evaluation would not end are refused beforehand: that bounds the time in practice, but not in principle.

    Args:
        prediction: A model's whole output.
        reference: A short answer, bare or boxed, or a solution that ends in it.

    Returns:
        The verdict. No answer in the output is `False`; an empty reference, a refused pair or an error is `None`.

    Example:
        >>> verify_answer(r"Half of it: \boxed{\frac12}", "0.5")
        Verdict(equivalent=True, stage='numeric', prediction='\\frac{1}{2}', reference='0.5', detail='')
        >>> verify_answer("Half of it.", "0.5").stage
        'extraction'
    """
    answer, expected, stage = "", "", "reference"
    try:
        raw_expected = extract_reference(reference)
        expected = _normalize(raw_expected)
        if not expected:
            return Verdict(None, stage, answer, expected, "the reference holds no answer")
        stage = "extraction"
        raw_answer = extract_answer(prediction)
        answer = _normalize(raw_answer or "")
        if not answer:
            return Verdict(False, stage, answer, expected)
        if raw_answer == raw_expected:
            return Verdict(True, "exact", answer, expected)
        for stage, compare in STAGES:
            equivalent = compare(answer, expected)
            if equivalent is not None:
                return Verdict(equivalent, stage, answer, expected)
    except Refused as refusal:
        return Verdict(None, "refused", answer, expected, f"{stage}: {refusal}")
    except Exception as error:
        logger.debug("The %s stage failed.", stage, exc_info=True)
        return Verdict(None, "error", answer, expected, f"{stage}: {type(error).__name__}")
    return Verdict(None, "undecided", answer, expected, "no stage applies")


# Longer answers are compared character by character only.
_MAX_NORMALIZED_CHARACTERS = 10_000


def _normalize(answer: str) -> str:
    return normalize_answer(answer) if len(answer) <= _MAX_NORMALIZED_CHARACTERS else answer.strip()


def same_text(prediction: str, reference: str) -> bool | None:
    """Equal after normalisation; words may differ in case, symbols may not."""
    if prediction == reference:
        return True
    both_words = _PLAIN_WORDS.fullmatch(prediction) and _PLAIN_WORDS.fullmatch(reference)
    return True if both_words and prediction.casefold() == reference.casefold() else None


_PLAIN_WORDS = re.compile(r"[^\W\d_]{3,}(?:[ ,'-][^\W\d_]+)*")
_TRUTH = {"yes": True, "true": True, "no": False, "false": False}


def same_truth(prediction: str, reference: str) -> bool | None:
    """Yes equals true, no equals false; anything else against a truth value is wrong."""
    expected = _TRUTH.get(reference.casefold())
    return None if expected is None else _TRUTH.get(prediction.casefold()) is expected


_DECIMAL = r"(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)(?:\\frac\{{(?P<numerator>-?\d+)\}}\{{(?P<denominator>-?\d+)\}}"
    rf"|(?P<value>{_DECIMAL})"
    rf"(?:/(?P<divisor>{_DECIMAL})|(?:e|(?:\\times|\\cdot|\*)\s?10\^)\{{?(?P<exponent>[+-]?\d{{1,4}})\}}?)?)(?P<percent>%?)",
    re.ASCII | re.IGNORECASE,
)
# Under the length at which Python refuses to turn text into integers (4,300 digits by default).
_MAX_NUMBER_CHARACTERS = 4000


def same_number(prediction: str, reference: str) -> bool | None:
    """Compare two plain numbers exactly; a percent sign on one side only may be read either way."""
    if max(len(prediction), len(reference)) > _MAX_NUMBER_CHARACTERS:
        return None
    left, right = _NUMBER.fullmatch(prediction), _NUMBER.fullmatch(reference)
    if left is None or right is None or (a := _fraction(left)) is None or (b := _fraction(right)) is None:
        return None
    percent_on_one_side = bool(left["percent"]) != bool(right["percent"])
    return a == b or (percent_on_one_side and (a == b / 100 or a / 100 == b))


def _fraction(number: re.Match[str]) -> Fraction | None:
    """Exact value without the percent sign; `None` for a zero denominator."""
    plain = (number["value"] or number["numerator"]).replace(",", "")
    divisor = Fraction((number["divisor"] or number["denominator"] or "1").replace(",", ""))
    if divisor == 0:
        return None
    value = Fraction(plain) / divisor * Fraction(10) ** int(number["exponent"] or 0)
    return -value if number["sign"] == "-" else value


_FUNCTIONS = (
    "(?:arc)?(?:sin|cos|tan)|(?:sin|cos|tan)h|cot|sec|csc|log|exp|ln|det|gcd|lcm|max|min|mod|dim|ker|arg|sqrt|pi"
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{\w+\*?\}")
_WORD = re.compile(rf"(?<![\\A-Za-z])(?!(?:{_FUNCTIONS})(?![A-Za-z]))[A-Za-z]{{3,}}|[\u3400-\u9fff]")


def no_words(prediction: str, reference: str) -> bool | None:
    """Keep prose from the algebra, which would read it as a product of letters.

    Two different texts may mean the same, so against a reference in words nothing is decided. Words against a formula
    are wrong: undecided, they would let a model escape the reward of a wrong answer by adding words.
    """
    in_prediction, in_reference = (bool(_WORD.search(_ENVIRONMENT.sub("", text))) for text in (prediction, reference))
    if in_reference:
        raise Refused("the reference is text")
    return False if in_prediction else None


def same_expression(prediction: str, reference: str) -> bool | None:
    """Compare by computer algebra (math-verify)."""
    for text in (prediction, reference):
        _refuse_unsafe_text(text)
    with _ALGEBRA_LOCK:
        expected = _parse(reference)
        if expected is None:
            raise Refused("the reference is no formula that math-verify can read")
        answer = _parse(prediction)
        if answer is None:
            return False
        _refuse_large(_bits, _MAX_BITS, answer, expected)
        if _differ(answer, expected):
            return False
        _refuse_large(_terms, _MAX_TERMS, answer, expected)
        return _algebraically_equal(answer, expected)


STAGES: tuple[tuple[str, Stage], ...] = (
    ("normalized", same_text),
    ("boolean", same_truth),
    ("numeric", same_number),
    ("words", no_words),
    ("symbolic", same_expression),
)
STAGE_NAMES = ("reference", "extraction", "exact", *(name for name, _ in STAGES), "refused", "error", "undecided")
"""What may decide, or fail to: see `Verdict.stage`."""

# The LaTeX parser shares its tables between calls without locks of its own.
_ALGEBRA_LOCK = threading.Lock()

_MAX_FORMULA_CHARACTERS, _MAX_NESTING = 600, 12
_MAX_BITS, _MAX_TERMS = 400_000.0, 100_000.0
_LONG_DIGITS = re.compile(r"\d{60}")
# These are computed while they are parsed, hence before the size of their arguments is known.
_EAGER = re.compile(r"\\d?binom|\\gcd|\\lcm|\\Gamma|\\det|[vV]matrix|\\mod|\bmod\b")
_LARGE_ARGUMENT = re.compile(r"\d{5}|\d[\s)}\]]*\^|!")
_SLOW_TO_PARSE = re.compile(r"binom(?!\{\d+\}).*\d{3}|matrix\}\)?\^\{?\d\d")


def _refuse_unsafe_text(text: str) -> None:
    """Refuse what could hang the parser."""
    if len(text) > _MAX_FORMULA_CHARACTERS:
        raise Refused(f"longer than {_MAX_FORMULA_CHARACTERS} characters")
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    if deepest > _MAX_NESTING:
        raise Refused(f"nested more than {_MAX_NESTING} deep")
    eager = _EAGER.search(text) and _LARGE_ARGUMENT.search(text)
    if eager or _LONG_DIGITS.search(text) or _SLOW_TO_PARSE.search(text):
        raise Refused("numbers too large")


_PLAIN_FUNCTION = re.compile(rf"(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])")
_DECIMAL_IN_FORMULA = re.compile(r"(\d*)\.(\d+)", re.ASCII)


def _parse(answer: str) -> Any:
    """SymPy object of a formula, not evaluated; `None` if it cannot be read."""
    try:
        import math_verify
    except ImportError as error:
        raise Refused('needs math-verify: `pip install "trl-ulorl[math]"`') from error

    # It warns of its switched-off time-out, which is deliberate: see `_algebraically_equal`.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    latex = _PLAIN_FUNCTION.sub(r"\\\1 ", answer).replace("%", r"\cdot\frac{1}{100}")
    # As fractions decimals stay exact, else 1.41421356 would equal a square root by rounding.
    latex = _DECIMAL_IN_FORMULA.sub(lambda m: rf"\frac{{{m[1]}{m[2]}}}{{1{'0' * len(m[2])}}}", latex)
    target = math_verify.LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    # Units stay as symbols: stripped, 27 cm would equal 27 m.
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


def _algebraically_equal(prediction: Any, reference: Any) -> bool:
    """Ask math-verify, without its time-out: SIGALRM needs the main thread and cancels the caller's own alarm."""
    import math_verify

    return bool(math_verify.verify(reference, prediction, timeout_seconds=None, raise_on_error=True))


_NEVER_EVALUATED = {"Sum", "Product", "Integral", "Limit", "Derivative", "Subs"}
_POWERS = {"Pow", "factorial", "factorial2", "gamma"}
_EXPONENTIALS = {"exp", "sinh", "cosh", "tanh", "coth"}
_CONTAINERS = {"Add", "Tuple", "FiniteSet", "MutableDenseMatrix"}


def _children(node: Any) -> list[Any]:
    """Operands of a SymPy node; a matrix holds its entries outside `args`."""
    return list(node.flat() if hasattr(node, "flat") else node.args)


def _bits(node: Any) -> float:
    """Rough upper bound on the binary digits of the numbers that evaluating a SymPy tree would produce."""
    name, children = type(node).__name__, _children(node)
    if name in _NEVER_EVALUATED:
        return float("inf")
    if not children:
        return float(node.p.bit_length() + node.q.bit_length()) if getattr(node, "is_Rational", False) else 2.0
    sizes = [_bits(child) for child in children]
    if name in _POWERS or name in _EXPONENTIALS:
        return _power_bits(children[-1], sizes[0] if name in _POWERS else 2.0, sizes[-1])
    return max(sizes) + len(sizes) if name in _CONTAINERS else sum(sizes)


def _power_bits(exponent: Any, base_bits: float, exponent_bits: float) -> float:
    """Size of base^exponent; n! counts as n^n."""
    if not exponent.is_number:
        return base_bits + exponent_bits
    exact = exponent.is_Rational and exponent_bits < 64
    return base_bits * max(abs(float(exponent)) if exact else 2.0 ** min(exponent_bits, 64.0), 1.0)


def _terms(node: Any) -> float:
    """Rough upper bound on the terms of a SymPy tree multiplied out; a function counts double, for its identities."""
    name, children = type(node).__name__, _children(node)
    if not children:
        return 1.0
    counts = [_terms(child) for child in children]
    if name == "Pow" and getattr(children[1], "is_Integer", False):
        return float(min(counts[0] ** min(abs(int(children[1])), 60), 1e9))
    if name == "Mul":
        return min(math.prod(counts), 1e9)
    return sum(counts) + (name not in _CONTAINERS)


def _refuse_large(size: Callable[[Any], float], limit: float, *nodes: Any) -> None:
    if any(size(node) > limit for node in nodes):
        raise Refused(f"evaluating it might not end (over {limit:.0f} {size.__name__.strip('_')})")


_PROBES = (("3/7", "11/13"), ("-5/3", "17/19"), ("23/9", "-29/31"))


def _differ(a: Any, b: Any) -> bool:
    """Whether two expressions have different values at some point.

    It spares the simplifier, which is slow above all where there is nothing to find, and compares relatively where
    math-verify rounds: 10^-20 would equal 10^-21.
    """
    import sympy

    def is_name(side: Any) -> bool:  # compared letter by letter there: the symbol abc equals a times b times c
        return all(factor.is_Symbol or factor is sympy.E for factor in sympy.Mul.make_args(side))

    equations = [side for side in (a, b) if isinstance(side, sympy.Eq)]
    if len(equations) == 1:  # x = 5 stands for 5, but x - 5 = 0 does not stand for 0
        if equations[0].rhs == 0 and equations[0].lhs.is_Add and equations[0].free_symbols:
            return True
        a, b = (side.rhs if side in equations and side.lhs.is_Symbol else side for side in (a, b))
    if not all(isinstance(side, sympy.Expr) and not side.is_Matrix for side in (a, b)) or (is_name(a) and is_name(b)):
        return False
    # By name, as the parser may give one letter different assumptions on the two sides.
    names = sorted({symbol.name for symbol in a.free_symbols | b.free_symbols})
    for start, step in _PROBES if names else _PROBES[:1]:
        values = {name: sympy.Rational(start) + k * sympy.Rational(step) for k, name in enumerate(names)}
        left, right = (side.xreplace({symbol: values[symbol.name] for symbol in side.free_symbols}) for side in (a, b))
        _refuse_large(_bits, _MAX_BITS, left, right)
        if _apart(left, right):
            return True
    return False


def _apart(a: Any, b: Any) -> bool:
    """Whether two constants differ in the first 15 digits; no, where they have no finite value."""
    left, right = a.evalf(30), b.evalf(30)
    gap, *sizes = (abs(value).evalf(15) for value in (left - right, left, right))
    if not all(value.is_Float or value.is_zero for value in (gap, *sizes)):
        return False
    # So close to zero, digits may be the noise of an exact zero: only an exact comparison can tell.
    return (a - b).equals(0) is False if max(sizes) < 1e-60 else bool(gap > 1e-15 * max(sizes))
