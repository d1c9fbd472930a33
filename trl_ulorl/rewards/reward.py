"""The verifier as a reward function for TRL."""

import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from numbers import Number
from typing import Any, ClassVar

from .verify import STAGE_NAMES, Verdict, verify_answer

logger = logging.getLogger(__name__)

Completion = str | Sequence[dict[str, Any]]


class VerifierReward:
    r"""Reward of 1 for a right final answer, 0 for a wrong one, `None` where that cannot be decided.

    Pass an instance to `reward_funcs`. TRL leaves a `None` out of the baseline, so a pair that cannot be decided
    neither rewards nor punishes; the trainer counts them in `verifier/undecided_frac`. Without math-verify
    (`pip install "trl-ulorl[math]"`) formulas that differ in more than spelling are among them.
    Instances hold no state: they may be pickled, and called from several threads.

    Logged metrics: for each stage of the verifier, `verifier/stage_<name>_frac`.
    Logged columns: `verifier_stage` and `extracted_answer`.

    Example:
        >>> VerifierReward()(completions=["So it is \\boxed{0.5}.", "No idea."], answer=["1/2", "1/2"])
        [1.0, 0.0]
    """

    # On the class, as in TRL's own callable rewards: instances need the name, and pickling needs a module-level class.
    __name__ = "verifier_reward"
    answer_columns: ClassVar[tuple[str, ...]] = ("answer", "solution")
    """Dataset columns that may hold the reference, the first one present wins."""

    def __init__(self) -> None:
        if find_spec("math_verify") is None:
            logger.warning(
                "math-verify is not installed: formulas that differ in more than spelling get no reward. "
                'Install it with `pip install "trl-ulorl[math]"`.'
            )

    def __call__(
        self,
        completions: Sequence[Completion],
        answer: Sequence[Any] | None = None,
        solution: Sequence[Any] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """Score a batch.

        Args:
            completions: Model outputs, plain or as lists of messages, of which the last is graded.
            answer: Reference for each completion.
            solution: Read where there is no `answer`, in all rows or in one.
            log_extra: TRL's callback for columns of the completions table.
            log_metric: TRL's callback for scalars.
            **kwargs: The other dataset columns, not used.

        Returns:
            One reward per completion.

        Raises:
            ValueError: If there is no reference column, or it has another length than `completions`.
        """
        references = _first_present(answer, solution)
        if references is None:
            raise ValueError(
                "The dataset has neither the column `answer` nor `solution`: `VerifierReward` compares each "
                "completion with a reference answer. Add one of them, or rename yours: "
                "`dataset.rename_column('...', 'answer')`."
            )
        if len(references) != len(completions):
            raise ValueError(
                f"`VerifierReward` got {len(completions)} completions and {len(references)} references: it needs one "
                "reference for each completion. Repeat a prompt's `answer` for each of its completions."
            )
        verdicts = [
            _judge(completion, reference) for completion, reference in zip(completions, references, strict=True)
        ]
        if log_extra is not None:
            log_extra("verifier_stage", [verdict.stage for verdict in verdicts])
            log_extra("extracted_answer", [verdict.prediction for verdict in verdicts])
        if log_metric is not None and verdicts:
            _log_fractions(verdicts, log_metric)
        return [None if verdict.equivalent is None else float(verdict.equivalent) for verdict in verdicts]


def _judge(completion: Completion, reference: Any) -> Verdict:
    """Verdict on one sample; an unusable sample costs itself, not the batch."""
    try:
        return verify_answer(_text(completion), _reference_text(reference))
    except Exception as error:
        logger.warning("A completion could not be verified and gets no reward.", exc_info=True)
        return Verdict(None, "error", "", "", type(error).__name__)


def _first_present(answer: Sequence[Any] | None, solution: Sequence[Any] | None) -> Sequence[Any] | None:
    """Reference column; mixed datasets fill the rows that lack a column with `None`."""
    if answer is None or solution is None:
        return solution if answer is None else answer
    return [second if first is None else first for first, second in zip(answer, solution, strict=True)]


def _text(completion: Completion) -> str:
    """Text of a completion; the content of a message is a string, or blocks of which some hold text."""
    content = completion if isinstance(completion, str) else completion[-1]["content"]
    if isinstance(content, str):
        return content
    return "".join(block["text"] for block in content or () if block["type"] == "text")


def _reference_text(reference: Any) -> str:
    if not isinstance(reference, str | Number):
        raise TypeError(f"A reference must be a string or a number, not {type(reference).__name__}.")
    return str(reference)


def _log_fractions(verdicts: Sequence[Verdict], log_metric: Callable[[str, float], None]) -> None:
    """Log every stage each time, also at 0, since TRL averages over the calls that logged a name."""
    for stage in STAGE_NAMES:
        log_metric(f"verifier/stage_{stage}_frac", sum(v.stage == stage for v in verdicts) / len(verdicts))
