"""A trainer under examination, and what the doctor's checks return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from .rollout.engine import DecodeRequest, SegmentEngine
from .rollout.transformers import TransformersEngine
from .trainer import UloRLTrainer

Figures = dict[str, float | int | str | None]


@dataclass(frozen=True)
class Check:
    """What one check found.

    Args:
        name: The check.
        ok: Whether it passed.
        figure: What was measured; the first entry is the one that decides.
        message: What that means, and after a failure the way out.
    """

    name: str
    ok: bool
    figure: Figures
    message: str


@dataclass(frozen=True)
class Tolerance:
    """How far engine and trainer may be apart in the precision of a run, in nats.

    float32 leaves only the order of summation. bfloat16 has 8 bits of mantissa: a logit of 20 is off by up to 0.06, and
    kernels round differently, so that single tokens may be far off and only the mean is judged.

    Args:
        mean: Mean gap of a token.
        largest: Gap of any token; None: not judged.
        tie: Gap of two tokens whose order rounding may turn.
    """

    mean: float
    largest: float | None
    tie: float


EXACT = Tolerance(mean=1e-4, largest=2e-3, tie=2e-3)
ROUNDED = Tolerance(mean=0.03, largest=None, tie=0.25)


@dataclass(eq=False)
class Completion:
    """What an engine made of a prompt, call by call."""

    prompt_ids: NDArray[Any]
    limit: int
    token_ids: list[int] = field(default_factory=list)
    per_token_logps: list[float] = field(default_factory=list)
    is_stopped: bool = False
    faults: list[str] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended or used up its limit."""
        return self.is_stopped or len(self.token_ids) >= self.limit

    @property
    def all_ids(self) -> NDArray[np.int32]:
        """Prompt and completion."""
        return np.concatenate([self.prompt_ids, np.asarray(self.token_ids, dtype=np.int32)]).astype(np.int32)


class Patient:
    """A trainer under examination.

    Args:
        trainer: Built from the configuration, not trained.
        num_prompts: Prompts that are decoded.
        num_tokens: Most tokens that a check decodes for each.
    """

    def __init__(self, trainer: UloRLTrainer, *, num_prompts: int, num_tokens: int) -> None:
        self.trainer = trainer
        self.num_tokens = min(num_tokens, trainer.args.max_completion_length)
        rows = trainer.train_dataset.select(range(min(num_prompts, len(trainer.train_dataset))))
        self.prompts = [np.asarray(ids, np.int32) for ids in trainer._tokenized(list(rows["prompt"]))]

    @property
    def engine(self) -> SegmentEngine:
        """The engine that training would decode with."""
        return self.trainer.rollout_engine

    @property
    def segment_length(self) -> int:
        """Tokens of a segment, in the proportion that the configuration has to its limit."""
        return max(1, -(-self.num_tokens // max(2, self.trainer.args.num_segments)))

    @property
    def tolerance(self) -> Tolerance:
        """What rounding may do in this run's precision."""
        is_exact = self.trainer.model.dtype == torch.float32 and self.trainer.accelerator.mixed_precision == "no"
        return EXACT if is_exact else ROUNDED

    def decode(self, prompts: Sequence[NDArray[Any]], limits: Sequence[int], segment_length: int) -> list[Completion]:
        """Decode prompts to their end or limit, by at most `segment_length` tokens a call, noting broken promises."""
        completions = [Completion(ids, limit) for ids, limit in zip(prompts, limits, strict=True)]
        while unfinished := [completion for completion in completions if not completion.is_finished]:
            budgets = [min(segment_length, c.limit - len(c.token_ids)) for c in unfinished]
            requests = [DecodeRequest(c.all_ids, budget) for c, budget in zip(unfinished, budgets, strict=True)]
            answered = set()
            for decoded in self.engine.decode(requests):
                completion, budget = unfinished[decoded.request_index], budgets[decoded.request_index]
                answered.add(decoded.request_index)
                ids = [int(token) for token in decoded.token_ids]
                completion.faults += _faults(ids, decoded.is_stopped, budget, self.trainer.eos_token_ids)
                completion.token_ids += ids
                completion.per_token_logps += [float(logp) for logp in decoded.per_token_logps]
                completion.is_stopped = decoded.is_stopped
            if len(answered) < len(requests) or any(not c.token_ids for c in unfinished):
                raise RuntimeError(
                    f"The engine answered {len(answered)} of {len(requests)} requests, or without a token: see its log."
                )
        return completions

    @cached_property
    def samples(self) -> list[Completion]:
        """Completions sampled in segments, as training would."""
        return self.decode(self.prompts, [self.room(ids) for ids in self.prompts], self.segment_length)

    def room(self, prompt_ids: NDArray[Any]) -> int:
        """Most tokens that a check decodes behind a prompt, at least one."""
        return max(1, min(self.num_tokens, self.trainer._rows.room(prompt_ids.size)))

    def score(self, all_ids: NDArray[Any], num_completion: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the trainer's log-probabilities and entropies of the last tokens, each of shape `(num_completion,)`."""
        ids = torch.from_numpy(all_ids.astype(np.int64))[None].to(self.trainer.accelerator.device)
        model = self.trainer.model
        was_training = model.training
        model.train(False)
        try:
            with torch.no_grad(), self.trainer.compute_loss_context_manager():
                logps, entropies, _ = self.trainer._get_per_token_logps_and_entropies(
                    model, ids, torch.ones_like(ids), num_completion, compute_entropy=True
                )
        finally:
            model.train(was_training)
        assert entropies is not None
        return logps[0].double().cpu().numpy(), entropies[0].double().cpu().numpy()

    @contextmanager
    def greedy(self) -> Iterator[None]:
        """Have the engine take the likeliest token."""
        engine = cast(Any, self.engine)
        if isinstance(engine, TransformersEngine):
            config = engine._generation_config
            kept = config.do_sample, config.temperature
            config.do_sample, config.temperature = False, 1.0
            try:
                yield
            finally:
                config.do_sample, config.temperature = kept
        else:
            generation = engine._generation
            kept = generation.temperature
            generation.temperature = 0.0
            try:
                yield
            finally:
                generation.temperature = kept

    @contextmanager
    def changed_weights(self) -> Iterator[None]:
        """Add noise to the trained weights, half of each tensor's own spread, and take it away again."""
        trained = [value for value in self.trainer.model.parameters() if value.requires_grad]
        kept = [value.detach().clone() for value in trained]
        generator = torch.Generator().manual_seed(0)
        try:
            with torch.no_grad():
                for value in trained:
                    noise = torch.randn(value.shape, generator=generator).to(value)
                    value.add_(0.5 * noise * (float(value.float().std(unbiased=False)) or 0.01))
            self.trainer._last_loaded_step = -1  # an engine with weights of its own loads them anew
            yield
        finally:
            with torch.no_grad():
                for value, before in zip(trained, kept, strict=True):
                    value.copy_(before)
            self.trainer._last_loaded_step = -1


def _faults(ids: list[int], is_stopped: bool, budget: int, eos_token_ids: Sequence[int]) -> list[str]:
    """Return which promises of an engine a decoded segment breaks."""
    ends = [place for place, token in enumerate(ids) if token in eos_token_ids]
    faults = []
    if len(ids) > budget:
        faults.append(f"{len(ids)} tokens for a budget of {budget}")
    if ends and ends[0] != len(ids) - 1:
        faults.append("tokens behind an end of sequence")
    if is_stopped != (bool(ends) and ends[-1] == len(ids) - 1):
        faults.append(f"said to be {'ended' if is_stopped else 'unfinished'}, but its last token says otherwise")
    if not is_stopped and len(ids) < budget:
        faults.append(f"given up after {len(ids)} of {budget} tokens")
    return faults
