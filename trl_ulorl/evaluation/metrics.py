"""Figures over problems that were each tried several times. numpy only.

Problems are what is counted: tries of one problem are not independent, so every figure is first taken per problem, shape
`(n,)`, and standard errors, intervals and tests are over the `n` problems. Throughout `n` is the number of problems, `m`
the number of tries of each, and `k` the number of tries that a figure is about, at most `m`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

_RESAMPLES = 10_000
_CHUNK_NUMBERS = 4_000_000  # of resampled problem indices held at a time


def avg_at_k(is_correct: ArrayLike) -> tuple[float, float]:
    r"""Return the mean accuracy over problems and tries, and its standard error over problems.

    With $p_i$ the share of problem $i$'s tries that are right, it is the mean of the $p_i$ and
    $s / \sqrt{n}$ with the sample standard deviation $s$ of the $p_i$. More tries than k estimate the same figure with a
    smaller error. The paper reports avg@32 (section 4.1).

    Args:
        is_correct: 1 where a try is right, 0 where it is wrong, shape `(n, m)`.

    Returns:
        The mean and its standard error, both in `[0, 1]`; the error is NaN for a single problem.

    Raises:
        ValueError: If the shape is not `(n, m)` with at least one problem and one try.

    Example:
        >>> avg_at_k([[1, 1], [0, 0]])
        (0.5, 0.5)
    """
    return mean_and_error(_tries(is_correct).mean(axis=1))


def pass_at_k(is_correct: ArrayLike, k: int) -> tuple[float, float]:
    """Return the probability that one of `k` tries is right, unbiased, and its standard error over problems.

    Args:
        is_correct: 1 where a try is right, 0 where it is wrong, shape `(n, m)`.
        k: Tries that count, at most `m`.

    Raises:
        ValueError: If `k` is not in `[1, m]`, or `is_correct` has another form.

    Example:
        >>> pass_at_k([[1, 0], [0, 0]], k=1)
        (0.25, 0.25)
    """
    return mean_and_error(pass_shares(is_correct, k))


def maj_at_k(is_correct: ArrayLike, answers: Sequence[Sequence[str]], k: int) -> tuple[float, float]:
    """Return the accuracy of the most frequent of `k` answers, and its standard error over problems.

    Args:
        is_correct: 1 where a try is right, 0 where it is wrong, shape `(n, m)`.
        answers: The tries' answers in normal form, shape `(n, m)`; an empty one does not vote.
        k: Tries that vote, at most `m`.

    Raises:
        ValueError: If `k` is not in `[1, m]`, or the shapes differ.

    Example:
        >>> maj_at_k([[1, 1, 0], [1, 0, 0]], [["4", "4", "5"], ["7", "8", "8"]], k=3)
        (0.5, 0.5)
    """
    return mean_and_error(majority_shares(is_correct, answers, k))


def pass_shares(is_correct: ArrayLike, k: int) -> NDArray[np.float64]:
    r"""Return per problem the probability that `k` of its tries, drawn without replacement, hold a right one.

    $1 - \binom{m-c}{k} / \binom{m}{k}$ for $c$ right tries of $m$, which is unbiased for the probability that one of $k$
    fresh tries is right (Chen et al., [2107.03374](https://huggingface.co/papers/2107.03374), section 2.1). Computed
    as $1 - \prod_{i=m-c+1}^{m} (1 - k / i)$: the binomials overflow.

    Returns:
        Shape `(n,)`.
    """
    tries = _tries(is_correct, k, is_binary=True)
    num_tries = tries.shape[1]
    by_count = np.ones(num_tries + 1)  # probability of no hit, by number of right tries
    for count in range(1, num_tries + 1):
        by_count[count] = by_count[count - 1] * max(0.0, 1 - k / (num_tries - count + 1))
    passes: NDArray[np.float64] = 1 - by_count[tries.sum(axis=1).astype(np.int64)]
    return passes


def majority_shares(is_correct: ArrayLike, answers: Sequence[Sequence[str]], k: int) -> NDArray[np.float64]:
    """Return per problem how far its most frequent answer is right, the mean over its whole blocks of `k` tries.

    Of several answers with equally many votes one would be drawn at random: they count for the share of them that is
    right, which is the mean of that draw. Where no try has an answer, nothing is right.

    Returns:
        Shape `(n,)`.
    """
    tries = _tries(is_correct, k, is_binary=True)
    if [len(row) for row in answers] != [tries.shape[1]] * len(tries):
        raise ValueError(
            f"`answers` must hold one answer for each try, {len(tries)} rows of {tries.shape[1]}. Pass an empty text where a "
            "try gives no answer."
        )
    starts = range(0, tries.shape[1] - k + 1, k)
    return np.array(
        [
            np.mean([_majority(row[start : start + k], texts[start : start + k]) for start in starts])
            for row, texts in zip(tries, answers, strict=True)
        ]
    )


def _majority(is_correct: NDArray[np.float64], answers: Sequence[str]) -> float:
    votes: dict[str, list[float]] = {}
    for right, answer in zip(is_correct.tolist(), answers, strict=True):
        if answer:
            votes.setdefault(answer, []).append(right)
    most = max((len(each) for each in votes.values()), default=0)
    # One spelling may have been judged differently, as where the judge has no verdict: its mean then.
    return float(np.mean([np.mean(each) for each in votes.values() if len(each) == most])) if votes else 0.0


def mean_and_error(values: NDArray[np.float64]) -> tuple[float, float]:
    r"""Return the mean of values per problem, shape `(n,)`, and its standard error $s / \sqrt{n}$ (NaN for one)."""
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), float(error)


def confidence_interval(
    values: ArrayLike, *, confidence: float = 0.95, low: float = 0.0, high: float = 1.0
) -> tuple[float, float]:
    r"""Return an interval for the mean over problems like these.

    From a bootstrap over problems (percentiles of 10,000 means, always the same draws): it makes no assumption on the
    distribution and stays within the bounds, where mean $\pm$ 1.96 errors would leave them near 0 % or 100 %. Where every
    problem has the lowest value, or every one the highest, resampling shows no spread and the bound is exact instead: at
    a mean of $\mu$ all $n$ values are 0 with a probability of at most $(1 - \mu)^n$, which is half of what the interval
    may miss from $\mu = 1 - ((1 - \text{confidence}) / 2)^{1/n}$ on.

    Args:
        values: One per problem, in `[low, high]`, shape `(n,)`.
        confidence: Probability to cover the mean.
        low: Least possible value.
        high: Largest possible value.

    Returns:
        The ends; NaN for a single problem between the bounds.

    Example:
        >>> low, high = confidence_interval([0.0] * 30)
        >>> (low, round(high, 3))
        (0.0, 0.116)
    """
    sample = np.asarray(values, dtype=np.float64)
    tail = (1 - confidence) / 2
    reach = (high - low) * (1 - tail ** (1 / len(sample)))
    if (sample == low).all():
        return low, low + reach
    if (sample == high).all():
        return high - reach, high
    if len(sample) == 1:
        return math.nan, math.nan
    random = np.random.default_rng(0)
    rows = max(1, _CHUNK_NUMBERS // len(sample))
    means = [
        sample[random.integers(0, len(sample), (min(rows, _RESAMPLES - start), len(sample)))].mean(axis=1)
        for start in range(0, _RESAMPLES, rows)
    ]
    ends = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(ends[0]), float(ends[1])


@dataclass(frozen=True)
class PairedTest:
    """How two runs on the same problems differ.

    Args:
        difference: Second minus first accuracy.
        standard_error: Of the difference, over problems.
        confidence_interval: Of the difference, 95 %.
        p_value: Probability of a difference at least as large in size if the two were alike.
        num_problems: Problems compared.
        num_better: Problems of which the second run gets a larger share right.
        num_worse: Problems of which it gets a smaller one right.
    """

    difference: float
    standard_error: float
    confidence_interval: tuple[float, float]
    p_value: float
    num_problems: int
    num_better: int
    num_worse: int


def paired_test(first: ArrayLike, second: ArrayLike) -> PairedTest:
    r"""Test whether two runs on the same problems have different accuracies.

    A permutation test on the mean difference: were the two models alike, each problem's difference $d_i$ would be as
    likely with the other sign, so the observed sum is compared with $\sum \pm d_i$ over all $2^n$ signs. Exact, not
    sampled: shares are multiples of one number, so the distribution of the sum is a convolution. It takes the problems
    as the units, needs no normal distribution, and unlike Wilcoxon's signed ranks it tests the mean itself and has no
    trouble with ties, which shares of a few tries are full of.

    Args:
        first: 1 where a try is right, 0 where it is wrong, shape `(n, m)`.
        second: The same for the other run, shape `(n, l)`, in the same order of problems.

    Raises:
        ValueError: If the two have different numbers of problems, or hold anything but 0 and 1.

    Example:
        >>> paired_test([[0, 0], [0, 0]], [[1, 1], [1, 0]]).p_value
        0.5
    """
    tries = [_tries(each, is_binary=True) for each in (first, second)]
    if len(tries[0]) != len(tries[1]):
        raise ValueError(
            f"The runs have {len(tries[0])} and {len(tries[1])} problems, but a paired test needs the same ones in the same "
            "order. Evaluate both on one data set."
        )
    unit = math.lcm(tries[0].shape[1], tries[1].shape[1])
    counts = [each.sum(axis=1).astype(np.int64) * (unit // each.shape[1]) for each in tries]
    steps = counts[1] - counts[0]  # differences of the shares, in units of 1 / unit
    differences = steps / unit
    mean, error = mean_and_error(differences)
    return PairedTest(
        difference=mean,
        standard_error=error,
        confidence_interval=confidence_interval(differences, low=-1.0, high=1.0),
        p_value=_sign_flip_p_value(steps),
        num_problems=len(steps),
        num_better=int((steps > 0).sum()),
        num_worse=int((steps < 0).sum()),
    )


def _sign_flip_p_value(steps: NDArray[np.int64]) -> float:
    """Return the share of the sign patterns whose sum is at least as far from 0 as that of `steps`."""
    sizes = np.abs(steps[steps != 0])
    total = int(sizes.sum())
    probabilities = np.zeros(total + 1)  # of each sum of the sizes with a positive sign
    probabilities[0] = 1.0
    reached = 0
    for size in sizes.tolist():
        shifted = probabilities[: reached + 1].copy()
        reached += size
        probabilities[: reached + 1] /= 2
        probabilities[size : reached + 1] += shifted / 2
    is_as_far = np.abs(2 * np.arange(total + 1) - total) >= abs(int(steps.sum()))
    return min(1.0, float(probabilities[is_as_far].sum()))


def length_statistics(lengths: ArrayLike, is_correct: ArrayLike) -> dict[str, float | None]:
    """Return mean, percentiles and maximum of the lengths of all tries, and the means of the right and the wrong ones.

    Args:
        lengths: Completion tokens of each try, shape `(n, m)`.
        is_correct: 1 where a try is right, shape `(n, m)`.

    Returns:
        `mean`, `p50`, `p90`, `p99`, `max`, and `mean_right` and `mean_wrong`, None where there is no such try.
    """
    tokens, right = np.asarray(lengths), np.asarray(is_correct) == 1
    if tokens.shape != right.shape:
        raise ValueError(f"`lengths` {tokens.shape} and `is_correct` {right.shape} must have one value for each try.")
    return {
        "mean": float(tokens.mean()),
        **{f"p{percent}": float(np.percentile(tokens, percent)) for percent in (50, 90, 99)},
        "max": float(tokens.max()),
        "mean_right": float(tokens[right].mean()) if right.any() else None,
        "mean_wrong": float(tokens[~right].mean()) if not right.all() else None,
    }


def _tries(is_correct: ArrayLike, k: int = 1, *, is_binary: bool = False) -> NDArray[np.float64]:
    tries = np.asarray(is_correct, dtype=np.float64)
    if tries.ndim != 2 or tries.size == 0:
        raise ValueError(
            f"`is_correct` has shape {tries.shape}, but must be (n, k) with one row per problem and one column per try, "
            "neither empty. Group the tries by problem."
        )
    if not 1 <= k <= tries.shape[1]:
        raise ValueError(
            f"`k` ({k}) must lie between 1 and the number of tries of each problem ({tries.shape[1]}): a figure about k "
            "tries needs k of them. Sample more tries, or lower `k`."
        )
    if is_binary and not np.isin(tries, (0, 1)).all():
        raise ValueError(
            "`is_correct` holds values other than 0 and 1: whether one of several tries is right, or the most frequent "
            "answer, needs a verdict on each. Score with a reward that measures correctness alone."
        )
    return tries
