"""Answers that are no mathematics: letters of a multiple choice, truth values, and words."""

import re
from typing import NamedTuple

from .normalize import Answer

# ------------------------------------------------------------------------------------------------------ multiple choice

_LETTERS = re.compile(r"\(?([A-J](?:(?:\s?(?:,|/|&|\band\b|和)\s?|\s)?[A-J])*)\)?", re.ASCII)
_CHOICE = re.compile(
    r"(?:(?i:(?:the\s)?(?:correct\s|right\s|best\s)?(?:option|choice|answer)(?:\sis)?)[\s:]{0,2}|选项?)?"
    r"\(?([A-J])(?:\)|[.:)]\s?(?=\S)|\s?选项)?"
)
# What labels a second option, or hedges. "C. E. coli" and "B. C. F. Gauss" don't.
_SECOND = re.compile(
    r"(?:(?<![A-Za-z])|(?<=[A-Za-z]{2}))\([A-J]\)|(?<![A-Za-z\d])[A-J][:)]|(?:\bor\s|[;/])[A-J]\.|^[A-J](?:[.):,;/\s]+[A-J])+$"
    r"|^\(?(?:or|maybe|perhaps|possibly)\b"
)
_REFERS = re.compile(r"\b(?:both|all|any|none|neither|either|only|except)\b", re.IGNORECASE)
_WITH_TEXT = re.compile(r"\(([A-J])\)\s?\S.*|([A-J])[.):]\s?\S.*", re.DOTALL)


def same_choice(prediction: Answer, reference: Answer) -> tuple[bool, str, str] | None:
    r"""Compare letters of a multiple choice, in any order where there are several.

    Args:
        prediction: Such as "(B)", "B. 12", "Option B", "A, C".
        reference: A letter from A to J, or several: "AC", "(B)".

    Returns:
        The verdict and the letters, or `None` if one of the two is no choice. "A or C" is none.
    """
    expected = _choice_letters(reference)
    if expected is None:
        return None
    given = _choice_letters(prediction)
    if given is None:
        return None
    return given == expected, "".join(sorted(given)), "".join(sorted(expected))


def _choice_letters(answer: Answer) -> frozenset[str] | None:
    if len(answer.form) > 300:
        return None
    text = re.sub(r"\(([A-J])\)(?=[\s,/&]|and|$)", r"\1", answer.form)
    several = _LETTERS.fullmatch(text)
    if several:
        letters = re.findall("[A-J]", several[1])
        in_order = letters == sorted(letters) or not re.fullmatch("[A-J]+", several[1])  # BA may be a matrix product
        return frozenset(letters) if len(set(letters)) == len(letters) and in_order else None
    one = _CHOICE.fullmatch(text) or (None if _names_another(answer.form) else _WITH_TEXT.fullmatch(text))
    return frozenset(next(letter for letter in one.groups() if letter)) if one else None


def _names_another(text: str) -> bool:
    """Whether the text behind a letter holds other options: "A. 5 or B. 6", and not "D. Both (A) and (B)"."""
    text = re.sub(r"^\(?[A-J][.):]\s?", "", text)
    return bool(_SECOND.search(text)) and not _REFERS.search(text)


# --------------------------------------------------------------------------------------------------------------- truth

_TRUE = frozenset("yes true correct right 是 对 正确 成立 是的 对的".split())
_FALSE = frozenset("no false incorrect wrong 否 不是 错 错误 不对 不正确 不成立".split()) | {"not true", "not correct"}
_LEAD = re.compile(r"^(?:(?:it|this|that|the (?:statement|claim|answer)) is|therefore|so)[\s,:]+", re.IGNORECASE)
_OPENING = re.compile(r"(yes|no|true|false|是|否)[,.;:!]\s?(?=\S)", re.IGNORECASE)


def same_truth(prediction: Answer, reference: Answer) -> tuple[bool, str, str] | None:
    """Compare truth values: yes equals true, no equals false; anything else against a truth value is wrong.

    "Yes, it converges" is a yes where the reference says no more than "Yes".
    """
    expected = _truth(reference.form)
    if expected is None:
        return None
    given = _truth(prediction.form)
    if given is None:
        opening = _OPENING.match(prediction.form)
        kinds = {
            _truth(word) for word in re.findall(r"\b(?:yes|true|no|false)\b|[是否]", prediction.form, re.IGNORECASE)
        }
        given = _truth(opening[1]) if opening and len(kinds) == 1 else None
    return given is expected, str(prediction.form if given is None else given), str(expected)


def _truth(text: str) -> bool | None:
    word = _LEAD.sub("", text[:100]).casefold().strip(" !\"'")
    return True if word in _TRUE else False if word in _FALSE else None


# --------------------------------------------------------------------------------------------------------------- words


class Words(NamedTuple):
    """Verdict on two texts.

    Attributes:
        equivalent: Whether they are the same words.
        presumed: Whether other words could still mean the same.
        forms: What was compared.
    """

    equivalent: bool
    presumed: bool
    forms: tuple[str, str]


# What is said in set phrases, in two languages.
_IDIOMS: tuple[frozenset[str], ...] = tuple(
    frozenset(phrase.strip() for phrase in group.split("|"))
    for group in (
        "doesnotexist|dne|doesntexist|limitdoesnotexist|notexist|不存在|极限不存在|itdoesnotexist|nonexistent",
        "nosolution|nosolutions|norealsolution|norealsolutions|nonexistentsolution|thereisnosolution|therearenosolutions"
        + "|无解|没有解|方程无解|无实数解|nosolutionexists|hasnosolution|emptyset|theemptyset|空集|\\emptyset|\\{\\}",
        "undefined|notdefined|无意义|未定义",
        "infinitelymany|infinitelymanysolutions|infinitesolutions|无穷多|无穷多个|无数个|无数|无穷多解|无数解",
        "infinity|infinite|positiveinfinity|plusinfinity|无穷|无穷大|正无穷|∞|\\infty|+\\infty",
        "negativeinfinity|minusinfinity|负无穷|负无穷大|-\\infty",
        "allrealnumbers|allreals|realnumbers|anyrealnumber|everyrealnumber|thesetofallrealnumbers|setofallrealnumbers"
        + "|全体实数|一切实数|任意实数|实数集|所有实数|\\mathbb{r}|(-\\infty,\\infty)|(-\\infty,+\\infty)|x\\in\\mathbb{r}",
        "allintegers|theintegers|thesetofintegers|integers|anyinteger|全体整数|整数集|所有整数|\\mathbb{z}",
        "converges|convergent|收敛|itconverges|theseriesconverges|theintegralconverges",
        "diverges|divergent|发散|itdiverges|theseriesdiverges|theintegraldiverges",
        "even|偶数|evennumber|偶",
        "odd|奇数|oddnumber|奇",
        "evenfunction|偶函数",
        "oddfunction|奇函数",
    )
)
_IDIOM_OF = {phrase: number for number, group in enumerate(_IDIOMS) for phrase in group}
_LETTERS_AND_SPACE = re.compile(r"[^\W\d_]|\s")
_ARTICLE = re.compile(r"^(?:an?|the)\s|\b(?-i:the|The|an?)\s", re.IGNORECASE)  # not the A of "vitamin A deficiency"
_INNER_CAPITAL = re.compile(r"\b[A-Z]*[a-z]+[A-Z]\w*|\b[A-Z]{2,}[a-z]\w*")
_SPELLINGS = (
    ("centre", "center"),
    ("metre", "meter"),
    ("colour", "color"),
    ("grey", "gray"),
    ("behaviour", "behavior"),
)
_FUNCTIONS = (
    r"(?:arc|ar|a)?(?:sin|cos|tan|cot|sec|csc)h?|cot|sec|csc|log|lg|exp|ln|det|gcd|lcm|max|min|mod|dim|ker|arg|"
    r"sqrt|cbrt|pi|theta|alpha|beta|gamma|delta|lambda|omega|sigma|phi|inf|infinity|floor|ceil|abs|binom|and|or|if|for"
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{\w+\*?\}|\\math(?:bb|cal|frak|scr)\{\w\}")
_WORD = re.compile(
    rf"(?<![\\A-Za-z])(?!(?:{_FUNCTIONS})(?![A-Za-z]))(?!(?:[abc]+|[xyz]+|[pqr]+|[klmn]+)(?![A-Za-z]))[A-Za-z]{{3,}}|[\u3400-\u9fff]"
)

_CONNECTIVE = re.compile(r"(?<=[\w)}\]])[或和且与](?=[\w({\[\\+-])")


def has_words(text: str) -> bool:
    """Whether a normalised answer holds prose, which algebra would read as a product of letters."""
    text = _ENVIRONMENT.sub("", text)
    return bool(_WORD.search(_CONNECTIVE.sub("", text)))


def same_words(prediction: Answer, reference: Answer) -> Words | None:
    """Compare texts: case, articles, hyphens and spaces don't count, the order of a list does.

    Different words are presumed to be different answers. Words against a formula are wrong; against a plain number or
    letter that is certain, as numerals have been read before.

    Returns:
        `None` if both are formulas.
    """
    if len(prediction.form) > 2000 or len(reference.form) > 2000:
        return None
    left, right = word_form(prediction.form), word_form(reference.form)
    idioms = _IDIOM_OF.get(left.replace(".", "")), _IDIOM_OF.get(right.replace(".", ""))
    if idioms[0] is not None and idioms[1] is not None:
        return Words(idioms[0] == idioms[1], False, (left, right))
    in_prediction, in_reference = has_words(prediction.form), has_words(reference.form)
    if not in_prediction and not in_reference:
        return None
    if left == right and left and in_prediction and in_reference:
        capitals = [_INNER_CAPITAL.findall(form) for form in (prediction.form, reference.form)]
        same = not all(capitals) or capitals[0] == capitals[1]  # CoCl2 is not COCl2
        return Words(same, not same, (left, right) if same else (prediction.form, reference.form))
    is_plain_reference = bool(re.fullmatch(r"[\d.,+\-/%\s]+|[A-Za-z]|\\frac\{-?\d+\}\{-?\d+\}", reference.form))
    return Words(False, not is_plain_reference, (left, right))


_LETTER = r"[^\W\d_]"
_MARKS = re.compile(
    rf"(?<={_LETTER})-(?={_LETTER})|(?<={_LETTER}{{2}})'(?={_LETTER})|\s|\"|(?:(?<={_LETTER}{{2}})|(?<=[\u3400-\u9fff]))!|[.]$"
)


def word_form(text: str) -> str:
    """Letters and symbols of a text without case, articles, spaces and hyphens between letters: f' and n! keep theirs."""
    text = _ARTICLE.sub("", text).casefold()
    for british, american in _SPELLINGS:
        text = text.replace(british, american)
    return _MARKS.sub("", text)
