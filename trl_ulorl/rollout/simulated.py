"""An engine with a decode-time model and no language model: for the planner and for tests.

It knows only how long each rollout will become. That length is a function of the seed and of the rollout's serial number,
and the serial number travels in the completion itself: its first token is `SERIAL_BASE` plus the serial number, the others
count their own positions (1, 2, 3, ...), and the last is `EOS_ID`. So a later segment needs nothing but the request, and
whoever joins segments wrongly can see it in the ids.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .engine import DecodedSegment, DecodeRequest

SERIAL_BASE = 1 << 30  # ids of prompts and positions stay below
EOS_ID = 0
MIN_LENGTH = 2  # one token carries the serial number, one ends the completion
_BLOCK = 1024


DecodeTime = Callable[[int], float]


def linear_decode_time(step_seconds: float, sequence_seconds: float) -> DecodeTime:
    """Return the time in seconds of a decode step over `b` sequences, $t_0 + t_1 b$.

    Args:
        step_seconds: $t_0$: what a step takes however many sequences there are, the weights' way through the memory.
        sequence_seconds: $t_1$: what each sequence adds to it.
    """
    return lambda num_sequences: step_seconds + sequence_seconds * num_sequences


_GPU_LIKE = linear_decode_time(0.02, 0.000_01)


class SimulatedEngine:
    """Decodes nothing, in a simulated time.

    Lengths are log-normal, which has the long tail of reasoning traces: the mean is exp(sigma² / 2) times the median. Or
    they are drawn from a sample.

    Args:
        seed: Seed of the lengths.
        median_length: Tokens, the end-of-sequence token included.
        sigma: Standard deviation of the logarithm of the length; 0 makes all rollouts equally long.
        lengths: Lengths to draw from with replacement, in the place of log-normal ones: shape `(N,)`, or `(N, G)` where
            consecutive rollouts are a group of `G` and the lengths of a group are drawn together.
        decode_time: Seconds of a decode step over a number of sequences.
        prefill_seconds: Seconds per token of a prefix that is computed anew.
        prefill_quadratic_seconds: Seconds per square of its number of tokens: the attention among them.
        max_sequences: Sequences that decode side by side; others wait until one ends. None for no limit. A stream
            has none: there the caller decides.

    Attributes:
        seconds: Simulated time spent decoding so far.
        total_prefill_seconds: Part of it spent on prompts and prefixes.
        peak_tokens: Most tokens that decoding sequences had at a time: what a key-value cache has to hold.
        num_started: Rollouts started so far, the next serial number; set it to go on where another engine stopped.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        median_length: float = 8_192,
        sigma: float = 1.0,
        lengths: NDArray[np.int64] | None = None,
        decode_time: DecodeTime = _GPU_LIKE,
        prefill_seconds: float = 0.0,
        prefill_quadratic_seconds: float = 0.0,
        max_sequences: int | None = None,
    ) -> None:
        self.seconds = 0.0
        self.total_prefill_seconds = 0.0
        self.peak_tokens = 0
        self.num_started = 0
        self._seed = seed
        self._log_median = float(np.log(median_length))
        self._sigma = sigma
        self._lengths = None if lengths is None else lengths.reshape(len(lengths), -1)
        self._drawn: dict[int, NDArray[np.int64]] = {}  # rows of `lengths`, a block of draws at a time
        self._decode_time = decode_time
        self._prefill_seconds = prefill_seconds
        self._prefill_quadratic_seconds = prefill_quadratic_seconds
        self._max_sequences = max_sequences

    def planned_length(self, serial: int) -> int:
        """Return how many tokens a rollout has if no limit cuts it short."""
        if self._lengths is not None:
            group, index = divmod(serial, self._lengths.shape[1])
            return max(MIN_LENGTH, int(self._lengths[self._drawn_row(group), index]))
        draw = np.random.default_rng([self._seed, serial]).lognormal(self._log_median, self._sigma)
        return max(MIN_LENGTH, round(draw))

    def _drawn_row(self, group: int) -> int:
        assert self._lengths is not None
        block, place = divmod(group, _BLOCK)
        if block not in self._drawn:
            rng = np.random.default_rng([self._seed, block])
            self._drawn[block] = rng.integers(len(self._lengths), size=_BLOCK)
        return int(self._drawn[block][place])

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodedSegment]:
        """Continue every request to its planned length or its budget; results come in the order in which they end."""
        waiting = deque(enumerate(requests))
        limit = len(requests) if self._max_sequences is None else self._max_sequences
        with self.stream() as stream:
            while waiting or stream.num_open:
                while waiting and stream.num_open < limit:
                    stream.submit(*waiting.popleft())
                yield from stream.step()

    @contextmanager
    def stream(self) -> Iterator[SimulatedStream]:
        """Open a stream."""
        yield SimulatedStream(self)

    def decode_for(self, num_steps: int, num_sequences: int) -> None:
        """Let the time of decode steps pass."""
        self.seconds += num_steps * self._decode_time(num_sequences)

    def prefill(self, num_tokens: int) -> None:
        """Let the time pass that a prefix takes."""
        seconds = num_tokens * self._prefill_seconds + num_tokens**2 * self._prefill_quadratic_seconds
        self.seconds += seconds
        self.total_prefill_seconds += seconds

    def identify(self, token_ids: NDArray[np.int32]) -> tuple[int, int]:
        """Return the rollout's serial number and how many tokens it has; a prompt alone is given a new number."""
        marks = np.flatnonzero(token_ids >= SERIAL_BASE)
        if marks.size:
            return int(token_ids[marks[0]]) - SERIAL_BASE, token_ids.size - int(marks[0])
        self.num_started += 1
        return self.num_started - 1, 0


class SimulatedStream:
    """Jumps from one end of a rollout to the next."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.num_steps = 0
        self._engine = engine
        self._running: list[_Running] = []  # a heap: what ends first comes first
        self._tokens_before = 0  # tokens of the running sequences, less the steps that each joined after

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return len(self._running)

    def submit(self, key: int, request: DecodeRequest) -> None:
        """Start a sequence."""
        serial, start = self._engine.identify(request.token_ids)
        self._engine.prefill(request.token_ids.size)
        length = self._engine.planned_length(serial)
        stop = min(length, start + request.max_new_tokens)
        tokens_before = request.token_ids.size - self.num_steps
        self._tokens_before += tokens_before
        heapq.heappush(
            self._running,
            _Running(self.num_steps + stop - start, key, serial, start, self.num_steps, tokens_before, length),
        )

    def step(self) -> list[DecodedSegment]:
        """Decode until the next sequence ends; return all that end then."""
        num_steps = self._running[0].end_step - self.num_steps
        self._engine.decode_for(num_steps, len(self._running))
        self.num_steps += num_steps
        num_tokens = self._tokens_before + len(self._running) * self.num_steps
        self._engine.peak_tokens = max(self._engine.peak_tokens, num_tokens)
        ended = []
        while self._running and self._running[0].end_step == self.num_steps:
            running = heapq.heappop(self._running)
            self._tokens_before -= running.tokens_before
            ended.append(self._segment(running))
        return ended

    def interrupt(self) -> list[DecodedSegment]:
        """Stop every sequence; the last one that came in may have no token yet."""
        stopped, self._running, self._tokens_before = sorted(self._running), [], 0
        return [self._segment(running) for running in stopped if running.first_step < self.num_steps]

    def _segment(self, running: _Running) -> DecodedSegment:
        start, stop = running.start, running.start + self.num_steps - running.first_step
        token_ids = np.arange(start, stop)
        if start == 0:
            token_ids[0] = SERIAL_BASE + running.serial
        if stop == running.length:
            token_ids[-1] = EOS_ID
        logps = per_token_logps(running.serial, start, stop)
        return DecodedSegment(running.key, token_ids, logps, is_stopped=stop == running.length)


class _Running(NamedTuple):
    """A sequence being decoded: its last step, its key and serial number, and what it was when it came in.

    `start` are the tokens of its completion then, `tokens_before` all its tokens less the steps before it; `length` is
    the planned one.
    """

    end_step: int
    key: int
    serial: int
    start: int
    first_step: int
    tokens_before: int
    length: int


def per_token_logps(serial: int, start: int, stop: int) -> NDArray[np.float64]:
    """Return log-probabilities that tell rollouts and positions apart: between -1 and 0, shape `(stop - start,)`."""
    positions = np.arange(start, stop, dtype=np.float64)
    return np.asarray(-((serial * 0.618_034 + positions * 0.414_214) % 1))
