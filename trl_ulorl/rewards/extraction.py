r"""Find the final answer in a text and bring it to a comparable form.

Pure string functions in linear time: they run on megabytes of model output, which may be hostile. They know nothing
about mathematics beyond its spelling; whether two answers are equal is decided in `verify`.

An output and its answer: `<think>\boxed{1}? No.</think> The answer is \boxed{\frac{1}{2}}.` gives `\frac{1}{2}`.
"""

import re
import unicodedata

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
# What may stand between two boxes that form one answer: "\boxed{3} or \boxed{4}", "$\boxed{3}$, $\boxed{4}$".
# Bounded, as two unbounded repeats take quadratic time on a megabyte of spaces.
_BOX_JOINT = re.compile(r"[\s$,;，；、]{0,20}(?:or|and|或|和)?[\s$,;，；、]{0,20}")
_BARE_TOKEN = re.compile(r"[^\s${}\\]+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MARKER = re.compile(
    r"""(?:\b(?:answer|(?:correct|right)\ (?:option|choice))(?:\s*\*\*)?\s*(?:\bis\b\s*:?|[:：=])
        |(?:答案\s*(?:应?[为是]|[:：])|故选|应选)\s*[:：]?)[\s*]*""",
    re.IGNORECASE | re.VERBOSE,
)
_SENTENCE_END = re.compile(r"\n|[。；]|[.?](?=\s|$)")

_MAX_PHRASE_CHARACTERS = 1000


def extract_answer(text: str) -> str | None:
    r"""Return the final answer of a model's whole output, or `None` if it gives none.

    Looked for after the last `</think>`, in this order: the last `\boxed{...}` (boxes joined only by commas or "or"
    are one answer, so a row of guesses is not a hit), `<answer>` tags, "the answer is ..." in English or Chinese.
    There is no fallback to the last number, which would reward guesses.

    Args:
        text: The output. Without any thinking tags it is searched as a whole.

    Returns:
        The answer as written, or `None` if thinking never ended, if the last box is empty or its braces do not
        balance, or if nothing marks an answer.

    Example:
        >>> extract_answer(r"<think>\boxed{1}</think> So it is \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
        >>> extract_answer("Of 12 apples 5 are left") is None
        True
    """
    final = text.rpartition(_THINK_CLOSE)[2]
    if _THINK_OPEN in final:
        return None
    if _BOX.search(final):
        return _boxed(final)
    tagged, closing_tag, _ = final.rpartition("</answer>")
    _, opening_tag, content = tagged.rpartition("<answer>")
    return (content.strip() or None) if opening_tag and closing_tag else _phrase(final)


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


def _boxed(text: str) -> str | None:
    """Answer in the last box, together with the boxes directly before it."""
    boxes = list(_BOX.finditer(text))
    last = _box_content(text, boxes[-1].end())
    if last is None or not last[0]:
        return None
    contents, start = {last[0]: None}, boxes[-1].start()  # a set that keeps its order
    for box in reversed(boxes[:-1]):
        content = _box_content(text, box.end(), start)
        if content is None or not _BOX_JOINT.fullmatch(text, content[1], start):
            break
        contents[content[0]] = None
        start = box.start()
    return ", ".join(reversed(contents))


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
    end = -1
    for marker in _MARKER.finditer(text):
        end = marker.end()
    if end < 0:
        return None
    sentence = _SENTENCE_END.split(text[end : end + _MAX_PHRASE_CHARACTERS], maxsplit=1)[0]
    return sentence.strip(" \t\r*_`\"'") or None


_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
_SYMBOLS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "⋅": r"\cdot ",
        "·": r"\cdot ",
        "÷": r"\div ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "∞": r"\infty ",
        "π": r"\pi ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "°": r"^\circ ",
        "。": ".",
    }
)
# One spelling for what LaTeX writes in several ways; the order matters.
_LATEX_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=\d)(?:\{,\}|\\[,;:! ]|,\\!)(?=\d{3}(?!\d))", ""),  # thousands: 2{,}000 and 2\,000
        (r"\\[td]frac|\\cfrac", r"\\frac"),
        (r"(?<!\\)\\[\[\]()]|\\?\$", " "),
        (r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|rm|bf)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|q?quad)(?![A-Za-z])", " "),
        (r"(?<!\\)\\[,;:! ]|~", " "),
        (r"\\(leq|geq|neq)(?:slant)?(?![A-Za-z])", r"\\\1"),
        (r"\\(le|ge|ne)q(?![A-Za-z])", r"\\\1"),
        (r"\\(frac|sqrt)\s*([0-9A-Za-z])", r"\\\1{\2}"),
        (r"(\\frac\{[^{}]*\})\s*([0-9A-Za-z])", r"\1{\2}"),
        (r"([\^_])\s*\{\s*(\w)\s*\}", r"\1\2"),
        (r"\\%", "%"),
        (r"(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])", ","),
        (r"\s+", " "),
        (r" ?([^\w ]) ?", r"\1"),
        (r"(?<!\.)[.,;:]$|\\\\$", ""),
        (r"^\(([A-Z])\)$", r"\1"),
    )
)


def normalize_answer(text: str) -> str:
    r"""Return one spelling for answers that differ only in Unicode, spacing, LaTeX layout or punctuation.

    Args:
        text: A short answer, as extracted.

    Returns:
        The normalised answer. Equal forms mean equal answers, different forms mean nothing.

    Example:
        >>> normalize_answer(r"$\left( \dfrac12,\, 2{,}000 \right)$.")
        '(\\frac{1}{2},2000)'
    """
    text = _SUPERSCRIPT_RUN.sub(lambda run: "^{" + run[0].translate(_SUPERSCRIPTS) + "}", text)
    text = _VULGAR_FRACTION.sub(_vulgar_to_latex, text)
    text = unicodedata.normalize("NFKC", text).translate(_SYMBOLS)
    text = "".join(str(unicodedata.decimal(c, c)) for c in text if unicodedata.category(c) != "Cf").strip()
    for pattern, replacement in _LATEX_REWRITES:
        text = pattern.sub(replacement, text).strip()
    return text


def _vulgar_to_latex(character: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", character[0]).partition("⁄")
    return rf"\frac{{{numerator}}}{{{denominator}}}"
