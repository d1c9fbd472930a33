"""Tries, the judge of them, the file that they are kept in, and the figures that they come to."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_ulorl import VerifierReward
from trl_ulorl.cli.summary import _table
from trl_ulorl.evaluation.report import OtherRun, figures, table
from trl_ulorl.evaluation.runner import EvaluationResult, Judge, Try
from trl_ulorl.evaluation.samples import SampleFile

SETTINGS = {"model": "m", "temperature": 0.85}


def a_try(problem, attempt, score=1.0, *, answer="4", length=3, truncated=False):
    return Try(problem, attempt, length, truncated, score, answer, "2+2=4\n\\boxed{4}")


# Two problems, two tries each: right, wrong | undecided, truncated.
TRIES = [
    a_try(1, 1, 0.0, answer="", length=8, truncated=True),
    a_try(0, 0),
    a_try(0, 1, 0.0, answer="5"),
    a_try(1, 0, None, answer="x", length=6),
]


def result(tries=TRIES, num_problems=2):
    return EvaluationResult.from_tries(tries, num_problems=num_problems, seconds=1.0)


# --- tries ------------------------------------------------------------------------------------------------------------


def test_tries_are_arranged_by_problem():
    arranged = result()
    assert arranged.is_correct.tolist() == [[1, 0], [0, 0]]
    assert arranged.lengths.tolist() == [[3, 3], [6, 8]]
    assert arranged.is_truncated.tolist() == [[False, False], [False, True]]
    assert arranged.is_undecided.tolist() == [[False, False], [True, False]]
    assert arranged.answers == [["4", "5"], ["x", ""]]
    assert (arranged.accuracy, arranged.standard_error, arranged.truncated_fraction) == (0.25, 0.25, 0.25)


def test_a_result_survives_json():
    again = EvaluationResult.from_json(json.loads(json.dumps(result().to_json())))
    assert again.to_json() == result().to_json()
    assert again.is_truncated.dtype == bool and again.lengths.dtype == np.int64


def test_a_training_summary_shows_a_gain_only_over_a_figure_before():
    both, alone = _table(result(), result(), 2), _table(None, result(), 2)
    assert [line.split()[0] for line in both] == ["Held-out", "avg@2", "before", "after", "gain"]
    assert [line.split()[0] for line in alone] == ["Held-out", "avg@2", "after"]


@pytest.mark.parametrize("tries", [[], TRIES[:3], [*TRIES[:3], a_try(0, 0)], [*TRIES, a_try(2, 0), a_try(2, 1)]])
def test_missing_tries_are_refused(tries):
    with pytest.raises(ValueError, match="Sample the missing ones"):
        result(tries)


# --- the judge --------------------------------------------------------------------------------------------------------


def test_the_verifier_judges_and_gives_the_answer():
    row = {"prompt": [{"role": "user", "content": "1/2="}], "answer": "1/2"}
    assert Judge(VerifierReward())(row, "So \\boxed{0.5}.") == (1.0, "0.5")
    assert Judge(VerifierReward())(row, "So \\boxed{2}.") == (0.0, "2")
    assert Judge(VerifierReward())(row, "No idea.") == (0.0, "")


def test_a_function_that_logs_no_answer_is_read_as_the_verifier_would():
    def reward(completions, **kwargs):
        return [float(completions[0].endswith("!"))]

    assert Judge(reward)({"prompt": "?"}, "\\boxed{ \\frac12 }!") == (1.0, "\\frac{1}{2}")


def test_what_a_reward_is_given():
    def reward(prompts, completions, answer, log_extra, **kwargs):
        log_extra("extracted_answer", ["seven"])
        assert (prompts, completions, answer) == (["?"], ["7"], ["8"])
        assert set(kwargs) == {"log_metric", "source"}
        return [None]

    assert Judge(reward)({"prompt": "?", "answer": "8", "source": "s"}, "7") == (None, "seven")


def test_a_reward_may_be_asynchronous_and_undecided():
    async def reward(completions, **kwargs):
        return [math.nan]

    assert Judge(reward)({"prompt": "?"}, "7")[0] is None


def test_a_reward_that_is_no_verdict_is_refused():
    with pytest.raises(ValueError, match=r"gave 0\.5 .* measures correctness alone"):
        Judge(lambda **kwargs: [0.5])({"prompt": "?"}, "7")


# --- the file ---------------------------------------------------------------------------------------------------------


def filled(path, tries, **arguments):
    file = SampleFile(path, SETTINGS, **arguments)
    for each in tries:
        file.append(each)
    file.close()
    return file


def test_samples_are_there_after_a_restart(tmp_path):
    output = tmp_path / "run.json"
    filled(output, TRIES[:2])
    filled(output, TRIES[2:])
    filled(output, [a_try(2, 0)], rank=1)
    again = SampleFile(output, SETTINGS)
    assert sorted(again.tries) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert (tmp_path / "run.samples.jsonl").read_text().count("settings") == 1
    assert (tmp_path / "run.samples-1.jsonl").exists()
    assert again.tries[1, 0].score is None and again.tries[1, 1].is_truncated


@given(st.integers(0, 2000))
def test_a_file_cut_at_any_byte_loses_no_more_than_its_last_line(tmp_path_factory, cut):
    output = tmp_path_factory.mktemp("cut") / "run.json"
    path = filled(output, TRIES).path
    content = path.read_bytes()
    kept = content[: min(cut, len(content))]
    path.write_bytes(kept)
    whole_lines = max(0, kept.count(b"\n") - 1)
    resumed = SampleFile(output, SETTINGS)
    assert len(resumed.tries) == whole_lines
    for each in TRIES[whole_lines:]:
        resumed.append(each)
    resumed.close()
    assert path.read_bytes() == content


def test_half_a_character_is_kept(tmp_path):
    """JSON of a server may hold one half of a surrogate pair, which UTF-8 can't."""
    broken = Try(0, 0, 3, False, 0.0, "\ud83d", "2+2=\ud83d")
    first = SampleFile(tmp_path / "r.json", SETTINGS)
    first.append(broken)
    first.close()
    assert json.loads(first.path.read_text(encoding="utf-8").splitlines()[1])["text"] == "2+2=\ud83d"
    assert SampleFile(tmp_path / "r.json", SETTINGS).tries[0, 0].answer == "\ud83d"


def test_samples_of_other_settings_are_refused(tmp_path):
    filled(tmp_path / "run.json", TRIES)
    with pytest.raises(ValueError, match=r"`temperature` \(0\.85 then, 1\.0 now\).*sample anew"):
        SampleFile(tmp_path / "run.json", {**SETTINGS, "temperature": 1.0})


def test_a_result_without_its_samples_is_refused(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="Choose another name"):
        SampleFile(tmp_path / "run.json", SETTINGS)


@pytest.mark.parametrize(
    "text", ["x\n", "[]\n", "{}\n", '{"settings": {"model": "m", "temperature": 0.85}}\n{"a": 1}\n']
)
def test_a_file_of_something_else_is_refused(tmp_path, text):
    (tmp_path / "run.samples.jsonl").write_text(text)
    with pytest.raises(ValueError, match="is no file of samples"):
        SampleFile(tmp_path / "run.json", SETTINGS)


# --- figures ----------------------------------------------------------------------------------------------------------


def test_figures_by_hand():
    values = figures(result(), k=2, ids=["a", "b"])
    assert (values["avg_at_k"], values["standard_error"]) == (0.25, 0.25)
    assert (values["pass_at_k"], values["pass_at_k_standard_error"]) == (0.5, 0.5)
    assert values["maj_at_k"] == 0.25  # a tie of a right and a wrong answer; one undecided answer
    assert values["pass_at"] == {"1": 0.25, "2": 0.5}
    assert (values["truncated_fraction"], values["undecided_fraction"]) == (0.25, 0.25)
    assert values["unanswered_fraction"] == 0  # the one without an answer was truncated
    assert values["lengths"]["mean"] == 5 and values["lengths"]["mean_right"] == 3
    assert values["problems"][1] == {"id": "b", "is_correct": [0, 0], "lengths": [6, 8]}
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert "avg@2       25.0 %            25.0" in table(values)


def test_figures_about_fewer_answers_than_sampled():
    tries = [a_try(0, attempt, float(attempt < 2), answer=str(attempt < 2)) for attempt in range(6)]
    values = figures(result(tries, 1), k=4, ids=["a"])
    assert values["avg_at_k"] == pytest.approx(1 / 3)
    assert values["pass_at_k"] == pytest.approx(1 - 1 / 15)  # C(4,4) of C(6,4) draws miss both
    assert values["maj_at_k"] == 0.5  # of the first four, two are right and two wrong
    assert list(values["pass_at"]) == ["1", "2", "4", "6"]
    assert values["standard_error"] is None  # of a single problem
    assert "-" in table(values)
    with pytest.raises(ValueError, match="Sample more tries, or lower `k`"):
        figures(result(tries, 1), k=7, ids=["a"])


def written(path, tries=TRIES, ids=("a", "b")):
    path.write_text(json.dumps(figures(result(tries), k=2, ids=list(ids))))
    return path


def test_a_run_is_compared_with_an_earlier_one_by_problem(tmp_path):
    better = [a_try(problem, attempt) for problem in range(2) for attempt in range(2)]
    values = figures(result(better), k=2, ids=["b", "a"])  # in another order
    other = OtherRun(written(tmp_path / "other.json"))
    other.check(["b", "a"])
    values["comparison"] = other.compared(values)
    assert values["comparison"]["difference"] == 0.75
    assert values["comparison"]["p_value"] == 0.5  # both problems better: 2 of 4 signs
    assert values["comparison"]["num_better"] == 2
    assert "differs by +75.0 points" in table(values) and "p = 0.5" in table(values)


def test_a_comparison_of_other_problems_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Evaluate both on one data set"):
        OtherRun(written(tmp_path / "other.json")).check(["a", "c"])


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"problems": [1], "avg_at_k": 1}'])
def test_a_comparison_with_something_else_is_refused(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match="that an earlier one wrote"):
        OtherRun(tmp_path / "other.json")
