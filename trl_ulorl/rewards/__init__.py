"""Rewards: the final answer of a completion, compared with the reference.

Importing this package costs nothing: pint is loaded, and worker processes are started, for the first pair that needs
them; math-verify and SymPy only ever run in those.
"""

from .audit import RuleAudit
from .judge import AnswerJudge, GenerativeVerifier
from .judge_models import EndpointModel, TransformersModel, VLLMModel
from .reward import VerifierReward
from .verify import Verdict, verify_answer, verify_answers

__all__ = [
    "AnswerJudge",
    "EndpointModel",
    "GenerativeVerifier",
    "RuleAudit",
    "TransformersModel",
    "VLLMModel",
    "Verdict",
    "VerifierReward",
    "verify_answer",
    "verify_answers",
]
