"""Other verifiers, for comparison, each in a child process that can be killed: none of them bounds its own time."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import NamedTuple, Self

_START_SECONDS = 120.0

PEERS = {
    "math-verify": ("math_verify", False),
    "math-verify, boxed reference": ("math_verify", True),
    "TRL accuracy_reward": ("trl", False),
    "TRL accuracy_reward, boxed reference": ("trl", True),
}
"""Name of each set-up: the module it needs, and whether the reference is put into `\\boxed{}`."""


class PeerVerdict(NamedTuple):
    """What a peer says about a pair.

    Attributes:
        equivalent: `None` for no verdict.
        seconds: Wall time.
        failure: Empty, `killed` (not done in time), `died`, or the name of an exception.
    """

    equivalent: bool | None
    seconds: float
    failure: str = ""


class Peer:
    """A peer in a child process.

    Args:
        name: One of `PEERS`.
        time_limit: Seconds per pair, after which the process is killed.

    Raises:
        ImportError: If the peer is not installed.
    """

    def __init__(self, name: str, *, time_limit: float = 10.0) -> None:
        module, self.is_boxed = PEERS[name]
        if find_spec(module) is None or find_spec("math_verify") is None:
            raise ImportError(f'{name} is not installed: `pip install "trl-ulorl[math]"`.')
        self.module, self.time_limit = module, time_limit
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill the child process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def verify(self, prediction: str, reference: str) -> PeerVerdict:
        """Return the peer's verdict on an output and a reference."""
        if self._process is None:
            self._process = _started(self.module)
        if self.is_boxed:
            reference = rf"\boxed{{{reference}}}"
        start = time.monotonic()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps([prediction, reference]).encode("ascii") + b"\n")
            self._process.stdin.flush()
            line = _line(self._process, self.time_limit)
        except OSError:
            line = b""
        seconds = time.monotonic() - start
        if not line:
            self.stop()
            return PeerVerdict(None, seconds, "killed" if line is None else "died")
        return PeerVerdict(json.loads(line)[0], seconds, json.loads(line)[1])


def _started(module: str) -> subprocess.Popen[bytes]:
    code = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from trl_ulorl.cli import peers; peers.serve(sys.argv[1])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, module, json.dumps([path for path in sys.path if isinstance(path, str)])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    if not _line(process, _START_SECONDS):
        process.kill()
        process.communicate()
        raise RuntimeError(f"The child process with {module} did not start.")
    return process


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """Next line of the child's output, empty at its end, `None` if there is none in time."""
    assert process.stdout is not None
    deadline, line = time.monotonic() + seconds, b""
    while not line.endswith(b"\n"):
        if not select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
            return None
        data = os.read(process.stdout.fileno(), 65536)
        if not data:
            return b""
        line += data
    return line


def serve(module: str) -> None:
    """Answer pairs in a child process: `[prediction, reference]` in, `[verdict, failure]` out, a line each."""
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    judge = _math_verify if module == "math_verify" else _accuracy_reward
    judge("$1$", "$1$")
    replies.write("[]\n")
    replies.flush()
    for line in sys.stdin:
        try:
            reply = [judge(*json.loads(line)), ""]
        except Exception as error:  # noqa: BLE001 - it is what the peer does on this pair
            reply = [None, type(error).__name__]
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _math_verify(prediction: str, reference: str) -> bool:
    import math_verify

    return bool(math_verify.verify(math_verify.parse(reference), math_verify.parse(prediction)))


def _accuracy_reward(prediction: str, reference: str) -> bool | None:
    from trl.rewards import accuracy_reward

    (reward,) = accuracy_reward([[{"role": "assistant", "content": prediction}]], [reference])
    return None if reward is None else bool(reward)
