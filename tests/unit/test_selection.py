"""Which groups are trained on, on hand-made tables: rows are rollouts, columns reward functions."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_ulorl.rollout.pool import Finish, RolloutGroup, Segment
from trl_ulorl.rollout.selection import has_baseline, is_decided, is_mixed, settle_rewards

NAN = math.nan


def make_group(rows, *, truncated=(), failed=()):
    group = RolloutGroup.start(
        group_id=0, row_index=0, prompt_ids=[1], max_length=9, admitted_version=0, num_generations=len(rows)
    )
    for rollout, row in zip(group.rollouts, rows, strict=True):
        rollout.extend(Segment.from_values([1], [0.0], 0), Finish.LENGTH if rollout.index in truncated else Finish.EOS)
        rollout.rewards = np.array(row, dtype=np.float32)
        rollout.has_failed_reward = rollout.index in failed
    return group


def settle(rows, *, weights=None, wrong_index=None, **kwargs):
    group = make_group(rows, **kwargs)
    settle_rewards(group, weights=weights or [1.0] * len(rows[0]), wrong_index=wrong_index)
    return group.rewards.tolist()


def assert_table(table, expected):
    np.testing.assert_array_equal(np.array(table), np.array(expected))  # NaN equals NaN here


# --- undecided ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "failed", "expected"),
    [
        # All decided: nothing changes.
        ([[1, 2], [0, 3]], (), [[1, 2], [0, 3]]),
        # Undecided where a sibling is decided: its sum would lack a term, so it loses all its rewards.
        ([[1, 2], [NAN, 3], [0, 1]], (), [[1, 2], [NAN, NAN], [0, 1]]),
        # A function that gives None to the whole group does not apply to it: the others count.
        ([[1, NAN], [0, NAN]], (), [[1, NAN], [0, NAN]]),
        # Both at once.
        ([[1, NAN, 5], [0, NAN, NAN]], (), [[1, NAN, 5], [NAN, NAN, NAN]]),
        # A failure costs all rewards, even where the function decided nothing else in the group.
        ([[1, NAN], [0, NAN]], (1,), [[1, NAN], [NAN, NAN]]),
        ([[1, 2], [0, 3]], (0, 1), [[NAN, NAN], [NAN, NAN]]),
        ([[NAN, NAN], [NAN, NAN]], (), [[NAN, NAN], [NAN, NAN]]),
    ],
)
def test_undecided_rollouts_lose_all_rewards(rows, failed, expected):
    assert_table(settle(rows, failed=failed), expected)


def test_who_lost_all_rewards_is_noted():
    """A reward model scores later, and must not make up for what a function could not say."""
    group = make_group([[1, NAN], [NAN, NAN], [0, NAN]])
    settle_rewards(group, weights=[1.0, 1.0], wrong_index=None)
    assert [rollout.has_failed_reward for rollout in group.rollouts] == [False, True, False]
    group = make_group([[NAN], [NAN]], failed={1})  # no function applies to the group
    settle_rewards(group, weights=[1.0], wrong_index=None)
    assert [rollout.has_failed_reward for rollout in group.rollouts] == [False, True]


def test_settled_rewards_stay_float32():
    group = make_group([[1, NAN], [0, 1]])
    settle_rewards(group, weights=[1.0, 1.0], wrong_index=0)
    assert all(rollout.rewards.dtype == np.float32 for rollout in group.rollouts)


@pytest.mark.parametrize(
    ("rows", "decided", "baseline"),
    [
        ([[1, NAN], [NAN, NAN], [NAN, 0]], [True, False, True], True),
        ([[1], [NAN], [NAN]], [True, False, False], False),
        ([[NAN], [NAN]], [False, False], False),
        ([[0], [0]], [True, True], True),
        ([[1]], [True], False),
    ],
)
def test_a_baseline_needs_two_decided_rollouts(rows, decided, baseline):
    group = make_group(rows)
    assert is_decided(group.rewards).tolist() == decided
    assert has_baseline(group) is baseline


# --- mixed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "weights", "expected"),
    [
        ([[1], [0], [0]], [1], True),
        ([[1], [1]], [1], False),
        ([[0], [0]], [1], False),
        ([[1], [NAN], [1]], [1], False),  # undecided is not 0
        ([[1], [NAN], [0]], [1], True),
        ([[NAN], [NAN]], [1], False),
        ([[0, 1], [1, 0]], [1, 1], False),  # equal sums
        ([[0, 1], [1, 0]], [1, 0.5], True),
        ([[0, 1], [0, 2]], [1, 0], False),  # weight 0: logged only
        ([[0, 1], [0, 2]], [1, -1], True),
        ([[0.5, NAN], [0.5, NAN]], [1, 1], False),
        ([[0.1 + 0.2, 0], [0.3, 0]], [1, 1], False),  # rounding is no difference
        ([[1e-3], [2e-3]], [1], True),
    ],
)
def test_is_mixed(rows, weights, expected):
    assert is_mixed(make_group(rows), weights=weights) is expected


@settings(derandomize=True, max_examples=150)
@given(st.lists(st.floats(-5000, 5000, width=32), min_size=1, max_size=3), st.integers(2, 16), st.booleans())
def test_equal_rewards_of_any_size_are_not_mixed(row, num_generations, is_per_function):
    """In float32 the mean of equal numbers may be another number: that of six times 150.15 is."""
    group = make_group([row] * num_generations)
    weights = [1.0, 0.7, -2.0][: len(row)]
    assert not is_mixed(group, weights=weights, is_per_function=is_per_function)


def test_sums_differ_by_more_than_their_rounding():
    assert not is_mixed(make_group([[33.3, 66.7], [100, 0], [66.7, 33.3]]), weights=[1, 1])
    assert is_mixed(make_group([[33.3, 66.7], [100, 0.001]]), weights=[1, 1])


# --- truncation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "truncated", "weights", "expected"),
    [
        # Columns: correctness, another reward. The truncated rollout (last row) falls to the lowest of the wrong ones.
        ([[1, 9], [0, 5], [0, 3], [0, 7]], {3}, [1, 1], [[1, 9], [0, 5], [0, 3], [0, 3]]),
        # Already below: stays.
        ([[1, 9], [0, 5], [0, 1]], {2}, [1, 1], [[1, 9], [0, 5], [0, 1]]),
        # No complete rollout is wrong: 0.
        ([[1, 9], [1, 5], [0, 7]], {2}, [1, 1], [[1, 9], [1, 5], [0, 0]]),
        ([[1, 9], [1, 5], [0, -7]], {2}, [1, 1], [[1, 9], [1, 5], [0, -7]]),
        # Where wrong is -1, so is truncated.
        ([[1, 9], [-1, 5], [0, 3]], {2}, [1, 1], [[1, 9], [-1, 5], [-1, 3]]),
        # All truncated.
        ([[0, 4], [0, -2]], {0, 1}, [1, 1], [[0, 0], [0, -2]]),
        # A negative weight turns the order round: the highest penalty of the wrong ones counts, here 5.
        ([[1, 0], [0, 5], [0, 3], [0, 1]], {3}, [1, -1], [[1, 0], [0, 5], [0, 3], [0, 5]]),
        ([[1, 0], [0, 5], [0, 9]], {2}, [1, -2], [[1, 0], [0, 5], [0, 9]]),
        # Weight 0: no part of the sum.
        ([[1, 9], [0, 5], [0, 7]], {2}, [1, 0], [[1, 9], [0, 5], [0, 7]]),
        # Undecided and not applicable stay as they are.
        ([[1, NAN], [0, NAN], [0, NAN]], {2}, [1, 1], [[1, NAN], [0, NAN], [0, NAN]]),
        ([[1, 1], [0, NAN], [0, 7]], {2}, [1, 1], [[1, 1], [NAN, NAN], [0, 0]]),
        ([[1, 1], [0, 2], [0, NAN]], {2}, [1, 1], [[1, 1], [0, 2], [NAN, NAN]]),
    ],
)
def test_truncated_rollouts_are_capped(rows, truncated, weights, expected):
    assert_table(settle(rows, truncated=truncated, weights=weights, wrong_index=0), expected)


def test_the_correctness_function_may_be_any_column():
    rows = [[9, 1], [5, 0], [7, 0]]
    assert_table(settle(rows, truncated={2}, wrong_index=1), [[9, 1], [5, 0], [5, 0]])


def test_truncated_rollouts_are_not_capped_if_truncation_is_not_wrong():
    rows = [[1, 9], [0, 5], [1, 7]]
    assert_table(settle(rows, truncated={2}, wrong_index=None), rows)


values = st.floats(-100, 100, width=32)
weight = st.floats(-4, 4, width=16).filter(lambda w: w == 0 or abs(w) > 0.01)


@settings(derandomize=True, max_examples=150)
@given(
    st.data(),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 2),
    st.floats(0.125, 4, width=16),
    st.sampled_from([0.0, -1.0]),
)
def test_no_truncated_rollout_beats_a_wrong_one(
    data, num_complete, num_truncated, num_others, correctness_weight, wrong
):
    """Correctness is {0, 1} or {-1, 1}; the others are anything, with any weights, undecided and failed rollouts among them."""
    weights = [correctness_weight, *data.draw(st.lists(weight, min_size=num_others, max_size=num_others))]
    count = num_complete + num_truncated
    rows = [
        [
            data.draw(st.sampled_from([wrong, 1.0, NAN])) if row < num_complete else 0.0,
            *data.draw(st.lists(values | st.just(NAN), min_size=num_others, max_size=num_others)),
        ]
        for row in range(count)
    ]
    truncated = set(range(num_complete, count))
    failed = data.draw(st.sets(st.integers(0, count - 1), max_size=1))
    group = make_group(rows, truncated=truncated, failed=failed)
    settle_rewards(group, weights=weights, wrong_index=0)
    table, decided = group.rewards, is_decided(group.rewards)
    totals = np.nansum(table * np.array(weights), axis=1)
    is_wrong = decided & (table[:, 0] == wrong)
    is_wrong[num_complete:] = False
    for row in truncated:
        if decided[row]:
            assert totals[row] <= totals[is_wrong].min(initial=math.inf) + 1e-4
            assert (table[row, 1:] * weights[1:] <= np.array(rows[row][1:]) * weights[1:] + 1e-4)[
                ~np.isnan(table[row, 1:])
            ].all()  # a cap only
    for row in range(num_complete):  # complete rollouts are not touched
        if decided[row]:
            np.testing.assert_array_equal(table[row], np.array(rows[row], dtype=np.float32))


def test_a_function_that_does_not_apply_stays_so_beside_a_truncated_rollout():
    """The 0 of a truncated rollout was not given by the function, which left the whole group undecided."""
    table = settle([[NAN, 1], [NAN, 0], [0, 0.5]], truncated={2}, wrong_index=0)
    assert_table(table, [[NAN, 1], [NAN, 0], [NAN, 0]])


def test_functions_that_are_normalised_one_by_one_differ_one_by_one():
    """Their weighted sums are equal, the sums of their normalised values are not."""
    group = make_group([[1, 0], [0, 10], [1, 0]])
    weights = (1.0, 0.1)
    assert not is_mixed(group, weights=weights)
    assert is_mixed(group, weights=weights, is_per_function=True)
    assert not is_mixed(make_group([[1, 2], [1, 2]]), weights=weights, is_per_function=True)


def test_masked_rollouts_alone_make_no_gradient():
    rows = [[1], [1], [0]]
    assert is_mixed(make_group(rows, truncated={2}), weights=(1.0,), is_truncated_masked=True)  # the rest is above 2/3
    assert not is_mixed(make_group(rows, truncated={0, 1, 2}), weights=(1.0,), is_truncated_masked=True)
    assert not is_mixed(make_group([[1], [0], [0.5]], truncated={0, 1}), weights=(1.0,), is_truncated_masked=True)
