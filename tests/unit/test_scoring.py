"""Rewards stay with their rollouts, and a failing reward function costs only the rollout that it fails on."""

import asyncio
import concurrent.futures
import gc
import logging
import math
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from trl_ulorl.replay import replay_logs
from trl_ulorl.rollout.pool import Finish, Rollout, Segment
from trl_ulorl.rollout.scoring import (
    MAX_FIRST_FAILURES,
    MAX_ROLLOUTS,
    MAX_WARNINGS,
    RewardInput,
    RewardScorer,
    RewardSource,
)

TIMEOUT = 20  # seconds after which something hangs


def make_item(group_id=0, index=0, completion="", finish=Finish.EOS, **columns):
    rollout = Rollout(group_id, index)
    rollout.extend(Segment.from_values([1], [-1.0], 0), finish)
    return RewardInput(rollout, f"prompt {group_id}", completion, [group_id, index], columns)


def make_items(completions, num_generations=2):
    return [make_item(*divmod(i, num_generations), completion=text) for i, text in enumerate(completions)]


def score(items, *funcs, **kwargs):
    """Score in one go: the functions see all items in their first call. Returns the scorer."""
    scorer = RewardScorer([RewardSource(func.__name__, func) for func in funcs], **kwargs)
    scorer._loop.call_soon_threadsafe(lambda: [scorer.submit(item) for item in items])  # all before the thread looks
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), scorer._loop).result(TIMEOUT)
    wait(scorer)
    return scorer


def wait(scorer):
    """`scorer.wait()`, but a hang fails the test."""
    _, not_done = concurrent.futures.wait(scorer._open, TIMEOUT)
    assert not not_done, "wait() would hang"
    scorer.wait()


def rewards(items):
    return [[None if math.isnan(x) else x for x in item.rollout.rewards.tolist()] for item in items]


def failed(items):
    return [item.rollout.has_failed_reward for item in items]


def length(completions, **_):
    return [float(len(text)) for text in completions]


async def length_async(completions, **_):
    await asyncio.sleep(0.001)
    return [100.0 + len(text) for text in completions]


# --- calls ----------------------------------------------------------------------------------------------------------


def test_synchronous_and_asynchronous_functions():
    items = make_items(["a", "bb", "ccc"])
    scorer = score(items, length, length_async, length)
    assert rewards(items) == [[1.0, 101.0, 1.0], [2.0, 102.0, 2.0], [3.0, 103.0, 3.0]]
    assert all(item.rollout.rewards.dtype == np.float32 for item in items)
    assert failed(items) == [False] * 3
    assert scorer.num_failures == {}


def test_functions_see_what_trl_would_show_them():
    calls, state = [], object()

    def reward(**kwargs):
        calls.append(kwargs)
        return [0.0] * len(kwargs["completions"])

    items = [make_item(g, i, f"{g}{i}", answer=f"answer {g}", level=g) for g, i in ((0, 0), (0, 1), (3, 0))]
    score(items, reward, get_trainer_state=lambda: state)
    (call,) = calls
    assert callable(call.pop("log_extra")) and callable(call.pop("log_metric"))
    assert call.pop("trainer_state") is state
    assert call == {
        "prompts": ["prompt 0", "prompt 0", "prompt 3"],
        "completions": ["00", "01", "30"],
        "completion_ids": [[0, 0], [0, 1], [3, 0]],
        "answer": ["answer 0", "answer 0", "answer 3"],
        "level": [0, 0, 3],
    }


def test_what_ends_during_a_call_shares_the_next_one():
    is_called, may_return, sizes = threading.Event(), threading.Event(), []

    def slow(completions, **_):
        sizes.append(len(completions))
        is_called.set()
        assert may_return.wait(TIMEOUT)
        return [float(text) for text in completions]

    scorer = RewardScorer([RewardSource("slow", slow)])
    items = make_items("12345")
    scorer.submit(items[0])
    assert is_called.wait(TIMEOUT)
    for item in items[1:]:
        scorer.submit(item)  # returns though the function is busy
    assert all(item.rollout.rewards is None for item in items)
    may_return.set()
    wait(scorer)
    assert sizes == [1, 4]
    assert rewards(items) == [[1.0], [2.0], [3.0], [4.0], [5.0]]


def test_functions_can_be_added_and_coroutines_run():
    scorer = RewardScorer([RewardSource("length", length)])
    assert scorer.add(RewardSource("length_async", length_async)) == 1
    (item,) = make_items(["abc"])
    scorer.submit(item)
    wait(scorer)
    assert rewards([item]) == [[3.0, 103.0]]
    assert scorer.run(length_async(["ab"])) == [102.0]
    wait(scorer)  # nothing is open: returns at once


def test_scored_completions_are_let_go():
    """Ids are Python lists here, 36 bytes a token: they may not outlive their scoring."""

    class Text(str):
        __slots__ = ("__weakref__",)

    items = make_items([Text("abc")])
    reference = weakref.ref(items[0].completion)
    scorer = score(items, length)
    del items
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), scorer._loop).result(TIMEOUT)
    gc.collect()
    assert reference() is None


# --- failures -------------------------------------------------------------------------------------------------------


def picky(completions, **_):
    for text in completions:
        if text == "bad":
            raise KeyError("no such answer")
        if text == "exit":
            sys.exit(3)
        if text == "alarm":
            raise Alarm
    return [float(len(text)) for text in completions]


class Alarm(BaseException):
    """As math-verify's timeout is."""


async def picky_async(completions, **_):
    await asyncio.sleep(0)
    return picky(completions)


@pytest.mark.parametrize("bad", ["bad", "exit", "alarm"])
@pytest.mark.parametrize("func", [picky, picky_async])
def test_an_exception_costs_one_rollout(func, bad, caplog):
    items = make_items(["a", "bb", "ccc", bad, "eeeee"])
    scorer = score(items, length, func)
    assert rewards(items) == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [float(len(bad)), None], [5.0, 5.0]]
    assert failed(items) == [False, False, False, True, False]
    assert scorer.num_failures == {func.__name__: 1}
    (record,) = caplog.records
    assert f"`{func.__name__}` failed on rollout 1 of group 1" in record.getMessage()
    assert "Return None for completions that can't be judged" in record.getMessage()
    more = make_items(["dddd"])
    scorer.submit(more[0])  # the thread still serves
    wait(scorer)
    assert rewards(more) == [[4.0, 4.0]]


def test_other_groups_are_called_once_more_as_a_whole():
    calls = []

    def reward(completions, **_):
        calls.append("".join(completions))
        return picky(["bad" if text == "x" else text for text in completions])

    score(make_items("abcxef"), reward)
    assert calls == ["abcxef", "ab", "cx", "c", "x", "ef"]


@pytest.mark.parametrize("num_values", [0, 1, 3])
def test_wrong_number_of_values_is_a_failure(num_values, caplog):
    """Two values for two completions, but not for a completion `x`."""

    def reward(completions, **_):
        return [1.0] * (
            num_values if "x" in completions and len(completions) == 1 else 2 * ("x" not in completions) or 7
        )

    items = make_items("abx", num_generations=2)
    score(items, reward)
    is_right = num_values == 1
    assert rewards(items) == [[1.0], [1.0], [1.0 if is_right else None]]
    assert failed(items) == [False, False, not is_right]
    if not is_right:
        assert f"it returned {num_values} rewards for 1 completions" in caplog.text


@pytest.mark.parametrize("output", [None, 5, [[1.0]], ["one"], [1j], [{}]], ids=repr)
def test_output_that_is_no_list_of_numbers_is_a_failure(output):
    def reward(**_):
        return output

    items = make_items("a")
    scorer = score(items, reward, length)
    assert rewards(items) == [[None, 1.0]]
    assert failed(items) == [True]
    assert scorer.num_failures == {"reward": 1}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (math.nan, None),
        (math.inf, None),
        (-math.inf, None),
        (True, 1.0),
        (2, 2.0),
        (np.float32(0.5), 0.5),
        (np.array(0.25), 0.25),
    ],
    ids=repr,
)
def test_values(value, expected):
    """A function that can't decide says so without failing."""

    def reward(completions, **_):
        return [value if text == "x" else 1.0 for text in completions]

    items = make_items("axb")
    scorer = score(items, reward)
    assert rewards(items) == [[1.0], [expected], [1.0]]
    assert failed(items) == [False] * 3
    assert scorer.num_failures == {}


def test_one_text_among_numbers_costs_one_rollout():
    def reward(completions, **_):
        return ["?" if text == "x" else 1.0 for text in completions]

    items = make_items("axbc")
    score(items, reward)
    assert rewards(items) == [[1.0], [None], [1.0], [1.0]]
    assert failed(items) == [False, True, False, False]


@pytest.mark.parametrize("works_at_first", [False, True])
def test_a_function_that_never_works_ends_the_run_and_one_that_worked_does_not(works_at_first):
    calls = []

    def reward(completions, **_):
        calls.append(len(completions))
        if works_at_first and len(calls) == 1:
            return [1.0] * len(completions)
        raise KeyError("solution")

    scorer = score(make_items(["x"]), reward) if works_at_first else score([], reward)
    for item in make_items(["x"] * (MAX_FIRST_FAILURES - 1)):
        scorer.submit(item)
    wait(scorer)
    scorer.submit(make_items(["x"])[0])
    if works_at_first:
        wait(scorer)
        assert scorer.num_failures == {"reward": MAX_FIRST_FAILURES}
        return
    with pytest.raises(RuntimeError, match=f"failed on the first {MAX_FIRST_FAILURES} rollouts.*KeyError") as caught:
        wait(scorer)
    assert isinstance(caught.value.__cause__, KeyError), "its traceback names the line"


def test_warnings_end_and_counting_goes_on(caplog):
    def reward(**_):
        raise ValueError("always")

    items = make_items(["x"] * (MAX_WARNINGS + 5))
    scorer = score(items, reward)
    assert scorer.num_failures == {"reward": MAX_WARNINGS + 5}
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == MAX_WARNINGS
    assert all(failed(items))


def test_failing_trainer_state_is_isolated_too():
    items = make_items("ab")
    score(items, length, get_trainer_state=lambda: 1 / 0)
    assert rewards(items) == [[None], [None]]


# --- logs -----------------------------------------------------------------------------------------------------------


def test_logs_stay_with_their_rollouts():
    def reward(completions, log_extra, log_metric, **_):
        log_extra("text", [text.upper() for text in completions])
        log_metric("calls", np.float32(len(completions)))
        return [0.0] * len(completions)

    def other(completions, log_extra, log_metric, **_):
        log_extra("reverse", [text[::-1] for text in completions])
        log_metric("other", 7)
        return [0.0] * len(completions)

    items = make_items(["ab", "cd", "ef"])
    scorer = score(items[:2], reward, other)
    scorer.submit(items[2])
    wait(scorer)
    assert [item.rollout.logs for item in items] == [
        {"text": "AB", "reverse": "ba"},
        {"text": "CD", "reverse": "dc"},
        {"text": "EF", "reverse": "fe"},
    ]
    assert [item.rollout.metrics for item in items] == [{"calls": [n], "other": [7.0]} for n in (2.0, 2.0, 1.0)]
    assert all(type(value) is float for item in items for values in item.rollout.metrics.values() for value in values)


def test_logs_of_a_failed_call_are_dropped():
    def reward(completions, log_extra, log_metric, **_):
        log_extra("text", list(completions))
        log_metric("calls", 1)
        return picky(["bad" if text == "x" else text for text in completions])

    items = make_items("axbc")
    score(items, reward)
    assert [item.rollout.logs.get("text") for item in items] == ["a", None, "b", "c"]
    assert [item.rollout.metrics for item in items] == [{"calls": [1.0]}, {}, {"calls": [1.0]}, {"calls": [1.0]}]


def test_log_extra_with_a_wrong_number_of_values_is_a_failure():
    def reward(completions, log_extra, **_):
        log_extra("text", ["only one", "and another"])
        return [1.0] * len(completions)

    items = make_items("abc")
    score(items, reward)
    assert rewards(items) == [[1.0], [1.0], [None]]
    assert "text" not in items[2].rollout.logs


# --- truncation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong_index", [0, 1])
def test_truncated_rollouts_are_wrong_without_a_call(wrong_index):
    seen = []

    def correctness(completions, **_):
        seen.extend(completions)
        return [1.0] * len(completions)

    cut = {1, 2, 4}
    items = [make_item(0, i, str(i), Finish.LENGTH if i in cut else Finish.EOS) for i in range(5)]
    funcs = [correctness, length] if wrong_index == 0 else [length, correctness]
    score(items, *funcs, truncated_is_wrong=wrong_index)
    assert seen == ["0", "3"]
    assert [item.rollout.rewards[wrong_index] for item in items] == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert [item.rollout.rewards[1 - wrong_index] for item in items] == [1.0] * 5
    assert failed(items) == [False] * 5


def test_only_truncated_rollouts_need_no_call():
    def never(**_):
        raise AssertionError

    items = [make_item(0, i, "x", Finish.LENGTH) for i in range(2)]
    scorer = score(items, never, truncated_is_wrong=0)
    assert rewards(items) == [[0.0], [0.0]]
    assert scorer.num_failures == {}


def test_truncated_rollouts_are_judged_if_nothing_else_is_asked_for():
    items = [make_item(0, 0, "abc", Finish.LENGTH)]
    score(items, length)
    assert rewards(items) == [[3.0]]


# --- the end of the process -----------------------------------------------------------------------------------------

SCRIPT = """
import time
from trl_ulorl.rollout.pool import Rollout
from trl_ulorl.rollout.scoring import RewardInput, RewardScorer, RewardSource

def reward(completions, **_):
    print("called", flush=True)
    {body}
    return [1.0] * len(completions)

scorer = RewardScorer([RewardSource("reward", reward)])
rollout = Rollout(0, 0)
scorer.submit(RewardInput(rollout, "", "", [], {{}}))
{wait}
print("end of the program")
"""


@pytest.mark.parametrize(
    ("body", "wait"),
    [("pass", "scorer.wait(); print(rollout.rewards)"), ("time.sleep(600)", "time.sleep(0.3)")],
    ids=["idle", "hanging reward function"],
)
def test_process_ends_by_itself(body, wait):
    script = SCRIPT.format(body=body, wait=wait)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("called") and result.stdout.endswith("end of the program\n")
    assert result.stderr == ""


def test_waiting_for_a_slow_reward_is_said(monkeypatch, caplog):
    monkeypatch.setattr("trl_ulorl.rollout.scoring.SLOW_SECONDS", 0.05)

    def slow(completions, **_):
        time.sleep(0.3)
        return [1.0] * len(completions)

    items = make_items("ab")
    scorer = RewardScorer([RewardSource("slow", slow)])
    for item in items:
        scorer.submit(item)
    scorer.wait()
    assert "a reward function is slow or hangs" in caplog.text
    assert all(item.rollout.rewards.tolist() == [1.0] for item in items)


def test_a_backlog_is_scored_in_calls_of_bounded_size():
    sizes = []

    def length(completions, **_):
        sizes.append(len(completions))
        return [float(len(text)) for text in completions]

    items = make_items(["x" * (i % 7) for i in range(2 * MAX_ROLLOUTS + 10)])
    score(items, length)
    assert sizes == [MAX_ROLLOUTS, MAX_ROLLOUTS, 10]
    assert [row[0] for row in rewards(items)] == [float(i % 7) for i in range(len(items))]


def test_a_call_under_way_is_not_repeated_when_the_scorer_is_closed():
    calls, started = [], threading.Event()

    async def slow(completions, **_):
        calls.append(len(completions))
        started.set()
        await asyncio.sleep(TIMEOUT)

    scorer = RewardScorer([RewardSource("slow", slow)])
    scorer._loop.call_soon_threadsafe(lambda: [scorer.submit(item) for item in make_items("abcd")])
    assert started.wait(TIMEOUT)
    scorer.close()
    scorer._thread.join(TIMEOUT)
    assert not scorer._thread.is_alive() and calls == [4]


# --- replay ---------------------------------------------------------------------------------------------------------


def test_a_metric_is_the_mean_over_the_completions_of_all_ranks():
    """TRL divides the sum of what all ranks logged by its number; a rank may hold few of the completions that were judged."""
    logged = []
    for shares in ([1.0], [0.0, 0.0, 0.0]):
        rollouts = [make_item().rollout for _ in range(4)]
        for rollout, share in zip(rollouts, shares, strict=False):
            rollout.metrics["judged"] = [share]
        replay_logs(rollouts, lambda column, values: None, lambda name, value: logged.append((name, value)))
    assert {name for name, _ in logged} == {"judged"}
    assert sum(value for _, value in logged) / len(logged) == 0.25
