"""Collect one batch of complete groups per rollout step: Algorithm 1 around the pools.

A round admits prompts, decodes unfinished rollouts, scores what ended and sorts the groups that are complete. Rounds
follow each other under one policy until a batch is in hand. What a round decodes is the schedule's affair: `segmented.py`
has the paper's, `continuous.py` the other one.

Over several ranks the unfinished rollouts of a group live on one rank, and complete groups are exchanged once a round, so
that the experience pool, the stream of prompts and the ledger are the same everywhere and every rank takes the same
decisions.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .engine import DecodedSegment, SegmentEngine
from .pool import (
    ExperiencePool,
    Finish,
    Ledger,
    Outcome,
    Rollout,
    RolloutGroup,
    Segment,
    UnfinishedPool,
)
from .prompts import PromptStream
from .report import CompletedGroup, StepReport, Work, batch_metrics, completed_metrics, ledger_metrics, step_metrics
from .schedule import Schedule, balanced_order
from .scoring import RewardInput, RewardScorer
from .selection import has_baseline, is_mixed, settle_rewards

logger = logging.getLogger(__name__)

ON_POLICY = "num_segments == 1"  # name of a setting in checkpoints
MAX_REFILL_ROUNDS = 10  # rounds beyond `num_segments` before a batch is filled with filtered groups


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """What the collector needs to know of the configuration.

    Args:
        num_generations: Rollouts per prompt, `G`.
        max_completion_length: Length limit of a rollout.
        num_segments: Segments that a rollout of full length takes.
        dynamic_sampling: Whether groups with equal rewards are left out.
        reward_weights: Weight of each reward function.
        scored_at_batch_time: Whether a reward model gives rewards only once the batch is formed, so that nothing can
            be decided on them here.
        correctness_index: The reward function whose mean is the accuracy; None for none.
        truncated_is_wrong: Whether truncation counts as wrong.
        truncated_is_masked: Whether truncated rollouts are left out of the loss.
        normalizes_per_function: Whether rewards are normalised per function before they are summed.
    """

    num_generations: int
    max_completion_length: int
    num_segments: int
    dynamic_sampling: bool
    reward_weights: tuple[float, ...]
    scored_at_batch_time: bool
    correctness_index: int | None
    truncated_is_wrong: bool
    truncated_is_masked: bool = False
    normalizes_per_function: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready to be decoded: its token ids and the most completion tokens that fit behind it."""

    token_ids: Sequence[int]
    max_length: int


@dataclass(slots=True)
class Ticket:
    """What every rank knows of an unfinished group, wherever it lives."""

    row_index: int
    admitted_version: int
    owner: int


class RankFailedError(RuntimeError):
    """The rollout failed on another rank, which has told this one."""


class RolloutStopped(Exception):
    """A stop was asked for on some rank; all ranks are at the end of a round, and their pools can be saved."""


class ExperienceCollector(ABC):
    """Runs the rounds and keeps the pools and the ledger.

    Args:
        engine: Decodes with the current policy.
        schedule: Who decodes, how far, and what is admitted.
        prompts: The stream of row indices.
        scorer: Scores finished rollouts.
        settings: The rest of the configuration.
        tokenize: Row indices to prompts.
        render: A finished rollout to what reward functions see.
        exchange: Gathers one object from every rank, in rank order.
        rank: This process.
        num_ranks: All processes.
        ranks_per_engine: Consecutive processes that share an engine (tensor parallelism): they hold the same unfinished
            groups and submit the same requests.
        on_close: Told of every group that leaves, with its outcome and the policy version.
        should_stop: Whether to stop at the end of the round; asked on every rank.
    """

    def __init__(
        self,
        *,
        engine: SegmentEngine,
        schedule: Schedule,
        prompts: PromptStream,
        scorer: RewardScorer,
        settings: CollectorSettings,
        tokenize: Callable[[list[int]], list[Prompt]],
        render: Callable[[RolloutGroup, Rollout], RewardInput],
        exchange: Callable[[dict[str, Any]], list[dict[str, Any]]] = lambda payload: [payload],
        rank: int = 0,
        num_ranks: int = 1,
        ranks_per_engine: int = 1,
        on_close: Callable[[RolloutGroup, Outcome, int], None] = lambda group, outcome, version: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.engine = engine
        self.schedule = schedule
        self.prompts = prompts
        self.scorer = scorer
        self._settings = settings
        self._tokenize = tokenize
        self._render = render
        self._exchange = exchange
        self._num_ranks = num_ranks
        self._ranks_per_engine = ranks_per_engine
        self._owner = rank // ranks_per_engine
        self._speaks = rank % ranks_per_engine == 0  # for the ranks that share its engine
        self._on_close = on_close
        self._should_stop = should_stop
        self._is_stopping = False
        self.unfinished = UnfinishedPool()
        self.ready = ExperiencePool()
        self.ledger = Ledger()
        self.training: list[RolloutGroup] = []
        self._tickets: dict[int, Ticket] = {}
        self._open_by_owner = [0] * (num_ranks // ranks_per_engine)
        self._unfinished_tokens = 0  # over all ranks
        self._decoded_tokens = 0  # here, in this round
        self.num_failed_rewards = 0  # over all ranks
        self.report = StepReport()

    # ---------------------------------------------------------------------------------------------- one rollout step

    def collect(self, version: int, num_batches_left: int | None = None) -> list[RolloutGroup]:
        """Advance until a batch of complete groups is in hand, and take it.

        Args:
            version: Current policy version, the optimizer step.
            num_batches_left: With `drain`, the batches still to be trained on, this one included.

        Returns:
            `groups_per_batch` groups, the same on every rank, in an order that gives ranks equal work.

        Raises:
            RuntimeError: If the rollout failed on any rank, or the last batch is not finished.
            RolloutStopped: If any rank was asked to stop. Complete groups that would only have filled the batch are then
                booked, and the step begins anew when it is resumed.
        """
        if self.training:
            raise RuntimeError(
                f"A batch of {len(self.training)} groups is still being trained on: call `finish_batch` before the next "
                "`collect`, or it would be lost."
            )
        started = time.perf_counter()
        self.report = StepReport()
        self._is_stopping = False
        self._fill_batch(version, num_batches_left)
        if self._is_stopping:
            self._close_fillers(self.report.fillers, version)
            self.report.fillers = []
            raise RolloutStopped
        batch = self._take_batch(version)
        report = self.report
        report.bookkeeping_seconds = time.perf_counter() - started - report.decode_seconds - report.score_seconds
        return batch

    def _fill_batch(self, version: int, num_batches_left: int | None) -> None:
        while not self._is_stopping and not self._has_batch(version, num_batches_left):
            self._run_round(version, lambda: self._advance(version, num_batches_left))
            self.report.num_rounds += 1

    @abstractmethod
    def _advance(self, version: int, num_batches_left: int | None) -> Work:
        """Admit prompts and decode; the groups that are then complete are sorted by the caller."""

    def finish_batch(self, version: int) -> None:
        """Book the batch as trained: its last update is done."""
        for group in self.training:
            self._close(group, Outcome.TRAINED, version)
        self.training = []

    def ledger_balance(self) -> dict[str, dict[str, int]]:
        """Return the ledger over all ranks, checked."""
        held = self.ready.num_tokens + sum(group.num_tokens for group in self.training) + self._unfinished_tokens
        waiting = len(self.ready) + len(self.training)
        waiting += len(self.report.fillers)  # still candidates for this batch
        held += sum(group.num_tokens for group, _ in self.report.fillers)
        return self.ledger.balance(ready=waiting, unfinished=len(self._tickets), held_tokens=held)

    def _has_batch(self, version: int, num_batches_left: int | None) -> bool:
        num_fillers = 0
        if self._is_late:
            num_fillers = len(self.report.fillers)
            if num_batches_left is not None:  # filling must not leave groups in hand that no later batch can take
                num_fillers = min(num_fillers, num_batches_left * self.schedule.groups_per_batch - self._num_held)
        return len(self.ready) + num_fillers >= self.schedule.groups_per_batch and not self._due_groups(version)

    @property
    def _num_held(self) -> int:
        return len(self._tickets) + len(self.ready)

    @property
    def _is_late(self) -> bool:
        """Whether so many rounds gave so few groups with differing rewards that the batch will be filled."""
        return self.report.num_rounds >= self._settings.num_segments + MAX_REFILL_ROUNDS

    def _due_groups(self, version: int) -> set[int]:
        """Return the unfinished groups that have to be in this batch, so that the staleness bound holds."""
        held = {group.group_id: group.admitted_version for group in self.ready.groups}
        held.update((group_id, ticket.admitted_version) for group_id, ticket in self._tickets.items())
        oldest_first = sorted(held)
        num_due = self.schedule.num_due([held[group_id] for group_id in oldest_first], version)
        return self._tickets.keys() & set(oldest_first[:num_due])

    def _run_round(self, version: int, work: Callable[[], Work]) -> None:
        payload: dict[str, Any] = {"error": None}
        failure: BaseException | None = None
        complete: list[RolloutGroup] = []
        self._decoded_tokens = 0
        try:
            payload["work"] = work()
            started = time.perf_counter()
            self.scorer.wait()
            self.report.score_seconds += time.perf_counter() - started
        except RankFailedError:
            raise  # every rank knows
        except BaseException as error:  # `sys.exit` in an engine and Ctrl-C too
            if self._num_ranks == 1:  # what was decoded is in the pool: who catches the error can go on
                self.ledger.tokens["generated"] += self._decoded_tokens
                self._unfinished_tokens = self.unfinished.num_tokens
            if isinstance(error, KeyboardInterrupt):
                raise  # at once: the launcher ends the other ranks
            # Told to the other ranks first: they would wait for this one for ever.
            failure, payload["error"] = error, f"{type(error).__name__}: {error}"
        else:
            complete = self.unfinished.pop_complete()
            payload["decoded_tokens"] = self._decoded_tokens
            payload["complete"] = complete if self._num_ranks > 1 and self._speaks else []
            payload["open"] = len(self.unfinished.open_rollouts())
            payload["unfinished_tokens"] = self.unfinished.num_tokens
            payload["failed_rewards"] = self.scorer.num_failures.total()
            payload["stop"] = self._should_stop()
        payloads = self._tell(payload, failure)
        if self._num_ranks > 1:
            complete = [group for other in payloads for group in other["complete"]]
        self._receive(payloads, complete, version)

    def _tell(self, payload: dict[str, Any], failure: BaseException | None = None) -> list[dict[str, Any]]:
        """Exchange one message a rank, and return those that speak for an engine.

        Raises:
            RankFailedError: If another rank tells of a failure; `failure` itself if it is this one.
        """
        started = time.perf_counter()
        payloads = self._exchange(payload)
        self.report.exchange_seconds += time.perf_counter() - started
        if failure is not None:
            raise failure
        for rank, other in enumerate(payloads):
            if other["error"] is not None:
                raise RankFailedError(
                    f"The rollout failed on rank {rank} ({other['error']}): see that rank's traceback."
                )
        self._is_stopping |= any(other["stop"] for other in payloads)
        return payloads[:: self._ranks_per_engine]

    def _admit(self, owners: Sequence[int], version: int) -> list[RolloutGroup]:
        """Admit a prompt for each owner, and return the groups that live here."""
        rows = self.prompts.take(len(owners))
        first_id = self.ledger.groups["admitted"]
        for group_id, (owner, row_index) in enumerate(zip(owners, rows, strict=True), first_id):
            self._tickets[group_id] = Ticket(row_index, version, owner)
        self.ledger.groups["admitted"] += len(rows)
        # All of them on every rank, so that one which can't be rendered is an error on all: if its owner alone stopped, the
        # others would wait for it where weights are gathered.
        prompts = self._tokenize(rows) if rows else []
        groups = [
            RolloutGroup.start(
                group_id=group_id,
                row_index=row_index,
                prompt_ids=prompt.token_ids,
                max_length=prompt.max_length,
                admitted_version=version,
                num_generations=self._settings.num_generations,
            )
            for group_id, (owner, row_index, prompt) in enumerate(zip(owners, rows, prompts, strict=True), first_id)
            if owner == self._owner
        ]
        for group in groups:
            self.unfinished.admit(group)
        return groups

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Count the time as decoding."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.report.decode_seconds += time.perf_counter() - started

    def _extend(self, group: RolloutGroup, rollout: Rollout, decoded: DecodedSegment, version: int) -> None:
        """Append what an engine decoded, and hand a rollout that ends to the scorer."""
        segment = Segment.from_values(decoded.token_ids, decoded.per_token_logps, version)
        num_tokens = rollout.num_tokens + len(segment)
        if num_tokens > group.max_length:
            raise RuntimeError(
                f"The engine added {len(segment)} tokens to a rollout of {rollout.num_tokens}, beyond its limit of "
                f"{group.max_length}: an engine must keep to `max_new_tokens`."
            )
        finish = Finish.EOS if decoded.is_stopped else Finish.LENGTH if num_tokens == group.max_length else None
        rollout.extend(segment, finish)
        self._decoded_tokens += len(segment)
        if rollout.is_finished and self._speaks:
            started = time.perf_counter()
            self.scorer.submit(self._render(group, rollout))  # which may let the reward thread run at once
            self.report.score_seconds += time.perf_counter() - started

    # ------------------------------------------------------------------------------------------- sorting what is done

    def _receive(self, payloads: list[dict[str, Any]], complete: list[RolloutGroup], version: int) -> None:
        self._open_by_owner = [payload["open"] for payload in payloads]
        self._unfinished_tokens = sum(payload["unfinished_tokens"] for payload in payloads)
        self.num_failed_rewards = sum(payload["failed_rewards"] for payload in payloads)
        decoded = sum(payload["decoded_tokens"] for payload in payloads)
        self.ledger.tokens["generated"] += decoded
        self.report.decoded_tokens += decoded
        self.report.add_work([payload["work"] for payload in payloads])
        for group in sorted(complete, key=lambda group: group.group_id):
            del self._tickets[group.group_id]
            self._sort(group)
        # They stay candidates for filling this batch, filtered groups before those that were set aside: at least their
        # rewards are known. What the batch can't need is booked.
        self.report.fillers.sort(key=lambda filler: filler[1] is Outcome.SET_ASIDE)
        self._close_fillers(self.report.fillers[self.schedule.groups_per_batch :], version)
        del self.report.fillers[self.schedule.groups_per_batch :]

    def _sort(self, group: RolloutGroup) -> None:
        settings = self._settings
        wrong_index = settings.correctness_index if settings.truncated_is_wrong else None
        settle_rewards(group, weights=settings.reward_weights, wrong_index=wrong_index)
        self.report.completed.append(CompletedGroup.of(group))
        if settings.scored_at_batch_time:
            self.ready.add(group)
        elif not has_baseline(group):
            self.report.fillers.append((group, Outcome.SET_ASIDE))
        elif settings.dynamic_sampling and not is_mixed(
            group,
            weights=settings.reward_weights,
            is_truncated_masked=settings.truncated_is_masked,
            is_per_function=settings.normalizes_per_function,
        ):
            self.report.fillers.append((group, Outcome.FILTERED))
        else:
            self.ready.add(group)

    def _take_batch(self, version: int) -> list[RolloutGroup]:
        batch = self.ready.take(self.schedule.groups_per_batch)
        num_missing = self.schedule.groups_per_batch - len(batch)
        fillers, rest = self.report.fillers[:num_missing], self.report.fillers[num_missing:]
        if num_missing:
            self.report.num_filled = num_missing
            logger.warning(
                "Only %d of %d groups have differing rewards after %d rounds: the batch is filled with %d groups "
                "without a gradient. The data is too easy or too hard for the policy, or the reward function fails. "
                "Check `accuracy` and `verifier/failed`, clean the data, or raise `num_generations`.",
                len(batch),
                self.schedule.groups_per_batch,
                self.report.num_rounds,
                num_missing,
            )
        self._close_fillers(rest, version)
        if self.schedule.is_on_policy:  # a surplus would be stale in the next step
            for group in self.ready.take(len(self.ready)):
                self._close(group, Outcome.FILTERED, version)
        self.report.fillers = []
        batch += [group for group, _ in fillers]
        if self.schedule.is_on_policy and any(group.admitted_version != version for group in batch):
            raise RuntimeError("A rollout of another policy is in an on-policy batch: this is a bug in trl_ulorl.")
        order = balanced_order([group.num_tokens for group in batch], self._num_ranks)
        self.training = [batch[index] for index in order]
        return self.training

    def _close_fillers(self, fillers: Sequence[tuple[RolloutGroup, Outcome]], version: int) -> None:
        for group, outcome in fillers:
            self._close(group, outcome, version)

    def _close(self, group: RolloutGroup, outcome: Outcome, version: int) -> None:
        self.ledger.close(group, outcome)
        self._on_close(group, outcome, version)

    # ------------------------------------------------------------------------------------------------ metrics, state

    def metrics(self, version: int) -> dict[str, float]:
        """Return the step's metrics over all ranks."""
        return {
            "rollout/in_flight": float(sum(self._open_by_owner)),
            "rollout/unfinished_groups": float(len(self._tickets)),
            "rollout/ready_groups": float(len(self.ready)),
            "rollout/oldest_group_age": float(
                max((version - ticket.admitted_version for ticket in self._tickets.values()), default=0)
            ),
            "rollout/epoch": self.prompts.epoch,
            "verifier/failed": float(self.num_failed_rewards),
            **step_metrics(self.report),
            **batch_metrics(self.training, version),
            **completed_metrics(self.report.completed, self._settings.correctness_index),
            **ledger_metrics(self.ledger_balance()),
        }

    @property
    def fixed_settings(self) -> dict[str, Any]:
        """What may not change while groups are held."""
        return {
            "num_generations": self._settings.num_generations,
            "max_completion_length": self._settings.max_completion_length,
            ON_POLICY: self.schedule.is_on_policy,
            "number of reward functions": len(self._settings.reward_weights),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what is alike on every rank, besides the groups held, as JSON values."""
        return {
            "settings": self.fixed_settings,
            "prompts": self.prompts.state_dict(),
            "ledger": self.ledger.state_dict(),
        }

    def take_up(
        self,
        *,
        unfinished: Sequence[RolloutGroup],
        ready: Sequence[RolloutGroup],
        training: Sequence[RolloutGroup],
        tickets: dict[int, Ticket],
        open_by_owner: Sequence[int],
        unfinished_tokens: int,
    ) -> None:
        """Take up groups of an earlier run, once prompts and ledger are at its state.

        Args:
            unfinished: Those that are decoded here, oldest first.
            ready: The experience pool.
            training: The batch that was being trained on.
            tickets: Every unfinished group, oldest first.
            open_by_owner: Unfinished rollouts by owner.
            unfinished_tokens: Tokens of the unfinished groups, over all ranks.

        Raises:
            RuntimeError: If the ledger does not balance with them.
            ValueError: If a prompt is not the one that its group was admitted with.
        """
        self._check_prompts([*unfinished, *ready])
        self._tickets = dict(tickets)
        self._open_by_owner = list(open_by_owner)
        self._unfinished_tokens = unfinished_tokens
        self.unfinished, self.ready, self.training = UnfinishedPool(), ExperiencePool(), list(training)
        for group in unfinished:
            self.unfinished.admit(group)
        for group in ready:
            self.ready.add(group)
        self.report = StepReport()
        self.ledger_balance()
        for group in unfinished if self._speaks else ():
            for rollout in group.rollouts:
                if rollout.is_finished and rollout.rewards is None:  # an error came before its rewards did
                    self.scorer.submit(self._render(group, rollout))
        if self._num_held > self.schedule.capacity:
            logger.warning(
                "%d groups are held, more than this run may hold (%d): a smaller batch or bound than that of the run that "
                "saved them. No prompt is admitted until there is room, and `max_staleness` may not hold until then.",
                self._num_held,
                self.schedule.capacity,
            )

    def _check_prompts(self, groups: Sequence[RolloutGroup]) -> None:
        prompts = self._tokenize([group.row_index for group in groups]) if groups else []
        for group, prompt in zip(groups, prompts, strict=True):
            if group.prompt_ids.tolist() != list(prompt.token_ids):
                raise ValueError(
                    f"the prompt in row {group.row_index} of the training set has other tokens than when group "
                    f"{group.group_id} was admitted. Resume with the same training set, tokenizer and chat template"
                )
            if group.max_length > prompt.max_length:
                raise ValueError(
                    f"group {group.group_id} may take {group.max_length} tokens, but now only {prompt.max_length} fit "
                    "behind its prompt. Resume with a model and an engine of as many positions"
                )
