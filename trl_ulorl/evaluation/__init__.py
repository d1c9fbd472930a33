"""Evaluation by repeated sampling: avg@k, pass@k and maj@k with their standard errors."""

from .callback import EvaluationCallback
from .metrics import avg_at_k, maj_at_k, paired_test, pass_at_k
from .runner import EvaluationResult, sample_and_score

__all__ = [
    "EvaluationCallback",
    "EvaluationResult",
    "avg_at_k",
    "maj_at_k",
    "paired_test",
    "pass_at_k",
    "sample_and_score",
]
