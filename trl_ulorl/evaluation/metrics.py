"""Figures over problems that were each tried `k` times. numpy only."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike


def avg_at_k(is_correct: ArrayLike) -> tuple[float, float]:
    r"""Return the mean accuracy over problems and tries, and its standard error over problems.

    With $p_i$ the share of problem $i$'s tries that are right, it is the mean of the $p_i$ and
    $s / \sqrt{n}$ with the sample standard deviation $s$ of the $p_i$: tries of one problem are not independent, so
    the problems are what is counted. The paper reports avg@32 (section 4.1).

    Args:
        is_correct: 1 where a try is right, 0 where it is wrong, shape `(n, k)`.

    Returns:
        The mean and its standard error, both in `[0, 1]`; the error is NaN for a single problem.

    Raises:
        ValueError: If the shape is not `(n, k)` with at least one problem and one try.

    Example:
        >>> avg_at_k([[1, 1], [0, 0]])
        (0.5, 0.5)
    """
    tries = np.asarray(is_correct, dtype=np.float64)
    if tries.ndim != 2 or tries.size == 0:
        raise ValueError(
            f"`is_correct` has shape {tries.shape}, but must be (n, k) with one row per problem and one column per try, "
            "neither empty. Group the tries by problem."
        )
    shares = tries.mean(axis=1)
    error = shares.std(ddof=1) / math.sqrt(len(shares)) if len(shares) > 1 else math.nan
    return float(shares.mean()), float(error)
