r"""The rules that judge one row by its text: pure functions of a question and its reference.

A rule returns nothing where it does not apply, else a `Finding`. UloRL's section 3.4 names what is to be cleaned; the
spelling that gives it away is ours, read off DeepMath, DAPO-Math-17k and OpenR1-Math.

Nothing here is certain: rules read words, not mathematics. Where the text leaves a doubt, a row stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..rewards.extraction import extract_reference
from ..rewards.normalize import normalize_answer


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule says about a row: dropped, or changed where there is a new question or answer.

    Args:
        reason: Why, for a person.
        question: The question in its new form.
        answer: The reference in its new form.
        needs_model: Whether a model may still save the row by rewriting it.
    """

    reason: str
    question: str | None = None
    answer: str | None = None
    needs_model: bool = False


Rule = Callable[[str, str], Finding | None]

# ---------------------------------------------------------------------------------------------------------- references

MAX_ANSWER_CHARACTERS = 100
_WRAPPED = re.compile(
    r"(\$\$?)(?P<dollars>[^$]+)\1|\\\((?P<round>(?:(?!\\\)).)+)\\\)|\\\[(?P<square>(?:(?!\\\]).)+)\\\]"
)
_MATRIX = re.compile(r"\\begin\{([a-zA-Z]*matrix|array|cases|aligned?|tabular)\*?\}(.*?)\\end\{\1\*?\}", re.DOTALL)
NO_ANSWER = frozenset(
    {"proof", "n/a", "na", "none", "null", "see solution", "see proof", "mcq", "not found", "-", "?"}
)


def missing(question: str, answer: str) -> Finding | None:
    """Drop a row without a question or without a reference."""
    if not question.strip():
        return Finding("there is no question")
    return None if answer.strip() else Finding("there is no reference answer")


def short_answer(question: str, answer: str) -> Finding | None:
    r"""Take the short answer out of a solution, a box or a pair of dollar signs.

    Args:
        question: Not read.
        answer: Bare, boxed, after `####` or in a closing phrase, as `rewards.extraction.extract_reference` reads it.

    Example:
        >>> short_answer("", r"So the sum is \boxed{43_5}.").answer
        '43_5'
    """
    if answer.isdecimal():  # as most references are
        return None
    short = without_wrapping(extract_reference(answer))
    if not short:
        return Finding("the reference holds no answer: its box is empty or cut off")
    return None if short == answer.strip() else Finding("the short answer, taken out of the reference", answer=short)


def without_wrapping(text: str) -> str:
    """Take spaces, a full stop and dollar signs or brackets off a formula that they enclose."""
    text = text.strip()
    while True:
        bare = text if text.endswith("..") else text.removesuffix(".").rstrip()
        if (match := _WRAPPED.fullmatch(bare)) is not None:
            bare = next(group for group in match.group("dollars", "round", "square") if group).strip()
        if bare == text:
            return text
        text = bare


def overlong(question: str, answer: str, max_characters: int = MAX_ANSWER_CHARACTERS) -> Finding | None:
    """Drop references that no rule could compare: long ones, matrices, systems (the paper: "matrices, say").

    Args:
        question: Not read.
        answer: The short answer.
        max_characters: Longest reference to keep, after normalisation of its spelling.
    """
    if len(answer) > 100 * max_characters:  # no spelling is so wasteful
        return Finding(f"the reference has {len(answer)} characters, more than {max_characters}")
    for name, body in _MATRIX.findall(answer):
        rows = [row for row in re.split(r"\\\\|\\cr\b", body) if row.strip()]
        if name == "cases" or (len(rows) > 1 and "&" in body):
            return Finding(f"the reference is a {'system of cases' if name == 'cases' else 'matrix or table'}")
    length = len(answer) if len(answer) <= max_characters else len(normalize_answer(answer))
    return (
        Finding(f"the reference has {length} characters, more than {max_characters}")
        if length > max_characters
        else None
    )


# ------------------------------------------------------------------------------------------------- what a question asks

_DRAWING = re.compile(r"\[asy\].*?\[/asy\]|```.*?```", re.DOTALL)
_SENTENCE_END = re.compile(r"[.?!:](?=\s+[A-Z\\$(])|[.?!](?:\\\]|\$\$)?(?=\s*\n)|\n(?=\n)")
_LEAD = r"(?:(?:then|also|next|finally|hence|thus|and|now|please|additionally|furthermore|moreover|if so|in addition),?\s+)*"
_VALUE_VERB = (
    r"(?:find|compute|calculate|evaluate|solve|simplify|express|determine(?!\s+(?:whether|if)\b)|list|give|count)"
)
VALUE = re.compile(
    rf"{_LEAD}(?:{_VALUE_VERB}\b|what\s+(?:is|are|was|were|must)\b|how\s+(?:many|much|long|far|old)\b)", re.IGNORECASE
)
VALUE_INSIDE = re.compile(
    rf"(?:^|[,;:.?!]\s+|\b(?:and|then|so|to|us)\s+){_LEAD}(?:{_VALUE_VERB}\b|what\b|how\s+(?:many|much)\b|which\b)",
    re.IGNORECASE,
)
_TRUTHS = frozenset({"yes", "no", "true", "false", "correct", "incorrect"})


def sentences_of(text: str) -> list[str]:
    """Split a text where sentences seem to end, without drawings."""
    text = _without_drawings(text)
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    parts = [text[start:end].strip() for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    return [part for part in parts if part]


def _without_drawings(text: str) -> str:
    return _DRAWING.sub(" ", text) if "[asy]" in text or "```" in text else text


def mentions(lowered: str, *words: str) -> bool:
    """Say whether one of the words is in a text: far cheaper than the expression that it lets one skip."""
    for word in words:  # noqa: SIM110 - twice as fast as a generator, and asked for every row
        if word in lowered:
            return True
    return False


def is_truth_value(answer: str) -> bool:
    """Say whether a reference is yes, no, true or false."""
    return answer.strip(" .*`'\"").casefold() in _TRUTHS


# ----------------------------------------------------------------------------------------------------------- multi-part

_DEMAND = re.compile(
    r"\W*(?:find|compute|calculate|determine|evaluate|prove|show|solve|what|how|is|are|does|do|can|which|why|express|give|"
    r"state|sketch|draw|explain|describe|derive|verify|write|list|estimate|simplify|deduce|hence|where|when|who|name|factor|"
    r"differentiate|integrate|justify|construct|plot|graph|for\s+(?:which|what)|in\s+how|with\s+what|at\s+what)\b",
    re.IGNORECASE,
)
_PART_LABEL = re.compile(
    r"(?:(?<=\s)|(?<=^)|(?<=[.;:?,]))(?:\bparts?\s+)?\(?(?P<label>[a-h]|[ivx]{1,4}|[1-9]|[A-H])[).:]\s*(?=\S)",
    re.MULTILINE,
)
_SERIES = ("abcdefgh", "ABCDEFGH", "123456789", ("i", "ii", "iii", "iv", "v", "vi"))
_LABELLED_ANSWER = re.compile(
    r"^\W*(?:part\s+)?(?:a|i|1)\s*[).:].+?[\s,;](?:part\s+)?\(?(?:b|ii|2)\s*[).:]\s*\S", re.IGNORECASE | re.DOTALL
)
_ALSO = re.compile(
    rf"\b(?:also|additionally|in\s+addition|furthermore|moreover|as\s+well\s+as\s+to),?\s+(?:{_VALUE_VERB}|prove|show|"
    rf"determine|what|how)\b|\b{_VALUE_VERB}\s+also\b",
    re.IGNORECASE,
)
_QUANTITY = (
    r"(?:area|perimeter|volume|circumference|surface\s+area|sum|product|mean|median|mode|range|variance|standard\s+deviation|"
    r"radius|diameter|cent(?:er|re)|domain|length|width|height|amplitude|period|slope|intercept|rank|nullity|trace|determinant|"
    r"eigenvalues|eigenvectors|quotient|remainder|minimum|maximum|gcd|lcm|magnitude|direction|kernel|image|curvature|torsion)"
)
# On lower-case text and with a literal at the start, which makes the search fast.
_TWO_QUANTITIES = re.compile(rf"the\s+{_QUANTITY}\s+and\s+(?:the\s+)?{_QUANTITY}\b(?!\s+(?:value|point))")
_ASKED_FOR = re.compile(rf"(?:{_VALUE_VERB}|\bwhat\s+(?:is|are))\s+(?:both\s+)?$")
_WH_WORD = re.compile(r"(?:^|[,;]\s+|\band\s+)(?:what|how|which|who|when|where|why)\b", re.IGNORECASE)
_DEMAND_WORDS = (
    "find", "compute", "calculate", "evaluate", "solve", "simplify", "express", "determine", "list", "give ", "count ", "what ",
    "how ",
)  # fmt: skip
_MORE_FOLLOWS = re.compile(r"[.?!:]\s*[)$\]]*\s+\S|\n")
_SECOND_LABEL = re.compile(r"(?<![A-Za-z0-9])(?:[bB2]|ii)[).:]")
_SECOND_LABELS = tuple(f"{label}{end}" for label in ("b", "B", "2", "ii") for end in ").:")
_BACK_REFERENCE = re.compile(
    r"\b(?:if\s+(?:so|it|they|yes|not)|in\s+other\s+words|that\s+is|specifically|i\.e)\b", re.IGNORECASE
)
_OTHER_WHETHER = re.compile(
    r"(?:^|.*?\band\s+)(?:then\s+)?(?:determine|decide|check|verify|state)\s+(?:whether|if)\b",
    re.IGNORECASE | re.DOTALL,
)
_FORM_OF_ANSWER = re.compile(r"\w+\s+(?:your|the|all|each)?\s*(?:final\s+)?answers?\b", re.IGNORECASE)
_EXISTENCE = re.compile(r"\b(?:exists?|converges?|convergent|possible|such\s+a)\b", re.IGNORECASE)
_SHORT_DEMAND = 60  # characters; longer ones are often the same demand said twice


def multi_part(question: str, answer: str) -> Finding | None:
    """Drop a question that asks for several things: one short answer can't tell whether all are right.

    Args:
        question: Its text.
        answer: The reference; one with labelled parts gives the question away.

    Example:
        >>> multi_part("Let $f(x)=x^2$. (a) Find $f(2)$. (b) Find $f'(2)$.", "4, 4").reason
        'it has 2 labelled parts that each ask for something'
        >>> multi_part("Find $x$ given that (a) $x > 0$ and (b) $x^2 = 4$.", "2") is None
        True
    """
    if len(answer) > 5 and _LABELLED_ANSWER.match(answer):
        return Finding("the reference answers several labelled parts")
    text = _without_drawings(question)
    num_parts = _num_demanding_parts(text)
    if num_parts > 1:
        return Finding(f"it has {num_parts} labelled parts that each ask for something")
    lowered = text.lower()
    if mentions(lowered, "also", "addition", "furthermore", "moreover", "as well") and (match := _ALSO.search(text)):
        return Finding(f"it asks for more than one thing: {match[0]!r}")
    match = _TWO_QUANTITIES.search(lowered) if " and " in lowered else None
    if match is not None and _ASKED_FOR.search(lowered[: match.start()]):
        return Finding(f"it asks for two quantities: {match[0]!r}")
    if mentions(lowered, "whether", " if ") or _may_ask_twice(text, lowered):
        return _several_demands(text, answer)
    return None


def _may_ask_twice(text: str, lowered: str) -> bool:
    """Whether it has two sentences, and two question marks or words of demand: few have, and cutting them is dear."""
    return (
        mentions(text[:-1], ".", "?", "!", ":", "\n")
        and (text.count("?") > 1 or sum(map(lowered.count, _DEMAND_WORDS)) > 1)
        and _MORE_FOLLOWS.search(text) is not None
    )


def _num_demanding_parts(text: str) -> int:
    """Count the labelled parts that ask for something, over labels that follow each other."""
    has_second = mentions(text, *_SECOND_LABELS) and _SECOND_LABEL.search(text)
    labels = list(_PART_LABEL.finditer(text)) if has_second else []
    return max((_num_demands(text, labels, series) for series in _SERIES), default=0) if len(labels) > 1 else 0


def _num_demands(text: str, labels: list[re.Match[str]], series: Sequence[str]) -> int:
    expected, parts = 0, []
    for match in labels:
        if expected < len(series) and match["label"] == series[expected]:
            parts.append(match)
            expected += 1
        elif match["label"] == series[0]:
            expected, parts = 1, [match]
    ends = [*(part.start() for part in parts[1:]), len(text)][: len(parts)]
    bodies = [text[part.end() : end] for part, end in zip(parts, ends, strict=True)]
    return sum(bool(_DEMAND.match(body)) for body in bodies)


def _several_demands(text: str, answer: str) -> Finding | None:
    sentences = sentences_of(text)
    candidates = sentences if text.count("?") > 1 else ()
    questions = [part for part in candidates if _is_wh_question(part) and not _BACK_REFERENCE.search(part)]
    if len(questions) > 1 and not _alike(questions[-2], questions[-1]):
        return Finding(f"it asks {len(questions)} questions")
    demands = [index for index, part in enumerate(sentences) if VALUE.match(part) and not _FORM_OF_ANSWER.match(part)]
    if len(demands) > 1 and demands[-1] - demands[-2] == 1:
        first, second = sentences[demands[-2]], sentences[demands[-1]]
        if max(len(first), len(second)) <= _SHORT_DEMAND and not _alike(first, second):
            return Finding("it asks for two things in two sentences")
    if demands and not is_truth_value(answer):
        for part in sentences[demands[0] :]:
            if _OTHER_WHETHER.match(part) and not _EXISTENCE.search(part):
                return Finding("it asks for a value, and whether something holds")
    return None


def _is_wh_question(sentence: str) -> bool:
    return sentence.rstrip(" )$\\]").endswith("?") and bool(_WH_WORD.search(sentence))


_CONTENT_WORD = re.compile(r"[A-Za-z]{2,}|\\[A-Za-z]+|\d+|[A-Za-z]")
_EMPTY_WORDS = frozenset(
    ("of", "is", "are", "by", "in", "to", "for", "a", "and", "the", "its", "that", "this", "what", "value", "values", "find",
     "compute", "calculate", "determine", "evaluate")
)  # fmt: skip


def _alike(first: str, second: str) -> bool:
    """Whether two demands share a word: the same thing is often asked for twice, at length and in short."""
    words = [
        {word.lower() if len(word) > 1 else word for word in _CONTENT_WORD.findall(part)} - _EMPTY_WORDS
        for part in (first, second)
    ]
    return bool(words[0] & words[1])
