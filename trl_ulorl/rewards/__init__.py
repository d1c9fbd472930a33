"""Rewards: the final answer of a completion, compared with the reference.

Importing this package costs nothing: math-verify and SymPy are loaded with the first pair that needs them.
"""

from .reward import VerifierReward
from .verify import Verdict, verify_answer

__all__ = ["Verdict", "VerifierReward", "verify_answer"]
