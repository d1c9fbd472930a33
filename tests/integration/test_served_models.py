"""Evaluation and cleaning with a model behind a real HTTP server: figures, restarts, and every way in which it fails."""

import json
import re

import pytest
from judge_server import MODEL, JudgeServer, completion

from trl_ulorl.cli import main
from trl_ulorl.data.model_rules import ModelSettings
from trl_ulorl.data.models import SamplingSettings, ServedModel
from trl_ulorl.endpoint import Endpoint, EndpointError, EndpointSettings, Request

pytestmark = pytest.mark.slow


def calculator(prompt):
    """Work a sum out, at the first operand 2 always wrong, at 3 for ever."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    first, second = map(int, re.search(r"(\d)\+(\d)=", text).groups())
    if first == 3:
        return "let me think about it", "length"
    return rf"It is \boxed{{{first + second + (first == 2)}}}."


@pytest.fixture
def server():
    with JudgeServer(calculator) as server:
        yield server


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"problem": f"{first}+1=", "answer": str(first + 1)} for first in (1, 2, 3, 4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def evaluate(server, *arguments, base_url=None):
    given = ["--model", MODEL, "--dataset", "sums.jsonl", "--output", "run.json", "--k", "2", "--max_retries", "1"]
    endpoint = ["--engine", "endpoint", "--base_url", base_url or server.base_url]
    return main(["eval", *given, *endpoint, *arguments])


def settings(server, **changes):
    return EndpointSettings(server.base_url, **{"timeout_seconds": 5.0, "max_retries": 0, **changes})


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_figures_by_hand(server, folder, capsys):
    assert evaluate(server, "--max_completion_length", "64", "--extra_body", '{"min_p": 0.1}') == 0
    result = json.loads((folder / "run.json").read_text())
    # 1+1 and 4+1 are right both times, 2+1 wrong, 3+1 cut off.
    assert (result["avg_at_k"], result["pass_at_k"], result["maj_at_k"]) == (0.5, 0.5, 0.5)
    assert result["standard_error"] == pytest.approx((1 / 3 / 4) ** 0.5)
    assert result["truncated_fraction"] == 0.25
    assert result["lengths"]["mean"] == (3 + 3 + 5 + 3) / 4
    bodies = [body for _, body in server.seen]
    assert len(bodies) == 8 and len({body["seed"] for body in bodies}) == 8
    sampling = {"temperature": 0.85, "top_p": 0.95, "top_k": 20, "max_tokens": 64, "min_p": 0.1}
    assert all(body.items() >= sampling.items() for body in bodies)
    assert bodies[0]["messages"] == [{"role": "user", "content": "1+1="}]


def test_plain_completions(server, folder):
    assert evaluate(server, "--api", "completions") == 0
    assert json.loads((folder / "run.json").read_text())["avg_at_k"] == 0.5
    assert sorted({body["prompt"] for _, body in server.seen}) == ["1+1=", "2+1=", "3+1=", "4+1="]


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([500, 503], "InternalServerError"),
        (["hang", "hang"], "APITimeoutError"),
        (["break", "break"], "APIConnectionError"),
        (["<html>", "<html>"], "is no completion"),
        (['{"choices": []}'], "is no completion"),
        ([json.dumps({"choices": [{"message": {"content": "1"}, "finish_reason": "stop"}]})], "is no completion"),
        ([completion(("so", "content_filter"))], "ended with 'content_filter'"),
    ],
)
def test_what_fails_is_asked_for_again_by_the_same_command(server, folder, capsys, events, reason):
    server.script.extend(events)
    with pytest.raises(EndpointError, match=f"1 x .*{reason}|2 x .*{reason}") as failure:
        evaluate(server, "--timeout_seconds", "1", "--batch_size", "1")
    assert "start the same command again" in str(failure.value)
    assert not (folder / "run.json").exists()
    samples = len((folder / "run.samples.jsonl").read_text().splitlines()) - 1
    assert 6 <= samples < 8  # the others were asked all the same
    num_seen = len(server.seen)
    # On another port it is still the same evaluation.
    with JudgeServer(calculator) as restarted:
        assert evaluate(restarted) == 0
        assert len(restarted.seen) == 8 - samples
    assert len(server.seen) == num_seen
    assert json.loads((folder / "run.json").read_text())["avg_at_k"] == 0.5
    seeds = [body["seed"] for _, body in (*server.seen, *restarted.seen)]
    assert len(set(seeds)) == 8  # a repeated request has the seed that it had


def test_requests_that_are_refused_one_by_one_do_not_end_the_run(server, folder):
    server.script.extend([400] * 20)
    with pytest.raises(EndpointError, match=r"20 of 64 requests .* have no answer: 20 x BadRequestError"):
        evaluate(server, "--k", "16", "--batch_size", "1")
    assert len((folder / "run.samples.jsonl").read_text().splitlines()) == 1 + 44


def test_a_hiccup_is_not_noticed(server, folder):
    server.script.extend([503, None, 429])
    assert evaluate(server) == 0


def test_an_endpoint_that_is_down_is_left_alone(server, folder):
    server.script.extend([500] * 1000)
    with pytest.raises(EndpointError, match=r"24 x not asked any more; 8 x InternalServerError"):
        evaluate(server, "--k", "8", "--max_retries", "0", "--batch_size", "1")
    assert len(server.seen) == 8


def test_a_trickle_has_an_end(server):
    server.script.append("trickle")
    with pytest.raises(EndpointError, match=r"no whole answer within 0\.5 s"):
        list(Endpoint(MODEL, settings(server, timeout_seconds=0.5)).ask([Request("1+1=", {})]))


def test_a_reader_that_leaves_stops_the_requests(server):
    server.delay = 0.05
    endpoint = Endpoint(MODEL, settings(server, concurrency=2))
    answers = endpoint.ask([Request(f"{first % 2 + 1}+1=", {}) for first in range(500)])
    next(answers)
    answers.close()
    assert len(server.seen) < 20


def test_the_key_is_never_told(server, folder, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret-123")
    server.script.extend([401])
    with pytest.raises(EndpointError, match=r"\*\*\*") as failure:
        evaluate(server, "--api_key_env", "MY_KEY", "--batch_size", "1")
    assert "secret" not in str(failure.value)
    assert "7 x not asked any more" in str(failure.value)
    assert server.seen[0][0]["authorization"] == "Bearer secret-123"
    assert not (folder / "run.json").exists()


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--base_url", "http://127.0.0.1:9/v1"], "Check `--base_url`"),
        (["--base_url", "localhost:8000"], "from http:// or https://"),
        (["--model", "other"], "Pass one of these"),
        (["--api_key_env", "NO_SUCH_KEY"], "Set it"),
        (["--extra_body", "{"], "Pass an object"),
        (["--extra_body", "[]"], "must be a JSON object"),
        (["--api", "completions", "--instruction", "Box it."], "ask for chat completions"),
        (["--engine", "transformers"], "leave the address out"),
    ],
)
def test_bad_input_is_explained_and_leaves_nothing(server, folder, capsys, arguments, remedy):
    before = sorted(folder.iterdir())
    assert evaluate(server, *arguments) == 2
    assert remedy in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


def test_an_endpoint_needs_an_address(folder, capsys):
    given = ["--model", MODEL, "--dataset", "sums.jsonl", "--output", "run.json", "--engine", "endpoint"]
    assert main(["eval", *given]) == 2
    assert "http://localhost:8000/v1" in capsys.readouterr().err


# --- cleaning ---------------------------------------------------------------------------------------------------------


def clean(server, *arguments):
    given = ["sums.jsonl", "--output", "clean", "--model", MODEL, "--samples", "2", "--num_proc", "1"]
    return main(
        ["clean", *given, "--engine", "endpoint", "--base_url", server.base_url, "--max_retries", "0", *arguments]
    )


def test_cleaning_asks_an_endpoint(server, folder):
    assert clean(server) == 0
    fates = [json.loads(line) for line in (folder / "clean" / "audit.jsonl").read_text().splitlines()]
    assert [(fate["rule"], fate["action"]) for fate in fates] == [
        ("too_easy", "dropped"), ("all", "kept"), ("all", "kept"), ("too_easy", "dropped"),
    ]  # fmt: skip
    assert server.base_url not in (folder / "clean" / "summary.json").read_text()


def test_an_answer_that_fails_decides_nothing(server, folder):
    server.script.append(400)
    with pytest.raises(EndpointError):
        clean(server, "--batch_size", "1")
    assert not (folder / "clean" / "kept.jsonl").exists()
    with JudgeServer(calculator) as restarted:
        assert clean(restarted) == 0
    assert len((folder / "clean" / "kept.jsonl").read_text().splitlines()) == 2


def test_cleaning_refuses_an_unknown_model_at_once(server, folder, capsys):
    assert clean(server, "--reference_models", MODEL, "other") == 2
    assert "'other'" in capsys.readouterr().err
    assert not (folder / "clean").exists()


def test_a_served_model_draws_other_answers_each_time(server):
    model = ServedModel(MODEL, SamplingSettings(engine="endpoint", endpoint=settings(server), max_tokens=9))
    question = [{"role": "user", "content": "1+1="}]
    texts = model.complete([question, [{"role": "user", "content": "3+1="}], question], seed=1)
    assert texts == [r"It is \boxed{2}.", None, r"It is \boxed{2}."]
    assert len({body["seed"] for _, body in server.seen}) == 3
    assert {body["max_tokens"] for _, body in server.seen} == {9}
    assert ModelSettings(model=MODEL).names == [MODEL]
