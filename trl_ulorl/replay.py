"""Reward functions that are called early, by the rollout, and answer TRL from memory when it asks for a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .rollout.pool import Rollout
from .rollout.scoring import RewardScorer, RewardSource


class ReplayedReward:
    """Takes the place of one reward function in `GRPOTrainer`.

    While a training batch is handed over it returns the rewards that the batch's rollouts got when they ended; at any
    other time, in evaluation, it calls the function itself.

    Args:
        source: The function and its name.
        index: Its place among the rollouts' rewards.
        handed_over: Returns this rank's rollouts of the batch, or None outside training.
        scorer: Runs asynchronous functions in evaluation.
    """

    def __init__(
        self,
        source: RewardSource,
        index: int,
        handed_over: Callable[[], list[Rollout] | None],
        scorer: RewardScorer,
    ) -> None:
        self.__name__ = source.name
        self._source = source
        self._index = index
        self._handed_over = handed_over
        self._scorer = scorer

    def __call__(self, /, **kwargs: Any) -> Any:
        """Return one reward per completion, in TRL's calling form."""
        rollouts = self._handed_over()
        if rollouts is not None:
            return [_reward(rollout, self._index) for rollout in rollouts]
        output = self._source.func(**kwargs)
        return self._scorer.run(_awaited(output)) if inspect.isawaitable(output) else output


def _reward(rollout: Rollout, index: int) -> float | None:
    assert rollout.rewards is not None
    value = float(rollout.rewards[index])
    return None if np.isnan(value) else value


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def replay_logs(
    rollouts: Sequence[Rollout],
    log_extra: Callable[[str, list[Any]], None],
    log_metric: Callable[[str, float], None],
) -> None:
    """Log what the reward functions logged when they scored these rollouts.

    Columns are aligned with the batch (None where a call logged none). A metric is logged for each rollout of the calls that
    logged it: TRL's mean is then over these rollouts of all ranks, however many a rank holds.
    """
    for column in sorted({name for rollout in rollouts for name in rollout.logs}):
        log_extra(column, [rollout.logs.get(column) for rollout in rollouts])
    for rollout in rollouts:
        for name, values in rollout.metrics.items():
            for value in values:
                log_metric(name, value)
