r"""Find the final answer in a text.

Pure string functions in linear time: they run on megabytes of model output, which may be hostile. Whether two answers
are equal is decided in `verify`.

An output and its answer: `<think>\boxed{1}? No.</think> The answer is \boxed{\frac{1}{2}}.` gives `\frac{1}{2}`.
"""

import re

from .normalize import to_answer
from .numbers import Number, half_unit, read_number, same_value

_THINK_OPEN = re.compile(r"<think(?:ing)?>")
_THINK_CLOSE = re.compile(r"</think(?:ing)?>")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
# What may stand between two boxes that form one answer: "\boxed{3} or \boxed{4}", "$\boxed{3}$, maybe $\boxed{4}$".
# Bounded, as two unbounded repeats take quadratic time on a megabyte of spaces.
_GAP = r"[\s$,;:.?!/|&*()，；、。？\\\]\[]{0,20}"
_HEDGE = (
    "(?:it|this|that|could|can|may|might|also|be|is|or|and|else|either|otherwise|alternatively|maybe|perhaps|possibly|"
    "even|again|probably|或者|或|和|与|也可能是|可能是|还是)"
)
_BOX_JOINT = re.compile(rf"{_GAP}(?:{_HEDGE}{_GAP}){{0,6}}", re.IGNORECASE)
# "\boxed{5} or 6." at the end of a sentence.
_SECOND_THOUGHT = re.compile(
    rf"(?P<joint>{_GAP}(?:{_HEDGE}{_GAP}){{1,6}})(?P<other>[-+]?(?:\\d?frac\{{\d+\}}\{{\d+\}}|\d[\d,]{{0,40}}(?:\.\d{{1,40}})?(?:/\d{{1,40}})?)%?|[A-J])"
    r"(?=[ \t$)*\\]{0,10}(?:[.!。；;](?!\d)|\n|$))",
    re.IGNORECASE,
)
_ELSE = re.compile(r"\b(?:or|maybe|perhaps|possibly|probably|alternatively)\b|或|可能|还是", re.IGNORECASE)
_BARE_TOKEN = re.compile(r"[^\s${}\\]+|\\[A-Za-z]+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MARKER = re.compile(
    r"""(?:\b(?:answer|(?:correct|right)\ (?:option|choice))(?:\s*\*\*)?\s*(?:\bis\b\s*:?|[:：=])
        |(?:答案\s*(?:应?[为是]|[:：])|故选|应选)\s*[:：]?|选\s*[:：]?\s*(?=[(（]?[A-J](?![A-Za-z])))[\s*]*
        |\#{4}\s*
        |"(?:final_?)?answer"\s*:\s*""",
    re.IGNORECASE | re.VERBOSE,
)
_SENTENCE_END = re.compile(r"\n|[。；？]|[.?](?=\s|$)|,?\s(?:because|since|as|which)\s|,?因为")
_JSON_VALUE = re.compile(r'"((?:[^"\\\n]|\\.){1,1000})"|([^\s,}]{1,1000})')
# "**Answer: D**" on a line of its own, at the very end.
_CLOSING_LINE = re.compile(
    r"\n[ \t*_#>]{0,10}(?:the\s)?(?:(?:final|correct)\s)?(?:answer|答案)[ \t*]{0,5}[:：][ \t*]{0,5}(\S[^\n]{0,200})\s*$",
    re.IGNORECASE,
)
_CLOSING_NUMBER = re.compile(
    r"(?:\b(?:is|are|was|were|equals?|gives?|gets?|makes?|totals?|obtain|have|has)\s+|=\s*|[为是得有]\s*)"
    r"(?:\\?[($]\s?)?([-+]?(?:\\\$)?\d[\d,]{0,40}(?:\.\d{1,40})?%?)\s?\\?[)$]?[*_]{0,2}[.!。]?\s*$"
)

_LEAD_IN = re.compile(
    r"^(?:\\text\{)?\s{0,3}(?:therefore,?\s|so,?\s|thus,?\s)?(?:the\s)?(?:final\s|correct\s)?answer(?:\sis\s*:?|\s*[:=])"
    r"(?:\s*\}|(?=[^{}]*$))\s*",
    re.IGNORECASE,
)
_MAX_PHRASE_CHARACTERS = 1000
_MAX_WHOLE_CHARACTERS = 200


def extract_answer(text: str, *, lenient: bool = False) -> str | None:
    r"""Return the final answer of a model's whole output, or `None` if it gives none.

    Looked for after the last `</think>`, in this order: a last line "Answer: ...", the last `\boxed{...}` (boxes
    joined only by commas, "or" and the like are one answer, so a row of guesses is not a hit), `<answer>` tags, "the
    answer is ..." in English or Chinese, `####`, or `"answer":` in JSON.

    Args:
        text: The output. Without any thinking tags it is searched as a whole.
        lenient: Whether an output without any mark may answer by its last sentence if that ends in "is 73", or by
            being nothing but an answer of one line.

    Returns:
        The answer as written, or `None` if thinking never ended, if the last box is empty or its braces do not
        balance, or if nothing marks an answer.

    Example:
        >>> extract_answer(r"<think>\boxed{1}</think> So it is \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
        >>> extract_answer("Of 12 apples 5 are left") is None
        True
    """
    final = _after_thinking(text)
    if final is None:
        return None
    if _BOX.search(final):
        closing = _CLOSING_LINE.search(final, max(len(final) - 400, 0))
        if closing and not _BOX.search(closing[1]):
            return _clean_phrase(closing[1])
        return _boxed(final)
    tagged, closing_tag, _ = final.rpartition("</answer>")
    _, opening_tag, content = tagged.rpartition("<answer>")
    if opening_tag and closing_tag:
        return content.strip() or None
    return _phrase(final) or (_unmarked(final) if lenient else None)


def extract_reference(text: str) -> str:
    r"""Return a reference's answer: a bare one as it is, a worked solution's from its box, `####` or closing phrase.

    Args:
        text: The reference column of a dataset.

    Returns:
        The answer; empty if there is none, or if a box is cut off.

    Example:
        >>> extract_reference("She has 3 + 4 = 7 apples.\n#### 7")
        '7'
    """
    if _BOX.search(text):
        return _boxed(text) or ""
    if "####" in text:
        return text.rpartition("####")[2].strip()
    return _phrase(text) or text.strip()


def _after_thinking(text: str) -> str | None:
    end = 0
    for tag in _THINK_CLOSE.finditer(text):
        end = tag.end()
    return None if _THINK_OPEN.search(text, end) else text[end:]


def _boxed(text: str) -> str | None:
    """Answer in the last box, together with the boxes directly before it."""
    boxes = list(_BOX.finditer(text))
    last = _box_content(text, boxes[-1].end())
    if last is None or not last[0]:
        return None
    second = _second_thought(text, *last)
    contents = dict.fromkeys((second, last[0]) if second else (last[0],))  # a set that keeps its order
    start = boxes[-1].start()
    for box in reversed(boxes[:-1]):
        content = _box_content(text, box.end(), start)
        if content is None or not _BOX_JOINT.fullmatch(text, content[1], start):
            break
        contents[content[0]] = None
        start = box.start()
    return _LEAD_IN.sub("", ", ".join(reversed(contents)))


def _second_thought(text: str, content: str, end: int) -> str | None:
    """Another number or letter behind the box, which is then a guess: "or 6". "Or 1/2" behind 0.5 is none."""
    match = _SECOND_THOUGHT.match(text, end)
    if match is None or not _ELSE.search(match["joint"]):
        return None
    given, other = to_answer(content), to_answer(match["other"])
    numbers = read_number(given), read_number(other)
    if numbers[0] is None or numbers[1] is None:
        is_letter = len(given.form) == len(other.form) == 1 and numbers == (None, None)
        return match["other"] if is_letter and given.form != other.form else None
    restates = same_value(numbers[0], _as_rounded(numbers[1], other.form)) or same_value(
        numbers[1], _as_rounded(numbers[0], given.form)
    )
    return None if restates else match["other"]


def _as_rounded(number: Number, text: str) -> Number:
    """A decimal or a percentage beside another number may be its rounding: 1/3 or 0.33."""
    return number._replace(half_unit=half_unit(text)) if "." in text or number.percent else number


def _box_content(text: str, start: int, stop: int | None = None) -> tuple[str, int] | None:
    r"""Content of a box whose braces open at `start`, and where it ends; `\boxed 4` holds one token."""
    stop = len(text) if stop is None else stop
    if not text.startswith("{", start):
        token = _BARE_TOKEN.match(text, start, stop)
        return (token[0].rstrip(".,;"), token.end()) if token else None
    depth = 0
    for brace in _BRACE.finditer(text, start, stop):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return text[start + 1 : brace.start()].strip(), brace.end()
    return None


def _phrase(text: str) -> str | None:
    """Rest of the sentence after the last "the answer is" or "Answer:"."""
    last = None
    for last in _MARKER.finditer(text):  # noqa: B007 - the last one counts
        pass
    if last is None:
        return None
    rest = text[last.end() : last.end() + _MAX_PHRASE_CHARACTERS]
    if last[0].startswith('"'):
        value = _JSON_VALUE.match(rest)
        return (value[1] or value[2]).strip() or None if value else None
    end = _SENTENCE_END.search(rest)
    if end and end[0] in "?？":
        return None  # "The answer is 5?" asks
    return _clean_phrase(rest[: end.start()] if end else rest)


def _clean_phrase(phrase: str) -> str | None:
    return phrase.strip(" \t\r*_`\"'") or None


def _unmarked(text: str) -> str | None:
    """Answer of an output that marks none; never one of several numbers, which would reward guesses."""
    closing = _CLOSING_NUMBER.search(text, max(len(text) - 200, 0))
    if closing:
        return closing[1]
    bare = text.strip().strip("*_`").strip()
    return bare if 0 < len(bare) <= _MAX_WHOLE_CHARACTERS and "\n" not in bare else None
