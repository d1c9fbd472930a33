r"""The rule for multiple-choice questions: the option that the reference names becomes the answer, the options go.

How many lines pass through four distinct points ...?  \(\text{(A)} \ 60 \qquad \text{(B)} \ 64 ...\)    D
-> How many lines pass through four distinct points ...?                                               76
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..rewards.normalize import normalize_answer
from .rules import VALUE, Finding, mentions

_FONT = r"\\(?:text|textbf|mathrm|mathbf|rm|bf|textrm)\s*\{\s*"
# \textbf{(A) }, \text{(A)}, (A), A., A) and A: at the start of a line or after a gap; small letters too.
_LETTER = re.compile(
    rf"{_FONT}\(?(?P<font>[A-Ha-h])\)?[.:]?\s*\}}[):.]?|(?<![\w\\(])\((?P<round>[A-Ha-h])\)|"
    r"(?:^|(?<=\n)|(?<=[\s,;:?.$]))(?P<bare>[A-Ha-h])\s?[.):](?=\s|\\|\$|\d|-)",
)
_DIGIT = re.compile(r"(?:^|(?<=\n))\s*\(?(?P<digit>[1-9])[.)]\s+")
_FIRST_LABELS = ("A)", "a)", "A.", "a.", "A:", "a:", "{A", "1.", "1)", "A }", "A )")
_SECOND_LABELS = ("B)", "b)", "B.", "b.", "B:", "b:", "{B", "2.", "2)", "B }", "B )")
_CHOOSE = re.compile(
    r"\(?\b(?:(?:choose|select|pick|circle|mark)\b[^.?!:\n]*\b(?:option|answer|choice|one|statement|alternative)s?\b[^.?!:\n]*"
    r"|(?:the\s+)?(?:options|choices|answer\s+choices)(?:\s+are)?)[.:)]*\s*$",
    re.IGNORECASE,
)
_NEEDS_OPTIONS = re.compile(
    r"\bwhich\s+(?:one\s+)?(?:of\b|(?:statement|option|answer|expression|equation|graph|figure|choice|pair|set|number)s?\b|"
    r"(?:is|are)\s+(?:true|correct|false))|\b(?:of\s+(?:the\s+following|these)|following\s+(?:statements?|options?|is|are))\b",
    re.IGNORECASE,
)
_WHICH = re.compile(r"\bwhich\b", re.IGNORECASE)
_REFERS = re.compile(
    r"\b(?:all|none|both|neither|either|any)\s+of\b|\bnone\b|\b(?:both|neither|either)\s+\(?[A-H]\b|\b(?:only|and)\s+I+\b|\bI+\s+(?:only|and)"
    r"|\bcannot\s+be\s+determined\b|\bnot\s+enough\b|\bmore\s+than\s+one\b",
    re.IGNORECASE,
)
_NAMED = re.compile(
    rf"\s*(?:option|choice|answer)?\s*(?:{_FONT})?\(?\s*([A-Ha-h1-9])\s*\)?\s*\}}?\s*(?:[.):]\s*(?P<text>.*))?$",
    re.IGNORECASE | re.DOTALL,
)
_GAP_BEFORE = re.compile(r"(?:\\[ ,;:!]|\\q?quad\b|~|[\s,;.:}])+")
_GAPS_AFTER = ("\\qquad", "\\quad", "\\,", "\\;", "\\:", "\\!", "\\")
_RELATION = re.compile(r"\\(?:ge|le|geq|leq|geqslant|leqslant|approx|neq?|gt|lt)(?![A-Za-z])|[<>≤≥≠≈]")
_ASKS_RANGE = re.compile(r"\b(?:range|interval|inequalit|domain|condition|values|solution\s+set)", re.IGNORECASE)
_ENDS_OPEN = re.compile(
    r"\b(?:is|are|equals?|equal\s+to|be|was|has|in|of|to|by|as)\s*[:_]*\s*(?:\(\s*\)|\\_+|_+)?\s*:?\s*$", re.IGNORECASE
)
_GUESS = "a guess is often right"


@dataclass(frozen=True, slots=True)
class Choices:
    """A question cut into its stem and its options.

    Args:
        stem: What stands before the options, without the request to choose.
        options: Text of each option, by its label in upper case.
        is_asked: Whether the text asks to choose, so that digits count as labels.
    """

    stem: str
    options: dict[str, str]
    is_asked: bool


def find_choices(question: str) -> Choices | None:
    r"""Find the options at the end of a question: at least two labels in order, or digits where it asks to choose.

    Example:
        >>> find_choices(r"What is $1+1$? (A) 1 (B) 2 (C) 3").options
        {'A': '1', 'B': '2', 'C': '3'}
    """
    if not (mentions(question, *_FIRST_LABELS) and mentions(question, *_SECOND_LABELS)):
        return None
    for pattern, series in ((_LETTER, "ABCDEFGH"), (_DIGIT, "123456789")):
        labels = _last_run(list(pattern.finditer(question)), series)
        if len(labels) < 2:
            continue
        head = _bare(question[: labels[0].start()])
        is_asked = bool(_CHOOSE.search(head) or _WHICH.search(head))
        if pattern is _DIGIT and not is_asked:
            continue
        ends = [label.start() for label in labels[1:]] + [len(question)]
        texts = [_bare(question[label.end() : end]).removesuffix(".") for label, end in zip(labels, ends, strict=True)]
        if not all(texts) or sum(bool(VALUE.match(text) or text.endswith("?")) for text in texts) > 1:
            continue  # parts that each ask for something
        stem = _CHOOSE.sub("", head).rstrip()
        return Choices(stem, dict(zip(series, texts, strict=False)), is_asked)
    return None


def _last_run(labels: Sequence[re.Match[str]], series: str) -> list[re.Match[str]]:
    """Return the last labels that follow each other from the first of the series."""
    run: list[re.Match[str]] = []
    best: list[re.Match[str]] = []
    for label in labels:
        name = next(group for group in label.groups() if group).upper()
        if name == series[0]:
            run = [label]
        elif run and len(run) < len(series) and name == series[len(run)]:
            run.append(label)
        else:
            continue
        if len(run) > 1:
            best = run
    return best


def _bare(text: str) -> str:
    """Take gaps from both ends, and a dollar sign or bracket whose partner was cut off."""
    text = text.strip()
    while True:
        gap = _GAP_BEFORE.match(text)
        bare = _without_gap_after(text[gap.end() :] if gap else text)
        if bare.count("$") % 2:
            bare = bare[1:] if bare.startswith("$") else bare.removesuffix("$")
        for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
            if bare.count(opening) != bare.count(closing):
                bare = bare.removeprefix(closing).removesuffix(opening)
                bare = bare.removesuffix(closing) if bare.count(opening) < bare.count(closing) else bare
        if bare == text:
            return text
        text = bare


def _without_gap_after(text: str) -> str:
    text = text.rstrip(" \t\r\n,;~")
    for gap in _GAPS_AFTER:
        text = text.removesuffix(gap)
    return text


def multiple_choice(question: str, answer: str) -> Finding | None:
    r"""Turn a multiple-choice question into a short-answer one, if it stands without its options; else a model may.

    Args:
        question: Its text.
        answer: The short reference: a label, an option's text, or both.

    Example:
        >>> finding = multiple_choice("What is $1+1$? (A) $1$ (B) $2$ (C) $3$", "B")
        >>> finding.question, finding.answer
        ('What is $1+1$?', '2')
        >>> multiple_choice("Which of the following is prime? (A) 4 (B) 5", "B").needs_model
        True
    """
    choices = find_choices(question)
    if choices is None:
        if (
            mentions(question.lower(), "option", "choi", "choose")
            and (named := _NAMED.fullmatch(" ".join(answer.split())))
            and not named["text"]
            and _CHOOSE.search(question)
        ):
            return Finding(f"it asks to choose, but has no options to read ({answer})", needs_model=True)
        return None
    label = _label(choices, answer)
    if label is None:
        if not choices.is_asked:
            return None
        return Finding(f"its options do not hold the reference ({answer}): {_GUESS}", needs_model=True)
    option = choices.options[label]
    if _NEEDS_OPTIONS.search(choices.stem):
        return Finding(f"it cannot be asked without its options: {_GUESS}", needs_model=True)
    if any(_REFERS.search(text) for text in choices.options.values()):
        return Finding(f"its options refer to one another: {_GUESS}", needs_model=True)
    if not choices.stem or (_RELATION.search(option) and not _ASKS_RANGE.search(choices.stem)):
        return Finding(f"option {label} ({option}) is no answer to what it asks: {_GUESS}", needs_model=True)
    stem = choices.stem
    if _ENDS_OPEN.search(stem):
        stem = f"{stem.rstrip(' :_')} what? Complete the sentence."
    return Finding(f"option {label} is the answer; the options are taken out", question=stem, answer=_plain(option))


def _label(choices: Choices, answer: str) -> str | None:
    named = _NAMED.fullmatch(" ".join(answer.split()))
    if named and named[1].upper() in choices.options:
        text = named["text"]
        option = choices.options[named[1].upper()]
        if not text or normalize_answer(text) == normalize_answer(option):
            return named[1].upper()
    spelling = normalize_answer(answer)
    return next((label for label, text in choices.options.items() if normalize_answer(text) == spelling), None)


def _plain(option: str) -> str:
    """Take the dollar signs or brackets off a formula."""
    match = re.fullmatch(r"\$([^$]+)\$\.?|\\\(((?:(?!\\\)).)+)\\\)\.?", option, re.DOTALL)
    return next(group for group in match.groups() if group).strip() if match else option.removesuffix(".")
