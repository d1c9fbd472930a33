"""The worker processes: time, memory, deaths, and verdicts from every kind of thread and process."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from trl_ulorl.rewards import pool, verify_answer, verify_answers
from trl_ulorl.rewards.pool import TIME_LIMIT_SECONDS, Outcome, WorkerPool, compare_in_pool

ENDLESS = r"\prod_{k=1}^{100000000}\frac{k}{k+1}"
EASY = [(f"x+{n}", f"{n}+x") for n in range(2, 42)]


def boxed(answer):
    return rf"So the result is $\boxed{{{answer}}}$."


@pytest.fixture(scope="module", autouse=True)
def warm():
    compare_in_pool([*EASY, (r"\int_0^1 x\,dx", r"\frac{1}{2}")] * 2)


HOSTILE = [
    "a" * 1_000_000,
    "$ " * 500_000,
    "answer " * 100_000,
    "answer" + " " * 500_000,
    "<answer>" * 100_000,
    "</answer>" * 100_000,
    r"\boxed{" * 20_000,
    "".join(rf"\boxed{{{n}}}" for n in range(20_000)),
    r"\boxed{1}" + " " * 200_000 + r"; \boxed{2}",
    "or " * 200_000 + r"\boxed{1}" + "or " * 100_000 + r"\boxed{2}",
    '"answer":' * 50_000,
    "is " * 300_000,
    "is " + "1" * 500_000,
    "\n" + "*" * 500_000 + "answer: 5",
    boxed("(" * 5000 + "1" + ")" * 5000),
    boxed("(" * 900 + "1" + ")" * 900),
    boxed(r"\sqrt{" * 300 + "2" + "}" * 300),
    boxed(r"\frac{1}{" * 1500 + "x" + "}" * 1500),
    boxed(r"\frac" * 500),
    boxed("7" * 5000),
    boxed("7" * 2900),
    boxed(":" * 9900 + "x"),
    boxed("(" * 9900 + "x"),
    boxed("1," * 1400 + "1"),
    boxed("2^" * 900 + "2"),
    boxed("-" * 2000 + "1"),
    boxed("yes, " + "no " * 3000),
    "The answer is 9^9^9^9",
    boxed("9^{9^{9^{9}}}"),
    boxed("9^{9^{9}} - 9^{9^{9}} + 4"),
    boxed("((2^{99999})^{99999})^{99999}"),
    boxed("(((9!)!)!)!"),
    boxed("100000000!"),
    boxed(r"\binom{1000000000}{500000000}"),
    boxed(r"\sum_{k=1}^{1000000000}\frac{1}{k^2}"),
    boxed(r"\prod_{k=1}^{100000000}k"),
    boxed(ENDLESS),
    boxed(r"\gcd(9^{9^9},3)"),
    boxed(r"\exp(\exp(\exp(\exp(5))))"),
    boxed(r"\lfloor \sinh(12345^2) \rfloor"),
    boxed(r"\sin(10^{1000000})"),
    boxed(r"x^{9^{9^9}}"),
    boxed("1e999999999"),
    boxed("NaN"),
    boxed(r"\frac{1}{0}"),
    boxed("4\x002"),
    boxed("\ud83d"),
    boxed("١٢³⁴/୫"),
    boxed("().__class__.__bases__[0].__subclasses__()"),
    boxed("__import__('os').getpid()"),
    boxed("\u202e24"),
    "",
    " \n\t",
]


@pytest.mark.parametrize("prediction", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_predictions_end_and_are_never_right(prediction):
    start = time.monotonic()
    verdicts = [verify_answer(prediction, reference) for reference in ("3", "Yes", "3 cm")]
    assert time.monotonic() - start < 3 * (TIME_LIMIT_SECONDS + 1)
    assert all(verdict.equivalent is not True for verdict in verdicts)


def test_a_pair_that_hung_a_naive_solver_is_decided():
    assert verify_answer(boxed("3<0.5"), r"\sqrt[3]{3}-\sqrt[3]{z}=z-n").equivalent is False


def test_an_endless_pair_costs_its_time_limit_and_itself():
    start = time.monotonic()
    outcomes = compare_in_pool([*EASY[:20], (ENDLESS, "3"), *EASY[20:]])
    assert time.monotonic() - start < TIME_LIMIT_SECONDS + 2
    assert outcomes.pop(20) == Outcome("timeout", detail="not done within 2 seconds")
    assert outcomes == [Outcome("decided", True)] * len(EASY)


def test_many_endless_pairs_share_one_time_limit_per_worker():
    pairs = [(ENDLESS.replace("k+1", f"k+{n}"), "3") for n in range(1, 9)]
    mixed = [pair for n, pair in enumerate(EASY) for pair in ([pair, pairs[n // 5]] if n % 5 == 0 else [pair])]
    start = time.monotonic()
    outcomes = compare_in_pool(mixed)
    assert time.monotonic() - start < 2 * TIME_LIMIT_SECONDS + 2  # sixteen seconds if each had its own
    assert [outcome.kind for outcome in outcomes].count("decided") == len(EASY)
    assert [outcome.kind for outcome in outcomes].count("timeout") == len(pairs)


def test_a_worker_that_does_not_interrupt_itself_is_killed(monkeypatch):
    stopped = WorkerPool(1)
    try:
        assert stopped.compare(EASY[:1]) == [Outcome("decided", True)]
        process = stopped._workers[0].process
        os.kill(process.pid, signal.SIGSTOP)  # as C code that never looks at signals
        start = time.monotonic()
        outcomes = stopped.compare(EASY[:3])
        assert time.monotonic() - start < TIME_LIMIT_SECONDS + 3
        assert [outcome.kind for outcome in outcomes] == ["timeout", "decided", "decided"]
        assert process.poll() is not None
    finally:
        stopped.close()


def test_the_death_of_a_worker_costs_the_pair_it_was_at():
    dying = WorkerPool(1)
    try:
        dying.compare(EASY[:1])
        process = dying._workers[0].process
        timer = threading.Timer(0.02, process.kill)
        timer.start()
        outcomes = dying.compare([(ENDLESS, "3"), *EASY])
        timer.join()
        assert outcomes[0].kind in ("error", "timeout")
        assert outcomes[1:] == [Outcome("decided", True)] * len(EASY)
        assert dying._workers[0].process.pid != process.pid
    finally:
        dying.close()


def test_without_a_worker_the_way_out_is_named(monkeypatch):
    monkeypatch.setattr(pool, "_WORKER_CODE", "raise SystemExit(3)")
    broken = WorkerPool(2)
    outcomes = broken.compare(EASY[:2])
    assert [outcome.kind for outcome in outcomes] == ["error", "error"]
    assert "import trl_ulorl.rewards.worker" in outcomes[0].detail


def test_an_interrupted_batch_leaves_no_replies_behind(monkeypatch):
    interrupted = WorkerPool(1)
    try:
        interrupted.compare(EASY[:1])
        with monkeypatch.context() as patch:
            patch.setattr(WorkerPool, "_wait", lambda self, batch: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                interrupted.compare([("x", "x+1")] * 3)
        assert interrupted.compare(EASY[:2]) == [Outcome("decided", True)] * 2
    finally:
        interrupted.close()


def test_memory_beyond_the_limit_is_refused():
    code = """
from trl_ulorl.rewards import worker
worker._limit_memory(300 * 2**20)
kept = bytearray(100 * 2**20)
try:
    bytearray(400 * 2**20)
except MemoryError:
    print("refused")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "refused"


PAIRS = [
    (boxed(r"1+\sqrt{2}"), r"\sqrt{2}+1"),
    (boxed("x+1"), "x+2"),
    (boxed("27 cm"), "0.27 m"),
    (boxed(r"\text{one half}"), "1/2"),
    (boxed("(1,2)"), "[1,2]"),
    (boxed(r"\text{increases}"), "decreases"),
]
EXPECTED = [True, False, True, True, False, False]


def equivalents(_=None):
    return [verdict.equivalent for verdict in verify_answers(PAIRS)]


def test_verdicts_in_the_main_thread_and_in_others():
    assert equivalents() == EXPECTED
    results = {}
    threads = [threading.Thread(target=lambda n=n: results.__setitem__(n, equivalents())) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(6), EXPECTED)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_verdicts_in_forked_and_spawned_processes(method):
    """Their processes are daemons, which `multiprocessing` lets have no children of their own."""
    equivalents()  # the parent's pool is running
    with multiprocessing.get_context(method).Pool(1) as processes:
        assert processes.map_async(equivalents, [None]).get(timeout=60) == [EXPECTED]
    assert equivalents() == EXPECTED  # and still is


def test_the_callers_own_alarm_stays():
    rings = []
    before = signal.signal(signal.SIGALRM, lambda *_: rings.append(time.monotonic()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 30)
        assert verify_answer(boxed(ENDLESS), "3").stage == "timeout"
        assert 20 < signal.getitimer(signal.ITIMER_REAL)[0] < 30
        signal.setitimer(signal.ITIMER_REAL, 0.01)  # rings while a batch is waited for
        assert equivalents() == EXPECTED
        time.sleep(0.02)
        assert len(rings) == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_workers_end_with_their_process():
    code = r"""
from trl_ulorl.rewards import pool, verify_answer
assert verify_answer("\\boxed{x+1}", "1+x").equivalent
print(*[worker.process.pid for worker in pool._POOL._workers])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (pid,) = map(int, result.stdout.split())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_script_without_a_main_guard_works(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from trl_ulorl import verify_answer\nprint(verify_answer(r'\\boxed{x+1}', '1+x').equivalent)\n",
        encoding="utf-8",
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert result.stdout == "True\n"
