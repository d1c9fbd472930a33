"""The continuous schedule: a fixed number of slots, each of which is refilled as soon as its rollout has ended.

A rollout step opens a stream of the engine and keeps its slots busy until a batch of groups is complete; then the rest
is interrupted and keeps its tokens. Groups of equal rewards don't count, so a step has several rounds where there are
such groups: a round ends when as many groups are complete as are missing, and the stream decodes on in the next one.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack

import numpy as np

from .collector import MAX_REFILL_ROUNDS, ExperienceCollector
from .engine import DecodeRequest, DecodeStream, StreamingEngine
from .pool import Rollout, RolloutGroup
from .report import Work
from .schedule import ContinuousSchedule

POLL_STEPS = 32  # steps of an engine between two messages of several ranks


class ContinuousCollector(ExperienceCollector):
    """Keeps the slots busy; takes the arguments of `ExperienceCollector`, with a `StreamingEngine`."""

    schedule: ContinuousSchedule
    engine: StreamingEngine
    _stream: DecodeStream | None = None

    def _fill_batch(self, version: int, num_batches_left: int | None) -> None:
        with ExitStack() as self._open_streams:
            try:
                super()._fill_batch(version, num_batches_left)
                if self._stream is not None:  # a step that finds its batch in the pool opens none
                    self._run_round(version, lambda: self._close_stream(version))
            finally:
                self._stream = None

    @property
    def _is_late(self) -> bool:
        num_batches = self._settings.num_segments + MAX_REFILL_ROUNDS
        return len(self.report.completed) >= num_batches * self.schedule.groups_per_batch

    def _advance(self, version: int, num_batches_left: int | None) -> Work:
        stream = self._stream or self._open_stream()
        due = self._due_groups(version)
        num_missing = self.schedule.groups_per_batch - len(self.ready)
        if self._is_late:
            num_missing -= len(self.report.fillers)
        self._prefilled_tokens = self._busy_steps = 0
        first_step = self._counted_steps = stream.num_steps
        while True:
            open_by_owner, is_done = self._poll(due, num_missing)
            if is_done:
                break
            groups_before = self.ledger.groups["admitted"]
            self._admit_for_slots(open_by_owner, version, num_batches_left)
            if not sum(open_by_owner) and self.ledger.groups["admitted"] == groups_before:
                break  # with `drain`: all that will ever be complete is
            next_poll = stream.num_steps + (1 if self._num_ranks == 1 else POLL_STEPS)
            while stream.num_steps < next_poll:
                self._fill_slots(stream)
                if not self._decoding_rollouts:
                    break
                self._step(stream, version)
        return self._work(self._counted_steps - first_step)

    def _open_stream(self) -> DecodeStream:
        with self._decoding():  # the engine may have to load the policy's weights first
            stream = self._stream = self._open_streams.enter_context(self.engine.stream())
        self._waiting = deque(self.unfinished.open_rollouts())
        self._decoding_rollouts: dict[int, tuple[RolloutGroup, Rollout]] = {}
        # None, unless an error was caught before they were sorted.
        self._complete = {group.group_id for group in self.unfinished.groups if group.is_complete}
        self._num_submitted = 0
        return stream

    def _poll(self, due: set[int], num_missing: int) -> tuple[list[int], bool]:
        """Return every rank's unfinished rollouts, and whether the groups that are missing or due are complete."""
        due_here = sum(self._tickets[group_id].owner == self._owner for group_id in due - self._complete)
        states = self._tell(
            {
                "error": None,
                "open": len(self._waiting) + len(self._decoding_rollouts),
                "complete": len(self._complete),
                "due": due_here,
                "stop": self._should_stop(),
            }
        )
        # One at least: where groups are missing only because `drain` holds fillers back, none would be decoded.
        is_done = sum(s["complete"] for s in states) >= max(1, num_missing) and not any(s["due"] for s in states)
        is_done |= self._is_stopping
        return [state["open"] for state in states], is_done

    def _admit_for_slots(self, open_by_owner: list[int], version: int, num_batches_left: int | None) -> None:
        if self._is_late and num_batches_left is not None:
            return
        room = self.schedule.room(num_held=self._num_held, num_batches_left=num_batches_left)
        # One process polls after each step; several do so only now and then.
        owners = self.schedule.admissions(
            open_by_owner, self._settings.num_generations, room, has_reserve=self._num_ranks > 1
        )
        for group in self._admit(owners, version):
            self._waiting.extend((group, rollout) for rollout in group.rollouts)

    def _fill_slots(self, stream: DecodeStream) -> None:
        num_slots = self.schedule.slots_of_rank(len(self._open_by_owner))
        while self._waiting and len(self._decoding_rollouts) < num_slots:
            group, rollout = self._waiting.popleft()
            token_ids = np.concatenate([group.prompt_ids, rollout.completion_ids])
            if rollout.segments:
                self._prefilled_tokens += token_ids.size
            with self._decoding():
                stream.submit(self._num_submitted, DecodeRequest(token_ids, group.max_length - rollout.num_tokens))
            self._decoding_rollouts[self._num_submitted] = (group, rollout)
            self._num_submitted += 1

    def _step(self, stream: DecodeStream, version: int) -> None:
        num_decoding = len(self._decoding_rollouts)
        try:
            with self._decoding():
                ended = stream.step()
        except Exception:
            self._interrupt(stream, version)  # what has arrived is in the pool, for whoever catches the error
            raise
        # Counted here only: a served engine decodes on while rollouts are admitted and ranks wait for each other.
        self._busy_steps += (stream.num_steps - self._counted_steps) * num_decoding
        self._counted_steps = stream.num_steps
        for decoded in ended:
            group, rollout = self._decoding_rollouts.pop(decoded.request_index)
            self._extend(group, rollout, decoded, version)
            if group.is_complete:
                self._complete.add(group.group_id)

    def _interrupt(self, stream: DecodeStream, version: int) -> None:
        """Take back what still decodes, with the tokens that it has."""
        with self._decoding():
            interrupted = stream.interrupt()
        for decoded in interrupted:
            self._extend(*self._decoding_rollouts[decoded.request_index], decoded, version)

    def _close_stream(self, version: int) -> Work:
        assert self._stream is not None
        self._prefilled_tokens = self._busy_steps = 0
        self._interrupt(self._stream, version)
        with self._decoding():
            self._open_streams.close()
        return self._work(0)

    def _work(self, num_steps: int) -> Work:
        self._complete.clear()  # they leave the pool once the round ends
        num_slots = self.schedule.slots_of_rank(len(self._open_by_owner))
        return Work(num_steps, num_slots, self._busy_steps, self._prefilled_tokens)
