"""The continuous schedule over simulated rollouts: the checks of test_collector.py, and what is its own."""

import contextlib
import logging
import math
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import resume, save
from test_collector import (
    EOS_ID,
    Run,
    configurations,
    equal,
    fuzz,
    mixed,
    own_tokens,
    packed,
    raising,
    run_ranks,
    steps,
    undecided,
)

from trl_ulorl.rollout.collector import MAX_REFILL_ROUNDS
from trl_ulorl.rollout.report import step_metrics
from trl_ulorl.rollout.schedule import ContinuousSchedule


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, "trl_ulorl")


@st.composite
def continuous_configurations(draw):
    configuration = draw(configurations())
    configuration["num_segments"] = max(2, configuration["num_segments"])
    configuration["num_slots"] = draw(st.integers(1, 12))
    return configuration


@fuzz
@given(continuous_configurations(), st.integers(1, 5))
def test_nothing_is_lost_in_any_configuration(configuration, num_steps):
    run = Run(**configuration)
    for _ in range(num_steps):
        run.step()
        assert run.engine.most_open <= configuration["num_slots"]
    assert run.outcome_counts()["trained"] == num_steps * configuration["groups_per_batch"]


@fuzz
@given(continuous_configurations(), st.integers(6, 10))
def test_long_rollouts_meet_their_staleness_bound(configuration, num_steps):
    configuration["max_staleness"] = configuration["versions_per_batch"] - 1 + configuration["extra_inflight"] % 3
    configuration.update(cap=40, median_length=12)
    run = Run(**configuration)
    for _ in range(num_steps):
        run.step()


@fuzz
@given(continuous_configurations(), st.integers(1, 5))
def test_drain_leaves_nothing_behind(configuration, num_steps):
    run = Run(**configuration)
    for step in range(num_steps):
        run.step(num_batches_left=num_steps - step)
    counts = run.outcome_counts()
    assert counts["ready"] == counts["unfinished"] == 0
    assert counts["trained"] == num_steps * configuration["groups_per_batch"]
    if configuration["pattern"] is mixed and not configuration["dynamic_sampling"]:
        assert counts["filtered"] == counts["set_aside"] == 0


@fuzz
@given(continuous_configurations(), st.integers(0, 4))
def test_a_restored_run_goes_on_identically(configuration, num_before):
    run, resumed = Run(**configuration), Run(**configuration)
    for _ in range(num_before):
        run.step()
    with tempfile.TemporaryDirectory() as folder:
        save(run, folder)
        resume(resumed, run, folder)
    for _ in range(2):
        assert packed(resumed.step()) == packed(run.step())
    assert packed(resumed.collector.unfinished.groups) == packed(run.collector.unfinished.groups)


def test_slots_are_refilled_as_they_become_free():
    """Two slots, groups of two, by hand.

    Lengths 3 and 9 (group 0), 3 and 3 (group 1), then 5: the first slot runs 3 + 3 + 3 steps beside the 9 of the second.
    After 9 steps group 0 and group 1 are complete, and that is the batch.
    """
    run = Run(num_slots=2, cap=40, extra_inflight=4)
    run.engine.simulated.planned_length = lambda serial: {0: 3, 1: 9, 2: 3, 3: 3}.get(serial, 5)
    batch = run.step()
    assert [group.group_id for group in batch] == [0, 1]
    metrics = step_metrics(run.collector.report)
    assert metrics["rollout/decoded_tokens"] == 18
    assert metrics["rollout/occupancy"] == 1.0
    assert run.engine.simulated.seconds == pytest.approx(9 * (0.02 + 2 * 0.000_01))


def test_an_interrupted_rollout_goes_on_where_it_was():
    """One group a batch, three slots: when group 0 ends after 4 steps, the first rollout of group 1 has 4 tokens."""
    run = Run(num_slots=3, cap=40, groups_per_batch=1, extra_inflight=3)
    run.engine.simulated.planned_length = lambda serial: 4 if serial < 2 else 10
    assert [group.group_id for group in run.step()] == [0]
    (unfinished,) = [rollout for _, rollout in run.collector.unfinished.open_rollouts() if rollout.num_tokens]
    assert unfinished.num_tokens == 4
    (group,) = run.step()
    assert [[len(s) for s in rollout.segments] for rollout in group.rollouts] == [[4, 6], [10]]
    assert [s.policy_version for s in group.rollouts[0].segments] == [0, 1]
    assert group.rollouts[0].completion_ids[-1] == EOS_ID
    # The prefix of the rollout that went on: its 4 tokens, and row 1's prompt of two.
    assert step_metrics(run.collector.report)["rollout/prefilled_tokens"] == 6


def test_nobody_waits_for_the_longest():
    """A rollout of 10,000 tokens beside ones of 10: the segment schedule's rounds are as long as a segment."""
    run = Run(num_slots=4, cap=20_000, groups_per_batch=1, extra_inflight=9)
    run.engine.simulated.planned_length = lambda serial: 10_000 if serial == 0 else 10
    for step in range(5):
        run.step()
        assert run.engine.simulated.seconds < (step + 1) * 0.02 * 31
    assert run.collector.unfinished.groups[0].group_id == 0


def test_slots_stay_empty_only_where_groups_may_not_be_held():
    run = Run(num_slots=8, cap=60, groups_per_batch=2, extra_inflight=30)
    for _ in range(10):
        run.step()
        assert step_metrics(run.collector.report)["rollout/occupancy"] == 1.0
    tight = Run(num_slots=8, cap=60, groups_per_batch=2, extra_inflight=0)
    tight.step()
    assert step_metrics(tight.collector.report)["rollout/occupancy"] < 0.6


@pytest.mark.parametrize(
    ("pattern", "dynamic_sampling", "outcome"),
    [(equal, True, "filtered"), (undecided, True, "set_aside"), (raising, False, "set_aside")],
)
def test_batches_are_filled_after_a_bounded_number_of_groups(pattern, dynamic_sampling, outcome):
    run = Run(num_slots=4, pattern=pattern, dynamic_sampling=dynamic_sampling, cap=16, median_length=4)
    for _ in range(2):
        run.step()
        assert run.collector.report.num_filled == 2
    assert run.outcome_counts()["trained"] == 4
    assert run.outcome_counts()[outcome] >= 2 * 2 * (3 + MAX_REFILL_ROUNDS - 1)


def test_a_full_pool_is_used_without_decoding():
    run = Run(num_slots=12, cap=30, median_length=2, extra_inflight=6)
    while len(run.collector.ready) < 2:
        run.step()
    calls = run.engine.num_calls
    run.step()
    assert run.engine.num_calls == calls


def test_a_failing_engine_leaves_every_token_in_the_pool():
    """Who catches the error can go on: the ledger balances, and what was decoded is there."""
    run = Run(num_slots=4, cap=60, median_length=20, extra_inflight=6)
    run.step()
    stream_type = type(run.engine.simulated.stream().__enter__())
    original, calls = stream_type.step, []

    def fail_later(self):
        calls.append(self)
        if len(calls) == 3:
            raise OSError("the server is gone")
        return original(self)

    stream_type.step = fail_later
    try:
        run.engine.version = run.version
        with pytest.raises((OSError, AssertionError), match="the server is gone"):
            run.collector.collect(run.version)
    finally:
        stream_type.step = original
    run.collector.ledger_balance()
    held = run.collector.unfinished.num_tokens
    assert held > 0
    run.step()


def test_what_had_arrived_before_a_failure_is_kept():
    """Rollouts that were decoding when the engine failed keep the tokens of this step too."""
    run = Run(num_slots=2, cap=60, extra_inflight=6)
    run.engine.simulated.planned_length = lambda serial: 9 if serial == 0 else 40

    class Failing(type(run.engine.simulated.stream().__enter__())):
        def step(self):
            if self.num_steps:
                raise OSError("the server is gone")
            return super().step()

    @contextlib.contextmanager
    def stream():
        yield Failing(run.engine.simulated)

    run.collector.engine.stream = stream
    with pytest.raises(OSError, match="the server is gone"):
        run.collector.collect(0)
    assert [rollout.num_tokens for rollout in run.collector.unfinished.groups[0].rollouts] == [9, 9]
    run.collector.ledger_balance()


# --- several ranks --------------------------------------------------------------------------------------------------


@fuzz
@given(continuous_configurations(), st.integers(2, 3), st.integers(1, 4), st.booleans())
def test_all_ranks_take_the_same_decisions(configuration, num_ranks, num_steps, drain):
    results = run_ranks(num_ranks, steps(num_steps, drain), **configuration)
    for result in results:
        if isinstance(result, Exception):
            raise result
        result.pop("calls")
        assert result == results[0]
    if drain:
        groups = results[0]["balance"]["groups"]
        assert groups["ready"] == groups["unfinished"] == 0


def test_work_is_spread_over_the_ranks():
    def body(run):
        for _ in range(4):
            run.step()
            run.exchange({})
        return own_tokens(run)

    tokens_0, tokens_1 = run_ranks(2, body, groups_per_batch=4, num_slots=8, cap=40, extra_inflight=12)
    assert 0.5 < tokens_0 / tokens_1 < 2


def test_a_failing_rank_stops_the_others():
    def body(run):
        for step in range(6):
            if step == 1 and run.rank == 1:
                run.collector.engine = None
            run.step()
            run.exchange({})

    other, own = run_ranks(2, body, groups_per_batch=4, num_slots=8, extra_inflight=4)
    assert isinstance(own, AttributeError)
    assert isinstance(other, RuntimeError) and "failed on rank 1 (AttributeError" in str(other)


def test_ranks_that_share_an_engine_count_once():
    """Two tensor-parallel groups of two: the ranks of a group hold the same rollouts, and each token counts once."""

    def body(run):
        for _ in range(3):
            run.engine.version = run.version
            batch = run.collector.collect(run.version)
            for group, rollout in [(g, r) for g in batch for r in g.rollouts if run.rank % 2 == 0]:
                run.check_rollout(group, rollout)
            run.collector.finish_batch(run.version)
            run.version += 1
            run.exchange({})
        return packed(run.collector.unfinished.groups), run.collector.ledger_balance()

    results = run_ranks(4, body, groups_per_batch=2, num_slots=8, extra_inflight=4, ranks_per_engine=2)
    for result in results:
        if isinstance(result, Exception):
            raise result
    balances = [balance for _, balance in results]
    assert balances == balances[:1] * 4
    assert results[0][0] == results[1][0] and results[2][0] == results[3][0]


def test_admissions_by_hand():
    schedule = ContinuousSchedule(groups_per_batch=2, max_inflight_groups=8, num_slots=10)
    assert schedule.slots_of_rank(1) == 10 and schedule.slots_of_rank(3) == math.ceil(10 / 3)
    assert schedule.admissions([6], 4, room=9) == [0]
    assert schedule.admissions([10], 4, room=9) == []
    assert schedule.admissions([0], 4, room=2) == [0, 0]
    # Two ranks of 5 slots, each with up to 3 in reserve: they are filled to 8 or more, the emptier one first.
    assert schedule.admissions([4, 0], 4, room=9, has_reserve=True) == [1, 0, 1]
    assert schedule.admissions([5, 0], 4, room=9, has_reserve=True) == [1, 1, 0]
    assert schedule.admissions([5, 0], 4, room=9) == [1, 1]
    assert schedule.room(num_held=3) == 5 and schedule.room(num_held=3, num_batches_left=2) == 1
