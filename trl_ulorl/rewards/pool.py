"""Compare formulas in worker processes, under a hard limit of time and memory.

SIGALRM is no bound (main thread only, never inside C code, and the caller may need it), a thread can't be stopped, and
an executor of processes waits for hung work. Only killing a process ends it. So pairs go to a few processes that this
module starts, watches and replaces; a killed one costs the pair it was at.

Workers are plain child processes that run this package's `worker`, not `multiprocessing`'s: those import the caller's
main module anew, and are refused to daemonic processes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

TIME_LIMIT_SECONDS = 2.0
"""Wall time that one pair may take, and that all slow pairs of a batch may take together per worker."""

_MAX_WORKERS = 4
_START_SECONDS = 60.0
_FIRST_SECONDS = 0.1  # CPU time in which nearly every pair is decided; the others wait for the end of the batch
_LEAST_SECONDS = 0.05
_LEAST_WALL_SECONDS = 1.0  # on a busy machine little CPU time takes long
_KILL_SECONDS = 0.2  # what a worker has to interrupt itself
_WINDOW = 8  # pairs under way per worker, few enough for a pipe
_START_ATTEMPTS = 3


class Outcome(NamedTuple):
    """What became of a pair.

    Attributes:
        kind: `decided`, `refused`, `timeout` or `error`.
        equivalent: Whether the formulas are equal, where decided.
        presumed: Whether that is only presumed.
        detail: Why nothing was decided.
    """

    kind: str
    equivalent: bool = False
    presumed: bool = False
    detail: str = ""


_TIMED_OUT = Outcome("timeout", detail=f"not done within {TIME_LIMIT_SECONDS:g} seconds")


def warm_pool() -> None:
    """Start a worker of this process's pool, if there is none, without waiting for it."""
    _POOL.warm()


def compare_in_pool(pairs: Sequence[tuple[str, str]]) -> list[Outcome]:
    """Compare pairs of formulas in the pool of this process, which the first call starts.

    May be called from any thread; batches of several threads follow each other. Starts no timer and no handler of
    signals in this process.

    Args:
        pairs: Formulas, the prediction's and the reference's.

    Returns:
        One outcome per pair. A batch takes at most its own time and `TIME_LIMIT_SECONDS` per worker for all pairs that
        would not end.
    """
    return _POOL.compare(pairs) if pairs else []


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    started: float
    is_ready: bool = False
    is_loading: bool = False
    buffer: bytes = b""
    under_way: deque[tuple[int, float, float]] = field(default_factory=deque)  # pair, its CPU and wall seconds
    since: float = 0.0  # since when the first of them is under way

    def send(self, number: int, pair: tuple[str, str], cpu_seconds: float, wall_seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([number, *pair, cpu_seconds, wall_seconds]).encode("ascii") + b"\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        """Kill the process, if it still runs, and let go of it."""
        with contextlib.suppress(OSError):
            self.process.kill()
        self.let_go()
        self.process.wait()

    def let_go(self) -> None:
        """Close our ends of the pipes: a worker ends when its input does."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError, ValueError):
                    pipe.close()


class _Batch:
    """Pairs that are still to be compared, and what has been found."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self.pairs = pairs
        self.outcomes: list[Outcome | None] = [None] * len(pairs)
        self.waiting = deque(range(len(pairs)))
        self.slow: deque[tuple[int, float]] = deque()  # with the time that was not enough
        self.wasted = 0.0  # seconds, of all workers together, on pairs that did not end

    def settle(self, number: int, outcome: Outcome) -> None:
        if self.outcomes[number] is None:
            self.outcomes[number] = outcome

    @property
    def is_done(self) -> bool:
        return all(outcome is not None for outcome in self.outcomes)


class WorkerPool:
    """A few worker processes, started when needed and replaced when they die.

    Args:
        num_workers: How many processes compare at the same time.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._failed_starts = 0

    def compare(self, pairs: Sequence[tuple[str, str]]) -> list[Outcome]:
        """Compare a batch: see `compare_in_pool`."""
        with self._lock:
            batch = _Batch(pairs)
            self._failed_starts = 0
            try:
                self._run(batch)
            except BaseException:
                self._stop_all()  # replies that nobody waits for must not reach the next batch
                raise
        return [outcome or Outcome("error", detail="no reply") for outcome in batch.outcomes]

    def warm(self) -> None:
        """Start a worker if there is none, without waiting for it."""
        if not self._workers and self._lock.acquire(blocking=False):
            try:
                if not self._workers:
                    self._workers.append(_start_worker())
            except OSError:
                logger.debug("No worker could be started ahead of time.", exc_info=True)
            finally:
                self._lock.release()

    def close(self) -> None:
        """End all workers; the next batch starts new ones."""
        with self._lock:
            self._stop_all()

    def forget(self) -> None:
        """Leave the workers to the process that we were forked from."""
        for worker in self._workers:
            worker.let_go()
            worker.process.returncode = 0  # not our child: nothing to wait for
        self._workers = []

    def _stop_all(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers = []

    # one batch

    def _run(self, batch: _Batch) -> None:
        while not batch.is_done:
            self._start_missing(batch)
            if not self._workers:
                for number in range(len(batch.pairs)):
                    batch.settle(number, Outcome("error", detail=_NOT_STARTED))
                return
            for worker in list(self._workers):
                self._feed(worker, batch)
            if not batch.is_done:  # what has no time left is settled without a worker
                self._wait(batch)

    def _start_missing(self, batch: _Batch) -> None:
        wanted = min(self.num_workers, sum(outcome is None for outcome in batch.outcomes))
        while len(self._workers) < wanted and self._failed_starts < _START_ATTEMPTS:
            try:
                self._workers.append(_start_worker())
            except OSError:
                self._failed_starts += 1

    def _budget(self, batch: _Batch) -> float:
        """Seconds that a worker may still spend on pairs that do not end."""
        # Of a batch a quarter is kept for what it costs to interrupt and to send again.
        limit = TIME_LIMIT_SECONDS if len(batch.pairs) == 1 else 0.75 * TIME_LIMIT_SECONDS
        return max(limit - batch.wasted / max(len(self._workers), 1), 0.0)

    def _feed(self, worker: _Worker, batch: _Batch) -> None:
        if not worker.is_ready:
            return
        while batch.waiting and len(worker.under_way) < _WINDOW:
            seconds = max(min(_FIRST_SECONDS, self._budget(batch) / 8), _LEAST_SECONDS)
            self._send(worker, batch, batch.waiting.popleft(), seconds, max(self._budget(batch), _LEAST_WALL_SECONDS))
        if worker.under_way or batch.waiting:
            return
        while batch.slow and not worker.under_way:
            number, tried = batch.slow.popleft()
            share = self._budget(batch) / max(1.0, (len(batch.slow) + 1) / len(self._workers))
            seconds = max(share, min(2 * tried, self._budget(batch)))
            if seconds <= tried:
                batch.settle(number, _TIMED_OUT)
                continue
            self._send(worker, batch, number, seconds, max(min(2 * seconds, self._budget(batch)), seconds))

    def _send(self, worker: _Worker, batch: _Batch, number: int, cpu_seconds: float, wall_seconds: float) -> None:
        if not worker.under_way:
            worker.since = time.monotonic()
        worker.under_way.append((number, cpu_seconds, wall_seconds))
        with contextlib.suppress(OSError):  # if it died, its output ends: see _wait
            worker.send(number, batch.pairs[number], cpu_seconds, wall_seconds)

    def _deadline(self, worker: _Worker, batch: _Batch) -> float:
        if not worker.is_ready:
            return worker.started + _START_SECONDS
        if not worker.under_way:
            return float("inf")
        if worker.is_loading:
            return worker.since + _START_SECONDS
        return worker.since + worker.under_way[0][2] + _KILL_SECONDS

    def _wait(self, batch: _Batch) -> None:
        """Take what the workers have to say, and kill those that are late."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                assert worker.process.stdout is not None
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            deadline = min(self._deadline(worker, batch) for worker in self._workers)
            timeout = None if deadline == float("inf") else max(deadline - time.monotonic(), 0.0)
            for key, _ in selector.select(timeout):
                self._receive(key.data, batch)
        now = time.monotonic()
        for worker in list(self._workers):
            if now >= self._deadline(worker, batch):
                self._replace(worker, batch, is_late=True)

    def _receive(self, worker: _Worker, batch: _Batch) -> None:
        assert worker.process.stdout is not None
        data = os.read(worker.process.stdout.fileno(), 65536)
        if not data:
            self._replace(worker, batch, is_late=False)
            return
        *lines, worker.buffer = (worker.buffer + data).split(b"\n")
        for line in lines:
            if line in (b"loading", b"loaded"):
                self._note_loading(worker, batch, is_loading=line == b"loading")
                continue
            if not worker.is_ready:
                worker.is_ready = True
                continue
            self._take_reply(worker, batch, json.loads(line))

    def _note_loading(self, worker: _Worker, batch: _Batch, *, is_loading: bool) -> None:
        """The time of the pair that a worker is at starts when it has loaded what it needs."""
        now = time.monotonic()
        if not is_loading and worker.under_way and len(batch.pairs) == 1:
            batch.wasted += min(now - worker.since, 0.25 * TIME_LIMIT_SECONDS)
        worker.is_loading, worker.since = is_loading, now

    def _take_reply(self, worker: _Worker, batch: _Batch, reply: list[Any]) -> None:
        number, kind, *rest = reply
        _, seconds, _ = worker.under_way.popleft()
        now = time.monotonic()
        if kind == "out of time":
            batch.wasted += min(now - worker.since, seconds)  # CPU time: on a busy machine all takes longer
            batch.slow.append((number, seconds))
        elif kind == "decided":
            batch.settle(number, Outcome("decided", *rest))
        else:
            batch.settle(number, Outcome(kind, detail=rest[0]))
        worker.since = now

    def _replace(self, worker: _Worker, batch: _Batch, *, is_late: bool) -> None:
        """Bury a worker; the pair it was at is lost, those behind it are dealt again."""
        worker.stop()
        self._workers.remove(worker)
        if not worker.is_ready:
            self._failed_starts += 1
            return
        spent = max(time.monotonic() - worker.since, 0.0)
        if worker.under_way:
            number, seconds, _ = worker.under_way.popleft()
            batch.wasted += spent
            late = is_late or spent >= seconds
            batch.settle(number, _TIMED_OUT if late else Outcome("error", detail="its worker process died"))
        for number, *_ in reversed(worker.under_way):
            batch.waiting.appendleft(number)


_NOT_STARTED = "no worker process could be started; `python -c 'import trl_ulorl.rewards.worker'` in the same environment says why"
_WORKER_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from trl_ulorl.rewards.worker import main; main()"
)


def _start_worker() -> _Worker:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", _WORKER_CODE, json.dumps([path for path in sys.path if isinstance(path, str)])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # an interrupt from the keyboard is for the caller
    )
    return _Worker(process, started=time.monotonic())


def num_workers() -> int:
    """Number of processes that compare at the same time: the cores this process may use, at most four."""
    return max(1, min(_MAX_WORKERS, len(os.sched_getaffinity(0))))


_POOL = WorkerPool(num_workers())


def _renew_after_fork() -> None:
    """Give a forked child a pool of its own; the lock may have been held by a thread that it doesn't have."""
    global _POOL
    _POOL.forget()
    _POOL = WorkerPool(num_workers())


def _close() -> None:
    _POOL.close()


os.register_at_fork(after_in_child=_renew_after_fork)
atexit.register(_close)
