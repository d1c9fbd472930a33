"""The sandbox of the example on programs: what hostile ones can do, which is nothing, and whose fault is what."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import sandbox
import train_code
from sandbox import Job, Outcome, Sandbox

ADD = "def f(a, b):\n    return a + b\n"


@pytest.fixture(scope="module")
def box():
    with Sandbox(1) as box:
        yield box


def run(box, code, *calls, function="f"):
    (outcome,) = box.run([Job(code, function, list(calls))])
    return outcome


# ------------------------------------------------------------------------------------------------- programs that behave


def test_values_come_back_in_order(box):
    assert run(box, ADD, [1, 2], [3, 4]) == Outcome("returned", [3, 7])
    assert run(box, "def f(*rows): return {'sum': sum(rows), 'pair': (1, None), 'text': 'é', 'half': .5}", [1, 2]) == (
        Outcome("returned", [{"sum": 3, "pair": [1, None], "text": "é", "half": 0.5}])
    )


@pytest.mark.parametrize("name", sandbox.MODULES)
def test_module_can_be_imported(box, name):
    assert run(box, f"import {name}\ndef f(): return 1", []).values == [1]


def test_modules_work_without_loading_more(box):
    code = """
import collections, datetime, decimal, fractions, functools, heapq, itertools, math, random, re, statistics, string
@functools.lru_cache(None)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
def f():
    heap = [3, 1, 2]; heapq.heapify(heap)
    return [fib(50), heap[0], math.isqrt(99), re.sub(r"(\\d)", r"<\\1>", "a1"), str(fractions.Fraction(6, 4)),
            str(decimal.Decimal(1) / 8), statistics.median([1, 5, 2]), str(datetime.date(2024, 2, 28) + datetime.timedelta(2)),
            collections.Counter("abba").most_common(1)[0][1], len(list(itertools.permutations(range(4)))),
            f"{3.14159:.2f}", "ab".encode("utf-8").hex(), random.random() < 1]
"""
    assert run(box, code, []).values == [
        [12586269025, 1, 9, "a<1>", "3/2", "0.125", 2, "2024-03-01", 2, 24, "3.14", "6162", True]
    ]


def test_programs_do_not_see_each_other(box):
    run(box, "import math\nmath.pi = 3\nfoo = 1\ndef f(): return 0", [])
    assert run(box, "import math\ndef f(): return [round(math.pi, 2), 'foo' in globals()]", []).values == [
        [3.14, False]
    ]


def test_order_of_sets_is_the_same_in_every_server():
    code = "def f(): return [str(each) for each in {'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}]"
    with Sandbox(1) as one, Sandbox(1) as other:
        assert run(one, code, []) == run(other, code, [])


# ---------------------------------------------------------------------------------------------------- programs that fail

FAILING = {
    "syntax error": "def f(:",
    "no such function": "def g(): return 1",
    "exception": "def f(): return 1 / 0",
    "null byte": "def f(): return '\0'",
    "surrogate": "def f(): return '\ud800'  # \ud800",
    "exit before the tests": "import sys\nsys.exit(0)",
    "exit in the tests": "def f(): raise SystemExit(0)",
    "hard exit": "import os\nos._exit(0)",
    "abort": "import os\nos.abort()",
    "too deep for the parser": "x = " + "(" * 100_000,
    "endless recursion": "def g(): g()\ng()",
    "crash in C code": "import ctypes\nctypes.string_at(0)",
    "answer that is no JSON": "def f(): return {1, 2}",
    "answer with a sabotaged encoder": "import json\njson.dumps = lambda value: '[' * 30_000\ndef f(): return 1",
    "answer of too few values": "import json\njson.dumps = lambda value: '[]'\ndef f(): return 1",
    "waiting for a lock": "import _thread\nl = _thread.allocate_lock()\nl.acquire()\nl.acquire()\ndef f(): return 1",
    "sleeping": "import time\ntime.sleep(1000)\ndef f(): return 1",
    "module that is not loaded": "import sqlite3\ndef f(): return 1",
    "closing the pipe": "import os\nos.closerange(0, 100)\nwhile True: pass",
}


@pytest.mark.parametrize("name", FAILING)
def test_failing_program_has_failed(box, name):
    assert run(box, FAILING[name], []) == Outcome("failed")
    assert run(box, ADD, [1, 2]).values == [3], "the next one runs"


def test_endless_loop_is_ended(box):
    assert run(box, "while True: pass", []).kind == "timeout"


def test_endless_loop_that_catches_everything_is_ended(box):
    code = "import signal\n\ndef stop(*a): raise ValueError\nsignal.signal(signal.SIGXCPU, stop)\n"
    code += "while True:\n    try:\n        for x in iter(int, 1): x += 1\n    except BaseException: pass"
    assert run(box, code, []).kind == "timeout"


@pytest.mark.parametrize("code", ["x = bytearray(10**12)", "x = []\nwhile True: x.append(bytes(10**7))"])
def test_memory_is_bounded(box, code):
    code = f"try:\n    exec({code!r})\nexcept MemoryError: result = 'refused'\ndef f(): return result"
    assert run(box, code, []).values == ["refused"]


def test_megabytes_of_output_are_not_read(box):
    assert run(box, "print('x' * 10**7)\nimport sys\nsys.stderr.write('x' * 10**7)\n" + ADD, [1, 2]).values == [3]
    assert run(box, "def f(): return 'x' * 10**7", []).kind == "too long"


# ----------------------------------------------------------------------------------------------- what programs can't do

# Each of these writes what it got hold of into `got`.
REACHING = {
    "read a file": "got = open('/etc/hostname').read()",
    "read its environment": "got = open('/proc/self/environ').read()",
    "read the caller's environment": "got = open(f'/proc/{os.getppid()}/environ').read()",
    "read the caller's memory": "got = os.open(f'/proc/{os.getppid()}/mem', os.O_RDONLY)",
    "list a folder": "got = os.listdir('.')",
    "write a file": "got = open('/tmp/x', 'wb').write(b'x' * 10**9)",
    "delete its folder": "got = os.rmdir(os.getcwd())",
    "change its folder": "got = os.chdir('/tmp')",
    "delete a file": "got = os.unlink('/tmp/no such file')",
    "fork": "got = [os.fork() for _ in range(100)]",
    "start a thread": "import _thread\ngot = _thread.start_new_thread(print, ())",
    "run a program": "got = os.execv('/bin/true', ['true'])",
    "kill its parent": "got = os.kill(os.getppid(), 9)",
    "kill its group": "got = os.killpg(0, 9)",
    "stop itself": "import signal\ngot = signal.raise_signal(signal.SIGSTOP)",
    "leave its session": "got = os.setsid()",
    "become another user": "got = os.setuid(1)",
    "raise its limits": "import resource\ngot = resource.setrlimit(resource.RLIMIT_CPU, (100, 100))",
    "open a pipe": "got = os.pipe()",
    "read what is open": "got = [os.read(fd, 9) for fd in range(3, 100)]",
}
# As modules they are not on the list; a program may still find them among what the server has loaded.
SOCKETS = {
    "open a socket": "got = _socket.socket()",
    "make a pair of sockets": "got = _socket.socketpair()",
}


@pytest.mark.parametrize("name", REACHING)
def test_program_reaches_nothing(box, name):
    code = f"import os\ngot = 'nothing'\ntry:\n    exec({REACHING[name]!r})\nexcept (OSError, ValueError, RuntimeError): pass\n"
    code += "def f(): return repr(got)"
    assert run(box, code, []) == Outcome("returned", ["'nothing'"])
    assert run(box, ADD, [1, 2]).values == [3]


@pytest.mark.parametrize("name", SOCKETS)
def test_network_is_off_by_system_call_and_not_by_a_missing_module(name, monkeypatch, tmp_path):
    """The server loads the module of sockets first, so that nothing but the filter is in the way."""
    server = Path(sandbox.__file__).read_text(encoding="utf-8").replace('"array ', '"_socket array ')
    (tmp_path / "server.py").write_text(server, encoding="utf-8")
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "server.py"))
    code = f"import _socket\ntry:\n    {SOCKETS[name]}\nexcept OSError as error: got = type(error).__name__\n"
    with Sandbox(1) as box:
        (outcome,) = box.run([Job(code + "def f(): return str(got)", "f", [[]])])
    assert outcome.values == ["PermissionError"]


def test_environment_of_the_caller_is_not_passed_on(box, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    with Sandbox(1) as fresh:
        assert run(fresh, "import os\ndef f(): return dict(os.environ)", []).values == [
            {"LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"}
        ]


def test_filter_lets_no_dangerous_call_through():
    """A list of what must not be on the list: it fails when somebody adds one of these."""
    dangerous = {"open": 2, "openat": 257, "socket": 41, "connect": 42, "clone": 56, "fork": 57, "vfork": 58}
    dangerous |= {"execve": 59, "kill": 62, "tgkill": 234, "ptrace": 101, "prctl": 157, "io_uring_setup": 425}
    dangerous |= {"process_vm_readv": 310, "clone3": 435, "ioctl": 16, "unlink": 87, "pidfd_send_signal": 424}
    assert not set(dangerous.values()) & set(sandbox._ALLOWED.values())


# --------------------------------------------------------------------------------------- what is not the program's doing


def test_idle_server_that_was_killed_is_replaced():
    with Sandbox(1) as box:
        run(box, ADD, [1, 2])
        server = box._servers.get()
        server.process.kill()
        server.process.wait()
        box._servers.put(server)
        assert run(box, ADD, [1, 2]).values == [3]


def test_children_end_with_their_server():
    with Sandbox(1) as box:
        run(box, ADD, [1, 2])
        server = box._servers.get()
        server.process.stdin.write(json.dumps(Job("while True: pass", "f", [])).encode() + b"\n")
        server.process.stdin.flush()
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        end = time.monotonic() + 20
        while not (pids := children.read_text().split()) and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        box._servers.put(server)
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_server_that_can_not_be_started_runs_nothing(monkeypatch):
    monkeypatch.setattr(sandbox.sys, "executable", "/no/such/python")
    with Sandbox(1) as box:
        outcome = run(box, ADD, [1, 2])
    assert outcome.kind == "not run"
    assert "/no/such/python" in outcome.detail


def test_without_a_filter_nothing_runs(monkeypatch, tmp_path):
    server = Path(sandbox.__file__).read_text(encoding="utf-8").replace('!= "x86_64"', '!= "vax"')
    (tmp_path / "server.py").write_text(server, encoding="utf-8")
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "server.py"))
    with Sandbox(1) as box:
        outcome = run(box, ADD, [1, 2])
    assert outcome.kind == "not run"
    assert "Linux on x86-64 only" in outcome.detail


# ------------------------------------------------------------------------------------------------------------ the reward

TESTS = json.dumps([[[1, 2], 3], [[5, -5], 0]])


def reward(*completions, tests=TESTS):
    return train_code.program_reward(list(completions), ["f"] * len(completions), [tests] * len(completions))


def test_reward_is_1_for_a_program_that_passes_all_tests():
    fenced = f"Like this:\n```python\nwrong\n```\nor rather\n```python\n{ADD}```\nwhich adds."
    assert reward(ADD, fenced, "def f(a, b): return a - b", "def f(a, b): return 3", "") == [1, 1, 0, 0, 0]
    assert reward([{"role": "assistant", "content": ADD}]) == [1]


def test_cheats_get_nothing():
    always_equal = "class Yes(int):\n    def __eq__(self, other): return True\ndef f(a, b): return Yes(7)"
    patched = "import json\njson.dumps = lambda *a, **k: 'true'\ndef f(a, b): return 0"
    early = "import os\nos.write(1, b'[3, 0]')\nos._exit(0)"
    looking = "import gc\ndef f(a, b):\n    return next(x for x in gc.get_objects() if isinstance(x, list) and x[1:] == [0])[0]"
    assert reward(always_equal, patched, early, looking, "import sys\nsys.exit(0)\n" + ADD) == [0] * 5


def test_no_reward_where_a_program_could_not_be_run(monkeypatch, capsys):
    monkeypatch.setattr(sandbox.sys, "executable", "/no/such/python")
    with Sandbox(1) as broken:
        monkeypatch.setattr(train_code, "SANDBOX", broken)
        assert reward(ADD, "nonsense") == [None, None]
    assert "2 of 2 programs were not run" in capsys.readouterr().err


def test_shares_are_logged():
    logged = {}
    train_code.program_reward(
        [ADD, "nonsense"], ["f", "f"], [TESTS, TESTS], log_metric=lambda name, value: logged.update({name: value})
    )
    assert logged["programs/returned_frac"] == logged["programs/failed_frac"] == 0.5
    assert sum(logged.values()) == 1


# -------------------------------------------------------------------------------------------------------------- the task


def test_task_worked_out_by_hand():
    # 3 + (-2) = 1, times 4 = 4, minus 3 = 1; without brackets 3 + (-2) * 4 - 3 = -8.
    steps = [("+", "b"), ("*", "4"), ("-", "a")]
    assert train_code.task_of(steps) == "take a, add b, multiply by 4, subtract a"
    assert train_code.careful(steps) == "def f(a, b):\n x = a\n x += b\n x *= 4\n x -= a\n return x"
    assert train_code.hasty(steps) == "def f(a, b):\n return a+b*4-a"
    tests = json.dumps([[[3, -2], 1]])
    assert reward(train_code.careful(steps), train_code.hasty(steps), tests=tests) == [1, 0]


def test_careful_programs_pass_and_hasty_ones_often_do_not():
    rows = train_code.draw_rows(64, train_code.random.Random(0), held_out=True)
    tests, names = [row["tests"] for row in rows], ["f"] * 64
    assert train_code.program_reward([train_code.careful(row["steps"]) for row in rows], names, tests) == [1] * 64
    hasty = train_code.program_reward([train_code.hasty(row["steps"]) for row in rows], names, tests)
    assert 0.1 < sum(hasty) / 64 < 0.5
    trained = {row["prompt"] for row in train_code.draw_rows(500, train_code.random.Random(0), held_out=False)}
    assert len({row["prompt"] for row in rows} - trained) == 64
