"""Sample every problem `k` times with a trainer's own engine and score the answers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from datasets import Dataset
from numpy.typing import NDArray
from tqdm.auto import tqdm

from ..rollout.engine import DecodeRequest
from ..trainer import UloRLTrainer
from .metrics import avg_at_k


@dataclass(frozen=True)
class EvaluationResult:
    """What sampling `n` problems `k` times gave.

    Args:
        is_correct: 1.0 or 0.0 for each try, shape `(n, k)`; a try that can't be judged counts as 0.0.
        lengths: Completion tokens of each try, shape `(n, k)`.
        truncated_fraction: Share of tries that reached the length limit; they count as wrong.
        seconds: Wall-clock time.
    """

    is_correct: NDArray[np.float64]
    lengths: NDArray[np.int64]
    truncated_fraction: float
    seconds: float

    @property
    def accuracy(self) -> float:
        """The avg@k, in `[0, 1]`."""
        return avg_at_k(self.is_correct)[0]

    @property
    def standard_error(self) -> float:
        """Standard error of the avg@k over problems."""
        return avg_at_k(self.is_correct)[1]

    def to_json(self) -> str:
        """Write the result as JSON."""
        return json.dumps({**asdict(self), "is_correct": self.is_correct.tolist(), "lengths": self.lengths.tolist()})

    @classmethod
    def from_json(cls, text: str) -> EvaluationResult:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        arrays = {name: np.array(values[name]) for name in ("is_correct", "lengths")}
        return cls(**{**values, **arrays})


def sample_and_score(
    trainer: UloRLTrainer, problems: Dataset, *, k: int, reward: Callable[..., list[float | None]], name: str
) -> EvaluationResult:
    """Sample `k` completions of every problem with the current policy, as in training, and score them.

    The problems are shared out over the ranks; every rank returns the whole result.

    Args:
        trainer: Its engine, sampling settings and length limit are used.
        problems: Rows with `prompt` and the columns that `reward` reads.
        k: Tries per problem.
        reward: A reward function in TRL's form that gives 1 for a right answer.
        name: What the progress bar says.
    """
    started = time.perf_counter()
    accelerator = trainer.accelerator
    # Ranks that share an engine ask it for the same, and one of them reports.
    owner, place = divmod(accelerator.process_index, trainer.args.ranks_per_engine)
    num_owners = accelerator.num_processes // trainer.args.ranks_per_engine
    mine = problems.select(range(owner, len(problems), num_owners))
    prompt_ids = trainer._tokenize_prompts(list(mine["prompt"]))[0] if len(mine) else []
    requests = [
        DecodeRequest(np.asarray(ids, dtype=np.int32), trainer._rows.room(len(ids)))
        for ids in prompt_ids
        for _ in range(k)
    ]
    rows: list[tuple[int, float, int, bool]] = []
    progress = tqdm(total=len(requests), desc=name, unit="answer", disable=not accelerator.is_local_main_process)
    for decoded in trainer.rollout_engine.decode(requests):
        index = decoded.request_index // k
        score = 0.0
        if decoded.is_stopped:
            (text,) = trainer.processing_class.batch_decode([decoded.token_ids.tolist()], skip_special_tokens=True)
            score = _score(reward, mine[index], text)
        rows.append((owner + index * num_owners, score, len(decoded.token_ids), not decoded.is_stopped))
        progress.update()
    progress.close()
    gathered = sorted(gather_object(rows if place == 0 else []))
    return EvaluationResult(
        is_correct=np.array([row[1] for row in gathered]).reshape(len(problems), k),
        lengths=np.array([row[2] for row in gathered]).reshape(len(problems), k),
        truncated_fraction=float(np.mean([row[3] for row in gathered])),
        seconds=time.perf_counter() - started,
    )


def _score(reward: Callable[..., list[float | None]], row: dict[str, Any], text: str) -> float:
    completion = [{"role": "assistant", "content": text}] if isinstance(row["prompt"], list) else text
    columns = {key: [value] for key, value in row.items() if key != "prompt"}
    (score,) = reward(prompts=[row["prompt"]], completions=[completion], **columns)
    return 0.0 if score is None or math.isnan(score) else float(score)
