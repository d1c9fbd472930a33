"""Dealing rows and cutting columns: nothing but padding is lost, and every window keeps its rows."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from trl_ulorl.microbatches import (
    cut,
    deal,
    dealt_rows,
    dealt_window,
    is_additive,
    joined_rows,
    padding_counts,
    scored_without_padding,
    window_slots,
)


def make_batches(prompt_lengths, lengths, num_micro_batches, *, is_masked=()):
    """Make TRL's micro-batches: prompts padded on the left, completions on the right, a value of its own per token."""
    count, num_prompt_columns, num_columns = len(lengths), max(prompt_lengths), max(max(lengths), 1)
    prompt_mask = torch.zeros(count, num_prompt_columns, dtype=torch.long)
    mask, ids = (torch.zeros(count, num_columns, dtype=torch.long) for _ in range(2))
    for row, (prompt_length, length) in enumerate(zip(prompt_lengths, lengths, strict=True)):
        prompt_mask[row, num_prompt_columns - prompt_length :] = 1
        ids[row, :length] = 1000 * (row + 1) + torch.arange(length)
        mask[row, :length] = int(row not in is_masked)
    batch = {
        "prompt_ids": prompt_mask * torch.arange(1, count + 1).unsqueeze(1),
        "prompt_mask": prompt_mask,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.arange(count).float(),
        "old_per_token_logps": -ids.float(),
        "sampling_per_token_logps": -2 * ids.float(),
        "token_ages": ids.int(),
        "importance_sampling_ratio": torch.arange(count).float().unsqueeze(1),  # one value per sequence
    }
    size = count // num_micro_batches
    return [
        {
            **{name: value[start : start + size] for name, value in batch.items()},
            "num_items_in_batch": mask.sum(),
            "num_images": None,
        }
        for start in range(0, count, size)
    ]


def first_rows(batch, count):
    return {name: value[:count] if torch.is_tensor(value) and value.dim() else value for name, value in batch.items()}


def contents(batch):
    """Return one entry per row with all that it holds: the tokens of every matrix, and the row's own values."""
    rows = []
    for row in range(len(batch["advantages"])):
        real, prompt = batch["completion_mask"][row].bool(), batch["prompt_mask"][row].bool()
        per_token = ("completion_ids", "old_per_token_logps", "sampling_per_token_logps", "token_ages")
        rows.append(
            (
                tuple(batch["prompt_ids"][row][prompt].tolist()),
                *(tuple(batch[name][row][real].tolist()) for name in per_token),
                batch["advantages"][row].item(),
                batch["importance_sampling_ratio"][row].item(),
            )
        )
    return rows


# ------------------------------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize(
    ("num_slots", "window_starts", "expected"),
    [
        (2, [0, 2, 4], [(0, 2), (0, 2), (0, 2), (0, 2)]),  # a batch is a window
        (4, [0, 2, 4], [(0, 2), (0, 2), (2, 4), (2, 4)]),  # a batch feeds several windows
        (2, [0, 4], [(0, 2), (0, 2), (0, 2), (0, 2)]),  # a window spans two batches, or two passes over one
        (3, [0, 2, 4, 6], [(0, 2), (0, 2), (2, 3), (0, 1), (1, 3), (1, 3)]),  # they don't align
        (4, [0, 3, 4], [(0, 3), (0, 3), (0, 3), (3, 4)]),  # the last window of an epoch is short
        (1, [0, 1], [(0, 1)]),
    ],
)
def test_slots_of_a_window(num_slots, window_starts, expected):
    for step, (first, last) in enumerate(expected):
        start = max(s for s in window_starts if s <= step)
        end = min(s for s in window_starts if s > step)
        slots = window_slots(step, window_start=start, window_length=end - start, num_slots=num_slots)
        assert slots == range(first, last), step


# ------------------------------------------------------------------------------------------------------------- dealing


def test_rows_are_dealt_longest_first():
    assert dealt_rows([3, 9, 1, 8, 4, 2], 3) == [[1, 3], [4, 0], [5, 2]]


def test_rows_of_equal_length_keep_their_order():
    assert dealt_rows([5, 5, 5, 5], 2) == [[0, 1], [2, 3]]


def test_rows_without_a_token_are_spread():
    assert dealt_rows([0, 7, 0, 0, 9, 8, 6, 0, 0], 3) == [[4, 5, 3], [1, 2, 8], [6, 0, 7]]
    assert dealt_rows([0, 0, 0, 5], 2) == [[3, 1], [0, 2]]
    assert dealt_rows([0] * 4, 2) == [[1, 3], [0, 2]]


def test_dealt_micro_batches_by_hand():
    batches = make_batches([1, 2, 3, 1], [2, 6, 5, 3], 2)
    first, second = (deal(batches, index, dealt_window(batches)[index]) for index in range(2))
    assert first["advantages"].tolist() == [1, 2] and second["advantages"].tolist() == [3, 0]
    assert first["completion_ids"][:, 0].tolist() == [2000, 3000]
    assert first["num_items_in_batch"] == 16 and first["num_images"] is None
    assert cut(first)["completion_ids"].shape == (2, 6) and cut(first)["prompt_ids"].shape == (2, 3)
    assert cut(second)["completion_ids"].shape == (2, 3) and cut(second)["prompt_ids"].shape == (2, 1)
    assert batches[0]["advantages"].tolist() == [0, 1], "the buffer must stay as it is"


# ------------------------------------------------------------------------------------------------------------- joining


def cells_of(parts, prompt_lengths, lengths):
    """Cells of a rank's padded micro-batches."""
    prompts, completions = np.asarray(prompt_lengths), np.asarray(lengths)
    return [len(part) * int(prompts[part].max() + completions[part].max()) for part in parts]


def test_short_rows_join_by_hand():
    # Two rows of 90 + 10 columns are the bound of 200 cells. Those of 40 fit four to a micro-batch, those of 10 all.
    lengths = [10, 40, 90, 40, 10, 90, 40, 40]
    assert joined_rows([[10] * 8], [lengths], 4) == [[2, 5], [1, 3, 6, 7], [0, 4]]


def test_a_micro_batch_is_as_wide_as_its_own_prompts():
    # With 50 columns for every prompt only three of the short rows would fit where one of 150 + 50 does.
    assert joined_rows([[50, 2, 3, 1, 2]], [[150, 10, 8, 9, 9]], 5) == [[0], [1, 4, 3, 2]]
    # Of rows as long, those of long prompts come first.
    assert joined_rows([[2, 90, 2, 90]], [[40] * 4], 4) == [[1], [3], [0, 2]]


def test_the_largest_micro_batch_bounds_the_others():
    assert joined_rows([[5] * 8], [[100] * 8], 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert joined_rows([[96] * 4], [[4096, 2000, 1990, 1900]], 4) == [[0], [1, 2], [3]]
    # The first two rows make micro-batches of equal size no larger than 2 x (10 + 60) cells: the long prompt is elsewhere.
    assert joined_rows([[10, 10, 60, 5]], [[60, 60, 4, 4]], 2) == [[0, 1], [2, 3]]


def test_rows_without_a_token_are_left_out():
    assert joined_rows([[400, 10, 10, 400]], [[0, 60, 50, 0]], 4) == [[1], [2]]
    assert joined_rows([[10, 20, 30, 40]], [[0] * 4], 4) == [[3]], "a rank can't do without a backward pass"


def test_a_rank_with_fewer_tokens_has_as_many_rows():
    prompt_lengths, lengths = [[10] * 4, [10, 20, 10, 10]], [[90, 0, 80, 0], [0, 0, 0, 90]]
    assert joined_rows(prompt_lengths, lengths, 4, rank=0) == [[0], [2]]
    assert joined_rows(prompt_lengths, lengths, 4, rank=1) == [[3], [1]]


@pytest.mark.parametrize("size", [1, 2, 3])
@given(data=st.data())
@settings(max_examples=60)
def test_joined_rows_are_cut_where_it_is_cheapest(size, data):
    num_micro_batches, num_ranks = data.draw(st.integers(1, 7 // size)), data.draw(st.integers(1, 3))
    num_rows = size * num_micro_batches

    def drawn(tokens):
        rows = st.lists(tokens, min_size=num_rows, max_size=num_rows)
        return data.draw(st.lists(rows, min_size=num_ranks, max_size=num_ranks))

    prompt_lengths, lengths = drawn(st.integers(1, 600)), drawn(st.just(0) | st.integers(0, 3000))
    by_rank = [joined_rows(prompt_lengths, lengths, num_micro_batches, rank=rank) for rank in range(num_ranks)]
    counts = [len(part) for part in by_rank[0]]
    assert all([len(part) for part in parts] == counts for parts in by_rank), "ranks stay in step"
    num_dealt = max(1, max(np.count_nonzero(row) for row in lengths))
    assert sum(counts) == num_dealt and min(counts) >= 1 and len(counts) <= num_micro_batches

    ordered = []
    for prompts, completions, parts in zip(prompt_lengths, lengths, by_rank, strict=True):
        rows = [row for part in parts for row in part]
        assert len(set(rows)) == num_dealt
        assert sum(completions[row] for row in rows) == sum(completions), "every token is trained on"
        keys = [(completions[row], prompts[row]) for row in rows]
        assert keys == sorted(keys, reverse=True)
        ordered.append(rows)

    def cells(borders):
        """Of each micro-batch on the rank where it is largest, as ranks wait for each other."""
        of_ranks = [
            cells_of(np.split(rows, borders), prompt_lengths[rank], lengths[rank]) for rank, rows in enumerate(ordered)
        ]
        return np.max(of_ranks, axis=0).tolist()

    bound = max(cells(range(size, num_dealt, size)))
    cheapest = {}  # cells by number of micro-batches, in whatever way the rows are cut
    for number in range(num_dealt):
        for borders in combinations(range(1, num_dealt), number):
            if max(parts := cells(borders)) <= bound:
                cheapest[number + 1] = min(cheapest.get(number + 1, np.inf), sum(parts))
    borders = np.cumsum(counts)[:-1]
    assert max(cells(borders)) <= bound and sum(cells(borders)) == cheapest[len(counts)]
    cost = {number: cells + 128 * number for number, cells in cheapest.items()}
    best = [number for number in cost if cost[number] == min(cost.values())]
    assert len(counts) in best or min(best) > num_micro_batches, "a pass counts for more only where there are too few"


def test_another_rank_s_prompts_make_no_room():
    # 400 + 100 columns at most: the long prompts and the long completions are on different ranks.
    prompt_widths, widths = [[400, 400, 10, 10, 10, 10], [10] * 6], [[100] * 6, [490, 400, 300, 200, 120, 110]]
    assert joined_rows(prompt_widths, widths, 6, rank=1) == [[0], [1], [2], [3], [4, 5]]


@pytest.mark.parametrize("multiple", [None, 8, 64])
@given(data=st.data())
@settings(max_examples=60)
def test_no_joined_micro_batch_is_larger_than_the_largest_once_it_is_padded(multiple, data):
    num_micro_batches, size = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    num_rows = num_micro_batches * size
    drawn = [
        st.lists(tokens, min_size=num_rows, max_size=num_rows) for tokens in (st.integers(1, 20), st.integers(1, 300))
    ]
    (batch,) = make_batches(*map(data.draw, drawn), 1)
    multiple_of = multiple or 1
    padding = {name: -value.size(1) % multiple_of for name, value in batch.items() if name.endswith("_mask")}
    batch = {
        name: pad(value, (padding["prompt_mask"], 0) if name.startswith("prompt") else (0, padding["completion_mask"]))
        for name, value in batch.items()
        if name.startswith(("prompt", "completion"))
    }
    batches = [{name: value[i : i + size] for name, value in batch.items()} for i in range(0, num_rows, size)]

    def most_cells(places):
        parts = [cut(deal(batches, 0, part), pad_to_multiple_of=multiple) for part in places if part]
        return max(
            len(part["prompt_ids"]) * (part["prompt_ids"].size(1) + part["completion_ids"].size(1)) for part in parts
        )

    joined = dealt_window(batches, gather=lambda own: own, pad_to_multiple_of=multiple)
    rows = [place for part in joined for place in part]
    assert most_cells(joined) <= most_cells([rows[start : start + size] for start in range(0, num_rows, size)])


@given(data=st.data())
@settings(max_examples=100)
def test_dealt_rows_keep_every_row_and_its_rank_in_length(data):
    num_micro_batches, size = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    num_rows = num_micro_batches * size
    lengths = data.draw(st.lists(st.sampled_from([0, 0, 1, 5, 9]), min_size=num_rows, max_size=num_rows))
    parts = dealt_rows(lengths, num_micro_batches)
    assert [len(part) for part in parts] == [size] * num_micro_batches
    assert sorted(row for part in parts for row in part) == list(range(num_rows))
    real = [lengths[row] for part in parts for row in part if lengths[row]]
    assert real == sorted(real, reverse=True)
    if len(real) >= num_micro_batches:
        assert all(any(lengths[row] for row in part) for part in parts), "a clip ratio needs a token"


def test_a_joined_window_begins_with_the_micro_batches_that_have_no_rows():
    batches = make_batches([2, 3, 1, 2], [60, 5, 4, 3], 4)
    seen = []

    def gather(tensor):
        seen.append(tensor)
        return torch.cat([torch.tensor([[[3, 3, 1, 1], [4, 4, 60, 3]]]), tensor])  # another rank's, and this one's

    places = dealt_window(batches, gather=gather, rank=1)
    assert [len(rows) for rows in places] == [0, 0, 1, 3]
    assert seen[0].tolist() == [[[2, 3, 1, 2], [60, 5, 4, 3]]], "lengths of the prompts and of the completions"
    empty, joined = (deal(batches, index, places[index]) for index in (0, 3))
    assert empty["completion_ids"].shape == (0, 60) and empty["num_items_in_batch"] == 72
    assert cut(joined)["completion_ids"].shape == (3, 5) and joined["advantages"].tolist() == [1, 2, 3]


# ------------------------------------------------------------------------------------------------------------- cutting


def test_every_matrix_is_cut_and_nothing_else():
    (batch,) = make_batches([2, 3], [2, 4], 1)
    once_per_row = ("advantages", "importance_sampling_ratio", "num_items_in_batch", "num_images")
    wide = {
        name: value if name in once_per_row else pad(value, (5, 0) if name.startswith("prompt") else (0, 7))
        for name, value in batch.items()
    }
    assert wide["prompt_ids"].shape == (2, 8) and wide["token_ages"].shape == (2, 11)
    narrow = cut(wide)
    assert list(narrow) == list(batch)
    for name in batch.keys() - {"num_images"}:
        torch.testing.assert_close(narrow[name], batch[name], rtol=0, atol=0)


def test_prompts_as_wide_as_completions_are_told_apart_by_name():
    (batch,) = make_batches([1, 4], [1, 4], 1)
    narrow = cut(first_rows(batch, 1))
    assert narrow["prompt_ids"].tolist() == [[1]] and narrow["completion_ids"].tolist() == [[1000, 0]]


def test_a_masked_completion_widens_nothing():
    (batch,) = make_batches([1, 1], [3, 9], 1, is_masked=[1])
    assert cut(batch)["completion_ids"].shape == (2, 3)


@pytest.mark.parametrize("lengths", [[1, 1], [3, 3]])
def test_two_columns_are_left(lengths):
    """TRL reads one column as one value per sequence, and `[:, -0:]` keeps all."""
    is_masked = [0, 1] if lengths == [3, 3] else []
    (batch,) = make_batches([1, 1, 1], [*lengths, 5], 1, is_masked=is_masked)
    narrow = cut(first_rows(batch, 2))
    assert narrow["completion_ids"].shape == (2, 2)


def test_widths_are_multiples_where_asked():
    (batch,) = make_batches([1, 5, 8], [3, 5, 16], 1)
    narrow = cut(first_rows(batch, 2), pad_to_multiple_of=8)
    assert narrow["prompt_ids"].shape == (2, 8) and narrow["completion_ids"].shape == (2, 8)


@settings(max_examples=200)
@given(data=st.data())
def test_property_only_padding_is_lost(data):
    num_micro_batches, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    count = num_micro_batches * size
    prompt_lengths = data.draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=count, max_size=count))
    is_masked = data.draw(st.sets(st.integers(0, count - 1)))
    batches = make_batches(prompt_lengths, lengths, num_micro_batches, is_masked=is_masked)
    multiple = data.draw(st.sampled_from([None, 4]))
    dealt = [
        cut(deal(batches, index, dealt_window(batches)[index]), pad_to_multiple_of=multiple)
        for index in range(num_micro_batches)
    ]
    before, after = ([row for batch in each for row in contents(batch)] for each in (batches, dealt))
    assert Counter(before) == Counter(after)
    widths = []
    for batch in dealt:
        assert len(batch["advantages"]) == size
        shapes = {
            batch[name].shape for name in ("completion_ids", "completion_mask", "old_per_token_logps", "token_ages")
        }
        assert len(shapes) == 1 and batch["prompt_ids"].shape == batch["prompt_mask"].shape
        widths.append(batch["completion_ids"].size(1))
        needed = max(2, int(batch["completion_mask"].sum(1).max()))
        assert widths[-1] <= max(lengths) and (multiple or widths[-1] <= needed)
    assert widths == sorted(widths, reverse=True)


# ------------------------------------------------------------------------------------------------------------- scoring


def test_scoring_puts_every_value_in_its_place():
    (batch,) = make_batches([1, 4, 2, 3], [3, 9, 2, 5], 1, is_masked=[3])
    calls = []

    def score(ids, mask, num_columns):
        calls.append((tuple(ids.shape), num_columns))
        return (ids * mask)[:, -num_columns:].double()

    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    scores = scored_without_padding(score, ids, mask, 9, batch_size=2)
    torch.testing.assert_close(scores, (batch["completion_ids"] * batch["completion_mask"]).double())
    assert calls == [((2, 4 + 9), 9), ((2, 3 + 2), 2)]  # 9 and 3, then 2 and the masked one


# ------------------------------------------------------------------------------------------------------------- padding


def test_padding_counts_by_hand():
    (batch,) = make_batches([1, 2], [3, 1], 1)
    assert padding_counts(batch, 12).tolist() == [2 * (2 + 3), 2 * 12, 3 + 4]


@pytest.mark.parametrize(
    ("loss_type", "changed", "expected"),
    [
        *((name, {}, True) for name in ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")),
        ("bnpo", {}, False),
        ("a later loss", {}, False),
        ("dapo", {"has_entropy_bonus": True}, False),
        ("dapo", {"has_auxiliary_loss": True}, False),
        ("dapo", {"top_entropy_quantile": 0.2}, False),
    ],
)
def test_losses_that_dealing_leaves_alone(loss_type, changed, expected):
    plain = {"has_entropy_bonus": False, "has_auxiliary_loss": False, "top_entropy_quantile": 1.0}
    assert is_additive(loss_type, **{**plain, **changed}) is expected


def ratios(rng, num_rows, size):
    """Return stock's padded over real tokens and ours, for log-normal lengths whose p99 is above 4 times the median."""
    prompts = np.repeat(rng.integers(10, 40, num_rows // 8), 8)
    # Four fifths stay under half of the limit.
    lengths = np.minimum(np.ceil(500 * rng.lognormal(0, 0.8, num_rows)), 2100).astype(int)
    order = rng.permutation(num_rows)
    num_micro_batches = num_rows // size
    batches = make_batches(prompts[order].tolist(), lengths[order].tolist(), num_micro_batches)
    columns = batches[0]["prompt_ids"].size(1) + batches[0]["completion_ids"].size(1)
    counts = sum(
        padding_counts(cut(deal(batches, i, dealt_window(batches)[i])), columns) for i in range(num_micro_batches)
    )
    cells, uncut_cells, tokens = counts.tolist()
    return uncut_cells / tokens, cells / tokens


@pytest.mark.parametrize(
    ("num_rows", "size", "bound"),
    # What is left is the spread of lengths within a micro-batch: the more of a window's rows it holds, the wider.
    [(32, 1, 1.0), (32, 2, 1.07), (32, 4, 1.2), (32, 8, 1.4), (64, 4, 1.1), (128, 8, 1.12)],
)
def test_padding_of_a_long_tail(num_rows, size, bound):
    rng = np.random.default_rng(0)
    stock, ours = np.mean([ratios(rng, num_rows, size) for _ in range(20)], axis=0)
    assert 2.4 < stock < 3.5
    assert ours <= bound
