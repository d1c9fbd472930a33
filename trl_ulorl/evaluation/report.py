"""What an evaluation comes to: figures as JSON values, a table, and the comparison of two."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..records import finite
from .metrics import (
    confidence_interval,
    length_statistics,
    majority_shares,
    mean_and_error,
    paired_test,
    pass_shares,
)
from .runner import EvaluationResult


def figures(result: EvaluationResult, *, k: int, ids: Sequence[str]) -> dict[str, Any]:
    """Return the figures of an evaluation as JSON values.

    Args:
        result: The tries.
        k: The k of avg@k, pass@k and maj@k.
        ids: A name for each problem.

    Returns:
        `avg_at_k`, `pass_at_k` and `maj_at_k`, each with its standard error and 95 % interval; pass@j for each power of
        two up to the number of tries; fractions of truncated, undecided and unanswered tries; lengths; each problem's
        tries. What is not defined is None.

    Raises:
        ValueError: If `k` is more than the tries of each problem.
    """
    num_tries = result.is_correct.shape[1]
    values: dict[str, Any] = {"k": k, "num_samples": num_tries, "num_problems": len(result.is_correct)}
    for name, per_problem in (
        ("avg_at_k", result.is_correct.mean(axis=1)),
        ("pass_at_k", pass_shares(result.is_correct, k)),
        ("maj_at_k", majority_shares(result.is_correct, result.answers, k)),
    ):
        prefix = "" if name == "avg_at_k" else f"{name}_"
        values[name], error = mean_and_error(per_problem)
        values[f"{prefix}standard_error"] = finite(error)
        values[f"{prefix}confidence_interval"] = finite(confidence_interval(per_problem))
    powers = [2**exponent for exponent in range(num_tries.bit_length())]
    values["pass_at"] = {
        str(each): float(pass_shares(result.is_correct, each).mean()) for each in sorted({*powers, k, num_tries})
    }
    has_answer = np.array([[bool(answer) for answer in row] for row in result.answers])
    return {
        **values,
        "truncated_fraction": result.truncated_fraction,
        "undecided_fraction": float(result.is_undecided.mean()),
        "unanswered_fraction": float((~has_answer & ~result.is_truncated).mean()),
        "lengths": length_statistics(result.lengths, result.is_correct),
        "seconds": result.seconds,
        "problems": [
            {"id": name, "is_correct": right, "lengths": lengths}
            for name, right, lengths in zip(
                ids, result.is_correct.astype(int).tolist(), result.lengths.tolist(), strict=True
            )
        ],
    }


class OtherRun:
    """An earlier result to compare with.

    Args:
        path: A file that `trl-ulorl eval` wrote.

    Raises:
        ValueError: If it holds no result.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            self._tries = {
                str(each["id"]): [int(right) for right in each["is_correct"]] for each in content["problems"]
            }
            self.accuracy = float(content["avg_at_k"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"`--compare` ({path}) is no result of `trl-ulorl eval` ({type(error).__name__}: {error}). Pass the file that "
                "an earlier one wrote with `--output`."
            ) from error

    def check(self, ids: Sequence[str]) -> None:
        """Refuse problems that are not those of the earlier result.

        Raises:
            ValueError: If a problem is on one side only.
        """
        common = len(set(ids) & self._tries.keys())
        if not common == len(ids) == len(self._tries):
            raise ValueError(
                f"`--compare` ({self._path}) has {len(self._tries)} problems and this evaluation {len(ids)}, {common} of them "
                "in common, but a paired test needs the same ones. Evaluate both on one data set."
            )

    def compared(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return how figures differ from the earlier ones: see `PairedTest`.

        Args:
            values: What `figures` gave.
        """
        mine = [each["is_correct"] for each in values["problems"]]
        test = paired_test([self._tries[each["id"]] for each in values["problems"]], mine)
        return {
            "with": str(self._path),
            "avg_at_k": self.accuracy,
            **asdict(test),
            "standard_error": finite(test.standard_error),
            "confidence_interval": finite(test.confidence_interval),
        }


def table(values: dict[str, Any]) -> str:
    """Write figures out for a reader."""
    k, num_tries = values["k"], values["num_samples"]
    lines = [f"{values['num_problems']} problems, {num_tries} answers each", ""]
    lines.append(f"{'':12}{'value':>8}  {'standard error':>14}  95 % interval")
    for name, prefix in (("avg", ""), ("pass", "pass_at_k_"), ("maj", "maj_at_k_")):
        low, high = values[f"{prefix}confidence_interval"]
        interval = "-" if low is None else f"{100 * low:.1f} to {100 * high:.1f} %"
        error = values[f"{prefix}standard_error"]
        lines.append(
            f"  {f'{name}@{k}':10}{_percent(values[f'{name}_at_k']):>8}  "
            f"{'-' if error is None else f'{100 * error:.1f}':>14}  {interval}"
        )
    lines.append("")
    lines.append("pass@k: " + ", ".join(f"{each} {_percent(share)}" for each, share in values["pass_at"].items()))
    lines.append(
        f"Truncated {_percent(values['truncated_fraction'])}, without an answer "
        f"{_percent(values['unanswered_fraction'])}, not decided {_percent(values['undecided_fraction'])}"
    )
    lengths = {name: "-" if tokens is None else f"{tokens:.0f}" for name, tokens in values["lengths"].items()}
    lines.append(
        f"Tokens: mean {lengths['mean']}, median {lengths['p50']}, p90 {lengths['p90']}, p99 {lengths['p99']}, most "
        f"{lengths['max']}; right answers {lengths['mean_right']}, wrong ones {lengths['mean_wrong']}"
    )
    if "comparison" in values:
        lines += ["", _comparison(values["comparison"], k)]
    return "\n".join(lines) + "\n"


def _comparison(test: dict[str, Any], k: int) -> str:
    low, high = test["confidence_interval"]
    interval = "" if low is None else f", 95 % interval {100 * low:+.1f} to {100 * high:+.1f}"
    return (
        f"Against {test['with']} ({_percent(test['avg_at_k'])}): avg@{k} differs by {100 * test['difference']:+.1f} "
        f"points{interval}, p = {test['p_value']:.2g}\n"
        f"  (permutation test over {test['num_problems']} problems, {test['num_better']} better and "
        f"{test['num_worse']} worse)"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
