"""The report's numbers: series, histograms and tables from a run's records. numpy only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .run import OUTCOMES, Floats, History, Ints, Rollouts

MAX_POINTS = 600  # of a curve; a longer one is shown by means
PHASES = ("decode", "score", "exchange", "update")
NUM_LENGTH_BINS = 32
WINDOW_ROLLOUTS = 96  # rows of a timeline


# --------------------------------------------------------------------------------------------------------------- series


@dataclass(frozen=True, slots=True)
class Series:
    """A logged figure over the steps.

    Args:
        steps: Optimizer steps, shape `(N,)`.
        values: Its values, shape `(N,)`.
        per_point: Logged values that each point is the mean of.
    """

    steps: Floats
    values: Floats
    per_point: int = 1

    def __len__(self) -> int:
        return len(self.steps)

    def thinned(self, max_points: int = MAX_POINTS) -> Series:
        """Return a series of at most so many points, each the mean of equally many successive ones."""
        per_point = -(-len(self) // max_points)
        if per_point <= 1:
            return self
        starts = np.arange(0, len(self), per_point)
        counts = np.diff([*starts, len(self)])
        steps, values = (np.add.reduceat(each, starts) / counts for each in (self.steps, self.values))
        return Series(steps, values, per_point)

    def running_mean(self) -> Series | None:
        """Return the mean over a tenth of the points up to each; None for fewer than ten."""
        if len(self) < 10:
            return None
        width = max(3, len(self) // 10)
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        ends = np.arange(1, len(self) + 1)
        starts = np.maximum(0, ends - width)
        return Series(self.steps, (sums[ends] - sums[starts]) / (ends - starts), width)

    def last_third(self) -> float | None:
        """Return the mean over the last third of the points."""
        return float(self.values[-max(1, len(self) // 3) :].mean()) if len(self) else None


def series(history: History, name: str) -> Series:
    """Return what was logged under a name; entries without a finite number are left out."""
    points = [(entry["step"], entry[name]) for entry in history if _is_number(entry.get(name))]
    columns = np.array(points, dtype=float).reshape(-1, 2)
    return Series(columns[:, 0], columns[:, 1])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and bool(np.isfinite(value))


def missing_values(history: History, name: str) -> int:
    """Count the entries in which a figure was not finite."""
    return sum(name in entry and not _is_number(entry[name]) for entry in history)


# ---------------------------------------------------------------------------------------------------------------- times


def phase_series(history: History, batches_per_step: float) -> tuple[Floats, dict[str, Floats]]:
    """Return the seconds of each logged step by phase: decoding, waiting for rewards and ranks, and the rest.

    A logged value is the mean over the steps since the last log, and for the rollout over their batches.

    Args:
        history: The trainer's log.
        batches_per_step: Generation batches per optimizer step.

    Returns:
        Steps of the entries, and by phase the mean seconds of a step, each of shape `(N,)`.
    """
    entries = [entry for entry in history if _is_number(entry.get("step_time"))]
    parts = {
        name: np.array([entry.get(f"rollout/{name}_seconds") or 0.0 for entry in entries], dtype=float)
        * batches_per_step
        for name in PHASES[:-1]
    }
    total = np.array([entry["step_time"] for entry in entries], dtype=float)
    parts["update"] = total - sum(parts.values(), np.zeros(len(entries)))
    return np.array([entry["step"] for entry in entries], dtype=float), parts


def phase_seconds(history: History, batches_per_step: float) -> dict[str, float]:
    """Return the seconds of all steps by phase."""
    steps, parts = phase_series(history, batches_per_step)
    num_steps = np.diff(steps, prepend=0.0)
    return {name: float((seconds * num_steps).sum()) for name, seconds in parts.items()}


# ------------------------------------------------------------------------------------------------------ length fairness


@dataclass(frozen=True, slots=True)
class LengthBins:
    """Rollouts by length.

    Args:
        edges: A bin holds the lengths from its edge to below the next, shape `(N + 1,)`.
        finished: Rollouts of groups that have left the pools, shape `(N,)`.
        trained: Those of them that were trained on, shape `(N,)`.
    """

    edges: Ints
    finished: Ints
    trained: Ints


def length_bins(rollouts: Rollouts) -> LengthBins:
    """Count finished and trained rollouts in bins that widen with the length."""
    low, high = int(rollouts.length.min()), int(rollouts.length.max())
    edges = np.unique(np.rint(np.geomspace(low, high + 1, NUM_LENGTH_BINS + 1)).astype(np.int64))
    finished, _ = np.histogram(rollouts.length, edges)
    trained, _ = np.histogram(rollouts.length[rollouts.is_trained()], edges)
    return LengthBins(edges, finished, trained)


def token_ages(rollouts: Rollouts) -> tuple[Ints, Ints]:
    """Count tokens by age, in versions from sampling to leaving the pools.

    Returns:
        Tokens of age 0, 1, … of all finished rollouts and of the trained ones, each of shape `(A,)`.
    """
    ages = rollouts.left[rollouts.segment_rollout] - rollouts.segment_version
    is_trained = rollouts.is_trained()[rollouts.segment_rollout]
    finished = np.bincount(ages, weights=rollouts.segment_length)
    trained = np.bincount(ages[is_trained], weights=rollouts.segment_length[is_trained], minlength=len(finished))
    return finished.astype(np.int64), trained.astype(np.int64)


def length_table(rollouts: Rollouts) -> list[dict[str, Any]]:
    """Return, by outcome and for all, the rollouts, their tokens, mean, p50, p99 and longest length, and truncated share."""
    rows = []
    for name, is_in in [("all finished", np.ones(len(rollouts.length), dtype=bool))] + [
        (outcome.replace("_", " "), rollouts.outcome == index) for index, outcome in enumerate(OUTCOMES)
    ]:
        lengths = rollouts.length[is_in]
        if lengths.size:
            p50, p99 = np.percentile(lengths, [50, 99])
            rows.append(
                {
                    "name": name,
                    "rollouts": int(lengths.size),
                    "tokens": int(lengths.sum()),
                    "mean": float(lengths.mean()),
                    "p50": float(p50),
                    "p99": float(p99),
                    "max": int(lengths.max()),
                    "truncated": float(rollouts.is_truncated[is_in].mean()),
                }
            )
    return rows


# ------------------------------------------------------------------------------------------------------------- timeline


def timeline_windows(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Choose trained groups, in order of admission, from the start, the middle and the end of a run.

    Returns:
        Up to three windows of `WINDOW_ROLLOUTS` rollouts, by name; one with all of them where they fit.
    """
    trained = sorted((r for r in records if r["outcome"] == OUTCOMES[0]), key=lambda record: record["group"])
    if not trained:
        return {}
    count = max(1, WINDOW_ROLLOUTS // len(trained[0]["rollouts"]))
    if len(trained) <= count:
        return {"all": trained}
    if len(trained) < 3 * count:
        return {"start": trained[:count], "end": trained[-count:]}
    middle = (len(trained) - count) // 2
    return {"start": trained[:count], "middle": trained[middle : middle + count], "end": trained[-count:]}


# ------------------------------------------------------------------------------------------------------------- verifier


def stage_table(rollouts: Rollouts) -> list[dict[str, Any]]:
    """Return, by stage of the verifier, how many rollouts it decided as right, as wrong, and left undecided.

    Truncated rollouts, which are wrong without a call, and those without a recorded stage have rows of their own.
    """
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for stage, is_truncated, correctness in zip(
        rollouts.stages, rollouts.is_truncated, rollouts.correctness, strict=True
    ):
        name = stage or ("truncated, not called" if is_truncated else "not recorded")
        counts[name][2 if np.isnan(correctness) else int(correctness < 0.5)] += 1
    rows = [
        {"stage": name, "right": right, "wrong": wrong, "undecided": undecided, "total": right + wrong + undecided}
        for name, (right, wrong, undecided) in counts.items()
    ]
    return sorted(rows, key=lambda row: (-row["total"], row["stage"]))


# ----------------------------------------------------------------------------------------------------------- importance


def by_age(history: History, name: str) -> dict[str, float]:
    """Return the mean over the last third of the steps of `importance/<name>_age_<a>`, by age."""
    prefix = f"importance/{name}_age_"
    names = {key for entry in history for key in entry if key.startswith(prefix)}
    ages = sorted((key.removeprefix(prefix) for key in names), key=lambda age: int(age.rstrip("+")))
    means = {age: series(history, prefix + age).last_third() for age in ages}
    return {age: mean for age, mean in means.items() if mean is not None}
