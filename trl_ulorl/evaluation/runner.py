"""Tries of problems: how they are judged, what a set of them comes to, and sampling them with a trainer's own engine."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from accelerate.utils import gather_object
from datasets import Dataset
from numpy.typing import NDArray
from tqdm.auto import tqdm

from ..rewards.extraction import extract_answer
from ..rewards.normalize import normalize_answer
from ..rollout.engine import DecodedSegment, DecodeRequest
from .metrics import avg_at_k

if TYPE_CHECKING:
    from ..trainer import UloRLTrainer

Reward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Try:
    """One completion of one problem.

    Args:
        problem: Row of the problem.
        attempt: Which of its tries, from 0.
        length: Completion tokens.
        is_truncated: Whether it reached the length limit; then it is wrong and has no answer.
        score: 1 for right, 0 for wrong, None where the reward can't decide.
        answer: Its answer in normal form, empty if it gives none.
        text: The completion.
    """

    problem: int
    attempt: int
    length: int
    is_truncated: bool
    score: float | None
    answer: str
    text: str


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """What sampling `n` problems `m` times gave.

    Args:
        is_correct: 1.0 or 0.0 for each try, shape `(n, m)`; one that can't be judged counts as 0.0.
        lengths: Completion tokens of each try, shape `(n, m)`.
        is_truncated: True where a try reached the length limit, shape `(n, m)`; it counts as wrong.
        is_undecided: True where the reward could not decide, shape `(n, m)`.
        answers: Each try's answer in normal form, empty for none, `n` rows of `m`.
        seconds: Wall-clock time.
    """

    is_correct: NDArray[np.float64]
    lengths: NDArray[np.int64]
    is_truncated: NDArray[np.bool_]
    is_undecided: NDArray[np.bool_]
    answers: list[list[str]]
    seconds: float

    @classmethod
    def from_tries(cls, tries: Sequence[Try], *, num_problems: int, seconds: float) -> EvaluationResult:
        """Arrange tries, in any order, by problem.

        Raises:
            ValueError: If they are not equally many of each problem.
        """
        ordered = sorted(tries, key=lambda each: (each.problem, each.attempt))
        num_tries, rest = divmod(len(ordered), num_problems)
        expected = [(problem, attempt) for problem in range(num_problems) for attempt in range(num_tries)]
        if rest or not num_tries or [(each.problem, each.attempt) for each in ordered] != expected:
            raise ValueError(
                f"{len(ordered)} tries of {num_problems} problems: every problem needs as many as the others. Sample the "
                "missing ones."
            )
        shape = (num_problems, num_tries)
        answers = [each.answer for each in ordered]
        return cls(
            is_correct=np.array([each.score or 0.0 for each in ordered]).reshape(shape),
            lengths=np.array([each.length for each in ordered], dtype=np.int64).reshape(shape),
            is_truncated=np.array([each.is_truncated for each in ordered]).reshape(shape),
            is_undecided=np.array([each.score is None for each in ordered]).reshape(shape),
            answers=[answers[start : start + num_tries] for start in range(0, len(answers), num_tries)],
            seconds=seconds,
        )

    @property
    def accuracy(self) -> float:
        """The avg@k, in `[0, 1]`."""
        return avg_at_k(self.is_correct)[0]

    @property
    def standard_error(self) -> float:
        """Standard error of the avg@k over problems."""
        return avg_at_k(self.is_correct)[1]

    @property
    def truncated_fraction(self) -> float:
        """Share of tries that reached the length limit."""
        return float(self.is_truncated.mean())

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in values.items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> EvaluationResult:
        """Take what `to_json` gave."""
        arrays = ("is_correct", "lengths", "is_truncated", "is_undecided")
        return cls(**values | {key: np.array(values[key]) for key in arrays})


class Judge:
    """Gives a completion its verdict and its answer.

    Args:
        reward: A reward function in TRL's form that gives 1 for a right answer, 0 for a wrong one, None where it can't
            decide. The answer is what it logs as `extracted_answer`, as `VerifierReward` does; else it is extracted as
            the verifier would.
    """

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    def __call__(self, row: dict[str, Any], text: str) -> tuple[float | None, str]:
        """Return the score and the answer in normal form.

        Args:
            row: The problem: `prompt` and the columns that the reward reads.
            text: The completion.

        Raises:
            ValueError: If the reward gives anything but 1, 0 and None: the share of right answers would mean nothing.
        """
        completion = [{"role": "assistant", "content": text}] if isinstance(row["prompt"], list) else text
        columns = {key: [value] for key, value in row.items() if key not in ("prompt", "completion")}
        logged: dict[str, list[Any]] = {}
        scores = self._reward(
            prompts=[row["prompt"]],
            completions=[completion],
            log_extra=logged.__setitem__,
            log_metric=lambda name, value: None,
            **columns,
        )
        if inspect.isawaitable(scores):
            scores = asyncio.run(_awaited(scores))
        (score,) = scores
        if score is not None and math.isnan(score):
            score = None
        if score not in (None, 0, 1):
            raise ValueError(
                f"The reward gave {score!r} for an answer, but avg@k is the share of right answers: it must give 1 for a right "
                "one, 0 for a wrong one, and None where it can't decide. Evaluate with a reward that measures correctness "
                "alone, such as `VerifierReward`."
            )
        if "extracted_answer" in logged:
            (answer,) = logged["extracted_answer"]
        else:
            answer = normalize_answer(extract_answer(text) or "")
        return score, answer or ""


async def _awaited(scores: Any) -> Any:
    return await scores


def judged_try(
    decoded: DecodedSegment, row: dict[str, Any], place: tuple[int, int], judge: Judge, tokenizer: Any
) -> Try:
    """Turn a decoded completion into a try; a truncated one is wrong, and is not judged."""
    (text,) = tokenizer.batch_decode([decoded.token_ids.tolist()], skip_special_tokens=True)
    score, answer = judge(row, text) if decoded.is_stopped else (0.0, "")
    return Try(*place, len(decoded.token_ids), not decoded.is_stopped, score, answer, text)


def tries_without_room(problem: int, num_tries: int) -> list[Try]:
    """Return the tries of a problem whose prompt fills the model's positions: truncated, and of no token."""
    return [Try(problem, attempt, 0, True, 0.0, "", "") for attempt in range(num_tries)]


def sample_and_score(
    trainer: UloRLTrainer, problems: Dataset, *, k: int, reward: Reward, name: str
) -> EvaluationResult:
    """Sample `k` completions of every problem with the current policy, as in training, and score them.

    The problems are shared out over the ranks, all of which must call it; every rank returns the whole result. A problem
    whose prompt fills the model's positions counts as truncated.

    Args:
        trainer: Its engine, sampling settings and length limit are used.
        problems: Rows with `prompt` and the columns that `reward` reads.
        k: Tries per problem.
        reward: A reward function in TRL's form that gives 1 for a right answer and 0 for a wrong one.
        name: What the progress bar says.

    Raises:
        ValueError: If the reward gives other values.
    """
    started = time.perf_counter()
    accelerator = trainer.accelerator
    # Ranks that share an engine ask it for the same, and one of them reports.
    owner, place = divmod(accelerator.process_index, trainer.args.ranks_per_engine)
    num_owners = accelerator.num_processes // trainer.args.ranks_per_engine
    mine = problems.select(range(owner, len(problems), num_owners))
    prompt_ids = trainer._tokenize_prompts(list(mine["prompt"]))[0] if len(mine) else []
    rooms = [trainer._rows.room(len(ids)) for ids in prompt_ids]
    fitting = [index for index, room in enumerate(rooms) if room > 0]
    requests = [
        DecodeRequest(np.asarray(prompt_ids[index], dtype=np.int32), rooms[index])
        for index in fitting
        for _ in range(k)
    ]
    judge = Judge(reward)
    tries = [
        each
        for index, room in enumerate(rooms)
        if room < 1
        for each in tries_without_room(owner + index * num_owners, k)
    ]
    error: Exception | None = None
    progress = tqdm(total=len(requests), desc=name, unit="answer", disable=not accelerator.is_local_main_process)
    for decoded in trainer.rollout_engine.decode(requests):
        request, attempt = divmod(decoded.request_index, k)
        index = fitting[request]
        try:
            spot = (owner + index * num_owners, attempt)
            tries.append(judged_try(decoded, mine[index], spot, judge, trainer.processing_class))
        except Exception as failure:  # noqa: BLE001 - told to all ranks below: they would wait for this one
            error = failure
            break
        progress.update()
    progress.close()
    gathered = gather_object([(tries if place == 0 else [], None if error is None else repr(error))])
    failures = [failure for _, failure in gathered if failure is not None]
    if failures:
        raise error or RuntimeError(f"The evaluation failed on another rank: {failures[0]}")
    return EvaluationResult.from_tries(
        [each for some, _ in gathered for each in cast(list[Try], some)],
        num_problems=len(problems),
        seconds=time.perf_counter() - started,
    )
