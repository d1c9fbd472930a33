r"""avg@k, pass@k and maj@k as a metric of Hugging Face's `evaluate`, an optional extra.

from trl_ulorl.evaluation import evaluate_metric

metric = evaluate.load(evaluate_metric.__file__)  # or evaluate_metric.AvgAtK()
metric.compute(predictions=[["\\boxed{4}", "\\boxed{5}"]], references=["4"], k=2)
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

# In full: `evaluate` runs a copy of this file from its cache.
from trl_ulorl.evaluation.metrics import avg_at_k, maj_at_k, pass_at_k
from trl_ulorl.evaluation.runner import Judge
from trl_ulorl.rewards import VerifierReward

_DESCRIPTION = "Accuracy over k answers of each problem: avg@k, pass@k (unbiased) and maj@k, with standard errors."
_INPUTS = """
Args:
    predictions: The completions of each problem, equally many of every one.
    references: Its reference answer.
    k: Answers that the figures are about, at most as many as there are. None: all.

Returns:
    `avg_at_k`, `pass_at_k` and `maj_at_k`, and their standard errors over problems.
"""
_CITATION = """
@article{du2025ulorl,
    title  = {UloRL: An Ultra-Long Output Reinforcement Learning Approach for Advancing Large Language Models' Reasoning Abilities},
    author = {Du, Dong and Liu, Shulin and Yang, Tao and Chen, Shaohua and Li, Yang},
    year   = {2025},
    eprint = {arXiv:2507.19766},
}
"""


class AvgAtK(evaluate.Metric):
    """The metric: the verifier judges every completion against the reference."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {
                    "predictions": datasets.Sequence(datasets.Value("string")),
                    "references": datasets.Value("string"),
                }
            ),
            reference_urls=["https://huggingface.co/papers/2507.19766"],
        )

    def _compute(
        self, predictions: list[list[str]], references: list[str], k: int | None = None, **kwargs: Any
    ) -> dict[str, float]:
        counts = {len(each) for each in predictions}
        if len(counts) != 1:
            raise ValueError(
                f"`predictions` holds from {min(counts)} to {max(counts)} completions of a problem: every problem needs as many "
                "as the others. Sample the missing ones."
            )
        judge = Judge(VerifierReward())
        verdicts = [
            [judge({"prompt": "", "answer": reference}, text) for text in texts]
            for texts, reference in zip(predictions, references, strict=True)
        ]
        is_correct = [[score or 0.0 for score, _ in row] for row in verdicts]
        answers = [[answer for _, answer in row] for row in verdicts]
        k = min(counts) if k is None else k
        figures = {
            "avg_at_k": avg_at_k(is_correct),
            "pass_at_k": pass_at_k(is_correct, k),
            "maj_at_k": maj_at_k(is_correct, answers, k),
        }
        means = {name: mean for name, (mean, _) in figures.items()}
        return {**means, **{f"{name}_standard_error": error for name, (_, error) in figures.items()}}
