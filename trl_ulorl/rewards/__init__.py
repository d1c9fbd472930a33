"""Rewards: the final answer of a completion, compared with the reference.

Importing this package costs nothing: pint is loaded, and worker processes are started, for the first pair that needs
them; math-verify and SymPy only ever run in those.
"""

from .reward import Judge, VerifierReward
from .verify import Verdict, verify_answer, verify_answers

__all__ = ["Judge", "Verdict", "VerifierReward", "verify_answer", "verify_answers"]
