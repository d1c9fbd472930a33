"""What a rollout step did, and its metrics; docs/metrics.md has each one's formula, unit and healthy range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .pool import Outcome, RolloutGroup
from .selection import is_decided, is_truncated


@dataclass(frozen=True, slots=True)
class Work:
    """What one rank decoded in a round.

    Args:
        num_steps: Decode steps that its slots stood open for.
        num_slots: Sequences that could decode in each.
        busy_steps: Sequences that did decode, summed over the steps.
        prefilled_tokens: Tokens of continued rollouts, prompts included, that were sent to the engine again.
    """

    num_steps: int
    num_slots: int
    busy_steps: int
    prefilled_tokens: int


@dataclass(frozen=True, slots=True)
class CompletedGroup:
    """What the metrics read of a group that became complete; the group's tokens may go before they are logged.

    Args:
        lengths: Tokens of each rollout, shape `(G,)`.
        is_truncated: Whether it reached the length limit, shape `(G,)`.
        rewards: Of each reward function, shape `(G, F)`.
    """

    lengths: NDArray[np.int64]
    is_truncated: NDArray[np.bool_]
    rewards: NDArray[np.float32]

    @classmethod
    def of(cls, group: RolloutGroup) -> Self:
        """Read them from a settled group."""
        return cls(
            np.array([rollout.num_tokens for rollout in group.rollouts]),
            is_truncated(group),
            group.rewards,
        )


@dataclass(slots=True)
class StepReport:
    """What one rollout step did, over all ranks; times are this rank's.

    Args:
        num_rounds: Rounds that it took.
        decode_seconds: Spent decoding.
        score_seconds: Spent on texts for reward functions, and waited for rewards after decoding.
        exchange_seconds: Spent exchanging complete groups, waiting for slower ranks included.
        bookkeeping_seconds: Spent on pools, schedule and exchange: neither decoding nor waiting for rewards.
        decoded_tokens: New tokens.
        busy_steps: Sequences that decoded, summed over decode steps.
        slot_steps: Slots, summed over decode steps: what could have been decoded.
        prefilled_tokens: Tokens of continued rollouts that were sent to the engine again.
        completed: Groups that became complete.
        fillers: Groups that are not trained on, unless the batch can't be filled without them.
        num_filled: How many of them the batch took.
    """

    num_rounds: int = 0
    decode_seconds: float = 0.0
    score_seconds: float = 0.0
    exchange_seconds: float = 0.0
    bookkeeping_seconds: float = 0.0
    decoded_tokens: int = 0
    busy_steps: int = 0
    slot_steps: int = 0
    prefilled_tokens: int = 0
    completed: list[CompletedGroup] = field(default_factory=list)
    fillers: list[tuple[RolloutGroup, Outcome]] = field(default_factory=list)
    num_filled: int = 0

    def add_work(self, work: Sequence[Work]) -> None:
        """Add what the ranks did in a round."""
        self.busy_steps += sum(part.busy_steps for part in work)
        # Ranks wait for the slowest one: its steps are what every slot stood open for.
        self.slot_steps += max(part.num_steps for part in work) * sum(part.num_slots for part in work)
        self.prefilled_tokens += sum(part.prefilled_tokens for part in work)


def step_metrics(report: StepReport) -> dict[str, float]:
    """Return work and time of the step."""
    return {
        "rollout/rounds": float(report.num_rounds),
        # A step that found its batch in the pool decoded nothing: no slot stood open.
        "rollout/occupancy": report.busy_steps / report.slot_steps if report.slot_steps else 1.0,
        "rollout/decoded_tokens": float(report.decoded_tokens),
        "rollout/prefilled_tokens": float(report.prefilled_tokens),
        "rollout/filled_groups": float(report.num_filled),
        "rollout/decode_seconds": report.decode_seconds,
        "rollout/score_seconds": report.score_seconds,
        "rollout/exchange_seconds": report.exchange_seconds,
        "rollout/bookkeeping_seconds": report.bookkeeping_seconds,
    }


def batch_metrics(batch: Sequence[RolloutGroup], version: int) -> dict[str, float]:
    """Return how old the tokens of a training batch are, in policy versions."""
    rollouts = [rollout for group in batch for rollout in group.rollouts]
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    lengths = np.array([len(segment) for segment in segments])
    ages = version - np.array([segment.policy_version for segment in segments])
    return {
        "rollout/segments_per_rollout": len(segments) / len(rollouts),
        "rollout/age_mean": float((ages * lengths).sum() / lengths.sum()),
        "rollout/age_max": float(ages.max()),
        "rollout/on_policy_frac": float(lengths[ages == 0].sum() / lengths.sum()),
    }


def completed_metrics(completed: Sequence[CompletedGroup], correctness_index: int | None) -> dict[str, float]:
    """Return accuracy, truncation and lengths of all groups that became complete, before any is filtered.

    There is no accuracy without a correctness function.
    """
    if not completed:
        return {}
    metrics = {
        "rollout/truncated_frac": float(np.concatenate([group.is_truncated for group in completed]).mean()),
        "rollout/completed_length_mean": float(np.concatenate([group.lengths for group in completed]).mean()),
    }
    rewards = np.concatenate([group.rewards for group in completed])
    if rewards.shape[1]:
        metrics["verifier/undecided_frac"] = float(1 - is_decided(rewards).mean())
    if correctness_index is not None and not np.isnan(rewards[:, correctness_index]).all():
        metrics["accuracy"] = float(np.nanmean(rewards[:, correctness_index]))
    return metrics


def ledger_metrics(balance: dict[str, dict[str, int]]) -> dict[str, float]:
    """Return the ledger's entries, and the share of generated tokens that was not trained on for good."""
    metrics = {f"ledger/{part}_{name}": float(value) for part, rest in balance.items() for name, value in rest.items()}
    tokens = balance["tokens"]
    wasted = tokens["filtered"] + tokens["set_aside"]
    metrics["rollout/wasted_tokens_frac"] = wasted / max(1, tokens["generated"])
    return metrics
