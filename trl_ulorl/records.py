"""What a run leaves on disk for people: `rollouts.jsonl`, one line for every group that has left the pools, and JSON."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from .rollout.pool import Outcome, Rollout, RolloutGroup


class RolloutLog:
    """Appends to the file; a new run starts a new one, a resumed run goes on where its checkpoint was saved.

    A line holds `group`, `row`, the policy versions `admitted` and `left`, the `outcome` and, per rollout, `finish`,
    `segments` as `[policy version, tokens]` pairs, and `rewards`.

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
    rewards = [] if rollout.rewards is None else rollout.rewards.tolist()
    return {
        "finish": rollout.finish,
        "segments": [[segment.policy_version, len(segment)] for segment in rollout.segments],
        "rewards": [None if math.isnan(reward) else reward for reward in rewards],
    }


def write_json(path: Path, content: Any) -> None:
    """Write JSON values so that the file is either the old or the new one, never half of one."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
