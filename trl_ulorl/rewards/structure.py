r"""Read what formulas are combined to: lists, sets, tuples, intervals, equations, inequalities, matrices.

`x \in [2, 5)` becomes a named interval, `a = 1 \text{ or } a = -2` a list of two named formulas. A text that is none
of these is kept as `Text`, which equals nothing but itself.
"""

import re
from fractions import Fraction
from itertools import pairwise

from .formula import MAX_CHARACTERS, Node, Unreadable, Unsupported, read_formula
from .items import Congruence, Interval, Item, Matrix, Named, Relation, Rounded, Scalar, Sequence, Text, determinant
from .numbers import Number, read_plain, read_span
from .regions import joined_region
from .values import exact_value

_MAX_ITEMS = 500
_MAX_DEPTH = 12


def read_structure(text: str, *, depth: int = 0) -> Item:
    """Return the structure of a normalised answer."""
    text = _ANGLES.sub(r"(\1)", text)
    text = _FRENCH.sub(_brackets_to_parentheses, _unwrapped(_system(text.strip())))
    if depth > _MAX_DEPTH or len(text) > MAX_CHARACTERS or not _is_balanced(text):
        return Text(text)
    readers = (_span, _implication, _congruence, _joined, _matrix, _set_builder, _union, _relation, _signs, _bracketed)
    for reader in readers:
        item = reader(text, depth)
        if item is not None:
            return item
    return _scalar(text)


# ------------------------------------------------------------------------------------------------------------ brackets

_ANGLES = re.compile(r"^\s*\\langle(?![A-Za-z])([^<>\\]*(?:\\(?!langle|rangle)[^<>\\]*)*)\\rangle\s*$")
_FRENCH = re.compile(r"(?<!\S)([\[\]])([^\[\]()]{1,80},[^\[\]()]{1,80})([\[\]])(?!\S)")


def _brackets_to_parentheses(interval: re.Match[str]) -> str:
    """]a, b[ is another way to write the open interval (a, b)."""
    return f"{'(' if interval[1] == ']' else '['}{interval[2]}{')' if interval[3] == '[' else ']'}"


_BRACKET = re.compile(r"\\[{}]|\\[lr]?(?:angle|brace|brack)(?![A-Za-z])|\\begin\{\w+\*?\}|\\end\{\w+\*?\}|[()\[\]{}]")
_OPENING = frozenset("([{") | {r"\{"}
_CLOSING = frozenset(")]}") | {r"\}"}


def _steps(text: str) -> list[tuple[int, int, int]]:
    """Brackets as (start, end, change of depth)."""
    steps = []
    for match in _BRACKET.finditer(text):
        sign = match[0]
        change = (sign in _OPENING or sign.startswith(r"\begin")) - (sign in _CLOSING or sign.startswith(r"\end"))
        steps.append((match.start(), match.end(), change))
    return steps


def _is_balanced(text: str) -> bool:
    depth = 0
    for _, _, change in _steps(text):
        depth += change
        if depth < 0:
            return False
    return depth == 0


def _top_level(text: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """Matches outside all brackets."""
    spans: list[tuple[int, int]] = []
    depth = start = 0
    for begin, end, change in _steps(text):
        if depth == 0 and change > 0:
            spans.append((start, begin))
        depth += change
        if depth == 0 and change < 0:
            start = end
    spans.append((start, len(text)))
    return [
        match
        for match in pattern.finditer(text)
        if any(begin <= match.start() and match.end() <= end for begin, end in spans)
    ]


def _pieces(text: str, matches: list[re.Match[str]]) -> list[str]:
    edges = [0, *(edge for match in matches for edge in match.span()), len(text)]
    return [text[edges[place] : edges[place + 1]].strip() for place in range(0, len(edges), 2)]


_SYSTEM = re.compile(r"(?P<name>[^{}\\=]{1,20}=)?\\?\{(?P<rows>.*)", re.DOTALL)
_ROW = re.compile(r"\\\\")


def _system(text: str) -> str:
    r"""Write what one tall brace holds as a list, equations such as `\{x=1\\y=2`, or as cases, if it is an array."""
    brace = None if _is_balanced(text) else _SYSTEM.fullmatch(text)
    rows = brace["rows"].strip() if brace else text
    if brace and not _is_balanced(rows):
        return text
    array = _MATRIX.fullmatch(rows) if brace else None
    if brace and array and array[1] == "array":
        return rf"{brace['name'] or ''}\begin{{cases}}{array[2].replace('&=', '=').replace('=&', '=')}\end{{cases}}"
    if "=" not in rows or (brace and brace["name"]):
        return text
    ends = _top_level(rows, _ROW)
    return ",".join(piece for piece in _pieces(rows, ends) if piece) if ends else rows


def _unwrapped(text: str) -> str:
    """Drop braces around the whole."""
    while text.startswith("{") and text.endswith("}") and _closes_at_end(text):
        text = text[1:-1].strip()
    return text


def _closes_at_end(text: str) -> bool:
    """Whether the bracket that opens the text is closed by its end."""
    depth = 0
    for _, end, change in _steps(text):
        depth += change
        if depth == 0:
            return end == len(text)
    return False


# ------------------------------------------------------------------------------------------------------------- readers


def _span(text: str, depth: int) -> Item | None:
    """A range as the whole answer, which is no difference: 5-6 is not -1."""
    span = read_span(text.strip("()[]")) if depth == 0 else None
    return Text(f"{span[0]} to {span[1]}{span[2]}") if span else None


_IMPLIES = re.compile(r"\\Rightarrow(?![A-Za-z])|=>")
_MODULO = re.compile(
    r"(?P<left>.{1,100}?)\\equiv(?![A-Za-z])(?P<residues>.{1,200}?)\s?(?P<bracket>\()?\\?[pb]?mod(?![A-Za-z])\s?"
    r"(?P<modulus>\{(?:[^{}]|\{[^{}]*\})*\}|[\w^+\-*]+)(?(bracket)\))"
)
_RELATION_SIGN = re.compile(
    r"\\(?:le|ge|ne|in|approx|equiv|sim|simeq|perp|parallel|cong|propto|notin|subset|subseteq|supset|to|ll|gg|mapsto|pmod|bmod|mod)(?![A-Za-z])"
    r"|[<>=:]=?"
)
_COMMA = re.compile(
    r"[,;]|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])|\\(?:lor|vee|land|wedge|text|quad)(?![A-Za-z])|[或和且与]"
)
_OR = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])|或")
# Without 和 and 与, which join lists
_AND = re.compile(r"(?<![A-Za-z\\])and(?![A-Za-z])|\\(?:land|wedge)(?![A-Za-z])|且")
_LOGICAL = re.compile(r"\\(?:lor|vee|land|wedge)(?![A-Za-z])")
_THOUSANDS = re.compile(r"(?:[^,=]*=)?[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_ORDERED = re.compile(r"[A-Za-z]{3,}|\\ldots|[\u3400-\u9fff]")
_FUNCTION_WORDS = re.compile(r"\\[A-Za-z]+|(?:arc)?(?:sin|cos|tan)h?|exp|log|sqrt|max|min|gcd|lcm|mod|sec|csc|cot")


def _implication(text: str, depth: int) -> Item | None:
    """The end of a chain of conclusions."""
    arrows = _top_level(text, _IMPLIES)
    if not arrows or not _top_level(text[: arrows[0].start()], _RELATION_SIGN):
        return None
    return read_structure(text[arrows[-1].end() :], depth=depth + 1)


def _joined(text: str, depth: int) -> Item | None:
    """Items joined by commas, semicolons, "or" and "and"."""
    signs = _top_level(text, _COMMA)
    if not signs or _THOUSANDS.fullmatch(text) or len(signs) > _MAX_ITEMS:
        return None
    pieces = [piece for piece in _pieces(text, signs) if piece]
    if len(pieces) < 2:
        return read_structure(pieces[0], depth=depth + 1) if pieces else None
    items = [read_structure(piece, depth=depth + 1) for piece in pieces]
    joints = tuple(dict.fromkeys(joint for match in signs if (joint := _joint(match[0]))))
    region = joined_region(items, "or" if "or" in joints else "".join(joints))
    if region is not None:
        return region
    first = items[0]
    if isinstance(first, Named) and not any(isinstance(item, Named | Relation) for item in items[1:]):
        return Named(first.name, Sequence((first.value, *items[1:]), "list"))  # n = 1, 2, 3
    if all(isinstance(item, Named) and item.name == first.name for item in items if isinstance(first, Named)) and (
        isinstance(first, Named)
    ):
        return Named(first.name, Sequence(tuple(item.value for item in items if isinstance(item, Named)), "list"))
    is_ordered = bool(_ORDERED.search(_FUNCTION_WORDS.sub("", text))) or r"\ldots" in text
    if not _LOGICAL.search(text) and not any(isinstance(item, Named | Relation | Congruence) for item in items):
        joints = ()  # the solutions 1 and 2 are 1 or 2
    return Sequence(tuple(items), "list", is_ordered=is_ordered or len(joints) > 1, joints=joints)


def _joint(sign: str) -> str:
    return "or" if _OR.fullmatch(sign) else "and" if _AND.fullmatch(sign) else ""


def _congruence(text: str, depth: int) -> Item | None:
    r"""`x \equiv 1, 2 \pmod 4` is one congruence for each residue."""
    match = _MODULO.fullmatch(text) if text.count(r"\equiv") == 1 else None
    if match is None:
        return None
    left, residues, modulus = (
        read_structure(match[name], depth=depth + 1) for name in ("left", "residues", "modulus")
    )
    several = residues.items if isinstance(residues, Sequence) and residues.kind == "list" else (residues,)
    items = tuple(Congruence(left, residue, modulus) for residue in several)
    return items[0] if len(items) == 1 else Sequence(items, "list")


_MATRIX = re.compile(
    r"\\begin\{([pbBvV]?matrix|smallmatrix|array|cases|aligned)\}(?:\{[lcr|\s]*\})?(.*)\\end\{\1\}", re.DOTALL
)


def _matrix(text: str, depth: int) -> Item | None:
    body = text
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        body = text[1:-1]
    match = _MATRIX.fullmatch(body)
    if match is None or r"\begin" in match[2] or match[1] == "Vmatrix":
        return None
    lines = [line for line in re.split(r"\\\\(?:\[[^\]]*\])?", match[2]) if line.strip()]
    if match[1] in ("cases", "aligned"):
        joined = ", ".join(lines).replace("&", "" if match[1] == "aligned" else " if ")
        return read_structure(joined, depth=depth + 1) if lines else None
    if match[1] == "array" and len(lines) == 1 and "&" not in lines[0]:
        return read_structure(lines[0], depth=depth + 1)
    rows = tuple(tuple(read_structure(cell, depth=depth + 1) for cell in line.split("&")) for line in lines)
    if not rows or len(rows) > _MAX_ITEMS or len({len(row) for row in rows}) > 1:
        return None
    if match[1] != "vmatrix":
        return Matrix(rows)
    value = determinant(rows)
    return Scalar(value, text) if value else None


_BUILDER = re.compile(r"\\\{(\w+)(?:\\in(?:\\mathbb\{R\}|R))?[|:](.*)\\\}", re.DOTALL)


def _set_builder(text: str, depth: int) -> Item | None:
    """`{x | x > 3}` is the solution of its condition."""
    match = _BUILDER.fullmatch(text)
    if match is None or not _closes_at_end(text):
        return None
    condition = read_structure(match[2], depth=depth + 1)
    if isinstance(condition, Named) and condition.name == match[1] and isinstance(condition.value, Scalar):
        return Sequence((condition.value,), "set")
    return condition if isinstance(condition, Relation | Named | Sequence) else None


_PUNCTURED = re.compile(
    r"(?:\\mathbb\{R\}|R|\(-\\infty,\+?\\infty\))(?:\\setminus|\\backslash|-|\\)\\\{([^{}]{1,200})\\\}"
)


def _without_points(texts: list[str], depth: int) -> Item | None:
    """The real numbers but a few, as a union of intervals."""
    points = [read_structure(text, depth=depth + 1) for text in texts]
    values = [exact_value(point.node, {}) if isinstance(point, Scalar) else None for point in points]
    if any(value is None for value in values):
        return None
    ordered = [point for _, point in sorted(zip(values, points, strict=True), key=lambda pair: pair[0] or 0)]
    ends: list[Item | None] = [None, *ordered, None]
    return Sequence(tuple(Interval(*pair, (True, True)) for pair in pairwise(ends)), "union")


_CUP = re.compile(r"\\cup(?![A-Za-z])")


def _union(text: str, depth: int) -> Item | None:
    if _top_level(text, _RELATION_SIGN):
        return None
    punctured = _PUNCTURED.fullmatch(text)
    if punctured:
        return _without_points(punctured[1].split(","), depth)
    cups = _top_level(text, _CUP)
    if not cups or len(cups) > _MAX_ITEMS:
        return None
    return Sequence(tuple(read_structure(piece, depth=depth + 1) for piece in _pieces(text, cups)), "union")


_NAME = re.compile(
    r"(?:\\?[A-Za-z]+|[A-Za-z])(?:_\{[^{}]*\}|_\w)?'*(?:\((?:\\?[A-Za-z]+|\d+)(?:,(?:\\?[A-Za-z]+|\d+))*\))?"
    r"|\\frac\{d[A-Za-z]\}\{d[A-Za-z]\}|\\(?:angle|triangle|overline|vec|widehat|hat|bar|mathbb|mathcal)\s?\{?\s?\w+\}?"
)
_ABOUT = frozenset((r"\approx", r"\sim", r"\simeq"))
_SWAPPED = {">": "<", r"\ge": r"\le"}


def _relation(text: str, depth: int) -> Item | None:
    signs = [match for match in _top_level(text, _RELATION_SIGN) if match[0] != ":"]
    if not signs or len(signs) > 20:
        return None
    sides = _pieces(text, signs)
    kinds = tuple({"==": "=", ":=": "=", "<=": r"\le", ">=": r"\ge"}.get(sign[0], sign[0]) for sign in signs)
    if not sides[-1]:
        return None
    if kinds[0] in _ABOUT and (not sides[0] or (len(kinds) == 1 and _NAME.fullmatch(sides[0]))):
        number = read_plain(sides[-1])
        return Rounded(_with_half_unit(number, sides[-1])) if number and len(kinds) == 1 else None
    if not sides[0]:
        return None
    if kinds[0] in ("=", r"\in") and len(kinds) == 1:
        named = _named(sides[0], sides[1], depth)
        if named is not None:
            return named
    items = [read_structure(side, depth=depth + 1) for side in sides]
    if {*kinds} <= {">", r"\ge"}:
        items.reverse()
        kinds = tuple(_SWAPPED[kind] for kind in reversed(kinds))
    return Relation(tuple(items), kinds)


def _with_half_unit(number: Number, text: str) -> Number:
    decimals = re.search(r"\.(\d+)", text)
    return number._replace(half_unit=Fraction(1, 2 * 10 ** (len(decimals[1]) if decimals else 0)))


def _named(left: str, right: str, depth: int) -> Item | None:
    if _NAME.fullmatch(left) and not _FUNCTION_WORDS.fullmatch(left.partition("(")[0]):
        value = read_structure(right, depth=depth + 1)
        return Named(_name(left), value)
    names = re.fullmatch(r"\((\w+(?:,\w+)+)\)", left)
    if names is None:
        return None
    value = read_structure(right, depth=depth + 1)
    values: tuple[Item | None, ...] = ()
    if isinstance(value, Interval) and all(value.is_open):
        values = value.low, value.high
    elif isinstance(value, Sequence) and value.kind == "tuple":
        values = value.items
    pairs = list(zip(names[1].split(","), values, strict=False))
    named = tuple(Named(name, each) for name, each in pairs if each is not None)
    if len(named) == names[1].count(",") + 1 == len(values):
        return Sequence(named, "list")  # (n, k) = (2, 45) says n = 2 and k = 45
    return value if isinstance(value, Interval | Sequence) else None


def _name(text: str) -> str:
    return re.sub(r"[\s{}]", "", text)


_PLUS, _MINUS = re.compile(r"\\pm(?![A-Za-z])"), re.compile(r"\\mp(?![A-Za-z])")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")


def _signs(text: str, depth: int) -> Item | None:
    r"""The two values of a formula with `\pm`."""
    if not _PLUS_MINUS.search(text) or len(_PLUS_MINUS.findall(text)) > 2:
        return None
    upper, lower = _PLUS.sub("+", _MINUS.sub("-", text)), _PLUS.sub("-", _MINUS.sub("+", text))
    return Sequence(tuple(read_structure(variant, depth=depth + 1) for variant in (upper, lower)), "list")


_INFINITY = re.compile(r"([+-]?)(?:\\infty|infinity|inf|oo)")


def _bracketed(text: str, depth: int) -> Item | None:
    """A tuple, an interval, a set, or a formula in brackets."""
    is_set = text.startswith(r"\{") and text.endswith(r"\}")
    opening, closing = text[:1], text[-1:]
    if is_set:
        inner = text[2:-2].strip()
    elif opening in ("(", "[") and closing in (")", "]") and not text.endswith(r"\]"):
        inner = text[1:-1].strip()
    else:
        return None
    if not _closes_at_end(text):
        return None
    commas = _top_level(inner, re.compile("[,;]"))
    if len(commas) > _MAX_ITEMS:
        return None
    pieces = _pieces(inner, commas) if inner else []
    if is_set:
        return Sequence(tuple(read_structure(piece, depth=depth + 1) for piece in pieces), "set")
    if len(pieces) == 1 and opening == "(" and closing == ")":
        return read_structure(inner, depth=depth + 1)
    if len(pieces) == 2:
        ends = [None if _INFINITY.fullmatch(piece) else read_structure(piece, depth=depth + 1) for piece in pieces]
        signs = [_INFINITY.fullmatch(piece) for piece in pieces]
        if (signs[0] and signs[0][1] != "-") or (signs[1] and signs[1][1] == "-"):
            return Text(text)
        is_open = (opening == "(", closing == ")")
        return Interval(ends[0], ends[1], (is_open[0] or ends[0] is None, is_open[1] or ends[1] is None))
    if len(pieces) < 2:
        return None
    return Sequence(tuple(read_structure(piece, depth=depth + 1) for piece in pieces), "tuple")


_DATE = re.compile(r"([12]\d{3})([-/])(\d{1,2})\2(\d{1,2})|(\d{1,2})([-/])(\d{1,2})\6([12]\d{3})", re.ASCII)


def _date(text: str) -> Text | None:
    """A date in digits, which is no difference or quotient: 2024-01-05 is not 2018."""
    match = _DATE.fullmatch(text)
    if match is None:
        return None
    fields = [int(field) for field in match.group(1, 3, 4, 5, 7, 8) if field]
    return Text("-".join(map(str, fields))) if max(sorted(fields)[:2]) <= 31 else None


def _scalar(text: str) -> Item:
    date = _date(text)
    if date is not None:
        return date
    number = read_plain(text)
    if number is not None:
        value = number.value / 100 if number.percent else number.value
        return Scalar(Node("number", value=value), text)
    try:
        return Scalar(read_formula(text), text)
    except Unsupported:
        return Text(text, needs_algebra=True)
    except Unreadable:
        return Text(text)
