"""The parts of the cleaning: what counts as the same question, duplicates against brute force, hostile text."""

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_ulorl.data import duplicates
from trl_ulorl.data import similarity as similarity_module
from trl_ulorl.data.choices import find_choices, multiple_choice
from trl_ulorl.data.chunks import ChunkCleaner, ChunkSettings, answer_key, judge_row
from trl_ulorl.data.duplicates import FATE, KIND_CONTRADICTION, KIND_NEAR, KIND_NONE, KIND_SAME, Rows, find_duplicates
from trl_ulorl.data.forms import proof, true_false
from trl_ulorl.data.rules import missing, multi_part, overlong, short_answer
from trl_ulorl.data.similarity import MIN_SIMILARITY, LeakageIndex, band_keys, features, similarity
from trl_ulorl.data.sources import Columns, read_prompt

RULES = {
    "missing": missing,
    "short_answer": short_answer,
    "multiple_choice": multiple_choice,
    "multi_part": multi_part,
    "proof": proof,
    "true_false": true_false,
    "overlong": overlong,
}

# ----------------------------------------------------------------------------------------------------- the same question


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Find $x^2$.", "find  \\(x^{2}\\)"),
        (r"Find $\dfrac{1}{2}$", r"Find $\frac{1}{2}$."),
        (r"Let $a \leq b$.", "Let $a ≤ b$"),
        (r"Find $\left( 3 - 2 \right)$", "Find $(3 − 2)$"),
        ("Find $2 \\cdot 3$.\n", "Find $2 \\times 3$."),
    ],
)
def test_the_same_in_another_layout(first, second):
    assert features(first).tokens == features(second).tokens


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Find $x_1$.", "Find $x_2$."),
        ("Find $A$.", "Find $a$."),
        ("Find $f(1,2)$.", "Find $f(12)$."),
        ("Find $3 - 5$.", "Find $5 - 3$."),
        ("Find $5!$.", "Find $5$."),
        ("Find $1.5$.", "Find $15$."),
        (r"Find $x^{a+b}$.", r"Find $x^a+b$."),
        ("Find the least root.", "Find the largest root."),
        ("求 $x$ 的最大值", "求 $x$ 的最小值"),
    ],
)
def test_not_the_same(first, second):
    assert features(first).tokens != features(second).tokens


def test_features_outlive_the_cache_of_tokens(monkeypatch):
    texts = ["Find the sum of $3x^2$ and $y$.", r"Find \( \frac{1}{2} \)", "Is $17$ prime?"]
    before = [features(text) for text in texts]
    monkeypatch.setattr(similarity_module, "_MAX_CACHED_TOKENS", 4)  # fewer than one question has
    assert [features(text) for text in texts * 2] == before * 2


@settings(max_examples=200)
@given(st.text(st.sampled_from("ab1 ${}~^_&nbsp;.,")))
def test_texts_without_commands_are_read_as_those_with_some(text):
    assert features(text).tokens == features(text + r" \quad").tokens


def test_similarity_by_hand():
    """Words {sum, roots, equation} and {sum, roots, polynomial}; pairs sum-roots, roots-...: 3 of 7 in common."""
    first, second = (
        features("Find the sum of the roots of the equation $x$."),
        features("Sum of roots of the polynomial $x$"),
    )
    assert similarity(first, second) == pytest.approx(3 / 7)
    assert similarity(first, first) == 1
    assert similarity(first, features("Find the sum of the roots of the equation $y$.")) == 0
    assert similarity(features("$x$"), features("Find $x$.")) == 1  # nothing but the formula


@pytest.mark.parametrize(
    ("end", "is_told"),
    [
        (r"The result of the integral should be \( \frac{1}{3} \).", True),
        (r"Your final answer should equal $1/3$", False),  # another spelling is no proof that it is told
        ("The answer should be an integer.", False),
        (r"The value of $a$ should be $\dfrac13$, and $x$ should be real.", False),
        (r"The answer should be \( \frac13 \) of the length.", False),
    ],
)
def test_a_question_that_tells_its_answer(end, is_told):
    finding = proof(rf"Evaluate \( \int_0^1 x^2 dx \). {end}", r"\dfrac{1}{3}")
    assert (finding is not None and finding.reason == "it tells its own answer" and finding.needs_model) is is_told


words = st.lists(
    st.sampled_from(["sum", "root", "prime", "area", "graph", "circle", "digit", "number", "square", "point"]),
    min_size=1,
    max_size=12,
)
questions = st.builds(lambda text, n: f"Find the {' '.join(text)} of ${n}$.", words, st.integers(0, 3))


@settings(max_examples=50)
@given(words)
def test_equal_words_share_every_band(text):
    rows = [features(" ".join(text)), features(" ".join(text).upper())]
    keys = band_keys(rows, [1, 1])
    assert (keys[0] == keys[1]).all()
    assert not (band_keys(rows[:1], [2]) == keys[0]).any()  # another reference


def test_bands_are_shared_as_often_as_the_similarity_says():
    """One band agrees with probability s^3, one of 12 with 1 - (1 - s^3)^12."""
    draw = np.random.default_rng(0)
    hits, expected = [], []
    for _ in range(400):
        common = [f"w{number}" for number in draw.integers(0, 10**6, 20)]
        cut = int(draw.integers(1, 20))
        pair = [
            features(" ".join(common)),
            features(" ".join([*common[:cut], *(f"v{n}" for n in draw.integers(0, 10**6, 20 - cut))])),
        ]
        alike = similarity(*pair)
        keys = band_keys(pair, [0, 0])
        hits.append(bool((keys[0] == keys[1]).any()))
        expected.append(1 - (1 - alike**3) ** 12)
    error = np.sqrt(np.sum(np.array(expected) * (1 - np.array(expected)))) / len(hits)
    assert np.mean(hits) == pytest.approx(np.mean(expected), abs=4 * error)


# ----------------------------------------------------------------------------------------------------------- duplicates


def make_rows(folder, rows, chunk_rows=3):
    columns = Columns("question", "answer")
    cleaner = ChunkCleaner(ChunkSettings(columns, ("missing",)), Path(folder))
    starts = range(0, len(rows), chunk_rows)
    for number, start in enumerate(starts):
        part = rows[start : start + chunk_rows]
        table = pa.table({"question": [row[0] for row in part], "answer": [row[1] for row in part]})
        cleaner.clean(number, start, table)
    return Rows(Path(folder), len(starts))


def test_kinds_of_duplicates(tmp_path):
    rows = [
        ("Find the sum of the digits of $12$.", "3"),
        ("What is the sum of the digits of 12?", "3"),
        ("find the sum of the digits of $12$", "3"),
        ("Find the product of $3$ and $4$.", "12"),
        ("Find the product of $3$ and $4$.", "7"),
        ("Find the digits of $12$.", "1, 2"),
        ("Find the value of $0.5$.", "0.5"),
        ("Find the value of $0.5$.", r"\frac{1}{2}"),
    ]
    fates, answers = find_duplicates(make_rows(tmp_path, rows))
    assert fates["kind"].tolist() == [
        KIND_NONE, KIND_NEAR, KIND_SAME, KIND_CONTRADICTION, KIND_CONTRADICTION, KIND_NONE, KIND_NONE, KIND_SAME,
    ]  # fmt: skip
    assert fates["of"][[1, 2, 7]].tolist() == [0, 0, 6]
    assert answers == {3: "'12', '7'", 4: "'12', '7'"}


@settings(max_examples=25)
@given(st.lists(st.tuples(questions, st.sampled_from(["1", "2"])), max_size=30))
def test_duplicates_against_brute_force(tmp_path_factory, rows):
    found = make_rows(tmp_path_factory.mktemp("rows"), rows)
    fates, _ = find_duplicates(found)
    assert fates.dtype == FATE and len(fates) == len(rows)
    known = [features(question) for question, _ in rows]
    answers = {}
    for (_, answer), row in zip(rows, known, strict=True):
        answers.setdefault(row.tokens, set()).add(answer)
    for place, row in enumerate(known):
        kind, other = int(fates["kind"][place]), int(fates["of"][place])
        assert (kind == KIND_CONTRADICTION) == (len(answers[row.tokens]) > 1)
        if kind == KIND_SAME:
            assert known[other].tokens == row.tokens and other < place
        if kind == KIND_NEAR:
            assert (
                similarity(known[other], row) >= MIN_SIMILARITY and other < place and rows[other][1] == rows[place][1]
            )
            assert fates["kind"][other] == KIND_NONE  # the row that it repeats stays
        if kind == KIND_NONE:
            earlier = [p for p in range(place) if fates["kind"][p] == KIND_NONE and rows[p][1] == rows[place][1]]
            assert all(similarity(known[p], row) < 1 for p in earlier)


def test_parts_of_the_keys_change_nothing(tmp_path, monkeypatch):
    draw = np.random.default_rng(1)
    rows = [
        (f"Find the number of {draw.choice(['sheep', 'goats', 'cows'])} and {n}.", "1")
        for n in draw.integers(0, 20, 60)
    ]
    found = make_rows(tmp_path, rows)
    whole, _ = find_duplicates(found)
    monkeypatch.setattr(duplicates, "_PART_ROWS", 7)
    parts, _ = find_duplicates(found)
    assert (whole == parts).all() and (whole["kind"] != KIND_NONE).any()


def test_nothing_left_is_nothing_twice(tmp_path):
    fates, _ = find_duplicates(make_rows(tmp_path, [("", "1"), ("a", "")]))
    assert len(fates) == 0


def test_answers_in_other_spellings_have_one_key():
    assert answer_key("12") == answer_key("$12$") == answer_key("12.")
    assert answer_key(r"\dfrac12") == answer_key(r"\frac{1}{2}") != answer_key("12")


# -------------------------------------------------------------------------------------------------------------- leakage


@settings(max_examples=50)
@given(st.lists(questions, min_size=1, max_size=5), st.lists(questions, max_size=10))
def test_what_is_found_is_suspected(problems, rows):
    index = LeakageIndex((str(number), problem) for number, problem in enumerate(problems))
    known = [features(row) for row in rows]
    suspects = index.suspects(known)
    for row, is_suspect in zip(known, suspects, strict=True):
        assert is_suspect or index.find(row) is None
    for problem in problems:
        assert index.find(features(problem)).how == "word for word"


# --------------------------------------------------------------------------------------------------------- hostile text

PIECES = [
    " ", "\n", "$", "(", "{", r"\(", r"\boxed{", r"\qquad ", "a. ", "(A) x (B) y ", "1. a\n2. b\n", "find ", "the sum and ",
    "prove that the ", "x is ", "what is x? ", "determine whether the limit $x$ ", "which larger or ", ", and verify that it is ",
    "justify your answer ", "provide a proof ", "choose one of the options ", "step by step final answer ",
    r"\begin{cases}", "then, ", "in addition, ", "x = ",
]  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_time_on_hostile_text(piece):
    text = piece * (50_000 // len(piece))
    started = time.process_time()
    read_prompt(text)
    for question, answer in (
        (text, "5"),
        (text, "B"),
        ("Choose one: (A) x (B) y", text),
        (f"Show that the {text}", "5"),
    ):
        judge_row(question, answer, RULES)
    features(text)
    assert time.process_time() - started < 4


@settings(max_examples=300)
@given(st.text(max_size=200), st.text(max_size=50))
def test_any_text_has_a_fate(question, answer):
    judged = judge_row(question, answer, RULES)
    assert judged.fate in ("kept", "dropped")
    if judged.fate == "dropped":
        assert judged.events[-1]["action"] == "dropped" and judged.events[-1]["reason"]
    if judged.fate == "kept":
        again = judge_row(judged.question, judged.answer, RULES)
        assert again.fate in ("kept", "dropped")


def test_options_in_every_spelling():
    for text in (
        "(A) 1 (B) 2 (C) 3",
        "A. 1 B. 2 C. 3",
        "\nA) 1\nB) 2\nC) 3",
        r"$\textbf{(A)}\ 1 \qquad \textbf{(B)}\ 2 \qquad \textbf{(C)}\ 3$",
        r"\(\text{(A) } 1 \quad \text{(B) } 2 \quad \text{(C) } 3\)",
        "(a) 1; (b) 2; (c) 3.",
    ):
        assert find_choices(f"How many are there? {text}").options == {"A": "1", "B": "2", "C": "3"}, text
