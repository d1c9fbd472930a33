"""Micro-batches without a long tail's padding: rows of similar length together, each micro-batch as wide as it needs.

TRL pads every micro-batch to the longest row of the whole generation batch. Here rows are dealt by length to the
micro-batches that feed one optimizer step, and each micro-batch loses the columns in which none of its rows has a token.
With `dynamic_micro_batches` short rows share a micro-batch, as many as fit where the longest rows fit, and fewer are left.
Pure functions on TRL's batches: dictionaries of tensors with one row per completion, prompts padded on the left and
completions on the right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

# TRL takes a matrix of one column for one value per sequence, and none at all for every column.
_MIN_COMPLETION_COLUMNS = 2
# Losses that are sums over rows with weights that don't depend on the other rows of the micro-batch.
_ADDITIVE_LOSS_TYPES = frozenset({"grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"})
# Those of them that don't depend on how many rows it has either: divided by the tokens of the whole batch.
TOKEN_SUM_LOSS_TYPES = ("dapo", "cispo", "vespo")
# What a forward and backward pass takes besides its tokens, as so many more of them: its kernels are launched one by one.
# The embedded model's takes as long as 96 on a CPU, without what Trainer does around it.
_PASS_CELLS = 128


def is_additive(
    loss_type: str, *, has_entropy_bonus: bool, has_auxiliary_loss: bool, top_entropy_quantile: float
) -> bool:
    """Whether the loss of an update stays the same however its rows are dealt to micro-batches.

    Loss "bnpo", TRL's entropy bonus, the load-balancing loss of a mixture of experts and the choice of the tokens of
    highest entropy are means or quantiles over a micro-batch, so they depend on which rows share one.

    Args:
        loss_type: TRL's name of the loss.
        has_entropy_bonus: Whether an entropy bonus is added.
        has_auxiliary_loss: Whether a load-balancing loss is added.
        top_entropy_quantile: Share of tokens, those of highest entropy, that the loss acts on.
    """
    depends_on_company = has_entropy_bonus or has_auxiliary_loss or top_entropy_quantile < 1.0
    return loss_type in _ADDITIVE_LOSS_TYPES and not depends_on_company


def window_slots(step: int, *, window_start: int, window_length: int, num_slots: int) -> range:
    """Return which buffered micro-batches are in the optimizer step of backward pass `step`, in one pass over the buffer.

    A window of accumulation may begin inside a buffer, span several, or go over the same one several times; only rows of
    the same pass may change places.

    Args:
        step: Backward passes before this one, since the start of training.
        window_start: Backward passes before the window's first.
        window_length: Backward passes of the window.
        num_slots: Micro-batches of the buffer; each pass over it begins at a multiple of this.

    Example:
        >>> window_slots(5, window_start=4, window_length=4, num_slots=6)  # passes 4 and 5; 6 and 7 see a new buffer
        range(4, 6)
    """
    first_pass = step - step % num_slots
    return range(
        max(window_start, first_pass) - first_pass,
        min(window_start + window_length, first_pass + num_slots) - first_pass,
    )


def dealt_rows(lengths: Sequence[int], num_micro_batches: int) -> list[list[int]]:
    """Deal rows to micro-batches of equal size by length, the longest first.

    A micro-batch that is too large for the memory thus fails at once. Rows without a token, which fit anywhere, are spread
    evenly: a micro-batch of nothing else has no clip ratio or entropy to report.

    Args:
        lengths: Length of each row in tokens.
        num_micro_batches: A divisor of the number of rows.

    Returns:
        The rows of each micro-batch.

    Example:
        >>> dealt_rows([3, 9, 0, 8, 4, 0], 2)
        [[1, 3, 5], [4, 0, 2]]
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    size = len(lengths) // num_micro_batches
    empty = deque(row for row in order if lengths[row] == 0)
    parts: list[list[int]] = [[] for _ in range(num_micro_batches)]
    for room in (size - 1, size):  # a place for another row in each, unless there are not enough others
        while empty and any(len(part) < room for part in parts):
            for part in reversed(parts):
                if empty and len(part) < room:
                    part.append(empty.popleft())
    longest_first = iter(order)
    return [[*islice(longest_first, size - len(part)), *part] for part in parts]


def joined_rows(
    prompt_widths: ArrayLike, widths: ArrayLike, num_micro_batches: int, *, rank: int = 0
) -> list[list[int]]:
    """Deal rows by length where they may share a micro-batch as long as it gets no larger than the largest.

    The largest is that of micro-batches of equal numbers of rows, on whichever rank. Within this bound it is the cheapest way
    to cut the rows, ordered by length, into at most `num_micro_batches` parts: the fewest cells of padded matrices, where a
    pass more costs as much as some cells more. Rows without a token, which add nothing to a loss that is divided by the
    batch's tokens, are left out.

    Args:
        prompt_widths: Columns that each row's prompt takes, padding to a multiple included, shape `(ranks, rows)`.
        widths: Columns that its completion takes; 0 without a token, shape `(ranks, rows)`. Every rank has as many rows in
            each micro-batch, so that ranks stay in step; one with fewer rows that have tokens adds others. A micro-batch
            counts as on the rank where it is largest, for which the others wait.
        num_micro_batches: Most micro-batches, a divisor of the number of rows.
        rank: Whose rows are dealt.

    Returns:
        The rows of each micro-batch, the longest ones first.

    Example:
        >>> joined_rows([[20] * 8], [[100, 900, 90, 90, 80, 80, 70, 0]], 8)
        [[1], [0, 2, 3, 4, 5, 6]]
    """
    prompts, completions = np.asarray(prompt_widths), np.asarray(widths)
    order = np.lexsort((-prompts, -completions), axis=1)
    order = order[:, : max(1, int((completions > 0).sum(axis=1).max()))]
    prompts, completions = (np.take_along_axis(values, order, axis=1) for values in (prompts, completions))
    size = np.shape(widths)[1] // num_micro_batches
    counts = _cheapest_counts(prompts, completions, size, num_micro_batches)
    return [part.tolist() for part in np.split(order[rank], np.cumsum(counts)[:-1])]


def _cheapest_counts(
    prompt_widths: NDArray[np.int64], widths: NDArray[np.int64], size: int, num_micro_batches: int
) -> list[int]:
    """Return how many rows each micro-batch holds; see `joined_rows`.

    Args:
        prompt_widths: Columns that each row's prompt takes, shape `(ranks, N)`.
        widths: Columns that its completion takes, the longest first, shape `(ranks, N)`.
        size: Rows of a micro-batch if all are of one size.
        num_micro_batches: Most micro-batches.
    """
    num_rows = widths.shape[1]
    starts = np.arange(0, num_rows, size)
    most_cells = int(size * (np.maximum.reduceat(prompt_widths, starts, axis=1) + widths[:, starts]).max())
    least_columns = (prompt_widths + widths).max(axis=0)  # of a micro-batch with that row in it
    counts: list[int] = []
    pass_cells = _PASS_CELLS
    while not counts or len(counts) > num_micro_batches:
        cost, first = np.zeros(num_rows + 1), np.zeros(num_rows + 1, dtype=np.int64)
        for end in range(1, num_rows + 1):
            starts = np.arange(max(0, end - most_cells // int(least_columns[end - 1])), end)
            longest_prompts = np.maximum.accumulate(prompt_widths[:, starts][:, ::-1], axis=1)[:, ::-1]
            cells = (end - starts) * (longest_prompts + widths[:, starts]).max(axis=0)
            costs = np.where(cells <= most_cells, cost[starts] + cells + pass_cells, np.inf)
            best = int(costs.argmin())
            cost[end], first[end] = costs[best], starts[best]
        counts, end = [], num_rows
        while end:
            counts.append(int(end - first[end]))
            end = int(first[end])
        pass_cells *= 2  # until it is worth no more passes than there are; as many as that always fit
    return counts[::-1]


def dealt_window(
    batches: Sequence[dict[str, Any]],
    *,
    gather: Callable[[Tensor], Tensor] | None = None,
    rank: int = 0,
    pad_to_multiple_of: int | None = None,
) -> list[list[tuple[int, int]]]:
    """Deal a window's rows to its micro-batches by the length of their completions.

    Args:
        batches: The window's micro-batches as TRL made them: equal numbers of rows, equally padded.
        gather: Joins a tensor's first dimension over all ranks. Given, short rows share a micro-batch, those without a token
            are left out, and the first micro-batches are left without rows: gradients are exchanged in the last.
        rank: This process's place in what is gathered.
        pad_to_multiple_of: The widths that `cut` leaves are multiples of it.

    Returns:
        For each micro-batch the place of its rows now: a micro-batch and a row of it.
    """
    size = len(batches[0]["completion_mask"])
    ends = torch.cat([_row_ends(batch["completion_mask"]) for batch in batches])
    if gather is None:
        parts = dealt_rows(ends.tolist(), len(batches))
    else:
        prompt_ends = torch.cat([_row_ends(batch["prompt_mask"].flip(1)) for batch in batches])
        multiple = pad_to_multiple_of or 1
        own = torch.stack([prompt_ends, ends.clamp(min=_MIN_COMPLETION_COLUMNS) * (ends > 0)])
        own = (own + multiple - 1) // multiple * multiple
        prompt_widths, widths = gather(own.unsqueeze(0)).cpu().numpy().swapaxes(0, 1)
        joined = joined_rows(prompt_widths, widths, len(batches), rank=rank)
        parts = [[] for _ in range(len(batches) - len(joined))] + joined
    return [[divmod(row, size) for row in rows] for rows in parts]


def deal(batches: Sequence[dict[str, Any]], index: int, places: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the `index`-th of a window's micro-batches after its rows were dealt.

    Args:
        batches: As in `dealt_window`.
        index: Which one.
        places: What `dealt_window` gave for it.

    Returns:
        A new dictionary; what has no rows, such as `num_items_in_batch`, is that of `batches[index]`.
    """
    if not places:
        return {name: value[:0] if _has_rows(value) else value for name, value in batches[index].items()}
    return {
        name: torch.stack([batches[slot][name][row] for slot, row in places]) if _has_rows(value) else value
        for name, value in batches[index].items()
    }


def cut(batch: dict[str, Any], *, pad_to_multiple_of: int | None = None) -> dict[str, Any]:
    """Remove the columns in which no row has a token: the prompts' first ones and the completions' last ones.

    What counts are the masks. A truncated completion that is left out of the loss has an empty mask and widens nothing.

    Args:
        batch: A micro-batch with `prompt_ids` and `prompt_mask` of shape `(B, P)`, `completion_ids` and
            `completion_mask` of shape `(B, T)`. Other tensors whose second dimension is `T` are cut as the completions.
        pad_to_multiple_of: The widths that are left are multiples of it.

    Returns:
        A new dictionary of views.
    """
    num_prompt_columns, num_columns = batch["prompt_mask"].size(1), batch["completion_mask"].size(1)
    prompt_width, width = torch.stack(
        [_row_ends(batch["prompt_mask"].flip(1)).max(), _row_ends(batch["completion_mask"]).max()]
    ).tolist()
    prompt_width = _padded(max(prompt_width, 1), pad_to_multiple_of, num_prompt_columns)
    width = _padded(max(width, _MIN_COMPLETION_COLUMNS), pad_to_multiple_of, num_columns)

    def narrowed(name: str, value: Any) -> Any:
        if name in ("prompt_ids", "prompt_mask"):
            return value[:, num_prompt_columns - prompt_width :]
        is_per_token = _has_rows(value) and value.dim() > 1 and value.size(1) == num_columns
        return value[:, :width] if is_per_token else value

    return {name: narrowed(name, value) for name, value in batch.items()}


def scored_without_padding(
    score: Callable[[Tensor, Tensor, int], Tensor],
    input_ids: Tensor,
    attention_mask: Tensor,
    num_columns: int,
    *,
    batch_size: int,
    pad_to_multiple_of: int | None = None,
) -> Tensor:
    """Score completions in batches of similar length, each cut to its own longest row.

    Every rank makes as many calls as without: sharded models need that.

    Args:
        score: Returns a value per completion token, shape `(batch_size, T')`, for ids and attention mask of shape
            `(batch_size, P' + T')` and for `T'`.
        input_ids: Prompts and completions, shape `(B, P + T)`.
        attention_mask: 1 where a token is real, shape `(B, P + T)`.
        num_columns: `T`.
        batch_size: Rows of a call, a divisor of `B`.
        pad_to_multiple_of: The widths are multiples of it.

    Returns:
        The values, shape `(B, T)`; 0 in the columns that were cut, as TRL has it on padding.
    """
    start = input_ids.size(1) - num_columns
    whole = {
        "prompt_ids": input_ids[:, :start],
        "prompt_mask": attention_mask[:, :start],
        "completion_ids": input_ids[:, start:],
        "completion_mask": attention_mask[:, start:],
    }
    scores = None
    for rows in dealt_rows(_row_ends(whole["completion_mask"]).tolist(), len(input_ids) // batch_size):
        batch = cut({name: tensor[rows] for name, tensor in whole.items()}, pad_to_multiple_of=pad_to_multiple_of)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        width = batch["completion_ids"].size(1)
        values = score(ids, mask, width)
        scores = values.new_zeros((len(input_ids), num_columns)) if scores is None else scores
        scores[rows, :width] = values
    assert scores is not None
    return scores


def padding_counts(batch: dict[str, Any], num_uncut_columns: int) -> Tensor:
    """Count what goes through the model for a micro-batch, to be added over micro-batches and ranks.

    Args:
        batch: As in `cut`.
        num_uncut_columns: Columns of prompts and completions together before anything was cut.

    Returns:
        Cells of the padded matrix, cells that it had uncut, and real tokens in it, shape `(3,)`, float64.
    """
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    num_cells = torch.tensor([mask.numel(), len(mask) * num_uncut_columns], dtype=torch.float64, device=mask.device)
    return torch.cat([num_cells, mask.sum().double().unsqueeze(0)])


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _row_ends(mask: Tensor) -> Tensor:
    """Return the number of columns up to each row's last token, shape `(B,)`."""
    return (mask.bool() * torch.arange(1, mask.size(1) + 1, device=mask.device)).amax(dim=1)


def _padded(width: int, multiple: int | None, num_columns: int) -> int:
    multiple = multiple or 1
    return min(-(-width // multiple) * multiple, num_columns)
