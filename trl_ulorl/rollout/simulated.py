"""An engine with a decode-time model and no language model: for the planner and for tests.

It knows only how long each rollout will become. That length is a function of the seed and of the rollout's serial number,
and the serial number travels in the completion itself: its first token is `SERIAL_BASE` plus the serial number, the others
count their own positions (1, 2, 3, ...), and the last is `EOS_ID`. So a later segment needs nothing but the request, and
whoever joins segments wrongly can see it in the ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .engine import DecodedSegment, DecodeRequest

SERIAL_BASE = 1 << 30  # ids of prompts and positions stay below
EOS_ID = 0
MIN_LENGTH = 2  # one token carries the serial number, one ends the completion


class SimulatedEngine:
    """Decodes nothing, in a simulated time.

    Lengths are log-normal, which has the long tail of reasoning traces: the mean is exp(sigma² / 2) times the median. All
    requests of a call decode side by side, and a step over `b` sequences takes $t_0 + t_1 b$: a call takes $t_0$ for each
    step of its longest segment and $t_1$ for each token.

    Args:
        seed: Seed of the lengths.
        median_length: Tokens, the end-of-sequence token included.
        sigma: Standard deviation of the logarithm of the length; 0 makes all rollouts equally long.
        step_seconds: $t_0$: what a decode step takes however many sequences there are, the weights' way through the memory.
        sequence_seconds: $t_1$: what each sequence adds to a step.

    Attributes:
        seconds: Simulated time spent decoding so far.
        num_started: Rollouts started so far, the next serial number; set it to go on where another engine stopped.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        median_length: float = 8_192,
        sigma: float = 1.0,
        step_seconds: float = 0.02,
        sequence_seconds: float = 0.000_01,
    ) -> None:
        self.seconds = 0.0
        self.num_started = 0
        self._seed = seed
        self._log_median = float(np.log(median_length))
        self._sigma = sigma
        self._step_seconds = step_seconds
        self._sequence_seconds = sequence_seconds

    def planned_length(self, serial: int) -> int:
        """Return how many tokens a rollout has if no limit cuts it short."""
        draw = np.random.default_rng([self._seed, serial]).lognormal(self._log_median, self._sigma)
        return max(MIN_LENGTH, round(draw))

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodedSegment]:
        """Continue every request to its planned length or its budget; results come in the order in which they end."""
        segments = [self._continue(index, request) for index, request in enumerate(requests)]
        lengths = [segment.token_ids.size for segment in segments]
        self.seconds += self._step_seconds * max(lengths, default=0) + self._sequence_seconds * sum(lengths)
        yield from sorted(segments, key=lambda segment: segment.token_ids.size)

    def _continue(self, index: int, request: DecodeRequest) -> DecodedSegment:
        serial, start = self._identify(request.token_ids)
        length = self.planned_length(serial)
        stop = min(length, start + request.max_new_tokens)
        token_ids = np.arange(start, stop)
        token_ids[token_ids == 0] = SERIAL_BASE + serial
        token_ids[token_ids == length - 1] = EOS_ID
        return DecodedSegment(index, token_ids, per_token_logps(serial, start, stop), is_stopped=stop == length)

    def _identify(self, token_ids: NDArray[np.int32]) -> tuple[int, int]:
        """Return the rollout's serial number and how many tokens it has; a prompt alone is given a new number."""
        marks = np.flatnonzero(token_ids >= SERIAL_BASE)
        if marks.size:
            return int(token_ids[marks[0]]) - SERIAL_BASE, token_ids.size - int(marks[0])
        self.num_started += 1
        return self.num_started - 1, 0


def per_token_logps(serial: int, start: int, stop: int) -> NDArray[np.float64]:
    """Return log-probabilities that tell rollouts and positions apart: between -1 and 0, shape `(stop - start,)`."""
    positions = np.arange(start, stop, dtype=np.float64)
    return np.asarray(-((serial * 0.618_034 + positions * 0.414_214) % 1))
