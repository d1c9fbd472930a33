"""A model behind an endpoint that speaks OpenAI's API, such as `vllm serve`: many requests side by side, answers as they come.

The answers are those of chat completions, or of plain completions for prompts that are texts.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import openai

Prompt = str | list[dict[str, Any]]

_MAX_FAILURES_ON_END = 8  # requests in a row that fail for good: the endpoint is down, and the rest would fail too
_MAX_PAUSE_SECONDS = 8.0  # of the client before another try
_REFUSALS = (401, 403, 404)  # what holds for every request: the key, or the name of the model


@dataclass(frozen=True)
class EndpointSettings:
    """Where an endpoint is, and how it is asked.

    Args:
        base_url: Address up to and with `/v1`.
        api_key_env: Name of the environment variable that holds the key; None sends none. The key is never logged.
        timeout_seconds: Longest wait for one try of a request.
        max_retries: Further tries of a request: after time-outs, broken connections, statuses 408, 409, 429 and 500 or above.
        concurrency: Most requests under way at a time, at least 1.
        extra_body: Further fields of each request.

    Raises:
        ImportError: If the `openai` package is not installed.
        ValueError: If the address or a limit makes no sense, or the key is not in the environment.
    """

    base_url: str
    api_key_env: str | None = None
    timeout_seconds: float = 3600.0
    max_retries: int = 4
    concurrency: int = 32
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            import openai  # noqa: F401 - rather here than in the midst of a run
        except ImportError as error:
            raise ImportError('A model behind an endpoint needs openai: `pip install "trl-ulorl[judge]"`.') from error
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(
                f"`base_url` ({self.base_url!r}) must be the address of an endpoint, from http:// or https:// up to and with /v1."
            )
        if self.timeout_seconds <= 0 or self.concurrency < 1 or self.max_retries < 0:
            raise ValueError(
                f"`timeout_seconds` ({self.timeout_seconds}) must be above 0, `concurrency` ({self.concurrency}) at least 1 and "
                f"`max_retries` ({self.max_retries}) at least 0: else no request could be answered."
            )
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise ValueError(
                f"The environment variable {self.api_key_env!r} that `api_key_env` names is not set: the endpoint would refuse "
                "every request. Set it, or pass None for an endpoint without keys."
            )

    @property
    def deadline_seconds(self) -> float:
        """Longest time for a request with all its tries; a server that sends a byte now and then never times out."""
        return self.timeout_seconds * (self.max_retries + 1) + _MAX_PAUSE_SECONDS * self.max_retries

    @property
    def place(self) -> str:
        """The address without a password, for messages."""
        scheme, _, rest = self.base_url.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"

    def client(self) -> openai.AsyncOpenAI:
        """Return a client, for one event loop."""
        import openai

        return openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=self._key or "none",  # left out, it would be taken from OPENAI_API_KEY
            timeout=self.timeout_seconds,
            max_retries=self.max_retries,
        )

    def described(self, error: Exception) -> str:
        """Return an error's type and text, without the key, which some servers repeat."""
        text = f"{type(error).__name__}: {error}"
        return (text.replace(self._key, "***") if self._key else text)[:300]

    @property
    def _key(self) -> str | None:
        return os.environ[self.api_key_env] if self.api_key_env is not None else None


@dataclass(frozen=True, slots=True)
class Answer:
    """What an endpoint answered to a request.

    Args:
        text: The answer.
        num_tokens: Its length in tokens, thinking included.
        is_truncated: Whether it was cut off at a limit.
    """

    text: str
    num_tokens: int
    is_truncated: bool


@dataclass(frozen=True)
class Request:
    """One answer to one prompt.

    Args:
        prompt: Messages for a chat completion, a text for a plain one.
        fields: Sampling fields of the request, such as `temperature`; those that are not OpenAI's go out beside them.
    """

    prompt: Prompt
    fields: Mapping[str, Any]


class EndpointError(RuntimeError):
    """Requests have no answer: the endpoint refused them, or failed at them for good."""


class Endpoint:
    """Asks one model behind an endpoint.

    Args:
        model: Name of the model as the endpoint lists it.
        settings: Where it is and how it is asked.
    """

    def __init__(self, model: str, settings: EndpointSettings) -> None:
        self._model = model
        self._settings = settings

    def check(self) -> None:
        """Check that the endpoint can be reached, takes the key and, if it lists its models, has this one.

        Raises:
            ValueError: If it does not.
        """
        import openai

        async def listed() -> list[str] | None:
            async with self._settings.client().with_options(timeout=30.0, max_retries=1) as client:
                try:
                    return [each.id async for each in client.models.list()]
                except (openai.APIConnectionError, openai.AuthenticationError, openai.PermissionDeniedError):
                    raise
                except (openai.OpenAIError, ValueError, TypeError, AttributeError):
                    return None  # it has no list, which is no fault: not every server has one

        try:
            names = asyncio.run(listed())
        except openai.OpenAIError as error:
            raise ValueError(
                f"The endpoint at {self._settings.place} can't be used ({self._settings.described(error)}). It must be the "
                "address of a running server, up to and with /v1, and take the key. Check `--base_url` and `--api_key_env`."
            ) from error
        if names and self._model not in names:
            raise ValueError(
                f"The endpoint at {self._settings.place} has no model {self._model!r}: it lists {names[:10]}. Pass one of these."
            )

    def ask(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        """Yield the place of each request and its answer, as soon as it is there.

        What fails does not hold the others up: they are asked to the end, unless the endpoint refuses the key or the model,
        or eight requests in a row fail for good.

        Args:
            requests: What to ask.

        Raises:
            EndpointError: At the end, if some have no answer.
        """
        # In a thread of its own: the caller judges answers while others are under way.
        queue: SimpleQueue[tuple[int, Answer] | Counter[str] | BaseException] = SimpleQueue()
        is_stopped = threading.Event()
        thread = threading.Thread(target=self._run, args=(requests, queue.put, is_stopped), daemon=True)
        thread.start()
        try:
            while isinstance(item := queue.get(), tuple):
                yield item
        finally:
            is_stopped.set()
            thread.join()
        if isinstance(item, BaseException):
            raise item
        if item:
            raise EndpointError(
                f"{item.total()} of {len(requests)} requests to {self._model!r} at {self._settings.place} have no answer: "
                + "; ".join(f"{count} x {reason}" for reason, count in item.most_common(3))
                + ". Those that came are kept: look at the server, and start the same command again for the rest."
            )

    def _run(
        self,
        requests: Sequence[Request],
        put: Callable[[tuple[int, Answer] | Counter[str] | BaseException], None],
        is_stopped: threading.Event,
    ) -> None:
        try:
            put(asyncio.run(self._ask_all(requests, put, is_stopped)))
        except BaseException as error:  # noqa: BLE001 - raised where the answers are read
            put(error)

    async def _ask_all(
        self, requests: Sequence[Request], put: Callable[[tuple[int, Answer]], None], is_stopped: threading.Event
    ) -> Counter[str]:
        import openai

        kinds = (openai.OpenAIError, TimeoutError, ValueError, TypeError, AttributeError, IndexError)
        failures: Counter[str] = Counter()
        waiting = iter(enumerate(requests))
        in_a_row = num_answered = 0

        async def work() -> None:
            nonlocal in_a_row, num_answered
            for place, request in waiting:
                if is_stopped.is_set():
                    return
                try:
                    async with asyncio.timeout(self._settings.deadline_seconds):
                        answer = await self._answer(client, request)
                except kinds as error:
                    failures[self._reason(error)] += 1
                    status = error.status_code if isinstance(error, openai.APIStatusError) else None
                    # A request that is refused by itself, such as one with too long a prompt, says nothing of the others.
                    in_a_row += status is None or status >= 500 or status == 429
                    if status in _REFUSALS or in_a_row >= _MAX_FAILURES_ON_END:
                        is_stopped.set()
                else:
                    in_a_row = 0
                    num_answered += 1
                    put((place, answer))

        async with self._settings.client() as client:
            workers = [asyncio.create_task(work()) for _ in range(self._settings.concurrency)]
            stopping = asyncio.create_task(_until(is_stopped))
            working = asyncio.gather(*workers)
            both: list[asyncio.Future[Any]] = [working, stopping]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()  # raises what is no failure of the endpoint
            working.cancel()
            stopping.cancel()
            await asyncio.gather(*workers, stopping, return_exceptions=True)
        if failures and (num_left := len(requests) - num_answered - failures.total()):
            failures["not asked any more"] += num_left
        return failures

    def _reason(self, error: Exception) -> str:
        import openai

        described = self._settings.described(error)
        # The package does not check what it was sent: bad JSON, or JSON that is no completion, shows up in use.
        if isinstance(error, TimeoutError):
            return f"no whole answer within {self._settings.deadline_seconds:g} s, all tries together"
        return described if isinstance(error, openai.OpenAIError) else f"the answer is no completion ({described})"

    async def _answer(self, client: openai.AsyncOpenAI, request: Request) -> Answer:
        known = {name: value for name, value in request.fields.items() if name in _OPENAI_FIELDS}
        others = {name: value for name, value in request.fields.items() if name not in _OPENAI_FIELDS}
        arguments: dict[str, Any] = {
            "model": self._model,
            "extra_body": {**others, **self._settings.extra_body},
            **known,
        }
        if isinstance(request.prompt, str):
            completion: Any = await client.completions.create(prompt=request.prompt, **arguments)
            choice = completion.choices[0]
            text = choice.text
        else:
            completion = await client.chat.completions.create(messages=cast(Any, request.prompt), **arguments)
            choice = completion.choices[0]
            text = choice.message.content or ""  # none where all tokens went into thinking
        num_tokens = completion.usage.completion_tokens
        if not isinstance(text, str) or not isinstance(num_tokens, int):
            raise TypeError("it has no text, or does not say how many tokens it has")
        if choice.finish_reason not in ("stop", "length"):
            raise ValueError(f"it ended with {choice.finish_reason!r}, and neither by itself nor at the length limit")
        return Answer(text, num_tokens, choice.finish_reason == "length")


_OPENAI_FIELDS = ("temperature", "top_p", "max_tokens", "seed")


async def _until(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.05)
