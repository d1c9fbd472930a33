r"""What formulas are combined to: lists, sets, tuples, intervals, equations, inequalities, matrices; and what solves what.

`structure` reads them, `compare` compares them.
"""

from dataclasses import dataclass

from .errors import Refused
from .formula import Node, symbols
from .numbers import Number
from .values import TooLarge, Undefined, exact_value, rough_value


@dataclass(frozen=True)
class Scalar:
    """A formula without outer structure."""

    node: Node
    text: str


@dataclass(frozen=True)
class Rounded:
    r"""A number that is said to be rounded: `\approx 3.14`."""

    number: Number


@dataclass(frozen=True)
class Interval:
    """An interval, or what may as well be a pair: `(1, 2)`. `None` for an infinite end."""

    low: "Item | None"
    high: "Item | None"
    is_open: tuple[bool, bool]


@dataclass(frozen=True)
class Sequence:
    """Several items.

    Attributes:
        items: In the order written.
        kind: `list` without brackets, `tuple`, `set`, `union` of sets, or `common` for sets that share nothing.
        is_ordered: Whether the order of a list counts.
        joints: Which of "and" and "or" join statements: "x = 1 or y = 2" is not "x = 1 and y = 2".
    """

    items: tuple["Item", ...]
    kind: str
    is_ordered: bool = False
    joints: tuple[str, ...] = ()


@dataclass(frozen=True)
class Matrix:
    """A matrix, its rows of equal length."""

    rows: tuple[tuple["Item", ...], ...]


@dataclass(frozen=True)
class Named:
    r"""A value and what it is the value of: `x = 5`, `f(x) = 2x`, `D = (0, 1)`, `x \in [2, 5)`."""

    name: str
    value: "Item"


@dataclass(frozen=True)
class Relation:
    r"""A chain of sides and the signs between them; `<` and `\le` stand for both directions, sides swapped."""

    sides: tuple["Item", ...]
    signs: tuple[str, ...]


@dataclass(frozen=True)
class Congruence:
    r"""What leaves a residue: `x \equiv 3 \pmod 7`."""

    left: "Item"
    residue: "Item"
    modulus: "Item"


@dataclass(frozen=True)
class Text:
    """A text that is no mathematics that we can read."""

    text: str
    needs_algebra: bool = False


Item = Scalar | Rounded | Interval | Sequence | Matrix | Named | Relation | Congruence | Text


# -------------------------------------------------------------------------------------------------------- determinants

_MAX_DETERMINANT = 4  # the expansion has as many terms as there are permutations


def determinant(rows: tuple[tuple[Item, ...], ...]) -> Node | None:
    """Return the determinant of a square of formulas, `None` for anything else and for more than four rows."""
    cells = tuple(tuple(cell.node for cell in row if isinstance(cell, Scalar)) for row in rows)
    if len(rows) > _MAX_DETERMINANT or any(len(row) != len(rows) for row in cells):
        return None
    return _expanded(cells)


def _expanded(cells: tuple[tuple[Node, ...], ...]) -> Node:
    """Laplace's expansion along the first row."""
    if len(cells) == 1:
        return cells[0][0]
    terms = []
    for column, cell in enumerate(cells[0]):
        term = Node("mul", (cell, _expanded(tuple(row[:column] + row[column + 1 :] for row in cells[1:]))))
        terms.append(Node("neg", (term,)) if column % 2 else term)
    return Node("add", tuple(terms))


# ------------------------------------------------------------------------------------------------- solved inequalities


def solved(item: Item) -> tuple[str, Item] | None:
    r"""Return the variable of a solved inequality and its solution: `x < 3` gives `x` and $(-\infty, 3)$.

    Returns:
        `None` if it isn't solved for one variable.
    """
    if isinstance(item, Named):
        is_set = isinstance(item.value, Interval) or (isinstance(item.value, Sequence) and item.value.kind != "list")
        return (item.name, item.value) if is_set else None
    if not isinstance(item, Relation):
        return None
    names = [_variable(side) for side in item.sides]
    others = [side for side, name in zip(item.sides, names, strict=True) if name is None or len(item.sides) == 3]
    match item.signs, item.sides:
        case (("<" | r"\le") as sign,), (left, right):
            if names[0] and _is_free_of(names[0], right):
                return names[0], Interval(None, right, (True, sign == "<"))
            if names[1] and _is_free_of(names[1], left):
                return names[1], Interval(left, None, (sign == "<", True))
        case ((("<" | r"\le") as lower), (("<" | r"\le") as upper)), (left, _, right):
            if names[1] and _is_free_of(names[1], left) and _is_free_of(names[1], right):
                return names[1], Interval(left, right, (lower == "<", upper == "<"))
        case ((r"\ne",), (_, right)):
            if names[0] and _is_free_of(names[0], right) and len(others) == 1:
                parts = (Interval(None, right, (True, True)), Interval(right, None, (True, True)))
                return names[0], Sequence(parts, "union")
    return None


def _variable(item: Item) -> str | None:
    return item.node.name if isinstance(item, Scalar) and item.node.kind == "symbol" else None


def _is_free_of(name: str, item: Item) -> bool:
    return isinstance(item, Scalar) and name not in symbols(item.node)


def is_below(low: Item | None, high: Item | None) -> bool:
    """Whether one bound is below another, by value; for formulas that can't be told, it is presumed."""
    if not isinstance(low, Scalar) or not isinstance(high, Scalar):
        return False
    left, right = exact_value(low.node, {}), exact_value(high.node, {})
    if left is not None and right is not None:
        return left < right
    try:
        return rough_value(Node("add", (high.node, Node("neg", (low.node,)))))[0]
    except (Undefined, TooLarge, Refused):
        return True
