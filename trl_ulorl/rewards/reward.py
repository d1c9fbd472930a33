"""The verifier as a reward function for TRL."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from numbers import Number
from typing import TYPE_CHECKING, Any, ClassVar

from .audit import RuleAudit
from .judge import AnswerJudge
from .verify import STAGE_NAMES, Verdict, verify_answers

if TYPE_CHECKING:
    from transformers import TrainerState

logger = logging.getLogger(__name__)

Completion = str | Sequence[dict[str, Any]]

_MAX_JUDGED_CHARACTERS = 1000  # a judge compares two short answers


class VerifierReward:
    r"""Reward of 1 for a right final answer, 0 for a wrong one, `None` where that cannot be decided.

    Pass an instance to `reward_funcs`. TRL leaves a `None` out of the baseline, so a pair that cannot be decided
    neither rewards nor punishes; the trainer counts them in `verifier/undecided_frac`. Without math-verify and pint
    (`pip install "trl-ulorl[math]"`) units, integrals and sums are among them.
    Instances hold no state of their own: they may be pickled, if judge and audit may, and called from several threads.

    Logged metrics: for each stage of the verifier, `verifier/stage_<name>_frac`; with an audit, its estimates so far in
    this process, `verifier/audit_<name>`.
    Logged columns: `verifier_stage` and `extracted_answer`.

    Args:
        judge: Asked, once per batch, about the pairs that rules leave open: those they can't decide, and those whose
            words differ, which without a judge are taken as wrong. `None` from it stays `None`. One with a method
            `start_step`, such as `GenerativeVerifier`, is told the training step, for its budget.
        audit: Has a sampled share of the pairs judged again that rules have decided, after the open ones, so that these
            come first in a budget that both share. It changes no reward, and where it fails none is lost.
        lenient: Whether an output that marks no answer may answer by how it ends, which rewards guesses.

    Example:
        >>> VerifierReward()(completions=["So it is \\boxed{0.5}.", "No idea."], answer=["1/2", "1/2"])
        [1.0, 0.0]
    """

    # On the class, as in TRL's own callable rewards: instances need the name, and pickling needs a module-level class.
    __name__ = "verifier_reward"
    answer_columns: ClassVar[tuple[str, ...]] = ("answer", "solution")
    """Dataset columns that may hold the reference, the first one present wins."""

    def __init__(
        self, judge: AnswerJudge | None = None, *, audit: RuleAudit | None = None, lenient: bool = False
    ) -> None:
        self.judge = judge
        self.audit = audit
        self.lenient = lenient
        missing = [name for name in ("math_verify", "pint") if find_spec(name) is None]
        if missing:
            logger.warning(
                f"{' and '.join(missing)} not installed: answers with units, integrals or sums get no reward. "
                'Install what they need with `pip install "trl-ulorl[math]"`.'
            )

    def __call__(
        self,
        completions: Sequence[Completion],
        answer: Sequence[Any] | None = None,
        solution: Sequence[Any] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        trainer_state: TrainerState | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """Score a batch.

        Args:
            completions: Model outputs, plain or as lists of messages, of which the last is graded.
            answer: Reference for each completion.
            solution: Read where there is no `answer`, in all rows or in one.
            log_extra: TRL's callback for columns of the completions table.
            log_metric: TRL's callback for scalars.
            trainer_state: Where the training stands.
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
        by_rules = verdicts = _by_rules(completions, references, lenient=self.lenient)
        if self.judge is not None:
            if trainer_state is not None and hasattr(self.judge, "start_step"):
                self.judge.start_step(trainer_state.global_step)
            verdicts = _with_judge(verdicts, self.judge)
        if self.audit is not None:
            if trainer_state is not None:
                self.audit.start_step(trainer_state.global_step)
            _audit(by_rules, self.audit)
        if log_extra is not None:
            log_extra("verifier_stage", [verdict.stage for verdict in verdicts])
            log_extra("extracted_answer", [verdict.prediction for verdict in verdicts])
        if log_metric is not None and verdicts:
            _log_fractions(verdicts, log_metric)
            for name, figure in self.audit.metrics().items() if self.audit is not None else ():
                log_metric(f"verifier/audit_{name}", figure)
        return [None if verdict.equivalent is None else float(verdict.equivalent) for verdict in verdicts]


def _by_rules(completions: Sequence[Completion], references: Sequence[Any], *, lenient: bool) -> list[Verdict]:
    """Verdicts on a batch; an unusable sample costs itself, not the batch."""
    pairs: list[tuple[str, str]] = []
    failed: dict[int, Verdict] = {}
    for place, (completion, reference) in enumerate(zip(completions, references, strict=True)):
        try:
            pairs.append((_text(completion), _reference_text(reference)))
        except Exception as error:
            logger.warning("A completion could not be verified and gets no reward.", exc_info=True)
            failed[place] = Verdict(None, "error", "", "", type(error).__name__)
    verdicts = iter(verify_answers(pairs, lenient=lenient))
    return [failed[place] if place in failed else next(verdicts) for place in range(len(completions))]


def _with_judge(verdicts: list[Verdict], judge: AnswerJudge) -> list[Verdict]:
    """Put the judge's verdicts in the place of those that rules leave open."""
    places = [place for place, verdict in enumerate(verdicts) if verdict.is_open and _is_short(verdict)]
    if not places:
        return verdicts
    answers: Sequence[bool | None] = [None] * len(places)
    detail = "the judge has no verdict"
    try:
        given = list(judge.judge([(verdicts[place].prediction, verdicts[place].reference) for place in places]))
        if len(given) != len(places):
            raise ValueError(
                f"The judge gave {len(given)} verdicts on {len(places)} pairs: it must give one for each."
            )
        answers = given
    except Exception as error:
        logger.warning(f"The judge failed on {len(places)} pairs, which get no reward.", exc_info=True)
        detail = f"the judge failed: {type(error).__name__}"
    judged = list(verdicts)
    for place, answer in zip(places, answers, strict=True):
        stage, reason = ("undecided", detail) if answer is None else ("judge", "")
        equivalent = None if answer is None else bool(answer)
        judged[place] = replace(verdicts[place], equivalent=equivalent, stage=stage, detail=reason, presumed=False)
    return judged


def _audit(verdicts: Sequence[Verdict], audit: RuleAudit) -> None:
    """Hand over the pairs that rules decided for certain; a pair without an answer on one side is not judged."""
    decided = [
        (verdict.prediction, verdict.reference, verdict.equivalent)
        for verdict in verdicts
        if verdict.equivalent is not None
        and not verdict.is_open
        and (verdict.prediction and verdict.reference)
        and _is_short(verdict)
    ]
    try:
        audit.add(decided)
    except Exception:
        logger.warning(f"The audit of the rules failed on a batch of {len(decided)} pairs.", exc_info=True)


def _is_short(verdict: Verdict) -> bool:
    return max(len(verdict.prediction), len(verdict.reference)) <= _MAX_JUDGED_CHARACTERS


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
