"""Run programs that nobody has read, each in a process that can do nothing but compute.

    with Sandbox() as sandbox:
        (outcome,) = sandbox.run([Job("def f(a, b): return a + b", "f", [[1, 2], [3, 4]])])
    assert outcome == Outcome("returned", [3, 7])

A server process, started without the caller's environment, forks a child for every program. Before the child reads a line
of it, it gives up all system calls (seccomp) but those that computing takes: reading and writing what is open, which is one
pipe, memory, the clock, and the end. So a program opens no file and no socket, starts no process or thread, signals nobody
and waits for nothing. Its memory, its CPU time and its output are bounded. What it may import is what the server has loaded,
`MODULES`.

A program is not told what its answers should be. It returns values, and whoever asked compares them: there is nothing in its
process to read or to patch. What it sends back is read as JSON, never evaluated.

What this does not stop: a flaw of the kernel in one of the system calls that are left, and what programs can learn from the
time that they take. It needs Linux on x86-64; elsewhere no program is run, and each outcome is "not run".
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import platform
import queue
import resource
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

CPU_SECONDS = 1
WALL_SECONDS = 30.0  # a program can't wait, so only a machine that is too busy takes so long
MEMORY_BYTES = 256 * 2**20  # address space, the interpreter's own included
OUTPUT_BYTES = 64 * 2**10
MODULES = (  # noqa: SIM905 - reads better as one string
    "array base64 bisect calendar cmath collections copy dataclasses datetime decimal enum fractions functools hashlib heapq "
    "itertools json math numbers operator random re statistics string textwrap time typing unicodedata"
).split()
START_SECONDS = 60.0  # for the server to load them on a busy machine


class Job(NamedTuple):
    """A program and what to call it with.

    Attributes:
        code: Python source.
        function: Name of the function that is called.
        calls: Arguments of each call, as JSON values.
    """

    code: str
    function: str
    calls: Sequence[Sequence[Any]]


class Outcome(NamedTuple):
    """What became of a program.

    Attributes:
        kind: `returned`; `failed` (an error, an early end, more memory than it may have, an answer that is no JSON);
            `timeout`; `too long` (more output than it may have); `not run`, which is not the program's doing.
        values: What the calls returned, in their order, where `kind` is `returned`. A tuple comes back as a list.
        detail: Why a program was not run.
    """

    kind: str
    values: list[Any] | None = None
    detail: str = ""


# ---------------------------------------------------------------------------------------------------- the caller's side


class Sandbox:
    """Runs programs in parallel, one to a server process. Its servers start with the first job, and end with the caller.

    Args:
        num_servers: How many programs run at a time; None for one per core, at most four.
    """

    def __init__(self, num_servers: int | None = None) -> None:
        num_servers = num_servers or min(4, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(num_servers, thread_name_prefix="sandbox")
        self._servers: queue.SimpleQueue[_Server | None] = queue.SimpleQueue()
        for _ in range(num_servers):
            self._servers.put(None)

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Run programs and return what became of each, in their order; may be called from any thread."""
        return list(self._threads.map(self._run, jobs))

    def _run(self, job: Job) -> Outcome:
        server = self._servers.get()
        try:
            for _ in range(2):  # a server that something ended while it was idle costs no program its chance
                try:
                    server = server or _Server()
                    return server.run(job)
                except OSError as error:
                    reason = f"{type(error).__name__}: {error}"
                    if server is not None:
                        server.close()
                    server = None
            return Outcome("not run", detail=reason)
        finally:
            self._servers.put(server)

    def close(self) -> None:
        """End the servers."""
        self._threads.shutdown()
        while not self._servers.empty():
            server = self._servers.get()
            if server is not None:
                server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Server:
    """A server process, seen from the caller. Raises `OSError` if it is gone, or does not answer."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={
                "LC_ALL": "C.UTF-8",
                "PYTHONHASHSEED": "0",
            },  # none of the caller's secrets, and the same order of sets every time
            start_new_session=True,  # an interrupt from the keyboard is for the caller
        )
        self._answer(START_SECONDS)

    def run(self, job: Job) -> Outcome:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job).encode("ascii") + b"\n")
        self.process.stdin.flush()
        kind, text = json.loads(self._answer(WALL_SECONDS + 10))
        if kind == "not run":
            return Outcome(kind, detail=text)
        return _outcome_of(text, len(job.calls)) if kind == "ended" else Outcome(kind)

    def _answer(self, seconds: float) -> bytes:
        assert self.process.stdout is not None
        line, end = b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            if not select.select([self.process.stdout], [], [], max(end - time.monotonic(), 0))[0]:
                raise TimeoutError(f"the server of the sandbox did not answer within {seconds:g} seconds")
            data = os.read(self.process.stdout.fileno(), 2**16)
            if not data:
                raise ConnectionError("the server of the sandbox ended")
            line += data
        return line

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        self.process.kill()
        self.process.wait()


def _outcome_of(text: str, num_calls: int) -> Outcome:
    """Read what a program wrote, which may be anything."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return Outcome("failed")
    is_answer = isinstance(values, list) and len(values) == num_calls
    return Outcome("returned", values) if is_answer else Outcome("failed")


# ---------------------------------------------------------------------------------------------------- the server's side


def _serve() -> None:
    """Fork a child for each line of the input, until it ends."""
    for name in MODULES:
        importlib.import_module(name)
    json.dumps([0.5, "\N{SNOWMAN}"]), json.loads("[]")  # loaded now: a child can load nothing
    answers = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    answers.write(b"ready\n")
    answers.flush()
    for line in sys.stdin.buffer:
        answers.write(json.dumps(_run_in_child(Job(*json.loads(line)), null)).encode("ascii") + b"\n")
        answers.flush()


def _run_in_child(job: Job, null: int) -> tuple[str, str]:
    reading, writing = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        os.close(reading)
        os.close(writing)
        return "not run", f"no process could be forked: {error}"
    if not child:
        _be_child(job, writing, null)
    os.close(writing)
    try:
        output, is_late = _read(reading)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)  # no harm if it has ended: until the next line nobody else can have its number
        _, status, used = os.wait4(child, 0)
    if not output.startswith(_READY):
        return "not run", output.decode("utf-8", "replace") or f"the child ended with status {status}"
    if len(output) > OUTPUT_BYTES:
        return "too long", ""
    cpu_seconds = used.ru_utime + used.ru_stime
    if os.WIFSIGNALED(status) and (os.WTERMSIG(status) == signal.SIGXCPU or cpu_seconds >= CPU_SECONDS):
        return "timeout", ""
    if is_late:
        return "not run", f"in {WALL_SECONDS:g} seconds it got {cpu_seconds:.2f} seconds of CPU time"
    return "ended", output[len(_READY) :].decode("ascii", "replace")


def _read(pipe: int) -> tuple[bytes, bool]:
    """Read until the end, the limit, or the hour: the flag says whether it was the last."""
    output, end = b"", time.monotonic() + WALL_SECONDS
    while len(output) <= OUTPUT_BYTES:
        if not select.select([pipe], [], [], max(end - time.monotonic(), 0))[0]:
            return output, True
        data = os.read(pipe, 2**16)
        if not data:
            break
        output += data
    return output, False


# ----------------------------------------------------------------------------------------------------- the child's side

_READY = b"ready\n"


def _be_child(job: Job, pipe: int, null: int) -> None:
    """Become harmless, run the program, write what it returned, and end. Never returns."""
    try:
        _drop_everything(pipe, null)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the program must not run
        os.write(pipe, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    try:
        os.write(pipe, _READY)
        # Compiled here: the parser's memory and time are bounded too.
        namespace: dict[str, Any] = {"__name__": "program"}
        exec(compile(job.code, "<program>", "exec"), namespace)  # noqa: S102 - what all of this is for
        function = namespace[job.function]
        output = json.dumps([function(*arguments) for arguments in job.calls]).encode("ascii")
        while output:
            output = output[os.write(pipe, output) :]
    finally:
        os._exit(0)  # whatever it raised, `SystemExit` too: it wrote no answer


def _drop_everything(pipe: int, null: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    os.dup2(null, 0)
    os.dup2(null, 2)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, 2**16)
    for limit, value in (
        (
            resource.RLIMIT_CPU,
            (CPU_SECONDS, CPU_SECONDS + 1),
        ),  # a second later what ignores the first signal is killed
        (resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
        *((limit, (0, 0)) for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE)),
    ):
        resource.setrlimit(limit, value)
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise OSError(f"system calls are filtered on Linux on x86-64 only, not on {sys.platform} {platform.machine()}")
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    rules = ctypes.create_string_buffer(b"".join(_filter()))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(_filter()), ctypes.addressof(rules)))
    _check(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), "prctl: " + os.strerror(ctypes.get_errno()))


_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 1, 38, 22, 2
_ARCHITECTURE = 0xC000003E  # x86-64
_ALLOWED = (
    {"read": 0, "write": 1, "close": 3, "fstat": 5, "lseek": 8, "writev": 20}  # of what is open: one pipe
    | {"mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "mremap": 25, "madvise": 28}
    | {"rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "sigaltstack": 131, "restart_syscall": 219}
    | {"getpid": 39, "gettimeofday": 96, "clock_gettime": 228, "getrandom": 318, "sched_yield": 24}
    | {"exit": 60, "exit_group": 231}
)
"""System calls of x86-64 that stay; all others fail with "Operation not permitted"."""


def _filter() -> list[bytes]:
    """Return the filter of system calls, in the instructions of the Berkeley Packet Filter."""
    load, jump_if_equal, answer = 0x20, 0x15, 0x06
    kill, allow, refuse = 0x80000000, 0x7FFF0000, 0x00050001  # the process; the call; the call, with EPERM

    def instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    rules = [
        instruction(load, 0, 0, 4),  # the architecture: the numbers below are another's otherwise
        instruction(jump_if_equal, 1, 0, _ARCHITECTURE),
        instruction(answer, 0, 0, kill),
        instruction(load, 0, 0, 0),  # the number of the call; those of the x32 variant are none of these
    ]
    for number in _ALLOWED.values():
        rules += [instruction(jump_if_equal, 0, 1, number), instruction(answer, 0, 0, allow)]
    return [*rules, instruction(answer, 0, 0, refuse)]


if __name__ == "__main__":
    _serve()
