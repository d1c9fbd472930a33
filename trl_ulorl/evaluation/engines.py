"""A model's configuration, tokenizer and engine for its evaluation, without a trainer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from ..positions import extended_positions
from ..rollout.engine import SegmentEngine
from ..rollout.transformers import TransformersEngine


@dataclass(frozen=True)
class EvaluationSettings:
    """How a model is sampled.

    Args:
        model: A path, or a name on the Hub.
        num_samples: Completions of each problem.
        revision: Of the model on the Hub.
        temperature: The paper's is 0.85 (section 4.1).
        top_p: The paper's is 0.95.
        top_k: The paper's is 20; 0 for no limit.
        max_completion_length: In tokens, as far as the model's positions go. None: all that they leave behind the prompt.
        engine: "transformers" or "vllm".
        batch_size: Completions that decode together in a process.
        seed: Of the sampling.
        dtype: Of the weights; "auto" as they were saved.
        gpu_memory_utilization: Share of the GPU's memory for vLLM.
        rope_parameters: YaRN in the place of the model's own rope parameters, as JSON: see `extended_positions`.
    """

    model: str
    num_samples: int
    revision: str | None = None
    temperature: float = 0.85
    top_p: float = 0.95
    top_k: int = 20
    max_completion_length: int | None = None
    engine: str = "transformers"
    batch_size: int = 32
    seed: int = 0
    dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    rope_parameters: str | None = None

    def __post_init__(self) -> None:
        if self.engine == "vllm" and self.revision is not None:
            raise ValueError(
                f"`revision` ({self.revision}) can't be handed to vLLM, which loads the model by its name. Download the "
                "revision (`hf download NAME --revision …`) and pass its folder as the model."
            )


def load_config(settings: EvaluationSettings) -> Any:
    """Load a model's configuration, with the positions of the settings.

    Raises:
        ValueError: If there is none, or the rope parameters don't fit it.
    """
    config = _loaded(AutoConfig, settings)
    if settings.rope_parameters is not None:
        config.get_text_config().update(extended_positions(config, settings.rope_parameters))
    return config


def load_tokenizer(settings: EvaluationSettings) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer.

    Raises:
        ValueError: If there is none.
    """
    tokenizer: PreTrainedTokenizerBase = _loaded(AutoTokenizer, settings)
    return tokenizer


def _loaded(kind: Any, settings: EvaluationSettings) -> Any:
    try:
        return kind.from_pretrained(settings.model, revision=settings.revision)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The model {settings.model!r} can't be loaded ({error}). Pass the folder of a saved model, or a name on the Hub."
        ) from error


def fingerprint(model: str, config: Any) -> Any:
    """Return what tells versions of a model apart: the Hub's commit, or names, sizes and times of its files."""
    if not Path(model).is_dir():
        return getattr(config, "_commit_hash", None)
    patterns = ("*.safetensors", "*.bin", "*.json")
    files = sorted({path for pattern in patterns for path in Path(model).glob(pattern)})
    text = "\n".join(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def build_engine(
    settings: EvaluationSettings,
    config: Any,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    *,
    max_model_length: int,
    num_kept: int,
) -> tuple[SegmentEngine, Callable[[], None]]:
    """Load the model into an engine.

    Args:
        settings: Which model, which engine, and how it samples.
        config: The model's configuration.
        tokenizer: The model's tokenizer.
        accelerator: Says on which device.
        max_model_length: Most tokens of a prompt and its completion.
        num_kept: Samples that exist, with which vLLM's random numbers change.

    Returns:
        The engine, and what ends it.

    Raises:
        ValueError: If neither model nor tokenizer says what ends a completion.
    """
    eos_token_ids = _eos_token_ids(settings, config, tokenizer)
    if settings.engine == "vllm":
        from ..rollout.vllm import ColocatedEngine, SegmentVLLM

        with torch.device("meta"):  # vLLM loads the weights itself: only the model's form is needed here
            form = cast(Any, AutoModelForCausalLM).from_config(config, dtype=_dtype(settings, config))
        generation = SegmentVLLM(
            form,
            accelerator,
            tokenizer,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            max_model_length=max_model_length,
            num_sequences=settings.batch_size,
            seed=settings.seed + num_kept,
        )
        engine = ColocatedEngine(generation, sync_weights=lambda: None, eos_token_ids=eos_token_ids)
        return engine, generation.shutdown
    model = cast(Any, AutoModelForCausalLM).from_pretrained(
        settings.model, config=config, revision=settings.revision, dtype=settings.dtype
    )
    model = model.to(accelerator.device).eval()
    pad_token_id = cast(int, eos_token_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
    sampling = cast(Any, GenerationConfig)(
        do_sample=True,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        pad_token_id=pad_token_id,
        eos_token_id=eos_token_ids,
        disable_compile=True,
    )
    transformers_engine = TransformersEngine(
        generation_model=lambda: nullcontext(model),
        generation_config=sampling,
        eos_token_ids=eos_token_ids,
        pad_token_id=pad_token_id,
        max_batch_size=settings.batch_size,
    )
    return transformers_engine, lambda: None


def _dtype(settings: EvaluationSettings, config: Any) -> Any:
    return getattr(torch, settings.dtype) if settings.dtype != "auto" else config.dtype or torch.float32


def _eos_token_ids(settings: EvaluationSettings, config: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every id that the model or its tokenizer ends a completion with."""
    try:
        generation_config = GenerationConfig.from_pretrained(settings.model, revision=settings.revision or "main")
    except OSError:  # the model has no such file, and then its configuration counts
        generation_config = GenerationConfig.from_model_config(config)
    declared = cast(Any, generation_config).eos_token_id
    ids = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    own = tokenizer.eos_token_id
    ids = ids if own is None or own in ids else [cast(int, own), *ids]
    if not ids:
        raise ValueError(
            f"Neither the model {settings.model!r} nor its tokenizer says which token ends a completion: every one would be cut "
            "at the limit and count as wrong. Set `tokenizer.eos_token`."
        )
    return ids
