"""The schedule against adversaries: whatever completes when, the staleness bound holds and nothing is dropped.

The simulation below is Algorithm 1 reduced to counts: an adversary decides which groups become complete. That the
collector calls the schedule in this way is not covered here; test_collector.py has the bound end to end.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_ulorl.rollout.schedule import SegmentSchedule, balanced_order

fuzz = settings(derandomize=True, max_examples=150)

MAX_ROUNDS = 12  # then the adversary runs out of excuses: everything completes


def make_schedule(groups_per_batch=2, max_staleness=None, versions_per_batch=1, **kwargs):
    return SegmentSchedule(
        groups_per_batch=groups_per_batch,
        segment_length=10,
        max_inflight_groups=kwargs.pop("max_inflight_groups", 1000),
        max_staleness=max_staleness,
        versions_per_batch=versions_per_batch,
        **kwargs,
    )


def run_steps(schedule, num_steps, choose_complete, *, num_due=None, keep=lambda group_id: True, advance=None):
    """Run rollout steps and return each trained group's age at the last update on its batch, and the counts.

    Args:
        choose_complete: Given step, round and the unfinished group ids, returns those that become complete.
        num_due: In the place of the schedule's own rule.
        keep: Whether a complete group survives dynamic sampling.
        advance: Versions from one batch to the next, by default what a batch feeds.
    """
    num_due = num_due or schedule.num_due
    advance = advance or (lambda step: schedule.versions_per_batch)
    admitted_version, ready, unfinished = {}, set(), set()
    ages, num_filtered, version = [], 0, 0
    for step in range(num_steps):
        for round_index in range(MAX_ROUNDS + 1):
            held = sorted(ready | unfinished)
            due = num_due([admitted_version[g] for g in held], version)
            if len(ready) >= schedule.groups_per_batch and not unfinished & set(held[:due]):
                break
            for _ in range(schedule.num_admissions(num_held=len(held), num_ready=len(ready))):
                unfinished.add(len(admitted_version))
                admitted_version[len(admitted_version)] = version
            held = sorted(ready | unfinished)
            assert len(held) <= schedule.capacity
            due = num_due([admitted_version[g] for g in held], version)
            assert 0 <= due <= schedule.groups_per_batch or num_due != schedule.num_due
            complete = unfinished & set(held[:due])
            complete |= unfinished & set(choose_complete(step, round_index, sorted(unfinished)))
            if round_index >= MAX_ROUNDS - 1:
                complete = set(unfinished)
            unfinished -= complete
            kept = {g for g in complete if round_index >= MAX_ROUNDS - 1 or keep(g)}
            num_filtered += len(complete - kept)
            ready |= kept
        batch = sorted(ready)[: schedule.groups_per_batch]
        assert len(batch) == schedule.groups_per_batch
        ages += [version + schedule.versions_per_batch - 1 - admitted_version[g] for g in batch]
        ready -= set(batch)
        version += advance(step)
    counts = {"admitted": len(admitted_version), "filtered": num_filtered, "held": len(ready | unfinished)}
    return ages, counts


def youngest_first(step, round_index, unfinished):
    """The worst adversary: only the youngest groups ever complete, just enough for a batch, after many rounds."""
    return unfinished[-2:] if round_index >= 4 else []


@st.composite
def bounds(draw):
    versions_per_batch = draw(st.integers(1, 3))
    return draw(st.integers(versions_per_batch - 1, 6)), versions_per_batch


# --- staleness ------------------------------------------------------------------------------------------------------


@fuzz
@given(
    bounds(), st.integers(1, 4), st.integers(0, 30), st.randoms(use_true_random=False), st.booleans(), st.booleans()
)
def test_no_group_is_trained_on_too_late(bound, groups_per_batch, extra, random, filters, is_slow):
    """For every bound and every order of completion, with and without groups that are filtered; nothing is dropped."""
    max_staleness, versions_per_batch = bound
    schedule = make_schedule(
        groups_per_batch, max_staleness, versions_per_batch, max_inflight_groups=groups_per_batch + extra
    )
    hits = random.choice([0.05, 0.3, 0.9])
    ages, counts = run_steps(
        schedule,
        8,
        lambda step, round_index, unfinished: [
            g for g in unfinished[:: random.choice([1, -1])] if random.random() < hits
        ],
        keep=lambda group_id: not filters or random.random() < 0.5,
        # Several rollout steps may feed one update: then the version stays for a while.
        advance=(lambda step: random.randint(0, versions_per_batch)) if is_slow else None,
    )
    assert max(ages) <= max_staleness
    assert counts["admitted"] == len(ages) + counts["filtered"] + counts["held"]


@pytest.mark.parametrize(("max_staleness", "versions_per_batch"), [(s, v) for v in (1, 2, 3) for s in range(v - 1, 7)])
def test_youngest_first_reaches_the_bound_and_not_more(max_staleness, versions_per_batch):
    schedule = make_schedule(2, max_staleness, versions_per_batch)
    ages, counts = run_steps(schedule, 12, youngest_first)
    whole_batches = (max_staleness - (versions_per_batch - 1)) // versions_per_batch
    assert max(ages) == versions_per_batch - 1 + whole_batches * versions_per_batch <= max_staleness
    assert counts["admitted"] == len(ages) + counts["held"]


def test_waiting_until_a_group_is_at_the_limit_is_too_late():
    """Decoding groups to their end once they are at the limit does not keep the bound: several batches may be at once."""
    schedule = make_schedule(groups_per_batch=2, max_staleness=2)
    at_limit_counts = []

    def num_at_limit(admitted_versions, version):
        at_limit_counts.append(sum(version - admitted >= 2 for admitted in admitted_versions))
        return at_limit_counts[-1]

    ages, _ = run_steps(schedule, 8, youngest_first, num_due=num_at_limit)
    assert max(at_limit_counts) == 4  # two batches, and one step takes one of them
    assert max(ages) == 3
    ages, _ = run_steps(schedule, 8, youngest_first)
    assert max(ages) == 2


def test_num_due_by_hand():
    schedule = make_schedule(groups_per_batch=2, max_staleness=2)
    # Version 1: groups of version 0 may wait for this batch and the next. Five wait, the next takes two.
    assert schedule.num_due([0, 0, 0, 0], 1) == 2
    assert schedule.num_due([0, 0, 0], 1) == 1
    assert schedule.num_due([0, 0], 1) == 0
    # Version 2: those of version 0 must go now. Those of version 1 may wait for one batch more, which takes two.
    assert schedule.num_due([0], 2) == 1
    assert schedule.num_due([0, 1, 1], 2) == 1
    assert schedule.num_due([0, 1, 1, 1], 2) == 2
    assert schedule.num_due([], 2) == 0
    assert make_schedule(max_staleness=None).num_due([0, 0, 0], 99) == 0
    # Two updates per batch, at most 3 versions: of version 0 must be in the batch of version 2, whose last update is 3.
    assert make_schedule(2, 3, 2).num_due([0], 0) == 0
    assert make_schedule(2, 3, 2).num_due([0], 2) == 1


@pytest.mark.parametrize(
    ("max_staleness", "versions_per_batch", "capacity"),
    [(0, 1, 2), (1, 1, 4), (3, 1, 8), (6, 1, 9), (None, 1, 9), (1, 2, 2), (2, 2, 2), (3, 2, 4), (2, 3, 2), (5, 3, 4)],
)
def test_capacity_by_hand(max_staleness, versions_per_batch, capacity):
    """(S + 1) batches of 2 with one update each, fewer with several, and never more than the 9 in flight."""
    schedule = make_schedule(2, max_staleness, versions_per_batch, max_inflight_groups=9)
    assert schedule.capacity == capacity


# --- admission ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "held", "ready", "batches_left", "expected"),
    [
        ({}, 0, 0, None, 4),
        ({}, 7, 0, None, 3),  # 10 in flight at most
        ({}, 10, 10, None, 0),
        ({}, 12, 0, None, 0),  # a resume with a smaller limit: never negative
        ({}, 5, 3, None, 4),  # a batch, however much is ready: small admissions cost speed
        ({"is_on_policy": True}, 3, 3, None, 1),
        ({"is_on_policy": True}, 0, 0, None, 4),
        ({}, 0, 0, 1, 4),
        ({}, 3, 1, 1, 1),  # drain: the last batch is all that is still needed
        ({}, 4, 1, 1, 0),
        ({}, 4, 1, 2, 4),
        ({}, 6, 1, 2, 2),
        ({"max_staleness": 1}, 6, 0, None, 2),  # two batches
    ],
)
def test_num_admissions_by_hand(kwargs, held, ready, batches_left, expected):
    schedule = make_schedule(groups_per_batch=4, max_inflight_groups=10, **kwargs)
    assert schedule.num_admissions(num_held=held, num_ready=ready, num_batches_left=batches_left) == expected


@fuzz
@given(st.integers(1, 5), st.integers(0, 20), st.integers(0, 30), st.integers(0, 30), st.none() | st.integers(1, 5))
def test_num_admissions_keeps_every_limit(groups_per_batch, extra, num_held, num_ready, batches_left):
    schedule = make_schedule(groups_per_batch, max_inflight_groups=groups_per_batch + extra)
    num_ready = min(num_ready, num_held)
    number = schedule.num_admissions(num_held=num_held, num_ready=num_ready, num_batches_left=batches_left)
    assert 0 <= number <= groups_per_batch
    if number:
        assert num_held + number <= groups_per_batch + extra
        assert batches_left is None or num_held + number <= batches_left * groups_per_batch
    elif batches_left is None:
        assert num_held >= groups_per_batch + extra


# --- budgets --------------------------------------------------------------------------------------------------------


@fuzz
@given(st.integers(1, 500), st.integers(0, 499), st.booleans())
def test_token_budget_ends_exactly_at_the_limit(max_length, num_tokens, is_due):
    num_tokens = min(num_tokens, max_length - 1)
    schedule = make_schedule()
    budgets = []
    while num_tokens < max_length:
        budgets.append(schedule.token_budget(num_tokens=num_tokens, max_length=max_length, is_due=is_due))
        assert budgets[-1] > 0
        num_tokens += budgets[-1]
    assert num_tokens == max_length
    if is_due:
        assert len(budgets) == 1
    else:
        assert all(budget == 10 for budget in budgets[:-1]) and budgets[-1] <= 10


# --- sharing a batch among ranks ------------------------------------------------------------------------------------


@settings(fuzz, max_examples=300)
@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_balanced_order_is_a_balanced_permutation(num_ranks, per_rank, data):
    """Shares differ by no more than the largest group."""
    count = num_ranks * per_rank
    num_tokens = data.draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    order = balanced_order(num_tokens, num_ranks)
    assert sorted(order) == list(range(count))
    shares = [order[start : start + per_rank] for start in range(0, count, per_rank)]
    totals = [sum(num_tokens[group] for group in share) for share in shares]
    assert max(totals) - min(totals) <= max(num_tokens)
    assert all(share == sorted(share) for share in shares)


def test_balanced_order_by_hand():
    assert balanced_order([100, 1, 1, 1, 100, 1], 2) == [0, 1, 3, 2, 4, 5]
    assert balanced_order([9, 8, 2, 1], 2) == [0, 3, 1, 2]
    assert balanced_order([1, 2, 3, 4], 4) == [3, 2, 1, 0]
    assert balanced_order([1, 9], 1) == [0, 1]
    assert balanced_order([1, 9, 3], 2) == [0, 1, 2]  # groups span ranks
    assert balanced_order([], 2) == []
