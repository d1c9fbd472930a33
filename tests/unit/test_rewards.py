"""Tables of (prediction, reference, expected, stage), then the reward function around them.

Predictions are whole outputs; `boxed` wraps a bare answer. What needs units, number words or a judge is not covered.
"""

# ruff: noqa: RUF001 (full-width characters are what is tested)

import pickle
import subprocess
import sys
import threading
import time

import pytest

from trl_ulorl.rewards import Verdict, VerifierReward, verify, verify_answer
from trl_ulorl.rewards.extraction import extract_answer, extract_reference, normalize_answer
from trl_ulorl.rewards.verify import STAGE_NAMES


def boxed(answer):
    return rf"So the result is $\boxed{{{answer}}}$."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{7}", "7"),
        (r"\boxed{\frac{1}{\sqrt{2}}} done", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x : x > 0 \right\}}", r"\left\{ x : x > 0 \right\}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed {42} or \fbox{42}", "42"),
        (r"$\boxed 4$.", "4"),
        ("\\boxed{\n\\frac{14}{3}\n}", r"\frac{14}{3}"),
        (r"First \boxed{3}. Then \boxed{4}.", "4"),
        (r"\boxed{3} or $\boxed{4}$", "3, 4"),
        (r"\boxed{42} has 3 steps", "42"),
        # malformed
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{7} and \boxed{8", None),
        (r"\boxed{{}.", None),
        (r"\boxed{}", None),
        (r"\boxed", None),
        # thinking
        (r"<think>\boxed{12}</think> \boxed{7}", "7"),
        (r"<think>\boxed{12}", None),
        (r"\boxed{12}</think> It is 7", None),
        (r"<think>a</think>\boxed{1}<think>\boxed{2}", None),
        ("<think>x</think><answer> 12 </answer>", "12"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        # phrases
        ("The answer is 42.", "42"),
        ("The answer is 3.5. That is all.", "3.5"),
        ("**Final Answer:** $42$\n", "$42$"),
        ("905 so far. Final Answer: **73**", "73"),
        ("**Answer: D**", "D"),
        ("The correct option is (B).", "(B)"),
        ("所以最终答案是 12。请检查。", "12"),
        ("答案：\\frac{1}{2}", r"\frac{1}{2}"),
        ("故选：B", "B"),
        ("故答案为 3.5", "3.5"),
        # no marker: no guess
        ("There are 73 residents", None),
        ("答案很简单 5", None),
        ("", None),
        (":", None),
    ],
)
def test_extract_answer(text, expected):
    assert extract_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42", "42"),
        (r" \boxed{42} ", "42"),
        ("3 + 4 = 7\n#### 7", "7"),
        (r"We add and get \boxed{7}, since 3 + 4 = 7.", "7"),
        (r"\boxed{7", ""),
        ("", ""),
    ],
)
def test_extract_reference(text, expected):
    assert extract_reference(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"$\dfrac12$", r"\frac{1}{2}"),
        (r"\left( 1,\, 2 \right)", "(1,2)"),
        (r"\text{(C)}", "C"),
        (r"2{,}271{,}380", "2271380"),
        (r"58\,500", "58500"),
        ("−7.", "-7"),
        ("½", r"\frac{1}{2}"),
        ("x²", "x^2"),
        ("x^{2}_{1}", "x^2_1"),
        ("４２", "42"),
        ("4\u200b2", "42"),
        ("（-2，5）", "(-2,5)"),
        (r"a=1 \text{ or } a=-2", "a=1,a=-2"),
        ("1 2", "1 2"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"27\text{ cm}", "27 cm"),
        (r"1,2,\ldots", r"1,2,\ldots"),
        ("1,2,...", "1,2,..."),
    ],
)
def test_normalize_answer(text, expected):
    assert normalize_answer(text) == expected


@pytest.mark.parametrize(
    ("prediction", "reference", "expected", "stage"),
    [
        (boxed("204"), "204", True, "exact"),
        ("No idea.", "204", False, "extraction"),
        (r"<think>\boxed{204}", "204", False, "extraction"),
        (boxed(r"\dfrac{9}{4}"), r"\frac{9}{4}", True, "normalized"),
        (boxed("F(1, 1)"), "$F(1,1)$", True, "normalized"),
        (boxed(r"\text{Western Blot}"), "Western blot", True, "normalized"),
        (boxed("C"), r"\text{(C)}", True, "normalized"),
        (boxed(r"\text{yes}"), "Yes", True, "normalized"),
        (boxed("Yes"), "True", True, "boolean"),
        (boxed("No"), "Yes", False, "boolean"),
        (boxed("false"), "no", True, "boolean"),
        (boxed("7"), "Yes", False, "boolean"),
        # numbers
        (boxed(r"\frac{1}{2}"), "0.5", True, "numeric"),
        (boxed("1/2"), "0.5", True, "numeric"),
        (boxed("0.33"), r"\frac{1}{3}", False, "numeric"),
        (boxed("0.333333333333"), "1/3", False, "numeric"),
        (boxed("033"), "33", True, "numeric"),
        (boxed("1.0"), "1", True, "numeric"),
        (boxed("-2/4"), r"-\frac{1}{2}", True, "numeric"),
        (boxed("58500"), "58,500", True, "numeric"),
        (boxed("1,234"), "1.234", False, "numeric"),
        (boxed(r"6.72 \times 10^{-5}"), ".0000672", True, "numeric"),
        (boxed("1e-5"), "0.00001", True, "numeric"),
        (boxed("28\\%"), "0.28", True, "numeric"),
        (boxed("28"), "28%", True, "numeric"),
        (boxed("0.5"), "50", False, "numeric"),
        (boxed("0.5%"), "50%", False, "numeric"),
        (boxed("0.1"), "0.1000000000000000055511151231257827", False, "numeric"),
        # formulas
        (boxed(r"1+\sqrt{2}"), r"\sqrt{2}+1", True, "symbolic"),
        (boxed("x=5"), "5", True, "symbolic"),
        (boxed(r"-2\pi"), "-2*pi", True, "symbolic"),
        (boxed(r"\tan^2(y)+1"), r"\sec^2(y)", True, "symbolic"),
        (boxed("3^{25}+1"), "847288609444", True, "symbolic"),
        (boxed("4^{50000}"), "2^{100000}", True, "symbolic"),
        (boxed(r"\frac{10\sqrt{10.5}}{27}"), r"\frac{5\sqrt{42}}{27}", True, "symbolic"),
        (boxed("a=1 \\text{ or } a=-2"), "a = -2 \\text{ or } a = 1", True, "symbolic"),
        (boxed("34x+45y-20z+100=0"), "-34x-45y+20z-100=0", True, "symbolic"),
        (boxed("y=x"), "x=y", True, "symbolic"),
        (boxed(r"\begin{bmatrix}1\\2\end{bmatrix}"), r"\begin{pmatrix}1\\2\end{pmatrix}", True, "symbolic"),
        (boxed("2x^3"), "2x^3+c", False, "symbolic"),
        (boxed("x^2-5x+6=0"), "0", False, "symbolic"),
        (boxed("a+b=7"), "7", True, "symbolic"),
        (boxed("(2,1)"), "(1,2)", False, "symbolic"),
        (boxed("(1,2)"), "[1,2]", False, "symbolic"),
        (boxed(r"\{1,2,3\}"), "3", False, "symbolic"),
        ("The answer is 3 or 4.", "3", False, "symbolic"),
        (r"It is \boxed{3} or \boxed{4}.", "4", False, "symbolic"),
        (boxed("B"), "C", False, "symbolic"),
        # decimals stay exact, and tiny numbers are not rounded to zero
        (boxed("1.41421356"), r"\sqrt{2}", False, "symbolic"),
        (boxed("3.14"), r"\pi", False, "symbolic"),
        (boxed("10^{-20}+0"), "10^{-21}", False, "symbolic"),
        (boxed(r"\frac{1}{2006!}"), r"\frac{1}{2004!}", False, "symbolic"),
        (boxed(r"1+\frac{1}{\mathrm{e}}"), r"1-\frac{1}{\mathrm{e}}", False, "symbolic"),
        # units are not stripped
        (boxed(r"27\text{ cm}"), r"27 \text{ m}", False, "symbolic"),
        # words
        (boxed(r"\text{same as the reference answer}"), "7", False, "words"),
        (boxed(r"\text{increases}"), "decreases", None, "refused"),
        (boxed("5"), "", None, "reference"),
        (boxed("5"), r"\boxed{5", None, "reference"),
    ],
)
def test_verify_answer(prediction, reference, expected, stage):
    verdict = verify_answer(prediction, reference)
    assert (verdict.equivalent, verdict.stage) == (expected, stage)


@pytest.fixture
def warm():
    """Load the algebra before the clock starts, which counts CPU time: other jobs may be running."""
    verify_answer(boxed("x+1"), "1+x")


@pytest.mark.parametrize(
    "prediction",
    [
        "a" * 1_000_000,
        "$ " * 500_000,
        "answer " * 100_000,
        "answer" + " " * 500_000,
        "<answer>" * 100_000,
        "</answer>" * 100_000,
        r"\boxed{" * 20_000,
        "".join(rf"\boxed{{{n}}}" for n in range(20_000)),
        r"\boxed{1}" + " " * 200_000 + r"; \boxed{2}",
        boxed("(" * 5000 + "1" + ")" * 5000),
        boxed(r"\sqrt{" * 300 + "2" + "}" * 300),
        boxed("7" * 5000),
        boxed("1+" * 290 + "2"),
        "The answer is 9^9^9^9",
        boxed("9^{9^{9^{9}}}"),
        boxed("9^{9^{9}} - 9^{9^{9}} + 3"),
        boxed("((2^{99999})^{99999})^{99999}"),
        boxed("(((9!)!)!)!"),
        boxed("100000000!"),
        boxed(r"\binom{1000000000}{500000000}"),
        boxed(r"\sum_{k=1}^{1000000000}\frac{1}{k^2}"),
        boxed(r"\prod_{k=1}^{100000000}k"),
        boxed(r"\gcd(9^{9^9},3)"),
        boxed(r"\exp(\exp(\exp(\exp(5))))"),
        boxed(r"\lfloor \sinh(12345^2) \rfloor"),
        boxed(r"\int e^{x^2} \sin(x^3) dx"),
        boxed("1e999999999"),
        boxed("NaN"),
        boxed(r"\frac{1}{0}"),
        boxed("1/0"),
        boxed("4\x002"),
        boxed("\ud83d"),
        boxed("١٢³⁴/୫"),
        boxed("().__class__.__bases__[0].__subclasses__()"),
        boxed("\u202e24"),
        "",
        " \n\t",
    ],
    ids=range(37),
)
def test_hostile_predictions_end_within_a_second_and_are_never_right(warm, prediction):
    start = time.process_time()
    verdict = verify_answer(prediction, "3")
    assert time.process_time() - start < 1
    assert verdict.equivalent in (None, False)


def test_unequal_trigonometry_skips_the_simplifier(warm):
    start = time.process_time()
    verdict = verify_answer(boxed(r"\sin(x)^{40}+\cos(x)^{38}\tan(x)^{17}"), r"\cos(x)^{40}+\sin(x)^{38}\tan(x)^{17}")
    assert verdict.equivalent is False
    assert time.process_time() - start < 1


def test_equal_towers_are_decided_as_text():
    assert verify_answer(boxed("9^{9^{9^{9}}}"), "$9^{9^{9^9}}$").stage == "normalized"


def test_an_exception_inside_a_stage_decides_nothing(monkeypatch):
    def broken(prediction, reference):
        raise RecursionError

    monkeypatch.setattr(verify, "STAGES", (("numeric", broken), ("later", lambda prediction, reference: True)))
    verdict = verify_answer(boxed("1/2"), "0.5")
    assert verdict == Verdict(None, "error", "1/2", "0.5", "numeric: RecursionError")


def test_pairs_that_no_stage_decides(monkeypatch):
    monkeypatch.setattr(verify, "STAGES", (("numeric", lambda prediction, reference: None),))
    assert verify_answer(boxed("a"), "b").stage == "undecided"


def test_without_math_verify_formulas_stay_undecided(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    verdict = verify_answer(boxed("x+1"), "1+x")
    assert (verdict.equivalent, verdict.stage) == (None, "refused")
    assert 'pip install "trl-ulorl[math]"' in verdict.detail
    assert verify_answer(boxed("1/2"), "0.5").equivalent is True


def test_without_math_verify_the_reward_warns(monkeypatch, caplog):
    monkeypatch.setattr("trl_ulorl.rewards.reward.find_spec", lambda name: None)
    VerifierReward()
    assert 'pip install "trl-ulorl[math]"' in caplog.text


def test_import_loads_nothing_heavy():
    code = "import sys, trl_ulorl.rewards; print([m for m in ('sympy', 'math_verify', 'trl') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_reward_reads_plain_and_conversational_completions():
    reward = VerifierReward()
    plain = [boxed("1/2"), boxed("2"), "no"]
    conversational = [[{"role": "assistant", "content": text}] for text in plain]
    blocks = [[{"role": "assistant", "content": [{"type": "text", "text": text}]}] for text in plain]
    for completions in (plain, conversational, blocks):
        assert reward(completions=completions, answer=["0.5"] * 3, prompts=["?"] * 3) == [1.0, 0.0, 0.0]


def test_reward_grades_the_last_message_and_accepts_an_empty_one():
    turns = [{"role": "assistant", "content": boxed("1")}, {"role": "assistant", "content": boxed("2")}]
    assert VerifierReward()([turns, [{"role": "assistant", "content": None}]], answer=["2", "2"]) == [1.0, 0.0]


def test_reward_reads_the_reference_columns_in_order():
    reward, completions = VerifierReward(), [boxed("1"), boxed("1")]
    assert reward(completions, answer=[1, 2.0], solution=["2", "1"]) == [1.0, 0.0]
    assert reward(completions, answer=[None, "1"], solution=[r"\boxed{1}", "2"]) == [1.0, 1.0]
    assert reward(completions, solution=["#### 1", "2"]) == [1.0, 0.0]
    assert reward.answer_columns == ("answer", "solution")


def test_reward_names_the_way_out_of_missing_references():
    with pytest.raises(ValueError, match=r"neither the column `answer` nor `solution`.*dataset\.rename_column"):
        VerifierReward()([boxed("1")], prompts=["?"])
    with pytest.raises(ValueError, match=r"2 completions and 1 references.*Repeat a prompt's `answer`"):
        VerifierReward()([boxed("1")] * 2, answer=["1"])


def test_a_bad_sample_costs_itself_only():
    assert VerifierReward()([boxed("1"), [], boxed("1")], answer=[["1"], "1", "1"]) == [None, None, 1.0]


def test_reward_logs_columns_and_metrics():
    columns, metrics = {}, {}
    VerifierReward()(
        [boxed("1/2"), boxed("increases"), "no"],
        answer=["0.5", "decreases", "1"],
        log_extra=columns.__setitem__,
        log_metric=metrics.__setitem__,
    )
    assert columns["verifier_stage"] == ["numeric", "refused", "extraction"]
    assert columns["extracted_answer"] == ["1/2", "increases", ""]
    assert set(metrics) == {f"verifier/stage_{stage}_frac" for stage in STAGE_NAMES}
    assert sum(metrics.values()) == pytest.approx(1)
    assert metrics["verifier/stage_numeric_frac"] == pytest.approx(1 / 3)


def test_reward_is_named_and_picklable():
    reward = pickle.loads(pickle.dumps(VerifierReward()))
    assert reward.__name__ == "verifier_reward"
    assert reward([boxed("1")], answer=["1"]) == [1.0]


def test_reward_runs_in_threads():
    # Distinct formulas, so that math-verify's caches do not hide a race.
    rewards = {}

    def score(n):
        pairs = [(boxed(rf"{n}+\sqrt{{{k}}}x"), rf"\sqrt{{{k}}}x+{n}") for k in range(2, 8)]
        rewards[n] = VerifierReward()([p for p, _ in pairs], answer=[r for _, r in pairs])

    threads = [threading.Thread(target=score, args=(n,)) for n in range(2, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rewards == {n: [1.0] * 6 for n in range(2, 6)}
