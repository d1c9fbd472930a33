"""The engine on `model.generate`: any device, any architecture of transformers, no server."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import is_peft_model
from torch.distributed.fsdp import FSDPModule
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from .engine import DecodedSegment, DecodeRequest


class _LogprobRecorder(LogitsProcessor):
    """Record the log-probability of each sampled token inside the sampling loop, without a second forward pass.

    Called with the scores of the next token and all ids so far, so a token is read off one call after it was drawn.
    Custom processors run before the temperature is applied, hence the division here.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._next_logps: torch.Tensor | None = None
        self._columns: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._read_last(input_ids)
        self._next_logps = torch.log_softmax(scores.float() / self._temperature, dim=-1)
        return scores

    def _read_last(self, input_ids: torch.Tensor) -> None:
        if self._next_logps is not None:
            self._columns.append(self._next_logps.gather(1, input_ids[:, -1:]).squeeze(1))

    def per_token_logps(self, sequences: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of all new tokens, shape `(B, N)`, once the ids are complete."""
        self._read_last(sequences)
        return torch.stack(self._columns, dim=1)


_MOST_MASK_CELLS = 2**26  # about 0.6 GiB for what attention makes of a mask on a CPU


def _prefill_chunk(num_rows: int, width: int) -> int | None:
    """Return how many columns of padded rows may go through the model at once; None for all of them.

    Rows of unequal length need a mask of rows x columns x width, which for a prefix of 100k tokens would be tens of GiB.
    Rows of equal length need none.
    """
    if num_rows * width * width <= _MOST_MASK_CELLS:
        return None
    return max(1, _MOST_MASK_CELLS // (num_rows * width))


class _TokenBudget(StoppingCriteria):
    """End each row at its own number of new tokens."""

    def __init__(self, budgets: torch.Tensor, prefix_width: int) -> None:
        self._last_width = budgets + prefix_width

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: object) -> torch.BoolTensor:
        return torch.as_tensor(input_ids.size(1) >= self._last_width)  # type: ignore[return-value]


class TransformersEngine:
    """Decodes segments with `model.generate`, in batches of rows of similar length.

    Args:
        generation_model: Context in which the policy can generate: unwrapped, with its weights gathered.
        generation_config: Sampling settings; `max_new_tokens` is set per call.
        eos_token_ids: Ids that end a completion.
        pad_token_id: Fills short rows.
        max_batch_size: Rows of one `generate` call.
    """

    def __init__(
        self,
        *,
        generation_model: Callable[[], AbstractContextManager[PreTrainedModel]],
        generation_config: GenerationConfig,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        max_batch_size: int,
    ) -> None:
        self._generation_model = generation_model
        self._generation_config = generation_config
        self._eos_token_ids = np.asarray(eos_token_ids)
        self._pad_token_id = pad_token_id
        self._max_batch_size = max_batch_size

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodedSegment]:
        """Continue every request by sampling; results come batch by batch, the longest prefixes first."""
        longest_first = sorted(range(len(requests)), key=lambda index: -requests[index].token_ids.size)
        # Entered without requests too: gathering sharded weights takes every rank.
        with self._generation_model() as model, _own_generation_config_unset(model):
            for start in range(0, len(requests), self._max_batch_size):
                indices = longest_first[start : start + self._max_batch_size]
                yield from self._decode_batch(model, indices, [requests[index] for index in indices])

    def _decode_batch(
        self, model: PreTrainedModel, indices: list[int], requests: list[DecodeRequest]
    ) -> Iterator[DecodedSegment]:
        width = max(request.token_ids.size for request in requests)
        input_ids = np.full((len(requests), width), self._pad_token_id, dtype=np.int64)
        attention_mask = np.zeros((len(requests), width), dtype=np.int64)
        for row, request in enumerate(requests):
            input_ids[row, width - request.token_ids.size :] = request.token_ids
            attention_mask[row, width - request.token_ids.size :] = 1
        budgets = np.array([request.max_new_tokens for request in requests])
        config = copy.deepcopy(self._generation_config)
        config.max_new_tokens = int(budgets.max())
        if attention_mask.min() == 0:
            config.prefill_chunk_size = _prefill_chunk(*input_ids.shape)
        recorder = _LogprobRecorder(config.temperature)
        generate = cast(Callable[..., torch.Tensor], model.generate)
        sequences = generate(
            input_ids=torch.from_numpy(input_ids).to(model.device),
            attention_mask=torch.from_numpy(attention_mask).to(model.device),
            generation_config=config,
            logits_processor=LogitsProcessorList([recorder]),
            stopping_criteria=StoppingCriteriaList([_TokenBudget(torch.from_numpy(budgets).to(model.device), width)]),
            # Weights are gathered, so ranks need not decode in step; with uneven work they would wait for ever.
            synced_gpus=False,
        )
        token_ids = sequences[:, width:].cpu().numpy()
        per_token_logps = recorder.per_token_logps(sequences).cpu().numpy()
        for index, budget, ids, logps in zip(indices, budgets, token_ids, per_token_logps, strict=True):
            eos_positions = np.flatnonzero(np.isin(ids[:budget], self._eos_token_ids))
            length = int(eos_positions[0]) + 1 if eos_positions.size else int(budget)
            yield DecodedSegment(index, ids[:length], logps[:length], is_stopped=bool(eos_positions.size))


@contextmanager
def unsharded(model: torch.nn.Module, *, reshards_after_forward: bool) -> Iterator[None]:
    """Hold the whole weights of a model that FSDP2 has sharded.

    Its modules gather their weights in each forward pass, with every rank, and free them after it. A rank that decodes
    more than another would wait for it for ever, so all weights are gathered once and kept.

    Args:
        model: The sharded model.
        reshards_after_forward: What its modules do outside of this context.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
            module.set_reshard_after_forward(reshards_after_forward, recurse=False)


@contextmanager
def step_hook_disabled(deepspeed_engine: Any) -> Iterator[None]:
    """Keep ZeRO-3 from comparing ranks in forward passes that ranks run each for itself.

    TRL takes ZeRO-3's hooks off the model's modules for generation, but one stays on the model itself: in the first two
    forward passes it compares with the other ranks which modules were run. A rank without anything to decode runs none,
    and the others would wait for it.
    """
    coordinator = deepspeed_engine.optimizer.parameter_offload.get_param_coordinator()
    coordinator.reset_step = lambda: None  # in the place of the method
    try:
        yield
    finally:
        del coordinator.reset_step


@contextmanager
def _own_generation_config_unset(model: PreTrainedModel) -> Iterator[None]:
    """Keep `generate` from filling in fields of the model's own generation configuration.

    Some would restrict sampling behind the recorded log-probabilities (`min_p`), or end every segment
    (`forced_eos_token_id`).
    """
    own = cast(Any, model).get_base_model() if is_peft_model(model) else model
    kept, own.generation_config = own.generation_config, cast(Any, GenerationConfig)()
    try:
        yield
    finally:
        own.generation_config = kept
