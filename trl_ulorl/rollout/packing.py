"""Groups as JSON values and flat arrays, for checkpoints, and as matrices, for the loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .pool import Finish, Rollout, RolloutGroup, Segment, joined

PACKED_ARRAYS = ("prompt_ids", "token_ids", "per_token_logps")


def pack_groups(groups: Iterable[RolloutGroup]) -> tuple[list[dict[str, Any]], dict[str, NDArray[Any]]]:
    """Turn groups into JSON values and three flat arrays.

    Returns:
        The groups' records, and `prompt_ids` (int32), `token_ids` (int32) and `per_token_logps` (float32), each the
        concatenation over groups, rollouts and segments in order.
    """
    groups = list(groups)
    segments = [s for group in groups for rollout in group.rollouts for s in rollout.segments]
    arrays = {
        "prompt_ids": joined([group.prompt_ids for group in groups], np.int32),
        "token_ids": joined([s.token_ids for s in segments], np.int32),
        "per_token_logps": joined([s.per_token_logps for s in segments], np.float32),
    }
    records = [
        {
            "group_id": group.group_id,
            "row_index": group.row_index,
            "prompt_length": int(group.prompt_ids.size),
            "max_length": group.max_length,
            "admitted_version": group.admitted_version,
            "rollouts": [_pack_rollout(rollout) for rollout in group.rollouts],
        }
        for group in groups
    ]
    return records, arrays


def _pack_rollout(rollout: Rollout) -> dict[str, Any]:
    rewards = rollout.rewards
    return {
        "segments": [[len(s), s.policy_version] for s in rollout.segments],
        "finish": rollout.finish,
        "rewards": None if rewards is None else [None if np.isnan(x) else float(x) for x in rewards],
        "has_failed_reward": rollout.has_failed_reward,
        "logs": rollout.logs,
        "metrics": rollout.metrics,
    }


def unpack_groups(records: list[dict[str, Any]], arrays: dict[str, NDArray[Any]]) -> list[RolloutGroup]:
    """Undo `pack_groups`."""
    groups, prompt_start, start = [], 0, 0
    for record in records:
        prompt_stop = prompt_start + record["prompt_length"]
        group = RolloutGroup.start(
            group_id=record["group_id"],
            row_index=record["row_index"],
            prompt_ids=arrays["prompt_ids"][prompt_start:prompt_stop],
            max_length=record["max_length"],
            admitted_version=record["admitted_version"],
            num_generations=len(record["rollouts"]),
        )
        prompt_start = prompt_stop
        for rollout, saved in zip(group.rollouts, record["rollouts"], strict=True):
            for length, version in saved["segments"]:
                stop = start + length
                tokens, logps = arrays["token_ids"][start:stop], arrays["per_token_logps"][start:stop]
                rollout.extend(Segment.from_values(tokens, logps, version), None)
                start = stop
            rollout.finish = None if saved["finish"] is None else Finish(saved["finish"])
            if saved["rewards"] is not None:
                rollout.rewards = np.array([np.nan if x is None else x for x in saved["rewards"]], dtype=np.float32)
            rollout.has_failed_reward = saved["has_failed_reward"]
            rollout.logs, rollout.metrics = saved["logs"], saved["metrics"]
        groups.append(group)
    return groups


def sampling_matrices(
    rollouts: Sequence[Rollout], num_columns: int, version: int
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Lay out what each token was sampled with as TRL lays out completions, padded with zeros on the right.

    Args:
        rollouts: The rows, `B`.
        num_columns: Width `T`, at least the longest completion's.
        version: Current policy version.

    Returns:
        Log-probability in nats of each token under the policy that sampled it, and its age in versions; `(B, T)` each.
    """
    logps = np.zeros((len(rollouts), num_columns), dtype=np.float32)
    ages = np.zeros((len(rollouts), num_columns), dtype=np.int32)
    for row, rollout in enumerate(rollouts):
        stop = 0
        for segment in rollout.segments:
            start, stop = stop, stop + len(segment)
            logps[row, start:stop] = segment.per_token_logps
            ages[row, start:stop] = version - segment.policy_version
    return logps, ages
