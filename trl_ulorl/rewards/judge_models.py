"""What runs a judge's model: transformers in this process, vLLM in this process, or an endpoint that speaks OpenAI's API.

All decode greedily and at most `MAX_VERDICT_TOKENS` tokens. Their libraries are loaded with the first object.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

from ..endpoint import EndpointSettings
from .judge import MAX_VERDICT_TOKENS, Messages

if TYPE_CHECKING:
    import openai
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MAX_WARNINGS = 10  # of an endpoint; later failures show in the judge's counts only
# Templates of models that think before they answer leave the thinking out; others don't read it.
_CHAT_TEMPLATE_KWARGS = {"enable_thinking": False}


class TransformersModel:
    """A causal language model in this process, in batches padded on the left.

    Each process that judges holds a copy of its own, on the device that it trains on unless told otherwise.

    Args:
        model: A name on the Hub, a folder, or a loaded model; its own generation settings are not used.
        tokenizer: Its tokenizer, with a chat template; loaded with the model if that is given by name.
        device: Where a model that is given by name goes; by default to this process's accelerator, or the CPU.
        batch_size: Most prompts in one call of `generate`, at least 1.
        **model_kwargs: For `AutoModelForCausalLM.from_pretrained`; `dtype` is `"auto"` by default.

    Raises:
        ValueError: If there is no tokenizer or chat template, `batch_size` is below 1, or DeepSpeed ZeRO-3 would cut a
            model that is loaded by name into shards.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        device: str | None = None,
        batch_size: int = 64,
        **model_kwargs: Any,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
        from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

        if batch_size < 1:
            raise ValueError(
                f"`batch_size` ({batch_size}) must be at least 1: that many prompts are decoded together."
            )
        if isinstance(model, str | os.PathLike):
            if cast(Callable[[], bool], is_deepspeed_zero3_enabled)():
                raise ValueError(
                    f"The judge {str(model)!r} would be loaded in shards, as DeepSpeed ZeRO-3 is configured in this "
                    "process: a rank could then not judge by itself. Make the judge before the training arguments, or "
                    "serve it and use `EndpointModel`."
                )
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
            loaded: Any = AutoModelForCausalLM.from_pretrained(model, **{"dtype": "auto", **model_kwargs})
            model = loaded.to(device or _own_device()).eval()
        self._model: Any = cast(Any, model)
        if tokenizer is None or not tokenizer.chat_template:
            raise ValueError(
                "The judge's `tokenizer` has no chat template (or is not given), which says where a question ends and the "
                "answer begins. Pass the tokenizer of a model that was trained for chats, or set its `chat_template`."
            )
        own = self._model.generation_config.eos_token_id
        eos_token_ids = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id} - {None}
        if not eos_token_ids:
            raise ValueError("The judge has no `eos_token_id`, so its answers would have no end: set the tokenizer's.")
        self._eos_token_ids = sorted(eos_token_ids)
        self._pad_token_id = self._eos_token_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._tokenizer: Any = tokenizer
        self._batch_size = batch_size
        # `generate` fills in from the model's own configuration what is not set: a penalty, for instance.
        self._generation_config = cast(Any, GenerationConfig)(
            do_sample=False,
            num_beams=1,
            max_new_tokens=MAX_VERDICT_TOKENS,
            eos_token_id=self._eos_token_ids,
            pad_token_id=self._pad_token_id,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            temperature=1.0,
            top_p=1.0,
            top_k=50,
        )

    def complete(self, prompts: Sequence[Messages]) -> list[str | None]:
        """Return the text of each answer, up to where it ends or is cut off."""
        ids = [self._prompt_ids(messages) for messages in prompts]
        texts: list[str | None] = [None] * len(ids)
        by_length = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        for start in range(0, len(ids), self._batch_size):
            indices = by_length[start : start + self._batch_size]
            for index, text in zip(indices, self._generate([ids[index] for index in indices]), strict=True):
                texts[index] = text
        return texts

    def _prompt_ids(self, messages: Messages) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **_CHAT_TEMPLATE_KWARGS
        )
        return cast(list[int], self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _generate(self, rows: list[list[int]]) -> list[str]:
        import torch

        width = max(map(len, rows))
        input_ids = torch.tensor([[self._pad_token_id] * (width - len(row)) + row for row in rows])
        attention_mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        with torch.inference_mode():
            sequences = self._model.generate(
                input_ids=input_ids.to(self._model.device),
                attention_mask=attention_mask.to(self._model.device),
                generation_config=self._generation_config,
                synced_gpus=False,  # other ranks judge other pairs, at other times
            )
        return [self._text(answer) for answer in sequences[:, width:].tolist()]

    def _text(self, answer: list[int]) -> str:
        end = next((index for index, token in enumerate(answer) if token in self._eos_token_ids), len(answer))
        return cast(str, self._tokenizer.decode(answer[:end]))  # special tokens stay: they belong to no verdict


def _own_device() -> str:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else f"{accelerator.type}:{os.environ.get('LOCAL_RANK', '0')}"


class VLLMModel:
    """A model on a vLLM engine in this process.

    The engine must be the judge's own: rewards are computed in a thread while the policy's engine decodes, and an engine
    serves one thread. To share a model between processes, serve it (`vllm serve`) and use `EndpointModel`.

    Args:
        llm: A `vllm.LLM`, or the name or folder of a model for one.
        **llm_kwargs: For `vllm.LLM`, where it is made here; `gpu_memory_utilization` has to leave room for the training.

    Raises:
        ImportError: If vLLM is to be started and is not installed.
        ValueError: If there are arguments for an engine that is already there.
    """

    def __init__(self, llm: Any, **llm_kwargs: Any) -> None:
        try:
            from vllm import LLM, SamplingParams
        except ImportError as error:
            raise ImportError('A judge on vLLM needs vLLM: `pip install "trl-ulorl[vllm]"`.') from error

        if not isinstance(llm, str | os.PathLike) and llm_kwargs:
            raise ValueError(
                f"{sorted(llm_kwargs)} are arguments for a new engine, but `llm` is an engine already: set them where it is "
                "made, or pass the model's name."
            )
        self._llm = LLM(model=str(llm), **llm_kwargs) if isinstance(llm, str | os.PathLike) else llm
        self._sampling_params = SamplingParams(temperature=0.0, max_tokens=MAX_VERDICT_TOKENS)

    def complete(self, prompts: Sequence[Messages]) -> list[str | None]:
        """Return the text of each answer, up to where it ends or is cut off."""
        outputs = self._llm.chat(
            list(prompts), self._sampling_params, use_tqdm=False, chat_template_kwargs=_CHAT_TEMPLATE_KWARGS
        )
        return [output.outputs[0].text for output in outputs]


class EndpointModel:
    """A model behind an endpoint that speaks OpenAI's chat completions, such as `vllm serve`.

    Requests of a call go out side by side. What fails for a moment (time-outs, broken connections, statuses 408, 409, 429
    and 500 or above) is tried again with growing pauses; what fails for good, and what has no answer when the call's time
    is up, has no text, and the reason is logged.

    Args:
        base_url: Address up to and with `/v1`.
        model: Name of the model as the endpoint lists it.
        api_key_env: Name of the environment variable that holds the key; None sends none. The key is never logged.
        timeout_seconds: Longest wait for one try.
        max_retries: Further tries of a request.
        deadline_seconds: Longest time that one call of `complete` takes, whatever the endpoint does.
        concurrency: Most requests under way at a time, at least 1.
        extra_body: Further fields of each request: `{"chat_template_kwargs": {"enable_thinking": False}}` for a model on
            vLLM that would think before it answers.

    Raises:
        ImportError: If the `openai` package is not installed.
        ValueError: If the address or a limit makes no sense, or the key is not in the environment.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        timeout_seconds: float = 30.0,
        max_retries: int = 2,
        deadline_seconds: float = 120.0,
        concurrency: int = 32,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        if deadline_seconds <= 0:
            raise ValueError(
                f"`deadline_seconds` ({deadline_seconds}) must be above 0: else no request could be answered."
            )
        self._settings = EndpointSettings(
            base_url, api_key_env, timeout_seconds, max_retries, concurrency, dict(extra_body or {})
        )
        self._model = model
        self._deadline_seconds = deadline_seconds
        self._num_warnings = 0

    def complete(self, prompts: Sequence[Messages]) -> list[str | None]:
        """Return the text of each answer; `None` for a request that failed or took too long."""
        if not prompts:
            return []
        # In a thread of its own: an event loop may run in the caller's, as in the trainer's thread for rewards.
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(lambda: asyncio.run(self._complete(prompts))).result()

    async def _complete(self, prompts: Sequence[Messages]) -> list[str | None]:
        gate = asyncio.Semaphore(self._settings.concurrency)
        failures: Counter[str] = Counter()
        async with self._settings.client() as client:
            tasks = [asyncio.create_task(self._answer(client, gate, messages, failures)) for messages in prompts]
            done, late = await asyncio.wait(tasks, timeout=self._deadline_seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if late:
            failures[f"no answer within the {self._deadline_seconds:g} s of a call"] += len(late)
        self._warn(failures, len(prompts))
        return [task.result() if task in done else None for task in tasks]

    async def _answer(
        self, client: openai.AsyncOpenAI, gate: asyncio.Semaphore, messages: Messages, failures: Counter[str]
    ) -> str | None:
        import openai

        try:
            async with gate:
                completion = await client.chat.completions.create(
                    model=self._model,
                    messages=cast(Any, messages),
                    temperature=0.0,
                    max_tokens=MAX_VERDICT_TOKENS,
                    extra_body=self._settings.extra_body,
                )
            content: object = completion.choices[0].message.content
        except openai.OpenAIError as error:
            failures[self._settings.described(error)] += 1
        # The package does not check what it was sent: bad JSON, or JSON that is no chat completion, shows up in use.
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            failures[f"the answer is no chat completion ({self._settings.described(error)})"] += 1
        else:
            if content is None or isinstance(content, str):
                return content or ""
            failures["the answer is no chat completion (its content is no text)"] += 1
        return None

    def _warn(self, failures: Counter[str], num_prompts: int) -> None:
        if failures and self._num_warnings < MAX_WARNINGS:
            self._num_warnings += 1
            logger.warning(
                "%d of %d requests to the judge %r at %s have no answer: %s. The pairs have no verdict. %s",
                failures.total(),
                num_prompts,
                self._model,
                self._settings.place,
                "; ".join(f"{count} x {reason}" for reason, count in failures.most_common(3)),
                "Further failures are not logged." if self._num_warnings == MAX_WARNINGS else "",
            )
