"""Groups as flat arrays, for checkpoints, and as matrices, for the loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .pool import Finish, Rollout, RolloutGroup, Segment

# What is known of groups besides their tokens, by what each array has an entry for.
_PER_GROUP = ("group_id", "row_index", "prompt_length", "max_length", "admitted_version")
_PER_ROLLOUT = ("num_segments", "finish", "is_scored", "has_failed_reward")
_PER_SEGMENT = ("segment_length", "segment_version")
RECORD_TYPES: dict[str, type[np.generic]] = {
    **dict.fromkeys((*_PER_GROUP, *_PER_SEGMENT, "num_segments"), np.int32),
    **dict.fromkeys(("finish", "is_scored", "has_failed_reward"), np.uint8),
    "rewards": np.float32,
}
TOKEN_TYPES: dict[str, type[np.generic]] = {
    "prompt_ids": np.int32,
    "token_ids": np.int32,
    "per_token_logps": np.float32,
}
_FINISHES = (None, Finish.EOS, Finish.LENGTH)  # by their code in `finish`

Records = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """Groups as arrays.

    Args:
        records: An array per name in `RECORD_TYPES`, for `N` groups of `G` rollouts: shape `(N,)`, `(N * G,)` or, for
            segments, their number over all rollouts; `rewards` has shape `(N * G, number of reward functions)`, NaN
            where undecided.
        tokens: For each name in `TOKEN_TYPES` the parts that make up one flat array, in the order of groups, rollouts
            and segments. They are the groups' own arrays: nothing is copied.
        notes: `[group id, index, logs, metrics]` of each rollout whose reward functions logged something.
    """

    records: dict[str, NDArray[Any]]
    tokens: dict[str, list[NDArray[Any]]]
    notes: list[list[Any]]


@dataclass(frozen=True, slots=True)
class RecordBounds:
    """What the records of held groups must keep to.

    Args:
        num_generations: Rollouts per group, `G`.
        num_rewards: Reward functions.
        num_rows: Rows of the training set.
        max_completion_length: Length limit of a rollout.
        version: Policy version at the save.
        num_admitted: Groups admitted until then.
    """

    num_generations: int
    num_rewards: int
    num_rows: int
    max_completion_length: int
    version: int
    num_admitted: int


def pack_groups(groups: Iterable[RolloutGroup]) -> PackedGroups:
    """Turn groups into arrays, without copying a token."""
    groups = list(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    columns: dict[str, list[int]] = {
        "group_id": [group.group_id for group in groups],
        "row_index": [group.row_index for group in groups],
        "prompt_length": [group.prompt_ids.size for group in groups],
        "max_length": [group.max_length for group in groups],
        "admitted_version": [group.admitted_version for group in groups],
        "num_segments": [len(rollout.segments) for rollout in rollouts],
        "finish": [_FINISHES.index(rollout.finish) for rollout in rollouts],
        "is_scored": [int(rollout.rewards is not None) for rollout in rollouts],
        "has_failed_reward": [int(rollout.has_failed_reward) for rollout in rollouts],
        "segment_length": [len(segment) for segment in segments],
        "segment_version": [segment.policy_version for segment in segments],
    }
    records = {name: np.array(values, dtype=RECORD_TYPES[name]) for name, values in columns.items()}
    num_rewards = max((rollout.rewards.size for rollout in rollouts if rollout.rewards is not None), default=0)
    records["rewards"] = np.full((len(rollouts), num_rewards), np.nan, dtype=np.float32)
    for row, rollout in zip(records["rewards"], rollouts, strict=True):
        if rollout.rewards is not None:
            row[:] = rollout.rewards
    parts: dict[str, list[NDArray[Any]]] = {
        "prompt_ids": [group.prompt_ids for group in groups],
        "token_ids": [segment.token_ids for segment in segments],
        "per_token_logps": [segment.per_token_logps for segment in segments],
    }
    # An empty part first, so that no parts at all have their type too.
    tokens = {name: [np.empty(0, dtype=TOKEN_TYPES[name]), *each] for name, each in parts.items()}
    notes = [[r.group_id, r.index, r.logs, r.metrics] for r in rollouts if r.logs or r.metrics]
    return PackedGroups(records, tokens, notes)


def num_held_tokens(records: Records) -> int:
    """Count the completion tokens of groups."""
    return int(records["segment_length"].sum(dtype=np.int64))


def rollout_tokens(records: Records) -> NDArray[np.int64]:
    """Return the completion tokens of each rollout, shape `(N * G,)`."""
    starts = np.concatenate([[0], np.cumsum(records["segment_length"], dtype=np.int64)])
    stops = np.cumsum(records["num_segments"], dtype=np.int64)
    return np.asarray(starts[stops] - starts[stops - records["num_segments"]])


def check_records(records: Records, bounds: RecordBounds, *, is_complete: bool) -> None:
    """Refuse records that no run can have saved.

    Args:
        records: As in `PackedGroups`.
        bounds: What they must keep to.
        is_complete: Whether every rollout must have ended and be scored.

    Raises:
        ValueError: With what is wrong, for a message that names the file.
    """
    for name, dtype in RECORD_TYPES.items():
        if name not in records:
            raise ValueError(f"`{name}` is missing")
        if records[name].dtype != dtype or records[name].ndim != (2 if name == "rewards" else 1):
            raise ValueError(f"`{name}` has type {records[name].dtype} and {records[name].ndim} dimensions")
    num_groups = len(records["group_id"])
    sizes = {name: num_groups for name in _PER_GROUP}
    sizes |= {name: num_groups * bounds.num_generations for name in (*_PER_ROLLOUT, "rewards")}
    sizes |= {name: int(records["num_segments"].sum(dtype=np.int64)) for name in _PER_SEGMENT}
    for name, size in sizes.items():
        if len(records[name]) != size:
            raise ValueError(f"`{name}` has {len(records[name])} entries, but {size} are needed")
    ranges = {
        "group_id": (0, bounds.num_admitted - 1),
        "row_index": (0, bounds.num_rows - 1),
        "prompt_length": (1, None),
        "max_length": (1, bounds.max_completion_length),
        "admitted_version": (0, bounds.version),
        "num_segments": (0, None),
        "finish": (0, len(_FINISHES) - 1),
        "is_scored": (0, 1),
        "has_failed_reward": (0, 1),
        "segment_length": (1, bounds.max_completion_length),
        "segment_version": (0, bounds.version),
    }
    for name, (least, most) in ranges.items():
        values = records[name]
        if values.size and (values.min() < least or (most is not None and values.max() > most)):
            raise ValueError(f"`{name}` has values from {values.min()} to {values.max()}, beyond {least} to {most}")
    is_scored = records["is_scored"].astype(bool)
    if is_scored.any() and records["rewards"].shape[1] != bounds.num_rewards:
        raise ValueError(f"`rewards` has {records['rewards'].shape[1]} columns, but {bounds.num_rewards} are needed")
    _check_lengths(records, bounds, is_scored, is_complete=is_complete)


def _check_lengths(records: Records, bounds: RecordBounds, is_scored: NDArray[np.bool_], *, is_complete: bool) -> None:
    num_tokens, finish = rollout_tokens(records), records["finish"]
    limits = np.repeat(records["max_length"], bounds.num_generations)
    admitted = np.repeat(np.repeat(records["admitted_version"], bounds.num_generations), records["num_segments"])
    if (records["segment_version"] < admitted).any():
        raise ValueError("`segment_version` has a segment that was sampled before its group was admitted")
    is_ended, is_truncated = finish != 0, finish == _FINISHES.index(Finish.LENGTH)
    for is_wrong, what in (
        (num_tokens > limits, "is longer than its limit"),
        (is_truncated & (num_tokens != limits), "counts as truncated, but is not at its limit"),
        (~is_ended & (num_tokens == limits), "goes on, but is at its limit"),
        (is_ended & (num_tokens == 0), "has ended without a token"),
        (~is_ended & is_scored, "goes on, but is scored"),
        (~is_ended & is_complete, "goes on, but belongs to a complete group"),
        (~is_scored & is_complete, "is not scored, but belongs to a complete group"),
    ):
        if is_wrong.any():
            group, index = divmod(int(np.flatnonzero(is_wrong)[0]), bounds.num_generations)
            raise ValueError(f"rollout {index} of group {records['group_id'][group]} {what}")


def check_tokens(records: Records, tokens: Mapping[str, NDArray[Any]], vocab_size: int | None) -> None:
    """Refuse tokens that don't belong to the records.

    Args:
        records: Checked records.
        tokens: A flat array per name in `TOKEN_TYPES`.
        vocab_size: Ids must be below it; None for no bound.

    Raises:
        ValueError: With what is wrong, for a message that names the file.
    """
    num_tokens = num_held_tokens(records)
    sizes = {
        "prompt_ids": int(records["prompt_length"].sum(dtype=np.int64)),
        "token_ids": num_tokens,
        "per_token_logps": num_tokens,
    }
    for name, dtype in TOKEN_TYPES.items():
        if name not in tokens:
            raise ValueError(f"`{name}` is missing")
        values = tokens[name]
        if values.dtype != dtype or values.shape != (sizes[name],):
            raise ValueError(
                f"`{name}` has type {values.dtype} and shape {values.shape}, but {np.dtype(dtype)} and {(sizes[name],)} "
                "are needed"
            )
        if dtype is not np.int32 or not values.size:
            continue
        if values.min() < 0 or (vocab_size is not None and values.max() >= vocab_size):
            raise ValueError(
                f"`{name}` has ids from {values.min()} to {values.max()}, but the vocabulary has {vocab_size}"
            )


def unpack_groups(
    records: Records,
    tokens: Mapping[str, NDArray[Any]],
    notes: Iterable[Sequence[Any]] = (),
    keep: Sequence[bool] | None = None,
) -> list[RolloutGroup]:
    """Undo `pack_groups`, once `check_records` and `check_tokens` have passed.

    Args:
        records: As in `PackedGroups`.
        tokens: Flat arrays; what is kept is copied.
        notes: As in `PackedGroups`.
        keep: Whether to return each group; None for all.
    """
    groups: list[RolloutGroup] = []
    num_groups = len(records["group_id"])
    num_generations = len(records["finish"]) // num_groups if num_groups else 0
    noted = {(group_id, index): (logs, metrics) for group_id, index, logs, metrics in notes}
    values = {name: records[name].tolist() for name in RECORD_TYPES if name != "rewards"}
    prompt_start = token_start = segment = 0
    for number in range(num_groups):
        is_kept = keep is None or keep[number]
        prompt_stop = prompt_start + values["prompt_length"][number]
        group = RolloutGroup.start(
            group_id=values["group_id"][number],
            row_index=values["row_index"][number],
            prompt_ids=tokens["prompt_ids"][prompt_start:prompt_stop],
            max_length=values["max_length"][number],
            admitted_version=values["admitted_version"][number],
            num_generations=num_generations,
        )
        prompt_start = prompt_stop
        for place, rollout in enumerate(group.rollouts, start=number * num_generations):
            for _ in range(values["num_segments"][place]):
                token_stop = token_start + values["segment_length"][segment]
                if is_kept:
                    span = slice(token_start, token_stop)
                    version = values["segment_version"][segment]
                    ids, logps = tokens["token_ids"][span], tokens["per_token_logps"][span]
                    rollout.extend(Segment.from_values(ids, logps, version), None)
                token_start, segment = token_stop, segment + 1
            rollout.finish = _FINISHES[values["finish"][place]]
            if values["is_scored"][place]:
                rollout.rewards = np.array(records["rewards"][place], dtype=np.float32)
            rollout.has_failed_reward = bool(values["has_failed_reward"][place])
            rollout.logs, rollout.metrics = noted.get((group.group_id, rollout.index), ({}, {}))
        if is_kept:
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
