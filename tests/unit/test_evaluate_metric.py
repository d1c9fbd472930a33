"""The metric of Hugging Face's `evaluate`, loaded by its path without a network."""

import pytest

evaluate = pytest.importorskip("evaluate")

from trl_ulorl.evaluation import evaluate_metric

PREDICTIONS = [["\\boxed{4}", "It is \\boxed{4}."], ["\\boxed{5}", "No idea."]]
REFERENCES = ["4", "5.0"]


@pytest.fixture(params=["loaded", "made"])
def metric(request, tmp_path):
    if request.param == "made":
        return evaluate_metric.AvgAtK(cache_dir=str(tmp_path))
    return evaluate.load(evaluate_metric.__file__, cache_dir=str(tmp_path))


def test_figures_by_hand(metric):
    figures = metric.compute(predictions=PREDICTIONS, references=REFERENCES)
    assert figures == {
        "avg_at_k": 0.75,
        "pass_at_k": 1.0,
        "maj_at_k": 1.0,
        "avg_at_k_standard_error": 0.25,
        "pass_at_k_standard_error": 0.0,
        "maj_at_k_standard_error": 0.0,
    }


def test_figures_about_fewer_answers_and_in_batches(metric):
    for texts, reference in zip(PREDICTIONS, REFERENCES, strict=True):
        metric.add(prediction=texts, reference=reference)
    figures = metric.compute(k=1)
    assert figures["pass_at_k"] == figures["maj_at_k"] == figures["avg_at_k"] == 0.75


def test_bad_input_is_explained(metric):
    with pytest.raises(ValueError, match="Sample more tries, or lower `k`"):
        metric.compute(predictions=PREDICTIONS, references=REFERENCES, k=3)
    with pytest.raises(ValueError, match="from 1 to 2 completions"):
        metric.compute(predictions=[["1"], ["1", "2"]], references=REFERENCES)
