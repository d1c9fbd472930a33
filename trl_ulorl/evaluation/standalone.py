"""Evaluation of a model by itself, without a trainer: any engine, several processes, and a restart that goes on.

What is decoded together, and from which random numbers, depends on the settings alone: on the transformers engine an
evaluation that was stopped and restarted, also on another number of processes, gives the same samples as one that ran
through. vLLM mixes what it decodes as it comes: there a restart keeps the samples that exist and draws the others anew.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, set_seed

from ..rollout.engine import DecodeRequest
from .engines import EvaluationSettings, build_engine, fingerprint, load_config
from .problems import problem_ids
from .runner import EvaluationResult, Judge, Reward, judged_try, tries_without_room
from .samples import SampleFile

_Place = tuple[int, int]  # problem and attempt


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
        self._config = load_config(settings)
        self._prompts = self._tokenized()
        self._limits = self._completion_limits()
        ids = "\n".join(problem_ids(problems))
        self.description: dict[str, Any] = {
            **asdict(settings),
            **labels,
            "num_problems": len(problems),
            "problems": hashlib.sha256(ids.encode()).hexdigest()[:16],
            "model_files": fingerprint(settings.model, self._config),
        }
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
        # After all have read their files, which need not be the same ones: every process must know what is missing.
        for kept in gather_object(list(self._samples.tries.values())):
            self._samples.tries.setdefault((kept.problem, kept.attempt), kept)
        unfit = [problem for problem, limit in enumerate(self._limits) if limit < 1]
        tries = [each for problem in unfit for each in tries_without_room(problem, self._settings.num_samples)]
        if self.num_missing:
            self._sample(Judge(reward))
        gathered = gather_object([*tries, *self._samples.tries.values()])
        return EvaluationResult.from_tries(
            list({(each.problem, each.attempt): each for each in gathered}.values()),
            num_problems=len(self._problems),
            seconds=time.perf_counter() - started,
        )

    def close(self) -> None:
        """Leave the process group, at the very end, when all have come to it: see `UloRLTrainer.end`."""
        self._accelerator.wait_for_everyone()
        self._accelerator.end_training()

    def _sample(self, judge: Judge) -> None:
        state = self._accelerator
        chunks = self._chunks()[state.process_index :: state.num_processes]
        engine, shut_down = build_engine(
            self._settings,
            self._config,
            self._tokenizer,
            state,
            max_model_length=max(
                prompt.size + limit for prompt, limit in zip(self._prompts, self._limits, strict=True) if limit > 0
            ),
            num_kept=self.num_kept,
        )
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
            shut_down()

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
