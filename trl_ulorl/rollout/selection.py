"""Which complete groups are trained on: truncation as wrong, undecided rewards, dynamic sampling. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .pool import Finish, Float32Array, RolloutGroup

MIN_DECIDED = 2  # a baseline needs two rewards
_ROUNDING = 1e-6  # what float32 sums may differ by, of the largest one or of 1


def settle_rewards(group: RolloutGroup, *, weights: Sequence[float], wrong_index: int | None) -> None:
    """Make the rewards of a complete, scored group final, in place.

    A rollout that a reward function failed on, or could not judge though it judged a sibling, loses all its rewards: its
    sum would silently lack a term. A function that gives None to the whole group does not apply to it, as in TRL.

    With `wrong_index`, truncated rollouts count as wrong (section 3.5): no reward may lift them above a wrong answer, so
    each of their weighted rewards is capped at the lowest one of the group's wrong rollouts, or at 0 where no complete
    rollout is wrong. For {0, 1} rewards their correctness is 0.

    Args:
        group: Its rollouts' `rewards` and `has_failed_reward` are changed.
        weights: Weight of each reward function.
        wrong_index: Index of the correctness function if truncation counts as wrong, else None.
    """
    rewards = group.rewards
    judged = rewards
    if wrong_index is not None:
        is_cut = is_truncated(group)
        if not is_cut.all():  # a truncated rollout's 0 was not given by the function
            judged = rewards[~is_cut]
            if np.isnan(judged[:, wrong_index]).all():
                rewards[is_cut, wrong_index] = np.nan
    applies = ~np.isnan(judged).all(axis=0)
    is_undecided = np.array([rollout.has_failed_reward for rollout in group.rollouts])
    is_undecided |= (np.isnan(rewards) & applies).any(axis=1)
    rewards[is_undecided] = np.nan
    if wrong_index is not None:
        _cap_truncated(rewards, group, np.asarray(weights, dtype=np.float32), wrong_index)
    for rollout, row, is_left_out in zip(group.rollouts, rewards, is_undecided.tolist(), strict=True):
        rollout.rewards, rollout.has_failed_reward = row, is_left_out


def is_truncated(group: RolloutGroup) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Tell for each rollout whether it reached its limit, shape `(G,)`."""
    return np.array([rollout.finish is Finish.LENGTH for rollout in group.rollouts])


def _cap_truncated(rewards: Float32Array, group: RolloutGroup, weights: Float32Array, wrong_index: int) -> None:
    is_cut = is_truncated(group)
    is_wrong = ~is_cut & (rewards[:, wrong_index] <= 0)
    for index, weight in enumerate(weights):
        if weight == 0:
            continue
        of_wrong = (rewards[is_wrong, index] * weight)[~np.isnan(rewards[is_wrong, index])]
        cap = float(of_wrong.min()) if of_wrong.size else 0.0
        capped = np.minimum(rewards[is_cut, index] * weight, cap)  # NaN stays NaN
        rewards[is_cut, index] = capped / weight


def is_decided(rewards: Float32Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Tell for each row of rewards, a rollout's, whether it has any."""
    return np.asarray(~np.isnan(rewards).all(axis=1))


def has_baseline(group: RolloutGroup) -> bool:
    """Whether enough rollouts have a reward for a baseline."""
    return int(is_decided(group.rewards).sum()) >= MIN_DECIDED


def is_mixed(
    group: RolloutGroup, *, weights: Sequence[float], is_truncated_masked: bool = False, is_per_function: bool = False
) -> bool:
    """Whether the decided rollouts' weighted rewards differ, so that the group carries a gradient.

    DAPO's dynamic sampling as UloRL uses it (section 4 of the paper's set-up): for {0, 1} rewards it is
    0 < number correct < G.

    Args:
        group: A settled group.
        weights: Weight of each reward function.
        is_truncated_masked: Truncated rollouts are left out of the loss, so one of the others has to differ from the
            mean.
        is_per_function: The functions are normalised one by one before they are summed, so one that differs is enough.
    """
    decided = is_decided(group.rewards)
    if not decided.any():
        return False
    # In float64, as the mean of equal numbers is else another number.
    weighted = np.nan_to_num(group.rewards.astype(np.float64) * np.asarray(weights), nan=0.0)
    totals = (weighted if is_per_function else weighted.sum(axis=1, keepdims=True))[decided]
    rounding = _ROUNDING * np.maximum(1.0, np.abs(totals).max(axis=0))
    differs = (np.abs(totals - totals.mean(axis=0)) > rounding).any(axis=1)
    if is_truncated_masked:
        differs &= ~is_truncated(group)[decided]
    return bool(differs.any())
