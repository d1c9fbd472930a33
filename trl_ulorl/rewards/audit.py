"""How often the rules of the verifier are wrong: a sample of what they decided, judged again by a model."""

import json
import math
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .judge import AnswerJudge

_NORMAL_QUANTILE = 1.959964  # of 97.5 %


def wilson_interval(num_hits: int, num_tries: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share, after Wilson (1927); it also holds for few tries and no hit.

    Args:
        num_hits: Tries that count, from 0 to `num_tries`.
        num_tries: All tries.

    Returns:
        Bounds in `[0, 1]`; the whole range where nothing was tried.

    Example:
        >>> [round(bound, 3) for bound in wilson_interval(0, 10)]
        [0.0, 0.278]
    """
    if num_tries == 0:
        return 0.0, 1.0
    share, z2 = num_hits / num_tries, _NORMAL_QUANTILE**2
    middle = (share + z2 / (2 * num_tries)) / (1 + z2 / num_tries)
    half = math.sqrt(z2 * (share * (1 - share) / num_tries + z2 / (4 * num_tries**2))) / (1 + z2 / num_tries)
    return max(middle - half, 0.0), min(middle + half, 1.0)


@dataclass
class AuditCounts:
    """Pairs that the rules decided in one way, and what the judge says of a sample of them.

    Attributes:
        num_decided: Pairs that the rules decided so.
        num_sampled: Those of them that the judge was asked about.
        num_judged: Those for which it had a verdict.
        num_disagreed: Those in which its verdict was the other one.
    """

    num_decided: int = 0
    num_sampled: int = 0
    num_judged: int = 0
    num_disagreed: int = 0

    @property
    def disagreed_frac(self) -> float | None:
        """Share of the rules' decisions that the judge would turn, in `[0, 1]`; `None` where it judged nothing."""
        return self.num_disagreed / self.num_judged if self.num_judged else None

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of `disagreed_frac` at 95 % confidence."""
        return wilson_interval(self.num_disagreed, self.num_judged)


class RuleAudit:
    """Estimates how often the rules are wrong, from a sampled share of their decisions that a judge decides again.

    A judge errs too: where both disagree, the log says about what, and a reader who is right. One call runs at a time;
    others wait.

    Args:
        judge: What decides again.
        fraction: Share of the decided pairs that are sampled, in `(0, 1]`.
        log_path: JSON lines that disagreements are appended to: `prediction`, `reference`, `rules` and `judge` (1 or 0).
        seed: Seed of the sampling.

    Attributes:
        wrong: Counts of the pairs that the rules call different; `wrong.disagreed_frac` estimates their false negatives.
        right: Counts of the pairs that they call equal, hence the false positives.

    Raises:
        ValueError: If `fraction` is out of range.
    """

    def __init__(
        self, judge: AnswerJudge, *, fraction: float, log_path: str | Path | None = None, seed: int = 0
    ) -> None:
        if not 0 < fraction <= 1:
            raise ValueError(
                f"`fraction` ({fraction}) must be in (0, 1]: it is the share of the rules' decisions that is judged "
                "again. Use 1 for all of them, or leave the audit out for none."
            )
        self.wrong, self.right = AuditCounts(), AuditCounts()
        self._judge = judge
        self._fraction = fraction
        self._log_path = None if log_path is None else Path(log_path)
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def start_step(self, step: int) -> None:
        """Pass on to the judge which step the next pairs belong to, for its budget, if it has one."""
        if hasattr(self._judge, "start_step"):
            self._judge.start_step(step)

    def metrics(self) -> dict[str, float]:
        """Return the estimates so far, with the bounds of their 95 % intervals; one for which nothing was judged is left out."""
        figures: dict[str, float] = {}
        with self._lock:
            for name, counts in (("negative", self.wrong), ("positive", self.right)):
                if counts.disagreed_frac is not None:
                    low, high = counts.interval
                    figures |= {
                        f"false_{name}_frac": counts.disagreed_frac,
                        f"false_{name}_low": low,
                        f"false_{name}_high": high,
                        f"false_{name}_judged": counts.num_judged,
                    }
        return figures

    def add(self, decided: Sequence[tuple[str, str, bool]]) -> None:
        """Sample from pairs that the rules decided, and have the sample judged.

        Args:
            decided: The prediction's and the reference's short answer, and whether the rules call them equal.
        """
        with self._lock:
            self._add(decided)

    def _add(self, decided: Sequence[tuple[str, str, bool]]) -> None:
        sampled = [each for each in decided if self._random.random() < self._fraction]
        verdicts = self._judge.judge([(prediction, reference) for prediction, reference, _ in sampled])
        for _, _, equivalent in decided:
            self._counts(equivalent).num_decided += 1
        disagreements = []
        for (prediction, reference, equivalent), verdict in zip(sampled, verdicts, strict=True):
            counts = self._counts(equivalent)
            counts.num_sampled += 1
            counts.num_judged += verdict is not None
            if verdict is (not equivalent):
                counts.num_disagreed += 1
                entry = {
                    "prediction": prediction,
                    "reference": reference,
                    "rules": int(equivalent),
                    "judge": int(verdict),
                }
                disagreements.append(json.dumps(entry, ensure_ascii=False) + "\n")
        if disagreements and self._log_path is not None:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("a", encoding="utf-8", errors="backslashreplace") as log:
                log.write("".join(disagreements))

    def _counts(self, equivalent: bool) -> AuditCounts:
        return self.right if equivalent else self.wrong

    def __str__(self) -> str:
        lines = []
        for name, counts in (("called different", self.wrong), ("called equal", self.right)):
            low, high = counts.interval
            share = "none judged" if counts.disagreed_frac is None else f"{counts.disagreed_frac:.1%}"
            lines.append(
                f"{counts.num_decided} pairs {name} by rules: {counts.num_judged} of {counts.num_sampled} sampled ones "
                f"judged, {counts.num_disagreed} the other way ({share}, 95 % between {low:.1%} and {high:.1%})"
            )
        return "\n".join(lines)
