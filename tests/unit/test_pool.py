"""The pools lose nothing, mix nothing and cost 8 bytes per token; checked at a tenth of the paper's size here.

`benchmarks/pool_memory.py` measures the full size.
"""

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trl_ulorl.rollout.packing import RECORD_TYPES, pack_groups, unpack_groups
from trl_ulorl.rollout.pool import (
    LENGTH_BINS,
    ExperiencePool,
    Finish,
    Ledger,
    Outcome,
    Rollout,
    RolloutGroup,
    Segment,
    UnfinishedPool,
)

fuzz = settings(derandomize=True, max_examples=60)


def make_segment(length=3, version=0, first=0):
    return Segment.from_values(np.arange(first, first + length), -np.arange(1.0, length + 1), version)


def make_group(group_id, lengths=((3,), (2,)), finish=Finish.EOS, *, row_index=0, version=0):
    """A group whose rollouts have segments of the given lengths; `finish=None` leaves them open."""
    group = RolloutGroup.start(
        group_id=group_id,
        row_index=row_index,
        prompt_ids=[5, 6],
        max_length=100,
        admitted_version=version,
        num_generations=len(lengths),
    )
    for rollout, segments in zip(group.rollouts, lengths, strict=True):
        for position, length in enumerate(segments):
            is_last = position == len(segments) - 1
            rollout.extend(make_segment(length, version + position), finish if is_last else None)
    return group


# --- segments and rollouts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token_ids", "logps"),
    [([], []), ([1, 2], [-0.5]), ([1], [-0.5, -0.5]), ([[1, 2]], [[-0.5, -0.5]]), (1, -0.5)],
    ids=["empty", "logp missing", "logp too many", "matrix", "scalar"],
)
def test_segment_refuses_what_does_not_match(token_ids, logps):
    with pytest.raises(ValueError, match="Return one log-probability per sampled token") as error:
        Segment.from_values(token_ids, logps, 0)
    assert str(np.shape(token_ids)) in str(error.value) and str(np.shape(logps)) in str(error.value)


def test_segment_owns_compact_arrays():
    padded_ids = np.arange(4 * 1000, dtype=np.int64).reshape(4, 1000)
    padded_logps = -np.ones((4, 1000), dtype=np.float32)  # the segment's own type: no conversion that would copy
    segment = Segment.from_values(padded_ids[2, :5], padded_logps[2, :5], 7)
    aligned = Segment.from_values(padded_ids[2, :5].astype(np.int32)[:4], padded_logps[2, :4], 7)
    for array in (segment.token_ids, segment.per_token_logps, aligned.token_ids, aligned.per_token_logps):
        assert array.base is None and array.flags.owndata
    assert segment.token_ids.nbytes + segment.per_token_logps.nbytes == 8 * len(segment) == 40
    padded_ids[:], padded_logps[:] = 0, 0  # an engine may reuse its buffers
    assert segment.token_ids.tolist() == [2000, 2001, 2002, 2003, 2004]
    assert segment.per_token_logps.tolist() == [-1.0] * 5
    assert segment.policy_version == 7


def test_rollout_joins_segments_in_order():
    rollout = Rollout(group_id=0, index=0)
    assert rollout.completion_ids.size == rollout.policy_versions.size == rollout.num_tokens == 0
    rollout.extend(Segment.from_values([4, 3], [-0.25, -0.5], 1), None)
    assert not rollout.is_finished
    rollout.extend(Segment.from_values([9], [-1.5], 4), Finish.EOS)
    assert rollout.is_finished
    assert rollout.num_tokens == 3
    assert rollout.completion_ids.tolist() == [4, 3, 9]
    assert rollout.sampling_per_token_logps.tolist() == [-0.25, -0.5, -1.5]
    assert rollout.policy_versions.tolist() == [1, 1, 4]
    assert (rollout.completion_ids.dtype, rollout.sampling_per_token_logps.dtype) == (np.int32, np.float32)


def test_ended_rollout_is_not_extended():
    rollout = make_group(3).rollouts[1]
    with pytest.raises(ValueError, match=r"Rollout 1 of group 3 has ended .* decode unfinished rollouts only"):
        rollout.extend(make_segment(), None)
    assert rollout.num_tokens == 2


def test_adding_a_segment_does_not_touch_earlier_ones():
    """No concatenation: what is held stays the same object, and adding allocates next to nothing."""
    rollout = Rollout(0, 0)
    for version in range(100):
        rollout.extend(make_segment(2000, version), None)
    held, segment = list(rollout.segments), make_segment(10, 100)
    tracemalloc.start()
    rollout.extend(segment, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4096  # the rollout's ids alone are 800,000 bytes
    assert all(now is before for now, before in zip(rollout.segments, [*held, segment], strict=True))
    assert rollout.num_tokens == 200_010


# --- pools ----------------------------------------------------------------------------------------------------------


def test_unfinished_pool_keeps_the_order_of_admission():
    pool = UnfinishedPool()
    groups = [make_group(0, finish=None), make_group(1), make_group(2, finish=None), make_group(5)]
    for group in groups:
        pool.admit(group)
    assert len(pool) == 4 and pool.num_tokens == 20
    groups[2].rollouts[0].finish = Finish.EOS
    open_rollouts = [(group.group_id, rollout.index) for group, rollout in pool.open_rollouts()]
    assert open_rollouts == [(0, 0), (0, 1), (2, 1)]  # a finished sibling waits, it isn't decoded
    assert pool.pop_complete() == [groups[1], groups[3]]
    assert pool.groups == [groups[0], groups[2]]
    assert pool.pop_complete() == []


@pytest.mark.parametrize("group_id", [0, 2, 3])
def test_unfinished_pool_refuses_ids_that_do_not_grow(group_id):
    pool = UnfinishedPool()
    pool.admit(make_group(1, finish=None))
    pool.admit(make_group(3, finish=None))
    with pytest.raises(ValueError, match=f"Group {group_id} was admitted after group 3.*Give each prompt the next id"):
        pool.admit(make_group(group_id, finish=None))
    assert len(pool) == 2


def test_experience_pool_refuses_unfinished_groups():
    group = make_group(0)
    group.rollouts[1].finish = None
    with pytest.raises(ValueError, match=r"Group 0 still has unfinished rollouts.*Keep it in the unfinished pool"):
        ExperiencePool().add(group)


@fuzz
@given(st.permutations(range(7)), st.lists(st.integers(0, 4), max_size=6), st.integers(0, 7))
def test_experience_pool_does_not_depend_on_arrival(arrival, takes, num_early):
    """Whatever order groups come in and however they are taken, the oldest held ones leave first, each once."""
    pool, held, left = ExperiencePool(), set(), []
    groups = {group_id: make_group(group_id, [(group_id + 1,)]) for group_id in arrival}
    for group_id in arrival[:num_early]:
        pool.add(groups[group_id])
        held.add(group_id)
    for number in takes:
        taken = [group.group_id for group in pool.take(number)]
        assert taken == sorted(held)[:number]
        held -= set(taken)
        left += taken
    for group_id in arrival[num_early:]:
        pool.add(groups[group_id])
        held.add(group_id)
    assert [group.group_id for group in pool.groups] == sorted(held)
    assert pool.num_tokens == sum(group_id + 1 for group_id in held)
    assert sorted(left + [group.group_id for group in pool.take(7)]) == list(range(7))
    assert len(pool) == 0


# --- packing --------------------------------------------------------------------------------------------------------

int32s = st.integers(-(2**31), 2**31 - 1)
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
rewards = st.none() | hnp.arrays(np.float32, 2, elements=numbers | st.just(np.nan))


@st.composite
def segments(draw):
    length = draw(st.integers(1, 5))
    token_ids = draw(hnp.arrays(np.int32, length, elements=int32s))
    logps = draw(hnp.arrays(np.float32, length, elements=st.floats(max_value=0, width=32)))
    return Segment.from_values(token_ids, logps, draw(st.integers(0, 10**6)))


@st.composite
def rollout_groups(draw, group_id=0, num_generations=2):
    group = RolloutGroup.start(
        group_id=group_id,
        row_index=draw(st.integers(0, 10**9)),
        prompt_ids=draw(st.lists(int32s, max_size=4)),
        max_length=draw(st.integers(1, 10**6)),
        admitted_version=draw(st.integers(0, 10**6)),
        num_generations=num_generations,
    )
    for rollout in group.rollouts:
        for segment in draw(st.lists(segments(), max_size=3)):
            rollout.extend(segment, None)
        rollout.finish = draw(st.none() | st.sampled_from(Finish))
        rollout.rewards = draw(rewards)
        rollout.has_failed_reward = draw(st.booleans())
        rollout.logs = draw(st.dictionaries(st.text(), st.none() | st.text() | st.integers(), max_size=2))
        rollout.metrics = draw(st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=2))
    return group


def contents(group):
    """All that a group holds, arrays as their types and bytes: equal exactly when the groups are."""

    def raw(array):
        return None if array is None else (array.dtype, array.shape, array.tobytes())

    return (
        (group.group_id, group.row_index, raw(group.prompt_ids), group.max_length, group.admitted_version),
        [
            (r.group_id, r.index, r.finish, raw(r.rewards), r.has_failed_reward, r.logs, r.metrics, r.num_tokens)
            for r in group.rollouts
        ],
        [[(raw(s.token_ids), raw(s.per_token_logps), s.policy_version) for s in r.segments] for r in group.rollouts],
    )


@settings(fuzz, max_examples=25)
@given(
    st.tuples(st.integers(0, 3), st.integers(1, 3)).flatmap(
        lambda sizes: st.tuples(*(rollout_groups(group_id, sizes[1]) for group_id in range(sizes[0])))
    ),
    st.data(),
)
def test_packing_round_trips_exactly(groups, data):
    packed = pack_groups(groups)
    arrays = {name: np.concatenate(parts) for name, parts in packed.tokens.items()}
    notes = json.loads(json.dumps(packed.notes))
    keep = [data.draw(st.booleans()) for _ in groups]
    for kept in (None, keep):
        copies = unpack_groups(packed.records, arrays, notes, kept)
        expected = [group for group, is_kept in zip(groups, kept or [True] * len(groups), strict=True) if is_kept]
        assert [contents(group) for group in copies] == [contents(group) for group in expected]
    assert {name: values.dtype for name, values in packed.records.items()} == RECORD_TYPES
    assert {name: values.dtype for name, values in arrays.items()} == {
        "prompt_ids": np.int32,
        "token_ids": np.int32,
        "per_token_logps": np.float32,
    }
    assert all(
        any(part is s.token_ids for part in packed.tokens["token_ids"])
        for g in groups
        for r in g.rollouts
        for s in r.segments
    ), "packing copies no token"
    for group in copies:  # a view would keep the whole checkpoint in memory
        for rollout in group.rollouts:
            assert isinstance(rollout.finish, Finish | None)
            assert all(s.token_ids.base is None and s.per_token_logps.base is None for s in rollout.segments)


# --- ledger ---------------------------------------------------------------------------------------------------------


def filled_ledger():
    """Ten groups admitted and 100 tokens generated; three groups of 5 tokens have left."""
    ledger = Ledger()
    ledger.groups["admitted"], ledger.tokens["generated"] = 10, 100
    for group_id, outcome in enumerate(Outcome):
        ledger.close(make_group(group_id), outcome)
    return ledger


def test_ledger_balances():
    balance = filled_ledger().balance(ready=3, unfinished=4, held_tokens=85)
    assert balance == {
        "groups": {"admitted": 10, "trained": 1, "filtered": 1, "set_aside": 1, "ready": 3, "unfinished": 4},
        "tokens": {"generated": 100, "trained": 5, "filtered": 5, "set_aside": 5, "held": 85},
    }
    for entries in balance.values():
        first, *rest = entries.values()
        assert first == sum(rest)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (
            {"ready": 3, "unfinished": 3, "held_tokens": 85},
            "groups does not balance: 10 admitted, .* add up to 9 .*'un",
        ),
        (
            {"ready": 4, "unfinished": 4, "held_tokens": 85},
            "groups does not balance: 10 admitted, .* up to 11 .*'ready'",
        ),
        (
            {"ready": 3, "unfinished": 4, "held_tokens": 84},
            "tokens does not balance: 100 generated, .* up to 99 .*'held'",
        ),
        (
            {"ready": 3, "unfinished": 4, "held_tokens": 86},
            "tokens does not balance: 100 generated, .* up to 101 .*'held",
        ),
    ],
)
def test_ledger_names_what_is_missing(held, message):
    with pytest.raises(RuntimeError, match=message) as error:
        filled_ledger().balance(**held)
    assert "Resume from the last checkpoint" in str(error.value)


def test_ledger_books_lengths_by_powers_of_two():
    ledger = Ledger()
    ledger.close(make_group(0, [(1,), (2,), (3,), (4,), (2**12 - 1,), (2**12,)]), Outcome.FILTERED)
    counts = [0] * LENGTH_BINS
    counts[0], counts[1], counts[2], counts[11], counts[12] = 1, 2, 1, 1, 1
    assert ledger.lengths == {"trained": [0] * LENGTH_BINS, "filtered": counts, "set_aside": [0] * LENGTH_BINS}


def test_ledger_state_is_a_snapshot():
    ledger = filled_ledger()
    state = ledger.state_dict()
    saved = json.dumps(state)
    ledger.close(make_group(3), Outcome.TRAINED)
    ledger.groups["admitted"] += 1
    assert json.dumps(state) == saved
    restored = Ledger()
    restored.load_state_dict(state)
    assert json.dumps(restored.state_dict()) == saved
    restored.close(make_group(4), Outcome.TRAINED)
    assert json.dumps(state) == saved


# --- memory ---------------------------------------------------------------------------------------------------------


def test_memory_at_a_tenth_of_the_full_size():
    """512 rollouts with 24 M tokens, cut out of padded matrices as an engine returns them: at most 0.22 GB."""
    num_groups, num_generations, num_tokens, width = 64, 8, 24_000_000, 16_384
    shares = np.random.default_rng(0).lognormal(0, 1, num_groups * num_generations)
    remaining = np.ceil(shares / shares.sum() * num_tokens).astype(int)
    ids = np.ones((8, width), dtype=np.int64)
    logps = -np.ones((8, width), dtype=np.float32)
    tracemalloc.start()
    pool = UnfinishedPool()
    for group_id in range(num_groups):
        pool.admit(make_group(group_id, [()] * num_generations))
    version = 0
    while remaining.any():
        for (_, rollout), left in zip(pool.open_rollouts(), remaining, strict=True):
            if left:
                length = min(left, width)
                row = rollout.index
                rollout.extend(Segment.from_values(ids[row, :length], logps[row, :length], version), None)
        remaining = np.maximum(0, remaining - width)
        version += 1
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert version > 4
    assert num_tokens <= pool.num_tokens < num_tokens + 512
    assert 8 * pool.num_tokens < held <= peak < 0.22e9
