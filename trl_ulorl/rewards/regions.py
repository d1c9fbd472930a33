r"""What inequalities in one variable say together: a union by "or", else what they have in common.

`x \ge 1 \text{ and } x < 4` gives `x` in $[1, 4)$.
"""

from .errors import Refused
from .formula import Node, symbols
from .items import Interval, Item, Named, Relation, Scalar, Sequence, is_below, solved
from .values import TooLarge, Undefined, exact_value, rough_value

_MAX_INTERVALS = 40
_ZERO_LOG2 = -100.0  # bounds this near each other, in binary digits, are the same


def joined_region(items: list[Item], joint: str) -> Item | None:
    """Return the values that inequalities allow together, `None` if they aren't solved for the same variable.

    Args:
        items: The inequalities.
        joint: What stands between them: `or`, `and`, or nothing but commas, which mean "and" unless nothing satisfies
            them all, as with `x < -1, x > 1`.
    """
    if not all(isinstance(item, Relation) for item in items):
        return None
    parts = [solved(item) for item in items]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len({name for name, _ in known}) > 1:
        return None
    name, regions = known[0][0], tuple(region for _, region in known)
    union = Named(name, Sequence(regions, "union"))
    if joint == "or":
        return union
    common = _common(regions)
    if common is None:
        between = _between(regions)
        return between and Named(name, between)
    if len(common) == 1:
        return Named(name, common[0])
    if common:
        return Named(name, Sequence(common, "union"))
    return Named(name, Sequence(regions, "common")) if joint == "and" else union


def _common(regions: tuple[Item, ...]) -> tuple[Interval, ...] | None:
    """Intervals that all regions share; `None` if they can't be told."""
    common: tuple[Interval, ...] = (Interval(None, None, (True, True)),)
    for region in regions:
        intervals = region.items if isinstance(region, Sequence) else (region,)
        if not all(isinstance(interval, Interval) for interval in intervals):
            return None
        shared = [_overlap(one, other) for one in common for other in intervals if isinstance(other, Interval)]
        if len(shared) > _MAX_INTERVALS or any(overlap is None for overlap in shared):
            return None
        common = tuple(overlap for overlap in shared if isinstance(overlap, Interval))
    return common


def _overlap(one: Interval, other: Interval) -> Interval | bool | None:
    """What two intervals share: False for nothing, `None` if it can't be told."""
    low = _inner(one.low, other.low, (one.is_open[0], other.is_open[0]), is_low=True)
    high = _inner(one.high, other.high, (one.is_open[1], other.is_open[1]), is_low=False)
    if low is None or high is None:
        return None
    shared = Interval(low[0], high[0], (low[1], high[1]))
    if shared.low is None or shared.high is None:
        return shared
    order = _order(shared.low, shared.high)
    if order is None:
        return None
    return shared if order < 0 or (order == 0 and not any(shared.is_open)) else False


def _inner(
    one: Item | None, other: Item | None, is_open: tuple[bool, bool], *, is_low: bool
) -> tuple[Item | None, bool] | None:
    """The bound of two that excludes more, and whether it is open."""
    if one is None or other is None:
        return (other, is_open[1]) if one is None else (one, is_open[0])
    order = _order(one, other)
    if order is None:
        return None
    if order == 0:
        return one, any(is_open)
    return (one, is_open[0]) if (order > 0) == is_low else (other, is_open[1])


def _order(one: Item, other: Item) -> int | None:
    """-1, 0 or 1 as the first bound is below, equal to or above the second; `None` if it can't be told."""
    if not isinstance(one, Scalar) or not isinstance(other, Scalar):
        return None
    left, right = exact_value(one.node, {}), exact_value(other.node, {})
    if left is not None and right is not None:
        return (left > right) - (left < right)
    if one.node == other.node:
        return 0
    if symbols(one.node) or symbols(other.node):
        return None
    try:
        is_above, log2 = rough_value(Node("add", (one.node, Node("neg", (other.node,)))))
    except (Undefined, TooLarge, Refused):
        return None
    if log2 < _ZERO_LOG2:
        return 0
    return 1 if is_above else -1


def _between(regions: tuple[Item, ...]) -> Interval | None:
    """The interval between two bounds that hold symbols, of which the lower is presumed to be lower."""
    below = [part for part in regions if isinstance(part, Interval) and part.low is not None and part.high is None]
    above = [part for part in regions if isinstance(part, Interval) and part.high is not None and part.low is None]
    if len(regions) != 2 or len(below) != 1 or len(above) != 1 or not is_below(below[0].low, above[0].high):
        return None
    return Interval(below[0].low, above[0].high, (below[0].is_open[0], above[0].is_open[1]))
