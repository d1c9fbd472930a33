"""Score rollouts as they end, in a thread of their own, while others decode.

Each rollout is scored once, on its own rank and without a collective: ranks hold uneven numbers of finished rollouts. What
a reward function returned and logged stays with the rollout and is replayed when its batch is trained on. A failing
reward function costs the sample that it fails on, not the run.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from .pool import Finish, Int32Array, Rollout

logger = logging.getLogger(__name__)

SLOW_SECONDS = 300  # of waiting for rewards before it is said
MAX_WARNINGS = 10  # per reward function; further failures are counted only
# Rollouts on which a reward function may fail before it has given a single reward: then it is the function, or what it
# is called with, and no step would have a gradient.
MAX_FIRST_FAILURES = 64
MAX_ROLLOUTS = 256  # in a call: their ids are lists there, of 36 bytes a token


@dataclass(frozen=True, slots=True)
class RewardSource:
    """A reward function and its name."""

    name: str
    func: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One finished rollout as reward functions see it.

    Args:
        rollout: Receives the rewards.
        prompt: The row's prompt, a string or messages.
        completion: The decoded completion, a string or messages.
        completion_ids: Its token ids, an array while it waits: a list of ints takes ten times the memory.
        columns: The row's other columns.
    """

    rollout: Rollout
    prompt: Any
    completion: Any
    completion_ids: Int32Array
    columns: dict[str, Any]


@dataclass(slots=True)
class _Score:
    value: float = math.nan
    has_failed: bool = False
    logs: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)


class RewardScorer:
    """Runs reward functions, synchronous and asynchronous ones, in one thread with one event loop.

    Args:
        sources: The reward functions, in TRL's calling form. Only one call is under way at a time.
        get_trainer_state: Returns what is passed on as `trainer_state`.
        truncated_is_wrong: Index of the correctness function, which is not called for truncated rollouts but gives
            them 0 (section 3.5 of the paper); None calls it for all.
    """

    def __init__(
        self,
        sources: Sequence[RewardSource],
        *,
        get_trainer_state: Callable[[], Any] = lambda: None,
        truncated_is_wrong: int | None = None,
    ) -> None:
        self._sources = list(sources)
        self._get_trainer_state = get_trainer_state
        self._truncated_is_wrong = truncated_is_wrong
        self.num_failures: Counter[str] = Counter()
        self._has_worked: set[str] = set()  # names of functions that gave a reward
        self._loop = asyncio.new_event_loop()
        self._inbox: asyncio.Queue[tuple[RewardInput, Future[None]]] = asyncio.Queue()
        self._open: list[Future[None]] = []
        self._is_closing = False
        # A daemon, so that a reward function that hangs can't keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name="trl_ulorl-rewards", daemon=True)
        self._thread.start()

    def add(self, source: RewardSource) -> int:
        """Add a reward function and return its index; before anything is submitted."""
        self._sources.append(source)
        return len(self._sources) - 1

    def submit(self, item: RewardInput) -> None:
        """Have a finished rollout scored; returns at once."""
        future: Future[None] = Future()
        self._open.append(future)
        self._loop.call_soon_threadsafe(self._inbox.put_nowait, (item, future))

    def wait(self) -> None:
        """Return once all that was submitted is scored."""
        open_futures, self._open = self._open, []
        for future in open_futures:
            while not futures.wait([future], timeout=SLOW_SECONDS).done:
                logger.warning(
                    "Rewards of %d rollouts are not there after %d s more: a reward function is slow or hangs. The step "
                    "waits for it.",
                    sum(not each.done() for each in open_futures),
                    SLOW_SECONDS,
                )
            future.result()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the event loop of the reward functions and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """End the thread; what is under way is given up."""
        self._is_closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(self._serve_forever())
        self._loop.run_forever()  # until `close`
        task.cancel()
        self._loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        self._loop.close()

    async def _serve_forever(self) -> None:
        while True:  # a call for each turn, so that no scored completion is held while waiting for the next
            await self._serve_next()

    async def _serve_next(self) -> None:
        waiting = [await self._inbox.get()]
        while not self._inbox.empty() and len(waiting) < MAX_ROLLOUTS:  # one call for all that ended meanwhile
            waiting.append(self._inbox.get_nowait())
        try:
            await self._score([item for item, _ in waiting])
        except Exception as error:  # noqa: BLE001 - raised by `wait`
            for _, future in waiting:
                future.set_exception(error)
        else:
            for _, future in waiting:
                future.set_result(None)

    async def _score(self, items: list[RewardInput]) -> None:
        columns = await asyncio.gather(*(self._score_with(i, items) for i in range(len(self._sources))))
        for row, item in enumerate(items):
            scores = [column[row] for column in columns]
            item.rollout.rewards = np.array([score.value for score in scores], dtype=np.float32)
            item.rollout.has_failed_reward = any(score.has_failed for score in scores)
            for score in scores:
                item.rollout.logs.update(score.logs)
                for name, values in score.metrics.items():
                    item.rollout.metrics.setdefault(name, []).extend(values)

    async def _score_with(self, index: int, items: list[RewardInput]) -> list[_Score]:
        source = self._sources[index]
        if index != self._truncated_is_wrong:
            return await self._attempt(source, items)
        complete = [item for item in items if item.rollout.finish is not Finish.LENGTH]
        judged = iter(await self._attempt(source, complete) if complete else [])
        return [_Score(0.0) if item.rollout.finish is Finish.LENGTH else next(judged) for item in items]

    async def _attempt(self, source: RewardSource, items: list[RewardInput]) -> list[_Score]:
        """Call once for all items; where that fails, by group and then by rollout, until the bad ones are isolated."""
        try:
            return await self._call(source, items)
        except BaseException as error:  # `sys.exit` and math-verify's timeout too: the thread serves on
            if self._is_closing:
                raise
            if len(items) == 1:
                self._count_failure(source, items[0], error)
                if source.name not in self._has_worked and self.num_failures[source.name] >= MAX_FIRST_FAILURES:
                    raise RuntimeError(
                        f"Reward function `{source.name}` has failed on the first {self.num_failures[source.name]} rollouts, "
                        f"every time it was called ({type(error).__name__}: {error}; its traceback is above), so nothing "
                        "would be learnt. Correct it, or what it is called with, and start again or resume."
                    ) from error
                return [_Score(has_failed=True)]
        parts = [list(part) for _, part in groupby(items, key=lambda item: item.rollout.group_id)]
        if len(parts) == 1:
            parts = [[item] for item in items]
        return [score for part in parts for score in await self._attempt(source, part)]

    async def _call(self, source: RewardSource, items: list[RewardInput]) -> list[_Score]:
        scores = [_Score() for _ in items]

        def log_extra(column: str, values: Sequence[Any]) -> None:
            for score, value in zip(scores, values, strict=True):
                score.logs[column] = _plain(value)

        def log_metric(name: str, value: float) -> None:
            for score in scores:
                score.metrics.setdefault(name, []).append(float(value))

        output = source.func(
            prompts=[item.prompt for item in items],
            completions=[item.completion for item in items],
            completion_ids=[np.asarray(item.completion_ids).tolist() for item in items],
            trainer_state=self._get_trainer_state(),
            log_extra=log_extra,
            log_metric=log_metric,
            **{column: [item.columns[column] for item in items] for column in items[0].columns},
        )
        if inspect.isawaitable(output):
            output = await output
        values = [math.nan if value is None else float(value) for value in output]
        if len(values) != len(items):
            raise ValueError(f"it returned {len(values)} rewards for {len(items)} completions")
        for score, value in zip(scores, values, strict=True):
            score.value = value if math.isfinite(value) else math.nan
        self._has_worked.add(source.name)
        return scores

    def _count_failure(self, source: RewardSource, item: RewardInput, error: BaseException) -> None:
        self.num_failures[source.name] += 1
        if self.num_failures[source.name] <= MAX_WARNINGS:
            logger.warning(
                "Reward function `%s` failed on rollout %d of group %d (%s: %s). The rollout is left out of its group's "
                "baseline. Return None for completions that can't be judged; further failures are counted in "
                "`verifier/failed`.",
                source.name,
                item.rollout.index,
                item.rollout.group_id,
                type(error).__name__,
                error,
            )


def _plain(value: Any) -> Any:
    """Turn what a reward function logged into JSON values: it travels between ranks and into checkpoints."""
    if isinstance(value, np.generic):
        value = value.item()
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value
