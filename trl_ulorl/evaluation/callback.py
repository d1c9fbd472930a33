"""avg@k on held-out problems while a model trains."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..records import write_json
from .metrics import maj_at_k, pass_at_k
from .problems import problem_ids
from .runner import EvaluationResult, Reward, sample_and_score

if TYPE_CHECKING:
    from ..trainer import UloRLTrainer

logger = logging.getLogger(__name__)


class EvaluationCallback(TrainerCallback):
    """Samples held-out problems with the current policy, as training does, and logs the figures.

    It logs `eval_avg_at_k`, `eval_standard_error`, `eval_pass_at_k`, `eval_maj_at_k`, `eval_truncated_fraction` and
    `eval_mean_length`, beside the figures of training. All ranks take part, so each of them must have it. On the
    transformers engine an evaluation during training leaves training's random numbers alone: the run is the same with and
    without it, and each evaluation starts from the same ones.

    Args:
        trainer: Its engine, sampling settings and length limit are used.
        problems: Rows with `prompt` and the columns that `reward` reads.
        k: Answers per problem.
        reward: A reward function in TRL's form that gives 1 for a right answer and 0 for a wrong one.
        every_steps: Optimizer steps between evaluations; None for none during training.
        at_ends: Whether to evaluate before and after training too.
        is_resumed: Whether training takes up a checkpoint: what was measured before it is read from the output folder, unless
            problems, `k` or sampling are others now.

    Attributes:
        before: The result before training; None where a resumed run has none to compare with.
        after: The result after training.

    Raises:
        ValueError: If there are no problems, or a number is below 1.

    Example:
        ```python
        trainer.add_callback(EvaluationCallback(trainer, problems, k=8, reward=VerifierReward(), every_steps=50))
        ```
    """

    def __init__(
        self,
        trainer: UloRLTrainer,
        problems: Dataset,
        *,
        k: int,
        reward: Reward,
        every_steps: int | None = None,
        at_ends: bool = False,
        is_resumed: bool = False,
    ) -> None:
        for name, value in (("k", k), ("every_steps", 1 if every_steps is None else every_steps)):
            if value < 1:
                raise ValueError(f"`{name}` ({value}) must be at least 1. Leave the callback out to evaluate nothing.")
        if not len(problems):
            raise ValueError("`problems` is empty: there is nothing to evaluate on. Leave the callback out.")
        self._trainer = trainer
        self._problems = problems
        self._k = k
        self._reward = reward
        self._every_steps = every_steps
        self._at_ends = at_ends
        self._is_resumed = is_resumed
        self._path = Path(cast(str, trainer.args.output_dir)) / "held_out_before.json"
        self.before: EvaluationResult | None = None
        self.after: EvaluationResult | None = None

    @property
    def k(self) -> int:
        """Answers per problem."""
        return self._k

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Evaluate before training, or read what a resumed run measured then."""
        if not self._at_ends:
            return
        if self._is_resumed and self._path.exists():
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            changed = [name for name, value in self._setting().items() if kept["setting"].get(name) != value]
            if changed:
                logger.warning(
                    "What %s measured before training is left out: it had other %s, so no gain can be told from it.",
                    self._path,
                    ", ".join(f"`{name}`" for name in changed),
                )
            else:
                self.before = EvaluationResult.from_json(kept["result"])
            return
        self.before = self._evaluate("held-out, before")
        if state.is_world_process_zero:
            write_json(self._path, {"setting": self._setting(), "result": self.before.to_json()})

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Evaluate every few steps."""
        if self._trainer.is_stopping or self._every_steps is None or state.global_step % self._every_steps:
            return
        if self._at_ends and state.global_step == state.max_steps:
            return  # comes after training
        with _random_numbers_of(args.seed + args.process_index):
            self._evaluate(f"held-out, step {state.global_step}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Evaluate after training."""
        if self._at_ends and not self._trainer.is_stopping:  # a run that was stopped is not at its end
            self.after = self._evaluate("held-out, after")

    def _setting(self) -> dict[str, Any]:
        """Return what evaluations must have in common to be compared."""
        args = self._trainer.args
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")
        problems = hashlib.sha256("".join(problem_ids(self._problems)).encode()).hexdigest()[:16]
        return {"problems": problems, "k": self._k, **{name: getattr(args, name) for name in names}}

    def _evaluate(self, name: str) -> EvaluationResult:
        result = sample_and_score(self._trainer, self._problems, k=self._k, reward=self._reward, name=name)
        control = self._trainer.control
        is_log_due = control.should_log
        # Not GRPO's `log`: that would take along, and so use up, what training has gathered for its own next line.
        Trainer.log(
            self._trainer,
            {
                "eval_avg_at_k": result.accuracy,
                "eval_standard_error": result.standard_error,
                "eval_pass_at_k": pass_at_k(result.is_correct, self._k)[0],
                "eval_maj_at_k": maj_at_k(result.is_correct, result.answers, self._k)[0],
                "eval_truncated_fraction": result.truncated_fraction,
                "eval_mean_length": float(result.lengths.mean()),
            },
        )
        control.should_log = is_log_due  # logging takes it back, and training's own line of this step is still to come
        return result


@contextmanager
def _random_numbers_of(seed: int) -> Iterator[None]:
    """Draw torch's and NumPy's random numbers from a seed, and go on with those of before."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        forked = torch.random.fork_rng(devices=[])
    else:
        index = torch.accelerator.current_device_index()
        forked = torch.random.fork_rng(devices=[index], device_type=accelerator.type)
    state = np.random.get_state()
    try:
        with forked:
            torch.manual_seed(seed)
            np.random.seed(seed)
            yield
    finally:
        np.random.set_state(state)
