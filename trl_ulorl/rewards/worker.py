"""A worker process that compares formulas, one pair after the other, and may be killed at any time.

Started by `pool`; it speaks lines of JSON: `[number, left, right, seconds]` in, `[number, outcome, ...]` out. It limits
its own memory, and its own life if a pair outlasts its time even where its parent is gone.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from importlib.util import find_spec
from types import FrameType
from typing import Any

from .compare import compare_formulas
from .errors import Refused

_MEMORY_BYTES = 300 * 2**20  # beyond what the worker holds when it is ready
_GRACE_SECONDS = 0.5


class _OutOfTime(BaseException):
    """Raised into a comparison; no `except Exception` of a library stops it."""


class _Watch:
    """Limits on one comparison: CPU seconds, after which it is interrupted, and a hard end if it can't be."""

    def __init__(self) -> None:
        self.is_running = False
        signal.signal(signal.SIGPROF, self._interrupt)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, also from within C code

    def _interrupt(self, signal_number: int, frame: FrameType | None) -> None:
        if self.is_running:
            raise _OutOfTime

    def start(self, seconds: float, hard_seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, hard_seconds + _GRACE_SECONDS)
        self.is_running = True
        # Again and again, since a library may swallow the first one.
        signal.setitimer(signal.ITIMER_PROF, seconds, 0.05)

    def stop(self) -> None:
        self.is_running = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """Serve until the input ends."""
    # Replies go where standard output went; what a library prints must not.
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    if find_spec("math_verify") is not None:
        with contextlib.suppress(Exception):
            from . import algebra

            algebra.same_by_algebra(r"\int_0^1 x\,dx", r"\frac{1}{2}")
    compare_formulas("x+1", "1+x")
    _limit_memory()
    watch = _Watch()
    replies.write("ready\n")
    replies.flush()
    for line in sys.stdin:
        number, left, right, seconds, hard_seconds = json.loads(line)
        reply = _compare(watch, left, right, seconds, hard_seconds)
        replies.write(json.dumps([number, *reply]) + "\n")
        replies.flush()


def _compare(watch: _Watch, left: str, right: str, seconds: float, hard_seconds: float) -> list[Any]:
    try:
        try:
            watch.start(seconds, hard_seconds)
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
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY or limit < most:
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
