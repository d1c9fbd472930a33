"""Compare two structures: scalars by value, lists in any order, intervals with their ends, equations up to a factor.

A verdict that rests on both sides having been read is certain; where a side is a text, different is only presumed.
"""

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import NamedTuple

from .errors import Refused
from .evaluate import approximately, ratio, same_formula
from .formula import Node, symbols
from .items import Congruence, Interval, Item, Matrix, Named, Relation, Rounded, Scalar, Sequence, Text, solved
from .magnitude import differ_in_size
from .structure import read_structure
from .values import TooLarge, exact_value


class Comparison(NamedTuple):
    """Outcome of the symbolic stage.

    Attributes:
        equivalent: Whether the answers are equal.
        presumed: Whether that is only presumed, as a side could not be read.
    """

    equivalent: bool
    presumed: bool = False


def compare_formulas(prediction: str, reference: str) -> Comparison:
    """Compare two normalised answers as mathematics.

    Raises:
        Refused: If it can't be told.
    """
    left, right = read_structure(prediction), read_structure(reference)
    if _needs_algebra(left) or _needs_algebra(right):
        from .algebra import same_by_algebra

        if _as_text(left) == _as_text(right):
            return Comparison(True)
        equivalent = same_by_algebra(prediction, reference)
        return Comparison(equivalent, presumed=not equivalent)
    if same_item(left, right):
        return Comparison(True)
    is_number = isinstance(right, Scalar) and not symbols(right.node)
    unread = isinstance(right, Text) or (_has_text(left) and not is_number) or _has_text(right)
    return Comparison(False, presumed=unread)


def _parts(item: Item) -> Iterable[Item]:
    stack = [item]
    while stack:
        item = stack.pop()
        yield item
        match item:
            case Sequence(items=items):
                stack.extend(items)
            case Matrix(rows=rows):
                stack.extend(cell for row in rows for cell in row)
            case Named(value=value):
                stack.append(value)
            case Relation(sides=sides):
                stack.extend(sides)
            case Congruence():
                stack.extend((item.left, item.residue, item.modulus))
            case Interval(low=low, high=high):
                stack.extend(end for end in (low, high) if end is not None)


def _has_text(item: Item) -> bool:
    return any(isinstance(part, Text) for part in _parts(item))


def _needs_algebra(item: Item) -> bool:
    return any(isinstance(part, Text) and part.needs_algebra for part in _parts(item))


def _as_text(item: Item) -> str:
    return item.text if isinstance(item, Text | Scalar) else repr(item)


def same_item(left: Item, right: Item) -> bool:
    """Return whether two structures are equal; symmetric but for `Rounded`, which only a reference may be."""
    if isinstance(right, Rounded):
        return _is_rounded_to(left, right)
    if isinstance(left, Rounded):
        return isinstance(right, Scalar) and right.node == Node("number", value=left.number.value)
    left, right = _simple(left), _simple(right)
    if isinstance(left, Named) and isinstance(right, Named):
        return (_same_name(left.name, right.name) and same_item(left.value, right.value)) or _same_relation(
            left, right
        )
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Named) and not isinstance(other, Named | Relation):
            return _names_fit(one.name, other) and same_item(one.value, other)
    if isinstance(left, Named | Relation) or isinstance(right, Named | Relation):
        return _same_relation(left, right)
    return _same_value(left, right)


def _names_fit(name: str, other: Item) -> bool:
    """Whether what a list says is said of one variable: x = 1, 2 is x_1 = 1, x_2 = 2, and not x = 1, y = 2."""
    items = other.items if isinstance(other, Sequence) and other.kind == "list" else ()
    root = name.partition("_")[0]
    return all(_same_name(root, _subject(item)) for item in items if isinstance(item, Named | Relation))


def _subject(item: Item) -> str:
    """What a statement is about, without an index; empty where it is solved for nothing."""
    region = solved(item)
    if isinstance(item, Named):
        name = item.name
    elif region is not None:
        name = region[0]
    else:
        first = item.sides[0] if isinstance(item, Relation) and {*item.signs} == {"="} else None
        name = first.node.name if isinstance(first, Scalar) and first.node.kind == "symbol" else ""
    return name.partition("_")[0]


def _simple(item: Item) -> Item:
    """A set or list of one is that one, but for a set of a set."""
    while isinstance(item, Sequence) and item.kind in ("list", "set", "union"):
        items = _distinct(item.items) if item.kind == "set" else item.items
        if len(items) != 1 or (item.kind == "set" and _is_set(items[0])):
            break
        item = items[0]
    return item


def _is_set(item: Item) -> bool:
    is_empty = isinstance(item, Scalar | Text) and item.text == r"\emptyset"
    return is_empty or (isinstance(item, Sequence) and item.kind == "set")


def _same_member(left: Item, right: Item) -> bool:
    """Whether two members of a set are equal, in which {1} is not 1."""
    return _is_set(left) == _is_set(right) and same_item(left, right)


def _same_value(left: Item, right: Item) -> bool:
    if isinstance(left, Interval) and isinstance(right, Sequence):
        left, right = right, left
    if isinstance(left, Sequence) and left.kind == "union" and isinstance(right, Interval):
        merged = _merged(left.items)
        return len(merged) == 1 and same_item(merged[0], right)
    match left, right:
        case Scalar(), Scalar():
            return _same_scalar(left.node, right.node)
        case Text(text=one), Text(text=other):
            return one == other
        case Congruence(), Congruence():
            return _same_congruence(left, right)
        case Interval(), Interval():
            ends = ((left.low, right.low), (left.high, right.high))
            return left.is_open == right.is_open and all(_same_end(*pair) for pair in ends)
        case Matrix(), Matrix():
            return _same_shape(left, right) and all(
                same_item(one, other)
                for row, other_row in zip(left.rows, right.rows, strict=True)
                for one, other in zip(row, other_row, strict=True)
            )
        case (Matrix() as matrix, other) | (other, Matrix() as matrix):
            vector = _vector(matrix)
            return vector is not None and not isinstance(other, Scalar) and _same_value(vector, other)
    return _same_sequence(left, right)


def _same_scalar(left: Node, right: Node) -> bool:
    try:
        return same_formula(left, right)
    except TooLarge as error:
        if not symbols(left) and not symbols(right) and differ_in_size(left, right):
            return False
        raise Refused("evaluating it might not end") from error


def _same_congruence(left: Congruence, right: Congruence) -> bool:
    """Whether residues of the same thing differ by a multiple of the same modulus."""
    if not (same_item(left.left, right.left) and same_item(left.modulus, right.modulus)):
        return False
    values = [_value(item) for item in (left.residue, right.residue, left.modulus)]
    if None in values or not values[2]:
        return same_item(left.residue, right.residue)
    one, other, modulus = (value or Fraction(0) for value in values)
    return ((one - other) / modulus).denominator == 1


def _value(item: Item) -> Fraction | None:
    return exact_value(item.node, {}) if isinstance(item, Scalar) else None


def _same_end(left: Item | None, right: Item | None) -> bool:
    return left is right if left is None or right is None else same_item(left, right)


def _same_shape(left: Matrix, right: Matrix) -> bool:
    return len(left.rows) == len(right.rows) and len(left.rows[0]) == len(right.rows[0])


def _vector(matrix: Matrix) -> Item | None:
    """A matrix of one row or column as a tuple."""
    if len(matrix.rows) == 1:
        items = matrix.rows[0]
    elif len(matrix.rows[0]) == 1:
        items = tuple(row[0] for row in matrix.rows)
    else:
        return None
    return Interval(items[0], items[1], (True, True)) if len(items) == 2 else Sequence(items, "tuple")


def _same_sequence(left: Item, right: Item) -> bool:
    kinds, items = [], []
    for item in (left, right):
        if isinstance(item, Sequence):
            kinds.append(item.kind)
            items.append(item.items)
        elif (
            isinstance(item, Interval) and item.low is not None and item.high is not None and len({*item.is_open}) == 1
        ):
            kinds.append("tuple" if item.is_open[0] else "bracket")
            items.append((item.low, item.high))
        else:
            return False
    if {*kinds} in ({"tuple", "set"}, {"tuple", "union"}, {"set", "union"}, {"bracket", "set"}, {"bracket", "tuple"}):
        return False
    says_of_which = _says_of_which(items[0]) != _says_of_which(items[1])  # x = 1, y = 2 against 1, 2
    if (says_of_which and {"set", "union"} & {*kinds}) or (kinds[0] != kinds[1] and "common" in kinds):
        return False  # values of several things are no set; nothing is in all of what has nothing in common
    joints = [item.joints for item in (left, right) if isinstance(item, Sequence) and item.joints]
    if len(joints) > 1 and joints[0] != joints[1]:
        return False
    is_ordered = (
        "tuple" in kinds
        or "bracket" in kinds
        or any(isinstance(item, Sequence) and item.is_ordered for item in (left, right))
        or says_of_which
    )
    if is_ordered:
        return len(items[0]) == len(items[1]) and all(map(same_item, *items))
    if kinds == ["union", "union"]:
        items = [_merged(members) for members in items]
    elif "set" in kinds or "union" in kinds:
        items = [_distinct(members) for members in items]
    return _same_in_any_order(*items, same=_same_member if kinds == ["set", "set"] else same_item)


def _says_of_which(items: tuple[Item, ...]) -> bool:
    """Whether a list is about several variables; x_1 and x_2 are two values of one."""
    return len({_subject(item) for item in items if isinstance(item, Named | Relation)}) > 1


def _merged(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """Join intervals that touch or overlap, where their ends are rational."""
    keyed: list[tuple[Fraction | float, bool, Fraction | float, bool, Interval]] = []
    for item in items:
        low = _rational_end(item.low, -math.inf) if isinstance(item, Interval) else None
        high = _rational_end(item.high, math.inf) if isinstance(item, Interval) else None
        if not isinstance(item, Interval) or low is None or high is None:
            return _distinct(items)
        keyed.append((low, item.is_open[0], high, item.is_open[1], item))
    keyed.sort(key=lambda interval: interval[:2])
    merged = keyed[:1]
    for low, low_open, high, high_open, item in keyed[1:]:
        first = merged[-1]
        if low > first[2] or (low == first[2] and low_open and first[3]):
            merged.append((low, low_open, high, high_open, item))
        elif (high, not high_open) > (first[2], not first[3]):
            joined = Interval(first[4].low, item.high, (first[1], high_open))
            merged[-1] = (first[0], first[1], high, high_open, joined)
    return tuple(interval[4] for interval in merged)


def _rational_end(end: Item | None, infinite: float) -> Fraction | float | None:
    return infinite if end is None else _value(end)


def _distinct(items: tuple[Item, ...]) -> tuple[Item, ...]:
    kept: list[Item] = []
    for item in items:
        if len(items) > 40 or not any(same_item(item, other) for other in kept):
            kept.append(item)
    return tuple(kept)


def _same_in_any_order(left: tuple[Item, ...], right: tuple[Item, ...], *, same: Callable[[Item, Item], bool]) -> bool:
    """Match the items one to one; being equal is transitive, so the first match will do."""
    if len(left) != len(right):
        return False
    rest = list(right)
    for item in left:
        for place, other in enumerate(rest):
            if same(item, other):
                del rest[place]
                break
        else:
            return False
    return True


def _is_rounded_to(left: Item, right: Rounded) -> bool:
    if isinstance(left, Named):
        left = left.value
    if isinstance(left, Rounded):
        return abs(left.number.value - right.number.value) <= right.number.half_unit
    if isinstance(left, Relation) and left.signs[-1] in (r"\approx", "="):
        left = left.sides[-1]
    return isinstance(left, Scalar) and approximately(left.node, right.number.value, right.number.half_unit)


# ----------------------------------------------------------------------------------------------------------- relations

_SAME_NAMES = (frozenset(("y", "f(x)")), frozenset(("y", "y(x)")), frozenset(("f(x)", "y(x)")))


def _same_name(one: str, other: str) -> bool:
    return one == other or frozenset((one, other)) in _SAME_NAMES


def _same_relation(left: Item, right: Item) -> bool:
    if not isinstance(left, Named | Relation) or not isinstance(right, Named | Relation):
        if isinstance(left, Named | Relation):
            return _relation_states(left, right)
        return isinstance(right, Named | Relation) and _relation_states(right, left)
    regions = solved(left), solved(right)
    if regions[0] is not None and regions[1] is not None:
        return regions[0][0] == regions[1][0] and same_item(regions[0][1], regions[1][1])
    one, other = _as_relation(left), _as_relation(right)
    return one is not None and other is not None and _same_sides(one, other)


def _same_sides(one: Relation, other: Relation) -> bool:
    if one.signs == other.signs and all(map(same_item, one.sides, other.sides)):
        return True
    if len(one.signs) == 1 and one.signs == other.signs:
        return _same_two_sides(one, other)
    is_equation = {*one.signs} == {*other.signs} == {"="} and len(one.sides) == len(other.sides)
    return is_equation and all(map(same_item, one.sides, other.sides[::-1]))


def _as_relation(item: Named | Relation) -> Relation | None:
    if isinstance(item, Relation):
        return item
    if not isinstance(item.value, Scalar):
        return None
    name = read_structure(item.name)
    return Relation((name, item.value), ("=",)) if isinstance(name, Scalar) else None


def _same_two_sides(one: Relation, other: Relation) -> bool:
    """Whether left minus right agree up to a factor, a positive one for inequalities."""
    sides = (*one.sides, *other.sides)
    if not all(isinstance(side, Scalar) for side in sides):
        return False
    nodes = [side.node for side in sides if isinstance(side, Scalar)]
    differences = [Node("add", (nodes[place], Node("neg", (nodes[place + 1],)))) for place in (0, 2)]
    try:
        match one.signs[0]:
            case "=" | r"\ne" | r"\perp" | r"\parallel" if symbols(nodes[0]) | symbols(nodes[1]):
                return one.signs[0] in ("=", r"\ne") and ratio(*differences) != 0
            case "<" | r"\le":
                return ratio(*differences) > 0
    except TooLarge as error:
        raise Refused("evaluating it might not end") from error
    return False


def _relation_states(relation: Named | Relation, other: Item) -> bool:
    """Whether a relation gives a bare value: by its last side, or as the solution of an inequality."""
    region = solved(relation)
    if region is not None and not isinstance(other, Scalar):
        return same_item(region[1], other)
    if isinstance(relation, Named):
        return same_item(relation.value, other)
    *before, last = relation.sides
    if {*relation.signs} == {"="}:
        is_equation = (
            isinstance(last, Scalar) and not symbols(last.node) and not last.node.value and last.node.kind == "number"
        ) and any(isinstance(side, Scalar) and symbols(side.node) for side in before)
        if is_equation or _is_false(relation):
            return False  # x - 5 = 0 does not stand for 0, nor 1 = 2 for 2
        return same_item(last, other)
    if relation.signs[-1] == r"\approx" and {*relation.signs[:-1]} <= {"="}:
        return _states_about(relation, other)
    return False


def _is_false(relation: Relation) -> bool:
    """Whether a chain of equations sets different constants equal."""
    constants = [side for side in relation.sides if isinstance(side, Scalar) and not symbols(side.node)]
    return any(not same_item(constants[0], other) for other in constants[1:])


def _states_about(relation: Relation, other: Item) -> bool:
    r"""The exact side of `\pi \approx 3.14`, or the rounded one, if it is a rounding of the other."""
    *_, exact, rounded = relation.sides
    about = read_structure(rf"\approx {rounded.text}") if isinstance(rounded, Scalar) else None
    if not isinstance(about, Rounded) or not _is_rounded_to(exact, about):
        return False
    return same_item(exact, other) or same_item(rounded, other)
