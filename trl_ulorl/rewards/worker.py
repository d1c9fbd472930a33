"""A worker process that compares formulas, one pair after the other, and may be killed at any time.

Started by `pool`; it speaks lines of JSON: `[number, left, right, CPU seconds, wall seconds]` in, `[number, outcome, ...]`
out. It limits its own memory, interrupts itself where it can, and ends where it can't even if its parent is gone.
"""

import contextlib
import json
import os
import re
import resource
import signal
import sys
import time
from importlib.util import find_spec
from types import FrameType
from typing import Any, TextIO

from .compare import compare_formulas
from .errors import Refused

_MEMORY_BYTES = 300 * 2**20  # beyond what the worker holds when it is ready
_GRACE_SECONDS = 3


class _OutOfTime(BaseException):
    """Raised into a comparison; no `except Exception` of a library stops it."""


class _Watch:
    """Limits on one comparison: interrupted after its seconds of CPU or wall time, ended if that does not help.

    A process of our own may have its signals: nothing else in it needs them.
    """

    def __init__(self) -> None:
        self.is_running = False
        signal.signal(signal.SIGPROF, self._interrupt)
        signal.signal(signal.SIGALRM, self._interrupt)

    def _interrupt(self, signal_number: int, frame: FrameType | None) -> None:
        if self.is_running:
            raise _OutOfTime

    def start(self, cpu_seconds: float, wall_seconds: float) -> None:
        end = int(time.process_time() + wall_seconds) + _GRACE_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        self.is_running = True
        # Again and again, since a library may swallow the first one.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds, 0.05)
        signal.setitimer(signal.ITIMER_REAL, wall_seconds, 0.05)

    def stop(self) -> None:
        self.is_running = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """Serve until the input ends."""
    # Replies go where standard output went; what a library prints must not.
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    compare_formulas("x+1", "1+x")
    _limit_memory()
    watch = _Watch()
    replies.write("ready\n")
    replies.flush()
    is_loaded = False
    for line in sys.stdin:
        number, left, right, cpu_seconds, wall_seconds = json.loads(line)
        if not is_loaded and (_ALGEBRA.search(left) or _ALGEBRA.search(right)):
            _load_algebra(replies)
            is_loaded = True
        reply = _compare(watch, left, right, cpu_seconds, wall_seconds)
        replies.write(json.dumps([number, *reply]) + "\n")
        replies.flush()


_ALGEBRA = re.compile(r"\\(?:[io]*int|sum|prod|lim|partial|nabla|det|sup|inf|frac\{d)")


def _load_algebra(replies: TextIO) -> None:
    """Import math-verify and SymPy, which takes a second that no pair shall pay for."""
    replies.write("loading\n")
    replies.flush()
    resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
    if find_spec("math_verify") is not None:
        with contextlib.suppress(Exception):
            from .algebra import same_by_algebra

            same_by_algebra(r"\int_0^1 x\,dx", r"\frac{1}{2}")
    _limit_memory()
    replies.write("loaded\n")
    replies.flush()


def _compare(watch: _Watch, left: str, right: str, cpu_seconds: float, wall_seconds: float) -> list[Any]:
    try:
        try:
            watch.start(cpu_seconds, wall_seconds)
            comparison = compare_formulas(left, right)
        finally:
            watch.stop()
    except _OutOfTime:
        return ["out of time"]
    except Refused as refusal:
        return ["refused", str(refusal)]
    except BaseException as error:  # noqa: BLE001 - whatever a pair raises, it costs that pair
        return ["error", type(error).__name__]
    return ["decided", bool(comparison.equivalent), comparison.presumed]


def _limit_memory() -> None:
    """Cap the address space a little above what is in use; an allocation beyond it raises `MemoryError`."""
    with open("/proc/self/statm", encoding="ascii") as status:
        in_use = int(status.read().split()[0]) * resource.getpagesize()
    limit = in_use + _MEMORY_BYTES
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    if most == resource.RLIM_INFINITY or limit < most:
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
