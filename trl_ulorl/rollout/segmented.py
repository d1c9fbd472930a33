"""The paper's schedule: every round decodes all unfinished rollouts and new prompts by one segment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from .collector import ExperienceCollector
from .engine import DecodedSegment, DecodeRequest
from .report import Work
from .schedule import SegmentSchedule


class SegmentCollector(ExperienceCollector):
    """Runs rounds of one segment each; takes the arguments of `ExperienceCollector`."""

    schedule: SegmentSchedule

    def _advance(self, version: int, num_batches_left: int | None) -> Work:
        if not self._is_late or num_batches_left is None:
            self._admit_batch(version, num_batches_left)
        due = self._due_groups(version)
        work = self.unfinished.open_rollouts()
        requests = [
            DecodeRequest(
                token_ids=np.concatenate([group.prompt_ids, rollout.completion_ids]),
                max_new_tokens=self.schedule.token_budget(
                    num_tokens=rollout.num_tokens, max_length=group.max_length, is_due=group.group_id in due
                ),
            )
            for group, rollout in work
        ]
        prefilled = sum(
            request.token_ids.size for request, (_, rollout) in zip(requests, work, strict=True) if rollout.segments
        )
        longest = 0
        for decoded in self._timed(self.engine.decode(requests)):
            self._extend(*work[decoded.request_index], decoded, version)
            longest = max(longest, len(decoded.token_ids))
        return Work(longest, len(requests), self._decoded_tokens, prefilled)

    def _admit_batch(self, version: int, num_batches_left: int | None) -> None:
        num_new = self.schedule.num_admissions(
            num_held=self._num_held, num_ready=len(self.ready), num_batches_left=num_batches_left
        )
        load, owners = list(self._open_by_owner), []
        for _ in range(num_new):
            owner = min(range(len(load)), key=lambda rank: (load[rank], rank))
            load[owner] += self._settings.num_generations
            owners.append(owner)
        self._admit(owners, version)

    def _timed(self, decoded: Iterable[DecodedSegment]) -> Iterator[DecodedSegment]:
        """Count the time that the engine takes, without what is done with its results meanwhile."""
        iterator = iter(decoded)
        while True:
            with self._decoding():
                try:
                    segment = next(iterator)
                except StopIteration:
                    return
            yield segment
