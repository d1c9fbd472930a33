"""How rows of the training set look to the engine and to reward functions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational

from .rollout.collector import Prompt
from .rollout.pool import Rollout, RolloutGroup
from .rollout.scoring import RewardInput

_CACHED_ROWS = 256
_ROLLOUT_COLUMNS = ("prompt", "completion", "completion_ids")


class EmptyRows(torch.utils.data.Dataset[dict[str, Any]]):
    """As many rows as a data set has, with nothing in them.

    The dataloader only drives the steps, and hands out every row of a generation batch anew for each micro-batch: with
    1,024 rollouts in 512 micro-batches half a million of them per batch, which take seconds to read.

    Args:
        num_rows: Rows of the data set.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {}


class PromptRows:
    """Turns rows into prompts, and finished rollouts into what TRL would show reward functions.

    Args:
        dataset: The training set.
        tokenizer: Decodes completions.
        tokenize: Prompts to token ids, as TRL renders them.
        max_completion_length: Length limit of completions.
        model_limit: Positions of the model, for prompt and completion together; None for no limit.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        tokenize: Callable[[list[Any]], list[list[int]]],
        *,
        max_completion_length: int,
        model_limit: int | None,
    ) -> None:
        # A row is read for each rollout of its group, and reading takes longer than copying. A copy, as a reward function
        # may change what it is given.
        self._read: Callable[[int], dict[str, Any]] = lru_cache(_CACHED_ROWS)(dataset.__getitem__)
        self._tokenizer = tokenizer
        self._tokenize = tokenize
        self._max_completion_length = max_completion_length
        self._model_limit = model_limit

    def __getitem__(self, row_index: int) -> dict[str, Any]:
        """Return a row, with all its columns."""
        return copy.deepcopy(self._read(row_index))

    def prompts(self, row_indices: list[int]) -> list[Prompt]:
        """Tokenize the prompts of some rows, each with the completion tokens that fit behind it.

        Raises:
            ValueError: If a prompt leaves no room.
        """
        prompts = []
        for index, ids in zip(
            row_indices, self._tokenize([copy.deepcopy(self._read(i)["prompt"]) for i in row_indices]), strict=True
        ):
            room = self.room(len(ids))
            if room < 1:
                raise ValueError(
                    f"The prompt in row {index} has {len(ids)} tokens, but the model has only {self._model_limit} "
                    "positions, so no completion fits behind it. Filter such prompts out."
                )
            prompts.append(Prompt(ids, room))
        return prompts

    def room(self, prompt_length: int) -> int:
        """Return the most completion tokens that fit behind a prompt."""
        limit, positions = self._max_completion_length, self._model_limit
        return limit if positions is None else min(limit, positions - prompt_length)

    def render(self, group: RolloutGroup, rollout: Rollout) -> RewardInput:
        """Decode a finished rollout as TRL will: its reward is needed before TRL sees the batch."""
        row, ids = self[group.row_index], rollout.completion_ids
        is_chat = is_conversational({"prompt": row["prompt"]})
        completion: Any
        if is_chat and self.has_response_format:
            completion = [parse_response(self._tokenizer, ids.tolist(), prefix=group.prompt_ids.tolist(), tools=[])]
        else:
            (text,) = self._tokenizer.batch_decode([ids.tolist()], skip_special_tokens=True)
            completion = [{"role": "assistant", "content": text}] if is_chat else text
        columns = {name: value for name, value in row.items() if name not in _ROLLOUT_COLUMNS}
        return RewardInput(rollout, row["prompt"], completion, ids, columns)

    @cached_property
    def has_response_format(self) -> bool:
        """Whether TRL parses this tokenizer's completions instead of decoding them."""
        names = ("response_template", "response_schema")
        return any(getattr(self._tokenizer, name, None) is not None for name in names)
