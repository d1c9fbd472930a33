"""Language models as cleaning asks them: a list of chats in, a list of texts out, by the package's own engines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ..endpoint import Endpoint, EndpointSettings, Request

Messages = list[dict[str, Any]]


class ChatModel(Protocol):
    """A language model that answers chats. An endpoint fits, too: a text that does not come is None."""

    def complete(self, prompts: Sequence[Messages], *, seed: int) -> list[str | None]:
        """Return the text of each answer, the same ones for the same prompts and seed; None for one that is cut off."""
        ...


@dataclass(frozen=True)
class SamplingSettings:
    """How a model is sampled; the paper's temperature, and its evaluation's top_p and top_k (section 4.1).

    Args:
        engine: "transformers", "vllm", or "endpoint".
        endpoint: Where the models are, for "endpoint".
        temperature: Above 0.
        top_p: Share of the probability that is sampled from.
        top_k: Most tokens that are sampled from; 0 for no limit.
        max_tokens: Most tokens of an answer; a longer one is cut off and counts as none.
        batch_size: Answers that decode side by side.
    """

    engine: str = "transformers"
    endpoint: EndpointSettings | None = None
    temperature: float = 0.85
    top_p: float = 0.95
    top_k: int = 20
    max_tokens: int = 8192
    batch_size: int = 32


def read_tokenizer_and_config(name: str) -> tuple[Any, Any]:
    """Read what goes with a model's weights.

    Args:
        name: A folder, or a name on the Hub.

    Raises:
        ValueError: If there is none, or the tokenizer has no chat template.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name)
        config: Any = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The model {name!r} can't be loaded ({error}). Pass the folder of a saved model, or a name on the Hub."
        ) from error
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer of {name!r} has no chat template, which says where a question ends and the answer begins. Pass a "
            "model that was trained for chats, or set `chat_template`."
        )
    return tokenizer, config


class ServedModel:
    """A model behind an endpoint that speaks OpenAI's chat completions.

    Args:
        name: As the endpoint lists it.
        settings: How it is sampled; `endpoint` says where it is.
    """

    def __init__(self, name: str, settings: SamplingSettings) -> None:
        self._endpoint = Endpoint(name, cast(EndpointSettings, settings.endpoint))
        self._fields = {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": settings.max_tokens,
            **({"top_k": settings.top_k} if settings.top_k else {}),
        }

    def complete(self, prompts: Sequence[Messages], *, seed: int) -> list[str | None]:
        """Return the text of each answer; None for one that is cut off.

        Raises:
            EndpointError: If some have no answer: that says nothing about the rows.
        """
        import numpy as np

        seeds = np.random.default_rng(seed).integers(2**31, size=len(prompts)).tolist()
        requests = [
            Request(messages, {**self._fields, "seed": each}) for messages, each in zip(prompts, seeds, strict=True)
        ]
        answers = dict(self._endpoint.ask(requests))
        return [None if answers[place].is_truncated else answers[place].text for place in range(len(prompts))]


def load_model(name: str, settings: SamplingSettings) -> ChatModel:
    """Load a model, or reach it, as the settings say.

    Raises:
        ValueError: If it can't be loaded.
    """
    return ServedModel(name, settings) if settings.engine == "endpoint" else EngineModel(name, settings)


def check_model(name: str, settings: SamplingSettings) -> None:
    """Check that there is such a model, without loading its weights.

    Raises:
        ValueError: If there is none, or it answers no chats.
    """
    if settings.endpoint is None:
        read_tokenizer_and_config(name)
    else:
        Endpoint(name, settings.endpoint).check()


class EngineModel:
    """A model on one of the package's engines, in this process.

    Args:
        name: A folder, or a name on the Hub.
        settings: How it is sampled.

    Raises:
        ValueError: If it can't be loaded, or has no chat template or end-of-sequence token.
    """

    def __init__(self, name: str, settings: SamplingSettings) -> None:
        import torch
        from accelerate import Accelerator

        self._tokenizer, self._config = read_tokenizer_and_config(name)
        self._name = name
        self._settings = settings
        self._eos_token_ids = self._read_eos_token_ids()
        self._positions = int(self._config.get_text_config().max_position_embeddings)
        self._accelerator = Accelerator(cpu=not torch.accelerator.is_available())
        self._vllm: Any = None
        self._engine = self._vllm_engine() if settings.engine == "vllm" else self._transformers_engine()

    def complete(self, prompts: Sequence[Messages], *, seed: int) -> list[str | None]:
        """Return the text of each answer; None for one that is cut off, or that the prompt leaves no room for."""
        import numpy as np
        from transformers import set_seed

        from ..rollout.engine import DecodeRequest

        requests, places = [], []
        for place, messages in enumerate(prompts):
            rendered = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )
            ids = np.asarray(rendered["input_ids"], dtype=np.int32)
            if (room := min(self._positions - len(ids), self._settings.max_tokens)) > 0:
                requests.append(DecodeRequest(ids, room))
                places.append(place)
        set_seed(seed)
        texts: list[str | None] = [None] * len(prompts)
        for decoded in self._engine.decode(requests):
            if decoded.is_stopped:
                ids = decoded.token_ids.tolist()
                texts[places[decoded.request_index]] = self._tokenizer.decode(ids, skip_special_tokens=True)
        return texts

    def close(self) -> None:
        """End vLLM, if it was started."""
        if self._vllm is not None:
            self._vllm.shutdown()

    def _transformers_engine(self) -> Any:
        from transformers import AutoModelForCausalLM, GenerationConfig

        from ..rollout.transformers import TransformersEngine

        model = cast(Any, AutoModelForCausalLM).from_pretrained(self._name, dtype="auto")
        model = model.to(self._accelerator.device).eval()
        pad = self._eos_token_ids[0] if self._tokenizer.pad_token_id is None else self._tokenizer.pad_token_id
        sampling = cast(Any, GenerationConfig)(
            do_sample=True,
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            top_k=self._settings.top_k,
            pad_token_id=pad,
            eos_token_id=self._eos_token_ids,
        )
        return TransformersEngine(
            generation_model=lambda: nullcontext(model),
            generation_config=sampling,
            eos_token_ids=self._eos_token_ids,
            pad_token_id=pad,
            max_batch_size=self._settings.batch_size,
        )

    def _vllm_engine(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        from ..rollout.vllm import ColocatedEngine, SegmentVLLM

        with torch.device("meta"):  # vLLM loads the weights itself: only the model's form is needed here
            model = cast(Any, AutoModelForCausalLM).from_config(
                self._config, dtype=self._config.dtype or torch.float32
            )
        model.name_or_path = self._name
        self._vllm = SegmentVLLM(
            model,
            self._accelerator,
            self._tokenizer,
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            top_k=self._settings.top_k,
            gpu_memory_utilization=0.9,
            max_model_length=self._positions,
            num_sequences=self._settings.batch_size,
        )
        return ColocatedEngine(self._vllm, sync_weights=lambda: None, eos_token_ids=self._eos_token_ids)

    def _read_eos_token_ids(self) -> list[int]:
        from transformers import GenerationConfig

        try:
            declared: Any = GenerationConfig.from_pretrained(self._name).eos_token_id
        except OSError:  # the model has no such file
            declared = self._config.eos_token_id
        ids = {*(declared if isinstance(declared, list) else [declared]), self._tokenizer.eos_token_id} - {None}
        if not ids:
            raise ValueError(
                f"Neither {self._name!r} nor its tokenizer says which token ends an answer: every one would be cut off. Set "
                "`eos_token` of the tokenizer."
            )
        return sorted(ids)
