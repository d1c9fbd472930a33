r"""Decide whether a model's answer equals the reference, in stages from the cheapest to the dearest.

Stages that need no algebra run where they are called; what they leave goes to worker processes, in one batch. What is
still open is the seam for a judge: see `Verdict.is_open`.
"""

import logging
from collections.abc import Sequence

from .pool import Outcome, compare_in_pool, warm_pool
from .stages import STAGE_NAMES, Pending, Verdict, judge_without_algebra

__all__ = ["STAGE_NAMES", "Verdict", "verify_answer", "verify_answers"]

logger = logging.getLogger(__name__)


def verify_answer(prediction: str, reference: str, *, lenient: bool = True) -> Verdict:
    r"""Compare the final answer of a model's output with the reference.

    Never raises on text, runs in any thread and process, and starts no timer here. Formulas are compared in a worker
    process that is killed after 2 seconds at a pair; it is started with the first call.

    Args:
        prediction: A model's whole output.
        reference: A short answer, bare or boxed, or a solution that ends in it.
        lenient: Whether an output that marks no answer may answer with its last sentence ("... is 73"), or by being
            nothing but an answer. `VerifierReward` is strict, as that would reward guesses.

    Returns:
        The verdict. No answer in the output, or none in the reference, is `False`; a pair that is refused, takes too
        long or fails is `None`.

    Example:
        >>> verify_answer(r"It is \boxed{27\text{ cm}}.", "0.27 m").forms
        ('27/100 meter', '27/100 meter')
        >>> verify_answer("Half of it.", "0.5", lenient=False).stage
        'extraction'
    """
    return verify_answers([(prediction, reference)], lenient=lenient)[0]


def verify_answers(pairs: Sequence[tuple[str, str]], *, lenient: bool = True) -> list[Verdict]:
    """Compare many outputs with their references, those that need algebra in one batch.

    Args:
        pairs: Outputs and references.
        lenient: As in `verify_answer`.

    Returns:
        One verdict per pair.
    """
    if pairs:
        warm_pool()  # it loads while the other stages work
    first = [_without_algebra(prediction, reference, lenient=lenient) for prediction, reference in pairs]
    pending = [verdict for verdict in first if isinstance(verdict, Pending)]
    outcomes = iter(compare_in_pool([(pair.left, pair.right) for pair in pending]))
    return [_settled(verdict, next(outcomes)) if isinstance(verdict, Pending) else verdict for verdict in first]


def _without_algebra(prediction: str, reference: str, *, lenient: bool) -> Verdict | Pending:
    try:
        return judge_without_algebra(prediction, reference, lenient=lenient)
    except Exception as error:
        logger.warning("A pair could not be verified and gets no verdict.", exc_info=True)
        return Verdict(None, "error", "", "", type(error).__name__)


def _settled(pair: Pending, outcome: Outcome) -> Verdict:
    if outcome.kind == "decided":
        return pair.decided(outcome.equivalent, presumed=outcome.presumed)
    return pair.undecided(outcome.kind, outcome.detail)
