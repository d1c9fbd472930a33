"""Evaluation of a model by itself, without a trainer: any engine, several processes, and a restart that goes on.

What is decoded together, and from which random numbers, depends on the settings alone: on the transformers engine an
evaluation that was stopped and restarted, also on another number of processes, gives the same samples as one that ran
through. vLLM mixes what it decodes as it comes: there a restart keeps the samples that exist and draws the others anew.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    set_seed,
)

from ..rollout.engine import DecodeRequest, SegmentEngine
from ..rollout.transformers import TransformersEngine
from .problems import problem_ids
from .runner import EvaluationResult, Judge, Reward, Try, judged_try
from .samples import SampleFile

_Place = tuple[int, int]  # problem and attempt


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

    def __post_init__(self) -> None:
        if self.engine == "vllm" and self.revision is not None:
            raise ValueError(
                f"`revision` ({self.revision}) can't be handed to vLLM, which loads the model by its name. Download the "
                "revision (`hf download NAME --revision …`) and pass its folder as the model."
            )


class Evaluation:
    """Samples of problems by a model, in a file that a restart goes on with.

    Args:
        problems: Rows with `prompt` and the columns that the reward reads.
        settings: How they are sampled.
        output: Where the result will be; the samples lie beside it.
        tokenizer: The model's.
        labels: More of what the samples depend on, by name, such as the name of the data set.

    Raises:
        ValueError: If model, problems and settings don't fit, or there are samples of another evaluation.
    """

    def __init__(
        self,
        problems: Dataset,
        settings: EvaluationSettings,
        output: Path,
        tokenizer: PreTrainedTokenizerBase,
        labels: dict[str, Any],
    ) -> None:
        self._accelerator = Accelerator(cpu=not torch.accelerator.is_available())
        self._problems = problems
        self._settings = settings
        self._tokenizer = tokenizer
        self._config = _loaded(AutoConfig, settings)
        self._prompts = self._tokenized()
        self._limits = self._completion_limits()
        ids = "\n".join(problem_ids(problems))
        self.description: dict[str, Any] = {
            **asdict(settings),
            **labels,
            "num_problems": len(problems),
            "problems": hashlib.sha256(ids.encode()).hexdigest()[:16],
            "model_files": _fingerprint(settings.model, self._config),
        }
        self._vllm: Any = None
        self._samples = SampleFile(output, self.description, rank=self._accelerator.process_index)

    @property
    def num_kept(self) -> int:
        """Tries that the files of samples hold."""
        return len(self._samples.tries)

    @property
    def num_too_long(self) -> int:
        """Problems whose prompt leaves no room for a completion; their tries count as truncated."""
        return sum(limit < 1 for limit in self._limits)

    @property
    def num_missing(self) -> int:
        """Tries that no file of samples holds."""
        return (len(self._problems) - self.num_too_long) * self._settings.num_samples - self.num_kept

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes the result."""
        return bool(self._accelerator.is_main_process)

    def run(self, reward: Reward) -> EvaluationResult:
        """Sample what is missing; every process returns the whole result.

        Raises:
            ValueError: If the reward gives anything but 1, 0 and None.
        """
        started = time.perf_counter()
        self._accelerator.wait_for_everyone()  # until all have read the files
        unfit = [problem for problem, limit in enumerate(self._limits) if limit < 1]
        tries = [
            Try(problem, attempt, 0, True, 0.0, "", "")
            for problem in unfit
            for attempt in range(self._settings.num_samples)
        ]
        if self.num_missing:
            self._sample(Judge(reward))
        gathered = gather_object([*tries, *self._samples.tries.values()])
        return EvaluationResult.from_tries(
            list({(each.problem, each.attempt): each for each in gathered}.values()),
            num_problems=len(self._problems),
            seconds=time.perf_counter() - started,
        )

    def close(self) -> None:
        """Leave the process group, at the very end."""
        self._accelerator.end_training()

    def _sample(self, judge: Judge) -> None:
        state = self._accelerator
        chunks = self._chunks()[state.process_index :: state.num_processes]
        engine = self._engine()
        kept = len(self._samples.tries)
        bar = tqdm(
            total=kept + self.num_missing if state.num_processes == 1 else None,
            initial=kept,
            desc="sampling",
            unit="answer",
            disable=not state.is_main_process,
        )
        right = 0
        try:
            for seed, places in chunks:
                set_seed(seed)
                requests = [DecodeRequest(self._prompts[problem], self._limits[problem]) for problem, _ in places]
                for decoded in engine.decode(requests):
                    place = places[decoded.request_index]
                    if place in self._samples.tries:
                        continue  # decoded again for the sake of those that it was decoded with
                    new = judged_try(decoded, self._problems[place[0]], place, judge, self._tokenizer)
                    self._samples.append(new)
                    right += new.score == 1
                    bar.update()
                    bar.set_postfix_str(f"right {right / (len(self._samples.tries) - kept):.1%}", refresh=False)
        finally:
            bar.close()
            self._samples.close()
            if self._vllm is not None:
                self._vllm.shutdown()

    def _chunks(self) -> list[tuple[int, list[_Place]]]:
        """Return what decodes together, with the seed for it, without what is complete."""
        fitting = [problem for problem in range(len(self._problems)) if self._limits[problem] > 0]
        longest_first = sorted(fitting, key=lambda problem: -self._prompts[problem].size)
        places = [(problem, attempt) for problem in longest_first for attempt in range(self._settings.num_samples)]
        done = self._samples.tries
        if self._settings.engine == "vllm":
            # One call for all, which vLLM fills up as completions end. Other random numbers than the first time: with the
            # same ones the rest would be copies of samples that exist.
            missing = [place for place in places if place not in done]
            num_chunks = self._accelerator.num_processes
            return [(self._seed(len(done), start), missing[start::num_chunks]) for start in range(num_chunks)]
        size = self._settings.batch_size
        chunks = [(self._seed(start), places[start : start + size]) for start in range(0, len(places), size)]
        return [(seed, chunk) for seed, chunk in chunks if any(place not in done for place in chunk)]

    def _seed(self, *place: int) -> int:
        return int(np.random.default_rng([self._settings.seed, *place]).integers(2**31))

    # ------------------------------------------------------------------------------------------ prompts and limits

    def _tokenized(self) -> list[Any]:
        prompts = list(self._problems["prompt"])
        if isinstance(prompts[0], str):
            ids = self._tokenizer(text=prompts)["input_ids"]
        elif self._tokenizer.chat_template is None:
            raise ValueError(
                f"The prompts are lists of messages, but the tokenizer of {self._settings.model!r} has no chat template to "
                "write them with. Pass prompts as texts, or save a template with the tokenizer."
            )
        else:
            rendered: Any = self._tokenizer.apply_chat_template(
                prompts, add_generation_prompt=True, tokenize=True, return_dict=True
            )
            ids = rendered["input_ids"]
        return [np.asarray(each, dtype=np.int32) for each in cast(Sequence[Any], ids)]

    def _completion_limits(self) -> list[int]:
        positions: int | None = getattr(self._config.get_text_config(), "max_position_embeddings", None)
        wanted = self._settings.max_completion_length
        if positions is None and wanted is None:
            raise ValueError(
                f"The model {self._settings.model!r} states no `max_position_embeddings`, so completions need a limit of "
                "their own. Pass `--max_completion_length`."
            )
        rooms = [wanted if positions is None else positions - prompt.size for prompt in self._prompts]
        limits = [room if wanted is None else min(room, wanted) for room in cast(list[int], rooms)]
        if max(limits) < 1:
            raise ValueError(
                f"The shortest prompt has {min(prompt.size for prompt in self._prompts)} tokens and the model {positions} "
                "positions, so no completion fits behind any. Evaluate on shorter problems, or extend the model's positions "
                "in its configuration."
            )
        return limits

    # ----------------------------------------------------------------------------------------------------- engines

    def _engine(self) -> SegmentEngine:
        if self._settings.engine == "vllm":
            return self._vllm_engine()
        settings = self._settings
        model = cast(Any, AutoModelForCausalLM).from_pretrained(
            settings.model, revision=settings.revision, dtype=settings.dtype
        )
        model = model.to(self._accelerator.device).eval()
        eos_token_ids = self._eos_token_ids()
        sampling = cast(Any, GenerationConfig)(
            do_sample=True,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            pad_token_id=self._pad_token_id,
            eos_token_id=eos_token_ids,
            disable_compile=True,
        )
        return TransformersEngine(
            generation_model=lambda: nullcontext(model),
            generation_config=sampling,
            eos_token_ids=eos_token_ids,
            pad_token_id=self._pad_token_id,
            max_batch_size=settings.batch_size,
        )

    def _vllm_engine(self) -> SegmentEngine:
        from ..rollout.vllm import ColocatedEngine, SegmentVLLM

        settings = self._settings
        with torch.device("meta"):  # vLLM loads the weights itself: only the model's form is needed here
            model = cast(Any, AutoModelForCausalLM).from_config(self._config, dtype=self._dtype())
        generation = self._vllm = SegmentVLLM(
            model,
            self._accelerator,
            self._tokenizer,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            max_model_length=max(
                prompt.size + limit for prompt, limit in zip(self._prompts, self._limits, strict=True) if limit > 0
            ),
            num_sequences=settings.batch_size,
            seed=settings.seed + len(self._samples.tries),
        )
        return ColocatedEngine(generation, sync_weights=lambda: None, eos_token_ids=self._eos_token_ids())

    def _generation_config(self) -> Any:
        try:
            return GenerationConfig.from_pretrained(self._settings.model, revision=self._settings.revision or "main")
        except OSError:  # the model has no such file, and then its configuration counts
            return GenerationConfig.from_model_config(self._config)

    def _dtype(self) -> Any:
        if self._settings.dtype == "auto":
            return self._config.dtype or torch.float32
        return getattr(torch, self._settings.dtype)

    @property
    def _pad_token_id(self) -> int:
        pad = self._tokenizer.pad_token_id
        return cast(int, self._tokenizer.eos_token_id if pad is None else pad)

    def _eos_token_ids(self) -> list[int]:
        """Return every id that the model or its tokenizer ends a completion with."""
        declared = self._generation_config().eos_token_id
        ids = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
        own = self._tokenizer.eos_token_id
        ids = ids if own is None or own in ids else [cast(int, own), *ids]
        if not ids:
            raise ValueError(
                f"Neither the model {self._settings.model!r} nor its tokenizer says which token ends a completion: every one "
                "would be cut at the limit and count as wrong. Set `tokenizer.eos_token`."
            )
        return ids


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


def _fingerprint(model: str, config: Any) -> Any:
    """Return what tells versions of a model apart: the Hub's commit, or names, sizes and times of its files."""
    if not Path(model).is_dir():
        return getattr(config, "_commit_hash", None)
    patterns = ("*.safetensors", "*.bin", "*.json")
    files = sorted({path for pattern in patterns for path in Path(model).glob(pattern)})
    text = "\n".join(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
