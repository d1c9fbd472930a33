"""Who decodes in a round, how far, and what is admitted: Algorithm 1's schedule and the continuous one, pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What both schedules have in common: the size of a batch, and how many groups may be held for how long.

    A rollout step is one or more rounds under one policy, until a batch of complete groups is in hand.

    Args:
        groups_per_batch: Groups that one rollout step trains on.
        max_inflight_groups: Most groups held, unfinished and ready together.
        max_staleness: Most versions between a group's first token and the last update on it; None for no bound.
        versions_per_batch: Optimizer steps that one batch feeds, rounded up.
        is_on_policy: One segment only (TOIS): nothing is carried over to the next policy.
    """

    groups_per_batch: int
    max_inflight_groups: int
    max_staleness: int | None = None
    versions_per_batch: int = 1
    is_on_policy: bool = False

    def batches_left(self, admitted_version: int, version: int) -> int:
        """Count the batches, the current one included, that a group may still be trained in.

        The last of a batch's `versions_per_batch` updates is `versions_per_batch - 1` versions after the first.
        """
        assert self.max_staleness is not None
        slack = admitted_version + self.max_staleness - version - (self.versions_per_batch - 1)
        return slack // self.versions_per_batch + 1

    @property
    def capacity(self) -> int:
        """Most groups held at any time: what `max_staleness` allows, within `max_inflight_groups`."""
        if self.max_staleness is None:
            return self.max_inflight_groups
        return min(self.max_inflight_groups, self.groups_per_batch * self.batches_left(0, 0))

    def room(self, *, num_held: int, num_batches_left: int | None = None) -> int:
        """Count the groups that may be admitted.

        Args:
            num_held: Groups held, unfinished and ready.
            num_batches_left: With `drain`, the batches still to be trained on, the current one included.
        """
        room = self.capacity - num_held
        if num_batches_left is not None:
            room = min(room, num_batches_left * self.groups_per_batch - num_held)
        return max(0, room)

    def num_due(self, admitted_versions: Sequence[int], version: int) -> int:
        """Count the oldest held groups that must be in the current batch, so that no later one breaks `max_staleness`.

        The first `i + 1` groups have to leave within the batches that the last of them may still wait for; what the
        later batches can't take is due now. Decoding the due groups to their end keeps the bound exactly, and nothing
        is dropped.

        Args:
            admitted_versions: Version of each held group at its admission, oldest first.
            version: Current policy version.

        Returns:
            A number between 0 and `groups_per_batch`, as long as `room` was obeyed.
        """
        if self.max_staleness is None:
            return 0
        due = 0
        for index, admitted in enumerate(admitted_versions):
            later_batches = max(0, self.batches_left(admitted, version) - 1)
            due = max(due, index + 1 - self.groups_per_batch * later_batches)
        return due


@dataclass(frozen=True, kw_only=True)
class SegmentSchedule(Schedule):
    """The paper's schedule: every round decodes all unfinished rollouts and new prompts by one segment.

    Args:
        segment_length: Most new tokens of a rollout in a round.
    """

    segment_length: int

    def num_admissions(self, *, num_held: int, num_ready: int, num_batches_left: int | None = None) -> int:
        """Count the prompts to admit in the next round: a batch, or what there is room for.

        An on-policy round admits no more than the batch misses.

        Args:
            num_held: Groups held, unfinished and ready.
            num_ready: Ready ones among them.
            num_batches_left: With `drain`, the batches still to be trained on, the current one included.
        """
        wanted = self.groups_per_batch - num_ready if self.is_on_policy else self.groups_per_batch
        return max(0, min(wanted, self.room(num_held=num_held, num_batches_left=num_batches_left)))

    def token_budget(self, *, num_tokens: int, max_length: int, is_due: bool) -> int:
        """Return how many tokens a rollout may add in a round: a segment, or all that is left to its limit."""
        remaining = max_length - num_tokens
        return remaining if is_due else min(self.segment_length, remaining)


@dataclass(frozen=True, kw_only=True)
class ContinuousSchedule(Schedule):
    """A fixed number of slots, each of which decodes one rollout to its end and then takes up the next.

    Nobody waits for the longest rollout, in no round: once a batch of groups is complete, the rest is interrupted, and
    goes on under the next policy. A rollout is cut where an update happens to fall, not at a fixed length.

    Args:
        num_slots: Rollouts that decode at any time, on all ranks together; rounded up so that each has as many.
    """

    num_slots: int

    def admissions(
        self, num_open: Sequence[int], num_generations: int, room: int, *, has_reserve: bool = False
    ) -> list[int]:
        """Choose the ranks that new prompts go to, so that each has unfinished rollouts for all of its slots.

        Args:
            num_open: Unfinished rollouts of each rank, those that wait for a slot included.
            num_generations: Rollouts per prompt.
            room: Most prompts to admit.
            has_reserve: Whether each rank gets a prompt more, for the decode steps until admissions are agreed on again.

        Returns:
            The owner of each new prompt.

        Example:
            >>> schedule = ContinuousSchedule(groups_per_batch=1, max_inflight_groups=9, num_slots=4)
            >>> schedule.admissions([3], 2, room=9), schedule.admissions([3, 0], 2, room=9, has_reserve=True)
            ([0], [1, 1])
        """
        open_rollouts = list(num_open)
        wanted = self.slots_of_rank(len(open_rollouts)) + (num_generations - 1 if has_reserve else 0)
        owners: list[int] = []
        while len(owners) < room:
            owner = min(range(len(open_rollouts)), key=lambda rank: (open_rollouts[rank], rank))
            if open_rollouts[owner] >= wanted:
                break
            open_rollouts[owner] += num_generations
            owners.append(owner)
        return owners

    def slots_of_rank(self, num_ranks: int) -> int:
        """Return the slots of each rank, rounded up."""
        return math.ceil(self.num_slots / num_ranks)

    @staticmethod
    def inflight_groups(num_slots: int, num_generations: int, groups_per_batch: int) -> int:
        """Return how many groups must be held so that the slots hardly ever stand empty.

        Finished rollouts wait for their siblings, so there are more groups in flight than the slots could hold alone:
        with log-normal lengths about two and a half times as many, and the batch that is being completed.
        """
        return groups_per_batch + math.ceil(2.5 * num_slots / num_generations)


def balanced_order(num_tokens: Sequence[int], num_ranks: int) -> list[int]:
    """Order the groups of a batch so that equal consecutive shares of it hold about equally many tokens.

    Largest first, each to the share with the fewest tokens that still has room. Where the groups don't divide evenly
    among the ranks, groups span ranks and the order stays as it is.

    Example:
        >>> balanced_order([8, 1, 1, 6], 2)
        [0, 2, 1, 3]
    """
    count = len(num_tokens)
    if num_ranks == 1 or count % num_ranks:
        return list(range(count))
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for group in sorted(range(count), key=lambda i: (-num_tokens[i], i)):
        rank = min((r for r in range(num_ranks) if len(shares[r]) < count // num_ranks), key=lambda r: (totals[r], r))
        shares[rank].append(group)
        totals[rank] += num_tokens[group]
    return [group for share in shares for group in sorted(share)]


def expected_remaining(num_tokens: int, max_length: int, mean_length: float) -> float:
    """Return how many more tokens an unfinished rollout is expected to take.

    As many as it has, and no fewer than the mean length: under a long tail, what has gone on for long goes on for about
    as long again. Its limit caps it.

    Args:
        num_tokens: Tokens that it has.
        max_length: Its limit.
        mean_length: Mean length of the run's ended rollouts.

    Example:
        >>> expected_remaining(0, 100, 20.0), expected_remaining(40, 100, 20.0), expected_remaining(90, 100, 20.0)
        (20.0, 40.0, 10.0)
    """
    return float(min(max(num_tokens, mean_length), max_length - num_tokens))


def dealt_owners(work: Sequence[float], num_owners: int) -> list[int]:
    """Deal groups to engines so that each gets about equal work: the largest first, each to the one with the least.

    Example:
        >>> dealt_owners([5.0, 9.0, 4.0], 2)
        [1, 0, 1]
    """
    owners, totals = [0] * len(work), [0.0] * num_owners
    for group in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        owner = min(range(num_owners), key=lambda i: (totals[i], i))
        owners[group] = owner
        totals[owner] += work[group]
    return owners
