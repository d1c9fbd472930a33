"""What a run's folder holds, read for the report: every part is optional, and what is not there is None."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoints import COMMIT_MARK, is_committed
from ..records import METRICS, ROLLOUTS, RUN, read_lines
from ..samples import SAMPLES

DISAGREEMENTS = "disagreements.jsonl"
OUTCOMES = ("trained", "filtered", "set_aside")

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
History = Sequence[dict[str, Any]]


class NoRunError(ValueError):
    """A folder is not that of a run, or a file in it can't be read; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The rollouts of all groups that have left the pools, as columns.

    Args:
        group: Group of each, shape `(N,)`.
        outcome: Index into `OUTCOMES`, shape `(N,)`.
        left: Policy version at which its group left, shape `(N,)`.
        length: Completion tokens, shape `(N,)`.
        is_truncated: Whether it reached its limit, shape `(N,)`.
        correctness: The correctness function's reward, NaN where undecided, shape `(N,)`.
        stages: Stage of the verifier, None where none was recorded, `N` of them.
        segment_rollout: Rollout of each segment, shape `(S,)`.
        segment_version: Policy version of each segment, shape `(S,)`.
        segment_length: Tokens of each segment, shape `(S,)`.
    """

    group: Ints
    outcome: Ints
    left: Ints
    length: Ints
    is_truncated: NDArray[np.bool_]
    correctness: Floats
    stages: list[str | None]
    segment_rollout: Ints
    segment_version: Ints
    segment_length: Ints

    def is_trained(self) -> NDArray[np.bool_]:
        """Which rollouts were trained on, shape `(N,)`."""
        is_trained: NDArray[np.bool_] = self.outcome == 0
        return is_trained

    @classmethod
    def from_records(cls, records: Sequence[dict[str, Any]], correctness_index: int | None) -> Rollouts:
        """Turn the records of `rollouts.jsonl` into columns; without a correctness function no rollout has any."""
        rows = [(record, rollout) for record in records for rollout in record["rollouts"]]
        segments = [(i, *pair) for i, (_, rollout) in enumerate(rows) for pair in rollout["segments"]]
        columns = np.array(segments, dtype=np.int64).reshape(-1, 3).T
        length = np.bincount(columns[0], weights=columns[2], minlength=len(rows)).astype(np.int64)
        return cls(
            group=np.array([record["group"] for record, _ in rows], dtype=np.int64),
            outcome=np.array([OUTCOMES.index(record["outcome"]) for record, _ in rows], dtype=np.int64),
            left=np.array([record["left"] for record, _ in rows], dtype=np.int64),
            length=length,
            is_truncated=np.array([rollout["finish"] == "length" for _, rollout in rows], dtype=bool),
            correctness=np.array([_reward(rollout["rewards"], correctness_index) for _, rollout in rows], dtype=float),
            stages=[rollout.get("stage") for _, rollout in rows],
            segment_rollout=columns[0],
            segment_version=columns[1],
            segment_length=columns[2],
        )


def _reward(rewards: Sequence[float | None], index: int | None) -> float:
    value = rewards[index] if index is not None and index < len(rewards) else None
    return np.nan if value is None else float(value)


@dataclass(frozen=True)
class Run:
    """A run as its folder shows it.

    Args:
        folder: The folder.
        files: Names of the files that were read.
        description: `run.json`; empty where there is none.
        history: What the trainer logged, in order; None where nothing was recorded.
        records: `rollouts.jsonl`, in order of leaving.
        samples: Sample completions.
        summary: `summary.json`; empty where there is none.
        saved_ledger: The ledger of the newest checkpoint.
        disagreements: Pairs on which the rules and a judge disagree.
    """

    folder: Path
    files: tuple[str, ...]
    description: dict[str, Any]
    history: History | None
    records: Sequence[dict[str, Any]] | None
    samples: Sequence[dict[str, Any]] | None
    summary: dict[str, Any]
    saved_ledger: dict[str, dict[str, int]] | None
    disagreements: Sequence[dict[str, Any]] | None

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration; empty where it was not recorded."""
        settings: dict[str, Any] = self.description.get("settings", {})
        return settings

    @property
    def batches_per_step(self) -> float:
        """Generation batches per optimizer step; 1 where it was not recorded."""
        return float(self.description.get("batches_per_step", 1.0))

    @property
    def last_step(self) -> int | None:
        """The last optimizer step that something was recorded of."""
        steps = [entry["step"] for entry in self.history or ()]
        steps += [self.summary["steps"]] if "steps" in self.summary else []
        steps += [record["left"] + 1 for record in self.records or () if record["outcome"] == "trained"]
        return max(steps, default=None)

    @cached_property
    def rollouts(self) -> Rollouts | None:
        """The rollouts as columns."""
        if not self.records:
            return None
        index: int | None = 0  # where nothing was recorded
        if "correctness" in self.description:
            names, correctness = self.description["reward_functions"], self.description["correctness"]
            index = names.index(correctness) if correctness in names else None
        return Rollouts.from_records(self.records, index)

    @cached_property
    def ledger(self) -> tuple[dict[str, dict[str, int]], str] | None:
        """The newest ledger, and when it was taken."""
        if "ledger" in self.description:
            return self.description["ledger"], f"at the end of training, step {self.description['ended_at_step']}"
        logged = [entry for entry in self.history or () if "ledger/groups_admitted" in entry]
        if "ledger" in self.summary and self.summary["steps"] == self.last_step:
            return self.summary["ledger"], f"at the end of training, step {self.summary['steps']}"
        if logged:
            return _logged_ledger(logged[-1]), f"as last logged, in step {logged[-1]['step']}, before its update"
        return None if self.saved_ledger is None else (self.saved_ledger, "in the newest checkpoint")


def _logged_ledger(entry: dict[str, Any]) -> dict[str, dict[str, int]]:
    ledger: dict[str, dict[str, int]] = {"groups": {}, "tokens": {}}
    for name, value in entry.items():
        match = re.fullmatch(r"ledger/(groups|tokens)_(\w+)", name)
        if match:
            ledger[match[1]][match[2]] = int(value)
    return ledger


def read_run(folder: str | Path) -> Run:
    """Read a run's folder.

    Args:
        folder: The run's `output_dir`, also while it trains.

    Returns:
        What is there.

    Raises:
        NoRunError: If it is not the folder of a run, or a file in it is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise NoRunError(f"`{folder}` is no folder. Pass the `output_dir` of a training.")
    reader = _Reader(folder)
    checkpoint = _newest_checkpoint(folder)
    run = Run(
        folder=folder,
        description=reader.json(RUN) or {},
        history=_history(reader, checkpoint),
        records=reader.lines(ROLLOUTS, ("group", "left", "outcome", "rollouts")),
        samples=(reader.json(SAMPLES) or {}).get("samples"),
        summary=reader.json("summary.json") or {},
        saved_ledger=None if checkpoint is None else reader.json(f"{checkpoint}/rollout/ledger.json"),
        disagreements=reader.lines(DISAGREEMENTS, ("prediction", "reference", "rules", "judge")),
        files=tuple(reader.files),
    )
    if run.history is None and run.records is None:
        raise NoRunError(
            f"`{folder}` is not the folder of a run: it has neither `{METRICS}`, `{ROLLOUTS}`, `{COMMIT_MARK}` nor a "
            "checkpoint. Pass the `output_dir` of a training that has begun."
        )
    return run


def _newest_checkpoint(folder: Path) -> str | None:
    steps = [int(match[1]) for path in folder.iterdir() if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))]
    whole = [step for step in steps if is_committed(folder / f"checkpoint-{step}")]
    return f"checkpoint-{max(whole)}" if whole else None


def _history(reader: _Reader, checkpoint: str | None) -> History | None:
    history: History | None = reader.lines(METRICS, ("step",))
    if history is not None:
        return history
    for name in (COMMIT_MARK, f"{checkpoint}/{COMMIT_MARK}"):
        state = reader.json(name)
        if state is not None:
            return list(state.get("log_history", []))
    return None


class _Reader:
    """Reads files of a folder and notes which were there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files: list[str] = []

    def json(self, name: str) -> dict[str, Any] | None:
        path = self._folder / name
        if not path.is_file():
            return None
        self.files.append(name)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise NoRunError(f"`{path}` can't be read ({error}). Move it away to have a report without it.") from error
        if not isinstance(content, dict):
            raise NoRunError(f"`{path}` holds no JSON object. Move it away to have a report without it.")
        return content

    def lines(self, name: str, needs: Sequence[str]) -> list[dict[str, Any]] | None:
        path = self._folder / name
        if not path.is_file():
            return None
        self.files.append(name)
        try:
            records = read_lines(path)
        except (OSError, ValueError) as error:
            raise NoRunError(f"`{path}` can't be read ({error}) Move it away to have a report without it.") from error
        for number, record in enumerate(records, 1):
            missing = [key for key in needs if key not in record]
            if missing:
                raise NoRunError(
                    f"Line {number} of `{path}` has no `{missing[0]}`: it was not written by a training. Move the file "
                    "away to have a report without it."
                )
        return records
