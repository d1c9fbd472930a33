"""Read lengths of completions from a file: a list, a histogram, or the record of a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..planner import histogram_lengths

_FORMATS = (
    "It may be a JSON list of lengths, one length a line, a JSON histogram with `edges` and `counts`, or the "
    "`rollouts.jsonl` that training writes."
)


def read_lengths(path: Path, num_generations: int) -> NDArray[np.int64]:
    """Return the lengths in a file.

    Args:
        path: The file.
        num_generations: Rollouts per group.

    Returns:
        Lengths of shape `(N,)`, or `(N, num_generations)` where the file tells groups of that size.

    Raises:
        ValueError: If the file holds anything else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"`--lengths` ({path}) can't be read ({error}). {_FORMATS}") from error
    try:
        values = _parsed(text)
        if isinstance(values, dict):
            return histogram_lengths(values["edges"], values["counts"])
        if values and isinstance(values[0], dict):
            return _recorded_lengths(values, num_generations)
        lengths = np.array(values, dtype=np.float64)
        if lengths.ndim != 1 or not lengths.size or not (np.isfinite(lengths) & (lengths >= 1)).all():
            raise ValueError("lengths must be numbers of at least 1, and there must be one")
        return np.rint(lengths).astype(np.int64)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"`--lengths` ({path}) does not hold lengths ({error!s}). {_FORMATS}") from error


def _parsed(text: str) -> Any:
    """Return the histogram as a mapping, or all values as a list: one JSON value, or one a line."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    is_whole = isinstance(value, list) or (isinstance(value, dict) and "edges" in value)
    return value if is_whole else [value]


def _recorded_lengths(records: list[dict[str, Any]], num_generations: int) -> NDArray[np.int64]:
    groups = [[sum(n for _, n in rollout["segments"]) for rollout in record["rollouts"]] for record in records]
    if all(len(group) == num_generations for group in groups):
        return np.array(groups, dtype=np.int64)
    return np.array([length for group in groups for length in group], dtype=np.int64)
