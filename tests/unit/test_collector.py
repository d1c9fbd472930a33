"""Rollout steps end to end over simulated rollouts: nothing is lost, mixed, too long, too old or out of order.

The engine is simulated and ranks are threads that exchange through a barrier. What a real engine or a real collective
does is not covered here.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import pickle
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_ulorl.rollout.collector import MAX_REFILL_ROUNDS, CollectorSettings, Prompt
from trl_ulorl.rollout.continuous import ContinuousCollector
from trl_ulorl.rollout.engine import DecodedSegment
from trl_ulorl.rollout.packing import pack_groups
from trl_ulorl.rollout.pool import Finish, Outcome
from trl_ulorl.rollout.prompts import PromptStream
from trl_ulorl.rollout.schedule import ContinuousSchedule, SegmentSchedule
from trl_ulorl.rollout.scoring import RewardInput, RewardScorer, RewardSource
from trl_ulorl.rollout.segmented import SegmentCollector
from trl_ulorl.rollout.selection import has_baseline, is_mixed
from trl_ulorl.rollout.simulated import EOS_ID, SERIAL_BASE, SimulatedEngine

fuzz = settings(derandomize=True, max_examples=30)

NUM_ROWS = 13
MAX_CALLS = 2000  # of an engine: more means that a step does not end
TIMEOUT = 20  # seconds after which a rank hangs


@pytest.fixture(autouse=True)
def _quiet(caplog):
    """Thousands of expected warnings otherwise."""
    caplog.set_level(logging.ERROR, "trl_ulorl")


# --- rewards --------------------------------------------------------------------------------------------------------


def mixed(serial, row):
    return float(serial % 2)


def equal(serial, row):
    return 1.0


def undecided(serial, row):
    return None


def raising(serial, row):
    raise ValueError("can't judge this")


def anything(serial, row):
    """0, 1, None or an exception, at random, but the same for a rollout whenever it is asked for."""
    choice = hashlib.sha256(b"%d" % serial).digest()[0] % 8
    return raising(serial, row) if choice == 7 else [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, None][choice]


PATTERNS = [mixed, equal, undecided, raising, anything]


class Rewards:
    """A reward function whose behaviour is set for each run, since a scorer's thread is never given back."""

    pattern = staticmethod(mixed)

    def __call__(self, prompts, completion_ids, **_):
        return [self.pattern(ids[0] - SERIAL_BASE, row) for ids, row in zip(completion_ids, prompts, strict=True)]


@functools.cache
def scorer_of(rank):
    rewards = Rewards()
    return RewardScorer([RewardSource("reward", rewards)]), rewards


# --- a run and all that must hold in it -----------------------------------------------------------------------------


class RecordingEngine:
    """Writes down what was sampled under which version, and gives results out of order and as views of one matrix."""

    def __init__(self, engine, sampled, seed=0):
        self.simulated = engine
        self.sampled = sampled  # serial number -> [(version, ids, log-probs)]
        self.version = 0
        self.num_calls = 0
        self.most_open = 0
        self._random = np.random.default_rng(seed)

    def decode(self, requests):
        self.num_calls += 1
        assert self.num_calls < MAX_CALLS, "the step does not end"
        results = list(self.simulated.decode(requests))
        self._random.shuffle(results)
        ids = np.zeros((len(results), max((r.token_ids.size for r in results), default=0)), dtype=np.int32)
        logps = np.zeros(ids.shape, dtype=np.float32)
        for row, result in enumerate(results):
            length = result.token_ids.size
            ids[row, :length], logps[row, :length] = result.token_ids, result.per_token_logps
            self.record(requests[result.request_index], result)
            yield DecodedSegment(result.request_index, ids[row, :length], logps[row, :length], result.is_stopped)
            ids[row], logps[row] = -1, -1  # an engine may reuse its buffers

    def record(self, request, result):
        assert 1 <= result.token_ids.size <= request.max_new_tokens
        whole = np.concatenate([request.token_ids, result.token_ids])
        serial = int(whole[whole >= SERIAL_BASE][0]) - SERIAL_BASE
        record = (self.version, result.token_ids.astype(np.int32), result.per_token_logps.astype(np.float32))
        self.sampled.setdefault(serial, []).append(record)

    @contextlib.contextmanager
    def stream(self):
        self.num_calls += 1
        with self.simulated.stream() as stream:
            recorded = RecordingStream(self, stream)
            yield recorded
            assert recorded.is_interrupted, "a step ends with an interruption, or tokens are lost"


class RecordingStream:
    """Passes a stream on, and checks that no more sequences decode than there are slots."""

    def __init__(self, engine, stream):
        self.engine, self.stream = engine, stream
        self.requests, self.num_calls, self.most, self.is_interrupted = {}, 0, 0, False

    @property
    def num_steps(self):
        return self.stream.num_steps

    def submit(self, key, request):
        assert key not in self.requests
        self.requests[key] = request
        self.stream.submit(key, request)
        self.engine.most_open = max(self.engine.most_open, self.stream.num_open)

    def step(self):
        self.num_calls += 1
        assert self.num_calls < MAX_CALLS, "the step does not end"
        return self.recorded(self.stream.step())

    def interrupt(self):
        self.is_interrupted = True
        return self.recorded(self.stream.interrupt())

    def recorded(self, results):
        for result in results:
            self.engine.record(self.requests[result.request_index], result)
        return results


class Run:
    """A collector, and everything that must hold after each of its steps."""

    def __init__(
        self,
        *,
        pattern=mixed,
        groups_per_batch=2,
        num_generations=2,
        num_segments=3,
        cap=30,
        extra_inflight=None,
        max_staleness=None,
        versions_per_batch=1,
        dynamic_sampling=False,
        median_length=12,
        rank=0,
        num_ranks=1,
        exchange=lambda payload: [payload],
        sampled=None,
        seed=0,
        scorer=None,
        num_slots=None,
        ranks_per_engine=1,
        **settings,
    ):
        self.cap, self.rank, self.exchange, self.version = cap, rank, exchange, 0
        simulated = SimulatedEngine(seed=seed, median_length=median_length, sigma=1.5)
        simulated.num_started = 100_000 * (rank // ranks_per_engine)
        self.is_first = rank % ranks_per_engine == 0  # of those that share an engine and sample the same
        self.engine = RecordingEngine(simulated, sampled if sampled is not None and self.is_first else {}, seed)
        self.closed = []
        if scorer is None:
            scorer, rewards = scorer_of(rank)
            rewards.pattern = pattern
        default_inflight = (num_segments - 1) * groups_per_batch
        bounds = {
            "groups_per_batch": groups_per_batch,
            "max_inflight_groups": groups_per_batch + (default_inflight if extra_inflight is None else extra_inflight),
            "max_staleness": max_staleness,
            "versions_per_batch": versions_per_batch,
        }
        if num_slots is None:
            collector_type, self.schedule = (
                SegmentCollector,
                SegmentSchedule(
                    **bounds, segment_length=math.ceil(cap / num_segments), is_on_policy=num_segments == 1
                ),
            )
        else:
            collector_type, self.schedule = ContinuousCollector, ContinuousSchedule(**bounds, num_slots=num_slots)
        self.settings = CollectorSettings(
            num_generations=num_generations,
            max_completion_length=cap,
            num_segments=num_segments,
            dynamic_sampling=dynamic_sampling,
            **{
                "reward_weights": (1.0,),
                "scored_at_batch_time": False,
                "correctness_index": 0,
                "truncated_is_wrong": False,
                **settings,
            },
        )
        self.collector = collector_type(
            engine=self.engine,
            schedule=self.schedule,
            prompts=PromptStream(NUM_ROWS, seed=seed, shuffle=False),
            scorer=scorer,
            settings=self.settings,
            tokenize=self.tokenize,
            render=self.render,
            exchange=exchange,
            rank=rank,
            num_ranks=num_ranks,
            ranks_per_engine=ranks_per_engine,
            on_close=lambda group, outcome, version: self.closed.append((group, outcome, version)),
        )

    def limit_of(self, row):
        """Some prompts leave less room than others."""
        return self.cap - row % 3

    def tokenize(self, rows):
        return [Prompt([7] * (row + 1), self.limit_of(row)) for row in rows]

    def render(self, group, rollout):
        assert rollout.is_finished
        return RewardInput(rollout, group.row_index, "", rollout.completion_ids.tolist(), {})

    def step(self, num_batches_left=None):
        """One rollout step and the updates on its batch, checked."""
        self.engine.version = self.version
        batch = self.collector.collect(self.version, num_batches_left)
        if self.is_first:
            self.check_batch(batch)
            self.check_ledger()
        self.collector.finish_batch(self.version)
        if self.is_first:
            self.check_ledger()
        self.version += self.schedule.versions_per_batch
        return batch

    def is_filler(self, group):
        if self.settings.scored_at_batch_time:
            return False
        is_filtered = self.settings.dynamic_sampling and not is_mixed(group, weights=[1.0])
        return is_filtered or not has_baseline(group)

    def check_batch(self, batch):
        assert len(batch) == self.schedule.groups_per_batch
        left_before = {group.group_id for group, *_ in self.closed}
        fillers = [group for group in batch if self.is_filler(group)]
        ready = self.collector.ready.groups
        assert len(fillers) == self.collector.report.num_filled
        assert not fillers or not ready
        assert not any(self.is_filler(group) for group in ready)
        for group in batch:
            assert group.group_id not in left_before
            assert self.is_filler(group) or all(group.group_id < waiting.group_id for waiting in ready)
            assert len(group.rollouts) == self.settings.num_generations
            for rollout in group.rollouts:
                self.check_rollout(group, rollout)
            if self.schedule.max_staleness is not None and not self.schedule.is_on_policy:
                last_update = self.version + self.schedule.versions_per_batch - 1
                assert last_update - group.admitted_version <= self.schedule.max_staleness

    def check_rollout(self, group, rollout):
        """It has exactly what the engine sampled for it, with the versions and log-probs of that moment."""
        ids, limit = rollout.completion_ids, self.limit_of(group.row_index)
        assert 1 <= rollout.num_tokens == ids.size <= limit
        if rollout.finish is Finish.EOS:
            assert ids[-1] == EOS_ID
        else:
            assert rollout.finish is Finish.LENGTH and ids.size == limit and ids[-1] != EOS_ID
        records = self.engine.sampled[int(ids[0]) - SERIAL_BASE]
        assert len(records) == len(rollout.segments)
        versions = [segment.policy_version for segment in rollout.segments]
        assert versions == sorted(versions) and versions[-1] <= self.version
        if isinstance(self.schedule, ContinuousSchedule):  # a sibling may wait for a slot
            assert versions[0] >= group.admitted_version
        else:
            assert versions[0] == group.admitted_version
            lengths = [len(segment) for segment in rollout.segments]
            assert self.schedule.max_staleness is not None or max(lengths) <= self.schedule.segment_length
        for segment, (version, sampled_ids, sampled_logps) in zip(rollout.segments, records, strict=True):
            assert segment.policy_version == version
            assert segment.token_ids.tobytes() == sampled_ids.tobytes()
            assert segment.per_token_logps.tobytes() == sampled_logps.tobytes()
        middle = ids[1:-1] if rollout.finish is Finish.EOS else ids[1:]
        assert middle.tolist() == list(range(1, 1 + middle.size))

    def check_ledger(self):
        """The ledger balances, and it agrees with what engine and callback saw."""
        collector, balance = self.collector, self.collector.ledger_balance()
        closed = [group.group_id for group, *_ in self.closed]
        here = [group.group_id for group in collector.training + collector.ready.groups]
        unfinished = list(collector._tickets)
        assert sorted(closed + here + unfinished) == list(range(balance["groups"]["admitted"]))
        assert balance["groups"]["ready"] == len(here) and balance["groups"]["unfinished"] == len(unfinished)
        for outcome in Outcome:
            groups = [group for group, how, _ in self.closed if how is outcome]
            assert balance["groups"][outcome] == len(groups)
            assert balance["tokens"][outcome] == sum(group.num_tokens for group in groups)
            assert sum(collector.ledger.lengths[outcome]) == len(groups) * self.settings.num_generations
        assert balance["tokens"]["generated"] == sum(
            ids.size for records in self.engine.sampled.values() for _, ids, _ in records
        )
        assert len(collector.ready) + len(unfinished) <= self.schedule.capacity

    def outcome_counts(self):
        groups = self.collector.ledger_balance()["groups"]
        return {name: groups[name] for name in ("trained", "filtered", "set_aside", "ready", "unfinished")}


def packed(groups):
    """What the groups hold, byte by byte, and nothing that is the same object."""
    groups = pack_groups(groups)
    arrays = {**groups.records, **{name: np.concatenate(parts) for name, parts in groups.tokens.items()}}
    return {name: values.tobytes() for name, values in arrays.items()}, json.dumps(groups.notes)


@st.composite
def configurations(draw, patterns=PATTERNS):
    versions_per_batch = draw(st.integers(1, 3))
    return {
        "pattern": draw(st.sampled_from(patterns)),
        "groups_per_batch": draw(st.integers(1, 3)),
        "num_generations": draw(st.integers(2, 3)),
        "num_segments": draw(st.integers(1, 4)),
        "cap": draw(st.integers(4, 40)),
        "median_length": draw(st.sampled_from([4, 12, 40])),
        "extra_inflight": draw(st.integers(0, 9)),
        "max_staleness": draw(st.none() | st.integers(versions_per_batch - 1, 6)),
        "versions_per_batch": versions_per_batch,
        "dynamic_sampling": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


# --- conservation ---------------------------------------------------------------------------------------------------


@fuzz
@given(configurations(), st.integers(1, 5))
def test_nothing_is_lost_in_any_configuration(configuration, num_steps):
    run = Run(**configuration)
    for _ in range(num_steps):
        run.step()
    assert run.outcome_counts()["trained"] == num_steps * configuration["groups_per_batch"]


@fuzz
@given(configurations(patterns=[mixed, anything]), st.integers(6, 10))
def test_long_rollouts_meet_their_staleness_bound(configuration, num_steps):
    """The tail is long and the bound tight, so that groups are decoded to their end for its sake."""
    configuration["max_staleness"] = configuration["versions_per_batch"] - 1 + configuration["extra_inflight"] % 3
    configuration.update(cap=40, median_length=12, num_segments=4)
    run = Run(**configuration)
    for _ in range(num_steps):
        run.step()


def test_groups_at_the_bound_are_decoded_to_their_end():
    run = Run(num_segments=4, cap=40, median_length=200, max_staleness=0)
    run.step()
    assert run.engine.num_calls == 1
    assert run.outcome_counts() == {"trained": 2, "filtered": 0, "set_aside": 0, "ready": 0, "unfinished": 0}


def plan_groups(run, lengths, otherwise):
    """Fix the lengths of the rollouts of some groups; groups have two rollouts and start in order."""
    run.engine.simulated.planned_length = lambda serial: lengths.get(serial // 2, otherwise)


def test_a_full_experience_pool_does_not_hide_a_group_at_the_bound():
    """A long group is decoded to its end though a batch of younger ones is ready: it could never leave in time else."""
    run = Run(groups_per_batch=1, num_segments=10, cap=100, max_staleness=3)
    plan_groups(run, {0: 90, 3: 15}, otherwise=5)
    assert [[group.group_id for group in run.step()] for _ in range(3)] == [[1], [2], [3]]
    assert [group.group_id for group in run.collector.ready.groups] == [4]
    assert [group.group_id for group in run.step()] == [0]


@fuzz
@given(configurations())
def test_one_segment_is_on_policy(configuration):
    """TOIS: every token is the current policy's, and nothing is carried over."""
    configuration.update(num_segments=1, max_staleness=None)
    run = Run(**configuration)
    for _ in range(3):
        for group in run.step():
            assert group.admitted_version == run.version - run.schedule.versions_per_batch
            for rollout in group.rollouts:
                assert set(rollout.policy_versions.tolist()) == {group.admitted_version}
        assert len(run.collector.ready) == len(run.collector.unfinished) == len(run.collector._tickets) == 0
    assert all(len(records) == 1 for records in run.engine.sampled.values())


def test_on_policy_surplus_is_filtered():
    """An engine may stop before the budget is used up; what is then complete beyond the batch would be stale later."""
    run = Run(num_segments=1, cap=30, extra_inflight=2)
    plan_groups(run, {}, otherwise=10)
    decode = run.engine.decode

    def decode_half(requests):
        run.engine.decode = decode
        return decode([dataclasses.replace(r, max_new_tokens=4 if i < 2 else 30) for i, r in enumerate(requests)])

    run.engine.decode = decode_half
    assert [group.group_id for group in run.step()] == [0, 1]
    assert [(group.group_id, outcome) for group, outcome, _ in run.closed] == [
        (2, Outcome.FILTERED),
        (0, Outcome.TRAINED),
        (1, Outcome.TRAINED),
    ]


def test_drain_ends_though_groups_are_always_on_their_way():
    """Each round completes the group of the round before, and all are filtered: admission has to stop."""
    run = Run(pattern=equal, dynamic_sampling=True, num_segments=3, cap=30)
    plan_groups(run, {0: 5}, otherwise=15)
    run.step(num_batches_left=1)
    assert run.collector.report.num_rounds == 3 + MAX_REFILL_ROUNDS + 1
    assert run.outcome_counts()["unfinished"] == 0


@fuzz
@given(configurations(), st.integers(1, 5))
def test_drain_leaves_nothing_behind(configuration, num_steps):
    run = Run(**configuration)
    for step in range(num_steps):
        run.step(num_batches_left=num_steps - step)
    counts = run.outcome_counts()
    assert counts["ready"] == counts["unfinished"] == 0
    assert counts["trained"] == num_steps * configuration["groups_per_batch"]
    assert counts["trained"] + counts["filtered"] + counts["set_aside"] == run.collector.ledger.groups["admitted"]
    if (
        configuration["pattern"] is mixed
        and configuration["num_segments"] > 1
        and not configuration["dynamic_sampling"]
    ):
        assert counts["filtered"] == counts["set_aside"] == 0


def test_a_full_pool_is_used_without_decoding():
    run = Run(num_segments=2, cap=30, median_length=2, extra_inflight=6)
    for _ in range(2):
        run.step()
    while len(run.collector.ready) < 2:
        run.step()
    calls, held = run.engine.num_calls, run.collector.ready.groups
    run.collector.collect(run.version)
    assert run.engine.num_calls == calls
    assert [group.group_id for group in run.collector.training] == [group.group_id for group in held[:2]]
    assert run.collector.metrics(run.version)["rollout/occupancy"] == 1.0


# --- filling a batch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_segments", [1, 4])
@pytest.mark.parametrize(
    ("pattern", "dynamic_sampling", "outcome"),
    [
        (equal, True, "filtered"),
        (undecided, True, "set_aside"),
        (raising, True, "set_aside"),
        (raising, False, "set_aside"),
    ],
)
def test_batches_are_filled_after_a_bounded_number_of_rounds(num_segments, pattern, dynamic_sampling, outcome, caplog):
    caplog.set_level(logging.WARNING, "trl_ulorl")
    run = Run(num_segments=num_segments, pattern=pattern, dynamic_sampling=dynamic_sampling, cap=16, median_length=4)
    for step in range(1, 3):
        run.step()
        assert run.engine.num_calls == step * (num_segments + MAX_REFILL_ROUNDS)
        assert run.collector.report.num_filled == 2
    counts = run.outcome_counts()
    assert counts["trained"] == 4
    assert counts[outcome] > 10
    assert counts["filtered"] + counts["set_aside"] == counts[outcome]
    warnings = [r.getMessage() for r in caplog.records if r.name.endswith("collector")]
    assert len(warnings) == 2
    assert f"Only 0 of 2 groups have differing rewards after {num_segments + MAX_REFILL_ROUNDS} rounds" in warnings[0]
    assert "filled with 2 groups" in warnings[0] and "`num_generations`" in warnings[0]


def test_groups_with_equal_rewards_are_kept_without_dynamic_sampling():
    run = Run(pattern=equal)
    for _ in range(3):
        run.step()
    assert run.outcome_counts()["filtered"] == run.outcome_counts()["set_aside"] == 0


def test_filtered_groups_fill_before_those_without_rewards():
    run = Run(pattern=lambda serial, row: None if row % 2 else 1.0, dynamic_sampling=True)
    for _ in range(3):
        assert [group.row_index % 2 for group in run.step()] == [0, 0]


def test_good_groups_come_before_fillers():
    """One row of 13 has differing rewards: what is found of it is used, the rest of the batch is filled."""
    run = Run(
        pattern=lambda serial, row: float(serial % 2) if row == 12 else 1.0, dynamic_sampling=True, groups_per_batch=8
    )
    batch = run.step()
    num_found = sum(group.row_index == 12 for group in batch)
    assert 0 < num_found == 8 - run.collector.report.num_filled < 8


def test_reward_models_decide_nothing_here():
    """They give rewards once the batch is formed: every group is kept, in order."""
    run = Run(scorer=RewardScorer([]), scored_at_batch_time=True, reward_weights=())
    ids = [group.group_id for _ in range(3) for group in run.step()]
    assert len(set(ids)) == 6
    assert run.outcome_counts()["filtered"] == run.outcome_counts()["set_aside"] == 0


def test_truncation_as_wrong_reaches_the_rewards():
    """The collector settles rewards before it filters: a truncated rollout's bonus may not make a group mixed."""

    def correctness(completions, **_):
        return [0.0] * len(completions)

    def bonus(completion_ids, **_):
        return [float(ids[-1] != EOS_ID) for ids in completion_ids]

    scorer = RewardScorer(
        [RewardSource("correctness", correctness), RewardSource("bonus", bonus)], truncated_is_wrong=0
    )
    run = Run(scorer=scorer, dynamic_sampling=True, truncated_is_wrong=True, reward_weights=(1.0, 1.0))
    run.is_filler = lambda group: True
    batch = run.step()
    rollouts = [rollout for group, *_ in run.closed for rollout in group.rollouts]
    assert {rollout.finish for rollout in rollouts} == set(Finish)
    assert all(rollout.rewards.tolist() == [0.0, 0.0] for rollout in rollouts)
    assert run.collector.report.num_filled == len(batch)


# --- failures and metrics -------------------------------------------------------------------------------------------


def test_an_engine_that_exceeds_its_budget_is_caught():
    run = Run(cap=4)

    class Endless:
        def decode(self, requests):
            for index, request in enumerate(requests):
                length = request.max_new_tokens + 100
                yield DecodedSegment(index, np.ones(length), np.zeros(length), is_stopped=False)

    run.collector.engine = Endless()
    with pytest.raises(RuntimeError, match="beyond its limit of 4: an engine must keep to `max_new_tokens`"):
        run.collector.collect(0)


def test_a_lost_token_is_noticed():
    run = Run(num_segments=4, cap=40, median_length=40)
    run.step()
    run.collector.ready._groups = run.collector.ready.groups[1:]
    run.collector.unfinished._groups.popitem()
    with pytest.raises(RuntimeError, match="does not balance"):
        run.step()


def test_metrics_by_hand():
    """Four rollouts of 10 tokens, cut after 6: two rounds of one policy, then the same again with the next."""
    run = Run(num_segments=2, cap=12, median_length=10, extra_inflight=0)
    run.engine.simulated._sigma = 0.0
    run.step()
    run.engine.version = 1
    run.collector.collect(1)
    metrics = run.collector.metrics(1)
    expected = {
        "rollout/rounds": 2,
        "rollout/occupancy": 1.0,
        "rollout/decoded_tokens": 40,
        "rollout/filled_groups": 0,
        "rollout/in_flight": 0,
        "rollout/unfinished_groups": 0,
        "rollout/ready_groups": 0,
        "rollout/oldest_group_age": 0,
        "rollout/segments_per_rollout": 2.0,
        "rollout/age_mean": 0.0,
        "rollout/age_max": 0.0,
        "rollout/on_policy_frac": 1.0,
        "rollout/epoch": 4 / NUM_ROWS,
        "rollout/truncated_frac": 0.0,
        "rollout/completed_length_mean": 10.0,
        "rollout/wasted_tokens_frac": 0.0,
        "accuracy": 0.5,
        "verifier/undecided_frac": 0.0,
        "ledger/groups_admitted": 4,
        "ledger/groups_trained": 2,
        "ledger/groups_ready": 2,
        "ledger/tokens_generated": 80,
        "ledger/tokens_held": 40,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


# --- several ranks --------------------------------------------------------------------------------------------------


class Exchange:
    """Gathers pickled copies, as between processes; a rank that others wait for in vain breaks the barrier."""

    def __init__(self, num_ranks):
        self._barrier = threading.Barrier(num_ranks, timeout=TIMEOUT)
        self._payloads = [b""] * num_ranks

    def of(self, rank):
        def gather(payload):
            self._payloads[rank] = pickle.dumps(payload)
            self._barrier.wait()
            payloads = [pickle.loads(payload) for payload in self._payloads]
            self._barrier.wait()
            return payloads

        return gather


def run_ranks(num_ranks, body, **configuration):
    """Run `body(run)` on every rank; returns what each returned or raised."""
    exchange, results = Exchange(num_ranks), [None] * num_ranks
    sampled = configuration.pop("sampled", {})
    patterns = configuration.pop("patterns", None)

    def target(rank):
        try:
            if patterns is not None:
                configuration["pattern"] = patterns[rank]
            run = Run(rank=rank, num_ranks=num_ranks, exchange=exchange.of(rank), sampled=sampled, **configuration)
            results[rank] = body(run)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[rank] = error

    threads = [threading.Thread(target=target, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * TIMEOUT)
        assert not thread.is_alive(), "a rank hangs"
    return results


def steps(num_steps, drain=False):
    def body(run):
        batches = []
        for step in range(num_steps):
            batches.append(packed(run.step(num_steps - step if drain else None)))
            run.exchange({})  # nobody decodes on while others still compare with what was sampled
        return {
            "batches": batches,
            "balance": run.collector.ledger_balance(),
            "closed": [(group.group_id, outcome, version) for group, outcome, version in run.closed],
            "ready": packed(run.collector.ready.groups),
            "failed": run.collector.num_failed_rewards,
            "calls": run.engine.num_calls,
            "prompts": run.collector.prompts.state_dict(),
            "tickets": {i: (t.row_index, t.admitted_version, t.owner) for i, t in run.collector._tickets.items()},
        }

    return body


def own_tokens(run):
    return sum(
        r[1].size for serial, records in run.engine.sampled.items() if serial // 100_000 == run.rank for r in records
    )


@settings(fuzz, max_examples=25)
@given(configurations(), st.integers(2, 3), st.integers(1, 4), st.booleans())
def test_all_ranks_take_the_same_decisions(configuration, num_ranks, num_steps, drain):
    results = run_ranks(num_ranks, steps(num_steps, drain), **configuration)
    for result in results:
        if isinstance(result, Exception):
            raise result
        assert result == results[0]
    if drain:
        groups = results[0]["balance"]["groups"]
        assert groups["ready"] == groups["unfinished"] == 0


def test_work_is_spread_over_the_ranks():
    def body(run):
        for _ in range(4):
            run.step()
            run.exchange({})
        return own_tokens(run), len(run.collector.unfinished)

    results = run_ranks(2, body, groups_per_batch=4, num_segments=4, cap=40)
    (tokens_0, _), (tokens_1, _) = results
    assert 0.5 < tokens_0 / tokens_1 < 2


def test_a_rank_may_have_nothing_to_decode():
    """One group at a time on two ranks: the idle rank calls its engine all the same."""

    def body(run):
        for _ in range(3):
            run.step()
            run.exchange({})
        return run.engine.num_calls, own_tokens(run)

    (calls_0, tokens_0), (calls_1, tokens_1) = run_ranks(2, body, groups_per_batch=1, extra_inflight=0)
    assert calls_0 == calls_1 > 0
    assert tokens_0 > 0 == tokens_1


@pytest.mark.parametrize("part", ["decode", "tokenize", "render"])
def test_a_failing_rank_stops_the_others(part):
    """They would wait for it for ever."""

    def body(run):
        for step in range(3):
            if step == 2 and run.rank == 1:
                owner = run.collector.engine if part == "decode" else run.collector
                setattr(owner, part if part == "decode" else f"_{part}", fail)
            run.step()
            run.exchange({})

    def fail(*_):
        raise ValueError("no memory left")

    own, other = run_ranks(2, body, groups_per_batch=4, num_segments=1)[::-1]
    assert isinstance(own, ValueError)
    assert isinstance(other, RuntimeError), repr(other)
    assert "failed on rank 1 (ValueError: no memory left)" in str(other)


def test_a_prompt_that_one_rank_can_not_render_is_an_error_on_all_before_any_decodes():
    """The others would wait where weights are gathered, and no message would reach them."""
    decoding = []

    def body(run):
        tokenize, decode = run.collector._tokenize, run.collector.engine.decode

        def failing(rows):
            if 3 in rows:
                raise ValueError("row 3 has no template")
            return tokenize(rows)

        run.collector._tokenize = failing
        run.collector.engine.decode = lambda requests: (decoding.append(run.rank), decode(requests))[1]
        run.step()

    results = run_ranks(2, body, groups_per_batch=4, num_segments=1)
    assert [str(error) for error in results] == ["row 3 has no template"] * 2
    assert not decoding


def test_an_engine_that_exits_on_one_rank_stops_the_others():
    def body(run):
        if run.rank == 1:
            run.collector.engine.decode = sys.exit
            with pytest.raises(SystemExit):
                run.step()
            return None
        return run.step()

    other, own = run_ranks(2, body, groups_per_batch=4, num_segments=1)
    assert own is None
    assert isinstance(other, RuntimeError) and "failed on rank 1 (SystemExit" in str(other)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_whoever_catches_an_error_of_the_engine_can_go_on(error):
    run = Run(num_segments=4, cap=40, median_length=40)
    run.step()
    decode = run.collector.engine.decode

    def failing(requests):
        results = decode(requests)
        yield next(results)
        yield next(results)
        raise error

    run.collector.engine.decode = failing
    with pytest.raises(error):
        run.collector.collect(run.version)
    run.collector.ledger_balance()
    run.collector.engine.decode = decode
    for _ in range(3):
        run.collector.collect(run.version)
        run.collector.finish_batch(run.version)
        run.collector.ledger_balance()
        run.version += 1


def test_a_failing_reward_on_one_rank_stops_nobody():
    results = run_ranks(2, steps(3), patterns=[mixed, raising], groups_per_batch=2)
    assert results[0] == results[1]
    assert results[0]["failed"] > 0
    assert results[0]["balance"]["groups"]["set_aside"] > 0
    assert results[0]["balance"]["groups"]["trained"] == 6


def test_a_batch_is_ordered_by_work():
    """The first half of the batch is one rank's, the second half the other's: about equally many tokens."""

    def body(run):
        batch = run.step()
        run.exchange({})
        tokens = [group.num_tokens for group in batch]
        return sum(tokens[:4]), sum(tokens[4:]), max(tokens)

    results = run_ranks(2, body, groups_per_batch=8, num_segments=1, cap=200, median_length=20, seed=3)
    assert results[0] == results[1]
    first, second, largest = results[0]
    assert abs(first - second) <= largest


# --- the simulated engine -------------------------------------------------------------------------------------------


def test_simulated_time_and_lengths():
    run = Run(groups_per_batch=2, num_generations=2, num_segments=1, cap=100)
    run.step()
    lengths = [ids.size for records in run.engine.sampled.values() for _, ids, _ in records]
    assert run.engine.simulated.seconds == pytest.approx(0.02 * max(lengths) + 0.000_01 * sum(lengths))
    engine = SimulatedEngine(median_length=1000, sigma=1.0, seed=1)
    planned = np.array([engine.planned_length(serial) for serial in range(2000)])
    assert np.median(planned) == pytest.approx(1000, rel=0.1)
    assert planned.mean() == pytest.approx(1000 * math.exp(0.5), rel=0.1)
    assert (planned == [engine.planned_length(serial) for serial in range(2000)]).all()
    assert (planned != [SimulatedEngine(median_length=1000, seed=2).planned_length(s) for s in range(2000)]).any()
