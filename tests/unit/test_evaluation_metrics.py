"""avg@k, pass@k, maj@k, intervals and the paired test: numbers worked out by hand, closed forms, and resampling."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_ulorl.evaluation import metrics
from trl_ulorl.evaluation.metrics import (
    avg_at_k,
    confidence_interval,
    length_statistics,
    maj_at_k,
    majority_shares,
    paired_test,
    pass_at_k,
    pass_shares,
)

# Right tries of four: 2, 1, 0, 4.
TRIES = [[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]


def random_tries(seed, problems=60, tries=8):
    random = np.random.default_rng(seed)
    return (random.random((problems, tries)) < random.beta(0.6, 0.9, (problems, 1))).astype(float)


def test_avg_at_k_by_hand():
    # Shares 1/2, 1/4, 0, 1: mean 7/16, squared deviations (1 + 9 + 49 + 81) / 256, over 3 and 4.
    mean, error = avg_at_k(TRIES)
    assert mean == 7 / 16
    assert error == pytest.approx(math.sqrt(140 / 256 / 3 / 4))


def test_avg_at_k_of_one_problem_has_no_error():
    mean, error = avg_at_k([[1, 0, 0]])
    assert mean == pytest.approx(1 / 3) and math.isnan(error)


def test_pass_at_k_by_hand():
    # Two of four: 1 - C(2,2)/C(4,2) = 5/6, 1 - C(3,2)/C(4,2) = 1/2, 0, 1.
    assert pass_shares(TRIES, 2).tolist() == pytest.approx([5 / 6, 1 / 2, 0, 1])
    assert pass_at_k(TRIES, 2)[0] == pytest.approx((5 / 6 + 1 / 2 + 1) / 4)
    assert pass_at_k(TRIES, 1)[0] == pytest.approx(avg_at_k(TRIES)[0])
    assert pass_shares(TRIES, 4).tolist() == [1, 1, 0, 1]


@given(st.integers(1, 60), st.data())
def test_pass_at_k_equals_the_closed_form(num_tries, data):
    right = data.draw(st.lists(st.integers(0, num_tries), min_size=1, max_size=5))
    k = data.draw(st.integers(1, num_tries))
    tries = [[1] * count + [0] * (num_tries - count) for count in right]
    exact = [1 - Fraction(math.comb(num_tries - count, k), math.comb(num_tries, k)) for count in right]
    assert pass_shares(tries, k).tolist() == pytest.approx([float(each) for each in exact], abs=1e-12)


@given(st.lists(st.integers(0, 1), min_size=2, max_size=8), st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(row, data):
    k = data.draw(st.integers(1, len(row)))
    subsets = [float(any(subset)) for subset in itertools.combinations(row, k)]
    assert pass_shares([row], k)[0] == pytest.approx(np.mean(subsets))


def test_maj_at_k_by_hand():
    answers = [
        ["7", "3", "7", "4"],  # most votes for 7
        ["5", "6", "5", "8"],  # most votes for a wrong one
        ["2", "9", "2", "9"],  # a tie of a right and a wrong one
        ["", "", "1", ""],  # one vote
        ["", "", "", ""],  # none
    ]
    is_correct = [[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert majority_shares(is_correct, answers, 4).tolist() == [1, 0, 0.5, 1, 0]
    assert maj_at_k(is_correct, answers, 4)[0] == 0.5
    # Blocks of two: 7 or 3, 7 or 4 | 5 or 6, 5 or 8 | 2 or 9, twice | none, 1 | none.
    assert majority_shares(is_correct, answers, 2).tolist() == [0.5, 0.25, 0.5, 0.5, 0]
    # One block of three; the fourth try is left over.
    assert majority_shares(is_correct, answers, 3).tolist() == [1, 0, 1, 1, 0]


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", ""]), st.booleans()), min_size=1, max_size=9))
def test_maj_at_k_does_not_depend_on_the_order(tries):
    # As a judge does, the spelling decides, and no answer is wrong.
    verdicts = {answer: right for answer, right in tries if answer}
    answers = [answer for answer, _ in tries]
    rights = [float(verdicts.get(answer, False)) for answer in answers]
    there = majority_shares([rights], [answers], len(tries))
    back = majority_shares([rights[::-1]], [answers[::-1]], len(tries))
    assert there[0] == pytest.approx(back[0]) and 0 <= there[0] <= 1


def test_maj_at_1_is_avg_at_k_where_every_try_answers():
    tries = random_tries(0)
    answers = [["right" if right else f"wrong {index}" for index, right in enumerate(row)] for row in tries]
    assert maj_at_k(tries, answers, 1) == pytest.approx(avg_at_k(tries))


@pytest.mark.parametrize("seed", range(3))
def test_standard_errors_agree_with_a_bootstrap_over_problems(seed):
    tries = random_tries(seed)
    answers = [["1" if right else str(index % 3) for index, right in enumerate(row)] for row in tries]
    random = np.random.default_rng(seed)
    draws = random.integers(0, len(tries), (4000, len(tries)))
    for per_problem, error in (
        (tries.mean(axis=1), avg_at_k(tries)[1]),
        (pass_shares(tries, 4), pass_at_k(tries, 4)[1]),
        (majority_shares(tries, answers, 8), maj_at_k(tries, answers, 8)[1]),
    ):
        assert per_problem[draws].mean(axis=1).std() == pytest.approx(error, rel=0.06)


def test_standard_error_is_the_spread_of_repeated_evaluations():
    """Fresh problems and fresh tries each time; the error of one evaluation foretells how far the others scatter."""
    runs = [avg_at_k(random_tries(seed)) for seed in range(400)]
    means, errors = zip(*runs, strict=True)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)


def test_intervals_cover_the_mean_as_often_as_they_say():
    mean = 0.6 / 1.5  # of the beta distribution above
    intervals = [confidence_interval(random_tries(seed, problems=40).mean(axis=1)) for seed in range(300)]
    covered = np.mean([low <= mean <= high for low, high in intervals])
    assert 0.91 < covered < 0.98  # 95 % less what percentiles lose with 40 problems


def test_intervals_at_the_bounds_are_exact():
    low, high = confidence_interval([0.0] * 30)
    assert low == 0 and (1 - high) ** 30 == pytest.approx(0.025)
    assert confidence_interval([1.0] * 30) == pytest.approx((1 - high, 1.0))
    assert all(math.isnan(end) for end in confidence_interval([0.5]))


def test_intervals_are_the_same_each_time_and_within_the_bounds():
    values = [0.0] * 29 + [1.0]
    first = confidence_interval(values)
    assert first == confidence_interval(values)
    assert 0 <= first[0] < 1 / 30 < first[1] <= 1


def test_paired_test_by_hand():
    # Differences +1, +1/2, -1/2, 0. Signs on 2, 1, 1 (halves): sums 4, 2, 2, 0, 0, -2, -2, -4; observed 2: 6 of 8.
    test = paired_test([[0, 0], [0, 0], [1, 0], [1, 1]], [[1, 1], [0, 1], [0, 0], [1, 1]])
    assert test.difference == 0.25
    assert test.p_value == pytest.approx(6 / 8)
    assert (test.num_problems, test.num_better, test.num_worse) == (4, 2, 1)
    assert test.standard_error == pytest.approx(math.sqrt((0.75**2 + 0.25**2 + 0.75**2 + 0.25**2) / 3 / 4))
    assert test.confidence_interval[0] <= 0.25 <= test.confidence_interval[1]


def test_paired_test_of_equal_runs():
    assert paired_test(TRIES, TRIES).p_value == 1


@settings(max_examples=30)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 8), st.integers(0, 10_000))
def test_paired_test_equals_the_enumeration_of_all_signs(k, other_k, problems, seed):
    random = np.random.default_rng(seed)
    first, second = (random.integers(0, 2, (problems, each)) for each in (k, other_k))
    differences = second.mean(axis=1) - first.mean(axis=1)
    signs = np.array(list(itertools.product((-1, 1), repeat=problems)))
    p_value = np.mean(np.abs(signs @ differences) >= abs(differences.sum()) - 1e-9)
    assert paired_test(first, second).p_value == pytest.approx(p_value)


def test_paired_test_finds_few_differences_between_equal_models():
    random = np.random.default_rng(0)
    p_values = []
    for _ in range(2000):
        first, second = (random.random((2, 30, 8)) < random.random((30, 1))).sum(axis=2)
        p_values.append(metrics._sign_flip_p_value(second - first))
    # Sums of few shares coincide, and what coincides with the observed one counts against it: a little cautious.
    assert 0.025 < np.mean(np.array(p_values) < 0.05) < 0.05
    assert 0.38 < np.mean(np.array(p_values) < 0.5) < 0.5


def test_paired_test_finds_a_difference_that_unpaired_errors_hide():
    random = np.random.default_rng(0)
    chances = random.choice([0.05, 0.9], (30, 1))
    first, second = random.random((30, 32)) < chances, random.random((30, 32)) < chances + 0.1
    assert paired_test(first, second).p_value < 0.001
    assert avg_at_k(second)[0] - avg_at_k(first)[0] < 2 * avg_at_k(first)[1]


def test_length_statistics_by_hand():
    figures = length_statistics([[1, 2], [3, 10]], [[1, 0], [0, 0]])
    assert figures == {
        "mean": 4,
        "p50": 2.5,
        "p90": pytest.approx(7.9),
        "p99": pytest.approx(9.79),
        "max": 10,
        "mean_right": 1,
        "mean_wrong": 5,
    }
    assert length_statistics([[1]], [[1]])["mean_wrong"] is None


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda: avg_at_k([]), "Group the tries by problem"),
        (lambda: avg_at_k([1, 0]), "Group the tries by problem"),
        (lambda: pass_at_k([[1, 0]], 3), "Sample more tries, or lower `k`"),
        (lambda: pass_at_k([[1, 0]], 0), "Sample more tries, or lower `k`"),
        (lambda: maj_at_k([[1, 0]], [["1", "2"]], 3), "Sample more tries, or lower `k`"),
        (lambda: maj_at_k([[1, 0]], [["1"]], 1), "Pass an empty text"),
        (lambda: pass_at_k([[0.5, 0]], 1), "measures correctness alone"),
        (lambda: paired_test([[1]], [[1], [0]]), "Evaluate both on one data set"),
        (lambda: length_statistics([[1]], [[1, 0]]), "one value for each try"),
    ],
)
def test_bad_input_is_explained(call, remedy):
    with pytest.raises(ValueError, match=remedy):
        call()
