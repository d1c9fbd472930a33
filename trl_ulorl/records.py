"""What a run leaves on disk for people: `rollouts.jsonl`, one line for every group that has left the pools, and JSON."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from .rollout.pool import Outcome, Rollout, RolloutGroup

RUN, METRICS, ROLLOUTS = "run.json", "metrics.jsonl", "rollouts.jsonl"
STAGE_COLUMN = "verifier_stage"  # as `VerifierReward` logs it
# What a reader of a run asks for first, in its model card and its report.
KEY_SETTINGS = (
    "max_completion_length",
    "num_segments",
    "segment_length",
    "rollout_schedule",
    "max_inflight_groups",
    "max_staleness",
    "importance_mode",
    "dynamic_sampling",
    "overlong",
    "num_generations",
    "generation_batch_size",
    "num_iterations",
    "temperature",
    "top_p",
    "top_k",
    "learning_rate",
    "lr_scheduler_type",
    "beta",
    "epsilon",
    "epsilon_high",
    "loss_type",
    "seed",
)


class RolloutLog:
    """Appends to the file; a new run starts a new one, a resumed run goes on where its checkpoint was saved.

    A line holds `group`, `row`, the policy versions `admitted` and `left`, the `outcome` and, per rollout, `finish`,
    `segments` as `[policy version, tokens]` pairs, `rewards` and, where a reward function logged it, `stage`.

    Args:
        path: The file.
        is_enabled: False writes nothing.
    """

    def __init__(self, path: Path, *, is_enabled: bool) -> None:
        self._path = path
        self._is_enabled = is_enabled
        self._is_begun = False

    def restart(self) -> None:
        """Let the next line start a new file."""
        self._is_begun = False

    def write(self, group: RolloutGroup, outcome: Outcome, version: int) -> None:
        """Write a group's line."""
        if not self._is_enabled:
            return
        record = {
            "group": group.group_id,
            "row": group.row_index,
            "admitted": group.admitted_version,
            "left": version,
            "outcome": outcome,
            "rollouts": [_rollout_record(rollout) for rollout in group.rollouts],
        }
        with self._path.open("a" if self._is_begun else "w", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self._is_begun = True

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        return self._path.stat().st_size if self._is_begun and self._path.exists() else 0

    def go_back_to(self, num_bytes: int) -> None:
        """Cut off what was written after a checkpoint: those groups will come again. -1 for an unknown place."""
        if self._is_enabled and self._path.exists():
            self._is_begun = True
            if num_bytes >= 0:
                os.truncate(self._path, min(num_bytes, self._path.stat().st_size))


def _rollout_record(rollout: Rollout) -> dict[str, Any]:
    record: dict[str, Any] = {
        "finish": rollout.finish,
        "segments": [[segment.policy_version, len(segment)] for segment in rollout.segments],
        "rewards": reward_values(rollout),
    }
    if (stage := rollout.logs.get(STAGE_COLUMN)) is not None:
        record["stage"] = str(stage)
    return record


def reward_values(rollout: Rollout) -> list[float | None]:
    """Return a rollout's rewards, None where one is undecided."""
    rewards = [] if rollout.rewards is None else rollout.rewards.tolist()
    return [None if math.isnan(reward) else reward for reward in rewards]


def finite(value: Any) -> Any:
    """Return JSON values: infinities and NaN as None, which JSON has no number for."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def share_with_error(share: float, error: float | None) -> str:
    """Write a share in percent, and its standard error in points if there is one: over one problem there is none."""
    shown = "" if error is None or not math.isfinite(error) else f" ± {100 * error:.1f}"
    return f"{share:.1%}{shown}"


def write_json(path: Path, content: Any) -> None:
    """Write values as JSON, see `finite`, so that the file is either the old or the new one, never half of one."""
    write_text(path, json.dumps(finite(content), indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8 so that it is either the old or the new one; lone surrogates are written as escapes."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(temporary, path)


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON lines file; a last line that is still being written is left out.

    Raises:
        ValueError: If a line is no object.
    """
    records = []
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                break
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"Line {number} of {path} is no JSON ({error}).") from error
            if not isinstance(record, dict):
                raise ValueError(f"Line {number} of {path} is no JSON object.")  # noqa: TRY004 - the file's type
            records.append(record)
    return records
