"""The engine on a vLLM server: every rank streams its own rollouts from it, one request for each.

`vllm_server.py` checks the server and hands it the policy's weights.
"""

from __future__ import annotations

import asyncio
import json
import math
import resource
import threading
import uuid
from array import array
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np

from .engine import DecodedSegment, DecodeRequest
from .vllm_server import ServedVLLM, restarted_message

_STREAM_INTERVAL = 16  # tokens in one message: a message per token would keep both sides busy with messages only
_TICK_SECONDS = 0.05  # how long `step` waits before it returns without a sequence that has ended
_RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0)  # waits before a broken request is sent again
_ABORT_SECONDS = 2.0  # how long an interrupted server has to send what it still holds
_OPEN_FILES = 65536  # one for each sequence that decodes, and some

_T = TypeVar("_T")


class ServedEngine:
    """Decodes on a vLLM server, with one streamed request per sequence, so that what has arrived is never lost.

    Each rank sends its own requests. Log-probabilities are vLLM's processed ones: at the sampling temperature, and
    with `top_p`, `top_k` or `min_p` over what these leave of the vocabulary.

    Args:
        generation: The back end that TRL's trainer holds; its sampling settings are used.
        sync_weights: Hands the policy's weights over if they have changed; a collective operation.
        eos_token_ids: Ids that end a completion.
    """

    def __init__(
        self, generation: ServedVLLM, *, sync_weights: Callable[[], None], eos_token_ids: Sequence[int]
    ) -> None:
        self._generation = generation
        self._sync_weights = sync_weights
        self._eos_token_ids = frozenset(eos_token_ids)
        _allow_open_files()

    @property
    def max_model_length(self) -> int:
        """Most tokens of a sequence, prompt and completion together."""
        return self._generation.max_model_len

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodedSegment]:
        """Continue every request by sampling; each result comes as soon as it has ended.

        Raises:
            RuntimeError: If the server fails for good, once everything that has arrived was handed out.
        """
        with self.stream() as stream:
            for index, request in enumerate(requests):
                stream.submit(index, request)
            num_left = len(requests)
            while num_left:
                try:
                    ended = stream.step()
                except RuntimeError:
                    yield from stream.interrupt()
                    raise
                num_left -= len(ended)
                yield from ended

    @contextmanager
    def stream(self) -> Iterator[ServedStream]:
        """Open a stream under the current weights; leaving it stops what still decodes."""
        self._sync_weights()
        stream = ServedStream(self._generation, self._eos_token_ids)
        try:
            stream.open()
            yield stream
        finally:
            stream.close()


def _allow_open_files() -> None:
    """Raise this process's limit of open files, which is 1,024 by default: every sequence has a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence that decodes, and what has arrived of it so far."""

    key: int
    request: DecodeRequest
    first_step: int
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    per_token_logps: array[float] = field(default_factory=lambda: array("f"))
    request_id: str = ""
    failed_at: float | None = None
    deadline: asyncio.Timeout | None = None
    task: asyncio.Task[None] | None = None

    @property
    def num_left(self) -> int:
        return self.request.max_new_tokens - len(self.token_ids)

    def extend(self, tokens: Sequence[str], logps: Sequence[float | None]) -> int:
        """Append what one message holds, ids and log-probs alike or neither, and return how many tokens that is."""
        token_ids = [int(token.removeprefix("token_id:")) for token in tokens]
        if len(token_ids) != len(logps) or not all(logp is not None and math.isfinite(logp) for logp in logps):
            raise RuntimeError(
                f"The vLLM server sent {len(tokens)} tokens with the log-probabilities {list(logps)}, which must be "
                "equally many finite numbers. NaN (or null) means that the forward pass broke down: check the weights "
                "and the precision of the model."
            )
        self.token_ids.extend(token_ids)
        self.per_token_logps.extend(logps)  # type: ignore[arg-type]
        return len(token_ids)


class ServedStream:
    """Sequences that decode side by side on a server: see `DecodeStream`.

    Everything that touches the network runs in an event loop of one thread; this object is used from another one.

    Args:
        generation: Where the server is and how to sample.
        eos_token_ids: Ids that end a completion.

    Attributes:
        num_steps: Decode steps taken so far, counted by the sequence that got on fastest.
    """

    def __init__(self, generation: ServedVLLM, eos_token_ids: frozenset[int]) -> None:
        self.num_steps = 0
        self._generation = generation
        self._eos_token_ids = eos_token_ids
        self._timeout = generation.server_timeout
        self._sequences: dict[int, _Sequence] = {}  # those that have not ended; the loop's thread only
        self._ended: SimpleQueue[DecodedSegment | None] = SimpleQueue()  # None only wakes the reader
        self._failure: Exception | None = None
        self._is_stopping = False
        self._last_arrival = self._checked_at = -math.inf
        self._session: Any = None
        self._watchdog: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="served-stream", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------------- called by the collector

    def open(self) -> None:
        """Connect, and check that the server still has the policy's weights.

        Raises:
            RuntimeError: If it can't be reached or was restarted.
        """
        try:
            self._run(self._open())
        except OSError as error:
            raise RuntimeError(self._unreachable_message(error)) from error

    def submit(self, key: int, request: DecodeRequest) -> None:
        """Start to decode a sequence; its results carry `key` as their `request_index`.

        Raises:
            ValueError: If the server was not started for so long a sequence.
        """
        if request.token_ids.size + request.max_new_tokens > self._generation.max_model_len:
            raise ValueError(
                f"A request of {request.token_ids.size} tokens and {request.max_new_tokens} new ones goes beyond the "
                f"{self._generation.max_model_len} tokens that the vLLM server at {self._generation.base_url} was "
                "started for. Restart it with a larger `--max-model-len`, or lower `max_completion_length`."
            )
        sequence = _Sequence(key, request, self.num_steps)
        self._loop.call_soon_threadsafe(self._start, sequence)

    def step(self) -> list[DecodedSegment]:
        """Wait until a sequence has ended or tokens have arrived, and return the sequences that have ended.

        Raises:
            RuntimeError: If the server fails for good; `interrupt` still returns what has arrived.
        """
        steps_before = self.num_steps
        while True:
            if ended := self._take_ended(_TICK_SECONDS):
                return ended
            if self._failure is not None:
                raise self._failure
            if self.num_steps > steps_before:
                return []

    def interrupt(self) -> list[DecodedSegment]:
        """Stop every sequence and return what each has so far; one that has no new token yet is left out."""
        interrupted = self._run(self._interrupt())
        return self._take_ended(0) + interrupted

    def close(self) -> None:
        """Stop every sequence and disconnect."""
        try:
            self._run(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _take_ended(self, timeout: float) -> list[DecodedSegment]:
        ended = []
        try:
            ended.append(self._ended.get(timeout=timeout) if timeout else self._ended.get_nowait())
            while True:
                ended.append(self._ended.get_nowait())
        except Empty:
            return [segment for segment in ended if segment is not None]

    # --------------------------------------------------------------------------------------- run in the loop's thread

    async def _open(self) -> None:
        import aiohttp  # vLLM requires it, so it is there whenever a server can be

        self._retryable = (aiohttp.ClientError, OSError)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeout),
            trust_env=True,  # proxies as TRL's client takes them
        )
        self._lock = asyncio.Lock()
        self._watchdog = asyncio.create_task(self._watch())
        for delay in (*_RETRY_SECONDS, None):
            try:
                return await self._check_instance(self._loop.time())
            except self._retryable:
                if delay is None:
                    raise
            await asyncio.sleep(delay)

    def _start(self, sequence: _Sequence) -> None:
        self._last_arrival = self._loop.time()
        self._sequences[sequence.key] = sequence
        sequence.task = self._loop.create_task(self._decode(sequence))

    async def _decode(self, sequence: _Sequence) -> None:
        try:
            for delay in (*_RETRY_SECONDS, None):
                try:
                    async with asyncio.timeout(None) as sequence.deadline:
                        await self._attempt(sequence)
                    break
                except self._retryable as error:
                    if self._has_ended(sequence) or self._is_stopping:
                        break
                    if delay is None:
                        raise RuntimeError(self._unreachable_message(error)) from error
                    sequence.failed_at = self._loop.time()
                finally:
                    sequence.deadline = None
                await asyncio.sleep(delay)
        except Exception as error:  # noqa: BLE001 - raised where the results are read
            self._failure = error
            self._ended.put(None)
        if self._has_ended(sequence):
            del self._sequences[sequence.key]
            self._ended.put(self._segment(sequence))

    async def _attempt(self, sequence: _Sequence) -> None:
        """Send a request for what is left of a sequence, and read what comes."""
        if sequence.failed_at is not None:
            await self._check_instance(sequence.failed_at)
        sequence.request_id = uuid.uuid4().hex
        url = f"{self._generation.base_url}/v1/completions"
        async with self._session.post(url, json=self._body(sequence)) as response:
            if response.status != 200:
                text = await response.text()
                if response.status >= 500:
                    raise ConnectionError(f"HTTP {response.status}: {text}")
                raise RuntimeError(
                    f"The vLLM server at {self._generation.base_url} refused a request (HTTP {response.status}: "
                    f"{text}). Start it with a release of vLLM and flags that trl-ulorl supports."
                )
            reason = await self._read(sequence, response.content)
        if self._has_ended(sequence) or self._is_stopping:
            return
        if reason in (None, "abort"):
            raise ConnectionError("the server broke a request off")
        raise RuntimeError(
            f"The vLLM server at {self._generation.base_url} ended a sequence ({reason!r}) {sequence.num_left} tokens "
            "before its budget and without an end-of-sequence token. Restart it with `--generation-config vllm`, so "
            "that no limit or stop of its own applies."
        )

    def _body(self, sequence: _Sequence) -> dict[str, Any]:
        generation = self._generation
        return {
            "prompt": [*sequence.request.token_ids.tolist(), *sequence.token_ids],
            "max_tokens": sequence.num_left,
            "request_id": sequence.request_id,
            # All of them, as the server would fill in the defaults of the model's generation configuration.
            "temperature": generation.temperature,
            "top_p": generation.top_p,
            "top_k": generation.top_k,
            "min_p": generation.min_p or 0.0,
            "repetition_penalty": generation.repetition_penalty,
            "ignore_eos": True,  # those below are the only ones
            "stop_token_ids": sorted(self._eos_token_ids),
            "logprobs": 0,  # of the sampled token only
            "return_tokens_as_token_ids": True,
            "stream": True,
            "stream_interval": _STREAM_INTERVAL,
            **generation.generation_kwargs,
        }

    async def _read(self, sequence: _Sequence, content: Any) -> str | None:
        """Read a stream of server-sent events to its end, and return why the server ended it."""
        reason, rest = None, b""
        async for chunk in content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    reason = self._receive(sequence, json.loads(line[len(b"data: ") :])) or reason
        return reason

    def _receive(self, sequence: _Sequence, message: dict[str, Any]) -> str | None:
        if "error" in message:
            raise ConnectionError(message["error"]["message"])
        (choice,) = message["choices"]
        logprobs = choice["logprobs"]
        if logprobs is not None and sequence.extend(logprobs["tokens"], logprobs["token_logprobs"]):
            self._last_arrival = self._loop.time()
            self.num_steps = max(self.num_steps, sequence.first_step + len(sequence.token_ids))
        reason: str | None = choice["finish_reason"]
        return reason

    def _has_ended(self, sequence: _Sequence) -> bool:
        return not sequence.num_left or self._is_stopped(sequence)

    def _is_stopped(self, sequence: _Sequence) -> bool:
        return bool(sequence.token_ids) and sequence.token_ids[-1] in self._eos_token_ids

    def _segment(self, sequence: _Sequence) -> DecodedSegment:
        return DecodedSegment(
            sequence.key,
            np.array(sequence.token_ids, dtype=np.int32),
            np.array(sequence.per_token_logps, dtype=np.float32),
            is_stopped=self._is_stopped(sequence),
        )

    async def _watch(self) -> None:
        """Break off and repeat every request once no token at all has come for long; one alone may wait its turn."""
        while True:
            await asyncio.sleep(min(1.0, self._timeout / 4))
            now = self._loop.time()
            if now - self._last_arrival < self._timeout:
                continue
            for sequence in self._sequences.values():
                if sequence.deadline is not None:
                    sequence.deadline.reschedule(now)
            self._last_arrival = now

    async def _check_instance(self, since: float) -> None:
        """Check that the server is still the one that was given the weights, unless it was checked after `since`."""
        async with self._lock:
            if self._checked_at >= since:
                return
            url = f"{self._generation.base_url}/server_info?config_format=json"
            async with self._session.get(url) as response:
                if response.status != 200:
                    raise ConnectionError(f"HTTP {response.status}: {await response.text()}")
                info = await response.json()
            if str(info["vllm_config"]["instance_id"]) != self._generation.instance_id:
                raise RuntimeError(restarted_message(self._generation.base_url))
            self._checked_at = self._loop.time()

    async def _interrupt(self) -> list[DecodedSegment]:
        self._is_stopping = True
        deadline = self._loop.time() + _ABORT_SECONDS
        # Asked to abort, the server first sends the tokens that it has kept for the next message. Asked again, as a
        # request on its way is not known to it yet.
        while (pending := self._pending()) and self._loop.time() < deadline and await self._abort(pending):
            await asyncio.wait([task for _, task in pending], timeout=0.25)
        await self._cancel()
        interrupted = [self._segment(sequence) for sequence in self._sequences.values() if sequence.token_ids]
        self._sequences.clear()
        self._is_stopping = False
        return interrupted

    def _pending(self) -> list[tuple[_Sequence, asyncio.Task[None]]]:
        return [(each, each.task) for each in self._sequences.values() if each.task and not each.task.done()]

    async def _abort(self, pending: list[tuple[_Sequence, asyncio.Task[None]]]) -> bool:
        url = f"{self._generation.base_url}/abort_requests"
        body = {"request_ids": [f"cmpl-{sequence.request_id}-0" for sequence, _ in pending]}
        try:
            async with asyncio.timeout(_ABORT_SECONDS), self._session.post(url, json=body) as response:
                return bool(response.status == 200)  # older releases have no such endpoint
        except self._retryable:
            return False

    async def _cancel(self) -> None:
        tasks = [task for _, task in self._pending()]
        for task in tasks:
            task.cancel()  # closes its connection, which makes the server stop
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _close(self) -> None:
        self._is_stopping = True
        await self._cancel()
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._session is not None:
            await self._session.close()

    def _unreachable_message(self, error: Exception) -> str:
        return (
            f"The vLLM server at {self._generation.base_url} does not answer ({type(error).__name__}: {error}), not "
            f"even after {len(_RETRY_SECONDS)} further tries. Look at the server's log, restart it, and resume the "
            "run from its last checkpoint."
        )
