"""Evaluation by repeated sampling: avg@k with its standard error."""

from .metrics import avg_at_k
from .runner import EvaluationResult, sample_and_score

__all__ = ["EvaluationResult", "avg_at_k", "sample_and_score"]
