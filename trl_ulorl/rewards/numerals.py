"""Numbers in words: English and Chinese numerals, by strict grammars.

Each reader takes the whole text or nothing. "one and one half" is 3/2, "thirty-four hundred and fifty" is 3450,
"二分之一" is 1/2, "一万零三" is 10003; "one two", "twenty thirty" and "万三" are no numbers.
"""

import re
from fractions import Fraction

_MAX_CHARACTERS = 200

# ------------------------------------------------------------------------------------------------------------- English

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_SMALL = {word: value for value, word in enumerate(_ONES)}
_TEN = {word: 10 * value for value, word in enumerate(_TENS, start=2)} | {"fourty": 40}
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "quadrillion": 10**15}
_ORDINAL_ONES = (
    "third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth "
    "seventeenth eighteenth nineteenth"
).split()
_PARTS = (
    {word: value for value, word in enumerate(_ORDINAL_ONES, start=3)}
    | {f"{tens[:-1]}ieth": 10 * value for value, tens in enumerate(_TENS, start=2)}
    | {"half": 2, "halve": 2, "quarter": 4, "hundredth": 100, "thousandth": 1000, "millionth": 10**6}
)
_WORD = re.compile(r"[a-z]+|\d+(?:,\d{3})*(?:\.\d+)?|,")
_ENGLISH = re.compile(r"[a-z\d\s,.\-]+")


def read_english(text: str) -> Fraction | None:
    """Value of an English numeral, digits with a scale word ("1.5 million") included; `None` if it is none.

    Args:
        text: The whole text, any case.

    Example:
        >>> read_english("two and three quarters")
        Fraction(11, 4)
        >>> read_english("twenty thirty") is None
        True
    """
    text = text.casefold().strip()
    if len(text) > _MAX_CHARACTERS or not _ENGLISH.fullmatch(text) or not re.search("[a-z]", text):
        return None
    tokens = _WORD.findall(text.replace("-", " "))
    if "".join(tokens) != re.sub(r"[\s\-]", "", text):
        return None
    negative = bool(tokens) and tokens[0] in ("minus", "negative")
    value = _amount(tokens[negative:])
    return -value if negative and value is not None else value


def _amount(tokens: list[str]) -> Fraction | None:
    """Sum of a whole and a part: "one and one half", "two thirds", "half a million", "three point one four"."""
    if not tokens:
        return None
    for reader in (_cardinal, _decimal, _ratio, _part, _scaled_part):
        value = reader(tokens)
        if value is not None:
            return value
    for place, token in enumerate(tokens):
        if token == "and":  # the part must be less than one, else "one and two" would be three
            whole, part = _cardinal(tokens[:place]), _part(tokens[place + 1 :])
            if whole is not None and part is not None and whole.denominator == 1 and 0 < part < 1:
                return whole + part
    return None


def _cardinal(tokens: list[str]) -> Fraction | None:
    """Scale by scale, in falling order; "thirty-four hundred and fifty" too."""
    if len(tokens) == 1 and tokens[0] in ("a", "an"):
        return None
    if tokens[-2:] and tokens[-1] in ("dozen", "dozens"):
        return _dozens(tokens[:-1])
    total, last_scale, start = Fraction(0), Fraction(10**18), 0
    for place, token in enumerate(tokens):
        scale = _SCALES.get(token.removesuffix("s") if token != "s" else token)
        if scale is None:
            continue
        count = _below_scale(_without_joint(tokens[start:place], is_first=start == 0))
        if count is None or scale >= last_scale or (start > 0 and count >= 1000):
            return None
        total, last_scale, start = total + count * scale, Fraction(scale), place + 1
    if start == len(tokens):
        return total if start else None
    rest = _without_joint(tokens[start:], is_first=start == 0)
    count = _below_scale(rest)
    if count is None or (start > 0 and (count >= last_scale or count.denominator != 1)):
        return None
    if start == 0 and len(rest) == 1 and rest[0][0].isdigit():
        return None  # digits alone are no numeral
    return total + count


def _dozens(tokens: list[str]) -> Fraction | None:
    if tokens in (["a"], ["one"]):
        return Fraction(12)
    if tokens in (["half", "a"], ["a", "half"]):
        return Fraction(6)
    count = _below_scale(tokens)
    return None if count is None else 12 * count


def _without_joint(tokens: list[str], *, is_first: bool) -> list[str]:
    """Drop one comma or "and" between two scales."""
    if not is_first and tokens and tokens[0] == ",":
        tokens = tokens[1:]
    return tokens[1:] if not is_first and tokens and tokens[0] == "and" else tokens


def _below_scale(tokens: list[str]) -> Fraction | None:
    """Number below 10,000 without scale words, or digits."""
    if len(tokens) == 1 and tokens[0][0].isdigit():
        return Fraction(tokens[0].replace(",", ""))
    if "hundred" in tokens:
        place = tokens.index("hundred")
        head, tail = tokens[:place], tokens[place + 1 :]
        count = Fraction(1) if head in (["a"], ["one"]) or not head else _below_hundred(head)
        if len(head) == 1 and head[0][0].isdigit():
            count = Fraction(head[0].replace(",", ""))
        if tail[:1] == ["and"]:
            tail = tail[1:]
            if not tail:
                return None
        rest = _below_hundred(tail) if tail else Fraction(0)
        return None if count is None or rest is None or not count else 100 * count + rest
    return Fraction(1) if tokens == ["a"] else _below_hundred(tokens)


def _below_hundred(tokens: list[str]) -> Fraction | None:
    match tokens:
        case [word] if word in _SMALL:
            return Fraction(_SMALL[word])
        case [word] if word in _TEN:
            return Fraction(_TEN[word])
        case [tens, ones] if tens in _TEN and 0 < _SMALL.get(ones, 0) < 10:
            return Fraction(_TEN[tens] + _SMALL[ones])
    return None


def _decimal(tokens: list[str]) -> Fraction | None:
    """Read "three point one four", "point five"; with a scale: "one point five million"."""
    if "point" not in tokens:
        return None
    place = tokens.index("point")
    scale = _SCALES.get(tokens[-1], 1)
    digits = [_SMALL.get(word, 10) for word in tokens[place + 1 : len(tokens) - (scale > 1)]]
    if not digits or max(digits) > 9:
        return None
    whole = _cardinal(tokens[:place]) if place else Fraction(0)
    if whole is None:
        return None
    return scale * (whole + Fraction(int("".join(map(str, digits))), 10 ** len(digits)))


def _ratio(tokens: list[str]) -> Fraction | None:
    """Read "one over two", "three out of four"."""
    for place, token in enumerate(tokens):
        if token == "over" or (token == "out" and tokens[place + 1 : place + 2] == ["of"]):
            top, bottom = _count(tokens[:place]), _count(tokens[place + 1 + (token == "out") :])
            return top / bottom if top is not None and bottom else None
    return None


def _count(tokens: list[str]) -> Fraction | None:
    if len(tokens) == 1 and tokens[0].isdigit():
        return Fraction(tokens[0])
    return _cardinal(tokens) if tokens else None


def _part(tokens: list[str]) -> Fraction | None:
    """Read "half", "a third", "two thirds", "twenty-one hundredths", "three one-hundredths"."""
    if not tokens:
        return None
    if tokens in (["half"], ["one", "half"], ["a", "half"]):
        return Fraction(1, 2)
    name = tokens[-1]
    parts = _PARTS.get(name.removesuffix("s"))
    if parts is None or len(tokens) < 2:
        return None
    head = tokens[:-1]
    if head[-1] in _TEN and parts < 10 and not name.endswith("s"):
        return None  # twenty-third is an ordinal
    if head == ["a"] or head == ["one"]:
        return None if name.endswith("s") else Fraction(1, parts)
    if head[-1] == "one" and len(head) > 1 and parts in (100, 1000, 10**6):
        head = head[:-1]
    count = _count(head)
    return None if count is None or count.denominator != 1 else count / parts


def _scaled_part(tokens: list[str]) -> Fraction | None:
    """Read "half a million", "a quarter of a million"."""
    scale = _SCALES.get(tokens[-1]) or (100 if tokens[-1] == "hundred" else None)
    if scale is None or tokens[-2:-1] != ["a"]:
        return None
    head = tokens[:-2]
    part = _part(head[:-1] if head[-1:] == ["of"] else head)
    return None if part is None else part * scale


_ORDINAL = re.compile(r"(\d{1,15})(?:\s?|\^\{?\s?)(?:st|nd|rd|th)\}?", re.ASCII)
_ORDINALS = {"first": "one", "second": "two"} | {
    name: next(word for word, value in (_SMALL | _TEN).items() if value == parts)
    for name, parts in _PARTS.items()
    if name not in ("half", "halve", "quarter") and parts < 100
}


def read_ordinal(text: str) -> int | None:
    """Rank that an ordinal names, in digits, English or Chinese; `None` if it is none.

    Args:
        text: The whole text, any case.

    Example:
        >>> read_ordinal("3rd"), read_ordinal("twenty-first"), read_ordinal("第三")
        (3, 21, 3)
    """
    if len(text) > _MAX_CHARACTERS:
        return None
    text = text.casefold().strip()
    match = _ORDINAL.fullmatch(text)
    if match:
        return int(match[1])
    if text.startswith("第"):
        rank = read_chinese(text[1:]) if not text[1:].isdecimal() else Fraction(text[1:])
    else:
        last = re.split(r"[\s-]", text)[-1]
        rank = read_english(text.removesuffix(last) + _ORDINALS[last]) if last in _ORDINALS else None
    return int(rank) if rank is not None and rank.denominator == 1 else None


# ------------------------------------------------------------------------------------------------------------- Chinese

_DIGITS = (
    {character: value for value, character in enumerate("零一二三四五六七八九")}
    | {
        "〇": 0,
        "两": 2,
        "兩": 2,
    }
    | {character: value for value, character in enumerate("壹贰叁肆伍陆柒捌玖", start=1)}
)
_PLACES = {"十": 10, "百": 100, "千": 1000, "拾": 10, "佰": 100, "仟": 1000}
_MYRIADS = {"亿": 10**8, "億": 10**8, "万": 10**4, "萬": 10**4}
_CHINESE = re.compile(r"[零〇一二两兩三四五六七八九十百千万萬亿億壹贰叁肆伍陆柒捌玖拾佰仟点點分之又负負半成个\d.,]+")
_ARABIC = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


def read_chinese(text: str) -> Fraction | None:
    """Value of a Chinese numeral, Arabic digits with a Chinese scale ("1.2万") included; `None` if it is none.

    Args:
        text: The whole text.

    Example:
        >>> read_chinese("三又二分之一"), read_chinese("百分之二十五"), read_chinese("两千零五")
        (Fraction(7, 2), Fraction(1, 4), Fraction(2005, 1))
    """
    text = text.replace(" ", "")
    if len(text) > _MAX_CHARACTERS or not _CHINESE.fullmatch(text) or _ARABIC.fullmatch(text):
        return None
    negative = text[0] in "负負"
    value = _chinese_amount(text[negative:])
    return -value if negative and value is not None else value


def _chinese_amount(text: str) -> Fraction | None:
    if text in ("半", "一半", "半个"):
        return Fraction(1, 2)
    whole = Fraction(0)
    if "又" in text:
        head, _, text = text.partition("又")
        value = _chinese_whole(head)
        if value is None or "分之" not in text:
            return None
        whole = value
    if "分之" in text:
        bottom_text, _, top_text = text.partition("分之")
        scale = {"百": Fraction(100), "千": Fraction(1000), "万": Fraction(10**4)}.get(bottom_text)
        bottom, top = scale or _chinese_whole(bottom_text), _chinese_number(top_text)
        return whole + top / bottom if bottom and top is not None else None
    return _chinese_number(text)


def _chinese_number(text: str) -> Fraction | None:
    """Whole or decimal number: 三点一四, 1.2万, 一点五亿."""
    scale = _MYRIADS.get(text[-1:], 1)
    for point in "点點":
        if point in text:
            head, _, digits = text.partition(point)
            digits = digits.rstrip("".join(_MYRIADS)) if scale > 1 else digits
            whole = _chinese_whole(head)
            if whole is None or not digits or any(digit not in _DIGITS for digit in digits):
                return None
            fraction = Fraction(int("".join(str(_DIGITS[digit]) for digit in digits)), 10 ** len(digits))
            return scale * (whole + fraction)
    return _chinese_whole(text)


def _chinese_whole(text: str) -> Fraction | None:
    if _ARABIC.fullmatch(text):
        return Fraction(text.replace(",", ""))
    for name, scale in _MYRIADS.items():
        head, found, tail = text.rpartition(name)
        if found:
            count = _chinese_whole(head)
            if not tail:
                rest: Fraction | None = Fraction(0)
            elif tail[0] in _DIGITS and len(tail) == 1 and tail[0] not in "零〇":
                rest = Fraction(_DIGITS[tail] * scale, 10)  # 一万三 is 13,000
            else:
                rest = _chinese_whole(tail.lstrip("零〇"))
            return None if count is None or rest is None or rest >= scale or not count else count * scale + rest
    return _chinese_below_myriad(text)


def _chinese_below_myriad(text: str) -> Fraction | None:
    number = re.fullmatch(rf"({_ARABIC.pattern})([十百千])", text)
    if number:
        return Fraction(number[1].replace(",", "")) * _PLACES[number[2]]
    if text and all(character in _DIGITS for character in text):
        return Fraction(int("".join(str(_DIGITS[character]) for character in text)))  # 二〇二四
    return _by_places(text) if text else None


def _by_places(text: str) -> Fraction | None:
    """Digits with their places, 四千三百二十一."""
    total, digit, last_place = 0, None, 10**4
    for place, character in enumerate(text):
        if character in "零〇":
            if digit is not None or place in (0, len(text) - 1):
                return None
            last_place = min(last_place, 100)
        elif character in _DIGITS:
            if digit is not None:
                return None
            digit = _DIGITS[character]
        elif character in _PLACES:
            value = _PLACES[character]
            if value >= last_place or (
                digit is None and (value != 10 or (place > 0 and text[place - 1] not in "零〇"))
            ):
                return None
            total, digit, last_place = total + (1 if digit is None else digit) * value, None, value
        else:
            return None
    if digit is not None:
        # 一百三 is 130, 一百零三 is 103
        colloquial = total > 0 and last_place > 10 and len(text) > 1 and text[-2] in _PLACES
        total += digit * (last_place // 10 if colloquial else 1)
    return Fraction(total)
