"""Evaluation of a model behind an endpoint that speaks OpenAI's API: `vllm serve`, or any other server.

Every answer is a request of its own with a seed of its own, so that an evaluation that was stopped asks only for what is
missing, and gets what it would have got on a server that heeds the seed.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from tqdm.auto import tqdm

from ..data.sources import plain_message
from ..endpoint import Answer, Endpoint, EndpointSettings, Prompt, Request
from .problems import problem_ids
from .runner import EvaluationResult, Judge, Reward, Try
from .samples import SampleFile


@dataclass(frozen=True)
class ServedSettings:
    """What the samples of a served model depend on.

    Args:
        model: Its name as the endpoint lists it.
        num_samples: Completions of each problem.
        temperature: The paper's is 0.85 (section 4.1).
        top_p: The paper's is 0.95.
        top_k: The paper's is 20; 0 leaves it to the server.
        max_completion_length: In tokens. None: as the server's limits go.
        seed: Of the sampling.
    """

    model: str
    num_samples: int
    temperature: float = 0.85
    top_p: float = 0.95
    top_k: int = 20
    max_completion_length: int | None = None
    seed: int = 0


class ServedEvaluation:
    """Samples of problems by a served model, in a file that a restart goes on with: see `Evaluation`.

    Messages are asked for by chat completions, texts are continued by plain ones.

    Args:
        problems: Rows with `prompt` and the columns that the reward reads.
        settings: How they are sampled.
        endpoint: Where the model is.
        output: Where the result will be; the samples lie beside it.
        labels: More of what the samples depend on, by name.

    Raises:
        ValueError: If the endpoint can't be used, there are several processes, or there are samples of another evaluation.
    """

    num_too_long = 0  # the server refuses a prompt that is too long, which its error tells
    is_main_process = True

    def __init__(
        self,
        problems: Dataset,
        settings: ServedSettings,
        endpoint: EndpointSettings,
        output: Path,
        labels: dict[str, Any],
    ) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                f"An endpoint is asked by one process, but there are {os.environ['WORLD_SIZE']}: each would ask for everything. "
                "Start the command without `accelerate launch`, and raise `--batch_size` for more requests at a time."
            )
        self._problems = problems
        self._settings = settings
        self._endpoint = Endpoint(settings.model, endpoint)
        ids = "\n".join(problem_ids(problems))
        self.description: dict[str, Any] = {
            **vars(settings),
            **labels,
            "engine": "endpoint",
            "extra_body": dict(endpoint.extra_body),
            "num_problems": len(problems),
            "problems": hashlib.sha256(ids.encode()).hexdigest()[:16],
        }
        self._samples = SampleFile(output, self.description)
        if self.num_missing:
            self._endpoint.check()

    @property
    def num_kept(self) -> int:
        """Tries that the file of samples holds."""
        return len(self._samples.tries)

    @property
    def num_missing(self) -> int:
        """Tries that it does not hold."""
        return len(self._problems) * self._settings.num_samples - self.num_kept

    def run(self, reward: Reward) -> EvaluationResult:
        """Ask for what is missing, and return the whole result.

        Raises:
            ValueError: If the reward gives anything but 1, 0 and None.
            EndpointError: If requests have no answer; those that came are kept.
        """
        started = time.perf_counter()
        judge = Judge(reward)
        places = [
            (problem, attempt)
            for problem in range(len(self._problems))
            for attempt in range(self._settings.num_samples)
            if (problem, attempt) not in self._samples.tries
        ]
        kept, right = self.num_kept, 0
        bar = tqdm(total=kept + len(places), initial=kept, desc="sampling", unit="answer")
        try:
            for index, answer in self._endpoint.ask([self._request(*place) for place in places]):
                new = self._judged(answer, places[index], judge)
                self._samples.append(new)
                right += new.score == 1
                bar.update()
                bar.set_postfix_str(f"right {right / (self.num_kept - kept):.1%}", refresh=False)
        finally:
            bar.close()
            self._samples.close()
        return EvaluationResult.from_tries(
            list(self._samples.tries.values()),
            num_problems=len(self._problems),
            seconds=time.perf_counter() - started,
        )

    def close(self) -> None:
        """Do nothing: there is no process group to leave."""

    def _judged(self, answer: Answer, place: tuple[int, int], judge: Judge) -> Try:
        score, extracted = (0.0, "") if answer.is_truncated else judge(self._problems[place[0]], answer.text)
        return Try(*place, answer.num_tokens, answer.is_truncated, score, extracted, answer.text)

    def _request(self, problem: int, attempt: int) -> Request:
        settings = self._settings
        prompt: Prompt = self._problems[problem]["prompt"]
        if not isinstance(prompt, str):
            prompt = [plain_message(message) for message in prompt]
        seed = int(np.random.default_rng([settings.seed, problem, attempt]).integers(2**31))
        fields = {"temperature": settings.temperature, "top_p": settings.top_p, "seed": seed}
        if settings.top_k:
            fields["top_k"] = settings.top_k
        if settings.max_completion_length is not None:
            fields["max_tokens"] = settings.max_completion_length
        return Request(prompt, fields)
