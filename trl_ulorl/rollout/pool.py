"""Rollouts in progress: segments, groups, the unfinished pool, the experience pool and the ledger.

The state of Algorithm 1 (section 3.1 of [UloRL](https://huggingface.co/papers/2507.19766)). This module knows token ids,
log-probabilities and rewards only: no model, no tokenizer, no tensor library. A held token costs 8 bytes (an int32 id
and a float32 log-probability).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]


class Finish(StrEnum):
    """Why a rollout ended."""

    EOS = "eos"  # the model ended it
    LENGTH = "length"  # it reached its limit: truncated


class Outcome(StrEnum):
    """How a complete group left the pools."""

    TRAINED = "trained"
    FILTERED = "filtered"  # dynamic sampling: all rewards equal, or a surplus that may not be carried over
    SET_ASIDE = "set_aside"  # fewer than two rollouts have a reward


def _owned(values: ArrayLike, dtype: type[np.generic]) -> NDArray[Any]:
    """Copy into an array of its own: a view would keep its whole padded matrix alive for as long as it is held."""
    return np.array(values, dtype=dtype, copy=True)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One uninterrupted piece of a rollout, sampled by one policy.

    Args:
        token_ids: Sampled ids, shape `(T,)`, at least one.
        per_token_logps: Log-probability in nats of each id under the policy that sampled it, shape `(T,)`.
        policy_version: Optimizer step of that policy.

    Raises:
        ValueError: If the segment is empty or the two shapes differ.
    """

    token_ids: Int32Array
    per_token_logps: Float32Array
    policy_version: int

    @classmethod
    def from_values(cls, token_ids: ArrayLike, per_token_logps: ArrayLike, policy_version: int) -> Segment:
        """Copy what an engine returned into compact arrays."""
        return cls(_owned(token_ids, np.int32), _owned(per_token_logps, np.float32), int(policy_version))

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 1 or self.token_ids.shape != self.per_token_logps.shape or not self.token_ids.size:
            raise ValueError(
                f"A segment has `token_ids` of shape {self.token_ids.shape} and `per_token_logps` of shape "
                f"{self.per_token_logps.shape}: both must be one-dimensional, equally long and not empty, or ids, "
                "log-probabilities and versions would no longer match. Return one log-probability per sampled token."
            )

    def __len__(self) -> int:
        return int(self.token_ids.size)


@dataclass(slots=True, eq=False)
class Rollout:
    """One completion, finished or not: its segments so far and, once it has ended, its rewards.

    Args:
        group_id: The group it belongs to.
        index: Its place in the group, in `[0, G)`.
        segments: In order of sampling.
        finish: None while unfinished.
        rewards: One value per reward function, NaN where undecided; None until scored.
        has_failed_reward: Whether a reward function failed on it or, once its group is settled, could not judge it, so that
            it is left out of the baseline.
        logs: Values that reward functions gave to `log_extra`, by column.
        metrics: Values that reward functions gave to `log_metric`, by name.
    """

    group_id: int
    index: int
    segments: list[Segment] = field(default_factory=list)
    finish: Finish | None = None
    rewards: Float32Array | None = None
    has_failed_reward: bool = False
    logs: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    num_tokens: int = 0

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, by an end-of-sequence token or at its limit."""
        return self.finish is not None

    def extend(self, segment: Segment, finish: Finish | None) -> None:
        """Append a segment. Costs nothing in the length of the rollout: segments are joined only when read."""
        if self.is_finished:
            raise ValueError(
                f"Rollout {self.index} of group {self.group_id} has ended ({self.finish}) and can't be extended: "
                "decode unfinished rollouts only."
            )
        self.segments.append(segment)
        self.num_tokens += len(segment)
        self.finish = finish

    @property
    def completion_ids(self) -> Int32Array:
        """All ids so far, shape `(T,)`."""
        return joined([segment.token_ids for segment in self.segments], np.int32)

    @property
    def sampling_per_token_logps(self) -> Float32Array:
        """Log-probability in nats of each token under the policy that sampled it, shape `(T,)`."""
        return joined([segment.per_token_logps for segment in self.segments], np.float32)

    @property
    def policy_versions(self) -> Int32Array:
        """Policy version of each token, shape `(T,)`."""
        lengths = [len(segment) for segment in self.segments]
        return np.repeat(np.array([s.policy_version for s in self.segments], dtype=np.int32), lengths)


def joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """Concatenate; nothing gives an empty array of that type."""
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


@dataclass(slots=True, eq=False)
class RolloutGroup:
    """The `G` rollouts of one prompt. They are trained on together, since GRPO's baseline needs all of them.

    Args:
        group_id: Order of admission, counted over the whole run.
        row_index: The prompt's row in the training set.
        prompt_ids: Token ids of the rendered prompt, shape `(P,)`.
        max_length: Most completion tokens of each rollout.
        admitted_version: Policy version at its admission; its first tokens are sampled under this one or a later one.
        rollouts: The `G` rollouts.
    """

    group_id: int
    row_index: int
    prompt_ids: Int32Array
    max_length: int
    admitted_version: int
    rollouts: list[Rollout]

    @classmethod
    def start(
        cls,
        *,
        group_id: int,
        row_index: int,
        prompt_ids: ArrayLike,
        max_length: int,
        admitted_version: int,
        num_generations: int,
    ) -> RolloutGroup:
        """Make a group whose rollouts are all empty."""
        rollouts = [Rollout(group_id, index) for index in range(num_generations)]
        return cls(group_id, row_index, _owned(prompt_ids, np.int32), max_length, admitted_version, rollouts)

    @property
    def is_complete(self) -> bool:
        """Whether every rollout has ended."""
        return all(rollout.is_finished for rollout in self.rollouts)

    @property
    def num_tokens(self) -> int:
        """Completion tokens held by the group."""
        return sum(rollout.num_tokens for rollout in self.rollouts)

    @property
    def rewards(self) -> Float32Array:
        """Rewards of the scored group, shape `(G, number of reward functions)`."""
        rows = [rollout.rewards for rollout in self.rollouts if rollout.rewards is not None]
        if len(rows) != len(self.rollouts):
            raise ValueError(f"Group {self.group_id} is not scored yet: rewards are there once all its rollouts are.")
        return np.stack(rows)


class UnfinishedPool:
    """Groups with at least one unfinished rollout, in order of admission. Their finished siblings wait with them."""

    def __init__(self) -> None:
        self._groups: dict[int, RolloutGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> list[RolloutGroup]:
        """The groups, oldest first."""
        return list(self._groups.values())

    @property
    def num_tokens(self) -> int:
        """Completion tokens held."""
        return sum(group.num_tokens for group in self._groups.values())

    def admit(self, group: RolloutGroup) -> None:
        """Add a new group; group ids must grow."""
        last = next(reversed(self._groups), -1)
        if group.group_id <= last:
            raise ValueError(
                f"Group {group.group_id} was admitted after group {last}: ids must grow with each admission, since "
                "they are the order in which groups are trained on. Give each prompt the next id."
            )
        self._groups[group.group_id] = group

    def open_rollouts(self) -> list[tuple[RolloutGroup, Rollout]]:
        """List every unfinished rollout with its group, oldest first."""
        return [(g, r) for g in self._groups.values() for r in g.rollouts if not r.is_finished]

    def pop_complete(self) -> list[RolloutGroup]:
        """Remove and return the groups whose rollouts have all ended, oldest first."""
        complete = [group for group in self._groups.values() if group.is_complete]
        for group in complete:
            del self._groups[group.group_id]
        return complete


class ExperiencePool:
    """Complete groups that wait to be trained on. Those admitted first leave first, whatever order they came in."""

    def __init__(self) -> None:
        self._groups: list[RolloutGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> list[RolloutGroup]:
        """The groups, oldest first."""
        return list(self._groups)

    @property
    def num_tokens(self) -> int:
        """Completion tokens held."""
        return sum(group.num_tokens for group in self._groups)

    def add(self, group: RolloutGroup) -> None:
        """Add a complete group."""
        if not group.is_complete:
            raise ValueError(
                f"Group {group.group_id} still has unfinished rollouts: it can't be trained on, since its baseline "
                "needs all of them. Keep it in the unfinished pool."
            )
        bisect.insort(self._groups, group, key=lambda held: held.group_id)

    def take(self, num_groups: int) -> list[RolloutGroup]:
        """Remove and return the `num_groups` groups that were admitted first."""
        taken, self._groups = self._groups[:num_groups], self._groups[num_groups:]
        return taken


LENGTH_BINS = 32  # bin b counts rollouts of 2^b to 2^(b+1) - 1 tokens


class Ledger:
    """Where every admitted group and every generated token went.

    Groups admitted = trained + filtered + set aside + ready + unfinished, and tokens generated = trained + filtered +
    set aside + held. The left sides are counted when groups are admitted and tokens decoded, the held terms are read
    from the pools, so the balance is a check and not a definition. A batch that is being trained on counts as ready
    until its last update is done.

    Attributes:
        groups: Groups admitted, and groups by outcome.
        tokens: Tokens generated, and tokens by outcome.
        lengths: By outcome, how many rollouts had 2^b to 2^(b+1) - 1 tokens.
        discarded: What a resume could not take up and booked as set aside: `reason`, `groups` and `tokens` of each time.
    """

    def __init__(self) -> None:
        self.groups: dict[str, int] = {"admitted": 0, **{outcome.value: 0 for outcome in Outcome}}
        self.tokens: dict[str, int] = {"generated": 0, **{outcome.value: 0 for outcome in Outcome}}
        self.lengths: dict[str, list[int]] = {outcome.value: [0] * LENGTH_BINS for outcome in Outcome}
        self.discarded: list[dict[str, Any]] = []

    def close(self, group: RolloutGroup, outcome: Outcome) -> None:
        """Book a group that has left the pools."""
        self.groups[outcome] += 1
        self.tokens[outcome] += group.num_tokens
        for rollout in group.rollouts:
            self.lengths[outcome][rollout.num_tokens.bit_length() - 1] += 1

    def discard(self, num_groups: int, num_tokens: int, reason: str) -> None:
        """Book groups that a checkpoint held and that can't be taken up from it as set aside.

        Their rollouts are gone, so they are missing in `lengths`.
        """
        self.groups[Outcome.SET_ASIDE] += num_groups
        self.tokens[Outcome.SET_ASIDE] += num_tokens
        self.discarded.append({"reason": reason, "groups": num_groups, "tokens": num_tokens})

    @property
    def mean_length(self) -> float:
        """Mean tokens of the rollouts that have left the pools; 0 before any has."""
        num_rollouts = sum(sum(counts) for counts in self.lengths.values())
        num_tokens = sum(self.tokens[outcome] for outcome in Outcome) - sum(each["tokens"] for each in self.discarded)
        return num_tokens / num_rollouts if num_rollouts else 0.0

    def balance(self, *, ready: int, unfinished: int, held_tokens: int) -> dict[str, dict[str, int]]:
        """Return the ledger, after checking that it balances.

        Args:
            ready: Groups in the experience pool or being trained on.
            unfinished: Groups in the unfinished pool, over all ranks.
            held_tokens: Completion tokens of all of these.

        Returns:
            `{"groups": {...}, "tokens": {...}}`; in each the first number is the sum of the others.

        Raises:
            RuntimeError: If a group or a token was lost or counted twice.
        """
        groups = {**self.groups, "ready": ready, "unfinished": unfinished}
        tokens = {**self.tokens, "held": held_tokens}
        for kind, first, entries in (("groups", "admitted", groups), ("tokens", "generated", tokens)):
            rest = sum(entries.values()) - entries[first]
            if entries[first] != rest:
                raise RuntimeError(
                    f"The ledger of {kind} does not balance: {entries[first]} {first}, but the other terms add up to "
                    f"{rest} ({entries}). Rollouts were lost or counted twice: this is a bug in the rollout engine or "
                    "in trl_ulorl. Resume from the last checkpoint and report it with this line."
                )
        return {"groups": groups, "tokens": tokens}

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as JSON values."""
        return {
            "groups": dict(self.groups),
            "tokens": dict(self.tokens),
            "lengths": {name: list(counts) for name, counts in self.lengths.items()},
            "discarded": [dict(each) for each in self.discarded],
        }

    def load_state_dict(self, state: Any) -> None:
        """Take up counters that `state_dict` returned.

        Raises:
            ValueError: If they are none.
        """
        fresh = Ledger()
        counters: dict[str, dict[str, Any]] = {
            "groups": {**fresh.groups},
            "tokens": {**fresh.tokens},
            "lengths": {**fresh.lengths},
        }
        is_valid = isinstance(state, dict) and all(
            isinstance(state.get(part), dict) and state[part].keys() == entries.keys()
            for part, entries in counters.items()
        )
        if is_valid:
            counts = [*state["groups"].values(), *state["tokens"].values()]
            for bins in state["lengths"].values():
                is_valid &= isinstance(bins, list) and len(bins) == LENGTH_BINS
                counts += bins if isinstance(bins, list) else []
            discarded = state.get("discarded")
            is_valid &= isinstance(discarded, list) and all(
                isinstance(each, dict) and each.keys() == {"reason", "groups", "tokens"} for each in discarded
            )
            if is_valid:
                counts += [each[part] for each in discarded for part in ("groups", "tokens")]
            is_valid &= all(is_count(count) for count in counts)
        if not is_valid:
            raise ValueError(f"it holds no ledger: {str(state)[:200]}")
        self.groups, self.tokens = dict(state["groups"]), dict(state["tokens"])
        self.lengths = {name: list(counts) for name, counts in state["lengths"].items()}
        self.discarded = [dict(each) for each in state["discarded"]]


def is_count(value: Any) -> bool:
    """Whether a JSON value is a whole number from 0 on that fits into 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
