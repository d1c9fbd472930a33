"""A worker process that compares formulas, one pair after the other, and may be killed at any time.

Started by `pool`; it speaks lines of JSON: `[number, left, right, CPU seconds, wall seconds]` in, `[number, outcome, ...]`
out. It limits its own memory, interrupts itself where it can, and ends where it can't even if its parent is gone.
"""

import contextlib
import json
import os
import re
import resource
import select
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from types import FrameType
from typing import Any

from .compare import compare_formulas
from .errors import Refused

_MEMORY_BYTES = 300 * 2**20  # beyond what the worker holds when it is ready
_LOADING_BYTES = 200 * 2**20
_GRACE_SECONDS = 3
_IDLE_SECONDS = 0.05


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
    _limit_memory(_LOADING_BYTES + _MEMORY_BYTES)
    watch = _Watch()
    replies.write("ready\n")
    replies.flush()
    is_loaded = False
    for line in _lines():
        number, left, right, cpu_seconds, wall_seconds = json.loads(line) if line else (0, "", "", 0.0, 0.0)
        if not is_loaded and (not line or _ALGEBRA.search(left) or _ALGEBRA.search(right)):
            replies.write("loading\n")
            replies.flush()
            _load_algebra()
            is_loaded = True
            replies.write("loaded\n")
            replies.flush()
        if not line:
            continue
        reply = _compare(watch, left, right, cpu_seconds, wall_seconds)
        replies.write(json.dumps([number, *reply]) + "\n")
        replies.flush()


def _lines() -> Iterator[bytes]:
    """Lines of the input, and an empty one when there has been none for a while."""
    buffer = b""
    while True:
        *lines, buffer = buffer.split(b"\n")
        yield from lines
        if not buffer and not select.select([0], [], [], _IDLE_SECONDS)[0]:
            yield b""
            select.select([0], [], [])
        data = os.read(0, 65536)
        if not data:
            return
        buffer += data


_ALGEBRA = re.compile(r"\\(?:[io]*int|sum|prod|lim|partial|nabla|det|sup|inf|frac\{d)")


def _load_algebra() -> None:
    """Import math-verify and SymPy, and let the parser make its tables: a second or two that no pair shall pay for."""
    if find_spec("math_verify") is not None:
        from .algebra import parse

        for latex in _TYPICAL:
            with contextlib.suppress(Exception):
                parse(latex)
    _limit_memory(_MEMORY_BYTES)


_TYPICAL = (
    r"\frac{d}{dx}\int_0^{x}\sum_{n=0}^{\infty}\frac{t^n}{n!}dt",
    r"\lim_{n\to\infty}(1+\frac{1}{n})^n",
    r"\prod_{k=1}^{n-1}F_kF_{n-k-1}",
)


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


def _limit_memory(spare_bytes: int) -> None:
    """Cap the address space a little above what is in use; an allocation beyond it raises `MemoryError`."""
    with open("/proc/self/statm", encoding="ascii") as status:
        in_use = int(status.read().split()[0]) * resource.getpagesize()
    limit = in_use + spare_bytes
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    if most == resource.RLIM_INFINITY or limit < most:
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
