r"""The stages that need no algebra: each a pure function of two answers that says yes, no or nothing.

They take linear time, so they run where they are called. What none of them decides is left as a `Pending` pair of
formulas, which `symbolic` compares in a worker process that can be killed.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from .choices import has_words, same_choice, same_truth, same_words
from .errors import Refused
from .extraction import extract_answer, extract_reference
from .normalize import Answer, to_answer
from .numbers import Number, decimal_comma, read_number, same_value
from .numerals import read_ordinal
from .units import Formulas, same_quantity


@dataclass(frozen=True)
class Verdict:
    """Outcome of one comparison.

    Attributes:
        equivalent: Whether the answers are equal; `None` if that could not be decided.
        stage: What decided, one of `STAGE_NAMES`.
        prediction: The normalised answer of the model; empty if it gave none.
        reference: The normalised reference.
        detail: Why nothing was decided; empty otherwise.
        presumed: Whether the answers are taken as different only because their words or signs are, so that a judge
            may know better.
        forms: The two normal forms that the deciding stage compared, such as `27/100 meter` for 27 cm.
    """

    equivalent: bool | None
    stage: str
    prediction: str
    reference: str
    detail: str = ""
    presumed: bool = False
    forms: tuple[str, str] = ("", "")

    @property
    def is_open(self) -> bool:
        """Whether rules leave the pair to a judge: both have an answer, and what rules say is not certain."""
        has_answers = bool(self.prediction and self.reference)
        return has_answers and (self.presumed or self.equivalent is None)


class Pending(NamedTuple):
    """A pair that only algebra can decide.

    Attributes:
        left: Formula of the prediction.
        right: Formula of the reference.
        stage: Name of the stage that the verdict counts for.
        prediction: The model's answer.
        reference: The reference.
    """

    left: str
    right: str
    stage: str
    prediction: Answer
    reference: Answer

    def decided(self, equivalent: bool, *, presumed: bool) -> Verdict:
        """Return the verdict."""
        return Verdict(
            equivalent,
            self.stage,
            self.prediction.form,
            self.reference.form,
            presumed=presumed,
            forms=(self.left, self.right),
        )

    def undecided(self, stage: str, detail: str) -> Verdict:
        """Return the verdict that there is none."""
        return Verdict(
            None,
            stage,
            self.prediction.form,
            self.reference.form,
            f"{self.stage}: {detail}",
            forms=(self.left, self.right),
        )


def judge_without_algebra(prediction: str, reference: str, *, lenient: bool) -> Verdict | Pending:
    """Return the verdict of the first stage that decides, or what remains to be compared.

    Args:
        prediction: A model's whole output.
        reference: A short answer, or a solution that ends in it.
        lenient: See `extract_answer`.
    """
    expected = to_answer(extract_reference(reference))
    if not expected.form:
        return Verdict(False, "reference", "", "", "the reference holds no answer")
    raw = extract_answer(prediction, lenient=lenient)
    answer = to_answer(raw or "")
    if not answer.form:
        return Verdict(False, "extraction", "", expected.form)
    if answer.raw == expected.raw:
        return Verdict(True, "exact", answer.form, expected.form, forms=(answer.raw, expected.raw))
    if answer.form == expected.form:
        return Verdict(True, "normalized", answer.form, expected.form, forms=(answer.form, expected.form))
    return _first_decision(answer, expected)


def _first_decision(answer: Answer, expected: Answer) -> Verdict | Pending:
    sides = _without_name(_without_restatement(answer), _without_restatement(expected))
    left, right = (_in_digits(side) for side in sides)
    stage = ""
    try:
        for stage, compare in STAGES:
            decision = compare(left, right)
            if isinstance(decision, Formulas):
                return Pending(decision.prediction, decision.reference, stage, answer, expected)
            if decision is not None:
                equivalent, *forms, presumed = decision
                return Verdict(
                    equivalent, stage, answer.form, expected.form, presumed=presumed, forms=(forms[0], forms[1])
                )
    except Refused as refusal:
        return Verdict(None, "refused", answer.form, expected.form, f"{stage}: {refusal}")
    return Pending(left.form, right.form, "symbolic", answer, expected)


_NAME = re.compile(
    r"(?:[A-Za-z]{1,3}'?|\\(?:angle|triangle|[a-z]{2,7})\s?[A-Z]{0,4})(?:_\w|_\{[^{}]{1,20}\})?(?:\([a-z]\))?\s?=(?!=)"
)


def _without_name(answer: Answer, expected: Answer) -> tuple[Answer, Answer]:
    """Drop "x =" where only one side has it, or both have the same."""
    names = [_NAME.match(side.marked) for side in (answer, expected)]
    rests = [
        side.marked[name.end() :] if name else side.marked
        for side, name in zip((answer, expected), names, strict=True)
    ]
    if any(re.search(r"=|\\Rightarrow", rest) for rest in rests):
        return answer, expected
    starts = [re.sub(r"\s", "", name[0]) if name else "" for name in names]
    if starts[0] and starts[1] and starts[0] != starts[1]:
        return answer, expected
    left, right = (
        to_answer(rest)._replace(raw=side.raw) if name else side
        for side, name, rest in zip((answer, expected), names, rests, strict=True)
    )
    return (left, right) if left.form and right.form else (answer, expected)


_RESTATED = re.compile(r"([^()]{1,200}?)\s?\(([^()]{1,200})\)([^()\d]{0,100})")


def _without_restatement(answer: Answer) -> Answer:
    """Drop a number in words that a number is followed by, or digits that follow it: "5 (five)", "二十五(25)元"."""
    restated = _RESTATED.fullmatch(answer.form)
    if restated is None or not (has_words(restated[1]) or has_words(restated[2])):
        return answer
    given, again = (read_number(Answer(text, text, text)) for text in restated.groups()[:2])
    if given is None or again is None or given != again:
        return answer
    bare = to_answer(f"{_digits(given)} {restated[3]}")
    return bare._replace(raw=answer.raw) if bare.form else answer


def _digits(number: Number) -> str:
    return f"{number.value}{'%' if number.percent else ''}"


def _in_digits(answer: Answer) -> Answer:
    """Write a number in words as digits, which algebra can read."""
    number = read_number(answer) if has_words(answer.form) else None
    if number is None or number.percent or number.half_unit:
        return answer
    digits = str(number.value)
    return Answer(answer.raw, digits, digits)


def _choice(prediction: Answer, reference: Answer) -> tuple[bool, str, str, bool] | None:
    decision = same_choice(prediction, reference)
    return None if decision is None else (*decision, False)


def _truth(prediction: Answer, reference: Answer) -> tuple[bool, str, str, bool] | None:
    decision = same_truth(prediction, reference)
    return None if decision is None else (*decision, False)


_CLOCK = re.compile(
    r"0?(\d|1\d|2[0-3])(?::([0-5]\d)(?::([0-5]\d))?)?\s?(?:(a|p)\.?\s?m\.?)?", re.ASCII | re.IGNORECASE
)


def _clock(prediction: Answer, reference: Answer) -> tuple[bool, str, str, bool] | None:
    """Times of day, which are no ratios: 12:00 is not 1:00, nor 10:30 the same as 5:15."""
    left, right = _time(prediction.form), _time(reference.form)
    if left is None or right is None:
        return None
    # A bare 7:30 may be in the evening, 19:30 is.
    twelve_hours = bool(left[1]) != bool(right[1]) and (right if left[1] else left)[0] < 13 * 3600
    same = left[0] == right[0] or (twelve_hours and abs(left[0] - right[0]) == 12 * 3600)
    return same, prediction.form, reference.form, False


def _time(text: str) -> tuple[int, str] | None:
    """Seconds since midnight, and "a" or "p" if it is said."""
    match = _CLOCK.fullmatch(text)
    if match is None or not (match[2] or match[4]):
        return None
    hour, half = int(match[1]), (match[4] or "").lower()
    if half:
        hour = hour % 12 + 12 * (half == "p") if 1 <= hour <= 12 else hour
    return 3600 * hour + 60 * int(match[2] or 0) + int(match[3] or 0), half


def _number(prediction: Answer, reference: Answer) -> tuple[bool, str, str, bool] | None:
    left, right = read_number(prediction), read_number(reference)
    if left is not None and right is not None:
        return same_value(left, right), str(left), str(right), False
    for number, other in ((left, reference), (right, prediction)):
        value = decimal_comma(other)
        if number is not None and value is not None and number.value == value:  # 3,14 for 3.14
            return True, str(value), str(value), False
    return _ordinal(prediction, reference)


def _ordinal(prediction: Answer, reference: Answer) -> tuple[bool, str, str, bool] | None:
    """Ordinals, in words or digits."""
    ranks = read_ordinal(prediction.form), read_ordinal(reference.form)
    if ranks[0] is None or ranks[1] is None:
        return None
    return ranks[0] == ranks[1], f"{ranks[0]}.", f"{ranks[1]}.", False


def _quantity(prediction: Answer, reference: Answer) -> tuple[bool, str, str, bool] | Formulas | None:
    decision = same_quantity(prediction, reference)
    return decision if decision is None or isinstance(decision, Formulas) else (*decision, False)


def _words(prediction: Answer, reference: Answer) -> tuple[bool, str, str, bool] | None:
    words = same_words(prediction, reference)
    return None if words is None else (words.equivalent, *words.forms, words.presumed)


STAGES: tuple[tuple[str, Callable[[Answer, Answer], tuple[bool, str, str, bool] | Formulas | None]], ...] = (
    ("choice", _choice),
    ("boolean", _truth),
    ("clock", _clock),
    ("numeric", _number),
    ("units", _quantity),
    ("words", _words),
)
STAGE_NAMES = (
    "reference",
    "extraction",
    "exact",
    "normalized",
    *(name for name, _ in STAGES),
    "symbolic",
    "judge",
    "undecided",
    "refused",
    "timeout",
    "error",
)
"""What may decide, or fail to: see `Verdict.stage`."""
