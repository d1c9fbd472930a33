r"""One spelling for answers that differ only in Unicode, spacing, LaTeX layout or punctuation.

Pure string functions in linear time. They know nothing about mathematics beyond its spelling.
`$\left( \dfrac12,\, 2{,}000 \right)$.` becomes `(\frac{1}{2},2000)`.
"""

import re
import unicodedata
from functools import lru_cache
from typing import NamedTuple

MAX_CHARACTERS = 10_000
"""Longer answers are compared character by character only."""


class Answer(NamedTuple):
    r"""An answer in the spellings that the stages read.

    Attributes:
        raw: As extracted.
        marked: Normalised, with words still set off by `\text{...}`: what is a unit, and what a product of letters.
        form: Normalised, `marked` without `\text`.
    """

    raw: str
    marked: str
    form: str


def normalize_answer(text: str) -> str:
    r"""Return one spelling for answers that differ only in Unicode, spacing, LaTeX layout or punctuation.

    Args:
        text: A short answer, as extracted. Over 10,000 characters only its ends are stripped.

    Returns:
        The normalised answer. Equal forms mean equal answers, different forms mean nothing.

    Example:
        >>> normalize_answer(r"$\left( \dfrac12,\, 2{,}000 \right)$.")
        '(\\frac{1}{2},2000)'
    """
    return to_answer(text).form


def to_answer(text: str) -> Answer:
    r"""Return an answer with its two normalised spellings.

    Example:
        >>> to_answer(r"27\mathrm{~cm}")[1:]
        ('27\\text{cm}', '27 cm')
    """
    if len(text) > MAX_CHARACTERS:
        return Answer(text, text.strip(), text.strip())
    return _to_answer(text) if len(text) <= _MAX_KEPT_CHARACTERS else _to_answer.__wrapped__(text)


_MAX_KEPT_CHARACTERS = 300


@lru_cache(maxsize=4096)  # a prompt's rollouts share their reference, and often their answer
def _to_answer(text: str) -> Answer:
    marked = _GROUPED.sub(_without_groups, _dollars(_characters(text)))
    marked = _rewrite(marked, _LAYOUT)
    marked = _spaces(marked)
    plain = marked
    for _ in range(3):  # \text{...} inside \text{...}
        plain, found = _TEXT.subn(r" \1 ", plain)
        if not found:
            break
    form = _spaces(plain)
    in_base = _IN_BASE.fullmatch(form)
    if in_base:
        marked = form = _with_base(in_base)
    return Answer(text, marked, form)


_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"} | {
    "ten": "10",
    "twelve": "12",
    "sixteen": "16",
}
_BASE = rf"(?:\d{{1,2}}|{'|'.join(_BASES)})"
_IN_BASE = re.compile(rf"\(?(\d[\dA-F]*)\)?\s?(?:_\{{?\(?({_BASE})\)?\}}?|\(?base\s({_BASE})\)?)", re.ASCII)


def _with_base(number: re.Match[str]) -> str:
    """One spelling for a number and its base; the decimal one is not said."""
    base = number[2] or number[3]
    base = _BASES.get(base, base)
    if base == "10" and number[1].isdecimal():
        return number[1]
    return f"{number[1]}_{base}" if len(base) == 1 else f"{number[1]}_{{{base}}}"


# ------------------------------------------------------------------------------------------------------------- Unicode

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_SUBSCRIPT_RUN = re.compile("[₀-₉]+")
_CIRCLED_RUN = re.compile("[①-⑳]{2,}")  # labels of statements: ①③ is no 13
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
# Before NFKC, which would turn them into plain letters.
_DOUBLE_STRUCK = str.maketrans(
    {letter: rf"\mathbb{{{plain}}}" for letter, plain in zip("ℝℤℚℕℂ", "RZQNC", strict=True)}
)
_GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon phi chi psi omega"
_SYMBOLS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "—": "-",
        "×": r"\times ",
        "⋅": r"\cdot ",
        "·": r"\cdot ",
        "∗": "*",
        "÷": r"\div ",
        "±": r"\pm ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "⩽": r"\le ",
        "⩾": r"\ge ",
        "≠": r"\ne ",
        "≈": r"\approx ",
        "≡": r"\equiv ",
        "∞": r"\infty ",
        "√": r"\surd ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "⇒": r"\Rightarrow ",
        "→": r"\to ",
        "⊥": r"\perp ",
        "∥": r"\parallel ",
        "∠": r"\angle ",
        "△": r"\triangle ",
        "°": r"^\circ ",
        "′": "'",
        "’": "'",
        "。": ".",
        "、": ",",
        "“": '"',
        "”": '"',
    }
    | {chr(0x3B1 + place + (place > 16)): rf"\{name} " for place, name in enumerate(_GREEK.split())}
    | {"Δ": r"\Delta ", "Ω": r"\Omega ", "Σ": r"\Sigma ", "Θ": r"\Theta ", "Φ": r"\Phi ", "Γ": r"\Gamma "}
)


def _characters(text: str) -> str:
    text = _SUPERSCRIPT_RUN.sub(lambda run: "^{" + run[0].translate(_SUPERSCRIPTS) + "}", text)
    text = _SUBSCRIPT_RUN.sub(lambda run: "_{" + unicodedata.normalize("NFKC", run[0]) + "}", text)
    text = _CIRCLED_RUN.sub(lambda run: ",".join(run[0]), text)
    text = _VULGAR_FRACTION.sub(_vulgar_to_latex, text).translate(_DOUBLE_STRUCK)
    text = unicodedata.normalize("NFKC", text).translate(_SYMBOLS)
    return "".join(
        str(unicodedata.decimal(c, c)) for c in text if c < "\x7f" or unicodedata.category(c) != "Cf"
    ).strip()


def _vulgar_to_latex(character: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", character[0]).partition("⁄")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


# --------------------------------------------------------------------------------------------------------------- LaTeX

_PRICE = re.compile(r"(?<!\\)\$(?=\s?[\d.])")


def _dollars(text: str) -> str:
    r"""Tell the delimiter `$` from the currency, which is left as `\$`."""
    if text.count("$") - text.count(r"\$") == 1:
        text = _PRICE.sub(r"\\$", text)
    return re.sub(r"(?<!\\)\$", " ", text)


_TEXT = re.compile(r"\\text\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_FONTS = (
    "textbf|textit|textrm|textsf|texttt|mbox|hbox|mathrm|mathbf|mathit|mathsf|mathtt|boldsymbol|bm|operatorname|text"
)


def _patterns(*rules: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in rules)


_BEFORE, _AFTER = r"(?<=[0-9A-Za-z)}])\s?", r"\s?(?=[0-9A-Za-z(\\-])"  # sides of a relation in Chinese words
# One spelling for what LaTeX writes in several ways; the order matters.
_LAYOUT = _patterns(
    (r"\{\s*\\(?:rm|bf|it)(?![A-Za-z])\s*([^{}]*)\}", r"\\text{\1}"),
    (rf"\\(?:{_FONTS})\*?\s*\{{", r"\\text{"),
    (r"\\(?:rm|bf|it)(?![A-Za-z])", " "),
    (r"\{,\}", ","),
    (r"(?<=\d),(?:\s|\\[ ,;:]|\\q?quad)+(?=\d{3}(?!\d))", ";"),  # "100, 200" is a list, no number
    (r"\\[tdc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\[td]binom(?![A-Za-z])", r"\\binom"),
    (r"(?<!\\)\\[\[\]()]", " "),
    (
        r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|q?quad|hspace\{[^{}]*\})(?![A-Za-z])\.?",
        " ",
    ),
    (r"(?<!\\)\\[,;:! ]|(?<!\\)~", " "),
    (r"\\(leq|geq|neq)(?:slant)?(?![A-Za-z])", r"\\\1"),
    (r"\\(le|ge|ne)q(?![A-Za-z])", r"\\\1"),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"<=", r"\\le "),
    (r">=", r"\\ge "),
    (r"!=", r"\\ne "),
    (rf"{_BEFORE}(?:大于或?等于|不小于){_AFTER}", r"\\ge "),
    (rf"{_BEFORE}(?:小于或?等于|不大于){_AFTER}", r"\\le "),
    (rf"{_BEFORE}大于{_AFTER}", ">"),
    (rf"{_BEFORE}小于{_AFTER}", "<"),
    (r"\\(?:varnothing|O)(?![A-Za-z])", r"\\emptyset"),
    (r"\\(?:dots|cdots|ldots|dotsc|dotsb)(?![A-Za-z])|\.\.\.|…", r"\\ldots "),
    (r"\\lnot(?![A-Za-z])", r"\\neg"),
    (r"\\overrightarrow(?![A-Za-z])", r"\\vec"),
    (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
    (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
    (r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])", "|"),
    (r"\\(?:implies|Longrightarrow)(?![A-Za-z])", r"\\Rightarrow"),
    (r"\\(?:degree)(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}", r"^\\circ"),
    (r"\\overline\s*\{\s*([A-Z]{2})\s*\}", r"\1"),  # a segment
    (r"\^\\circ\s*(?=\d)", r"^\\circ "),
    (r"\\(?:overline|dot)\s*(\d)(?!\d)", r"\\overline{\1}"),
    (
        r"(\.\d*)\\(?:overline|dot)\s*\{(\d)\}(?:(\d*)\\(?:overline|dot)\s*\{(\d)\})?",
        r"\1\\overline{\2\3\4}",
    ),  # dots at both ends
    (r"\\(frac|sqrt)\s*([0-9A-Za-z])(?![A-Za-z])", r"\\\1{\2}"),
    (r"(\\frac\s*\{[^{}]*\})\s*([0-9A-Za-z])", r"\1{\2}"),
    (r"([\^_])\s*\{\s*(\w)\s*\}", r"\1\2"),
    (r"\\%", "%"),
    (r"\\(?:newline|\\)\s*$", ""),
)
# Thousands set off as only LaTeX does: 2{,}000 and 2\,000. A plain comma may also separate items.
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\{,\}|,\\!|,|\\[,;:! ])\d{3})+(?!\d)")


def _without_groups(number: re.Match[str]) -> str:
    digits = re.sub(r"\D", "", number[0])
    return digits if re.search(r"[{\\]", number[0]) else number[0]


_CJK = "\u3400-\u9fff"
_SPACING = _patterns(
    (r"\s+", " "),
    (r" ?([^\w ]) ?", r"\1"),
    (rf" (?=[{_CJK}])|(?<=[{_CJK}]) ", ""),
    (r"(?<=[A-Za-z])\\text\{", r" \\text{"),
)
_LETTER_IN_BRACKETS = re.compile(r"\(([A-Z])\)")


def _rewrite(text: str, rules: tuple[tuple[re.Pattern[str], str], ...]) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def _spaces(text: str) -> str:
    for pattern, replacement in _SPACING:
        text = pattern.sub(replacement, text).strip()
    text = text.removesuffix("**").rstrip(" .,;:")  # no pattern: one that ends in `$` takes quadratic time
    if len(text) > 2 and text[0] == text[-1] == '"':
        text = text[1:-1].strip()
    letter = _LETTER_IN_BRACKETS.fullmatch(text)
    return letter[1] if letter else text
