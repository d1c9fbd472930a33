r"""The rules for questions that don't ask for a short answer: proofs, and yes or no.

They turn one into a question for what its reference states, where the text gives that away:

    Determine whether the limit \( \lim_{n \to \infty} p_n / n \) exists.    1    -> Find the limit ...
    Show that the \(j\)-invariant of this elliptic curve is 0.              0    -> Find the \(j\)-invariant ...
    Is the Cantor set compact?                                             Yes   -> a model rewrites it, or it goes
"""

from __future__ import annotations

import re

from ..rewards.normalize import normalize_answer
from .rules import NO_ANSWER, VALUE, VALUE_INSIDE, Finding, is_truth_value, mentions, sentences_of, without_wrapping

# ---------------------------------------------------------------------------------------------------------------- proof

_MAX_REWRITTEN = 5_000  # characters; the time of what rewrites grows with their square

_PROVE = re.compile(
    r"(?:^|[.?!,:;)$]\s+|\n\s*|\b(?:and|to|then|hence|please)\s+)(?:prove|show|demonstrate|verify|establish|deduce|disprove)"
    r"(?:\s+or\s+disprove)?(?:\s*:|\s+(?:that|the|why|this|it|by|for|using|or)\b)",
    re.IGNORECASE,
)
_PROOF_REQUEST = re.compile(
    r"\s*(?<![A-Za-z])(?:(?:please\s+)?(?:provide|give|include|write)\s+(?:a|an|your|the)?\s*(?:\w+\s+)?(?:justification|proof|"
    r"explanation|reasoning)\b[^.?!]*|(?:justify|prove|explain)\s+(?:your|the)\s+(?:answer|response|claim|reasoning|result)\b"
    r"[^.?!]*|show\s+(?:all\s+)?your\s+work\b[^.?!]*)[.!]?(?=\s|$)",
    re.IGNORECASE,
)
_CONFIRM = re.compile(
    r",?\s+and\s+(?:verify|show|prove|confirm|check)\s+that\s+(?:its\s+value|it|the\s+(?:result|value|answer)|this)\s+"
    r"(?:is\s+equal\s+to|equals|is)\s+(?P<value>[^.?!]+?)\s*(?=[.?!]?$)",
    re.IGNORECASE,
)
_TOLD = re.compile(
    r"\bthe\s+(?:final\s+)?(?:result|answer|value)\b[^.?!$\\]{0,40}\sshould\s+(?:be|equal)\s+(?P<value>[^.?!]{1,60}?)\s*\.?\s*$",
    re.IGNORECASE,
)
_PROVE_IS = re.compile(
    r"(?P<before>.*?)\b(?:show|prove|verify|demonstrate)\s+that\s+(?P<what>(?:the|its)\s+.+)\s+(?:is\s+equal\s+to|equals|is)\s+"
    r"(?P<value>[^.?!]{1,60}?)\s*\.?\s*$",
    re.IGNORECASE | re.DOTALL,
)
_EQUATION = r"(?P<open>\\\(|\\\[|\$\$?)\s*(?P<left>[^=<>$]+?)\s*=\s*(?P<value>[^=<>$]+?)\s*(?P<close>\\\)|\\\]|\$\$?)\s*[.?]?\s*$"
_PROVE_EQUATION = re.compile(
    rf"(?P<before>.*?)\b(?:show|prove|verify|demonstrate)\s+that\s+{_EQUATION}", re.IGNORECASE | re.DOTALL
)
_WORD_VALUES = {"zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "infinite": r"\infty"}


def proof(question: str, answer: str) -> Finding | None:
    r"""Turn a proof into the question for what is proved, if the reference is that; else a model may.

    A request to justify a short answer is taken out: only the answer is compared.

    Args:
        question: Its text.
        answer: The short reference.

    Example:
        >>> proof(r"Consider a curve. Show that its genus is $1$.", "1").question
        'Consider a curve. Find its genus.'
    """
    if answer.strip(" .").casefold() in NO_ANSWER:
        return Finding(f"the reference ({answer}) stands for a proof or for nothing", needs_model=True)
    lowered = question.lower()
    if "should" in lowered and (match := _TOLD.search(question)) and _same(match["value"], answer):
        return Finding("it tells its own answer", needs_model=True)
    if not mentions(
        lowered,
        "prov",
        "proof",
        "show",
        "verify",
        "demonstrat",
        "deduce",
        "confirm",
        "establish",
        "check",
        "justif",
        "expla",
    ):
        return None
    if len(question) <= _MAX_REWRITTEN and (match := _CONFIRM.search(question)) and _same(match["value"], answer):
        return Finding("it told its own answer and asked to verify it", question=_cut(question, match))
    if _PROVE.search(question):
        return _proof_of(question, answer)
    if not is_truth_value(answer) and (match := _PROOF_REQUEST.search(question)):
        rest = _cut(question, match)
        if VALUE_INSIDE.search(rest) or "?" in rest:
            return Finding("the request to justify the answer is taken out", question=rest)
    return None


def _proof_of(question: str, answer: str) -> Finding:
    if len(question) > _MAX_REWRITTEN:
        return Finding("it asks for a proof, at length", needs_model=True)
    reason = "what it asks to prove is asked for"
    if (match := _PROVE_IS.fullmatch(question)) and _same(match["value"], answer):
        return Finding(reason, question=f"{match['before']}{_find(match['before'])} {match['what']}.")
    if (match := _PROVE_EQUATION.fullmatch(question)) and _same(match["value"], answer):
        return Finding(reason, question=_formula_asked_for(match))
    rest = _PROVE.sub(" ", question)
    if any(VALUE.match(part) for part in sentences_of(rest)):
        return Finding("it asks for a value and for a proof", needs_model=True)
    return Finding("it asks for a proof", needs_model=True)


def _find(before: str) -> str:
    """Spell "find" as the text before it asks for."""
    return "Find" if not before.strip() or before.rstrip()[-1] in ".?!:" or before.rstrip().endswith("\\]") else "find"


def _formula_asked_for(match: re.Match[str]) -> str:
    return f"{match['before']}{_find(match['before'])} {match['open']}{match['left']}{match['close']}."


def _cut(text: str, match: re.Match[str]) -> str:
    return (text[: match.start()].rstrip() + text[match.end() :]).strip()


def _same(stated: str, answer: str) -> bool:
    stated = without_wrapping(stated)
    return normalize_answer(_WORD_VALUES.get(stated.casefold(), stated)) == normalize_answer(answer)


# ----------------------------------------------------------------------------------------------------------- true-false

_WHETHER = re.compile(
    r"\b(?:determine|decide|check|verify|state|tell|ascertain|investigate|discuss|find\s+out|establish)\s+(?:whether|if)\b",
    re.IGNORECASE,
)
_TRUE_FALSE = re.compile(
    r"\btrue\s+or\s+(?:is\s+it\s+)?false\b|\bprove\s+or\s+disprove\b|\byes\s+or\s+no\b|\byes/no\b|\bT/F\b",
    re.IGNORECASE,
)
_TRUTH_LETTERS = frozenset({"a", "b", "t", "f", "(a)", "(b)"})
_WHICH_OF_TWO = re.compile(
    r"\bwhich\b[^.?]{0,60}\b(?:larger|greater|bigger|smaller|faster|better)\b.*\bor\b", re.IGNORECASE | re.DOTALL
)
_LIMIT_EXISTS = re.compile(
    r"\b(?P<verb>determine|decide|check)\s+(?:whether|if)\s+(?:the\s+)?(?P<what>limit|sequence)\s+"
    r"(?P<formula>(?:defined\s+by\s+|of\s+)?(?:\\\(.+?\\\)|\$[^$]+\$))\s+(?:exists|converges|is\s+convergent)(?P<after>[,.?].*|)$",
    re.IGNORECASE | re.DOTALL,
)
_WHETHER_EQUATION = re.compile(
    rf"(?P<before>.*?)\b(?:determine|decide|check|verify)\s+(?:whether|if)\s+(?:it\s+(?:is|must\s+be)\s+true\s+that\s+)?{_EQUATION}",
    re.IGNORECASE | re.DOTALL,
)
_GUESS = "a guess is right half of the time"


def true_false(question: str, answer: str) -> Finding | None:
    r"""Turn a question for yes or no into one for a value, if the reference is that value; else a model may.

    Args:
        question: Its text.
        answer: The short reference.

    Example:
        >>> true_false(r"Determine whether the limit $\lim_n p_n/n$ exists.", "1").question
        'Find the limit $\\lim_n p_n/n$.'
        >>> true_false("Is the Cantor set compact?", "Yes").needs_model
        True
    """
    if is_truth_value(answer):
        return Finding(f"it is answered by {answer!r}: {_GUESS}", needs_model=True)
    lowered = question.lower()
    if (
        mentions(lowered, "true", "yes", "t/f", "disprove")
        and _TRUE_FALSE.search(question)
        and answer.casefold() in _TRUTH_LETTERS
    ):
        return Finding(f"it asks for true or false, answered by {answer!r}: {_GUESS}", needs_model=True)
    if (
        "which" in lowered
        and _WHICH_OF_TWO.search(question)
        and normalize_answer(answer) in normalize_answer(question)
    ):
        return Finding(f"it asks which of two is larger: {_GUESS}", needs_model=True)
    whether = _WHETHER.search(question) if mentions(lowered, "whether", " if ") else None
    if whether is None or _asks_for_value(question, whether):
        return None
    if len(question) > _MAX_REWRITTEN:
        return Finding("it asks whether something holds, at length", needs_model=True)
    reason = "it asked whether something holds, and the reference is the value"
    if match := _LIMIT_EXISTS.search(question):
        is_limit = match["what"].lower() == "limit" or r"\lim" in match["formula"]
        what = "limit" if is_limit else "limit of the sequence"
        formula = re.sub(r"^of\s+", "", match["formula"])
        verb = "Find" if match["verb"][0].isupper() else "find"
        rewritten = f"{question[: match.start()]}{verb} the {what} {formula}{match['after'] or '.'}"
        return Finding(reason, question=rewritten)
    if (match := _WHETHER_EQUATION.fullmatch(question)) and _same(match["value"], answer):
        return Finding(reason, question=_formula_asked_for(match))
    return Finding(
        f"it asks whether something holds, but the reference ({answer}) is neither yes nor no", needs_model=True
    )


def _asks_for_value(question: str, whether: re.Match[str]) -> bool:
    """Whether it asks for a value besides, as in "if so, find it" or "evaluate it and determine whether"."""
    rest = question[: whether.start()] + " " + question[whether.end() :]
    return bool(VALUE_INSIDE.search(rest)) or any(VALUE.match(part) for part in sentences_of(rest))
